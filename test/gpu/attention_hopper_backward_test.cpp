// The Hopper kernels of the attention backward pass, by themselves: against fp64 on the CPU, and against the plain fp32
// kernels. attention_test.cpp runs them too, through attention_backward().
//
// Tolerance, as in attention_test.cpp: e0 is the 2-norm of what rounding the exact result to T costs. The kernels round
// P, dS and the result, each no worse than the result's rounding: ||gpu - exact|| <= 3 e0, and no element may be off by
// more than 3 half units in the last place of the largest one. Gradients that vanish (one visible key) leave fp32 noise.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/attention/train/paths.h"
#include "llmc/cuda/op/fp8/fp8.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/model/config.h"
#include "test/gpu/attention_tools.h"
#include "test/gpu/device_buffer.h"

namespace weft::cuda {
namespace {

using namespace test;

struct Case {
  AttentionShape shape;
  Packing packing = Packing::llama_rows;
  std::int64_t guard = 0;     // tokens after the last of each sequence, in every tensor
  float magnitude = 1;        // standard deviation of q and k
  std::int64_t rotary = 0;    // dimensions of a head that RoPE has rotated
  std::int64_t document = 0;  // tokens of each document; 0: one document
};
// Position of the first token of query t's document.
std::int64_t document_start(const Case& c, std::int64_t t) {
  return c.document > 0 ? t / c.document * c.document : 0;
}
std::vector<std::int32_t> document_starts(const Case& c) {
  std::vector<std::int32_t> starts;
  for (std::int64_t i = 0; c.document > 0 && i < c.shape.B * c.shape.TQ; ++i)
    starts.push_back(static_cast<std::int32_t>(document_start(c, i % c.shape.TQ)));
  return starts;
}
Layouts layouts(const Case& c) {
  const AttentionShape& s = c.shape;
  const std::int64_t q = s.NH * s.HS, kv = s.NKV * s.HS, capacity = s.TK + c.guard;
  const auto rows = [&](std::int64_t width, std::int64_t first, std::int64_t head_stride) {
    return Layout{first, capacity * width, width, head_stride, s.B * capacity * width};
  };
  const Layout out = rows(q, 0, s.HS);
  const Layout cache = {0, s.NKV * capacity * s.HS, s.HS, capacity * s.HS, s.B * s.NKV * capacity * s.HS};
  switch (c.packing) {
    case Packing::llama_rows:
      return {rows(q + 2 * kv, 0, s.HS), rows(q + 2 * kv, q, s.HS), rows(q + 2 * kv, q + kv, s.HS), out};
    case Packing::neox_rows:
      return {rows(3 * q, 0, 3 * s.HS), rows(3 * q, s.HS, 3 * s.HS), rows(3 * q, 2 * s.HS, 3 * s.HS), out};
    case Packing::cache:  // [B, heads, capacity, HS]
      return {rows(q, 0, s.HS), cache, cache, out};
    default:
      return {out, rows(kv, 0, s.HS), rows(kv, 0, s.HS), out};
  }
}

Case square(std::int64_t B, std::int64_t T, std::int64_t NH, std::int64_t NKV, std::int64_t HS,
            Packing packing = Packing::llama_rows) {
  Case c;
  c.shape.B = B, c.shape.TQ = T, c.shape.TK = T, c.shape.NH = NH, c.shape.NKV = NKV, c.shape.HS = HS;
  c.shape.scale = 1 / std::sqrt(static_cast<float>(HS));
  c.packing = packing;
  return c;
}

std::size_t elements(const Layout& layout) {
  return static_cast<std::size_t>(layout.elements);
}

// Visits (b, t, h, d) of a tensor in [B, T, heads, HS] order.
template <typename Visit>
void each(const AttentionShape& s, std::int64_t heads, const Visit& visit) {
  for (std::int64_t b = 0; b < s.B; ++b)
    for (std::int64_t t = 0; t < s.TQ; ++t)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t d = 0; d < s.HS; ++d) visit(b, t, h, d);
}

// What a layout covers, in [B, T, heads, HS] order.
template <typename T>
Doubles covered(const AttentionShape& s, const Layout& layout, const std::vector<T>& buffer, std::int64_t heads) {
  Doubles values;
  const HeadViewOf<const T> view = layout.view(buffer.data());
  each(s, heads, [&](auto b, auto t, auto h, auto d) { values.push_back(widen(view.at(b, t, h)[d])); });
  return values;
}
template <typename T>
std::vector<T> laid_out(const AttentionShape& s, const Layout& layout, const Doubles& values, std::int64_t heads,
                        float beside) {
  std::vector<T> buffer(elements(layout), rounded<T>(beside));
  const HeadViewOf<T> view = layout.view(buffer.data());
  auto next = values.begin();
  each(s, heads,
       [&](auto b, auto t, auto h, auto d) { view.at(b, t, h)[d] = rounded<T>(static_cast<float>(*next++)); });
  return buffer;
}

// Tensors in [B, T, heads, HS] order.
struct Gradients {
  Doubles dq, dk, dv;
};
struct Tensors {
  Doubles q, k, v, dout, out, lse;
};

// Attention and its gradients in fp64, straight from the formulas of hopper_backward.cu. The sum over dout * out, whose
// gradients these are, is returned by forward().
struct Exact {
  AttentionShape s;
  Case c = {};
  std::int64_t first_key(std::int64_t t) const {
    return std::max(document_start(c, t), s.window > 0 ? t + 1 - s.window : 0);
  }
  std::size_t at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t heads) const {
    return static_cast<std::size_t>(((b * s.TQ + t) * heads + h) * s.HS);
  }
  double dot(const Doubles& a, std::size_t i, const Doubles& b, std::size_t j) const {
    double sum = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(s.HS); ++d) sum += a[i + d] * b[j + d];
    return sum;
  }
  double forward(Tensors& x) const {
    x.out.assign(x.q.size(), 0), x.lse.assign(static_cast<std::size_t>(s.B * s.NH * s.TQ), 0);
#pragma omp parallel for collapse(3) schedule(dynamic, 16)
    for (std::int64_t b = 0; b < s.B; ++b)
      for (std::int64_t h = 0; h < s.NH; ++h)
        for (std::int64_t t = 0; t < s.TQ; ++t) {
          const std::int64_t kv = h / (s.NH / s.NKV);
          const std::size_t query = at(b, t, h, s.NH);
          Doubles score;
          const std::int64_t first = first_key(t);
          for (std::int64_t j = first; j <= t; ++j)
            score.push_back(dot(x.q, query, x.k, at(b, j, kv, s.NKV)) * s.scale);
          const double largest = *std::max_element(score.begin(), score.end());
          double sum = 0;
          for (const double value : score) sum += std::exp(value - largest);
          const double lse = largest + std::log(sum);
          x.lse[static_cast<std::size_t>((b * s.NH + h) * s.TQ + t)] = lse;
          for (std::int64_t j = first; j <= t; ++j)
            for (std::size_t d = 0; d < static_cast<std::size_t>(s.HS); ++d)
              x.out[query + d] +=
                  std::exp(score[static_cast<std::size_t>(j - first)] - lse) * x.v[at(b, j, kv, s.NKV) + d];
        }
    double sum = 0;
    for (std::size_t i = 0; i < x.out.size(); ++i) sum += x.out[i] * x.dout[i];
    return sum;
  }
  Gradients backward(const Tensors& x) const {
    Gradients g{Doubles(x.q.size()), Doubles(x.k.size()), Doubles(x.v.size())};
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (std::int64_t b = 0; b < s.B; ++b)
      for (std::int64_t kv = 0; kv < s.NKV; ++kv)
        for (std::int64_t h = kv * (s.NH / s.NKV); h < (kv + 1) * (s.NH / s.NKV); ++h)
          for (std::int64_t t = 0; t < s.TQ; ++t) {
            const std::size_t query = at(b, t, h, s.NH);
            const double D = dot(x.dout, query, x.out, query);
            for (std::int64_t j = first_key(t); j <= t; ++j) {
              const std::size_t key = at(b, j, kv, s.NKV);
              const double P = std::exp(dot(x.q, query, x.k, key) * s.scale -
                                        x.lse[static_cast<std::size_t>((b * s.NH + h) * s.TQ + t)]);
              const double dS = P * (dot(x.dout, query, x.v, key) - D) * s.scale;
              for (std::size_t d = 0; d < static_cast<std::size_t>(s.HS); ++d) {
                g.dv[key + d] += P * x.dout[query + d];
                g.dq[query + d] += dS * x.k[key + d];
                g.dk[key + d] += dS * x.q[query + d];
              }
            }
          }
    return g;
  }
};

