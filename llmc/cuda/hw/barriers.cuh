// The mbarriers of a ring of buffers in shared memory: a full and an empty one for every stage.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/ring.cuh"

namespace weft::cuda::hopper {

// The storage of mbarriers, for structs that lay out shared memory.
using BarrierStorage = std::uint64_t;
template <int Stages>
struct RingBarrierStorage {
  BarrierStorage full[Stages], empty[Stages];
};

#if WEFT_BULK_COPY

// The barriers of a ring, by their shared-memory addresses. A stage's full barrier completes a phase when the producer
// has filled the stage, its empty barrier when all consumers have released it. full() and empty() return addresses for
// the functions of hopper.cuh.
class RingBarriers {
 public:
  // `storage`: address of a RingBarrierStorage<stages>, or of 2 * stages mbarriers.
  __device__ RingBarriers(unsigned storage, int stages)
      : full_(storage), empty_(storage + static_cast<unsigned>(stages) * sizeof(BarrierStorage)) {}

  __device__ unsigned full(int stage) const { return full_ + stage * static_cast<int>(sizeof(BarrierStorage)); }
  __device__ unsigned empty(int stage) const { return empty_ + stage * static_cast<int>(sizeof(BarrierStorage)); }

  // Called by one thread for each stage: how many arrivals fill it and how many release it.
  __device__ void init(int stage, unsigned full_arrivals, unsigned empty_arrivals) const {
    mbarrier_init(full(stage), full_arrivals);
    mbarrier_init(empty(stage), empty_arrivals);
  }
  // Consumer: waits until the stage is full.
  __device__ void wait_full(RingPosition position) const { mbarrier_wait(full(position.stage), position.phase); }
  // Producer: waits until the consumers have released the stage's previous contents; returns at once in the first
  // round.
  __device__ void wait_empty(RingPosition position) const { mbarrier_wait(empty(position.stage), position.phase ^ 1); }
  // The phases that wait_full() and wait_empty() wait for.
  __device__ BarrierPhase full_phase(RingPosition position) const { return {full(position.stage), position.phase}; }
  __device__ BarrierPhase empty_phase(RingPosition position) const {
    return {empty(position.stage), position.phase ^ 1};
  }

 private:
  unsigned full_, empty_;
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::hopper
