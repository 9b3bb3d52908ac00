// The tensor file: shared vectors with the Python implementation, damage of every kind, failures while
// writing.
#include "llmc/file/tensor_file.h"
#include "llmc/base/json.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <limits>
#include <vector>

#include "colliding_names.h"
#include "llmc/base/hash.h"
#include "llmc/model/formats/formats.h"
#include "llmc/model/model_file.h"
#include "processor_time.h"
#include "quantized_files.h"
#include "test_files.h"

namespace weft {
namespace {

const std::string kFixtures = "test/fixtures/tensor_file/";

// Makes the header hash of a damaged file right again, so that the checks behind it are reached.
void rehash(std::string& bytes) {
  std::uint64_t data_offset = 0;
  std::memcpy(&data_offset, bytes.data() + 56, 8);
  std::memset(bytes.data() + 64, 0, 8);
  const std::uint64_t hash = xxh3_64(bytes.data(), data_offset);
  std::memcpy(bytes.data() + 64, &hash, 8);
}

template <typename T>
void put(TensorFileWriter& writer, const std::vector<T>& values) {
  writer.write(values.data(), values.size() * sizeof(T));
}

FileKind kind_in(const std::string& bytes) {
  std::uint32_t kind = 0;
  std::memcpy(&kind, bytes.data() + 16, 4);
  return static_cast<FileKind>(kind);
}

std::string reason(const std::string& path, FileKind expected) {
  return error_of(Exit::bad_file, [&] { TensorFile::open(path, expected); });
}

// Content of the good vectors, as test/fixtures/tensor_file/make_fixtures.py has it.

void write_all_dtypes(const std::string& path) {
  TensorFileWriter writer(path, FileKind::model,
                          {{"model", {{"family", "llama"}, {"norm_eps", 1e-5}}}, {"made_by", "make_fixtures.py"}});
  writer.declare("matrix", DType::f32, {2, 3});
  writer.declare("half", DType::f16, {5});
  writer.declare("brain", DType::bf16, {4});
  writer.declare("tokenizer.json", DType::u8, {12});
  writer.declare("u16", DType::u16, {3});
  writer.declare("u32", DType::u32, {2});
  writer.declare("i32", DType::i32, {2, 1});
  writer.declare("i64", DType::i64, {1});
  writer.declare("i8", DType::i8, {3});
  writer.declare("u4", DType::u4, {2, 4});
  writer.declare("e4m3", DType::e4m3, {3});
  const std::vector<float> matrix = {-1, -0.5f, 0, 0.5f, 1, 1.5f};
  const std::vector<float> half = {0, -0.0f, 1, 65504, std::numeric_limits<float>::infinity()};
  const std::vector<float> brain = {1, 1.00390625f, 3.4e38f, -2.5f};
  writer.write_f32(matrix.data(), matrix.size());
  writer.write_f32(half.data(), half.size());
  writer.write_f32(brain.data(), brain.size());
  writer.write("{\"model\"", 8);  // one tensor in two pieces
  writer.write(":{}}", 4);
  put<std::uint16_t>(writer, {0, 1, 65535});
  put<std::uint32_t>(writer, {0, 4294967295u});
  put<std::int32_t>(writer, {std::numeric_limits<std::int32_t>::min(), 7});
  put<std::int64_t>(writer, {-1});
  put<std::int8_t>(writer, {-128, 127, 1});
  put<std::uint8_t>(writer, {0x10, 0x32, 0x54, 0xF6});
  put<std::uint8_t>(writer, {0x01, 0x7E, 0xB8});
  writer.publish();
}

void write_edge(const std::string& path) {
  const Json config = {{"dump", {{"dtype", "f32"}}},
                       {"model", {{"family", "gpt_neox"}}},
                       {"text", "Gr\u00fc\u00dfe \u0001\"\\/\n\U0001f9f5"},
                       {"numbers", {0, -1, 1e-5, 0.5, 1e20, 9007199254740993}},
                       {"none", nullptr},
                       {"flag", true}};
  TensorFileWriter writer(path, FileKind::reference_dump, config);
  writer.declare("scalar", DType::f32, {});
  writer.declare("empty", DType::i32, {0, 3});
  writer.declare("na\u00efve/\u91cd\u307f.\U0001f9f5", DType::u8, {1});
  writer.declare("eight", DType::u16, {1, 1, 1, 1, 1, 1, 2, 1});
  writer.declare(std::string(255, 'n'), DType::u8, {300});
  writer.declare("last_empty", DType::f16, {2, 0});
  put<float>(writer, {3.25f});
  put<std::uint8_t>(writer, {255});
  put<std::uint16_t>(writer, {1, 2});
  std::vector<std::uint8_t> ramp(300);
  for (std::size_t i = 0; i < ramp.size(); ++i) ramp[i] = static_cast<std::uint8_t>(i % 251);
  put(writer, ramp);
  writer.publish();
}

// What a file is instead, by its first bytes: a hint is given where they show it, and not where they only look alike.
TEST(TensorFile, SaysWhatAFileIsInstead) {
  const TemporaryDirectory directory;
  const std::string zeros(100, '\0');
  const std::pair<std::string, const char*> cases[] = {
      {"\x89WEFT\n\x1a" + zeros, "damaged by a text-mode copy"},
      {"\tWEFT\r\n\x1a" + zeros, "damaged by a text-mode copy"},
      {"xWEFT\n and more", "this is plain text"},
      {"WEFT is a program", "this is plain text"},
      {"\x1f\x8b" + zeros, "gzip-compressed"},
      {"\x1f\x8c" + zeros, "expected '\\x89WEFT"},
      {"PK\x03\x04" + zeros, "a zip archive"},
      {"\x80\x02" + zeros, "a Python pickle"},
      {"GGUF" + zeros, "a GGUF file"},
      {std::string("\x02\0\0\0\0\0\0\0{}", 10), "a safetensors file"},
      {std::string("\x03\0\0\0\0\0\0\0{}", 10), "expected '\\x89WEFT"},
      {std::string("\x80\x02\0\0\0\0\0\0{", 9) + std::string(639, ' '), "a safetensors file"},
      {"version https://git-lfs.github.com/spec/v1", "a git-lfs pointer"},
      {" <!doctype html>", "a web page"},
      {"\xef\xbb\xbf\n{\"error\": 1}", "JSON text"},
      {"\r\n\t[1, 2]", "JSON text"},
      {"\r\n\t <html>", "a web page"},
      {"\ttext\r\n", "this is plain text, expected a tensor file"},
      {"text\x7f", "expected '\\x89WEFT"},
      {"\x89WTOK\n\x1a" + zeros, "damaged by a text-mode copy"},
      {"\tWTOK\r\n\x1a" + zeros, "damaged by a text-mode copy"},
      {"\x89WTOK\r\n\x1a" + zeros, "this is a token shard"},
      {"\x1a\n\rKOTW\x89" + zeros, "written in the other byte order"},
      {"\x1a\n\rTFEW\x89" + zeros, "written in the other byte order"},
      {"\x89WEF", "truncated"},
      {"", "0 bytes"}};
  for (const auto& [bytes, words] : cases) {
    write_bytes(directory.file("f"), bytes);
    expect_contains(reason(directory.file("f"), FileKind::model), words);
  }
}

TEST(TensorFile, WritesTheSameBytesAsPython) {
  const TemporaryDirectory directory;
  write_all_dtypes(directory.file("all_dtypes.bin"));
  write_edge(directory.file("edge.bin"));
  TensorFileWriter(directory.file("no_tensors.bin"), FileKind::training_state, Json::object()).publish();
  for (const std::string name : {"all_dtypes.bin", "edge.bin", "no_tensors.bin"}) {
    EXPECT_TRUE(read_bytes(directory.file(name)) == read_bytes(kFixtures + name)) << name;
  }
  EXPECT_EQ(directory.entries(), 3u);
}

TEST(TensorFile, ReadsWhatPythonWrote) {
  const TensorFile file = TensorFile::open(kFixtures + "all_dtypes.bin", FileKind::model);
  file.verify_all();
  EXPECT_EQ(file.config()["model"]["norm_eps"], 1e-5);
  ASSERT_EQ(file.tensors().size(), 11u);
  std::vector<float> matrix(6), half(5), brain(4);
  file.read_f32(file.at("matrix"), matrix.data());
  file.read_f32(file.at("half"), half.data());
  file.read_f32(file.at("brain"), brain.data());
  EXPECT_EQ(matrix, (std::vector<float>{-1, -0.5f, 0, 0.5f, 1, 1.5f}));
  EXPECT_EQ(half, (std::vector<float>{0, 0, 1, 65504, std::numeric_limits<float>::infinity()}));
  EXPECT_TRUE(std::signbit(half[1]));
  EXPECT_EQ(brain, (std::vector<float>{1, 1, std::numeric_limits<float>::infinity(), -2.5f}));  // 1 + 2^-8 is a tie
  EXPECT_EQ(file.find("lm_head.weight"), nullptr);
  expect_contains(error_of(Exit::bad_file, [&] { file.at("lm_head.weight"); }), "tensor 'lm_head.weight': missing");
  float values[12];
  expect_contains(error_of(Exit::bad_file, [&] { file.read_f32(file.at("tokenizer.json"), values); }),
                  "tensor 'tokenizer.json': dtype: got u8, expected f32, f16 or bf16");
}

TEST(TensorFile, ReadsScalarsEmptyTensorsAndUnicodeNames) {
  TensorFile opened = TensorFile::open(kFixtures + "edge.bin", FileKind::reference_dump);
  const TensorFile file = std::move(opened);  // the index must survive a move
  file.verify_all();
  float scalar = 0;
  EXPECT_EQ(file.at("scalar").elements(), 1u);
  file.read_f32(file.at("scalar"), &scalar);
  EXPECT_EQ(scalar, 3.25f);
  EXPECT_EQ(file.at("empty").elements(), 0u);
  EXPECT_EQ(file.bytes(file.at("last_empty")).size(), 0u);
  EXPECT_EQ(file.bytes(file.at("na\u00efve/\u91cd\u307f.\U0001f9f5"))[0], std::byte{255});
  EXPECT_EQ(shape_text(file.at("eight").shape), "[1, 1, 1, 1, 1, 1, 2, 1]");
  EXPECT_EQ(file.config()["numbers"][5], 9007199254740993);
}

// Each damage of damaged.json is refused with the words that the Python reader uses.
TEST(TensorFile, RefusesDamageInTheWordsOfThePythonReader) {
  const Json cases = parse_json(read_bytes(kFixtures + "damaged.json"), "damaged.json");
  ASSERT_GT(cases.size(), 60u);
  const TemporaryDirectory directory;
  const std::string path = directory.file("damaged.bin");
  for (const Json& damage : cases) {
    SCOPED_TRACE(damage["name"].get<std::string>());
    std::string bytes = damaged_bytes(kFixtures, damage);
    const FileKind kind = kind_in(read_bytes(kFixtures + damage["base"].get<std::string>()));
    if (damage["rehash"].get<bool>()) rehash(bytes);
    write_bytes(path, bytes);
    std::string expected = escaped(path) + ": " + damage["message"].get<std::string>();
    std::string got = reason(path, kind);
    // What a JSON parser says of a syntax error is its own.
    if (const std::size_t at = expected.find("not valid JSON"); at != std::string::npos) {
      expected.resize(at);
      got.resize(std::min(at, got.size()));
    }
    EXPECT_EQ(got, expected);
  }
}

TEST(TensorFile, RefusesATruncationAtEveryHeaderByte) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("cut.bin");
  write_bytes(path, read_bytes(kFixtures + "edge.bin"));
  for (std::size_t size = 8193; size-- > 0;) {
    std::filesystem::resize_file(path, size);
    const std::string message = reason(path, FileKind::reference_dump);
    ASSERT_NE(message.find(size == 0 ? "0 bytes" : "truncated: got"), std::string::npos) << size << ": " << message;
  }
}

TEST(TensorFile, RefusesOneFlippedBitAnywhere) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("flipped.bin");
  const std::string bytes = read_bytes(kFixtures + "edge.bin");
  write_bytes(path, bytes);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put_byte = [&](std::size_t i, char byte) { file.seekp(static_cast<std::streamoff>(i)).put(byte).flush(); };
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    put_byte(i, static_cast<char>(bytes[i] ^ (1 << (i % 8))));
    const auto open = [&] { TensorFile::open(path, FileKind::reference_dump); };
    const auto verify = [&] { TensorFile::open(path, FileKind::reference_dump).verify_all(); };
    ASSERT_NE(i < 8192 ? error_of(Exit::bad_file, open) : error_of(Exit::bad_file, verify), "") << "byte " << i;
    put_byte(i, bytes[i]);
  }
  TensorFile::open(path, FileKind::reference_dump).verify_all();
}

