// Token embedding: forward is a gather, out[n, :] = scale weight[tokens[n], :]; backward its transpose, a scatter-add.
//
// Bytes moved, for elements of E bytes: forward reads and writes N C E each. Backward reads N C E and reads and writes
// a row of 4 C bytes for each distinct token.
//
// Backward without atomics, the same bits every time:  1. A stable radix sort orders the pairs (token, n) by token, so
// that the rows of one token become neighbours in the order of n. A pass sorts by kDigitBits bits: it counts the digits
// of each tile, scans the counts, then moves each pair to its destination. Two passes, 18 bits, cover every vocabulary
// in use. Where there are clusters (sm_90 and later) one of them sorts in its distributed shared memory, in one launch;
// otherwise, or if the pairs do not fit there, each step is a launch. The sort needs the tokens alone and is a call of
// its own, so it can run beside other work.  2. A block has kRun consecutive pairs of the sorted order and adds up the
// rows of each token in registers. A token whose rows all lie in the run is added to dweight at once: no other block
// has it. The sums of a token that continues across an edge of the run are stored in the workspace.  3. The block in
// whose run such a token begins adds those sums in the order of the runs.
// The kernel of step 3 is launched early and waits for the end of step 2.

#include "llmc/cuda/op/elementwise/embedding.h"

#include <cooperative_groups.h>

#include <algorithm>

#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"

