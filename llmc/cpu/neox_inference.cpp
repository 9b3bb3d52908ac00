// GPT-NeoX (Black et al., 2022) on the CPU: run_layers() and run_layer() are the model as a straight list of operators.
//
// Parallel residual:   h' = h + attention(norm1(h)) + mlp(norm2(h))     one residual_norm with two outputs a layer
// Sequential residual: h1 = h + attention(norm1(h));  h' = h1 + mlp(norm2(h1))
//
// The fused QKV keeps the layout of the checkpoint, [head][q, k, v][HS] in each row: head views with a stride of 3 HS
// read it in place.
#include "llmc/cpu/neox_inference.h"

#include "llmc/cpu/embedding.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/matmul_rows.h"
#include "llmc/model/neox_layout.h"
#include "llmc/model/quantized_weights.h"

namespace weft::cpu {

namespace {

class NeoxInference final : public Inference {
 public:
  NeoxInference(const ModelConfig& model, const TensorTable& table, const InferenceOptions& options,
                const std::function<void(const TensorSpec&, std::byte*)>& fill)
      : Inference(model, options),
        arena_(parameter_plan(table)),
        weights_(model, table, arena_.at<const float>(0), Offsets::bytes),
        quants_(bind_quantized(model, table, arena_.at<const std::byte>(0))) {
    for (const TensorSpec& spec : table.specs()) fill(spec, arena_.at<std::byte>(spec.byte_offset));
    const std::size_t rows = static_cast<std::size_t>(max_rows());
    const std::size_t C = static_cast<std::size_t>(config().hidden_size),
                      F = static_cast<std::size_t>(config().ffn_size);
    norm1_.resize(rows * C);
    norm2_.resize(rows * C);
    branch_.resize(rows * C);
    attention_.resize(rows * C);
    qkv_.resize(rows * 3 * C);
    up_.resize(rows * F);
  }

  std::vector<MemoryLine> memory() const override {
    const std::size_t scratch =
        row_values() + norm1_.size() + norm2_.size() + branch_.size() + attention_.size() + qkv_.size() + up_.size();
    return {{parameters_name(), arena_.bytes()},
            {"K/V cache (fp32)", kv_bytes()},
            {"workspace (fp32)", scratch * sizeof(float)}};
  }

 protected:
  void run_layers(std::span<const std::int32_t> ids) override;
  RowsWeight head() const override { return {weights_.head, quants_.head}; }

 private:
  void run_layer(std::int64_t l, std::int64_t rows);

  // The norm or norms that read the input of layer l, or the final norm after the last layer.
  void normalize_input(std::int64_t l, std::int64_t rows, const float* branch) {
    if (l == config().num_layers) {
      normalize(rows, branch, weights_.final_norm, final_norm());
    } else if (config().parallel_residual) {
      const NeoxLayerParameters<const float>& layer = weights_.layers[static_cast<std::size_t>(l)];
      normalize(rows, branch, layer.input_norm, norm1_.data(), layer.post_norm, norm2_.data());
    } else {
      normalize(rows, branch, weights_.layers[static_cast<std::size_t>(l)].input_norm, norm1_.data());
    }
  }

  HostArena arena_;
  const NeoxParameters<const float> weights_;
  const QuantizedWeights quants_;
  std::vector<float> norm1_, norm2_, branch_, attention_, qkv_, up_;
};

void NeoxInference::run_layers(std::span<const std::int32_t> ids) {
  const std::int64_t rows = static_cast<std::int64_t>(ids.size()), C = config().hidden_size;
  embedding_forward(residual(), ids.data(), weights_.embedding, rows, C);
  keep("embedding", residual(), rows, C);
  normalize_input(0, rows, nullptr);
  for (std::int64_t l = 0; l < config().num_layers; ++l) run_layer(l, rows);
  keep("final_norm", final_norm(), rows, C);
}

void NeoxInference::run_layer(std::int64_t l, std::int64_t rows) {
  const ModelConfig& c = config();
  const NeoxLayerParameters<const float>& w = weights_.layers[static_cast<std::size_t>(l)];
  const QuantizedLayer& q = quants_.layers[static_cast<std::size_t>(l)];
  const std::int64_t C = c.hidden_size, F = c.ffn_size, HS = c.head_dim;
  const auto heads = [&](std::int64_t part) { return HeadView{qkv_.data() + part * HS, 0, 3 * C, 3 * HS}; };
  const std::string prefix = "layers." + std::to_string(l) + ".";

  keep(prefix + "input_norm", norm1_.data(), rows, C);
  matmul_rows_forward(qkv_.data(), norm1_.data(), {w.qkv.weight, q.qkv}, w.qkv.bias, rows, C, 3 * C);
  attend(l, heads(0), heads(1), heads(2), attention_.data());
  matmul_rows_forward(branch_.data(), attention_.data(), {w.dense.weight, q.output}, w.dense.bias, rows, C, C);
  if (!c.parallel_residual) normalize(rows, branch_.data(), w.post_norm, norm2_.data());
  keep(prefix + "post_attention_norm", norm2_.data(), rows, C);
  matmul_rows_forward(up_.data(), norm2_.data(), {w.up.weight, q.up}, w.up.bias, rows, C, F);
  (c.gelu_tanh ? gelu_tanh_forward : gelu_forward)(up_.data(), up_.data(), rows * F);
  keep(prefix + "mlp_product", up_.data(), rows, F);
  // Parallel residual: both branches are added at once, so the MLP accumulates into what attention left.
  matmul_rows_forward(branch_.data(), up_.data(), {w.down.weight, q.down}, w.down.bias, rows, F, C,
                      c.parallel_residual ? Accumulate::yes : Accumulate::no);
  normalize_input(l + 1, rows, branch_.data());
  keep(prefix + "residual", residual(), rows, C);
}

}  // namespace

std::unique_ptr<Inference> load_neox_inference(const ModelFile& file, const InferenceOptions& options) {
  return std::make_unique<NeoxInference>(file.config(), file.table(), options,
                                         [&](const TensorSpec& spec, std::byte* out) { file.read_tensor(spec, out); });
}

std::unique_ptr<InferenceModel> make_neox_inference(const ModelConfig& config, const InferenceOptions& options,
                                                    const std::function<void(const TensorSpec&, float*)>& fill) {
  const auto fill_bytes = [&](const TensorSpec& spec, std::byte* out) { fill(spec, reinterpret_cast<float*>(out)); };
  return std::make_unique<NeoxInference>(config, TensorTable(config), options, fill_bytes);
}

}  // namespace weft::cpu
