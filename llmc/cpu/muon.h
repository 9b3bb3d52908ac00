// Muon on the CPU in fp32 (llmc/model/optimizers/muon.h has the sources): momentum in Nesterov's form, orthogonalised by
// Newton-Schulz, scaled, with decoupled weight decay.
#pragma once

#include <cstdint>

#include "llmc/cpu/optimizer.h"

namespace weft::cpu {

// x [rows, columns] = approximately the nearest semi-orthogonal matrix: with x = U S V^T its singular values S, over their
// 2-norm, become p(p(p(p(p(S))))), p(s) = 3.4445 s - 4.7750 s^3 + 2.0315 s^5, between 0.68 and 1.14 for those that are not
// tiny. A matrix of zeros stays zero. workspace [orthogonalize_workspace()] is overwritten. The same bits for any number of
// threads.
void orthogonalize(float* x, std::int64_t rows, std::int64_t columns, float* workspace);
std::int64_t orthogonalize_workspace(std::int64_t rows, std::int64_t columns);

// With g = gradient * gradient_scale: m += (1 - momentum) (g - m);  u = orthogonalize(g + momentum (m - g));
// p = p (1 - lr * weight_decay, if the tensor decays) - lr * 0.2 sqrt(max(rows, columns)) u.
// A tensor that is no matrix of a block is updated by AdamW.
void muon_update(const TensorUpdate& tensor, const OptimizerStep& step);
std::int64_t muon_workspace(const TensorSpec& spec);

}  // namespace weft::cpu
