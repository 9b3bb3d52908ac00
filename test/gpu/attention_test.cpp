// GPU attention against the CPU's on the same inputs, for every head dimension, odd lengths, group sizes and layouts.
//
// Tolerance. The CPU computes in fp32 from the very values that the GPU reads (rounded to T), so what differs is the
// GPU's own rounding: P, dS and the result are rounded to T once each. Rounding the fp32 result to T is the least error
// that any kernel can have; call its 2-norm e0. Three such roundings in a row, none smaller than another, add up to at
// most 3 e0: ||gpu - cpu|| <= 3 e0. A single element may be off by 3 half units in the last place of the largest one.
// Gradients that vanish (one visible key: P = 1, dS = 0) leave only fp32 noise, for which both bounds get a floor. For
// T = float the bound is 1e-4 relative.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/error.h"
#include "llmc/cpu/attention.h"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/attention/train/paths.h"
#include "test/gpu/device_buffer.h"

namespace weft::cuda {
namespace {

using test::DeviceBuffer;
using Floats = std::vector<float>;

template <typename T>
constexpr DType kDType = DType::f32;
template <>
constexpr DType kDType<__nv_bfloat16> = DType::bf16;
template <>
constexpr DType kDType<__half> = DType::f16;

// Half a unit in the last place of a value near 1.
template <typename T>
constexpr float kHalfUlp = 0x1p-24f;
template <>
constexpr float kHalfUlp<__nv_bfloat16> = 0x1p-8f;
template <>
constexpr float kHalfUlp<__half> = 0x1p-11f;

template <typename T>
std::vector<T> rounded(const Floats& values) {
  std::vector<T> result(values.size());
  convert_from_f32(values.data(), kDType<T>, result.data(), values.size());
  return result;
}
template <typename T>
Floats widened(const std::vector<T>& values) {
  Floats result(values.size());
  convert_to_f32(values.data(), kDType<T>, result.data(), values.size());
  return result;
}

// Where a tensor's heads lie inside a buffer: elements before the first, and the strides.
struct Layout {
  std::int64_t first = 0, batch_stride = 0, token_stride = 0, head_stride = 0, elements = 0;

  template <typename View, typename Data>
  View view(Data* data) const {
    return {data + first, batch_stride, token_stride, head_stride};
  }
};

enum class Packing { separate, llama_rows, neox_rows, cache, odd, odd_q, odd_k, odd_v, odd_out };

struct Case {
  AttentionShape shape;
  Packing packing = Packing::separate;
  float magnitude = 1;  // standard deviation of q and k
};

struct Layouts {
  Layout q, k, v, out;  // dq, dk, dv lie as q, k, v do; dout as out
};

Layouts layouts(const Case& c) {
  const AttentionShape& s = c.shape;
  const auto rows = [&](std::int64_t T, std::int64_t width, std::int64_t first, std::int64_t head_stride) {
    return Layout{first, T * width, width, head_stride, s.B * T * width};
  };
  const std::int64_t q = s.NH * s.HS, kv = s.NKV * s.HS;
  const Layout out = rows(s.TQ, q, 0, s.HS);
  switch (c.packing) {
    case Packing::llama_rows:  // [q heads | k heads | v heads]
      return {rows(s.TQ, q + 2 * kv, 0, s.HS), rows(s.TK, q + 2 * kv, q, s.HS), rows(s.TK, q + 2 * kv, q + kv, s.HS),
              out};
    case Packing::neox_rows:  // [head][q, k, v]
      return {rows(s.TQ, 3 * q, 0, 3 * s.HS), rows(s.TK, 3 * q, s.HS, 3 * s.HS), rows(s.TK, 3 * q, 2 * s.HS, 3 * s.HS),
              out};
    case Packing::cache: {  // [B, heads, capacity, HS] with room to spare
      const std::int64_t capacity = s.TK + 24;
      const Layout cache = {0, s.NKV * capacity * s.HS, s.HS, capacity * s.HS, s.B * s.NKV * capacity * s.HS};
      return {rows(s.TQ, q, 0, s.HS), cache, cache, out};
    }
    case Packing::odd:  // no 16-byte alignment anywhere
      return {rows(s.TQ, q + 3, 1, s.HS), rows(s.TK, kv + 5, 3, s.HS), rows(s.TK, kv + 1, 0, s.HS),
              rows(s.TQ, q + 1, 1, s.HS)};
    default: {  // of odd_q and the like one tensor alone is not aligned: by its beginning, or by its rows
      Layouts at = {out, rows(s.TK, kv, 0, s.HS), rows(s.TK, kv, 0, s.HS), out};
      if (c.packing == Packing::odd_q) at.q = rows(s.TQ, q + 8, 1, s.HS);
      if (c.packing == Packing::odd_k) at.k = rows(s.TK, kv + 4, 0, s.HS);
      if (c.packing == Packing::odd_v) at.v = rows(s.TK, kv + 8, 3, s.HS);
      if (c.packing == Packing::odd_out) at.out = rows(s.TQ, q + 4, 0, s.HS);
      return at;
    }
  }
}

Floats random_normal(const Layout& layout, unsigned seed, float magnitude) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, magnitude);
  Floats values(static_cast<std::size_t>(layout.elements));
  for (float& value : values) value = normal(generator);
  return values;
}

