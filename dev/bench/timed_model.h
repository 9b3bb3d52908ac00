// A model that only takes time, as a GPU does: a step is ready when its time has passed since the one before was, and ids come from
// a simple generator. For what the host costs.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/model/inference_model.h"

namespace weft {

class TimedModel final : public InferenceModel {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kPositions = 2048;
  enum class Wait { sleeps, polls };  // of collect(); cudaEventSynchronize polls

  TimedModel(std::int64_t vocab_size, std::int64_t sequences, std::int64_t depth, double step_seconds, Wait wait)
      : step_(duration_of(step_seconds)), slots_(sequences), depth_(depth), wait_(wait) {
    config_.vocab_size = config_.tokenizer_vocab = vocab_size;
    config_.max_positions = kPositions;
  }

  const ModelConfig& config() const override { return config_; }
  std::vector<MemoryLine> memory() const override { return {}; }
  std::uint64_t bytes_per_step(std::int64_t, std::int64_t) const override { return 0; }
  std::int64_t page_size() const override { return 32; }
  std::int64_t num_pages() const override { return slots_ * kPositions / page_size(); }
  std::int64_t slots() const override { return slots_; }
  std::int64_t max_rows() const override { return 2048; }
  std::int64_t max_positions() const override { return kPositions; }
  std::int64_t depth() const override { return depth_; }
  void keep_activations(bool) override {}
  std::vector<float> activation(const std::string&) override { return {}; }

  void submit(std::span<const Chunk> work) override {
    const Clock::time_point begin = Clock::now();
    if (std::ssize(flights_) >= depth_) fail(Exit::internal, "timed model: too many steps");
    last_ready_ = std::max(last_ready_, begin) + step_;
    std::vector<ChunkResult> results(work.size());
    for (std::size_t i = 0; i < work.size(); ++i) {
      without_ids += work[i].ids.empty();
      if (work[i].sampling == nullptr) continue;
      word_ = word_ * 6364136223846793005u + 1442695040888963407u;
      const auto id = static_cast<std::int32_t>((word_ >> 33) % static_cast<std::uint64_t>(config_.vocab_size));
      results[i].sampled = ScoredId{id, 0, {}};
    }
    flights_.push_back({last_ready_, std::move(results)});
    deepest = std::max(deepest, flights_.size());
    taken += Clock::now() - begin;
  }
  std::span<const ChunkResult> collect() override {
    const Clock::time_point begin = Clock::now();
    ended_ = flights_.front().ready;
    if (wait_ == Wait::sleeps) std::this_thread::sleep_until(ended_);
    while (Clock::now() < ended_) {
    }
    collected_ = std::move(flights_.front().results);
    flights_.pop_front();
    taken += Clock::now() - begin;
    return collected_;
  }
  double ended_seconds() const override { return in_seconds(ended_.time_since_epoch()); }

  Clock::duration taken{0};  // in submit() and collect()
  std::size_t deepest = 0;
  std::int64_t without_ids = 0;  // chunks whose id was sampled by the step before

 private:
  struct Flight {
    Clock::time_point ready;
    std::vector<ChunkResult> results;
  };
  const Clock::duration step_;
  const std::int64_t slots_, depth_;
  const Wait wait_;
  ModelConfig config_;
  std::deque<Flight> flights_;
  std::vector<ChunkResult> collected_;
  Clock::time_point last_ready_, ended_;
  std::uint64_t word_ = 1;
};

}  // namespace weft
