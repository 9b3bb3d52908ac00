// Fused dropout + residual + norm on the GPU in all its forms, against the CPU.

#include "llmc/cuda/op/norm/residual_norm.h"

#include <optional>
#include <utility>

#include "llmc/cpu/residual_norm.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

// One form of the operator: which of the optional operands are there.
struct Form {
  NormKind kind = NormKind::rmsnorm;
  std::int64_t rows = 0, C = 0;
  bool residual = true, bias = false, rowscale = false, colscale = false, second = false;
  bool prenorm = true;  // keeps h; else it is recomputed in backward
  float dropout = 0;
  std::optional<int> shared_limit = {};  // that of another device
  float offset = 0;                      // of weights

  int shared_memory() const { return shared_limit.value_or(norm_shared_memory()); }
};

std::string describe(const Form& f) {
  std::string text = f.kind == NormKind::layernorm ? "layernorm" : "rmsnorm";
  text += " " + std::to_string(f.rows) + " x " + std::to_string(f.C);
  for (const auto& [on, name] : {std::pair{f.residual, " residual"},
                                 {f.bias, " bias"},
                                 {f.rowscale, " rowscale"},
                                 {f.colscale, " colscale"},
                                 {f.second, " second"},
                                 {f.prenorm, " prenorm"},
                                 {f.dropout > 0, " dropout"},
                                 {f.offset != 0, " offset"}})
    if (on) text += name;
  if (f.shared_limit) text += ", " + std::to_string(*f.shared_limit) + " bytes of shared memory";
  return text;
}

ResidualNormShape shape_of(const Form& f) {
  ResidualNormShape shape;
  shape.rows = f.rows;
  shape.C = f.C;
  shape.kind = f.kind;
  shape.eps = 1e-3f;
  shape.dropout = f.dropout;
  shape.weight_offset = f.offset;
  shape.seed = 42;
  shape.offset = 1000;
  return shape;
}

constexpr float kBefore = 0.25f;  // what the column gradients hold before: = in place of += shows

// Operands on both sides, null where the form has none.
template <typename T>
struct Operand {
  Floats host;
  std::optional<DeviceBuffer<T>> device;

  void set(Floats values) {
    host = std::move(values);
    device.emplace(stored<T>(host));
  }
  const float* cpu() const { return device ? host.data() : nullptr; }
  T* gpu() const { return device ? device->data() : nullptr; }
};

template <typename T, typename R>
struct Inputs {
  Operand<T> x, weight, bias, weight2, bias2, colscale, dout, dout2;
  Operand<R> residual, dresidual_out;
  Operand<float> rowscale;

  explicit Inputs(const Form& f) {
    const std::int64_t n = f.rows * f.C;
    x.set(random_stored<T>(n, 1));
    weight.set(random_stored<T>(f.C, 5, 0.3f, 1 - f.offset));
    dout.set(random_stored<T>(n, 9));
    if (f.residual) residual.set(random_stored<R>(n, 2, 2, 0.5f));
    if (f.bias) bias.set(random_stored<T>(f.C, 6));
    if (f.second) weight2.set(random_stored<T>(f.C, 7, 0.3f, 1));
    if (f.second) dout2.set(random_stored<T>(n, 10));
    if (f.second && f.bias) bias2.set(random_stored<T>(f.C, 8));
    if (f.colscale) colscale.set(random_stored<T>(f.C, 4));
    if (f.rowscale) rowscale.set(random_floats(f.rows, 3));
    if (f.prenorm) dresidual_out.set(random_stored<R>(n, 11));
  }
};

template <typename T, typename R>
struct Outputs {
  DeviceBuffer<R> h;
  DeviceBuffer<T> out, out2;
  DeviceBuffer<float> mean, rstd;

  explicit Outputs(const Form& f)
      : h(f.rows * f.C), out(f.rows * f.C), out2(f.rows * f.C), mean(f.rows), rstd(f.rows) {}
};

