// --precision fp8 on the GPU: rounded operands bit for bit against the CPU, GEMMs on them, and the whole model against the
// reference that rounds in the same places.
#include "llmc/cuda/op/fp8/fp8.h"

#include <bit>
#include <cmath>
#include <random>
#include <set>
#include <string>

#include "llmc/cpu/adamw.h"
#include "llmc/cpu/fp8.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/cpu/training.h"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/compare.h"
#include "llmc/model/presets.h"
#include "test/cpp/golden_cases.h"
#include "test/cpp/test_files.h"
#include "test/cpp/whole_model_checks.h"
#include "test/gpu/fp8_tools.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;
Codes transpose(const Codes& codes, std::int64_t rows, std::int64_t columns) {
  Codes result(codes.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      result[static_cast<std::size_t>(c * rows + r)] = codes[static_cast<std::size_t>(r * columns + c)];
    }
  }
  return result;
}

constexpr std::pair<std::int64_t, std::int64_t> kSizes[] = {{16, 16}, {144, 80}, {128, 64}, {272, 1040}};

TEST(CudaFp8, CodesAndCountersAreThoseOfTheCpu) {
  const Stream stream;
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    for (const auto& [N, C] : kSizes) {
      for (const int exponent : {-3, 6}) {
        SCOPED_TRACE(std::to_string(N) + " x " + std::to_string(C) + ", 2^" + std::to_string(exponent));
        Floats x = random_stored<bf16>(N * C, 3, 4.0f);
        const std::size_t last = x.size() - 1;
        x[0] = 0.0f;
        x[1] = -0.0f;
        x[5] = std::bit_cast<float>(0x7F7F0000u);  // the largest of bf16
        x[last] = -std::ldexp(1.0f, -126);
        x[last - 1] = fp8_largest(format) / scale_of(exponent);
        Fp8Counters counters;
        Floats unused(x.size());
        cpu::round_fp8(unused.data(), x.data(), N * C, format, exponent, &counters);
        Codes want(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) {
          want[i] = f32_to_fp8(std::clamp(x[i] * scale_of(exponent), -1e30f, 1e30f), format);
        }
        const DeviceBuffer<bf16> source = on_device<bf16>(x);
        const Written to(N * C, exponent);
        quantize_fp8(format, to.target(), source.data(), N, C, stream);
        stream.synchronize("test");
        EXPECT_EQ(to.codes.download(), want);
        EXPECT_EQ(to.transposed.download(), transpose(want, N, C));
        EXPECT_EQ(to.counters.download()[0], counters);

        // One layout alone gives the same codes; without any the counters get amax alone.
        const Written one(N * C, exponent);
        quantize_fp8(format, {nullptr, one.transposed.data(), one.scale.data(), nullptr}, source.data(), N, C, stream);
        quantize_fp8(format, {nullptr, nullptr, nullptr, one.counters.data()}, source.data(), N, C, stream);
        stream.synchronize("test");
        EXPECT_EQ(one.transposed.download(), to.transposed.download());
        EXPECT_EQ(one.counters.download()[0], (Fp8Counters{0, 0, counters.amax_bits, 0}));
        EXPECT_EQ(one.codes.download(), Codes(x.size(), 0xFF)) << "not wanted, not written";
      }
    }
  }
}

TEST(CudaFp8, WhatIsNotFiniteStaysSo) {
  const Stream stream;
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    Floats x(256, 1.0f);
    x[3] = INFINITY;
    x[100] = -INFINITY;
    x[200] = NAN;
    const DeviceBuffer<bf16> source = on_device<bf16>(x);
    const Written to(256, 0);
    quantize_fp8(format, to.target(), source.data(), 16, 16, stream);
    stream.synchronize("test");
    const Codes codes = to.codes.download();
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(std::isnan(fp8_to_f32(codes[i], format)), !std::isfinite(x[i])) << i;
    }
    EXPECT_GT(to.counters.download()[0].amax_bits, 0x7F800000u) << "a NaN is the largest";
  }
}

TEST(CudaFp8, TransposedCodesAreTheCodes) {
  const Stream stream;
  for (const auto& [N, C] : kSizes) {
    Codes codes(static_cast<std::size_t>(N * C));
    std::mt19937 generator(11);
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(generator());
    const DeviceBuffer<std::uint8_t> source(codes), transposed(codes.size() + 1);
    transpose_fp8(transposed.data(), source.data(), N, C, stream);
    stream.synchronize("test");
    Codes want = transpose(codes, N, C);
    want.push_back(0xFF);  // nothing behind the matrix is written
    EXPECT_EQ(transposed.download(), want) << N << " x " << C;
  }
}

// ---- norms that write codes -----------------------------------------------------------------------------------------

struct NormCase {
  NormKind kind;
  std::int64_t rows, C;
  bool branch = true;  // x is added to the stream, which is stored
  float dropout = 0;
  int shared_limit = norm_shared_memory();
  bool finite = true;
};

