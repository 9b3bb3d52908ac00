// Planning of layout: where the pointers of a plan end up once there is memory.
#include "llmc/base/arena_layout.h"

#include <gtest/gtest.h>

#include "llmc/base/error.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

TEST(ArenaLayout, PointersGetAlignedRegionsThatDoNotOverlap) {
  float* first = nullptr;
  std::uint8_t* second = nullptr;
  double* third = nullptr;
  ArenaLayout layout("plan");
  layout.reserve(&first, 3);
  layout.reserve_bytes(&second, 257);
  layout.reserve(&third, 1);
  EXPECT_EQ(layout.plan().bytes(), 3 * kRegionAlignment + sizeof(double));
  EXPECT_EQ(first, nullptr) << "there is no memory yet";
  const HostArena arena(layout.plan());
  layout.bind(arena);
  EXPECT_EQ(first, arena.at<float>(0));
  EXPECT_EQ(second, arena.at<std::uint8_t>(kRegionAlignment));
  EXPECT_EQ(third, arena.at<double>(3 * kRegionAlignment));
}

TEST(ArenaLayout, SharedRegionsTakeNoMemoryOfTheirOwn) {
  float *own = nullptr, *shared = nullptr, *unknown = nullptr;
  ArenaLayout layout("plan");
  layout.reserve(&own, 100);
  const std::uint64_t bytes = layout.plan().bytes();
  layout.share(&shared, &own);
  EXPECT_EQ(layout.plan().bytes(), bytes);
  const HostArena arena(layout.plan());
  layout.bind(arena);
  EXPECT_EQ(shared, own);
  EXPECT_NE(shared, nullptr);
  error_of(Exit::internal, [&] { layout.share(&shared, &unknown); });
}

TEST(ArenaLayout, AlternativesOverlapAndTakeWhatTheLargestNeeds) {
  float *before = nullptr, *large = nullptr, *small = nullptr, *beside = nullptr, *after = nullptr;
  ArenaLayout layout("plan"), one("one"), other("other");
  layout.reserve(&before, 1);
  one.reserve(&large, 1000);
  other.reserve(&small, 10);
  other.reserve(&beside, 10);
  layout.reserve_one_of({&one, &other});
  layout.reserve(&after, 1);
  const HostArena arena(layout.plan());
  layout.bind(arena);
  EXPECT_EQ(large, arena.at<float>(kRegionAlignment));
  EXPECT_EQ(small, large);
  EXPECT_EQ(beside, arena.at<float>(2 * kRegionAlignment));
  EXPECT_GE(after, large + 1000);
}

TEST(ArenaLayout, SizesThatOverflowAreRefused) {
  float* pointer = nullptr;
  ArenaLayout layout("plan");
  EXPECT_THROW(layout.reserve(&pointer, std::int64_t{1} << 62), Error);
}

}  // namespace
}  // namespace weft
