#include "llmc/infer/perplexity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/running_moments.h"

namespace weft {

void check_text(std::string_view text, const std::string& path) {
  const std::string name = escaped(path);
  if (text.empty()) fail(Exit::bad_file, "%s: empty", name.c_str());
  const std::size_t nul = text.find('\0');
  if (nul != std::string_view::npos) {
    fail(Exit::bad_file, "%s: byte %zu is NUL: this is not text. --perplexity scores UTF-8 text", name.c_str(), nul);
  }
  std::size_t bad = 0;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_sequence_length(text.substr(i));
    bad += length == 0;
    i += std::max<std::size_t>(length, 1);
  }
  if (bad > text.size() / 10) {
    fail(Exit::bad_file, "%s: %zu of %zu bytes are not UTF-8: this is not text. --perplexity scores UTF-8 text",
         name.c_str(), bad, text.size());
  }
  if (bad > 0) {
    log_warning("%s: %zu of %zu bytes are not UTF-8 and are scored as U+FFFD", name.c_str(), bad, text.size());
  }
}

double PerplexityResult::perplexity() const {
  return std::exp(mean_nll);
}

double PerplexityResult::bits_per_byte() const {
  if (interrupted) return std::numeric_limits<double>::quiet_NaN();
  return mean_nll * static_cast<double>(tokens) / std::numbers::ln2 / static_cast<double>(bytes);
}

std::vector<PerplexityWindow> perplexity_windows(std::int64_t count, std::int64_t window, std::int64_t stride) {
  if (window < 2) {
    fail(Exit::usage, "perplexity: got a context of %lld, expected at least 2", static_cast<long long>(window));
  }
  if (stride < 1 || stride >= window) {
    fail(Exit::usage, "--stride: got %lld, expected an integer from 1 to %lld: less than the context",
         static_cast<long long>(stride), static_cast<long long>(window - 1));
  }
  std::vector<PerplexityWindow> windows;
  std::int64_t scored = 1;  // the first id has nothing before it
  for (std::int64_t begin = 0; scored < count; begin += stride) {
    const std::int64_t end = std::min(begin + window, count);
    windows.push_back({begin, end, scored});
    scored = end;
  }
  return windows;
}

PerplexityResult perplexity(DecodeModel& model, std::span<const std::int32_t> ids, std::int64_t bytes,
                            std::int64_t stride, const PerplexityHooks& hooks) {
  const auto windows = perplexity_windows(static_cast<std::int64_t>(ids.size()), model.capacity(), stride);
  if (windows.empty()) fail(Exit::bad_file, "perplexity: the text has no token to score");
  PerplexityResult result;
  result.bytes = bytes;
  result.of_tokens = std::ssize(ids) - 1;
  RunningMoments moments;
  model.interrupt_score(hooks.interrupted);
  for (const PerplexityWindow& window : windows) {
    result.interrupted = hooks.interrupted && hooks.interrupted();
    if (result.interrupted) break;
    const std::size_t begin = static_cast<std::size_t>(window.begin);
    const std::vector<double> nll =
        model.score(ids.subspan(begin, static_cast<std::size_t>(window.end - window.begin)));
    const std::int64_t end = window.begin + 1 + static_cast<std::int64_t>(nll.size());  // of the ids that have a loss
    for (std::int64_t i = window.first_scored; i < end; ++i) {
      double value = nll[static_cast<std::size_t>(i - window.begin - 1)];  // nll[j] is of token j + 1
      if (hooks.on_loss) value = hooks.on_loss(value);
      if (!std::isfinite(value)) {
        fail(Exit::numeric, "perplexity: the loss of token %lld is not finite", static_cast<long long>(i));
      }
      moments.add(value);
    }
    result.interrupted = end < window.end;
    if (result.interrupted) break;
    ++result.windows;
    if (hooks.on_window) {
      hooks.on_window(result.windows, static_cast<std::int64_t>(windows.size()), std::exp(moments.mean()));
    }
  }
  model.interrupt_score({});
  result.tokens = moments.count();
  result.mean_nll = moments.mean();
  result.standard_error = moments.standard_error();
  return result;
}

}  // namespace weft
