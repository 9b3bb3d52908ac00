// The head: final norm, logits of this block's rows, and the largest of them.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"
#include "llmc/cuda/fused/packed_tiles.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// Writes the logits of this block's rows. Greedy: publishes the block's largest logit in head_best. Otherwise block 0
// waits for all logits and draws the id.
template <typename K>
__device__ __forceinline__ void Consumer<K>::run_head(int token) {
  const Parameters& p = c.p;
  float input[kInputs];
  if constexpr (K::kSequential) {
    const NormWeight norm = load_norm(layers[p.L].norm1_weight, layers[p.L].norm1_bias);
    load_vector<kRowLoads>(p.x, p.C, step, input);
    stamp(p.L, FusedPhase::x_here);
    normalize_one(norm, input);
  } else {
    float unused[kInputs];
    const NormWeights norms = load_norms(layers[p.L], false);
    load_vector<kRowLoads>(p.x, p.C, step, input);
    stamp(p.L, FusedPhase::x_here);
    normalize(norms, input, unused);
  }
  stamp(p.L, FusedPhase::norms_done);
  // Loaded early, because it is host memory. A cancellation may therefore take effect one token later.
  const bool cancelled = c.block == 0 && thread == 0 && load_relaxed_system(&p.host->cancel) == p.sequence;
  std::uint64_t best = 0;
  unsigned bad = 0;
  struct Nothing {};
  [[maybe_unused]] std::conditional_t<K::kQuantized, Digits<HeadFormat, kRowLoads>, Nothing> digits;
  [[maybe_unused]] bool quantized = false;
  if constexpr (K::kQuantized) {
    quantized = layers[p.L].stream != nullptr;
    if (quantized) make_digits(digits, input);
  }
  partial_buffer = 0;  // a barrier of the norm lies behind the layer's last use
  // Rows whose partial sums fit and that have a thread each, rounded down to whole stages.
  const int chunk_rows = (K::kQuantized ? kSetRows<HeadFormat> : kRows) * p.warps_r,
            batch = (K::kQuantized ? min(p.partial_rows, threads) : p.partial_rows) / chunk_rows * chunk_rows;
  const std::int64_t limit = p.sampling.vocab_limit > 0 ? p.sampling.vocab_limit : p.V;
  for (int first = own.head.begin; first < own.head.end; first += batch) {
    const int rows = min(batch, own.head.end - first);
    [[maybe_unused]] float scale = 1;
    if constexpr (K::kQuantized) {
      if (quantized) {
        scale = thread < rows ? load_scale(layers[p.L].qkv_scales + first + thread) : 1.0f;
        multiply_band(rows, groups_of(p.C), digits, false);
      }
    }
    if (!quantized) narrow_rows(rows, input);
    finish_rows(rows, [&](int row, float sum) {
      const int id = first + row;
      const float logit = K::kQuantized ? sum * scale : sum;
      p.logits[id] = logit;
      if (id >= limit) return;
      const std::uint64_t rank = sampler_detail::rank_of(logit, id);
      best = rank > best ? rank : best;
      bad |= isnan(logit) ? BlockBest::kNotANumber : logit == INFINITY ? BlockBest::kInfinite : 0u;
    });
  }
  stamp(p.L, FusedPhase::qkv_done);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const std::uint64_t other = __shfl_xor_sync(~0u, best, offset);
    best = other > best ? other : best;
    bad |= __shfl_xor_sync(~0u, bad, offset);
  }
  ulonglong2* words = reinterpret_cast<ulonglong2*>(shared + at.sampler);
  if (lane == 0) words[warp] = make_ulonglong2(best, bad);
  sync();
  if (thread == 0 && p.sampling.greedy) {
    for (int w = 1; w < threads / kWarpSize; ++w) {
      best = words[w].x > best ? words[w].x : best;
      bad |= static_cast<unsigned>(words[w].y);
    }
    if (cancelled) bad |= BlockBest::kCancelled;
    store_relaxed(p.head_best + c.block, BlockBest::word(best, bad, token));
  }
  if (!p.sampling.greedy) {
    announce(p.control->head);
    if (c.block == 0) choose(token, cancelled);
  }
  stamp(p.L, FusedPhase::up_done);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
