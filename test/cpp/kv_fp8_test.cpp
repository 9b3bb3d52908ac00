// --kv-dtype fp8 on the CPU: codes and scales of a row, attention over them, and models whose pages hold them.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "llmc/base/dtype.h"
#include "llmc/base/fp8.h"
#include "llmc/base/kv_fp8.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/paged_attention.h"
#include "llmc/model/single_sequence.h"
#include "test/cpp/golden_cases.h"
#include "test/cpp/gradient_check.h"
#include "test/cpp/inference_tools.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

using test::expect_close;
using test::Floats;
using test::kSlots;
using test::random_floats;
using test::run;
using test::Sequence;
using test::Trace;

// ---- codes and scales -----------------------------------------------------------------------------------------------

TEST(KvFp8, ACodeIsTheNearestNumberOfTheFormat) {
  std::mt19937 random(3);
  for (int i = 0; i < 300'000; ++i) {
    // from below half of the smallest number to the largest
    const std::uint32_t bits = static_cast<std::uint32_t>(random() & 0x80FFFFFFu) + ((115u + random() % 20u) << 23);
    const float value = std::bit_cast<float>(bits);
    if (std::abs(value) > 448) continue;
    ASSERT_EQ(kv_code(bits), f32_to_fp8(value, Fp8Format::e4m3)) << value;
  }
  for (unsigned code = 0; code < 256; ++code) {  // the codes, the middles between them, and what is next to both
    if ((code & 0x7Fu) == 0x7F) continue;
    const float value = fp8_to_f32(static_cast<std::uint8_t>(code), Fp8Format::e4m3);
    const float after =
        (code & 0x7Fu) == 0x7E ? value : fp8_to_f32(static_cast<std::uint8_t>(code + 1), Fp8Format::e4m3);
    for (const float at : {value, (value + after) / 2}) {
      for (const float each : {at, std::nextafter(at, -1000.0f), std::nextafter(at, 1000.0f)}) {
        EXPECT_EQ(kv_code(std::bit_cast<std::uint32_t>(each)), f32_to_fp8(each, Fp8Format::e4m3)) << each;
      }
    }
  }
  for (const float large : {449.0f, 1e30f}) {
    EXPECT_EQ(kv_code(std::bit_cast<std::uint32_t>(large)), 0x7Eu);
    EXPECT_EQ(kv_code(std::bit_cast<std::uint32_t>(-large)), 0xFEu);
  }
  for (const std::uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7FFFFFFFu, 0xFF800001u}) EXPECT_EQ(kv_code(nan), 0x7Fu);
  EXPECT_EQ(kv_code(0x7F800000u), 0x7Eu);
  for (const float small : {0.0f, 1e-45f, 1e-30f, 0x1p-10f}) {  // half of the smallest number is a tie
    EXPECT_EQ(kv_code(std::bit_cast<std::uint32_t>(small)), 0u);
    EXPECT_EQ(kv_code(std::bit_cast<std::uint32_t>(-small)), 0x80u);
  }
}

// Widening to 16 bits rounds nothing: whatever kernel reads the pages, it sees one value.
TEST(KvFp8, EveryStoredNumberIsOneOfFp16AndOfBf16) {
  for (std::uint32_t scale = kKvLeastScale; scale <= kKvLargestScale; ++scale) {
    for (unsigned code = 0; code < 256; ++code) {
      if ((code & 0x7Fu) == 0x7F) continue;
      const auto stored = static_cast<std::uint8_t>(code), stored_scale = static_cast<std::uint8_t>(scale);
      float value = 0;
      kv_load(KvKind::key, &stored, &stored_scale, 1, 0, 1, &value);
      EXPECT_EQ(static_cast<double>(value),
                std::ldexp(static_cast<double>(fp8_to_f32(stored, Fp8Format::e4m3)), static_cast<int>(scale) - 127));
      EXPECT_EQ(f16_to_f32(f32_to_f16(value)), value);
      EXPECT_EQ(bf16_to_f32(f32_to_bf16(value)), value);
    }
  }
}

// A row as it is read again.
struct Stored {
  std::uint8_t scale;
  Floats values;
};
Stored stored(const Floats& row) {
  std::vector<std::uint8_t> codes(kKvUnit * row.size());
  Stored result{0, Floats(row.size())};
  kv_store(KvKind::key, row.data(), std::ssize(row), 0, codes.data(), &result.scale);
  kv_load(KvKind::key, codes.data(), &result.scale, std::ssize(row), 0, 1, result.values.data());
  return result;
}

