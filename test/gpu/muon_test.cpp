// Muon on the GPU against the CPU. Ranks are in ranks_test.cpp.
//
// Tolerance. In fp32 both sides differ by the order of sums, which Newton-Schulz enlarges: its slope at 0 is 3.4445^5 = 485. In
// bf16 the reference rounds where the GPU does, x, A and the polynomial. A sum in another order then moves a value over a
// rounding boundary now and then, which is less than what rounding does as a whole: a hundredth of a matrix, in the 2-norm.
#include "llmc/cuda/op/optim/muon.h"

#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "llmc/cpu/matmul.h"
#include "llmc/cpu/muon.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/compare.h"
#include "test/cpp/whole_model_checks.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

template <typename T>
Floats rounded(const Floats& values) {
  return widened(stored<T>(values));
}

double norm_of(const Floats& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

double distance_of(const Floats& a, const Floats& b) {
  Floats difference(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return norm_of(difference);
}

Floats exact(Floats x, const MuonShape& shape) {
  Floats workspace(static_cast<std::size_t>(cpu::orthogonalize_workspace(shape.rows, shape.columns)));
  cpu::orthogonalize(x.data(), shape.rows, shape.columns, workspace.data());
  return x;
}

// The iterations on x, whose 2-norm is 1, with every stored result rounded to T.
template <typename T>
Floats iterated(Floats x, const MuonShape& shape) {
  const std::int64_t rows = shape.rows, columns = shape.columns, n = shape.shorter();
  x = rounded<T>(x);
  for (int iteration = 0; iteration < kMuonIterations; ++iteration) {
    Floats gram(static_cast<std::size_t>(n * n)), square(gram.size()), next = x;
    if (shape.tall()) {
      cpu::matmul_backward(nullptr, gram.data(), nullptr, x.data(), x.data(), nullptr, rows, columns, columns);
    } else {
      cpu::matmul_forward(gram.data(), x.data(), x.data(), nullptr, rows, columns, rows);
    }
    gram = rounded<T>(gram);
    cpu::matmul_forward(square.data(), gram.data(), gram.data(), nullptr, n, n, n);
    for (std::size_t i = 0; i < gram.size(); ++i) square[i] = kMuonB * gram[i] + kMuonC * square[i];
    square = rounded<T>(square);
    for (float& value : next) value *= kMuonA;
    if (shape.tall()) {
      cpu::matmul_forward(next.data(), x.data(), square.data(), nullptr, rows, columns, columns, cpu::Accumulate::yes);
    } else {
      cpu::matmul_backward(next.data(), nullptr, nullptr, square.data(), nullptr, x.data(), rows, columns, rows,
                           cpu::Accumulate::yes);
    }
    x = rounded<T>(next);
  }
  return x;
}

// In fp32 against the CPU; in bf16 against iterations that round.
template <typename T>
void expect_orthogonal(const Floats& got, const Floats& x, const MuonShape& shape, const std::string& what) {
  const Floats want = exact(x, shape);
  if (std::is_same_v<T, float>) {
    EXPECT_LE(distance_of(got, want), 1e-4 * norm_of(want)) << what;
    return;
  }
  const Floats nearer = iterated<T>(x, shape);
  const double allowed = std::max(distance_of(nearer, want), 0x1p-8 * norm_of(want));
  EXPECT_LE(distance_of(got, nearer), allowed) << what << ": allowed is " << allowed / norm_of(want) << " of it";
}

std::string name_of(const MuonShape& shape) {
  return format("%lld x %lld", static_cast<long long>(shape.rows), static_cast<long long>(shape.columns));
}

// Memory for one shape, cleared.
class Workspace {
 public:
  Workspace(const MuonShape& shape, std::size_t element_bytes, cudaStream_t stream) {
    ArenaLayout layout("test");
    work_.reserve(layout, {&shape, 1}, element_bytes);
    arena_.emplace(layout.plan());
    layout.bind(*arena_);
    arena_->clear(stream);
  }
  const MuonWorkspace& operator*() const { return work_; }

 private:
  MuonWorkspace work_;
  std::optional<DeviceArena> arena_;
};

// Sides of 1, sides that are no multiple of 8, of a tile of 128 and one more, several tiles; wide, tall and square; in batches of
// 16, 14, 8, 5 and 1.
const MuonShape kShapes[] = {{1, 1},     {1, 9},      {10, 1},    {33, 65},   {65, 33},    {64, 64},
                             {72, 200},  {200, 72},   {128, 128}, {129, 300}, {300, 520},  {520, 300},
                             {512, 512}, {8, 20'000}, {1000, 16}, {640, 640}, {1032, 640}, {1160, 2056}};

template <typename T>
class CudaMuon : public testing::Test {};
using Types = testing::Types<float, __nv_bfloat16>;
TYPED_TEST_SUITE(CudaMuon, Types);

// The first, the second and the last place of a batch; the others have been left empty.
TYPED_TEST(CudaMuon, OrthogonalizesAsTheCpu) {
  using T = TypeParam;
  const Stream stream;
  Matmul matmul(stream);
  for (const MuonShape& shape : kShapes) {
    SCOPED_TRACE(name_of(shape));
    const Workspace work(shape, sizeof(T), stream);
    const std::int64_t batch = muon_batch(shape), stride = Matmul::batch_stride(shape.elements());
    std::map<std::int64_t, Floats> matrices;
    for (const std::int64_t place : {std::int64_t{0}, std::min<std::int64_t>(1, batch - 1), batch - 1}) {
      Floats x = random_floats(shape.elements(), static_cast<unsigned>(place + 1));
      const double norm = norm_of(x);
      for (float& value : x) value = static_cast<float>(value / norm);
      const std::vector<T> values = stored<T>(x);
      check(cudaMemcpyAsync(reinterpret_cast<T*>((*work).x) + place * stride, values.data(), values.size() * sizeof(T),
                            cudaMemcpyHostToDevice, stream),
            "test");
      stream.synchronize("test");
      matrices[place] = rounded<T>(x);
    }
    orthogonalize<T>(matmul, shape, *work);
    stream.synchronize("test");
    for (const auto& [place, x] : matrices) {
      std::vector<T> got(x.size());
      check(cudaMemcpy(got.data(), reinterpret_cast<const T*>((*work).next) + place * stride, got.size() * sizeof(T),
                       cudaMemcpyDeviceToHost),
            "test");
      expect_orthogonal<T>(widened(got), x, shape, format("place %lld", static_cast<long long>(place)));
    }
  }
}

// ---- the update of some matrices ----

// `count` matrices of one shape, elements apart that belong to nobody, in arenas of three layouts.
struct Arenas {
  std::vector<MuonMatrix> matrices;
  std::int64_t elements = 0;

  Arenas(const MuonShape& shape, std::int64_t count) {
    constexpr std::int64_t kGap = 8, kState = 16, kGradient = 4, kParameter = 12;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t begin = kGap + i * (Matmul::batch_stride(shape.elements()) + kGap);
      matrices.push_back({shape, begin, begin + kState, begin + kGradient, begin + kParameter, i % 2 == 0});
      elements = begin + shape.elements() + kState + kGap;
    }
  }
  Floats of(const Floats& arena, std::int64_t begin) const {
    return {arena.begin() + begin, arena.begin() + begin + matrices[0].shape.elements()};
  }
};

// An fp32 arena on the device as T's masters.
template <typename T>
struct Masters {
  DeviceBuffer<T> parameters;
  DeviceBuffer<std::int16_t> low;

  explicit Masters(const Floats& values) : parameters(values.size()), low(values.size()) {
    const DeviceBuffer<float> masters(values);
    if constexpr (std::is_same_v<T, float>) {
      parameters.upload(values);
    } else {
      split_masters(parameters.data(), low.data(), masters.data(), static_cast<std::int64_t>(values.size()), nullptr);
    }
  }
  Floats download() const {
    if constexpr (std::is_same_v<T, float>) {
      return parameters.download();
    } else {
      const DeviceBuffer<float> masters(low.size());
      join_masters(masters.data(), parameters.data(), low.data(), static_cast<std::int64_t>(low.size()), nullptr);
      return masters.download();
    }
  }
  // `low` at the states of the matrices, which lie `shift` behind their parameters.
  void apply(const MuonWorkspace& work, const std::vector<MuonMatrix>& matrices, const MuonStep& step) const {
    if constexpr (std::is_same_v<T, float>) {
      muon_apply(work, matrices, parameters.data(), step, nullptr);
    } else {
      const std::int64_t shift = matrices[0].state - matrices[0].parameter;
      muon_apply(work, matrices, parameters.data(), low.data() - shift, step, nullptr);
    }
  }
};

MuonStep step_of(std::int64_t t) {
  return {0.03f, 0.9f, 0.1f, t % 2 == 0 ? 1.0f : 0.25f, t};
}

// Momentum and norm exactly as specified, in fp32: u / ||u||.
Floats direction(Floats& momentum, const Floats& gradient, const MuonStep& step) {
  Floats u(gradient.size());
  for (std::size_t i = 0; i < u.size(); ++i) {
    const float g = gradient[i] * step.gradient_scale;
    momentum[i] += (1.0f - step.momentum) * (g - momentum[i]);
    u[i] = g + step.momentum * (momentum[i] - g);
  }
  const double norm = norm_of(u);
  for (float& value : u) value = norm == 0 ? 0 : static_cast<float>(value / norm);
  return u;
}

// Ten steps. Each is compared with what the specification makes of the momentum and the gradient; the GPU's own result goes on.
TYPED_TEST(CudaMuon, TenStepsOfABatchAreTheCpus) {
  using T = TypeParam;
  for (const MuonShape& shape : {MuonShape{33, 65}, MuonShape{200, 72}, MuonShape{72, 200}, MuonShape{130, 129}}) {
    for (const std::int64_t wanted : {1, 3, 16}) {
      const std::int64_t count = std::min(wanted, muon_batch(shape));
      SCOPED_TRACE(name_of(shape) + format(", %lld matrices", static_cast<long long>(count)));
      const Arenas arenas(shape, count);
      Matmul matmul(nullptr);
      const Workspace work(shape, sizeof(T), nullptr);
      const Masters<T> masters(random_floats(arenas.elements, 1));
      DeviceBuffer<float> momentum(Floats(static_cast<std::size_t>(arenas.elements), 0.0f));
      Floats before = masters.download(), m(static_cast<std::size_t>(arenas.elements), 0.0f);
      for (std::int64_t t = 1; t <= 10; ++t) {
        const Floats gradients = random_floats(arenas.elements, static_cast<unsigned>(10 + t), 1e-3f);
        const DeviceBuffer<float> on_gpu(gradients);
        const MuonStep step = step_of(t);
        muon_momentum<T>(*work, arenas.matrices, on_gpu.data(), momentum.data(), step, nullptr);
        orthogonalize<T>(matmul, shape, *work);
        masters.apply(*work, arenas.matrices, step);
        const Floats after = masters.download();
        Floats touched = before;
        for (const MuonMatrix& matrix : arenas.matrices) {
          Floats own = arenas.of(m, matrix.state);
          const Floats x = direction(own, arenas.of(gradients, matrix.gradient), step);
          std::copy(own.begin(), own.end(), m.begin() + matrix.state);
          const Floats p = arenas.of(before, matrix.parameter), got = arenas.of(after, matrix.parameter);
          Floats update(p.size());
          const float size =
              step.learning_rate * 0.2f * std::sqrt(static_cast<float>(std::max(shape.rows, shape.columns)));
          const float keep = matrix.decay ? 1.0f - step.learning_rate * step.weight_decay : 1.0f;
          for (std::size_t i = 0; i < p.size(); ++i) update[i] = (p[i] * keep - got[i]) / size;
          // p - size x is rounded to fp32: a share of 2^-24 / size of p.
          // In bf16 two orders of sums round apart: the GPU may be half as far again from the exact result as the
          // specification is.
          const Floats want = exact(x, shape);
          const double allowed =
              std::is_same_v<T, float> ? 2e-4 * norm_of(want) : 1.5 * distance_of(iterated<T>(x, shape), want);
          EXPECT_LE(distance_of(update, want), allowed) << "step " << t;
          std::copy(got.begin(), got.end(), touched.begin() + matrix.parameter);
        }
        EXPECT_EQ(after, touched) << "an element between the matrices has changed";
        before = after;
      }
      for (const MuonMatrix& matrix : arenas.matrices) {
        const Floats got = arenas.of(momentum.download(), matrix.state), want = arenas.of(m, matrix.state);
        EXPECT_LE(distance_of(got, want), 1e-6 * norm_of(want));
      }
    }
  }
}

TYPED_TEST(CudaMuon, ZerosMoveNothingAndTheSizeOfAGradientDoesNotMatter) {
  using T = TypeParam;
  const MuonShape shape{40, 72};
  const Arenas arenas(shape, 3);
  Matmul matmul(nullptr);
  const Workspace work(shape, sizeof(T), nullptr);
  const Floats start = random_floats(arenas.elements, 1), ordinary = random_floats(shape.elements(), 2);
  const Masters<T> masters(start);
  Floats gradients(start.size(), 0.0f);  // of the first matrix: zeros
  for (std::size_t i = 0; i < ordinary.size(); ++i) {
    gradients[static_cast<std::size_t>(arenas.matrices[1].gradient) + i] = ordinary[i] * 0x1p-90f;
    gradients[static_cast<std::size_t>(arenas.matrices[2].gradient) + i] = ordinary[i] * 0x1p40f;
  }
  const DeviceBuffer<float> on_gpu(gradients), momentum(Floats(start.size(), 0.0f));
  MuonStep step;
  step.learning_rate = 1;
  muon_momentum<T>(*work, arenas.matrices, on_gpu.data(), momentum.data(), step, nullptr);
  orthogonalize<T>(matmul, shape, *work);
  masters.apply(*work, arenas.matrices, step);
  const Floats before = Masters<T>(start).download(), after = masters.download();
  const auto moved = [&](std::size_t i) {
    const std::int64_t at = arenas.matrices[i].parameter;
    Floats result = arenas.of(after, at);
    const Floats old = arenas.of(before, at);
    for (std::size_t e = 0; e < old.size(); ++e) result[e] -= old[e];
    return result;
  };
  EXPECT_EQ(norm_of(moved(0)), 0);
  EXPECT_GT(norm_of(moved(1)), 0.7 * 0.2 * std::sqrt(72.0) * std::sqrt(40.0) * 0.9);
  EXPECT_LE(distance_of(moved(1), moved(2)), 1e-5 * norm_of(moved(2)));
}

// Up or down as the random bits of (seed, step, element) say.
TEST(CudaMuonRounded, AMomentumInBf16IsRoundedAtRandom) {
  using T = __nv_bfloat16;
  const MuonShape shape{60, 130};
  const Arenas arenas(shape, 2);
  const Workspace work(shape, sizeof(T), nullptr);
  const Floats gradients = random_floats(arenas.elements, 3);
  const DeviceBuffer<float> on_gpu(gradients);
  const auto momentum_after = [&](std::uint64_t seed, std::int64_t number) {
    const DeviceBuffer<T> momentum(stored<T>(random_floats(arenas.elements, 4)));
    MuonStep step = step_of(number);
    step.gradient_scale = 1;
    muon_momentum<T>(*work, arenas.matrices, on_gpu.data(), momentum.data(), step, seed, nullptr);
    return momentum.download();
  };
  const std::vector<T> got = momentum_after(7, 3), again = momentum_after(7, 3), other = momentum_after(7, 4);
  EXPECT_EQ(std::memcmp(got.data(), again.data(), got.size() * sizeof(T)), 0);
  EXPECT_NE(std::memcmp(got.data(), other.data(), got.size() * sizeof(T)), 0);
  const Floats old = rounded<T>(random_floats(arenas.elements, 4));
  std::int64_t differ = 0;
  for (const MuonMatrix& matrix : arenas.matrices) {
    for (std::int64_t i = 0; i < shape.elements(); ++i) {
      const float m = old[static_cast<std::size_t>(matrix.state + i)],
                  g = gradients[static_cast<std::size_t>(matrix.gradient + i)];
      const float value = m + (1.0f - 0.9f) * (g - m);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      const std::int64_t element = matrix.begin + i;
      const std::uint16_t want = round_at_random(bits, rounding_words(7, 3, element / 4).word[element % 4] & 0xffffu);
      std::uint16_t have = 0;
      std::memcpy(&have, &got[static_cast<std::size_t>(matrix.state + i)], sizeof have);
      differ += have != want;
    }
  }
  // The GPU fuses a product and a sum: the last bits of fp32 differ, which decide one rounding of thousands.
  EXPECT_LE(differ, shape.elements() / 200);
}

// ---- a model ----

struct Case {
  Precision precision, moments;
};

std::vector<Case> cases() {
  std::vector<Case> all = {
      {Precision::fp32, Precision::fp32}, {Precision::bf16, Precision::fp32}, {Precision::bf16, Precision::bf16}};
  if (has_fp8()) all.push_back({Precision::fp8, Precision::fp32});
  return all;
}

ModelConfig config_of(const Case& c) {
  ModelConfig config = small_llama();
  config.num_layers = 2;
  config.tied_embeddings = false;
  if (c.precision != Precision::fp8) return config;
  config.hidden_size = 144;
  config.ffn_size = 208;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rope.rotary_dim = 64;
  return config;
}

TrainOptions options_of(const Case& c) {
  TrainOptions options;
  options.micro_batch = 4;
  options.seq_len = 64;
  options.precision = c.precision;
  options.moments = c.moments;
  options.optimizer = &muon_optimizer();
  options.seed = 3;
  return options;
}

OptimizerStep optimizer_step(std::int64_t number, double gradient_norm) {
  AdamWStep adamw;
  adamw.step = number;
  adamw.learning_rate = 1e-2f;
  adamw.weight_decay = 0.1f;
  adamw.gradient_scale = clip_factor(gradient_norm, 0.5);
  OptimizerStep step(adamw);
  step.muon.learning_rate = 2e-2f;
  step.muon.momentum = 0.9f;
  return step;
}

double compute(TrainModel& model, const Case& c, std::int64_t step) {
  const TokenBatch text = random_tokens(config_of(c), 256, static_cast<unsigned>(step));
  model.zero_gradients();
  model.forward(text.batch(), static_cast<std::uint64_t>(step), 0.01f);
  model.backward();
  return model.statistics().gradient_norm;
}

// From the gradients that the model has, by cpu::muon_update(). What the parameters move in ten steps may differ by the rounding
// of fp32 or, for matrices in bf16, by what its rounding makes of a gradient: a hundredth if it has all directions in about the same
// measure, more if some are rare (74 rows for a side of 72: 3 %, 40 rows: 14 %). Here are 256 rows for 72 and 144.
TEST(CudaMuonModel, TenStepsAreTheCpusFromTheSameGradients) {
  for (const Case& c : cases()) {
    if (c.moments == Precision::bf16) continue;  // rounded at random
    SCOPED_TRACE(static_cast<int>(c.precision));
    const auto model = make_training_model(config_of(c), options_of(c));
    randomize_parameters(*model);
    const cpu::OptimizerUpdate& reference = cpu::update_of(muon_optimizer());
    std::map<std::string, Floats> start, p, state1, state2;
    for (const TensorSpec& spec : model->table().specs()) {
      start[spec.name] = p[spec.name] = read_values(*model, TensorRole::parameter, spec);
      state1[spec.name] = state2[spec.name] = Floats(static_cast<std::size_t>(spec.elements));
    }
    for (std::int64_t number = 1; number <= 10; ++number) {
      const OptimizerStep step = optimizer_step(number, compute(*model, c, number));
      for (const TensorSpec& spec : model->table().specs()) {
        const Floats gradient = read_values(*model, TensorRole::gradient, spec);
        Floats workspace(static_cast<std::size_t>(reference.workspace(spec)));
        reference.update({spec,
                          spec.elements,
                          p[spec.name].data(),
                          gradient.data(),
                          {state1[spec.name].data(), state2[spec.name].data()},
                          workspace.data()},
                         step);
      }
      model->update(step);
    }
    for (const TensorSpec& spec : model->table().specs()) {
      const Floats got = read_values(*model, TensorRole::parameter, spec);
      const double moved = distance_of(p[spec.name], start[spec.name]);
      const bool in_bf16 = spec.hidden_matrix && c.precision != Precision::fp32;
      EXPECT_LE(distance_of(got, p[spec.name]), (in_bf16 ? 0.15 : 1e-3) * moved) << spec.name;
      const Floats m = read_values(*model, TensorRole::state1, spec);
      EXPECT_LE(distance_of(m, state1[spec.name]), 1e-5 * norm_of(m)) << spec.name;
      if (spec.hidden_matrix) {
        Floats values(m.size());
        EXPECT_THROW(model->read_tensor(TensorRole::state2, spec, values.data()), Error);
      } else {
        const Floats v = read_values(*model, TensorRole::state2, spec);
        EXPECT_LE(distance_of(v, state2[spec.name]), 1e-5 * norm_of(v)) << spec.name;
      }
    }
  }
}

Floats state_of(TrainModel& model) {
  Floats all;
  for (const StateTensor& tensor : state_tensors(model.optimizer(), model.table())) {
    const Floats values = read_values(model, tensor.role, model.table().specs()[tensor.spec]);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Six steps: eager, captured and replayed. A second model goes on from the third with the state of the first, once as it is read
// tensor by tensor and once as the copy for a save has it.
TEST(CudaMuonModel, RerunGraphAndResumeGiveTheSameBits) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(static_cast<int>(c.precision) * 10 + static_cast<int>(c.moments));
    const auto run = [&](TrainModel& model, std::int64_t first, std::int64_t last) {
      for (std::int64_t number = first; number <= last; ++number) {
        model.update(optimizer_step(number, compute(model, c, number)));
      }
    };
    const auto whole = [&](bool graph) {
      TrainOptions options = options_of(c);
      options.graph = graph;
      const auto model = make_training_model(config_of(c), options);
      randomize_parameters(*model);
      run(*model, 1, 6);
      return state_of(*model);
    };
    const Floats expected = whole(true);
    EXPECT_EQ(whole(true), expected) << "another run";
    EXPECT_EQ(whole(false), expected) << "without graphs";
    for (const bool copied : {false, true}) {
      const auto first = make_training_model(config_of(c), options_of(c)),
                 second = make_training_model(config_of(c), options_of(c));
      randomize_parameters(*first);
      run(*first, 1, 3);
      const auto copy = first->make_state_copy();
      copy->take();
      for (const StateTensor& tensor : state_tensors(first->optimizer(), first->table())) {
        const TensorSpec& spec = first->table().specs()[tensor.spec];
        Floats values(static_cast<std::size_t>(spec.elements));
        if (copied) {
          Floats buffer(values.size());
          const float* from = copy->read(tensor.role, spec, 0, values.size(), buffer.data());
          values.assign(from, from + values.size());
        } else {
          first->read_tensor(tensor.role, spec, values.data());
        }
        second->write_tensor(tensor.role, spec, values.data());
      }
      if (c.precision == Precision::fp8) second->set_fp8_state(first->fp8_state());
      run(*second, 4, 6);
      EXPECT_EQ(state_of(*second), expected) << (copied ? "from a copy" : "tensor by tensor");
    }
  }
}

// A matrix has one state, and memory for no second; what is planned is what is allocated.
TEST(CudaMuonModel, ItsMemoryIsPlanned) {
  for (const Case& c : cases()) {
    const auto model = make_training_model(config_of(c), options_of(c));
    EXPECT_EQ(total_bytes(model->memory()), total_bytes(plan_training(config_of(c), options_of(c))));
    std::int64_t states = 0;
    for (const StateTensor& tensor : state_tensors(model->optimizer(), model->table())) {
      if (tensor.role != TensorRole::parameter) states += model->table().specs()[tensor.spec].elements;
    }
    const std::string name = format("momentum, AdamW moments (%s)", c.moments == Precision::bf16 ? "bf16" : "fp32");
    const std::uint64_t bytes = c.moments == Precision::bf16 ? 2 : 4;
    std::uint64_t planned = 0;
    for (const MemoryLine& line : model->memory()) {
      if (line.name == name) planned = line.bytes;
    }
    EXPECT_GE(planned, bytes * static_cast<std::uint64_t>(states));
    EXPECT_LE(planned, bytes * static_cast<std::uint64_t>(states) + 2 * bytes * 128 * model->table().specs().size());
  }
}

}  // namespace
}  // namespace weft::cuda
