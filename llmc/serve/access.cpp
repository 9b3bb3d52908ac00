#include "llmc/serve/access.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string_view>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/serve/request_target.h"
#include "llmc/serve/text_request.h"

namespace weft {

namespace {

constexpr std::size_t kMaxKeyBytes = 4096;
constexpr const char* kKeyVariable = "WEFT_API_KEY";

// Host or Origin without scheme and port: "http://[::1]:8000" is "[::1]".
std::string_view host_of(std::string_view text) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (text.starts_with(scheme)) text.remove_prefix(scheme.size());
  }
  const std::size_t bracket = text.rfind(']');
  const std::size_t colon = text.rfind(':');
  if (colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket))
    text = text.substr(0, colon);
  return text;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

// Names of hosts, media types and encodings are the same in capital letters.
std::string lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace

void check_access(const HttpRequest& request, const AccessRules& rules, bool open) {
  // A page of another site can make a browser of this machine connect here: by a name of its own that leads to
  // 127.0.0.1 (DNS rebinding; Host tells), or openly (Origin tells).
  const std::string field = lower_case(request.host), address = lower_case(rules.host);
  const std::string_view host = host_of(field);
  const bool known = host.empty() || host == "localhost" || host == "[::1]" || host == "127.0.0.1" || host == address ||
                     host == "[" + address + "]" ||
                     std::ranges::find(rules.allowed_hosts, host) != rules.allowed_hosts.end();
  if (!known && !rules.allowed_hosts.empty()) {
    throw RequestError(403, format("Host: got %s, expected localhost or a host that --allowed-host names",
                                   escaped(request.host).c_str()));
  }
  if (!known && rules.loopback) {
    throw RequestError(403,
                       format("Host: got %s, expected localhost: this server is for its own machine. --allowed-host "
                              "names another host",
                              escaped(request.host).c_str()));
  }
  if (!request.origin.empty() && request.origin != "http://" + request.host &&
      request.origin != "https://" + request.host) {
    throw RequestError(
        403, format("Origin: got %s: pages of other sites may not use this server", escaped(request.origin).c_str()));
  }
  if (rules.api_key.empty() || open) return;
  constexpr std::string_view kScheme = "bearer ";
  const bool bearer = lower_case(request.authorization.substr(0, kScheme.size())) == kScheme;
  const std::string given(bearer ? trimmed(std::string_view(request.authorization).substr(kScheme.size()))
                                 : std::string_view());
  if (!same_key(given, rules.api_key)) {
    throw RequestError(401,
                       bearer ? "Authorization: not the key of this server"
                              : "Authorization: expected Bearer and the key of this server",
                       "", "invalid_api_key");
  }
}

void check_json_body(const HttpRequest& request) {
  if (!request.content_encoding.empty() && lower_case(request.content_encoding) != "identity") {
    throw RequestError(415, format("Content-Encoding: got %s, expected none: bodies are not decompressed",
                                   escaped(request.content_encoding).c_str()));
  }
  const std::string type(trimmed(lower_case(request.content_type.substr(0, request.content_type.find(';')))));
  if (!type.empty() && type != "application/json") {
    throw RequestError(415, format("Content-Type: got %s, expected application/json", escaped(type).c_str()));
  }
}

std::vector<std::string> parse_allowed_hosts(const std::vector<std::string>& names) {
  std::vector<std::string> hosts;
  for (const std::string& name : names) {
    hosts.push_back(lower_case(name));
    // "*" may be part of a name, but here it would be taken for one that stands for all.
    const bool plain = !name.empty() && is_host(name) && name.find('*') == std::string::npos;
    if (plain && host_of(hosts.back()) == hosts.back()) continue;
    fail(Exit::usage,
         "--allowed-host: got %s, expected the name of a host, as weft.example.org, without scheme and port",
         escaped(name).c_str());
  }
  return hosts;
}

std::string read_api_key(const std::string& file) {
  std::string key, source;
  Exit code = Exit::bad_file;
  if (!file.empty()) {
    source = escaped(file);
    key = trimmed(read_text_file(file, kMaxKeyBytes));
  } else if (const char* variable = std::getenv(kKeyVariable); variable != nullptr) {
    source = kKeyVariable;
    code = Exit::usage;
    key = trimmed(variable);
  } else {
    return "";
  }
  const bool printable = std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < '\x7F'; });
  if (key.empty() || !printable) {
    fail(code, "%s: expected a key of printable ASCII characters without spaces", source.c_str());
  }
  return key;
}

bool same_key(const std::string& given, const std::string& expected) {
  // No early end, and no branch on a character.
  volatile unsigned difference = given.size() == expected.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto other = expected.empty() ? 0u : static_cast<unsigned char>(expected[i % expected.size()]);
    difference = difference | (static_cast<unsigned char>(given[i]) ^ other);
  }
  return difference == 0 && !expected.empty();
}

}  // namespace weft
