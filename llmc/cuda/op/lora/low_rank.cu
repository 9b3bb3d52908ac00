// The kernels beside the GEMMs touch the small matrices alone: packing reads A and B once and writes H (in + out) elements,
// unpacking reads as many and writes the gradients. Dropout reads and writes [N, in].
#include "llmc/cuda/op/lora/low_rank.h"

#include <algorithm>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/base/philox.h"
#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 2048;  // of kernels whose threads take several elements

// The modules as an argument of kernels.
template <typename T>
struct Modules {
  LowRank<T> of[kMaxLowRankModules];
  int count;
};

template <typename T>
Modules<T> modules_of(const LowRankShape& shape, std::span<const LowRank<T>> list) {
  if (list.empty() || std::ssize(list) > kMaxLowRankModules || std::ssize(list) != shape.modules) {
    fail(Exit::internal, "low_rank: %zu modules, expected %lld", list.size(), static_cast<long long>(shape.modules));
  }
  Modules<T> modules{};
  std::copy(list.begin(), list.end(), modules.of);
  modules.count = static_cast<int>(list.size());
  return modules;
}

unsigned blocks_for(std::int64_t work) {
  return static_cast<unsigned>(std::min(ceil_div(work, kThreads), kMaxBlocks));
}

// Element i of `down` and, behind all of them, of `up`.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(T* down, T* up, Modules<T> modules, LowRankShape shape, std::int64_t hidden) {
  const std::int64_t downs = hidden * shape.in, count = downs + shape.out * hidden;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    if (i < downs) {
      const std::int64_t row = i / shape.in, m = row / shape.rank;
      down[i] = m < modules.count ? modules.of[m].down[(row - m * shape.rank) * shape.in + i % shape.in]
                                  : from_float<T>(0.0f);
      continue;
    }
    const std::int64_t row = (i - downs) / hidden, column = (i - downs) % hidden, m = column / shape.rank;
    float value = 0;
    if (m < modules.count && row >= modules.of[m].rows.begin && row < modules.of[m].rows.end) {
      const LowRank<T>& module = modules.of[m];
      value = shape.scale * to_float(module.up[(row - module.rows.begin) * shape.rank + column - m * shape.rank]);
    }
    up[i - downs] = from_float<T>(value);
  }
}

// The gradients of A and B from those of `down` and of `up`, whose blocks alone count.
template <bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(Modules<float> modules, const float* down, const float* up, LowRankShape shape, std::int64_t hidden) {
  const std::int64_t downs = modules.count * shape.rank * shape.in, count = downs + shape.out * hidden;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const auto give = [](float* to, float value) { *to = kAccumulate ? *to + value : value; };
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    if (i < downs) {
      const std::int64_t row = i / shape.in, m = row / shape.rank;
      give(modules.of[m].down + (row - m * shape.rank) * shape.in + i % shape.in, down[i]);
      continue;
    }
    const std::int64_t row = (i - downs) / hidden, column = (i - downs) % hidden, m = column / shape.rank;
    if (m >= modules.count || row < modules.of[m].rows.begin || row >= modules.of[m].rows.end) continue;
    const LowRank<float>& module = modules.of[m];
    give(module.up + (row - module.rows.begin) * shape.rank + column - m * shape.rank, shape.scale * up[i - downs]);
  }
}

// out = dropout(x), or with kAdds out += dropout(x), of [N, in]; a thread has four elements and one Philox counter.
template <typename T, bool kAdds>
__global__ void __launch_bounds__(kThreads) dropout_kernel(T* out, const T* x, LowRankShape shape) {
  const std::int64_t count = shape.N * shape.in;
  const std::int64_t first = 4 * (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (first >= count) return;
  const PhiloxWords random = philox(shape.seed, shape.offset + static_cast<std::uint64_t>(first / 4),
                                    static_cast<std::uint64_t>(RandomStream::adapter_dropout));
  const float kept = 1 / (1 - shape.dropout);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int64_t e = first + i;
    if (e >= count) return;
    const float value = uniform01(random.word[i]) >= shape.dropout ? kept * to_float(x[e]) : 0.0f;
    out[e] = from_float<T>(kAdds ? to_float(out[e]) + value : value);
  }
}

template <bool kAdds, typename T>
void dropout(const LowRankShape& shape, T* out, const T* x, cudaStream_t stream) {
  const std::int64_t blocks = ceil_div(shape.N * shape.in, 4 * kThreads);
  if (blocks == 0) return;
  dropout_kernel<T, kAdds><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(out, x, shape);
  check_launch("adapter dropout");
}

template <typename T>
void pack(const LowRankShape& shape, std::span<const LowRank<T>> modules, const LowRankWorkspace<T>& work,
          cudaStream_t stream) {
  const std::int64_t hidden = hidden_size(shape);
  pack_kernel<T><<<blocks_for(hidden * (shape.in + shape.out)), kThreads, 0, stream>>>(
      work.down, work.up, modules_of(shape, modules), shape, hidden);
  check_launch("adapter");
}

// h, from x or what dropout leaves of it, which this returns.
template <typename T>
const T* hidden_values(Matmul& matmul, const LowRankShape& shape, const T* x, const LowRankWorkspace<T>& work,
                       cudaStream_t stream) {
  if (shape.dropout > 0) {
    dropout<false>(shape, work.input, x, stream);
    x = work.input;
  }
  matmul.forward<T>(work.hidden, x, work.down, nullptr, shape.N, shape.in, hidden_size(shape));
  return x;
}

}  // namespace

