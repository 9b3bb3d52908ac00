"""A copy of the tree, in which bugs are planted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Unusable(Exception):
    """The run cannot say anything: exit code 2."""


def copy_tree(tree: Path, commit: str | None) -> None:
    """Brings the copy to the state of the working tree, or of `commit`. Files that are equal keep their time, so that the
    objects of an earlier run stand."""
    new = tree.parent / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    if commit is None:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in names.decode().rstrip("\0").split("\0"):
            if (ROOT / name).is_file():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, new / name)
    else:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(new)], input=archive, check=True)
    tree.mkdir(exist_ok=True)
    for old in [path for path in tree.rglob("*") if path.is_file() and "build" not in path.relative_to(tree).parts[:1]]:
        if not (new / old.relative_to(tree)).exists():
            old.unlink()
    for path in [path for path in new.rglob("*") if path.is_file()]:
        target = tree / path.relative_to(new)
        if not target.exists() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)  # with the time of now
    shutil.rmtree(new)
