// Where a producer or a consumer stands in a ring of buffers in shared memory (the stages of a pipeline).
#pragma once

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

// Each role keeps positions of its own and advances them past every stage in the same order. `phase` is the parity of
// the rounds that the ring has made, as mbarriers count theirs: a consumer waits until the phase `phase` of its stage's
// full barrier is complete, a producer until the phase `phase ^ 1` of the empty barrier is (in the first round that wait
// returns at once).
struct RingPosition {
  int stage = 0;
  unsigned phase = 0;

  // The next stage of `stages`.
  __device__ void advance(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  // As `steps` calls of the above.
  __device__ void advance(int stages, int steps) {
    stage += steps;
    phase ^= static_cast<unsigned>(stage / stages) & 1;
    stage %= stages;
  }
  // The position of step `step` >= 0, counted from the beginning.
  __device__ static RingPosition at(int step, int stages) {
    return {step % stages, static_cast<unsigned>(step / stages % 2)};
  }
};

}  // namespace weft::cuda