// The norm that writes codes against the norm in bf16 with quantize_fp8() behind it: codes, counters, and what else the norm
// stores, bit for bit. One column of weights saturates, one is flushed.
void expect_the_codes_of_the_pass(const NormCase& c) {
  SCOPED_TRACE(std::string(c.kind == NormKind::layernorm ? "layernorm " : "rmsnorm ") + std::to_string(c.rows) + " x " +
               std::to_string(c.C) + (c.branch ? ", branch" : "") + ", dropout " + std::to_string(c.dropout) + ", " +
               std::to_string(c.shared_limit) + " bytes of shared memory" + (c.finite ? "" : ", not finite"));
  const std::int64_t n = c.rows * c.C;
  ResidualNormShape shape;
  shape.rows = c.rows;
  shape.C = c.C;
  shape.kind = c.kind;
  shape.eps = 1e-3f;
  shape.dropout = c.dropout;
  shape.seed = 42;
  Floats weights = random_stored<bf16>(c.C, 5, 0.3f, 1.0f), biases = random_stored<bf16>(c.C, 6);
  weights[static_cast<std::size_t>(c.C) - 1] = 1e6f;
  weights[static_cast<std::size_t>(c.C) / 2] = 1e-6f;
  biases[static_cast<std::size_t>(c.C) / 2] = 0.0f;
  Floats stream_in = random_stored<bf16>(n, 2, 2.0f, 0.5f);
  if (!c.finite) {
    weights[1] = INFINITY;
    stream_in[static_cast<std::size_t>(n) - 3] = NAN;
  }
  const DeviceBuffer<bf16> x = on_device<bf16>(random_stored<bf16>(n, 1)), residual = on_device<bf16>(stream_in);
  const DeviceBuffer<bf16> weight = on_device<bf16>(weights), bias = on_device<bf16>(biases);
  struct Result {
    DeviceBuffer<bf16> h;
    DeviceBuffer<float> mean, rstd;
  };
  const auto operands = [&](const Result& to) {
    ResidualNormForward<bf16, bf16> io;
    io.x = c.branch ? x.data() : nullptr;
    io.residual = residual.data();
    io.weight = weight.data();
    io.bias = c.kind == NormKind::layernorm ? bias.data() : nullptr;
    io.residual_out = c.branch ? to.h.data() : nullptr;
    io.mean = c.kind == NormKind::layernorm ? to.mean.data() : nullptr;
    io.rstd = to.rstd.data();
    return io;
  };
  const auto result = [&] {
    return Result{DeviceBuffer<bf16>(n), DeviceBuffer<float>(c.rows), DeviceBuffer<float>(c.rows)};
  };
  constexpr int kExponent = 4;
  const Fp8Counters before{7, 9, std::bit_cast<std::uint32_t>(0.001f), 0};  // counters are added to
  const Stream stream;
  const Result of_pass = result(), of_norm = result(), of_look = result();
  const DeviceBuffer<bf16> out(n);
  Written want(n, kExponent), got(n, kExponent), looked(n, kExponent), again(n, kExponent);
  for (Written* each : {&want, &got, &looked}) each->counters.upload({before});
  ResidualNormForward<bf16, bf16> io = operands(of_pass);
  io.out = out.data();
  residual_norm_forward(shape, io, stream, c.shared_limit);
  quantize_fp8(Fp8Format::e4m3, {want.codes.data(), nullptr, want.scale.data(), want.counters.data()}, out.data(),
               c.rows, c.C, stream);
  io = operands(of_norm);
  io.codes = {got.codes.data(), nullptr, got.scale.data(), got.counters.data()};
  residual_norm_forward(shape, io, stream, c.shared_limit);
  io = operands(of_look);
  io.codes = {nullptr, nullptr, nullptr, looked.counters.data()};  // as in the first step
  residual_norm_forward(shape, io, stream, c.shared_limit);
  io.codes = {again.codes.data(), nullptr, again.scale.data(), nullptr};  // as in recomputation
  residual_norm_forward(shape, io, stream, c.shared_limit);
  stream.synchronize("test");

  EXPECT_EQ(got.codes.download(), want.codes.download());
  EXPECT_EQ(again.codes.download(), want.codes.download());
  const Fp8Counters counters = want.counters.download()[0];
  EXPECT_EQ(got.counters.download()[0], counters);
  EXPECT_EQ(looked.counters.download()[0], (Fp8Counters{before.saturated, before.flushed, counters.amax_bits, 0}));
  if (c.finite) {
    EXPECT_GT(counters.saturated, before.saturated);
    EXPECT_GT(counters.flushed, before.flushed);
  } else {
    EXPECT_GE(counters.amax_bits, 0x7F800000u);
  }
  for (const Result* each : {&of_norm, &of_look}) {
    expect_same_bits(each->h, of_pass.h, "h");
    expect_same_bits(each->mean, of_pass.mean, "mean");
    expect_same_bits(each->rstd, of_pass.rstd, "rstd");
  }
}

