// Decides the next id, and passes it to all blocks and to the host.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/op/sample/mailbox.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Whether the launch ends with this token, and why. The result is the same in every thread that knows the token.
template <typename K>
__device__ __forceinline__ FusedEnd Consumer<K>::end_after(const SampledToken& chosen, int token,
                                                           bool cancelled) const {
  const Parameters& p = c.p;
  FusedEnd end = token + 1 == p.count ? FusedEnd::length : FusedEnd::running;
  if (cancelled || chosen.error != SampleError::none) end = FusedEnd::cancelled;
  for (int i = 0; i < p.num_stop_ids; ++i) {
    if (p.stop_ids[i] == chosen.id && chosen.error == SampleError::none) end = FusedEnd::stop_id;
  }
  return end;
}

// Publishes the id or error in the mailbox, and then, if the launch ends, its end.
template <typename K>
__device__ __forceinline__ void Consumer<K>::tell_host(const SampledToken& chosen, int token, FusedEnd end) const {
  const Parameters& p = c.p;
  const int sampled = token - p.num_more;
  if (p.device_ids != nullptr && chosen.error == SampleError::none) p.device_ids[sampled] = chosen.id;
  publish(p.mailbox, p.sequence + static_cast<unsigned>(sampled), chosen.id, chosen.error);
  if (end == FusedEnd::running) return;
  const int tokens = chosen.error == SampleError::none ? sampled + 1 : sampled;
  store_release_system(&p.host->end, static_cast<std::uint64_t>(p.sequence) << 32 |
                                         static_cast<unsigned>(chosen.error) << kEndErrorShift |
                                         static_cast<unsigned>(end) << kEndShift | static_cast<unsigned>(tokens));
}

// The given id that is fed after `token`, which has no logits. Waits for x as the head would: until then other blocks
// may still read what the next layer overwrites.
template <typename K>
__device__ __forceinline__ std::int32_t Consumer<K>::given_id(int token) const {
  float unused[kInputs];
  load_vector<kRowLoads>(c.p.x, c.p.C, step, unused);
  return c.p.more_ids[token];
}

// The next id, or -1 if the launch ends. Greedy: every block finds the largest logit of all blocks for itself.
template <typename K>
__device__ __forceinline__ std::int32_t Consumer<K>::greedy_id(int token) {
  constexpr int kAhead = 8;
  const Parameters& p = c.p;
  SampledToken chosen{0, SampleError::none};
  FusedEnd end = FusedEnd::running;
  bool came = true;
  if (warp == 0) {
    std::uint64_t best = 0;
    unsigned flags = 0;
    for (int first = lane; first - lane < c.blocks; first += kAhead * kWarpSize) {
      std::uint64_t words[kAhead];
      came = came && c.wait_for([&] {
        bool good = true;
#pragma unroll
        for (int u = 0; u < kAhead; ++u)
          words[u] = load_relaxed(p.head_best + min(first + u * kWarpSize, c.blocks - 1));
#pragma unroll
        for (int u = 0; u < kAhead; ++u) good = good && BlockBest::is_of(words[u], token);
        return good;
      });
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const std::uint64_t rank = BlockBest::rank(words[u]);
        best = rank > best ? rank : best;
        flags |= BlockBest::flags(words[u]);
      }
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
      best = other > best ? other : best;
      flags |= __shfl_xor_sync(~0u, flags, offset);
    }
    came = __all_sync(~0u, came) != 0;
    chosen.id = sampler_detail::id_of(best);
    if (best <= ~0u || sampler_detail::logit_of(static_cast<std::uint32_t>(best >> 32)) == -INFINITY) {
      chosen = {0, SampleError::nothing_finite};
    }
    if ((flags & BlockBest::kInfinite) != 0) chosen = {0, SampleError::infinite};
    if ((flags & BlockBest::kNotANumber) != 0) chosen = {0, SampleError::not_a_number};
    end = end_after(chosen, token, (flags & BlockBest::kCancelled) != 0);
    if (lane == 0) c.flags.id = came && end == FusedEnd::running ? chosen.id : -1;
  }
  sync();
  if (c.block == 0 && thread == 0 && came) tell_host(chosen, token, end);
  return *const_cast<volatile std::int32_t*>(&c.flags.id);
}

// Random sampling: block 0 draws the id when all blocks have written their logits, and publishes it for the other
// blocks.
template <typename K>
__device__ __forceinline__ void Consumer<K>::choose(int token, bool cancelled) {
  const Parameters& p = c.p;
  await(p.control->head, static_cast<unsigned>(c.blocks) * static_cast<unsigned>(token - p.num_more + 1));
  if (thread >= kSamplerThreads) return;
  auto& scratch = *reinterpret_cast<SamplerScratch<kSamplerThreads>*>(shared + at.sampler);
  const SampledToken chosen =
      sample_block<kSamplerThreads, 2>(p.logits, p.V, p.sampling, p.position + token + 1, thread, scratch);
  if (thread != 0) return;
  const FusedEnd end = end_after(chosen, token, cancelled);
  const unsigned stop = end != FusedEnd::running ? 1u << 31 : 0u;
  store_relaxed(&p.control->next,
                static_cast<std::uint64_t>(token + 1) << 32 | stop | static_cast<unsigned>(chosen.id));
  tell_host(chosen, token, end);
}
template <typename K>
__device__ __forceinline__ std::int32_t Consumer<K>::sampled_id(int token) {
  if (thread == 0) {
    std::uint64_t word = 0;
    const bool came = c.wait_for([&] {
      word = load_relaxed(&c.p.control->next);
      return static_cast<int>(word >> 32) == token + 1;
    });
    const std::int32_t id = static_cast<std::int32_t>(word & 0x7fffffffu);
    c.flags.id = !came || (word & 0x80000000u) != 0 ? -1 : id;
  }
  sync();
  return *const_cast<volatile std::int32_t*>(&c.flags.id);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