template <typename T, typename R>
void gpu_forward(const Form& f, const Inputs<T, R>& in, Outputs<T, R>& o, bool in_place = false) {
  ResidualNormForward<T, R> io;
  io.x = in.x.gpu();
  io.residual = in.residual.gpu();
  if (in_place) {
    o.h.upload(stored<R>(in.residual.host));
    io.residual = o.h.data();
  }
  io.rowscale = in.rowscale.gpu();
  io.colscale = in.colscale.gpu();
  io.weight = in.weight.gpu();
  io.bias = in.bias.gpu();
  io.weight2 = in.weight2.gpu();
  io.bias2 = in.bias2.gpu();
  io.residual_out = f.prenorm ? o.h.data() : nullptr;
  io.out = o.out.data();
  io.out2 = f.second ? o.out2.data() : nullptr;
  io.mean = f.kind == NormKind::layernorm ? o.mean.data() : nullptr;
  io.rstd = o.rstd.data();
  residual_norm_forward(shape_of(f), io, nullptr, f.shared_memory());
}

// The CPU's h, from the same operands.
template <typename T, typename R>
Floats cpu_stream(const Form& f, const Inputs<T, R>& in) {
  const Floats ones(static_cast<std::size_t>(f.C), 1.0f);
  Floats h(static_cast<std::size_t>(f.rows * f.C)), out(h.size());
  cpu::ResidualNormForward io;
  io.x = in.x.cpu();
  io.residual = in.residual.cpu();
  io.rowscale = in.rowscale.cpu();
  io.colscale = in.colscale.cpu();
  io.weight = ones.data();
  io.residual_out = h.data();
  io.out = out.data();
  cpu::residual_norm_forward(shape_of(f), io);
  return h;
}

struct HostOutputs {
  Floats out, out2, mean, rstd;
};
// The CPU's outputs for a given h.
template <typename T, typename R>
HostOutputs cpu_outputs(const Form& f, const Inputs<T, R>& in, const Floats& h) {
  const auto rows = static_cast<std::size_t>(f.rows);
  HostOutputs o{Floats(h.size()), Floats(h.size()), Floats(rows), Floats(rows)};
  cpu::ResidualNormForward io;
  io.x = h.data();
  io.weight = in.weight.cpu();
  io.bias = in.bias.cpu();
  io.weight2 = in.weight2.cpu();
  io.bias2 = in.bias2.cpu();
  io.out = o.out.data();
  io.out2 = f.second ? o.out2.data() : nullptr;
  io.mean = o.mean.data();
  io.rstd = o.rstd.data();
  Form plain = f;
  plain.dropout = 0;
  cpu::residual_norm_forward(shape_of(plain), io);
  return o;
}

template <typename T, typename R>
struct Gradients {
  DeviceBuffer<T> dx;
  DeviceBuffer<R> dresidual;
  std::vector<DeviceBuffer<float>> columns;  // dweight, dbias, dweight2, dbias2, dcolscale

  explicit Gradients(const Form& f) : dx(f.rows * f.C), dresidual(f.rows * f.C) {
    for (int k = 0; k < 5; ++k) columns.emplace_back(Floats(static_cast<std::size_t>(f.C), kBefore));
  }
};

// All gradients that the form has, on either device.
template <typename Backward, typename Gradients>
void ask_for_gradients(Backward& io, const Form& f, Gradients& g) {
  io.dx = g.dx.data();
  io.dresidual = g.dresidual.data();
  io.dweight = g.columns[0].data();
  io.dbias = f.bias ? g.columns[1].data() : nullptr;
  io.dweight2 = f.second ? g.columns[2].data() : nullptr;
  io.dbias2 = f.second && f.bias ? g.columns[3].data() : nullptr;
  io.dcolscale = f.colscale ? g.columns[4].data() : nullptr;
}

