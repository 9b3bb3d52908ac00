"""What tests of several programs ask for."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

# nohup, and a shell that starts something in the background, ignore signals for all that follows. A program under test is to
# meet them as a user's does: a handler, other than SIG_IGN, ends with exec, and keeps this process as deaf as it was.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session")
def comma_locale(tmp_path_factory):
    """The environment of a country that writes 0,5: made here, because a machine without it would prove nothing."""
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is not None:
        subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", folder / "de_DE.UTF-8"], capture_output=True)
    chosen = {"LOCPATH": str(folder), "LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8"}
    probe = "import locale; locale.setlocale(locale.LC_ALL, ''); print(locale.localeconv()['decimal_point'])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env={**os.environ, **chosen})
    if done.stdout != ",\n":
        pytest.skip("needs localedef and the locales' sources (package locales)")
    return chosen


@pytest.fixture
def nothing_hangs():
    """Turns waiting for what never comes, as for the writer of a FIFO, into an error. A test that is well never gets there."""
    def ends(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ends)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
