// The fused decode kernel. Private to fused_decode.cu, which says what it does and why.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/fused/helper.cuh"
#include "llmc/cuda/fused/stream.cuh"

namespace weft::cuda::fused {

// One block on each multiprocessor, all of them resident at once; the last two warps are producer and helper.
template <typename S, int QC>
__global__ void __launch_bounds__((kMaxWarps + 2) * kWarpSize, 1)
    fused_decode_kernel(const __grid_constant__ Parameters<S> p) {
#if WEFT_BULK_COPY
  extern __shared__ __align__(128) char shared[];
  __shared__ Flags flags;
  const SharedLayout at = shared_layout(p);
  const int consumers = p.warps_k * p.warps_r * kWarpSize;
  const unsigned base = shared_address(shared);
  const Common<S> common{p,
                         flags,
                         base,
                         base + at.barriers,
                         base + at.barriers + 8 * p.stages,
                         base + at.barriers + 16 * p.stages,
                         base + at.barriers + 16 * p.stages + 8,
                         static_cast<int>(gridDim.x),
                         static_cast<int>(blockIdx.x)};
  const int words = (p.L + 1) * static_cast<int>(sizeof(Layer<S>) / 8);
  auto* table = reinterpret_cast<std::uint64_t*>(shared + at.layers);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    table[i] = reinterpret_cast<const std::uint64_t*>(p.layers)[i];
  }
  if (threadIdx.x == 0) {
    flags.abort = 0;
    flags.stop = 0;
    flags.cache_steps = 0;
    for (int s = 0; s < p.stages; ++s) {
      hopper::mbarrier_init(common.full + 8 * s, 1);
      hopper::mbarrier_init(common.empty + 8 * s, static_cast<unsigned>(consumers / kWarpSize));
    }
    hopper::mbarrier_init(common.query_here, 1);
    hopper::mbarrier_init(common.item_done, static_cast<unsigned>(consumers / kWarpSize));
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= consumers + kWarpSize) {
    Helper<S> helper{common, shared, at, static_cast<int>(threadIdx.x) % kWarpSize, consumers / kWarpSize};
    helper.run();
    return;
  }
  if (static_cast<int>(threadIdx.x) >= consumers) {
    if (static_cast<int>(threadIdx.x) == consumers) {
      Producer<S> producer{common, reinterpret_cast<const Layer<S>*>(shared + at.layers), {}, {}, 0, false};
      producer.run(p.shares[blockIdx.x]);
    }
    return;
  }
  Consumer<S, QC> consumer(common, shared, at);
  consumer.run();
#else
  __trap();  // fused_decode_refusal() keeps such GPUs away
#endif
}

}  // namespace weft::cuda::fused
