#include "llmc/model/single_sequence.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/logit_rules.h"
#include "llmc/model/queue_depth.h"

namespace weft {

namespace {

class SingleSequence final : public DecodeModel {
 public:
  SingleSequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity, std::function<void()> wait_for_weights,
                 std::unique_ptr<IdDecoder> decoder, std::int64_t decoder_positions)
      : model_(std::move(model)),
        decoder_(std::move(decoder)),
        decoder_positions_(decoder_positions),
        wait_for_weights_(std::move(wait_for_weights)),
        capacity_(capacity),
        pages_(static_cast<std::size_t>(model_->num_pages())) {
    std::iota(pages_.begin(), pages_.end(), 0);
  }

  const ModelConfig& config() const override { return model_->config(); }
  std::vector<MemoryLine> memory() const override {
    std::vector<MemoryLine> lines = model_->memory();
    if (decoder_ == nullptr) return lines;
    for (const MemoryLine& line : decoder_->memory()) lines.push_back(line);
    return lines;
  }
  std::uint64_t bytes_per_token(std::int64_t context) const override { return model_->bytes_per_step(1, context); }
  std::int64_t capacity() const override { return capacity_; }
  std::int64_t length() const override { return length_; }
  void reset() override {
    if (wait_for_weights_) wait_for_weights_();
    length_ = 0;
  }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override;
  std::span<const float> decode(std::int32_t id) override {
    if (decoder_ == nullptr || keep_ != Keep::nothing || length_ >= decoder_positions_) return prefill({&id, 1});
    check_room(1);
    return decoder_->decode(id, length_++);
  }
  std::string decode_timeline(std::int32_t id) override {
    if (decoder_ == nullptr) return {};
    check_room(1);
    return decoder_->timeline(id, length_++);
  }
  // A model that computes on the host is not faster for sampling itself.
  bool samples() const override { return model_->depth() > 1 || decoder_ != nullptr; }
  void generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                    const std::function<bool(std::int32_t)>& on_id) override;
  // Ids of a decoder come from its mailbox, without a time.
  double sampled_seconds() const override {
    return decoder_ == nullptr ? model_->ended_seconds() : DecodeModel::sampled_seconds();
  }
  bool can_draft() const override { return decoder_ != nullptr; }
  void start_draft(std::int64_t kept, std::span<const std::int32_t> ids, std::int64_t count,
                   const SamplingPlan& sampling, const DeviceDrafts& to) override;
  std::optional<std::int32_t> drafted(std::int64_t i) override {
    return drafted_id([&] { return decoder_->wait(i); });
  }
  std::vector<double> score(std::span<const std::int32_t> ids) override;
  void keep_activations(bool keep) override { set_keep(keep ? Keep::activations : Keep::nothing); }
  void keep_logits(bool keep) override { set_keep(keep ? Keep::logits : Keep::nothing); }
  std::vector<float> activation(const std::string& name) override { return model_->activation(name); }

 private:
  enum class Keep { nothing, logits, activations };

  void set_keep(Keep keep) {
    keep_ = keep;
    if (keep == Keep::logits) {
      model_->keep_logits(true);
    } else {
      model_->keep_activations(keep == Keep::activations);
    }
  }
  void check_room(std::size_t ids) const {
    if (ids == 0 || static_cast<std::int64_t>(ids) > capacity_ - length_) {
      fail(Exit::internal, "decoder: %zu tokens do not fit: %lld of %lld positions are used", ids,
           static_cast<long long>(length_), static_cast<long long>(capacity_));
    }
  }
  // A chunk of `rows` positions from `first` on.
  Chunk chunk_at(std::int64_t first, std::int64_t rows) const {
    Chunk chunk;
    const std::int64_t size = model_->page_size(), covering = (first + rows + size - 1) / size;
    chunk.pages = std::span(pages_).first(static_cast<std::size_t>(covering));
    chunk.first_position = first;
    return chunk;
  }
  // Appends `ids`, max_rows() of them a step, until `ends` returns true. `want` completes the chunk of a step that begins at
  // ids[begin].
  template <typename Want, typename Take, typename Ends>
  void append(std::span<const std::int32_t> ids, const Want& want, const Take& take, const Ends& ends) {
    const std::size_t most = static_cast<std::size_t>(model_->max_rows());
    for (std::size_t begin = 0; begin < ids.size() && !ends(); begin += most) {
      const std::size_t count = std::min(most, ids.size() - begin);
      Chunk chunk = chunk_at(length_, static_cast<std::int64_t>(count));
      chunk.ids = ids.subspan(begin, count);
      want(chunk, begin);
      model_->submit({&chunk, 1});
      length_ += static_cast<std::int64_t>(chunk.ids.size());
      take(model_->collect()[0]);
    }
  }