template <typename T, typename R>
void gpu_backward(const Form& f, const Inputs<T, R>& in, const Outputs<T, R>& o, Gradients<T, R>& g, bool keep_h,
                  bool in_place = false) {
  const DeviceBuffer<char> workspace(residual_norm_backward_workspace(f.C, 5));
  ResidualNormBackward<T, R> io;
  io.dout = in.dout.gpu();
  if (in_place) {
    g.dx.upload(stored<T>(in.dout.host));
    io.dout = g.dx.data();
  }
  io.dout2 = in.dout2.gpu();
  io.dresidual_out = in.dresidual_out.gpu();
  if (in_place && f.prenorm) {
    g.dresidual.upload(stored<R>(in.dresidual_out.host));
    io.dresidual_out = g.dresidual.data();
  }
  io.residual_out = keep_h ? o.h.data() : nullptr;
  io.x = !keep_h || f.colscale ? in.x.gpu() : nullptr;
  io.residual = keep_h ? nullptr : in.residual.gpu();
  io.rowscale = in.rowscale.gpu();
  io.colscale = in.colscale.gpu();
  io.weight = in.weight.gpu();
  io.weight2 = in.weight2.gpu();
  io.mean = f.kind == NormKind::layernorm ? o.mean.data() : nullptr;
  io.rstd = o.rstd.data();
  ask_for_gradients(io, f, g);
  io.workspace = workspace.data();
  residual_norm_backward(shape_of(f), io, nullptr, f.shared_memory());
  check(cudaStreamSynchronize(nullptr), "residual_norm_backward");
}

struct HostGradients {
  Floats dx, dresidual;
  std::vector<Floats> columns;
};
template <typename T, typename R>
HostGradients cpu_backward(const Form& f, const Inputs<T, R>& in, const Floats& h, const HostOutputs& o) {
  const auto C = static_cast<std::size_t>(f.C);
  HostGradients g{Floats(h.size()), Floats(h.size()), std::vector<Floats>(5, Floats(C, kBefore))};
  cpu::ResidualNormBackward io;
  io.dout = in.dout.cpu();
  io.dout2 = in.dout2.cpu();
  io.dresidual_out = in.dresidual_out.cpu();
  io.residual_out = h.data();
  io.x = in.x.cpu();
  io.rowscale = in.rowscale.cpu();
  io.colscale = in.colscale.cpu();
  io.weight = in.weight.cpu();
  io.weight2 = in.weight2.cpu();
  io.mean = o.mean.data();
  io.rstd = o.rstd.data();
  ask_for_gradients(io, f, g);
  cpu::residual_norm_backward(shape_of(f), io);
  return g;
}

template <typename T, typename R>
void expect_same_gradients(const Gradients<T, R>& a, const Gradients<T, R>& b) {
  expect_same_bits(a.dx, b.dx, "dx");
  expect_same_bits(a.dresidual, b.dresidual, "dresidual");
  for (int k = 0; k < 5; ++k) expect_same_bits(a.columns[k], b.columns[k], "column gradient " + std::to_string(k));
}

