// What ranks over TCP do before the first step: who is let in, what all must have in common, and work that takes long.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>

#include "llmc/app/train_device.h"
#include "llmc/base/hash.h"
#include "llmc/base/log.h"
#include "llmc/comm/agreement.h"
#include "llmc/comm/frame_io.h"
#include "llmc/comm/heartbeat.h"
#include "llmc/comm/start_ranks.h"
#include "llmc/cpu/training.h"
#include "llmc/model/presets.h"
#include "test/cpp/processor_time.h"
#include "test/cpp/rank_tools.h"
#include "test/cpp/sanitized.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

// What this program does where a test has started it as a rank: start_ranks() starts its own program, whatever that is.
constexpr const char* kPart = "WEFT_TEST_PART";
constexpr const char* kSignal = "WEFT_TEST_SIGNAL";
constexpr int kReadyRead = 60, kReadyWrite = 61;  // ends of a pipe on which ranks say that they wait

[[noreturn]] void play(const std::string& part) {
  const std::string rank = std::getenv("RANK");
  if (part == "environment") {  // each variable once, and as the supervisor says
    std::map<std::string, int> seen;
    for (char** each = environ; *each != nullptr; ++each)
      ++seen[std::string(*each).substr(0, std::strcspn(*each, "="))];
    const bool once = std::all_of(seen.begin(), seen.end(), [](const auto& one) { return one.second == 1; });
    const std::string address = std::getenv("MASTER_ADDR"), port = std::getenv("MASTER_PORT");
    const std::string size = std::getenv("WORLD_SIZE"), of_machine = std::getenv("LOCAL_WORLD_SIZE");
    const bool counted = size == "3" && of_machine == "3" && rank == std::getenv("LOCAL_RANK");
    ::_exit(once && address == "127.0.0.1" && port != "1" && counted ? 0 : 1);
  }
  if (part == "killed" && rank == "1") ::_exit(1);
  if (part == "killed" && rank == "2") {  // after rank 1 has ended
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    ::raise(SIGKILL);
  }
  if (part == "left" && rank == "0") std::this_thread::sleep_for(std::chrono::minutes(1));  // until it is killed
  if (part == "left" && rank == "1") ::_exit(static_cast<int>(Exit::bad_file));
  if (part == "left") {  // later, and late enough that the supervisor then kills who is left
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::_exit(static_cast<int>(Exit::resources));
  }
  if (part == "signalled") {  // rank 0 sends a signal to who has started it when all wait for it: it comes to each
    sigset_t set, before;
    sigfillset(&set);
    ::sigprocmask(SIG_BLOCK, &set, &before);
    const int expected = std::atoi(std::getenv(kSignal));
    if (sigismember(&before, expected) == 1) ::_exit(1);
    char all[3];
    [[maybe_unused]] const ssize_t said = ::write(kReadyWrite, "x", 1);
    for (std::size_t got = 0; rank == "0" && got < sizeof all;) {
      got += static_cast<std::size_t>(std::max<ssize_t>(0, ::read(kReadyRead, all, sizeof all)));
    }
    if (rank == "0") ::kill(::getppid(), expected);
    const timespec limit{10, 0};
    ::_exit(::sigtimedwait(&set, nullptr, &limit) == expected ? 0 : 1);
  }
  ::_exit(0);
}

struct StartedAsRank {
  StartedAsRank() {
    if (const char* part = std::getenv(kPart)) play(part);
  }
} const started_as_rank;

using Fields = std::vector<RankField>;

// What each of three ranks throws when its fields are compared; they are those of `differing` on one of them.
std::vector<std::string> compared(int differing, const Fields& fields, const Fields& others) {
  std::vector<std::string> errors(3);
  run_thread_ranks(3, 20, [&](Communicator& ranks) {
    try {
      require_same(ranks, ranks.rank() == differing ? others : fields);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::environment);
      errors[static_cast<std::size_t>(ranks.rank())] = error.what();
    }
  });
  return errors;
}

TEST(Agreement, ADifferenceIsNamedOnAllRanks) {
  const Fields fields = {{"--lr", "0.001"}, {"--seed", "1"}, {"train, shard 2", "{\"name\":\"a\"}"}};
  for (const std::string& error : compared(0, fields, fields)) EXPECT_EQ(error, "");
  for (const std::string& error : compared(2, fields, {{"--lr", "0.001"}, {"--seed", "2"}, fields[2]})) {
    EXPECT_EQ(error, "rank 2: --seed: got '2', expected '1' as on rank 0. All ranks of a run have this in common");
  }
  for (const std::string& error : compared(0, fields, {{"--lr", "1"}, {"--seed", "2"}, fields[2]})) {
    EXPECT_EQ(error, "rank 1: --lr: got '0.001', expected '1' as on rank 0. All ranks of a run have this in common");
  }
}

TEST(Agreement, FieldsThatOneRankAloneHasAreDifferences) {
  const Fields fields = {{"a", "1"}}, more = {{"a", "1"}, {"b", ""}};
  for (const std::string& error : compared(1, fields, more)) {
    EXPECT_EQ(error, "rank 1: b: got '', expected nothing as on rank 0. All ranks of a run have this in common");
  }
  for (const std::string& error : compared(1, more, fields)) {
    EXPECT_EQ(error, "rank 1: b: got nothing, expected '' as on rank 0. All ranks of a run have this in common");
  }
  for (const std::string& error : compared(2, fields, more)) {
    EXPECT_EQ(error, "rank 2: b: got '', expected nothing as on rank 0. All ranks of a run have this in common");
  }
  for (const std::string& error : compared(1, {}, {})) EXPECT_EQ(error, "");
}

