// A kernel that computes only items of splits (paged_work_units.cuh), used in two places:
//
// In a step in which every chunk is one row: RoPE, the append to pages and attention in one launch. No key or value of
// an earlier position is written in this step, so the first copies start before the predecessor, the GEMM of q, k and
// v, has ended: as much as all rings hold, 220 KiB a multiprocessor. What the step's own rows need comes after the
// wait.
//
// In any other step on Hopper, beside its tiles (paged_hopper.cu). All that items read was complete when the kernel of
// the tiles let this one start; it waits for the tiles at its end.
//
// Over codes it follows append_to_pages() or the tiles. A warp whose first item reads nothing that a step of single rows
// appends starts its copies before it waits for them.
//
// Heads of 80 are fetched by bulk copies from Hopper on, other heads by cp.async (SlotCopy). A multiprocessor has two
// blocks of four warps. With few items, few warps of a block compute, with longer rings, and blocks without an item
// exit at once, which makes room for the successor.

#include <algorithm>
#include <cstdint>

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/paged/paged_paths.h"
#include "llmc/cuda/op/attention/paged/paged_work_units.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/attention/train/paths.h"

namespace weft::cuda {

using namespace paged;

namespace {

// Shared memory of a block. Two share a multiprocessor; each reserves 1 KiB more than it asks for.
constexpr int kMostBytes = 113 * 1024;

// Entries whose keys and values the first blocks prefetch to L2, two blocks an entry, and a limit in bytes. Those
// blocks start beside the preceding GEMM on multiprocessors that it leaves free (12 of an H200 at QKV of Pythia-2.8B).
// With many rows that GEMM is not bound by memory bandwidth, so memory has time for the prefetch.
constexpr std::int64_t kEarlyEntries = 12, kEarlyBytes = std::int64_t{32} << 20;

template <int HeadDim, SlotCopy Copy, bool Windowed, bool Codes = false>
struct DecodeTiling {
  static constexpr int HS = HeadDim;
  static constexpr SlotCopy kCopy = Copy;
  static constexpr bool kWindowed = Windowed, kCodes = Codes;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize, kBlocksPerMultiprocessor = 2;
  // Positions in a slot of a warp's ring: of codes a key block.
  static constexpr int kSlotKeys = kCodes ? kBlockKeys<HS> : kWideSlotKeys<HS>;
  static constexpr int kSlotBytes = kCodes ? CodeSlot<HS>::kBytes : SlotLayout<bf16, HS, kCopy>::bytes(kSlotKeys);
  // Slots of a warp's ring if four warps of a block compute (kRing), two (kPairRing), or one (kLongRing). At
  // most those of a span: items are looked up span by span.
  static constexpr int kMostSlots = 2 * kSpan / kSlotKeys;
  static constexpr int kBarrierBytes = kCopy == SlotCopy::threads ? 0 : kMostSlots * 8;  // bytes of a warp's mbarriers
  static constexpr int kBeginBytes = kWarps * kBarrierBytes;                             // they precede the rings
  static constexpr int kRing = std::min(kMostSlots, (kMostBytes - kBeginBytes) / kWarps / kSlotBytes);
  static constexpr int kPairRing = std::min(kMostSlots, 2 * kRing);
  static constexpr int kLongRing = std::min(kMostSlots, 3 * kRing);
  // Rings of kRing whose memory two pair rings take: a GPU of 99 KB a block has that of three.
  static constexpr int kPairNeeds = (2 * kPairRing + kRing - 1) / kRing;
  static constexpr int kRingBytes = kRing * kSlotBytes;
};

#if WEFT_BULK_COPY

// Called by all warps of a block: prefetches the keys, or the values, of an entry's earlier positions, at most of its first
// span, for all heads.
template <int HS, typename S>
__device__ __forceinline__ void prefetch_entry(const Arguments<S>& a, const PagedWorkUnit& item, bool values) {
  const int lane = threadIdx.x % kWarpSize, first = paged_split_begin(item.split);
  const int end = min(first + kSpan, item.first_position);
  const int pages = span_pages(a, a.tables[item.first_row], first / kSpan, end);
  const S* const from = values ? a.values : a.keys;
#pragma unroll 1
  for (int unit = threadIdx.x / kWarpSize; first + unit * kPageUnit < end; unit += blockDim.x / kWarpSize) {
    const int position = first + unit * kPageUnit, page = __shfl_sync(~0u, pages, unit);
    const int bytes = min(kPageUnit, end - position) * HS * static_cast<int>(sizeof(S));
#pragma unroll 1
    for (int head = lane; head < a.NKV; head += kWarpSize)
      hopper::bulk_prefetch(from + page_offset<HS>(a, page, head, position), bytes);
  }
}

#endif

template <typename S, typename Tiling, bool kAppends>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksPerMultiprocessor)
    paged_items_kernel(const __grid_constant__ Arguments<S> a) {
  // Of the two kernels for a head dimension each architecture uses one, according to how it copies; with a window always the
  // one whose threads copy, because they can leave out positions in front of the window.
  constexpr SlotCopy kUsed =
      WEFT_BULK_COPY && !Tiling::kWindowed && !Tiling::kCodes ? kFastCopy<Tiling::HS> : SlotCopy::threads;
  if constexpr (Tiling::kCopy != kUsed) {
    __trap();
  } else {
    extern __shared__ __align__(16) unsigned char shared[];
    const PagedWorkUnit* items = reinterpret_cast<const PagedWorkUnit*>(a.work + 1) + a.work->tiles;
    const int count = a.work->items * a.NKV, blocks = gridDim.x, block = blockIdx.x;
    // block 0 stays: some block must wait for the predecessors, as every kernel of a chain does
    if (block > 0 && block >= count) return;

    int warps = a.item_warps, slots = Tiling::kRing;
    if (count <= 2 * blocks) {
      warps = count <= blocks ? 1 : 2;
      slots = warps == 1 ? Tiling::kLongRing : a.item_warps >= Tiling::kPairNeeds ? Tiling::kPairRing : Tiling::kRing;
    }
    const int warp = threadIdx.x / kWarpSize, first = warp < warps ? warp * blocks + block : count;
    const unsigned ring = shared_address(shared) + Tiling::kBeginBytes + warp * slots * Tiling::kSlotBytes;
    ItemStream<S, Tiling, kAppends> stream(a, items, count, blocks * warps, first, ring, slots);
#if WEFT_BULK_COPY
    if constexpr (Tiling::kCopy == SlotCopy::bulk)
      stream.use_barriers(shared_address(shared) + warp * Tiling::kBarrierBytes);
#endif
    stream.look_up_first();
    if constexpr (Tiling::kCodes) {
      if (a.work->decodes == 0 || !stream.begins_with_earlier_positions()) wait_for_predecessors();
    }
    stream.start_assigned();
    if constexpr (Tiling::kCodes) wait_for_predecessors();
#if WEFT_BULK_COPY
    if constexpr (kAppends && !Tiling::kWindowed) {
      const int entry = block / 2;
      if (count > 2 * blocks && entry < min(a.early_entries, a.work->items))
        prefetch_entry<Tiling::HS>(a, items[entry], block % 2 == 1);
    }
#endif
    if constexpr (kAppends) wait_for_predecessors();
    launch_dependents();  // not earlier: see paged_attention() on what the successor may read
    if (warp < warps) {
      stream.start();
#pragma unroll 1
      for (int i = 0;; ++i) {
        const int n = stream.item(i);
        if (n >= count) break;
        compute_work_unit(a, items + n / a.NKV, n % a.NKV, i, stream);
      }
      const int alive = max(1, min(blocks, count));
      compute_merges<S, Tiling, kAppends>(a, warp * alive + block, warps * alive);
    }

    if constexpr (!kAppends && !Tiling::kCodes) wait_for_predecessors();
    if (count > blocks * warps) reset_cursors(a, blocks);  // otherwise the cursors have not been used
  }
}

template <typename S, int HS, SlotCopy kCopy, bool kWindowed, bool kAppends, bool kCodes = false>
void launch_with(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  using Tiling = DecodeTiling<HS, kCopy, kWindowed, kCodes>;
  constexpr const char* kName = "paged_attention (items)";
  const int most = std::min(shared_bytes_per_block(), kMostBytes);
  const int warps = std::min<int>(Tiling::kWarps, (most - Tiling::kBeginBytes) / Tiling::kRingBytes);
  const int shared = Tiling::kBeginBytes + warps * Tiling::kRingBytes;
  static_assert(Tiling::kBeginBytes + 3 * Tiling::kRingBytes <= 99 * 1024 && Tiling::kPairNeeds <= Tiling::kWarps &&
                    Tiling::kLongRing <= 3 * Tiling::kRing,
                "three warps' rings fit on every GPU, and so does a long one");
  const auto kernel = paged_items_kernel<S, Tiling, kAppends>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kName);
  Arguments<S> arguments = arguments_of(io, warps);
  arguments.early_entries = static_cast<int>(
      std::min(kEarlyEntries, kEarlyBytes / (2 * kSpan * io.shape.NKV * HS * std::int64_t{sizeof(S)})));
  const dim3 grid(resident_blocks(kernel, Tiling::kThreads, shared, device.multiprocessors, kName));
  launch_chained(kernel, grid, dim3(Tiling::kThreads), static_cast<std::size_t>(shared), stream, device.overlapping,
                 kName, arguments);
}
template <typename S, int HS, bool kAppends>
void launch_for(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  for_window(io, [&]<bool kWindowed>() {
    if constexpr (kFastCopy<HS> != SlotCopy::threads && !kWindowed) {
      if (device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9)
        return launch_with<S, HS, kFastCopy<HS>, false, kAppends>(io, device, stream);
    }
    launch_with<S, HS, SlotCopy::threads, kWindowed, kAppends>(io, device, stream);
  });
}

}  // namespace

template <typename S>
void paged_work_units(const PagedAttention<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  for_head_dimension(io.shape.HS, "paged attention", [&]<int HS>() {
    if (io.kv.fp8()) {
      return for_window(io, [&]<bool kWindowed>() {
        launch_with<S, HS, SlotCopy::threads, kWindowed, false, true>(io, device, stream);
      });
    }
    if (io.k.data != nullptr) return launch_for<S, HS, true>(io, device, stream);
    if constexpr (HS <= 128) launch_for<S, HS, false>(io, device, stream);
  });
}

template void paged_work_units<bf16>(const PagedAttention<bf16>&, const LaunchDevice&, cudaStream_t);
template void paged_work_units<fp16>(const PagedAttention<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda
