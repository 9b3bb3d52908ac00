// With r = 1 / sqrt(mean(x^2) + eps), xhat = x r, w the weight with its offset, and g = dout w:
//   y = xhat w,   dx = r (g - xhat mean(g xhat)),   dw = sum of dout xhat over all heads
// r is taken again in backward: a pass over HS elements, which are in the cache for dx anyway.
//
// dw is summed over blocks of a fixed number of tokens, then over the blocks in order: the same bits for any number of threads.

#include "llmc/cpu/head_norm.h"

#include <algorithm>
#include <vector>

#include "llmc/base/ceil_div.h"
#include "llmc/cpu/norm_row.h"

namespace weft::cpu {

namespace {

constexpr std::int64_t kBlockTokens = 32;

float inverse_rms(const float* x, const HeadNormShape& shape) {
  return norm_statistics(x, shape.HS, NormKind::rmsnorm, shape.eps).rstd;
}

void backward_head(const HeadNormShape& shape, float* dx, float* dweight, const float* dout, const float* x,
                   const float* weight, float* g, float* xhat) {
  const std::int64_t HS = shape.HS;
  const float r = inverse_rms(x, shape);
#pragma omp simd
  for (std::int64_t d = 0; d < HS; ++d) {
    xhat[d] = x[d] * r;
    g[d] = dout[d] * (weight[d] + shape.weight_offset);
    dweight[d] += dout[d] * xhat[d];
  }
  norm_gradient(g, xhat, r, HS, NormKind::rmsnorm);
  std::copy_n(g, HS, dx);
}

}  // namespace

void head_norm_forward(const HeadNormShape& shape, HeadView out, ConstHeadView x, const float* weight) {
  const std::int64_t tokens = shape.B * shape.T;
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < tokens; ++n) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const float* const from = x.at(n / shape.T, n % shape.T, h);
      float* const to = out.at(n / shape.T, n % shape.T, h);
      const float r = inverse_rms(from, shape);
#pragma omp simd
      for (std::int64_t d = 0; d < shape.HS; ++d) to[d] = from[d] * r * (weight[d] + shape.weight_offset);
    }
  }
}

void head_norm_backward(const HeadNormShape& shape, HeadView dx, float* dweight, ConstHeadView dout, ConstHeadView x,
                        const float* weight) {
  const std::int64_t tokens = shape.B * shape.T, blocks = ceil_div(tokens, kBlockTokens), HS = shape.HS;
  std::vector<float> partial(static_cast<std::size_t>(blocks * HS));
#pragma omp parallel
  {
    std::vector<float> scratch(static_cast<std::size_t>(2 * HS));
#pragma omp for schedule(static)
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t end = std::min((block + 1) * kBlockTokens, tokens);
      for (std::int64_t n = block * kBlockTokens; n < end; ++n) {
        const std::int64_t b = n / shape.T, t = n % shape.T;
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          backward_head(shape, dx.at(b, t, h), partial.data() + block * HS, dout.at(b, t, h), x.at(b, t, h), weight,
                        scratch.data(), scratch.data() + HS);
        }
      }
    }
  }
  for (std::int64_t d = 0; d < (dweight != nullptr ? HS : 0); ++d) {
    double sum = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      sum += static_cast<double>(partial[static_cast<std::size_t>(block * HS + d)]);
    }
    dweight[d] += static_cast<float>(sum);
  }
}

}  // namespace weft::cpu