TEST(Agreement, WhatEachRankNeedsForItself) {
  const auto errors_of = [](const std::vector<std::string>& gpus) {
    std::vector<std::string> errors(gpus.size());
    run_thread_ranks(static_cast<int>(gpus.size()), 20, [&](Communicator& ranks) {
      const auto me = static_cast<std::size_t>(ranks.rank());
      try {
        require_distinct(ranks, "GPU", gpus[me]);
      } catch (const Error& error) {
        errors[me] = error.what();
      }
    });
    return errors;
  };
  for (const std::string& error : errors_of({"a 0", "a 1", "b 0"})) EXPECT_EQ(error, "");
  for (const std::string& error : errors_of({"", "", ""})) EXPECT_EQ(error, "") << "no GPU";
  for (const std::string& error : errors_of({"", "a 0", "a 0"})) {
    EXPECT_EQ(error, "rank 2: GPU: got 'a 0', which is that of rank 1. Each rank needs one of its own");
  }
  for (const std::string& error : errors_of({"a 0", "a 1", "a 0"})) {
    EXPECT_EQ(error, "rank 2: GPU: got 'a 0', which is that of rank 0. Each rank needs one of its own");
  }
}

// ---- work that takes longer than the time limit ----

TEST(AtWorkTest, TheOthersWaitForWhoGivesSigns) {
  run_socket_ranks(3, 1, [](Communicator& ranks) {
    for (const int busy : {1, 0}) {
      if (ranks.rank() == busy) {
        const Heartbeat patience(ranks);
        std::this_thread::sleep_for(std::chrono::milliseconds(1700));
      }
      EXPECT_EQ(ranks.gather(ranks.rank()), (std::vector<int>{0, 1, 2}));
    }
  });
  EXPECT_EQ(error_of(Exit::environment,
                     [] {
                       run_socket_ranks(2, 1, [](Communicator& ranks) {
                         if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1700));
                         ranks.barrier();
                       });
                     }),
            "rank 1 did not come to barrier() within 1 s");
}

// Longer than any checkpoint takes to be read, and not for ever.
TEST(AtWorkTest, SignsOfARankThatHangsEnd) {
  EXPECT_EQ(Heartbeat::kLongest, std::chrono::minutes(30));
  EXPECT_EQ(error_of(Exit::environment,
                     [] {
                       run_socket_ranks(2, 1, [](Communicator& ranks) {
                         if (ranks.rank() == 1) {
                           const Heartbeat patience(ranks, std::chrono::duration<double>(0.3));
                           std::this_thread::sleep_for(std::chrono::milliseconds(1800));
                         }
                         ranks.barrier();
                       });
                     }),
            "rank 1 did not come to barrier() within 1 s");
}

TEST(AtWorkTest, OneRankNeedsNoSigns) {
  SingleRank alone;
  const Heartbeat patience(alone);
}

// ---- frames ----

FrameHeader header_of(FrameKind kind, std::uint64_t bytes) {
  FrameHeader header;
  header.kind = kind;
  header.bytes = bytes;
  return header;
}

TEST(FrameReader, MemoryGrowsWithWhatHasComeNotWithWhatIsClaimed) {
  const auto [ours, theirs] = connected_pair();
  FrameReader reader;
  constexpr std::uint64_t kClaimed = 2 * kPieceBytes;
  write_some(theirs, const_bytes_of(header_of(FrameKind::call, kClaimed)));
  EXPECT_EQ(reader.read(ours), FrameReader::Got::nothing);
  EXPECT_LE(reader.body().capacity(), 64u << 10);
  std::vector<std::byte> body(kClaimed);
  for (std::size_t i = 0; i < body.size(); ++i) body[i] = static_cast<std::byte>(i * 7 + i / 4096);
  std::size_t sent = 0;
  FrameReader::Got got = FrameReader::Got::nothing;
  while (got == FrameReader::Got::nothing) {
    sent += static_cast<std::size_t>(write_some(theirs, std::span(body).subspan(sent)));
    got = reader.read(ours);
    if (got == FrameReader::Got::nothing) {
      EXPECT_LE(reader.body().size(), std::max<std::size_t>(2 * sent, 64 << 10));
    }
  }
  EXPECT_EQ(got, FrameReader::Got::frame);
  EXPECT_EQ(reader.body(), body);
  write_some(theirs, const_bytes_of(header_of(FrameKind::call, 3)));  // a smaller one behind it
  write_some(theirs, std::span(body).first(3));
  EXPECT_EQ(reader.read(ours), FrameReader::Got::frame);
  EXPECT_EQ(reader.body(), std::vector<std::byte>(body.begin(), body.begin() + 3));
}

TEST(FrameReader, AFrameThatClaimsMoreThanItsKindBringsIsNone) {
  const std::pair<FrameKind, std::uint64_t> most[] = {{FrameKind::call, 2 * kPieceBytes},
                                                      {FrameKind::reply, 2 * kPieceBytes},
                                                      {FrameKind::abort, kLongestReason},
                                                      {FrameKind::leave, 0},
                                                      {FrameKind::alive, 0}};
  for (const auto& [kind, bytes] : most) {
    EXPECT_TRUE(is_frame(header_of(kind, bytes)));
    const auto [ours, theirs] = connected_pair();
    FrameReader reader;
    write_some(theirs, const_bytes_of(header_of(kind, bytes + 1)));
    EXPECT_EQ(reader.read(ours), FrameReader::Got::closed);
    EXPECT_EQ(reader.body().capacity(), 0u);
  }
}

