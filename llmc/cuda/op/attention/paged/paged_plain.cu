// Attention over pages in fp32, one block for each row and head. Blocks of 32 keys go to the warps in turn, one key a
// lane for the scores; for the weighted sum the lanes divide the dimensions. The warps' states are merged in the order
// of the warps.
//
// kAppends: a block rotates its query and its row's key, and keeps key and value of the row's own position in shared
// memory; the block of the first query head of a K/V head writes them to the page.

#include <cmath>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/paged/paged_paths.h"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda {

namespace {

constexpr int kPlainWarps = 4;

struct PlainArguments {
  HeadViewOf<const float> q, k, v;
  PagedKv<float> kv;
  PagedRows rows;
  DeviceRopeTable rope;
  float* out;
  int NH;
  float c;
  int window;  // 0: none
};

template <int HS, bool kAppends>
__global__ void __launch_bounds__(kPlainWarps* kWarpSize) plain_kernel(const __grid_constant__ PlainArguments a) {
  constexpr int kPerLane = (HS + kWarpSize - 1) / kWarpSize;
  [[maybe_unused]] __shared__ alignas(16) float own_key[HS], own_value[HS];
  __shared__ float query[HS], group_maximum[kPlainWarps], group_sum[kPlainWarps], group_out[kPlainWarps][HS];
  wait_for_predecessors();
  launch_dependents();
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int position = a.rows.positions[row];
  if (position < 0) return;
  const float* q = a.q.at(0, row, head);
  const int kv_head = head / (a.NH / static_cast<int>(a.kv.NKV)), page_size = static_cast<int>(a.kv.page_size);
  const std::int32_t* table = a.rows.pages + a.rows.tables[row];
  const auto offset = [&](int of) {
    return ((table[of / page_size] * a.kv.NKV + kv_head) * page_size + of % page_size) * HS;
  };
  const int half = static_cast<int>(a.rope.half);
  const auto rotated_at = [&](const float* of_head, int d) {
    const std::int64_t angles = static_cast<std::int64_t>(position) * half;
    return rotated_element(of_head, d, a.rope.cos + angles, a.rope.sin + angles, half);
  };
  for (int d = threadIdx.x; d < HS; d += kPlainWarps * kWarpSize) {
    if constexpr (kAppends) {
      query[d] = rotated_at(q, d);
      own_key[d] = rotated_at(a.k.at(0, row, kv_head), d);
      own_value[d] = a.v.at(0, row, kv_head)[d];
      if (head % (a.NH / static_cast<int>(a.kv.NKV)) == 0) {
        const std::int64_t at = offset(position);
        a.kv.keys[at + d] = own_key[d];
        a.kv.values[at + d] = own_value[d];
      }
    } else {
      query[d] = q[d];
    }
  }
  __syncthreads();

  float maximum = -INFINITY, sum = 0, o[kPerLane] = {};
  const int begin = a.window > 0 ? max(0, position + 1 - a.window) : 0;
  // What lies in front of the window is not read: its pages may be gone.
  for (int first = begin / kWarpSize * kWarpSize + warp * kWarpSize; first <= position;
       first += kPlainWarps * kWarpSize) {
    const int own = max(begin, min(first + lane, position));
    const std::int64_t at = offset(own);
    const float* own_or_page = kAppends && own == position ? own_key : a.kv.keys + at;
    float score = 0;
#pragma unroll 4
    for (int d = 0; d < HS; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(own_or_page + d);
      score = fmaf(query[d], k.x, score);
      score = fmaf(query[d + 1], k.y, score);
      score = fmaf(query[d + 2], k.z, score);
      score = fmaf(query[d + 3], k.w, score);
    }
    if (first + lane > position || first + lane < begin) score = -INFINITY;
    const float largest = fmaxf(maximum, warp_max(score));  // some key of the block is visible
    const float shrink = exp2f((maximum - largest) * a.c), p = exp2f((score - largest) * a.c);
    maximum = largest;
    sum = fmaf(sum, shrink, warp_sum(p));
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) o[j] *= shrink;
    const int count = min(kWarpSize, position + 1 - first);
    for (int key = max(0, begin - first); key < count; ++key) {
      const float weight = __shfl_sync(~0u, p, key);
      const std::int64_t of_key = __shfl_sync(~0u, at, key);
      const float* v = kAppends && first + key == position ? own_value : a.kv.values + of_key;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int d = j * kWarpSize + lane;
        if (d < HS) o[j] = fmaf(weight, v[d], o[j]);
      }
    }
  }
  if (lane == 0) group_maximum[warp] = maximum, group_sum[warp] = sum;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int d = j * kWarpSize + lane;
    if (d < HS) group_out[warp][d] = o[j];
  }
  __syncthreads();
  float* out = a.out + (static_cast<std::int64_t>(row) * a.NH + head) * HS;
  for (int d = threadIdx.x; d < HS; d += kPlainWarps * kWarpSize) {
    float largest = -INFINITY, total = 0, result = 0;
    for (int w = 0; w < kPlainWarps; ++w) largest = fmaxf(largest, group_maximum[w]);
    for (int w = 0; w < kPlainWarps; ++w) {
      const float factor = exp2f((group_maximum[w] - largest) * a.c);  // 0 for a warp without keys
      total = fmaf(group_sum[w], factor, total);
      result = fmaf(group_out[w][d], factor, result);
    }
    out[d] = result / total;
  }
}

template <int HS, bool kAppends>
void launch(const PlainArguments& arguments, const LaunchDevice& device, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(arguments.NH), static_cast<unsigned>(arguments.rows.rows));
  launch_chained(plain_kernel<HS, kAppends>, grid, dim3(kPlainWarps * kWarpSize), 0, stream, device.overlapping,
                 "paged_attention", arguments);
}

}  // namespace

void paged_plain(const PagedAttention<float>& io, const LaunchDevice& device, cudaStream_t stream) {
  const PlainArguments arguments = {io.q,
                                    io.k,
                                    io.v,
                                    io.kv,
                                    io.rows,
                                    io.rope,
                                    io.out,
                                    static_cast<int>(io.shape.NH),
                                    io.scale * kLog2E,
                                    static_cast<int>(io.window)};
  for_head_dimension(io.shape.HS, "paged attention", [&]<int HS>() {
    if (io.k.data != nullptr) return launch<HS, true>(arguments, device, stream);
    launch<HS, false>(arguments, device, stream);
  });
}

}  // namespace weft::cuda
