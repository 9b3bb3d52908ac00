// Items of splits (paged_work.h): a warp computes one split of up to 16 rows, with its own ring of key and value
// blocks.
//
// kAppends: each chunk is one row, whose query and key are not rotated yet and whose key and value are not in their page
// yet. Every item rotates the queries that it reads. The items of the row's own split also rotate its key and put key
// and value at their place in shared memory, rounded as the page stores them, so that they are multiplied as if they
// came from the page; the first of these items writes them to the page.
//
// Tiling::kCodes: pages hold e4m3, and so do the slots of the ring (code_slots.cuh).
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/barriers.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/memory_order.cuh"
#include "llmc/cuda/op/attention/paged/code_slots.cuh"
#include "llmc/cuda/op/attention/paged/paged_recurrence.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda::paged {

// Positions in a slot of a warp's ring, of rows in 16 bits. Of codes a slot has a key block.
template <int HS>
constexpr int kWideSlotKeys = HS <= 128 ? 32 : 16;

// How keys and values are copied to a slot.
enum class SlotCopy {
  threads,  // cp.async of 16 bytes a lane, to padded rows
  bulk,     // one bulk copy of all rows in a page, to rows without padding
};
// Bulk copies where unpadded rows fall into different banks: rows of 160 bytes, at least for four of the eight that a
// phase of ldmatrix reads. For heads of 64 and 128, tensor copies with swizzling were not faster than cp.async.
template <int HS>
constexpr SlotCopy kFastCopy = HS == 80 ? SlotCopy::bulk : SlotCopy::threads;
template <typename T, int HS, SlotCopy kCopy>
using SlotLayout = Tile<T, HS, kCopy == SlotCopy::bulk ? 0 : 8>;

// Starts a warp's copy of positions first to first + Rows - 1 of one span, head and tensor; positions from `end` on, and
// with kWindowed those before `begin`, become zeros. Works in units of kPageUnit positions, which are contiguous in their page.
template <int HS, int Rows, bool kWindowed, typename S>
__device__ __forceinline__ void load_units(const Arguments<S>& a, const S* from, unsigned tile, int pages, int kv_head,
                                           int first, int begin, int end, std::uint64_t policy) {
  using T = Tile<S, HS>;
  constexpr int kUnitChunks = kPageUnit * T::kChunks;
  static_assert(Rows % kPageUnit == 0 && kUnitChunks % kWarpSize == 0);
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int unit = 0; unit < Rows / kPageUnit; ++unit) {
    const int position = first + unit * kPageUnit;
    const int page = __shfl_sync(~0u, pages, position % kSpan / kPageUnit);
    const S* at = from + page_offset<HS>(a, page, kv_head, position) + lane * 8;
    const int chunks = (end - position) * T::kChunks - lane;  // from this lane's first one on
#pragma unroll
    for (int i = 0; i < kUnitChunks / kWarpSize; ++i) {
      const int index = lane + i * kWarpSize, row = unit * kPageUnit + index / T::kChunks;
      const bool inside = i * kWarpSize < chunks && (!kWindowed || position + index / T::kChunks >= begin);
      copy_async(tile + row * T::kRowBytes + index % T::kChunks * 16, at + i * kWarpSize * 8, inside, policy);
    }
  }
}

// ---- appended rows
// -----------------------------------------------------------------------------------------------------
// The row's key and value, in the words that WarpRotation assigns to this lane.
template <typename S, int HS>
struct AppendedRow {
  using Rotation = WarpRotation<S, HS>;
  static constexpr int kWords = Rotation::kWords;
  unsigned key[kWords], value[kWords];

  __device__ void store(S* k, S* v) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (Rotation::word(i) >= HS / 2) break;
      reinterpret_cast<unsigned*>(k)[Rotation::word(i)] = key[i];
      reinterpret_cast<unsigned*>(v)[Rotation::word(i)] = value[i];
    }
  }
  // Writes key or value to a row of a slot; called by all lanes.
  template <typename Slot>
  __device__ __forceinline__ void put(bool of_key, unsigned slot, int row) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = Rotation::word(i);
      const unsigned to = slot + Slot::offset(row, word / 4) + word % 4 * 4;
      if (word < HS / 2) asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(of_key ? key[i] : value[i]) : "memory");
    }
  }
};

