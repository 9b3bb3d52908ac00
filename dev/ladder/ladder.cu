// Runs the ladder: every step on shapes that fit no tile, compared with the CPU reference, then on one large shape, compared
// and timed. Exits with 1 if a step is wrong, with 4 where there is no GPU.
//
//   ladder [--check | --self-check] [norm] [attention]
//
// --check leaves the timing out. --self-check needs no GPU: it asks whether the comparison finds an error at all, and it
// runs before everything else, too.
//
// Time: the median of 9 batches of launches. GB/s counts each input and output once, TF/s half of all scores, because the
// mask is causal. The floor is what the same run measures: a copy of as many bytes, or the square bf16 GEMM. "error" is the
// largest one of all shapes as a share of the tolerance.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "dev/ladder/ladder.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/residual_norm.h"
#include "llmc/cuda/op/gemm/ceilings.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::ladder {

namespace {

using cuda::check;

using Floats = std::vector<float>;
using Bf16s = std::vector<bf16>;

// ---- comparison ---------------------------------------------------------------------------------------------------------
// Errors are in units of the tolerance: above 1 is wrong. NaN and infinity are.
double worse(double a, double b) {
  return std::isnan(b) || b > a ? b : a;
}
bool wrong(double error) {
  return !(error <= 1);
}

// h is one rounded sum, so the stream has to be equal. Of the result the last operation is a rounding to bf16: half a unit
// in the last place, at most 2^-8 of it, so an error of 0.99 is what a right kernel shows. Sums in another order add some
// 1e-6 of its terms, which are as large as the largest result of a row.
double norm_error(const Floats& h, const Floats& want_h, const Floats& out, const Floats& want, std::size_t C) {
  double error = 0;
  for (std::size_t row = 0; row < want.size(); row += C) {
    float largest = 0;
    for (std::size_t i = row; i < row + C; ++i) largest = std::max(largest, std::fabs(want[i]));
    for (std::size_t i = row; i < row + C; ++i) {
      const double tolerance = std::fabs(want[i]) * 0x1p-8 + largest * 1e-5;
      error = worse(error, std::fabs(static_cast<double>(out[i]) - want[i]) / tolerance);
      if (h[i] != want_h[i]) error = worse(error, INFINITY);
    }
  }
  return error;
}

// The 2-norm of a head's error, relative to its result. Weights and results that are rounded to bf16 err by at most 2^-8 and
// at random, which leaves some 2^-9 of the norm for each; the tolerance is 2^-7. One key too many or too few of n is an
// error of about n^-1/2: still more than twice the tolerance at n = 2048.
double attention_error(const Floats& out, const Floats& want, std::size_t HS) {
  double error = 0;
  for (std::size_t row = 0; row < want.size(); row += HS) {
    double difference = 0, size = 0;
    for (std::size_t i = row; i < row + HS; ++i) {
      difference += std::pow(static_cast<double>(out[i]) - want[i], 2);
      size += std::pow(static_cast<double>(want[i]), 2);
    }
    error = worse(error, std::sqrt(difference / size) / 0x1p-7);
  }
  return error;
}

// ---- numbers ------------------------------------------------------------------------------------------------------------
float rounded(float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

// Uniform in [centre - sqrt 3, centre + sqrt 3): variance 1.
Bf16s random_values(std::size_t count, unsigned seed, float centre = 0) {
  std::mt19937 generator(seed);
  Bf16s values(count);
  for (bf16& value : values) {
    const float uniform = static_cast<float>(generator() >> 8) * 0x1p-24f;
    value = __float2bfloat16_rn(centre + (2 * uniform - 1) * 1.7320508f);
  }
  return values;
}

Floats widened(const bf16* values, std::size_t count) {
  Floats result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = __bfloat162float(values[i]);
  return result;
}

// ---- device memory --------------------------------------------------------------------------------------------------
struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};

template <typename T>
std::unique_ptr<T, Free> allocate(std::size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "ladder: allocating GPU memory");
  return std::unique_ptr<T, Free>(static_cast<T*>(memory));
}

std::unique_ptr<bf16, Free> upload(const Bf16s& values) {
  auto memory = allocate<bf16>(values.size());
  check(cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(bf16), cudaMemcpyHostToDevice),
        "ladder: copying to the GPU");
  return memory;
}

