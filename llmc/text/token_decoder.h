// Turns tokens back into text, as the decoder of tokenizer.json says.
//
// Byte-level: the bytes of the tokens, one after the other. SentencePiece-style: ▁ becomes a space, tokens that read <0x00>
// to <0xFF> are bytes, and a space in front of the whole text is taken away. The details are those of the decoders Replace,
// ByteFallback, Metaspace and Strip in the Hugging Face `tokenizers` library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// Puts `to` in the place of every `character`; in the first token of a text, `to_in_first`.
struct CharacterReplacement {
  std::string character;  // one character of UTF-8, as are the others unless they are empty
  std::string to;
  std::string to_in_first;
};

struct DecoderSpec {
  std::vector<CharacterReplacement> before_bytes;  // in each token, before it may stand for a byte
  // A token <0xHH> stands for a byte. Bytes in a row are text if they are valid UTF-8, and otherwise one U+FFFD each.
  bool byte_fallback = false;
  std::vector<CharacterReplacement> after_bytes;  // in each token that is no byte, and in the text of bytes in a row
  std::string strip;                              // one character, or nothing
  std::uint64_t strip_count = 0;                  // at most so many of them are taken away at the beginning of the text
};

class TokenDecoder {
 public:
  // The state of one decoding.
  struct State {
    bool begun = false;          // a token has come
    std::uint64_t stripped = 0;  // characters taken away at the beginning of the text
    std::string row;            // bytes in a row, held back until the row ends: one wrong byte makes all of them U+FFFD
    std::size_t complete = 0;   // bytes of `row` that are complete characters
    bool row_is_first = false;  // the text begins with this row
    bool row_is_broken = false;  // it has a wrong byte; what follows in it is not held back
  };

  // `tokens`: by id. As the file spells them, or as bytes for byte-level tokens, whose spec is empty.
  TokenDecoder(const std::vector<std::string>& tokens, DecoderSpec spec);

  // Appends to `out` what the token adds to the text for certain. `id` is in range.
  void push(State& state, std::int32_t id, std::string& out) const;
  // Ends the text.
  void finish(State& state, std::string& out) const;
  // Whether the token stands for a byte, and so may be held back in a row. `id` is in range.
  bool is_byte(std::int32_t id) const { return !bytes_.empty() && bytes_[static_cast<std::size_t>(id)] >= 0; }
  // What the token stands for in the middle of a text, by itself: possibly not UTF-8. `id` is in range.
  std::string bytes_of(std::int32_t id) const;

 private:
  void push_byte(State& state, char byte, std::string& out) const;
  void emit_broken(State& state, std::string& out) const;
  void end_row(State& state, std::string& out) const;
  void emit(State& state, std::string_view text, std::string& out) const;

  DecoderSpec spec_;
  std::vector<std::string> texts_;        // by id
  std::vector<std::string> first_texts_;  // by id, where the first token differs from others; else no entries
  std::vector<std::int16_t> bytes_;       // by id: the byte, or -1; no entries without byte_fallback
};

}  // namespace weft
