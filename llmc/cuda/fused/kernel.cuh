// The fused decode kernel: one block on each multiprocessor, all resident at once; behind the consumers' warps are those of
// producer and helper. What it does and why: decode.cu.
#pragma once

#include "llmc/cuda/fused/helper.cuh"
#include "llmc/cuda/fused/kernel.h"
#include "llmc/cuda/fused/layer.cuh"
#include "llmc/cuda/fused/producer.cuh"
#include "llmc/cuda/fused/sequential_helper.cuh"
#include "llmc/cuda/fused/sequential_layer.cuh"
#include "llmc/cuda/fused/sequential_producer.cuh"

namespace weft::cuda::fused {

template <typename K>
__global__ void __launch_bounds__((kMaxWarps + 2) * kWarpSize, 1)
    fused_decode_kernel(const __grid_constant__ ParametersOf<K> p) {
#if WEFT_BULK_COPY
  using Layer = typename Block<K>::Layer;
  extern __shared__ __align__(128) char shared[];
  __shared__ Flags flags;
  const SharedLayout& at = p.at;
  const int consumers = p.threads;
  const unsigned base = shared_address(shared);
  const Block<K> block{p,
                       flags,
                       base,
                       base + at.barriers,
                       base + at.barriers + 8 * p.stages,
                       base + at.barriers + 16 * p.stages,
                       base + at.barriers + 16 * p.stages + 8,
                       p.blocks,
                       static_cast<int>(blockIdx.x)};
  static_assert(sizeof(Layer) == kLayerBytes<K::kQuantized>);
  const int words = (p.L + 1) * static_cast<int>(sizeof(Layer)) / 8;
  auto* table = reinterpret_cast<std::uint64_t*>(shared + at.layers);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    table[i] = reinterpret_cast<const std::uint64_t*>(p.layers)[i];
  }
  const BlockRows& own = p.rows[blockIdx.x];
  for (int i = static_cast<int>(threadIdx.x); i < own.runs; i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<CopyRun*>(shared + at.copies)[i] = p.copies[own.first_run + i];
  }
  if (threadIdx.x == 0) {
    flags.own = own;
    for (int w = 0; w < kMaxWarps; ++w) flags.places[w] = make_int2(w % p.warps_k, w / p.warps_k);
    flags.abort = 0;
    flags.stop = 0;
    flags.cache_steps = 0;
    for (int s = 0; s < p.stages; ++s) {
      hopper::mbarrier_init(block.full + 8 * s, 1);
      hopper::mbarrier_init(block.empty + 8 * s, static_cast<unsigned>(consumers / kWarpSize));
    }
    hopper::mbarrier_init(block.query_here, 1);
    hopper::mbarrier_init(block.item_done, K::kSequential ? 1u : static_cast<unsigned>(consumers / kWarpSize));
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x), other = thread - consumers;
  if (other < 0) {
#if WEFT_WGMMA  // elsewhere they have kLaunchRegisters
    if constexpr (K::kSequential) hopper::increase_registers<kConsumerRegisters<K::kQuantized>>();
#endif
    Consumer<K> consumer(block, shared);
    if constexpr (K::kSequential) {
      consumer.run_sequential();
    } else {
      consumer.run();
    }
    return;
  }
#if WEFT_WGMMA
  if constexpr (K::kSequential) hopper::decrease_registers<kOtherRegisters<K::kQuantized>>();
#endif
  if (other == 0) {
    Producer<K> producer{block, reinterpret_cast<const Layer*>(shared + at.layers),
                         reinterpret_cast<const CopyRun*>(shared + at.copies)};
    producer.run(flags.own);
  } else if (other >= kWarpSize && other < 2 * kWarpSize) {
    Helper<K> helper{block, shared, at, thread % kWarpSize, consumers / kWarpSize};
    if constexpr (K::kSequential) {
      helper.run_sequential();
    } else {
      helper.run();
    }
  }
#else
  __trap();  // fused_decode_unsupported_reason() keeps such GPUs away
#endif
}

// Defines fused_kernel() or fused_sequential_kernel() for matrices in the storage type S: four kernels, with 1 or 2 row
// loads, each with and without instruments.
#define WEFT_FUSED_KERNELS(function, Variant, S)                                                                  \
  template <>                                                                                                     \
  const void* function<S, void>(int row_loads, bool instrumented) {                                               \
    const auto of = [](auto variant) {                                                                            \
      return reinterpret_cast<const void*>(fused_decode_kernel<decltype(variant)>);                               \
    };                                                                                                            \
    if (row_loads == 1) return instrumented ? of(Variant<S, void, 1, true>()) : of(Variant<S, void, 1, false>()); \
    return instrumented ? of(Variant<S, void, 2, true>()) : of(Variant<S, void, 2, false>());                     \
  }

// The same for quantised matrices: two kernels, always without instruments. (Those cost 1 us a layer even where nothing is
// recorded, since each stamp waits for what it would write.)
#define WEFT_QUANTIZED_FUSED_KERNELS(function, Variant, S, Format)                                   \
  template <>                                                                                        \
  const void* function<S, Format>(int row_loads, bool) {                                             \
    const auto of = [](auto variant) {                                                               \
      return reinterpret_cast<const void*>(fused_decode_kernel<decltype(variant)>);                  \
    };                                                                                               \
    return row_loads == 1 ? of(Variant<S, Format, 1, false>()) : of(Variant<S, Format, 2, false>()); \
  }

}  // namespace weft::cuda::fused
