// Of each chunk of a work list the positions that its rows see, from codes to 16 bits: for kernels that read 16 bits. Bytes
// moved: HS + 1 read and 2 HS written for each row of keys and of values, which is little beside the attention of many rows.
//
// Chunks that share pages write the same bytes to them.
#include <algorithm>

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/paged/kv_codes.cuh"
#include "llmc/cuda/op/attention/paged/paged_paths.h"
#include "llmc/cuda/op/attention/paged/paged_recurrence.cuh"

namespace weft::cuda {

using namespace paged;

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize, kBlocksPerMultiprocessor = 4;
// Blocks that share an entry of the list: of a tile, whose chunk may see all of a long sequence, and where there are items, of
// one split each.
constexpr int kTileParts = 128, kItemParts = 32;

// Widens positions [begin, end) of a unit of kPageUnit positions of a page, for one head, of keys or of values.
template <typename S>
__device__ void widen_unit(KvKind kind, S* to, const std::uint8_t* codes, const std::uint8_t* scales,
                           std::int64_t first_row, int HS, int begin, int end) {
  const int groups = HS / 16;
  const std::uint16_t* const pairs = reinterpret_cast<const std::uint16_t*>(codes + first_row * HS);
  for (int i = threadIdx.x % kWarpSize; i < kPageUnit * groups; i += kWarpSize) {
    const int row = i / groups, group = i % groups * 16;
    if (row < begin || row >= end) continue;
    const unsigned power = kv_power<S>(scales[first_row + row]);
    WidePairs wide[4];  // of dimensions 2j, 2j + 1 and 8 further: pairs of a key are neighbours, those of a value not
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint16_t* const at = pairs + kv_pair_index(kind, row, group + 2 * j, HS);
      const unsigned both = kind == KvKind::key
                                ? *reinterpret_cast<const unsigned*>(at)
                                : *at | unsigned{pairs[kv_pair_index(kind, row, group + 2 * j + 1, HS)]} << 16;
      wide[j] = widen<S>(both, power);
    }
    uint4* const elements = reinterpret_cast<uint4*>(to + (first_row + row) * HS + group);
    elements[0] = {wide[0].first, wide[1].first, wide[2].first, wide[3].first};
    elements[1] = {wide[0].second, wide[1].second, wide[2].second, wide[3].second};
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads) widen_kernel(const __grid_constant__ Arguments<S> a, int HS, bool items) {
  launch_dependents();
  wait_for_predecessors();
  const PagedWorkHeader work = *a.work;
  const PagedWorkUnit* entries = reinterpret_cast<const PagedWorkUnit*>(a.work + 1);
  const int parts = items ? kItemParts : kTileParts, count = (work.tiles + (items ? work.items : 0)) * parts;
  for (int n = blockIdx.x; n < count; n += gridDim.x) {
    const PagedWorkUnit entry = entries[n / parts];
    const bool item = n / parts >= work.tiles;
    // The chunk's first entry is for the others: of tiles all positions of the chunk, of items those of the split, which
    // its rows may not see.
    const int seen_first = entry.first_position + (min(kItemRows, entry.rows * a.group) - 1) / a.group + 1;
    const int split_begin = paged_split_begin(entry.split);
    if (entry.tile > 0 && (!item || split_begin < seen_first)) continue;
    int end = entry.first_position + entry.rows, begin = a.window > 0 ? max(0, entry.first_position + 1 - a.window) : 0;
    if (item) {
      begin = max(begin, split_begin);
      end = min(end, split_begin + paged_split_length(split_begin));
    }
    const int first_unit = begin / kPageUnit, units = max(0, static_cast<int>(ceil_div(end, kPageUnit)) - first_unit);
    const int* const pages = a.pages + a.tables[entry.first_row];
    const int warp = n % parts * kWarps + static_cast<int>(threadIdx.x / kWarpSize);
    for (int i = warp; i < units * a.NKV * 2; i += parts * kWarps) {
      const int position = (first_unit + i / (2 * a.NKV)) * kPageUnit, kv_head = i / 2 % a.NKV;
      const std::int64_t row = page_offset<1>(a, pages[position >> a.page_shift], kv_head, position);
      const bool values = i % 2 == 1;
      widen_unit(values ? KvKind::value : KvKind::key, values ? a.values : a.keys,
                 values ? a.codes.values : a.codes.keys, values ? a.codes.value_scales : a.codes.key_scales, row, HS,
                 begin - position, end - position);
    }
  }
}

}  // namespace

template <typename S>
void widen_pages(const PagedAttention<S>& io, bool items, const LaunchDevice& device, cudaStream_t stream) {
  Arguments<S> arguments = arguments_of(io, 0);
  if (io.window >= io.shape.max_positions) arguments.window = 0;
  launch_chained(widen_kernel<S>, dim3(static_cast<unsigned>(device.multiprocessors * kBlocksPerMultiprocessor)),
                 dim3(kThreads), 0, stream, device.overlapping, "widen_pages", arguments, static_cast<int>(io.shape.HS),
                 items);
}

template void widen_pages<bf16>(const PagedAttention<bf16>&, bool, const LaunchDevice&, cudaStream_t);
template void widen_pages<fp16>(const PagedAttention<fp16>&, bool, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda
