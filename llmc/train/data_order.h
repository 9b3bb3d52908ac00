// The order in which a run sees its windows: in each epoch another permutation of all of them. It is computed, not stored,
// so that a corpus of any size costs no memory and a resumed run needs only a position.
#pragma once

#include <cstdint>

namespace weft {

// A keyed bijection of [0, count): a Feistel network (Luby and Rackoff, 1988) over the smallest even number
// of bits that holds count, with Philox as its round function, applied again until the value is below count
// (cycle walking: Black and Rogaway, 2002).
class DataOrder {
 public:
  DataOrder(std::uint64_t count, std::uint64_t seed);  // count > 0

  // The window at `position` of the run: epoch = position / count, and within an epoch every window occurs
  // once.
  std::uint64_t window_at(std::uint64_t position) const;
  std::uint64_t count() const { return count_; }

 private:
  std::uint64_t encrypt(std::uint64_t value, std::uint64_t epoch) const;

  std::uint64_t count_;
  std::uint64_t seed_;
  int half_bits_;
};

}  // namespace weft