// Inputs as T holds them, in fp64; the output rounded to T as the forward pass leaves it.
template <typename T>
Tensors random_tensors(const Case& c, unsigned seed = 1) {
  const AttentionShape& s = c.shape;
  std::mt19937 generator(seed);
  const auto fill = [&](std::int64_t heads, float magnitude) {
    std::normal_distribution<float> normal(0, magnitude);
    Doubles values(static_cast<std::size_t>(s.B * s.TQ * heads * s.HS));
    for (double& value : values) value = widen(rounded<T>(normal(generator)));
    return values;
  };
  Tensors x;
  x.q = fill(s.NH, c.magnitude), x.k = fill(s.NKV, c.magnitude), x.v = fill(s.NKV, 1), x.dout = fill(s.NH, 1);
  return x;
}

template <typename T>
using Kernel = std::function<void(const BackwardArguments<T>&, cudaStream_t)>;

template <typename T>
void portable(const BackwardArguments<T>& arguments, cudaStream_t stream) {
  portable_backward<T>(arguments, stream);
}

template <typename T>
struct Results {
  std::vector<T> dq, dk, dv;
  bool operator==(const Results& other) const {
    const auto same = [](const std::vector<T>& a, const std::vector<T>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
    };
    return same(dq, other.dq) && same(dk, other.dk) && same(dv, other.dv);
  }
};

// A problem on the device: what the views do not cover is `beside`. Outputs and workspace are NaN before a run.
template <typename T>
struct OnDevice {
  Case c;
  Layouts at;
  DeviceBuffer<T> q, k, v, dout, out, dq, dk, dv;
  DeviceBuffer<float> lse;
  DeviceBuffer<char> workspace;
  DeviceBuffer<std::int32_t> starts;

  OnDevice(const Case& given, const Tensors& x, float beside = NAN)
      : c(given),
        at(layouts(given)),
        q(laid_out<T>(c.shape, at.q, x.q, c.shape.NH, beside)),
        k(laid_out<T>(c.shape, at.k, x.k, c.shape.NKV, beside)),
        v(laid_out<T>(c.shape, at.v, x.v, c.shape.NKV, beside)),
        dout(laid_out<T>(c.shape, at.out, x.dout, c.shape.NH, beside)),
        out(laid_out<T>(c.shape, at.out, x.out, c.shape.NH, beside)),
        dq(elements(at.q)),
        dk(elements(at.k)),
        dv(elements(at.v)),
        lse(std::vector<float>(x.lse.begin(), x.lse.end())),
        workspace(attention_backward_workspace(c.shape)),
        starts(document_starts(c)) {
    if (c.document > 0) c.shape.document_starts = starts.data();
  }

  BackwardArguments<T> arguments() const {
    const auto input = [](const Layout& layout, const DeviceBuffer<T>& buffer) {
      return layout.view(static_cast<const T*>(buffer.data()));
    };
    return {c.shape,
            at.q.view(dq.data()),
            at.k.view(dk.data()),
            at.v.view(dv.data()),
            input(at.out, dout),
            input(at.out, out),
            lse.data(),
            input(at.q, q),
            input(at.k, k),
            input(at.v, v),
            reinterpret_cast<RowStatistics*>(workspace.data())};
  }
  void poison() { dq.fill_bytes(0xff), dk.fill_bytes(0xff), dv.fill_bytes(0xff), workspace.fill_bytes(0xff); }
  Results<T> download() const {
    check(cudaDeviceSynchronize(), "test: kernels");
    return {dq.download(), dk.download(), dv.download()};
  }
  Results<T> run(const Kernel<T>& kernel) {
    poison();
    kernel(arguments(), nullptr);
    return download();
  }
  Gradients values(const Results<T>& r) const {
    return {covered(c.shape, at.q, r.dq, c.shape.NH), covered(c.shape, at.k, r.dk, c.shape.NKV),
            covered(c.shape, at.v, r.dv, c.shape.NKV)};
  }
};