// The longest reason that can be sent, and longer ones, which are cut to it.
TEST(FrameWriter, AReasonOfAnyLengthArrives) {
  for (const std::size_t length : {0u, 1u, 4095u, 4096u, 4097u, 10'000u}) {
    const auto [ours, theirs] = connected_pair();
    FrameWriter writer;
    writer.begin(Error(Exit::numeric, std::string(length, 'x')));
    ASSERT_TRUE(writer.write_all(theirs, deadline_in(5)));
    FrameReader reader;
    ASSERT_EQ(reader.read(ours), FrameReader::Got::frame) << length;
    EXPECT_EQ(reader.reason().code(), Exit::numeric);
    EXPECT_EQ(reader.reason().what(), std::string(std::min(length, kLongestReason), 'x'));
  }
}

// ---- the memory that a rank needs ----

// With --eval each rank has all of a model, and the ranks of a machine share its memory, however many there are on others.
TEST(TrainDevice, WhatEachRankHasAllOfIsPlannedAsThat) {
  TrainSettings settings;
  settings.device = "cpu";
  settings.precision = "fp32";
  settings.ranks = settings.virtual_ranks = 4;
  settings.shard = "parameters";
  ModelConfig config = preset_config("llama3.1-8b");
  config.num_layers = 500;  // fits nowhere
  TrainOptions options, of_ranks;
  options.seq_len = of_ranks.seq_len = 16;
  of_ranks.virtual_ranks = 4;
  const std::uint64_t all = total_bytes(cpu::plan_training(config, options));
  const std::uint64_t part = total_bytes(cpu::plan_training(config, of_ranks, 0, 4, Shard::parameters));
  EXPECT_LT(part, all / 2);
  for (const std::int64_t of_machine : {4, 2, 1}) {
    const RankTeam team(settings, LaunchedRank{"test", 0, 4, 0, of_machine, "127.0.0.1", 1, "", false});
    const TrainDevice device(settings, team);
    EXPECT_EQ(total_bytes(device.plan(config, options, 0, Holds::all)), all);
    EXPECT_EQ(total_bytes(device.plan(config, of_ranks, 0)), part);
    const auto needs = [&](std::uint64_t bytes) {
      return "the plan needs " + human_bytes(static_cast<double>(of_machine) * static_cast<double>(bytes)) +
             " of memory";
    };
    const std::string message = error_of(Exit::resources, [&] { device.check_memory(config, of_ranks, 1, 0); });
    expect_contains(message, needs(part));
    // What helps on the CPU, which has no moments in bf16.
    expect_contains(message,
                    ". Not even --micro-batch 1 fits: try --recompute block, a shorter --seq-len or a smaller");
    expect_contains(error_of(Exit::resources, [&] { device.check_memory(config, options, 1, 0, Holds::all); }),
                    needs(all));
  }
}

// By its ranks, however many there are on others.
TEST(RankTeam, TheCoresOfAMachineAreDividedByItsRanks) {
  ThreadLimits limits;
  limits.cores = 12;
  const auto threads = [&](std::int64_t option, std::int64_t ranks, std::int64_t of_machine) {
    TrainSettings settings;
    settings.ranks = ranks;
    return RankTeam(settings, LaunchedRank{"test", 0, ranks, 0, of_machine, "", 0, "", false}).threads(option, limits);
  };
  EXPECT_EQ(threads(0, 2, 2), 6);
  EXPECT_EQ(threads(0, 8, 2), 6);
  EXPECT_EQ(threads(0, 16, 16), 1);
  EXPECT_EQ(threads(0, 8, 1), 0) << "all";
  EXPECT_EQ(threads(5, 8, 2), 5);
}

// ---- what ends the work of all ----

// Rank 1 waits on both of its connections, as its loop does on one and a save in the background on the other: whatever
// ends the work of rank 0 ends both waits, with the reason.
TEST(RankTeam, AnErrorEndsTheCallsOfTheLoopAndOfTheSave) {
  constexpr double kLimit = 10;  // seconds: as good as for ever
  struct Case {
    std::function<void()> work;
    Exit code;
    const char* reason;
  };
  for (const Case& c : {Case{[] { throw Error(Exit::numeric, "the loss is nan"); }, Exit::numeric, "the loss is nan"},
                        Case{[] { throw std::bad_alloc(); }, Exit::resources, "out of memory"},
                        Case{[] { throw std::logic_error("no Error"); }, Exit::internal, "ended by an exception"}}) {
    Socket listener = listen_at("127.0.0.1", 0);
    TrainSettings settings;
    settings.ranks = 2;
    settings.comm_timeout = kLimit;
    const LaunchedRank launched{"test", 0, 2, 0, 2, "127.0.0.1", port_of(listener), "run", false};
    std::string heard[2];
    std::thread other([&] {
      const auto meet = [&](std::uint64_t token) {
        return rendezvous({1, 2, token, "test"}, {launched.address, launched.port}, kLimit);
      };
      const std::uint64_t token = xxh3_64(launched.run);
      const std::unique_ptr<Communicator> of_loop = meet(token), of_save = meet(token + 1);
      of_loop->barrier();
      of_save->barrier();
      std::thread save([&] { heard[1] = error_of(c.code, [&] { of_save->barrier(); }); });
      heard[0] = error_of(c.code, [&] { of_loop->barrier(); });
      save.join();
    });
    ::setenv("WEFT_RANKS_LISTENER", std::to_string(listener.release()).c_str(), 1);
    {
      RankTeam team(settings, launched);
      team.meet(settings, "test");
      team.together([&] {
        team.communicator().barrier();
        team.save_communicator().barrier();
        return Exit::ok;
      });
      EXPECT_ANY_THROW(team.together([&] {
        c.work();
        return Exit::ok;
      }));
      other.join();  // before the team ends: that its connections are closed is an end, too
    }
    for (const std::string& error : heard) EXPECT_EQ(error, std::string("rank 0: ") + c.reason);
  }
}

// ---- who comes to the port ----

struct Door {
  Socket listener = listen_at("127.0.0.1", 0);
  std::int64_t port = port_of(listener);

  Socket knock(std::span<const std::byte> words) const {
    std::string problem;
    Socket socket = connect_to("127.0.0.1", port, deadline_in(5), problem);
    EXPECT_TRUE(socket.open()) << problem;
    write_some(socket, words);
    return socket;
  }
};

// Waits for the end of a connection, or for the error that comes over it.
std::string answer(const Socket& socket) {
  FrameReader reader;
  const Deadline end = deadline_in(10);
  while (SocketClock::now() < end) {
    const FrameReader::Got got = reader.read(socket);
    if (got == FrameReader::Got::closed) return "closed";
    if (got == FrameReader::Got::frame && reader.header().kind == FrameKind::abort) return reader.reason().what();
    if (got == FrameReader::Got::frame && reader.header().kind == FrameKind::reply) return "welcome";
    pollfd waiting{socket.fd(), POLLIN, 0};
    wait_for_any({&waiting, 1}, end);
  }
  return "nothing";
}

Hello hello_of(int rank, int size, const char* version = "test") {
  Hello hello;
  hello.token = 42;
  hello.rank = rank;
  hello.size = size;
  std::string_view(version).copy(hello.version, sizeof hello.version - 1);
  hello.job = RankIdentity().job();
  return hello;
}

// The answer to a rank that says `hello` to a run of two.
std::string answer_to(const Hello& hello, const std::string& version = "test") {
  Door door;
  Socket visitor = door.knock(const_bytes_of(hello));
  Rendezvous hub(std::move(door.listener), {0, 2, 42, version}, 5);
  Socket first = hub.take_first_connection();
  const std::string text = answer(visitor);
  visitor.close();
  first.close();
  return text;
}

TEST(Rendezvous, LetsInTheRanksOfItsRunAlone) {
  EXPECT_EQ(answer_to(hello_of(1, 2)), "welcome");
  EXPECT_EQ(answer_to(hello_of(0, 2)), "rank 0 was started twice");
  EXPECT_EQ(answer_to(hello_of(1, 3)), "rank 1 was started as one of 3 ranks, rank 0 as one of 2");
  for (const int rank : {-1, 2, 1 << 30}) {
    EXPECT_EQ(answer_to(hello_of(rank, 2)), format("rank %d was started as one of 2 ranks, rank 0 as one of 2", rank));
  }
  EXPECT_EQ(answer_to(hello_of(1, 2, "newer")),
            "rank 1: version: got 'newer', expected the 'test' of rank 0. Start all ranks with one program");
  EXPECT_EQ(answer_to(hello_of(1, 2, std::string(95, 'v').c_str()), std::string(200, 'v')), "welcome") << "cut alike";
  Hello of_another_run = hello_of(1, 2);
  of_another_run.token = 43;
  EXPECT_EQ(answer_to(of_another_run), "closed");
  Hello of_something_else = hello_of(1, 2);
  of_something_else.magic[7] = 'x';
  EXPECT_EQ(answer_to(of_something_else), "closed");
}

// A rank of another job with the same token, as torchrun without an id gives it: it hears why, and the run goes on to meet its
// own ranks. A rank of an older version, which does not say its job, is refused by its version.
TEST(Rendezvous, ARankOfAnotherJobIsTurnedAwayAndDoesNoHarm) {
  Door door;
  RankIdentity other{1, 2, 42, "test", "runs/b"};
  Hello of_another_job = hello_of(1, 2), own = hello_of(1, 2);
  of_another_job.job = other.job();
  RankIdentity first_rank{0, 2, 42, "test", "runs/a"};
  own.job = first_rank.job();
  EXPECT_NE(own.job, of_another_job.job);
  Socket stranger = door.knock(const_bytes_of(of_another_job));
  Socket rank = door.knock(const_bytes_of(own));
  Rendezvous hub(std::move(door.listener), first_rank, 5);
  Socket first = hub.take_first_connection();
  EXPECT_EQ(
      answer(stranger),
      "rank 1 was turned away: --out: got another one than the 'runs/a' of rank 0. Give each job a port of its own "
      "(MASTER_PORT), and all ranks of a job the same --out");
  EXPECT_EQ(answer(rank), "welcome");
  rank.close();
  first.close();

  Hello older = hello_of(1, 2, "older");
  older.job = 0;
  expect_contains(answer_to(older), "rank 1: version: got 'older'");
}

// Rank 0 hears why the run cannot start, in the words that the rank at fault hears; others that come later hear them, too.
TEST(Rendezvous, ARefusalIsToldToAllRanks) {
  Door door;
  Socket newer = door.knock(const_bytes_of(hello_of(1, 3, "newer")));
  Rendezvous hub(std::move(door.listener), {0, 3, 42, "test"}, 5);
  Socket first = hub.take_first_connection();
  const std::string reason = answer(newer);
  EXPECT_EQ(reason, "rank 1: version: got 'newer', expected the 'test' of rank 0. Start all ranks with one program");
  Socket third = door.knock(const_bytes_of(hello_of(2, 3)));
  EXPECT_EQ(answer(first), reason);
  EXPECT_EQ(answer(third), reason);
}

// It tells its ranks for a part of the time limit, not until they all have come.
TEST(Rendezvous, ARunThatCannotStartEndsBeforeTheTimeLimit) {
  Door door;
  const Socket newer = door.knock(const_bytes_of(hello_of(1, 3, "newer")));
  Rendezvous hub(std::move(door.listener), {0, 3, 42, "test"}, 4);
  const Socket first = hub.take_first_connection();
  const auto begin = SocketClock::now();
  expect_contains(answer(first), "rank 1: version: got 'newer'");
  EXPECT_LT(SocketClock::now() - begin, std::chrono::milliseconds(3500));
}

// The two ranks of a run find each other at `point` within the time limit, in seconds.
void expect_two_ranks_meet(const MeetingPoint& point, double time_limit_s) {
  std::string errors[2];
  const auto rank = [&](int number) {
    try {
      EXPECT_EQ(rendezvous({number, 2, 42, "test"}, point, time_limit_s)->gather(number), (std::vector<int>{0, 1}));
    } catch (const Error& error) {
      errors[number] = error.what();
    }
  };
  std::thread second([&] { rank(1); });
  rank(0);
  second.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// As many as have a place: they lose it in time for the ranks of the run.
TEST(Rendezvous, ConnectionsThatSayNothingMakeRoom) {
  Door door;
  std::vector<Socket> silent;
  for (int i = 0; i < 64; ++i) silent.push_back(door.knock({}));
  const MeetingPoint point{"127.0.0.1", door.port, door.listener.release()};
  expect_two_ranks_meet(point, 4);
}

// Random bytes, in the place of a hello and behind one: the connection ends, and the ranks of the run meet all the same.
TEST(Rendezvous, RandomBytesAtThePortDoNoHarm) {
  std::mt19937 random(7);
  Door door;
  std::vector<Socket> visitors;
  for (int i = 0; i < 40; ++i) {
    std::vector<std::byte> words(1 + random() % 300);
    for (std::byte& byte : words) byte = static_cast<std::byte>(random());
    if (i % 3 == 0) {  // the right magic, and another token
      const Hello hello;
      const auto known = const_bytes_of(hello).first(std::min<std::size_t>(words.size(), 16));
      std::copy(known.begin(), known.end(), words.begin());
    }
    visitors.push_back(door.knock(words));
  }
  MeetingPoint point{"127.0.0.1", door.port, door.listener.release()};
  expect_two_ranks_meet(point, 20);
}

// Connections that say nothing, or begin to and stop, more than may wait at once: each loses its place in time, and the ranks
// that stand behind them in the queue meet.
TEST(Rendezvous, SilentStrangersDoNotKeepTheRanksOut) {
  Door door;
  std::vector<Socket> silent;
  const Hello hello;
  for (std::size_t i = 0; i < 70; ++i) silent.push_back(door.knock(const_bytes_of(hello).first(i % 2 * (i % 127))));
  const MeetingPoint point{"127.0.0.1", door.port, door.listener.release()};
  testing::internal::CaptureStderr();
  const double seconds = processor_seconds([&] { expect_two_ranks_meet(point, 4); });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  expect_contains(said, "is of no rank of this run, and was closed");
  EXPECT_LT(seconds, test::sanitized() ? 0.6 : 0.12) << "of a second that was a wait";
  for (const Socket& each : silent) EXPECT_EQ(answer(each), "closed");
}

// A rank that is let in and then sends what no rank sends ends the run, not the process, whatever the bytes are.
TEST(Rendezvous, ARankThatSendsNonsenseEndsTheRun) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; round += test::every_nth(5)) {
    Door door;
    std::vector<std::byte> words;
    const Hello hello = hello_of(1, 2);
    const auto known = const_bytes_of(hello);
    words.assign(known.begin(), known.end());
    FrameHeader header;
    header.kind = round % 3 == 0 ? FrameKind::reply : FrameKind::call;
    header.call = static_cast<CallName>(random() % 6);
    header.root = static_cast<std::int32_t>(random());
    header.bytes = round % 2 == 0 ? 24 : random();
    header.sizes = round % 4 == 0 ? xxh3_64(nullptr, 0) : random();
    const auto frame = const_bytes_of(header);
    words.insert(words.end(), frame.begin(), frame.end());
    for (int i = 0; i < 24 + round; ++i) words.push_back(static_cast<std::byte>(random()));
    const MeetingPoint point{"127.0.0.1", door.port, door.listener.fd()};
    Socket visitor = door.knock(words);
    door.listener.release();
    try {
      const auto ranks = rendezvous({0, 2, 42, "test"}, point, 2);
      std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        visitor.close();
      });
      std::vector<float> values(2);
      EXPECT_THROW(
          {
            ranks->exchange(values.data(), std::vector<Range>{{0, 1}, {1, 2}}, values.data());
            ranks->barrier();
          },
          Error)
          << round;
      later.join();
    } catch (const Error&) {  // before the start
    }
  }
}