namespace weft::cuda {

namespace {

// ---- forward ----------------------------------------------------------------------------------------------------------
constexpr int kCopyThreads = 256;

template <typename T, typename R, int kCount>
__global__ void __launch_bounds__(kCopyThreads)
    forward_kernel(R* out, const std::int32_t* tokens, const T* weight, std::int64_t C, float scale) {
  scale_row<kCopyThreads, kCount>(out + blockIdx.x * C, weight + tokens[blockIdx.x] * C, C, scale);
}

// ---- the sort ---------------------------------------------------------------------------------------------------------
constexpr int kDigitBits = 9, kDigits = 1 << kDigitBits;
constexpr int kSortThreads = 256, kSortWarps = kSortThreads / kWarpSize;
constexpr int kTile = 2048;  // pairs that a block counts and moves
constexpr int kWarpPairs = kTile / kSortWarps;

struct Pairs {
  std::int32_t *token, *n;
};

__device__ int digit_of(std::int32_t token, int shift) {
  return (token >> shift) & (kDigits - 1);
}

// counts[digit][tile]: how often the digit occurs in the tile. Integer atomics: the sum does not depend on their order.
__global__ void __launch_bounds__(kSortThreads)
    count_digits_kernel(int* counts, const std::int32_t* tokens, int N, int shift) {
  __shared__ int histogram[kDigits];
  for (int d = threadIdx.x; d < kDigits; d += kSortThreads) histogram[d] = 0;
  __syncthreads();
  const int end = min((static_cast<int>(blockIdx.x) + 1) * kTile, N);
  for (int i = blockIdx.x * kTile + threadIdx.x; i < end; i += kSortThreads)
    atomicAdd(&histogram[digit_of(tokens[i], shift)], 1);
  __syncthreads();
  for (int d = threadIdx.x; d < kDigits; d += kSortThreads) counts[d * gridDim.x + blockIdx.x] = histogram[d];
}

constexpr int kScanThreads = 1024;

// counts becomes its exclusive prefix sum: the destination of the first pair of each (digit, tile). One block; each
// thread scans a contiguous stretch of the list.
__global__ void __launch_bounds__(kScanThreads) scan_counts_kernel(int* counts, int size) {
  __shared__ int sums[kScanThreads];
  const int stretch = static_cast<int>(ceil_div(size, kScanThreads));
  const int begin = min(static_cast<int>(threadIdx.x) * stretch, size), end = min(begin + stretch, size);
  int sum = 0;
  for (int i = begin; i < end; ++i) sum += counts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int distance = 1; distance < kScanThreads; distance *= 2) {
    const int before = static_cast<int>(threadIdx.x) >= distance ? sums[threadIdx.x - distance] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  int destination = sums[threadIdx.x] - sum;
  for (int i = begin; i < end; ++i) {
    const int count = counts[i];
    counts[i] = destination;
    destination += count;
  }
}

// Lanes of the warp with the same digit, this one included.
__device__ unsigned lanes_with(int digit, bool valid) {
  return __match_any_sync(~0u, valid ? digit : kDigits);
}

// Moves the pairs of a tile to their destinations. A warp owns kWarpPairs consecutive pairs and processes them 32 at a
// time, in order, which makes the sort stable. from.n null: pair i is (from.token[i], i).
__global__ void __launch_bounds__(kSortThreads)
    move_pairs_kernel(Pairs to, Pairs from, const int* destinations, int N, int shift) {
  // first a warp's count of the digit, then the destination of its next such pair
  __shared__ int next[kSortWarps][kDigits];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int first = blockIdx.x * kTile + warp * kWarpPairs;
  for (int i = threadIdx.x; i < kSortWarps * kDigits; i += kSortThreads) next[i / kDigits][i % kDigits] = 0;
  __syncthreads();
  for (int i = first + lane; i < first + kWarpPairs; i += kWarpSize) {
    if (i < N) atomicAdd(&next[warp][digit_of(from.token[i], shift)], 1);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < kDigits; d += kSortThreads) {
    int destination = destinations[d * gridDim.x + blockIdx.x];
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = next[w][d];
      next[w][d] = destination;
      destination += count;
    }
  }
  __syncthreads();
  for (int i = first + lane; i < first + kWarpPairs; i += kWarpSize) {
    const bool valid = i < N;
    const std::int32_t token = valid ? from.token[i] : 0;
    const int digit = digit_of(token, shift);
    const unsigned same = lanes_with(digit, valid);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int destination = valid ? next[warp][digit] : 0;
    __syncwarp();
    if (valid && rank == 0) next[warp][digit] = destination + __popc(same);
    __syncwarp();
    if (!valid) continue;
    to.token[destination + rank] = token;
    to.n[destination + rank] = from.n != nullptr ? from.n[i] : i;
  }
}

// ---- the sort of one cluster ----------------------------------------------------------------------------------------------
constexpr int kSortCluster = 8;
constexpr int kClusterThreads = kDigits;  // one thread for each digit
constexpr int kClusterWarps = kClusterThreads / kWarpSize;

struct ClusterSortMemory {
  int next[kClusterWarps][kDigits];  // first a warp's count of the digit, then the destination of its next such pair
  int total[kDigits];                // counts of the whole block
  int warp_sums[kClusterWarps];
};
// Two arrays of `capacity` pairs follow: a block's part before and after a pass.
struct alignas(8) Pair {
  std::int32_t token, n;
};
constexpr std::size_t cluster_sort_bytes(std::int64_t capacity) {
  return sizeof(ClusterSortMemory) + 2 * static_cast<std::size_t>(capacity) * sizeof(Pair);
}

// Block r of the cluster holds pairs [r capacity, (r + 1) capacity) of the current order. A warp owns consecutive pairs
// and processes them 32 at a time, in order, which makes the sort stable.
__global__ void __launch_bounds__(kClusterThreads)
    cluster_sort_kernel(Pairs sorted, const std::int32_t* tokens, int N, int V, int capacity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ int4 dynamic_memory[];
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  auto& memory = *reinterpret_cast<ClusterSortMemory*>(dynamic_memory);
  Pair* pairs = reinterpret_cast<Pair*>(&memory + 1);
  Pair* other = pairs + capacity;
  const int rank = static_cast<int>(cluster.block_rank());
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, digit_of_thread = threadIdx.x;
  const int first = rank * capacity, mine = max(0, min(capacity, N - first));
  const int share = static_cast<int>(ceil_div(ceil_div(capacity, kClusterWarps), kWarpSize)) * kWarpSize;
  const int begin = min(warp * share, mine), end = min(begin + share, mine);
  for (int i = threadIdx.x; i < mine; i += kClusterThreads) pairs[i] = {tokens[first + i], first + i};
  for (int shift = 0; shift == 0 || (V - 1) >> shift > 0; shift += kDigitBits) {
    const bool last = (V - 1) >> shift >> kDigitBits == 0;
    for (int i = threadIdx.x; i < kClusterWarps * kDigits; i += kClusterThreads)
      memory.next[i / kDigits][i % kDigits] = 0;
    __syncthreads();
    for (int i = begin + lane; i < end; i += kWarpSize)
      atomicAdd(&memory.next[warp][digit_of(pairs[i].token, shift)], 1);
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < kClusterWarps; ++w) total += memory.next[w][digit_of_thread];
    memory.total[digit_of_thread] = total;
    cluster_barrier();  // the totals of each block are visible to all blocks
    // The digit's pairs of this block come after those of smaller digits and those of this digit in lower blocks.
    int everywhere = 0, before = 0;
#pragma unroll
    for (int r = 0; r < kSortCluster; ++r) {
      const int there = *cluster.map_shared_rank(&memory.total[digit_of_thread], r);
      everywhere += there;
      if (r < rank) before += there;
    }
    int running = everywhere;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int left = __shfl_up_sync(~0u, running, offset);
      if (lane >= offset) running += left;
    }
    if (lane == kWarpSize - 1) memory.warp_sums[warp] = running;
    __syncthreads();
    int destination = running - everywhere + before;
    for (int w = 0; w < warp; ++w) destination += memory.warp_sums[w];
#pragma unroll
    for (int w = 0; w < kClusterWarps; ++w) {
      const int count = memory.next[w][digit_of_thread];
      memory.next[w][digit_of_thread] = destination;
      destination += count;
    }
    __syncthreads();
    for (int i = begin + lane; i - lane < end; i += kWarpSize) {
      const bool valid = i < end;
      const Pair pair = valid ? pairs[i] : Pair{0, 0};
      const int digit = digit_of(pair.token, shift);
      const unsigned same = lanes_with(digit, valid);
      const int rank_of_lane = __popc(same & ((1u << lane) - 1));
      const int to = (valid ? memory.next[warp][digit] : 0) + rank_of_lane;
      __syncwarp();
      if (valid && rank_of_lane == 0) memory.next[warp][digit] = to + __popc(same);
      __syncwarp();
      if (!valid) continue;
      if (last) {
        sorted.token[to] = pair.token;
        sorted.n[to] = pair.n;
      } else {
        *cluster.map_shared_rank(other + to % capacity, to / capacity) = pair;
      }
    }
    if (last) break;
    cluster_barrier();  // the pairs that blocks wrote into each other's memory are visible there
    Pair* const moved = other;
    other = pairs;
    pairs = moved;
  }
  // A block may exit once no block reads its totals any more. Those reads have completed, since the destinations of the
  // pairs depend on them. Nothing else must become visible, so this barrier omits the fence, which would wait for all
  // pairs that the thread has just written to global memory; the end of the kernel makes them visible.
  cluster_arrive();
  cluster_wait();
