// GPT-NeoX (Black et al., 2022) as a straight list of operators.
//
// Parallel residual:   h' = h + attention(norm1(h)) + mlp(norm2(h))     one residual_norm with two outputs a
// layer Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))
//
// The fused QKV keeps the layout of the checkpoint, [head][q, k, v][HS] in each row: head views with a stride
// of 3 HS read it in place.
#include "llmc/cpu/neox.h"

#include <algorithm>

#include "llmc/cpu/decoder.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/residual_norm.h"

namespace weft::cpu {

namespace {

struct Linear {
  const float* weight = nullptr;  // [out, in]
  const float* bias = nullptr;    // [out] or null
};
struct Norm {
  const float *weight = nullptr, *bias = nullptr;  // [C]
};
struct NeoxLayer {
  Norm input_norm, post_norm;
  Linear qkv, dense, up, down;
};

MemoryPlan weight_plan(const TensorTable& table) {
  MemoryPlan plan("parameters");
  plan.add(static_cast<std::uint64_t>(table.arena_elements()) * sizeof(float));
  return plan;
}

class NeoxDecoder final : public Decoder {
 public:
  NeoxDecoder(const ModelFile& file, std::int64_t capacity)
      : Decoder(file.config(), capacity), arena_(weight_plan(file.table())) {
    for (const TensorSpec& spec : file.table().specs()) file.read_parameter(spec, arena_.at<float>(0) + spec.offset);
    bind(file.table());
    const std::size_t rows = static_cast<std::size_t>(std::min(kChunk, capacity));
    const std::size_t C = static_cast<std::size_t>(config().hidden_size),
                      F = static_cast<std::size_t>(config().ffn_size);
    residual_.resize(rows * C);
    norm1_.resize(rows * C);
    norm2_.resize(rows * C);
    branch_.resize(rows * C);
    attention_.resize(rows * C);
    qkv_.resize(rows * 3 * C);
    up_.resize(rows * F);
  }

  std::vector<MemoryLine> memory() const override {
    const std::size_t scratch = 5 * residual_.size() + qkv_.size() + up_.size();
    return {{"parameters (fp32)", arena_.bytes()},
            {"K/V cache (fp32)", cache_bytes()},
            {"workspace (fp32)", scratch * sizeof(float)}};
  }

 protected:
  void run_layers(std::span<const std::int32_t> ids) override;
  const float* head() const override { return head_; }
  std::uint64_t weight_bytes() const override {
    const std::int64_t embedding = config().vocab_size * config().hidden_size;
    return static_cast<std::uint64_t>(parameters_ - embedding + config().hidden_size) * sizeof(float);
  }

 private:
  void bind(const TensorTable& table);
  void run_layer(std::int64_t l, std::int64_t rows);

  // residual += branch (unless null); out = norm(residual), and out2 = norm2(residual) from the same
  // statistics.
  void normalize(std::int64_t rows, const float* branch, const Norm& norm, float* out, const Norm& norm2, float* out2) {
    ResidualNormShape shape;
    shape.rows = rows;
    shape.C = config().hidden_size;
    shape.kind = NormKind::layernorm;
    shape.eps = static_cast<float>(config().norm_eps);
    ResidualNormForward io;
    io.x = branch != nullptr ? branch : residual_.data();
    io.residual = branch != nullptr ? residual_.data() : nullptr;
    io.residual_out = branch != nullptr ? residual_.data() : nullptr;
    io.weight = norm.weight;
    io.bias = norm.bias;
    io.out = out;
    io.weight2 = norm2.weight;
    io.bias2 = norm2.bias;
    io.out2 = out2;
    residual_norm_forward(shape, io);
  }
  // The norm or norms that read the input of layer l, or the final norm after the last layer.
  void normalize_input(std::int64_t l, std::int64_t rows, const float* branch) {
    if (l == config().num_layers) {
      normalize(rows, branch, final_norm_weights_, final_norm(), {}, nullptr);
    } else if (config().parallel_residual) {
      const NeoxLayer& layer = layers_[static_cast<std::size_t>(l)];
      normalize(rows, branch, layer.input_norm, norm1_.data(), layer.post_norm, norm2_.data());
    } else {
      normalize(rows, branch, layers_[static_cast<std::size_t>(l)].input_norm, norm1_.data(), {}, nullptr);
    }
  }