// Every spread of a row over threads: exact widths, widths with bounds, rows that are not copied ahead; one row, several
// rows a block, more rows than blocks.
TEST(CudaFp8, NormsWriteTheCodesOfThePass) {
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) {
    for (const std::int64_t C :
         {16, 240, 256, 272, 512, 528, 768, 1024, 1040, 2048, 2064, 2560, 2576, 3072, 4096, 4112, 8192, 8208, 16'384}) {
      for (const bool branch : {true, false}) {
        for (const std::int64_t rows : {1, 9}) expect_the_codes_of_the_pass({kind, rows, C, branch});
        for (const int limit : {20'000, 0}) expect_the_codes_of_the_pass({kind, 9, C, branch, 0, limit});
      }
      expect_the_codes_of_the_pass({kind, 9, C, true, 0.3f});
    }
    for (const bool branch : {true, false}) {
      for (const std::int64_t C : {272, 768, 2048, 4096}) expect_the_codes_of_the_pass({kind, 5001, C, branch});
      expect_the_codes_of_the_pass({kind, 9, 2048, branch, 0, norm_shared_memory(), false});
      expect_the_codes_of_the_pass({kind, 9, 144, branch, 0, norm_shared_memory(), false});
    }
    expect_the_codes_of_the_pass({kind, 5001, 1040, true, 0.1f});
  }
}

// ---- AdamW that writes codes ----------------------------------------------------------------------------------------

// Matrices of an arena, with gaps between them, by adamw() and quantize_fp8() and by adamw_fp8(): the same bits of
// everything that is stored, codes, counters and the gaps included.
template <typename M>
void expect_the_codes_of_the_update(std::int64_t number) {
  SCOPED_TRACE(type_name<M>() + " moments, step " + std::to_string(number));
  constexpr std::pair<std::int64_t, std::int64_t> kMatrices[] = {{16, 16},    {144, 80}, {128, 64}, {272, 1040},
                                                                 {1040, 272}, {16, 208}, {400, 16}};
  constexpr std::int64_t kGap = 128;
  constexpr int kExponent = 6;
  constexpr std::uint64_t kSeed = 5;
  std::vector<AdamWMatrix> list;
  std::vector<AdamWRange> ranges;
  std::vector<Written> want, got;
  std::int64_t elements = kGap, tiles = 0;
  for (const auto& [rows, columns] : kMatrices) {
    want.emplace_back(rows * columns, kExponent);
    got.emplace_back(rows * columns, kExponent);
    const bool decay = list.size() % 3 != 1;
    list.push_back({elements, rows, columns, tiles, decay ? 1 : 0, got.back().target()});
    ranges.push_back({elements, elements + rows * columns, decay});
    tiles += adamw_tiles(rows, columns);
    elements += rows * columns + kGap;
  }
  Floats masters = random_floats(elements, 1), gradients = random_floats(elements, 2), v = random_floats(elements, 4);
  for (float& value : v) value *= value;
  for (const AdamWMatrix& matrix : list) {  // each matrix saturates, loses values to zero, and has what is not finite
    const auto at = static_cast<std::size_t>(matrix.begin);
    masters[at + 1] = 100.0f;
    masters[at + 2] = 1e-7f;
    gradients[at + 2] = v[at + 2] = 0.0f;
    masters[at + 3] = INFINITY;
    gradients[at + 4] = NAN;
  }
  struct State {
    DeviceBuffer<bf16> parameters;
    DeviceBuffer<std::int16_t> low;
    DeviceBuffer<M> moment1, moment2;
  };
  const DeviceBuffer<float> whole(masters), gradient(gradients);
  const auto state = [&] {
    State s{DeviceBuffer<bf16>(masters.size()), DeviceBuffer<std::int16_t>(masters.size()),
            on_device<M>(random_stored<M>(elements, 3, 1e-12f)), on_device<M>(v)};
    split_masters(s.parameters.data(), s.low.data(), whole.data(), elements, nullptr);
    check(cudaDeviceSynchronize(), "test");
    return s;
  };
  const State by_pass = state(), fused = state();
  const DeviceBuffer<AdamWBlock> blocks(adamw_blocks(ranges));
  const DeviceBuffer<AdamWMatrix> matrices(list);
  const auto block_count = static_cast<std::int64_t>(blocks.size()), count = static_cast<std::int64_t>(list.size());
  AdamWStep step;
  step.step = number;
  step.learning_rate = 3e-3f;
  step.weight_decay = 0.1f;
  step.gradient_scale = 0.7f;
  if constexpr (std::is_same_v<M, float>) {
    adamw(by_pass.parameters.data(), by_pass.low.data(), gradient.data(), by_pass.moment1.data(),
          by_pass.moment2.data(), blocks.data(), block_count, step, nullptr, nullptr);
    adamw_fp8(fused.parameters.data(), fused.low.data(), gradient.data(), fused.moment1.data(), fused.moment2.data(),
              matrices.data(), count, tiles, step, nullptr);
  } else {
    adamw(by_pass.parameters.data(), by_pass.low.data(), gradient.data(), by_pass.moment1.data(),
          by_pass.moment2.data(), blocks.data(), block_count, step, nullptr, kSeed, nullptr);
    adamw_fp8(fused.parameters.data(), fused.low.data(), gradient.data(), fused.moment1.data(), fused.moment2.data(),
              matrices.data(), count, tiles, step, kSeed, nullptr);
  }
  expect_same_bits(fused.parameters, by_pass.parameters, "parameters");
  expect_same_bits(fused.low, by_pass.low, "low halves");
  expect_same_bits(fused.moment1, by_pass.moment1, "moment1");
  expect_same_bits(fused.moment2, by_pass.moment2, "moment2");
  for (std::size_t m = 0; m < list.size(); ++m) {
    SCOPED_TRACE(std::to_string(list[m].rows) + " x " + std::to_string(list[m].columns));
    quantize_fp8(Fp8Format::e4m3, want[m].target(), by_pass.parameters.data() + list[m].begin, list[m].rows,
                 list[m].columns, nullptr);
    check(cudaDeviceSynchronize(), "test");
    EXPECT_EQ(got[m].codes.download(), want[m].codes.download());
    EXPECT_EQ(got[m].transposed.download(), want[m].transposed.download());
    const Fp8Counters counters = want[m].counters.download()[0];
    EXPECT_EQ(got[m].counters.download()[0], counters);
    EXPECT_GT(counters.saturated, 0u);
    EXPECT_GT(counters.flushed, 0u);
    EXPECT_GE(counters.amax_bits, 0x7F800000u);
  }
}

TEST(CudaFp8, AdamWWritesTheCodesOfThePass) {
  for (const std::int64_t step : {1, 7}) {
    expect_the_codes_of_the_update<float>(step);
    expect_the_codes_of_the_update<bf16>(step);
  }
}

TEST(CudaFp8, TheCurrentScaleIsThatOfTheCpu) {
  const Stream stream;
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    for (const float amax : {0.0f, 1e-40f, 3e-6f, 1.75f, 1.8f, 448.0f, 1e30f, INFINITY}) {
      Fp8Counters counters;
      counters.amax_bits = std::bit_cast<std::uint32_t>(amax);
      const DeviceBuffer<Fp8Counters> on_gpu(std::vector<Fp8Counters>{counters});
      const DeviceBuffer<float> scale(1), inverse(1);
      fp8_current_scale(scale.data(), inverse.data(), on_gpu.data(), format, stream);
      stream.synchronize("test");
      const int exponent = std::isfinite(amax) ? fp8_exponent(counters.amax_bits, format) : 0;
      EXPECT_EQ(scale.download()[0], scale_of(exponent)) << amax;
      EXPECT_EQ(inverse.download()[0], scale_of(-exponent)) << amax;
    }
  }
}

// Codes of values that two devices compute a little differently: each within one rounding of the CPU's value, and nearly all
// of them equal.
void expect_nearly_the_codes(const Codes& got, const Floats& want, Fp8Format format, int exponent, const char* what) {
  const double half_step = format == Fp8Format::e4m3 ? 0x1p-4 : 0x1p-3;
  std::size_t different = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const float scaled = want[i] * scale_of(exponent);
    different += got[i] != f32_to_fp8(scaled, format);
    if (std::abs(scaled) > fp8_largest(format)) continue;
    const double allowed = half_step * 1.01 * std::abs(scaled) + 1.01 * fp8_flushed(format);
    ASSERT_NEAR(fp8_to_f32(got[i], format), scaled, allowed) << what << " " << i;
  }
  EXPECT_LE(different, want.size() / 500 + 1) << what;
}

