// generate_ids() is a request of the engine, whose prompt is all of the sequence so far: the pages that it has filled
// are found again as a shared prefix. Everything else is single_sequence() over the same model. Each uses all of the
// model's pages, so changing from one to the other computes the sequence anew.
#include "llmc/infer/engine_sequence.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/model/single_sequence.h"

namespace weft {

namespace {

// Passes ids on. Listeners must not throw: an exception of on_id ends the request, and generate_ids() rethrows it at
// the end.
class Listener final : public RequestListener {
 public:
  explicit Listener(const std::function<bool(std::int32_t)>& take) : take_(take) {}
  bool on_id(const ScoredId& id) override {
    try {
      return take_(id.id);
    } catch (...) {
      thrown = std::current_exception();
      return false;
    }
  }
  void on_end(RequestEnd end) override { ended = end; }

  std::exception_ptr thrown;
  RequestEnd ended = RequestEnd::cancelled;

 private:
  const std::function<bool(std::int32_t)>& take_;
};

class EngineSequence final : public DecodeModel {
 public:
  EngineSequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity, SequenceDraft draft,
                 DraftOptions options)
      : model_(std::move(model)), draft_(std::move(draft)), capacity_(capacity), options_(options) {
    options_.model = draft_.paged.get();
    options_.sequence = draft_.sequence.get();
  }

  const ModelConfig& config() const override { return model_->config(); }
  std::vector<MemoryLine> memory() const override;
  std::uint64_t bytes_per_token(std::int64_t context) const override { return model_->bytes_per_step(1, context); }
  std::int64_t capacity() const override { return capacity_; }
  std::int64_t length() const override { return std::ssize(ids_); }
  void reset() override {
    ids_.clear();
    if (plain_) plain_->reset();
  }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override;
  std::span<const float> decode(std::int32_t id) override { return prefill({&id, 1}); }
  bool samples() const override { return true; }
  void generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                    const std::function<bool(std::int32_t)>& on_id) override;
  double sampled_seconds() const override { return model_->ended_seconds(); }
  std::optional<DraftCounts> draft_counts() const override { return counts_; }
  std::vector<double> score(std::span<const std::int32_t> ids) override {
    DecodeModel& model = plain();
    model.interrupt_score([this] { return score_interrupted(); });
    std::vector<double> nll = model.score(ids);
    ids_.assign(ids.begin(), ids.begin() + model.length());
    return nll;
  }
  void keep_activations(bool keep) override { plain().keep_activations(keep); }
  std::vector<float> activation(const std::string& name) override { return plain().activation(name); }

 private:
  DecodeModel& plain();
  Engine& engine();

  std::shared_ptr<InferenceModel> model_;
  SequenceDraft draft_;
  const std::int64_t capacity_;
  DraftOptions options_;
  std::vector<std::int32_t> ids_;  // of the sequence
  DraftCounts counts_;             // of the last generate_ids()
  // At most one of them exists: it uses the model's pages.
  std::unique_ptr<DecodeModel> plain_;
  std::unique_ptr<Engine> engine_;
};

std::vector<MemoryLine> EngineSequence::memory() const {
  std::vector<MemoryLine> lines = model_->memory();
  const std::vector<MemoryLine> of_draft = draft_.paged      ? draft_.paged->memory()
                                           : draft_.sequence ? draft_.sequence->memory()
                                                             : std::vector<MemoryLine>{};
  for (MemoryLine line : of_draft) {
    line.name = "draft: " + line.name;
    lines.push_back(std::move(line));
  }
  return lines;
}

DecodeModel& EngineSequence::plain() {
  engine_.reset();
  if (!plain_) plain_ = single_sequence(model_, capacity_);
  return *plain_;
}

Engine& EngineSequence::engine() {
  plain_.reset();
  if (!engine_) {
    EngineOptions options;
    options.max_running = 1;
    options.rows_per_step = model_->max_rows();
    options.drafts = options_;
    engine_ = std::make_unique<Engine>(*model_, options);
  }
  return *engine_;
}

std::span<const float> EngineSequence::prefill(std::span<const std::int32_t> ids) {
  DecodeModel& model = plain();
  const std::vector<std::int32_t> added(ids.begin(), ids.end());
  if (model.length() != length()) {
    model.reset();
    if (!ids_.empty()) model.prefill(ids_);
  }
  const std::span<const float> logits = model.prefill(added);
  ids_.insert(ids_.end(), added.begin(), added.end());
  return logits;
}

void EngineSequence::generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                                  const std::function<bool(std::int32_t)>& on_id) {
  const std::int64_t left = capacity_ - length() - std::ssize(prompt);
  if (prompt.empty() || request.max_ids < 1 || request.max_ids > left) {
    fail(Exit::internal, "decoder: %lld ids asked for after %zu, %lld positions are left",
         static_cast<long long>(request.max_ids), prompt.size(), static_cast<long long>(left));
  }
  ids_.insert(ids_.end(), prompt.begin(), prompt.end());
  EngineRequest asked;
  asked.prompt = ids_;
  asked.sampling = request.sampling;
  asked.rules = request.rules;
  asked.stop_ids = request.stop_ids;
  asked.max_ids = request.max_ids;
  bool first = true;
  std::int32_t last = 0;  // becomes part of the sequence when another id follows
  const std::function<bool(std::int32_t)> take = [&](std::int32_t id) {
    if (!std::exchange(first, false)) ids_.push_back(last);
    last = id;
    return on_id(id);
  };
  Engine& engine = this->engine();
  const DraftCounts before = engine.statistics().drafts;
  const auto listener = std::make_shared<Listener>(take);
  engine.submit(std::move(asked), listener);
  while (engine.step()) {
  }
  const DraftCounts after = engine.statistics().drafts;
  counts_ = {after.chunks - before.chunks, after.ids - before.ids, after.verifications - before.verifications,
             after.drafted - before.drafted, after.accepted - before.accepted};
  if (listener->thrown) std::rethrow_exception(listener->thrown);
  if (listener->ended == RequestEnd::not_finite) check_sample(SampleError::not_a_number);
}

}  // namespace

std::unique_ptr<DecodeModel> engine_sequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity,
                                             SequenceDraft draft, DraftOptions options) {
  return std::make_unique<EngineSequence>(std::move(model), capacity, std::move(draft), options);
}

}  // namespace weft