// Large tensors are checked on a second thread, small ones on the same: both find both kinds of damage, at its place.
TEST(TensorFile, ReadingFindsAFlippedBitAndAValueThatIsNotFinite) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("values.bin");
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::size_t count : {std::size_t{1000}, std::size_t{1} << 22}) {
      std::vector<float> values(count, 0.5f), out(count);
      values[count - 7] = std::numeric_limits<float>::infinity();
      TensorFileWriter writer(path, FileKind::training_state, Json::object());
      writer.declare("t", dtype, {static_cast<std::int64_t>(count)});
      writer.write_f32(values.data(), count);
      writer.publish();
      {
        const TensorFile file = TensorFile::open(path, FileKind::training_state);
        const std::string where = "'t': element " + std::to_string(count - 7) + " is not finite";
        file.read_f32(file.at("t"), out.data());
        EXPECT_EQ(out, values);
        expect_contains(error_of(Exit::bad_file, [&] { file.read_finite_f32(file.at("t"), out.data()); }), where);
        expect_contains(error_of(Exit::bad_file, [&] { file.verify_finite(file.at("t")); }), where);
      }
      std::string bytes = read_bytes(path);
      bytes[bytes.size() - 100] ^= 1;
      write_bytes(path, bytes);
      const TensorFile file = TensorFile::open(path, FileKind::training_state);
      expect_contains(error_of(Exit::bad_file, [&] { file.read_f32(file.at("t"), out.data()); }), "XXH3-64: got");
      expect_contains(error_of(Exit::bad_file, [&] { file.verify_finite(file.at("t")); }), "XXH3-64: got");
    }
  }
}