// Zeroes a slot's rows from `row` on.
template <typename Slot, int HS, int kSlotKeys>
__device__ __forceinline__ void clear_rows(unsigned slot, int row) {
#pragma unroll 1
  for (int i = row * (HS / 8) + threadIdx.x % kWarpSize; i < kSlotKeys * (HS / 8); i += kWarpSize)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(slot + Slot::offset(i / (HS / 8), i % (HS / 8))),
                 "r"(0)
                 : "memory");
}

// Q = the rotated queries of an item whose chunk is one row, which are consecutive heads. The next head is loaded while
// one is rotated. The loop is not unrolled: instructions are fetched from memory at each launch, and here that costs
// more than the arithmetic.
template <typename S, int HS>
__device__ __forceinline__ void load_rotated(RegisterOperand<S, HS, 1>& Q, const Arguments<S>& a, const S* head,
                                             int count, const WarpRotation<S, HS>& rotation) {
  using Rotation = WarpRotation<S, HS>;
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int k = 0; k < HS / 16; ++k) Q.at[0][k] = {};
  typename Rotation::Head loaded = rotation.load(head);
#pragma unroll 1
  for (int row = 0; row < count; ++row) {
    unsigned words[Rotation::kWords];
#pragma unroll
    for (int w = 0; w < Rotation::kWords; ++w) words[w] = rotation.rotate(loaded, w);
    head += a.q_head_stride;
    if (row + 1 < count) loaded = rotation.load(head);
    // The lanes of the row's quad receive the words that RegisterOperand::load() would load.
    const bool upper = row == g, lower = row == g + 8;
#pragma unroll
    for (int k = 0; k < HS / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int word = k * 8 + j * 4;  // and the three after it
        const unsigned taken = __shfl_sync(~0u, words[word / kWarpSize], word % kWarpSize + t);
        if (upper) Q.at[0][k].word[2 * j] = taken;
        if (lower) Q.at[0][k].word[2 * j + 1] = taken;
      }
    }
  }
}

// ---- results of splits
// -------------------------------------------------------------------------------------------------
// Where a row's slot lies for one K/V head.
template <int HS, typename S>
__device__ float* slot_of(const Arguments<S>& a, std::int64_t slot, int kv_head) {
  return a.partials + (slot * a.NKV + kv_head) * kSlotFloats<HS>;
}
// The counter of an item's finished splits.
template <typename S>
__device__ int* finished_splits(const Arguments<S>& a, const PagedWorkUnit& item, int kv_head) {
  return a.merged + static_cast<std::int64_t>(item.partials) * a.NKV + kv_head;
}

// Stores the state of one split for the warp that will merge the splits.
template <typename S, int HS>
__device__ void store_partial(const Arguments<S>& a, const SplitState<S, HS, 1>& state, int rows,
                              std::int64_t first_slot, int kv_head) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + g;
    if (row >= rows) continue;
    float* slot = slot_of<HS>(a, first_slot + row, kv_head);
#pragma unroll
    for (int n = 0; n < HS / 8; ++n)
      *reinterpret_cast<float2*>(slot + n * 8 + t * 2) = {state.O.at[0][n][half * 2], state.O.at[0][n][half * 2 + 1]};
    if (t == 0) *reinterpret_cast<float2*>(slot + HS) = {state.maximum[0][half], state.sum[0][half]};
  }
}

// The splits of an item's rows: which the list has, and of those the ones that this layer's window reaches.
struct RowSplits {
  int listed, first, count;  // listed: number in the list; first: number of the first one that is seen; count: seen
  std::int64_t first_slot;   // of the first one that is seen

  template <bool kWindowed, typename S, typename Rows>
  static __device__ RowSplits of(const Arguments<S>& a, const PagedWorkUnit& item, const Rows& rows) {
    const int end = paged_split_of(rows.end() - 1) + 1;
    if constexpr (!kWindowed) return {end, 0, end, item.partials};
    const int first = paged_split_of(rows.first_visible(0, a.window));
    const int first_listed = a.list_window > 0 ? paged_split_of(rows.first_visible(0, a.list_window)) : 0;
    return {end - first_listed, first, end - first,
            item.partials + static_cast<std::int64_t>(first - first_listed) * rows.count};
  }
  __device__ bool merged_by_one() const { return listed <= kPagedSplitsOfOne; }
};

