#include "llmc/file/token_shard.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <vector>

#include "llmc/base/checked.h"
#include "llmc/base/hash.h"
#include "llmc/file/signature.h"

namespace weft {

static_assert(std::endian::native == std::endian::little, "token shards are read in place");

namespace {

using u64 = unsigned long long;  // what printf's %llu takes

constexpr std::uint64_t kHeaderBytes = 256;
constexpr std::uint32_t kPlain = 1, kOfPairs = 3;  // versions; 2 has documents
constexpr std::uint64_t kMaxVocabulary = 1'000'000;
constexpr std::int64_t kPiece = 1 << 18;  // tokens that verify() reads at once

// The header as it lies in the file; zeros up to kHeaderBytes follow.
struct Header {
  char magic[8];
  std::uint32_t version, dtype;
  std::uint64_t count, vocab_size, tokenizer_hash;
  std::int64_t number;  // kPlain: end_of_document_id; otherwise how many documents
  std::uint64_t data_hash, header_hash;
};
static_assert(sizeof(Header) == 64 && offsetof(Header, header_hash) == 56);

// The checks of TokenShard::open, in the order that gives the most specific message.
class Validator {
 public:
  explicit Validator(const MappedFile& file) : file_(file), where_(escaped(file.path())) {}

  Header header() const {
    check_magic(file_, kTokenShardMagic, "a token shard");
    if (file_.size() < kHeaderBytes) {
      fail(Exit::bad_file, "%s: truncated: got %llu bytes, expected at least %llu. Get or make the shard again",
           where_.c_str(), u64{file_.size()}, u64{kHeaderBytes});
    }
    Header header;
    std::memcpy(&header, file_.data(), sizeof header);
    if (header.version < kPlain || header.version > kOfPairs) {
      fail(Exit::bad_file, "%s: version: got %u, expected %u to %u. %s", where_.c_str(), header.version, kPlain,
           kOfPairs,
           header.version != 0 ? "It was made by a newer tool: update weft"
                               : "The shard is damaged: get or make it again");
    }
    check_hash(header);
    check_fields(header);
    check_size(header);
    return header;
  }

 private:
  void check_hash(const Header& header) const {
    const std::uint64_t hash = xxh3_64(file_.data(), offsetof(Header, header_hash));
    if (hash != header.header_hash) {
      fail(Exit::bad_file,
           "%s: header_hash: got %016llx, expected %016llx. The header is damaged: get or make the shard "
           "again",
           where_.c_str(), u64{hash}, u64{header.header_hash});
    }
    const auto set = [](std::byte byte) { return byte != std::byte{0}; };
    if (std::any_of(file_.data() + sizeof(Header), file_.data() + kHeaderBytes, set)) {
      fail(Exit::bad_file, "%s: header: padding is not zero. The shard is damaged: get or make it again",
           where_.c_str());
    }
  }

  void check_fields(const Header& header) const {
    const bool is_u32 = header.dtype == static_cast<std::uint32_t>(DType::u32);
    if (header.dtype != static_cast<std::uint32_t>(DType::u16) && !is_u32) {
      fail(Exit::bad_file, "%s: dtype: got %u, expected %u (u16) or %u (u32)", where_.c_str(), header.dtype,
           static_cast<unsigned>(DType::u16), static_cast<unsigned>(DType::u32));
    }
    const std::uint64_t limit = is_u32 ? kMaxVocabulary : 65536;
    if (header.vocab_size < 1 || header.vocab_size > limit) {
      fail(Exit::bad_file, "%s: vocab_size: got %llu, expected 1 to %llu for %s", where_.c_str(),
           u64{header.vocab_size}, u64{limit}, is_u32 ? "u32" : "u16");
    }
    const std::int64_t id = header.number;
    if (header.version != kPlain) return;
    if (id < -1 || id >= static_cast<std::int64_t>(header.vocab_size)) {
      fail(Exit::bad_file, "%s: end_of_document_id: got %lld, expected -1 to %llu", where_.c_str(),
           static_cast<long long>(id), u64{header.vocab_size - 1});
    }
  }

  void check_size(const Header& header) const {
    if (header.count == 0) fail(Exit::bad_file, "%s: count: got 0, expected at least one token", where_.c_str());
    const bool of_documents = header.version != kPlain;
    const auto documents = of_documents ? static_cast<std::uint64_t>(header.number) : 0;
    if (of_documents && (header.number < 1 || documents > header.count)) {
      fail(Exit::bad_file, "%s: documents: got %lld, expected 1 to %llu", where_.c_str(),
           static_cast<long long>(header.number), u64{header.count});
    }
    if (header.version == kOfPairs && documents % 2 != 0) {
      fail(Exit::bad_file, "%s: documents: got %lld, expected an even number: they are pairs", where_.c_str(),
           static_cast<long long>(header.number));
    }
    const std::string where = where_ + ": count";
    std::uint64_t expected = checked_mul(header.count, dtype_bytes(static_cast<DType>(header.dtype)), where);
    expected = checked_add(expected, kHeaderBytes, where);
    expected = checked_add(expected, checked_mul(documents, sizeof(std::uint64_t), where), where);
    if (of_documents) expected = checked_add(expected, header.count / 8 + (header.count % 8 != 0 ? 1 : 0), where);
    if (expected > file_.size()) {
      fail(Exit::bad_file, "%s: truncated: got %llu bytes, expected %llu for %llu tokens. Get or make the shard again",
           where_.c_str(), u64{file_.size()}, u64{expected}, u64{header.count});
    }
    if (expected < file_.size()) {
      fail(Exit::bad_file,
           "%s: count: got %llu bytes, expected %llu for %llu tokens: %llu too many. Get or make the shard "
           "again",
           where_.c_str(), u64{file_.size()}, u64{expected}, u64{header.count}, u64{file_.size() - expected});
    }
  }