// What the tensors hold where `layout` covers them, in [B, T, heads, HS] order.
Floats covered(const Floats& buffer, const Layout& layout, std::int64_t B, std::int64_t T, std::int64_t heads,
               std::int64_t HS) {
  Floats values;
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t h = 0; h < heads; ++h) {
        const auto* head = layout.view<cpu::ConstHeadView>(buffer.data()).at(b, t, h);
        values.insert(values.end(), head, head + HS);
      }
  return values;
}

double norm(const Floats& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}
Floats difference(const Floats& a, const Floats& b) {
  Floats result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) result[i] = a[i] - b[i];
  return result;
}
float largest(const Floats& values) {
  float result = 0;
  for (const float value : values) result = std::max(result, std::fabs(value));
  return result;
}

// The worst figures of all cases, a row for each tensor.
struct Worst {
  double ratio = 0;     // ||gpu - cpu|| / e0, for 16-bit types
  double relative = 0;  // ||gpu - cpu|| / ||cpu||
};

template <typename T>
void expect_close(const std::string& name, const Floats& gpu, const Floats& cpu, Worst& worst) {
  const Floats error = difference(gpu, cpu);
  const double size = norm(cpu), off = norm(error), floor = 2e-6 * std::sqrt(static_cast<double>(cpu.size()));
  for (const float value : gpu) ASSERT_TRUE(std::isfinite(value)) << name << ": unwritten or not finite";
  const double e0 = norm(difference(widened(rounded<T>(cpu)), cpu));
  const double bound = (sizeof(T) == 4 ? 1e-4 * size : 3 * e0) + floor;
  EXPECT_LE(off, bound) << name << ": relative " << off / size << ", rounding alone " << e0 / size;
  const float element_bound = (sizeof(T) == 4 ? 1e-4f : 3 * kHalfUlp<T>)*largest(cpu) + 1e-5f;
  EXPECT_LE(largest(error), element_bound) << name << ": one element";
  if (size < 100 * floor) return;  // a gradient that vanishes has no relative error
  worst.relative = std::max(worst.relative, off / size);
  if (sizeof(T) == 2) worst.ratio = std::max(worst.ratio, off / e0);
}

// Inputs of one case as the GPU reads them (T) and as the CPU does (the same values in fp32), and the CPU's results.
template <typename T>
struct Problem {
  Case c;
  Layouts at;
  std::vector<T> q, k, v, dout, out_rounded;
  Floats out, lse, dq, dk, dv;

  explicit Problem(const Case& given) : c(given), at(layouts(given)) {
    const AttentionShape& s = c.shape;
    q = rounded<T>(random_normal(at.q, 1, c.magnitude));
    k = rounded<T>(random_normal(at.k, 2, c.magnitude));
    v = rounded<T>(random_normal(at.v, 3, 1));
    dout = rounded<T>(random_normal(at.out, 4, 1));
    const Floats q32 = widened(q), k32 = widened(k), v32 = widened(v), dout32 = widened(dout);
    out.assign(dout.size(), 0), lse.assign(static_cast<std::size_t>(s.B * s.NH * s.TQ), 0);
    dq.assign(q.size(), 0), dk.assign(k.size(), 0), dv.assign(v.size(), 0);
    const auto q_view = at.q.view<cpu::ConstHeadView>(q32.data()), k_view = at.k.view<cpu::ConstHeadView>(k32.data()),
               v_view = at.v.view<cpu::ConstHeadView>(v32.data());
    cpu::attention_forward(s, at.out.view<cpu::HeadView>(out.data()), lse.data(), q_view, k_view, v_view);
    out_rounded = rounded<T>(out);
    const Floats out32 = widened(out_rounded);  // the GPU's backward starts from the same rounded output
    cpu::attention_backward(s, at.q.view<cpu::HeadView>(dq.data()), at.k.view<cpu::HeadView>(dk.data()),
                            at.v.view<cpu::HeadView>(dv.data()), at.out.view<cpu::ConstHeadView>(dout32.data()),
                            at.out.view<cpu::ConstHeadView>(out32.data()), lse.data(), q_view, k_view, v_view);
  }
};

