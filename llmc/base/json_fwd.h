// Json by name alone, for headers whose functions take or return one. Nothing costs a compiler more than llmc/base/json.h,
// and half of what includes such a header never looks into a Json.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace weft {

using Json = nlohmann::json;

}  // namespace weft
