// Attention on the CPU by the flash recurrence, block by block: no T x T matrix is stored. attention.cpp is the definition.
//
// Forward, for one query block Q and each key block K, V in turn (Dao et al., 2022, algorithm 1):
//
//   S = scale Q K^T;   m' = max(m, rowmax S);   P = e^(S - m');
//   l = l e^(m - m') + rowsum P;   O = O e^(m - m') + P V
//
// and at the end O / l and lse = m + log l.
//
// Backward recomputes P = e^(S - lse) block by block; with D = rowsum(dO * O):
//
//   dV += P^T dO;  dP = dO V^T;  dS = P * (dP - D);  dQ += scale dS K;  dK += scale dS^T Q.
//
// Blocks of 64 queries by 64 keys: S fits the first-level cache for every head dimension, and each copied block of K and V
// serves 64 queries. Blocks that the causal mask hides completely are skipped. The blocks are copied into scratch whose rows
// are padded with zeros to full vectors, so that the GEMMs share one kernel without remainders in their inner loop; K and V
// are also stored transposed where a GEMM sums over the head dimension.
//
// With few queries (decode) those copies would cost more than the arithmetic: such a call goes row by row over K and V where
// they lie.
//
// Forward: a thread has one query block. Backward: a thread has one K/V head of one sequence and adds its query heads in
// order. So no two threads write the same element and no sum depends on the number of threads.

#include "llmc/cpu/attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "llmc/cpu/dot_products.h"
#include "llmc/cpu/exp.h"
#include "llmc/cpu/lanes.h"

namespace weft::cpu {

namespace {

constexpr std::int64_t kBlock = 64;      // queries, and keys, of a block
constexpr std::int64_t kFewQueries = 8;  // up to this many queries go row by row
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row-major block in scratch or, by strides, its transpose: element (i, j) is data[i * row + j * column].
struct Strided {
  const float* data;
  std::int64_t row, column;
};

// c [Rows, Vectors * kLanes] += a [Rows, K] b [K, Vectors * kLanes]. Unrolled, so that the sums stay in
// registers: with 4 x 2 of them each loaded vector of b serves 4 additions, and 8 independent sums hide the
// latency of one.
template <int Rows, int Vectors>
void register_gemm(float* c, std::int64_t c_stride, const Strided& a, const float* b, std::int64_t b_stride,
                   std::int64_t K) {
  Lanes sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sums[i][j] = *lanes(c + i * c_stride + j * kLanes);
  }
  for (std::int64_t k = 0; k < K; ++k) {
    const float* column = a.data + k * a.column;
    const float* row = b + k * b_stride;
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j)
        sums[i][j] = multiply_add(all_lanes(column[i * a.row]), *lanes(row + j * kLanes), sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) *lanes(c + i * c_stride + j * kLanes) = sums[i][j];
  }
}

// c [M, N] += a [M, K] b [K, N]; M a multiple of 4, N of kLanes.
void add_gemm(float* c, std::int64_t c_stride, const Strided& a, const float* b, std::int64_t b_stride, std::int64_t M,
              std::int64_t N, std::int64_t K) {
  constexpr int kRows = 4;
  for (std::int64_t m = 0; m < M; m += kRows) {
    const Strided a_rows = {a.data + m * a.row, a.row, a.column};
    float* c_rows = c + m * c_stride;
    std::int64_t n = 0;
    for (; n + 2 * kLanes <= N; n += 2 * kLanes) {
      register_gemm<kRows, 2>(c_rows + n, c_stride, a_rows, b + n, b_stride, K);
    }
    if (n < N) register_gemm<kRows, 1>(c_rows + n, c_stride, a_rows, b + n, b_stride, K);
  }
}

