// The operator works row by row: the row h is computed once, in residual_out or in a thread's own buffer, its statistics are
// taken (norm_row.h), then normalised.
//
// Backward of z = xhat w + b with xhat = (h - mean) rstd, for g = dout w + dout2 w2 (w: the weight with its offset):
//   dh = rstd (g - [mean(g)] - xhat mean(g xhat)) + dresidual_out      [mean(g)] for LayerNorm only
//   dresidual = dh,   dx = dh colscale f,   dcolscale += dh x f        f = rowscale * dropout factor
//   dweight += dout xhat,   dbias += dout
// The column sums (dweight, dbias, dcolscale) are taken over blocks of a fixed number of rows, then over the
// blocks in order: the same bits for any number of threads.

#include "llmc/cpu/residual_norm.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "llmc/base/ceil_div.h"
#include "llmc/base/philox.h"
#include "llmc/cpu/norm_row.h"

namespace weft::cpu {

namespace {

constexpr std::int64_t kBlockRows = 32;

// One row buffer of C floats, or several, for every thread of the next parallel region.
class RowBuffers {
 public:
  RowBuffers(std::int64_t count, std::int64_t C)
      : count_(count), C_(C), memory_(static_cast<std::size_t>(omp_get_max_threads() * count * C)) {}
  float* get(std::int64_t index) { return memory_.data() + (omp_get_thread_num() * count_ + index) * C_; }

 private:
  std::int64_t count_, C_;
  std::vector<float> memory_;
};

const float* at_row(const float* matrix, std::int64_t row, std::int64_t C) {
  return matrix ? matrix + row * C : nullptr;
}
float* at_row(float* matrix, std::int64_t row, std::int64_t C) {
  return matrix ? matrix + row * C : nullptr;
}

// factors[c] = rowscale * (1 / (1 - p) where dropout keeps the element, else 0).
void branch_factors(float* factors, const ResidualNormShape& shape, const float* rowscale, std::int64_t row) {
  const float scale = rowscale ? rowscale[row] : 1.0f;
  if (shape.dropout == 0) {
    std::fill(factors, factors + shape.C, scale);
    return;
  }
  const float kept = scale / (1.0f - shape.dropout);
  const std::uint64_t begin = static_cast<std::uint64_t>(row * shape.C);
  const std::uint64_t end = begin + static_cast<std::uint64_t>(shape.C);
  for (std::uint64_t group = begin / 4; group * 4 < end; ++group) {
    const PhiloxWords random =
        philox(shape.seed, shape.offset + group, static_cast<std::uint64_t>(RandomStream::dropout));
    for (std::uint64_t e = std::max(begin, group * 4); e < std::min(end, group * 4 + 4); ++e) {
      factors[e - begin] = uniform01(random.word[e % 4]) >= shape.dropout ? kept : 0.0f;
    }
  }
}

// h = x * factors * colscale + residual; h may be residual. Without x it is residual.
void add_branch(float* h, const float* x, const float* factors, const float* colscale, const float* residual,
                std::int64_t C) {
  if (!x) {
    if (h != residual) std::copy(residual, residual + C, h);
    return;
  }
#pragma omp simd
  for (std::int64_t c = 0; c < C; ++c) {
    float value = x[c] * factors[c];
    if (colscale) value *= colscale[c];
    h[c] = residual ? value + residual[c] : value;
  }
}

// out = (h - mean) * rstd * (weight + offset) + bias.
void normalise(float* out, const float* h, NormStatistics s, const float* weight, float offset, const float* bias,
               std::int64_t C) {
#pragma omp simd
  for (std::int64_t c = 0; c < C; ++c) {
    const float value = (h[c] - s.mean) * s.rstd * (weight[c] + offset);
    out[c] = bias ? value + bias[c] : value;
  }
}

// The column sums of one block of rows; null: not asked for.
struct ColumnSums {
  float *dweight, *dbias, *dweight2, *dbias2, *dcolscale;
};
constexpr std::int64_t kColumnSums = 5;

// One output's share: g += dout * (weight + offset), dweight += dout * xhat, dbias += dout.
void add_output(float* g, float* dweight, float* dbias, const float* dout, const float* xhat, const float* weight,
                float offset, std::int64_t C) {
#pragma omp simd
  for (std::int64_t c = 0; c < C; ++c) g[c] += dout[c] * (weight[c] + offset);
  if (dweight) {
#pragma omp simd
    for (std::int64_t c = 0; c < C; ++c) dweight[c] += dout[c] * xhat[c];
  }
  if (dbias) {
#pragma omp simd
    for (std::int64_t c = 0; c < C; ++c) dbias[c] += dout[c];
  }
}

void backward_row(const ResidualNormShape& shape, const ResidualNormBackward& io, std::int64_t row, ColumnSums sums,
                  RowBuffers& buffers) {
  const std::int64_t C = shape.C;
  float *g = buffers.get(0), *xhat = buffers.get(1), *factors = buffers.get(2);
  const float* x = at_row(io.x, row, C);
  branch_factors(factors, shape, io.rowscale, row);
  const float* h = at_row(io.residual_out, row, C);
  if (!h) {
    add_branch(xhat, x, factors, io.colscale, at_row(io.residual, row, C), C);
    h = xhat;
  }
  const float mean = shape.kind == NormKind::layernorm ? io.mean[row] : 0.0f, rstd = io.rstd[row];
#pragma omp simd
  for (std::int64_t c = 0; c < C; ++c) xhat[c] = (h[c] - mean) * rstd;

  std::fill(g, g + C, 0.0f);
  const float offset = shape.weight_offset;
  add_output(g, sums.dweight, sums.dbias, io.dout + row * C, xhat, io.weight, offset, C);
  if (io.weight2) add_output(g, sums.dweight2, sums.dbias2, io.dout2 + row * C, xhat, io.weight2, offset, C);
  norm_gradient(g, xhat, rstd, C, shape.kind);
  float* dh = g;
  if (const float* skip = at_row(io.dresidual_out, row, C)) {
#pragma omp simd
    for (std::int64_t c = 0; c < C; ++c) dh[c] += skip[c];
  }

  if (float* dresidual = at_row(io.dresidual, row, C)) std::copy(dh, dh + C, dresidual);
  if (sums.dcolscale) {
#pragma omp simd
    for (std::int64_t c = 0; c < C; ++c) sums.dcolscale[c] += dh[c] * x[c] * factors[c];
  }
  if (float* dx = at_row(io.dx, row, C)) {
    const float* colscale = io.colscale;
#pragma omp simd
    for (std::int64_t c = 0; c < C; ++c) {
      const float value = dh[c] * factors[c];
      dx[c] = colscale ? value * colscale[c] : value;
    }
  }
}

}  // namespace

void residual_norm_forward(const ResidualNormShape& shape, const ResidualNormForward& io) {
  const std::int64_t C = shape.C;
  RowBuffers buffers(2, C);
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    float* h = io.residual_out ? io.residual_out + row * C : buffers.get(0);
    float* factors = buffers.get(1);
    branch_factors(factors, shape, io.rowscale, row);
    add_branch(h, at_row(io.x, row, C), factors, io.colscale, at_row(io.residual, row, C), C);
    const NormStatistics s = norm_statistics(h, C, shape.kind, shape.eps);
    normalise(io.out + row * C, h, s, io.weight, shape.weight_offset, io.bias, C);
    if (io.weight2) normalise(io.out2 + row * C, h, s, io.weight2, shape.weight_offset, io.bias2, C);
    if (io.mean) io.mean[row] = s.mean;
    if (io.rstd) io.rstd[row] = s.rstd;
  }
}

