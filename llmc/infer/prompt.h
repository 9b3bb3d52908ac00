// The ids that the model starts from: parses and checks what the user gave as a prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/model/config.h"

namespace weft {

// The id that begins a document: bos_id or, for models that mark documents by their end, the first of eos_ids (Pythia's
// <|endoftext|>, id 0). Nothing if the model has neither.
std::optional<std::int32_t> document_start(const ModelConfig& config);

// `ids`, or the id of document_start() if `ids` is empty; Exit::usage if the model has no such id.
std::vector<std::int32_t> start_ids(std::vector<std::int32_t> ids, const ModelConfig& config);

// "1,2,3", the value of `option`, as integers from `low` to `high`. Anything else, also an empty text, is Exit::usage with a
// message that says which `item` is wrong.
std::vector<std::int64_t> parse_integers(const char* option, const std::string& text, std::int64_t high,
                                         std::int64_t low = 1, const char* item = "number");

// The same for ids in [0, vocab_size).
std::vector<std::int32_t> parse_ids(const std::string& text, std::int64_t vocab_size,
                                    const char* option = "--prompt-ids");

// The inverse of parse_ids: the ids as "1,2,3".
std::string ids_text(std::span<const std::int32_t> ids);

// Exit::usage, with how many tokens there are and how many fit, unless `count` more ids leave room for a generated one
// in a context of `capacity` positions of which `used` are taken.
void check_prompt_fits(std::size_t count, std::int64_t used, std::int64_t capacity);

}  // namespace weft