template <typename T>
void LowRankWorkspace<T>::reserve(ArenaLayout& layout, std::span<const LowRankShape> shapes, bool dropout) {
  std::int64_t downs = 0, ups = 0, hiddens = 0, inputs = 0;
  for (const LowRankShape& shape : shapes) {
    downs = std::max(downs, hidden_size(shape) * shape.in);
    ups = std::max(ups, shape.out * hidden_size(shape));
    hiddens = std::max(hiddens, shape.N * hidden_size(shape));
    inputs = std::max(inputs, dropout ? shape.N * shape.in : 0);
  }
  layout.reserve(&down, downs);
  layout.reserve(&up, ups);
  layout.reserve(&hidden, hiddens);
  layout.reserve(&d_hidden, hiddens);
  layout.reserve(&input, inputs);
  layout.reserve(&d_down, downs);
  layout.reserve(&d_up, ups);
}

template <typename T>
std::vector<MatmulShape> low_rank_matmuls(const LowRankShape& shape) {
  const cudaDataType_t type = std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;
  const std::int64_t N = shape.N, in = shape.in, out = shape.out, H = hidden_size(shape);
  return {{Gemm::forward, N, in, H, type},
          {Gemm::forward, N, H, out, type, Accumulate::yes},
          {Gemm::input_grad, N, H, out, type},
          {Gemm::input_grad, N, in, H, type, shape.dropout > 0 ? Accumulate::no : Accumulate::yes},
          {Gemm::weight_grad, N, in, H, type},
          {Gemm::weight_grad, N, H, out, type}};
}

template <typename T>
void low_rank_forward(Matmul& matmul, const LowRankShape& shape, T* y, const T* x, std::span<const LowRank<T>> modules,
                      const LowRankWorkspace<T>& work, cudaStream_t stream) {
  pack(shape, modules, work, stream);
  hidden_values(matmul, shape, x, work, stream);
  matmul.forward<T>(y, work.hidden, work.up, nullptr, shape.N, hidden_size(shape), shape.out, Accumulate::yes);
}

template <typename T>
void low_rank_hidden_grad(Matmul& matmul, const LowRankShape& shape, const T* dy, std::span<const LowRank<T>> modules,
                          const LowRankWorkspace<T>& work, cudaStream_t stream) {
  pack(shape, modules, work, stream);
  matmul.input_grad<T>(work.d_hidden, dy, work.up, shape.N, hidden_size(shape), shape.out);
}

template <typename T>
void low_rank_input_grad(Matmul& matmul, const LowRankShape& shape, T* dx, const LowRankWorkspace<T>& work,
                         cudaStream_t stream) {
  if (shape.dropout == 0) {
    return matmul.input_grad<T>(dx, work.d_hidden, work.down, shape.N, shape.in, hidden_size(shape), Accumulate::yes);
  }
  matmul.input_grad<T>(work.input, work.d_hidden, work.down, shape.N, shape.in, hidden_size(shape));
  dropout<true>(shape, dx, static_cast<const T*>(work.input), stream);
}

template <typename T>
void low_rank_weight_grad(Matmul& matmul, const LowRankShape& shape, std::span<const LowRank<float>> d_modules,
                          const T* dy, const T* x, const LowRankWorkspace<T>& work, Accumulate accumulate,
                          cudaStream_t stream) {
  const std::int64_t hidden = hidden_size(shape);
  const T* const input = hidden_values(matmul, shape, x, work, stream);
  matmul.weight_grad<T>(work.d_up, dy, work.hidden, shape.N, hidden, shape.out, Accumulate::no);
  matmul.weight_grad<T>(work.d_down, work.d_hidden, input, shape.N, shape.in, hidden, Accumulate::no);
  const auto kernel = accumulate == Accumulate::yes ? unpack_kernel<true> : unpack_kernel<false>;
  kernel<<<blocks_for(hidden * (shape.in + shape.out)), kThreads, 0, stream>>>(modules_of(shape, d_modules),
                                                                               work.d_down, work.d_up, shape, hidden);
  check_launch("adapter wgrad");
}

template <typename T>
void low_rank_merge(Matmul& matmul, const LowRankShape& shape, T* weight, std::span<const LowRank<T>> modules,
                    const LowRankWorkspace<T>& work, cudaStream_t stream) {
  pack(shape, modules, work, stream);
  matmul.input_grad<T>(weight, work.up, work.down, shape.out, shape.in, hidden_size(shape), Accumulate::yes);
}

#define WEFT_INSTANTIATE(T)                                                                                         \
  template struct LowRankWorkspace<T>;                                                                              \
  template std::vector<MatmulShape> low_rank_matmuls<T>(const LowRankShape&);                                       \
  template void low_rank_forward<T>(Matmul&, const LowRankShape&, T*, const T*, std::span<const LowRank<T>>,        \
                                    const LowRankWorkspace<T>&, cudaStream_t);                                      \
  template void low_rank_hidden_grad<T>(Matmul&, const LowRankShape&, const T*, std::span<const LowRank<T>>,        \
                                        const LowRankWorkspace<T>&, cudaStream_t);                                  \
  template void low_rank_input_grad<T>(Matmul&, const LowRankShape&, T*, const LowRankWorkspace<T>&, cudaStream_t); \
  template void low_rank_weight_grad<T>(Matmul&, const LowRankShape&, std::span<const LowRank<float>>, const T*,    \
                                        const T*, const LowRankWorkspace<T>&, Accumulate, cudaStream_t);            \
  template void low_rank_merge<T>(Matmul&, const LowRankShape&, T*, std::span<const LowRank<T>>,                    \
                                  const LowRankWorkspace<T>&, cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