TEST(KvFp8, TheScaleIsTheSmallestThatHoldsTheRow) {
  for (int e = -40; e <= 15; ++e) {
    const float top = std::ldexp(1.75f, e), next = std::nextafter(top, 1e9f);
    const int wanted = std::clamp(e - 8, -15, 7), wanted_next = std::clamp(e - 7, -15, 7);
    EXPECT_EQ(stored({0, -top, top / 3}).scale, wanted + 127) << e;
    EXPECT_EQ(stored({0, next, top / 3}).scale, wanted_next + 127) << e;
  }
  EXPECT_EQ(stored({0, 0, 0}).values, Floats(3, 0.0f));
  EXPECT_EQ(stored({-0x1p-24f, 0x1p-24f, 0}).values, (Floats{-0x1p-24f, 0x1p-24f, 0}));  // fp16's smallest
  EXPECT_EQ(stored({-65504, 65504, 3e38f}).values, (Floats{-57344, 57344, 57344}));      // saturates, stays finite
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    const Stored row = stored({1, bad, 2});
    for (const float value : row.values) EXPECT_FALSE(std::isfinite(value)) << bad;
  }
}

// Both numbers of every pair, as code_slots.cuh gets them in bf16 and in fp16: by shifts, masks and a power of two.
TEST(KvFp8, APairIsWidenedByShiftsAndMasks) {
  const auto pick = [](std::uint32_t bits, std::uint32_t mask) { return bits & mask; };
  for (std::uint32_t first = 0; first < 256; ++first) {
    for (std::uint32_t second = 0; second < 256; ++second) {
      const std::uint32_t pair = kv_pair(first, second);
      ASSERT_LT(pair, 1u << 16);
      ASSERT_EQ(kv_first(pair), first);
      ASSERT_EQ(kv_second(pair), second);
      if ((first & 0x7F) == 0x7F || (second & 0x7F) == 0x7F) continue;
      const float want_first = fp8_to_f32(static_cast<std::uint8_t>(first), Fp8Format::e4m3),
                  want_second = fp8_to_f32(static_cast<std::uint8_t>(second), Fp8Format::e4m3);
      const auto of_bf16 = [](std::uint32_t bits) { return bf16_to_f32(static_cast<std::uint16_t>(bits)) * 0x1p120f; };
      const auto of_fp16 = [](std::uint32_t bits) { return f16_to_f32(static_cast<std::uint16_t>(bits)) * 0x1p8f; };
      ASSERT_EQ(of_bf16(pick(pair, 0x87F0)), want_first);
      ASSERT_EQ(of_bf16(pick(pair << 4, 0x80F0) | pick(pair >> 4, 0x0700)), want_second);
      ASSERT_EQ(of_fp16(pick(pair, 0x8000) | pick(pair << 3, 0x3F80)), want_first);
      ASSERT_EQ(of_fp16(pick(pair << 4, 0x8000) | pick(pair >> 1, 0x3800) | pick(pair << 7, 0x0780)), want_second);
    }
  }
}

// Written as the PTX ISA has it: register r of operand B of a lane is rows (k) 2t + 8r and 2t + 8r + 1 of column (n) g.
TEST(KvFp8, AUnitLiesAsALaneMultipliesIt) {
  for (const std::int64_t HS : {32, 64, 80, 96, 128, 256}) {
    const std::int64_t of_load = HS / 16 % 2 == 0 ? 2 : 1;
    for (const KvKind kind : {KvKind::key, KvKind::value}) {
      std::int64_t index = 0;
      for (std::int64_t first = 0; first < HS / 16; first += of_load) {
        for (std::int64_t lane = 0; lane < 32; ++lane) {
          for (std::int64_t group = first; group < first + of_load; ++group) {
            for (const int word : {0, 1}) {
              for (const int half : {0, 1}) {
                const std::int64_t g = lane / 4, t = lane % 4;
                // Of keys a word has both registers of eight positions, of values one register of both eight dimensions.
                const std::int64_t p = kind == KvKind::key ? word * 8 + g : word * 8 + 2 * t + half;
                const std::int64_t d = group * 16 + (kind == KvKind::key ? 2 * t + half : g);
                ASSERT_EQ(kv_pair_index(kind, p, d, HS), index++) << HS << ", " << p << ", " << d;
              }
            }
          }
        }
      }
      EXPECT_EQ(index, kKvUnit * HS / 2);
    }
  }
}

