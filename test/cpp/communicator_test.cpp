// The communicators, on threads and over sockets: what each rank gets, and that no wait is for ever.
#include "llmc/comm/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "llmc/comm/thread_ranks.h"
#include "test/cpp/address_space.h"
#include "test/cpp/rank_tools.h"
#include "test/cpp/sanitized.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

constexpr double kLimit = 20;  // seconds: as good as for ever on a busy machine

const int kSizes[] = {1, 2, 3, 4, 8};

// Element i of rank r.
float value(int rank, std::int64_t i) {
  return static_cast<float>(1000 * rank + i);
}

std::vector<float> values_of(int rank, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = value(rank, i);
  return values;
}

class CommunicatorTest : public testing::TestWithParam<Ranks> {
 protected:
  static void run(int size, double limit, const std::function<void(Communicator&)>& work) {
    run_ranks(GetParam(), size, limit, work);
  }

  struct Ends {
    std::vector<std::string> text;  // of each rank; empty: it ended well
    std::vector<Exit> code;
  };
  // What each of `size` ranks throws.
  static Ends ends_of(int size, double limit, const std::function<void(Communicator&)>& work) {
    Ends ends{std::vector<std::string>(static_cast<std::size_t>(size)),
              std::vector<Exit>(static_cast<std::size_t>(size), Exit::ok)};
    try {
      run(size, limit, [&](Communicator& ranks) {
        const auto me = static_cast<std::size_t>(ranks.rank());
        try {
          work(ranks);
        } catch (const Error& error) {
          ends.text[me] = error.what();
          ends.code[me] = error.code();
          throw;
        }
      });
    } catch (const Error&) {
    }
    return ends;
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, CommunicatorTest, testing::Values(Ranks::threads, Ranks::sockets),
                         [](const auto& info) { return info.param == Ranks::threads ? "Threads" : "Sockets"; });

// Uneven ranges, one of them empty where there are three.
std::vector<Range> uneven(int ranks) {
  std::vector<Range> parts;
  for (int r = 0, begin = 0; r < ranks; ++r) {
    const int count = r == 1 && ranks > 2 ? 0 : 3 + 5 * r;
    parts.push_back({begin, begin + count});
    begin += count + 2;  // two elements that no rank gets
  }
  return parts;
}

TEST_P(CommunicatorTest, ExchangeBringsEachRankItsPart) {
  for (const int size : kSizes) {
    const std::vector<Range> parts = uneven(size);
    std::atomic<int> checked{0};
    run(size, kLimit, [&](Communicator& ranks) {
      ASSERT_EQ(ranks.size(), size);
      for (int round = 0; round < 20; ++round) {
        const std::vector<float> mine = values_of(ranks.rank() + round, parts.back().end);
        const Range part = parts[static_cast<std::size_t>(ranks.rank())];
        std::vector<float> received(static_cast<std::size_t>(size * part.size()), -1.0f);
        ranks.exchange(mine.data(), parts, received.data());
        for (int from = 0; from < size; ++from) {
          for (std::int64_t i = 0; i < part.size(); ++i) {
            ASSERT_EQ(received[static_cast<std::size_t>(from * part.size() + i)], value(from + round, part.begin + i));
          }
        }
        ++checked;
      }
    });
    EXPECT_EQ(checked, 20 * size);
  }
}

TEST_P(CommunicatorTest, GatherGivesAllPartsToAllRanks) {
  for (const int size : kSizes) {
    const std::vector<Range> parts = uneven(size);
    run(size, kLimit, [&](Communicator& ranks) {
      for (int round = 0; round < 20; ++round) {
        std::vector<float> all(static_cast<std::size_t>(parts.back().end), -1.0f), expected = all;
        for (int r = 0; r < size; ++r) {
          const Range part = parts[static_cast<std::size_t>(r)];
          for (std::int64_t i = part.begin; i < part.end; ++i) {
            expected[static_cast<std::size_t>(i)] = value(r + round, i);
            if (r == ranks.rank()) all[static_cast<std::size_t>(i)] = value(r + round, i);
          }
        }
        ranks.gather(all.data(), parts);
        ASSERT_EQ(all, expected);
      }
    });
  }
}

TEST_P(CommunicatorTest, SmallValuesReachEveryRank) {
  for (const int size : kSizes) {
    run(size, kLimit, [&](Communicator& ranks) {
      const int me = ranks.rank();
      const std::vector<double> all = ranks.gather(0.5 + me);
      for (int r = 0; r < size; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], 0.5 + r);
      EXPECT_EQ(ranks.broadcast(static_cast<std::int64_t>(me), size - 1), size - 1);
      EXPECT_EQ(ranks.broadcast_text(me == 0 ? "the first rank's" : "another, of another length"), "the first rank's");
      EXPECT_EQ(ranks.broadcast_text(me == 0 ? "" : "x"), "");
      EXPECT_EQ(largest(ranks, -me), 0);
      EXPECT_EQ(largest(ranks, me), size - 1);
      ranks.barrier();
    });
  }
}

