// Planning of regions: where the pointers of a plan end up once there is memory.
#include "llmc/base/regions.h"

#include <gtest/gtest.h>

#include "llmc/base/error.h"

namespace weft {
namespace {

TEST(Regions, PointersGetAlignedRegionsThatDoNotOverlap) {
  float* first = nullptr;
  std::uint8_t* second = nullptr;
  double* third = nullptr;
  Regions regions("plan");
  regions.want(&first, 3);
  regions.want_bytes(&second, 257);
  regions.want(&third, 1);
  EXPECT_EQ(regions.plan().bytes(), 3 * kRegionAlignment + sizeof(double));
  EXPECT_EQ(first, nullptr) << "there is no memory yet";
  const HostArena arena(regions.plan());
  regions.bind(arena);
  EXPECT_EQ(first, arena.at<float>(0));
  EXPECT_EQ(second, arena.at<std::uint8_t>(kRegionAlignment));
  EXPECT_EQ(third, arena.at<double>(3 * kRegionAlignment));
}

TEST(Regions, SharedRegionsTakeNoMemoryOfTheirOwn) {
  float *own = nullptr, *shared = nullptr, *unknown = nullptr;
  Regions regions("plan");
  regions.want(&own, 100);
  const std::uint64_t bytes = regions.plan().bytes();
  regions.share(&shared, &own);
  EXPECT_EQ(regions.plan().bytes(), bytes);
  const HostArena arena(regions.plan());
  regions.bind(arena);
  EXPECT_EQ(shared, own);
  EXPECT_NE(shared, nullptr);
  try {
    regions.share(&shared, &unknown);
    ADD_FAILURE() << "shared a region that was never wanted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::internal);
  }
}

TEST(Regions, AlternativesOverlapAndTakeWhatTheLargestNeeds) {
  float *before = nullptr, *large = nullptr, *small = nullptr, *beside = nullptr, *after = nullptr;
  Regions regions("plan"), one("one"), other("other");
  regions.want(&before, 1);
  one.want(&large, 1000);
  other.want(&small, 10);
  other.want(&beside, 10);
  regions.want_one_of({&one, &other});
  regions.want(&after, 1);
  const HostArena arena(regions.plan());
  regions.bind(arena);
  EXPECT_EQ(large, arena.at<float>(kRegionAlignment));
  EXPECT_EQ(small, large);
  EXPECT_EQ(beside, arena.at<float>(2 * kRegionAlignment));
  EXPECT_GE(after, large + 1000);
}

TEST(Regions, SizesThatOverflowAreRefused) {
  float* pointer = nullptr;
  Regions regions("plan");
  EXPECT_THROW(regions.want(&pointer, std::int64_t{1} << 62), Error);
}

}  // namespace
}  // namespace weft
