#include "llmc/infer/divergence.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/infer/perplexity.h"
#include "llmc/infer/running_moments.h"

namespace weft {

namespace {

constexpr std::int64_t kPiece = 128;  // rows whose activations and logits exist at once

// The logarithm of the sum of the exponentials.
double log_sum(std::span<const float> logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum);
}

std::ptrdiff_t top(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

// KL(p || q) of the distributions whose logits these are, of equal length.
double divergence_of(std::span<const float> logits_p, std::span<const float> logits_q, double log_sum_p,
                     double log_sum_q) {
  double sum = 0;
  for (std::size_t i = 0; i < logits_p.size(); ++i) {
    const double log_p = logits_p[i] - log_sum_p;
    sum += std::exp(log_p) * (log_p - (logits_q[i] - log_sum_q));
  }
  return sum;
}

// One token: its divergence, and the losses of both models.
struct Compared {
  double divergence = 0, nll = 0, nll_against = 0;
  bool same_top = false;
};

Compared compare(std::span<const float> p, std::span<const float> q, std::int32_t next) {
  const double of_p = log_sum(p), of_q = log_sum(q);
  Compared result{divergence_of(p, q, of_p, of_q), 0, 0, top(p) == top(q)};
  if (next < std::ssize(p)) {
    result.nll = of_q - q[static_cast<std::size_t>(next)];
    result.nll_against = of_p - p[static_cast<std::size_t>(next)];
  }
  return result;
}

// Appends `ids` to the model's sequence. With `logits` returns those after each id, [ids, vocab_size], else an empty
// vector.
std::vector<float> append(DecodeModel& model, std::span<const std::int32_t> ids, bool logits) {
  model.keep_logits(logits);
  model.prefill(ids);
  return logits ? model.activation("logits") : std::vector<float>{};
}

}  // namespace

DivergenceResult divergence(DecodeModel& model, DecodeModel& against, std::span<const std::int32_t> ids,
                            std::int64_t window, std::int64_t stride, const DivergenceHooks& hooks) {
  const std::int64_t vocabulary = model.config().tokenizer_vocab;
  if (against.config().tokenizer_vocab != vocabulary) {
    fail(Exit::bad_file,
         "--against: its tokenizer has %lld ids, expected the %lld of --model: only models of one tokenizer "
         "can be compared",
         static_cast<long long>(against.config().tokenizer_vocab), static_cast<long long>(vocabulary));
  }
  const auto windows = perplexity_windows(std::ssize(ids), window, stride);
  if (windows.empty()) fail(Exit::bad_file, "perplexity: the text has no token to score");
  DivergenceResult result;
  RunningMoments divergences, differences;  // of each token: its divergence, and how much the models' losses differ
  std::int64_t done = 0, same = 0;
  std::vector<Compared> compared;
  for (const PerplexityWindow& each : windows) {
    model.reset();
    against.reset();
    for (std::int64_t begin = each.begin; begin + 1 < each.end; begin += kPiece) {
      result.interrupted = hooks.interrupted && hooks.interrupted();
      if (result.interrupted) break;
      const std::int64_t count = std::min(kPiece, each.end - 1 - begin);
      const std::int64_t first = std::max<std::int64_t>(each.first_scored - 1 - begin, 0);  // first row that is scored
      const auto piece = ids.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
      const std::vector<float> q = append(model, piece, first < count), p = append(against, piece, first < count);
      if (first >= count) continue;
      compared.assign(static_cast<std::size_t>(count), {});
#pragma omp parallel for
      for (std::int64_t i = first; i < count; ++i) {
        const auto row = [&](const std::vector<float>& logits) {
          const std::size_t width = logits.size() / static_cast<std::size_t>(count);
          return std::span(logits).subspan(static_cast<std::size_t>(i) * width, static_cast<std::size_t>(vocabulary));
        };
        compared[static_cast<std::size_t>(i)] = compare(row(p), row(q), ids[static_cast<std::size_t>(begin + i + 1)]);
      }
      for (std::int64_t i = first; i < count; ++i) {
        const Compared& token = compared[static_cast<std::size_t>(i)];
        if (!std::isfinite(token.divergence)) {
          fail(Exit::numeric, "--against: the divergence at token %lld is not finite",
               static_cast<long long>(begin + i + 1));
        }
        divergences.add(token.divergence);
        differences.add(token.nll - token.nll_against);
        result.largest = std::max(result.largest, token.divergence);
        same += token.same_top ? 1 : 0;
        result.nll += token.nll;
        result.nll_against += token.nll_against;
      }
    }
    if (result.interrupted) break;
    if (hooks.on_window) hooks.on_window(++done, std::ssize(windows), divergences.mean());
  }
  result.tokens = divergences.count();
  result.mean = divergences.mean();
  result.standard_error = divergences.standard_error();
  result.nll_difference_error = differences.standard_error();
  const double count = static_cast<double>(std::max<std::int64_t>(result.tokens, 1));
  result.same_top = static_cast<double>(same) / count;
  result.nll /= count;
  result.nll_against /= count;
  model.keep_logits(false);
  against.keep_logits(false);
  return result;
}

}  // namespace weft
