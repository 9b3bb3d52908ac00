// Names that std::hash of libstdc++ (MurmurHash64A with a fixed seed) maps to one value, as an attacker would make them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace weft {

// 2^bits printable names of 16 * bits bytes. A. Joux, "Multicollisions in Iterated Hash Functions", CRYPTO 2004: for each
// 16 bytes two choices that lead from one state to one state.
inline std::vector<std::string> colliding_names(int bits) {
  constexpr std::uint64_t kFactor = 0xC6A4A7935BD1E995u;
  std::uint64_t inverse = kFactor;  // modulo 2^64, by Newton's iteration
  for (int i = 0; i < 6; ++i) inverse *= 2 - kFactor * inverse;
  const auto mix = [](std::uint64_t word) {
    word *= kFactor;
    return (word ^ word >> 47) * kFactor;
  };
  const auto unmix = [inverse](std::uint64_t word) {
    word *= inverse;
    return (word ^ word >> 47) * inverse;
  };
  std::mt19937 random(1);
  const auto block = [&] {
    std::uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | ('0' + random() % 75);  // to 'z'
    return word;
  };
  const auto printable = [](std::uint64_t word) {
    for (; word != 0; word >>= 8) {
      if ((word & 0xFF) < '#' || (word & 0xFF) > '~') return false;
    }
    return true;
  };
  const auto text = [](std::uint64_t first, std::uint64_t second) {
    std::string bytes(16, ' ');
    std::memcpy(bytes.data(), &first, 8);
    std::memcpy(bytes.data() + 8, &second, 8);
    return bytes;
  };
  std::uint64_t state = 0xC70F6907u ^ 16 * static_cast<std::uint64_t>(bits) * kFactor;
  std::vector<std::string> names = {""};
  for (int i = 0; i < bits; ++i) {
    const std::uint64_t one = block(), other = block();
    const std::uint64_t after_one = (state ^ mix(one)) * kFactor, after_other = (state ^ mix(other)) * kFactor;
    std::uint64_t one_end = 0, other_end = 0;
    do {
      one_end = block();
      other_end = unmix(after_one ^ after_other ^ mix(one_end));
    } while (other_end >> 56 == 0 || !printable(other_end));
    std::vector<std::string> longer;
    for (const std::string& name : names) {
      longer.push_back(name + text(one, one_end));
      longer.push_back(name + text(other, other_end));
    }
    names = std::move(longer);
    state = (after_one ^ mix(one_end)) * kFactor;
  }
  return names;
}

// `seconds_for(names)` takes for colliding names about as long as for others: with std::hash it would be thirty times that.
template <typename Seconds>
void expect_no_collisions(Seconds seconds_for) {
  const std::vector<std::string> colliding = colliding_names(14);
  std::vector<std::string> others = colliding;
  for (std::string& name : others) std::reverse(name.begin(), name.end());
  const double usual = seconds_for(others);
  EXPECT_LT(seconds_for(colliding), 5 * usual);
}

}  // namespace weft
