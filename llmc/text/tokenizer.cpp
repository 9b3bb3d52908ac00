#include "llmc/text/tokenizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/utf8.h"
#include "llmc/text/tokenizer_json.h"

namespace weft {

namespace {

// Finds the added tokens of one of the two passes. Those of the second are normalized, as its text is.
AddedTokenMatcher matcher_of(const TokenizerSpec& spec, bool normalized) {
  const Normalizer normalizer(spec.normalizers);
  std::vector<AddedToken> tokens;
  for (const AddedToken& token : spec.added) {
    if (token.normalized != normalized) continue;
    tokens.push_back(token);
    if (normalized) tokens.back().content = normalizer.apply(token.content);
  }
  return AddedTokenMatcher(std::move(tokens));
}

std::vector<AddedToken> special_of(const TokenizerSpec& spec) {
  std::vector<AddedToken> tokens;
  std::ranges::copy_if(spec.added, std::back_inserter(tokens), &AddedToken::special);
  return tokens;
}

// How many times as long as its result the text before `step` can be; 0: any number of times.
double most_shrinking(const NormalizerStep& step) {
  // A code point of at most 4 bytes becomes one byte or more. Where the result is composed, at most 3 of them become 2 bytes, or
  // 4 become 3. Of NFC the most, over all code points, is 3.5: 7 bytes of U+1FBE U+0308 U+0301 become the 2 of U+0390.
  if (step.kind == NormalizerStep::Kind::form) return step.form == NormalForm::nfkc ? 6 : 4;
  if (step.kind == NormalizerStep::Kind::prepend) return 1;
  if (step.kind != NormalizerStep::Kind::replace || step.text.empty()) return 0;
  return std::max(1.0, static_cast<double>(step.character.size()) / static_cast<double>(step.text.size()));
}

// The most bytes of text that one id can stand for; 0: any number.
double most_bytes_per_id(const TokenizerSpec& spec) {
  // Bytes without a token are left out, and so is what a pre-tokenizer removes; unknown characters in a row may be one token, and so is white space beside some added
  // tokens. (C0, C1 and F5 to FF are in no text.)
  bool every_byte = true;
  for (int byte = 0; byte <= 0xF4; ++byte) {
    if (spec.base.byte_ids[static_cast<std::size_t>(byte)] < 0 && byte != 0xC0 && byte != 0xC1) every_byte = false;
  }
  const bool each_unknown = spec.base.by_character && spec.base.unknown && !spec.base.fuse_unknown;
  if (!every_byte && !each_unknown) return 0;
  if (std::ranges::any_of(spec.added, [](const AddedToken& token) { return token.lstrip || token.rstrip; })) return 0;
  const auto removes = [](const PreTokenizerStep& step) { return step.behavior == SplitBehavior::removed; };
  if (std::ranges::any_of(spec.steps, removes)) return 0;
  std::size_t longest = 1;
  for (const std::string& text : spec.texts) longest = std::max(longest, text.size());
  const Normalizer normalizer(spec.normalizers);
  for (const AddedToken& token : spec.added) longest = std::max(longest, normalizer.apply(token.content).size());
  auto most = static_cast<double>(longest);
  if (!every_byte) most *= 4;  // the unknown token may be spelled with one byte, and stands for one character
  for (const NormalizerStep& step : spec.normalizers) most *= most_shrinking(step);
  return most;
}

}  // namespace

// One call of encode(): its working memory, and a cache of the pieces it has encoded.
class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, std::vector<std::int32_t>& ids) : tokenizer_(tokenizer), ids_(ids) {}

  // `in_front`: nothing comes before the text.
  void encode(std::string_view text, bool allow_special, bool in_front = true) {
    split_scratch_.begin_text(text.size());
    const auto on_token = [&](std::int32_t id) { ids_.push_back(id); };
    const auto on_raw_part = [&](std::string_view part) {
      const bool at_start = in_front && part.data() == text.data();
      std::string normalized;
      if (!tokenizer_.normalizer_.changes_nothing()) part = normalized = tokenizer_.normalizer_.apply(part);
      tokenizer_.normalized_added_.split(
          part, allow_special,
          [&](std::string_view plain) {
            tokenizer_.pre_tokenizer_.split(plain, at_start && plain.data() == part.data(), split_scratch_,
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
    if (!tokenizer_.id_by_word_.empty() && piece.size() <= kMaxTokenBytes) {
      key_.assign(piece);
      const auto word = tokenizer_.id_by_word_.find(key_);
      if (word != tokenizer_.id_by_word_.end()) return ids_.push_back(word->second);
    }
    if (piece.size() > kMaxCachedBytes || ids_.size() > UINT32_MAX - kMaxCachedBytes) return merge_piece(piece);
    key_.assign(piece);
    const auto cached = cache_.find(key_);
    if (cached != cache_.end()) {
      const Cached hit = cached->second;
      for (std::uint32_t i = 0; i < hit.count; ++i) ids_.push_back(ids_[hit.begin + i]);
      return;
    }
    const std::size_t begin = ids_.size();
    merge_piece(piece);
    if (cache_.size() >= kMaxCachedPieces) return;
    cache_.emplace(key_, Cached{static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(ids_.size() - begin)});
  }

  void merge_piece(std::string_view piece) {
    if (piece.size() > Bpe::kMaxTokens) {  // a byte gives at most one token
      fail(Exit::resources, "tokenizer: got a word of %zu bytes, at most %llu are accepted", piece.size(),
           static_cast<unsigned long long>(Bpe::kMaxTokens));
    }
    base_.clear();
    tokenizer_.base_tokens_.append(piece, base_);
    tokenizer_.bpe_.merge(base_, bpe_scratch_, ids_);
  }

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t>& ids_;
  std::vector<std::int32_t> base_;  // tokens of a piece before the merges
  PreTokenizer::Scratch split_scratch_;
  Bpe::Scratch bpe_scratch_;
  std::unordered_map<std::string, Cached, SeededHash> cache_;
  std::string key_;  // kept for its capacity
};

// One call of encode() for segments: joins what lies between two special tokens to runs.
class SegmentEncoder {
 public:
  SegmentEncoder(const Tokenizer& tokenizer, std::vector<std::int32_t>& ids)
      : tokenizer_(tokenizer), ids_(ids), encoder_(tokenizer, ids) {}

  void add(const TextSegment& segment) {
    const std::string text = utf8_replace_invalid(segment.text);
    if (!segment.literal) {
      run_ += text;
      return;
    }
    tokenizer_.special_names_.split(
        text, true, [&](std::string_view part) { run_ += part; }, [&](std::int32_t id) { add_token(id); });
  }
  // Ends the run.
  void end() {
    if (after_taking_) run_.erase(0, spaces_end(run_));
    if (!run_.empty()) encoder_.encode(run_, false, in_front_);
    run_.clear();
  }

 private:
  void add_token(std::int32_t id) {
    const auto index = static_cast<std::size_t>(id);
    if (tokenizer_.takes_before_[index]) run_.resize(spaces_begin(run_));
    end();
    ids_.push_back(id);
    in_front_ = false;
    after_taking_ = tokenizer_.takes_after_[index];
  }

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t>& ids_;
  Encoder encoder_;
  std::string run_;
  bool in_front_ = true;       // no special token has come
  bool after_taking_ = false;  // the run stands behind a token that takes white space
};

Tokenizer::Tokenizer(TokenizerSpec spec)
    : contents_(std::move(spec.contents)),
      special_(contents_.size(), false),
      takes_before_(contents_.size(), false),
      takes_after_(contents_.size(), false),
      left_out_(std::move(spec.left_out)),
      normalizer_(spec.normalizers),
      special_names_(special_of(spec)),
      raw_added_(matcher_of(spec, false)),
      normalized_added_(matcher_of(spec, true)),
      pre_tokenizer_(spec.steps),
      base_tokens_(spec.base),
      bpe_(spec.merges),
      decoder_(spec.texts, std::move(spec.decoder)),
      bos_(spec.bos),
      most_bytes_(most_bytes_per_id(spec)) {
  id_by_content_.reserve(contents_.size());
  for (std::size_t id = 0; id < contents_.size(); ++id) {
    id_by_content_.emplace(contents_[id], static_cast<std::int32_t>(id));
  }
  for (const AddedToken& token : spec.added) {
    const auto id = static_cast<std::size_t>(token.id);
    special_[id] = token.special;
    takes_before_[id] = token.lstrip;
    takes_after_[id] = token.rstrip;
  }
  id_by_word_.reserve(spec.words.size());
  for (TokenizerSpec::Word& word : spec.words) id_by_word_.emplace(std::move(word.bytes), word.id);
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

std::vector<std::int32_t> Tokenizer::encode(std::span<const TextSegment> segments) const {
  std::vector<std::int32_t> ids;
  SegmentEncoder encoder(*this, ids);
  for (const TextSegment& segment : segments) encoder.add(segment);
  encoder.end();
  return ids;
}

std::int64_t Tokenizer::least_ids(std::string_view text) const {
  if (most_bytes_ == 0) return 0;
  return static_cast<std::int64_t>(std::ceil(static_cast<double>(text.size()) / most_bytes_));
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  TokenDecoder::State state;
  std::string text;
  for (const std::int32_t id : ids) {
    check_id(id);
    if (!skip_special || !left_out_[static_cast<std::size_t>(id)]) decoder_.push(state, id, text);
  }
  decoder_.finish(state, text);
  return text;
}

void Tokenizer::check_id(std::int32_t id) const {
  if (id >= 0 && id < vocab_size()) return;
  fail(Exit::usage, "token id: got %d, expected 0 to %lld", id, static_cast<long long>(vocab_size() - 1));
}

std::int64_t Tokenizer::vocab_size() const {
  return static_cast<std::int64_t>(contents_.size());
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto found = id_by_content_.find(token);
  if (found == id_by_content_.end()) return std::nullopt;
  return found->second;
}

std::string Tokenizer::token_bytes(std::int32_t id) const {
  check_id(id);
  return decoder_.bytes_of(id);
}

bool Tokenizer::is_special(std::int32_t id) const {
  return id >= 0 && id < vocab_size() && special_[static_cast<std::size_t>(id)];
}

StreamingDecoder::StreamingDecoder(const Tokenizer& tokenizer, std::span<const std::int32_t> before)
    : tokenizer_(tokenizer) {
  std::string shown;
  for (const std::int32_t id : before) {
    const bool known = id >= 0 && id < tokenizer_.vocab_size();
    if (known && !tokenizer_.is_special(id)) tokenizer_.decoder_.push(state_, id, shown);
  }
  tokenizer_.decoder_.finish(state_, shown);
}

std::string StreamingDecoder::push(std::int32_t id, std::vector<std::size_t>* begins) {
  tokenizer_.check_id(id);
  const TokenDecoder& decoder = tokenizer_.decoder_;
  const std::size_t held_bytes = waiting_.size(), held_row = state_.row.size();
  const bool is_byte = decoder.is_byte(id);
  if (!is_byte) end_row(begins);
  const std::size_t begin = waiting_.size();
  decoder.push(state_, id, waiting_);
  if (begins != nullptr && is_byte) {
    // A wrong byte has ended the row: each of its bytes is a character of its own.
    const std::size_t most = utf8_characters(std::string_view(waiting_).substr(begin));
    for (std::size_t i = 0; state_.row.empty() && i <= held_row; ++i) begins->push_back(std::min(i, most));
  } else if (begins != nullptr) {
    // Bytes of a character that were held back either go on in this token, which then begins within the character, or
    // have become U+FFFD, one for all of them.
    const std::string_view joint = std::string_view(waiting_).substr(0, held_bytes + 1);
    const bool goes_on =
        begin == held_bytes && (waiting_.size() == held_bytes || utf8_sequence_length(joint) == joint.size() ||
                                utf8_incomplete_suffix(joint) == joint.size());
    std::size_t before = held_bytes > 0 && !goes_on ? 1 : 0;
    if (begin > held_bytes) before = utf8_characters(std::string_view(waiting_).substr(0, begin));
    begins->push_back(before);
  }
  const std::size_t incomplete = utf8_incomplete_suffix(waiting_);
  const std::string certain = utf8_replace_invalid(std::string_view(waiting_).substr(0, waiting_.size() - incomplete));
  waiting_.erase(0, waiting_.size() - incomplete);
  return certain;
}

std::string StreamingDecoder::finish(std::vector<std::size_t>* begins) {
  end_row(begins);
  state_ = {};
  return utf8_replace_invalid(std::exchange(waiting_, {}));
}

// Ends a row of byte tokens. Each of them begins with the character that its byte belongs to.
void StreamingDecoder::end_row(std::vector<std::size_t>* begins) {
  const TokenDecoder& decoder = tokenizer_.decoder_;
  if (begins == nullptr) return decoder.finish(state_, waiting_);
  const std::string row = state_.row;
  const bool is_text = state_.complete == row.size();
  const std::size_t before = waiting_.size();
  decoder.finish(state_, waiting_);
  const std::size_t shown = utf8_characters(std::string_view(waiting_).substr(before));
  const std::size_t all = is_text ? utf8_characters(row) : row.size();
  const std::size_t stripped = all - std::min(all, shown);  // at the beginning of the text
  for (std::size_t i = 0; i < row.size(); ++i) {
    // Of valid text: the characters that begin up to here, without the one that goes on or begins here.
    const std::size_t character = is_text ? utf8_characters(std::string_view(row).substr(0, i + 1)) - 1 : i;
    begins->push_back(character - std::min(character, stripped));
  }
}

}  // namespace weft
