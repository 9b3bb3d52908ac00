// tokenizer.json, read and checked: everything that weft's tokenizer depends on is either understood or
// refused by name.
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
  std::vector<std::string> contents;  // by id, as the file writes them; no holes
  std::vector<std::string> bytes;     // by id: what the token stands for
  std::vector<std::int32_t> words;    // ids that a whole piece may become: the model's vocabulary in the byte alphabet
  std::vector<BpeMerge> merges;       // by rank
  std::array<std::int32_t, 256> byte_ids{};  // -1: none, for a byte that UTF-8 never uses
  bool ignore_merges = false;                // a piece that is a word is one token, whatever the merges say
  std::vector<AddedToken> added;             // special ones first, else in the file's order
  bool nfc = false;
  std::vector<PreTokenizerStep> steps;
  std::optional<std::int32_t> bos;
};

constexpr std::int64_t kMaxVocabulary = 1'000'000;
constexpr std::size_t kMaxTokenBytes = 4096;
constexpr std::size_t kMaxAddedBytes = 16
                                       << 20;  // of all added tokens: AddedTokenMatcher takes 20 times as much memory

// Parses and checks. Anything damaged or not supported: Exit::bad_file, "<source>: <field>: got X, expected
// Y".
TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source);

}  // namespace weft
