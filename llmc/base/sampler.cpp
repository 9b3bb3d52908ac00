#include "llmc/base/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/base/error.h"
#include "llmc/base/sampling_math.h"

namespace weft {

namespace {

// The lowest id of the greatest logit.
SampleError argmax(std::span<const float> logits, std::size_t* best) {
  *best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return SampleError::not_a_number;
    if (logits[i] == std::numeric_limits<float>::infinity()) return SampleError::infinite;
    if (logits[i] > logits[*best]) *best = i;
  }
  return logits.empty() || !std::isfinite(logits[*best]) ? SampleError::nothing_finite : SampleError::none;
}

}  // namespace

std::span<const float> Sampler::sampled_part(std::span<const float> logits) const {
  if (plan_.vocab_limit > 0) {
    logits = logits.first(std::min(logits.size(), static_cast<std::size_t>(plan_.vocab_limit)));
  }
  return logits;
}

std::int32_t Sampler::sample(std::span<const float> logits, std::int64_t position) {
  std::int32_t id = 0;
  const SampleError error = try_sample(logits, position, &id);
  if (error == SampleError::not_a_number || error == SampleError::infinite) {
    logits = sampled_part(logits);
    const auto damaged = [](float x) { return std::isnan(x) || x == std::numeric_limits<float>::infinity(); };
    const auto first = std::find_if(logits.begin(), logits.end(), damaged);
    fail(Exit::numeric, "logit of id %td is %s: the model's weights or its arithmetic are damaged",
         first - logits.begin(), error == SampleError::not_a_number ? "NaN" : "infinite");
  }
  check_sample(error);
  return id;
}

SampleError Sampler::try_sample(std::span<const float> logits, std::int64_t position, std::int32_t* id) {
  logits = sampled_part(logits);
  std::size_t best = 0;
  const SampleError error = argmax(logits, &best);
  if (error != SampleError::none) return error;
  if (plan_.greedy) {
    *id = static_cast<std::int32_t>(best);
    return SampleError::none;
  }

  const float greatest = logits[best];
  weights_.resize(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) weights_[i] = sampling_weight(logits[i], greatest, plan_.scale);

  const std::vector<std::int32_t> kept = kept_ids(logits);
  std::uint64_t total = 0;
  for (const std::int32_t candidate : kept) total += weights_[static_cast<std::size_t>(candidate)];
  const std::uint64_t target = sampling_target(sampling_bits(plan_.seed, position), total);
  std::uint64_t cumulative = 0;
  for (const std::int32_t candidate : kept) {
    cumulative += weights_[static_cast<std::size_t>(candidate)];
    if (cumulative > target) {
      *id = candidate;
      return SampleError::none;
    }
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