TEST(CudaFp8, SwigluIsRoundedInBothLayoutsAndBothPasses) {
  const Stream stream;
  for (const auto& [N, F] : kSizes) {
    SCOPED_TRACE(std::to_string(N) + " x " + std::to_string(F));
    constexpr int kOut = 4, kGradient = 9;
    const Floats gate_up = random_stored<bf16>(2 * N * F, 1, 2.0f), dout = random_stored<bf16>(N * F, 2, 0.5f);
    Floats out(static_cast<std::size_t>(N * F)), d_gate_up(gate_up.size());
    cpu::swiglu_forward(out.data(), gate_up.data(), N, F);
    cpu::swiglu_backward(d_gate_up.data(), dout.data(), gate_up.data(), N, F);
    const DeviceBuffer<bf16> source = on_device<bf16>(gate_up), gradient = on_device<bf16>(dout);
    const Written forward(N * F, kOut), again(N * F, kOut), backward(2 * N * F, kGradient);
    swiglu_forward_fp8(forward.target(), source.data(), N, F, stream);
    swiglu_backward_fp8(backward.target(), again.target(), gradient.data(), source.data(), N, F, stream);
    stream.synchronize("test");
    const Codes codes = forward.codes.download(), gradients = backward.codes.download();
    expect_nearly_the_codes(codes, out, Fp8Format::e4m3, kOut, "out");
    expect_nearly_the_codes(gradients, d_gate_up, Fp8Format::e5m2, kGradient, "d_gate_up");
    EXPECT_EQ(forward.transposed.download(), transpose(codes, N, F));
    EXPECT_EQ(again.codes.download(), codes);
    EXPECT_EQ(again.transposed.download(), transpose(codes, N, F));
    EXPECT_EQ(backward.transposed.download(), transpose(gradients, N, 2 * F));
    EXPECT_EQ(again.counters.download(), forward.counters.download());
    const Fp8Counters counters = backward.counters.download()[0];
    Fp8Counters want;
    cpu::round_fp8(d_gate_up.data(), d_gate_up.data(), 2 * N * F, Fp8Format::e5m2, kGradient, &want);
    EXPECT_NEAR(std::bit_cast<float>(counters.amax_bits), std::bit_cast<float>(want.amax_bits),
                1e-5 * std::bit_cast<float>(want.amax_bits));
    EXPECT_NEAR(static_cast<double>(counters.flushed), static_cast<double>(want.flushed), 1 + 0.01 * want.flushed);

    // The gradients' amax alone, before there is a scale.
    const Written amax(2 * N * F, 0);
    swiglu_backward_fp8({nullptr, nullptr, nullptr, amax.counters.data()}, {}, gradient.data(), source.data(), N, F,
                        stream);
    stream.synchronize("test");
    EXPECT_EQ(amax.counters.download()[0], (Fp8Counters{0, 0, counters.amax_bits, 0}));
  }
}

// Codes and counters of the kernels above, and beside them what the kernels of bf16 store, the gradient in the place of gate_up.
TEST(CudaFp8, SwigluIsStoredBesideItsCodes) {
  const Stream stream;
  for (const auto& [N, F] : kSizes) {
    SCOPED_TRACE(std::to_string(N) + " x " + std::to_string(F));
    constexpr int kOut = 4, kGradient = 9;
    const auto values = static_cast<std::size_t>(N * F);
    const Floats gate_up = random_stored<bf16>(2 * N * F, 1, 2.0f), dout = random_stored<bf16>(N * F, 2, 0.5f);
    const DeviceBuffer<bf16> source = on_device<bf16>(gate_up), in_place = on_device<bf16>(gate_up),
                             again_in_place = on_device<bf16>(gate_up), gradient = on_device<bf16>(dout);
    const DeviceBuffer<bf16> want_out(values), want_gradient(2 * values), out(values), out_again(values);
    const Written want_codes(N * F, kOut), codes(N * F, kOut), want_gradients(2 * N * F, kGradient),
        gradients(2 * N * F, kGradient), more(2 * N * F, kGradient);
    swiglu_forward(want_out.data(), source.data(), N, F, stream);
    swiglu_backward<bf16>(want_gradient.data(), gradient.data(), source.data(), N, F, nullptr, stream);
    swiglu_forward_fp8(want_codes.rows(), source.data(), N, F, stream);
    swiglu_backward_fp8(want_gradients.rows(), {}, gradient.data(), source.data(), N, F, stream);

    swiglu_forward_fp8(codes.rows(), source.data(), N, F, stream, out.data());
    swiglu_backward_fp8(gradients.rows(), in_place.data(), out_again.data(), gradient.data(), in_place.data(), N, F,
                        stream);
    swiglu_backward_fp8(more.rows(), again_in_place.data(), nullptr, gradient.data(), again_in_place.data(), N, F,
                        stream);
    stream.synchronize("test");
    EXPECT_EQ(on_host(out), on_host(want_out));
    EXPECT_EQ(on_host(out_again), on_host(want_out));
    EXPECT_EQ(codes.codes.download(), want_codes.codes.download());
    EXPECT_EQ(codes.counters.download(), want_codes.counters.download());
    for (const auto& [written, stored] : {std::pair(&gradients, &in_place), {&more, &again_in_place}}) {
      EXPECT_EQ(on_host(*stored), on_host(want_gradient));
      EXPECT_EQ(written->codes.download(), want_gradients.codes.download());
      EXPECT_EQ(written->counters.download(), want_gradients.counters.download());
    }
    expect_contains(error_of(Exit::internal,
                             [&] {
                               swiglu_backward_fp8(more.target(), again_in_place.data(), nullptr, gradient.data(),
                                                   again_in_place.data(), N, F, stream);
                             }),
                    "as rows beside bf16");
  }
}

// A tensor that the host rounds has the codes and the counters of one that the GPU does.
TEST(CudaFp8, TheHostRoundsATensorAsTheGpuDoes) {
  const Stream stream;
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    Floats x = random_stored<bf16>(144 * 80, 3, 0.01f);
    for (std::size_t i = 0; i < x.size(); i += 7) x[i] = std::ldexp(x[i], -2 * static_cast<int>(i % 21));
    const Fp8Tensor rounded = round_tensor(x, format);
    const DeviceBuffer<bf16> source = on_device<bf16>(x);
    const Written written(144 * 80, rounded.exponent);
    quantize_fp8(format, written.rows(), source.data(), 144, 80, stream);
    stream.synchronize("test");
    EXPECT_EQ(written.codes.download(), rounded.codes);
    EXPECT_EQ(written.counters.download()[0], rounded.counters);
    EXPECT_GT(rounded.counters.flushed, 0u);
  }
}

