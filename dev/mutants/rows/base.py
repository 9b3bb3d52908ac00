"""Planted bugs in llmc/base."""

from mutant import Mutant, py, unit

ROOM = "llmc/base"

ROWS = [
    Mutant("arenas are not given back", "~HostArena", "if (base_ != nullptr) ::munmap(base_, bytes_);", "",
           unit("Memory.AnArena*")),
    Mutant("a bf16 NaN becomes an infinity", "f32_to_bf16", "(bits >> 16) | 0x40u", "bits >> 16", unit("DTypes.NotANumber*")),
    Mutant("a link in a run directory is followed", "open_own_file", "| O_NOFOLLOW", "",
           unit("RunDirectoryTest.NothingIsWritten*")),
    Mutant("renamed before it is synced", "publish",
           'if (!call_allowed("sync", path_) || ::fsync(fd_) != 0) fail_writing(path_, "sync");', "",
           py("test_train_cli.py::test_a_save_syncs_before_it_renames")),
    Mutant("half a line takes the lines before it along", "append_line", "fd, 0, SEEK_END", "fd, 0, SEEK_CUR",
           unit("Files.ALineThatDoesNotFit*")),
    Mutant("a failed rename leaves the temporary file", "publish",
           "const int error = errno; ::unlink(temporary_.c_str()); errno = error;", "", unit("AtomicFile.ACallThatFails*")),
    Mutant("a full disk costs a descriptor", "AtomicFile::AtomicFile", "::close(fd_);", "", unit("AtomicFile.AFullDisk*")),
    Mutant("a changed file of equal size goes unnoticed", "FileIdentity", "(const FileIdentity&) const = default;",
           "(const FileIdentity& other) const { return device == other.device && inode == other.inode && size == other.size; "
           "}", unit("MappedFile.KnowsThat*")),
    Mutant("fp8: no saturation", "round_to_fp8", "fp8_largest(format)", "3e38f", unit("Fp8.Saturates*")),
    Mutant("fp8: ties away from zero", "round_to_fp8", "half + odd", "half + 1", unit("Fp8.RoundsToTheNearest*")),
    Mutant("JSON one level deeper than the limit", "open", ">= limits_.depth", "> limits_.depth", unit("Json.*")),
    Mutant("2^63 becomes a negative integer", "json_integer", "() > static_cast<std::uint64_t>(INT64_MAX)", "() == UINT64_MAX",
           unit("Json.AnIntegerIsOneThatFits")),
    Mutant("an error that others cause is a line each time", "log", "written_ && now - *written_ < kInterval", "false",
           unit("Log.ARepeatedError*", "Http.ClientsDoNotFill*")),
    Mutant("an error of a helper thread is lost", "in_parallel", "if (error)", "if (error && count == 0)",
           unit("InParallel.*")),
    Mutant("the error of parallel work is that of its first failure", "in_parallel", "index >= failed", "error",
           unit("InParallel.TheErrorIsThatOfTheFirstPieceWhatever*")),
    Mutant("padded ids sampled", "sampled_part", "if (plan_.vocab_limit > 0)", "if (plan_.vocab_limit > 0 && plan_.greedy)",
           unit("Sampler.*", "Generate.*")),
    Mutant("top-p takes a token too many", "kept_ids", "mass < share", "mass <= share && rest != ids.begin()",
           unit("Sampler.*")),
    Mutant("min-p drops the boundary", "kept_ids", "weight(id) < plan_", "weight(id) <= plan_", unit("Sampler.*")),
    Mutant("the first quota counts, not the smallest", "cpu_quota", "std::min(smallest.value_or(*quota), *quota)",
           "smallest.value_or(*quota)", unit("Threads.TheQuota*")),
]
