#include "llmc/cuda/inference/fused_tokens.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "llmc/base/error.h"
#include "llmc/cuda/fused/decode.h"
#include "llmc/cuda/inference/inference_model.h"

namespace weft::cuda {

namespace {

template <typename S>
class FusedTokens final : public IdDecoder {
 public:
  FusedTokens(Inference<S>& model, const FusedTuning& tuning)
      : config_(model.config()),
        stream_(model.parts().stream),
        fused_(config_, *model.parts().weights, model.parts().cache, model.parts().rope, mailbox_, stream_, tuning),
        logits_(static_cast<std::uint64_t>(config_.vocab_size) * sizeof(float)) {}

  std::vector<MemoryLine> memory() const override { return FusedDecode<S>::memory(config_); }
  std::int64_t most_ids() const override { return kFusedTokens; }
  std::int64_t most_first_ids() const override { return kFusedMoreIds + 1; }
  void launch(std::span<const std::int32_t> ids, std::int64_t position, std::int64_t count,
              const GenerationRequest& request, const DeviceDrafts& to) override {
    FusedRequest fused;
    fused.first_id = ids[0];
    fused.more_ids.assign(ids.begin() + 1, ids.end());
    fused.position = position;
    fused.count = count;
    fused.sampling = request.sampling;
    const std::size_t stop_ids = std::min(request.stop_ids.size(), kMaxStopIds);  // the host compares the others
    fused.stop_ids.assign(request.stop_ids.begin(), request.stop_ids.begin() + static_cast<std::ptrdiff_t>(stop_ids));
    fused.device_ids = to.ids;
    fused_.launch(fused);
    if (to.ids != nullptr) check(cudaEventRecord(to.written, stream_), "fused decoding");
  }
  std::int32_t wait(std::int64_t i) override {
    if (const std::optional<std::int32_t> id = fused_.wait(i); id.has_value()) return *id;
    fail(Exit::internal, "fused decoding: ended before its last token");
  }
  void end() noexcept override {
    fused_.cancel();
    try {
      fused_.finish();
    } catch (const Error&) {  // generation has ended already: with this error, or for another reason
    }
  }
  std::span<const float> decode(std::int32_t id, std::int64_t position) override {
    FusedRequest request;
    request.first_id = id;
    request.position = position;
    request.count = 1;
    fused_.launch(request);
    fused_.finish();
    check(cudaMemcpyAsync(logits_.at<float>(0), fused_.logits(), logits_.bytes(), cudaMemcpyDeviceToHost, stream_),
          "logits");
    check(cudaStreamSynchronize(stream_), "logits");
    return {logits_.at<float>(0), static_cast<std::size_t>(config_.vocab_size)};
  }
  std::string timeline(std::int32_t id, std::int64_t position) override {
    fused_.record_timeline(true);
    decode(id, position);
    std::string text = timeline_text(fused_.timeline());
    fused_.record_timeline(false);
    return text;
  }

 private:
  ModelConfig config_;
  cudaStream_t stream_;
  Mailbox mailbox_;
  FusedDecode<S> fused_;
  PinnedBuffer logits_;
};

}  // namespace

std::string fused_unsupported_reason(const ModelConfig& config, DType dtype, bool kv_fp8) {
  if (dtype == DType::f32) return "the fused kernel computes with fp16 or bf16 weights, not fp32";
  if (config.quantization.any()) {
    const bool parallel = config.parallel_residual;
    if (config.quantization.weights == nullptr) {
      return "the fused kernel reads quantised heads beside quantised layers, not beside layers in 16 bits";
    }
    if (dtype != (parallel ? DType::f16 : DType::bf16)) {
      return format("the fused kernel reads quantised weights of %s beside %s, not %s",
                    parallel ? "models with the parallel residual" : "Llamas and models without the parallel residual",
                    parallel ? "fp16" : "bf16", parallel ? "bf16" : "fp16");
    }
  }
  return fused_decode_unsupported_reason(config, probe_device(), kv_fp8);
}

bool graph_is_faster(const ModelConfig& config) {
  constexpr std::int64_t kOneLoad = 2048;  // elements of a row that the warps load at once
  if (config.parallel_residual) return false;
  const bool unmeasured = config.quantization.any() && config.hidden_size < kOneLoad;
  return unmeasured || (fused_row_loads(config) == 2 && 2 * config.hidden_size < 3 * kOneLoad);
}

bool fused_by_default(const ModelConfig& config) {
  constexpr std::int64_t kWidest = 4096;
  const bool parallel = config.parallel_residual;
  return !config.quantization.any() || !parallel || config.hidden_size <= kWidest;
}

std::int64_t fused_positions(const ModelConfig& config) {
  constexpr std::int64_t kWidest = 128, kWider = 12'288;
  const bool grouped = config.num_kv_heads != config.num_heads;
  return grouped && config.head_dim > kWidest ? kWider : std::numeric_limits<std::int64_t>::max();
}

std::vector<MemoryLine> plan_fused_tokens(const ModelConfig& config) {
  return FusedDecode<fp16>::memory(config);
}

std::unique_ptr<IdDecoder> fused_tokens(InferenceModel& model, DType dtype, bool layer_only) {
  FusedTuning tuning;
  tuning.layer_only = layer_only;
  if (dtype == DType::bf16) return std::make_unique<FusedTokens<bf16>>(static_cast<Inference<bf16>&>(model), tuning);
  if (dtype == DType::f16) return std::make_unique<FusedTokens<fp16>>(static_cast<Inference<fp16>&>(model), tuning);
  fail(Exit::internal, "fused decoding in %s", dtype_name(dtype));
}

}  // namespace weft::cuda