  // Generates ids seen ... max_ids - 1 with decoder_, after `id`, which is not in the cache yet, and counts them. Returns the last
  // id where the model has to go on with it.
  std::optional<std::int32_t> decode_ids(std::int32_t id, std::int64_t& seen, const GenerationRequest& request,
                                         const std::function<bool(std::int32_t)>& on_id);

  std::shared_ptr<InferenceModel> model_;
  std::unique_ptr<IdDecoder> decoder_;
  std::int64_t decoder_positions_;
  std::function<void()> wait_for_weights_;
  std::int64_t capacity_, length_ = 0;
  std::vector<std::int32_t> pages_;
  Keep keep_ = Keep::nothing;
};

std::span<const float> SingleSequence::prefill(std::span<const std::int32_t> ids) {
  check_room(ids.size());
  set_keep(keep_);  // forgets what was kept of the prompt before
  std::span<const float> logits;
  append(
      ids, [&](Chunk& chunk, std::size_t begin) { chunk.keep_logits = begin + chunk.ids.size() == ids.size(); },
      [&](const ChunkResult& result) { logits = result.logits; }, [] { return false; });
  return logits;
}

// Keeps several steps queued: while the host looks at an id, or does not run, the steps behind it are computed. What was queued
// beyond the last id is thrown away; the keys and values that it wrote lie behind length(), where nothing reads them.
void SingleSequence::generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                                  const std::function<bool(std::int32_t)>& on_id) {
  check_room(prompt.size());
  set_keep(keep_);
  const std::int64_t begin = length_, prompt_size = std::ssize(prompt), end = begin + prompt_size;
  if (request.max_ids < 1 || request.max_ids > capacity_ - end) {
    fail(Exit::internal, "decoder: %lld ids asked for, %lld positions are left",
         static_cast<long long>(request.max_ids), static_cast<long long>(capacity_ - end));
  }
  // Collects what is still queued, however the loop ends, also by an exception.
  struct Queue {
    InferenceModel& model;
    std::int64_t steps = 0;
    ~Queue() {
      for (; steps > 0; --steps) {
        try {
          model.collect();
        } catch (const Error&) {  // generation has ended already: with this error, or for another reason
        }
      }
    }
  } queue{*model_};
  // With rules the model samples all ids itself, and at most one id is not known when a step is queued.
  std::optional<LogitRules> rules = begun_rules(request.rules, request.earlier, prompt);
  std::vector<std::int32_t> ids;                                             // that were generated; only with rules
  bool decodes = decoder_ != nullptr && !rules && end < decoder_positions_;  // what follows the first id
  std::optional<std::int32_t> decoded;                                       // the last id of decoder_, to be fed next
  QueueDepth depth(model_->depth(), kQueuedSeconds);
  std::int64_t fed = 0, sampled = 0;  // rows and ids that were queued
  const auto submit_next = [&] {
    const std::int64_t left = prompt_size - fed, rows = left > 0 ? std::min(left, model_->max_rows()) : 1;
    Chunk chunk = chunk_at(begin + fed, rows);
    if (left > 0) chunk.ids = prompt.subspan(static_cast<std::size_t>(fed), static_cast<std::size_t>(rows));
    if (decoded) chunk.ids = {&*decoded, 1};
    LogitRow row;
    if (left <= rows) {
      chunk.sampling = &request.sampling;
      if (rules) {
        row = rules->row(ids, std::span(&kUnknownId, static_cast<std::size_t>(sampled - std::ssize(ids))));
        chunk.logit_rows = {&row, 1};
      }
      ++sampled;
    }
    model_->submit({&chunk, 1});
    decoded.reset();
    fed += rows;
    ++queue.steps;
  };
  for (std::int64_t seen = 0; seen < request.max_ids;) {
    // With a decoder only the first id is sampled here before it, unless there are rules.
    while (queue.steps < (rules ? depth.least() : depth.steps()) && sampled < (decodes ? 1 : request.max_ids))
      submit_next();
    --queue.steps;
    const ChunkResult& result = model_->collect()[0];
    depth.collected(model_->ended_seconds());
    check_sample(result.error);
    if (!result.sampled.has_value()) continue;  // a chunk of the prompt
    const std::int32_t id = result.sampled->id;
    length_ = end + seen++;
    if (rules) ids.push_back(id);
    const bool stop = std::find(request.stop_ids.begin(), request.stop_ids.end(), id) != request.stop_ids.end();
    if (!on_id(id) || stop) return;
    if (!std::exchange(decodes, false)) continue;
    decoded = decode_ids(id, seen, request, on_id);
    if (!decoded) return;
    sampled = seen;
    fed = prompt_size + seen - 1;
  }
}