TEST(TensorFile, AWrongHashNamesTheTensor) {
  const TemporaryDirectory directory;
  std::string bytes = read_bytes(kFixtures + "all_dtypes.bin");
  const TensorFile good = TensorFile::open(kFixtures + "all_dtypes.bin", FileKind::model);
  bytes[good.at("brain").offset + 3] ^= 4;
  write_bytes(directory.file("flipped.bin"), bytes);
  const TensorFile file = TensorFile::open(directory.file("flipped.bin"), FileKind::model);
  file.verify(file.at("matrix"));
  float values[4];
  expect_contains(error_of(Exit::bad_file, [&] { file.verify(file.at("brain")); }), "tensor 'brain': XXH3-64: got ");
  expect_contains(error_of(Exit::bad_file, [&] { file.verify_all(); }), "tensor 'brain': XXH3-64: got ");
  expect_contains(error_of(Exit::bad_file, [&] { file.read_f32(file.at("brain"), values); }), "tensor 'brain'");
}

TEST(TensorFile, ANonZeroGapBetweenTensorsIsFound) {
  const TemporaryDirectory directory;
  std::string bytes = read_bytes(kFixtures + "all_dtypes.bin");
  bytes[TensorFile::open(kFixtures + "all_dtypes.bin", FileKind::model).at("half").offset - 1] = 1;
  write_bytes(directory.file("gap.bin"), bytes);
  const TensorFile file = TensorFile::open(directory.file("gap.bin"), FileKind::model);
  expect_contains(error_of(Exit::bad_file, [&] { file.verify_all(); }), "data section: padding is not zero");
}

