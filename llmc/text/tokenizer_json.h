// Reads and checks tokenizer.json. Every field that changes the ids is either understood completely or refused with its
// name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/text/added_tokens.h"
#include "llmc/text/base_tokens.h"
#include "llmc/text/bpe.h"
#include "llmc/text/normalizer.h"
#include "llmc/text/pretokenize.h"
#include "llmc/text/token_decoder.h"

namespace weft {

struct TokenizerSpec {
  struct Word {
    std::string bytes;
    std::int32_t id;
  };
  std::vector<std::string> contents;  // by id: the token as the file spells it; every id has one
  std::vector<std::string> texts;  // by id: what the decoder gets. The bytes of a byte-level token, else its spelling
  BaseTokenSpec base;
  std::vector<BpeMerge> merges;  // by rank
  bool ignore_merges = false;    // a piece that reads as one of `words` becomes that token, without any merge
  std::vector<Word> words;  // with ignore_merges: the vocabulary, but not byte-level tokens outside the byte alphabet
  std::vector<AddedToken> added;  // special ones first, otherwise in the file's order
  std::vector<NormalizerStep> normalizers;
  std::vector<PreTokenizerStep> steps;
  DecoderSpec decoder;
  std::vector<bool> left_out;       // by id: decode(skip_special) leaves it out
  std::optional<std::int32_t> bos;  // the token that the post-processor puts in front of a text
};

constexpr std::int64_t kMaxVocabulary = 1'000'000;
constexpr std::size_t kMaxTokenBytes = 4096;
// Of all added tokens together: AddedTokenMatcher takes 20 times as much memory.
constexpr std::size_t kMaxAddedBytes = 16 << 20;
constexpr std::size_t kMaxSteps = 8;             // of the normalizer, the pre-tokenizer and the decoder, each
constexpr std::size_t kMaxPrependBytes = 64;     // of the normalizer Prepend
constexpr std::size_t kMaxSplitBytes = 256;      // of the text that a Split looks for
constexpr std::uint64_t kMaxStripped = 1 << 20;  // characters that the decoder Strip takes away

// Parses and checks. Anything damaged or not supported: Exit::bad_file, "<source>: <field>: got X, expected
// Y".
TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source);

}  // namespace weft
