#include "llmc/cpu/matmul_rows.h"

#include <omp.h>

#include <algorithm>
#include <memory>

#include "llmc/base/ceil_div.h"
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
constexpr std::int64_t kPanelFloats = std::int64_t{1} << 16, kLeastPanel = 24;  // a multiple of each block's outputs
// Below this many multiplications, waking other threads costs more than they save.
constexpr std::int64_t kEnoughForThreads = std::int64_t{1} << 16;

struct Linear {
  float* out;
  const float *x, *bias, *scales;  // scales: of the rows of the weight; null: none
  std::int64_t C, OC;
  bool accumulate;
  const float* x_scales;  // of the rows of x; null: none

  void write(std::int64_t n, std::int64_t o, float sum) const {
    float* element = out + n * OC + o;
    if (x_scales != nullptr) sum *= x_scales[n];
    const float of_bias = bias != nullptr ? bias[o] : 0.0f;
    const float value = scales != nullptr ? multiply_add(sum, scales[o], of_bias) : sum + of_bias;
    *element = accumulate ? *element + value : value;
  }
  // `weight`: the weight's rows from output o on.
  template <int Rows, int Outputs>
  void block(std::int64_t n, std::int64_t o, const float* weight) const {
    float sums[Rows][Outputs];
    dot_products(sums, x + n * C, C, weight, C, C);
    for (int r = 0; r < Rows; ++r) {
      for (int i = 0; i < Outputs; ++i) write(n + r, o + i, sums[r][i]);
    }
  }
  // Rows [n, n + Rows) of x, outputs [first, last); `weight`: the weight's rows from output `first` on.
  template <int Rows, int Outputs>
  void outputs(std::int64_t n, std::int64_t first, std::int64_t last, const float* weight) const {
    std::int64_t o = first;
    for (; o + Outputs <= last; o += Outputs) block<Rows, Outputs>(n, o, weight + (o - first) * C);
    for (; o < last; ++o) block<Rows, 1>(n, o, weight + (o - first) * C);
  }
};

}  // namespace

void matmul_rows_forward(float* out, const float* x, const Weight<const float>& weight, const float* bias,
                         std::int64_t N, std::int64_t C, std::int64_t OC, Accumulate accumulate,
                         const float* x_scales) {
  const Linear linear = {out, x, bias, weight.packed.row_scales, C, OC, accumulate == Accumulate::yes, x_scales};
  const std::int64_t of_cache = kPanelFloats / std::max<std::int64_t>(C, 1),
                     of_thread = ceil_div(OC, omp_get_max_threads());
  const std::int64_t panel =
      ceil_div(std::max<std::int64_t>(std::min(of_cache, of_thread), 1), kLeastPanel) * kLeastPanel;
  // A panel of a quantised weight for each thread. Allocated here: no exception can leave the loop.
  const WeightFormat* const format = weight.packed ? &weight_format(weight.packed.dtype) : nullptr;
  const std::size_t panel_floats = format != nullptr ? static_cast<std::size_t>(panel * C) : 0;
  const auto panels =
      std::make_unique_for_overwrite<float[]>(panel_floats * static_cast<std::size_t>(omp_get_max_threads()));
#pragma omp parallel for schedule(dynamic) if (N * C * OC >= kEnoughForThreads)
  for (std::int64_t first = 0; first < OC; first += panel) {
    const std::int64_t last = std::min(first + panel, OC);
    const float* of_panel = nullptr;
    if (format != nullptr) {
      float* dequantized = panels.get() + panel_floats * static_cast<std::size_t>(omp_get_thread_num());
      format->dequantize(dequantized, weight.packed, first, last, C);
      of_panel = dequantized;
    } else {
      of_panel = weight.plain + first * C;
    }
    std::int64_t n = 0;
    for (; n + kRows <= N; n += kRows) linear.outputs<kRows, kOutputs>(n, first, last, of_panel);
    for (; n + 2 <= N; n += 2) linear.outputs<2, kOutputs>(n, first, last, of_panel);
    if (n < N) linear.outputs<1, kOutputsOfOneRow>(n, first, last, of_panel);
  }
}

}  // namespace weft::cpu