void residual_norm_backward(const ResidualNormShape& shape, const ResidualNormBackward& io) {
  const std::int64_t C = shape.C, blocks = ceil_div(shape.rows, kBlockRows);
  float* const targets[kColumnSums] = {io.dweight, io.dbias, io.dweight2, io.dbias2, io.dcolscale};
  std::vector<float> partial(static_cast<std::size_t>(blocks * kColumnSums * C));
  RowBuffers buffers(3, C);
#pragma omp parallel for schedule(static)
  for (std::int64_t block = 0; block < blocks; ++block) {
    const auto sums_of = [&](std::int64_t k) {
      return targets[k] ? partial.data() + (block * kColumnSums + k) * C : nullptr;
    };
    const ColumnSums sums = {sums_of(0), sums_of(1), sums_of(2), sums_of(3), sums_of(4)};
    const std::int64_t end = std::min((block + 1) * kBlockRows, shape.rows);
    for (std::int64_t row = block * kBlockRows; row < end; ++row) backward_row(shape, io, row, sums, buffers);
  }
#pragma omp parallel for schedule(static)
  for (std::int64_t c = 0; c < C; ++c) {
    for (std::int64_t k = 0; k < kColumnSums; ++k) {
      if (!targets[k]) continue;
      double sum = 0;
      for (std::int64_t block = 0; block < blocks; ++block) {
        sum += partial[static_cast<std::size_t>((block * kColumnSums + k) * C + c)];
      }
      targets[k][c] += static_cast<float>(sum);
    }
  }
}

}  // namespace weft::cpu
