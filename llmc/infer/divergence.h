// infer_pythia --perplexity --against: how far the next-token distribution of a model lies from another's, on one text.
//
// The windows are those of the perplexity. At each scored token the Kullback-Leibler divergence KL(p || q) = sum
// of p log(p / q) is taken over the ids of the tokenizer, with p of the other model and q of this one, both
// normalised over these ids: padding rows of a vocabulary do not count, and may differ in number. Perplexity alone
// hides what quantisation changes, because gains and losses of single tokens cancel in its mean. Both models
// compute many rows at a time, as for a prompt.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "llmc/model/decode_model.h"

namespace weft {

struct DivergenceResult {
  std::int64_t tokens = 0;    // distributions that were compared
  double mean = 0;            // of the divergence, in nats
  double standard_error = 0;  // of the mean, as if tokens were independent; NaN with fewer than two
  double largest = 0;
  double same_top = 0;              // share of tokens at which both models have the same likeliest id
  double nll = 0, nll_against = 0;  // mean -log of the text's token, of this model and of the other
  double nll_difference_error = 0;  // standard error of nll - nll_against, which is far below that of either
  bool interrupted = false;         // the figures cover the tokens before the interruption
};

struct DivergenceHooks {
  std::function<void(std::int64_t done, std::int64_t all, double mean_so_far)> on_window;
  std::function<bool()> interrupted;  // polled before each piece of a window
};

// `ids`: at least two, the first one starts the document. Windows of `window` ids, which both models hold, and `stride`: as
// perplexity_windows() takes them. Models whose tokenizers have different numbers of ids: Exit::bad_file. A divergence that is
// not finite: Exit::numeric.
DivergenceResult divergence(DecodeModel& model, DecodeModel& against, std::span<const std::int32_t> ids,
                            std::int64_t window, std::int64_t stride, const DivergenceHooks& hooks = {});

}  // namespace weft
