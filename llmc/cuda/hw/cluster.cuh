// What the blocks of a thread-block cluster tell each other through distributed shared memory (sm_90 and later): ClusterGather
// and ClusterReduce, the collectives of ClusterFusion (Luo et al., 2025), as one exchange without rounds.
//
// Each block pushes its message into the inbox of every block, its own included, and every 16 bytes that land are counted
// by the receiver's mbarrier. So there is one hop where a tree has log2(size) of them, and no barrier of the cluster. What
// keeps it free of races:
//  - There are two inboxes, used alternately. A block sends message k + 2 only after it has message k + 1 of every block, and a block
//    sends k + 1 only after it is done with inbox k: the entry barrier of the block stands between. So nobody overwrites
//    what is still read.
//  - Messages k and k + 2 are counted by the same mbarrier in consecutive phases; the argument above says that phase k is
//    complete when the first byte of k + 2 arrives. Bytes that arrive before the receiver announced them are not lost: the
//    phase waits for the announcement too.
//  - The constructor meets all blocks: nobody sends before the mbarriers exist.
//  - A block may leave after its last exchange: it has got everything that was sent to it, so nobody writes to it any more.
//    For that all blocks take part in the same exchanges.
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
// All threads of all blocks of the cluster; what they wrote before is visible to all of them after.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two halves, and without making anything visible that hopper::fence_barrier_init() has not: no fence that waits
// for the thread's accesses to memory.
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
// Arrives at the mbarrier of block `rank`. Orders nothing but what this thread has waited for: reads of shared memory that
// are done, say, so that block `rank` may copy over them.
__device__ inline void cluster_mbarrier_arrive(unsigned barrier, unsigned rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank)) : "memory");
}
// What other blocks sent is visible to this thread, too: a wait acquires from its own block only. For a phase that this
// thread has waited for.
__device__ inline void cluster_acquire(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait_%=:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra wait_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Until a phase is complete that other blocks' stores count toward, and what they sent is visible.
__device__ inline void cluster_mbarrier_wait(unsigned barrier, unsigned parity) {
  hopper::mbarrier_wait(barrier, parity);
  cluster_acquire(barrier, parity);
}
// 16 bytes from the shared memory of a block of the cluster.
__device__ inline float4 cluster_load(unsigned address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
// 16 bytes into the shared memory of a block of the cluster, counted by an mbarrier of the same block.
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
  // memory, aligned to 16. Returns the messages of all blocks in the order of ranks, message_stride() floats apart: in
  // shared memory, to be read until the next exchange.
  __device__ const float* gather(const float* own, int count) {
    __syncthreads();  // `own` is complete; nobody reads the previous inbox any more
    const unsigned barrier = barriers_ + 8 * next_.stage;
    float* inbox = inbox_ + next_.stage * kBlocks * floats_;
    if (threadIdx.x == 0) hopper::mbarrier_arrive_expect(barrier, static_cast<unsigned>(kBlocks * count * 4));
    const unsigned target = shared_address(inbox + rank_ * floats_);
    const int pieces = count / 4;  // of 16 bytes
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

  unsigned barriers_;  // two of 8 bytes
  float* inbox_;
  int floats_;
  unsigned rank_;
  RingPosition next_;  // of the two inboxes
};

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda
