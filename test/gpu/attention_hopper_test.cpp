// The Hopper kernel of the attention forward pass, by itself: against fp64 on the CPU, and against the portable and the
// plain kernels, which stay as its witnesses. attention_test.cpp runs it too, through attention_forward().
//
// Tolerance, as in attention_test.cpp: e0 is the 2-norm of what rounding the exact result to T costs. The kernel rounds
// P and the result, each no worse than the result's rounding: ||gpu - exact|| <= 3 e0 leaves one for fp32 sums and the
// approximate exponential, and no element may be off by more than 3 half units in the last place of the largest one.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
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
#include "llmc/cuda/runtime/error.h"
#include "test/gpu/attention_tools.h"
#include "test/gpu/device_buffer.h"

namespace weft::cuda {
namespace {

using namespace test;

struct Case {
  AttentionShape shape;
  Packing packing = Packing::llama_rows;
  std::int64_t guard = 0;     // tokens after the last of each sequence of out
  float magnitude = 1;        // standard deviation of q and k
  float ramp = 0;             // k's magnitude at the last key is 1 + ramp times that at the first
  std::int64_t document = 0;  // tokens of each document; 0: one document
};
Layouts layouts(const Case& c) {
  const AttentionShape& s = c.shape;
  const std::int64_t q = s.NH * s.HS, kv = s.NKV * s.HS;
  const auto rows = [&](std::int64_t T, std::int64_t width, std::int64_t first, std::int64_t head_stride) {
    return Layout{first, T * width, width, head_stride, s.B * T * width};
  };
  const Layout out = rows(s.TQ + c.guard, q, 0, s.HS);
  switch (c.packing) {
    case Packing::llama_rows:
      return {rows(s.TQ, q + 2 * kv, 0, s.HS), rows(s.TK, q + 2 * kv, q, s.HS), rows(s.TK, q + 2 * kv, q + kv, s.HS),
              out};
    case Packing::neox_rows:
      return {rows(s.TQ, 3 * q, 0, 3 * s.HS), rows(s.TK, 3 * q, s.HS, 3 * s.HS), rows(s.TK, 3 * q, 2 * s.HS, 3 * s.HS),
              out};
    case Packing::cache: {  // [B, heads, capacity, HS]
      const std::int64_t capacity = s.TK + 140;
      const Layout cache = {0, s.NKV * capacity * s.HS, s.HS, capacity * s.HS, s.B * s.NKV * capacity * s.HS};
      return {rows(s.TQ, q, 0, s.HS), cache, cache, out};
    }
    default:
      return {rows(s.TQ, q, 0, s.HS), rows(s.TK, kv, 0, s.HS), rows(s.TK, kv, 0, s.HS), out};
  }
}

AttentionShape shape(std::int64_t B, std::int64_t TQ, std::int64_t TK, std::int64_t NH, std::int64_t NKV,
                     std::int64_t HS, bool causal = true) {
  AttentionShape s;
  s.B = B, s.TQ = TQ, s.TK = TK, s.NH = NH, s.NKV = NKV, s.HS = HS, s.causal = causal;
  s.scale = 1 / std::sqrt(static_cast<float>(HS));
  return s;
}

// Random inputs; whatever the views do not cover is NaN, on every side.
template <typename T>
struct Problem {
  Case c;
  Layouts at;
  std::vector<T> q, k, v;

  explicit Problem(const Case& given) : c(given), at(layouts(given)) {
    const AttentionShape& s = c.shape;
    fill(q, at.q, s.TQ, s.NH, 1, c.magnitude, 0);
    fill(k, at.k, s.TK, s.NKV, 2, c.magnitude, c.ramp);
    fill(v, at.v, s.TK, s.NKV, 3, 1, 0);
  }

  void fill(std::vector<T>& buffer, const Layout& layout, std::int64_t tokens, std::int64_t heads, unsigned seed,
            float magnitude, float ramp) {
    buffer.assign(static_cast<std::size_t>(layout.elements), rounded<T>(NAN));
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0, magnitude);
    const HeadViewOf<T> view = layout.view(buffer.data());
    for (std::int64_t b = 0; b < c.shape.B; ++b)
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t h = 0; h < heads; ++h)
          for (std::int64_t d = 0; d < c.shape.HS; ++d)
            view.at(b, t, h)[d] =
                rounded<T>(normal(generator) * (1 + ramp * static_cast<float>(t) / static_cast<float>(tokens)));
  }
};