// An output with a guard behind it. Before a run all of it is NaN (0xFFFF): what a step does not write stays NaN, what it
// writes behind the end shows in the guard.
class Output {
 public:
  explicit Output(std::size_t count) : count_(count), memory_(allocate<bf16>(count + kGuard)) {}

  bf16* get() const { return memory_.get(); }

  void poison() const {
    check(cudaMemset(memory_.get(), 0xFF, (count_ + kGuard) * sizeof(bf16)), "ladder: filling an output");
  }

  Bf16s download(bool& guard_is_whole) const {
    Bf16s values(count_ + kGuard);
    check(cudaMemcpy(values.data(), memory_.get(), values.size() * sizeof(bf16), cudaMemcpyDeviceToHost),
          "ladder: copying from the GPU");
    for (std::size_t i = count_; i < values.size(); ++i) {
      unsigned short bits = 0;
      std::memcpy(&bits, &values[i], sizeof(bits));
      guard_is_whole = guard_is_whole && bits == 0xFFFF;
    }
    values.resize(count_);
    return values;
  }

 private:
  static constexpr std::size_t kGuard = 16384;
  std::size_t count_;
  std::unique_ptr<bf16, Free> memory_;
};

// ---- time -----------------------------------------------------------------------------------------------------------
// Seconds a launch.
double median_seconds(const std::function<void()>& launch) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "ladder: event");
  check(cudaEventCreate(&end), "ladder: event");
  const auto seconds = [&](int launches) {
    check(cudaEventRecord(begin), "ladder: event");
    for (int i = 0; i < launches; ++i) launch();
    check(cudaEventRecord(end), "ladder: event");
    check(cudaEventSynchronize(end), "ladder: kernels");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "ladder: event");
    return 1e-3 * milliseconds / launches;
  };
  seconds(1);  // warms up
  const int launches = static_cast<int>(std::clamp(2e-3 / std::max(seconds(1), 1e-6), 1.0, 50.0));
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) times.push_back(seconds(launches));
  check(cudaEventDestroy(begin), "ladder: event");
  check(cudaEventDestroy(end), "ladder: event");
  std::nth_element(times.begin(), times.begin() + 4, times.end());
  return times[4];
}

// ---- the two operators ------------------------------------------------------------------------------------------------
struct NormShape {
  std::int64_t rows;
  int C;
  bool layernorm;
};

std::string text(const NormShape& shape) {
  return std::to_string(shape.rows) + " rows of " + std::to_string(shape.C) +
         (shape.layernorm ? ", LayerNorm" : ", RMSNorm");
}

class NormCase {
 public:
  using Problem = NormProblem;

  explicit NormCase(const NormShape& shape)
      : C_(static_cast<std::size_t>(shape.C)),
        count_(static_cast<std::size_t>(shape.rows) * C_),
        residual_out_(count_),
        out_(count_) {
    // Off centre, so that LayerNorm's mean matters.
    const Bf16s x = random_values(count_, 1), residual = random_values(count_, 2, 0.5f);
    const Bf16s weight = random_values(C_, 3, 1), bias = random_values(C_, 4);
    want_h_.resize(count_), want_.resize(count_);
    for (std::size_t i = 0; i < count_; ++i)
      want_h_[i] = rounded(__bfloat162float(x[i]) + __bfloat162float(residual[i]));
    const Floats wide_weight = widened(weight.data(), C_), wide_bias = widened(bias.data(), C_);
    using namespace cpu;
    ResidualNormShape reference;
    reference.rows = shape.rows, reference.C = shape.C, reference.eps = 1e-5f;
    reference.kind = shape.layernorm ? NormKind::layernorm : NormKind::rmsnorm;
    ResidualNormForward io;
    io.x = want_h_.data(), io.weight = wide_weight.data(), io.bias = shape.layernorm ? wide_bias.data() : nullptr;
    io.out = want_.data();
    residual_norm_forward(reference, io);

    x_ = upload(x), residual_ = upload(residual), weight_ = upload(weight), bias_ = upload(bias);
    problem_.rows = shape.rows, problem_.C = shape.C, problem_.layernorm = shape.layernorm, problem_.eps = 1e-5f;
    problem_.x = x_.get(), problem_.residual = residual_.get(), problem_.weight = weight_.get();
    problem_.bias = shape.layernorm ? bias_.get() : nullptr;
    problem_.residual_out = residual_out_.get(), problem_.out = out_.get();
  }

