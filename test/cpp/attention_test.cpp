// Both forms of attention against the textbook definition in double precision (a T x T matrix, a mask, a softmax over its
// rows), and the blocked form against the plain loops.

#include "llmc/cpu/attention.h"

#include <deque>
#include <limits>
#include <numeric>
#include <tuple>

#include "test/cpp/gradient_check.h"

namespace weft::cpu {
namespace {

using namespace weft::test;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Contiguous [B, T, heads, HS] tensors.
struct Inputs {
  Floats q, k, v, dout;
};

Inputs random_inputs(const AttentionShape& s, float scale = 1.0f) {
  const std::int64_t queries = s.B * s.TQ * s.NH * s.HS, keys = s.B * s.TK * s.NKV * s.HS;
  return {random_floats(queries, 1, scale), random_floats(keys, 2, scale), random_floats(keys, 3),
          random_floats(queries, 4)};
}

template <typename T>
HeadViewOf<T> contiguous(T* data, std::int64_t tokens, std::int64_t heads, std::int64_t HS) {
  return {data, tokens * heads * HS, heads * HS, HS};
}

struct Result {
  Floats out, lse, dq, dk, dv;

  bool operator==(const Result&) const = default;
};

enum class Form { plain, blocks };

Result run(const AttentionShape& s, const Inputs& in, Form form = Form::blocks) {
  Result r{Floats(in.q.size(), kNaN), Floats(s.B * s.NH * s.TQ, kNaN), Floats(in.q.size(), kNaN),
           Floats(in.k.size(), kNaN), Floats(in.v.size(), kNaN)};
  const auto queries = [&](auto& data) { return contiguous(data.data(), s.TQ, s.NH, s.HS); };
  const auto keys = [&](auto& data) { return contiguous(data.data(), s.TK, s.NKV, s.HS); };
  const auto forward = form == Form::plain ? plain::attention_forward : attention_forward;
  const auto backward = form == Form::plain ? plain::attention_backward : attention_backward;
  forward(s, queries(r.out), r.lse.data(), queries(in.q), keys(in.k), keys(in.v));
  backward(s, queries(r.dq), keys(r.dk), keys(r.dv), queries(in.dout), queries(r.out), r.lse.data(), queries(in.q),
           keys(in.k), keys(in.v));
  return r;
}

// Whether the mask shows key j to query t of sequence b.
bool sees(const AttentionShape& s, std::int64_t b, std::int64_t t, std::int64_t j) {
  const std::int64_t position = s.TK - s.TQ + t;
  if (s.causal && j > position) return false;
  if (s.window > 0 && position - j >= s.window) return false;
  return s.document_starts == nullptr || j >= s.document_starts[b * s.TQ + t];
}

// AttentionShape::document_starts of the last TQ positions of sequences that have documents of these lengths.
const std::int32_t* documents(std::int64_t TQ, const std::vector<std::vector<std::int32_t>>& lengths) {
  static std::deque<std::vector<std::int32_t>> all;
  std::vector<std::int32_t>& starts = all.emplace_back();
  for (const std::vector<std::int32_t>& sequence : lengths) {
    std::vector<std::int32_t> row;
    for (const std::int32_t length : sequence) row.insert(row.end(), length, static_cast<std::int32_t>(row.size()));
    starts.insert(starts.end(), row.end() - TQ, row.end());
  }
  return starts.data();
}

struct Naive {
  Doubles out, lse;
};

Naive naive_attention(const AttentionShape& s, const Doubles& q, const Doubles& k, const Doubles& v) {
  Naive result{Doubles(q.size()), Doubles(s.B * s.NH * s.TQ)};
  const auto query = [&](std::int64_t b, std::int64_t t, std::int64_t h) { return ((b * s.TQ + t) * s.NH + h) * s.HS; };
  const auto key = [&](std::int64_t b, std::int64_t t, std::int64_t h) { return ((b * s.TK + t) * s.NKV + h) * s.HS; };
  for (std::int64_t b = 0; b < s.B; ++b) {
    for (std::int64_t h = 0; h < s.NH; ++h) {
      const std::int64_t kv = h * s.NKV / s.NH;  // consecutive query heads share one
      for (std::int64_t t = 0; t < s.TQ; ++t) {
        Doubles weights(s.TK);
        double sum = 0;
        for (std::int64_t j = 0; j < s.TK; ++j) {
          if (!sees(s, b, t, j)) continue;
          double score = 0;
          for (std::int64_t d = 0; d < s.HS; ++d) score += q[query(b, t, h) + d] * k[key(b, j, kv) + d];
          weights[j] = std::exp(score * static_cast<double>(s.scale));
          sum += weights[j];
        }
        result.lse[(b * s.NH + h) * s.TQ + t] = std::log(sum);
        for (std::int64_t j = 0; j < s.TK; ++j) {
          for (std::int64_t d = 0; d < s.HS; ++d) {
            result.out[query(b, t, h) + d] += weights[j] / sum * v[key(b, j, kv) + d];
          }
        }
      }
    }
  }
  return result;
}

class AttentionShapes : public testing::TestWithParam<AttentionShape> {
 protected:
  static AttentionShape scaled(AttentionShape s) {
    s.scale = 1.0f / std::sqrt(static_cast<float>(s.HS));
    return s;
  }
};

// The definition in double precision, and central differences of it at up to `samples` elements of each input.
void expect_definition(const AttentionShape& s, Form form, std::size_t samples) {
  const Inputs in = random_inputs(s);
  const Result r = run(s, in, form);
  const Doubles q = widen(in.q), k = widen(in.k), v = widen(in.v);
  const Naive expected = naive_attention(s, q, k, v);
  expect_close(r.out, expected.out, "out");
  expect_close(r.lse, expected.lse, "lse");
  const auto loss = [&](const Doubles& at_q, const Doubles& at_k, const Doubles& at_v) {
    return weighted_sum(naive_attention(s, at_q, at_k, at_v).out, in.dout);
  };
  expect_gradient(
      "dv", [&](const Doubles& x) { return loss(q, k, x); }, in.v, r.dv, samples);
  for (const Floats* gradient : {&r.dq, &r.dk, &r.dv}) {
    for (const float value : *gradient) ASSERT_TRUE(std::isfinite(value));
  }
  if (s.TK == 1 || s.window == 1) return;  // softmaxes of one element: no gradient to a score
  expect_gradient(
      "dq", [&](const Doubles& x) { return loss(x, k, v); }, in.q, r.dq, samples);
  expect_gradient(
      "dk", [&](const Doubles& x) { return loss(q, x, v); }, in.k, r.dk, samples);
}

TEST_P(AttentionShapes, PlainLoopsAreTheDefinition) {
  expect_definition(scaled(GetParam()), Form::plain, 12);
}

TEST_P(AttentionShapes, ForwardAndBackwardAreTheDefinition) {
  const AttentionShape s = scaled(GetParam());
  expect_definition(s, Form::blocks, s.B * s.NH * s.TQ * s.TK * s.HS > 100'000 ? 12 : 100);
}

TEST_P(AttentionShapes, BlocksAgreeWithThePlainLoops) {
  const AttentionShape s = scaled(GetParam());
  const Inputs in = random_inputs(s);
  const Result blocks = run(s, in), plain = run(s, in, Form::plain);
  expect_close(blocks.out, plain.out, "out");
  expect_close(blocks.lse, plain.lse, "lse");
  expect_close(blocks.dv, plain.dv, "dv");
  if (s.TK == 1 || s.window == 1) return;  // dq and dk are 0 up to rounding
  expect_close(blocks.dq, plain.dq, "dq");
  expect_close(blocks.dk, plain.dk, "dk");
}

//                                    B  TQ  TK  NH NKV HS causal
INSTANTIATE_TEST_SUITE_P(Odd, AttentionShapes,
                         testing::Values(AttentionShape{2, 1, 1, 2, 1, 4, true},       //
                                         AttentionShape{2, 7, 7, 4, 2, 5, true},       //
                                         AttentionShape{2, 65, 65, 6, 2, 8, true},     //
                                         AttentionShape{1, 64, 64, 2, 2, 32, true},    //
                                         AttentionShape{1, 130, 130, 3, 1, 16, true},  //
                                         AttentionShape{2, 9, 9, 4, 4, 1, true},       //
                                         AttentionShape{1, 12, 12, 2, 1, 80, true},    //
                                         AttentionShape{1, 12, 12, 2, 1, 96, true},    //
                                         AttentionShape{1, 10, 10, 2, 1, 128, true},   //
                                         AttentionShape{1, 10, 10, 2, 1, 256, true},   //
                                         AttentionShape{1, 11, 11, 3, 3, 33, true},    //
                                         AttentionShape{2, 1, 70, 6, 2, 8, true},      // decode
                                         AttentionShape{2, 3, 70, 4, 1, 8, true},      // a few new tokens
                                         AttentionShape{1, 20, 90, 4, 2, 8, true},     // a chunk at the end
                                         AttentionShape{1, 70, 133, 2, 1, 8, true},    //
                                         AttentionShape{1, 8, 65, 4, 2, 8, true},      // the last that goes by rows
                                         AttentionShape{2, 9, 129, 4, 2, 17, true},    // the first that goes by blocks
                                         AttentionShape{1, 129, 129, 2, 1, 8, false},  // three ragged blocks each way
                                         AttentionShape{1, 5, 9, 4, 2, 8, false},      //
                                         AttentionShape{1, 40, 70, 4, 2, 8, false}));

// More query heads for each head of keys than a block has rows, and numbers of them that no power of two divides.
INSTANTIATE_TEST_SUITE_P(Groups, AttentionShapes,
                         testing::Values(AttentionShape{1, 9, 9, 10, 2, 4, true},      // 5
                                         AttentionShape{2, 1, 12, 12, 2, 5, true},     // 6, decode
                                         AttentionShape{1, 5, 20, 14, 2, 4, true},     // 7
                                         AttentionShape{1, 66, 66, 16, 2, 4, true},    // 8, blocks
                                         AttentionShape{1, 70, 70, 15, 3, 3, true},    // 5 of 3
                                         AttentionShape{1, 4, 9, 9, 1, 6, true},       // 9
                                         AttentionShape{1, 67, 67, 22, 2, 3, true}));  // 11

// Windows of one key, around a block's 64 and twice that, and longer than the context.
INSTANTIATE_TEST_SUITE_P(Windows, AttentionShapes,
                         testing::Values(AttentionShape{1, 130, 130, 2, 1, 4, true, 0, 1},    //
                                         AttentionShape{1, 66, 66, 2, 2, 3, true, 0, 2},      //
                                         AttentionShape{1, 130, 130, 2, 1, 4, true, 0, 63},   //
                                         AttentionShape{2, 130, 130, 2, 1, 4, true, 0, 64},   //
                                         AttentionShape{1, 130, 130, 2, 1, 4, true, 0, 65},   //
                                         AttentionShape{1, 150, 150, 2, 2, 4, true, 0, 128},  //
                                         AttentionShape{1, 70, 70, 2, 1, 4, true, 0, 71},     //
                                         AttentionShape{1, 70, 200, 2, 1, 4, true, 0, 65},    // a chunk at the end
                                         AttentionShape{2, 20, 90, 2, 1, 4, true, 0, 7},      //
                                         AttentionShape{1, 3, 140, 4, 2, 8, true, 0, 64},     // by rows
                                         AttentionShape{2, 1, 70, 4, 2, 8, true, 0, 1},       //
                                         AttentionShape{1, 80, 80, 2, 1, 4, false, 0, 10}));  // keys behind it are seen

// Documents of one token, that end at a block's border, one before and one behind it, and that are longer than a block.
INSTANTIATE_TEST_SUITE_P(
    Documents, AttentionShapes,
    testing::Values(AttentionShape{1, 130, 130, 2, 1, 4, true, 0, 0, documents(130, {{64, 66}})},
                    AttentionShape{1, 130, 130, 2, 1, 4, true, 0, 0, documents(130, {{63, 67}})},
                    AttentionShape{1, 130, 130, 2, 2, 4, true, 0, 0, documents(130, {{65, 64, 1}})},
                    AttentionShape{1, 140, 140, 2, 1, 4, true, 0, 0, documents(140, {{1, 1, 126, 1, 1, 10}})},
                    AttentionShape{2, 70, 70, 2, 1, 4, true, 0, 0, documents(70, {{3, 1, 5, 2, 59}, {70}})},
                    AttentionShape{1, 200, 200, 2, 1, 4, true, 0, 0, documents(200, {{10, 150, 40}})},
                    AttentionShape{1, 40, 110, 2, 1, 4, true, 0, 0, documents(40, {{50, 30, 30}})},  // a chunk
                    AttentionShape{2, 5, 70, 2, 1, 4, true, 0, 0, documents(5, {{67, 3}, {70}})},    // by rows
                    AttentionShape{1, 150, 150, 2, 1, 4, true, 0, 64, documents(150, {{40, 100, 10}})},
                    AttentionShape{2, 130, 130, 2, 1, 4, true, 0, 9, documents(130, {{64, 66}, {5, 1, 124}})},
                    AttentionShape{1, 6, 90, 2, 1, 4, true, 0, 3, documents(6, {{88, 2}})}));

// A window that is no shorter than the context, and one document, hide nothing: they change no bit.
TEST(Attention, WhatHidesNothingChangesNothing) {
  for (const std::int64_t TQ : {5, 130}) {
    AttentionShape s{2, TQ, 130, 4, 2, 8, true, 0.3f};
    const Inputs in = random_inputs(s);
    for (const Form form : {Form::plain, Form::blocks}) {
      const Result want = run(s, in, form);
      AttentionShape all = s;
      all.window = 130;
      all.document_starts = documents(TQ, {{130}, {130}});
      EXPECT_EQ(run(all, in, form), want) << TQ;
    }
  }
}

// One document after another in a sequence, against each alone. Where documents begin at a block's border, the blocks of the
// two are the same and so are all bits; the plain loops have none. Elsewhere the same terms are added in another order.
TEST(Attention, PackedDocumentsAreThoseAlone) {
  const std::vector<std::vector<std::int32_t>> packings = {{64, 128, 40}, {9, 1, 55, 70, 2, 63}, {1, 64, 65}};
  for (const std::vector<std::int32_t>& lengths : packings) {
    const std::int64_t T = std::accumulate(lengths.begin(), lengths.end(), 0);
    for (const std::int64_t window : {0, 33}) {
      const AttentionShape s{1, T, T, 4, 2, 8, true, 0.3f, window, documents(T, {lengths})};
      const Inputs in = random_inputs(s);
      for (const Form form : {Form::plain, Form::blocks}) {
        const Result packed = run(s, in, form);
        const bool same_bits = form == Form::plain || lengths[0] == 64;
        std::int64_t first = 0;
        for (const std::int32_t length : lengths) {
          AttentionShape alone = s;
          alone.TQ = alone.TK = length, alone.document_starts = nullptr;
          const auto part = [&](const Floats& tensor, std::int64_t row) {
            return Floats(tensor.begin() + first * row, tensor.begin() + (first + length) * row);
          };
          const std::int64_t q_row = s.NH * s.HS, kv_row = s.NKV * s.HS;
          const Result want =
              run(alone, {part(in.q, q_row), part(in.k, kv_row), part(in.v, kv_row), part(in.dout, q_row)}, form);
          for (const auto& [got, expected, row] : {std::tuple{&packed.out, &want.out, q_row},
                                                   {&packed.dq, &want.dq, q_row},
                                                   {&packed.dk, &want.dk, kv_row},
                                                   {&packed.dv, &want.dv, kv_row}}) {
            const bool rounding = length == 1 && (expected == &want.dq || expected == &want.dk);  // of 0
            if (same_bits) {
              EXPECT_EQ(part(*got, row), *expected) << length;
            } else if (!rounding) {
              expect_close(part(*got, row), *expected, "document of " + std::to_string(length));
            }
          }
          first += length;
        }
      }
    }
  }
}

// NaN in a key and its value reaches nothing that does not see it: neither the queries from which the mask hides it, nor the
// gradients of keys that no query sees together with it. Nor does NaN in a query reach keys that it does not see.
TEST(Attention, HiddenKeysAndQueriesChangeNoBit) {
  const std::vector<AttentionShape> shapes = {
      {1, 130, 130, 2, 1, 4, true, 0.3f},
      {1, 130, 130, 2, 1, 4, true, 0.3f, 20},
      {1, 130, 130, 2, 1, 4, true, 0.3f, 64},
      {1, 70, 140, 2, 1, 4, true, 0.3f, 31},
      {1, 5, 90, 2, 1, 4, true, 0.3f, 31},
      {1, 150, 150, 2, 1, 4, true, 0.3f, 0, documents(150, {{1, 70, 57, 2, 20}})},
      {1, 150, 150, 2, 1, 4, true, 0.3f, 11, documents(150, {{1, 70, 57, 2, 20}})},
  };
  for (const AttentionShape& s : shapes) {
    const Inputs in = random_inputs(s);
    const auto poison = [&](Floats& tensor, std::int64_t row, std::int64_t size) {
      std::fill_n(tensor.begin() + row * size, size, kNaN);
    };
    const auto expect_same = [&](const Floats& got, const Floats& want, std::int64_t row, std::int64_t size,
                                 const std::string& what) {
      EXPECT_TRUE(std::equal(got.begin() + row * size, got.begin() + (row + 1) * size, want.begin() + row * size))
          << what << ", row " << row << ", window " << s.window << ", TQ " << s.TQ;
    };
    const std::int64_t q_row = s.NH * s.HS, kv_row = s.NKV * s.HS;
    for (const Form form : {Form::plain, Form::blocks}) {
      const Result want = run(s, in, form);
      for (const std::int64_t j : {std::int64_t{0}, s.TK / 2, s.TK - 27, s.TK - 1}) {
        Inputs bad = in;
        poison(bad.k, j, kv_row);
        poison(bad.v, j, kv_row);
        const Result got = run(s, bad, form);
        std::vector<bool> together(s.TK);  // whether a query sees the key and key j
        for (std::int64_t t = 0; t < s.TQ; ++t) {
          if (sees(s, 0, t, j)) {
            for (std::int64_t other = 0; other < s.TK; ++other)
              together[other] = together[other] || sees(s, 0, t, other);
            continue;
          }
          expect_same(got.out, want.out, t, q_row, "out");
          expect_same(got.dq, want.dq, t, q_row, "dq");
          for (std::int64_t h = 0; h < s.NH; ++h) expect_same(got.lse, want.lse, h * s.TQ + t, 1, "lse");
        }
        for (std::int64_t other = 0; other < s.TK; ++other) {
          if (together[other]) continue;
          expect_same(got.dk, want.dk, other, kv_row, "dk");
          expect_same(got.dv, want.dv, other, kv_row, "dv");
        }
      }
      for (const std::int64_t t : {std::int64_t{0}, s.TQ / 2, s.TQ - 1}) {
        Inputs bad = in;
        poison(bad.q, t, q_row);
        poison(bad.dout, t, q_row);
        const Result got = run(s, bad, form);
        for (std::int64_t j = 0; j < s.TK; ++j) {
          if (sees(s, 0, t, j)) continue;
          expect_same(got.dk, want.dk, j, kv_row, "dk");
          expect_same(got.dv, want.dv, j, kv_row, "dv");
        }
      }
    }
  }
}

TEST(Attention, RowsAndBlocksAgree) {
  // The last queries alone take the path without blocks.
  AttentionShape s{2, 100, 100, 4, 2, 24, true, 0.2f};
  const Inputs in = random_inputs(s);
  const Result blocks = run(s, in);
  AttentionShape last = s;
  last.TQ = 3;
  Inputs few = in;
  few.q.clear();
  Floats expected;
  for (std::int64_t b = 0; b < s.B; ++b) {
    const std::int64_t begin = (b * s.TQ + s.TQ - 3) * s.NH * s.HS, end = (b + 1) * s.TQ * s.NH * s.HS;
    few.q.insert(few.q.end(), in.q.begin() + begin, in.q.begin() + end);
    expected.insert(expected.end(), blocks.out.begin() + begin, blocks.out.begin() + end);
  }
  few.dout.resize(few.q.size());
  expect_close(run(last, few).out, expected, "out", 1e-6);
}

TEST(Attention, LargeScoresDoNotOverflow) {
  // Scores of several thousand: the softmax is one-hot or nearly so, and nothing overflows on the way.
  for (const std::int64_t TQ : {4, 80}) {
    const AttentionShape s{1, TQ, 80, 2, 1, 16, true, 1.0f};
    const Result r = run(s, random_inputs(s, 30.0f));
    for (const Floats* values : {&r.out, &r.lse, &r.dq, &r.dk, &r.dv}) {
      for (const float value : *values) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

TEST(Attention, ReadsAndWritesThroughStrides) {
  // Llama rows [q heads | k heads | v heads] against contiguous tensors, and GPT-NeoX rows [head][q, k, v].
  const AttentionShape s{2, 13, 13, 4, 4, 6, true, 0.4f};
  const std::int64_t N = s.B * s.TQ, width = s.NH * s.HS, row = 3 * width;
  const Inputs in = random_inputs(s);
  const Result expected = run(s, in);
  struct Layout {
    std::int64_t offset, head_stride;
  };
  for (const Layout layout : {Layout{width, s.HS}, Layout{s.HS, 3 * s.HS}}) {
    Floats qkv(N * row), dqkv(N * row, kNaN), out(N * width), lse(s.B * s.NH * s.TQ);
    const auto view = [&](Floats& data, std::int64_t which) {
      return HeadView{data.data() + which * layout.offset, s.TQ * row, row, layout.head_stride};
    };
    const auto copy = [&](Floats& packed, const Floats& tensor, std::int64_t which, bool back, Floats* to) {
      for (std::int64_t n = 0; n < N; ++n) {
        for (std::int64_t i = 0; i < width; ++i) {
          float& element = packed[n * row + which * layout.offset + i / s.HS * layout.head_stride + i % s.HS];
          if (back)
            (*to)[n * width + i] = element;
          else
            element = tensor[n * width + i];
        }
      }
    };
    copy(qkv, in.q, 0, false, nullptr);
    copy(qkv, in.k, 1, false, nullptr);
    copy(qkv, in.v, 2, false, nullptr);
    const HeadView out_view = contiguous(out.data(), s.TQ, s.NH, s.HS);
    attention_forward(s, out_view, lse.data(), view(qkv, 0), view(qkv, 1), view(qkv, 2));
    EXPECT_EQ(out, expected.out);
    attention_backward(s, view(dqkv, 0), view(dqkv, 1), view(dqkv, 2), contiguous(in.dout.data(), s.TQ, s.NH, s.HS),
                       out_view, lse.data(), view(qkv, 0), view(qkv, 1), view(qkv, 2));
    Floats got(N * width);
    for (const auto& [which, gradient] : {std::pair{0, &expected.dq}, {1, &expected.dk}, {2, &expected.dv}}) {
      copy(dqkv, {}, which, true, &got);
      EXPECT_EQ(got, *gradient) << which;
    }
  }
}

TEST(Attention, LogSumExpIsOptional) {
  for (const std::int64_t TQ : {2, 40}) {
    const AttentionShape s{1, TQ, 40, 2, 1, 8, true, 0.3f};
    const Inputs in = random_inputs(s);
    Floats out(in.q.size());
    attention_forward(s, contiguous(out.data(), s.TQ, s.NH, s.HS), nullptr, contiguous(in.q.data(), s.TQ, s.NH, s.HS),
                      contiguous(in.k.data(), s.TK, s.NKV, s.HS), contiguous(in.v.data(), s.TK, s.NKV, s.HS));
    EXPECT_EQ(out, run(s, in).out);
  }
}

TEST(Attention, NanReachesEveryOutputThatSeesIt) {
  for (const std::int64_t TQ : {3, 80}) {
    const AttentionShape s{1, TQ, 80, 2, 1, 8, true, 0.3f};
    for (const bool in_value : {false, true}) {
      Inputs in = random_inputs(s);
      (in_value ? in.v : in.k)[75 * s.HS + 2] = kNaN;
      const Result r = run(s, in);
      const std::int64_t first = std::max<std::int64_t>(75 - (s.TK - s.TQ), 0);  // query at position 75
      for (std::int64_t i = first * s.NH * s.HS; i < static_cast<std::int64_t>(r.out.size()); ++i) {
        if (in_value && i % s.HS != 2) continue;
        ASSERT_TRUE(std::isnan(r.out[i])) << i;
      }
    }
    Inputs in = random_inputs(s);
    in.q[0] = kNaN;
    const Result r = run(s, in);
    for (std::int64_t d = 0; d < s.HS; ++d) EXPECT_TRUE(std::isnan(r.out[d]));
    EXPECT_FALSE(std::isnan(r.out[s.HS]));  // the other head
  }
}

TEST(Attention, SameBitsForAnyThreads) {
  for (const std::int64_t TQ : {2, 100}) {
    const AttentionShape s{2, TQ, 100, 6, 2, 16, true, 0.25f, 40, documents(TQ, {{100}, {99, 1}})};
    const Inputs in = random_inputs(s);
    for (const Form form : {Form::plain, Form::blocks}) {
      expect_same_bits_for_any_threads("attention", [&] {
        const Result r = run(s, in, form);
        return std::vector<Floats>{r.out, r.lse, r.dq, r.dk, r.dv};
      });
    }
  }
}

}  // namespace
}  // namespace weft::cpu
