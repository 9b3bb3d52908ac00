// Attention as it is defined, for one query q over the keys k_j and values v_j that it sees:
//
//   s_j = scale q . k_j;   lse = log(sum_j e^(s_j));   p_j = e^(s_j - lse);   out = sum_j p_j v_j
//
// Backward, with dp_j = dout . v_j and D = dout . out (which is sum_j p_j dp_j):
//
//   ds_j = p_j (dp_j - D);   dv_j += p_j dout;   dq += scale ds_j k_j;   dk_j += scale ds_j q
//
// Forward subtracts the largest score from all of them, so that no exponential overflows; lse is the same number either way.
// A query's output belongs to one thread; in backward a thread has a K/V head with all of its queries.

#include "llmc/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace weft::cpu::plain {

namespace {

float dot(const float* a, const float* b, std::int64_t size) {
  float sum = 0;
  for (std::int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// y += factor x.
void add_scaled(float* y, float factor, const float* x, std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) y[i] += factor * x[i];
}

}  // namespace

void attention_forward(const AttentionShape& shape, HeadView out, float* lse, ConstHeadView q, ConstHeadView k,
                       ConstHeadView v) {
  const std::int64_t HS = shape.HS, group = shape.NH / shape.NKV;
#pragma omp parallel for collapse(3) schedule(static)
  for (std::int64_t b = 0; b < shape.B; ++b) {
    for (std::int64_t h = 0; h < shape.NH; ++h) {
      for (std::int64_t t = 0; t < shape.TQ; ++t) {
        const std::int64_t kv = h / group;
        const Range keys = visible_keys(shape.visibility(b), t);
        std::vector<float> p(static_cast<std::size_t>(keys.size()));
        for (std::int64_t j = keys.begin; j < keys.end; ++j)
          p[j - keys.begin] = shape.scale * dot(q.at(b, t, h), k.at(b, j, kv), HS);
        const float maximum = *std::max_element(p.begin(), p.end());
        float sum = 0;
        for (float& score : p) sum += score = std::exp(score - maximum);
        float* result = out.at(b, t, h);
        std::fill(result, result + HS, 0.0f);
        for (std::int64_t j = keys.begin; j < keys.end; ++j)
          add_scaled(result, p[j - keys.begin] / sum, v.at(b, j, kv), HS);
        if (lse) lse[(b * shape.NH + h) * shape.TQ + t] = maximum + std::log(sum);
      }
    }
  }
}

void attention_backward(const AttentionShape& shape, HeadView dq, HeadView dk, HeadView dv, ConstHeadView dout,
                        ConstHeadView out, const float* lse, ConstHeadView q, ConstHeadView k, ConstHeadView v) {
  const std::int64_t HS = shape.HS, group = shape.NH / shape.NKV;
#pragma omp parallel for collapse(2) schedule(static)
  for (std::int64_t b = 0; b < shape.B; ++b) {
    for (std::int64_t kv = 0; kv < shape.NKV; ++kv) {
      for (std::int64_t j = 0; j < shape.TK; ++j) {
        std::fill_n(dk.at(b, j, kv), HS, 0.0f);
        std::fill_n(dv.at(b, j, kv), HS, 0.0f);
      }
      for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        for (std::int64_t t = 0; t < shape.TQ; ++t) {
          const float *query = q.at(b, t, h), *gradient = dout.at(b, t, h);
          const float log_sum = lse[(b * shape.NH + h) * shape.TQ + t], D = dot(gradient, out.at(b, t, h), HS);
          std::fill_n(dq.at(b, t, h), HS, 0.0f);
          const Range keys = visible_keys(shape.visibility(b), t);
          for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            const float p = std::exp(shape.scale * dot(query, k.at(b, j, kv), HS) - log_sum);
            const float ds = p * (dot(gradient, v.at(b, j, kv), HS) - D);
            add_scaled(dv.at(b, j, kv), p, gradient, HS);
            add_scaled(dq.at(b, t, h), shape.scale * ds, k.at(b, j, kv), HS);
            add_scaled(dk.at(b, j, kv), shape.scale * ds, query, HS);
          }
        }
      }
    }
  }
}

}  // namespace weft::cpu::plain
