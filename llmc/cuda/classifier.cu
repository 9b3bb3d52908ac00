// Softmax + cross-entropy with the gradient in place of the logits, T = float, bf16 or fp16, arithmetic in fp32:
//
//   loss = log sum e^(x - max) + max - x[label]        dlogits = loss_scale (softmax(x) - onehot(label))
//
// One block a row. The first pass reads the row and keeps maximum and sum of exponentials together ("online softmax",
// Milakov & Gimelshein, 2018): a thread that meets a larger maximum rescales its sum. The second pass writes the
// gradient. Bytes moved: a row of V elements of E bytes is read once and written once, 2 V E. The second pass finds the
// beginning of the row in shared memory, where the first left it, and the rest in L2: a row of V = 128,256 in bf16 is
// 256 KB, and with one block a multiprocessor all rows in work leave 7 MB to L2. With more blocks at once the rows
// would push each other out.
//
// In place is safe: an element is read and overwritten by the same thread, and x[label] is read before the barrier that
// the second pass waits for.

#include "llmc/cuda/classifier.h"

#include <algorithm>

#include "llmc/cuda/elements.cuh"
#include "llmc/model/train_model.h"

namespace weft::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kSmallThreads = 256;
constexpr std::int64_t kSmallRow = 16384;  // elements up to which a row has kSmallThreads
constexpr int kInFlight = 4;               // accesses of a thread before it uses the first

struct SoftmaxSum {
  float maximum = -INFINITY, sum = 0;

  // Makes room for values up to `larger`. While all are -inf the reference is 0: e^(-inf) = 0 and no inf - inf.
  __device__ void raise(float larger) {
    larger = fmaxf(maximum, larger);
    if (larger > maximum) {
      sum *= expf(maximum - larger);
      maximum = larger;
    }
  }
  __device__ float reference() const { return maximum == -INFINITY ? 0.0f : maximum; }
};

template <typename T, int kCount>
__device__ void add_values(SoftmaxSum& total, const Elements<T, kCount> (&values)[kInFlight], int used) {
  float larger = -INFINITY;
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (u >= used) break;
#pragma unroll
    for (int i = 0; i < kCount; ++i) larger = fmaxf(larger, values[u].get(i));
  }
  total.raise(larger);
  const float reference = total.reference();
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    if (u >= used) break;
#pragma unroll
    for (int i = 0; i < kCount; ++i) total.sum += exp_for<T>(values[u].get(i) - reference);
  }
}

// The sum over columns [0, V); the first `stashed` units of kCount columns are left in `stash`.
template <typename T, int kCount>
__device__ SoftmaxSum read_row(const T* row, std::int64_t V, Elements<T, kCount>* stash, std::int64_t stashed) {
  SoftmaxSum total;
  const std::int64_t units = V / kCount;
  for (std::int64_t first = threadIdx.x; first < units; first += kInFlight * blockDim.x) {
    Elements<T, kCount> values[kInFlight];
    int used = 0;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const std::int64_t unit = first + static_cast<std::int64_t>(u) * blockDim.x;
      if (unit < units) {
        values[u].load(row + unit * kCount);
        used = u + 1;
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const std::int64_t unit = first + static_cast<std::int64_t>(u) * blockDim.x;
      if (u < used && unit < stashed) stash[unit] = values[u];
    }
    add_values(total, values, used);
  }
  const std::int64_t rest = units * kCount + threadIdx.x;
  if (rest < V) {
    const float value = to_float(row[rest]);
    total.raise(value);
    total.sum += exp_for<T>(value - total.reference());
  }
  return total;
}

template <typename T>
struct RowGradient {
  float maximum, scale, loss_scale;
  std::int64_t label;

  template <int kCount>
  __device__ void apply(Elements<T, kCount>& values, std::int64_t column) const {
    float gradient[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) gradient[i] = exp_for<T>(values.get(i) - maximum) * scale;
    if (label >= column && label < column + kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gradient[i] -= column + i == label ? loss_scale : 0.0f;
    }
    values.set(gradient);
  }
};