std::optional<std::int32_t> SingleSequence::decode_ids(std::int32_t id, std::int64_t& seen,
                                                       const GenerationRequest& request,
                                                       const std::function<bool(std::int32_t)>& on_id) {
  struct End {
    IdDecoder& decoder;
    ~End() { decoder.end(); }
  } const end{*decoder_};
  while (seen < request.max_ids) {
    const std::int64_t positions = decoder_positions_ - length_;
    if (positions <= 0) return id;
    const std::int64_t count = std::min({request.max_ids - seen, decoder_->most_ids(), positions});
    decoder_->launch({&id, 1}, length_, count, request);
    for (std::int64_t i = 0; i < count; ++i) {
      id = decoder_->wait(i);
      ++length_;
      ++seen;
      const bool stop = std::find(request.stop_ids.begin(), request.stop_ids.end(), id) != request.stop_ids.end();
      if (!on_id(id) || stop) return std::nullopt;
    }
    decoder_->end();
  }
  return std::nullopt;
}

void SingleSequence::start_draft(std::int64_t kept, std::span<const std::int32_t> ids, std::int64_t count,
                                 const SamplingPlan& sampling, const DeviceDrafts& to) {
  decoder_->end();
  length_ = kept;
  check_room(ids.size() + static_cast<std::size_t>(count) - 1);
  if (std::ssize(ids) > decoder_->most_first_ids()) {
    append(
        ids.first(ids.size() - 1), [](Chunk&, std::size_t) {}, [](const ChunkResult&) {}, [] { return false; });
    ids = ids.last(1);
  }
  GenerationRequest request;
  request.sampling = sampling;
  decoder_->launch(ids, length_, count, request, to);
  length_ += std::ssize(ids) + count - 1;
}

std::vector<double> SingleSequence::score(std::span<const std::int32_t> ids) {
  reset();
  check_room(ids.size());
  std::vector<double> nll;
  if (ids.size() < 2) return nll;
  append(
      ids.first(ids.size() - 1),
      [&](Chunk& chunk, std::size_t begin) { chunk.targets = ids.subspan(begin + 1, chunk.ids.size()); },
      [&](const ChunkResult& result) {
        for (const ScoredId& target : result.targets) nll.push_back(-static_cast<double>(target.logprob));
      },
      [&] { return score_interrupted(); });
  return nll;
}

}  // namespace

InferenceOptions one_sequence(std::int64_t capacity) {
  InferenceOptions options;
  options.num_pages = capacity / options.page_size + (capacity % options.page_size != 0 ? 1 : 0);
  options.max_rows = std::min(options.max_rows, capacity);
  options.max_positions = capacity;
  return options;
}

std::unique_ptr<DecodeModel> single_sequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity,
                                             std::function<void()> wait_for_weights, std::unique_ptr<IdDecoder> decoder,
                                             std::int64_t decoder_positions) {
  return std::make_unique<SingleSequence>(std::move(model), capacity, std::move(wait_for_weights), std::move(decoder),
                                          decoder_positions);
}

}  // namespace weft