  const NormProblem& problem() const { return problem_; }
  void poison() const { residual_out_.poison(), out_.poison(); }

  double error() const {
    bool guards = true;
    const Bf16s h = residual_out_.download(guards), out = out_.download(guards);
    return guards ? norm_error(widened(h.data(), count_), want_h_, widened(out.data(), count_), want_, C_) : INFINITY;
  }

 private:
  std::size_t C_, count_;
  Output residual_out_, out_;
  Floats want_h_, want_;
  std::unique_ptr<bf16, Free> x_, residual_, weight_, bias_;
  NormProblem problem_;
};

std::string text(const AttentionShape& shape) {
  return "B " + std::to_string(shape.B) + ", T " + std::to_string(shape.TQ) + ", " + std::to_string(shape.NH) + "/" +
         std::to_string(shape.NKV) + " heads of " + std::to_string(shape.HS);
}

AttentionShape attention_shape(std::int64_t B, std::int64_t T, std::int64_t NH, std::int64_t NKV, std::int64_t HS) {
  AttentionShape shape;
  shape.B = B, shape.TQ = shape.TK = T, shape.NH = NH, shape.NKV = NKV, shape.HS = HS;
  shape.scale = 1 / std::sqrt(static_cast<float>(HS));
  return shape;
}

// q, k and v lie in packed rows [q heads | k heads | v heads] as in a Llama. The reference computes the last sequence of the
// batch alone: what comes before it is the same arithmetic, and of 16,384 tokens the CPU would take minutes.
class AttentionCase {
 public:
  using Problem = AttentionProblem;

  explicit AttentionCase(const AttentionShape& shape)
      : shape_(shape),
        row_((shape.NH + 2 * shape.NKV) * shape.HS),
        out_row_(shape.NH * shape.HS),
        out_(static_cast<std::size_t>(shape.B * shape.TQ * out_row_)) {
    const std::int64_t T = shape.TQ, HS = shape.HS;
    const Bf16s qkv = random_values(static_cast<std::size_t>(shape.B * T * row_), 5);
    const Floats last = widened(qkv.data() + (shape.B - 1) * T * row_, static_cast<std::size_t>(T * row_));
    want_.resize(static_cast<std::size_t>(T * out_row_));
    AttentionShape one = shape;
    one.B = 1;
    const auto wide = [&](std::int64_t head) {
      return cpu::ConstHeadView{last.data() + head * HS, T * row_, row_, HS};
    };
    cpu::attention_forward(one, {want_.data(), T * out_row_, out_row_, HS}, nullptr, wide(0), wide(shape.NH),
                           wide(shape.NH + shape.NKV));

    qkv_ = upload(qkv);
    scores_ = allocate<float>(static_cast<std::size_t>(shape.B * shape.NH * T * T));
    const auto packed = [&](std::int64_t head) {
      return HeadViewOf<const bf16>{qkv_.get() + head * HS, T * row_, row_, HS};
    };
    problem_.shape = shape;
    problem_.q = packed(0), problem_.k = packed(shape.NH), problem_.v = packed(shape.NH + shape.NKV);
    problem_.out = {out_.get(), T * out_row_, out_row_, HS};
    problem_.scores = scores_.get();
  }

  const AttentionProblem& problem() const { return problem_; }
  void poison() const { out_.poison(); }

  double error() const {
    bool guards = true;
    const Bf16s out = out_.download(guards);
    double error = guards ? 0 : INFINITY;
    for (const bf16 value : out) {  // the other sequences: written at least
      if (std::isnan(__bfloat162float(value))) error = worse(error, NAN);
    }
    const std::size_t before = out.size() - want_.size();
    return worse(
        error, attention_error(widened(out.data() + before, want_.size()), want_, static_cast<std::size_t>(shape_.HS)));
  }

