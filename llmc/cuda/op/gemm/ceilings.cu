// Measures plain reads and copies of memory, and a large GEMM.

#include "llmc/cuda/op/gemm/ceilings.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/stream.h"

namespace weft::cuda {

namespace {

constexpr int kInFlight = 8;  // 16-byte loads in flight a thread

__global__ void __launch_bounds__(1024) read_kernel(const int4* data, std::int64_t count, int* never) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  int4 seen = make_int4(0, 0, 0, 0);
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (kInFlight - 1) * step < count; i += kInFlight * step) {
    int4 value[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) value[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      seen.x ^= value[j].x;
      seen.y ^= value[j].y;
      seen.z ^= value[j].z;
      seen.w ^= value[j].w;
    }
  }
  // The memory is zero, so nothing is written; the compiler cannot know that and keeps the loads.
  if ((seen.x | seen.y | seen.z | seen.w) != 0) *never = 1;
}

float median_ms(const DeviceArena& data, std::int64_t count, int blocks, int threads, cudaStream_t stream, int* never) {
  constexpr int kPasses = 7;
  const Event start, stop;
  std::vector<float> times;
  for (int pass = 0; pass <= kPasses; ++pass) {
    check(cudaEventRecord(start, stream), "event");
    read_kernel<<<blocks, threads, 0, stream>>>(data.at<int4>(0), count, never);
    check_launch("read_kernel");
    check(cudaEventRecord(stop, stream), "event");
    check(cudaEventSynchronize(stop), "reading memory");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "event");
    if (pass > 0) times.push_back(ms);  // the first one warms up
  }
  std::nth_element(times.begin(), times.begin() + kPasses / 2, times.end());
  return times[kPasses / 2];
}

// The shortest of a few runs, in seconds.
template <typename Launch>
double shortest(cudaStream_t stream, const Launch& launch) {
  constexpr int kRuns = 12;
  // The GPU rests first: after a minute of training its power limit holds the clock below what a single GEMM reaches.
  check(cudaStreamSynchronize(stream), "ceilings");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const Event start, stop;
  float best = 0;
  for (int i = 0; i < kRuns; ++i) {
    check(cudaEventRecord(start, stream), "ceilings");
    launch();
    check(cudaEventRecord(stop, stream), "ceilings");
    check(cudaEventSynchronize(stop), "ceilings");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "ceilings");
    if (i == 1 || (i > 1 && ms < best)) best = ms;  // the first one warms up
  }
  return best * 1e-3;
}

}  // namespace

double measure_read_bandwidth(double gigabytes) {
  constexpr std::uint64_t kUnit = 64 << 20;
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for the free GPU memory");
  const double wanted = std::min(gigabytes * 1e9, 0.5 * static_cast<double>(free_bytes));
  MemoryPlan plan("bandwidth measurement");
  plan.add(std::max<std::uint64_t>(static_cast<std::uint64_t>(wanted) / kUnit, 1) * kUnit);
  plan.add(sizeof(int));
  DeviceArena data(plan);
  const Stream stream;
  data.clear(stream);
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const std::uint64_t bytes = data.bytes() / kUnit * kUnit;
  double best = 0;
  for (const auto& [per_multiprocessor, threads] : {std::pair(1, 1024), std::pair(2, 1024), std::pair(4, 512)}) {
    const int blocks = multiprocessors * per_multiprocessor;
    // A multiple of what all threads load per iteration, so that every load of the loop is in range.
    const std::int64_t round = static_cast<std::int64_t>(blocks) * threads * kInFlight;
    const std::int64_t count = static_cast<std::int64_t>(bytes / sizeof(int4)) / round * round;
    const float ms = median_ms(data, count, blocks, threads, stream, data.at<int>(bytes));
    best = std::max(best, static_cast<double>(count) * sizeof(int4) / ms * 1e-6);
  }
  return best;
}

std::pair<double, double> measure_ceilings(cudaStream_t stream) {
  constexpr std::int64_t kSquare = 8192;
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "ceilings");
  MemoryPlan plan("ceilings");
  const std::uint64_t matrix = kSquare * kSquare * sizeof(bf16);
  const std::uint64_t half = std::clamp<std::uint64_t>(free_bytes / 4 / matrix * matrix, 2 * matrix, 8 * matrix);
  const std::uint64_t first = plan.add(half), second = plan.add(half);
  const DeviceArena arena(plan);
  double bytes_per_s = 0, flops_per_s = 0;
  {
    const auto copy = [&] {
      check(cudaMemcpyAsync(arena.at<void>(second), arena.at<void>(first), half, cudaMemcpyDeviceToDevice, stream),
            "ceilings");
    };
    bytes_per_s = 2 * static_cast<double>(half) / shortest(stream, copy);
  }
  Matmul matmul(stream);
  const MatmulShape shape{Gemm::forward, kSquare, kSquare, kSquare, CUDA_R_16BF, Accumulate::no, false};
  matmul.fill_random(arena.at<bf16>(first), kSquare * kSquare);
  matmul.fill_random(arena.at<bf16>(first) + kSquare * kSquare, kSquare * kSquare);
  matmul.prepare(shape);
  const auto gemm = [&] {
    matmul.forward<bf16>(arena.at<bf16>(second), arena.at<bf16>(first), arena.at<bf16>(first) + kSquare * kSquare,
                         nullptr, kSquare, kSquare, kSquare);
  };
  flops_per_s = 2.0 * kSquare * kSquare * kSquare / shortest(stream, gemm);
  return {bytes_per_s, flops_per_s};
}

}  // namespace weft::cuda
