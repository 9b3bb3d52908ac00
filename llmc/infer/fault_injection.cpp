#include "llmc/infer/fault_injection.h"

#include <unistd.h>

#include <charconv>
#include <csignal>
#include <limits>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/log.h"

namespace weft {

namespace {

constexpr const char* kForms = "nan@token=N, kill@token=N, term@token=N, hang@token=N, io-error@load or accept=P";

[[noreturn]] void refuse(const std::string& spec) {
  fail(Exit::usage, "--debug-inject: got %s, expected one of %s", escaped(spec).c_str(), kForms);
}

void parse_fault(const std::string& spec, DecodeFaults& faults) {
  if (spec == "io-error@load") {
    faults.io_error_at_load = true;
    return;
  }
  const std::size_t equals = spec.find('=');
  if (equals == std::string::npos) refuse(spec);
  const std::string fault = spec.substr(0, equals), digits = spec.substr(equals + 1);
  if (fault == "accept") {
    double share = 0;
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), share);
    if (end.ec != std::errc{} || end.ptr != digits.data() + digits.size() || !(share >= 0 && share <= 1)) refuse(spec);
    faults.acceptance = share;
    return;
  }
  std::int64_t number = 0;
  const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (end.ec != std::errc{} || end.ptr != digits.data() + digits.size() || number < 1) refuse(spec);
  const std::pair<const char*, std::optional<std::int64_t>*> fields[] = {{"nan@token", &faults.nan_token},
                                                                         {"kill@token", &faults.kill_token},
                                                                         {"term@token", &faults.term_token},
                                                                         {"hang@token", &faults.hang_token}};
  for (const auto& [name, field] : fields) {
    if (fault != name) continue;
    *field = number;
    return;
  }
  refuse(spec);
}

// Counts tokens and makes the planned faults happen.
class TokenFaults {
 public:
  explicit TokenFaults(const DecodeFaults& faults) : faults_(faults) {}

  // Counts the next token; kills, signals or stops the process if that is planned for it.
  void count() {
    ++token_;
    if (faults_.kill_token == token_) ::raise(SIGKILL);
    if (faults_.term_token == token_) ::raise(SIGTERM);
    if (faults_.hang_token == token_) {
      log_warning("token %lld never comes (injected)", static_cast<long long>(token_));
      while (true) ::pause();
    }
  }
  // Whether the numbers of the token that was counted last are to be NaN.
  bool nan() const { return faults_.nan_token == token_; }
  bool nan_planned() const { return faults_.nan_token.has_value(); }

 private:
  DecodeFaults faults_;
  std::int64_t token_ = 0;
};

bool faults_at_tokens(const DecodeFaults& faults) {
  return faults.nan_token || faults.kill_token || faults.term_token || faults.hang_token;
}

// Passes every call on to `inner`, counts the tokens that it generates, and makes the planned faults happen.
class FaultyModel final : public DecodeModel {
 public:
  FaultyModel(std::unique_ptr<DecodeModel> inner, const DecodeFaults& faults)
      : inner_(std::move(inner)), faults_(faults) {}

  const ModelConfig& config() const override { return inner_->config(); }
  std::vector<MemoryLine> memory() const override { return inner_->memory(); }
  std::uint64_t bytes_per_token(std::int64_t context) const override { return inner_->bytes_per_token(context); }
  std::int64_t capacity() const override { return inner_->capacity(); }
  std::int64_t length() const override { return inner_->length(); }
  void reset() override { inner_->reset(); }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override {
    faults_.count();
    return damaged(inner_->prefill(ids));
  }
  std::span<const float> decode(std::int32_t id) override {
    faults_.count();
    return damaged(inner_->decode(id));
  }
  // Logits that stay on the device cannot be damaged here. If one has to be, this makes the host sample.
  bool samples() const override { return inner_->samples() && !faults_.nan_planned(); }
  void generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& request,
                    const std::function<bool(std::int32_t)>& on_id) override {
    inner_->generate_ids(prompt, request, [&](std::int32_t id) {
      faults_.count();
      return on_id(id);
    });
  }
  double sampled_seconds() const override { return inner_->sampled_seconds(); }
  std::string decode_timeline(std::int32_t id) override { return inner_->decode_timeline(id); }
  // Windows overlap, and only the caller knows which losses count: loss_faults() has the faults of scored tokens.
  std::vector<double> score(std::span<const std::int32_t> ids) override { return inner_->score(ids); }
  void interrupt_score(std::function<bool()> interrupted) override { inner_->interrupt_score(std::move(interrupted)); }
  std::optional<DraftCounts> draft_counts() const override { return inner_->draft_counts(); }
  void keep_activations(bool keep) override { inner_->keep_activations(keep); }
  std::vector<float> activation(const std::string& name) override { return inner_->activation(name); }

 private:
  std::span<const float> damaged(std::span<const float> logits) {
    if (!faults_.nan()) return logits;
    logits_.assign(logits.begin(), logits.end());
    logits_[logits_.size() / 2] = std::numeric_limits<float>::quiet_NaN();
    return logits_;
  }

  std::unique_ptr<DecodeModel> inner_;
  TokenFaults faults_;
  std::vector<float> logits_;
};

