#include "llmc/infer/option_values.h"

#include <limits>
#include <optional>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

[[noreturn]] void refuse_option(const std::string& name, const Json& got, const std::string& expected) {
  fail(Exit::usage, "%s: got %s, expected %s", name.c_str(), escaped(json_text(got)).c_str(), expected.c_str());
}

std::int64_t integer_option(const std::string& name, const Json& value, std::int64_t low, std::int64_t high) {
  const std::optional<std::int64_t> number = json_integer(value);
  if (number.has_value() && *number >= low && *number <= high) return *number;
  refuse_option(name, value,
                high == INT64_MAX ? format("an integer of at least %lld", static_cast<long long>(low))
                                  : format("an integer from %lld to %lld", static_cast<long long>(low),
                                           static_cast<long long>(high)));
}

double number_option(const std::string& name, const Json& value, double low, double high) {
  if (value.is_number()) {
    const double number = value.get<double>();  // infinite if it is too large
    if (number >= low && number <= high) return number;
  }
  const bool limited = high < std::numeric_limits<double>::max();
  refuse_option(name, value,
                limited ? format("a number from %g to %g", low, high) : format("a number of at least %g", low));
}

bool bool_option(const std::string& name, const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  refuse_option(name, value, "true or false");
}

}  // namespace weft
