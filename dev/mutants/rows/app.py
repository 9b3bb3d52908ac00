"""Planted bugs in llmc/app."""

from mutant import Mutant, unit

ROOM = "llmc/app"

ROWS = [
    Mutant("the model gets its draft's share of the memory", "kv_share", "own / (own + other)", "other / (own + other)",
           unit("DecodeDevice.AModelAndItsDraft*")),
    Mutant("a draft of more tokens is taken", "check_same_tokens", "its != wanted", "its < wanted", unit("CheckSameTokens.*")),
    Mutant("a rank takes the GPU of its number among all", "see_own_gpu", "gpus[static_cast<std::size_t>(local_rank)]",
           "std::to_string(local_rank)", unit("Device.ARankTakes*")),
    Mutant("the cores of a machine are divided by all ranks", "threads", "/ launched_.local_size", "/ size_",
           unit("RankTeam.TheCores*")),
]
