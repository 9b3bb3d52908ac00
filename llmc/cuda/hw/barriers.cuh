// The mbarriers of a ring of buffers in shared memory: a full and an empty one for every stage.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/ring.cuh"

namespace weft::cuda::hopper {

// What mbarriers occupy in shared memory, for the struct that lays it out.
using BarrierStorage = std::uint64_t;
template <int Stages>
struct RingBarrierStorage {
  BarrierStorage full[Stages], empty[Stages];
};

#if WEFT_BULK_COPY

// By its address. The full barrier of a stage completes a phase when the producer has filled the stage, the empty one
// when all consumers have given it back. Both are addresses for the functions of hopper.cuh.
class RingBarriers {
 public:
  // `storage`: of RingBarrierStorage<stages>, or of 2 * stages mbarriers.
  __device__ RingBarriers(unsigned storage, int stages)
      : full_(storage), empty_(storage + static_cast<unsigned>(stages) * sizeof(BarrierStorage)) {}

  __device__ unsigned full(int stage) const { return full_ + stage * static_cast<int>(sizeof(BarrierStorage)); }
  __device__ unsigned empty(int stage) const { return empty_ + stage * static_cast<int>(sizeof(BarrierStorage)); }

  // One thread, for each stage: how many arrivals fill it, how many empty it.
  __device__ void init(int stage, unsigned full_arrivals, unsigned empty_arrivals) const {
    mbarrier_init(full(stage), full_arrivals);
    mbarrier_init(empty(stage), empty_arrivals);
  }
  // A consumer: until the stage is filled.
  __device__ void wait_full(RingPosition position) const { mbarrier_wait(full(position.stage), position.phase); }
  // The producer: until the consumers have given back what the stage held before; at once in the first round.
  __device__ void wait_empty(RingPosition position) const { mbarrier_wait(empty(position.stage), position.phase ^ 1); }

 private:
  unsigned full_, empty_;
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::hopper
