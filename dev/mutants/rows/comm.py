"""Planted bugs in llmc/comm."""

from mutant import Mutant, py, unit

ROOM = "llmc/comm"

ROWS = [
    Mutant("what one rank alone has is no difference", "require_same", "? first == other :", "||",
           unit("Agreement.FieldsThatOneRank*")),
    Mutant("a rank that hangs gives signs for ever", "Heartbeat::Heartbeat", "if (std::chrono::steady_clock::now() >= end) return",
           "static_cast<void>(end)", unit("AtWorkTest.*")),
    Mutant("a frame gets the memory that it claims", "FrameReader::read", "max(2 * have, kFirstBytes)",
           "max<std::size_t>(header_.bytes, kFirstBytes)", unit("FrameReader.MemoryGrows*")),
    Mutant("a rank of another job is let in", "let_in", "hello.job != identity_.job() && hello.job != 0", "false",
           unit("Rendezvous.ARankOfAnotherJob*")),
    Mutant("the hub copies what it has not compared", "round", "compare();", "",
           unit("*CommunicatorTest.RanksInDifferentCalls*")),
    Mutant("a rank that gives signs is late all the same", "require_in_time", "std::max(begin, peer.last_sign)", "begin",
           unit("AtWorkTest.*")),
    Mutant("the hub lets in ranks of other runs", "let_in", "|| hello.token != identity_.token", "", unit("Rendezvous.LetsIn*")),
    Mutant("an error follows half a reply", "tell_all", "if (!peer.writer.done()) peer.socket.close();", "",
           unit("Rendezvous.NothingFollowsHalfAReply")),
    Mutant("strangers stay connected after the start", "Rendezvous::meet", "strangers_.clear();", "", unit("Rendezvous.AfterTheStart*")),
    Mutant("a gather over sockets takes as many pieces as rank 0's part", "for_pieces", "longest_of(parts)",
           "parts.front().size()", unit("*LargeValuesGoInPieces*")),
    Mutant("ranks outlive who has started them", "start_rank", "::prctl(PR_SET_PDEATHSIG, SIGKILL);", "",
           py("test_ranks.py::test_ranks_die_with_who_has_started_them")),
    Mutant("the reason is a rank that this process has killed", "reap", "&& !killed_rest_", "",
           unit("StartRanks.ARankThatIsKilledBecause*")),
    Mutant("every rank gets the part of the first", "ThreadRank::exchange", "[static_cast<std::size_t>(rank_)]", ".front()",
           unit("*CommunicatorTest.Exchange*")),
    Mutant("a rank that has ended is waited for", "leave", "if (any(State::waiting)) end(ended_rank(left_));", "",
           unit("*CommunicatorTest.ARankThatHasEnded*")),
    Mutant("the second communicator does not hear of an error", "Meeting::abort", "other.end(error);", "",
           unit("ThreadRanks.AnError*")),
]