// ---- GEMMs ----------------------------------------------------------------------------------------------------------

// A matrix of codes with a scale, on both sides.
struct Matrix {
  Matrix(std::int64_t rows_, std::int64_t columns_, Fp8Format format, unsigned seed, bool exact)
      : rows(rows_), columns(columns_), codes(static_cast<std::size_t>(rows_ * columns_)) {
    // Exact: every sum of products is, whatever accumulates it.
    const Floats source = exact ? quarters(rows * columns, seed) : random_floats(rows * columns, seed);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      codes[i] = f32_to_fp8(source[i], format);
      values.push_back(scale_of(-exponent) * fp8_to_f32(codes[i], format));
    }
    on_gpu.emplace_back(codes);
    on_gpu.emplace_back(transpose(codes, rows, columns));
    scale.emplace_back(std::vector<float>{scale_of(-exponent)});
  }
  Fp8Matrix matrix(bool transposed) const { return {on_gpu[transposed ? 1 : 0].data(), scale[0].data()}; }

  static constexpr int exponent = 2;
  std::int64_t rows, columns;
  Codes codes;
  Floats values;
  std::vector<DeviceBuffer<std::uint8_t>> on_gpu;
  std::vector<DeviceBuffer<float>> scale;
};

TEST(CudaFp8, GemmsAreThoseOfTheCpuOnTheSameCodes) {
  if (!has_fp8()) GTEST_SKIP() << "needs a GPU of compute capability 8.9";
  const Stream stream;
  Matmul matmul(stream);
  for (const bool exact : {true, false}) {
    for (const auto& [N, C, OC] : {std::array<std::int64_t, 3>{512, 1024, 768}, {144, 272, 80}, {16, 32, 48}}) {
      SCOPED_TRACE((exact ? "exact " : "") + std::to_string(N) + " x " + std::to_string(C) + " x " +
                   std::to_string(OC));
      const Matrix x(N, C, Fp8Format::e4m3, 1, exact), w(OC, C, Fp8Format::e4m3, 2, exact);
      const Matrix dout(N, OC, Fp8Format::e5m2, 3, exact);
      const Floats skip = random_stored<bf16>(N * OC, 4), before = random_floats(OC * C, 5);
      const Floats bias = random_stored<bf16>(OC, 6, 4.0f);
      Floats out(static_cast<std::size_t>(N * OC)), dx(static_cast<std::size_t>(N * C)), dw = Floats(before.size());
      cpu::matmul_forward(out.data(), x.values.data(), w.values.data(), nullptr, N, C, OC);
      cpu::matmul_backward(dx.data(), dw.data(), nullptr, dout.values.data(), x.values.data(), w.values.data(), N, C,
                           OC);
      // Fast accumulation adds 32 products at a time to a sum of 14 bits, of which it cuts off the rest. Otherwise such a sum of
      // 128 products is added to one in fp32.
      const double fast = exact ? kArithmeticTolerance : static_cast<double>(C) / 32 * 0x1p-13;
      const double full = exact ? kArithmeticTolerance : 128.0 / 32 * 0x1p-13;

      const DeviceBuffer<bf16> gpu_out(out.size()), with_skip(out.size()), with_bias(out.size()), with_both(out.size()),
          gpu_dx(dx.size()), addend = on_device<bf16>(skip), gpu_bias = on_device<bf16>(bias);
      const DeviceBuffer<float> stored_dw(dw.size()), added_dw(before);
      // Plans of some of one size; the others use cuBLASLt's first suggestion.
      if (N == 512) {
        const MatmulShape shapes[] = {{Gemm::forward, N, C, OC, CUDA_R_8F_E4M3},
                                      {Gemm::forward, N, C, OC, CUDA_R_8F_E4M3, Accumulate::no, true},
                                      {Gemm::forward, N, C, OC, CUDA_R_8F_E4M3, Accumulate::no, true, true},
                                      {Gemm::weight_grad, N, C, OC, CUDA_R_8F_E4M3, Accumulate::yes}};
        matmul.prepare(shapes);
      }
      matmul.forward_fp8(gpu_out.data(), x.matrix(false), w.matrix(false), N, C, OC);
      matmul.forward_fp8(with_skip.data(), x.matrix(false), w.matrix(false), N, C, OC, addend.data());
      matmul.forward_fp8(with_bias.data(), x.matrix(false), w.matrix(false), N, C, OC, nullptr, gpu_bias.data());
      matmul.forward_fp8(with_both.data(), x.matrix(false), w.matrix(false), N, C, OC, addend.data(), gpu_bias.data());
      matmul.input_grad_fp8(gpu_dx.data(), dout.matrix(false), w.matrix(true), N, C, OC);
      matmul.weight_grad_fp8(stored_dw.data(), dout.matrix(true), x.matrix(true), N, C, OC, Accumulate::no);
      matmul.weight_grad_fp8(added_dw.data(), dout.matrix(true), x.matrix(true), N, C, OC, Accumulate::yes);
      stream.synchronize("test");
      expect_near<bf16>(on_host(gpu_out), out, "out", fast);
      Floats sum = out;
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += skip[i];
      expect_near<bf16>(on_host(with_skip), sum, "out with addend", fast);
      const auto column = [&](std::size_t i) { return bias[i % static_cast<std::size_t>(OC)]; };
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += column(i);
      expect_near<bf16>(on_host(with_both), sum, "out with addend and bias", fast);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = out[i] + column(i);
      expect_near<bf16>(on_host(with_bias), sum, "out with bias", fast);
      expect_near<bf16>(on_host(gpu_dx), dx, "dx", full);
      expect_near<float>(on_host(stored_dw), dw, "dw", full);
      for (std::size_t i = 0; i < dw.size(); ++i) dw[i] += before[i];
      expect_near<float>(on_host(added_dw), dw, "dw added", full);
    }
  }
}

// ---- the model ------------------------------------------------------------------------------------------------------

// Head dimension 64 has attention that writes codes, on Hopper; 32 never has.
constexpr std::int64_t kModelHeadDims[] = {32, 64};