// One thread's blocks. HP is the padded head dimension.
class Scratch {
 public:
  Scratch(std::int64_t HP, int blocks)
      : HP_(HP),
        floats_(blocks * kBlock * HP + 2 * kBlock * kBlock),
        memory_(static_cast<float*>(::operator new(bytes(), kAlignment))) {}
  float* head_block(int index) { return thread_part() + index * kBlock * HP_; }  // [64, HP] or [HP, 64]
  float* score_block(int index) {                                                // [64, 64]
    return thread_part() + floats_ - (index + 1) * kBlock * kBlock;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::size_t bytes() const { return static_cast<std::size_t>(omp_get_max_threads() * floats_) * sizeof(float); }
  float* thread_part() { return memory_.get() + omp_get_thread_num() * floats_; }

  std::int64_t HP_, floats_;
  std::unique_ptr<float, Free> memory_;
};

// block [64, HP] = count tokens from `first` of a head, times scale; the rest is zero.
void copy_tokens(float* block, std::int64_t HP, ConstHeadView view, std::int64_t b, std::int64_t first, std::int64_t h,
                 std::int64_t count, std::int64_t HS, float scale) {
  for (std::int64_t t = 0; t < kBlock; ++t) {
    float* row = block + t * HP;
    if (t >= count) {
      std::fill(row, row + HP, 0.0f);
      continue;
    }
    const float* token = view.at(b, first + t, h);
#pragma omp simd
    for (std::int64_t d = 0; d < HS; ++d) row[d] = token[d] * scale;
    std::fill(row + HS, row + HP, 0.0f);
  }
}

// transposed [HP, 64] from block [64, HP].
void transpose(float* transposed, const float* block, std::int64_t HP) {
  for (std::int64_t d = 0; d < HP; d += kLanes) {
    for (std::int64_t t = 0; t < kBlock; ++t) {
      for (std::int64_t i = 0; i < kLanes; ++i) transposed[(d + i) * kBlock + t] = block[t * HP + d + i];
    }
  }
}

void store_tokens(HeadView view, const float* block, std::int64_t HP, std::int64_t b, std::int64_t first,
                  std::int64_t h, std::int64_t count, std::int64_t HS) {
  for (std::int64_t t = 0; t < count; ++t) std::copy(block + t * HP, block + t * HP + HS, view.at(b, first + t, h));
}

// How many of the keys query t sees.
std::int64_t visible_keys(const AttentionShape& shape, std::int64_t t) {
  return shape.causal ? shape.TK - shape.TQ + t + 1 : shape.TK;
}

// The keys that any of the queries [first, first + count) sees.
std::int64_t visible_to_block(const AttentionShape& shape, std::int64_t first, std::int64_t count) {
  return visible_keys(shape, first + count - 1);
}

// ---- forward ----------------------------------------------------------------------------------------------

// Row by row: the scores of one query over all its keys, their softmax, the weighted sum of the values.
void forward_row(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                 ConstHeadView v, std::int64_t b, std::int64_t h, std::int64_t t, float* scores) {
  const std::int64_t HS = shape.HS, kv = h / (shape.NH / shape.NKV), keys = visible_keys(shape, t);
  const float* query = q.at(b, t, h);
  float maximum = -kInfinity;
  for (std::int64_t j = 0; j < keys; ++j) {
    const float* key = k.at(b, j, kv);
    scores[j] = dot_product(query, key, HS) * shape.scale;
    maximum = scores[j] > maximum ? scores[j] : maximum;
  }
#pragma omp simd
  for (std::int64_t j = 0; j < keys; ++j) scores[j] = exp_f32(scores[j] - maximum);
  const float sum = sum_of(scores, keys);
  float* result = out.at(b, t, h);
  std::fill(result, result + HS, 0.0f);
  for (std::int64_t j = 0; j < keys; ++j) {
    const float weight = scores[j] / sum;
    const float* value = v.at(b, j, kv);
#pragma omp simd
    for (std::int64_t d = 0; d < HS; ++d) result[d] = multiply_add(weight, value[d], result[d]);
  }
  if (lse) lse[(b * shape.NH + h) * shape.TQ + t] = maximum + std::log(sum);
}

void forward_by_rows(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                     ConstHeadView v) {
  std::vector<float> scores(static_cast<std::size_t>(omp_get_max_threads() * shape.TK));
#pragma omp parallel for collapse(3) schedule(static)
  for (std::int64_t b = 0; b < shape.B; ++b) {
    for (std::int64_t h = 0; h < shape.NH; ++h) {
      for (std::int64_t t = 0; t < shape.TQ; ++t) {
        forward_row(shape, out, lse, q, k, v, b, h, t, scores.data() + omp_get_thread_num() * shape.TK);
      }
    }
  }
}

// Keys that a query does not see get the score -infinity. Columns past `keys` are the block's padding.
void mask_scores(float* scores, const AttentionShape& shape, std::int64_t first_query, std::int64_t first_key) {
  for (std::int64_t t = 0; t < kBlock; ++t) {
    const std::int64_t seen = std::min(visible_keys(shape, first_query + t), shape.TK) - first_key;
    float* row = scores + t * kBlock;
    if (seen < kBlock) std::fill(row + std::max<std::int64_t>(seen, 0), row + kBlock, -kInfinity);
  }
}

// The running softmax of one query block.
struct OnlineSoftmax {
  float maximum[kBlock], sum[kBlock];

  OnlineSoftmax() {
    std::fill(maximum, maximum + kBlock, -kInfinity);
    std::fill(sum, sum + kBlock, 0.0f);
  }

