#include "llmc/cpu/muon.h"

#include <algorithm>
#include <cmath>

#include "llmc/cpu/adamw.h"
#include "llmc/cpu/matmul.h"

namespace weft::cpu {

namespace {

// value(i) for each element, in blocks of a fixed size: the same code for an element, whatever the number of threads.
template <typename Value>
void for_each_element(float* out, std::int64_t count, const Value& value) {
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < count; first += kAdamWBlock) {
    const std::int64_t last = std::min(first + kAdamWBlock, count);
#pragma omp simd
    for (std::int64_t i = first; i < last; ++i) out[i] = value(i);
  }
}

}  // namespace

std::int64_t orthogonalize_workspace(std::int64_t rows, std::int64_t columns) {
  const std::int64_t shorter = std::min(rows, columns);
  return rows * columns + 2 * shorter * shorter;
}

// One iteration is x = a x + (b A + c A A) x with A = x x^T or, of a tall matrix, x = a x + x (b A + c A A) with A = x^T x: A
// has the shorter side. The polynomial of A is as symmetric as A, so that it need not be transposed for the second product.
void orthogonalize(float* x, std::int64_t rows, std::int64_t columns, float* workspace) {
  const std::int64_t count = rows * columns, shorter = std::min(rows, columns);
  float* const next = workspace;
  float* const gram = next + count;                    // A [shorter, shorter]
  float* const polynomial = gram + shorter * shorter;  // b A + c A A
  const float norm = static_cast<float>(std::sqrt(sum_of_squares(x, count)));
  if (norm == 0) return;  // no gradient: no update
  for_each_element(x, count, [&](std::int64_t i) { return x[i] / norm; });
  for (int iteration = 0; iteration < kMuonIterations; ++iteration) {
    if (rows > columns) {
      std::fill_n(gram, shorter * shorter, 0.0f);
      matmul_backward(nullptr, gram, nullptr, x, x, nullptr, rows, columns, columns);
    } else {
      matmul_forward(gram, x, x, nullptr, rows, columns, rows);
    }
    matmul_forward(polynomial, gram, gram, nullptr, shorter, shorter, shorter);
    for_each_element(polynomial, shorter * shorter,
                     [&](std::int64_t i) { return kMuonB * gram[i] + kMuonC * polynomial[i]; });
    for_each_element(next, count, [&](std::int64_t i) { return kMuonA * x[i]; });
    if (rows > columns) {
      matmul_forward(next, x, polynomial, nullptr, rows, columns, columns, Accumulate::yes);
    } else {
      matmul_backward(next, nullptr, nullptr, polynomial, nullptr, x, rows, columns, rows, Accumulate::yes);
    }
    std::copy_n(next, count, x);
  }
}

std::int64_t muon_workspace(const TensorSpec& spec) {
  if (!spec.hidden_matrix) return 0;
  return spec.elements + orthogonalize_workspace(spec.shape[0], spec.shape[1]);
}

void muon_update(const TensorUpdate& tensor, const OptimizerStep& step) {
  if (!tensor.spec.hidden_matrix) return adamw_update(tensor, step);
  const MuonStep& muon = step.muon;
  const std::int64_t rows = tensor.spec.shape[0], columns = tensor.spec.shape[1];
  const float momentum = muon.momentum, gradient_scale = muon.gradient_scale;
  const float* const gradients = tensor.gradients;
  float* const m = tensor.states[0];
  float* const update = tensor.workspace;
  for_each_element(m, tensor.count,
                   [&](std::int64_t i) { return m[i] + (1.0f - momentum) * (gradients[i] * gradient_scale - m[i]); });
  for_each_element(update, tensor.count, [&](std::int64_t i) {
    const float g = gradients[i] * gradient_scale;
    return g + momentum * (m[i] - g);
  });
  orthogonalize(update, rows, columns, update + tensor.count);
  const float step_size = muon_step_size(muon, rows, columns), keep = muon_keep(muon, tensor.spec.decay);
  float* const p = tensor.parameters;
  for_each_element(p, tensor.count, [&](std::int64_t i) { return p[i] * keep - step_size * update[i]; });
}

}  // namespace weft::cpu
