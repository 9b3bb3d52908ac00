// JSON from files that nobody has checked: nlohmann-json with limits on size, number of values and depth, and typed access
// to members.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/base/json_fwd.h"

namespace weft {

// The defaults are those of the largest text that weft reads: a tokenizer of 1,000,000 tokens, whose vocabulary has a
// value for each token, and whose merges have three (a pair of texts).
struct JsonLimits {
  std::size_t bytes = 100'000'000;
  int depth = 64;
  std::size_t values = 5'000'000;  // a value takes two bytes of text ("0,"), but 16 to 200 bytes of memory
  // Not null: also what Python's json reads. Of a repeated key the last value counts, and NaN and Infinity are null; the first
  // 20 of them are told here.
  std::vector<std::string>* tolerated = nullptr;
};
// For a configuration: of a model, of a tensor file, of a checkpoint.
inline constexpr std::size_t kMaxConfigValues = 1'000'000;

// Parses `text`; a byte order mark before it is skipped. Too long, too many values, too deep, a duplicate key, trailing text, invalid UTF-8 or a syntax error:
// Exit::bad_file with "<source>: ...". Never recurses deeper than the limit.
Json parse_json(std::string_view text, const std::string& source, const JsonLimits& limits = {});

// The value of an integer that int64 holds; empty for any other value.
std::optional<std::int64_t> json_integer(const Json& value);

// The text of `value` on one line, or with `indent` spaces per level. Bytes that are not UTF-8 (a file name may contain
// them) become U+FFFD, so that writing a log or a report never fails because of its content.
std::string json_text(const Json& value, int indent = -1);

// A member of the object `object`, of the type in the function's name. A missing member or another type is
// Exit::bad_file with "<source>: <key>: ...". Integers must be JSON integers within [low, high].
std::int64_t json_int(const Json& object, const std::string& key, std::int64_t low, std::int64_t high,
                      const std::string& source);
double json_number(const Json& object, const std::string& key, const std::string& source);  // finite
bool json_bool(const Json& object, const std::string& key, const std::string& source);
std::string json_string(const Json& object, const std::string& key, const std::string& source);

}  // namespace weft
