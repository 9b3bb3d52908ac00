// A step between submit() and collect(). Everything that differs between two steps with the same padded sizes lies in
// device memory: the description, one copy from page-locked memory, and the ids that were sampled last. So a step of
// few rows is the replay of a captured graph, and the GPU does not wait for the host: a description is copied while the
// previous step runs, the last kernel writes results to page-locked memory, and an event follows it. Steps may be queued far
// ahead: on the device two descriptions take turns, page-locked memory is of each step that may be in flight.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/cuda/inference/inference_model.h"
#include "llmc/cuda/runtime/fork.h"

namespace weft::cuda {

std::int64_t row_bucket(std::int64_t rows) {
  for (const std::int64_t bucket : {0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256}) {
    if (rows <= bucket) return bucket;
  }
  return rows;
}

StepArrays step_arrays(std::byte* begin, std::int64_t rows, std::int64_t wanted) {
  StepArrays step;
  step.begin = reinterpret_cast<const std::int32_t*>(begin);
  const auto take = [&](auto*& array, std::int64_t count) {
    using T = std::remove_reference_t<decltype(*array)>;
    begin += (16 - reinterpret_cast<std::uintptr_t>(begin) % 16) % 16;
    array = reinterpret_cast<T*>(begin);
    begin = reinterpret_cast<std::byte*>(array + count);
  };
  take(step.scores_at, 1);
  take(step.sample_positions, wanted);
  take(step.plans, wanted);
  take(step.ids, rows);
  take(step.positions, rows);
  take(step.tables, rows);
  take(step.wanted_rows, wanted);
  take(step.slots, wanted);
  take(step.targets, wanted);
  take(step.alternatives, wanted);
  take(step.work, 0);
  return step;
}

// ---- submit -----------------------------------------------------------------------------------------------------------

// Rejects steps that would access memory of other chunks.
template <typename S>
void Inference<S>::check(std::span<const Chunk> work) const {
  if (submitted_ - collected_ >= kDepth) {
    fail(Exit::internal, "inference: %lld steps were not collected", static_cast<long long>(kDepth));
  }
  check_step(work, pool_, config_.longest_window());
  for (const Chunk& chunk : work) {
    if (chunk.alternatives > kMaxAlternatives) {
      fail(Exit::internal, "inference: %d alternatives, at most %lld are possible", chunk.alternatives,
           static_cast<long long>(kMaxAlternatives));
    }
  }
  if (std::ssize(work) > pool_.slots) {
    fail(Exit::internal, "inference: %zu sequences, there are %lld slots", work.size(),
         static_cast<long long>(pool_.slots));
  }
}

template <typename S>
LogitRowUpload& Inference<S>::free_rules(std::int64_t wanted) {
  Rules& rules = *rules_[static_cast<std::size_t>(with_rules_ % kStepSlots)];
  ++with_rules_;
  if (rules.step >= collected_) cuda::check(cudaEventSynchronize(*flight_of(rules.step).done), "inference step");
  rules.step = submitted_;
  rules.rows.begin(wanted);
  return rules.rows;
}

template <typename S>
std::size_t Inference<S>::describe(std::span<const Chunk> work, Flight& flight, std::int64_t& rows,
                                   std::int64_t& wanted) {
  // Rows and wanted rows of the chunks.
  flight.chunks.resize(work.size());
  flight.kept_rows.clear();
  paged_chunks_.clear();
  rows = wanted = 0;
  for (std::size_t s = 0; s < work.size(); ++s) {
    const Chunk& chunk = work[s];
    FlightChunk& out = flight.chunks[s];
    const std::int64_t count = chunk.rows(), targets = std::ssize(chunk.targets);
    const bool last_is_wanted = chunk.sampling != nullptr || chunk.keep_logits;
    out.drafts.assign(chunk.ids.end() - chunk.drafts, chunk.ids.end());
    out.later_drafts = chunk.drafts_on_device ? std::to_address(chunk.ids.end() - chunk.drafts) : nullptr;
    paged_chunks_.push_back({rows, count, chunk.first_position});
    out.targets_begin = wanted;
    out.targets.assign(chunk.targets.begin(), chunk.targets.end());
    wanted += targets + chunk.drafts;  // a chunk has targets or drafts, not both
    out.last = -1;
    // either the last target's row or an additional one
    if (last_is_wanted) out.last = targets == count ? wanted - 1 : wanted++;
    out.sampled = chunk.sampling != nullptr;
    out.alternatives = chunk.alternatives;
    out.logits = chunk.keep_logits ? std::ssize(flight.kept_rows) : -1;
    if (chunk.keep_logits) flight.kept_rows.push_back(out.last);
    rows += count;
  }
  const std::int64_t used_rows = rows, used_wanted = wanted;
  flight.all_wanted = wanted == rows;
  rows = row_bucket(rows);
  wanted = row_bucket(wanted);
  const bool any_rules = std::ranges::any_of(work, [](const Chunk& chunk) { return !chunk.logit_rows.empty(); });
  LogitRowUpload* const rules = any_rules ? &free_rules(wanted) : nullptr;

  std::byte* const begin = flight.upload.template at<std::byte>(0);
  const StepArrays step = step_arrays(begin, rows, wanted);
  *step.scores_at = flight.scores.template at<RowScore>(0);
  // Block tables follow attention's work list; `table` counts elements of 4 bytes.
  const std::size_t work_bytes = write_paged_work(step.work, attention_shape(config_, pool_), paged_chunks_);
  flight.decodes = paged_work_decodes(step.work);
  auto* const base = reinterpret_cast<std::int32_t*>(begin);
  std::int64_t table = ceil_div(step.work + work_bytes - begin, sizeof(std::int32_t));
  std::int64_t row = 0, next = 0;
  kept_places_.clear();
  for (std::size_t s = 0; s < work.size(); ++s) {
    const Chunk& chunk = work[s];
    const std::int64_t count = chunk.rows(), targets = std::ssize(chunk.targets);
    for (std::int64_t t = 0; t < count; ++t, ++row) {
      const std::int64_t position = chunk.first_position + t;
      const std::int64_t draft = t - (count - chunk.drafts);  // index among the drafts
      const bool on_device = chunk.drafts_on_device && draft >= 0;
      step.ids[row] = chunk.ids.empty() ? -1 - chunk.slot
                      : on_device       ? -1 - static_cast<std::int32_t>(pool_.slots + draft)
                                        : chunk.ids[static_cast<std::size_t>(t)];
      step.positions[row] = static_cast<std::int32_t>(position);
      step.tables[row] = static_cast<std::int32_t>(table);
      if (keep_) {
        kept_places_.push_back(
            {chunk.pages[static_cast<std::size_t>(position / pool_.page_size)], position % pool_.page_size});
      }
      const bool last = t + 1 == count && flight.chunks[s].last >= 0;
      const bool verified = chunk.drafts > 0 && t + 1 + chunk.drafts >= count;
      const bool sampled = (last && chunk.sampling != nullptr) || verified;
      if (t >= targets && !last && !verified) continue;
      step.wanted_rows[next] = static_cast<std::int32_t>(row);
      step.sample_positions[next] = sampled ? position + 1 : -1;
      if (sampled) step.plans[next] = *chunk.sampling;
      if (sampled && !chunk.logit_rows.empty()) {
        const auto i = static_cast<std::size_t>(t + 1 + chunk.drafts - count);  // among the sampled rows
        rules->set(next, chunk.logit_rows[i], chunk.slot);
      }
      step.slots[next] = verified ? kSampledForHost : sampled ? chunk.slot : kNotSampled;
      step.targets[next] = t < targets ? chunk.targets[static_cast<std::size_t>(t)] : -1;
      step.alternatives[next] = chunk.alternatives;
      ++next;
    }
    // the chunk's table may have more pages
    const std::int64_t pages = ceil_div(chunk.first_position + count, pool_.page_size);
    std::copy_n(chunk.pages.begin(), pages, base + table);
    table += pages;
  }
  for (; row < rows; ++row) {  // padding rows compute on an embedding, so that they stay finite
    step.ids[row] = 0;
    step.positions[row] = -1;
    step.tables[row] = 0;
  }
  flight.first_wanted = used_wanted > 0 ? step.wanted_rows[0] : rows;  // they ascend
  for (; next < wanted; ++next) {
    step.wanted_rows[next] = 0;
    step.sample_positions[next] = -1;
    step.slots[next] = kNotSampled;
    step.targets[next] = step.alternatives[next] = -1;
  }
  kept_step_rows_ = used_rows;
  flight.wanted = used_wanted;
  flight.logit_rows = rules != nullptr ? rules->rows() : nullptr;
  return static_cast<std::size_t>(table) * sizeof(std::int32_t);
}

// Copies the logits of wanted rows first to first + count - 1 from the workspace to the chunks that keep them.
template <typename S>
void Inference<S>::keep_logits(const Flight& flight, std::int64_t first, std::int64_t count) {
  const std::int64_t V = config_.vocab_size;
  for (std::size_t i = 0; i < flight.kept_rows.size(); ++i) {
    const std::int64_t row = flight.kept_rows[i] - first;
    if (row < 0 || row >= count) continue;
    const std::size_t bytes = static_cast<std::size_t>(V) * sizeof(float);
    cuda::check(cudaMemcpyAsync(flight.logits->template at<std::byte>(i * bytes), b_.logits + row * V, bytes,
                                cudaMemcpyDeviceToHost, stream_),
                "logits");
  }
}

template <typename S>
void Inference<S>::launch(const Flight& flight, std::int64_t rows, std::int64_t wanted) {
  StepArrays step = step_arrays(flight.step, rows, wanted);
  step.scores = flight.scores.template at<RowScore>(0);
  step.logit_rows = flight.logit_rows;
  step.decodes = flight.decodes && !keep_;  // kept activations need rotated queries in memory
  step.all_wanted = flight.all_wanted;
  if (fused_ != nullptr && !keep_ && kept_step_rows_ <= kFusedStepRows) {
    return launch_fused(flight, step, rows, wanted);
  }
  if (!options_.direct && !keep_ && rows <= kGraphRows && wanted <= kLogitRows) {
    BucketGraph& bucket = graphs_[{rows, wanted, step.decodes, step.all_wanted, step.logit_rows, flight.step}];
    // The first step with these sizes is launched directly: kernels are loaded in it, and the sizes may not recur.
    if (std::exchange(bucket.ran, true)) {
      if (bucket.graph.empty()) {
        step.scores = nullptr;
        bucket.graph.capture(stream_, [&] {
          run_layers(step, rows);
          if (wanted > 0) run_head(step, 0, wanted);
        });
      }
      bucket.graph.launch(stream_);
      keep_logits(flight, 0, wanted);
      return;
    }
  }
  // A graph serves steps that want other rows, so only direct launches leave rows out.
  if (!keep_) step.first_wanted = flight.first_wanted;
  run_layers(step, rows);
  keep_logits_of_all_rows();
  for (std::int64_t first = 0; first < wanted; first += kLogitRows) {
    const std::int64_t count = std::min(kLogitRows, wanted - first);
    run_head(step, first, count);
    keep_logits(flight, first, count);
  }
}

template <typename S>
void Inference<S>::launch_fused(const Flight& flight, const StepArrays& step, std::int64_t rows, std::int64_t wanted) {
  const StepArrays host = step_arrays(flight.upload.template at<std::byte>(0), rows, wanted);
  std::array<FusedStepRow, kFusedStepRows> all;
  const auto count = static_cast<std::size_t>(kept_step_rows_);
  for (std::size_t r = 0; r < count; ++r) {
    all[r] = {host.ids[r], host.positions[r], host.tables[r], static_cast<std::int32_t>(r), -1};
    if (r > 0 && all[r].table == all[r - 1].table) all[r].first = all[r - 1].first;  // every chunk has its own table
  }
  for (std::int64_t i = 0; i < flight.wanted; ++i) {
    all[static_cast<std::size_t>(host.wanted_rows[i])].logits = static_cast<std::int32_t>(i);
  }
  named("fused step", [&] { fused_->launch(std::span(all).first(count), step.begin, b_.last_ids, b_.logits); });
  if (wanted == 0) return;
  sample_and_score(step, 0, wanted);
  keep_logits(flight, 0, wanted);
}

template <typename S>
void Inference<S>::submit(std::span<const Chunk> work) {
  check(work);
  Flight& flight = flight_of(submitted_);
  flight.step = b_.step[submitted_ % kStepSlots];
  std::int64_t rows = 0, wanted = 0;
  const std::size_t bytes = describe(work, flight, rows, wanted);
  const std::size_t logit_bytes =
      flight.kept_rows.size() * static_cast<std::size_t>(config_.vocab_size) * sizeof(float);
  if (logit_bytes > 0 && (flight.logits == nullptr || flight.logits->bytes() < logit_bytes)) {
    flight.logits = std::make_unique<PinnedBuffer>(logit_bytes);
  }
  // The step that the slot described before must have ended. The flight's own previous step has been collected.
  if (const std::int64_t before = submitted_ - kStepSlots; before >= collected_) {
    cuda::check(cudaStreamWaitEvent(upload_stream_, *flight_of(before).done, 0), "inference step");
  }
  delay_point(upload_stream_, DelayPoint::step);
  cuda::check(cudaMemcpyAsync(flight.step, flight.upload.template at<std::byte>(0), bytes, cudaMemcpyHostToDevice,
                              upload_stream_),
              "inference step");
  cuda::check(cudaEventRecord(flight.uploaded, upload_stream_), "inference step");
  cuda::check(cudaStreamWaitEvent(stream_, flight.uploaded, 0), "inference step");
  if (std::ranges::any_of(work, [](const Chunk& chunk) { return chunk.drafts_on_device; })) {
    cuda::check(cudaStreamWaitEvent(stream_, drafts_written_, 0), "inference step");
  }
  {
    std::optional<TraceRange> range;  // dev/bench/profile_decode.py knows these names
    if (options_.direct && kept_step_rows_ == 1) {
      range.emplace(format("token %lld", static_cast<long long>(work[0].first_position)).c_str());
    } else if (options_.direct) {
      range.emplace(format("step of %lld", static_cast<long long>(kept_step_rows_)).c_str());
    }
    launch(flight, rows, wanted);
  }
  if (std::ranges::any_of(work, [](const Chunk& chunk) { return chunk.alternatives > 0; })) {
    cuda::check(cudaMemcpyAsync(flight.most_likely.template at<IdLogprob>(0), b_.most_likely,
                                static_cast<std::size_t>(flight.wanted) * kMaxAlternatives * sizeof(IdLogprob),
                                cudaMemcpyDeviceToHost, stream_),
                "results");
  }
  cuda::check(cudaEventRecord(*flight.done, stream_), "inference step");
  ++submitted_;
}

// ---- collect ----------------------------------------------------------------------------------------------------------

template <typename S>
ScoredId Inference<S>::scored(const Flight& flight, std::int64_t row, std::int32_t id, float logprob,
                              std::int32_t count) const {
  ScoredId result = {id, logprob, {}};
  if (count <= 0) return result;
  const IdLogprob* most_likely = flight.most_likely.template at<IdLogprob>(0) + row * kMaxAlternatives;
  result.alternatives.assign(most_likely, most_likely + std::min<std::int64_t>(count, config_.tokenizer_vocab));
  return result;
}

template <typename S>
std::span<const ChunkResult> Inference<S>::collect() {
  if (submitted_ == collected_) fail(Exit::internal, "inference: collect() without a step");
  Flight& flight = flight_of(collected_);
  ++collected_;
  cuda::check(cudaEventSynchronize(*flight.done), "inference step");
  float milliseconds = 0;  // from one step's end to the next one's, so that fp32 is enough however long the model lives
  cuda::check(cudaEventElapsedTime(&milliseconds, *last_done_, *flight.done), "inference step");
  ended_seconds_ += 1e-3 * static_cast<double>(milliseconds);
  std::swap(last_done_, flight.done);
  if (fused_ != nullptr) fused_->check();
  const RowScore* scores = flight.scores.template at<RowScore>(0);
  results_.clear();
  for (const FlightChunk& chunk : flight.chunks) {
    ChunkResult& result = results_.emplace_back();
    const std::span<const std::int32_t> drafts =
        chunk.later_drafts != nullptr ? std::span(chunk.later_drafts, chunk.drafts.size()) : std::span(chunk.drafts);
    for (std::size_t t = 0; t < chunk.targets.size(); ++t) {
      const std::int64_t row = chunk.targets_begin + static_cast<std::int64_t>(t);
      result.targets.push_back(scored(flight, row, chunk.targets[t], scores[row].target, chunk.alternatives));
    }
    if (chunk.logits >= 0) {
      const auto V = static_cast<std::size_t>(config_.vocab_size);
      result.logits = {flight.logits->template at<float>(0) + static_cast<std::size_t>(chunk.logits) * V, V};
    }
    if (!chunk.sampled) continue;
    if (!drafts.empty()) {
      const std::int64_t begin = chunk.last - std::ssize(drafts);
      verified_.clear();
      for (std::int64_t row = begin; row <= chunk.last; ++row) {
        const RowScore& score = scores[row];
        verified_.push_back({scored(flight, row, score.id, score.sampled, chunk.alternatives), score.error});
      }
      accept_drafts(drafts, verified_, result);
      continue;
    }
    const RowScore& score = scores[chunk.last];
    result.error = score.error;
    if (score.error != SampleError::none) continue;
    result.sampled = scored(flight, chunk.last, score.id, score.sampled, chunk.alternatives);
  }
  return results_;
}

#define WEFT_INSTANTIATE(S)                                   \
  template void Inference<S>::submit(std::span<const Chunk>); \
  template std::span<const ChunkResult> Inference<S>::collect();
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
