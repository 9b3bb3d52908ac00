// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
// (SC 2011).
//
// The four words are a pure function of (key, counter): a random number is computed from its address, there is no state
// to draw it from. So the forward and the backward pass compute the same dropout mask without storing it, and the host
// and the device agree bit for bit.
#pragma once

#include <cstdint>

#include "llmc/base/host_device.h"

namespace weft {

struct PhiloxWords {
  std::uint32_t word[4];
};

// Ten rounds over the 128-bit counter (low, high) with the 64-bit key `seed`.
WEFT_HOST_DEVICE inline PhiloxWords philox(std::uint64_t seed, std::uint64_t counter_low, std::uint64_t counter_high) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter_low), c1 = static_cast<std::uint32_t>(counter_low >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(counter_high), c3 = static_cast<std::uint32_t>(counter_high >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(0xD2511F53u) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(0xCD9E8D57u) * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A float uniform in [0, 1) with 24 random bits.
WEFT_HOST_DEVICE inline float uniform01(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24f;
}

// What a random number is used for. It is part of the counter's high half, so two uses of one seed never share numbers.
enum class RandomStream : std::uint64_t {
  init = 1,
  data_order = 2,
  dropout = 3,
  sampling = 4,
  stochastic_rounding = 5,
  adapter_dropout = 6
};

}  // namespace weft