ModelConfig small_config(std::int64_t head_dim = 32) {
  ModelConfig config = preset_config("tiny");
  config.num_layers = 3;
  config.vocab_size = config.tokenizer_vocab = 1003;
  config.hidden_size = 144;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rope.rotary_dim = head_dim;
  config.ffn_size = 208;
  return config;
}

// Biases of q, k and v; norms of the heads and every bias.
std::vector<ModelConfig> small_families() {
  std::vector<ModelConfig> all(2, small_config(64));
  set_family(all[0], "qwen2");
  set_family(all[1], "qwen3");
  all[1].qkv_bias = all[1].output_bias = all[1].mlp_bias = true;
  return all;
}

TrainOptions small_options(Precision precision = Precision::fp8) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 40;
  options.precision = precision;
  return options;
}

std::vector<float> all_of(TrainModel& model) {
  std::vector<float> all = model.fp8_state();
  for (const TensorRole role : {TensorRole::parameter, TensorRole::state1, TensorRole::state2}) {
    for (const TensorSpec& spec : model.table().specs()) {
      const Floats values = read_values(model, role, spec);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

// Steps first .. last of two micro-batches each; returns what the steps showed.
std::vector<double> take_steps(TrainModel& model, std::int64_t first, std::int64_t last) {
  std::vector<double> shown;
  for (std::int64_t step = first; step <= last; ++step) {
    model.zero_gradients();
    for (int i = 0; i < 2; ++i) {
      const auto number = static_cast<std::uint64_t>(2 * step + i);
      model.forward(random_tokens(model.config(), 80, static_cast<unsigned>(number)).batch(), number, 0.01f);
      model.backward();
    }
    const StepStatistics statistics = model.statistics();
    shown.insert(shown.end(), {statistics.loss_sum, statistics.gradient_norm});
    for (const Fp8Statistics::Kind& kind : statistics.fp8->kinds) {
      shown.insert(shown.end(), {static_cast<double>(kind.values), static_cast<double>(kind.saturated),
                                 static_cast<double>(kind.flushed)});
    }
    AdamWStep update;
    update.step = step;
    update.learning_rate = 1e-3f;
    update.weight_decay = 0.1f;
    model.update(update);
  }
  return shown;
}

class CudaFp8Model : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_fp8()) GTEST_SKIP() << "needs a GPU of compute capability 8.9";
  }
};

// The GPU rounds activations to bf16 first, which moves codes by a step of fp8, and with them those of the tensors behind: after
// some layers the two have rounded independently of each other. So a gradient may be as far from the reference as two
// such roundings are, sqrt(2) times what the reference itself is from fp32. An operand of another tensor, or with another scale, is
// tens of percent away. In the first step scales are current, in the others delayed.
// `of_largest`: how far the largest magnitudes of a tensor may be apart. Each is that of a single element: two runs on the CPU
// whose weights differ by 2^-9 have up to 0.14 there, most in the last down projection's input, a product.
void expect_the_steps_of_the_cpu(const ModelConfig& config, float of_largest) {
  const auto exact = cpu::make_training_model(config, small_options(Precision::fp32));
  const auto reference = cpu::make_training_model(config, small_options());
  const auto model = make_training_model(config, small_options());
  for (TrainModel* each : {exact.get(), reference.get(), model.get()}) {
    randomize_parameters(*each);
    for (const TensorSpec& spec : each->table().specs()) {  // as small as training has them
      if (spec.shape.size() != 2) continue;
      Floats values = read_values(*each, TensorRole::parameter, spec);
      for (float& value : values) value *= 0.3f;
      each->write_tensor(TensorRole::parameter, spec, values.data());
    }
  }
  for (int step = 1; step <= 3; ++step) {
    SCOPED_TRACE(step);
    const TokenBatch text = random_tokens(config, 80, static_cast<unsigned>(step));
    for (TrainModel* each : {exact.get(), reference.get(), model.get()}) {
      each->zero_gradients();
      each->forward(text.batch(), 0, 0.01f);
      each->backward();
    }
    constexpr double kApart = 1.5;
    const StepStatistics want = reference->statistics(), got = model->statistics();
    exact->statistics();
    EXPECT_NEAR(got.loss_sum, want.loss_sum, 5e-3 * want.loss_sum);
    EXPECT_NEAR(got.gradient_norm, want.gradient_norm, 0.03 * want.gradient_norm);
    for (std::size_t kind = 0; kind < 3; ++kind) {
      EXPECT_EQ(got.fp8->kinds[kind].values, want.fp8->kinds[kind].values);
      EXPECT_EQ(got.fp8->kinds[kind].saturated, 0u);
      // Where fp32 leaves something tiny, attention in bf16 leaves a zero, which is not lost by rounding to fp8.
      EXPECT_LE(static_cast<double>(got.fp8->kinds[kind].flushed),
                20 + 1.1 * static_cast<double>(want.fp8->kinds[kind].flushed));
    }
    for (const TensorSpec& spec : model->table().specs()) {
      const Floats of_gpu = read_values(*model, TensorRole::gradient, spec);
      const Floats of_cpu = read_values(*reference, TensorRole::gradient, spec);
      const Floats of_fp32 = read_values(*exact, TensorRole::gradient, spec);
      const double rounding = distance(spec.name, of_cpu, of_fp32, 1, Norm::l2).relative;
      const TensorDistance row = distance(spec.name, of_gpu, of_cpu, kApart * rounding, Norm::l2);
      record_worst("gradient", row.relative / (kApart * rounding));
      EXPECT_TRUE(row.pass) << spec.name << ": " << row.relative << " from the CPU's, which is " << rounding
                            << " from fp32";
    }
    AdamWStep none;  // the same parameters, with a history of scales
    none.learning_rate = 0;
    for (TrainModel* each : {exact.get(), reference.get(), model.get()}) each->update(none);
    const std::vector<float> history = model->fp8_state(), of_reference = reference->fp8_state();
    for (std::int64_t slot = 0; slot < Fp8Slots{3}.count(); ++slot) {  // the newest step
      const auto i = static_cast<std::size_t>(slot);
      EXPECT_NEAR(history[i], of_reference[i], of_largest * of_reference[i]) << Fp8Slots{3}.name(slot);
    }
  }
}

