// The tokens that BPE begins with, before any merge.
//
// Byte-level: one for each byte. SentencePiece-style: one for each character; a character that has no token becomes the
// tokens of its bytes ("byte fallback"), or else the unknown token, or else nothing. The details are those of
// BPE::merge_word() in the Hugging Face `tokenizers` library.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace weft {

struct BaseTokenSpec {
  struct Character {
    char32_t character;
    std::int32_t id;
  };
  bool by_character = false;
  std::array<std::int32_t, 256> byte_ids{};  // -1: none. By character: what byte fallback uses, else unused
  std::vector<Character> characters;         // by character: the tokens of one character, each character once
  std::optional<std::int32_t> unknown;       // by character
  bool fuse_unknown = false;                 // several unknown characters in a row are one unknown token
};

class BaseTokens {
 public:
  explicit BaseTokens(const BaseTokenSpec& spec);

  // Appends the tokens of `piece`, valid UTF-8, to `ids`: at most one for each byte.
  void append(std::string_view piece, std::vector<std::int32_t>& ids) const;

 private:
  static constexpr std::size_t kPage = 256;

  void append_bytes(std::string_view piece, std::vector<std::int32_t>& ids) const;
  std::int32_t id_of(char32_t character) const;
  bool append_fallback(std::string_view character, std::vector<std::int32_t>& ids) const;

  bool by_character_;
  bool fuse_unknown_;
  std::optional<std::int32_t> unknown_;
  std::array<std::int32_t, 256> byte_ids_;
  // Ids by character in pages of 256, those without any token left out: page_begin_[c / 256] is where the page of c begins.
  std::vector<std::uint32_t> page_begin_;
  std::vector<std::int32_t> pages_;  // -1: no token. The first page is that of all characters without a page
};

}  // namespace weft
