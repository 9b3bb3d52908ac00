// The byte-level BPE tokenizer of GPT-NeoX (Pythia) and Llama-3, read from a Hugging Face tokenizer.json.
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
#include "llmc/text/bpe.h"
#include "llmc/text/pretokenize.h"

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
  // piece of more than 256 MiB, or a limit of PCRE2: Exit::resources.
  std::vector<std::int32_t> encode(std::string_view text, bool add_bos, Special special = Special::text) const;

  // The bytes of the tokens, one after the other: possibly not UTF-8. An id out of range: Exit::usage.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = false) const;

  std::string_view token_bytes(std::int32_t id) const;              // of one token; out of range: Exit::usage
  std::int64_t vocab_size() const;                                  // ids go from 0 to vocab_size() - 1, without holes
  std::optional<std::int32_t> id_of(std::string_view token) const;  // by the file's spelling: "<|endoftext|>", "Ġthe"
  std::optional<std::int32_t> bos_id() const { return bos_; }       // what add_bos puts in front
  bool is_special(std::int32_t id) const;                           // an added token marked special

 private:
  friend class Encoder;
  explicit Tokenizer(TokenizerSpec spec);

  std::vector<std::string> bytes_;     // by id
  std::vector<std::string> contents_;  // by id; id_by_content_ points into it
  std::unordered_map<std::string_view, std::int32_t, SeededHash> id_by_content_;
  std::unordered_map<std::string_view, std::int32_t, SeededHash> id_by_word_;  // empty without ignore_merges
  std::vector<bool> special_;
  AddedTokenMatcher raw_added_;
  AddedTokenMatcher normalized_added_;
  bool nfc_;
  PreTokenizer pre_tokenizer_;
  Bpe bpe_;
  std::optional<std::int32_t> bos_;
};

// Turns tokens into text one at a time, so that each piece of text is valid UTF-8. The first bytes of a character are held
// back until the rest of it has come; bytes that cannot be part of a character become U+FFFD. All pushes and finish()
// together give utf8_replace_invalid(decode(ids)).
class StreamingDecoder {
 public:
  explicit StreamingDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  std::string push(std::int32_t id);  // the text that this token completes; id out of range: Exit::usage
  std::string finish();               // bytes still held back, as U+FFFD; resets the decoder

 private:
  const Tokenizer& tokenizer_;
  std::string waiting_;  // the bytes that are held back
};

}  // namespace weft