// Merges up to kPagedSplitsOfOne splits of an item's rows, in order; a lane computes four consecutive dimensions of a row.
template <typename S, int HS, typename Rows>
__device__ void merge_few(const Arguments<S>& a, const Rows& rows, const RowSplits& splits, int kv_head) {
  for (int i = threadIdx.x % kWarpSize; i < rows.count * (HS / 4); i += kWarpSize) {
    const int row = i / (HS / 4), d = i % (HS / 4) * 4;
    float4 added[kPagedSplitsOfOne];
    float2 of_row[kPagedSplitsOfOne];  // maximum, sum
#pragma unroll
    for (int s = 0; s < kPagedSplitsOfOne; ++s) {  // all loads before the first merge
      const std::int64_t at = splits.first_slot + min(s, splits.count - 1) * rows.count + row;
      const float* slot = slot_of<HS>(a, at, kv_head);
      added[s] = __ldcg(reinterpret_cast<const float4*>(slot + d));
      of_row[s] = __ldcg(reinterpret_cast<const float2*>(slot + HS));
    }
    float o[4] = {added[0].x, added[0].y, added[0].z, added[0].w}, maximum = of_row[0].x, sum = of_row[0].y;
#pragma unroll
    for (int s = 1; s < kPagedSplitsOfOne; ++s) {
      if (s >= splits.count) break;
      const float from[4] = {added[s].x, added[s].y, added[s].z, added[s].w};
      const MergeFactors factors = merge(maximum, sum, of_row[s].x, of_row[s].y, a.c);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = merged(factors, o[e], from[e]);
    }
    const float inverse = __frcp_rn(sum);
    *reinterpret_cast<uint2*>(rows.template out<HS>(a, row) + d) = {pack<S>(mean(o[0], inverse), mean(o[1], inverse)),
                                                                    pack<S>(mean(o[2], inverse), mean(o[3], inverse))};
  }
}

// Merges all splits of one row, in order, for dimension `d` of this lane (none if d >= HS). The next kWarpSize splits are
// loaded while these are merged. Running maxima are a scan over the lanes, each of which has the factors of one split: the
// largest of several floats does not depend on the order, so these are the bits of one merge() after another. A split
// behind the last one has maximum -infinity and sums 0, which changes nothing.
template <typename S, int HS>
__device__ float merge_many(const Arguments<S>& a, const RowSplits& splits, int row, int rows, int kv_head, int d) {
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t stride = static_cast<std::int64_t>(rows) * a.NKV * kSlotFloats<HS>;  // from split to split
  const float* from = slot_of<HS>(a, splits.first_slot + row, kv_head);
  float next[kWarpSize];
  float2 next_state;  // maximum, sum of split `lane`
  const auto load = [&](int first) {
    const float* at = from + first * stride;
    next_state = first + lane < splits.count ? __ldcg(reinterpret_cast<const float2*>(at + lane * stride + HS))
                                             : make_float2(-INFINITY, 0);
#pragma unroll
    for (int s = 0; s < kWarpSize; ++s) next[s] = first + s < splits.count && d < HS ? __ldcg(at + s * stride + d) : 0;
  };
  float o = 0, sum = 0, maximum = -INFINITY;
  load(0);
#pragma unroll 1
  for (int first = 0; first < splits.count; first += kWarpSize) {
    float added[kWarpSize];
    const float2 state = next_state;
#pragma unroll
    for (int s = 0; s < kWarpSize; ++s) added[s] = next[s];
    load(first + kWarpSize);
    float largest = fmaxf(maximum, state.x);
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const float other = __shfl_up_sync(~0u, largest, distance);
      if (lane >= distance) largest = fmaxf(largest, other);
    }
    const float earlier = __shfl_up_sync(~0u, largest, 1);
    const bool nothing = largest == -INFINITY;  // of this split and all before it, of which all sums are 0
    const auto weight = [&](float of) { return nothing ? 0 : merge_factor(of, largest, a.c); };
    const float before = weight(lane == 0 ? maximum : earlier), factor = weight(state.x);
    maximum = __shfl_sync(~0u, largest, kWarpSize - 1);
#pragma unroll
    for (int s = 0; s < kWarpSize; ++s) {
      const MergeFactors factors = {__shfl_sync(~0u, before, s), __shfl_sync(~0u, factor, s)};
      sum = merged(factors, sum, __shfl_sync(~0u, state.y, s));
      o = merged(factors, o, added[s]);
    }
  }
  return mean(o, __frcp_rn(sum));
}

