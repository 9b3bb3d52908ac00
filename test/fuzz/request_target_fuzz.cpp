// The target of an HTTP request: the method, a zero byte, the target.
#include <algorithm>

#include "llmc/serve/request_target.h"
#include "test/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(text.find('\0'), text.size());
  const std::string_view method = text.substr(0, end), target = text.substr(std::min(end + 1, text.size()));
  is_host(target);
  const auto parsed = parse_request_target(method, target);
  if (!parsed) return 0;
  FUZZ_CHECK(!parsed->path.empty() && parsed->path.size() <= std::max<std::size_t>(1, target.size()));
  FUZZ_CHECK(method == "CONNECT" || parsed->path == "*" || parsed->path.front() == '/');
  if (parsed->authority) FUZZ_CHECK(!parsed->authority->empty() && is_host(*parsed->authority));
  return 0;
}
