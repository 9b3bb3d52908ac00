// What a model is: its sizes, and its arithmetic as capabilities. Which family of models has which of them is said in
// llmc/model/families alone. No kernels here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/json_fwd.h"
#include "llmc/model/quantization.h"

namespace weft {

enum class NormKind { rmsnorm, layernorm };
enum class RopeType { standard, linear, llama3, yarn };
// Between the two matrices of the MLP. swiglu: silu(gate) up (Shazeer, "GLU Variants Improve Transformer", 2020); gelu: with
// erf (Hendrycks and Gimpel, 2016); gelu_tanh: its approximation; geglu_tanh: gelu_tanh(gate) up.
enum class Activation { swiglu, gelu, gelu_tanh, geglu_tanh };
// The rows of a block's matrix for q, k and v: all of q, then of k, then of v; or q, k and v of one head after another.
enum class QkvLayout { concatenated, per_head };
// The linear layers of a block. up: gate and up are one matrix.
enum class BlockLinear { qkv, output, up, down };
inline constexpr BlockLinear kBlockLinears[] = {BlockLinear::qkv, BlockLinear::output, BlockLinear::up,
                                                BlockLinear::down};

const char* norm_kind_name(NormKind kind);  // "rmsnorm", "layernorm"
const char* rope_type_name(RopeType type);  // "standard", "linear", "llama3", "yarn"
// As transformers calls them: "silu", "gelu", "gelu_pytorch_tanh". Whether there is a gate is the family's matter.
const char* activation_name(Activation activation);

// Rotary embedding (Su et al., RoFormer, 2021) in the half-split pairing of Hugging Face: dimensions i and
// i + rotary_dim/2 are rotated as a pair, for the first rotary_dim dimensions of a head. The others are left alone.
struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 0;
  std::int64_t rotary_dim = 0;
  double factor = 1;           // of every scaling
  double low_freq_factor = 1;  // llama3
  double high_freq_factor = 1;
  std::int64_t original_max_positions = 0;  // llama3, yarn
  double beta_fast = 32, beta_slow = 1;     // yarn: rotations within the original positions
  bool truncate = true;                     // yarn: the ramp begins and ends at whole dimensions
  double attention_factor = 1;              // yarn: of cos and sin, so that scores are scaled by its square

  bool operator==(const RopeConfig&) const = default;
};

struct ModelConfig {
  std::string family = "llama";    // for files and messages: nothing is computed by it
  std::int64_t vocab_size = 0;     // rows of the embedding; may exceed the tokenizer's vocabulary (padding)
  std::int64_t hidden_size = 0;    // C
  std::int64_t num_layers = 0;     // L
  std::int64_t num_heads = 0;      // NH
  std::int64_t num_kv_heads = 0;   // NKV; query head h reads K/V head h / (NH / NKV)
  std::int64_t head_dim = 0;       // HS; need not be C / NH
  std::int64_t ffn_size = 0;       // F
  std::int64_t max_positions = 0;  // longest sequence the model was made for
  double norm_eps = 0;
  NormKind norm = NormKind::rmsnorm;
  RopeConfig rope;
  bool tied_embeddings = false;                // the classifier uses the embedding's matrix
  bool parallel_residual = false;              // x + attention(norm1(x)) + mlp(norm2(x))
  bool qkv_bias = false, output_bias = false;  // of the linear layers of attention
  bool mlp_bias = false;                       // of both linear layers of the MLP
  bool qk_norm = false;  // RMSNorm of each head of q and of k, before they rotate (Henry et al., 2020)
  Activation activation = Activation::swiglu;
  QkvLayout qkv_layout = QkvLayout::concatenated;
  // Of each layer, the keys that a position sees, its own included (Beltagy et al., "Longformer", 2020); 0: all before it.
  // Empty: 0 in every layer. In transformers: sliding_window for the layers that layer_types calls sliding_attention.
  std::vector<std::int64_t> windows;
  // Layers whose q and k do not rotate, ascending ("NoPE": Kazemnejad et al., 2023). In transformers: 0 in no_rope_layers.
  std::vector<std::int64_t> nope_layers;
  double local_rope_theta = 0;    // of layers with a window, which rotate without scaling; 0: by `rope`, as the others
  double norm_weight_offset = 0;  // norms multiply by this plus their weight
  bool post_norms = false;        // what attention and the MLP add to the residual is normalised before
  bool scaled_embedding = false;  // rows of the embedding are multiplied by sqrt(C)
  double attention_scale = 0;     // of scores; 0: 1 / sqrt(HS)
  std::int64_t tokenizer_vocab = 0;  // ids >= this are padding rows and are never sampled
  std::vector<std::int32_t> eos_ids;
  std::optional<std::int32_t> bos_id;
  // How the weights are quantised. In a model file this is the object "quantization", beside the object "model".
  Quantization quantization;

  std::int64_t q_size() const { return num_heads * head_dim; }
  std::int64_t kv_size() const { return num_kv_heads * head_dim; }
  std::int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
  bool gated() const {  // `up` has gate and up, [2 F, C]
    return activation == Activation::swiglu || activation == Activation::geglu_tanh;
  }
  std::int64_t window(std::int64_t layer) const {
    return windows.empty() ? 0 : windows[static_cast<std::size_t>(layer)];
  }
  bool rotates(std::int64_t layer) const;
  bool rotates_locally(std::int64_t layer) const { return local_rope_theta > 0 && window(layer) > 0; }
  RopeConfig local_rope() const;
  float score_scale() const;
  // 1 unless scaled_embedding; as transformers rounds it where the embedding is stored in 16 bits.
  float embedding_scale(DType storage = DType::f32) const;
  std::int64_t longest_window() const;  // 0 where a layer has none

  bool operator==(const ModelConfig&) const = default;
};

// From and to the "config" object of a tensor file. `source` names the file in errors. from_json validates:
// every key present and in range (the limits of SECURITY.md), heads divisible, rotary_dim even and <= head_dim;
// Exit::bad_file.
ModelConfig config_from_json(const Json& object, const std::string& source);
Json config_to_json(const ModelConfig& config);

// The size of a linear layer.
struct LinearSize {
  std::int64_t C, OC;  // in, out
};
LinearSize linear_size(const ModelConfig& config, BlockLinear linear);
// The largest C of a block's linear layers.
std::int64_t widest_input(const ModelConfig& config);
bool has_bias(const ModelConfig& config, BlockLinear linear);
// What of the model the persistent kernel has no code for, for messages. Null: nothing.
const char* part_without_fused_kernel(const ModelConfig& config);

// Makes `config` a model of this family: its name, and the capabilities that all its models have. Exit::internal if there is no
// such family.
void set_family(ModelConfig& config, const std::string& name);
// The type of the weights that the family's checkpoints are published in.
DType published_dtype(const ModelConfig& config);

// inv_freq[i] for i < rotary_dim/2, fp32 as transformers computes them: theta^(-2i/rotary_dim), then the scaling. linear
// divides all by the factor; llama3 goes by wavelength (Llama 3.1 release, "apply_scaling"); yarn keeps fast dimensions,
// divides slow ones and has a ramp between (Peng et al., "YaRN", 2023).
std::vector<float> rope_inverse_frequencies(const RopeConfig& rope);

// cos and sin of position * inv_freq, each [positions, rotary_dim/2] fp32, times attention_factor: the angle is formed in
// fp32 as PyTorch does.
struct RopeTable {
  std::int64_t positions = 0, half = 0;
  std::vector<float> cos, sin;
};
RopeTable rope_table(const RopeConfig& rope, std::int64_t positions);

}  // namespace weft
