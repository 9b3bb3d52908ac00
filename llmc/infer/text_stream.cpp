#include "llmc/infer/text_stream.h"

#include <algorithm>
#include <utility>

#include "llmc/base/utf8.h"

namespace weft {

TextStream::TextStream(const Tokenizer* tokenizer, std::span<const std::int32_t> before, std::vector<std::string> stops,
                       bool hide_special, std::int64_t min_tokens)
    : tokenizer_(tokenizer), stops_(std::move(stops)), hide_special_(hide_special), unstoppable_(min_tokens) {
  if (tokenizer != nullptr) decoder_.emplace(*tokenizer, before);
}

std::string TextStream::push(std::int32_t id) {
  if (!decoder_.has_value()) return "";
  const bool ends = unstoppable_-- <= 0;
  if (!hide_special_ || !tokenizer_->is_special(id)) {
    const std::string text = decoder_->push(id);
    decoded_ += text.size();
    return shown(stops_.push(text, ends));
  }
  if (tokenizer_->is_byte(id)) return "";  // left out before bytes become characters, as by decode(skip_special)
  // What the decoder held back comes before the token.
  std::vector<std::size_t> begins;
  const std::string text = decoder_->push(id, &begins);
  std::size_t begin = 0;
  for (std::size_t i = 0; i < begins.back(); ++i) begin += utf8_sequence_length(std::string_view(text).substr(begin));
  hidden_.push_back({decoded_ + begin, decoded_ + text.size()});
  decoded_ += text.size();
  return shown(stops_.push(text, ends));
}

std::string TextStream::finish() {
  if (!decoder_.has_value()) return "";
  std::string text = stops_.push(decoder_->finish(), unstoppable_ < 0);
  return shown(text += stops_.finish());
}

// `text`, the next bytes that the stop texts let through, without special tokens.
std::string TextStream::shown(std::string text) {
  const std::size_t first = released_, last = released_ + text.size();
  released_ = last;
  for (auto range = hidden_.rbegin(); range != hidden_.rend(); ++range) {
    const std::size_t begin = std::clamp(range->begin, first, last), end = std::clamp(range->end, first, last);
    text.erase(begin - first, end - begin);
  }
  std::erase_if(hidden_, [&](const Range& range) { return range.end <= last; });
  return text;
}

}  // namespace weft
