// Muon on the CPU. Ten steps in float64 by singular values (scripts/make_muon_vectors.py) are in operator_vectors_test.cpp;
// ranks in ranks_loop_test.cpp.

#include "llmc/cpu/muon.h"

#include <algorithm>
#include <map>
#include <utility>

#include "llmc/model/compare.h"
#include "test/cpp/gradient_check.h"
#include "test/cpp/train_tools.h"

namespace weft::cpu {
namespace {

using namespace weft::test;

// Shapes on both sides of the blocks of a GEMM (256 x 512, at least 96) and of 4,096 elements.
const std::vector<std::pair<std::int64_t, std::int64_t>> kShapes = {
    {1, 1}, {1, 9}, {10, 1}, {5, 5}, {64, 64}, {97, 97}, {30, 70}, {131, 33}, {270, 60}, {50, 530}};

// x - 2 v (v . x) / (v . v) for each column x of values [rows, columns]: a reflection, whose matrix is orthogonal.
void reflect_columns(Doubles& values, std::int64_t rows, std::int64_t columns, const Floats& v) {
  double square = 0;
  for (const float value : v) square += static_cast<double>(value) * value;
  for (std::int64_t c = 0; c < columns; ++c) {
    double dot = 0;
    for (std::int64_t r = 0; r < rows; ++r)
      dot += v[static_cast<std::size_t>(r)] * values[static_cast<std::size_t>(r * columns + c)];
    for (std::int64_t r = 0; r < rows; ++r)
      values[static_cast<std::size_t>(r * columns + c)] -= 2 * v[static_cast<std::size_t>(r)] * dot / square;
  }
}

Doubles transposed(const Doubles& values, std::int64_t rows, std::int64_t columns) {
  Doubles result(values.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      result[static_cast<std::size_t>(c * rows + r)] = values[static_cast<std::size_t>(r * columns + c)];
    }
  }
  return result;
}

// The matrix [rows, columns] with these singular values, between two reflections.
Doubles with_singular_values(const Doubles& singular, std::int64_t rows, std::int64_t columns) {
  Doubles matrix(static_cast<std::size_t>(rows * columns));
  for (std::size_t i = 0; i < singular.size(); ++i) matrix[i * static_cast<std::size_t>(columns + 1)] = singular[i];
  reflect_columns(matrix, rows, columns, random_floats(rows, 1));
  matrix = transposed(matrix, rows, columns);
  reflect_columns(matrix, columns, rows, random_floats(columns, 2));
  return transposed(matrix, columns, rows);
}

double newton_schulz(double s) {
  for (int i = 0; i < 5; ++i) s = 3.4445 * s - 4.7750 * s * s * s + 2.0315 * s * s * s * s * s;
  return s;
}

TEST(Muon, SingularValuesAreWhereThePolynomialPutsThem) {
  for (const auto& [rows, columns] : kShapes) {
    const Floats random = random_floats(std::min(rows, columns), 3);
    Doubles singular = widen(random), expected;
    double square = 0;
    for (double& value : singular) {
      value = 0.5 + std::abs(value);
      square += value * value;
    }
    for (const double value : singular) {
      expected.push_back(newton_schulz(value / std::sqrt(square)));
      EXPECT_GT(expected.back(), 0.68) << value / std::sqrt(square);
      EXPECT_LT(expected.back(), 1.14) << value / std::sqrt(square);
    }
    const Doubles matrix = with_singular_values(singular, rows, columns);
    Floats x(matrix.begin(), matrix.end());
    Floats workspace(static_cast<std::size_t>(orthogonalize_workspace(rows, columns)), NAN);
    orthogonalize(x.data(), rows, columns, workspace.data());
    expect_close(x, with_singular_values(expected, rows, columns),
                 format("%lld x %lld", static_cast<long long>(rows), static_cast<long long>(columns)), 1e-4);
  }
}

TEST(Muon, TheSizeOfAGradientDoesNotMatterAndZerosStayZero) {
  const std::int64_t rows = 20, columns = 33;
  Floats workspace(static_cast<std::size_t>(orthogonalize_workspace(rows, columns)));
  Floats small = random_floats(rows * columns, 1, 1e-12f), large = small, zeros(small.size());
  for (float& value : large) value *= 0x1p40f;
  for (Floats* x : {&small, &large, &zeros}) orthogonalize(x->data(), rows, columns, workspace.data());
  expect_close(large, small, "large", 1e-4);
  EXPECT_EQ(zeros, Floats(zeros.size()));
}

TEST(Muon, SameBitsForAnyThreads) {
  for (const auto& [rows, columns] : kShapes) {
    expect_same_bits_for_any_threads("muon", [rows = rows, columns = columns] {
      Floats x = random_floats(rows * columns, 4);
      Floats workspace(static_cast<std::size_t>(orthogonalize_workspace(rows, columns)));
      orthogonalize(x.data(), rows, columns, workspace.data());
      return std::vector<Floats>{x};
    });
  }
}

// ---- a model ----

// Muon once more, for one matrix, in double and by plain loops, always by the rows' Gram matrix.
Doubles product(const Doubles& a, const Doubles& b, std::int64_t M, std::int64_t K, std::int64_t N) {
  Doubles c(static_cast<std::size_t>(M * N));
  for (std::int64_t m = 0; m < M; ++m) {
    for (std::int64_t k = 0; k < K; ++k) {
      for (std::int64_t n = 0; n < N; ++n)
        c[static_cast<std::size_t>(m * N + n)] +=
            a[static_cast<std::size_t>(m * K + k)] * b[static_cast<std::size_t>(k * N + n)];
    }
  }
  return c;
}

struct PlainMuon {
  double lr, momentum, weight_decay;