// Angles of every size; positions that no query has are NaN.
RopeTable angles(const Case& c) {
  RopeTable table;
  table.half = c.rotary / 2, table.positions = c.shape.TQ + 3;
  for (std::int64_t i = 0; i < table.positions * table.half; ++i) {
    const double angle = 0.37 * static_cast<double>(i) + 0.11;
    table.cos.push_back(i < c.shape.TQ * table.half ? static_cast<float>(std::cos(angle)) : NAN);
    table.sin.push_back(i < c.shape.TQ * table.half ? static_cast<float>(std::sin(angle)) : NAN);
  }
  return table;
}

// The transpose of y = (x cos - z sin, z cos + x sin), the rotation of llmc/cpu/rope.h. Positions begin with each document.
void unrotate(const Case& c, const RopeTable& table, Doubles& gradient, std::int64_t heads) {
  const auto half = static_cast<std::size_t>(table.half);
  for (std::size_t row = 0; row < gradient.size() / static_cast<std::size_t>(c.shape.HS); ++row) {
    const auto token = static_cast<std::int64_t>(row) / heads % c.shape.TQ;
    const auto t = static_cast<std::size_t>(token - document_start(c, token));
    for (std::size_t i = 0; i < half; ++i) {
      const double cosine = table.cos[t * half + i], sine = table.sin[t * half + i];
      double &x = gradient[row * static_cast<std::size_t>(c.shape.HS) + i], &z = (&x)[half];
      const double unrotated = x * cosine + z * sine;
      z = z * cosine - x * sine;
      x = unrotated;
    }
  }
}

std::string name(const Case& c) {
  const AttentionShape& s = c.shape;
  return format("B %d T %d NH %d NKV %d HS %d packing %d window %d documents of %d", int(s.B), int(s.TQ), int(s.NH),
                int(s.NKV), int(s.HS), int(c.packing), int(s.window), int(c.document));
}

template <typename T>
class AttentionHopperBackward : public testing::Test {
 protected:
  void SetUp() override {
    if (hopper_multiprocessors() == 0) GTEST_SKIP() << "not a GPU of compute capability 9.0";
  }
  void TearDown() override {
    if (cases_ > 0)
      std::printf("  worst of %d cases: dq %.2f, dk %.2f, dv %.2f roundings of the result\n", cases_, worst_[0],
                  worst_[1], worst_[2]);
  }

  void check_one(const char* what, const Doubles& got, const Doubles& want, double& worst) {
    Doubles rounding(want.size());
    for (std::size_t i = 0; i < want.size(); ++i)
      rounding[i] = widen(rounded<T>(static_cast<float>(want[i]))) - want[i];
    const Doubles error = difference(got, want);
    const double e0 = norm(rounding), floor = 2e-6 * std::sqrt(static_cast<double>(want.size()));
    EXPECT_LE(norm(error), 3 * e0 + floor) << what << ": rounding alone " << e0 << ", size " << norm(want);
    EXPECT_LE(largest(error), 3 * kHalfUlp<T> * largest(want) + 1e-5) << what << ": one element";
    if (norm(want) > 100 * floor) worst = std::max(worst, norm(error) / e0);
  }
  void check_close(const Gradients& got, const Gradients& want) {
    check_one("dq", got.dq, want.dq, worst_[0]);
    check_one("dk", got.dk, want.dk, worst_[1]);
    check_one("dv", got.dv, want.dv, worst_[2]);
    ++cases_;
  }

  // Against fp64.
  void compare(const Case& c) {
    SCOPED_TRACE(name(c));
    Tensors x = random_tensors<T>(c);
    const Exact exact{c.shape, c};
    exact.forward(x);
    for (double& value : x.out) value = widen(rounded<T>(static_cast<float>(value)));
    OnDevice<T> device(c, x);
    check_close(device.values(device.run(hopper_backward<T>)), exact.backward(x));
  }

