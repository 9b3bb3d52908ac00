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
  float magnitude = 1;                    // standard deviation of q and k
  std::vector<std::int32_t> starts = {};  // document_starts; none: one document
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

// HS: the gradient of a score is dP - D, two sums of HS products. Where it vanishes, as in a row that sees one key, their rounding is
// left, which grows with HS.
template <typename T>
void expect_close(const std::string& name, const Floats& gpu, const Floats& cpu, std::int64_t HS, Worst& worst) {
  const Floats error = difference(gpu, cpu);
  const double size = norm(cpu), off = norm(error), floor = 2e-6 * std::sqrt(static_cast<double>(cpu.size()));
  for (const float value : gpu) ASSERT_TRUE(std::isfinite(value)) << name << ": unwritten or not finite";
  const double e0 = norm(difference(widened(rounded<T>(cpu)), cpu));
  const double bound = (sizeof(T) == 4 ? 1e-4 * size : 3 * e0) + floor;
  EXPECT_LE(off, bound) << name << ": relative " << off / size << ", rounding alone " << e0 / size;
  const float element_bound =
      (sizeof(T) == 4 ? 1e-4f : 3 * kHalfUlp<T>)*largest(cpu) + 1e-5f * std::max(1.0f, static_cast<float>(HS) / 128);
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

  Problem(const Problem&) = delete;
  explicit Problem(const Case& given) : c(given), at(layouts(given)) {
    if (!c.starts.empty()) c.shape.document_starts = c.starts.data();
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
  AttentionShape s = p.c.shape;
  const DeviceBuffer<std::int32_t> starts(p.c.starts);
  if (!p.c.starts.empty()) s.document_starts = starts.data();
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
  SCOPED_TRACE(format("B %d TQ %d TK %d NH %d NKV %d HS %d causal %d packing %d window %d documents %d", int(s.B),
                      int(s.TQ), int(s.TK), int(s.NH), int(s.NKV), int(s.HS), int(s.causal), int(c.packing),
                      int(s.window), int(!c.starts.empty())));
  const Problem<T> p(c);
  const Results<T> gpu = run_gpu(p, shared_limit);
  const auto check = [&](const char* name, const std::vector<T>& result, const Floats& reference, const Layout& layout,
                         std::int64_t tokens, std::int64_t heads, Worst& row) {
    expect_close<T>(name, covered(widened(result), layout, s.B, tokens, heads, s.HS),
                    covered(reference, layout, s.B, tokens, heads, s.HS), s.HS, row);
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

// ---- windows and documents --------------------------------------------------------------------------------------------

AttentionShape windowed(AttentionShape s, std::int64_t window) {
  s.window = window;
  return s;
}

// [T] document starts of documents of these lengths, one after the other and again from the first, until T is full.
std::vector<std::int32_t> documents(const std::vector<std::int64_t>& lengths, std::int64_t T) {
  std::vector<std::int32_t> starts;
  for (std::size_t i = 0; std::ssize(starts) < T; ++i) {
    const auto start = static_cast<std::int32_t>(starts.size());
    starts.insert(starts.end(), static_cast<std::size_t>(lengths[i % lengths.size()]), start);
  }
  starts.resize(static_cast<std::size_t>(T));
  return starts;
}
std::vector<std::int32_t> joined(std::vector<std::int32_t> a, const std::vector<std::int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Tiles of queries and keys, of all kernels.
constexpr std::int64_t kTileSizes[] = {16, 32, 64, 80, 96, 128, 192};
// Crosses each of them twice and ends within one.
constexpr std::int64_t kLength = 517;

TYPED_TEST(Attention, Windows) {
  for (const std::int64_t HS : kHeadDims) {
    std::int64_t group = 0;
    const auto run = [&](std::int64_t window) {
      group = group % 4 + 1;
      this->run({windowed(shape(1, kLength, kLength, group, 1, HS), window)});
    };
    for (const std::int64_t window : {std::int64_t{1}, std::int64_t{7}, kLength - 1, kLength, kLength + 83})
      run(window);
    for (const std::int64_t tile : kTileSizes)
      for (const std::int64_t window : {tile - 1, tile, tile + 1}) run(window);
    this->run({windowed(shape(2, 333, 333, 4, 2, HS), 70), Packing::llama_rows});
    this->run({windowed(shape(2, 333, 333, 4, 2, HS), 70), Packing::odd});
  }
}

// Keys that no query sees have no gradient.
TYPED_TEST(Attention, WindowsBehindLongerKeys) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t window : {1, 65, 200, 459})
      for (const std::int64_t TQ : {1, 130}) {
        this->run({windowed(shape(2, TQ, TQ + 330, 4, 2, HS), window)});
        this->run({windowed(shape(1, TQ, TQ + 330, 3, 1, HS, false), window)});
      }
}

TYPED_TEST(Attention, Documents) {
  const std::vector<std::int64_t> ragged = {37, 1, 1, 200, 5, 129, 64}, single = {1};
  for (const std::int64_t HS : kHeadDims) {
    const auto run = [&](const std::vector<std::int64_t>& one, const std::vector<std::int64_t>& other,
                         std::int64_t window = 0) {
      Case c = {windowed(shape(2, kLength, kLength, 4, 2, HS), window)};
      c.starts = joined(documents(one, kLength), documents(other, kLength));
      this->run(c);
    };
    run(ragged, single);
    run({kLength}, {516, 1});
    run({1, 516}, ragged, 50);
    for (const std::int64_t tile : kTileSizes)
      run({tile, 2 * tile}, {tile - 1, tile, 2, 2 * tile}, tile == 64 ? 65 : 0);
    Case behind = {shape(1, 200, 330, 2, 1, HS)};  // documents that began before the first query
    behind.starts = std::vector<std::int32_t>(200, 100);
    std::fill(behind.starts.begin() + 30, behind.starts.end(), 160);
    this->run(behind);
  }
}

TYPED_TEST(AttentionOfSmallBlocks, WindowsAndDocuments) {
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t window : {1, 33, 64, 100, 129, 516})
      this->run({windowed(shape(1, kLength, kLength, 4, 2, HS), window)}, kSharedBytesEverywhere);
    Case c = {shape(2, kLength, kLength, 3, 1, HS)};
    c.starts = joined(documents({37, 1, 1, 200, 5, 129, 64}, kLength), documents({128, 192}, kLength));
    this->run(c, kSharedBytesEverywhere);
    c.shape.window = 40;
    this->run(c, kSharedBytesEverywhere);
  }
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
template <typename T>
void expect_same(const Results<T>& a, const Results<T>& b, std::int64_t HS) {
  EXPECT_TRUE(same_bits(a.out, b.out)) << "out, HS " << HS;
  EXPECT_TRUE(same_bits(a.lse, b.lse)) << "lse, HS " << HS;
  EXPECT_TRUE(same_bits(a.dq, b.dq)) << "dq, HS " << HS;
  EXPECT_TRUE(same_bits(a.dk, b.dk)) << "dk, HS " << HS;
  EXPECT_TRUE(same_bits(a.dv, b.dv)) << "dv, HS " << HS;
}

// One document is computed by the kernels that hide past keys, a window as long as the text by the causal ones.
TYPED_TEST(Attention, WhatHidesNothingHasTheBitsOfCausal) {
  for (const std::int64_t HS : kHeadDims) {
    const Case causal = {shape(2, kLength, kLength, 4, 2, HS)};
    Case one_document = causal, long_window = causal;
    one_document.starts.assign(2 * kLength, 0);
    long_window.shape.window = kLength;
    const Results<TypeParam> want = run_gpu(Problem<TypeParam>(causal));
    expect_same(run_gpu(Problem<TypeParam>(one_document)), want, HS);
    expect_same(run_gpu(Problem<TypeParam>(long_window)), want, HS);
  }
}

TYPED_TEST(Attention, WindowsAndDocumentsGiveTheSameBitsAgain) {
  for (const std::int64_t HS : kHeadDims) {
    Case c = {windowed(shape(2, 700, 700, 8, 2, HS), 150)};
    c.starts = joined(documents({37, 1, 300}, 700), documents({700}, 700));
    const Problem<TypeParam> p(c);
    const Results<TypeParam> first = run_gpu(p);
    for (int i = 0; i < 3; ++i) expect_same(run_gpu(p), first, HS);
  }
}

// A document that begins where tiles of every size begin has, packed behind another, the bits that it has alone, and they do
// not change when all of the other is NaN: its tiles are not read. (The Hopper kernels have tiles of 80, 96 and 128 keys and
// of 128 and 192 queries: all begin at multiples of 1920.)
TYPED_TEST(Attention, ADocumentHasItsBitsWhereverItLies) {
  constexpr std::int64_t kFirst = 1920, kOwn = 333, T = kFirst + kOwn, NH = 2, NKV = 1;
  for (const std::int64_t HS : kHeadDims) {
    const auto random = [&](std::int64_t heads, unsigned seed) {
      return rounded<TypeParam>(random_normal({0, 0, 0, 0, T * heads * HS}, seed, 1));
    };
    const std::vector<TypeParam> q = random(NH, 1), k = random(NKV, 2), v = random(NKV, 3), dout = random(NH, 4);
    // The tokens from `first` on; those of the first document are NaN if `poisoned`.
    const auto run = [&](std::int64_t first, bool poisoned) {
      const std::int64_t tokens = T - first;
      AttentionShape s = shape(1, tokens, tokens, NH, NKV, HS);
      const DeviceBuffer<std::int32_t> starts(documents({kFirst}, T));
      if (first == 0) s.document_starts = starts.data();
      const auto input = [&](const std::vector<TypeParam>& all, std::int64_t heads) {
        std::vector<TypeParam> values(all.begin() + first * heads * HS, all.end());
        if (poisoned) std::fill_n(values.begin(), kFirst * heads * HS, rounded<TypeParam>(Floats{NAN})[0]);
        return DeviceBuffer<TypeParam>(values);
      };
      const auto view = [&](const DeviceBuffer<TypeParam>& buffer, std::int64_t heads) {
        return HeadViewOf<TypeParam>{buffer.data(), 0, heads * HS, HS};
      };
      const DeviceBuffer<TypeParam> Q = input(q, NH), K = input(k, NKV), V = input(v, NKV), dO = input(dout, NH);
      const DeviceBuffer<TypeParam> out(Q.size()), dq(Q.size()), dk(K.size()), dv(K.size());
      const DeviceBuffer<float> lse(static_cast<std::size_t>(NH * tokens));
      const DeviceBuffer<char> workspace(attention_backward_workspace(s));
      attention_forward<TypeParam>(s, view(out, NH), lse.data(), view(Q, NH), view(K, NKV), view(V, NKV), nullptr);
      attention_backward<TypeParam>(s, view(dq, NH), view(dk, NKV), view(dv, NKV), view(dO, NH), view(out, NH),
                                    lse.data(), view(Q, NH), view(K, NKV), view(V, NKV), workspace.data(), nullptr);
      const auto own = [&](const auto& buffer, std::int64_t width) {
        const auto all = buffer.download();
        return std::vector(all.end() - kOwn * width, all.end());
      };
      Floats own_lse;
      const Floats all = lse.download();
      for (std::int64_t h = 0; h < NH; ++h)
        own_lse.insert(own_lse.end(), all.begin() + (h + 1) * tokens - kOwn, all.begin() + (h + 1) * tokens);
      return Results<TypeParam>{own(out, NH * HS), own(dq, NH * HS), own(dk, NKV * HS), own(dv, NKV * HS), own_lse};
    };
    const Results<TypeParam> alone = run(kFirst, false);
    for (const float value : widened(alone.dq)) ASSERT_TRUE(std::isfinite(value)) << "HS " << HS;
    expect_same(run(0, false), alone, HS);
    expect_same(run(0, true), alone, HS);
  }
}

// The same for a window: 64 keys before the last rows lie behind the NaN.
TYPED_TEST(Attention, TilesInFrontOfAWindowAreNotRead) {
  constexpr std::int64_t kFirst = 1920, kRest = 400, T = kFirst + kRest, kWindow = 65;
  for (const std::int64_t HS : kHeadDims) {
    Case c = {windowed(shape(1, T, T, 2, 1, HS), kWindow)};
    Problem<TypeParam> p(c);
    const Results<TypeParam> want = run_gpu(p);
    const TypeParam nan = rounded<TypeParam>(Floats{NAN})[0];
    std::fill_n(p.k.begin(), kFirst * HS, nan);
    std::fill_n(p.v.begin(), kFirst * HS, nan);
    const Results<TypeParam> got = run_gpu(p);
    // Rows from kFirst + 192 on: in the first tile of queries behind kFirst some rows see keys before it.
    const auto tail = [&](const std::vector<TypeParam>& values) {
      return std::vector<TypeParam>(values.end() - (kRest - 192) * 2 * HS, values.end());
    };
    EXPECT_TRUE(same_bits(tail(want.out), tail(got.out))) << "HS " << HS;
    EXPECT_TRUE(same_bits(tail(want.dq), tail(got.dq))) << "HS " << HS;
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
    expect_same(first, second, HS);
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
  EXPECT_NE(reason(windowed(shape(1, 8, 8, 2, 2, 64), -1)).find("window: got -1"), std::string::npos);
  EXPECT_NE(reason(no_scale).find("scale: got 0"), std::string::npos);
}

}  // namespace
}  // namespace weft::cuda