// For a rank to come to the start, to come to a call, and to close its connection after an error: all threads sleep meanwhile,
// the hub's, too, between the signs that it gives.
TEST(Rendezvous, WaitingCostsNoProcessorTime) {
  const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  std::string error;
  const double seconds = processor_seconds([&] {
    Door door;
    const MeetingPoint point{"127.0.0.1", door.port, door.listener.release()};
    std::thread second([&] {
      sleep(400);
      const auto ranks = rendezvous({1, 2, 42, "test"}, point, 1);
      sleep(400);
      ranks->barrier();
      EXPECT_THROW(ranks->barrier(), Error);
      sleep(400);  // this connection is still open
    });
    try {
      const auto ranks = rendezvous({0, 2, 42, "test"}, point, 1);
      ranks->barrier();
      ranks->abort(Error(Exit::numeric, "over"));
      ranks->barrier();
    } catch (const Error& caught) {
      error = caught.what();
    }
    second.join();
  });
  EXPECT_EQ(error, "rank 0: over");
  EXPECT_LT(seconds, test::sanitized() ? 0.6 : 0.12) << "of 1.2 s that were waits";
}

// Two ranks that take nothing of a long reply are late. Each has a part of the reply by then, so news behind it would be
// read as its rest: the connection ends instead. Nothing is read here until the first one has: a hub with news for the second
// would still try to write them.
TEST(Rendezvous, NothingFollowsHalfAReply) {
  Door door;
  const Hello hello = hello_of(1, 2);
  Socket second = door.knock(const_bytes_of(hello));
  Rendezvous hub(std::move(door.listener), {0, 2, 42, "test"}, 1.5);
  Socket first = hub.take_first_connection();
  EXPECT_EQ(answer(second), "welcome");
  FrameHeader call;
  call.call = CallName::broadcast;
  const std::vector<std::byte> body(2 * kPieceBytes, std::byte{0xab});
  for (const bool root : {true, false}) {
    FrameWriter writer;
    writer.begin(call, root ? std::span<const std::byte>(body) : std::span<const std::byte>());
    ASSERT_TRUE(writer.write_all(root ? first : second, deadline_in(5)));
  }
  const auto connected = open_descriptors();  // the hub's two among them
  for (const Deadline end = deadline_in(30); open_descriptors() == connected;) {
    ASSERT_LT(SocketClock::now(), end) << "the hub keeps the connections of ranks that do not read";
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const auto left_to_read = [](const Socket& socket) {
    std::vector<std::byte> all, some(1 << 16);
    for (const Deadline end = deadline_in(5); SocketClock::now() < end;) {
      const std::ptrdiff_t count = read_some(socket, some);
      if (count < 0) break;
      all.insert(all.end(), some.begin(), some.begin() + count);
      pollfd waiting{socket.fd(), POLLIN, 0};
      if (count == 0) wait_for_any({&waiting, 1}, end);
    }
    return all;
  };
  for (Socket* socket : {&first, &second}) {
    const std::vector<std::byte> got = left_to_read(*socket);
    ASSERT_GE(got.size(), sizeof(FrameHeader));
    EXPECT_LT(got.size(), sizeof(FrameHeader) + body.size()) << "the reply fits in what the system keeps";
    FrameHeader header;
    std::memcpy(&header, got.data() + (socket == &first ? sizeof header : 0), sizeof header);
    const auto of_body = std::span(got).subspan(sizeof header * (socket == &first ? 2 : 1));
    EXPECT_EQ(header.kind, FrameKind::reply);
    EXPECT_TRUE(std::ranges::all_of(of_body, [](std::byte byte) { return byte == std::byte{0xab}; }));
    socket->close();
  }
}

// Once the start is over, well or not, the hub has no connection but those of its ranks, and takes no new one.
TEST(Rendezvous, AfterTheStartNobodyElseIsConnected) {
  for (const bool well : {true, false}) {
    Door door;
    const int size = well ? 3 : 4;  // one never comes
    const Hello hello = hello_of(1, size);
    const Socket silent = door.knock({}), begun = door.knock(const_bytes_of(hello).first(20));
    Socket second = door.knock(const_bytes_of(hello));
    Socket third = door.knock(const_bytes_of(hello_of(2, size, well ? "test" : "newer")));
    Rendezvous hub(std::move(door.listener), {0, size, 42, "test"}, 20);
    const Socket first = hub.take_first_connection();
    if (well) {
      for (const Socket* rank : {&second, &third}) EXPECT_EQ(answer(*rank), "welcome");
    } else {
      expect_contains(answer(third), "rank 2: version: got 'newer'");
      FrameWriter news;
      news.begin(Error(Exit::numeric, "over"));
      EXPECT_TRUE(news.write_all(first, deadline_in(5)));
      EXPECT_EQ(answer(second), "over");
    }
    for (const Socket* stranger : {&silent, &begun}) EXPECT_EQ(answer(*stranger), "closed") << well;
    std::string problem;
    const Socket late = connect_to("127.0.0.1", door.port, deadline_in(5), problem);
    EXPECT_TRUE(!late.open() || answer(late) == "closed") << well;
    second.close();
    third.close();
  }
}

// A run that has just ended has closed its connections first: for a minute the system remembers them with this port.
TEST(Sockets, APortIsFreeAgainWhenItsRunHasEnded) {
  Door door;
  Socket visitor = door.knock({});
  std::string from;
  Socket accepted = accept_from(door.listener, from);
  ASSERT_TRUE(accepted.open());
  EXPECT_EQ(from, "127.0.0.1");
  accepted.close();
  EXPECT_EQ(answer(visitor), "closed");
  visitor.close();
  door.listener.close();
  EXPECT_EQ(port_of(listen_at("127.0.0.1", door.port)), door.port);
}

// None waits, none is left to another program, and small messages leave at once.
TEST(Sockets, HaveTheFlagsOfConnectionsBetweenRanks) {
  const Door door;
  const Socket visitor = door.knock({});
  std::string from;
  const Socket accepted = accept_from(door.listener, from), duplicate = duplicate_of(visitor);
  const auto [ours, theirs] = connected_pair();
  for (const Socket* socket : {&door.listener, &visitor, &accepted, &duplicate, &ours, &theirs}) {
    EXPECT_EQ(::fcntl(socket->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    EXPECT_EQ(::fcntl(socket->fd(), F_GETFL) & O_NONBLOCK, O_NONBLOCK);
  }
  for (const Socket* socket : {&visitor, &accepted, &duplicate}) {
    int on = 0;
    socklen_t size = sizeof on;
    ASSERT_EQ(::getsockopt(socket->fd(), IPPROTO_TCP, TCP_NODELAY, &on, &size), 0);
    EXPECT_EQ(on, 1);
  }
}

TEST(Rendezvous, APortThatIsTakenIsNamed) {
  const Door door;
  EXPECT_EQ(
      error_of(Exit::environment, [&] { listen_at("127.0.0.1", door.port); }),
      format("port %lld of '127.0.0.1': cannot listen for the ranks: Address already in use. Set MASTER_PORT to a free "
             "port",
             static_cast<long long>(door.port)));
}

// In a container the meeting point's name may be unknown, or that of an address outside: rank 0 is there at each address it has.
TEST(Sockets, ANameThatIsNotOfThisMachineMeansAllItsAddresses) {
  for (const char* name : {"no-such-host.invalid", "192.0.2.1", "2001:db8::1"}) {  // the addresses: RFC 5737, RFC 3849
    SCOPED_TRACE(name);
    const Socket listener = listen_at(name, 0);
    const std::int64_t port = port_of(listener);
    for (const char* address : {"127.0.0.1", "127.0.0.2"}) {
      std::string problem, from;
      const Socket visitor = connect_to(address, port, deadline_in(5), problem);
      EXPECT_TRUE(visitor.open()) << address << ": " << problem;
      EXPECT_TRUE(accept_from(listener, from).open()) << address;
    }
    EXPECT_EQ(
        error_of(Exit::environment, [&] { listen_at(name, port); }),
        format("port %lld of '%s': cannot listen for the ranks: Address already in use. Set MASTER_PORT to a free "
               "port",
               static_cast<long long>(port), name));
  }
  const Socket own = listen_at("127.0.0.1", 0);
  std::string problem;
  EXPECT_FALSE(connect_to("127.0.0.2", port_of(own), deadline_in(5), problem).open()) << "a name that is";
  EXPECT_EQ(problem, "Connection refused");
}

// ---- ranks that this process starts ----

struct Started {
  Exit code;
  std::string log;
};
Started start_three(const char* part, double time_limit_s = 20, double grace_s = kGraceSeconds) {
  ::setenv(kPart, part, 1);
  char program[] = "unit_tests";
  char* const argv[] = {program, nullptr};
  testing::internal::CaptureStderr();
  const Exit code = start_ranks(argv, 3, time_limit_s, grace_s);
  ::unsetenv(kPart);
  return {code, testing::internal::GetCapturedStderr()};
}

// The one that a signal has killed can tell nobody, so others may end before it is seen: it is the reason all the same.
TEST(StartRanks, ARankThatIsKilledIsTheReasonWhoeverEndsFirst) {
  const auto [code, log] = start_three("killed");
  EXPECT_EQ(code, Exit::environment);
  expect_contains(log, "rank 2 was killed by signal 9 (Killed)");
}

// Who is left is killed by this process: the reason is still the rank that failed first, and not one that failed later.
TEST(StartRanks, ARankThatIsKilledBecauseItIsLeftIsNotTheReason) {
  const auto [code, log] = start_three("left", 0.02, 0.03);
  EXPECT_EQ(code, Exit::bad_file) << log;
  expect_contains(log, "rank 0 does not end: it is killed");
  expect_contains(log, "rank 1 ended first, with exit code 3");
}

// What the user's environment says of a meeting point is that of other runs.
TEST(StartRanks, RanksHaveTheMeetingPointOfTheirOwnRun) {
  const auto names = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WEFT_RUN_ID"};
  for (const char* name : names) ::setenv(name, "1", 1);
  const auto [code, log] = start_three("environment");
  for (const char* name : names) ::unsetenv(name);
  EXPECT_EQ(code, Exit::ok) << log;
}

// In a process of its own, which a signal that is not waited for would end.
TEST(StartRanksDeathTest, EachSignalThatAsksForTheEndComesToEachRank) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    const auto start = [&] {
      ::signal(number, SIG_DFL);   // the tests may run under nohup
      ::signal(SIGCHLD, SIG_IGN);  // as some parents leave it
      ::alarm(20);
      int ends[2];
      if (::pipe(ends) != 0 || ::dup2(ends[0], kReadyRead) < 0 || ::dup2(ends[1], kReadyWrite) < 0) std::_Exit(99);
      ::setenv(kPart, "signalled", 1);
      ::setenv(kSignal, std::to_string(number).c_str(), 1);
      char program[] = "unit_tests";
      char* const argv[] = {program, nullptr};
      std::_Exit(static_cast<int>(start_ranks(argv, 3, 10, 1)));
    };
    EXPECT_EXIT(start(), testing::ExitedWithCode(0), "") << ::strsignal(number);
  }
}

TEST(SocketRanks, NobodyAtTheMeetingPoint) {
  Door door;
  door.listener.close();
  const std::string error = error_of(Exit::environment, [&] {
    rendezvous({1, 2, 42, "test"}, {"127.0.0.1", door.port, -1}, 0.3);
  });
  expect_contains(error, "rank 0 did not come to the start within 0.3 s (port ");
  expect_contains(error, "Connection refused");
  expect_contains(error_of(Exit::environment,
                           [&] {
                             rendezvous({1, 2, 42, "test"}, {"no-such-host.invalid", door.port, -1}, 0.3);
                           }),
                  "'no-such-host.invalid': ");
}

// The connection of a rank that comes to this door, with its hello read; not open if none comes before the deadline.
Socket rank_at(const Door& door, Deadline end) {
  Socket rank;
  std::string from;
  Hello hello;
  for (std::size_t got = 0; got < sizeof hello && SocketClock::now() < end;) {
    pollfd waiting{rank.open() ? rank.fd() : door.listener.fd(), POLLIN, 0};
    wait_for_any({&waiting, 1}, end);
    if (!rank.open()) {
      rank = accept_from(door.listener, from);
    } else if (const std::ptrdiff_t count = read_some(rank, bytes_of(hello).subspan(got)); count > 0) {
      got += static_cast<std::size_t>(count);
    }
  }
  return rank;
}

// TCP may cut the first header anywhere.
TEST(SocketRanks, TheFirstAnswerMayComeInPieces) {
  const Door door;
  std::thread hub([&] {
    const Socket rank = rank_at(door, deadline_in(5));
    const FrameHeader reply = header_of(FrameKind::reply, 0);
    const auto bytes = const_bytes_of(reply);
    for (const auto piece : {bytes.first(1), bytes.subspan(1, 12), bytes.subspan(13)}) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      write_some(rank, piece);
    }
    EXPECT_EQ(answer(rank), "closed");
    EXPECT_FALSE(rank_at(door, deadline_in(0)).open()) << "a second connection";
  });
  EXPECT_NO_THROW(rendezvous({1, 2, 42, "test"}, {"127.0.0.1", door.port, -1}, 1));
  hub.join();
}