TEST(TensorFile, EachKindIsRefusedAsEachOther) {
  const std::vector<std::pair<std::string, FileKind>> files = {{"all_dtypes.bin", FileKind::model},
                                                               {"no_tensors.bin", FileKind::training_state},
                                                               {"edge.bin", FileKind::reference_dump}};
  for (const auto& [name, is] : files) {
    for (const auto& [ignored, wanted] : files) {
      if (is == wanted) continue;
      expect_contains(reason(kFixtures + name, wanted),
                      format("kind: this is a %s, expected a %s", file_kind_name(is), file_kind_name(wanted)));
    }
  }
}

TEST(TensorFile, RefusesWhatIsNotARegularFile) {
  const TemporaryDirectory directory;
  expect_contains(reason(directory.file("absent.bin"), FileKind::model), "cannot open");
  expect_contains(reason(directory.file("."), FileKind::model), "not a regular file");
}

// A table of 65,536 tensors, the most that are accepted, in bounded time.
TEST(TensorFile, HandlesTheLargestTable) {
  const TemporaryDirectory directory;
  TensorFileWriter writer(directory.file("many.bin"), FileKind::model, Json::object());
  for (std::size_t i = 0; i < kMaxTensors; ++i) writer.declare(format("t%zu", i), DType::u8, {0});
  EXPECT_NE(error_of(Exit::internal, [&] { writer.declare("one more", DType::u8, {0}); }), "");
  writer.publish();
  const TensorFile file = TensorFile::open(directory.file("many.bin"), FileKind::model);
  file.verify_all();
  EXPECT_EQ(file.tensors().size(), kMaxTensors);
  EXPECT_NE(file.find("t65535"), nullptr);
}

