// Softmax + cross-entropy with the gradient in place of the logits, T = float, bf16 or fp16, arithmetic in fp32:
//
//   loss = log sum e^(x - max) + max - x[label]        dlogits = loss_scale (softmax(x) - onehot(label))
//
// Bytes moved: a row of V elements of E bytes is read once and written once, 2 V E. The first pass keeps maximum and
// sum of exponentials together ("online softmax", Milakov & Gimelshein, 2018): a thread that meets a larger maximum
// rescales its sum. The second writes the gradient.
//
// In place is safe in both kernels: a thread overwrites only what it has read itself, and x[label] is read before the
// barrier that precedes the second pass.
//
//  - Split rows (sm_90 and later, aligned rows): each block of a cluster keeps a part of the row in shared memory; the
//    blocks exchange their maxima and sums through distributed shared memory. A part is small enough for three blocks
//    to fit on a multiprocessor: while one waits for its row or reduces, another writes.
//  - One block a row otherwise. The second pass reads the beginning of the row from shared memory, where the first pass
//    left it, and the remainder from L2.

#include "llmc/cuda/op/classifier/classifier.h"

#include <cuda_pipeline.h>

#include <algorithm>

#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/model/train_model.h"

namespace weft::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kSmallThreads = 256;
constexpr std::int64_t kSmallRow = 16384;  // rows of up to so many elements get kSmallThreads
constexpr int kInFlight = 4;               // accesses that a thread issues before it uses the first

// Exponentials are relative to the largest logit so far. For results in 16 bits the reference is in base 2, so that
// each exponential is one fma and one 2^x: the rounding of maximum * log2(e) is a common factor of all of them.
template <typename T>
__device__ float reference_of(float maximum) {
  if (maximum == -INFINITY) return 0;  // all are -inf so far: e^(-inf) = 0 and no inf - inf
  return std::is_same_v<T, float> ? maximum : __fmul_rn(maximum, kLog2E);
}
template <typename T>
__device__ float exp_from(float x, float reference) {
  if constexpr (std::is_same_v<T, float>) {
    return expf(x - reference);
  } else {
    return exp2_approximate(fmaf(x, kLog2E, -reference));
  }
}

template <typename T>
struct SoftmaxSum {
  float maximum = -INFINITY, sum = 0;

  // Raises the maximum to `larger` if that is larger, and rescales the sum.
  __device__ void raise(float larger) {
    if (larger > maximum) {
      sum = sum_at(larger);
      maximum = larger;
    }
  }
  __device__ float reference() const { return reference_of<T>(maximum); }
  // The sum as if `larger` were the maximum.
  __device__ float sum_at(float larger) const {
    if (maximum == -INFINITY) return sum;
    const float below = reference_of<T>(maximum) - reference_of<T>(larger);
    return sum * (std::is_same_v<T, float> ? expf(below) : exp2_approximate(below));
  }
  __device__ void add(const SoftmaxSum& other) {
    raise(other.maximum);
    sum += other.sum_at(maximum);
  }
  // Exactly 0 if the row has only one logit.
  __device__ float loss(float label_logit) const {
    return logf(sum / exp_from<T>(maximum, reference())) + (maximum - label_logit);
  }
};

template <typename T, int kCount, int kUnits>
__device__ float largest_of(const Elements<T, kCount> (&units)[kUnits]) {  // ignores NaN
  if constexpr (std::is_same_v<T, bf16> && kCount == 8) {                  // two at a time
    const auto pair_of = [&](int u, int i) { return reinterpret_cast<const __nv_bfloat162*>(units[u].value)[i]; };
    __nv_bfloat162 most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most[i] = pair_of(0, i);
#pragma unroll
      for (int u = 1; u < kUnits; ++u) most[i] = __hmax2(most[i], pair_of(u, i));
    }
    const __nv_bfloat162 larger = __hmax2(__hmax2(most[0], most[1]), __hmax2(most[2], most[3]));
    return fmaxf(__low2float(larger), __high2float(larger));
  } else {
    float larger = -INFINITY;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) larger = fmaxf(larger, units[u].get(i));
    }
    return larger;
  }
}

template <typename T, int kCount, int kUnits>
__device__ void add_values(SoftmaxSum<T>& total, const Elements<T, kCount> (&units)[kUnits]) {
  total.raise(largest_of(units));
  const float reference = total.reference();
  float sums[4] = {0, 0, 0, 0};  // independent accumulators, so that the additions overlap
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i % 4] += exp_from<T>(units[u].get(i), reference);
  }
  total.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The softmax sum over columns [0, V); leaves the first `stashed` units of kCount columns in `stash`.
