"""Planted bugs in llmc/file."""

from mutant import Mutant, unit

ROOM = "llmc/file"

ROWS = [
    Mutant("values of a tensor's first piece only", "process", "finite_ && !first_", "finite_ && begin == 0",
           unit("TensorFile.EachPiece*")),
    Mutant("a lock that two can hold", "take_lock", "lock_, LOCK_EX", "lock_, LOCK_SH", unit("RunDirectoryTest.*")),
    Mutant("the old name is not given back", "commit_checkpoint", "if (exists) ::rename(replaced.c_str(), target.c_str());", "",
           unit("FailingCallTest.TheSecondRename*")),
    Mutant("checkpoint named before its directory is synced", "commit_checkpoint", "sync_directory(temporary);", "",
           unit("RunDirectoryTest.*")),
    Mutant("the old checkpoint goes before the directory is synced", "commit_checkpoint",
           "sync_directory(path_); if (exists) remove_or_warn(replaced)",
           "if (exists) remove_or_warn(replaced); sync_directory(path_)", unit("RunDirectoryTest.ACheckpointIsSynced*")),
    Mutant("tensor hash not checked", "compare_hash", "if (got != tensor.hash)", "if (got != tensor.hash && tensor.bytes == 0)",
           unit("TensorFile.*")),
    Mutant("header hash not checked", "Validator::header", "if (hash != header.header_hash)",
           "if (hash != header.header_hash && hash == 0)", unit("TensorFile.*")),
    Mutant("a file may be longer than it says", "check_file_bytes", "file_bytes < file_", "file_bytes + 1 < file_",
           unit("TensorFile.*")),
    Mutant("an id one past the vocabulary", "TokenShard::read", "largest < static_cast", "largest <= static_cast",
           unit("TokenShard.*")),
    Mutant("the largest vocabulary has no shard", "check_fields", "vocab_size > limit",
           "vocab_size >= limit + (is_u32 ? 0 : 1)", unit("TokenShard.TheLimits*")),
    Mutant("an error of the thread that writes is lost", "rethrow", "if (error_)", "if (error_ && closed_)",
           unit("WriteBehindTest.*")),
]
