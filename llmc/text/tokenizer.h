// BPE tokenizers, read from a Hugging Face tokenizer.json: the byte-level ones of GPT-NeoX (Pythia) and Llama-3, and those in
// the style of SentencePiece of Llama-2, TinyLlama and Mistral (doc/tokenizers.md says what is accepted).
//
// It gives the same ids as the Hugging Face `tokenizers` library 0.23.3, tested over all code points. Known differences:
//   - a tokenizer.json that weft does not understand completely is refused, not read in part;
//   - characters that were added after Unicode 16.0 are what the installed PCRE2 takes them for (letters or numbers, once it
//     knows them);
//   - next to an added token with single_word, characters that are newer than utf8proc's tables are no part of a word.
// Text that is not UTF-8 is encoded as if each maximal ill-formed part were U+FFFD (Python's errors="replace").
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/text/added_tokens.h"
#include "llmc/text/base_tokens.h"
#include "llmc/text/bpe.h"
#include "llmc/text/normalizer.h"
#include "llmc/text/pretokenize.h"
#include "llmc/text/text_segment.h"
#include "llmc/text/token_decoder.h"

namespace weft {

struct TokenizerSpec;

// Immutable once made: any number of threads may use one at the same time.
class Tokenizer {
 public:
  // Parses the text of a tokenizer.json. `source` names it in errors. Damaged or not supported:
  // Exit::bad_file with the field's name.
  static Tokenizer from_json(std::string_view text, const std::string& source);

  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;

  // What encode() makes of a special token's name in the text: plain text (for text that users write), or the token. Added
  // tokens that are not special, such as NeoX's runs of spaces, become tokens in both cases. The original's option is
  // `encode_special_tokens`.
  enum class Special { text, allow };

  // The ids of `text`; with `add_bos` the token that the file's post-processor puts in front comes first (NeoX has none). A
  // piece of more than 256 MiB: Exit::resources. A text on which a pattern takes too long (pretokenize.h): Exit::usage.
  std::vector<std::int32_t> encode(std::string_view text, bool add_bos, Special special = Special::text) const;

  // The ids of the segments, joined to one text: special tokens are those that stand in one literal, and names of special tokens
  // anywhere else are text. Nothing is put in front. doc/chat.md, "Ids", says what holds at the borders.
  std::vector<std::int32_t> encode(std::span<const TextSegment> segments) const;

  // No text of this many bytes has fewer ids, BOS not counted. 0: nothing is known without encoding it, because this tokenizer
  // leaves bytes out, or makes one token of any number of them.
  std::int64_t least_ids(std::string_view text) const;

  // The text of the tokens. Of byte-level tokens it is their bytes, one after the other: possibly not UTF-8. `skip_special`
  // leaves special tokens out, apart from those whose content the normalizer changes, as the original does. An id out of
  // range: Exit::usage.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = false) const;

  // The bytes of one token in the middle of a text: possibly not UTF-8. An id out of range: Exit::usage.
  std::string token_bytes(std::int32_t id) const;

  std::int64_t vocab_size() const;                                  // ids go from 0 to vocab_size() - 1, without holes
  std::optional<std::int32_t> id_of(std::string_view token) const;  // by the file's spelling: "<|endoftext|>", "Ġthe"
  std::optional<std::int32_t> bos_id() const { return bos_; }       // what add_bos puts in front
  bool is_special(std::int32_t id) const;                           // an added token marked special
  bool is_byte(std::int32_t id) const { return decoder_.is_byte(id); }  // of byte fallback: a part of a character

 private:
  friend class Encoder;
  friend class SegmentEncoder;
  friend class StreamingDecoder;
  explicit Tokenizer(TokenizerSpec spec);
  void check_id(std::int32_t id) const;

  std::vector<std::string> contents_;  // by id; id_by_content_ points into it
  std::unordered_map<std::string_view, std::int32_t, SeededHash> id_by_content_;
  std::unordered_map<std::string, std::int32_t, SeededHash> id_by_word_;  // empty without ignore_merges
  std::vector<bool> special_;
  std::vector<bool> takes_before_, takes_after_;  // AddedToken::lstrip and rstrip, by id
  std::vector<bool> left_out_;                    // by decode(skip_special)
  Normalizer normalizer_;
  AddedTokenMatcher special_names_;  // as they are spelled, normalized or not
  AddedTokenMatcher raw_added_;
  AddedTokenMatcher normalized_added_;
  PreTokenizer pre_tokenizer_;
  BaseTokens base_tokens_;
  Bpe bpe_;
  TokenDecoder decoder_;
  std::optional<std::int32_t> bos_;
  double most_bytes_ = 0;  // of text that one token can stand for; 0: no limit
};

// Turns tokens into text one at a time, so that each piece of text is valid UTF-8. What later tokens may change is held back:
// the first bytes of a character, and a row of byte tokens, which are all U+FFFD if one of them is wrong. Bytes that cannot be
// part of a character become U+FFFD. All pushes and finish() together give utf8_replace_invalid(decode(ids)).
class StreamingDecoder {
 public:
  // `before`: tokens whose text has been shown already, as that of a prompt. What follows them is decoded as the middle of a
  // text: a space in front of it stays. Special tokens and ids out of range do not count.
  explicit StreamingDecoder(const Tokenizer& tokenizer, std::span<const std::int32_t> before = {});
  // The text that this token completes; id out of range: Exit::usage. `begins`, unless null, gets where tokens begin, in
  // the order of the tokens: for this one, and for those of a row that it ends, how many characters of the result belong
  // to tokens before it alone. While a row is held back its tokens wait for that, and nothing is added.
  std::string push(std::int32_t id, std::vector<std::size_t>* begins = nullptr);
  // The rest of the text, and where the tokens begin that still wait; then the decoder is at the beginning of another one.
  std::string finish(std::vector<std::size_t>* begins = nullptr);

 private:
  void end_row(std::vector<std::size_t>* begins);

  const Tokenizer& tokenizer_;
  TokenDecoder::State state_;
  std::string waiting_;  // the bytes that are held back
};

}  // namespace weft