template <typename T, int kCount>
__device__ SoftmaxSum<T> read_row(const T* row, std::int64_t V, Elements<T, kCount>* stash, std::int64_t stashed) {
  SoftmaxSum<T> total;
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
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (u < used) {
        const Elements<T, kCount> unit[1] = {values[u]};
        add_values(total, unit);
      }
    }
  }
  const std::int64_t rest = units * kCount + threadIdx.x;
  if (rest < V) {
    const float value = to_float(row[rest]);
    total.raise(value);
    total.sum += exp_from<T>(value, total.reference());
  }
  return total;
}

template <typename T>
struct RowGradient {
  float reference, scale, loss_scale;
  std::int32_t label;

  template <int kCount>
  __device__ void apply(Elements<T, kCount>& values, std::int64_t column) const {
    float gradient[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) gradient[i] = exp_from<T>(values.get(i), reference) * scale;
    const int at = label - static_cast<int>(column);
    if (at >= 0 && at < kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gradient[i] -= i == at ? loss_scale : 0.0f;
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
                      const float* weights, float loss_scale, bool write_gradient, std::int64_t stashed) {
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
  const SoftmaxSum<T> own = read_row<T, kCount>(row, V, stash, stashed);
  SoftmaxSum<T> total;
  total.maximum = block_max(own.maximum, scratch);
  total.sum = block_sum(own.sum_at(total.maximum), scratch);
  if (threadIdx.x == 0) losses[blockIdx.x] = total.loss(label_logit);
  if (!write_gradient) return;
  if (weights != nullptr) loss_scale *= weights[blockIdx.x];
  const RowGradient<T> gradient{total.reference(), loss_scale / total.sum, loss_scale, label};
  write_row<T, kCount>(row, V, row_stride, gradient, stash, stashed);
}

// ---- split rows -------------------------------------------------------------------------------------------------------
constexpr int kPartThreads = 512;
constexpr int kPartsAtOnce = 3;                // parts that share a multiprocessor
[[maybe_unused]] constexpr int kStages = 4;    // stages in which a chunk is copied; unused on GPUs without this kernel
[[maybe_unused]] constexpr int kTogether = 2;  // units of a thread in a stage, for which the maximum moves once
[[maybe_unused]] constexpr int kChunk = kStages * kTogether * kPartThreads;
constexpr int kMaxCluster = 8;

// A unit is 16 bytes. A part is one chunk where three parts fit on a multiprocessor. A thread has every kPartThreads-th
// unit; distances between units of a chunk are constants, so that an access costs one instruction. A thread reads back
// only what it copied itself, so waiting for the copy needs no barrier.
template <typename T>
__global__ void __launch_bounds__(kPartThreads, kPartsAtOnce)
    split_row_kernel(T* logits, float* losses, const std::int32_t* labels, std::int64_t V, std::int64_t row_stride,
                     const float* weights, float loss_scale, bool write_gradient, int part, int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kCount = Pack<T>::size;
  extern __shared__ int4 dynamic_memory[];
  constexpr int kWarps = kPartThreads / kWarpSize;
  __shared__ float4 found[kMaxCluster * kWarps];  // from each warp of the cluster: maximum and sum
  __shared__ std::uint64_t arrived;
  const int rank = static_cast<int>(cluster_rank());
  const std::int64_t n = blockIdx.x / blocks;
  T* row = logits + n * row_stride;
  const std::int32_t label = labels[n];
  const int thread = static_cast<int>(threadIdx.x);
  const int all = static_cast<int>(ceil_div(V, kCount)), stride_units = static_cast<int>(row_stride / kCount);
  if (label == kIgnoredLabel) {  // the same for the whole cluster
    if (rank == 0 && thread == 0) losses[n] = 0;
    Elements<T, kCount> zeros;
    zeros.clear();
    for (int unit = rank * kPartThreads + thread; write_gradient && unit < stride_units; unit += blocks * kPartThreads)
      zeros.store_streaming(row + static_cast<std::int64_t>(unit) * kCount);
    return;
  }
  const unsigned barrier = shared_address(&arrived);
  if (thread == 0) {
    hopper::mbarrier_init(barrier, 1);
    hopper::fence_barrier_init();
    hopper::mbarrier_arrive_expect(barrier, static_cast<unsigned>(blocks * kWarps * sizeof(float4)));
  }
  __syncwarp();
  cluster_arrive();

  // Indices of this thread's units are relative to its first one; it has those below `mine`.
  const int first = rank * part + thread, mine = min(part, all - rank * part) - thread;
  auto* stash = reinterpret_cast<Elements<T, kCount>*>(dynamic_memory) + thread;
  T* own_part = row + static_cast<std::int64_t>(first) * kCount;
  for (int chunk = 0; chunk < mine; chunk += kChunk) {
    const T* const from = own_part + chunk * kCount;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int unit = (s * kTogether + u) * kPartThreads;
        if (chunk + unit < mine) __pipeline_memcpy_async(stash + chunk + unit, from + unit * kCount, 16);
      }
      __pipeline_commit();
    }
  }
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  float label_logit = 0;
  if (rank == 0 && warp == 0) label_logit = to_float(row[label]);

