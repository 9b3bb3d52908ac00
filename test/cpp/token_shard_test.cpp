// Token shards: shared vectors with the Python implementation, damage of every kind, replacement while in
// use.
#include "llmc/file/token_shard.h"
#include "llmc/base/json.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/file/tensor_file.h"
#include "test_files.h"

namespace weft {
namespace {

const std::string kFixtures = "test/fixtures/token_shard/";

std::vector<std::int32_t> read(const TokenShard& shard, std::int64_t begin, std::int64_t count) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  shard.read(begin, ids);
  return ids;
}

// Header and tokens of a shard, put together without the code under test.
std::string shard_bytes(std::uint32_t dtype, std::uint64_t vocab_size, const std::string& tokens, std::uint64_t count) {
  std::string bytes("\x89WTOK\r\n\x1a", 8);
  const auto append = [&](auto value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); };
  append(std::uint32_t{1});
  append(dtype);
  append(count);
  append(vocab_size);
  append(std::uint64_t{7});
  append(std::int64_t{0});
  append(xxh3_64(tokens));
  append(xxh3_64(bytes));
  bytes.resize(256);
  return bytes + tokens;
}

TEST(TokenShard, ReadsWhatPythonWrote) {
  const TokenShard narrow = TokenShard::open(kFixtures + "u16.bin");
  narrow.verify();
  EXPECT_EQ(narrow.dtype(), DType::u16);
  EXPECT_EQ(narrow.vocab_size(), 65536);
  EXPECT_EQ(narrow.tokenizer_hash(), 0x0123456789ABCDEFu);
  EXPECT_EQ(narrow.end_of_document_id(), 0);
  EXPECT_EQ(read(narrow, 0, 4), (std::vector<std::int32_t>{0, 1, 65535, 42}));
  EXPECT_EQ(read(narrow, 1, 2), (std::vector<std::int32_t>{1, 65535}));
  EXPECT_EQ(read(narrow, 4, 0).size(), 0u);

  const TokenShard wide = TokenShard::open(kFixtures + "u32.bin");
  wide.verify();
  EXPECT_EQ(wide.dtype(), DType::u32);
  EXPECT_EQ(wide.end_of_document_id(), -1);
  EXPECT_EQ(read(wide, 0, wide.count()), (std::vector<std::int32_t>{128255, 0, 65536}));
}

