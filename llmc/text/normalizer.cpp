#include "llmc/text/normalizer.h"

namespace weft {

std::string Normalizer::apply(std::string_view text) const {
  std::string result(text);
  for (const NormalizerStep& step : steps_) {
    switch (step.kind) {
      case NormalizerStep::Kind::form:
        result = normalize(result, step.form);
        break;
      case NormalizerStep::Kind::prepend:
        if (!result.empty()) result.insert(0, step.text);
        break;
      case NormalizerStep::Kind::replace:
        result = replace_all(result, step.character, step.text);
        break;
    }
  }
  return result;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t begin = 0;;) {
    const std::size_t found = text.find(from, begin);
    result += text.substr(begin, found - begin);
    if (found == std::string_view::npos) return result;
    result += to;
    begin = found + from.size();
  }
}

}  // namespace weft
