#include "llmc/infer/prompt.h"

#include <algorithm>
#include <charconv>

#include "llmc/base/error.h"

namespace weft {

std::optional<std::int32_t> document_start(const ModelConfig& config) {
  if (config.bos_id.has_value()) return config.bos_id;
  if (!config.eos_ids.empty()) return config.eos_ids.front();
  return std::nullopt;
}

std::vector<std::int32_t> start_ids(std::vector<std::int32_t> ids, const ModelConfig& config) {
  if (!ids.empty()) return ids;
  const std::optional<std::int32_t> start = document_start(config);
  if (start.has_value()) return {*start};
  fail(Exit::usage, "the prompt is empty, and this model has no token that begins a document: give some text");
}

std::vector<std::int64_t> parse_integers(const char* option, const std::string& text, std::int64_t high,
                                         std::int64_t low, const char* item) {
  std::vector<std::int64_t> numbers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::int64_t number = 0;
    const std::from_chars_result parsed = std::from_chars(text.data() + begin, text.data() + end, number);
    if (parsed.ec != std::errc{} || parsed.ptr != text.data() + end || number < low || number > high) {
      fail(Exit::usage, "%s: %s %zu: got %s, expected integers from %lld to %lld, separated by commas", option, item,
           numbers.size() + 1, escaped(text.substr(begin, end - begin)).c_str(), static_cast<long long>(low),
           static_cast<long long>(high));
    }
    numbers.push_back(number);
    begin = end + 1;
  }
  return numbers;
}

std::vector<std::int32_t> parse_ids(const std::string& text, std::int64_t vocab_size, const char* option) {
  const std::vector<std::int64_t> ids = parse_integers(option, text, vocab_size - 1, 0, "id");
  return {ids.begin(), ids.end()};
}

std::string ids_text(std::span<const std::int32_t> ids) {
  std::string text;
  for (const std::int32_t id : ids) text += format(text.empty() ? "%d" : ",%d", id);
  return text;
}

void check_prompt_fits(std::size_t count, std::int64_t used, std::int64_t capacity) {
  const std::int64_t room = capacity - used;
  if (static_cast<std::int64_t>(count) < room) return;
  fail(Exit::usage, "the prompt has %zu tokens, but the context of %lld positions takes at most %lld%s", count,
       static_cast<long long>(capacity), static_cast<long long>(room - 1), used > 0 ? " more" : " and a generated one");
}

}  // namespace weft