  // Scores become weights relative to the new maximum; what was accumulated before shrinks to it.
  void update(float* scores, float* accumulated, std::int64_t HP) {
    for (std::int64_t t = 0; t < kBlock; ++t) {
      float* row = scores + t * kBlock;
      float largest = maximum[t];
#pragma omp simd reduction(max : largest)
      for (std::int64_t j = 0; j < kBlock; ++j) largest = row[j] > largest ? row[j] : largest;
#pragma omp simd
      for (std::int64_t j = 0; j < kBlock; ++j) row[j] = exp_f32(row[j] - largest);
      const float shrink = exp_f32(maximum[t] - largest);
      sum[t] = multiply_add(sum[t], shrink, sum_of(row, kBlock));
      maximum[t] = largest;
      float* out = accumulated + t * HP;
#pragma omp simd
      for (std::int64_t d = 0; d < HP; ++d) out[d] *= shrink;
    }
  }
};

void forward_block(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                   ConstHeadView v, std::int64_t b, std::int64_t h, std::int64_t first_query, Scratch& scratch) {
  const std::int64_t HS = shape.HS, HP = padded(HS), kv = h / (shape.NH / shape.NKV);
  const std::int64_t queries = std::min(kBlock, shape.TQ - first_query);
  float *Q = scratch.head_block(0), *K = scratch.head_block(1), *KT = scratch.head_block(2);
  float* V = K;  // K is done with once it is transposed
  float *O = scratch.head_block(3), *S = scratch.score_block(0);
  copy_tokens(Q, HP, q, b, first_query, h, queries, HS, shape.scale);
  std::fill(O, O + kBlock * HP, 0.0f);
  OnlineSoftmax softmax;
  const std::int64_t end = visible_to_block(shape, first_query, queries);
  for (std::int64_t first_key = 0; first_key < end; first_key += kBlock) {
    const std::int64_t keys = std::min(kBlock, shape.TK - first_key);
    copy_tokens(K, HP, k, b, first_key, kv, keys, HS, 1.0f);
    transpose(KT, K, HP);
    std::fill(S, S + kBlock * kBlock, 0.0f);
    add_gemm(S, kBlock, {Q, HP, 1}, KT, kBlock, kBlock, kBlock, HP);
    mask_scores(S, shape, first_query, first_key);
    softmax.update(S, O, HP);
    copy_tokens(V, HP, v, b, first_key, kv, keys, HS, 1.0f);
    add_gemm(O, HP, {S, kBlock, 1}, V, HP, kBlock, HP, kBlock);
  }
  for (std::int64_t t = 0; t < queries; ++t) {
    const float inverse = 1.0f / softmax.sum[t];
    for (std::int64_t d = 0; d < HS; ++d) O[t * HP + d] *= inverse;
    if (lse) lse[(b * shape.NH + h) * shape.TQ + first_query + t] = softmax.maximum[t] + std::log(softmax.sum[t]);
  }
  store_tokens(out, O, HP, b, first_query, h, queries, HS);
}

// ---- backward ---------------------------------------------------------------------------------------------

// D[t] = sum over d of dout * out.
void row_products(float* D, const AttentionShape& shape, ConstHeadView dout, ConstHeadView out, std::int64_t b,
                  std::int64_t h) {
  for (std::int64_t t = 0; t < shape.TQ; ++t) {
    D[t] = dot_product(dout.at(b, t, h), out.at(b, t, h), shape.HS);
  }
}

// Scores become P = e^(S - lse), dP becomes dS = P * (dP - D); rows past `queries` become 0.
void softmax_backward(float* S, float* dP, const float* lse, const float* D, std::int64_t queries) {
  for (std::int64_t t = 0; t < kBlock; ++t) {
    float *score = S + t * kBlock, *gradient = dP + t * kBlock;
    if (t >= queries) {
      std::fill(score, score + kBlock, 0.0f);
      std::fill(gradient, gradient + kBlock, 0.0f);
      continue;
    }
    const float log_sum = lse[t], mean = D[t];
#pragma omp simd
    for (std::int64_t j = 0; j < kBlock; ++j) {
      score[j] = exp_f32(score[j] - log_sum);
      gradient[j] = score[j] * (gradient[j] - mean);
    }
  }
}

struct BackwardViews {
  HeadView dq, dk, dv;
  ConstHeadView dout, out, q, k, v;
  const float* lse;
};

// All query blocks of the group's heads against one K/V head of one sequence. dQ is accumulated in place, in
// its view.
void backward_kv_head(const AttentionShape& shape, const BackwardViews& views, std::int64_t b, std::int64_t kv,
                      Scratch& scratch, float* D) {
  const std::int64_t HS = shape.HS, HP = padded(HS), group = shape.NH / shape.NKV;
  float *Q = scratch.head_block(0), *K = scratch.head_block(1), *KT = scratch.head_block(2);
  float *VT = scratch.head_block(3), *dO = scratch.head_block(4), *dQ = scratch.head_block(5);
  float *dK = scratch.head_block(6), *dV = scratch.head_block(7);
  float *S = scratch.score_block(0), *dS = scratch.score_block(1);
  for (std::int64_t g = 0; g < group; ++g) {
    row_products(D + g * shape.TQ, shape, views.dout, views.out, b, kv * group + g);
    for (std::int64_t t = 0; t < shape.TQ; ++t) {
      float* row = views.dq.at(b, t, kv * group + g);
      std::fill(row, row + HS, 0.0f);
    }
  }
  for (std::int64_t first_key = 0; first_key < shape.TK; first_key += kBlock) {
    const std::int64_t keys = std::min(kBlock, shape.TK - first_key);
    copy_tokens(K, HP, views.v, b, first_key, kv, keys, HS, 1.0f);  // V, on its way to VT
    transpose(VT, K, HP);
    copy_tokens(K, HP, views.k, b, first_key, kv, keys, HS, 1.0f);
    transpose(KT, K, HP);
    std::fill(dK, dK + kBlock * HP, 0.0f);
    std::fill(dV, dV + kBlock * HP, 0.0f);
    for (std::int64_t g = 0; g < group; ++g) {
      const std::int64_t h = kv * group + g;
      for (std::int64_t first = 0; first < shape.TQ; first += kBlock) {
        const std::int64_t queries = std::min(kBlock, shape.TQ - first);
        if (visible_to_block(shape, first, queries) <= first_key) continue;
        copy_tokens(Q, HP, views.q, b, first, h, queries, HS, shape.scale);
        copy_tokens(dO, HP, views.dout, b, first, h, queries, HS, 1.0f);
        std::fill(S, S + kBlock * kBlock, 0.0f);
        std::fill(dS, dS + kBlock * kBlock, 0.0f);
        add_gemm(S, kBlock, {Q, HP, 1}, KT, kBlock, kBlock, kBlock, HP);
        mask_scores(S, shape, first, first_key);
        add_gemm(dS, kBlock, {dO, HP, 1}, VT, kBlock, kBlock, kBlock, HP);
        softmax_backward(S, dS, views.lse + (b * shape.NH + h) * shape.TQ + first, D + g * shape.TQ + first, queries);
        add_gemm(dV, HP, {S, 1, kBlock}, dO, HP, kBlock, HP, kBlock);
        add_gemm(dK, HP, {dS, 1, kBlock}, Q, HP, kBlock, HP, kBlock);  // Q carries the scale
        std::fill(dQ, dQ + kBlock * HP, 0.0f);
        add_gemm(dQ, HP, {dS, kBlock, 1}, K, HP, kBlock, HP, kBlock);
        for (std::int64_t t = 0; t < queries; ++t) {
          float* row = views.dq.at(b, first + t, h);
#pragma omp simd
          for (std::int64_t d = 0; d < HS; ++d) row[d] = multiply_add(dQ[t * HP + d], shape.scale, row[d]);
        }
      }
    }
    store_tokens(views.dk, dK, HP, b, first_key, kv, keys, HS);
    store_tokens(views.dv, dV, HP, b, first_key, kv, keys, HS);
  }
}

}  // namespace

