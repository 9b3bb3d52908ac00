#include "llmc/serve/request_target.h"

#include <algorithm>
#include <cctype>

namespace weft {

namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

std::optional<std::string> percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    if (text.size() - i < 3) return std::nullopt;
    const int high = hex_digit(text[i + 1]), low = hex_digit(text[i + 2]);
    if (high < 0 || low < 0) return std::nullopt;
    out += static_cast<char>(high << 4 | low);
    i += 2;
  }
  return out;
}

// "http://" or "https://" in any letters; their length, otherwise 0.
std::size_t scheme_length(std::string_view text) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    const bool same = text.size() >= scheme.size() &&
                      std::equal(scheme.begin(), scheme.end(), text.begin(),
                                 [](char a, char b) { return a == std::tolower(static_cast<unsigned char>(b)); });
    if (same) return scheme.size();
  }
  return 0;
}

}  // namespace

bool is_host(std::string_view text) {
  std::string_view name = text, port;
  const std::size_t bracket = text.rfind(']'), colon = text.rfind(':');
  if (colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket)) {
    name = text.substr(0, colon);
    port = text.substr(colon + 1);
  }
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (port.size() > 5 || !std::all_of(port.begin(), port.end(), is_digit)) return false;
  if (name.starts_with('[')) {  // an address of IPv6, or one that is still to come
    name.remove_prefix(1);
    if (!name.ends_with(']')) return false;
    name.remove_suffix(1);
    return !name.empty() && name.find_first_of("[]/?#@ ") == std::string_view::npos;
  }
  if (name.empty()) return text.empty();
  return std::all_of(name.begin(), name.end(), [](char c) {
    constexpr std::string_view kOthers = "-._~!$&'()*+,;=%";
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || kOthers.find(c) != std::string_view::npos;
  });
}

std::optional<RequestTarget> parse_request_target(std::string_view method, std::string_view target) {
  RequestTarget parsed;
  if (method == "CONNECT") {  // the authority form, and no other
    if (target.empty() || target.find(':') == std::string_view::npos || !is_host(target)) return std::nullopt;
    parsed.path = target;
    return parsed;
  }
  if (target == "*") {
    if (method != "OPTIONS") return std::nullopt;
    parsed.path = target;
    return parsed;
  }
  if (const std::size_t scheme = scheme_length(target); scheme > 0) {
    target.remove_prefix(scheme);
    const std::size_t end = std::min(target.find_first_of("/?#"), target.size());
    parsed.authority = target.substr(0, end);
    if (parsed.authority->empty() || !is_host(*parsed.authority)) return std::nullopt;  // no names of users either
    target.remove_prefix(end);
    if (target.empty() && method == "OPTIONS") {  // RFC 9112, 3.2.4: how a proxy passes "*" on
      parsed.path.push_back('*');
      return parsed;
    }
  } else if (!target.starts_with('/')) {
    return std::nullopt;
  }
  if (target.find('#') != std::string_view::npos) return std::nullopt;
  std::optional<std::string> path = percent_decoded(target.substr(0, target.find('?')));
  if (!path) return std::nullopt;
  parsed.path = path->empty() ? "/" : *path;
  return parsed;
}

}  // namespace weft