  const MappedFile& file_;
  std::string where_;
};

// Converts ids to 32 bits and returns the largest. It is unsigned, so that an id of 2^31 or more counts as too large.
template <typename T>
std::uint32_t widen(const std::byte* source, std::span<std::int32_t> out) {
  const auto* ids = reinterpret_cast<const T*>(source);
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint32_t id = ids[i];
    largest = std::max(largest, id);
    out[i] = static_cast<std::int32_t>(id);
  }
  return largest;
}

}  // namespace

TokenShard TokenShard::open(const std::string& path) {
  TokenShard shard{MappedFile(path)};
  const Header header = Validator(shard.file_).header();
  shard.dtype_ = static_cast<DType>(header.dtype);
  shard.count_ = static_cast<std::int64_t>(header.count);
  shard.vocab_size_ = static_cast<std::int64_t>(header.vocab_size);
  shard.tokenizer_hash_ = header.tokenizer_hash;
  shard.data_hash_ = header.data_hash;
  if (header.version == kPlain) {
    shard.end_of_document_id_ = header.number;
  } else {
    shard.read_starts(static_cast<std::size_t>(header.number));
    shard.of_pairs_ = header.version == kOfPairs;
  }
  return shard;
}

const std::byte* TokenShard::tokens() const {
  return file_.data() + kHeaderBytes;
}

const std::byte* TokenShard::behind_tokens() const {
  return tokens() + static_cast<std::uint64_t>(count_) * dtype_bytes(dtype_);
}

void TokenShard::read_starts(std::size_t documents) {
  starts_.resize(documents);
  std::memcpy(starts_.data(), behind_tokens(), documents * sizeof starts_[0]);
  for (std::size_t i = 0; i < documents; ++i) {
    const std::int64_t least = i == 0 ? 0 : starts_[i - 1] + 1, most = i == 0 ? 0 : count_ - 1;
    if (starts_[i] >= least && starts_[i] <= most) continue;
    fail(Exit::bad_file,
         "%s: document %zu: begins at token %llu, expected %lld to %lld. The shard is damaged: get or make it again",
         escaped(path()).c_str(), i, static_cast<u64>(starts_[i]), static_cast<long long>(least),
         static_cast<long long>(most));
  }
  starts_.push_back(count_);
}

void TokenShard::check_read(std::int64_t begin, std::size_t size) const {
  const std::int64_t wanted = static_cast<std::int64_t>(size);
  if (begin < 0 || begin > count_ || wanted > count_ - begin) {
    fail(Exit::internal, "%s: tokens %lld to %lld asked for, the shard has %lld", escaped(path()).c_str(),
         static_cast<long long>(begin), static_cast<long long>(begin + wanted), static_cast<long long>(count_));
  }
  if (!file_.unchanged()) {
    fail(Exit::bad_file,
         "%s: the shard was replaced or changed while it was in use. Keep shards unchanged during a run",
         escaped(path()).c_str());
  }
}

void TokenShard::read(std::int64_t begin, std::span<std::int32_t> out) const {
  check_read(begin, out.size());
  const std::byte* source = tokens() + static_cast<std::uint64_t>(begin) * dtype_bytes(dtype_);
  const std::uint32_t largest =
      dtype_ == DType::u16 ? widen<std::uint16_t>(source, out) : widen<std::uint32_t>(source, out);
  if (largest < static_cast<std::uint64_t>(vocab_size_)) return;
  const auto bad = [&](std::int32_t id) {
    return static_cast<std::uint32_t>(id) >= static_cast<std::uint64_t>(vocab_size_);
  };
  const auto first = std::find_if(out.begin(), out.end(), bad);
  fail(Exit::bad_file, "%s: token %lld: got id %u, expected at most %lld. The shard is damaged: get or make it again",
       escaped(path()).c_str(), static_cast<long long>(begin + (first - out.begin())),
       static_cast<std::uint32_t>(*first), static_cast<long long>(vocab_size_ - 1));
}

void TokenShard::read_learned(std::int64_t begin, std::span<std::uint8_t> out) const {
  check_read(begin, out.size());
  if (starts_.empty()) return std::fill(out.begin(), out.end(), std::uint8_t{1});
  const std::byte* bits = behind_tokens() + (starts_.size() - 1) * sizeof(std::uint64_t);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::size_t token = static_cast<std::size_t>(begin) + i;
    out[i] = static_cast<std::uint8_t>(bits[token / 8] >> token % 8 & std::byte{1});
  }
}

void TokenShard::verify() const {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(std::min(kPiece, count_)));
  Xxh3Stream stream;
  for (std::int64_t begin = 0; begin < count_; begin += kPiece) {
    const std::size_t piece = static_cast<std::size_t>(std::min(kPiece, count_ - begin));
    const std::size_t bytes = dtype_bytes(dtype_);
    stream.update(tokens() + static_cast<std::uint64_t>(begin) * bytes, piece * bytes);
    read(begin, std::span(ids).first(piece));
  }
  stream.update(behind_tokens(), static_cast<std::size_t>(file_.data() + file_.size() - behind_tokens()));
  if (stream.digest() != data_hash_) {
    fail(Exit::bad_file,
         "%s: data_hash: got %016llx, expected %016llx. The tokens are damaged: get or make the shard again",
         escaped(path()).c_str(), u64{stream.digest()}, u64{data_hash_});
  }
}

}  // namespace weft
