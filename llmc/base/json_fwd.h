// Declares Json without its definition, for headers whose functions take or return one. llmc/base/json.h is the most
// expensive header to compile, and half of the files that include such a header never use a Json.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace weft {

using Json = nlohmann::json;

}  // namespace weft