  // Inputs of a size at which fp64 takes too long, with the plain kernel's output and statistics.
  static Tensors large(const Case& c) {
    Tensors x = random_tensors<T>(c);
    x.out.assign(x.q.size(), 0), x.lse.assign(static_cast<std::size_t>(c.shape.B * c.shape.NH * c.shape.TQ), 0);
    const OnDevice<T> device(c, x);
    const BackwardArguments<T> a = device.arguments();
    const DeviceBuffer<float> lse(x.lse.size());
    const DeviceBuffer<T> out(elements(device.at.out));
    plain_forward<T>({a.shape, device.at.out.view(out.data()), lse.data(), a.q, a.k, a.v}, nullptr);
    x.out = covered(c.shape, device.at.out, out.download(), c.shape.NH);
    const std::vector<float> values = lse.download();
    x.lse.assign(values.begin(), values.end());
    return x;
  }

  double worst_[3] = {0, 0, 0};
  int cases_ = 0;
};
using Types = testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(AttentionHopperBackward, Types);

constexpr std::int64_t kHeadDims[] = {64, 128};

TYPED_TEST(AttentionHopperBackward, OddLengths) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {1, 7, 63, 64, 65, 127, 128, 129, 191, 193, 257, 384})
      this->compare(square(2, T, 2, 1, HS));
}

TYPED_TEST(AttentionHopperBackward, GroupsOfQueryHeads) {
  for (const std::int64_t group : {1, 2, 3, 4, 8})
    for (const std::int64_t HS : kHeadDims) this->compare(square(2, 150, 2 * group, 2, HS));
}

// The blocks of keys that a tile of queries sees begin anywhere: the first of them stores dQ, the others add.
TYPED_TEST(AttentionHopperBackward, WindowsAndDocuments) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {130, 517, 1030})
      for (const std::int64_t bound : {1, 2, 63, 64, 65, 127, 128, 129, 200, 257, 513}) {
        Case window = square(1, T, 4, 2, HS), documents = window, both = window;
        window.shape.window = bound;
        documents.document = bound;
        both.shape.window = 100, both.document = bound;
        for (const Case& c : {window, documents, both}) this->compare(c);
      }
}

// Work is ordered by sections of 16 K/V heads at this length: two of them, and one of 8.
TYPED_TEST(AttentionHopperBackward, HeadsOfSeveralSections) {
  for (const std::int64_t HS : kHeadDims) this->compare(square(5, 130, 16, 8, HS));
}

TYPED_TEST(AttentionHopperBackward, Layouts) {
  for (const std::int64_t HS : kHeadDims)
    for (const Packing packing : {Packing::separate, Packing::llama_rows, Packing::neox_rows, Packing::cache})
      this->compare(square(2, 200, 4, packing == Packing::neox_rows ? 4 : 2, HS, packing));
}

// Through attention_backward(): dq and dk of q and k before RoPE. A table of half a head is the kernel's own work; of a
// quarter, or with rows that are not aligned, that of the kernel of rope.h.
TYPED_TEST(AttentionHopperBackward, GradientsOfWhatWasBeforeRope) {
  using T = TypeParam;
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t part : {1, 2})
      for (const auto& [length, group, document] : {std::array{1, 1, 0},
                                                    {65, 3, 0},
                                                    {127, 4, 0},
                                                    {200, 5, 0},
                                                    {300, 8, 0},
                                                    {65, 3, 64},
                                                    {200, 5, 1},
                                                    {200, 2, 37},
                                                    {300, 1, 129}}) {
        Case c = square(2, length, 2 * group, 2, HS);
        c.rotary = HS / part, c.document = document;
        SCOPED_TRACE(name(c));
        Tensors x = random_tensors<T>(c);
        const Exact exact{c.shape, c};
        exact.forward(x);
        for (double& value : x.out) value = widen(rounded<T>(static_cast<float>(value)));
        Gradients want = exact.backward(x);
        const RopeTable table = angles(c);
        unrotate(c, table, want.dq, c.shape.NH);
        unrotate(c, table, want.dk, c.shape.NKV);
        const DeviceBuffer<float> cosines(table.cos), sines(table.sin);
        OnDevice<T> device(c, x);
        const DeviceRopeTable rope = {cosines.data(), sines.data(), table.positions, table.half,
                                      device.c.shape.document_starts};
        EXPECT_EQ(part == 1, hopper_backward_unrotates(c.shape, rope));
        this->check_close(device.values(device.run([&](const BackwardArguments<T>& a, cudaStream_t stream) {
          attention_backward<T>(a.shape, a.dq, a.dk, a.dv, a.dout, a.out, a.lse, a.q, a.k, a.v, a.statistics, stream,
                                rope);
        })),
                          want);
      }
}

