// Turns the ids of a generation into its text, piece by piece, up to a stop text.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/infer/stop_text.h"
#include "llmc/text/tokenizer.h"

namespace weft {

// A StreamingDecoder with a StopTextFilter behind it. Every piece is valid UTF-8; text that may belong to an unfinished
// character or to a stop text is held back.
class TextStream {
 public:
  // `tokenizer` may be null: all pieces are empty then. `before`: the prompt, as StreamingDecoder takes it. An empty stop text
  // is Exit::usage.
  TextStream(const Tokenizer* tokenizer, std::span<const std::int32_t> before, std::vector<std::string> stops);

  std::string push(std::int32_t id);  // the text that this id releases
  std::string finish();               // what is still held back: no stop text came of it
  bool stopped() const { return stops_.stopped(); }

 private:
  std::optional<StreamingDecoder> decoder_;
  StopTextFilter stops_;
};

}  // namespace weft