TEST(TensorFile, NamesThatCollideCostNoMoreThanOthers) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x.bin");
  expect_no_collisions([&](const std::vector<std::string>& names) {
    TensorFileWriter writer(path, FileKind::model, Json::object());
    for (const std::string& name : names) writer.declare(name, DType::u8, {0});
    writer.publish();
    return processor_seconds([&] { TensorFile::open(path, FileKind::model); });
  });
}

TEST(TensorFileWriter, RefusesMisuse) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x.bin");
  const auto declare = [&](const std::string& name, std::vector<std::int64_t> shape) {
    TensorFileWriter writer(path, FileKind::model, Json::object());
    writer.declare("a", DType::f32, {2});
    writer.declare(name, DType::f32, std::move(shape));
  };
  constexpr std::int64_t kLarge = std::int64_t{1} << 61;
  EXPECT_NE(error_of(Exit::internal, [&] { declare("a", {2}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { declare("", {2}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { declare(std::string(256, 'x'), {2}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { declare("line\nfeed", {2}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { declare("b", {-1}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { declare("b", {kLarge}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { declare("b", {kLarge, kLarge, 0}); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { declare("b", {1, 1, 1, 1, 1, 1, 1, 1, 1}); }), "");
  EXPECT_NE(error_of(Exit::internal,
                     [&] {
                       TensorFileWriter(path, FileKind::model, {{"model", {{"family", 7}}}});
                     }),
            "");
  // Each tensor fits in 63 bits, and no file holds both of them.
  const std::string message = error_of(Exit::internal, [&] {
    TensorFileWriter writer(path, FileKind::model, Json::object());
    for (const char* name : {"a", "b"}) writer.declare(name, DType::u8, {2 * kLarge});
    writer.publish();
  });
  expect_contains(message, "are too large for a file");
  TensorFileWriter writer(path, FileKind::model, Json::object());
  writer.declare("a", DType::f32, {2});
  const float values[3] = {1, 2, 3};
  EXPECT_NE(error_of(Exit::internal, [&] { writer.write(values, 12); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { writer.write_f32(values, 1); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { writer.declare("late", DType::f32, {1}); }), "");
  writer.write(values, 4);
  expect_contains(error_of(Exit::internal, [&] { writer.publish(); }), "tensor 'a': 4 of 8 bytes written");
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(TensorFileWriter, AnAbandonedFileLeavesTheOldOne) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model.bin");
  write_bytes(path, "old");
  {
    TensorFileWriter writer(path, FileKind::model, Json::object());
    writer.declare("a", DType::f32, {1000});
    const float value = 1;
    writer.write(&value, 4);
    EXPECT_EQ(directory.entries(), 2u);
  }
  EXPECT_EQ(read_bytes(path), "old");
  EXPECT_EQ(directory.entries(), 1u);
}

// A file size limit stands in for a full disk: EFBIG, with SIGXFSZ ignored.
TEST(TensorFileWriter, AFullDiskIsAResourceErrorAndLeavesTheOldFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model.bin");
  write_bytes(path, "old");
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::vector<float> values(1 << 20, 1.0f);
  const std::string message = error_of(Exit::resources, [&] {
    TensorFileWriter writer(path, FileKind::model, Json::object());
    writer.declare("a", DType::f32, {1 << 20});
    writer.write_f32(values.data(), values.size());
    writer.publish();
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  expect_contains(message, "model.bin");
  EXPECT_EQ(read_bytes(path), "old");
  EXPECT_EQ(directory.entries(), 1u);
}

// Conversion works in pieces: a tensor of several of them, of an odd size.
TEST(TensorFileWriter, ConvertsLargeTensorsInPieces) {
  const TemporaryDirectory directory;
  const std::size_t count = (5u << 18) + 7;
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 257) - 128;  // exact in bf16 and f16
  TensorFileWriter writer(directory.file("large.bin"), FileKind::training_state, Json::object());
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    writer.declare(dtype_name(dtype), dtype, {static_cast<std::int64_t>(count)});
  }
  for (int i = 0; i < 3; ++i) writer.write_f32(values.data(), count);
  writer.publish();
  const TensorFile file = TensorFile::open(directory.file("large.bin"), FileKind::training_state);
  file.verify_all();
  for (std::size_t i = 0; i < 3; ++i) {
    std::vector<float> got(count);
    file.read_f32(file.tensors()[i], got.data());
    EXPECT_TRUE(got == values) << file.tensors()[i].name;
    EXPECT_EQ(file.tensors()[i].hash, writer.tensors()[i].hash);
    EXPECT_EQ(file.tensors()[i].offset % kTensorAlignment, 0u);
  }
}

// Values are checked and hashed in pieces of 128 KiB within pieces of 1 MiB, by a thread of their own where 4 MiB are
// converted: what is wrong is found in the first piece, in one between, in the last and at their edges.
TEST(TensorFile, EachPieceIsCheckedAndHashed) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("values.bin");
  constexpr std::size_t kSmall = 1 << 17, kLarge = 1 << 20;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const std::size_t size = dtype_bytes(dtype);
    for (const std::size_t bytes : {2 * kLarge + 3 * kSmall + 3 * size, 4 * kLarge + kSmall + size}) {
      const std::size_t count = bytes / size;
      std::vector<float> values(count, 0.5f), out(count);
      TensorFileWriter writer(path, FileKind::training_state, Json::object());
      writer.declare("t", dtype, {static_cast<std::int64_t>(count)});
      writer.write_f32(values.data(), count);
      writer.publish();
      const std::string whole = read_bytes(path);
      const std::size_t data = whole.size() - bytes;
      for (const std::size_t byte : {std::size_t{0}, kSmall - size, kSmall, kLarge - size, kLarge,
                                     kLarge + kSmall + 8 * size, 2 * kLarge - size, 2 * kLarge, bytes - size}) {
        SCOPED_TRACE(format("%s, byte %zu of %zu", dtype_name(dtype), byte, bytes));
        // A NaN there and another one at the end, the hash made right: the first is named.
        std::string bad = whole;
        for (const std::size_t at : {byte, bytes - size}) {
          for (std::size_t i = 0; i < size; ++i) bad[data + at + i] = static_cast<char>(0xFF);
        }
        const std::uint64_t hash = xxh3_64(bad.data() + data, bytes);
        std::memcpy(bad.data() + 4096 + 8 + 344, &hash, 8);  // the record follows "{}", its hash comes last
        rehash(bad);
        write_bytes(path, bad);
        {
          const TensorFile file = TensorFile::open(path, FileKind::training_state);
          const std::string where = "'t': element " + std::to_string(byte / size) + " is not finite";
          file.read_f32(file.at("t"), out.data());
          EXPECT_TRUE(std::isnan(out[byte / size]));
          expect_contains(error_of(Exit::bad_file, [&] { file.read_finite_f32(file.at("t"), out.data()); }), where);
          expect_contains(error_of(Exit::bad_file, [&] { file.verify_finite(file.at("t")); }), where);
        }
        std::string flipped = whole;
        flipped[data + byte] = static_cast<char>(flipped[data + byte] ^ 1);
        write_bytes(path, flipped);
        const TensorFile file = TensorFile::open(path, FileKind::training_state);
        expect_contains(error_of(Exit::bad_file, [&] { file.read_f32(file.at("t"), out.data()); }), "XXH3-64");
        expect_contains(error_of(Exit::bad_file, [&] { file.verify_finite(file.at("t")); }), "XXH3-64");
        expect_contains(error_of(Exit::bad_file, [&] { file.verify(file.at("t")); }), "XXH3-64");
      }
    }
  }
}

// A tokenizer that no reader would take is refused before it is read: a sparse file has gigabytes for nothing.
TEST(TensorFile, ATokenizerBeyondTheLimitIsRefusedWhenAModelIsOpened) {
  const TemporaryDirectory directory;
  const std::string golden = "test/fixtures/golden/llama-hs32-mha.model.bin", path = directory.file("model.bin");
  const TensorFile original = TensorFile::open(golden, FileKind::model);
  const auto write = [&](DType dtype, std::vector<std::int64_t> shape) {
    TensorFileWriter writer(path, FileKind::model, original.config());
    for (const TensorInfo& tensor : original.tensors()) {
      if (tensor.name != kTokenizerTensor) writer.declare(tensor.name, tensor.dtype, tensor.shape);
    }
    writer.declare(kTokenizerTensor, dtype, shape);
    for (const TensorInfo& tensor : original.tensors()) {
      if (tensor.name != kTokenizerTensor) writer.write(original.bytes(tensor).data(), tensor.bytes);
    }
    const std::vector<char> text(16, ' ');
    writer.write(text.data(), 16);
    writer.publish();
  };
  write(DType::u8, {16});
  EXPECT_EQ(ModelFile::open(path).tokenizer_json(), std::string(16, ' '));
  std::string bytes = read_bytes(path);
  const auto word = [&](std::size_t at, std::uint64_t value) { std::memcpy(bytes.data() + at, &value, 8); };
  std::uint64_t tensors = 0, table = 0;
  std::memcpy(&tensors, bytes.data() + 40, 8);
  std::memcpy(&table, bytes.data() + 48, 8);
  const std::size_t record = table + (tensors - 1) * 352;
  const std::uint64_t size = 6'000'000'000, end = bytes.size() - 16 + size;
  word(24, end);                  // file_bytes
  word(record + 264, size);       // shape
  word(record + 264 + 72, size);  // bytes
  rehash(bytes);
  write_bytes(path, bytes);
  std::filesystem::resize_file(path, end);
  const double before = static_cast<double>(std::clock());
  const std::string message = error_of(Exit::bad_file, [&] { ModelFile::open(path); });
  expect_contains(message, "tokenizer.json: got 6000000000 bytes, expected at most 100000000");
  EXPECT_LT((static_cast<double>(std::clock()) - before) / CLOCKS_PER_SEC, 0.5) << "not a byte of it was read";
  write(DType::i32, {4});
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open(path); }), "vector of u8");
  write(DType::u8, {4, 4});
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open(path); }), "vector of u8");
}

// Each tensor in each other form that it could have: other shapes of the same elements, each type, missing, and one more.
TEST(ModelFile, EachTensorIsAsTheConfigurationSays) {
  const TemporaryDirectory directory(memory_files());
  const std::string path = directory.file("model.bin"), packed = directory.file("packed.bin"),
                    plain = directory.file("plain.bin");
  const std::string goldens[] = {"test/fixtures/golden/llama-hs32-mha.model.bin",
                                 "test/fixtures/golden/neox-hs64-sequential.model.bin"};
  const auto check = [&](const std::string& source, bool quantized) {
    const TensorFile original = TensorFile::open(source, FileKind::model);
    const TensorTable table(ModelFile::open(source).config());
    const auto opens_with = [&](const std::vector<TensorInfo>& tensors) -> std::string {
      TensorFileWriter writer(path, FileKind::model, original.config());
      for (const TensorInfo& tensor : tensors) writer.declare(tensor.name, tensor.dtype, tensor.shape);
      for (const TensorInfo& tensor : tensors) {
        put(writer, std::vector<char>(tensor.elements() * dtype_bits(tensor.dtype) / 8));
      }
      writer.publish();
      return reason_of(Exit::bad_file, [&] { ModelFile::open(path); });
    };
    const std::vector<TensorInfo> all(original.tensors().begin(), original.tensors().end());
    EXPECT_EQ(opens_with(all), "accepted");
    for (std::size_t i = 0; i < all.size(); ++i) {
      const TensorInfo& good = all[i];
      const TensorSpec* spec = table.find(good.name);
      if (spec == nullptr || good.name.find("layers.1.") != std::string::npos) continue;
      if (quantized && spec->kind == ValueKind::floats) continue;  // the same as in the file of floats
      SCOPED_TRACE(good.name);
      std::vector<TensorInfo> changed = all;
      const std::vector<std::int64_t> flat = {static_cast<std::int64_t>(good.elements())},
                                      turned(good.shape.rbegin(), good.shape.rend());
      std::vector<std::int64_t> deeper = good.shape;
      deeper.insert(deeper.begin(), 1);
      for (const std::vector<std::int64_t>& shape : {flat, turned, deeper}) {
        if (shape == good.shape) continue;
        changed[i].shape = shape;
        expect_contains(opens_with(changed), good.name + ": got shape " + shape_text(shape) + ", expected " +
                                                 shape_text(good.shape) + " by the configuration");
      }
      changed = all;
      for (std::uint32_t number = 0; number < kNumDTypes; ++number) {
        const auto dtype = static_cast<DType>(number);
        if (dtype == DType::u4 && good.shape.back() % 2 != 0) continue;
        changed[i].dtype = dtype;
        const bool right = spec->kind == ValueKind::floats ? number <= 2 : dtype == good.dtype;
        const std::string message = opens_with(changed);
        EXPECT_EQ(message == "accepted", right) << dtype_name(dtype) << ": " << message;
        if (!right) expect_contains(message, good.name + ": got dtype " + dtype_name(dtype) + ", expected ");
        if (right && i == 0) {
          EXPECT_EQ(ModelFile::open(path).dtype(), dtype);
        }
      }
      changed = all;
      changed.erase(changed.begin() + static_cast<std::ptrdiff_t>(i));
      expect_contains(opens_with(changed), "tensor " + good.name + " is missing");
      changed = all;
      changed.push_back(good);
      changed.back().name += ".more";
      expect_contains(opens_with(changed), good.name + ".more' does not belong");
    }
  };
  for (const std::string& golden : goldens) check(golden, false);
  for (const WeightFormat* scheme : kWeightFormats) {
    test::write_quantized_pair(ModelFile::open(goldens[1]), {scheme, &kInt8}, packed, plain);
    check(packed, true);
  }
}

// The words of the configuration and of the caller that are not about one tensor.
TEST(ModelFile, FamilyTiedHeadAndTokenizerAreChecked) {
  const TemporaryDirectory directory(memory_files());
  const std::string neox = "test/fixtures/golden/neox-hs64-sequential.model.bin",
                    tied = "test/fixtures/golden/llama-hs64-gqa3-tied.model.bin", path = directory.file("model.bin");
  EXPECT_EQ(ModelFile::open(neox).config().family, "gpt_neox");
  for (const std::string& trained : {neox, std::string("test/fixtures/golden/gemma3-local.model.bin")}) {
    EXPECT_NO_THROW(ModelFile::open(trained).require_trainable());
  }
  expect_contains(
      error_of(Exit::bad_file,
               [&] { ModelFile::open("test/fixtures/golden/neox-tanh-yarn.model.bin").require_trainable(); }),
      "got a model of the family gpt_neox, expected one that can be trained");

  const auto copy = [&](const std::string& source, const Json& config, const std::string& tokenizer) {
    const TensorFile original = TensorFile::open(source, FileKind::model);
    TensorFileWriter writer(path, FileKind::model, config);
    for (const TensorInfo& tensor : original.tensors()) writer.declare(tensor.name, tensor.dtype, tensor.shape);
    writer.declare(kTokenizerTensor, DType::u8, {std::ssize(tokenizer)});
    for (const TensorInfo& tensor : original.tensors()) writer.write(original.bytes(tensor).data(), tensor.bytes);
    writer.write(tokenizer.data(), tokenizer.size());
    writer.publish();
  };
  Json config = TensorFile::open(tied, FileKind::model).config();
  config["quantization"] = quantization_to_json({&kInt8, &kInt8});
  copy(tied, config, "{}");
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open(path); }), "head: got int8, but it is the embedding");

  copy(neox, TensorFile::open(neox, FileKind::model).config(), "{\"a\": \"tokenizer\"}");
  EXPECT_EQ(ModelFile::open(path).tokenizer_json(), "{\"a\": \"tokenizer\"}");
  std::string bytes = read_bytes(path);
  bytes[bytes.find("tokenizer\"}")] ^= 1;
  write_bytes(path, bytes);
  expect_contains(error_of(Exit::bad_file, [&] { ModelFile::open(path).tokenizer_json(); }), "XXH3-64");
}

}  // namespace
}  // namespace weft