// Rows of whole units and of one begun, of heads with a rest, too: each is read as it was written last, and writes no other.
TEST(KvFp8, RowsOfAUnitAreTheirOwn) {
  constexpr std::int64_t kRows = 2 * kKvUnit;
  for (const std::int64_t HS : {5, 16, 40, 64, 80}) {
    for (const KvKind kind : {KvKind::key, KvKind::value}) {
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(kRows * HS), 0xFF), scales(kRows, 255);
      Floats wide(static_cast<std::size_t>(kRows * HS), 0.0f), read(wide.size());
      std::mt19937 random(7);
      for (int write = 0; write < 200; ++write) {
        const std::int64_t row = write < kRows ? kRows - 1 - write : static_cast<std::int64_t>(random() % kRows);
        Floats values(static_cast<std::size_t>(HS));
        for (float& value : values)  // numbers of the format, the largest of which sets the scale
          value = fp8_to_f32(static_cast<std::uint8_t>((random() % 2 << 7) | random() % 0x7F), Fp8Format::e4m3);
        values[random() % values.size()] = 448;
        kv_store(kind, values.data(), HS, row, codes.data(), scales.data());
        std::copy(values.begin(), values.end(), wide.begin() + row * HS);
        if (write + 1 < kRows) continue;
        kv_load(kind, codes.data(), scales.data(), HS, 0, kRows, read.data());
        ASSERT_EQ(read, wide) << HS << ", write " << write;
      }
    }
  }
}

TEST(KvFp8, AStoredRowErrsByHalfASpacing) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const std::size_t size : {1, 5, 64, 80, 128, 256}) {
    for (const float spread : {1e-6f, 1e-3f, 1.0f, 300.0f}) {
      Floats row(size);
      for (float& value : row) value = normal(random) * spread;
      const Stored read = stored(row);
      const double smallest = std::ldexp(1.0, read.scale - 127 - 9);
      for (std::size_t d = 0; d < size; ++d) {
        EXPECT_LE(std::abs(read.values[d] - row[d]), std::max(std::abs(row[d]) / 16.0, smallest / 2));
      }
    }
  }
}

// ---- attention ------------------------------------------------------------------------------------------------------

// The codes in shuffled pages against plain attention over what they stand for, and against fp32 pages of that, bit for bit.
// Rows of one head differ in magnitude from those of the next, and so do keys and values: scales matter.
TEST(KvFp8, AttentionIsThatOverTheStoredNumbers) {
  constexpr std::int64_t P = 16, T = 2 * P + 5, kPages = 9;
  struct Shape {
    std::int64_t NH, NKV, HS, window = 0;
  };
  for (const auto& [NH, NKV, HS, window] :
       {Shape{4, 2, 64}, Shape{2, 2, 80}, Shape{3, 1, 128}, Shape{2, 1, 256}, Shape{4, 2, 5}, Shape{4, 2, 64, 7},
        Shape{2, 2, 80, P}, Shape{3, 1, 128, 30}}) {
    SCOPED_TRACE(format("heads of %lld, window %lld", static_cast<long long>(HS), static_cast<long long>(window)));
    const float scale = 0.02f;
    const Floats q = random_floats(T * NH * HS, 5);
    Floats k = random_floats(T * NKV * HS, 6), v = random_floats(T * NKV * HS, 7);
    for (std::size_t i = 0; i < k.size(); ++i) {
      const auto row = static_cast<int>(static_cast<std::int64_t>(i) / HS);
      k[i] = std::ldexp(k[i], row % 3);
      v[i] = std::ldexp(v[i], -2 - row % 5);
    }
    const auto elements = static_cast<std::size_t>(kPages * NKV * P * HS),
               rows = elements / static_cast<std::size_t>(HS);
    // What nobody wrote must not be read: codes and scales that are not numbers.
    std::vector<std::uint8_t> key_codes(elements, 0x7F), value_codes = key_codes;
    std::vector<std::uint8_t> key_scales(rows, 255), value_scales = key_scales;
    Floats wide_keys(elements, std::nanf("")), wide_values = wide_keys, read_k(k.size()), read_v(v.size());
    const std::vector<std::int32_t> pages = {8, 2, 5};
    const cpu::PagedKv wide = {wide_keys.data(), wide_values.data(), P, NKV, HS};
    const cpu::PagedKv kv = {
        nullptr, nullptr, P, NKV, HS, {key_codes.data(), value_codes.data(), key_scales.data(), value_scales.data()}};
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t h = 0; h < NKV; ++h) {
        const std::int64_t row = kv.row(pages[static_cast<std::size_t>(t / P)], h) + t % P, from = (t * NKV + h) * HS;
        kv_store(KvKind::key, k.data() + from, HS, row, kv.codes.keys, kv.codes.key_scales);
        kv_store(KvKind::value, v.data() + from, HS, row, kv.codes.values, kv.codes.value_scales);
        kv_load(KvKind::key, kv.codes.keys, kv.codes.key_scales, HS, row, 1, read_k.data() + from);
        kv_load(KvKind::value, kv.codes.values, kv.codes.value_scales, HS, row, 1, read_v.data() + from);
        std::copy_n(read_k.data() + from, HS, wide.keys + row * HS);
        std::copy_n(read_v.data() + from, HS, wide.values + row * HS);
      }
    }
    Floats want(q.size());
    AttentionShape shape;
    shape.B = 1, shape.TQ = T, shape.TK = T, shape.NH = NH, shape.NKV = NKV, shape.HS = HS, shape.scale = scale;
    shape.window = window;
    const auto view = [HS = HS](const Floats& data, std::int64_t heads) {
      return cpu::ConstHeadView{data.data(), 0, heads * HS, HS};
    };
    cpu::plain::attention_forward(shape, {want.data(), 0, NH * HS, HS}, nullptr, view(q, NH), view(read_k, NKV),
                                  view(read_v, NKV));
    for (const std::int64_t piece : {std::int64_t{1}, std::int64_t{3}, std::int64_t{4}, T}) {
      std::vector<cpu::PagedRows> work;
      for (std::int64_t t = 0; t < T; t += piece) work.push_back({pages, t, std::min(piece, T - t), t});
      Floats got(q.size()), of_wide(q.size());
      cpu::paged_attention({NH, scale, NH * HS, HS, window}, got.data(), q.data(), kv, work);
      cpu::paged_attention({NH, scale, NH * HS, HS, window}, of_wide.data(), q.data(), wide, work);
      expect_close(got, want, "attention over codes");
      EXPECT_EQ(got, of_wide) << "pieces of " << piece;
    }
  }
}