template <typename T, typename R>
void check_form(const Form& f, const Inputs<T, R>& in) {
  SCOPED_TRACE(describe(f) + " " + type_name<T>() + "/" + type_name<R>());
  Outputs<T, R> o(f);
  gpu_forward(f, in, o);
  const Floats stream = cpu_stream(f, in);
  if (f.prenorm) expect_near<R>(on_host(o.h), stream, "h", 1e-6);
  // What follows is compared on the h that the GPU rounded to R: its own, or the CPU's rounded alike.
  const Floats h = f.prenorm ? on_host(o.h) : widened(stored<R>(stream));
  const HostOutputs want = cpu_outputs(f, in, h);
  // Where the GPU keeps no h to read back, a tie may round the other way: one unit of h's roundoff.
  const double doubt = kArithmeticTolerance + (f.prenorm ? 0 : 2 * unit_roundoff<R>());
  expect_near<T>(on_host(o.out), want.out, "out", doubt);
  if (f.second) expect_near<T>(on_host(o.out2), want.out2, "out2", doubt);
  if (f.kind == NormKind::layernorm) expect_near<float>(on_host(o.mean), want.mean, "mean", doubt);
  expect_near<float>(on_host(o.rstd), want.rstd, "rstd", doubt);

  Gradients<T, R> g(f);
  gpu_backward(f, in, o, g, f.prenorm);
  const HostGradients wanted = cpu_backward(f, in, h, want);
  expect_near<T>(on_host(g.dx), wanted.dx, "dx", doubt);
  expect_near<R>(on_host(g.dresidual), wanted.dresidual, "dresidual", doubt);
  const char* const names[] = {"dweight", "dbias", "dweight2", "dbias2", "dcolscale"};
  for (int k = 0; k < 5; ++k) expect_near<float>(on_host(g.columns[k]), wanted.columns[k], names[k], doubt);

  Gradients<T, R> again(f), in_place(f);
  gpu_backward(f, in, o, again, f.prenorm);
  gpu_backward(f, in, o, in_place, f.prenorm, true);
  expect_same_gradients(g, again);
  expect_same_gradients(g, in_place);
}
template <typename T, typename R>
void check_form(const Form& f) {
  check_form(f, Inputs<T, R>(f));
}

template <typename T, typename R>
void check_types() {
  const NormKind kinds[] = {NormKind::rmsnorm, NormKind::layernorm};
  for (const NormKind kind : kinds) {
    const bool bias = kind == NormKind::layernorm;
    for (const std::int64_t C :
         {8, 24, 256, 264, 512, 768, 1024, 1032, 2048, 2560, 3072, 4096, 4104, 8192, 8200, 16384}) {
      for (const std::int64_t rows : {1, 7}) check_form<T, R>({kind, rows, C, true, bias});
    }
    for (const std::int64_t C : {64, 1024, 2048}) check_form<T, R>({kind, 1000, C, true, bias});
    check_form<T, R>({kind, 9, 768, false, bias});
    check_form<T, R>({kind, 300, 2560, true, bias, false, false, true});
    for (const std::int64_t C : {8, 520, 1032, 2560, 4104, 16384}) {
      for (const std::int64_t rows : {1, 7}) {
        check_form<T, R>({kind, rows, C, true, bias, true, true, true, true, 0.3f});
        check_form<T, R>({kind, rows, C, true, bias, true, true, true, false, 0.3f});
      }
    }
    check_form<T, R>({kind, 1000, 264, true, bias, false, false, false, true, 0.1f});
    // 1 + weight: rows of each spread and of exact widths, more rows than blocks, with dropout, without a branch, two outputs
    for (const std::int64_t C : {8, 264, 512, 640, 768, 1024, 1152, 2048, 2560, 3840, 5376, 8192, 16384}) {
      Form f{kind, 7, C, true, bias};
      f.offset = 1;
      check_form<T, R>(f);
      f.dropout = 0.3f;
      check_form<T, R>(f);
    }
    for (Form f : {Form{kind, 1000, 1152, true, bias}, Form{kind, 1000, 264, false, bias},
                   Form{kind, 9, 520, true, bias, false, false, true}, Form{kind, 5, 264, true, bias, true, true}}) {
      f.offset = 1;
      check_form<T, R>(f);
    }
    check_form<T, R>({kind, 1000, 1032, false, bias, true, true, true, false, 0.1f});
  }
}

TEST(ResidualNorm, Fp32) {
  check_types<float, float>();
}
TEST(ResidualNorm, Bf16) {
  check_types<bf16, bf16>();
}
TEST(ResidualNorm, Bf16WithFp32Stream) {
  check_types<bf16, float>();
}
TEST(ResidualNorm, Fp16) {
  check_types<fp16, fp16>();
}
TEST(ResidualNorm, Fp16WithFp32Stream) {
  check_types<fp16, float>();
}

