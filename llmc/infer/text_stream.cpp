#include "llmc/infer/text_stream.h"

#include <utility>

namespace weft {

TextStream::TextStream(const Tokenizer* tokenizer, std::vector<std::string> stops) : stops_(std::move(stops)) {
  if (tokenizer != nullptr) decoder_.emplace(*tokenizer);
}

std::string TextStream::push(std::int32_t id) {
  return decoder_.has_value() ? stops_.push(decoder_->push(id)) : "";
}

std::string TextStream::finish() {
  if (!decoder_.has_value()) return "";
  std::string text = stops_.push(decoder_->finish());
  return text += stops_.finish();
}

}  // namespace weft