template <typename T>
struct Results {
  std::vector<T> out, dq, dk, dv;
  Floats lse;
};

// `shared_limit`: of the portable kernels; 0: by the kernels that this device gets.
template <typename T>
Results<T> run_gpu(const Problem<T>& p, int shared_limit = 0) {
  const AttentionShape& s = p.c.shape;
  const DeviceBuffer<T> q(p.q), k(p.k), v(p.v), dout(p.dout), out_given(p.out_rounded);
  const DeviceBuffer<T> out(p.dout.size()), dq(p.q.size()), dk(p.k.size()), dv(p.v.size());  // all poisoned
  const DeviceBuffer<float> lse(p.lse.size()), lse_given(p.lse);
  const DeviceBuffer<char> workspace(attention_backward_workspace(s));
  const auto input = [](const Layout& layout, const DeviceBuffer<T>& buffer) {
    return layout.view<HeadViewOf<const T>>(static_cast<const T*>(buffer.data()));
  };
  const auto output = [](const Layout& layout, const DeviceBuffer<T>& buffer) {
    return layout.view<HeadViewOf<T>>(buffer.data());
  };
  const ForwardArguments<T> forward = {
      s, output(p.at.out, out), lse.data(), input(p.at.q, q), input(p.at.k, k), input(p.at.v, v)};
  const BackwardArguments<T> backward = {s,
                                         output(p.at.q, dq),
                                         output(p.at.k, dk),
                                         output(p.at.v, dv),
                                         input(p.at.out, dout),
                                         input(p.at.out, out_given),
                                         lse_given.data(),
                                         forward.q,
                                         forward.k,
                                         forward.v,
                                         reinterpret_cast<RowStatistics*>(workspace.data())};
  if constexpr (!std::is_same_v<T, float>) {
    if (shared_limit > 0) {
      portable_forward<T>(forward, nullptr, shared_limit);
      portable_backward<T>(backward, nullptr, shared_limit);
    }
  }
  if (shared_limit == 0) {
    attention_forward<T>(s, forward.out, forward.lse, forward.q, forward.k, forward.v, nullptr);
    attention_backward<T>(s, backward.dq, backward.dk, backward.dv, backward.dout, backward.out, backward.lse,
                          backward.q, backward.k, backward.v, workspace.data(), nullptr);
  }
  return {out.download(), dq.download(), dk.download(), dv.download(), lse.download()};
}

struct WorstOfAll {
  Worst out, dq, dk, dv;
  double lse = 0;
  int cases = 0;

  void print(const char* type) const {
    if (cases == 0) return;
    const auto row = [&](const char* name, const Worst& worst) {
      std::printf("  %-5s %-4s relative error %.2e, in roundings of the result %.2f\n", type, name, worst.relative,
                  worst.ratio);
      testing::Test::RecordProperty(format("metric_%s_relative_error", name), format("%.2e", worst.relative));
    };
    std::printf("  %-5s worst of %d cases:\n", type, cases);
    row("out", out), row("dq", dq), row("dk", dk), row("dv", dv);
    std::printf("  %-5s lse  absolute error %.2e\n", type, lse);
  }
};

