#include "llmc/model/formats/weight_format.h"

#include <vector>

#include "llmc/base/error.h"
#include "llmc/model/formats/formats.h"

namespace weft {

std::span<const WeightFormat* const> weight_formats() {
  return kWeightFormats;
}

const WeightFormat* find_weight_format(const std::string& name) {
  for (const WeightFormat* format : kWeightFormats) {
    if (name == format->name) return format;
  }
  return nullptr;
}

const WeightFormat& weight_format(DType dtype) {
  for (const WeightFormat* format : kWeightFormats) {
    if (dtype == format->dtype) return *format;
  }
  fail(Exit::internal, "no quantised matrix is of dtype %s", dtype_name(dtype));
}

std::string weight_format_names(bool of_head) {
  std::vector<std::string> names;
  for (const WeightFormat* format : kWeightFormats) {
    if (format->of_head || !of_head) names.push_back(format->name);
  }
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
  }
  return text;
}

}  // namespace weft
