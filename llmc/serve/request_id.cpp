#include "llmc/serve/request_id.h"

#include <algorithm>
#include <random>

#include "llmc/base/error.h"

namespace weft {

namespace {

constexpr std::size_t kMaxIdBytes = 128;

bool is_id_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("-_.:/+=@").find(c) != std::string_view::npos;
}

// The bits of std::random_device take as long as all else of a small request.
std::string new_id() {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  const unsigned long long high = random(), low = random();
  return format("%016llx%016llx", high, low);
}

}  // namespace

std::string request_id(std::string_view given) {
  const bool sane = !given.empty() && given.size() <= kMaxIdBytes && std::ranges::all_of(given, is_id_character);
  return sane ? std::string(given) : new_id();
}

std::string random_word() {
  std::random_device random;
  return format("%08x%08x%08x%08x", random(), random(), random(), random());
}

}  // namespace weft
