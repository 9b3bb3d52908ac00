#include "llmc/serve/request_log.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/serve/answer_choice.h"

namespace weft {

namespace {

std::string in_ms(std::optional<double> seconds) {
  return seconds ? format("%.2f", *seconds * 1e3) : "-";
}

}  // namespace

void RequestFigures::add(FinishedBy reason, std::int64_t tokens, const TokenTimes& of_choice) {
  completion_tokens += tokens;
  if (of_choice.first_seconds && (!times.first_seconds || *of_choice.first_seconds < *times.first_seconds)) {
    times.first_seconds = of_choice.first_seconds;
  }
  times.later_seconds += of_choice.later_seconds;
  times.later_tokens += of_choice.later_tokens;
  const char* const name = finish_reason_name(reason);
  if (std::ranges::find(finish, name) == finish.end()) finish.emplace_back(name);
}

std::string request_line(const HttpRequest& request, int status, const RequestFigures* figures) {
  std::string line = format("request id=%s method=%s path=%s status=%d", request.id.c_str(), request.method.c_str(),
                            escaped(request.path).c_str(), status);
  if (figures == nullptr) return line;
  const RequestFigures& f = *figures;
  std::optional<double> between;
  if (f.times.later_tokens > 0) between = f.times.later_seconds / static_cast<double>(f.times.later_tokens);
  line +=
      format(" prompt_tokens=%lld cached_tokens=%lld completion_tokens=%lld first_ms=%s token_ms=%s finish=",
             static_cast<long long>(f.prompt_tokens), static_cast<long long>(f.cached_tokens),
             static_cast<long long>(f.completion_tokens), in_ms(f.times.first_seconds).c_str(), in_ms(between).c_str());
  for (const std::string& reason : f.finish) line += (line.ends_with('=') ? "" : ",") + reason;
  return line;
}

}  // namespace weft
