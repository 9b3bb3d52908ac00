// Quantised weights: linear layers on the CPU, the table and its pointers, whole models against the same weights as floats, and
// files that are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "golden_cases.h"
#include "gradient_check.h"
#include "inference_tools.h"
#include "llmc/cpu/inference.h"
#include "llmc/cpu/matmul_rows.h"
#include "llmc/model/block_weights.h"
#include "llmc/model/formats/formats.h"
#include "llmc/model/presets.h"
#include "quantized_files.h"
#include "test_files.h"

namespace weft {
namespace {

using test::Floats;
using test::random_floats;
using test::RandomMatrix;

// Against sums in double; a row's bits whatever the others; u4 against its weights as floats, bit for bit. The columns are
// ragged for groups of 128 and for vectors, the outputs for blocks and panels.
TEST(QuantizedMatmul, GivesTheSumsOverItsWeights) {
  struct Shape {
    std::int64_t C, OC;
  };
  for (const WeightFormat* each : weight_formats()) {
    const DType dtype = each->dtype;
    for (const auto& [C, OC] : {Shape{2, 1}, Shape{38, 5}, Shape{128, 50}, Shape{130, 24}, Shape{3002, 61}}) {
      SCOPED_TRACE(format("%s, %lld x %lld", dtype_name(dtype), static_cast<long long>(OC), static_cast<long long>(C)));
      constexpr std::int64_t kMost = 13;
      const RandomMatrix matrix(dtype, OC, C, 7);
      const Floats weights = matrix.weights(), x = random_floats(kMost * C, 1), bias = random_floats(OC, 2),
                   before = random_floats(kMost * OC, 3);
      for (const cpu::Accumulate how : {cpu::Accumulate::no, cpu::Accumulate::yes}) {
        Floats alone = before;
        for (std::int64_t n = 0; n < kMost; ++n) {
          cpu::matmul_rows_forward(alone.data() + n * OC, x.data() + n * C, {nullptr, matrix.view()}, bias.data(), 1, C,
                                   OC, how);
        }
        for (std::int64_t n = 0; n < kMost; ++n) {
          for (std::int64_t o = 0; o < OC; ++o) {
            const std::size_t at = static_cast<std::size_t>(n * OC + o);
            double sum = bias[static_cast<std::size_t>(o)], size = 1;
            for (std::int64_t c = 0; c < C; ++c) {
              const double part = static_cast<double>(x[static_cast<std::size_t>(n * C + c)]) * matrix.weight(o, c);
              sum += part;
              size += std::abs(part);
            }
            if (how == cpu::Accumulate::yes) sum += before[at];
            ASSERT_NEAR(alone[at], sum, 2e-6 * size) << n << " " << o;
          }
        }
        for (const std::int64_t N : {2, 3, 4, 6, 7, 12, 13}) {
          Floats together(before.begin(), before.begin() + N * OC), plain = together;
          cpu::matmul_rows_forward(together.data(), x.data(), {nullptr, matrix.view()}, bias.data(), N, C, OC, how);
          EXPECT_TRUE(std::equal(together.begin(), together.end(), alone.begin())) << N << " rows";
          cpu::matmul_rows_forward(plain.data(), x.data(), {weights.data(), {}}, bias.data(), N, C, OC, how);
          EXPECT_TRUE(dtype != DType::u4 || together == plain) << N << " rows";
        }
      }
    }
  }
}

// ---- the table --------------------------------------------------------------------------------------------------------

Quantization scheme_of(const WeightFormat* weights, const WeightFormat* head = nullptr) {
  Quantization quantization;
  quantization.weights = weights;
  quantization.head = head;
  return quantization;
}

ModelConfig llama_with(Quantization quantization) {
  ModelConfig config = preset_config("tiny");  // C 192: one and a half groups
  config.tied_embeddings = false;
  config.quantization = quantization;
  return config;
}

TEST(QuantizedTable, ListsScalesAndZerosInTheirTypes) {
  const TensorTable table(llama_with(scheme_of(&kInt4, &kInt8)), DType::bf16);
  const auto expect = [&](const std::string& name, ValueKind kind, DType dtype, const std::vector<std::int64_t>& shape,
                          std::uint64_t bytes) {
    const TensorSpec& spec = table.at(name);
    EXPECT_EQ(spec.kind, kind) << name;
    EXPECT_EQ(spec.dtype, dtype) << name;
    EXPECT_EQ(spec.shape, shape) << name;
    EXPECT_EQ(spec.bytes, bytes) << name;
  };
  const std::string up = "model.layers.3.mlp.up_proj.weight";
  expect(up, ValueKind::quants, DType::u4, {512, 192}, 512 * 96);
  expect(up + ".scales", ValueKind::scales, DType::f16, {512, 2}, 2048);
  expect(up + ".zeros", ValueKind::zeros, DType::u8, {512, 2}, 1024);
  expect("lm_head.weight", ValueKind::quants, DType::i8, {2048, 192}, 2048 * 192);
  expect("lm_head.weight.scales", ValueKind::scales, DType::f32, {2048}, 8192);
  expect("model.embed_tokens.weight", ValueKind::floats, DType::bf16, {2048, 192}, 2048 * 384);
  expect("model.norm.weight", ValueKind::floats, DType::bf16, {192}, 384);
  EXPECT_EQ(table.find("lm_head.weight.zeros"), nullptr);
  EXPECT_EQ(table.find("model.norm.weight.scales"), nullptr);
  EXPECT_TRUE(table.quantized());
  const TensorTable plain(llama_with({}));
  EXPECT_FALSE(plain.quantized());
  EXPECT_EQ(table.parameters(), plain.parameters());
  EXPECT_NE(error_of(Exit::internal, [&] { per_parameter_plan("gradients", table, 4); }), "");

  std::uint64_t end = 0;  // the tensors follow each other, and none overlaps the one before
  for (const TensorSpec& spec : table.specs()) {
    EXPECT_GE(spec.byte_offset, end) << spec.name;
    end = spec.byte_offset + spec.bytes;
  }
  EXPECT_LE(end, table.arena_bytes());
}

// q, k and v, and gate and up, are one matrix each with one list of scales.
TEST(QuantizedTable, APackedMatrixHasItsScalesAndZerosSideBySide) {
  for (const WeightFormat* scheme : kWeightFormats) {
    const ModelConfig config = llama_with(scheme_of(scheme, &kInt8));
    const TensorTable table(config);
    const std::vector<std::byte> arena(table.arena_bytes());
    const ModelWeights<const float> bound =
        bind_weights(config, table, reinterpret_cast<const float*>(arena.data()), Offsets::bytes);
    const BlockWeights<const float>& block = bound.blocks[2];
    EXPECT_EQ(block.qkv.weight.plain, nullptr);
    EXPECT_EQ(bound.head.plain, nullptr);
    const auto at = [&](const std::string& name) -> const void* { return arena.data() + table.at(name).byte_offset; };
    const std::string prefix = "model.layers.2.";
    const auto expect = [&](const QuantizedMatrix& matrix, const std::vector<std::string>& names) {
      const std::string first = prefix + names[0] + ".weight";
      EXPECT_EQ(matrix.data, at(first));
      EXPECT_EQ(matrix.dtype, table.at(first).dtype);
      const void* scales = scheme == &kInt4 ? static_cast<const void*>(matrix.group_scales) : matrix.row_scales;
      EXPECT_EQ(scales, at(first + ".scales"));
      EXPECT_EQ(matrix.zeros, scheme == &kInt4 ? at(first + ".zeros") : nullptr);
      for (const char* suffix : {"", ".scales", ".zeros"}) {
        std::uint64_t end = 0;
        for (const std::string& name : names) {
          const TensorSpec* spec = table.find(prefix + name + ".weight" + suffix);
          if (spec == nullptr) continue;
          EXPECT_TRUE(end == 0 || spec->byte_offset == end) << spec->name;
          end = spec->byte_offset + spec->bytes;
        }
      }
    };
    expect(block.qkv.weight.packed, {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"});
    expect(block.output.weight.packed, {"self_attn.o_proj"});
    expect(block.up.weight.packed, {"mlp.gate_proj", "mlp.up_proj"});
    expect(block.down.weight.packed, {"mlp.down_proj"});
    EXPECT_EQ(bound.head.packed.data, at("lm_head.weight"));
    EXPECT_EQ(bound.head.packed.row_scales, at("lm_head.weight.scales"));
  }
}

// ---- models -----------------------------------------------------------------------------------------------------------

InferenceOptions pool(std::int64_t sequences) {
  return {.num_pages = 12 * sequences, .page_size = 4, .slots = sequences, .max_rows = 64, .max_positions = 48};
}

// Every golden model with random matrices of each scheme: int4 has the bits of its weights as floats, the others come close; and
// a sequence has its bits whatever else runs.
TEST(QuantizedModel, ComputesWhatItsWeightsGiveAsFloats) {
  const TemporaryDirectory directory;
  const std::string packed = directory.file("packed.bin"), plain = directory.file("plain.bin");
  for (const WeightFormat* scheme : kWeightFormats) {
    for (const GoldenCase& golden : golden_cases()) {
      SCOPED_TRACE(golden.name + " " + scheme->name);
      const bool int8_head = golden.name.size() % 2 == 0;
      test::write_quantized_pair(ModelFile::open(golden.model), scheme_of(scheme, int8_head ? &kInt8 : nullptr), packed,
                                 plain);
      const ModelFile file = ModelFile::open(packed);
      EXPECT_EQ(file.config().quantization.weights, scheme);
      const auto quantized = cpu::load_inference(file, pool(3)),
                 floats = cpu::load_inference(ModelFile::open(plain), pool(3));
      const std::vector<test::Sequence> all = test::random_sequences(quantized->config(), 3, 30);
      const std::vector<test::Trace> got = test::run(*quantized, all, 5, true, 4);
      EXPECT_EQ(test::run(*quantized, {all[1]}, 64, false, 1)[0], got[1]);
      const std::vector<test::Trace> want = test::run(*floats, all, 5, true, 4);
      if (scheme == &kInt4 && file.config().quantization.head == nullptr) {
        EXPECT_EQ(got, want);
        continue;
      }
      for (std::size_t s = 0; s < all.size(); ++s) {  // of the prompt: later ids may differ where two are close
        ASSERT_FALSE(got[s].logits.empty());
        for (std::size_t i = 0; i < got[s].logits[0].size(); ++i) {
          ASSERT_NEAR(got[s].logits[0][i], want[s].logits[0][i], 2e-4) << "sequence " << s << ", id " << i;
        }
      }
    }
  }
}

// ---- refused ----------------------------------------------------------------------------------------------------------

// A golden model with one byte of `tensor` replaced and every hash right.
void write_damaged(const std::string& path, const WeightFormat* scheme, const std::string& tensor,
                   const std::string& value) {
  const TemporaryDirectory directory;
  test::write_quantized_pair(ModelFile::open("test/fixtures/golden/neox-hs64-sequential.model.bin"), scheme_of(scheme),
                             directory.file("a.bin"), directory.file("b.bin"));
  const TensorFile file = TensorFile::open(directory.file("a.bin"), FileKind::model);
  TensorFileWriter writer(path, FileKind::model, file.config());
  for (const TensorInfo& info : file.tensors()) writer.declare(info.name, info.dtype, info.shape);
  for (const TensorInfo& info : file.tensors()) {
    std::vector<std::byte> bytes(file.bytes(info).begin(), file.bytes(info).end());
    if (info.name == tensor) std::memcpy(bytes.data() + 3 * value.size(), value.data(), value.size());
    writer.write(bytes.data(), bytes.size());
  }
  writer.publish();
}

TEST(QuantizedModel, RefusesValuesThatNoSchemeGives) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("bad.bin"), name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight";
  const auto bytes = [](auto value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); };
  struct Bad {
    const WeightFormat* scheme;
    std::string tensor, value, expected;
  };
  const float not_a_number = std::nanf("");
  const Bad cases[] = {
      {&kInt8, name, "\x80", "-127 to 127"},
      {&kFp8, name, "\x7F", "a number, not NaN"},
      {&kFp8, name, "\xFF", "a number, not NaN"},
      {&kInt8, name + ".scales", bytes(0.0f), "a finite number above 0"},
      {&kInt8, name + ".scales", bytes(-0.5f), "a finite number above 0"},
      {&kInt8, name + ".scales", bytes(HUGE_VALF), "a finite number above 0"},
      {&kFp8, name + ".scales", bytes(not_a_number), "a finite number above 0"},
      {&kInt4, name + ".scales", bytes(std::uint16_t{0x7C00}), "a finite number above 0"},
      {&kInt4, name + ".scales", bytes(std::uint16_t{0x0000}), "a finite number above 0"},
      {&kInt4, name + ".scales", bytes(std::uint16_t{0x8001}), "a finite number above 0"},
      {&kInt4, name + ".zeros", "\x10", "0 to 15"},
  };
  for (const Bad& bad : cases) {
    write_damaged(path, bad.scheme, bad.tensor, bad.value);
    const ModelFile file = ModelFile::open(path);
    const std::string message = error_of(Exit::bad_file, [&] { cpu::load_inference(file, pool(1)); });
    EXPECT_NE(message.find(bad.tensor + ": element 3: expected " + bad.expected), std::string::npos) << message;
  }
  write_damaged(path, &kInt8, name + ".scales", bytes(0x1p-126f));  // the least that is allowed
  EXPECT_NO_THROW(cpu::load_inference(ModelFile::open(path), pool(1)));
}

// test_quantisation.py holds the writer in Python to the same file.
TEST(WeightFormats, AreThoseOfTheTable) {
  const Json table = parse_json(read_text_file("test/fixtures/weight_formats.json", 1 << 20), "weight_formats.json");
  ASSERT_EQ(table.size(), weight_formats().size());
  EXPECT_EQ(weight_format_names(), "int8, int4 or fp8");
  EXPECT_EQ(weight_format_names(true), "int8");
  for (std::size_t i = 0; i < table.size(); ++i) {
    const WeightFormat& format = *weight_formats()[i];
    SCOPED_TRACE(format.name);
    EXPECT_EQ(table[i]["name"], format.name);
    EXPECT_EQ(table[i]["dtype"], dtype_name(format.dtype));
    EXPECT_EQ(table[i]["group"], format.group());
    EXPECT_EQ(table[i]["scales"], dtype_name(format.scale_dtype()));
    EXPECT_EQ(table[i]["head"], format.of_head);
    EXPECT_EQ(find_weight_format(format.name), &format);
    EXPECT_EQ(&weight_format(format.dtype), &format);
    const std::vector<int> invalid = table[i]["invalid"];
    for (int byte = 0; byte < 256; ++byte) {
      const auto q = static_cast<std::byte>(byte);
      const std::optional<std::size_t> bad = first_invalid_value(ValueKind::quants, format.dtype, {&q, 1});
      EXPECT_EQ(bad.has_value(), std::ranges::count(invalid, byte) > 0) << byte;
    }
  }
  EXPECT_EQ(find_weight_format("none"), nullptr);
  EXPECT_NE(error_of(Exit::internal, [] { weight_format(DType::bf16); }), "");
}

// The scale of a random model is made of their deviation, and a mean would be a direction that each layer amplifies.
TEST(WeightFormats, RandomValuesHaveTheirDeviationAndNoMean) {
  for (const WeightFormat* format : weight_formats()) {
    std::vector<std::uint8_t> q;
    for (int bits = 0; bits < 256; ++bits) q.push_back(format->random_q(static_cast<std::uint8_t>(bits)));
    const auto K = static_cast<std::int64_t>(q.size() * 8 / dtype_bits(format->dtype));
    const std::vector<std::uint16_t> scales(8, f32_to_f16(1));
    const std::vector<std::uint8_t> zeros(8, kRandomZero);
    Floats values(static_cast<std::size_t>(K));
    format->dequantize(values.data(), {q.data(), format->dtype, nullptr, scales.data(), zeros.data()}, 0, 1, K);
    double sum = 0, square = 0;
    for (const float value : values) sum += value, square += double{value} * value;
    const double mean = sum / static_cast<double>(K), variance = square / static_cast<double>(K) - mean * mean;
    EXPECT_NEAR(std::sqrt(variance) / format->random_deviation, 1, 0.02) << format->name;
    EXPECT_NEAR(mean / format->random_deviation, 0, 0.01) << format->name;
  }
}

// One bit of any tensor of the file, where the value that it becomes is as valid as the one before.
TEST(QuantizedModel, DamageIsFoundInEveryTensor) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("a.bin");
  for (const WeightFormat* scheme : kWeightFormats) {
    test::write_quantized_pair(ModelFile::open("test/fixtures/golden/neox-hs64-sequential.model.bin"),
                               scheme_of(scheme), path, directory.file("b.bin"));
    const std::string whole = read_bytes(path);
    const TensorFile file = TensorFile::open(path, FileKind::model);
    for (const TensorInfo& tensor : file.tensors()) {
      if (tensor.name == kTokenizerTensor) continue;
      const auto harmless = [](char byte) { return byte >= 0 && byte < 0x60; };
      const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(tensor.offset);
      const auto at = std::find_if(begin, begin + static_cast<std::ptrdiff_t>(tensor.bytes), harmless);
      std::string damaged = whole;
      damaged[static_cast<std::size_t>(at - whole.begin())] ^= 1;
      write_bytes(path, damaged);
      const std::string message =
          error_of(Exit::bad_file, [&] { cpu::load_inference(ModelFile::open(path), pool(1)); });
      expect_contains(message, tensor.name);
      expect_contains(message, "XXH3-64: got ");
    }
  }
}

TEST(QuantizedModel, RefusesAConfigurationThatItDoesNotKnow) {
  const Json good = quantization_to_json(scheme_of(&kInt4, &kInt8));
  EXPECT_EQ(quantization_from_json(good, "file"), scheme_of(&kInt4, &kInt8));
  const auto refused = [&](const char* key, const Json& value, const std::string& words) {
    Json changed = good;
    changed[key] = value;
    const std::string message = error_of(Exit::bad_file, [&] { quantization_from_json(changed, "file"); });
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  refused("scheme", "int2", "scheme: got 'int2', expected " + weight_format_names());
  refused("scheme", "none", "scheme: got 'none'");
  refused("scheme", 4, "scheme");
  refused("group", 64, "group: got 64, expected 128 with int4");
  refused("scheme", "fp8", "group: got 128, expected 0 with fp8");
  refused("head", "int4", "head: got 'int4', expected none or int8");
  EXPECT_NE(error_of(Exit::bad_file, [&] { quantization_from_json(Json::array(), "file"); }), "");
}

// Where floats are needed the file is refused by what it is.
TEST(QuantizedModel, IsNotTrained) {
  const TemporaryDirectory directory;
  test::write_quantized_pair(ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin"),
                             scheme_of(&kInt4, &kInt8), directory.file("a.bin"), directory.file("b.bin"));
  const ModelFile file = ModelFile::open(directory.file("a.bin"));
  const std::string message = error_of(Exit::bad_file, [&] { file.require_trainable(); });
  EXPECT_NE(message.find("its weights are quantised (int4, head int8), and training needs floats"), std::string::npos)
      << message;
  EXPECT_NO_THROW(ModelFile::open(directory.file("b.bin")).require_trainable());
}

}  // namespace
}  // namespace weft
