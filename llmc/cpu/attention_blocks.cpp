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
// serves 64 queries. Pairs of blocks without a visible key are skipped, and a GEMM that sums over keys or queries adds what is
// visible alone: what a query does not see is not multiplied by 0, so that a NaN there does not reach it. The blocks are
// copied into scratch whose rows are padded with zeros to full vectors, so that the GEMMs share one kernel without remainders
// in their inner loop; K and V are also stored transposed where a GEMM sums over the head dimension.
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

// Rows of c [Rows, N] += those of a [Rows, K] b [K, N] over the terms k of a range alone, in order; N a multiple of kLanes.
template <int Rows>
void add_terms(float* c, std::int64_t c_stride, const Strided& a, const float* b, std::int64_t b_stride, std::int64_t N,
               const Range& terms) {
  if (terms.size() <= 0) return;
  const Strided first = {a.data + terms.begin * a.column, a.row, a.column};
  b += terms.begin * b_stride;
  std::int64_t n = 0;
  for (; n + 2 * kLanes <= N; n += 2 * kLanes) {
    register_gemm<Rows, 2>(c + n, c_stride, first, b + n, b_stride, terms.size());
  }
  if (n < N) register_gemm<Rows, 1>(c + n, c_stride, first, b + n, b_stride, terms.size());
}

constexpr int kGemmRows = 4;

// c [64, N] += a [64, K] b [K, N].
void add_gemm(float* c, std::int64_t c_stride, const Strided& a, const float* b, std::int64_t b_stride, std::int64_t N,
              std::int64_t K) {
  for (std::int64_t m = 0; m < kBlock; m += kGemmRows) {
    add_terms<kGemmRows>(c + m * c_stride, c_stride, {a.data + m * a.row, a.row, a.column}, b, b_stride, N, {0, K});
  }
}

// The same over terms[m] alone for row m, with the bits of add_gemm() where the other terms of a are 0.
void add_visible_gemm(float* c, std::int64_t c_stride, const Strided& a, const float* b, std::int64_t b_stride,
                      std::int64_t N, const Range* terms) {
  for (std::int64_t m = 0; m < kBlock; m += kGemmRows) {
    Range shared = terms[m];
    for (int i = 1; i < kGemmRows; ++i) shared = common(shared, terms[m + i]);
    const auto add_alone = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t row = m; row < m + kGemmRows; ++row) {
        add_terms<1>(c + row * c_stride, c_stride, {a.data + row * a.row, a.row, a.column}, b, b_stride, N,
                     common(terms[row], {from, to}));
      }
    };
    add_alone(0, shared.begin);
    add_terms<kGemmRows>(c + m * c_stride, c_stride, {a.data + m * a.row, a.row, a.column}, b, b_stride, N, shared);
    add_alone(shared.end, kBlock);
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

// What a block of queries sees of a block of keys, both numbered from the beginning of their blocks. Ranges of what is hidden
// or past the last one are empty.
struct BlockVisibility {
  Range keys_of[kBlock], queries_of[kBlock];  // of each query, of each key

  BlockVisibility(const Visibility& visibility, const Range& queries, const Range& keys) {
    for (std::int64_t t = 0; t < queries.size(); ++t) {
      const Range seen = visible_keys(visibility, queries.begin + t);
      keys_of[t] = {std::clamp(seen.begin, keys.begin, keys.end) - keys.begin,
                    std::clamp(seen.end, keys.begin, keys.end) - keys.begin};
    }
    // Both bounds of a query's keys rise with the query.
    std::int64_t begin = 0, end = 0;
    for (std::int64_t j = 0; j < keys.size(); ++j) {
      while (begin < queries.size() && keys_of[begin].end <= j) ++begin;
      while (end < queries.size() && keys_of[end].begin <= j) ++end;
      queries_of[j] = {begin, end};
    }
  }
};

// The keys that any of these queries sees.
Range visible_to_block(const Visibility& visibility, const Range& queries) {
  return {visible_keys(visibility, queries.begin).begin, visible_keys(visibility, queries.end - 1).end};
}

// ---- forward ----------------------------------------------------------------------------------------------

