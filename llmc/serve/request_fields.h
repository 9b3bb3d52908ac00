// Fields of requests that other servers of this API know and this one does not.
#pragma once

#include <cstdint>
#include <string>

#include "llmc/base/json_fwd.h"

namespace weft {

// What is wrong with the field `name` of a request for completions, none of those that this server has, with a `value` other
// than null. Empty: nothing, because it changes neither the text nor what the client gets of it. All that is not known to be
// so is wrong: a client that asks for something and does not get it has to be told.
std::string foreign_field_error(const std::string& name, const Json& value);

}  // namespace weft
