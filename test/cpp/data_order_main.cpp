// data_order COUNT SEED BEGIN NUMBER: prints the windows at positions BEGIN to BEGIN + NUMBER - 1 of a run over COUNT
// windows, one a line. Lets a script compare its data order with weft's.
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "llmc/base/error.h"
#include "llmc/train/data_order.h"

namespace weft {
namespace {

std::uint64_t number(const char* text) {
  std::uint64_t value = 0;
  const char* end = text + std::strlen(text);
  const std::from_chars_result result = std::from_chars(text, end, value);
  if (result.ec != std::errc() || result.ptr != end) {
    fail(Exit::usage, "got %s, expected a number", escaped(text).c_str());
  }
  return value;
}

void run(const char* const* arguments) {
  const DataOrder order(number(arguments[0]), number(arguments[1]));
  const std::uint64_t begin = number(arguments[2]), count = number(arguments[3]);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::printf("%llu\n", static_cast<unsigned long long>(order.window_at(begin + i)));
  }
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  try {
    if (argc != 5) weft::fail(weft::Exit::usage, "usage: data_order COUNT SEED BEGIN NUMBER");
    weft::run(argv + 1);
    return 0;
  } catch (const weft::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.code());
  }
}
