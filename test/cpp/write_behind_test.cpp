// Writing on a thread of its own, and independent work on several: order, errors, memory that is used again.
#include "llmc/file/write_behind.h"
#include "llmc/base/json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "llmc/base/parallel.h"
#include "llmc/file/tensor_file.h"
#include "test/cpp/address_space.h"
#include "test/cpp/sanitized.h"
#include "test_files.h"

namespace weft {
namespace {

class WriteBehindTest : public ::testing::Test {
 protected:
  void TearDown() override { set_write_fault(nullptr); }
  TemporaryDirectory directory_;
};

std::atomic<int> writes{0};
std::atomic<bool> all_given{false};

TEST_F(WriteBehindTest, PiecesComeInOrderFromBuffersAndFromElsewhere) {
  std::vector<std::byte> elsewhere(WriteBehind::kPiece);
  std::string expected;
  AtomicFile file(directory_.file("pieces"));
  {
    WriteBehind behind(file);
    for (int i = 0; i < 100; ++i) {  // many more than there are buffers
      const std::size_t bytes = i % 7 == 0 ? WriteBehind::kPiece : 1000u + static_cast<unsigned>(i);
      std::byte* room = behind.buffer();
      std::memset(room, i, bytes);
      behind.write(i % 3 == 0 ? elsewhere.data() : room, bytes);
      expected += std::string(bytes, i % 3 == 0 ? '\0' : static_cast<char>(i));
    }
    behind.drain();
    EXPECT_EQ(file.size(), expected.size());
  }
  file.publish();
  EXPECT_TRUE(read_bytes(directory_.file("pieces")) == expected);
}

TEST_F(WriteBehindTest, AnErrorIsThrownByTheNextCallAndNothingIsWrittenAfterIt) {
  AtomicFile file(directory_.file("pieces"));
  writes = 0;
  set_write_fault([](const std::string&, std::uint64_t, std::size_t bytes) -> std::size_t {
    if (++writes == 3) fail(Exit::resources, "no space left");
    return bytes;
  });
  {
    WriteBehind behind(file);
    const auto fill = [&] {
      for (int i = 0; i < 1000; ++i) behind.write(behind.buffer(), 1000);
      behind.drain();
    };
    EXPECT_EQ(error_of(Exit::resources, fill), "no space left");
    EXPECT_EQ(error_of(Exit::resources, [&] { behind.drain(); }), "no space left");
    EXPECT_EQ(error_of(Exit::resources, [&] { behind.buffer(); }), "no space left");
  }
  EXPECT_EQ(writes, 3);
  EXPECT_EQ(file.size(), 2000u);
}

// A buffer is not given out again before what lies in it is written.
TEST_F(WriteBehindTest, ABufferInUseIsWaitedFor) {
  AtomicFile file(directory_.file("pieces"));
  writes = 0;
  all_given = false;
  set_write_fault([](const std::string&, std::uint64_t, std::size_t bytes) {
    while (!all_given) std::this_thread::yield();
    ++writes;
    return bytes;
  });
  std::string expected;
  {
    WriteBehind behind(file);
    for (int i = 0; i < 8; ++i) {  // as many as there are
      std::byte* room = behind.buffer();
      std::memset(room, 'a' + i, 100);
      behind.write(room, 100);
      expected += std::string(100, static_cast<char>('a' + i));
    }
    std::atomic<bool> given{false};
    std::thread maker([&] {
      std::byte* room = behind.buffer();
      given = true;
      std::memset(room, 'z', 100);
      behind.write(room, 100);
      behind.drain();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(given) << "all eight still wait for the disk";
    all_given = true;
    maker.join();
  }
  EXPECT_EQ(writes, 9);
  file.publish();
  EXPECT_EQ(read_bytes(directory_.file("pieces")), expected + std::string(100, 'z'));
}

TEST_F(WriteBehindTest, GivenUpItEndsWithoutWritingTheRest) {
  AtomicFile file(directory_.file("pieces"));
  writes = 0;
  all_given = false;
  set_write_fault([](const std::string&, std::uint64_t, std::size_t bytes) {
    while (!all_given) std::this_thread::yield();
    // The first one is over at once, the others give the end below time to begin, on the busiest machine.
    if (++writes > 1) std::this_thread::sleep_for(std::chrono::seconds(1));
    return bytes;
  });
  {
    WriteBehind behind(file);
    for (int i = 0; i < 8; ++i) behind.write(behind.buffer(), 1000);
    all_given = true;
  }
  EXPECT_LT(writes, 8);
}

TEST_F(WriteBehindTest, PartsMakeTheSameFileAsWholeTensors) {
  const std::size_t count = (5u << 18) + 7;
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i);
  const std::string text = "not of fp32";
  for (const bool parts : {false, true}) {
    TensorFileWriter writer(directory_.file(parts ? "parts" : "whole"), FileKind::training_state, Json::object());
    const auto put = [&](std::size_t first, std::size_t size, bool in_place) {
      if (!parts) return writer.write_f32(values.data() + first, size);
      writer.write_parts(size, [&](std::size_t from, std::size_t n, float* buffer) -> const float* {
        if (in_place) return values.data() + first + from;
        std::copy_n(values.data() + first + from, n, buffer);
        return buffer;
      });
    };
    writer.declare("a", DType::f32, {static_cast<std::int64_t>(count)});
    writer.declare("empty", DType::f32, {0, 3});
    writer.declare("text", DType::u8, {static_cast<std::int64_t>(text.size())});
    writer.declare("b", DType::f32, {5, 7});
    put(0, count, false);
    put(0, 0, false);
    {
      std::string passing = text;  // write() has taken what it was given when it returns
      writer.write(passing.data(), passing.size());
      passing.assign(passing.size(), '?');
    }
    put(3, 35, true);
    writer.publish();
  }
  EXPECT_TRUE(read_bytes(directory_.file("parts")) == read_bytes(directory_.file("whole")));
  TensorFile::open(directory_.file("parts"), FileKind::training_state).verify_all();
}

TEST_F(WriteBehindTest, PartsOfAnotherSizeOrTypeAreABug) {
  TensorFileWriter writer(directory_.file("parts"), FileKind::training_state, Json::object());
  writer.declare("a", DType::f32, {4});
  writer.declare("b", DType::bf16, {4});
  const float values[4] = {};
  const auto part = [&](std::size_t, std::size_t, float*) { return values; };
  expect_contains(error_of(Exit::internal, [&] { writer.write_parts(3, part); }), "do not match");
  writer.write_parts(4, part);
  expect_contains(error_of(Exit::internal, [&] { writer.write_parts(4, part); }), "fp32");
}

TEST(InParallel, EachPieceOnceOnAnyNumberOfThreads) {
  for (const unsigned threads : {1u, 3u, 64u}) {
    for (const std::size_t count : {0u, 1u, 2u, 1000u}) {
      std::vector<std::atomic<int>> done(count);
      in_parallel(count, threads, [&](std::size_t i) { ++done[i]; });
      for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
    }
  }
  EXPECT_GE(helper_threads(), 1u);
}

TEST(InParallel, TwoPiecesAreAtWorkAtOnce) {
  std::atomic<int> there{0};
  in_parallel(2, 2, [&](std::size_t) {
    ++there;
    while (there < 2) std::this_thread::yield();  // alone it would wait for ever
  });
  EXPECT_EQ(there, 2);
}

TEST(InParallel, TheErrorIsThatOfTheFirstPiece) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> begun{0};
    EXPECT_EQ(error_of(Exit::bad_file,
                       [&] {
                         in_parallel(1000, 4, [&](std::size_t i) {
                           ++begun;
                           if (i == 10) std::this_thread::sleep_for(std::chrono::microseconds(200));
                           if (i >= 10) fail(Exit::bad_file, "piece %zu", i);
                         });
                       }),
              "piece 10");
    EXPECT_LT(begun, 1000);
  }
}

TEST(InParallel, NoPieceBehindAFailureBegins) {
  std::vector<std::size_t> begun;
  const auto work = [&](std::size_t i) {
    begun.push_back(i);
    if (i == 2) fail(Exit::bad_file, "piece 2");
  };
  EXPECT_EQ(error_of(Exit::bad_file, [&] { in_parallel(9, 1, work); }), "piece 2");
  EXPECT_EQ(begun, (std::vector<std::size_t>{0, 1, 2}));
}

// Three pieces at work at once fail one after the other, in each order: the error is never that of whichever came last.
TEST(InParallel, TheErrorIsThatOfTheFirstPieceWhateverFailsLast) {
  std::size_t order[] = {0, 1, 2};  // when each piece fails
  do {
    std::atomic<std::size_t> there{0}, failing{0};
    const auto work = [&](std::size_t i) {
      ++there;
      while (there < 3 || failing != order[i]) std::this_thread::yield();
      // The error of the piece before has been caught by the end of this.
      if (order[i] > 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      ++failing;
      fail(Exit::bad_file, "piece %zu", i);
    };
    EXPECT_EQ(error_of(Exit::bad_file, [&] { in_parallel(3, 3, work); }), "piece 0")
        << order[0] << order[1] << order[2];
  } while (std::next_permutation(std::begin(order), std::end(order)));
}

// The calling thread does alone what no other thread can be started for.
TEST(InParallelDeathTest, WithoutMemoryForThreadsTheCallerDoesTheWork) {
  if (test::sanitized()) GTEST_SKIP() << "a sanitizer needs the address space";
  const auto run = [] {
    int done = 0;
    const std::function<void(std::size_t)> work = [&](std::size_t) { ++done; };
    test::use_up_memory();
    try {
      in_parallel(100, 64, work);
    } catch (...) {
      std::_Exit(1);
    }
    std::_Exit(done == 100 ? 0 : 2);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace weft
