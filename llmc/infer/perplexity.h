// infer_pythia --perplexity: how well a model predicts a text. A window slides over the text, and every token is scored
// exactly once.
//
// The encoded text follows the id that begins a document (document_start of prompt.h), so that its first token is
// predicted, too. The first window scores all of its tokens. Each later one begins `stride` ids further on and scores
// only the tokens after the end of the previous window. These have at least window - stride ids of context: a smaller
// stride gives each token more context and costs more passes of the model.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/model/decode_model.h"

namespace weft {

// Exit::bad_file if `text`, the content of the file `path`, is not text, so that its score would be meaningless: if it
// is empty, contains a NUL byte, or more than a tenth of it is not UTF-8. A warning if less than that is not UTF-8.
void check_text(std::string_view text, const std::string& path);

// One pass of the model: ids [begin, end) go in; the tokens at [first_scored, end) are counted.
struct PerplexityWindow {
  std::int64_t begin = 0, end = 0, first_scored = 0;
};

// The windows over `count` ids, of which the first only starts the document. window >= 2, 1 <= stride <
// window; otherwise Exit::usage.
std::vector<PerplexityWindow> perplexity_windows(std::int64_t count, std::int64_t window, std::int64_t stride);

struct PerplexityResult {
  std::int64_t tokens = 0;     // scored
  std::int64_t of_tokens = 0;  // of the text: one more where nothing begins a document, and the first has no context
  std::int64_t bytes = 0;      // of the text
  std::int64_t windows = 0;    // complete ones
  double mean_nll = 0;         // natural logarithm, per token
  double standard_error = 0;   // of mean_nll: standard deviation / sqrt(tokens), as if tokens were independent
  bool interrupted = false;    // the figures cover the tokens that were scored before the interruption

  double perplexity() const;     // exp(mean_nll)
  double bits_per_byte() const;  // comparable between tokenizers; NaN if interrupted
};

struct PerplexityHooks {
  std::function<void(std::int64_t done, std::int64_t all, double perplexity_so_far)> on_window;
  std::function<bool()> interrupted;      // polled before each window, and within it before each piece
  std::function<double(double)> on_loss;  // replaces each loss that counts, in order: faults on purpose
};

// Scores `ids` (at least two, the first one is only context) with windows of the model's capacity.
// `bytes`: length of the text. `of_tokens` of the result: those of `ids` that are scored, if none interrupts. A result that
// is not finite: Exit::numeric.
PerplexityResult perplexity(DecodeModel& model, std::span<const std::int32_t> ids, std::int64_t bytes,
                            std::int64_t stride, const PerplexityHooks& hooks = {});

}  // namespace weft
