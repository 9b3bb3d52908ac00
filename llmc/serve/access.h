// What the header of a request must say: a host that is the server's, its key, and a body that can be read.
#pragma once

#include <string>
#include <vector>

#include "llmc/serve/http.h"

namespace weft {

struct AccessRules {
  std::string host;                        // of the address that the server listens at
  std::vector<std::string> allowed_hosts;  // further ones; if there are any, all others are refused
  bool loopback = false;                   // only its own machine can connect
  std::string api_key;                     // empty: none is asked for
};

// Throws RequestError: 403 for another host or the page of another site, 401 without the key. `open`: needs no key.
void check_access(const HttpRequest& request, const AccessRules& rules, bool open);
// Throws RequestError 415 unless the body is JSON, as it came.
void check_json_body(const HttpRequest& request);

// The names of --allowed-host in small letters. One that is no host, or has a port: Exit::usage.
std::vector<std::string> parse_allowed_hosts(const std::vector<std::string>& names);
// The key that requests must have: the content of `file` (--api-key-file) without white space around it, or of the
// environment variable WEFT_API_KEY. Empty: none. A key with other than printable ASCII characters, or an empty one:
// Exit::bad_file, of the variable Exit::usage.
std::string read_api_key(const std::string& file);
// Takes the same time for every `given` of one length.
bool same_key(const std::string& given, const std::string& expected);

}  // namespace weft