// What devices with less shared memory run: rows that are not copied ahead, whole rows by the kernels with bounds,
// column sums that grow in the workspace. 99 KB is what compute capability 8.6, 8.9 and 12.0 have.
template <typename T, typename R>
void check_small_shared_memory() {
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) {
    for (const int limit : {98 * 1024, 20'000, 0}) {
      for (const std::int64_t C : {768, 1024, 2048, 3072, 4096, 8192, 12'296, 16'384}) {
        Form f{kind, 5, C, true, kind == NormKind::layernorm};
        f.shared_limit = limit;
        check_form<T, R>(f);
        f.offset = 1;
        check_form<T, R>(f);
      }
    }
  }
}
TEST(ResidualNorm, SmallSharedMemory) {
  check_small_shared_memory<float, float>();
  check_small_shared_memory<bf16, bf16>();
  check_small_shared_memory<bf16, float>();
}

template <typename T, typename R>
void check_in_place_forward(const Form& f) {
  const Inputs<T, R> in(f);
  Outputs<T, R> apart(f), in_place(f);
  gpu_forward(f, in, apart);
  gpu_forward(f, in, in_place, true);
  expect_same_bits(apart.h, in_place.h, "h");
  expect_same_bits(apart.out, in_place.out, "out");
  expect_same_bits(apart.rstd, in_place.rstd, "rstd");
}

TEST(ResidualNorm, ForwardInPlaceGivesTheSameBits) {
  check_in_place_forward<bf16, bf16>({NormKind::rmsnorm, 33, 2048});
  check_in_place_forward<bf16, float>({NormKind::layernorm, 33, 520, true, true, true, true, true, true, 0.2f});
}

// Operands of backward for the norm of a stream with a weight and nothing else. The caller names the stream and the gradients.
template <typename T, typename R>
ResidualNormBackward<T, R> backward_of_stream(const Inputs<T, R>& in, const Outputs<T, R>& o,
                                              const DeviceBuffer<char>& workspace) {
  ResidualNormBackward<T, R> io;
  io.dout = in.dout.gpu();
  io.dresidual_out = in.dresidual_out.gpu();
  io.weight = in.weight.gpu();
  io.mean = o.mean.data();
  io.rstd = o.rstd.data();
  io.workspace = workspace.data();
  return io;
}

// The norm of the stream that a call of form `f` stored gives the bits of that call: recomputation in backward may drop the
// output. x null names the stream without a branch.
template <typename T, typename R>
void check_norm_of_stored_stream(const Form& f) {
  SCOPED_TRACE(describe(f) + " " + type_name<T>() + "/" + type_name<R>());
  const Inputs<T, R> in(f);
  Outputs<T, R> fused(f), alone(f);
  gpu_forward(f, in, fused);
  ResidualNormShape shape = shape_of(f);
  shape.dropout = 0;
  ResidualNormForward<T, R> io;
  io.residual = fused.h.data();
  io.weight = in.weight.gpu();
  io.bias = in.bias.gpu();
  io.out = alone.out.data();
  if (f.kind == NormKind::layernorm) io.mean = alone.mean.data();
  io.rstd = alone.rstd.data();
  residual_norm_forward(shape, io, nullptr, f.shared_memory());
  expect_same_bits(fused.out, alone.out, "out");
  expect_same_bits(fused.mean, alone.mean, "mean");
  expect_same_bits(fused.rstd, alone.rstd, "rstd");
}