template <typename T>
using Kernel = std::function<void(const ForwardArguments<T>&, cudaStream_t)>;

template <typename T>
struct Results {
  std::vector<T> out;
  std::vector<float> lse;
};

template <typename T>
Results<T> run(const Problem<T>& p, const Kernel<T>& kernel, bool with_lse = true, cudaStream_t stream = nullptr) {
  const AttentionShape& s = p.c.shape;
  const DeviceBuffer<T> q(p.q), k(p.k), v(p.v), out(static_cast<std::size_t>(p.at.out.elements));
  const DeviceBuffer<float> lse(static_cast<std::size_t>(s.B * s.NH * s.TQ));
  AttentionShape on_device = s;
  std::vector<std::int32_t> starts;
  for (std::int64_t i = 0; p.c.document > 0 && i < s.B * s.TQ; ++i)
    starts.push_back(static_cast<std::int32_t>(i % s.TQ / p.c.document * p.c.document));
  const DeviceBuffer<std::int32_t> document_starts(starts);
  if (p.c.document > 0) on_device.document_starts = document_starts.data();
  kernel({on_device, p.at.out.view(out.data()), with_lse ? lse.data() : nullptr,
          p.at.q.view(static_cast<const T*>(q.data())), p.at.k.view(static_cast<const T*>(k.data())),
          p.at.v.view(static_cast<const T*>(v.data()))},
         stream);
  check(cudaDeviceSynchronize(), "test: kernel");
  return {out.download(), lse.download()};
}

struct Exact {
  Doubles out, lse;  // [B, TQ, NH, HS], [B, NH, TQ]
};

template <typename T>
Exact exact(const Problem<T>& p) {
  const AttentionShape& s = p.c.shape;
  Exact result{Doubles(static_cast<std::size_t>(s.B * s.TQ * s.NH * s.HS)),
               Doubles(static_cast<std::size_t>(s.B * s.NH * s.TQ))};
  const auto wide = [](const std::vector<T>& values) {
    std::vector<float> w(values.size());
    std::transform(values.begin(), values.end(), w.begin(), [](T value) { return widen(value); });
    return w;
  };
  const std::vector<float> q = wide(p.q), k = wide(p.k), v = wide(p.v);
#pragma omp parallel for collapse(3) schedule(dynamic, 16)
  for (std::int64_t b = 0; b < s.B; ++b)
    for (std::int64_t h = 0; h < s.NH; ++h)
      for (std::int64_t t = 0; t < s.TQ; ++t) {
        const std::int64_t keys = s.causal ? s.TK - s.TQ + t + 1 : s.TK, kv = h / (s.NH / s.NKV);
        std::int64_t first = s.window > 0 ? std::max<std::int64_t>(s.TK - s.TQ + t + 1 - s.window, 0) : 0;
        if (p.c.document > 0) first = std::max(first, t / p.c.document * p.c.document);
        Doubles score(static_cast<std::size_t>(keys)), mean(static_cast<std::size_t>(s.HS), 0.0);
        const float* query = p.at.q.view(q.data()).at(b, t, h);
        double largest = -INFINITY, sum = 0;
        for (std::int64_t j = first; j < keys; ++j) {
          const float* key = p.at.k.view(k.data()).at(b, j, kv);
          double dot = 0;
          for (std::int64_t d = 0; d < s.HS; ++d) dot += static_cast<double>(query[d]) * key[d];
          score[static_cast<std::size_t>(j)] = dot * s.scale;
          largest = std::max(largest, dot * s.scale);
        }
        for (std::int64_t j = first; j < keys; ++j) {
          const double weight = std::exp(score[static_cast<std::size_t>(j)] - largest);
          const float* value = p.at.v.view(v.data()).at(b, j, kv);
          sum += weight;
          for (std::int64_t d = 0; d < s.HS; ++d) mean[static_cast<std::size_t>(d)] += weight * value[d];
        }
        for (std::int64_t d = 0; d < s.HS; ++d)
          result.out[static_cast<std::size_t>(((b * s.TQ + t) * s.NH + h) * s.HS + d)] =
              mean[static_cast<std::size_t>(d)] / sum;
        result.lse[static_cast<std::size_t>((b * s.NH + h) * s.TQ + t)] = largest + std::log(sum);
      }
  return result;
}

