// Fused dropout + residual + norm in all its forms, against a double-precision definition and its central
// differences.

#include "llmc/cpu/residual_norm.h"

#include <limits>
#include <ostream>

#include "llmc/base/philox.h"
#include "test/cpp/gradient_check.h"

namespace weft::cpu {
namespace {

using namespace weft::test;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One form of the operator: which of the optional operands are there.
struct Form {
  const char* name;
  NormKind kind;
  std::int64_t rows, C;
  bool residual = false, bias = false, rowscale = false, colscale = false, second = false;
  bool prenorm = true;  // keeps h and takes the gradient of the skip path; else h is recomputed in backward
  float dropout = 0;
};
std::ostream& operator<<(std::ostream& out, const Form& form) {
  return out << form.name;
}

struct Tensors {
  Floats x, residual, rowscale, colscale, weight, bias, weight2, bias2, dout, dout2, dresidual_out;
};

Tensors random_tensors(const Form& f) {
  const std::int64_t n = f.rows * f.C;
  return {random_floats(n, 1),
          random_floats(n, 2, 2, 0.5f),
          random_floats(f.rows, 3),
          random_floats(f.C, 4),
          random_floats(f.C, 5, 0.3f, 1),
          random_floats(f.C, 6),
          random_floats(f.C, 7, 0.3f, 1),
          random_floats(f.C, 8),
          random_floats(n, 9),
          random_floats(n, 10),
          random_floats(n, 11)};
}

ResidualNormShape shape_of(const Form& f) {
  return {f.rows, f.C, f.kind, 1e-3f, f.dropout, /*seed=*/42, /*offset=*/1000};
}

struct Outputs {
  Floats residual_out, out, out2, mean, rstd;
};

Outputs forward(const Form& f, const Tensors& t, bool in_place = false) {
  const std::int64_t n = f.rows * f.C;
  Outputs o{Floats(n, kNaN), Floats(n, kNaN), Floats(n, kNaN), Floats(f.rows, kNaN), Floats(f.rows, kNaN)};
  if (in_place) o.residual_out = t.residual;
  ResidualNormForward io;
  io.x = t.x.data();
  if (f.residual) io.residual = in_place ? o.residual_out.data() : t.residual.data();
  if (f.rowscale) io.rowscale = t.rowscale.data();
  if (f.colscale) io.colscale = t.colscale.data();
  io.weight = t.weight.data();
  if (f.bias) io.bias = t.bias.data();
  if (f.second) io.weight2 = t.weight2.data(), io.out2 = o.out2.data();
  if (f.second && f.bias) io.bias2 = t.bias2.data();
  if (f.prenorm) io.residual_out = o.residual_out.data();
  io.out = o.out.data();
  if (f.kind == NormKind::layernorm) io.mean = o.mean.data();
  io.rstd = o.rstd.data();
  residual_norm_forward(shape_of(f), io);
  return o;
}

struct Gradients {
  Floats dx, dresidual, dweight, dbias, dweight2, dbias2, dcolscale;
};

// Column gradients start at `before`, so that = in place of += shows.
Gradients backward(const Form& f, const Tensors& t, const Outputs& o, float before = 0, bool in_place = false,
                   float weight_offset = 0) {
  const std::int64_t n = f.rows * f.C;
  Gradients g{Floats(n, kNaN),     Floats(n, kNaN),     Floats(f.C, before), Floats(f.C, before),
              Floats(f.C, before), Floats(f.C, before), Floats(f.C, before)};
  if (in_place) g.dresidual = t.dresidual_out;
  ResidualNormBackward io;
  io.dout = t.dout.data();
  if (f.second) io.dout2 = t.dout2.data();
  if (f.prenorm) io.dresidual_out = in_place ? g.dresidual.data() : t.dresidual_out.data();
  if (f.prenorm) io.residual_out = o.residual_out.data();
  if (!f.prenorm || f.colscale) io.x = t.x.data();
  if (!f.prenorm && f.residual) io.residual = t.residual.data();
  if (f.rowscale) io.rowscale = t.rowscale.data();
  if (f.colscale) io.colscale = t.colscale.data();
  io.weight = t.weight.data();
  if (f.second) io.weight2 = t.weight2.data();
  io.mean = f.kind == NormKind::layernorm ? o.mean.data() : nullptr;
  io.rstd = o.rstd.data();
  io.dx = g.dx.data();
  if (f.residual) io.dresidual = g.dresidual.data();
  io.dweight = g.dweight.data();
  if (f.bias) io.dbias = g.dbias.data();
  if (f.second) io.dweight2 = g.dweight2.data();
  if (f.second && f.bias) io.dbias2 = g.dbias2.data();
  if (f.colscale) io.dcolscale = g.dcolscale.data();
  ResidualNormShape shape = shape_of(f);
  shape.weight_offset = weight_offset;
  residual_norm_backward(shape, io);
  return g;
}

struct WideTensors {
  Doubles x, residual, colscale, weight, bias, weight2, bias2;
};

struct WideOutputs {
  Doubles h, out, out2;
};

// The header's formulas, word by word.
WideOutputs naive(const Form& f, const WideTensors& t, const Floats& rowscale) {
  const auto size = static_cast<std::size_t>(f.rows * f.C);
  WideOutputs o{Doubles(size), Doubles(size), Doubles(size)};
  const ResidualNormShape shape = shape_of(f);
  for (std::int64_t row = 0; row < f.rows; ++row) {
    for (std::int64_t c = 0; c < f.C; ++c) {
      const std::int64_t e = row * f.C + c;
      const PhiloxWords words = philox(shape.seed, shape.offset + static_cast<std::uint64_t>(e / 4),
                                       static_cast<std::uint64_t>(RandomStream::dropout));
      const bool kept = uniform01(words.word[e % 4]) >= f.dropout;
      double h = kept ? t.x[e] / (1 - static_cast<double>(f.dropout)) : 0;
      if (f.rowscale) h *= static_cast<double>(rowscale[row]);
      if (f.colscale) h *= t.colscale[c];
      if (f.residual) h += t.residual[e];
      o.h[e] = h;
    }
    const double* h = o.h.data() + row * f.C;
    double mean = 0, variance = 0;
    for (std::int64_t c = 0; c < f.C; ++c) mean += h[c] / static_cast<double>(f.C);
    if (f.kind == NormKind::rmsnorm) mean = 0;
    for (std::int64_t c = 0; c < f.C; ++c) variance += (h[c] - mean) * (h[c] - mean) / static_cast<double>(f.C);
    for (std::int64_t c = 0; c < f.C; ++c) {
      const double normed = (h[c] - mean) / std::sqrt(variance + static_cast<double>(shape.eps));
      o.out[row * f.C + c] = normed * t.weight[c] + (f.bias ? t.bias[c] : 0);
      o.out2[row * f.C + c] = normed * t.weight2[c] + (f.bias ? t.bias2[c] : 0);
    }
  }
  return o;
}

class ResidualNormForms : public testing::TestWithParam<Form> {};

TEST_P(ResidualNormForms, ForwardIsTheDefinition) {
  const Form f = GetParam();
  const Tensors t = random_tensors(f);
  const Outputs o = forward(f, t);
  const WideTensors wide = {widen(t.x),    widen(t.residual), widen(t.colscale), widen(t.weight),
                            widen(t.bias), widen(t.weight2),  widen(t.bias2)};
  const WideOutputs expected = naive(f, wide, t.rowscale);
  expect_close(o.out, expected.out, "out");
  if (f.second) expect_close(o.out2, expected.out2, "out2");
  if (f.prenorm) expect_close(o.residual_out, expected.h, "residual_out");
}

TEST_P(ResidualNormForms, BackwardIsCentralDifferences) {
  const Form f = GetParam();
  const Tensors t = random_tensors(f);
  const Gradients g = backward(f, t, forward(f, t));
  const WideTensors wide = {widen(t.x),    widen(t.residual), widen(t.colscale), widen(t.weight),
                            widen(t.bias), widen(t.weight2),  widen(t.bias2)};
  const auto check = [&](const char* name, Doubles WideTensors::*member, const Floats& at, const Floats& gradient) {
    const auto loss = [&](const Doubles& values) {
      WideTensors varied = wide;
      varied.*member = values;
      const WideOutputs o = naive(f, varied, t.rowscale);
      double sum = weighted_sum(o.out, t.dout);
      if (f.second) sum += weighted_sum(o.out2, t.dout2);
      if (f.prenorm) sum += weighted_sum(o.h, t.dresidual_out);
      return sum;
    };
    expect_gradient(name, loss, at, gradient, f.rows * f.C > 2000 ? 6 : 60);
  };
  check("dx", &WideTensors::x, t.x, g.dx);
  if (f.residual) check("dresidual", &WideTensors::residual, t.residual, g.dresidual);
  check("dweight", &WideTensors::weight, t.weight, g.dweight);
  if (f.bias) check("dbias", &WideTensors::bias, t.bias, g.dbias);
  if (f.second) check("dweight2", &WideTensors::weight2, t.weight2, g.dweight2);
  if (f.second && f.bias) check("dbias2", &WideTensors::bias2, t.bias2, g.dbias2);
  if (f.colscale) check("dcolscale", &WideTensors::colscale, t.colscale, g.dcolscale);
}

// x null names the stream without a branch: what recomputation calls.
TEST_P(ResidualNormForms, NormOfTheStoredStreamHasTheSameBits) {
  Form f = GetParam();
  f.prenorm = true;
  const Tensors t = random_tensors(f);
  const Outputs o = forward(f, t);
  Floats out(o.out.size(), kNaN), mean(o.mean.size(), kNaN), rstd(o.rstd.size(), kNaN), kept(o.out.size(), kNaN);
  ResidualNormShape shape = shape_of(f);
  shape.dropout = 0;
  ResidualNormForward io;
  io.residual = o.residual_out.data();
  io.weight = t.weight.data();
  if (f.bias) io.bias = t.bias.data();
  io.out = out.data();
  io.rstd = rstd.data();
  if (f.kind == NormKind::layernorm) io.mean = mean.data();
  for (float* const residual_out : {static_cast<float*>(nullptr), kept.data()}) {
    io.residual_out = residual_out;
    residual_norm_forward(shape, io);
    EXPECT_EQ(out, o.out);
    EXPECT_EQ(rstd, o.rstd);
    EXPECT_EQ(f.kind == NormKind::layernorm ? mean : rstd, f.kind == NormKind::layernorm ? o.mean : o.rstd);
  }
  EXPECT_EQ(kept, o.residual_out);

  // Backward knows the stream as residual_out or as residual alone.
  Floats by_residual_out(out.size(), kNaN), by_residual(out.size(), kNaN);
  ResidualNormBackward back;
  back.dout = t.dout.data();
  back.weight = t.weight.data();
  back.mean = o.mean.data();
  back.rstd = o.rstd.data();
  back.residual_out = o.residual_out.data();
  back.dresidual = by_residual_out.data();
  residual_norm_backward(shape, back);
  back.residual_out = nullptr;
  back.residual = o.residual_out.data();
  back.dresidual = by_residual.data();
  residual_norm_backward(shape, back);
  EXPECT_EQ(by_residual, by_residual_out);
}

TEST_P(ResidualNormForms, ColumnGradientsAccumulate) {
  const Form f = GetParam();
  const Tensors t = random_tensors(f);
  const Outputs o = forward(f, t);
  const Gradients from_zero = backward(f, t, o), from_eight = backward(f, t, o, 8.0f);
  const auto check = [](const Floats& base, const Floats& added) {
    for (std::size_t c = 0; c < base.size(); ++c) EXPECT_NEAR(added[c], base[c] + 8.0f, 1e-4);
  };
  check(from_zero.dweight, from_eight.dweight);
  check(from_zero.dcolscale, from_eight.dcolscale);
  check(from_zero.dbias, from_eight.dbias);
  check(from_zero.dweight2, from_eight.dweight2);
  check(from_zero.dbias2, from_eight.dbias2);
}

// The forms in which residual_out may be residual, and dresidual may be dresidual_out.
class ResidualNormSharedForms : public testing::TestWithParam<Form> {};

TEST_P(ResidualNormSharedForms, InPlaceEqualsOutOfPlace) {
  const Form f = GetParam();
  const Tensors t = random_tensors(f);
  const Outputs apart = forward(f, t), shared = forward(f, t, true);
  EXPECT_EQ(shared.residual_out, apart.residual_out);
  EXPECT_EQ(shared.out, apart.out);
  const Gradients g_apart = backward(f, t, apart), g_shared = backward(f, t, apart, 0, true);
  EXPECT_EQ(g_shared.dresidual, g_apart.dresidual);
  EXPECT_EQ(g_shared.dx, g_apart.dx);
}

TEST_P(ResidualNormForms, SameBitsForAnyThreads) {
  const Form f = GetParam();
  const Tensors t = random_tensors(f);
  expect_same_bits_for_any_threads(f.name, [&] {
    const Outputs o = forward(f, t);
    const Gradients g = backward(f, t, o);
    std::vector<Floats> bits = {o.out, o.rstd, g.dx, g.dweight};
    if (f.colscale) bits.push_back(g.dcolscale);
    return bits;
  });
}

std::vector<Form> forms() {
  constexpr NormKind rms = NormKind::rmsnorm, layer = NormKind::layernorm;
  std::vector<Form> list = {
      {.name = "rmsnorm", .kind = rms, .rows = 7, .C = 10},
      {.name = "rmsnorm_residual", .kind = rms, .rows = 7, .C = 12, .residual = true},
      {.name = "rmsnorm_postnorm", .kind = rms, .rows = 5, .C = 9, .residual = true, .prenorm = false},
      {.name = "rmsnorm_dropout", .kind = rms, .rows = 7, .C = 13, .residual = true, .dropout = 0.3f},
      {.name = "rmsnorm_one_row", .kind = rms, .rows = 1, .C = 1030, .residual = true},
      {.name = "rmsnorm_many_rows", .kind = rms, .rows = 1000, .C = 8, .residual = true},
      {.name = "layernorm", .kind = layer, .rows = 7, .C = 10, .bias = true},
      {.name = "layernorm_no_bias", .kind = layer, .rows = 3, .C = 11, .residual = true},
      {.name = "layernorm_second", .kind = layer, .rows = 4, .C = 15, .residual = true, .bias = true, .second = true},
      {.name = "layernorm_postnorm",
       .kind = layer,
       .rows = 4,
       .C = 14,
       .residual = true,
       .bias = true,
       .prenorm = false,
       .dropout = 0.25f},
      {.name = "layernorm_one_row", .kind = layer, .rows = 1, .C = 8, .bias = true},
      {.name = "layernorm_many_rows", .kind = layer, .rows = 1000, .C = 33, .residual = true, .bias = true},
  };
  for (const NormKind kind : {rms, layer}) {
    for (const bool prenorm : {false, true}) {
      list.push_back({.name = kind == rms
                                  ? (prenorm ? "rmsnorm_everything_prenorm" : "rmsnorm_everything_postnorm")
                                  : (prenorm ? "layernorm_everything_prenorm" : "layernorm_everything_postnorm"),
                      .kind = kind,
                      .rows = 6,
                      .C = 19,
                      .residual = true,
                      .bias = true,
                      .rowscale = true,
                      .colscale = true,
                      .second = true,
                      .prenorm = prenorm,
                      .dropout = 0.2f});
    }
  }
  return list;
}

std::vector<Form> shared_forms() {
  std::vector<Form> list = forms();
  std::erase_if(list, [](const Form& f) { return !f.residual || !f.prenorm; });
  return list;
}

std::string form_name(const testing::TestParamInfo<Form>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(All, ResidualNormForms, testing::ValuesIn(forms()), form_name);
INSTANTIATE_TEST_SUITE_P(All, ResidualNormSharedForms, testing::ValuesIn(shared_forms()), form_name);

TEST(ResidualNorm, ColumnSumsOverManyRows) {
  // dweight and dbias of 1000 rows against sums in double.
  const Form f = {.name = "", .kind = NormKind::layernorm, .rows = 1000, .C = 21, .bias = true};
  const Tensors t = random_tensors(f);
  const Outputs o = forward(f, t);
  const Gradients g = backward(f, t, o);
  Doubles dweight(f.C), dbias(f.C);
  for (std::int64_t e = 0; e < f.rows * f.C; ++e) {
    const double xhat = (static_cast<double>(o.residual_out[e]) - static_cast<double>(o.mean[e / f.C])) *
                        static_cast<double>(o.rstd[e / f.C]);
    dweight[e % f.C] += static_cast<double>(t.dout[e]) * xhat;
    dbias[e % f.C] += static_cast<double>(t.dout[e]);
  }
  expect_close(g.dweight, dweight, "dweight");
  expect_close(g.dbias, dbias, "dbias");
}

TEST(ResidualNorm, VarianceSurvivesALargeMean) {
  // E[h^2] - E[h]^2 in fp32 would be all rounding error here.
  Form f = {.name = "", .kind = NormKind::layernorm, .rows = 2, .C = 64};
  Tensors t = random_tensors(f);
  for (float& value : t.x) value = value + 10000.0f;
  const WideTensors wide = {widen(t.x),    widen(t.residual), widen(t.colscale), widen(t.weight),
                            widen(t.bias), widen(t.weight2),  widen(t.bias2)};
  // The fp32 mean is off by up to 2^-24 * 10000 = 6e-4 of the standard deviation.
  expect_close(forward(f, t).out, naive(f, wide, t.rowscale).out, "out", 6e-4);
}

TEST(ResidualNorm, DropoutKeepsItsShareAndTheMean) {
  const float p = 0.3f;
  const Form f = {.name = "", .kind = NormKind::rmsnorm, .rows = 1000, .C = 257, .dropout = p};
  Tensors t = random_tensors(f);
  std::fill(t.x.begin(), t.x.end(), 1.0f);
  const Outputs o = forward(f, t);
  std::int64_t kept = 0;
  for (const float value : o.residual_out) {
    ASSERT_TRUE(value == 0.0f || value == 1.0f / (1.0f - p));
    kept += value != 0.0f;
  }
  // A binomial count: five standard deviations.
  const double n = static_cast<double>(f.rows * f.C);
  EXPECT_NEAR(static_cast<double>(kept), n * (1 - p), 5 * std::sqrt(n * p * (1 - p)));

  // Backward drops the same elements: without a skip path dx is 0 exactly where the forward pass was.
  t.dresidual_out.assign(t.x.size(), 1.0f);
  t.dout.assign(t.x.size(), 0.0f);
  const Gradients g = backward(f, t, o);
  EXPECT_EQ(g.dx, o.residual_out);
}

TEST(ResidualNorm, DropoutMaskIsAFlatSequenceForAnyWidth) {
  // Element e of the mask does not depend on how the elements are cut into rows.
  Floats flat;
  for (const std::int64_t C : {420, 105, 70, 60, 28, 21, 10, 7, 4, 3, 2, 1}) {
    const Form f = {.name = "", .kind = NormKind::rmsnorm, .rows = 420 / C, .C = C, .dropout = 0.5f};
    Tensors t = random_tensors(f);
    std::fill(t.x.begin(), t.x.end(), 1.0f);
    const Floats mask = forward(f, t).residual_out;
    if (flat.empty()) flat = mask;
    EXPECT_EQ(mask, flat) << "C = " << C;
  }
}

TEST(ResidualNorm, SeedAndOffsetAddressTheMask) {
  const Form f = {.name = "", .kind = NormKind::rmsnorm, .rows = 10, .C = 40, .dropout = 0.5f};
  Tensors t = random_tensors(f);
  const auto mask = [&](std::uint64_t seed, std::uint64_t offset) {
    ResidualNormShape shape = shape_of(f);
    shape.seed = seed, shape.offset = offset;
    Floats h(t.x.size()), out(t.x.size());
    ResidualNormForward io;
    io.x = t.x.data(), io.weight = t.weight.data(), io.residual_out = h.data(), io.out = out.data();
    residual_norm_forward(shape, io);
    for (std::size_t i = 0; i < h.size(); ++i) h[i] = h[i] != 0.0f ? 1.0f : 0.0f;
    return h;
  };
  EXPECT_EQ(mask(1, 5), mask(1, 5));
  EXPECT_NE(mask(1, 5), mask(2, 5));
  const Floats first = mask(1, 5), second = mask(1, 6);  // one counter further: four elements further
  EXPECT_NE(first, second);
  EXPECT_TRUE(std::equal(first.begin() + 4, first.end(), second.begin()));
}

TEST(ResidualNorm, NanReachesItsRowOnly) {
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) {
    const Form f = {.name = "", .kind = kind, .rows = 3, .C = 20, .residual = true};
    Tensors t = random_tensors(f);
    t.x[25] = kNaN;
    const Outputs o = forward(f, t);
    const Gradients g = backward(f, t, o);
    for (std::int64_t e = 0; e < 60; ++e) {
      EXPECT_EQ(std::isnan(o.out[e]), e / 20 == 1) << e;
      EXPECT_EQ(std::isnan(g.dx[e]), e / 20 == 1) << e;
    }
    for (const float value : g.dweight) EXPECT_TRUE(std::isnan(value));
  }
}

// Of one form with both norms: weights that lack 1 give what whole weights give, and a branch may be normalised in place.
TEST(ResidualNorm, AnOffsetIsAddedToBothWeights) {
  const Form form{"two outputs", NormKind::layernorm, 5, 13, true, true, false, false, true};
  Tensors tensors = random_tensors(form);
  for (Floats* weights : {&tensors.weight, &tensors.weight2}) {
    for (float& weight : *weights) weight = std::round(weight * 64) / 64;  // so that 1 is added without rounding
  }
  const Outputs whole = forward(form, tensors);
  const Gradients of_whole = backward(form, tensors, whole);
  for (Floats* weights : {&tensors.weight, &tensors.weight2}) {
    for (float& weight : *weights) weight -= 1;
  }
  const Gradients gradients = backward(form, tensors, whole, 0, false, 1);
  EXPECT_EQ(gradients.dx, of_whole.dx);
  EXPECT_EQ(gradients.dweight, of_whole.dweight);
  EXPECT_EQ(gradients.dweight2, of_whole.dweight2);
  Floats out(tensors.x.size()), out2 = out, h = tensors.residual;
  ResidualNormShape shape = shape_of(form);
  shape.weight_offset = 1;
  ResidualNormForward io;
  io.x = tensors.x.data();
  io.residual = io.residual_out = h.data();
  io.weight = tensors.weight.data(), io.weight2 = tensors.weight2.data();
  io.bias = tensors.bias.data(), io.bias2 = tensors.bias2.data();
  io.out = out.data(), io.out2 = out2.data();
  residual_norm_forward(shape, io);
  EXPECT_EQ(out, whole.out);
  EXPECT_EQ(out2, whole.out2);

  Floats branch = tensors.x;
  ResidualNormForward alone;
  alone.x = tensors.x.data();
  alone.weight = tensors.weight.data();
  alone.out = out.data();
  residual_norm_forward(shape, alone);
  alone.x = alone.out = branch.data();
  residual_norm_forward(shape, alone);
  EXPECT_EQ(branch, out);

  Floats gradient = tensors.dout, dx(gradient.size());
  ResidualNormBackward back;
  back.residual_out = tensors.x.data();
  back.weight = tensors.weight.data();
  back.mean = whole.mean.data(), back.rstd = whole.rstd.data();
  back.dout = gradient.data();
  back.dx = dx.data();
  residual_norm_backward(shape, back);
  back.dx = gradient.data();
  residual_norm_backward(shape, back);
  EXPECT_EQ(gradient, dx);
}

}  // namespace
}  // namespace weft::cpu