TEST(SocketRanks, WhoAnswersWithSomethingElseIsNotRank0) {
  const FrameHeader reply = header_of(FrameKind::reply, 0);
  const std::string half(reinterpret_cast<const char*>(&reply), sizeof reply / 2);
  for (const std::string& words : {std::string("220 ready\r\n"), half}) {
    const Door door;
    std::atomic<int> knocks{0};
    std::thread other([&] {
      std::vector<Socket> visitors;
      const Deadline end = deadline_in(0.4);
      while (SocketClock::now() < end) {
        Socket visitor = rank_at(door, end);
        if (!visitor.open()) continue;
        ++knocks;
        write_some(visitor, std::as_bytes(std::span(words)));
        if (words != half) visitors.push_back(std::move(visitor));  // the other connection ends
      }
    });
    expect_contains(error_of(Exit::environment,
                             [&] {
                               rendezvous({1, 2, 42, "test"}, {"127.0.0.1", door.port, -1}, 0.3);
                             }),
                    "who listens there is not rank 0 of this run");
    other.join();
    EXPECT_GT(knocks, 1);
  }
}

// A hub that reads nothing for a while cuts a sign in the middle.
TEST(SocketRanks, TheRestOfASignComesBeforeTheNextCall) {
  const Door door;
  // Segments of another size than a sign: the buffer is full in the middle of one.
  const int few_bytes = 4096, segment = 1001;
  ASSERT_EQ(::setsockopt(door.listener.fd(), SOL_SOCKET, SO_RCVBUF, &few_bytes, sizeof few_bytes), 0);
  ASSERT_EQ(::setsockopt(door.listener.fd(), IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof segment), 0);
  std::atomic<bool> reads{false};
  std::thread hub([&] {
    const Socket rank = rank_at(door, deadline_in(5));
    const FrameHeader reply = header_of(FrameKind::reply, 0);
    write_some(rank, const_bytes_of(reply));
    while (!reads) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    FrameReader reader;
    for (const Deadline end = deadline_in(10); SocketClock::now() < end;) {
      const FrameReader::Got got = reader.read(rank);
      if (got == FrameReader::Got::closed) return;
      if (got == FrameReader::Got::frame && reader.header().kind == FrameKind::call) {
        write_some(rank, const_bytes_of(reply));
      }
      pollfd waiting{rank.fd(), POLLIN, 0};
      if (got == FrameReader::Got::nothing) wait_for_any({&waiting, 1}, end);
    }
  });
  auto ranks = rendezvous({1, 2, 42, "test"}, {"127.0.0.1", door.port, -1}, 5);
  Deadline begin;
  do {
    begin = SocketClock::now();
    ranks->beat();
  } while (SocketClock::now() < begin + std::chrono::milliseconds(900));  // until one has waited in vain
  reads = true;
  EXPECT_NO_THROW(ranks->barrier());
  ranks.reset();
  hub.join();
}

}  // namespace
}  // namespace weft