// The same for many sequences: counts ids in the order in which the steps report them.
class FaultyInference final : public InferenceModel {
 public:
  FaultyInference(std::unique_ptr<InferenceModel> inner, const DecodeFaults& faults)
      : inner_(std::move(inner)), faults_(faults) {}

  const ModelConfig& config() const override { return inner_->config(); }
  std::vector<MemoryLine> memory() const override { return inner_->memory(); }
  std::uint64_t bytes_per_step(std::int64_t sequences, std::int64_t context) const override {
    return inner_->bytes_per_step(sequences, context);
  }
  std::int64_t page_size() const override { return inner_->page_size(); }
  std::int64_t num_pages() const override { return inner_->num_pages(); }
  std::int64_t slots() const override { return inner_->slots(); }
  std::int64_t max_rows() const override { return inner_->max_rows(); }
  std::int64_t max_positions() const override { return inner_->max_positions(); }
  std::int64_t depth() const override { return inner_->depth(); }
  void submit(std::span<const Chunk> work) override { inner_->submit(work); }
  std::span<const ChunkResult> collect() override {
    const std::span<const ChunkResult> results = inner_->collect();
    results_.assign(results.begin(), results.end());
    for (ChunkResult& result : results_) {
      for (std::size_t i = 0; i < result.accepted.size(); ++i) {
        if (!count()) continue;
        result.accepted.resize(i);
        fail_sample(result);
      }
      if (result.sampled.has_value() && count()) fail_sample(result);
    }
    return results_;
  }
  double ended_seconds() const override { return inner_->ended_seconds(); }
  void keep_activations(bool keep) override { inner_->keep_activations(keep); }
  std::vector<float> activation(const std::string& name) override { return inner_->activation(name); }

 private:
  bool count() {
    faults_.count();
    return faults_.nan();
  }
  static void fail_sample(ChunkResult& result) {
    result.sampled.reset();
    result.error = SampleError::not_a_number;
  }

  std::unique_ptr<InferenceModel> inner_;
  TokenFaults faults_;
  std::vector<ChunkResult> results_;
};

}  // namespace

const char* decode_fault_help() {
  static const std::string text = std::string("test tool: fail on purpose at ") + kForms;
  return text.c_str();
}

DecodeFaults parse_decode_faults(const std::vector<std::string>& specs) {
  DecodeFaults faults;
  for (const std::string& spec : specs) parse_fault(spec, faults);
  return faults;
}

void inject_before_load(const DecodeFaults& faults) {
  if (faults.io_error_at_load) ::raise(SIGBUS);
}

std::unique_ptr<DecodeModel> with_faults(std::unique_ptr<DecodeModel> model, const DecodeFaults& faults) {
  if (!faults_at_tokens(faults)) return model;
  return std::make_unique<FaultyModel>(std::move(model), faults);
}

std::unique_ptr<InferenceModel> with_faults(std::unique_ptr<InferenceModel> model, const DecodeFaults& faults) {
  if (!faults_at_tokens(faults)) return model;
  return std::make_unique<FaultyInference>(std::move(model), faults);
}

std::function<double(double)> loss_faults(const DecodeFaults& faults) {
  if (!faults_at_tokens(faults)) return {};
  return [counted = TokenFaults(faults)](double loss) mutable {
    counted.count();
    return counted.nan() ? std::numeric_limits<double>::quiet_NaN() : loss;
  };
}

}  // namespace weft