// ---- models ---------------------------------------------------------------------------------------------------------

InferenceOptions pool(std::int64_t pages, bool fp8 = true) {
  return {.num_pages = pages, .page_size = 4, .slots = kSlots, .max_rows = 64, .max_positions = 48, .kv_fp8 = fp8};
}

// A row of each head [rows, NKV, HS] as pages store it.
Floats as_stored(const Floats& rows, std::int64_t HS) {
  Floats read;
  for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(HS)) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(at);
    const Floats row = stored(Floats(begin, begin + HS)).values;
    read.insert(read.end(), row.begin(), row.end());
  }
  return read;
}

// In every layer attention is that of plain loops over what the layer's own keys and values are as stored.
TEST(KvFp8, EachLayerAttendsToItsStoredKeysAndValues) {
  const std::vector<std::int32_t> ids = {5, 9, 2, 40, 7, 1, 3, 3, 8, 12, 6, 30, 21, 4, 17, 11, 2, 9};
  for (const GoldenCase& golden : golden_cases()) {
    const auto model = cpu::load_inference(ModelFile::open(golden.model), pool(12));
    const ModelConfig& c = model->config();
    const std::vector<std::int32_t> pages = {11, 3, 7, 2, 9};
    model->keep_activations(true);
    for (std::size_t first = 0, rows = 1; first < ids.size(); first += rows, rows = 6) {
      rows = std::min(rows, ids.size() - first);
      Chunk chunk;
      chunk.pages = pages;
      chunk.first_position = static_cast<std::int64_t>(first);
      chunk.ids = std::span(ids).subspan(first, rows);
      model->submit({&chunk, 1});
      model->collect();
    }
    for (std::int64_t l = 0; l < c.num_layers; ++l) {
      const std::string prefix = "layers." + std::to_string(l) + ".";
      SCOPED_TRACE(golden.name + ", " + prefix);
      const Floats q = model->activation(prefix + "q"), k = model->activation(prefix + "k"),
                   v = model->activation(prefix + "v"), got = model->activation(prefix + "attention");
      AttentionShape shape;
      shape.B = 1, shape.TQ = shape.TK = std::ssize(ids), shape.NH = c.num_heads, shape.NKV = c.num_kv_heads;
      shape.HS = c.head_dim, shape.scale = c.score_scale(), shape.window = c.window(l);
      ASSERT_EQ(std::ssize(k), shape.TK * c.kv_size());
      const auto attention = [&](const Floats& keys, const Floats& values) {
        Floats out(q.size());
        const auto view = [&](const Floats& data, std::int64_t heads) {
          return cpu::ConstHeadView{data.data(), 0, heads * c.head_dim, c.head_dim};
        };
        cpu::plain::attention_forward(shape, {out.data(), 0, c.q_size(), c.head_dim}, nullptr, view(q, c.num_heads),
                                      view(keys, c.num_kv_heads), view(values, c.num_kv_heads));
        return out;
      };
      const Floats read_k = as_stored(k, c.head_dim), read_v = as_stored(v, c.head_dim);
      EXPECT_NE(read_k, k);
      EXPECT_NE(read_v, v);
      expect_close(got, attention(read_k, read_v), "attention");
    }
  }
}

