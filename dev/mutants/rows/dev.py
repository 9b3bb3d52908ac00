"""Planted bugs in dev."""

from mutant import Mutant, py

ROOM = "dev"

ROWS = [
    Mutant("download: a timeout of a request is final", "download_starter_pack.sh", "22:408 | 22:429", "22:429",
           py("test_download.py::test_500_once")),
    Mutant("download: what comes has no limit", "download_starter_pack.sh", 'limit_writes "$most_bytes"', "",
           py("test_download.py::test_a_stream_that_does_not_end_where_it_was_announced_to")),
    Mutant("download: an error of an optional file leaves it out", "download_starter_pack.sh", "missing) return",
           "missing | denied) return", py("test_download.py::test_an_error_of_an_optional_file_is_an_error")),
    Mutant("prepare_data: a last shard of any length", "Split::write", "min(self.shard_tokens, SMALLEST_LAST_SHARD)", "1",
           py("test_prepare_data.py::test_no_shard_is_shorter_than_a_sequence_may_be")),
    Mutant("prepare_data: what was held back is lost", "Split::close", "for ids in self._held: self._writer.write(ids)", "",
           py("test_prepare_data.py::test_no_shard_is_shorter_than_a_sequence_may_be")),
    Mutant("prepare_data: the chat format of an earlier run stays beside shards of text", "publish",
           '(output / "chat_format.json").unlink(missing_ok=True)', "pass",
           py("test_conversations.py::test_the_chat_format_lies_beside_the_shards_and_goes_with_them")),
    Mutant("prepare_data: documents are numbered anew in each file", "add_with_split", "index = 0 for source in sources:",
           "for source in sources:\n        index = 0",
           py("test_prepare_data.py::test_each_document_goes_to_one_split_by_its_own_number")),
    Mutant("prepare_data: a directory that was there goes with a failed run", "main", "if not existed", "if True",
           py("test_prepare_data.py::test_what_was_there_before_a_run_that_fails_is_there_after_it")),
    Mutant("the adapter is not in what is measured after tuning", "measure", '"--adapter", checkpoint / "adapter.bin"', "",
           py("test_tuning_quality.py")),
]
