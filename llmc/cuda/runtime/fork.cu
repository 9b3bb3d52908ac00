#include "llmc/cuda/runtime/fork.h"

#include <algorithm>
#include <atomic>

#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

constexpr std::int64_t kLongestDelay = 1'000'000;  // microseconds; an upper bound, so that a delay cannot hang

std::atomic<std::int64_t> delays[static_cast<int>(DelayPoint::count)];

__global__ void spin_kernel(std::uint64_t nanoseconds) {
  std::uint64_t start = 0, now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

}  // namespace

void set_stream_delay(DelayPoint point, std::int64_t microseconds) {
  delays[static_cast<int>(point)] = std::clamp<std::int64_t>(microseconds, 0, kLongestDelay);
}

void delay_point(cudaStream_t stream, DelayPoint point) {
  const std::int64_t microseconds = delays[static_cast<int>(point)].load(std::memory_order_relaxed);
  if (microseconds == 0) return;
  spin_kernel<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(microseconds) * 1000);
  check_launch("spin_kernel");
}

void fork_stream(cudaStream_t from, cudaStream_t to, cudaEvent_t event, const char* action) {
  check(cudaEventRecord(event, from), action);
  check(cudaStreamWaitEvent(to, event), action);
  delay_point(to, DelayPoint::forked);
}

}  // namespace weft::cuda