template <typename T>
void compare(const Case& c, WorstOfAll& worst, int shared_limit = 0) {
  const AttentionShape& s = c.shape;
  SCOPED_TRACE(format("B %d TQ %d TK %d NH %d NKV %d HS %d causal %d packing %d", int(s.B), int(s.TQ), int(s.TK),
                      int(s.NH), int(s.NKV), int(s.HS), int(s.causal), int(c.packing)));
  const Problem<T> p(c);
  const Results<T> gpu = run_gpu(p, shared_limit);
  const auto check = [&](const char* name, const std::vector<T>& result, const Floats& reference, const Layout& layout,
                         std::int64_t tokens, std::int64_t heads, Worst& row) {
    expect_close<T>(name, covered(widened(result), layout, s.B, tokens, heads, s.HS),
                    covered(reference, layout, s.B, tokens, heads, s.HS), row);
  };
  check("out", gpu.out, p.out, p.at.out, s.TQ, s.NH, worst.out);
  check("dq", gpu.dq, p.dq, p.at.q, s.TQ, s.NH, worst.dq);
  check("dk", gpu.dk, p.dk, p.at.k, s.TK, s.NKV, worst.dk);
  check("dv", gpu.dv, p.dv, p.at.v, s.TK, s.NKV, worst.dv);
  const float lse_off = largest(difference(gpu.lse, p.lse));
  EXPECT_LE(lse_off, 2e-5f * (1 + largest(p.lse))) << "lse";
  worst.lse = std::max(worst.lse, static_cast<double>(lse_off));
  ++worst.cases;
}

AttentionShape shape(std::int64_t B, std::int64_t TQ, std::int64_t TK, std::int64_t NH, std::int64_t NKV,
                     std::int64_t HS, bool causal = true) {
  AttentionShape s;
  s.B = B, s.TQ = TQ, s.TK = TK, s.NH = NH, s.NKV = NKV, s.HS = HS, s.causal = causal;
  s.scale = 1 / std::sqrt(static_cast<float>(HS));
  return s;
}

constexpr std::int64_t kHeadDims[] = {32, 64, 80, 96, 128, 256};

template <typename T>
class Attention : public testing::Test {
 protected:
  void run(const Case& c, int shared_limit = 0) { compare<T>(c, worst_, shared_limit); }
  void TearDown() override { worst_.print(dtype_name(kDType<T>)); }
  WorstOfAll worst_;
};
using Types = testing::Types<__nv_bfloat16, __half, float>;
TYPED_TEST_SUITE(Attention, Types);

TYPED_TEST(Attention, OddLengthsOfEveryHeadDimension) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {1, 7, 63, 65, 257, 1000}) this->run({shape(T < 100 ? 2 : 1, T, T, 4, 2, HS)});
}

// The tilings of devices whose blocks have no more shared memory than that, wherever this runs: long loops over keys and
// queries, and lengths that end within a tile.
template <typename T>
class AttentionOfSmallBlocks : public Attention<T> {};
using TensorCoreTypes = testing::Types<__nv_bfloat16, __half>;
TYPED_TEST_SUITE(AttentionOfSmallBlocks, TensorCoreTypes);

TYPED_TEST(AttentionOfSmallBlocks, EveryHeadDimension) {
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t T : {1, 65, 700}) this->run({shape(1, T, T, 4, 2, HS)}, kSharedBytesEverywhere);
    this->run({shape(2, 130, 330, 3, 1, HS)}, kSharedBytesEverywhere);
    this->run({shape(1, 300, 337, 4, 2, HS, false), Packing::llama_rows}, kSharedBytesEverywhere);
  }
}

TYPED_TEST(Attention, GroupsOfQueryHeads) {
  for (const std::int64_t group : {1, 2, 3, 4, 8})
    for (const std::int64_t HS : {64, 128}) this->run({shape(2, 150, 150, 2 * group, 2, HS)});
}

TYPED_TEST(Attention, QueriesAtTheEndOfLongerKeys) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t TQ : {1, 5, 64, 130})
      for (const std::int64_t past : {1, 63, 200}) this->run({shape(2, TQ, TQ + past, 4, 2, HS)});
}

TYPED_TEST(Attention, EveryKeyVisible) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {1, 65, 300}) {
      this->run({shape(1, T, T, 4, 2, HS, false)});
      this->run({shape(1, T, T + 37, 3, 1, HS, false)});
    }
}

TYPED_TEST(Attention, Layouts) {
  for (const std::int64_t HS : kHeadDims) {
    this->run({shape(2, 200, 200, 6, 2, HS), Packing::llama_rows});
    this->run({shape(2, 200, 200, 3, 3, HS), Packing::neox_rows});
    this->run({shape(2, 70, 200, 4, 2, HS), Packing::cache});
    this->run({shape(2, 70, 100, 4, 2, HS), Packing::odd});
    for (const Packing packing : {Packing::odd_q, Packing::odd_k, Packing::odd_v, Packing::odd_out})
      this->run({shape(2, 70, 70, 4, 2, HS), packing});
  }
}

