#include "llmc/infer/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/base/error.h"
#include "llmc/infer/perplexity.h"

namespace weft {

namespace {

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

}  // namespace

double divergence_of(std::span<const float> logits_p, std::span<const float> logits_q) {
  const double of_p = log_sum(logits_p), of_q = log_sum(logits_q);
  double sum = 0;
  for (std::size_t i = 0; i < logits_p.size(); ++i) {
    const double log_p = logits_p[i] - of_p;
    sum += std::exp(log_p) * (log_p - (logits_q[i] - of_q));
  }
  return sum;
}

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
  DivergenceResult result;
  double squares = 0;  // sum of the squared differences from the mean (Welford, Technometrics 4, 1962)
  std::int64_t done = 0, same = 0;
  for (const PerplexityWindow& each : windows) {
    model.reset();
    against.reset();
    for (std::int64_t i = each.begin; i + 1 < each.end; ++i) {
      result.interrupted = hooks.interrupted && hooks.interrupted();
      if (result.interrupted) break;
      const std::int32_t id = ids[static_cast<std::size_t>(i)], next = ids[static_cast<std::size_t>(i + 1)];
      const auto real = static_cast<std::size_t>(vocabulary);
      const std::span<const float> q = model.decode(id).first(real), p = against.decode(id).first(real);
      if (i + 1 < each.first_scored) continue;
      const double value = divergence_of(p, q);
      if (!std::isfinite(value)) {
        fail(Exit::numeric, "--against: the divergence at token %lld is not finite", static_cast<long long>(i + 1));
      }
      const double difference = value - result.mean;
      result.mean += difference / static_cast<double>(++result.tokens);
      squares += difference * (value - result.mean);
      result.largest = std::max(result.largest, value);
      same += top(p) == top(q) ? 1 : 0;
      if (next < vocabulary) {
        result.nll += log_sum(q) - q[static_cast<std::size_t>(next)];
        result.nll_against += log_sum(p) - p[static_cast<std::size_t>(next)];
      }
    }
    if (result.interrupted) break;
    if (hooks.on_window) hooks.on_window(++done, std::ssize(windows), result.mean);
  }
  const double count = static_cast<double>(std::max<std::int64_t>(result.tokens, 1));
  result.same_top = static_cast<double>(same) / count;
  result.nll /= count;
  result.nll_against /= count;
  result.standard_error =
      result.tokens < 2 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(squares / (count - 1) / count);
  return result;
}

}  // namespace weft