  void step(Doubles& p, Doubles& m, const Floats& gradient, double scale, std::int64_t rows,
            std::int64_t columns) const {
    Doubles x(p.size());
    double square = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double g = gradient[i] * scale;
      m[i] = momentum * m[i] + (1 - momentum) * g;
      x[i] = (1 - momentum) * g + momentum * m[i];
      square += x[i] * x[i];
    }
    for (double& value : x) value /= std::sqrt(square);
    for (int iteration = 0; iteration < 5; ++iteration) {
      const Doubles gram = product(x, transposed(x, rows, columns), rows, columns, rows);
      Doubles polynomial = product(gram, gram, rows, rows, rows);
      for (std::size_t i = 0; i < gram.size(); ++i) polynomial[i] = -4.7750 * gram[i] + 2.0315 * polynomial[i];
      const Doubles more = product(polynomial, x, rows, rows, columns);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + more[i];
    }
    const double size = 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = p[i] * (1 - lr * weight_decay) - lr * size * x[i];
  }
};

// AdamW once more, as in adamw_test.cpp.
void plain_adamw(Doubles& p, Doubles& m, Doubles& v, const Floats& gradient, bool decay, const AdamWStep& s) {
  const double beta1 = s.beta1, beta2 = s.beta2, lr = s.learning_rate;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double g = static_cast<double>(gradient[i]) * s.gradient_scale;
    if (decay) p[i] *= 1 - lr * s.weight_decay;
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    p[i] -= lr * m[i] / (1 - std::pow(beta1, s.step)) / (std::sqrt(v[i] / (1 - std::pow(beta2, s.step))) + s.eps);
  }
}

// Heads that share keys, biases and a head of its own: matrices of every kind and shape.
ModelConfig mixed_config() {
  ModelConfig config = micro_config();
  config.num_layers = 2;
  config.tied_embeddings = false;
  config.qkv_bias = config.output_bias = config.mlp_bias = true;
  return config;
}

Floats values_of(TrainModel& model, TensorRole role, const TensorSpec& spec) {
  Floats values(static_cast<std::size_t>(spec.elements));
  model.read_tensor(role, spec, values.data());
  return values;
}

// By name: what Muon updates must not be decided by what is tested.
bool is_hidden_matrix(const std::string& name) {
  for (const char* module :
       {"_proj.weight", "query_key_value.weight", "dense.weight", "h_to_4h.weight", "4h_to_h.weight"}) {
    if (name.ends_with(module)) return true;
  }
  return false;
}

