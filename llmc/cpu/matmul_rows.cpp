#include "llmc/cpu/matmul_rows.h"

#include <omp.h>

#include <algorithm>

#include "llmc/cpu/dot_products.h"

namespace weft::cpu {

namespace {

// Blocks whose sums, weights and one piece of a row fill the registers: 4 x 3 sums of AVX2's 16, 6 x 4 of AVX-512's 32. A
// single row takes 8 outputs, enough independent sums to hide the latency of an addition.
#if defined(__AVX512F__)
constexpr int kRows = 6, kOutputs = 4;
#else
constexpr int kRows = 4, kOutputs = 3;
#endif
constexpr int kOutputsOfOneRow = 8;
// Outputs are taken in panels whose weights stay in the second-level cache while all rows pass.
constexpr std::int64_t kPanelFloats = std::int64_t{1} << 16, kLeastPanel = 24;  // of both blocks a multiple
// Below this many multiplications waking other threads costs more than they bring.
constexpr std::int64_t kEnoughForThreads = std::int64_t{1} << 16;

struct Linear {
  float* out;
  const float *x, *weight, *bias;
  std::int64_t C, OC;
  bool accumulate;

  void write(std::int64_t n, std::int64_t o, float sum) const {
    float* element = out + n * OC + o;
    const float value = sum + (bias != nullptr ? bias[o] : 0.0f);
    *element = accumulate ? *element + value : value;
  }
  template <int Rows, int Outputs>
  void block(std::int64_t n, std::int64_t o) const {
    float sums[Rows][Outputs];
    dot_products(sums, x + n * C, C, weight + o * C, C, C);
    for (int r = 0; r < Rows; ++r) {
      for (int i = 0; i < Outputs; ++i) write(n + r, o + i, sums[r][i]);
    }
  }
  // Rows [n, n + Rows), outputs [first, last).
  template <int Rows, int Outputs>
  void outputs(std::int64_t n, std::int64_t first, std::int64_t last) const {
    std::int64_t o = first;
    for (; o + Outputs <= last; o += Outputs) block<Rows, Outputs>(n, o);
    for (; o < last; ++o) block<Rows, 1>(n, o);
  }
};

std::int64_t ceil_divide(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

void matmul_rows_forward(float* out, const float* x, const float* weight, const float* bias, std::int64_t N,
                         std::int64_t C, std::int64_t OC, Accumulate accumulate) {
  const Linear linear = {out, x, weight, bias, C, OC, accumulate == Accumulate::yes};
  const std::int64_t of_cache = kPanelFloats / std::max<std::int64_t>(C, 1),
                     of_thread = ceil_divide(OC, omp_get_max_threads());
  const std::int64_t panel =
      ceil_divide(std::max<std::int64_t>(std::min(of_cache, of_thread), 1), kLeastPanel) * kLeastPanel;
#pragma omp parallel for schedule(dynamic) if (N * C * OC >= kEnoughForThreads)
  for (std::int64_t first = 0; first < OC; first += panel) {
    const std::int64_t last = std::min(first + panel, OC);
    std::int64_t n = 0;
    for (; n + kRows <= N; n += kRows) linear.outputs<kRows, kOutputs>(n, first, last);
    for (; n + 2 <= N; n += 2) linear.outputs<2, kOutputs>(n, first, last);
    if (n < N) linear.outputs<1, kOutputsOfOneRow>(n, first, last);
  }
}

}  // namespace weft::cpu
