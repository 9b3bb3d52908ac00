// XXH3-64 of a byte range or a stream. It detects accidental damage to files; it is no protection against an attacker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace weft {

std::uint64_t xxh3_64(const void* data, std::size_t bytes);
inline std::uint64_t xxh3_64(std::string_view text) {
  return xxh3_64(text.data(), text.size());
}
// A hash as files and messages write it: 16 hexadecimal digits.
std::string hash_text(std::uint64_t hash);

// The hash for tables whose keys come from outside, with a random seed for each process. std::hash is predictable: a
// file could hold a hundred thousand names that all collide, and filling the table would take minutes.
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