// The list's merges, as number `warp` of `warps` warps: every one of them comes here when no item is left for it. So what
// it waits for has been taken by a warp that is running, or will be started when an earlier kernel ends.
template <typename S, typename Tiling, bool kAppends>
__device__ __forceinline__ void compute_merges(const Arguments<S>& a, int warp, int warps) {
  constexpr int HS = Tiling::HS, kParts = (HS + kWarpSize - 1) / kWarpSize;  // parts of a row, of 32 dimensions
  const PagedWorkHeader& work = *a.work;
  const PagedWorkUnit* merges = reinterpret_cast<const PagedWorkUnit*>(a.work + 1) + work.tiles + work.items;
  const int lane = threadIdx.x % kWarpSize, count = work.merges * a.NKV * kItemRows * kParts;
#pragma unroll 1
  for (int n = warp; n < count; n += warps) {
    const int part = n % kParts, row = n / kParts % kItemRows, pair = n / kParts / kItemRows;
    const int kv_head = pair % a.NKV;
    const PagedWorkUnit item = merges[pair / a.NKV];
    const QueryRows<S, kAppends> rows(a, item, kv_head, kItemRows);
    if (row >= rows.count) continue;
    const RowSplits splits = RowSplits::of<Tiling::kWindowed>(a, item, rows);
    int* merged = finished_splits(a, item, kv_head);
    wait_for_count(merged, splits.count);
    const int d = part * kWarpSize + lane;
    const float value = merge_many<S, HS>(a, splits, row, rows.count, kv_head, d);
    if (d < HS) rows.template out<HS>(a, row)[d] = from_float<S>(value);
    // the last of those that have waited makes the counter ready for the next layer
    const int ended = splits.count + rows.count * kParts;
    if (lane == 0 && atomicAdd(merged, 1) == ended - 1) *merged = 0;
  }
}

// ---- items
// -------------------------------------------------------------------------------------------------------------
// The items of a warp, in the order in which it computes them, and its ring of keys and values, Tiling::kSlotKeys positions a
// slot: the keys of a key block, its values, the next block's keys, and so on, item after item; slots after an item's
// last position are skipped. Pages are looked up span by span. With a window an item begins with the key block in which its first row's window begins; items of
// which no row sees anything are passed over when they are looked up. Copies run up to the whole ring ahead of the computation.
// Lookups (item number -> entry -> block table -> pages) run one item ahead of the copies, one step with each copy, so that no
// lookup waits for the previous one.
template <typename S, typename Tiling, bool kAppends>
struct ItemStream {
  static constexpr int HS = Tiling::HS, kKeys = kBlockKeys<HS>;
  static constexpr int kSlotKeys = Tiling::kSlotKeys, kParts = kKeys / kSlotKeys;
  static constexpr int kRing = Tiling::kRing, kPairRing = Tiling::kPairRing, kLongRing = Tiling::kLongRing;
  static constexpr SlotCopy kCopy = Tiling::kCopy;
  static constexpr bool kWindowed = Tiling::kWindowed, kCodes = Tiling::kCodes;
  static_assert(!(kWindowed || kCodes) || kCopy == SlotCopy::threads);
  using Rows = QueryRows<S, kAppends>;
  using Slot = SlotLayout<S, HS, kCopy>;
  static constexpr unsigned kSlotBytes = kCodes ? CodeSlot<HS>::kBytes : Slot::bytes(kSlotKeys);

