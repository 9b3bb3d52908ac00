#include "llmc/text/tokenizer.h"

#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/utf8.h"
#include "llmc/text/normalize.h"
#include "llmc/text/tokenizer_json.h"

namespace weft {

namespace {

// Finds the added tokens of one of the two passes. Those of the second are normalized, as its text is.
AddedTokenMatcher matcher_of(const TokenizerSpec& spec, bool normalized) {
  std::vector<AddedToken> tokens;
  for (const AddedToken& token : spec.added) {
    if (token.normalized != normalized) continue;
    tokens.push_back(token);
    if (normalized && spec.nfc) tokens.back().content = normalize_nfc(token.content);
  }
  return AddedTokenMatcher(std::move(tokens));
}

}  // namespace

// One call of encode(): its working memory, and a cache of the pieces it has encoded.
class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, std::vector<std::int32_t>& ids) : tokenizer_(tokenizer), ids_(ids) {}

  void encode(std::string_view text, bool allow_special) {
    const auto on_token = [&](std::int32_t id) { ids_.push_back(id); };
    const auto on_raw_part = [&](std::string_view part) {
      std::string normalized;
      if (tokenizer_.nfc_) part = normalized = normalize_nfc(part);
      tokenizer_.normalized_added_.split(
          part, allow_special,
          [&](std::string_view plain) {
            tokenizer_.pre_tokenizer_.split(plain, split_scratch_,
                                            [&](std::string_view piece) { encode_piece(piece); });
          },
          on_token);
    };
    tokenizer_.raw_added_.split(text, allow_special, on_raw_part, on_token);
  }

 private:
  struct Cached {
    std::uint32_t begin;  // in ids_: where the ids of an earlier occurrence begin
    std::uint32_t count;
  };
  static constexpr std::size_t kMaxCachedBytes = 32;
  static constexpr std::size_t kMaxCachedPieces = 65'536;

  void encode_piece(std::string_view piece) {
    if (!tokenizer_.id_by_word_.empty()) {
      const auto word = tokenizer_.id_by_word_.find(piece);
      if (word != tokenizer_.id_by_word_.end()) return ids_.push_back(word->second);
    }
    if (piece.size() > kMaxCachedBytes || ids_.size() > UINT32_MAX - kMaxCachedBytes) {
      return tokenizer_.bpe_.encode(piece, bpe_scratch_, ids_);
    }
    key_.assign(piece);
    const auto cached = cache_.find(key_);
    if (cached != cache_.end()) {
      const Cached hit = cached->second;
      for (std::uint32_t i = 0; i < hit.count; ++i) ids_.push_back(ids_[hit.begin + i]);
      return;
    }
    const std::size_t begin = ids_.size();
    tokenizer_.bpe_.encode(piece, bpe_scratch_, ids_);
    if (cache_.size() >= kMaxCachedPieces) return;
    cache_.emplace(key_, Cached{static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(ids_.size() - begin)});
  }

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t>& ids_;
  PreTokenizer::Scratch split_scratch_;
  Bpe::Scratch bpe_scratch_;
  std::unordered_map<std::string, Cached, SeededHash> cache_;
  std::string key_;  // kept for its capacity
};

Tokenizer::Tokenizer(TokenizerSpec spec)
    : bytes_(std::move(spec.bytes)),
      contents_(std::move(spec.contents)),
      special_(contents_.size(), false),
      raw_added_(matcher_of(spec, false)),
      normalized_added_(matcher_of(spec, true)),
      nfc_(spec.nfc),
      pre_tokenizer_(spec.steps),
      bpe_(spec.byte_ids, spec.merges),
      bos_(spec.bos) {
  id_by_content_.reserve(contents_.size());
  for (std::size_t id = 0; id < contents_.size(); ++id) {
    id_by_content_.emplace(contents_[id], static_cast<std::int32_t>(id));
  }
  for (const AddedToken& token : spec.added) special_[static_cast<std::size_t>(token.id)] = token.special;
  if (!spec.ignore_merges) return;
  id_by_word_.reserve(spec.words.size());
  for (const std::int32_t id : spec.words) id_by_word_.emplace(bytes_[static_cast<std::size_t>(id)], id);
}

Tokenizer Tokenizer::from_json(std::string_view text, const std::string& source) {
  return Tokenizer(parse_tokenizer_json(text, source));
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_bos, Special special) const {
  std::vector<std::int32_t> ids;
  if (add_bos && bos_) ids.push_back(*bos_);
  Encoder(*this, ids).encode(utf8_replace_invalid(text), special == Special::allow);
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const std::int32_t id : ids) {
    const std::string_view token = token_bytes(id);
    if (!skip_special || !is_special(id)) bytes += token;
  }
  return bytes;
}

std::string_view Tokenizer::token_bytes(std::int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    fail(Exit::usage, "token id: got %d, expected 0 to %lld", id, static_cast<long long>(vocab_size() - 1));
  }
  return bytes_[static_cast<std::size_t>(id)];
}

std::int64_t Tokenizer::vocab_size() const {
  return static_cast<std::int64_t>(contents_.size());
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto found = id_by_content_.find(token);
  if (found == id_by_content_.end()) return std::nullopt;
  return found->second;
}

bool Tokenizer::is_special(std::int32_t id) const {
  return id >= 0 && id < vocab_size() && special_[static_cast<std::size_t>(id)];
}

std::string StreamingDecoder::push(std::int32_t id) {
  waiting_ += tokenizer_.token_bytes(id);
  const std::size_t incomplete = utf8_incomplete_suffix(waiting_);
  const std::string certain = utf8_replace_invalid(std::string_view(waiting_).substr(0, waiting_.size() - incomplete));
  waiting_.erase(0, waiting_.size() - incomplete);
  return certain;
}

std::string StreamingDecoder::finish() {
  return utf8_replace_invalid(std::exchange(waiting_, {}));
}

}  // namespace weft