// What the view covers, in [B, TQ, NH, HS] order.
template <typename T>
Doubles covered(const Problem<T>& p, const std::vector<T>& out) {
  Doubles values;
  const AttentionShape& s = p.c.shape;
  for (std::int64_t b = 0; b < s.B; ++b)
    for (std::int64_t t = 0; t < s.TQ; ++t)
      for (std::int64_t h = 0; h < s.NH; ++h)
        for (std::int64_t d = 0; d < s.HS; ++d) values.push_back(widen(p.at.out.view(out.data()).at(b, t, h)[d]));
  return values;
}

template <typename T>
class AttentionHopper : public testing::Test {
 protected:
  void SetUp() override {
    if (hopper_multiprocessors() == 0) GTEST_SKIP() << "not a GPU of compute capability 9.0";
  }
  void TearDown() override {
    if (cases_ > 0)
      std::printf("  worst of %d cases: out %.2f roundings of the result, lse %.1e\n", cases_, worst_, worst_lse_);
  }

  static Results<T> hopper(const Problem<T>& p, bool with_lse = true) { return run<T>(p, hopper_forward<T>, with_lse); }
  static Results<T> portable(const Problem<T>& p) {
    return run<T>(p, [](const ForwardArguments<T>& a, cudaStream_t stream) { portable_forward<T>(a, stream); });
  }
  static Results<T> plain(const Problem<T>& p) { return run<T>(p, plain_forward<T>); }

  static std::string name(const Case& c) {
    const AttentionShape& s = c.shape;
    return format("B %d TQ %d TK %d NH %d NKV %d HS %d causal %d packing %d ramp %g window %d documents of %d",
                  int(s.B), int(s.TQ), int(s.TK), int(s.NH), int(s.NKV), int(s.HS), int(s.causal), int(c.packing),
                  c.ramp, int(s.window), int(c.document));
  }

  // Against fp64. `noise` is the relative error of the scores' exponentials that fp32 products bring.
  void compare(const Case& c, double noise = 0) {
    SCOPED_TRACE(name(c));
    const Problem<T> p(c);
    const Results<T> gpu = hopper(p);
    const Exact reference = exact(p);
    Doubles rounding(reference.out.size());
    for (std::size_t i = 0; i < rounding.size(); ++i)
      rounding[i] = widen(rounded<T>(static_cast<float>(reference.out[i]))) - reference.out[i];
    check_close(covered(p, gpu.out), reference.out, norm(rounding), noise);
    const double lse_off = largest(difference(Doubles(gpu.lse.begin(), gpu.lse.end()), reference.lse));
    EXPECT_LE(lse_off, 2e-5 * (1 + largest(reference.lse))) << "lse";
    worst_lse_ = std::max(worst_lse_, lse_off);
  }

  void check_close(const Doubles& got, const Doubles& want, double e0, double noise = 0) {
    const Doubles error = difference(got, want);
    EXPECT_LE(norm(error), 3 * e0 + (noise + 1e-6) * norm(want)) << "rounding alone: " << e0;
    EXPECT_LE(largest(error), (3 * kHalfUlp<T> + 4 * noise + 1e-6) * largest(want)) << "one element";
    worst_ = std::max(worst_, norm(error) / e0);
    ++cases_;
  }

  double worst_ = 0, worst_lse_ = 0;
  int cases_ = 0;
};
using Types = testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(AttentionHopper, Types);

constexpr std::int64_t kHeadDims[] = {64, 80, 128, 256};

TYPED_TEST(AttentionHopper, OddLengths) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {1, 7, 63, 64, 65, 127, 128, 129, 191, 193, 257, 384, 1000, 2047, 2049})
      this->compare({shape(T < 300 ? 2 : 1, T, T, 2, 1, HS)});
}

