// The name of a request: in its answer (X-Request-Id), in the JSON of a text, and in the log.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// `given`, the client's own, if it is 1 to 128 letters, digits and characters of "-_.:/+=@": it is written into headers, JSON
// and the log as it is. Otherwise a new one of 32 hexadecimal digits, which no other request has. It is no secret.
std::string request_id(std::string_view given);
// 128 random bits in hexadecimal that nobody can guess, for nonces.
std::string random_word();

}  // namespace weft