TEST(TokenShard, DocumentsAndWhatIsLearnedAreThoseThatPythonWrote) {
  const TokenShard shard = TokenShard::open(kFixtures + "documents.bin");
  shard.verify();
  const std::span<const std::int64_t> starts = shard.document_starts();
  EXPECT_EQ(std::vector<std::int64_t>(starts.begin(), starts.end()), (std::vector<std::int64_t>{0, 2, 9, 11}));
  EXPECT_EQ(shard.end_of_document_id(), -1);
  EXPECT_EQ(read(shard, 0, 11).back(), 100'010);
  const std::vector<std::uint8_t> all = {0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1};
  for (std::size_t begin = 0; begin <= all.size(); ++begin) {
    std::vector<std::uint8_t> learned(all.size() - begin, 7);
    shard.read_learned(static_cast<std::int64_t>(begin), learned);
    EXPECT_EQ(learned, std::vector<std::uint8_t>(all.begin() + static_cast<std::ptrdiff_t>(begin), all.end()));
  }
  std::vector<std::uint8_t> one(1);
  EXPECT_NE(error_of(Exit::internal, [&] { shard.read_learned(11, one); }), "");

  const TokenShard plain = TokenShard::open(kFixtures + "u16.bin");
  EXPECT_TRUE(plain.document_starts().empty());
  plain.read_learned(3, one);
  EXPECT_EQ(one[0], 1) << "without documents everything is learned";
}

TEST(TokenShard, PairsAreDocuments) {
  const TokenShard shard = TokenShard::open(kFixtures + "pairs.bin");
  shard.verify();
  EXPECT_TRUE(shard.of_pairs());
  const std::span<const std::int64_t> starts = shard.document_starts();
  EXPECT_EQ(std::vector<std::int64_t>(starts.begin(), starts.end()), (std::vector<std::int64_t>{0, 2, 4, 8, 9}));
  std::vector<std::uint8_t> learned(9);
  shard.read_learned(0, learned);
  EXPECT_EQ(learned, (std::vector<std::uint8_t>{0, 1, 0, 1, 0, 0, 1, 1, 1}));
  EXPECT_FALSE(TokenShard::open(kFixtures + "documents.bin").of_pairs());
}

TEST(TokenShard, RefusesDamageInTheWordsOfThePythonReader) {
  const Json cases = parse_json(read_bytes(kFixtures + "damaged.json"), "damaged.json");
  ASSERT_GT(cases.size(), 25u);
  const TemporaryDirectory directory;
  const std::string path = directory.file("damaged.bin");
  for (const Json& damage : cases) {
    SCOPED_TRACE(damage["name"].get<std::string>());
    std::string bytes = damaged_bytes(kFixtures, damage);
    if (damage["rehash"].get<bool>()) {
      const std::uint64_t hash = xxh3_64(bytes.data(), 56);
      std::memcpy(bytes.data() + 56, &hash, 8);
    }
    write_bytes(path, bytes);
    EXPECT_EQ(error_of(Exit::bad_file, [&] { TokenShard::open(path).verify(); }),
              escaped(path) + ": " + damage["message"].get<std::string>());
  }
}

TEST(TokenShard, RefusesATruncationAtEveryByteAndOneFlippedBitAnywhere) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x.bin");
  const auto use = [&] { TokenShard::open(path).verify(); };
  for (const char* name : {"u32.bin", "documents.bin"}) {
    const std::string whole = read_bytes(kFixtures + name);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      write_bytes(path, whole.substr(0, i));
      ASSERT_NE(error_of(Exit::bad_file, use), "") << name << " cut to " << i;
      std::string flipped = whole;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
      write_bytes(path, flipped);
      ASSERT_NE(error_of(Exit::bad_file, use), "") << name << " flipped at " << i;
    }
  }
}

TEST(TokenShard, AnIdPastTheVocabularyIsFoundWhereItIsRead) {
  const TemporaryDirectory directory;
  std::vector<std::uint16_t> ids(1000, 9);
  ids[700] = 10;
  const std::string tokens(reinterpret_cast<const char*>(ids.data()), ids.size() * 2);
  write_bytes(directory.file("x.bin"), shard_bytes(4, 10, tokens, ids.size()));
  const TokenShard shard = TokenShard::open(directory.file("x.bin"));
  EXPECT_EQ(read(shard, 0, 700), std::vector<std::int32_t>(700, 9));
  expect_contains(error_of(Exit::bad_file, [&] { read(shard, 600, 200); }), "token 700: got id 10, expected at most 9");
  expect_contains(error_of(Exit::bad_file, [&] { shard.verify(); }), "token 700");
}

TEST(TokenShard, VerifyChecksShardsOfSeveralPieces) {
  const TemporaryDirectory directory;
  std::vector<std::uint32_t> ids((1 << 18) * 2 + 5);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint32_t>(i % 100'000);
  std::string tokens(reinterpret_cast<const char*>(ids.data()), ids.size() * 4);
  std::string bytes = shard_bytes(5, 100'000, tokens, ids.size());
  write_bytes(directory.file("x.bin"), bytes);
  TokenShard::open(directory.file("x.bin")).verify();
  bytes[bytes.size() - 4] ^= 1;
  write_bytes(directory.file("y.bin"), bytes);
  expect_contains(error_of(Exit::bad_file, [&] { TokenShard::open(directory.file("y.bin")).verify(); }), "data_hash");
}

// verify() checks 2^18 tokens at once: an id past the vocabulary is found in each such piece, the hash being right.
TEST(TokenShard, VerifyChecksTheIdsOfEveryPiece) {
  const TemporaryDirectory directory;
  constexpr std::size_t kPiece = 1 << 18;
  const std::size_t count = 2 * kPiece + 5;
  for (const std::size_t bad : {std::size_t{0}, kPiece - 1, kPiece, 2 * kPiece - 1, 2 * kPiece, count - 1}) {
    std::vector<std::uint16_t> ids(count, 9);
    ids[bad] = 10;
    const std::string tokens(reinterpret_cast<const char*>(ids.data()), ids.size() * 2);
    write_bytes(directory.file("x.bin"), shard_bytes(4, 10, tokens, ids.size()));
    expect_contains(error_of(Exit::bad_file, [&] { TokenShard::open(directory.file("x.bin")).verify(); }),
                    format("token %zu: got id 10, expected at most 9", bad));
  }
}

TEST(TokenShard, OfATextItSaysHowToMakeShards) {
  const TemporaryDirectory directory;
  write_bytes(directory.file("corpus.txt"), "Once upon a time");
  expect_contains(error_of(Exit::bad_file, [&] { TokenShard::open(directory.file("corpus.txt")); }),
                  "this is plain text, expected a token shard. Make shards of it with dev/prepare_data.py");
}

TEST(TokenShard, TheLimitsThemselvesAreGood) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("shard.bin"), tokens(4, '\0');
  const auto u16 = static_cast<std::uint32_t>(DType::u16), u32 = static_cast<std::uint32_t>(DType::u32);
  for (const auto& [dtype, most] : {std::pair(u16, 65'536), {u32, 1'000'000}}) {
    for (const int vocab_size : {1, most}) {
      write_bytes(path, shard_bytes(dtype, static_cast<std::uint64_t>(vocab_size), tokens, dtype == u16 ? 2 : 1));
      EXPECT_EQ(TokenShard::open(path).vocab_size(), vocab_size);
    }
    for (const int vocab_size : {0, most + 1}) {
      write_bytes(path, shard_bytes(dtype, static_cast<std::uint64_t>(vocab_size), tokens, dtype == u16 ? 2 : 1));
      expect_contains(error_of(Exit::bad_file, [&] { TokenShard::open(path); }),
                      format("vocab_size: got %d", vocab_size));
    }
  }
}

TEST(TokenShard, ReadingOutsideIsABugOfTheCaller) {
  const TokenShard shard = TokenShard::open(kFixtures + "u16.bin");
  EXPECT_NE(error_of(Exit::internal, [&] { read(shard, 3, 2); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { read(shard, -1, 1); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { read(shard, 5, 0); }), "");
}

TEST(TokenShard, AShardReplacedWhileInUseIsRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x.bin");
  write_bytes(path, read_bytes(kFixtures + "u16.bin"));
  const TokenShard shard = TokenShard::open(path);
  read(shard, 0, 4);
  write_bytes(directory.file("new.bin"), read_bytes(kFixtures + "u16.bin"));
  std::filesystem::rename(directory.file("new.bin"), path);
  expect_contains(error_of(Exit::bad_file, [&] { read(shard, 0, 4); }), "replaced or changed");
  std::filesystem::remove(path);
  expect_contains(error_of(Exit::bad_file, [&] { read(shard, 0, 4); }), "replaced or changed");
}

TEST(TokenShard, IsToldFromATensorFileAndTheOtherWayRound) {
  const std::string tensor_file = "test/fixtures/tensor_file/all_dtypes.bin";
  expect_contains(error_of(Exit::bad_file, [&] { TokenShard::open(tensor_file); }),
                  "magic: this is a tensor file, expected a token shard");
  expect_contains(error_of(Exit::bad_file, [&] { TensorFile::open(kFixtures + "u16.bin", FileKind::model); }),
                  "magic: this is a token shard, expected a tensor file");
}

}  // namespace
}  // namespace weft
