#include "llmc/train/data_order.h"

#include <algorithm>
#include <bit>

#include "llmc/base/error.h"
#include "llmc/base/philox.h"

namespace weft {

namespace {

// Theory asks for at least four rounds for a strong pseudo-random permutation; halves of few bits mix slowly, so there are
// eight, which still cost little beside reading the window.
constexpr std::uint64_t kRounds = 8;

std::uint64_t round_function(std::uint64_t half, std::uint64_t round, std::uint64_t epoch, std::uint64_t seed) {
  // One Philox key per epoch: mixing the epoch into the seed leaves both counter words for the round's input.
  const PhiloxWords key = philox(seed, epoch, static_cast<std::uint64_t>(RandomStream::data_order));
  const std::uint64_t epoch_seed = static_cast<std::uint64_t>(key.word[1]) << 32 | key.word[0];
  const PhiloxWords words = philox(epoch_seed, half, round);
  return static_cast<std::uint64_t>(words.word[1]) << 32 | words.word[0];
}

}  // namespace

DataOrder::DataOrder(std::uint64_t count, std::uint64_t seed)
    : count_(count), seed_(seed), half_bits_(std::max(1, (static_cast<int>(std::bit_width(count - 1)) + 1) / 2)) {
  if (count == 0) fail(Exit::internal, "a data order needs at least one window");
}

std::uint64_t DataOrder::encrypt(std::uint64_t value, std::uint64_t epoch) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_, right = value & mask;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    const std::uint64_t mixed = left ^ (round_function(right, round, epoch, seed_) & mask);
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

std::uint64_t DataOrder::window_at(std::uint64_t position) const {
  const std::uint64_t epoch = position / count_;
  std::uint64_t value = position % count_;
  do value = encrypt(value, epoch);
  while (value >= count_);  // the network permutes at most 4 count_ values: at most four passes on average
  return value;
}

}  // namespace weft
