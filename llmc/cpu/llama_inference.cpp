// Llama (Touvron et al., 2023) on the CPU: run_layers() and run_layer() are the model as a straight list of operators.
//
//   h1 = h + attention(norm1(h));  h' = h1 + down(silu(gate(norm2(h1))) * up(norm2(h1)))
#include "llmc/cpu/llama_inference.h"

#include <utility>
#include <vector>

#include "llmc/cpu/embedding.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/matmul_rows.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/model/quantized_weights.h"

namespace weft::cpu {

namespace {

// The parameters of a file in memory of their own: in fp32, and quantised matrices as they are.
struct FileParameters {
  explicit FileParameters(const ModelFile& file)
      : arena(parameter_plan(file.table())),
        weights(file.config(), file.table(), arena.at<float>(0), Offsets::bytes),
        quants(bind_quantized(file.config(), file.table(), arena.at<const std::byte>(0))) {
    for (const TensorSpec& spec : file.table().specs()) file.read_tensor(spec, arena.at<std::byte>(spec.byte_offset));
  }

  HostArena arena;
  LlamaParameters<float> weights;
  QuantizedWeights quants;
};

class LlamaInference final : public Inference {
 public:
  LlamaInference(const ModelFile& file, const InferenceOptions& options)
      : LlamaInference(file.config(), std::make_unique<FileParameters>(file), options) {}
  // `quants` has an element for each layer, empty where the matrices are floats.
  LlamaInference(const ModelConfig& config, const LlamaParameters<float>& weights, QuantizedWeights quants,
                 const InferenceOptions& options)
      : Inference(config, options), weights_(weights), quants_(std::move(quants)) {
    const std::size_t rows = static_cast<std::size_t>(max_rows());
    const std::size_t C = static_cast<std::size_t>(config.hidden_size), F = static_cast<std::size_t>(config.ffn_size);
    norm_.resize(rows * C);
    branch_.resize(rows * C);
    qkv_.resize(rows * static_cast<std::size_t>(config.q_size() + 2 * config.kv_size()));
    attention_.resize(rows * static_cast<std::size_t>(config.q_size()));
    gate_up_.resize(rows * 2 * F);
    product_.resize(rows * F);
  }

  std::vector<MemoryLine> memory() const override {
    const std::size_t scratch = row_values() + norm_.size() + branch_.size() + qkv_.size() + attention_.size() +
                                gate_up_.size() + product_.size();
    std::vector<MemoryLine> lines = {{"K/V cache (fp32)", kv_bytes()}, {"workspace (fp32)", scratch * sizeof(float)}};
    if (own_ != nullptr) lines.insert(lines.begin(), {parameters_name(), own_->arena.bytes()});
    return lines;
  }

 protected:
  void run_layers(std::span<const std::int32_t> ids) override {
    const std::int64_t rows = static_cast<std::int64_t>(ids.size());
    embedding_forward(residual(), ids.data(), weights_.embedding, rows, config().hidden_size);
    keep("embedding", residual(), rows, config().hidden_size);
    normalize(rows, nullptr, read_only(weights_.layers[0].input_norm), norm_.data());
    for (std::int64_t l = 0; l < config().num_layers; ++l) run_layer(l, rows);
  }
  RowsWeight head() const override { return {weights_.head, quants_.head}; }

 private:
  LlamaInference(const ModelConfig& config, std::unique_ptr<FileParameters> own, const InferenceOptions& options)
      : LlamaInference(config, own->weights, own->quants, options) {
    own_ = std::move(own);
  }

  static Norm read_only(const NormParameters<float>& norm) { return {norm.weight, norm.bias}; }

  void run_layer(std::int64_t l, std::int64_t rows) {
    const ModelConfig& c = config();
    const LayerParameters<float>& w = weights_.layers[static_cast<std::size_t>(l)];
    const QuantizedLayer& quants = quants_.layers[static_cast<std::size_t>(l)];
    const std::int64_t C = c.hidden_size, F = c.ffn_size, q = c.q_size(), kv = c.kv_size(), row = q + 2 * kv;
    const auto heads = [&](std::int64_t offset) { return HeadView{qkv_.data() + offset, 0, row, c.head_dim}; };
    const std::string prefix = "layers." + std::to_string(l) + ".";
    const bool last = l + 1 == c.num_layers;

    keep(prefix + "input_norm", norm_.data(), rows, C);
    matmul_rows_forward(qkv_.data(), norm_.data(), {w.qkv, quants.qkv}, w.qkv_bias, rows, C, row);
    attend(l, heads(0), heads(q), heads(q + kv), attention_.data());
    matmul_rows_forward(branch_.data(), attention_.data(), {w.output, quants.output}, w.output_bias, rows, q, C);
    normalize(rows, branch_.data(), read_only(w.post_norm), norm_.data());
    keep(prefix + "post_attention_norm", norm_.data(), rows, C);
    matmul_rows_forward(gate_up_.data(), norm_.data(), {w.gate_up, quants.up}, w.gate_up_bias, rows, C, 2 * F);
    swiglu_forward(product_.data(), gate_up_.data(), rows, F);
    keep(prefix + "mlp_product", product_.data(), rows, F);
    matmul_rows_forward(branch_.data(), product_.data(), {w.down, quants.down}, w.down_bias, rows, F, C);
    const NormParameters<float>& next =
        last ? weights_.final_norm : weights_.layers[static_cast<std::size_t>(l) + 1].input_norm;
    normalize(rows, branch_.data(), read_only(next), last ? final_norm() : norm_.data());
    keep(prefix + "residual", residual(), rows, C);
    if (last) keep("final_norm", final_norm(), rows, C);
  }

  std::unique_ptr<FileParameters> own_;   // null: the parameters live elsewhere
  const LlamaParameters<float> weights_;  // pointers: cheap to copy
  const QuantizedWeights quants_;
  std::vector<float> norm_, branch_, qkv_, attention_, gate_up_, product_;
};

}  // namespace

std::unique_ptr<Inference> load_llama_inference(const ModelFile& file, const InferenceOptions& options) {
  return std::make_unique<LlamaInference>(file, options);
}

std::unique_ptr<InferenceModel> make_llama_inference(const ModelConfig& config, const LlamaParameters<float>& weights,
                                                     const InferenceOptions& options) {
  QuantizedWeights none;
  none.layers.resize(static_cast<std::size_t>(config.num_layers));
  return std::make_unique<LlamaInference>(config, weights, std::move(none), options);
}

}  // namespace weft::cpu