  // Where the row ends inside a unit, the columns past V become -infinity: they add nothing in either pass.
  const int left = static_cast<int>(V % kCount), last = all - 1 - first;
  const bool ragged = left != 0 && last >= 0 && last < mine && last % kPartThreads == 0;
  if (ragged) {
    __pipeline_wait_prior(0);
#pragma unroll 1
    for (int i = left; i < kCount; ++i) stash[last].value[i] = from_float<T>(-INFINITY);
  }
  SoftmaxSum<T> own;
  for (int chunk = 0; chunk < mine; chunk += kChunk) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      __pipeline_wait_prior(kStages - 1 - s);
      const int unit = chunk + s * kTogether * kPartThreads;
      if (unit >= mine) continue;
      Elements<T, kCount> values[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (u == 0 || unit + u * kPartThreads < mine) {
          values[u] = stash[unit + u * kPartThreads];
        } else {
#pragma unroll
          for (int i = 0; i < kCount; ++i) values[u].value[i] = from_float<T>(-INFINITY);
        }
      }
      add_values(own, values);
    }
  }
  // Every warp sends its maximum and sum to all blocks, and every block adds what all warps have sent, in the same
  // order. x[label] is part of the message, which guarantees that it has been read before any block writes. A block
  // that has received everything may exit: no block stores to it any more.
  const float warp_maximum = warp_max(own.maximum), warp_total = warp_sum(own.sum_at(warp_maximum));
  cluster_wait();  // the mbarriers of all blocks are initialised
  if (lane < blocks)
    cluster_store(cluster_address(shared_address(&found[rank * kWarps + warp]), static_cast<unsigned>(lane)),
                  make_float4(warp_maximum, warp_total, label_logit, 0),
                  cluster_address(barrier, static_cast<unsigned>(lane)));
  hopper::mbarrier_wait(barrier, 0);
  cluster_acquire(barrier, 0);
  SoftmaxSum<T> some;
  for (int i = lane; i < blocks * kWarps; i += kWarpSize) {
    SoftmaxSum<T> other;
    other.maximum = found[i].x;
    other.sum = found[i].y;
    some.add(other);
  }
  SoftmaxSum<T> total;
  total.maximum = warp_max(some.maximum);
  total.sum = warp_sum(some.sum_at(total.maximum));
  if (first == 0) losses[n] = total.loss(label_logit);
  if (!write_gradient) return;
  if (weights != nullptr) loss_scale *= weights[n];
  const RowGradient<T> gradient{total.reference(), loss_scale / total.sum, loss_scale, label};
  for (int chunk = 0; chunk < mine; chunk += kChunk) {
    T* const to = own_part + chunk * kCount;
#pragma unroll
    for (int u = 0; u < kStages * kTogether; ++u) {
      const int unit = u * kPartThreads;
      if (chunk + unit >= mine) continue;
      Elements<T, kCount> values = stash[chunk + unit];
      gradient.apply(values, static_cast<std::int64_t>(first + chunk + unit) * kCount);
      values.store(to + unit * kCount);
    }
  }
  Elements<T, kCount> zeros;
  zeros.clear();
  for (int unit = all + rank * kPartThreads + thread; unit < stride_units; unit += blocks * kPartThreads)
    zeros.store(row + static_cast<std::int64_t>(unit) * kCount);
#endif
}

