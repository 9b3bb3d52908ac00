// Causal attention, forward, in seven steps, from three kernels around a T x T matrix to the wgmma kernel that training
// runs. The problem is AttentionProblem of ladder.h; Dao et al., 2022 (FlashAttention) is the source of steps 2 to 7.
//
// Operations: 4 B NH T^2 HS, half of them because of the causal mask. Bytes that must move are few (Q, K, V and out once),
// so the floor is the tensor cores' time, and the steps are about one question: what keeps the operands on their way to
// the multipliers? Letters: B batch, T tokens, NH query heads, NKV key/value heads, HS head size.

#include <cstdint>

#include "dev/ladder/ladder.h"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/attention/train/paths.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::ladder {

namespace {

using cuda::check;
using cuda::check_launch;

constexpr int kWarp = 32;
constexpr float kLog2E = 1.4426950408889634f;  // e^x = 2^(x log2 e), and 2^x is what the hardware computes

unsigned blocks_for(std::int64_t count, int per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// The batch, query head and key/value head of one of B * NH.
struct Head {
  std::int64_t b, h, kv;
};
__device__ Head head_of(const AttentionShape& shape, std::int64_t index) {
  const std::int64_t h = index % shape.NH;
  return {index / shape.NH, h, h / (shape.NH / shape.NKV)};
}

// ---- step 1: three kernels and a T x T matrix -------------------------------------------------------------------------
// S = Q K^T scale; P = softmax of each row; out = P V, each as the formula says it, in fp32. S alone is 4 B NH T^2 bytes
// (4.3 GB for 16,384 tokens at T 2048 and 32 heads) and crosses memory four times.
__global__ void all_scores(AttentionProblem p) {
  const int key = blockIdx.x * blockDim.x + threadIdx.x, query = blockIdx.y * blockDim.y + threadIdx.y;
  const int T = static_cast<int>(p.shape.TQ), HS = static_cast<int>(p.shape.HS);
  if (query >= T || key > query) return;  // causal: nobody reads the rest of S
  const Head head = head_of(p.shape, blockIdx.z);
  const bf16 *q = p.q.at(head.b, query, head.h), *k = p.k.at(head.b, key, head.kv);
  float dot = 0;
  for (int d = 0; d < HS; ++d) dot += __bfloat162float(q[d]) * __bfloat162float(k[d]);
  p.scores[(static_cast<std::int64_t>(blockIdx.z) * T + query) * T + key] = dot * p.shape.scale;
}

__global__ void softmax_of_rows(AttentionProblem p) {
  const std::int64_t T = p.shape.TQ, row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= p.shape.B * p.shape.NH * T) return;
  float* scores = p.scores + row * T;
  const int keys = static_cast<int>(row % T) + 1;
  float maximum = scores[0], sum = 0;
  for (int key = 1; key < keys; ++key) maximum = fmaxf(maximum, scores[key]);
  for (int key = 0; key < keys; ++key) sum += scores[key] = expf(scores[key] - maximum);
  for (int key = 0; key < keys; ++key) scores[key] /= sum;
}

__global__ void weighted_values(AttentionProblem p) {
  const std::int64_t T = p.shape.TQ, query = blockIdx.x;
  const int d = threadIdx.x;
  const Head head = head_of(p.shape, blockIdx.y);
  const float* weights = p.scores + (static_cast<std::int64_t>(blockIdx.y) * T + query) * T;
  float sum = 0;
  for (std::int64_t key = 0; key <= query; ++key)
    sum += weights[key] * __bfloat162float(p.v.at(head.b, key, head.kv)[d]);
  p.out.at(head.b, query, head.h)[d] = __float2bfloat16_rn(sum);
}

void launch_three_kernels(const AttentionProblem& p, cudaStream_t stream) {
  const AttentionShape& shape = p.shape;
  const auto heads = static_cast<unsigned>(shape.B * shape.NH), T = static_cast<unsigned>(shape.TQ);
  const dim3 tile(16, 16);
  all_scores<<<dim3(blocks_for(T, 16), blocks_for(T, 16), heads), tile, 0, stream>>>(p);
  check_launch("ladder: attention, scores");
  softmax_of_rows<<<blocks_for(shape.B * shape.NH * shape.TQ, 128), 128, 0, stream>>>(p);
  check_launch("ladder: attention, softmax");
  weighted_values<<<dim3(T, heads), static_cast<unsigned>(shape.HS), 0, stream>>>(p);
  check_launch("ladder: attention, weighted values");
}

// ---- step 2: one thread a query, online softmax -----------------------------------------------------------------------
// The softmax of a row can be computed in one pass over the keys: keep the maximum so far, the sum of exponentials and
// the weighted sum of values relative to it, and rescale both when the maximum grows. So no T x T matrix exists, and
// memory is no longer what is waited for. All threads of a block read the same key at the same time, but each for itself.
struct alignas(16) Eight {
  bf16 value[8];
};
__device__ Eight load(const bf16* address) {
  Eight eight;
  *reinterpret_cast<int4*>(&eight) = *reinterpret_cast<const int4*>(address);
  return eight;
}

template <int HS>
__global__ void __launch_bounds__(128) one_thread_a_query(AttentionProblem p) {
  const std::int64_t query = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (query >= p.shape.TQ) return;
  const Head head = head_of(p.shape, blockIdx.x);
  const float scale = p.shape.scale * kLog2E;
  Eight q[HS / 8];  // as bf16: 64 registers instead of 128 at head size 128, where the sums need 128
#pragma unroll
  for (int i = 0; i < HS / 8; ++i) q[i] = load(p.q.at(head.b, query, head.h) + i * 8);
  float maximum = -INFINITY, sum = 0, out[HS];
#pragma unroll
  for (int d = 0; d < HS; ++d) out[d] = 0;
  for (std::int64_t key = 0; key <= query; ++key) {
    const bf16 *k = p.k.at(head.b, key, head.kv), *v = p.v.at(head.b, key, head.kv);
    float score = 0;
#pragma unroll
    for (int i = 0; i < HS / 8; ++i) {
      const Eight eight = load(k + i * 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) score += __bfloat162float(q[i].value[j]) * __bfloat162float(eight.value[j]);
    }
    score *= scale;
    if (score > maximum) {
      const float shrink = exp2f(maximum - score);  // 0 for the first key: 2^-infinity
      maximum = score;
      sum *= shrink;
#pragma unroll
      for (int d = 0; d < HS; ++d) out[d] *= shrink;
    }
    const float weight = exp2f(score - maximum);
    sum += weight;
#pragma unroll
    for (int i = 0; i < HS / 8; ++i) {
      const Eight eight = load(v + i * 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) out[i * 8 + j] += weight * __bfloat162float(eight.value[j]);
    }
  }
  bf16* to = p.out.at(head.b, query, head.h);
#pragma unroll
  for (int d = 0; d < HS; ++d) to[d] = __float2bfloat16_rn(out[d] / sum);
}

void launch_one_thread_a_query(const AttentionProblem& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.shape.B * p.shape.NH), blocks_for(p.shape.TQ, 128));
  if (p.shape.HS == 64) {
    one_thread_a_query<64><<<grid, 128, 0, stream>>>(p);
  } else {
    one_thread_a_query<128><<<grid, 128, 0, stream>>>(p);
  }
  check_launch("ladder: attention, one thread a query");
}

