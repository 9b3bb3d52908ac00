// Messages between the blocks of a cluster that share a row: asynchronous stores into another block's shared memory,
// counted by its mbarrier (hw/cluster.cuh). No block reads another's shared memory. So no cluster barrier is needed,
// whose fence would wait for all accesses of every thread, and a block may exit once it has received its last message,
// since nothing is stored to it after that.
#pragma once

#include <cstdint>

#include "llmc/cuda/hw/cluster.cuh"
#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda::sampler_detail {

constexpr int kPivots = 8;
constexpr int kSums = kPivots + 1;  // one for each pivot, and the total

// 64-bit words of a message: a block's sums and its number of candidates, or one word for each of its warps. Even,
// because messages are sent in pieces of 16 bytes.
constexpr int message_words(int threads) {
  const int warps = threads / kWarpSize, words = kSums + 1 > warps ? kSums + 1 : warps;
  return words + words % 2;
}

// Shared memory in which a block of a cluster receives: messages of kWords 64-bit words (a ClusterExchange), and an
// mbarrier that counts the bytes of candidates.
template <int kBlocks, int kWords>
struct ClusterInbox {
  alignas(16) char messages[16 + 2 * kBlocks * kWords * 8];
  std::uint64_t candidates_arrived;
};
template <int kWords>
struct ClusterInbox<1, kWords> {};

// The primary template sends no messages: for one block, and for GPUs without clusters, for which kernels of several
// blocks are compiled but never launched.
template <int kBlocks, int kWords>
struct ClusterMessages {
  __device__ explicit ClusterMessages(ClusterInbox<kBlocks, kWords>&) {}
  __device__ int rank() const { return 0; }
  __device__ void exchange(const std::uint64_t*) {}
  __device__ const std::uint64_t* from(int) const { return nullptr; }
  template <typename Candidate>
  __device__ void gather(Candidate*, const Candidate*, const int*) {}
};

#if WEFT_BULK_COPY
template <int kBlocks, int kWords>
requires(kBlocks > 1) struct ClusterMessages<kBlocks, kWords> {
  using Inbox = ClusterInbox<kBlocks, kWords>;
  static_assert(sizeof(Inbox::messages) == ClusterExchange<kBlocks>::bytes(2 * kWords));

  __device__ explicit ClusterMessages(Inbox& inbox)
      : arrived_(shared_address(&inbox.candidates_arrived)), exchange_(prepared(inbox), 2 * kWords) {}

  __device__ int rank() const { return static_cast<int>(exchange_.rank()); }

  // Sends kWords words, which all threads of the block have finished writing, to every block. Until the next exchange
  // from(b) is the message of block b. The words may be overwritten after the next exchange.
  __device__ void exchange(const std::uint64_t* words) {
    received_ = exchange_.gather(reinterpret_cast<const float*>(words), 2 * kWords);
  }
  __device__ const std::uint64_t* from(int b) const {
    return reinterpret_cast<const std::uint64_t*>(received_ + b * exchange_.message_stride());
  }

  // all = the candidates of every block, in the order of the blocks; `own`: those of this block, counts[b]: their
  // number in block b. A block sends only after an exchange, which the other blocks enter when they have read the
  // previous contents of `all`, so nothing is overwritten before it is read.
  template <typename Candidate>
  __device__ void gather(Candidate* all, const Candidate* own, const int* counts) {
    static_assert(sizeof(Candidate) == 16);
    int before = 0, total = 0;
    for (int b = 0; b < kBlocks; ++b) {
      if (b < rank()) before += counts[b];
      total += counts[b];
    }
    if (threadIdx.x == 0) hopper::mbarrier_arrive_expect(arrived_, static_cast<unsigned>(total) * sizeof(Candidate));
    for (int i = static_cast<int>(threadIdx.x); i < counts[rank()] * kBlocks; i += static_cast<int>(blockDim.x)) {
      const unsigned to = static_cast<unsigned>(i % kBlocks);
      cluster_store(cluster_address(shared_address(all + before + i / kBlocks), to),
                    reinterpret_cast<const float4*>(own)[i / kBlocks], cluster_address(arrived_, to));
    }
    hopper::mbarrier_wait(arrived_, parity_);
    cluster_acquire(arrived_, parity_);
    parity_ ^= 1;
  }

 private:
  // The constructor of exchange_ synchronises all blocks, so none sends before this mbarrier is initialised.
  static __device__ void* prepared(Inbox& inbox) {
    if (threadIdx.x == 0) {
      hopper::mbarrier_init(shared_address(&inbox.candidates_arrived), 1);
      hopper::fence_barrier_init();
    }
    return inbox.messages;
  }

  unsigned arrived_, parity_ = 0;
  ClusterExchange<kBlocks> exchange_;
  const float* received_ = nullptr;
};
#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::sampler_detail