// Scores of some hundreds: one key has almost all the weight, exponentials under- and would overflow.
TYPED_TEST(Attention, LargeMagnitudesStayFinite) {
  for (const std::int64_t HS : kHeadDims) {
    for (const float magnitude : {30.0f, 200.0f}) {
      const Problem<TypeParam> p({shape(1, 300, 300, 4, 2, HS), Packing::separate, magnitude});
      const Results<TypeParam> gpu = run_gpu(p);
      for (const auto* tensor : {&gpu.out, &gpu.dq, &gpu.dk, &gpu.dv})
        for (const float value : widened(*tensor)) ASSERT_TRUE(std::isfinite(value)) << "HS " << HS;
      for (const float value : gpu.lse) ASSERT_TRUE(std::isfinite(value)) << "HS " << HS;
      const Floats out = widened(gpu.out);
      // Scores of magnitude m^2 are known to m^2 sqrt(HS) 2^-24 only, and so are the weights.
      const double noise = 4 * magnitude * magnitude * std::sqrt(static_cast<double>(HS)) * 0x1p-24;
      EXPECT_LE(norm(difference(out, p.out)) / norm(p.out), 3 * kHalfUlp<TypeParam> + noise) << "HS " << HS;
    }
  }
}

TYPED_TEST(Attention, TwoRunsGiveTheSameBits) {
  for (const std::int64_t HS : kHeadDims) {
    const Problem<TypeParam> p({shape(2, 700, 700, 8, 2, HS)});
    const Results<TypeParam> first = run_gpu(p), second = run_gpu(p);
    const auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    EXPECT_TRUE(same(first.out, second.out) && same(first.lse, second.lse)) << "HS " << HS;
    EXPECT_TRUE(same(first.dq, second.dq) && same(first.dk, second.dk) && same(first.dv, second.dv)) << "HS " << HS;
  }
}

// What lies beside the covered elements stays as it was.
TYPED_TEST(Attention, WritesNothingElse) {
  const Case c = {shape(2, 70, 70, 4, 2, 64), Packing::llama_rows};
  const Problem<TypeParam> p(c);
  const Results<TypeParam> gpu = run_gpu(p);
  std::size_t poisoned = 0;
  for (const float value : widened(gpu.dk)) poisoned += std::isnan(value);
  EXPECT_EQ(poisoned, gpu.dk.size() - static_cast<std::size_t>(2 * 70 * 2 * 64));
}

TYPED_TEST(Attention, LseIsOptional) {
  const AttentionShape s = shape(1, 33, 33, 2, 1, 64);
  const Problem<TypeParam> p({s});
  const DeviceBuffer<TypeParam> q(p.q), k(p.k), v(p.v), out(p.dout.size());
  const auto view = [](const Layout& layout, const DeviceBuffer<TypeParam>& buffer) {
    return layout.view<HeadViewOf<TypeParam>>(buffer.data());
  };
  attention_forward<TypeParam>(s, view(p.at.out, out), nullptr, view(p.at.q, q), view(p.at.k, k), view(p.at.v, v),
                               nullptr);
  EXPECT_EQ(0, std::memcmp(out.download().data(), run_gpu(p).out.data(), 33 * 2 * 64 * sizeof(TypeParam)));
}

TEST(AttentionShapes, WhatNoKernelComputesIsRefused) {
  const auto reason = [](const AttentionShape& s) -> std::string {
    try {
      attention_forward<__half>(s, {}, nullptr, {}, {}, {}, nullptr);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::usage);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(reason(shape(1, 8, 8, 2, 2, 48)).find("got 48, expected 32, 64, 80, 96, 128 or 256"), std::string::npos);
  EXPECT_NE(reason(shape(1, 8, 8, 3, 2, 64)).find("3 query heads, 2 K/V heads"), std::string::npos);
  EXPECT_NE(reason(shape(1, 9, 8, 2, 2, 64)).find("TQ 9, TK 8"), std::string::npos);
  EXPECT_NE(reason(shape(1, 8, 524'281, 2, 2, 64)).find("TK 524281"), std::string::npos);
  EXPECT_NE(reason(shape(134'217'728, 8, 8, 2, 2, 64)).find("B 134217728"), std::string::npos);
  AttentionShape no_scale = shape(1, 8, 8, 2, 2, 64);
  no_scale.scale = 0;
  EXPECT_NE(reason(no_scale).find("scale: got 0"), std::string::npos);
}

}  // namespace
}  // namespace weft::cuda
