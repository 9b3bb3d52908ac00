// ClusterGather and ClusterReduce alone: every element of every exchange in clusters of 2 to 16 blocks that run at different
// speeds, and what an exchange costs.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda/runtime/device.h"
#include "test/gpu/cluster_check.h"
#include "test/gpu/device_buffer.h"

namespace weft {
namespace {

using cuda::ClusterOperation;
using test::DeviceBuffer;

class Cluster : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::probe_device().arch < 90) GTEST_SKIP() << "clusters need compute capability 9.0";
  }
};

TEST_F(Cluster, EveryElementArrives) {
  constexpr int kRounds = 300;
  for (const ClusterOperation operation : {ClusterOperation::gather, ClusterOperation::reduce}) {
    for (const int blocks : {2, 4, 8, 16}) {
      for (const auto& [threads, count] : {std::pair{128, 4}, {256, 84}, {96, 256}, {352, 1024}}) {
        const int clusters = 96 / blocks;
        DeviceBuffer<unsigned> wrong(std::vector<unsigned>{0});
        DeviceBuffer<long long> clocks(static_cast<std::size_t>(clusters));
        const bool ran = cuda::cluster_check(operation, blocks, clusters, threads, count, kRounds, true, wrong.data(),
                                             clocks.data(), nullptr);
        if (blocks == 16 && !ran) continue;  // more than 8 is up to the GPU
        ASSERT_TRUE(ran);
        EXPECT_EQ(wrong.download()[0], 0u) << blocks << " blocks of " << threads << " threads, " << count << " floats";
      }
    }
  }
}

TEST_F(Cluster, Latency) {
  constexpr int kRounds = 2000;
  for (const int blocks : {2, 4, 8, 16}) {
    for (const auto& [name, operation, count] : {std::tuple{"barrier", ClusterOperation::barrier, 4},
                                                 {"gather_84", ClusterOperation::gather, 84},
                                                 {"reduce_84", ClusterOperation::reduce, 84},
                                                 {"gather_1024", ClusterOperation::gather, 1024}}) {
      DeviceBuffer<unsigned> wrong(std::vector<unsigned>{0});
      DeviceBuffer<long long> clocks(1);
      if (!cuda::cluster_check(operation, blocks, 1, 256, count, kRounds, false, wrong.data(), clocks.data(),
                               nullptr)) {
        continue;
      }
      const long long cycles = clocks.download()[0] / kRounds;
      RecordProperty("metric_cycles_" + std::string(name) + "_" + std::to_string(blocks), std::to_string(cycles));
      std::printf("cluster of %2d: %-11s %5lld cycles\n", blocks, name, cycles);
      EXPECT_GT(cycles, 0);
      EXPECT_LT(cycles, 100000);
    }
  }
}

}  // namespace
}  // namespace weft
