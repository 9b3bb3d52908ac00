// Reads the values of generation options from JSON. A value of the wrong type or out of range is Exit::usage: "<name>: got X,
// expected Y".
#pragma once

#include <cstdint>
#include <string>

#include "llmc/base/json_fwd.h"

namespace weft {

[[noreturn]] void refuse_option(const std::string& name, const Json& got, const std::string& expected);

// In [low, high]; INT64_MAX: no limit.
std::int64_t integer_option(const std::string& name, const Json& value, std::int64_t low, std::int64_t high);
// In [low, high]; the greatest double: no limit.
double number_option(const std::string& name, const Json& value, double low, double high);
bool bool_option(const std::string& name, const Json& value);

}  // namespace weft