// Row by row: the scores of one query over the keys that it sees, their softmax, the weighted sum of the values.
void forward_row(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                 ConstHeadView v, std::int64_t b, std::int64_t h, std::int64_t t, float* scores) {
  const std::int64_t HS = shape.HS, kv = h / (shape.NH / shape.NKV);
  const Range seen = visible_keys(shape.visibility(b), t);
  const std::int64_t keys = seen.size();
  const float* query = q.at(b, t, h);
  float maximum = -kInfinity;
  for (std::int64_t j = 0; j < keys; ++j) {
    const float* key = k.at(b, seen.begin + j, kv);
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
    const float* value = v.at(b, seen.begin + j, kv);
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

// Keys that a query does not see get the score -infinity. Columns past the last key are the block's padding.
void mask_scores(float* scores, const Range* keys_of) {
  for (std::int64_t t = 0; t < kBlock; ++t) {
    float* row = scores + t * kBlock;
    std::fill(row, row + keys_of[t].begin, -kInfinity);
    std::fill(row + keys_of[t].end, row + kBlock, -kInfinity);
  }
}

// The running softmax of one query block.
struct OnlineSoftmax {
  float maximum[kBlock], sum[kBlock];

  OnlineSoftmax() {
    std::fill(maximum, maximum + kBlock, -kInfinity);
    std::fill(sum, sum + kBlock, 0.0f);
  }

  // Scores become weights relative to the new maximum; what was accumulated before shrinks to it. A row that sees no key of
  // this block stays as it is: it may not have a maximum yet.
  void update(float* scores, const Range* keys_of, float* accumulated, std::int64_t HP) {
    for (std::int64_t t = 0; t < kBlock; ++t) {
      if (keys_of[t].size() == 0) continue;
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
  const Visibility visibility = shape.visibility(b);
  float *Q = scratch.head_block(0), *K = scratch.head_block(1), *KT = scratch.head_block(2);
  float* V = K;  // K is done with once it is transposed
  float *O = scratch.head_block(3), *S = scratch.score_block(0);
  copy_tokens(Q, HP, q, b, first_query, h, queries, HS, shape.scale);
  std::fill(O, O + kBlock * HP, 0.0f);
  OnlineSoftmax softmax;
  const Range rows = {first_query, first_query + queries}, seen = visible_to_block(visibility, rows);
  for (std::int64_t first_key = seen.begin / kBlock * kBlock; first_key < seen.end; first_key += kBlock) {
    const std::int64_t keys = std::min(kBlock, shape.TK - first_key);
    const BlockVisibility visible(visibility, rows, {first_key, first_key + keys});
    copy_tokens(K, HP, k, b, first_key, kv, keys, HS, 1.0f);
    transpose(KT, K, HP);
    std::fill(S, S + kBlock * kBlock, 0.0f);
    add_gemm(S, kBlock, {Q, HP, 1}, KT, kBlock, kBlock, HP);
    mask_scores(S, visible.keys_of);
    softmax.update(S, visible.keys_of, O, HP);
    copy_tokens(V, HP, v, b, first_key, kv, keys, HS, 1.0f);
    add_visible_gemm(O, HP, {S, kBlock, 1}, V, HP, HP, visible.keys_of);
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

// Scores become P = e^(S - lse), dP becomes dS = P * (dP - D). Those of hidden keys have no meaning before and after.
void softmax_backward(float* S, float* dP, const float* lse, const float* D, std::int64_t queries) {
  for (std::int64_t t = 0; t < queries; ++t) {
    float *score = S + t * kBlock, *gradient = dP + t * kBlock;
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
  const Visibility visibility = shape.visibility(b);
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
        const Range rows = {first, first + queries}, columns = {first_key, first_key + keys};
        if (common(visible_to_block(visibility, rows), columns).size() == 0) continue;
        const BlockVisibility visible(visibility, rows, columns);
        copy_tokens(Q, HP, views.q, b, first, h, queries, HS, shape.scale);
        copy_tokens(dO, HP, views.dout, b, first, h, queries, HS, 1.0f);
        std::fill(S, S + kBlock * kBlock, 0.0f);
        std::fill(dS, dS + kBlock * kBlock, 0.0f);
        add_gemm(S, kBlock, {Q, HP, 1}, KT, kBlock, kBlock, HP);
        add_gemm(dS, kBlock, {dO, HP, 1}, VT, kBlock, kBlock, HP);
        softmax_backward(S, dS, views.lse + (b * shape.NH + h) * shape.TQ + first, D + g * shape.TQ + first, queries);
        add_visible_gemm(dV, HP, {S, 1, kBlock}, dO, HP, HP, visible.queries_of);
        add_visible_gemm(dK, HP, {dS, 1, kBlock}, Q, HP, HP, visible.queries_of);  // Q carries the scale
        std::fill(dQ, dQ + kBlock * HP, 0.0f);
        add_visible_gemm(dQ, HP, {dS, kBlock, 1}, K, HP, HP, visible.keys_of);
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