  HostArena arena_;
  std::int64_t parameters_ = 0;
  const float *embedding_ = nullptr, *head_ = nullptr;  // [V, C]
  std::vector<NeoxLayer> layers_;
  Norm final_norm_weights_;
  std::vector<float> residual_, norm1_, norm2_, branch_, attention_, qkv_, up_;
};

void NeoxDecoder::bind(const TensorTable& table) {
  const auto at = [&](const std::string& name) { return arena_.at<float>(0) + table.at(name).offset; };
  const auto norm = [&](const std::string& name) { return Norm{at(name + ".weight"), at(name + ".bias")}; };
  const auto linear = [&](const std::string& name, bool bias) {
    return Linear{at(name + ".weight"), bias ? at(name + ".bias") : nullptr};
  };
  parameters_ = table.parameters();
  embedding_ = at("gpt_neox.embed_in.weight");
  for (std::int64_t l = 0; l < config().num_layers; ++l) {
    const std::string prefix = "gpt_neox.layers." + std::to_string(l) + ".";
    layers_.push_back({norm(prefix + "input_layernorm"), norm(prefix + "post_attention_layernorm"),
                       linear(prefix + "attention.query_key_value", config().attention_bias),
                       linear(prefix + "attention.dense", config().attention_bias),
                       linear(prefix + "mlp.dense_h_to_4h", true), linear(prefix + "mlp.dense_4h_to_h", true)});
  }
  final_norm_weights_ = norm("gpt_neox.final_layer_norm");
  head_ = at("embed_out.weight");
}

void NeoxDecoder::run_layers(std::span<const std::int32_t> ids) {
  const std::int64_t rows = static_cast<std::int64_t>(ids.size()), C = config().hidden_size;
  embedding_forward(residual_.data(), ids.data(), embedding_, rows, C);
  keep("embedding", residual_.data(), rows, C);
  normalize_input(0, rows, nullptr);
  for (std::int64_t l = 0; l < config().num_layers; ++l) run_layer(l, rows);
  keep("final_norm", final_norm(), rows, C);
}

void NeoxDecoder::run_layer(std::int64_t l, std::int64_t rows) {
  const ModelConfig& c = config();
  const NeoxLayer& w = layers_[static_cast<std::size_t>(l)];
  const std::int64_t C = c.hidden_size, F = c.ffn_size, HS = c.head_dim;
  const auto heads = [&](std::int64_t part) { return HeadView{qkv_.data() + part * HS, 0, 3 * C, 3 * HS}; };
  const std::string prefix = "layers." + std::to_string(l) + ".";

  keep(prefix + "input_norm", norm1_.data(), rows, C);
  matmul_forward(qkv_.data(), norm1_.data(), w.qkv.weight, w.qkv.bias, rows, C, 3 * C);
  attend(l, heads(0), heads(1), heads(2), rows, attention_.data());
  matmul_forward(branch_.data(), attention_.data(), w.dense.weight, w.dense.bias, rows, C, C);
  if (!c.parallel_residual) normalize(rows, branch_.data(), w.post_norm, norm2_.data(), {}, nullptr);
  keep(prefix + "post_attention_norm", norm2_.data(), rows, C);
  matmul_forward(up_.data(), norm2_.data(), w.up.weight, w.up.bias, rows, C, F);
  gelu_forward(up_.data(), up_.data(), rows * F);
  keep(prefix + "mlp_product", up_.data(), rows, F);
  // Parallel residual: both branches join at once, so the MLP adds to what attention left.
  matmul_forward(branch_.data(), up_.data(), w.down.weight, w.down.bias, rows, F, C,
                 c.parallel_residual ? Accumulate::yes : Accumulate::no);
  normalize_input(l + 1, rows, branch_.data());
  keep(prefix + "residual", residual_.data(), rows, C);
}

}  // namespace

std::unique_ptr<DecodeModel> load_neox(const ModelFile& file, std::int64_t capacity) {
  return std::make_unique<NeoxDecoder>(file, capacity);
}

}  // namespace weft::cpu
