// Reads and checks tokenizer.json. Every field that changes the ids is either understood completely or refused with its
// name.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/text/added_tokens.h"
#include "llmc/text/bpe.h"
#include "llmc/text/pretokenize.h"

namespace weft {

struct TokenizerSpec {
  std::vector<std::string> contents;  // by id: the token as the file spells it; every id has one
  std::vector<std::string> bytes;     // by id: the bytes that the token stands for
  std::vector<std::int32_t> words;    // tokens that ignore_merges applies to: the vocabulary in the byte alphabet
  std::vector<BpeMerge> merges;       // by rank
  std::array<std::int32_t, 256> byte_ids{};  // the token of each byte; -1: none, for a byte that UTF-8 never uses
  bool ignore_merges = false;                // a piece that is in `words` becomes that token, without any merge
  std::vector<AddedToken> added;             // special ones first, otherwise in the file's order
  bool nfc = false;
  std::vector<PreTokenizerStep> steps;
  std::optional<std::int32_t> bos;  // the token that the post-processor puts in front of a text
};

constexpr std::int64_t kMaxVocabulary = 1'000'000;
constexpr std::size_t kMaxTokenBytes = 4096;
// Of all added tokens together: AddedTokenMatcher takes 20 times as much memory.
constexpr std::size_t kMaxAddedBytes = 16 << 20;

// Parses and checks. Anything damaged or not supported: Exit::bad_file, "<source>: <field>: got X, expected
// Y".
TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source);

}  // namespace weft