TEST_F(CudaFp8Model, StepsAreThoseOfTheCpuThatRoundsInTheSamePlaces) {
  for (const auto& [head_dim, of_largest] : {std::pair{32, 0.1f}, {64, 0.3f}}) {
    SCOPED_TRACE("head dimension " + std::to_string(head_dim));
    expect_the_steps_of_the_cpu(small_config(head_dim), of_largest);
  }
  for (const ModelConfig& config : small_families()) {
    SCOPED_TRACE(config.family);
    expect_the_steps_of_the_cpu(config, 0.3f);
  }
}

// Within the tolerances that the dump brings: what bf16 makes of each tensor in PyTorch's own emulation of fp8.
TEST_F(CudaFp8Model, TrainingMatchesPyTorch) {
  const ModelFile file = ModelFile::open(kFp8Golden.model);
  const TensorFile dump = TensorFile::open(kFp8Golden.dump, FileKind::reference_dump);
  const auto load = [&](const TrainOptions& options) {
    auto model = make_training_model(file.config(), options);
    load_parameters(file, *model);
    return model;
  };
  const Comparison result = compare_training(dump, Precision::fp8, 1e-4, load, DType::bf16);
  EXPECT_GE(result.rows.size(), 35u);
  for (const TensorDistance& row : result.rows) {
    record_worst(row.name.substr(0, row.name.find('.')), row.relative / row.tolerance);
    EXPECT_TRUE(row.pass) << row.name << ": " << row.relative << " of at most " << row.tolerance;
  }
}

TEST_F(CudaFp8Model, RecomputationRerunAndGraphsGiveTheSameBits) {
  for (const auto& [dropout, config] : {std::pair{0.0f, small_config(32)},
                                        {0.1f, small_config(32)},
                                        {0.0f, small_config(64)},
                                        {0.1f, small_config(64)},
                                        {0.0f, small_families()[0]},
                                        {0.1f, small_families()[1]}}) {
    SCOPED_TRACE(config.family + ", head dimension " + std::to_string(config.head_dim));
    TrainOptions options = small_options();
    options.dropout = dropout;
    const auto run = [&](Recompute recompute, bool graph) {
      options.recompute = recompute;
      options.graph = graph;
      const auto model = make_training_model(config, options);
      randomize_parameters(*model);
      std::vector<double> shown = take_steps(*model, 1, 4);
      const std::vector<float> all = all_of(*model);
      shown.insert(shown.end(), all.begin(), all.end());
      return shown;
    };
    const std::vector<double> expected = run(Recompute::none, true);
    EXPECT_EQ(run(Recompute::none, true), expected);
    EXPECT_EQ(run(Recompute::none, false), expected);
    EXPECT_EQ(run(Recompute::norm, true), expected);
    EXPECT_EQ(run(Recompute::block, true), expected);
  }
}

void expect_to_go_on_bit_for_bit(const ModelConfig& config) {
  const auto whole = make_training_model(config, small_options()), half = make_training_model(config, small_options());
  for (TrainModel* each : {whole.get(), half.get()}) randomize_parameters(*each);
  const TokenBatch text = random_tokens(config, 80, 99);
  std::int64_t labels = 0;
  half->evaluate(text.batch(), &labels);  // before the first step, with current scales
  EXPECT_EQ(take_steps(*half, 1, 3), take_steps(*whole, 1, 3));
  const double evaluated = half->evaluate(text.batch(), &labels);
  const auto resumed = make_training_model(config, small_options());
  randomize_parameters(*resumed);
  take_steps(*resumed, 8, 9);  // another history, which must go
  for (const TensorRole role : kStateRoles) {
    for (const TensorSpec& spec : half->table().specs()) {
      resumed->write_tensor(role, spec, read_values(*half, role, spec).data());
    }
  }
  resumed->set_fp8_state(half->fp8_state());
  EXPECT_EQ(resumed->evaluate(text.batch(), &labels), evaluated);
  EXPECT_EQ(take_steps(*resumed, 4, 6), take_steps(*whole, 4, 6));
  EXPECT_EQ(all_of(*resumed), all_of(*whole));
}

TEST_F(CudaFp8Model, GoesOnBitForBitAndValidationChangesNothing) {
  for (const std::int64_t head_dim : kModelHeadDims) {
    SCOPED_TRACE("head dimension " + std::to_string(head_dim));
    expect_to_go_on_bit_for_bit(small_config(head_dim));
  }
}

// The weights of a step are those after the update before it, in both layouts: without a learning rate the same tokens give
// the same gradients again, with one they do not, nor do they if only W^T was left as it was.
TEST_F(CudaFp8Model, UpdatedWeightsAreRoundedInBothLayouts) {
  const auto model = make_training_model(small_config(), small_options()),
             fresh = make_training_model(small_config(), small_options());
  randomize_parameters(*model);
  take_steps(*model, 1, 3);
  const std::vector<float> history = model->fp8_state();
  for (const TensorSpec& spec : model->table().specs()) {
    fresh->write_tensor(TensorRole::parameter, spec, read_values(*model, TensorRole::parameter, spec).data());
  }
  fresh->set_fp8_state(history);
  const TokenBatch text = random_tokens(small_config(), 80, 7);
  for (TrainModel* each : {model.get(), fresh.get()}) {
    each->zero_gradients();
    each->forward(text.batch(), 0, 0.01f);
    each->backward();
  }
  EXPECT_EQ(model->statistics().loss_sum, fresh->statistics().loss_sum);
  for (const TensorSpec& spec : model->table().specs()) {
    EXPECT_EQ(read_values(*model, TensorRole::gradient, spec), read_values(*fresh, TensorRole::gradient, spec))
        << spec.name;
  }
}

