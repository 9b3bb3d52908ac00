// What the producer, the helper and the consumers of a block share: the variant of the kernel that is compiled, the
// barriers, and waits with a time limit.
#pragma once

#include <cstdint>
#include <type_traits>

#include "llmc/cuda/fused/parameters.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/memory_order.cuh"

namespace weft::cuda::fused {

// What a kernel is compiled for: the storage type; the format of quantised matrices, or void where they are in the storage
// type; the 16-byte loads that a lane makes of a row of C elements (KernelShape::row_loads); and whether it is instrumented
// for measurements and tests (Parameters::instruments).
template <typename Storage, typename Matrices, int kLoads, bool kWithInstruments>
struct Variant {
  using S = Storage;
  using Format = Matrices;
  static constexpr int kRowLoads = kLoads;
  static constexpr bool kQuantized = !std::is_void_v<Matrices>;
  static constexpr bool kInstrumented = kWithInstruments;
  static constexpr bool kSequential = false;  // false: layers as in layer.cuh; true: as in sequential_layer.cuh
};
template <typename Storage, typename Matrices, int kLoads, bool kWithInstruments>
struct SequentialVariant : Variant<Storage, Matrices, kLoads, kWithInstruments> {
  static constexpr bool kSequential = true;
};

template <typename K>
using ParametersOf = std::conditional_t<K::kSequential, SequentialParameters<typename K::S>, Parameters<typename K::S>>;

#if WEFT_BULK_COPY

// Tagged values carry their tag in the lowest bit: see TaggedValue.
__device__ inline TaggedValue tagged(float value, unsigned step) {
  return (__float_as_uint(value) & ~1u) | (step & 1);
}
__device__ inline bool has_tag(TaggedValue value, unsigned step) {
  return ((value ^ step) & 1) == 0;
}
__device__ inline float untagged(TaggedValue value) {
  return __uint_as_float(value & ~1u);
}

// A wait exceeded the time limit: tells the host and ends all blocks.
static __device__ __noinline__ void time_out(Control* control, HostWords* host, unsigned sequence,
                                             volatile int* abort) {
  if (atomicExch(&control->abort.value, 1u) == 0) {
    store_release_system(&host->timeout, static_cast<std::uint64_t>(sequence) << 32);
  }
  *abort = 1;
}

template <typename K>
struct Block {
  using Parameters = ParametersOf<K>;
  using Layer = fused::Layer<typename K::S, K::kQuantized>;

  const Parameters& p;
  Flags& flags;
  unsigned ring, full, empty;      // shared-memory addresses: the stages, and two mbarriers for each of them
  unsigned query_here, item_done;  // shared-memory addresses of the mbarriers between helper and consumers
  const int& blocks;               // in the kernel of many tokens in constant memory, where it takes no register
  int block;

  // Repeats try_once() until it returns true. Returns false if the launch is aborted, by this block's time limit or
  // another's.
  template <typename Try>
  __device__ bool wait_for(const Try& try_once) const {
    const volatile int* abort = &flags.abort;
    std::uint64_t start = 0;
#pragma unroll 1
    for (unsigned n = 1;; ++n) {
      if (try_once()) return true;
      if (*abort != 0) return false;
      if (n % 1024 != 0) continue;
      const std::uint64_t now = global_time();
      if (start == 0) start = now;
      if (load_relaxed(&p.control->abort.value) != 0) *const_cast<volatile int*>(&flags.abort) = 1;
      if (now - start > p.timeout_ns) time_out(p.control, p.host, p.sequence, &flags.abort);
    }
  }
  __device__ bool wait_barrier(unsigned barrier, unsigned phase) const {
    return wait_for([&] { return hopper::mbarrier_try(barrier, phase); });
  }
  __device__ bool wait_counter(const Counter& counter, unsigned target) const {
    return wait_for([&] { return static_cast<int>(load_acquire(&counter.value) - target) >= 0; });
  }
  // The first item of attention of this block in a layer; may be past the last item. The block's next items are
  // `blocks` further on each.
  __device__ int first_work_unit(int layer) const {
    return (block + layer * p.item_shift) % blocks;
  }

  __device__ bool layer_only() const {
    if constexpr (K::kInstrumented) return p.instruments.layer_only;
    return false;
  }
};

struct Positions {
  int begin, end;
};
// The cached positions of a split of the context. Splits begin at multiples of `unit`.
template <int unit = 1>
__device__ inline Positions positions_of(int position, int splits, int split) {
  const int each = ((position + splits - 1) / splits + unit - 1) / unit * unit;
  const int begin = min(split * each, position);
  return {begin, min(begin + each, position)};
}
// How many positions from `first` on form one chunk: a chunk lies in one page.
__device__ inline int chunk_of(const Sizes& p, int first, int end) {
  return min(min(end - first, p.chunk_positions), p.page_size - first % p.page_size);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
