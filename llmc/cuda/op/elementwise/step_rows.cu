// One block a row. Bytes moved a row: C elements are read and 4 C bytes written.
#include "llmc/cuda/op/elementwise/step_rows.h"

#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 128;

template <typename S>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(float* out, const std::int32_t* ids, const std::int32_t* last_ids, const S* weight, float scale,
                 std::int64_t C) {
  launch_dependents();
  const std::int32_t given = ids[blockIdx.x], id = given >= 0 ? given : last_ids[-1 - given];
  scale_row<kThreads, 8>(out + blockIdx.x * C, weight + id * C, C, scale);
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(float* out, const float* in, const std::int32_t* rows, std::int64_t C) {
  wait_for_predecessors();
  launch_dependents();
  scale_row<kThreads, 4>(out + blockIdx.x * C, in + rows[blockIdx.x] * C, C, 1.0f);
}

template <typename S>
__global__ void __launch_bounds__(kThreads) round_kernel(S* out, const float* in, std::int64_t C) {
  wait_for_predecessors();
  launch_dependents();
  scale_row<kThreads, 4>(out + blockIdx.x * C, in + blockIdx.x * C, C, 1.0f);
}

}  // namespace

template <typename S>
void embed_rows(float* out, const std::int32_t* ids, const std::int32_t* last_ids, const S* weight, float scale,
                std::int64_t rows, std::int64_t C, cudaStream_t stream) {
  if (rows == 0) return;
  embed_kernel<S><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(out, ids, last_ids, weight, scale, C);
  check_launch("embed_rows");
}

void gather_rows(float* out, const float* in, const std::int32_t* rows, std::int64_t count, std::int64_t C,
                 bool overlapping, cudaStream_t stream) {
  if (count == 0) return;
  launch_chained(gather_kernel, dim3(static_cast<unsigned>(count)), dim3(kThreads), 0, stream, overlapping,
                 "gather_rows", out, in, rows, C);
}

template <typename S>
void round_rows(S* out, const float* in, std::int64_t rows, std::int64_t C, bool overlapping, cudaStream_t stream) {
  if (rows == 0) return;
  launch_chained(round_kernel<S>, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream, overlapping,
                 "round_rows", out, in, C);
}

#define WEFT_INSTANTIATE(S)                                                                                    \
  template void embed_rows<S>(float*, const std::int32_t*, const std::int32_t*, const S*, float, std::int64_t, \
                              std::int64_t, cudaStream_t);                                                     \
  template void round_rows<S>(S*, const float*, std::int64_t, std::int64_t, bool, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