// Number of blocks over which a row of `units` is split: the fewest for which a part is one chunk and three parts fit
// on a multiprocessor, else the fewest for which a part fits at all; 0: the row is not split.
int blocks_of_row(std::int64_t units, const ClassifierLimits& limits) {
  constexpr int kReserved = 4096;  // bytes a block for the driver and for the kernel's static variables
  if (limits.major < 9) return 0;
  const int good = std::min(kChunk * 16, limits.shared_of_multiprocessor / kPartsAtOnce - kReserved),
            most = limits.shared_of_block - kReserved;
  for (const int room : {good, most}) {
    for (int blocks = 1; blocks <= kMaxCluster; ++blocks) {
      if (ceil_div(units, blocks) * 16 <= room) return blocks;
    }
  }
  return 0;
}

template <typename T>
void launch_split(T* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
                  std::int64_t row_stride, const float* weights, float loss_scale, bool write_gradient, int blocks,
                  cudaStream_t stream) {
  const int part = static_cast<int>(ceil_div(ceil_div(V, Pack<T>::size), blocks));
  const auto kernel = split_row_kernel<T>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, part * 16), "classifier");
  launch_clustered(kernel, dim3(static_cast<unsigned>(N * blocks)), dim3(kPartThreads),
                   static_cast<std::size_t>(part) * 16, stream, blocks, "classifier", logits, losses, labels, V,
                   row_stride, weights, loss_scale, write_gradient, part, blocks);
}

template <typename T, int kCount>
void launch(T* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
            std::int64_t row_stride, const float* weights, float loss_scale, bool write_gradient,
            const ClassifierLimits& limits, cudaStream_t stream) {
  constexpr int kUnitBytes = static_cast<int>(sizeof(Elements<T, kCount>));
  const std::int64_t room = (limits.shared_of_block - 1024) / kUnitBytes;  // minus the kernel's static variables
  const std::int64_t stashed = write_gradient && kCount > 1 ? std::min(room, V / kCount) : 0;
  const int shared_bytes = static_cast<int>(stashed) * kUnitBytes;
  const auto kernel = classifier_kernel<T, kCount>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "classifier");
  kernel<<<static_cast<unsigned>(N), V <= kSmallRow ? kSmallThreads : kThreads, shared_bytes, stream>>>(
      logits, losses, labels, V, row_stride, weights, loss_scale, write_gradient, stashed);
  check_launch("classifier");
}

// A single block suffices: the losses of a micro-batch are a few hundred kilobytes at most.
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

__global__ void move_losses_kernel(LossTotal* sum, LossTotal* total) {
  sum->loss_sum += total->loss_sum;
  sum->label_count += total->label_count;
  *total = {};
}

}  // namespace

ClassifierLimits classifier_limits() {
  return {device_attribute(cudaDevAttrComputeCapabilityMajor),
          device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
}

template <typename T>
void classifier(T* logits, float* losses, const std::int32_t* labels, std::int64_t N, std::int64_t V,
                std::int64_t row_stride, float loss_scale, bool write_gradient, cudaStream_t stream,
                const ClassifierLimits& limits, const float* weights) {
  constexpr int kPack = Pack<T>::size;
  if (N == 0) return;
  const bool aligned = row_stride % kPack == 0 && aligned_to_16(logits);
  const int blocks = aligned ? blocks_of_row(ceil_div(V, kPack), limits) : 0;
  if (blocks > 0) {
    launch_split(logits, losses, labels, N, V, row_stride, weights, loss_scale, write_gradient, blocks, stream);
  } else {
    with_count<kPack>(aligned, [&](auto count) {
      launch<T, count>(logits, losses, labels, N, V, row_stride, weights, loss_scale, write_gradient, limits, stream);
    });
  }
}

void add_losses(LossTotal* total, const float* losses, const std::int32_t* labels, std::int64_t N,
                cudaStream_t stream) {
  add_losses_kernel<<<1, kThreads, 0, stream>>>(total, losses, labels, N);
  check_launch("add_losses");
}

void move_losses(LossTotal* sum, LossTotal* total, cudaStream_t stream) {
  move_losses_kernel<<<1, 1, 0, stream>>>(sum, total);
  check_launch("move_losses");
}

#define WEFT_INSTANTIATE(T)                                                                                           \
  template void classifier<T>(T*, float*, const std::int32_t*, std::int64_t, std::int64_t, std::int64_t, float, bool, \
                              cudaStream_t, const ClassifierLimits&, const float*);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
