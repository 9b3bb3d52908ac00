#include "llmc/model/single_sequence.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "llmc/base/error.h"

namespace weft {

namespace {

class SingleSequence final : public DecodeModel {
 public:
  SingleSequence(std::unique_ptr<InferenceModel> model, std::int64_t capacity)
      : model_(std::move(model)), capacity_(capacity), pages_(static_cast<std::size_t>(model_->num_pages())) {
    std::iota(pages_.begin(), pages_.end(), 0);
  }

  const ModelConfig& config() const override { return model_->config(); }
  std::vector<MemoryLine> memory() const override { return model_->memory(); }
  std::uint64_t bytes_per_token(std::int64_t context) const override { return model_->bytes_per_step(1, context); }
  std::int64_t capacity() const override { return capacity_; }
  std::int64_t length() const override { return length_; }
  void reset() override { length_ = 0; }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override;
  std::span<const float> decode(std::int32_t id) override { return prefill({&id, 1}); }
  std::vector<double> score(std::span<const std::int32_t> ids) override;
  void keep_activations(bool keep) override {
    keep_ = keep;
    model_->keep_activations(keep);
  }
  std::vector<float> activation(const std::string& name) override { return model_->activation(name); }

 private:
  void check_room(std::size_t ids) const {
    if (ids == 0 || static_cast<std::int64_t>(ids) > capacity_ - length_) {
      fail(Exit::internal, "decoder: %zu tokens do not fit: %lld of %lld positions are used", ids,
           static_cast<long long>(length_), static_cast<long long>(capacity_));
    }
  }
  // Appends `ids`, max_rows() of them a step. `want` completes the span of a step that begins at ids[begin].
  template <typename Want, typename Take>
  void append(std::span<const std::int32_t> ids, const Want& want, const Take& take) {
    const std::size_t most = static_cast<std::size_t>(model_->max_rows());
    for (std::size_t begin = 0; begin < ids.size(); begin += most) {
      Span span;
      span.pages = pages_;
      span.first_position = length_;
      span.ids = ids.subspan(begin, std::min(most, ids.size() - begin));
      want(span, begin);
      model_->submit({&span, 1});
      length_ += static_cast<std::int64_t>(span.ids.size());
      take(model_->collect()[0]);
    }
  }

  std::unique_ptr<InferenceModel> model_;
  std::int64_t capacity_, length_ = 0;
  std::vector<std::int32_t> pages_;
  bool keep_ = false;
};

std::span<const float> SingleSequence::prefill(std::span<const std::int32_t> ids) {
  check_room(ids.size());
  if (keep_) model_->keep_activations(true);  // forgets those of the prompt before
  std::span<const float> logits;
  append(
      ids, [&](Span& span, std::size_t begin) { span.keep_logits = begin + span.ids.size() == ids.size(); },
      [&](const SpanResult& result) { logits = result.logits; });
  return logits;
}

std::vector<double> SingleSequence::score(std::span<const std::int32_t> ids) {
  reset();
  check_room(ids.size());
  std::vector<double> nll;
  if (ids.size() < 2) return nll;
  append(
      ids.first(ids.size() - 1),
      [&](Span& span, std::size_t begin) { span.targets = ids.subspan(begin + 1, span.ids.size()); },
      [&](const SpanResult& result) {
        for (const ScoredId& target : result.targets) nll.push_back(-static_cast<double>(target.logprob));
      });
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

std::unique_ptr<DecodeModel> single_sequence(std::unique_ptr<InferenceModel> model, std::int64_t capacity) {
  return std::make_unique<SingleSequence>(std::move(model), capacity);
}

}  // namespace weft