 private:
  AttentionShape shape_;
  std::int64_t row_, out_row_;
  Output out_;
  Floats want_;
  std::unique_ptr<bf16, Free> qkv_;
  std::unique_ptr<float, Free> scores_;
  AttentionProblem problem_;
};

// ---- running --------------------------------------------------------------------------------------------------------
// Runs a step and returns its error; +infinity or NaN for outputs that were not written, or written behind their end.
template <typename Case>
double error_of(const Step<typename Case::Problem>& step, const Case& problem) {
  problem.poison();
  step.launch(problem.problem(), nullptr);
  check(cudaDeviceSynchronize(), step.name);
  return problem.error();
}

// `unit`: a divisor for work / s. `floor`: work / s at best.
template <typename Case, typename Shape>
bool climb(const char* title, const std::vector<Step<typename Case::Problem>>& steps, const std::vector<Shape>& odd,
           const std::vector<Shape>& large, const std::function<double(const Shape&)>& work, double unit,
           const char* unit_name, double floor, bool timed) {
  bool right = true;
  std::vector<double> errors(steps.size(), 0);
  const auto compare = [&](const Case& problem, const Shape& shape) {
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].available != nullptr && !steps[i].available()) continue;
      const double error = error_of(steps[i], problem);
      errors[i] = worse(errors[i], error);
      if (!wrong(error)) continue;
      right = false;
      std::printf("WRONG: %s, step %s, %s: error %.3g times the tolerance\n", title, steps[i].name, text(shape).c_str(),
                  error);
    }
  };
  for (const Shape& shape : odd) compare(Case(shape), shape);
  for (const Shape& shape : large) {
    const Case problem(shape);
    compare(problem, shape);
    std::printf("\n%s, %s\n%-42s %12s %9s %10s %9s\n", title, text(shape).c_str(), "step", "us", unit_name, "of floor",
                "error");
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].available != nullptr && !steps[i].available()) {
        std::printf("%-42s %12s\n", steps[i].name, "not on this GPU");
        continue;
      }
      if (!timed) {
        std::printf("%-42s %12s %9s %10s %9.2f\n", steps[i].name, "", "", "", errors[i]);
        continue;
      }
      const double seconds = median_seconds([&] { steps[i].launch(problem.problem(), nullptr); });
      const double rate = work(shape) / seconds;
      std::printf("%-42s %12.1f %9.1f %9.1f%% %9.2f\n", steps[i].name, 1e6 * seconds, rate / unit, 100 * rate / floor,
                  errors[i]);
    }
    std::fflush(stdout);
  }
  return right;
}

bool climb_norm(double bytes_per_s, bool timed) {
  const std::vector<NormShape> odd = {{1, 8, true},      {7, 64, false},   {33, 768, true},   {1, 1032, true},
                                      {300, 2048, true}, {5, 2056, false}, {17, 5120, true},  {1000, 3072, false},
                                      {3, 8200, true},   {3, 16384, true}, {2, 16384, false}, {5000, 256, true}};
  const std::vector<NormShape> large = {{16384, 2048, false}, {16384, 2048, true}};
  return climb<NormCase, NormShape>(
      "residual + norm", norm_steps(), odd, large,
      [](const NormShape& shape) { return 4.0 * sizeof(bf16) * static_cast<double>(shape.rows) * shape.C; }, 1e9,
      "GB/s", bytes_per_s, timed);
}

bool climb_attention(double flops_per_s, bool timed) {
  std::vector<AttentionShape> odd, large;
  for (const std::int64_t HS : {64, 128}) {
    odd.push_back(attention_shape(1, 1, 1, 1, HS));
    odd.push_back(attention_shape(2, 7, 4, 2, HS));
    odd.push_back(attention_shape(1, 64, 2, 1, HS));
    odd.push_back(attention_shape(1, 65, 4, 4, HS));
    odd.push_back(attention_shape(3, 130, 6, 2, HS));
    odd.push_back(attention_shape(1, 257, 8, 1, HS));
    odd.push_back(attention_shape(2, 1000, 4, 2, HS));
    large.push_back(attention_shape(8, 2048, 32, 8, HS));
  }
  return climb<AttentionCase, AttentionShape>(
      "attention", attention_steps(), odd, large,
      [](const AttentionShape& shape) {
        return 2.0 * static_cast<double>(shape.B * shape.NH * shape.HS) * static_cast<double>(shape.TQ * shape.TQ);
      },
      1e12, "TF/s", flops_per_s, timed);
}

