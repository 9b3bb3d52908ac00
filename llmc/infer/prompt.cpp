#include "llmc/infer/prompt.h"

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

std::vector<std::int32_t> parse_ids(const std::string& text, std::int64_t vocab_size, const char* option) {
  std::vector<std::int32_t> ids;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = text.find(',', begin);
    const std::size_t end = comma == std::string::npos ? text.size() : comma;
    std::int32_t id = 0;
    const std::from_chars_result parsed = std::from_chars(text.data() + begin, text.data() + end, id);
    if (parsed.ec != std::errc{} || parsed.ptr != text.data() + end || id < 0 || id >= vocab_size) {
      fail(Exit::usage, "%s: id %zu: got %s, expected integers from 0 to %lld, separated by commas", option,
           ids.size() + 1, escaped(text.substr(begin, end - begin)).c_str(), static_cast<long long>(vocab_size - 1));
    }
    ids.push_back(id);
    begin = end + 1;
  }
  return ids;
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