  const Arguments<S>& a;
  const PagedWorkUnit* entries;
  int count;     // of item numbers; item n is entry n / NKV, K/V head n % NKV
  int assigned;  // items assigned statically, one a warp; the others come from the cursor
  unsigned ring;
  int slots;  // kRing, kPairRing or kLongRing
  // SlotCopy::threads waits by commit groups, SlotCopy::bulk by one mbarrier a slot.
  std::uint64_t policy = evict_first_policy();
  unsigned barriers = 0, phase = 0;
  int load_slot = 0, slot = 0;
  int numbers;        // item numbers looked up: lane i holds those of the i-th, (i + 32)-th, ... item of this warp
  int own_pages = 0;  // for the same items, when all their spans have been looked up: the page of the appended row
  int looked_up = 0;  // items looked up before the current one
  // The lookup in progress: its next step, item number, entry; then the positions of a span of its split, and the block table
  // or, after the last step, this lane's page.
  int step, number;
  int4 entry;
  int next_first, next_end, table_or_page;
  int next_begin;            // kWindowed: the first position of the item that is seen
  int item_end;              // of the item's positions that are seen
  bool within_item = false;  // the next span belongs to the same item as the one that is being copied
  // The copy in progress.
  int load_first = 0, load_end = 0, load_pages = 0, load_head = 0;
  int load_begin;     // kWindowed
  int copy_end = 0;   // kAppends: excludes the appended row
  int load_part = 0;  // which part of the key block: of its keys, then of its values

  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  // The next item number, in lane 0.
  __device__ int from_cursor() const {
    if (assigned >= count) return count;
    return lane() == 0 ? assigned + atomicAdd(&a.cursors->items, 1) : 0;
  }

  // `first`: this warp's statically assigned item; `numbers_of_items` if it has none.
  __device__ ItemStream(const Arguments<S>& arguments, const PagedWorkUnit* list, int numbers_of_items,
                        int assigned_beforehand, int first, unsigned shared_ring, int ring_slots)
      : a(arguments),
        entries(list),
        count(numbers_of_items),
        assigned(assigned_beforehand),
        ring(shared_ring),
        slots(ring_slots) {
    numbers = number = first;
    step = 1;
  }
#if WEFT_BULK_COPY
  // Call before the first copy: initialises the mbarriers, one a slot.
  __device__ void use_barriers(unsigned storage) {
    barriers = storage;
    if (lane() == 0) {
#pragma unroll 1
      for (int i = 0; i < slots; ++i) hopper::mbarrier_init(barrier(i), 1);
      hopper::fence_barrier_init();
    }
    __syncwarp();
  }
  __device__ unsigned barrier(int of_slot) const {
    return barriers + of_slot * static_cast<int>(sizeof(hopper::BarrierStorage));
  }
#endif

  // Does the next one of the four lookups. After the last item there is nothing to look up.
  __device__ __forceinline__ void look_up() {
    if (step == 0) {
      number = from_cursor();
    } else if (step == 1) {
      number = __shfl_sync(~0u, number, 0);
      if (lane() == looked_up % kWarpSize) numbers = number;
      if (number < count) entry = *reinterpret_cast<const int4*>(entries + number / a.NKV);
    } else if (number < count) {
      if (step == 2) {
        const PagedWorkUnit& item = reinterpret_cast<const PagedWorkUnit&>(entry);
        const Rows rows(a, item, 0, kItemRows);
        if (within_item) {
          next_first = next_end;
        } else {
          next_first = paged_split_begin(item.split);
          item_end = min(next_first + paged_split_length(next_first), rows.end());
          if constexpr (kWindowed) {
            next_begin = max(next_first, rows.first_visible(0, a.window));
            if (next_begin >= item_end) {  // its number is not counted, and the next one takes its place
              step = 0;
              return;
            }
            next_first = next_begin / kSpan * kSpan;
          }
          if constexpr (kAppends) prefetch_angles(item.first_position);
        }
        next_end = min(next_first + kSpan, item_end);
        table_or_page = a.tables[item.first_row];
      } else {
        table_or_page =
            span_pages<kWindowed>(a, table_or_page, next_first / kSpan, next_end, kWindowed ? next_begin : 0);
      }
    }
    ++step;
  }
  // Prefetches the position's row of the angle tables, every cache line of it, to L2.
  __device__ __forceinline__ void prefetch_angles(int position) const {
    const int half = a.appended.half, d = lane() % 16 * 32;
    if (half == 0 || d >= half + 31) return;
    const float* table = lane() < 16 ? a.appended.cos : a.appended.sin;
    prefetch_to_l2(table + static_cast<std::int64_t>(position) * half + min(d, half - 1));
  }
  // Of an item that was assigned. Where nothing of it is seen, the next one is for load_next() to find.
  __device__ void look_up_first() {
#pragma unroll 1
    while (step < 4 && (!kWindowed || step > 0)) look_up();
  }