// ---- does the comparison find errors? -----------------------------------------------------------------------------------
bool self_check() {
  bool right = true;
  const auto expect = [&](bool found, const char* what) {
    if (found) return;
    right = false;
    std::printf("WRONG: self check: %s\n", what);
  };
  const std::size_t C = 64, rows = 3, last = rows * C - 1;
  const Floats values = widened(random_values(rows * C, 7).data(), rows * C);
  expect(!wrong(norm_error(values, values, values, values, C)), "equal results of a norm differ");
  expect(!wrong(attention_error(values, values, C)), "equal results of attention differ");
  const auto changed = [&](std::size_t i, float value) {
    Floats copy = values;
    copy[i] = value;
    return copy;
  };
  for (const std::size_t i : {std::size_t{0}, C, last}) {
    const float off = values[i] + std::copysign(0.01f * std::fabs(values[i]) + 0.01f, values[i]);
    expect(wrong(norm_error(changed(i, off), values, values, values, C)), "a changed stream");
    expect(wrong(norm_error(values, values, changed(i, off), values, C)), "1 % in one result");
    expect(wrong(norm_error(values, values, changed(i, NAN), values, C)), "a result of a norm that is NaN");
    expect(wrong(attention_error(changed(i, NAN), values, C)), "a result of attention that is NaN");
    expect(wrong(attention_error(changed(i, values[i] + 0.2f), values, C)), "one dimension of a head");
  }
  Floats half_ulp = values;
  for (float& value : half_ulp) value *= 1 + 0x1p-8f;
  expect(!wrong(norm_error(values, values, half_ulp, values, C)),
         "half a unit in the last place of bf16 is called wrong");
  expect(!wrong(attention_error(half_ulp, values, C)), "half a unit in the last place of bf16 is called wrong");

  // One key less than a query sees, 2048 of them with equal weights: what a wrong edge of the mask does.
  const std::size_t keys = 2048, HS = 64;
  const Floats v = widened(random_values(keys * HS, 8).data(), keys * HS);
  Floats all(HS, 0), fewer(HS, 0);
  for (std::size_t key = 0; key < keys; ++key) {
    for (std::size_t d = 0; d < HS; ++d) {
      all[d] += v[key * HS + d] / static_cast<float>(keys);
      if (key + 1 < keys) fewer[d] += v[key * HS + d] / static_cast<float>(keys - 1);
    }
  }
  expect(wrong(attention_error(fewer, all, HS)), "a key that is left out at T 2048");
  return right;
}

int run(int argc, char** argv) {
  bool norm = false, attention = false, timed = true, self_check_alone = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "norm") {
      norm = true;
    } else if (argument == "attention") {
      attention = true;
    } else if (argument == "--check") {
      timed = false;
    } else if (argument == "--self-check") {
      self_check_alone = true;
    } else {
      fail(Exit::usage, "ladder: got %s, expected --check, --self-check, norm or attention", escaped(argument).c_str());
    }
  }
  if (!self_check()) return static_cast<int>(Exit::internal);
  if (self_check_alone) {
    std::puts("the comparison finds what it should");
    return static_cast<int>(Exit::ok);
  }
  check(cudaFree(nullptr), "ladder: looking for a GPU");
  const auto [bytes_per_s, flops_per_s] = timed ? cuda::measure_ceilings(nullptr) : std::pair(1.0, 1.0);
  if (timed)
    std::printf("floors of this run: copy %.0f GB/s, square bf16 GEMM %.0f TF/s\n", bytes_per_s / 1e9,
                flops_per_s / 1e12);
  const bool both = norm == attention;
  bool right = true;
  if (norm || both) right = climb_norm(bytes_per_s, timed) && right;
  if (attention || both) right = climb_attention(flops_per_s, timed) && right;
  return static_cast<int>(right ? Exit::ok : Exit::internal);
}

}  // namespace

}  // namespace weft::ladder

int main(int argc, char** argv) {
  try {
    return weft::ladder::run(argc, argv);
  } catch (const weft::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.code());
  }
}
