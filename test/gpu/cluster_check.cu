#include "test/gpu/cluster_check.h"

#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

#if WEFT_BULK_COPY
__device__ inline float value_of(int cluster, int round, int rank, int i) {
  // Not contracted with the addition that follows.
  return __fmul_rn(static_cast<float>((cluster * 31 + round * 7 + rank * 1009 + i * 13) % 4099), 0.37f);
}
#endif

template <int kBlocks>
__global__ void check_kernel(ClusterOperation operation, int count, int rounds, bool dawdle, unsigned* wrong,
                             long long* clocks) {
#if WEFT_BULK_COPY
  extern __shared__ __align__(16) char shared[];
  float* own = reinterpret_cast<float*>(shared);
  ClusterExchange<kBlocks> exchange(shared + count * 4, count);
  const int cluster = static_cast<int>(blockIdx.x) / kBlocks, rank = static_cast<int>(exchange.rank());
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  unsigned bad = 0;
  __syncthreads();
  const long long start = clock64();
  for (int k = 0; k < rounds; ++k) {
    if (operation == ClusterOperation::barrier) {
      cluster_barrier();
      continue;
    }
    // The message may change once the exchange has returned in all threads: that is what the barrier here is for.
    if (dawdle || k == 0) {
      __syncthreads();
      for (int i = thread; i < count; i += threads) own[i] = value_of(cluster, k, rank, i);
      if (dawdle) {
        const unsigned pause =
            (static_cast<unsigned>(k * 2654435761u) >> (rank % 16)) % 3000u * (thread / kWarpSize % 2 + 1);
        for (const long long until = clock64() + pause; clock64() < until;) {
        }
      }
    }
    const int sent = dawdle ? k : 0;
    if (operation == ClusterOperation::gather) {
      const float* messages = exchange.gather(own, count);
      if (dawdle) {
        for (int i = thread; i < count * kBlocks; i += threads) {
          const int from = i / count, at = i % count;
          bad += messages[from * exchange.message_stride() + at] != value_of(cluster, sent, from, at);
        }
      }
    } else {
      exchange.reduce(own, count, [&](int i, float sum) {
        if (!dawdle) {
          bad += isnan(sum);
          return;
        }
        float want = value_of(cluster, sent, 0, i);
        for (int r = 1; r < kBlocks; ++r) want += value_of(cluster, sent, r, i);
        bad += sum != want;
      });
    }
  }
  if (rank == 0 && thread == 0) clocks[cluster] = clock64() - start;
  if (bad > 0) atomicAdd(wrong, bad);
#else
  __trap();
#endif
}

template <int kBlocks>
bool launch(ClusterOperation operation, int clusters, int threads, int count, int rounds, bool dawdle, unsigned* wrong,
            long long* clocks, cudaStream_t stream) {
  const auto kernel = check_kernel<kBlocks>;
  const int bytes = count * 4 + 16 + 2 * kBlocks * count * 4;
  if (kBlocks > 8) {
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
  }
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cluster check");
  cudaLaunchAttribute attribute = cluster_attribute(kBlocks);
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(clusters * kBlocks)), dim3(static_cast<unsigned>(threads)),
                    static_cast<std::size_t>(bytes), stream, attribute);
  int resident = 0;
  if (cudaOccupancyMaxActiveClusters(&resident, kernel, &config) != cudaSuccess || resident == 0) {
    cudaGetLastError();
    return false;
  }
  check(cudaLaunchKernelEx(&config, kernel, operation, count, rounds, dawdle, wrong, clocks), "cluster check");
  return true;
}

}  // namespace

bool cluster_check(ClusterOperation operation, int blocks, int clusters, int threads, int count, int rounds,
                   bool dawdle, unsigned* wrong, long long* clocks, cudaStream_t stream) {
  switch (blocks) {
    case 2:
      return launch<2>(operation, clusters, threads, count, rounds, dawdle, wrong, clocks, stream);
    case 4:
      return launch<4>(operation, clusters, threads, count, rounds, dawdle, wrong, clocks, stream);
    case 8:
      return launch<8>(operation, clusters, threads, count, rounds, dawdle, wrong, clocks, stream);
    case 16:
      return launch<16>(operation, clusters, threads, count, rounds, dawdle, wrong, clocks, stream);
    default:
      return false;
  }
}

}  // namespace weft::cuda