// ---- step 3: tiles in shared memory, fp32 -----------------------------------------------------------------------------
// A block has 64 queries and walks over the keys in tiles of 32, so that each K and V element that comes from memory is
// used 64 times. Within the block a thread computes 4 x 4 scores and 4 x HS/8 outputs in registers: 8 numbers read from
// shared memory feed 16 multiply-adds. The 8 threads that share 4 queries are neighbours in a warp, so that row maxima and
// sums are shuffles and P needs no barrier of the block. This is about as far as fp32 multiply-adds go.
namespace tiled {
constexpr int kQueries = 64, kKeys = 32, kThreads = 128;

template <int HS>
struct Tiles {
  // One element of padding turns columns that lie in one bank of shared memory into columns that lie in all of them.
  float q[kQueries][HS + 1];
  float k[kKeys][HS + 1];
  float v[kKeys][HS];
  float weights[kQueries][kKeys + 1];
};

// Rows first .. first + kRows of a head as fp32; zeros past the last token.
template <int kRows, int HS, int kWidth>
__device__ void copy_rows(float (&to)[kRows][kWidth], const HeadViewOf<const bf16>& from, std::int64_t b, int first,
                          std::int64_t h, int tokens) {
  for (int index = threadIdx.x; index < kRows * HS / 8; index += kThreads) {
    const int row = index / (HS / 8), column = index % (HS / 8) * 8;
    Eight eight = {};
    if (first + row < tokens) eight = load(from.at(b, first + row, h) + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[row][column + i] = __bfloat162float(eight.value[i]);
  }
}

__device__ float maximum_of_eight(float value) {
  for (int distance = 4; distance > 0; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}
__device__ float sum_of_eight(float value) {
  for (int distance = 4; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

template <int HS>
__global__ void __launch_bounds__(kThreads) kernel(AttentionProblem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Tiles<HS>& tiles = *reinterpret_cast<Tiles<HS>*>(memory);
  const Head head = head_of(p.shape, blockIdx.x);
  const int T = static_cast<int>(p.shape.TQ), first_query = static_cast<int>(blockIdx.y) * kQueries;
  const int group = threadIdx.x / 8, lane = threadIdx.x % 8;  // this thread's queries are group * 4 + 0 .. 3
  const float scale = p.shape.scale * kLog2E;
  float out[4][HS / 8], maximum[4], sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    maximum[i] = -INFINITY, sum[i] = 0;
#pragma unroll
    for (int j = 0; j < HS / 8; ++j) out[i][j] = 0;
  }
  copy_rows<kQueries, HS>(tiles.q, p.q, head.b, first_query, head.h, T);
  const int end = min(T, first_query + kQueries);  // keys that any query of the block sees
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    __syncthreads();  // everybody is done with the tiles of the step before
    copy_rows<kKeys, HS>(tiles.k, p.k, head.b, first_key, head.kv, T);
    copy_rows<kKeys, HS>(tiles.v, p.v, head.b, first_key, head.kv, T);
    __syncthreads();

    float scores[4][4] = {};  // queries group * 4 + i, keys lane + 8 j
    for (int d = 0; d < HS; ++d) {
      float q[4], k[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = tiles.q[group * 4 + i][d], k[i] = tiles.k[lane + 8 * i][d];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[i][j] += q[i] * k[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = first_query + group * 4 + i;
      float largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = first_key + lane + 8 * j <= query ? scores[i][j] * scale : -INFINITY;
        largest = fmaxf(largest, scores[i][j]);
      }
      // Finite from the first tile on: every query sees key 0.
      const float raised = fmaxf(maximum[i], maximum_of_eight(largest)), shrink = exp2f(maximum[i] - raised);
      maximum[i] = raised;
      sum[i] *= shrink;
#pragma unroll
      for (int j = 0; j < HS / 8; ++j) out[i][j] *= shrink;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = exp2f(scores[i][j] - raised);
        sum[i] += weight;  // of this thread's keys; the eight add up at the end
        tiles.weights[group * 4 + i][lane + 8 * j] = weight;
      }
    }
    __syncwarp();  // a row of weights is written and read by eight lanes of one warp
    for (int key = 0; key < kKeys; ++key) {
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weight[i] = tiles.weights[group * 4 + i][key];
#pragma unroll
      for (int j = 0; j < HS / 8; ++j) {
        const float v = tiles.v[key][lane + 8 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i][j] += weight[i] * v;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int query = first_query + group * 4 + i;
    const float inverse = 1 / sum_of_eight(sum[i]);  // all lanes take part, those without a query too
    if (query >= T) continue;
    bf16* to = p.out.at(head.b, query, head.h);
#pragma unroll
    for (int j = 0; j < HS / 8; ++j) to[lane + 8 * j] = __float2bfloat16_rn(out[i][j] * inverse);
  }
}

template <int HS>
void launch(const AttentionProblem& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Tiles<HS>);
  check(cudaFuncSetAttribute(kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "ladder: attention, shared memory");
  const dim3 grid(static_cast<unsigned>(p.shape.B * p.shape.NH), blocks_for(p.shape.TQ, kQueries));
  kernel<HS><<<grid, kThreads, kBytes, stream>>>(p);
  check_launch("ladder: attention, fp32 tiles");
}
}  // namespace tiled

void launch_tiled(const AttentionProblem& p, cudaStream_t stream) {
  p.shape.HS == 64 ? tiled::launch<64>(p, stream) : tiled::launch<128>(p, stream);
}

// ---- what steps 4 and 5 share: tensor cores by mma.sync ---------------------------------------------------------------
// A warp has 16 queries and multiplies by mma.m16n8k16: D [16, 8] += A [16, 16] B [16, 8], bf16 operands, fp32 sums. With
// lane = 4 g + t, a lane holds of D the elements (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1); of A pairs at columns 2t and
// 2t+8 of rows g and g+8; of B pairs at rows 2t and 2t+8 of column g (PTX ISA, "Matrix fragments for mma.m16n8k16").
// Two neighbouring D tiles, rounded to bf16, have the layout of an A tile: P goes from one GEMM into the next in
// registers. ldmatrix loads four 8 x 8 matrices from shared memory into this layout; lane l names row l % 8 of matrix
// l / 8. Rows are padded by 16 bytes, so that the eight rows of a matrix lie in different banks.
namespace mma {
constexpr int kQueries = 64, kKeys = 64, kThreads = 128, kWarpQueries = 16;

template <int HS>
constexpr int kRow = HS + 8;  // elements between rows of a tile

__device__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ void load_matrices(unsigned (&to)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ void load_matrices_transposed(unsigned (&to)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ unsigned two(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// The state of a warp's 16 queries. A lane has rows g and g + 8; the four lanes of equal g share a row.
template <int HS>
struct Warp {
  unsigned q[HS / 16][4];
  float out[HS / 8][4];
  float maximum[2], sum[2];

  // `tile` is the warp's first row of queries.
  __device__ void begin(const bf16* tile) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < HS / 16; ++i) load_matrices(q[i], tile + lane % 16 * kRow<HS> + i * 16 + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < HS / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  // One tile of keys. `first_query`: the warp's; `scale` includes log2 e.
  __device__ void step(const bf16* keys, const bf16* values, int first_query, int first_key, float scale) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    float scores[kKeys / 8][4] = {};
    // B = K^T: column g is key g, rows are dimensions; K lies in memory as B's columns do, so ldmatrix is plain.
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const bf16* row = keys + (n * 16 + lane / 16 * 8 + lane % 8) * kRow<HS> + lane / 8 % 2 * 8;
#pragma unroll
      for (int i = 0; i < HS / 16; ++i) {
        unsigned b[4];
        load_matrices(b, row + i * 16);
        multiply_add(scores[2 * n], q[i], b[0], b[1]);
        multiply_add(scores[2 * n + 1], q[i], b[2], b[3]);
      }
    }
    // Keys after a query are masked; only tiles that the diagonal crosses have any.
    const bool masked = first_key + kKeys - 1 > first_query;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + half * 8 + g;
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n][half * 2 + i];
          score = masked && first_key + n * 8 + t * 2 + i > query ? -INFINITY : score * scale;
          largest = fmaxf(largest, score);
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      // Finite from the first tile on: every query sees key 0.
      const float raised = fmaxf(maximum[half], largest), shrink = exp2f(maximum[half] - raised);
      maximum[half] = raised;
      sum[half] *= shrink;
#pragma unroll
      for (int n = 0; n < HS / 8; ++n) out[n][half * 2] *= shrink, out[n][half * 2 + 1] *= shrink;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n][half * 2 + i];
          score = exp2f(score - raised);
          sum[half] += score;  // of this lane's columns; the four lanes add up at the end
        }
      }
    }
    // A = P, 16 keys at a time; B = V: column g is a dimension, rows are keys, so ldmatrix transposes.
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const unsigned a[4] = {two(scores[2 * k][0], scores[2 * k][1]), two(scores[2 * k][2], scores[2 * k][3]),
                             two(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                             two(scores[2 * k + 1][2], scores[2 * k + 1][3])};
      const bf16* row = values + (k * 16 + lane % 16) * kRow<HS> + lane / 16 * 8;
#pragma unroll
      for (int n = 0; n < HS / 16; ++n) {
        unsigned b[4];
        load_matrices_transposed(b, row + n * 16);
        multiply_add(out[2 * n], a, b[0], b[1]);
        multiply_add(out[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ void finish(const HeadViewOf<bf16>& view, const Head& head, int first_query, int T) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);  // all lanes take part
      total += __shfl_xor_sync(~0u, total, 2);
      const int query = first_query + half * 8 + g;
      if (query >= T) continue;
      bf16* row = view.at(head.b, query, head.h);
#pragma unroll
      for (int n = 0; n < HS / 8; ++n)
        *reinterpret_cast<unsigned*>(row + n * 8 + t * 2) = two(out[n][half * 2] / total, out[n][half * 2 + 1] / total);
    }
  }
};

template <int HS>
void set_shared_memory(void (*kernel)(AttentionProblem), int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "ladder: attention, shared memory");
}
}  // namespace mma

// ---- step 4: tensor cores ---------------------------------------------------------------------------------------------
// The same tiles and the same recurrence; the two GEMMs of a tile are mma.sync. Scores, P and out never leave the
// registers. Copies go through registers and between two barriers, so nobody computes while a tile arrives.
namespace tensor_cores {
using namespace mma;

template <int HS>
__device__ void copy_rows(bf16* to, const HeadViewOf<const bf16>& from, std::int64_t b, int first, std::int64_t h,
                          int tokens) {
  static_assert(kQueries == kKeys);
  for (int index = threadIdx.x; index < kKeys * HS / 8; index += kThreads) {
    const int row = index / (HS / 8), column = index % (HS / 8) * 8;
    Eight eight = {};  // zeros past the last token: a weight of 0 times whatever lies there could be NaN
    if (first + row < tokens) eight = load(from.at(b, first + row, h) + column);
    *reinterpret_cast<int4*>(to + row * kRow<HS> + column) = *reinterpret_cast<const int4*>(&eight);
  }
}

template <int HS>
__global__ void __launch_bounds__(kThreads) kernel(AttentionProblem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  bf16* queries = reinterpret_cast<bf16*>(memory);
  bf16 *keys = queries + kQueries * kRow<HS>, *values = keys + kKeys * kRow<HS>;
  const Head head = head_of(p.shape, blockIdx.x);
  const int T = static_cast<int>(p.shape.TQ), block_query = static_cast<int>(blockIdx.y) * kQueries;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpQueries, first_query = block_query + warp_row;
  copy_rows<HS>(queries, p.q, head.b, block_query, head.h, T);
  __syncthreads();
  Warp<HS> warp;
  warp.begin(queries + warp_row * kRow<HS>);
  const int end = min(T, block_query + kQueries);
  for (int first_key = 0; first_key < end; first_key += kKeys) {
    __syncthreads();  // everybody is done with the tiles of the step before
    copy_rows<HS>(keys, p.k, head.b, first_key, head.kv, T);
    copy_rows<HS>(values, p.v, head.b, first_key, head.kv, T);
    __syncthreads();
    warp.step(keys, values, first_query, first_key, p.shape.scale * kLog2E);
  }
  warp.finish(p.out, head, first_query, T);
}

template <int HS>
void launch(const AttentionProblem& p, cudaStream_t stream) {
  constexpr int kBytes = (kQueries + 2 * kKeys) * kRow<HS> * static_cast<int>(sizeof(bf16));
  set_shared_memory<HS>(kernel<HS>, kBytes);
  const dim3 grid(static_cast<unsigned>(p.shape.B * p.shape.NH), blocks_for(p.shape.TQ, kQueries));
  kernel<HS><<<grid, kThreads, kBytes, stream>>>(p);
  check_launch("ladder: attention, tensor cores");
}
}  // namespace tensor_cores

void launch_tensor_cores(const AttentionProblem& p, cudaStream_t stream) {
  p.shape.HS == 64 ? tensor_cores::launch<64>(p, stream) : tensor_cores::launch<128>(p, stream);
}

// ---- step 5: copies that run beside the arithmetic --------------------------------------------------------------------
// cp.async moves 16 bytes from global to shared memory without a register in between and without waiting. With two stages
// the next tile is under way while this one is multiplied, and one barrier a tile is enough. The blocks with the most keys
// start first, so that the last ones to finish are short.
namespace double_buffered {
using namespace mma;

// 16 bytes; zeros where not `valid` (the address is then not read, but it must be one).
__device__ void copy_async(bf16* to, const bf16* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

template <int HS>
__device__ void copy_rows(bf16* to, const HeadViewOf<const bf16>& from, std::int64_t b, int first, std::int64_t h,
                          int tokens) {
  static_assert(kQueries == kKeys);
  for (int index = threadIdx.x; index < kKeys * HS / 8; index += kThreads) {
    const int row = index / (HS / 8), column = index % (HS / 8) * 8;
    const bool valid = first + row < tokens;
    copy_async(to + row * kRow<HS> + column, from.at(b, valid ? first + row : 0, h) + column, valid);
  }
}

template <int HS>
__global__ void __launch_bounds__(kThreads) kernel(AttentionProblem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kTile = kKeys * kRow<HS>;
  bf16* queries = reinterpret_cast<bf16*>(memory);
  bf16* stages = queries + kTile;  // [2][keys, values]
  const Head head = head_of(p.shape, blockIdx.x);
  const int T = static_cast<int>(p.shape.TQ);
  const int block_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kQueries;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpQueries, first_query = block_query + warp_row;
  const auto fetch = [&](int first_key, int stage) {
    bf16* keys = stages + stage * 2 * kTile;
    copy_rows<HS>(keys, p.k, head.b, first_key, head.kv, T);
    copy_rows<HS>(keys + kTile, p.v, head.b, first_key, head.kv, T);
  };
  copy_rows<HS>(queries, p.q, head.b, block_query, head.h, T);
  fetch(0, 0);
  Warp<HS> warp;
  const int end = min(T, block_query + kQueries);
  int stage = 0;
  for (int first_key = 0; first_key < end; first_key += kKeys, stage ^= 1) {
    asm volatile("cp.async.wait_all;" ::: "memory");  // this thread's copies of this stage have arrived,
    __syncthreads();                                  // and everybody's; and everybody is done with the other stage
    if (first_key == 0) warp.begin(queries + warp_row * kRow<HS>);
    if (first_key + kKeys < end) fetch(first_key + kKeys, stage ^ 1);
    const bf16* keys = stages + stage * 2 * kTile;
    warp.step(keys, keys + kTile, first_query, first_key, p.shape.scale * kLog2E);
  }
  warp.finish(p.out, head, first_query, T);
}

template <int HS>
void launch(const AttentionProblem& p, cudaStream_t stream) {
  constexpr int kBytes = (kQueries + 4 * kKeys) * kRow<HS> * static_cast<int>(sizeof(bf16));
  set_shared_memory<HS>(kernel<HS>, kBytes);
  const dim3 grid(static_cast<unsigned>(p.shape.B * p.shape.NH), blocks_for(p.shape.TQ, kQueries));
  kernel<HS><<<grid, kThreads, kBytes, stream>>>(p);
  check_launch("ladder: attention, double buffering");
}
}  // namespace double_buffered

void launch_double_buffered(const AttentionProblem& p, cudaStream_t stream) {
  p.shape.HS == 64 ? double_buffered::launch<64>(p, stream) : double_buffered::launch<128>(p, stream);
}

// ---- step 6: weft's kernel for every GPU from sm_80 on ----------------------------------------------------------------
// llmc/cuda/op/attention/train/portable_forward.cu: 32 queries a warp, so that each fragment of K and V feeds two mma; a maximum
// that moves only when it must, so that `out` is seldom rescaled; results staged in shared memory and stored 16 bytes a
// lane.
void launch_portable(const AttentionProblem& p, cudaStream_t stream) {
  cuda::portable_forward<bf16>({p.shape, p.out, nullptr, p.q, p.k, p.v}, stream);
}

// ---- step 7: weft's kernel for Hopper ---------------------------------------------------------------------------------
// llmc/cuda/op/attention/train/hopper_forward.cu: warpgroups multiply by wgmma straight from shared memory, a producer warp
// brings tiles by tensor copies (TMA) through a ring, two or three consumer warpgroups take turns: one computes
// exponentials while another has the tensor cores.
void launch_hopper(const AttentionProblem& p, cudaStream_t stream) {
  cuda::hopper_forward<bf16>({p.shape, p.out, nullptr, p.q, p.k, p.v}, stream);
}

bool has_hopper() {
  return cuda::hopper_multiprocessors() > 0;
}

}  // namespace

const std::vector<Step<AttentionProblem>>& attention_steps() {
  static const std::vector<Step<AttentionProblem>> steps = {
      {"1 three kernels, T x T matrix", launch_three_kernels},
      {"2 one thread a query, online softmax", launch_one_thread_a_query},
      {"3 tiles in shared memory, fp32", launch_tiled},
      {"4 tensor cores: mma.sync, ldmatrix", launch_tensor_cores},
      {"5 cp.async, two stages", launch_double_buffered},
      {"6 weft's portable kernel", launch_portable},
      {"7 weft's Hopper kernel: wgmma, TMA", launch_hopper, has_hopper},
  };
  return steps;
}

}  // namespace weft::ladder