#endif
}

// ---- the sums ---------------------------------------------------------------------------------------------------------
constexpr int kRun = 32;      // consecutive rows of the sorted order that a block adds up
constexpr int kInFlight = 2;  // rows that are loaded before the first is added
// Small blocks with few registers, so that all of them are resident at once: with 70 registers a thread, a tenth of the
// blocks of 64 threads had to wait for others to end. A thread has 16 bytes of fp32, so that a warp's accesses to
// dweight fill every sector.
constexpr int kSumThreads = 64, kSumRegisters = 32, kSumColumns = 4;
constexpr int kEdgeThreads = 128;

struct Sorted {
  const std::int32_t *token, *n;
  int N;

  __device__ bool begins(int i) const { return i == 0 || token[i] != token[i - 1]; }
  __device__ bool ends(int i) const { return i == N - 1 || token[i] != token[i + 1]; }
};

// edges [runs][2][C]: 0, the sum of a token that continues from the previous run; 1, the sum of one that begins in this
// run and continues in the next.
__device__ float* edge_of(float* edges, std::int64_t run, int which, std::int64_t C) {
  return edges + (run * 2 + which) * C;
}

template <typename T, int kCount>
__global__ void __maxnreg__(kSumRegisters)
    sum_runs_kernel(float* dweight, float* edges, const T* dout, Sorted sorted, std::int64_t C, float scale) {
  __shared__ std::int32_t tokens[kRun], ns[kRun];
  __shared__ bool ends[kRun];
  __shared__ bool begins;
  const int begin = blockIdx.x * kRun, count = min(kRun, sorted.N - begin);
  launch_dependents();
  if (static_cast<int>(threadIdx.x) < count) {
    const int i = begin + threadIdx.x;
    tokens[threadIdx.x] = sorted.token[i];
    ns[threadIdx.x] = sorted.n[i];
    ends[threadIdx.x] = sorted.ends(i);
    if (threadIdx.x == 0) begins = sorted.begins(i);
  }
  __syncthreads();
  const std::int64_t c = (static_cast<std::int64_t>(blockIdx.y) * kSumThreads + threadIdx.x) * kCount;
  if (c >= C) return;
  float sum[kCount] = {};
  bool continued = !begins;
  for (int i = 0; i < count; i += kInFlight) {
    Elements<T, kCount> row[kInFlight];
    Elements<float, kCount> old[kInFlight];  // the value in dweight of a token that ends here
    bool first = continued;
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j >= count) break;
      row[j].load(dout + ns[i + j] * C + c);
      if (ends[i + j]) {
        if (!first) old[j].load(dweight + tokens[i + j] * C + c);
        first = false;
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j >= count) break;
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum[k] += scale * row[j].get(k);
      if (!ends[i + j] && i + j + 1 < count) continue;
      Elements<float, kCount> total;
      total.set(sum);
      if (continued) {
        total.store(edge_of(edges, blockIdx.x, 0, C) + c);
      } else if (!ends[i + j]) {
        total.store(edge_of(edges, blockIdx.x, 1, C) + c);
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k) old[j].value[k] += sum[k];
        old[j].store(dweight + tokens[i + j] * C + c);
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum[k] = 0;
      continued = false;
    }
  }
}

