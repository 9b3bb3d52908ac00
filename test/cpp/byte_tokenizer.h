// A tokenizer for tests whose tokens are bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/text/byte_alphabet.h"
#include "llmc/text/tokenizer.h"

namespace weft {

// Byte b is token b + 2, after <|endoftext|> (0) and <|padding|> (1); "ab" is one token, 258.
inline constexpr std::int32_t kEndOfText = 0;
inline constexpr std::int32_t kAb = 258;
inline std::int32_t byte_id(char byte) {
  return static_cast<unsigned char>(byte) + 2;
}
// One for each byte.
inline std::vector<std::int32_t> ids_of(std::string_view bytes) {
  std::vector<std::int32_t> ids;
  for (const char byte : bytes) ids.push_back(byte_id(byte));
  return ids;
}

// The post-processor of a tokenizer.json that puts a special token in front of every text.
inline Json token_in_front(const char* content, std::int32_t id) {
  return {{"type", "TemplateProcessing"},
          {"single",
           {{{"SpecialToken", {{"id", content}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
          {"special_tokens", {{content, {{"id", content}, {"ids", {id}}, {"tokens", {content}}}}}}};
}

inline Json byte_tokenizer_json() {
  Json vocab = {{"<|endoftext|>", 0}, {"<|padding|>", 1}, {"ab", kAb}};
  for (int byte = 0; byte < 256; ++byte) vocab[alphabet_character(static_cast<std::uint8_t>(byte))] = byte + 2;
  Json added = Json::array();
  for (const auto& [id, content] : std::map<int, std::string>{{0, "<|endoftext|>"}, {1, "<|padding|>"}}) {
    added.push_back({{"id", id},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  const Json model = {{"type", "BPE"},
                      {"dropout", nullptr},
                      {"unk_token", nullptr},
                      {"continuing_subword_prefix", nullptr},
                      {"end_of_word_suffix", nullptr},
                      {"fuse_unk", false},
                      {"byte_fallback", false},
                      {"ignore_merges", false},
                      {"vocab", vocab},
                      {"merges", {"a b"}}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer", byte_level},
          {"post_processor", byte_level},
          {"decoder", byte_level},
          {"model", model}};
}

inline const Tokenizer& byte_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::from_json(byte_tokenizer_json().dump(), "test tokenizer");
  return tokenizer;
}

// One that puts <|padding|> in front of every text.
inline const Tokenizer& starting_byte_tokenizer() {
  static const Tokenizer tokenizer = [] {
    Json json = byte_tokenizer_json();
    json["post_processor"] = token_in_front("<|padding|>", 1);
    return Tokenizer::from_json(json.dump(), "test tokenizer");
  }();
  return tokenizer;
}

}  // namespace weft