TEST_P(CommunicatorTest, NobodyPassesABarrierBeforeTheLastComes) {
  std::atomic<int> arrived{0};
  run(4, kLimit, [&](Communicator& ranks) {
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      ranks.barrier();
      EXPECT_GE(arrived, 4 * round);
      ranks.barrier();
    }
  });
}

TEST(Communicator, ARankAloneGetsItsOwnPart) {
  SingleRank alone;
  const std::vector<float> values = {0, 1, 2, 3};
  std::vector<float> received(2);
  alone.exchange(values.data(), std::vector<Range>{{1, 3}}, received.data());
  EXPECT_EQ(received, (std::vector<float>{1, 2}));
  EXPECT_EQ(alone.gather(7), std::vector<int>{7});
  EXPECT_EQ(alone.broadcast_text("text"), "text");
  EXPECT_EQ(largest(alone, -3), -3);
}

TEST(Communicator, SharesCoverEverythingOnce) {
  EXPECT_EQ(shares(7, 3), (std::vector<Range>{{0, 3}, {3, 5}, {5, 7}}));
  EXPECT_EQ(shares(2, 4), (std::vector<Range>{{0, 1}, {1, 2}, {2, 2}, {2, 2}}));
  EXPECT_EQ(shares(0, 2), (std::vector<Range>{{0, 0}, {0, 0}}));
}

// A long series of calls of all kinds and sizes, in an order that all ranks draw alike: nothing of one call is in the next.
TEST_P(CommunicatorTest, AnySeriesOfCalls) {
  for (const int size : {2, 3}) {
    run(size, kLimit, [&](Communicator& ranks) {
      std::mt19937 random(static_cast<unsigned>(size));
      const int me = ranks.rank();
      for (int round = 0; round < 150; ++round) {
        std::vector<Range> parts;
        for (int r = 0, begin = 0; r < size; ++r) {
          parts.push_back({begin, begin + static_cast<int>(random() % 4 == 0 ? 0 : random() % 300)});
          begin = static_cast<int>(parts.back().end + random() % 2);
        }
        const Range mine = parts[static_cast<std::size_t>(me)];
        std::vector<float> values = values_of(me + round, parts.back().end);
        const int root = static_cast<int>(random() % static_cast<unsigned>(size));
        switch (random() % 6) {
          case 0: {
            std::vector<float> received(static_cast<std::size_t>(size * mine.size()) + 1, -1.0f);
            ranks.exchange(values.data(), parts, received.data());
            for (int from = 0; from < size; ++from) {
              for (std::int64_t i = 0; i < mine.size(); ++i) {
                ASSERT_EQ(received[static_cast<std::size_t>(from * mine.size() + i)],
                          value(from + round, mine.begin + i));
              }
            }
            ASSERT_EQ(received.back(), -1.0f) << "nothing behind it";
            break;
          }
          case 1:
            ranks.gather(values.data(), parts);
            for (int r = 0; r < size; ++r) {
              const Range part = parts[static_cast<std::size_t>(r)];
              for (std::int64_t i = part.begin; i < part.end; ++i) {
                ASSERT_EQ(values[static_cast<std::size_t>(i)], value(r + round, i));
              }
            }
            break;
          case 2:
            ranks.broadcast_bytes(reinterpret_cast<std::byte*>(values.data()),
                                  static_cast<std::int64_t>(values.size() * sizeof(float)), root);
            ASSERT_EQ(values, values_of(root + round, std::ssize(values)));
            break;
          case 3:
            ASSERT_EQ(ranks.broadcast_text(std::string(static_cast<std::size_t>(round % 7 * (me == root)), 'x'), root),
                      std::string(static_cast<std::size_t>(round % 7), 'x'));
            break;
          case 4:
            ranks.barrier();
            ranks.check();
            ranks.beat();
            break;
          default: {
            // An error that all are told of ends nothing.
            std::optional<Error> error;
            if (me == root) error = Error(Exit::numeric, format("round %d", round));
            const std::string told = error_of(Exit::numeric, [&] { fail_together(ranks, error); });
            ASSERT_EQ(told, (me == root ? "" : format("rank %d: ", root)) + format("round %d", round));
            ASSERT_EQ(largest(ranks, me == root ? round : -1), round);
          }
        }
      }
    });
  }
}