void attention_forward(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                       ConstHeadView v) {
  if (shape.TQ <= kFewQueries) return forward_by_rows(shape, out, lse, q, k, v);
  Scratch scratch(padded(shape.HS), 4);
#pragma omp parallel for collapse(3) schedule(static, 1)
  for (std::int64_t b = 0; b < shape.B; ++b) {
    for (std::int64_t h = 0; h < shape.NH; ++h) {
      for (std::int64_t first = 0; first < shape.TQ; first += kBlock) {
        forward_block(shape, out, lse, q, k, v, b, h, first, scratch);
      }
    }
  }
}

void attention_backward(const AttentionShape& shape, HeadView dq, HeadView dk, HeadView dv, ConstHeadView dout,
                        ConstHeadView out, const float* lse, ConstHeadView q, ConstHeadView k, ConstHeadView v) {
  const BackwardViews views = {dq, dk, dv, dout, out, q, k, v, lse};
  const std::int64_t group_rows = shape.NH / shape.NKV * shape.TQ;
  std::vector<float> D(static_cast<std::size_t>(omp_get_max_threads() * group_rows));
  Scratch scratch(padded(shape.HS), 8);
#pragma omp parallel for collapse(2) schedule(static)
  for (std::int64_t b = 0; b < shape.B; ++b) {
    for (std::int64_t kv = 0; kv < shape.NKV; ++kv) {
      backward_kv_head(shape, views, b, kv, scratch, D.data() + omp_get_thread_num() * group_rows);
    }
  }
}

}  // namespace weft::cpu