// Several blocks of keys a head, more work than multiprocessors; the witness is the plain kernel in fp32. The portable
// kernels are held to it as well: what other GPUs train with is compared with nothing else at this size.
TYPED_TEST(AttentionHopperBackward, LongSequencesAgreeWithThePlainKernel) {
  using T = TypeParam;
  for (const std::int64_t HS : kHeadDims)
    for (const auto& [B, length, NH, NKV] : {std::array{1, 1000, 4, 2}, {2, 2049, 4, 1}, {2, 1111, 24, 8}}) {
      const Case c = square(B, length, NH, NKV, HS);
      SCOPED_TRACE(name(c));
      const Tensors x = this->large(c);
      OnDevice<T> device(c, x);
      OnDevice<float> witness(c, x);
      const Gradients want = witness.values(witness.run(plain_backward<float>));
      this->check_close(device.values(device.run(hopper_backward<T>)), want);
      SCOPED_TRACE("portable");
      this->check_close(device.values(device.run(portable<T>)), want);
    }
}

// attention_backward_fp8() against attention_backward() with quantize_fp8() behind it.
class AttentionHopperCodes : public AttentionHopperBackward<bf16> {
 protected:
  void compare_codes(const Case& c, bool finite = true) {
    SCOPED_TRACE(name(c) + ", rotary " + std::to_string(c.rotary) + (finite ? "" : ", not finite"));
    Tensors x = large(c);
    if (!finite) x.dout[x.dout.size() / 2] = NAN;
    OnDevice<bf16> device(c, x);
    const BackwardArguments<bf16> a = device.arguments();
    const AttentionShape& s = a.shape;
    const RopeTable table = angles(c);
    const DeviceBuffer<float> cosines(table.cos), sines(table.sin);
    const DeviceRopeTable rope =
        c.rotary > 0 ? DeviceRopeTable{cosines.data(), sines.data(), table.positions, table.half, s.document_starts}
                     : DeviceRopeTable{};
    ASSERT_TRUE(attention_backward_rounds(s, rope));

    const std::int64_t q = s.NH * s.HS, kv = s.NKV * s.HS, row = q + 2 * kv, N = s.B * s.TQ;
    const auto view = [&](auto* data, std::int64_t first) {
      return HeadViewOf<std::remove_pointer_t<decltype(data)>>{data + first, s.TQ * row, row, s.HS};
    };
    const DeviceBuffer<bf16> gradients(static_cast<std::size_t>(N * row));
    device.poison();
    attention_backward<bf16>(s, view(gradients.data(), 0), view(gradients.data(), q), view(gradients.data(), q + kv),
                             a.dout, a.out, a.lse, a.q, a.k, a.v, a.statistics, nullptr, rope);
    for (const int exponent : {-8, 18}) {  // flushes values; saturates
      SCOPED_TRACE(exponent);
      const DeviceBuffer<float> scale(std::vector<float>{std::ldexp(1.0f, exponent)});
      const Fp8Counters before{3, 5, 1, 0};  // counters are added to
      const DeviceBuffer<Fp8Counters> counters(std::vector<Fp8Counters>{before, before});
      const DeviceBuffer<std::uint8_t> want(gradients.size() + 16), got(gradients.size() + 16);
      quantize_fp8(Fp8Format::e5m2, {want.data(), nullptr, scale.data(), counters.data()}, gradients.data(), N, row,
                   nullptr);
      device.poison();
      attention_backward_fp8(
          s, {view(got.data(), 0), view(got.data(), q), view(got.data(), q + kv), scale.data(), counters.data() + 1},
          a.dout, a.out, a.lse, a.q, a.k, a.v, a.statistics, nullptr, rope);
      check(cudaDeviceSynchronize(), "test: kernels");
      EXPECT_EQ(got.download(), want.download());
      const std::vector<Fp8Counters> both = counters.download();
      EXPECT_EQ(both[1], both[0]);
      if (!finite) {
        EXPECT_GT(both[1].amax_bits, 0x7F800000u);
      } else if (N * row > 10'000) {
        EXPECT_GT(exponent < 0 ? both[1].flushed - before.flushed : both[1].saturated - before.saturated, 0u);
      }
    }
  }
};

