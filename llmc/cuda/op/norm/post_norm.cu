// The norm of a branch, its addition to the residual stream and the next norm (Zhang & Sennrich, 2019), arithmetic in
// fp32. A row lies in the registers of its threads (residual_norm.cuh), between both norms, too: bytes moved a row of T of
// E bytes are 12 C for branch, residual and h, and C E for out.
#include "llmc/cuda/op/norm/post_norm.h"

#include "llmc/base/ceil_div.h"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/norm/residual_norm.cuh"

namespace weft::cuda {

namespace {

using namespace norm_detail;

template <typename S>
using Row = float[S::kGroups][S::kGroup];

// Columns past C are zero.
template <typename S>
__device__ void load_row(Row<S>& row, const float* from, std::int64_t C) {
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    Group<float, S> group;
    group.clear();
    if (!S::outside(g, C)) group.load(from + S::column(g));
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) row[g][i] = group.get(i);
  }
}

// use(g, z): z is group g of (h - mean) rstd (weight + offset) + bias.
template <typename T, typename S, typename Use>
__device__ void normalize_row(const Row<S>& h, const ResidualNormShape& shape, RowSum<S>& row_sum,
                              const WeightsInRegisters<T, S>& weights, const Use& use) {
  const auto [mean, rstd] = row_statistics<S>(h, shape, row_sum);
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    if (S::outside(g, shape.C)) continue;
    Group<T, S> w, b;
    weights.get(g, w, b);
    float z[S::kGroup];
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) z[i] = (h[g][i] - mean) * rstd * (w.get(i) + shape.weight_offset) + b.get(i);
    use(g, z);
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads) post_norm_kernel(ResidualNormShape shape, PostNorm<T> io) {
  __shared__ float scratch[2][RowSum<S>::kBlockWarps][2];
  RowSum<S> row_sum{scratch};
  const std::int64_t C = shape.C, row = static_cast<std::int64_t>(blockIdx.x) * S::kRows + S::slot();
  launch_dependents();
  const WeightsInRegisters<T, S> branch_weights(io.branch_weight, io.branch_bias, C), weights(io.weight, io.bias, C);
  wait_for_predecessors();
  if (row >= shape.rows) return;  // all threads of a row, which synchronise with each other alone
  Row<S> h;
  load_row<S>(h, io.residual + row * C, C);
  if (io.branch != nullptr) {
    Row<S> x;
    load_row<S>(x, io.branch + row * C, C);
    normalize_row<T, S>(x, shape, row_sum, branch_weights, [&](int g, const float(&z)[S::kGroup]) {
#pragma unroll
      for (int i = 0; i < S::kGroup; ++i) h[g][i] += z[i];
      Group<float, S> sum;
      sum.set(h[g]);
      sum.store(io.residual_out + row * C + S::column(g));
    });
  }
  if (io.out == nullptr) return;
  normalize_row<T, S>(h, shape, row_sum, weights, [&](int g, const float(&z)[S::kGroup]) {
    Group<T, S> result;
    result.set(z);
    result.store(io.out + row * C + S::column(g));
  });
}

}  // namespace

template <typename T>
void post_norm(const ResidualNormShape& shape, const PostNorm<T>& io, cudaStream_t stream, bool overlapping) {
  check_shape(shape);
  if (shape.rows == 0) return;
  for_plain_spread<float, false>(shape.C, [&](auto spread) {
    using S = decltype(spread);
    const dim3 grid(static_cast<unsigned>(ceil_div(shape.rows, S::kRows)));
    launch_chained(post_norm_kernel<T, S>, grid, dim3(S::kThreads), 0, stream, overlapping, "post_norm", shape, io);
  });
}

#define WEFT_INSTANTIATE(T) \
  template void post_norm<T>(const ResidualNormShape&, const PostNorm<T>&, cudaStream_t, bool);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