TEST(KvFp8, BitsOfASequenceDoNotDependOnWhatElseRuns) {
  for (const char* name : {"llama-hs32-gqa2", "neox-hs32-padded", "smollm3-window-tied"}) {
    SCOPED_TRACE(name);
    const std::string path = std::string("test/fixtures/golden/") + name + ".model.bin";
    const auto model = cpu::load_inference(ModelFile::open(path), pool(96));
    const std::vector<Sequence> all = test::random_sequences(model->config(), kSlots, 30);
    std::vector<Trace> alone;
    for (const Sequence& sequence : all) alone.push_back(run(*model, {sequence}, 64, false, 1)[0]);
    for (const std::int64_t chunk : {1, 5, 64}) {
      EXPECT_TRUE(run(*model, all, chunk, chunk == 5, 9) == alone) << "chunks of " << chunk;
    }
  }
}

// Through the engine: preemption, shared prefixes, pages that are used again, drafts.
TEST(KvFp8, BitsDoNotDependOnTheEnginesSchedule) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  const auto model = cpu::load_inference(file, pool(20));
  const EngineStatistics sum = test::expect_engine_changes_nothing(*model, 3, 20, 1);
  EXPECT_GT(sum.preemptions, 5);
  EXPECT_GT(sum.prefix_ids, 5);
  test::expect_drafts_verified(*cpu::load_inference(file, pool(24)));
}

// With `cache` keys and values are rounded to 16 bits before, as a device has them.
TEST(KvFp8, RoundsWhatTheDeviceHas) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  const std::vector<std::int32_t> ids = {5, 9, 2, 40, 7, 1, 3, 3, 8, 12, 6, 30};
  const auto last = [&](DType cache) {
    InferenceOptions options = one_sequence(16);
    options.kv_fp8 = true;
    const auto model = single_sequence(cpu::load_inference(file, options, cache), 16);
    model->prefill(ids);
    const std::span<const float> logits = model->decode(3);
    return Floats(logits.begin(), logits.end());
  };
  EXPECT_NE(last(DType::f32), last(DType::bf16));
}

TEST(KvFp8, MemoryIsThatOfCodesAndScales) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin");
  const ModelConfig& c = file.config();
  const auto positions = std::uint64_t{8 * 4};
  const auto of_row = static_cast<std::uint64_t>(c.kv_size() + c.num_kv_heads);
  const std::vector<MemoryLine> lines = cpu::load_inference(file, pool(8))->memory();
  EXPECT_EQ(lines[1].name, "K/V cache (fp8)");
  const std::uint64_t bytes = 2 * static_cast<std::uint64_t>(c.num_layers) * of_row * positions;
  EXPECT_EQ(kv_bytes(c, 32, 0, true), bytes);
  EXPECT_EQ(kv_bytes(c, 32, 2, true), bytes + 2 * 2 * static_cast<std::uint64_t>(c.kv_size()) * positions);
  EXPECT_GE(lines[1].bytes, bytes);
  EXPECT_LT(lines[1].bytes, bytes + 4096);

  const std::uint64_t memory = 100 * kv_bytes(c, 32, 2);
  const InferenceOptions plain = pool_options(c, memory, 1000, 2), codes = pool_options(c, memory, 1000, 0, true);
  EXPECT_TRUE(codes.kv_fp8);
  EXPECT_EQ(static_cast<std::uint64_t>(codes.num_pages), memory / kv_bytes(c, 32, 0, true));
  EXPECT_GT(codes.num_pages, 19 * plain.num_pages / 10);

  const std::uint64_t fp32 = read_bytes_of_step(c, 3, 20, 4), fp8 = read_bytes_of_step(c, 3, 20, 4, true);
  const auto rows = static_cast<std::uint64_t>(2 * c.num_layers * 3 * 20);
  EXPECT_EQ(fp32 - fp8, rows * (4 * static_cast<std::uint64_t>(c.kv_size()) - of_row));
}

}  // namespace
}  // namespace weft