// Every spread of a row over threads, exact widths and others.
template <typename T, typename R>
void check_norms_of_stored_streams() {
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) {
    const bool bias = kind == NormKind::layernorm;
    for (const std::int64_t C : {8,    24,   64,   136,  256,  264,  512,  520,  768,  1024,  1032,
                                 2048, 2056, 2560, 2568, 3072, 4096, 4104, 8192, 8200, 16'384}) {
      Form f{kind, 9, C, true, bias};
      check_norm_of_stored_stream<T, R>(f);
      f.dropout = 0.3f;
      check_norm_of_stored_stream<T, R>(f);
      f.shared_limit = 20'000;
      check_norm_of_stored_stream<T, R>(f);
      check_norm_of_stored_stream<T, R>({kind, 9, C, true, bias, true, true, true});
      check_norm_of_stored_stream<T, R>({kind, 150, C, true, bias});  // more rows than multiprocessors
      Form offset{kind, 9, C, true, bias};
      offset.offset = 1;
      check_norm_of_stored_stream<T, R>(offset);
      offset.dropout = 0.3f;
      check_norm_of_stored_stream<T, R>(offset);
    }
    Form many{kind, 5001, 1024, true, bias};
    many.dropout = 0.1f;
    check_norm_of_stored_stream<T, R>(many);
  }
}
TEST(ResidualNorm, NormOfAStoredStreamFp32) {
  check_norms_of_stored_streams<float, float>();
}
TEST(ResidualNorm, NormOfAStoredStreamBf16) {
  check_norms_of_stored_streams<bf16, bf16>();
  check_norms_of_stored_streams<bf16, float>();
}
TEST(ResidualNorm, NormOfAStoredStreamFp16) {
  check_norms_of_stored_streams<fp16, fp16>();
  check_norms_of_stored_streams<fp16, float>();
}

// The norms of a stream in inference: a row alone gives the bits of that row among many, also where the stream holds -0.
template <typename T>
void check_rows_of_their_own(NormKind kind, std::int64_t C) {
  constexpr std::int64_t kRows = 150;
  SCOPED_TRACE(std::to_string(C) + " columns, " + type_name<T>());
  Floats stream = random_floats(kRows * C, 1);
  for (std::size_t i = 0; i < stream.size(); i += 5) stream[i] = -0.0f;
  const DeviceBuffer<float> residual(stream);
  const DeviceBuffer<T> weight(stored<T>(random_floats(C, 2))), bias(stored<T>(random_floats(C, 3)));
  const bool layernorm = kind == NormKind::layernorm;
  const auto norms = [&](std::int64_t first, std::int64_t rows) {
    DeviceBuffer<T> out(rows * C), out2(rows * C);
    ResidualNormShape shape;
    shape.rows = rows, shape.C = C, shape.kind = kind, shape.eps = 1e-5f;
    ResidualNormForward<T, float> io;
    io.residual = residual.data() + first * C;
    io.weight = weight.data(), io.out = out.data();
    if (layernorm) io.bias = bias.data(), io.weight2 = bias.data(), io.bias2 = weight.data(), io.out2 = out2.data();
    residual_norm_forward(shape, io, nullptr);
    std::vector<T> values = out.download();
    if (layernorm) {
      const std::vector<T> second = out2.download();
      values.insert(values.end(), second.begin(), second.end());
    }
    return values;
  };
  const std::vector<T> all = norms(0, kRows);
  for (const std::int64_t row : {0, 77, 149}) {
    const std::vector<T> alone = norms(row, 1);
    for (std::int64_t output = 0; output < (layernorm ? 2 : 1); ++output) {
      EXPECT_EQ(std::memcmp(alone.data() + output * C, all.data() + (output * kRows + row) * C,
                            static_cast<std::size_t>(C) * sizeof(T)),
                0)
          << "row " << row << ", output " << output;
    }
  }
}
TEST(ResidualNorm, ARowsBitsAreItsOwn) {
  for (const std::int64_t C : {264, 768, 1024, 2560, 3072, 4096, 16'384}) {
    for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) {
      check_rows_of_their_own<float>(kind, C);
      check_rows_of_their_own<bf16>(kind, C);
      check_rows_of_their_own<fp16>(kind, C);
    }
  }
}

