// The device's side of Ahead (rows_matmul_ahead.h).
#pragma once

#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/op/rows_matmul_ahead.h"

namespace weft::cuda {

#if WEFT_BULK_COPY

class AskAhead {
 public:
  // Reads the list, early.
  __device__ explicit AskAhead(const Ahead& ahead) : ahead_(ahead), first_page_(0), count_(ahead.count) {
    if (ahead.list != nullptr) first_page_ = ahead.list[0], count_ = ahead.list[1];
  }
  __device__ bool any() const { return count_ > 0 && ahead_.most_bytes > 0; }

  // A warp: the share number `share` of `shares`, in chunks.
  __device__ void ask(int share, int shares) const {
    constexpr int kChunk = 8 << 10;
    const int chunks = static_cast<int>(ceil_div(ahead_.bytes, std::int64_t{kChunk}));  // of a piece
    const int tensors = ahead_.second == nullptr ? 1 : 2, lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int all = min(count_ * tensors * chunks, ahead_.most_bytes / kChunk);
#pragma unroll 1
    for (int i = share + lane * shares; i < all; i += kWarpSize * shares) {
      const int piece = i / (tensors * chunks);
      const std::int64_t at = ahead_.pages == nullptr ? piece : ahead_.pages[first_page_ + piece];
      const std::int64_t offset = i % chunks * std::int64_t{kChunk};
      const void* const tensor = i / chunks % tensors == 0 ? ahead_.first : ahead_.second;
      hopper::bulk_prefetch(static_cast<const char*>(tensor) + at * ahead_.stride + offset,
                            static_cast<unsigned>(min(std::int64_t{kChunk}, ahead_.bytes - offset)));
    }
  }

 private:
  const Ahead& ahead_;
  int first_page_, count_;
};

#endif

}  // namespace weft::cuda