// The token that begins in run blockIdx.x and continues in the next: adds its sums of all runs, in order, to dweight.
template <int kCount>
__global__ void __launch_bounds__(kEdgeThreads)
    add_edges_kernel(float* dweight, float* edges, Sorted sorted, std::int64_t C) {
  wait_for_predecessors();
  const int begin = blockIdx.x * kRun, last = min(begin + kRun, sorted.N) - 1;
  if (last == sorted.N - 1) return;
  const std::int32_t token = sorted.token[last], next = sorted.token[last + 1], first = sorted.token[begin],
                     previous = sorted.token[max(begin - 1, 0)];
  if (token != next) return;
  if (first == token && begin > 0 && previous == token) return;  // it began in an earlier run
  int runs = 0;  // runs in which the token continues: their first row is the token's; a warp tests 32 at a time
  for (int found = kWarpSize; found == kWarpSize; runs += found) {
    const std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) + 1 + runs + threadIdx.x % kWarpSize) * kRun;
    found = __popc(__ballot_sync(~0u, row < sorted.N && sorted.token[min(row, sorted.N - std::int64_t{1})] == token));
  }
  const std::int64_t c = (static_cast<std::int64_t>(blockIdx.y) * kEdgeThreads + threadIdx.x) * kCount;
  if (c >= C) return;
  Elements<float, kCount> sum, old;
  sum.load(edge_of(edges, blockIdx.x, 1, C) + c);
  old.load(dweight + token * C + c);
#pragma unroll 8
  for (int run = 1; run <= runs; ++run) {
    Elements<float, kCount> more;
    more.load(edge_of(edges, blockIdx.x + run, 0, C) + c);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum.value[k] += more.value[k];
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) old.value[k] += sum.value[k];
  old.store(dweight + token * C + c);
}

// ---- memory ------------------------------------------------------------------------------------------------------------
// Result and scratch of embedding_sort(): pairs[0] is the result.
struct SortMemory {
  Pairs pairs[2];
  int* counts;  // [kDigits][tiles]
  std::size_t bytes;
};

SortMemory carve(void* memory, std::int64_t N) {
  std::size_t offset = 0;
  const auto take = [&](std::int64_t elements) {
    void* address = memory != nullptr ? static_cast<char*>(memory) + offset : nullptr;
    offset += static_cast<std::size_t>(ceil_div(elements * 4, 16) * 16);
    return static_cast<std::int32_t*>(address);
  };
  SortMemory m{};
  for (Pairs& pairs : m.pairs) {
    pairs.token = take(N);
    pairs.n = take(N);
  }
  m.counts = take(kDigits * ceil_div(N, kTile));
  m.bytes = offset;
  return m;
}

void sort_by_launches(const SortMemory& m, const std::int32_t* tokens, int N, std::int64_t V, cudaStream_t stream) {
  const int tiles = static_cast<int>(ceil_div(N, kTile));
  int passes = 1;
  while ((V - 1) >> (passes * kDigitBits) > 0) ++passes;
  Pairs from{const_cast<std::int32_t*>(tokens), nullptr};
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * kDigitBits;
    const Pairs to = m.pairs[(passes - 1 - pass) % 2];
    count_digits_kernel<<<tiles, kSortThreads, 0, stream>>>(m.counts, from.token, N, shift);
    check_launch("embedding_sort: count");
    scan_counts_kernel<<<1, kScanThreads, 0, stream>>>(m.counts, kDigits * tiles);
    check_launch("embedding_sort: scan");
    move_pairs_kernel<<<tiles, kSortThreads, 0, stream>>>(to, from, m.counts, N, shift);
    check_launch("embedding_sort: move");
    from = to;
  }
}

