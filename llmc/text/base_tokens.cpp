#include "llmc/text/base_tokens.h"

#include <algorithm>

#include "llmc/base/utf8.h"
#include "llmc/text/code_points.h"

namespace weft {

BaseTokens::BaseTokens(const BaseTokenSpec& spec)
    : by_character_(spec.by_character),
      fuse_unknown_(spec.fuse_unknown),
      unknown_(spec.unknown),
      byte_ids_(spec.byte_ids),
      page_begin_(0x110000 / kPage, 0),
      pages_(kPage, -1) {
  for (const auto& [character, id] : spec.characters) {
    std::uint32_t& begin = page_begin_[character / kPage];
    if (begin == 0) {
      begin = static_cast<std::uint32_t>(pages_.size());
      pages_.resize(pages_.size() + kPage, -1);
    }
    pages_[begin + character % kPage] = id;
  }
}

std::int32_t BaseTokens::id_of(char32_t character) const {
  return pages_[page_begin_[character / kPage] + character % kPage];
}

void BaseTokens::append_bytes(std::string_view piece, std::vector<std::int32_t>& ids) const {
  for (const char byte : piece) ids.push_back(byte_ids_[static_cast<unsigned char>(byte)]);
}

// True if each byte of the character has a token.
bool BaseTokens::append_fallback(std::string_view character, std::vector<std::int32_t>& ids) const {
  const auto has_token = [this](char byte) { return byte_ids_[static_cast<unsigned char>(byte)] >= 0; };
  if (!std::all_of(character.begin(), character.end(), has_token)) return false;
  append_bytes(character, ids);
  return true;
}

void BaseTokens::append(std::string_view piece, std::vector<std::int32_t>& ids) const {
  if (!by_character_) return append_bytes(piece, ids);
  // An unknown token is held back until a character with a token of its own comes, or the end. Tokens of byte fallback do not
  // count as such: in the original they overtake it.
  bool unknown_waits = false;
  while (!piece.empty()) {
    const std::string_view character = piece.substr(0, utf8_sequence_length(piece));
    piece.remove_prefix(character.size());
    const std::int32_t id = id_of(code_point_of(character));
    if (id >= 0) {
      if (unknown_waits) ids.push_back(*unknown_);
      unknown_waits = false;
      ids.push_back(id);
    } else if (!append_fallback(character, ids) && unknown_) {
      if (unknown_waits && !fuse_unknown_) ids.push_back(*unknown_);
      unknown_waits = true;
    }
  }
  if (unknown_waits) ids.push_back(*unknown_);
}

}  // namespace weft