  // Begins to copy the span that has been looked up. The item's next span, if there is one, is looked up from step 2 on.
  __device__ __forceinline__ void take_work_unit() {
    load_first = kWindowed ? max(next_first, next_begin / kKeys * kKeys) : next_first;
    if constexpr (kWindowed) load_begin = next_begin;
    load_end = next_end;
    load_pages = table_or_page;
    load_head = number % a.NKV;
    if constexpr (kAppends) {
      const int position = reinterpret_cast<const PagedWorkUnit&>(entry).first_position;
      copy_end = min(load_end, position);
      const int own_page = __shfl_sync(~0u, load_pages, position % kSpan / kPageUnit);
      if (lane() == looked_up % kWarpSize) own_pages = own_page;
    }
    within_item = next_end < item_end;
    if (!within_item) ++looked_up;
    step = within_item ? 2 : 0;
  }
  // Starts the next copy of this item, if there is one, to the slot that was read last.
  __device__ __forceinline__ void copy_next() {
    if (load_first < load_end) {
      const int first = load_first + load_part % kParts * kSlotKeys, end = kAppends ? copy_end : load_end;
      if constexpr (kCodes) {
        load_codes<HS>(a, load_part < kParts, ring + load_slot * kSlotBytes, load_pages, load_head, first,
                       kWindowed ? load_begin : 0, end, policy);
      } else if constexpr (kCopy == SlotCopy::threads) {
        load_units<HS, kSlotKeys, kWindowed>(a, load_part < kParts ? a.keys : a.values, ring + load_slot * kSlotBytes,
                                             load_pages, load_head, first, kWindowed ? load_begin : 0, end, policy);
      } else {
        start_copy(load_part < kParts, first, min(max(end - first, 0), kSlotKeys));
      }
      if ((load_part + 1) % kParts != 0 && first + kSlotKeys < load_end) {
        ++load_part;
      } else if (load_part < kParts) {
        load_part = kParts;
      } else {
        load_part = 0;
        load_first += kKeys;
      }
    }
    // After the last item commits an empty group, so that the number of groups in flight stays the same.
    if constexpr (kCopy == SlotCopy::threads) commit_copies();
    load_slot = load_slot + 1 == slots ? 0 : load_slot + 1;
  }
  // Starts the bulk copy of `rows` (possibly 0) rows from position `first` on to load_slot. The slot's remaining rows
  // keep their contents.
  __device__ __forceinline__ void start_copy(bool of_keys, int first, int rows) {
#if WEFT_BULK_COPY
    static_assert(kSlotKeys == 2 * kPageUnit);
    const int unit = first % kSpan / kPageUnit;
    const int page = __shfl_sync(~0u, load_pages, unit), next_page = __shfl_sync(~0u, load_pages, unit + 1);
    const unsigned to = ring + load_slot * kSlotBytes, full = barrier(load_slot);
    if (lane() != 0) return;
    const S* const from = of_keys ? a.keys : a.values;
    const int piece = a.page_shift == 4 ? min(rows, kPageUnit) : rows;  // rows in the first page
    hopper::mbarrier_arrive_expect(full, rows * Slot::kRowBytes);
    if (rows > 0)
      hopper::bulk_load(to, from + page_offset<HS>(a, page, load_head, first), piece * Slot::kRowBytes, full,
                        hopper::L2::evict_first);
    if (rows > piece)
      hopper::bulk_load(to + piece * Slot::kRowBytes, from + page_offset<HS>(a, next_page, load_head, first + piece),
                        (rows - piece) * Slot::kRowBytes, full, hopper::L2::evict_first);
#endif
  }
  __device__ __forceinline__ void load_next() {
    const bool ended = load_first >= load_end;
    if (ended && step == 4 && number >= count) {  // nothing is left
      if constexpr (kCopy == SlotCopy::threads) commit_copies();
      return;
    }
#pragma unroll 1
    while (step < 4) {
      look_up();
      if (!ended) break;
    }
    if (ended && number < count) take_work_unit();
    copy_next();
  }
  // Of a step that decodes: whether this warp's first item has been looked up and reads nothing that the step appends.
  __device__ bool begins_with_earlier_positions() const {
    return step == 4 && number < count && next_end <= reinterpret_cast<const PagedWorkUnit&>(entry).first_position;
  }
  // Both are called before the first block is read and fill all slots but one. start_assigned() uses no cursor, so it
  // may precede wait_for_predecessors() if no predecessor writes what it copies.
  __device__ void start_assigned() {
    if (number >= count || (kWindowed && step < 4)) return;
    take_work_unit();
#pragma unroll 1
    while (load_slot < slots - 1 && load_first < load_end) copy_next();
  }
  __device__ void start() {
#pragma unroll 1
    for (int i = load_slot; i < slots - 1; ++i) load_next();
  }