// Linear layers and everything else, each once: parameters and moments are those of the CPU's AdamW on the model's own
// gradients, in the first step and in one behind it.
TEST_F(CudaFp8Model, TheUpdateIsThatOfAdamW) {
  const auto model = make_training_model(small_config(), small_options());
  randomize_parameters(*model);
  for (std::int64_t number = 1; number <= 2; ++number) {
    SCOPED_TRACE(number);
    model->zero_gradients();
    model->forward(random_tokens(model->config(), 80, static_cast<unsigned>(number)).batch(), 0, 0.01f);
    model->backward();
    model->statistics();
    AdamWStep step;
    step.step = number;
    step.learning_rate = 1e-2f;
    step.weight_decay = 0.5f;
    std::vector<std::array<Floats, 3>> want;
    for (const TensorSpec& spec : model->table().specs()) {
      want.push_back({read_values(*model, TensorRole::parameter, spec), read_values(*model, TensorRole::state1, spec),
                      read_values(*model, TensorRole::state2, spec)});
      auto& [p, m, v] = want.back();
      cpu::adamw(p.data(), read_values(*model, TensorRole::gradient, spec).data(), m.data(), v.data(), spec.elements,
                 spec.decay, step);
    }
    model->update(step);
    for (std::size_t i = 0; i < want.size(); ++i) {
      const TensorSpec& spec = model->table().specs()[i];
      expect_near<float>(read_values(*model, TensorRole::parameter, spec), want[i][0], spec.name);
      expect_near<float>(read_values(*model, TensorRole::state1, spec), want[i][1], spec.name + " moment1");
      expect_near<float>(read_values(*model, TensorRole::state2, spec), want[i][2], spec.name + " moment2");
    }
  }
}

// The same micro-batch twice gives each gradient twice, and counts twice of what it rounds: with current scales, and with those of
// a history.
TEST_F(CudaFp8Model, MicroBatchesAddUp) {
  for (const std::int64_t head_dim : kModelHeadDims) {
    const auto model = make_training_model(small_config(head_dim), small_options());
    randomize_parameters(*model);
    const TokenBatch text = random_tokens(model->config(), 80, 5);
    const auto gradients = [&](int times, StepStatistics& statistics) {
      model->zero_gradients();
      for (int i = 0; i < times; ++i) {
        model->forward(text.batch(), 0, 0.01f);
        model->backward();
      }
      statistics = model->statistics();
      std::vector<Floats> all;
      for (const TensorSpec& spec : model->table().specs())
        all.push_back(read_values(*model, TensorRole::gradient, spec));
      return all;
    };
    for (const bool known : {false, true}) {
      SCOPED_TRACE("head dimension " + std::to_string(head_dim) + (known ? ", a history" : ""));
      StepStatistics of_one, of_two;
      const std::vector<Floats> once = gradients(1, of_one), twice = gradients(2, of_two);
      EXPECT_NEAR(of_two.loss_sum, 2 * of_one.loss_sum, 1e-6 * of_two.loss_sum);
      for (const Fp8Kind kind : {Fp8Kind::input, Fp8Kind::gradient}) {
        const Fp8Statistics::Kind &one = of_one.fp8->kinds[static_cast<std::size_t>(kind)],
                                  &two = of_two.fp8->kinds[static_cast<std::size_t>(kind)];
        EXPECT_EQ(two.values, 2 * one.values);
        EXPECT_EQ(two.saturated, 2 * one.saturated);
        EXPECT_EQ(two.flushed, 2 * one.flushed);
      }
      for (std::size_t t = 0; t < once.size(); ++t) {
        Floats doubled = once[t];
        for (float& value : doubled) value *= 2;
        const TensorSpec& spec = model->table().specs()[t];
        // A GEMM that adds may be another one than that which stores, and tensor cores add fp8 in sums of 14 bits.
        EXPECT_TRUE(distance(spec.name, twice[t], doubled, 1e-2, Norm::l2).pass) << spec.name;
      }
      AdamWStep none;  // the same parameters, with a history of scales
      none.learning_rate = 0;
      model->update(none);
    }
  }
}

// The names of the operators of one step.
std::set<std::string> names_of_a_step(TrainModel& model, std::int64_t number) {
  std::set<std::string> names;
  for (const OperatorTime& time : model.time_operators([&] { take_steps(model, number, number); }).operators) {
    names.insert(time.name);
  }
  return names;
}

// On Hopper, from the second step on, attention writes the gradient of qkv in fp8; where it cannot, a pass does.
TEST_F(CudaFp8Model, AttentionRoundsWhereItHasTheKernel) {
  for (const std::int64_t head_dim : kModelHeadDims) {
    const auto model = make_training_model(small_config(head_dim), small_options());
    randomize_parameters(*model);
    EXPECT_EQ(names_of_a_step(*model, 1).count("attention backward, quantise"), 0u);
    EXPECT_EQ(names_of_a_step(*model, 2).count("attention backward, quantise"),
              head_dim == 64 && hopper_multiprocessors() > 0 ? 1u : 0u);
  }
}

// On Hopper SwiGLU is in the epilogues of the GEMMs beside it; in the first step, which has to find scales, two passes
// are, and elsewhere always.
TEST_F(CudaFp8Model, SwigluNeedsNoPassWhereItHasTheKernel) {
  const auto model = make_training_model(small_config(), small_options());
  randomize_parameters(*model);
  const auto has_passes = [](const std::set<std::string>& names) {
    EXPECT_EQ(names.count("swiglu, quantise"), names.count("swiglu backward, quantise"));
    return names.count("swiglu, quantise") == 1;
  };
  const bool hopper = hopper_multiprocessors() > 0;
  EXPECT_TRUE(has_passes(names_of_a_step(*model, 1)));
  const std::set<std::string> names = names_of_a_step(*model, 2);
  EXPECT_EQ(has_passes(names), !hopper);
  EXPECT_EQ(names.count("gate, up, swiglu"), hopper ? 1u : 0u);
  EXPECT_EQ(names.count("down dgrad, swiglu"), hopper ? 1u : 0u);
}

// No pass over the weights but where no update has written them: in the first step and behind a load.
TEST_F(CudaFp8Model, AdamWRoundsTheWeightsOfTheNextStep) {
  const auto model = make_training_model(small_config(), small_options());
  randomize_parameters(*model);
  std::int64_t number = 0;
  const auto passes = [&] { return names_of_a_step(*model, ++number).count("quantise weights"); };
  EXPECT_EQ(passes(), 1u);
  EXPECT_EQ(passes(), 0u);
  const TensorSpec& some = model->table().specs().back();
  model->write_tensor(TensorRole::parameter, some, read_values(*model, TensorRole::parameter, some).data());
  EXPECT_EQ(passes(), 1u);
  EXPECT_EQ(passes(), 0u);
  model->set_fp8_state(model->fp8_state());
  EXPECT_EQ(passes(), 1u);
}

}  // namespace
}  // namespace weft::cuda