TEST_F(AttentionHopperCodes, AreThoseOfThePass) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t rotary : {std::int64_t{0}, HS}) {
      const auto compare = [&](Case c, bool finite = true) {
        c.rotary = rotary;
        compare_codes(c, finite);
      };
      for (const std::int64_t T : {1, 7, 63, 64, 65, 127, 128, 129, 191, 193, 257, 384})
        compare(square(2, T, 2, 1, HS));
      for (const std::int64_t group : {1, 3, 4, 5, 8}) compare(square(2, 150, 2 * group, 2, HS));
      compare(square(2, 1111, 24, 8, HS));
      compare(square(2, 150, 4, 2, HS), false);
      Case bounded = square(2, 1111, 6, 2, HS);
      bounded.shape.window = 200, bounded.document = 300;
      compare(bounded);
    }
}

TEST_F(AttentionHopperCodes, AreRefusedWhereNoKernelWritesThem) {
  Case c = square(1, 64, 2, 1, 64);
  c.rotary = 32;  // a part of a head: RoPE's own kernel would have to follow
  const RopeTable table = angles(c);
  const DeviceBuffer<float> cosines(table.cos), sines(table.sin);
  EXPECT_FALSE(attention_backward_rounds(c.shape, {cosines.data(), sines.data(), table.positions, table.half}));
  EXPECT_TRUE(attention_backward_rounds(c.shape, {}));
  c.shape.HS = 80;
  EXPECT_FALSE(attention_backward_rounds(c.shape, {}));
  EXPECT_THROW(attention_backward_fp8(c.shape, {}, {}, {}, nullptr, {}, {}, {}, nullptr, nullptr, {}), Error);
}

// The reference itself: its gradients are the slopes of its forward pass, along random directions.
TEST(AttentionHopperBackwardReference, FiniteDifferences) {
  const Case c = square(2, 37, 6, 2, 64);
  const Exact exact{c.shape};
  Tensors x = random_tensors<float>(c);
  exact.forward(x);
  const Gradients g = exact.backward(x);
  const Tensors direction = random_tensors<float>(c, 2);
  const auto moved = [&](double step, int which) {
    Tensors y = x;
    const auto add = [&](Doubles& values, const Doubles& along) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] += step * along[i];
    };
    if (which == 0) add(y.q, direction.q);
    if (which == 1) add(y.k, direction.k);
    if (which == 2) add(y.v, direction.v);
    return exact.forward(y);
  };
  const auto along = [](const Doubles& a, const Doubles& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  };
  const double expected[] = {along(g.dq, direction.q), along(g.dk, direction.k), along(g.dv, direction.v)};
  for (int which = 0; which < 3; ++which) {
    const double step = 1e-5, slope = (moved(step, which) - moved(-step, which)) / (2 * step);
    EXPECT_NEAR(slope, expected[which], 1e-6 * (1 + std::fabs(expected[which]))) << which;
  }
}

// The order in which blocks add to dQ is fixed, whatever else the GPU does and however many blocks it runs at a time.
TYPED_TEST(AttentionHopperBackward, EveryRunGivesTheSameBits) {
  using T = TypeParam;
  for (const std::int64_t HS : kHeadDims) {
    const Case c = square(3, 1500, 16, 4, HS);
    const Tensors x = this->large(c);
    OnDevice<T> device(c, x), other(c, x);
    const Results<T> first = device.run(hopper_backward<T>);
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "test: stream");
    for (int run = 0; run < 10; ++run) {
      device.poison();
      check(cudaDeviceSynchronize(), "test: poison");
      if (run % 2) portable_backward<T>(other.arguments(), stream);  // takes some of the multiprocessors, for a while
      hopper_backward<T>(device.arguments(), nullptr);
      EXPECT_TRUE(device.download() == first) << "HS " << HS << ", run " << run;
    }
    check(cudaStreamDestroy(stream), "test: stream");
  }
}