  // Number of the warp's i-th item, whose copies have begun; >= count if there is none.
  __device__ int item(int i) const {
    return __shfl_sync(~0u, numbers, i % kWarpSize);
  }
  __device__ int own_page(int i) const {
    return __shfl_sync(~0u, own_pages, i % kWarpSize);
  }

  // Waits for the next slot and returns its address; starts a copy to the slot that was read before it.
  __device__ __forceinline__ unsigned next_block() {
    if constexpr (kCopy != SlotCopy::threads) {
#if WEFT_BULK_COPY
      hopper::mbarrier_wait(barrier(slot), phase);
#endif
    } else if (slots == kRing) {
      wait_for_older_copies<kRing - 2>();
    } else if (slots == kLongRing) {
      wait_for_older_copies<kLongRing - 2>();
    } else {
      wait_for_older_copies<kPairRing - 2>();
    }
    __syncwarp();
    load_next();
    const unsigned block = ring + slot * kSlotBytes;
    if (++slot == slots) slot = 0, phase ^= 1;
    return block;
  }
};

// Computes the i-th item of the stream.
template <typename S, typename Tiling, bool kAppends>
__device__ void compute_work_unit(const Arguments<S>& a, const PagedWorkUnit* entry, int kv_head, int i,
                                  ItemStream<S, Tiling, kAppends>& blocks) {
  constexpr int HS = Tiling::HS, kKeys = kBlockKeys<HS>;
  constexpr int kSlotKeys = Tiling::kSlotKeys, kParts = kKeys / kSlotKeys;
  static_assert(kParts <= 2 && (kParts == 1 || !Tiling::kCodes));
  using Rows = QueryRows<S, kAppends>;
  using Slot = SlotLayout<S, HS, Tiling::kCopy>;
  constexpr bool kWindowed = Tiling::kWindowed;
  int begin, end, unmasked_end, visible[1][2];
  int unmasked_begin = 0;
  [[maybe_unused]] int first_seen = 0;  // kCodes with kWindowed
  bool few_rows;
  RegisterOperand<S, HS, 1> Q;
  [[maybe_unused]] AppendedRow<S, HS> own;
  [[maybe_unused]] bool has_own = false;  // the appended row belongs to this split
  {
    const PagedWorkUnit item = *entry;
    const Rows rows(a, item, kv_head, kItemRows);
    begin = paged_split_begin(item.split);
    end = min(begin + paged_split_length(begin), rows.end());
    if constexpr (kWindowed) {
      first_seen = rows.first_visible(0, a.window);
      begin = max(begin, first_seen) / kKeys * kKeys;
      unmasked_begin = rows.first_visible(rows.count - 1, a.window);
    }
    visible_positions(visible, rows);
    unmasked_end = rows.visible(0);
    few_rows = rows.count <= 8;
    if constexpr (kAppends) {
      const AppendedRows<S>& from = a.appended;
      const int position = item.first_position;
      const WarpRotation<S, HS> rotation(from.cos, from.sin, from.half, position);
      has_own = end > position;
      // All loads are issued before the first result is used.
      typename WarpRotation<S, HS>::Head key;
      if (has_own) {
        const S* v = from.v + item.first_row * from.v_row_stride + kv_head * from.v_head_stride;
#pragma unroll
        for (int w = 0; w < own.kWords; ++w)
          own.value[w] = reinterpret_cast<const unsigned*>(v)[min(rotation.word(w), HS / 2 - 1)];
        key = rotation.load(from.k + item.first_row * from.k_row_stride + kv_head * from.k_head_stride);
      }
      load_rotated(Q, a, rows.query(a, 0), rows.count, rotation);
      if (has_own) {
#pragma unroll
        for (int w = 0; w < own.kWords; ++w) own.key[w] = rotation.rotate(key, w);
      }
    } else {
      Q.load([&](int row) { return rows.query(a, row); });
    }
  }
  SplitState<S, HS, 1> state;
  state.clear();
  // Slot by slot, as the stream copies them, so that next_block() is inlined only once.
  Accumulators<1, kKeys / 8> scores;
  int first_key = begin, part = 0;  // part of the key block: of its keys, then of its values
#pragma unroll 1
  while (first_key < end) {
    const int first = first_key + part % kParts * kSlotKeys, slot_end = first + kSlotKeys;
    const bool last_part = (part + 1) % kParts == 0 || slot_end >= end;
    const unsigned slot = blocks.next_block();
    if (kAppends || Tiling::kCopy != SlotCopy::threads) {
      if (slot_end >= end) {
        if constexpr (kAppends) {
          if (has_own) own.template put<Slot>(part < kParts, slot, end - 1 - first);
        }
        if constexpr (Tiling::kCopy != SlotCopy::threads) {
          // Scores of keys after the end are masked whatever they are, but a NaN among the values there would survive.
          if (part >= kParts) clear_rows<Slot, HS, kSlotKeys>(slot, end - first);
#if WEFT_BULK_COPY
          hopper::fence_async_proxy_shared();  // orders these writes before the next bulk copy to the slot
#endif
        }
        __syncwarp();
      }
    }
    if (part < kParts) {
      if constexpr (Tiling::kCodes) {
        scores.clear();
        multiply_by_key_codes<S, HS>(scores, Q, slot);
      } else if (part == 0) {
        scores.clear();
        multiply_by_rows<S, HS, 0, kParts, Slot>(scores, Q, slot + Slot::lane_by_columns());
      } else {
        multiply_by_rows<S, HS, kParts - 1, kParts, Slot>(scores, Q, slot + Slot::lane_by_columns());
      }
      ++part;
      if (!last_part) continue;
      part = kParts;
      const bool masked = first_key + kKeys > unmasked_end || (kWindowed && first_key < unmasked_begin);
      float shrink[1][2];
      if (few_rows) {
        if (state.template weigh<1, kWindowed>(scores, shrink, visible, masked, first_key, a.c, a.window))
          state.template rescale<1>(shrink);
      } else {
        if (state.template weigh<2, kWindowed>(scores, shrink, visible, masked, first_key, a.c, a.window))
          state.rescale(shrink);
      }
    } else {
      if constexpr (Tiling::kCodes) {
        multiply_by_value_codes<S, HS>(state.O, scores, slot, first_seen - first, end - first);
      } else if (part == kParts) {
        multiply_by_columns<S, HS, 0, kParts, Slot>(state.O, scores, slot + Slot::lane_by_rows());
      } else {
        multiply_by_columns<S, HS, kParts - 1, kParts, Slot>(state.O, scores, slot + Slot::lane_by_rows());
      }
      ++part;
      if (!last_part) continue;
      part = 0;
      first_key += kKeys;
    }
  }
  state.close();
  const PagedWorkUnit item = *entry;  // loaded again to save registers in the loop
  if constexpr (kAppends) {           // now that the page is known: all spans have been looked up
    const std::int64_t at = page_offset<HS>(a, blocks.own_page(i), kv_head, item.first_position);
    if (has_own && item.tile == 0) own.store(a.keys + at, a.values + at);
  }
  const Rows rows(a, item, kv_head, kItemRows);
  if (item.partials < 0) return state.store(a, rows);

  const RowSplits splits = RowSplits::of<kWindowed>(a, item, rows);
  const int split = item.split - splits.first;
  store_partial(a, state, rows.count, splits.first_slot + static_cast<std::int64_t>(split) * rows.count, kv_head);
  int* merged = finished_splits(a, item, kv_head);
  __syncwarp();
  const int lane = threadIdx.x % kWarpSize;
  int before = 0;
  if (lane == 0) before = fetch_add_acquire_release(merged, 1);
  if (!splits.merged_by_one() || __shfl_sync(~0u, before, 0) != splits.count - 1) return;
  __syncwarp();
  merge_few<S, HS>(a, rows, splits, kv_head);
  if (lane == 0) *merged = 0;  // for the next layer
}

}  // namespace weft::cuda::paged