TYPED_TEST(AttentionHopper, GroupsOfQueryHeads) {
  for (const std::int64_t group : {1, 2, 3, 4, 8})
    for (const std::int64_t HS : kHeadDims) this->compare({shape(2, 150, 150, 2 * group, 2, HS)});
}

TYPED_TEST(AttentionHopper, EveryKeyVisible) {
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t T : {1, 65, 127, 129, 300, 1000}) this->compare({shape(1, T, T, 4, 2, HS, false)});
    this->compare({shape(2, 100, 333, 3, 1, HS, false), Packing::cache});
  }
}

TYPED_TEST(AttentionHopper, QueriesAtTheEndOfLongerKeys) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t TQ : {1, 5, 64, 130, 200})
      for (const std::int64_t past : {1, 63, 64, 127, 128, 200, 777})
        this->compare({shape(2, TQ, TQ + past, 4, 2, HS), Packing::cache});
}

TYPED_TEST(AttentionHopper, Layouts) {
  for (const std::int64_t HS : kHeadDims)
    for (const Packing packing : {Packing::separate, Packing::llama_rows, Packing::neox_rows, Packing::cache})
      this->compare({shape(2, 200, 200, 4, packing == Packing::neox_rows ? 4 : 2, HS), packing});
}

// The maximum in use grows in every block of keys: what was added before has to shrink.
TYPED_TEST(AttentionHopper, GrowingScores) {
  for (const std::int64_t HS : kHeadDims)
    for (const bool causal : {true, false})
      for (const float ramp : {20.0f, 100.0f}) {
        const Case c = {shape(1, 1000, 1000, 2, 1, HS, causal), Packing::llama_rows, 0, 1, ramp};
        // Scores up to 5 (1 + ramp) have an fp32 error of up to HS / 16 roundings of their terms' size.
        this->compare(c, 5 * (1 + ramp) * 0x1p-23);
      }
}

// Rows of a tile begin at different keys: some have no maximum yet while others raise theirs. The largest scores are at the
// end of each row, or at its beginning.
TYPED_TEST(AttentionHopper, WindowsAndDocuments) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {200, 1000})
      for (const float ramp : {0.0f, 20.0f, -0.99f})
        for (const std::int64_t bound : {1, 2, 63, 64, 65, 100, 191, 193, 400}) {
          Case window = {shape(1, T, T, 2, 1, HS), Packing::llama_rows, 0, 1, ramp}, documents = window;
          window.shape.window = bound;
          documents.document = bound;
          const double noise = 5 * (1 + std::fabs(ramp)) * 0x1p-23;
          this->compare(window, noise);
          this->compare(documents, noise);
        }
}

// More tiles than multiprocessors: a block takes several, its rings go round, Q's buffers are used again.
TYPED_TEST(AttentionHopper, ManyTilesAgreeWithTheWitnesses) {
  for (const std::int64_t HS : kHeadDims)
    for (const bool causal : {true, false}) {
      for (const std::int64_t window : {0, 300}) {
        Case c = {shape(3, 1111, 1111, 24, 8, HS, causal), Packing::llama_rows};
        c.shape.window = window;
        c.document = window > 0 ? 450 : 0;
        SCOPED_TRACE(this->name(c));
        const Problem<TypeParam> p(c);
        const Doubles hopper = covered(p, this->hopper(p).out);
        // A result rounded to nearest errs by half a unit in the last place at most, by 0.58 of that on average
        // (uniform).
        for (const auto& witness : {this->portable(p), this->plain(p)}) {
          const Doubles other = covered(p, witness.out);
          this->check_close(hopper, other, 0.4 * kHalfUlp<TypeParam> * norm(other));
        }
        const Results<TypeParam> a = this->hopper(p), b = this->plain(p);
        EXPECT_LE(largest(difference(Doubles(a.lse.begin(), a.lse.end()), Doubles(b.lse.begin(), b.lse.end()))), 2e-4);
      }
    }
}

TYPED_TEST(AttentionHopper, RunsGiveTheSameBits) {
  for (const std::int64_t HS : kHeadDims) {
    const Problem<TypeParam> p({shape(2, 1500, 1500, 32, 8, HS)});
    const Results<TypeParam> first = this->hopper(p);
    for (int i = 0; i < 3; ++i) {
      const Results<TypeParam> again = this->hopper(p);
      EXPECT_EQ(0, std::memcmp(first.out.data(), again.out.data(), first.out.size() * 2)) << "HS " << HS;
      EXPECT_EQ(0, std::memcmp(first.lse.data(), again.lse.data(), first.lse.size() * 4)) << "HS " << HS;
    }
  }
}

