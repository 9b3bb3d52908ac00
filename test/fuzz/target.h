// What every fuzz target shares: its inputs as a stream of small values, and the rule of what may be thrown.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/base/error.h"

namespace weft::fuzz {

// Takes an input apart from its front. Past the end everything is zero or empty, so that every input means something.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}

  template <typename Number>
  Number take() {
    Number value{};
    const std::size_t bytes = std::min(sizeof value, rest_.size());
    if (bytes > 0) std::memcpy(&value, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    return value;
  }
  std::string_view take_text(std::size_t bytes) {
    const auto taken = rest_.first(std::min(bytes, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::string_view take_rest() { return take_text(rest_.size()); }
  bool empty() const { return rest_.empty(); }

 private:
  std::span<const std::uint8_t> rest_;
};

// The lines of a text, as the arguments of a command: none holds a NUL.
inline std::vector<std::string> lines(std::string_view text) {
  std::vector<std::string> all;
  for (std::size_t begin = 0; begin <= text.size() && all.size() < 64;) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    all.emplace_back(line.substr(0, line.find('\0')));
    begin = end + 1;
  }
  return all;
}

// A broken promise: libFuzzer reports the abort with the input that led here.
#define FUZZ_CHECK(condition)                                                        \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

// Runs what reads the input. An Error is an answer if its code is among those that a bad input may have and its message
// is one printable line; Exit::internal (a bug, by its definition) and every other exception end the process.
template <typename Read>
bool accepts(Read&& read) {
  try {
    std::forward<Read>(read)();
    return true;
  } catch (const Error& error) {
    FUZZ_CHECK(error.code() == Exit::bad_file || error.code() == Exit::usage);
    const std::string_view message = error.what();
    const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; };
    FUZZ_CHECK(!message.empty() && std::none_of(message.begin(), message.end(), control));
    return false;
  }
}

}  // namespace weft::fuzz