// Rows past the end of a sequence may hold anything, and outputs stay untouched there.
TYPED_TEST(AttentionHopperBackward, NothingBesideTheTensorsIsReadOrWritten) {
  using T = TypeParam;
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t length : {1, 65, 300}) {
      Case c = square(2, length, 4, 2, HS);
      c.guard = 131;
      SCOPED_TRACE(name(c));
      Tensors x = random_tensors<T>(c);
      Exact{c.shape}.forward(x);
      OnDevice<T> beside_nan(c, x, NAN), beside_zero(c, x, 0);
      const Results<T> result = beside_nan.run(hopper_backward<T>);
      EXPECT_TRUE(result == beside_zero.run(hopper_backward<T>));
      const auto finite = [](const std::vector<T>& values) {
        return static_cast<std::int64_t>(
            std::count_if(values.begin(), values.end(), [](T value) { return std::isfinite(widen(value)); }));
      };
      EXPECT_EQ(finite(result.dq), 2 * length * 4 * HS);
      EXPECT_EQ(finite(result.dk), 2 * length * 2 * HS);
      EXPECT_EQ(finite(result.dv), 2 * length * 2 * HS);
    }
}

// Scores of some hundreds: P is 0 or 1 almost everywhere, and keys that no query sees would overflow.
TYPED_TEST(AttentionHopperBackward, LargeMagnitudesStayFinite) {
  using T = TypeParam;
  for (const std::int64_t HS : kHeadDims)
    for (const float magnitude : {30.0f, 200.0f}) {
      Case c = square(1, 300, 4, 2, HS);
      c.magnitude = magnitude;
      OnDevice<T> device(c, this->large(c));
      const Gradients g = device.values(device.run(hopper_backward<T>));
      EXPECT_TRUE(std::isfinite(largest(g.dq)) && std::isfinite(largest(g.dk)) && std::isfinite(largest(g.dv)))
          << "HS " << HS << " magnitude " << magnitude;
    }
}

TYPED_TEST(AttentionHopperBackward, InACapturedGraph) {
  using T = TypeParam;
  const Case c = square(2, 333, 8, 2, 128);
  OnDevice<T> device(c, this->large(c));
  const Results<T> expected = device.run(hopper_backward<T>);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  check(cudaStreamCreate(&stream), "test: stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "test: capture");
  hopper_backward<T>(device.arguments(), stream);
  check(cudaStreamEndCapture(stream, &graph), "test: capture");
  check(cudaGraphInstantiate(&ready, graph, 0), "test: graph");
  for (int run = 0; run < 3; ++run) {
    device.poison();
    check(cudaDeviceSynchronize(), "test: poison");
    check(cudaGraphLaunch(ready, stream), "test: launch");
    EXPECT_TRUE(device.download() == expected) << run;
  }
  check(cudaGraphExecDestroy(ready), "test: graph");
  check(cudaGraphDestroy(graph), "test: graph");
  check(cudaStreamDestroy(stream), "test: stream");
}

// attention_backward() takes these kernels for what they compute, and the portable ones for the rest.
TYPED_TEST(AttentionHopperBackward, Dispatch) {
  using T = TypeParam;
  const auto dispatched = [](const BackwardArguments<T>& a, cudaStream_t stream) {
    attention_backward<T>(a.shape, a.dq, a.dk, a.dv, a.dout, a.out, a.lse, a.q, a.k, a.v, a.statistics, stream);
  };
  for (const bool causal : {true, false}) {
    Case c = square(1, 500, 4, 2, 64);
    const Tensors x = this->large(c);
    c.shape.causal = causal;
    OnDevice<T> device(c, x);
    const Results<T> result = device.run(dispatched);
    EXPECT_EQ(causal, hopper_backward_computes(c.shape));
    EXPECT_EQ(result == device.run(portable<T>), !causal);
    if (causal) {
      EXPECT_TRUE(result == device.run(hopper_backward<T>));
    }
  }
  AttentionShape longer = square(1, 64, 2, 2, 64).shape;
  longer.TK = 65;
  EXPECT_FALSE(hopper_backward_computes(longer));
  EXPECT_FALSE(hopper_backward_computes(square(1, 64, 2, 2, 96).shape));
}

}  // namespace
}  // namespace weft::cuda
