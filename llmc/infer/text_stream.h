// Turns the ids of a generation into its text, piece by piece, up to a stop text.
#pragma once

#include <cstddef>
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
  // `tokenizer` may be null: all pieces are empty then. It must outlive this object. `before`: the prompt, as StreamingDecoder
  // takes it. An empty stop text is Exit::usage. `hide_special`: special tokens are not in the pieces, but stop texts see
  // them. `min_tokens`: stop texts that the first so many ids complete do not count.
  TextStream(const Tokenizer* tokenizer, std::span<const std::int32_t> before, std::vector<std::string> stops,
             bool hide_special = false, std::int64_t min_tokens = 0);

  std::string push(std::int32_t id);  // the text that this id releases
  std::string finish();               // what is still held back: no stop text came of it
  bool stopped() const { return stops_.stopped(); }

 private:
  std::string shown(std::string text);

  const Tokenizer* tokenizer_;
  std::optional<StreamingDecoder> decoder_;
  StopTextFilter stops_;
  const bool hide_special_;
  std::int64_t unstoppable_;  // ids that are still to come before stop texts count
  // Bytes of the text before anything is hidden: how many the decoder has given, how many the stop texts have let through,
  // and from where to where special tokens go among those that they hold back.
  std::size_t decoded_ = 0, released_ = 0;
  struct Range {
    std::size_t begin, end;
  };
  std::vector<Range> hidden_;
};

}  // namespace weft
