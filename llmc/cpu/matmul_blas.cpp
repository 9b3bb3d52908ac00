// The linear layer by OpenBLAS. matmul.cpp is the definition.
//
// Every GEMM is cut into blocks of the output whose sizes follow from the shape alone. A block is one single-threaded sgemm,
// and an OpenMP loop assigns the blocks to threads: an element is summed in the same order for any number of threads, which a
// threaded BLAS call does not promise.
//
// One row of x, or a few, reads every weight for very little arithmetic: memory is the limit, and sgemm would first copy the
// weights into its packed layout. Those rows are taken as dot products.

#include "llmc/cpu/matmul.h"

#include <cblas.h>

#include <algorithm>

#include "llmc/base/ceil_div.h"
#include "llmc/cpu/dot_products.h"

namespace weft::cpu {

namespace {

constexpr std::int64_t kFewRows = 4;  // up to this many rows of x are taken as dot products
constexpr int kDotOutputs = 4;        // rows of W side by side: enough independent sums to hide an addition's latency
constexpr std::int64_t kMostRows = 256, kMostColumns = 512, kLeastSide = 96;  // of a block of the output
constexpr std::int64_t kEnoughBlocks = 16;  // smaller blocks cost more than a better balance gives back

struct Matrix {
  const float* data;
  std::int64_t leading;  // elements between stored rows
  CBLAS_TRANSPOSE transpose = CblasNoTrans;

  // Where the part from `row` on begins, with `row` counted after the transposition; likewise `column`.
  const float* from_row(std::int64_t row) const { return data + row * (transpose == CblasNoTrans ? leading : 1); }
  const float* from_column(std::int64_t column) const {
    return data + column * (transpose == CblasNoTrans ? 1 : leading);
  }
};

// OpenBLAS's OpenMP flavour stays single-threaded inside a parallel region by itself. Its pthread flavour
// would start its own threads below each of ours.
void one_blas_thread() {
  static const bool done = [] {
    if (openblas_get_parallel() == OPENBLAS_THREAD) openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

// c [M, N] = a [M, K] b [K, N] + beta c.
void gemm(float* c, const Matrix& a, const Matrix& b, std::int64_t M, std::int64_t N, std::int64_t K, float beta) {
  if (M == 0 || N == 0) return;
  one_blas_thread();
  std::int64_t rows = std::min(M, kMostRows), columns = std::min(N, kMostColumns);
  while (ceil_div(M, rows) * ceil_div(N, columns) < kEnoughBlocks && std::max(rows, columns) > kLeastSide) {
    std::int64_t& longer = rows >= columns ? rows : columns;
    longer = ceil_div(longer, 2);
  }
  const std::int64_t block_rows = ceil_div(M, rows), block_columns = ceil_div(N, columns);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (std::int64_t i = 0; i < block_rows; ++i) {
    for (std::int64_t j = 0; j < block_columns; ++j) {
      const std::int64_t m = i * rows, n = j * columns;
      cblas_sgemm(CblasRowMajor, a.transpose, b.transpose, static_cast<blasint>(std::min(rows, M - m)),
                  static_cast<blasint>(std::min(columns, N - n)), static_cast<blasint>(K), 1.0f, a.from_row(m),
                  static_cast<blasint>(a.leading), b.from_column(n), static_cast<blasint>(b.leading), beta,
                  c + m * N + n, static_cast<blasint>(N));
    }
  }
}

void few_rows_forward(float* out, const float* x, const float* weight, const float* bias, std::int64_t N,
                      std::int64_t C, std::int64_t OC, Accumulate accumulate) {
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < OC; first += kDotOutputs) {
    const std::int64_t outputs = std::min<std::int64_t>(kDotOutputs, OC - first);
    for (std::int64_t n = 0; n < N; ++n) {
      float sums[1][kDotOutputs];
      if (outputs == kDotOutputs) {
        dot_products(sums, x + n * C, C, weight + first * C, C, C);
      } else {
        for (std::int64_t o = 0; o < outputs; ++o) sums[0][o] = dot_product(x + n * C, weight + (first + o) * C, C);
      }
      for (std::int64_t o = 0; o < outputs; ++o) {
        float* element = out + n * OC + first + o;
        const float value = sums[0][o] + (bias ? bias[first + o] : 0.0f);
        *element = accumulate == Accumulate::yes ? *element + value : value;
      }
    }
  }
}

// dbias [OC] += column sums, rows added in order; a thread owns whole columns.
void add_column_sums(float* dbias, const float* dout, std::int64_t N, std::int64_t OC) {
  constexpr std::int64_t kColumns = 64;
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < OC; first += kColumns) {
    const std::int64_t columns = std::min(kColumns, OC - first);
    double sums[kColumns] = {};
    for (std::int64_t n = 0; n < N; ++n) {
      const float* row = dout + n * OC + first;
#pragma omp simd
      for (std::int64_t o = 0; o < columns; ++o) sums[o] += row[o];
    }
    for (std::int64_t o = 0; o < columns; ++o) dbias[first + o] += static_cast<float>(sums[o]);
  }
}

}  // namespace

void matmul_forward(float* out, const float* x, const float* weight, const float* bias, std::int64_t N, std::int64_t C,
                    std::int64_t OC, Accumulate accumulate) {
  if (N <= kFewRows) return few_rows_forward(out, x, weight, bias, N, C, OC, accumulate);
  bool add = accumulate == Accumulate::yes;
  if (bias) {
#pragma omp parallel for schedule(static)
    for (std::int64_t n = 0; n < N; ++n) {
      float* row = out + n * OC;
#pragma omp simd
      for (std::int64_t o = 0; o < OC; ++o) row[o] = (add ? row[o] : 0.0f) + bias[o];
    }
    add = true;
  }
  gemm(out, {x, C}, {weight, C, CblasTrans}, N, OC, C, add ? 1.0f : 0.0f);
}

void matmul_backward(float* dx, float* dweight, float* dbias, const float* dout, const float* x, const float* weight,
                     std::int64_t N, std::int64_t C, std::int64_t OC, Accumulate accumulate_dx) {
  if (dx) gemm(dx, {dout, OC}, {weight, C}, N, C, OC, accumulate_dx == Accumulate::yes ? 1.0f : 0.0f);
  if (dweight) gemm(dweight, {dout, OC, CblasTrans}, {x, C}, OC, C, N, 1.0f);
  if (dbias) add_column_sums(dbias, dout, N, OC);
}

}  // namespace weft::cpu
