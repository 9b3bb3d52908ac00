// XXH3-64 over a byte range or a stream: finds accidents in files, does not protect against an attacker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace weft {

std::uint64_t xxh3_64(const void* data, std::size_t bytes);
inline std::uint64_t xxh3_64(std::string_view text) {
  return xxh3_64(text.data(), text.size());
}

// For hash tables whose keys come from outside. Each process hashes with a seed of its own: of std::hash anybody can compute
// a hundred thousand names that all fall into one place, and a table of them takes minutes.
struct SeededHash {
  std::size_t operator()(std::string_view text) const;
  std::size_t operator()(std::uint64_t key) const;
};

class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  Xxh3Stream(const Xxh3Stream&) = delete;
  Xxh3Stream& operator=(const Xxh3Stream&) = delete;
  void reset();
  void update(const void* data, std::size_t bytes);
  std::uint64_t digest() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace weft