// Backward knows the stream as residual_out or as residual alone.
template <typename T, typename R>
void check_recomputation(std::int64_t rows, std::int64_t C) {
  const Form f{NormKind::layernorm, rows, C, true, true};
  check_norm_of_stored_stream<T, R>(f);
  const Inputs<T, R> in(f);
  Outputs<T, R> fused(f);
  gpu_forward(f, in, fused);
  Gradients<T, R> kept(f), recomputed(f);
  gpu_backward(f, in, fused, kept, true);
  const DeviceBuffer<char> workspace(residual_norm_backward_workspace(C, 1));
  ResidualNormBackward<T, R> back = backward_of_stream(in, fused, workspace);
  back.residual = fused.h.data();
  back.dresidual = recomputed.dresidual.data();
  back.dweight = recomputed.columns[0].data();
  residual_norm_backward(shape_of(f), back, nullptr);
  expect_same_bits(kept.dresidual, recomputed.dresidual, "dresidual");
  expect_same_bits(kept.columns[0], recomputed.columns[0], "dweight");
}

TEST(ResidualNorm, RecomputedFromTheStreamItIsTheSame) {
  for (const std::int64_t C : {64, 768, 1024, 2048, 3072, 8192}) {
    check_recomputation<bf16, bf16>(37, C);
    check_recomputation<bf16, float>(37, C);
    check_recomputation<float, float>(37, C);
  }
  // More rows than the GPU works on at once: each thread goes on to rows that were copied ahead.
  for (const auto& [rows, C] : {std::pair{7001, 768}, {7001, 1024}, {2503, 2048}, {1501, 4096}, {401, 16'384}}) {
    check_recomputation<bf16, bf16>(rows, C);
  }
}

// A row whose statistics are those of a single column, and a gradient that comes from that column alone: a column left out of
// a sum shows, which the rounding of a 16-bit result hides where all columns matter alike.
template <typename T, typename R>
void check_every_column(NormKind kind, std::int64_t C, float dropout = 0) {
  const std::vector<std::int64_t> columns = telling_columns(C);
  Form f{kind, static_cast<std::int64_t>(columns.size()), C};
  f.dropout = dropout;
  Inputs<T, R> in(f);
  Floats residual(static_cast<std::size_t>(f.rows * C), 0.0f), dout = residual;
  for (std::size_t row = 0; row < columns.size(); ++row) {
    const std::size_t at = row * static_cast<std::size_t>(C) + static_cast<std::size_t>(columns[row]);
    residual[at] = 96;
    dout[at] = 1;
  }
  in.x.set(Floats(residual.size(), 0.0f));
  in.residual.set(residual);
  in.dout.set(dout);
  check_form(f, in);

  // Random streams, the gradient still from one column: its mean with xhat reaches all others.
  in.residual.set(random_stored<R>(f.rows * C, 21));
  in.dresidual_out.set(Floats(residual.size(), 0.0f));
  check_form(f, in);

  for (std::size_t row = 0; row < columns.size(); ++row)
    residual[row * static_cast<std::size_t>(C) + static_cast<std::size_t>(columns[row])] = NAN;
  in.residual.set(residual);
  Outputs<T, R> o(f);
  gpu_forward(f, in, o);
  const Floats rstd = on_host(o.rstd), out = on_host(o.out);
  for (std::size_t row = 0; row < columns.size(); ++row) {
    EXPECT_TRUE(std::isnan(rstd[row])) << "NaN in column " << columns[row] << " of " << C;
    EXPECT_TRUE(std::isnan(out[row * static_cast<std::size_t>(C)])) << "NaN in column " << columns[row] << " of " << C;
  }
}
TEST(ResidualNorm, EveryColumnCounts) {
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) {
    for (const std::int64_t C : {8, 264, 768, 1024, 2048, 2560, 3072, 4096, 8192, 16'384}) {
      check_every_column<bf16, bf16>(kind, C);
    }
    for (const std::int64_t C : {8, 264, 1032, 2560}) {
      check_every_column<bf16, float>(kind, C);
      check_every_column<fp16, fp16>(kind, C);
      check_every_column<float, float>(kind, C);
      check_every_column<float, float>(kind, C, 0.2f);
      check_every_column<bf16, bf16>(kind, C, 0.2f);
    }
  }
}

TEST(ResidualNorm, DropoutKeepsWhatTheCpuKeeps) {
  for (const std::int64_t C : {8, 40, 1024, 4104}) {
    Form f{NormKind::rmsnorm, 51, C, false};
    f.dropout = 0.4f;
    Inputs<float, float> in(f);
    in.x.set(Floats(static_cast<std::size_t>(f.rows * C), 1.0f));
    Outputs<float, float> o(f);
    gpu_forward(f, in, o);
    EXPECT_EQ(on_host(o.h), cpu_stream(f, in)) << C;
  }
}

// More rows than the GPU works on at once: each thread goes on to rows that were copied ahead.
TEST(ResidualNorm, ManyRows) {
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) {
    for (const auto& [rows, C] : {std::pair{7001, 768},
                                  {7001, 1024},
                                  {2603, 2048},
                                  {2001, 3072},
                                  {1501, 4096},
                                  {1301, 8192},
                                  {401, 16384},
                                  {11'001, 520}}) {
      check_form<bf16, bf16>({kind, rows, C, true, kind == NormKind::layernorm});
    }
    // With everything else that a row may have, and with two outputs and nothing else.
    const bool bias = kind == NormKind::layernorm;
    check_form<bf16, bf16>({kind, 2603, 1032, true, bias, true, true, true, true, 0.3f});
    check_form<bf16, float>({kind, 2603, 1032, true, bias, false, false, true});
  }
}

// Each gradient alone has the bits that it has beside the others. Without dweight another kernel computes the rest.
TEST(ResidualNorm, AnyOneOfTheGradients) {
  for (const std::int64_t C : {520, 1024, 2048, 4096}) {
    const Form f{NormKind::rmsnorm, 700, C, true};
    const Inputs<bf16, bf16> in(f);
    Outputs<bf16, bf16> o(f);
    gpu_forward(f, in, o);
    Gradients<bf16, bf16> all(f), alone(f);
    gpu_backward(f, in, o, all, true);
    const DeviceBuffer<char> workspace(residual_norm_backward_workspace(C, 1));
    ResidualNormBackward<bf16, bf16> io = backward_of_stream(in, o, workspace);
    io.residual_out = o.h.data();
    const auto run = [&](bf16* dx, bf16* dresidual, float* dweight) {
      io.dx = dx;
      io.dresidual = dresidual;
      io.dweight = dweight;
      residual_norm_backward(shape_of(f), io, nullptr);
    };
    run(alone.dx.data(), nullptr, alone.columns[0].data());
    expect_same_bits(all.dx, alone.dx, "dx");
    expect_same_bits(all.columns[0], alone.columns[0], "dweight");
    run(nullptr, alone.dresidual.data(), alone.columns[1].data());
    expect_same_bits(all.dresidual, alone.dresidual, "dresidual");
    expect_same_bits(all.dresidual, alone.dx, "dx and dresidual are equal here");
    const Gradients<bf16, bf16> no_weight(f);
    run(no_weight.dx.data(), no_weight.dresidual.data(), nullptr);
    // Two roundings to bf16 may fall on either side: one unit of an element, two roundoffs.
    expect_near<bf16>(on_host(no_weight.dx), on_host(all.dx), "dx", 2 * unit_roundoff<bf16>());
    expect_same_bits(no_weight.dx, no_weight.dresidual, "dx and dresidual without dweight");
  }
}

TEST(ResidualNorm, RefusesWidthsItCannotHold) {
  for (const std::int64_t C : {0, 12, 16392}) {
    ResidualNormShape shape;
    shape.rows = 1;
    shape.C = C;
    EXPECT_THROW((residual_norm_forward<float, float>(shape, {}, nullptr)), Error) << C;
    EXPECT_THROW((residual_norm_backward<float, float>(shape, {}, nullptr)), Error) << C;
  }
}

}  // namespace
}  // namespace weft::cuda
