#include "llmc/cpu/llama_decoder.h"

#include <algorithm>

#include "llmc/cpu/decoder.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/residual_norm.h"
#include "llmc/cpu/swiglu.h"

namespace weft::cpu {

namespace {

class LlamaDecoder final : public Decoder {
 public:
  LlamaDecoder(const ModelConfig& config, const LlamaParameters<float>& weights, std::int64_t capacity)
      : Decoder(config, capacity), weights_(weights) {
    const std::size_t rows = static_cast<std::size_t>(std::min(kChunk, capacity));
    const std::size_t C = static_cast<std::size_t>(config.hidden_size), F = static_cast<std::size_t>(config.ffn_size);
    residual_.resize(rows * C);
    norm_.resize(rows * C);
    branch_.resize(rows * C);
    qkv_.resize(rows * static_cast<std::size_t>(config.q_size() + 2 * config.kv_size()));
    attention_.resize(rows * static_cast<std::size_t>(config.q_size()));
    gate_up_.resize(rows * 2 * F);
    product_.resize(rows * F);
  }

  std::vector<MemoryLine> memory() const override {
    const std::size_t scratch = residual_.size() + norm_.size() + branch_.size() + qkv_.size() + attention_.size() +
                                gate_up_.size() + product_.size();
    return {{"K/V cache (fp32)", cache_bytes()}, {"workspace (fp32)", scratch * sizeof(float)}};
  }

 protected:
  void run_layers(std::span<const std::int32_t> ids) override {
    const std::int64_t rows = static_cast<std::int64_t>(ids.size());
    embedding_forward(residual_.data(), ids.data(), weights_.embedding, rows, config().hidden_size);
    keep("embedding", residual_.data(), rows, config().hidden_size);
    normalize(weights_.layers[0].input_norm, rows, nullptr, norm_.data());
    for (std::int64_t l = 0; l < config().num_layers; ++l) run_layer(l, rows);
  }
  const float* head() const override { return weights_.head; }
  std::uint64_t weight_bytes() const override;

 private:
  // residual += branch (unless null), out = norm(residual).
  void normalize(const NormParameters<float>& norm, std::int64_t rows, const float* branch, float* out) {
    ResidualNormShape shape;
    shape.rows = rows;
    shape.C = config().hidden_size;
    shape.kind = config().norm;
    shape.eps = static_cast<float>(config().norm_eps);
    ResidualNormForward io;
    io.x = branch != nullptr ? branch : residual_.data();
    io.residual = branch != nullptr ? residual_.data() : nullptr;
    io.residual_out = branch != nullptr ? residual_.data() : nullptr;
    io.weight = norm.weight;
    io.bias = norm.bias;
    io.out = out;
    residual_norm_forward(shape, io);
  }

  void run_layer(std::int64_t l, std::int64_t rows) {
    const ModelConfig& c = config();
    const LayerParameters<float>& w = weights_.layers[static_cast<std::size_t>(l)];
    const std::int64_t C = c.hidden_size, F = c.ffn_size, q = c.q_size(), kv = c.kv_size(), row = q + 2 * kv;
    const auto heads = [&](std::int64_t offset) { return HeadView{qkv_.data() + offset, 0, row, c.head_dim}; };
    const std::string prefix = "layers." + std::to_string(l) + ".";
    const bool last = l + 1 == c.num_layers;

    keep(prefix + "input_norm", norm_.data(), rows, C);
    matmul_forward(qkv_.data(), norm_.data(), w.qkv, nullptr, rows, C, row);
    attend(l, heads(0), heads(q), heads(q + kv), rows, attention_.data());
    matmul_forward(branch_.data(), attention_.data(), w.output, nullptr, rows, q, C);
    normalize(w.post_norm, rows, branch_.data(), norm_.data());
    keep(prefix + "post_attention_norm", norm_.data(), rows, C);
    matmul_forward(gate_up_.data(), norm_.data(), w.gate_up, nullptr, rows, C, 2 * F);
    swiglu_forward(product_.data(), gate_up_.data(), rows, F);
    keep(prefix + "mlp_product", product_.data(), rows, F);
    matmul_forward(branch_.data(), product_.data(), w.down, nullptr, rows, F, C);
    normalize(last ? weights_.final_norm : weights_.layers[static_cast<std::size_t>(l) + 1].input_norm, rows,
              branch_.data(), last ? final_norm() : norm_.data());
    keep(prefix + "residual", residual_.data(), rows, C);
    if (last) keep("final_norm", final_norm(), rows, C);
  }

  const LlamaParameters<float> weights_;  // pointers: cheap to copy
  std::vector<float> residual_, norm_, branch_, qkv_, attention_, gate_up_, product_;
};

std::uint64_t LlamaDecoder::weight_bytes() const {
  const ModelConfig& c = config();
  const std::int64_t norms = c.norm == NormKind::layernorm ? 2 * c.hidden_size : c.hidden_size;
  const std::int64_t layer = c.hidden_size * (2 * c.q_size() + 2 * c.kv_size() + 3 * c.ffn_size) + 2 * norms;
  const std::int64_t elements = c.num_layers * layer + norms + c.vocab_size * c.hidden_size + c.hidden_size;
  return static_cast<std::uint64_t>(elements) * sizeof(float);
}

}  // namespace

std::unique_ptr<DecodeModel> make_llama_decoder(const ModelConfig& config, const LlamaParameters<float>& weights,
                                                std::int64_t capacity) {
  return std::make_unique<LlamaDecoder>(config, weights, capacity);
}

}  // namespace weft::cpu
