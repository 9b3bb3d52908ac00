// The step kernel: one block on each multiprocessor, all resident at once; the last two warps are producer and helper.
// What it does and why: step.cu.
#pragma once

#include "llmc/cuda/fused/step_attention.cuh"
#include "llmc/cuda/fused/step_kernel.h"
#include "llmc/cuda/fused/step_norm.cuh"
#include "llmc/cuda/fused/step_producer.cuh"

namespace weft::cuda::fused {

template <typename S, int kRows>
__global__ void __launch_bounds__((kMaxWarps + 2) * kWarpSize, 1)
    fused_step_kernel(const __grid_constant__ StepParameters<S> p) {
#if WEFT_BULK_COPY
  using Layer = typename Block<StepVariant<S>>::Layer;
  extern __shared__ __align__(128) char shared[];
  __shared__ Flags flags;
  auto& constants = *reinterpret_cast<StepConstants*>(shared);
  const StepLayout at = step_layout(p, kRows);
  const int consumers = p.warps_k * p.warps_r * kWarpSize;
  const unsigned base = shared_address(shared);
  const Block<StepVariant<S>> block{p,
                                    flags,
                                    base + kStepConstantBytes,
                                    base + at.barriers,
                                    base + at.barriers + 8 * p.stages,
                                    base + at.barriers + 16 * p.stages,
                                    base + at.barriers + 16 * p.stages + 8 * kItemSlots,
                                    static_cast<int>(gridDim.x),
                                    static_cast<int>(blockIdx.x)};
  static_assert(sizeof(Layer) == kLayerBytes<false>);
  const int words = (p.L + 1) * kLayerBytes<false> / 8;
  auto* table = reinterpret_cast<std::uint64_t*>(shared + at.layers);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    table[i] = reinterpret_cast<const std::uint64_t*>(p.layers)[i];
  }
  if (threadIdx.x == 0) {
    constants = {at, p.rows[blockIdx.x]};
    flags.abort = 0;
    flags.stop = 0;
    const auto warps = static_cast<unsigned>(consumers / kWarpSize);
    for (int s = 0; s < p.stages; ++s) {
      hopper::mbarrier_init(block.full + 8 * s, 1);
      hopper::mbarrier_init(block.empty + 8 * s, warps);
    }
    for (int s = 0; s < kItemSlots; ++s) {
      hopper::mbarrier_init(block.query_here + 8 * s, 1);
      hopper::mbarrier_init(block.item_done + 8 * s, warps);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= consumers + kWarpSize) {
    StepHelper<S, kRows> helper{block, p, shared, at, static_cast<int>(threadIdx.x) % kWarpSize, consumers / kWarpSize};
    helper.run();
    return;
  }
  if (static_cast<int>(threadIdx.x) >= consumers) {
    if (static_cast<int>(threadIdx.x) == consumers) {
      Producer<StepVariant<S>> ring{block, reinterpret_cast<const Layer*>(shared + at.layers), nullptr};
      StepProducer<S, kRows> producer{ring, p};
      producer.run(p.rows[blockIdx.x]);
    }
    return;
  }
  StepConsumer<S, kRows> consumer(block, p, shared, constants.at, constants.own);
  consumer.run();
#else
  __trap();  // fused_step_unsupported_reason() keeps such GPUs away
#endif
}

// Defines fused_step_kernel_of() for this storage type.
#define WEFT_FUSED_STEP_KERNEL(S)                                                      \
  template <>                                                                          \
  const void* fused_step_kernel_of<S>(int rows) {                                      \
    return rows == 1 ? reinterpret_cast<const void*>(fused_step_kernel<S, 1>)          \
                     : reinterpret_cast<const void*>(fused_step_kernel<S, kStepRows>); \
  }

}  // namespace weft::cuda::fused
