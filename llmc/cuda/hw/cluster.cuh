// Communication between the blocks of a thread-block cluster through distributed shared memory (sm_90 and later):
// ClusterGather and ClusterReduce, the collectives of ClusterFusion (Luo et al., 2025), as a single exchange without
// rounds.
//
// Each block stores its message into the inbox of every block, its own included, and the receiver's mbarrier counts
// every 16 bytes that arrive. So there is one hop where a tree has log2(size), and no cluster barrier. Why there are no
// races:
//  - There are two inboxes, used alternately. A block sends message k + 2 only after it has received message k + 1 from
//    every block, and a block sends k + 1 only after it has finished reading inbox k (the __syncthreads() at the entry
//    of gather() is in between). So no message is overwritten before it is read.
//  - Messages k and k + 2 are counted by the same mbarrier in consecutive phases; by the argument above phase k is
//    complete when the first byte of k + 2 arrives. Bytes that arrive before the receiver has announced them are not
//    lost: the phase completes only after the announcement.
//  - The constructor synchronises all blocks, so none sends before the mbarriers are initialised.
//  - A block may exit after its last exchange: it has received everything that is sent to it, so no block stores to it
//    any more. This requires that all blocks take part in the same exchanges.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/hopper.cuh"
#include "llmc/cuda/hw/ring.cuh"

namespace weft::cuda {

#if WEFT_BULK_COPY

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Barrier for all threads of all blocks of the cluster; what they wrote before is visible to all of them after.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two halves, without the fence that waits for the thread's memory accesses: it makes nothing visible
// except what hopper::fence_barrier_init() has released.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address of the same shared variable in block `rank`.
__device__ inline unsigned cluster_address(unsigned shared, unsigned rank) {
  unsigned address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// Arrives at the mbarrier of block `rank`. It orders only accesses that this thread has waited for, such as completed
// reads of shared memory that block `rank` may then overwrite by a copy.
__device__ inline void cluster_mbarrier_arrive(unsigned barrier, unsigned rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank)) : "memory");
}
// Makes what other blocks sent visible to this thread: mbarrier_wait() acquires from its own block only. Call it for a
// phase that this thread has already waited for, so it does not spin.
__device__ inline void cluster_acquire(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait_%=:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra wait_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Waits for a phase that counts other blocks' stores; what they stored is then visible.
__device__ inline void cluster_mbarrier_wait(unsigned barrier, unsigned parity) {
  hopper::mbarrier_wait(barrier, parity);
  cluster_acquire(barrier, parity);
}
// Loads 16 bytes from the shared memory of a block of the cluster.
__device__ inline float4 cluster_load(unsigned address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
// Stores 16 bytes to the shared memory of a block of the cluster, counted by an mbarrier of the same block.
__device__ inline void cluster_store(unsigned address, const float4& value, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

// kBlocks: size of the cluster, 2, 4, 8 or 16. Used by all threads of a block, a multiple of 32.
template <int kBlocks>
class ClusterExchange {
 public:
  static_assert(kBlocks == 2 || kBlocks == 4 || kBlocks == 8 || kBlocks == 16);

  // Shared memory for messages of up to `floats` floats.
  __host__ __device__ static constexpr int bytes(int floats) { return 16 + 2 * kBlocks * round_up(floats) * 4; }

  // `shared`: bytes(floats), aligned to 16, at the same address in every block.
  __device__ ClusterExchange(void* shared, int floats)
      : barriers_(shared_address(shared)),
        inbox_(reinterpret_cast<float*>(static_cast<char*>(shared) + 16)),
        floats_(round_up(floats)),
        rank_(cluster_rank()) {
    if (threadIdx.x == 0) {
      hopper::mbarrier_init(barriers_, 1);
      hopper::mbarrier_init(barriers_ + 8, 1);
      hopper::fence_barrier_init();
    }
    cluster_barrier();
  }

  unsigned __device__ rank() const { return rank_; }

  // ClusterGather. `own`: this block's message of `count` floats (a multiple of 4, the same in all blocks), in shared
  // memory, aligned to 16. Returns the messages of all blocks in the order of ranks, message_stride() floats apart, in
  // shared memory; valid until the next exchange.
  __device__ const float* gather(const float* own, int count) {
    __syncthreads();  // `own` is complete, and no thread reads the previous inbox any more
    const unsigned barrier = barriers_ + 8 * next_.stage;
    float* inbox = inbox_ + next_.stage * kBlocks * floats_;
    if (threadIdx.x == 0) hopper::mbarrier_arrive_expect(barrier, static_cast<unsigned>(kBlocks * count * 4));
    const unsigned target = shared_address(inbox + rank_ * floats_);
    const int pieces = count / 4;  // 16-byte pieces of a message
    for (int i = static_cast<int>(threadIdx.x); i < pieces * kBlocks; i += static_cast<int>(blockDim.x)) {
      const unsigned to = static_cast<unsigned>(i / pieces);
      const int piece = i % pieces;
      cluster_store(cluster_address(target, to) + piece * 16, reinterpret_cast<const float4*>(own)[piece],
                    cluster_address(barrier, to));
    }
    cluster_mbarrier_wait(barrier, next_.phase);
    next_.advance(2);
    return inbox;
  }
  __device__ int message_stride() const { return floats_; }

  // ClusterReduce: element i of the sum over all blocks, added in the order of ranks, so that every block gets the same
  // bits. use(i, sum) runs in one thread for each i < count.
  template <typename Use>
  __device__ void reduce(const float* own, int count, const Use& use) {
    const float* messages = gather(own, count);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      float sum = messages[i];
#pragma unroll
      for (int r = 1; r < kBlocks; ++r) sum += messages[r * floats_ + i];
      use(i, sum);
    }
  }

 private:
  __host__ __device__ static constexpr int round_up(int floats) {
    return (floats + 3) / 4 * 4;
  }

  unsigned barriers_;  // two mbarriers, 8 bytes each
  float* inbox_;
  int floats_;
  unsigned rank_;
  RingPosition next_;  // position in the ring of two inboxes
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda
