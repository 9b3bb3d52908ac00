// Token shards: u8 flags (1: leave header_hash alone, 2: leave data_hash alone), then the file.
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/file/token_shard.h"
#include "test/fuzz/memory_files.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

constexpr const char* kPath = "fuzz/shard.bin";
constexpr std::size_t kHeaderBytes = 256, kDataHash = 48, kHeaderHash = 56;

void seal(std::vector<std::uint8_t>& file, std::uint8_t flags) {
  if (file.size() < kHeaderBytes) return;
  const std::uint64_t data = xxh3_64(file.data() + kHeaderBytes, file.size() - kHeaderBytes);
  if ((flags & 2) == 0) std::memcpy(file.data() + kDataHash, &data, sizeof data);
  const std::uint64_t header = xxh3_64(file.data(), kHeaderHash);
  if ((flags & 1) == 0) std::memcpy(file.data() + kHeaderHash, &header, sizeof header);
}

void use(const TokenShard& shard) {
  FUZZ_CHECK(shard.count() > 0 && shard.vocab_size() > 0);
  FUZZ_CHECK(shard.end_of_document_id() >= -1 && shard.end_of_document_id() < shard.vocab_size());
  std::vector<std::int32_t> ids(static_cast<std::size_t>(shard.count()));
  const bool readable = accepts([&] { shard.read(0, ids); });
  for (const std::int32_t id : ids) FUZZ_CHECK(!readable || (id >= 0 && id < shard.vocab_size()));
  accepts([&] { shard.read(shard.count() - 1, std::span(ids).first(1)); });
  std::vector<std::uint8_t> learned(ids.size());
  shard.read_learned(0, learned);
  for (const std::uint8_t one : learned) FUZZ_CHECK(one <= 1);
  const std::span<const std::int64_t> starts = shard.document_starts();
  FUZZ_CHECK(starts.empty() || (starts.front() == 0 && starts.back() == shard.count()));
  for (std::size_t i = 1; i < starts.size(); ++i) FUZZ_CHECK(starts[i - 1] < starts[i]);
  FUZZ_CHECK(!accepts([&] { shard.verify(); }) || readable);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const std::string_view rest = input.take_rest();
  std::vector<std::uint8_t> file(rest.begin(), rest.end());
  seal(file, flags);
  put_file(kPath, file);
  accepts([&] { use(TokenShard::open(kPath)); });
  return 0;
}

}  // namespace weft::fuzz
