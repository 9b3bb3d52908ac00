// With h = dropout(x) down^T, and dz = scale dy[:, rows]:
//
//   dup += dz^T h,   dh = dz up,   ddown += dh^T dropout(x),   dx += dropout'(dh down)
//
// h is computed again in the backward pass: it is a product with few columns.
#include "llmc/cpu/low_rank.h"

#include <algorithm>

#include "llmc/base/philox.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/matmul_rows.h"

namespace weft::cpu {

namespace {

// The parts of the workspace.
struct Scratch {
  float *hidden, *d_hidden;  // [N, rank]
  float* outputs;            // [N, out], of which a module's columns are used
  float* inputs;             // [N, in]; with dropout

  Scratch(const LowRankShape& shape, float* workspace)
      : hidden(workspace),
        d_hidden(hidden + shape.N * shape.rank),
        outputs(d_hidden + shape.N * shape.rank),
        inputs(outputs + shape.N * shape.out) {}
};

// Calls work(e, factor) for each element of x: factor is 1 / (1 - p) where it is kept, else 0.
template <typename Work>
void for_kept(const LowRankShape& shape, const Work& work) {
  const std::int64_t elements = shape.N * shape.in;
  const float kept = 1 / (1 - shape.dropout);
#pragma omp parallel for schedule(static)
  for (std::int64_t begin = 0; begin < elements; begin += 4) {
    const PhiloxWords random = philox(shape.seed, shape.offset + static_cast<std::uint64_t>(begin / 4),
                                      static_cast<std::uint64_t>(RandomStream::adapter_dropout));
    for (std::int64_t e = begin; e < std::min(begin + 4, elements); ++e) {
      work(e, uniform01(random.word[e % 4]) >= shape.dropout ? kept : 0.0f);
    }
  }
}

// dropout(x): x itself, or in the workspace.
const float* dropped(const LowRankShape& shape, const float* x, float* inputs) {
  if (shape.dropout == 0) return x;
  for_kept(shape, [&](std::int64_t e, float factor) { inputs[e] = x[e] * factor; });
  return inputs;
}

// y[:, rows] += scale outputs
void add_outputs(const LowRankShape& shape, float* y, const Range& rows, const float* outputs) {
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < shape.N; ++n) {
    float* const to = y + n * shape.out + rows.begin;
    for (std::int64_t o = 0; o < rows.size(); ++o) to[o] += shape.scale * outputs[n * rows.size() + o];
  }
}

}  // namespace

std::int64_t low_rank_workspace(const LowRankShape& shape) {
  return shape.N * (2 * shape.rank + shape.out + (shape.dropout > 0 ? 2 * shape.in : 0));
}

void low_rank_forward(const LowRankShape& shape, float* y, const float* x, const LowRank<float>& adapter,
                      float* workspace) {
  const Scratch scratch(shape, workspace);
  const std::int64_t rows = adapter.rows.size();
  matmul_forward(scratch.hidden, dropped(shape, x, scratch.inputs), adapter.down, nullptr, shape.N, shape.in,
                 shape.rank);
  matmul_forward(scratch.outputs, scratch.hidden, adapter.up, nullptr, shape.N, shape.rank, rows);
  add_outputs(shape, y, adapter.rows, scratch.outputs);
}

void low_rank_rows_forward(const LowRankShape& shape, float* y, const float* x, const LowRank<const float>& adapter,
                           float* workspace) {
  const Scratch scratch(shape, workspace);
  matmul_rows_forward(scratch.hidden, x, {adapter.down, {}}, nullptr, shape.N, shape.in, shape.rank);
  matmul_rows_forward(scratch.outputs, scratch.hidden, {adapter.up, {}}, nullptr, shape.N, shape.rank,
                      adapter.rows.size());
  add_outputs(shape, y, adapter.rows, scratch.outputs);
}

void low_rank_backward(const LowRankShape& shape, float* dx, const LowRank<float>& d_adapter, const float* dy,
                       const float* x, const LowRank<float>& adapter, float* workspace) {
  const Scratch scratch(shape, workspace);
  const std::int64_t rows = adapter.rows.size();
  const float* const input = dropped(shape, x, scratch.inputs);
#pragma omp parallel for schedule(static)
  for (std::int64_t n = 0; n < shape.N; ++n) {
    const float* const from = dy + n * shape.out + adapter.rows.begin;
    for (std::int64_t o = 0; o < rows; ++o) scratch.outputs[n * rows + o] = shape.scale * from[o];
  }
  matmul_forward(scratch.hidden, input, adapter.down, nullptr, shape.N, shape.in, shape.rank);
  matmul_backward(scratch.d_hidden, d_adapter.up, nullptr, scratch.outputs, scratch.hidden, adapter.up, shape.N,
                  shape.rank, rows);
  if (shape.dropout == 0 || dx == nullptr) {
    return matmul_backward(dx, d_adapter.down, nullptr, scratch.d_hidden, input, adapter.down, shape.N, shape.in,
                           shape.rank, Accumulate::yes);
  }
  float* const d_input = scratch.inputs + shape.N * shape.in;
  matmul_backward(d_input, d_adapter.down, nullptr, scratch.d_hidden, input, adapter.down, shape.N, shape.in,
                  shape.rank);
  for_kept(shape, [&](std::int64_t e, float factor) { dx[e] += d_input[e] * factor; });
}

}  // namespace weft::cpu