template <typename T, int kCount>
__device__ void write_row(T* row, std::int64_t V, std::int64_t row_stride, const RowGradient<T>& gradient,
                          const Elements<T, kCount>* stash, std::int64_t stashed) {
  const std::int64_t units = V / kCount;
#pragma unroll kInFlight
  for (std::int64_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    Elements<T, kCount> values;
    if (unit < stashed) {
      values = stash[unit];
    } else {
      values.load(row + unit * kCount);
    }
    gradient.apply(values, unit * kCount);
    values.store_streaming(row + unit * kCount);
  }
  for (std::int64_t column = units * kCount + threadIdx.x; column < row_stride; column += blockDim.x) {
    Elements<T, 1> value;
    value.clear();
    if (column < V) {
      value.load(row + column);
      gradient.apply(value, column);
    }
    value.store(row + column);
  }
}

template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    classifier_kernel(T* logits, float* losses, const std::int32_t* labels, std::int64_t V, std::int64_t row_stride,
                      float loss_scale, bool write_gradient, std::int64_t stashed) {
  extern __shared__ int4 dynamic_memory[];
  __shared__ float scratch[kWarpSize];
  auto* stash = reinterpret_cast<Elements<T, kCount>*>(dynamic_memory);
  T* row = logits + blockIdx.x * row_stride;
  const std::int32_t label = labels[blockIdx.x];
  if (label == kIgnoredLabel) {  // the same for the whole block
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    for (std::int64_t i = threadIdx.x; write_gradient && i < row_stride / kCount; i += blockDim.x) {
      Elements<T, kCount> zeros;
      zeros.clear();
      zeros.store(row + i * kCount);
    }
    return;
  }
  const float label_logit = to_float(row[label]);
  const SoftmaxSum own = read_row<T, kCount>(row, V, stash, stashed);
  const float maximum = block_max(own.maximum, scratch);
  const float sum = block_sum(own.sum * expf(own.maximum - maximum), scratch);
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + (maximum - label_logit);
  if (!write_gradient) return;
  const RowGradient<T> gradient{maximum, loss_scale / sum, loss_scale, label};
  write_row<T, kCount>(row, V, row_stride, gradient, stash, stashed);
}

template <typename T, int kCount>
void launch(T* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
            std::int64_t row_stride, float loss_scale, bool write_gradient, cudaStream_t stream) {
  int device = 0, limit = 0;
  check(cudaGetDevice(&device), "classifier");
  check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "classifier");
  constexpr int kUnitBytes = static_cast<int>(sizeof(Elements<T, kCount>));
  const std::int64_t room = (limit - 1024) / kUnitBytes;  // less what the kernel declares itself
  const std::int64_t stashed = write_gradient && kCount > 1 ? std::min(room, V / kCount) : 0;
  const int shared_bytes = static_cast<int>(stashed) * kUnitBytes;
  const auto kernel = classifier_kernel<T, kCount>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "classifier");
  kernel<<<static_cast<unsigned>(N), V <= kSmallRow ? kSmallThreads : kThreads, shared_bytes, stream>>>(
      logits, losses, labels, V, row_stride, loss_scale, write_gradient, stashed);
  check_launch("classifier");
}

// One block: the losses of a micro-batch are a few hundred kilobytes at most.
__global__ void __launch_bounds__(kThreads)
    add_losses_kernel(LossTotal* total, const float* losses, const std::int32_t* labels, std::int64_t N) {
  __shared__ double sums[kThreads];
  __shared__ long long counts[kThreads];
  double sum = 0;
  long long count = 0;
  for (std::int64_t n = threadIdx.x; n < N; n += kThreads) {
    sum += losses[n];
    count += labels[n] != kIgnoredLabel ? 1 : 0;
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
      counts[threadIdx.x] += counts[threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    total->loss_sum += sums[0];
    total->label_count += counts[0];
  }
}

}  // namespace

template <typename T>
void classifier(T* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
                std::int64_t row_stride, float loss_scale, bool write_gradient, cudaStream_t stream) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  if (row_stride % kPack == 0 && aligned_to_16(logits)) {
    launch<T, kPack>(logits, losses, labels, N, V, row_stride, loss_scale, write_gradient, stream);
  } else {
    launch<T, 1>(logits, losses, labels, N, V, row_stride, loss_scale, write_gradient, stream);
  }
}

void add_losses(LossTotal* total, const float* losses, const std::int32_t* labels, std::int64_t N,
                cudaStream_t stream) {
  add_losses_kernel<<<1, kThreads, 0, stream>>>(total, losses, labels, N);
  check_launch("add_losses");
}

#define WEFT_INSTANTIATE(T)                                                                                           \
  template void classifier<T>(T*, float*, const std::int32_t*, std::int64_t, std::int64_t, std::int64_t, float, bool, \
                              cudaStream_t);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