// A sequence's result is the same bits whatever the others of its batch hold: NaN here. (Problem has NaN beside the
// heads and after the last key of a cache already.)
TYPED_TEST(AttentionHopper, SequencesAreIsolated) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {1, 65, 200, 301}) {
      const Problem<TypeParam> alone({shape(1, T, T, 4, 2, HS)});
      Problem<TypeParam> three({shape(3, T, T, 4, 2, HS)});
      const auto size = static_cast<std::ptrdiff_t>(alone.q.size());
      std::fill(three.q.begin(), three.q.end(), rounded<TypeParam>(NAN));
      three.k = three.v = three.q;
      std::copy(alone.q.begin(), alone.q.end(), three.q.begin() + size);
      std::copy(alone.k.begin(), alone.k.end(), three.k.begin() + size);
      std::copy(alone.v.begin(), alone.v.end(), three.v.begin() + size);
      const std::vector<TypeParam> want = this->hopper(alone).out, got = this->hopper(three).out;
      EXPECT_EQ(0, std::memcmp(want.data(), got.data() + want.size(), want.size() * 2)) << "HS " << HS << " T " << T;
    }
}

// Rows after the last query stay as they were.
TYPED_TEST(AttentionHopper, WritesNothingElse) {
  for (const std::int64_t HS : kHeadDims)
    for (const std::int64_t T : {1, 65, 200}) {
      Case c = {shape(2, T, T, 4, 2, HS)};
      c.guard = 130;
      const Problem<TypeParam> p(c);
      const std::vector<TypeParam> out = this->hopper(p).out;
      std::size_t poisoned = 0;
      for (const TypeParam value : out) {
        std::uint16_t bits;
        std::memcpy(&bits, &value, 2);
        poisoned += bits == 0xffff;
      }
      EXPECT_EQ(poisoned, static_cast<std::size_t>(2 * 130 * 4 * HS)) << "HS " << HS << " T " << T;
    }
}

TYPED_TEST(AttentionHopper, LseIsOptional) {
  for (const std::int64_t HS : kHeadDims) {
    const Problem<TypeParam> p({shape(1, 200, 200, 2, 1, HS)});
    const Results<TypeParam> with = this->hopper(p), without = this->hopper(p, false);
    EXPECT_EQ(0, std::memcmp(with.out.data(), without.out.data(), with.out.size() * 2));
    for (const float value : without.lse) ASSERT_TRUE(std::isnan(value));
  }
}

// The tensor maps are in the captured launch: a replay needs nothing of the host.
TYPED_TEST(AttentionHopper, ReplaysFromAGraph) {
  for (const std::int64_t HS : kHeadDims) {
    const Problem<TypeParam> p({shape(2, 333, 333, 4, 2, HS)});
    const std::vector<TypeParam> want = this->hopper(p).out;
    const DeviceBuffer<TypeParam> q(p.q), k(p.k), v(p.v), out(want.size());
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "test: stream");
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "test: capture");
    const auto input = [](const Layout& layout, const DeviceBuffer<TypeParam>& buffer) {
      return layout.view(static_cast<const TypeParam*>(buffer.data()));
    };
    attention_forward<TypeParam>(p.c.shape, p.at.out.view(out.data()), nullptr, input(p.at.q, q), input(p.at.k, k),
                                 input(p.at.v, v), stream);
    check(cudaStreamEndCapture(stream, &graph), "test: capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "test: graph");
    for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(executable, stream), "test: replay");
    check(cudaStreamSynchronize(stream), "test: replay");
    EXPECT_EQ(0, std::memcmp(want.data(), out.download().data(), want.size() * 2)) << "HS " << HS;
    check(cudaGraphExecDestroy(executable), "test: graph");
    check(cudaGraphDestroy(graph), "test: graph");
    check(cudaStreamDestroy(stream), "test: stream");
  }
}

}  // namespace
}  // namespace weft::cuda
