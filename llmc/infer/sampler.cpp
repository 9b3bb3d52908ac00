#include "llmc/infer/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/base/error.h"
#include "llmc/base/sampling_math.h"

namespace weft {

namespace {

// The lowest id of the greatest logit. Fails on NaN, on +infinity, and if no logit is finite.
std::int32_t argmax(std::span<const float> logits) {
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<float>::infinity()) {
      fail(Exit::numeric, "logit of id %zu is %s: the model's weights or its arithmetic are damaged", i,
           std::isnan(logits[i]) ? "NaN" : "infinite");
    }
    if (logits[i] > logits[best]) best = i;
  }
  if (logits.empty() || !std::isfinite(logits[best])) fail(Exit::numeric, "no logit is finite: no token is possible");
  return static_cast<std::int32_t>(best);
}

}  // namespace

std::int32_t Sampler::sample(std::span<const float> logits, std::int64_t position) {
  if (plan_.vocab_limit > 0) {
    logits = logits.first(std::min(logits.size(), static_cast<std::size_t>(plan_.vocab_limit)));
  }
  const std::int32_t best = argmax(logits);
  if (plan_.greedy) return best;

  const float greatest = logits[static_cast<std::size_t>(best)];
  weights_.resize(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) weights_[i] = sampling_weight(logits[i], greatest, plan_.scale);

  const std::vector<std::int32_t> kept = kept_ids(logits);
  std::uint64_t total = 0;
  for (const std::int32_t id : kept) total += weights_[static_cast<std::size_t>(id)];
  const std::uint64_t target = sampling_target(sampling_bits(plan_.seed, position), total);
  std::uint64_t cumulative = 0;
  for (const std::int32_t id : kept) {
    cumulative += weights_[static_cast<std::size_t>(id)];
    if (cumulative > target) return id;
  }
  fail(Exit::internal, "sampling: target beyond the total");
}

// The ids that top-k, top-p and min-p keep, in order of id. Ids of weight 0 cannot be drawn and are left out.
std::vector<std::int32_t> Sampler::kept_ids(std::span<const float> logits) const {
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (weights_[i] > 0) ids.push_back(static_cast<std::int32_t>(i));
  }
  const auto weight = [this](std::int32_t id) { return weights_[static_cast<std::size_t>(id)]; };
  const auto ranks_before = [&logits](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };

  if (plan_.top_k > 0 && plan_.top_k < ids.size()) {
    std::nth_element(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(plan_.top_k), ids.end(), ranks_before);
    ids.resize(plan_.top_k);
  }
  if (plan_.top_p < 1) {
    std::uint64_t total = 0;
    for (const std::int32_t id : ids) total += weight(id);
    const std::uint64_t share = sampling_share(plan_.top_p, total);
    // A heap yields the ids in rank order without sorting all: a few of them usually have most of the weight.
    const auto ranks_after = [&](std::int32_t a, std::int32_t b) { return ranks_before(b, a); };
    std::make_heap(ids.begin(), ids.end(), ranks_after);
    auto rest = ids.end();
    for (std::uint64_t mass = 0; mass < share;) {
      std::pop_heap(ids.begin(), rest, ranks_after);
      mass += weight(*--rest);
    }
    ids.erase(ids.begin(), rest);
  }
  std::erase_if(ids, [&](std::int32_t id) { return weight(id) < plan_.least_weight; });
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace weft
