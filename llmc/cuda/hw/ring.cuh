// The position of a producer or a consumer in a ring of buffers in shared memory (the stages of a pipeline).
#pragma once

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

// Each role keeps its own position and advances it past every stage in the same order. `phase` is the parity of the
// rounds that the ring has made, as mbarriers count phases: a consumer waits for phase `phase` of its stage's full
// barrier, a producer for phase `phase ^ 1` of the empty barrier (in the first round that wait returns at once).
struct RingPosition {
  int stage = 0;
  unsigned phase = 0;

  // Moves to the next of `stages` stages.
  __device__ void advance(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  // Moves on by `steps`.
  __device__ void advance(int stages, int steps) {
    stage += steps;
    phase ^= static_cast<unsigned>(stage / stages) & 1;
    stage %= stages;
  }
  // The same without a division, for few rounds of the ring.
  __device__ void advance_a_little(int stages, int steps) {
    for (stage += steps; stage >= stages; stage -= stages) phase ^= 1;
  }
  // The position of step `step` >= 0, counted from the beginning.
  __device__ static RingPosition at(int step, int stages) {
    return {step % stages, static_cast<unsigned>(step / stages % 2)};
  }
};

}  // namespace weft::cuda