void sort_in_cluster(const SortMemory& m, const std::int32_t* tokens, int N, std::int64_t V, int capacity,
                     cudaStream_t stream) {
  const std::size_t bytes = cluster_sort_bytes(capacity);
  check(cudaFuncSetAttribute(cluster_sort_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "embedding_sort");
  launch_clustered(cluster_sort_kernel, dim3(kSortCluster), dim3(kClusterThreads), bytes, stream, kSortCluster,
                   "embedding_sort", m.pairs[0], tokens, N, V, capacity);
}

template <typename T, int kCount>
void sum_rows(float* dweight, const T* dout, const Sorted& sorted, float* edges, std::int64_t C, float scale,
              bool overlapping, cudaStream_t stream) {
  const unsigned runs = static_cast<unsigned>(ceil_div(sorted.N, kRun));
  const dim3 grid(runs, static_cast<unsigned>(ceil_div(C, kSumThreads * kCount)));
  sum_runs_kernel<T, kCount><<<grid, kSumThreads, 0, stream>>>(dweight, edges, dout, sorted, C, scale);
  check_launch("embedding_backward: sums");
  const dim3 edge_grid(runs, static_cast<unsigned>(ceil_div(C, kEdgeThreads * kCount)));
  launch_chained(add_edges_kernel<kCount>, edge_grid, dim3(kEdgeThreads), 0, stream, overlapping,
                 "embedding_backward: edges", dweight, edges, sorted, C);
}

}  // namespace

template <typename T, typename R>
void embedding_forward(R* out, const std::int32_t* tokens, const T* weight, std::int64_t N, std::int64_t C,
                       cudaStream_t stream, float scale) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  const unsigned blocks = static_cast<unsigned>(N);
  with_count<kPack>(C % kPack == 0 && aligned_to_16(out, weight), [&](auto count) {
    forward_kernel<T, R, count><<<blocks, kCopyThreads, 0, stream>>>(out, tokens, weight, C, scale);
  });
  check_launch("embedding_forward");
}

void embedding_sort(void* sorted, const std::int32_t* tokens, std::int64_t N, std::int64_t V, cudaStream_t stream) {
  if (N == 0) return;
  const SortMemory m = carve(sorted, N);
  const std::int64_t capacity = ceil_div(N, kSortCluster);
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
      cluster_sort_bytes(capacity) <=
          static_cast<std::size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))) {
    sort_in_cluster(m, tokens, static_cast<int>(N), V, static_cast<int>(capacity), stream);
  } else {
    sort_by_launches(m, tokens, static_cast<int>(N), V, stream);
  }
}

std::size_t embedding_sort_bytes(std::int64_t N) {
  return carve(nullptr, N).bytes;
}

template <typename T>
void embedding_backward(float* dweight, const T* dout, void* sorted, std::int64_t N, std::int64_t C, void* workspace,
                        cudaStream_t stream, float scale) {
  if (N == 0) return;
  const Pairs pairs = carve(sorted, N).pairs[0];
  const Sorted order{pairs.token, pairs.n, static_cast<int>(N)};
  float* edges = static_cast<float*>(workspace);
  const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  with_count<kSumColumns>(C % kSumColumns == 0 && aligned_to_16(dweight, dout), [&](auto count) {
    sum_rows<T, count>(dweight, dout, order, edges, C, scale, hopper, stream);
  });
}

std::size_t embedding_backward_workspace(std::int64_t N, std::int64_t C) {
  return static_cast<std::size_t>(ceil_div(N, kRun) * 2 * C) * sizeof(float);
}

#define WEFT_INSTANTIATE(T, R)                                                                                       \
  template void embedding_forward<T, R>(R*, const std::int32_t*, const T*, std::int64_t, std::int64_t, cudaStream_t, \
                                        float);
WEFT_INSTANTIATE(float, float)
WEFT_INSTANTIATE(bf16, bf16)
WEFT_INSTANTIATE(bf16, float)
WEFT_INSTANTIATE(fp16, fp16)
WEFT_INSTANTIATE(fp16, float)
#undef WEFT_INSTANTIATE
#define WEFT_INSTANTIATE(T) \
  template void embedding_backward<T>(float*, const T*, void*, std::int64_t, std::int64_t, void*, cudaStream_t, float);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