// ---- errors ----

TEST_P(CommunicatorTest, AnErrorOfOneRankEndsTheWaitOfAll) {
  const Ends ends = ends_of(4, kLimit, [](Communicator& ranks) {
    if (ranks.rank() == 2) fail(Exit::resources, "no memory left");
    ranks.barrier();
  });
  for (const std::size_t r : {0u, 1u, 3u}) {
    EXPECT_EQ(ends.text[r], "rank 2: no memory left");
    EXPECT_EQ(ends.code[r], Exit::resources);
  }
  EXPECT_EQ(ends.text[2], "no memory left");
  EXPECT_EQ(error_of(Exit::resources,
                     [] {
                       run(3, kLimit, [](Communicator& ranks) {
                         if (ranks.rank() == 1) fail(Exit::resources, "no memory left");
                         ranks.barrier();
                       });
                     }),
            "no memory left");
}

// A rank that computes too long, or hangs.
TEST_P(CommunicatorTest, ARankThatDoesNotComeIsNamed) {
  std::atomic<bool> over{false};
  const auto begin = std::chrono::steady_clock::now();
  const Ends ends = ends_of(3, 1, [&](Communicator& ranks) {
    ranks.barrier();
    if (ranks.rank() == 1) {
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    try {
      float value = 0;
      ranks.gather(&value, std::vector<Range>(3));
    } catch (...) {
      over = true;
      throw;
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  for (const std::string& text : ends.text) EXPECT_EQ(text, "rank 1 did not come to gather() within 1 s");
  for (const Exit code : ends.code) EXPECT_EQ(code, Exit::environment);
}

TEST_P(CommunicatorTest, ARankThatHasEndedIsNotWaitedFor) {
  for (const bool late : {false, true}) {
    const Ends ends = ends_of(3, kLimit, [&](Communicator& ranks) {
      // It leaves before the others come, or while they wait.
      if ((ranks.rank() == 1) != late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (ranks.rank() == 1) return;
      ranks.barrier();
    });
    EXPECT_EQ(ends.text[0], "rank 1 has ended, others go on");
    EXPECT_EQ(ends.text[1], "");
    EXPECT_EQ(ends.text[2], ends.text[0]);
  }
}

TEST_P(CommunicatorTest, RanksInDifferentCallsDoNotMixTheirMemory) {
  const Ends calls = ends_of(3, kLimit, [](Communicator& ranks) {
    if (ranks.rank() == 2) return ranks.barrier();
    ranks.gather(1.0);
  });
  for (const std::string& text : calls.text) {
    EXPECT_EQ(text, "the ranks do not agree: rank 0 is in gather(), rank 2 in barrier()");
  }
  const Ends sizes = ends_of(2, kLimit, [](Communicator& ranks) {
    std::vector<std::byte> bytes(8);
    ranks.broadcast_bytes(bytes.data(), 4 + ranks.rank(), 0);
  });
  for (const std::string& text : sizes.text) {
    EXPECT_EQ(text, "the ranks do not agree: rank 0 is in broadcast(), rank 1 in broadcast() with other sizes");
  }
  EXPECT_EQ(sizes.code[0], Exit::internal);
  const Ends roots = ends_of(2, kLimit, [](Communicator& ranks) {
    std::vector<std::byte> bytes(8);
    ranks.broadcast_bytes(bytes.data(), 8, ranks.rank());
  });
  for (const std::string& text : roots.text) {
    EXPECT_EQ(text, "the ranks do not agree: rank 0 is in broadcast(), rank 1 in broadcast() with other sizes");
  }
}

// For who waits for the others without a call.
TEST_P(CommunicatorTest, ACheckSeesTheEndAndNothingElse) {
  const Ends ends = ends_of(3, kLimit, [](Communicator& ranks) {
    ranks.check();
    ranks.barrier();
    ranks.check();
    if (ranks.rank() == 1) fail(Exit::environment, "the GPU has fallen off the bus");
    while (true) {
      ranks.check();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (const std::size_t r : {0u, 2u}) EXPECT_EQ(ends.text[r], "rank 1: the GPU has fallen off the bus");
}

// What is longer than the hub keeps at once goes in pieces.
TEST_P(CommunicatorTest, LargeValuesGoInPieces) {
  constexpr std::int64_t kCount = 3'000'001;
  for (const auto& [size, short_one] : {std::pair(2, 0), {2, 1}, {3, 1}}) {  // not all are as long as the longest
    run(size, kLimit, [&, short_one = static_cast<std::size_t>(short_one)](Communicator& ranks) {
      const int me = ranks.rank();
      std::vector<Range> parts = shares(kCount, size);
      parts[short_one].end -= parts[short_one].size() - 1000;
      const std::vector<float> mine = values_of(me, kCount);
      const std::int64_t own = parts[static_cast<std::size_t>(me)].size();
      std::vector<float> received(static_cast<std::size_t>(size * own), -1.0f);
      ranks.exchange(mine.data(), parts, received.data());
      for (int from = 0; from < size; ++from) {
        for (std::int64_t i = 0; i < own; ++i) {
          ASSERT_EQ(received[static_cast<std::size_t>(from * own + i)],
                    value(from, parts[static_cast<std::size_t>(me)].begin + i));
        }
      }
      std::vector<float> all = mine;
      ranks.gather(all.data(), parts);
      for (int r = 0; r < size; ++r) {
        const Range part = parts[static_cast<std::size_t>(r)];
        for (std::int64_t i = part.begin; i < part.end; ++i) ASSERT_EQ(all[static_cast<std::size_t>(i)], value(r, i));
      }
      std::vector<float> last = mine;
      ranks.broadcast_bytes(reinterpret_cast<std::byte*>(last.data()), 4 * kCount, size - 1);
      ASSERT_EQ(last, values_of(size - 1, kCount));
    });
  }
}

// After the first error every later call throws it too, at once, whatever else is said to have happened.
TEST_P(CommunicatorTest, NothingGoesOnAfterAnAbort) {
  const Ends ends = ends_of(2, kLimit, [](Communicator& ranks) {
    ranks.barrier();
    if (ranks.rank() == 0) ranks.abort(Error(Exit::numeric, "the loss is nan"));
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(error_of(Exit::numeric, [&] { ranks.barrier(); }), "rank 0: the loss is nan");
      ranks.abort(Error(Exit::resources, "the disk is full"));
      EXPECT_EQ(error_of(Exit::numeric, [&] { ranks.check(); }), "rank 0: the loss is nan");
    }
  });
  EXPECT_EQ(ends.text, std::vector<std::string>(2));
}

// Aborts that come at any moment of an exchange: no rank frees memory that another one still reads. (ThreadSanitizer and
// AddressSanitizer watch.)
TEST_P(CommunicatorTest, AnAbortInTheMiddleLeavesNobodyReading) {
  for (int round = 0; round < 50; ++round) {
    const Ends ends = ends_of(4, kLimit, [round](Communicator& ranks) {
      const std::vector<Range> parts = shares(20'000, 4);
      for (int i = 0;; ++i) {
        const std::vector<float> mine(20'000, static_cast<float>(i));
        std::vector<float> received(20'000);
        if (ranks.rank() == 3 && i == round % 7) ranks.abort(Error(Exit::environment, "enough"));
        ranks.exchange(mine.data(), parts, received.data());
      }
    });
    for (const std::string& text : ends.text) EXPECT_EQ(text, "rank 3: enough");
  }
}

TEST_P(CommunicatorTest, AllFailTogetherOrNobodyDoes) {
  for (const int size : {1, 2, 4}) {
    const Ends none = ends_of(size, kLimit, [](Communicator& ranks) { fail_together(ranks, std::nullopt); });
    EXPECT_EQ(none.text, std::vector<std::string>(static_cast<std::size_t>(size)));
  }
  const Ends ends = ends_of(4, kLimit, [](Communicator& ranks) {
    std::optional<Error> mine;
    if (ranks.rank() == 1) mine.emplace(Exit::bad_file, "train_0.bin: " + std::string(2000, 'x'));
    if (ranks.rank() == 3) mine.emplace(Exit::numeric, "another");
    try {
      fail_together(ranks, mine);
      ADD_FAILURE() << "rank " << ranks.rank() << " goes on";
    } catch (const Error&) {
      ranks.barrier();  // they are together still
      throw;
    }
  });
  EXPECT_EQ(ends.text[0].substr(0, 22), "rank 1: train_0.bin: x");
  EXPECT_EQ(ends.text[0].size(), 8u + 503u) << "as much as is sent";
  EXPECT_EQ(ends.text[2], ends.text[0]);
  EXPECT_EQ(ends.text[1].size(), 2013u) << "its own, whole";
  EXPECT_EQ(ends.text[3], "another");
  EXPECT_EQ(ends.code, (std::vector<Exit>{Exit::bad_file, Exit::bad_file, Exit::bad_file, Exit::numeric}));
}

// Work that fails on some ranks in any of the ways in which it can, and afterwards on none.
TEST_P(CommunicatorTest, WorkIsDoneOnAllRanksOrFailsOnAll) {
  const Ends ends = ends_of(4, kLimit, [](Communicator& ranks) {
    std::optional<Error> told;
    try {
      do_together(ranks, [&] {
        if (ranks.rank() == 1) throw std::bad_alloc();
        if (ranks.rank() == 2) fail(Exit::environment, "no GPU");
      });
      ADD_FAILURE() << "rank " << ranks.rank() << " goes on";
    } catch (const Error& error) {
      told = error;
    }
    bool done = false;
    do_together(ranks, [&] { done = true; });  // they are together still
    EXPECT_TRUE(done);
    if (told) throw *told;
  });
  EXPECT_EQ(ends.text,
            (std::vector<std::string>{"rank 1: out of memory", "out of memory", "no GPU", "rank 1: out of memory"}));
  EXPECT_EQ(ends.code, (std::vector<Exit>{Exit::resources, Exit::resources, Exit::environment, Exit::resources}));
}

// Those that wait on the second communicator hear it as those on the first do.
TEST(ThreadRanks, AnErrorEndsTheCallsOfBothCommunicators) {
  for (const bool unknown : {false, true}) {
    const Exit code = unknown ? Exit::internal : Exit::numeric;
    std::string heard[3];
    const auto wait = [&](Communicator& mine) {
      std::string& told = heard[static_cast<std::size_t>(mine.rank())];
      told = error_of(code, [&] { mine.barrier(); });
      EXPECT_EQ(error_of(code, [&] { mine.check(); }), told);
    };
    EXPECT_ANY_THROW(run_thread_ranks(3, kLimit, [&](Communicator& ranks, Communicator& beside) {
      if (ranks.rank() != 1) return wait(ranks.rank() == 0 ? beside : ranks);
      if (unknown) throw std::logic_error("no Error");
      fail(code, "the loss is nan");
    }));
    for (const std::size_t r : {0u, 2u}) {
      EXPECT_EQ(heard[r], unknown ? "rank 1: ended by an exception" : "rank 1: the loss is nan");
    }
  }
}

// The calls of the two do not meet: the ranks may come to them in any order.
TEST(ThreadRanks, TheSecondCommunicatorIsOneOfItsOwn) {
  run_thread_ranks(2, kLimit, [&](Communicator& ranks, Communicator& beside) {
    ASSERT_EQ(beside.rank(), ranks.rank());
    ASSERT_EQ(beside.size(), 2);
    std::thread other([&] { EXPECT_EQ(beside.gather(10 + beside.rank()), (std::vector<int>{10, 11})); });
    EXPECT_EQ(ranks.gather(ranks.rank()), (std::vector<int>{0, 1}));
    ranks.barrier();
    other.join();
  });
}

// The ranks that have started wait for one that never will.
TEST(ThreadRanksDeathTest, ARankWhoseThreadCannotStartEndsTheOthers) {
  if (test::sanitized()) GTEST_SKIP() << "a sanitizer needs the address space";
  const auto run = [] {
    test::limit_address_space(4 * test::stack_bytes());
    try {
      run_thread_ranks(64, 60, [](Communicator& ranks, Communicator& beside) {
        try {
          (ranks.rank() % 2 == 0 ? ranks : beside).barrier();
        } catch (const Error& error) {
          if (std::strstr(error.what(), "its thread cannot start") == nullptr) std::_Exit(3);
        }
      });
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      std::_Exit(error.code() == Exit::environment ? 0 : 1);
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "rank [0-9]+: its thread cannot start: ");
}

}  // namespace
}  // namespace weft