// `matrices`: how many there are.
void expect_matrices_one_by_one(const ModelConfig& config, int matrices) {
  TrainSettings settings = micro_settings();
  settings.optimizer = "muon";
  settings.muon_lr = 0.02;
  settings.muon_momentum = 0.9;
  const std::unique_ptr<TrainModel> model = make_training_model(config, settings.model_options());
  initialize_parameters(*model, 1);
  std::map<std::string, Doubles> p, m, v;
  for (const TensorSpec& spec : model->table().specs()) {
    p[spec.name] = widen(values_of(*model, TensorRole::parameter, spec));
    m[spec.name] = v[spec.name] = Doubles(static_cast<std::size_t>(spec.elements));
  }
  const PlainMuon muon{0.02f, 0.9f, static_cast<float>(settings.weight_decay)};
  for (std::int64_t t = 1; t <= 10; ++t) {
    const auto tokens = patterned_tokens(17, static_cast<std::size_t>(31 * t));
    const std::vector<std::int32_t> ids(tokens.begin(), tokens.end() - 1), labels(tokens.begin() + 1, tokens.end());
    model->zero_gradients();
    model->forward({ids, labels}, 0, 1.0f / 16);
    model->backward();
    OptimizerStep step = settings.optimizer_step(t, 10, clip_factor(model->statistics().gradient_norm, 0.5));
    std::map<std::string, Floats> gradients;
    for (const TensorSpec& spec : model->table().specs())
      gradients[spec.name] = values_of(*model, TensorRole::gradient, spec);
    model->update(step);
    for (const TensorSpec& spec : model->table().specs()) {
      const std::string& name = spec.name;
      if (is_hidden_matrix(name)) {
        muon.step(p[name], m[name], gradients[name], step.muon.gradient_scale, spec.shape[0], spec.shape[1]);
      } else {
        plain_adamw(p[name], m[name], v[name], gradients[name], spec.shape.size() == 2, step.adamw);
      }
    }
  }
  for (const TensorSpec& spec : model->table().specs()) {
    expect_close(values_of(*model, TensorRole::parameter, spec), p[spec.name], spec.name, 1e-4);
    expect_close(values_of(*model, TensorRole::state1, spec), m[spec.name], spec.name + ", first state", 1e-5);
    matrices -= is_hidden_matrix(spec.name);
    if (is_hidden_matrix(spec.name)) continue;
    expect_close(values_of(*model, TensorRole::state2, spec), v[spec.name], spec.name + ", second state", 1e-5);
  }
  EXPECT_EQ(matrices, 0);
}
TEST(MuonModel, TenStepsUpdateTheMatricesOfTheBlocksOneByOne) {
  expect_matrices_one_by_one(mixed_config(), 2 * 7);
  expect_matrices_one_by_one(micro_neox(), 4);  // that of q, k and v is one, as in PyTorch
}

TEST(MuonModel, AMatrixHasOneStateAndMemoryForNoMore) {
  TrainSettings settings = micro_settings();
  settings.optimizer = "muon";
  const std::unique_ptr<TrainModel> model = micro_model(settings);
  std::int64_t states = 0;
  std::vector<std::string> names;
  for (const StateTensor& tensor : state_tensors(model->optimizer(), model->table())) {
    const TensorSpec& spec = model->table().specs()[tensor.spec];
    names.push_back(state_tensor_name(model->optimizer(), tensor.role, spec));
    if (tensor.role != TensorRole::parameter) states += spec.elements;
  }
  const auto has = [&](const std::string& name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  EXPECT_TRUE(has("momentum.model.layers.0.self_attn.k_proj.weight"));
  EXPECT_FALSE(has("moment2.model.layers.0.self_attn.k_proj.weight"));
  EXPECT_TRUE(has("moment1.model.embed_tokens.weight"));
  EXPECT_TRUE(has("moment2.model.layers.0.input_layernorm.weight"));
  std::uint64_t planned = 0;
  for (const MemoryLine& line : model->memory()) {
    if (line.name == "momentum, AdamW moments (fp32)") planned = line.bytes;
  }
  const std::uint64_t padding = 4 * 128 * names.size();
  EXPECT_GE(planned, 4 * static_cast<std::uint64_t>(states));
  EXPECT_LE(planned, 4 * static_cast<std::uint64_t>(states) + padding);
  const TensorSpec& matrix = model->table().at("model.layers.0.mlp.up_proj.weight");
  Floats values(static_cast<std::size_t>(matrix.elements));
  EXPECT_THROW(model->read_tensor(TensorRole::state2, matrix, values.data()), Error);
}

}  // namespace
}  // namespace weft::cpu
