// Drafts without a model: what followed the same ids before (prompt lookup). The ids that end a text are looked for earlier in
// it, prompt and output alike, and what came after them there is the guess. Pays where a text repeats itself or its prompt.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace weft {

class Lookup {
 public:
  // Ids that must be the same before a guess is made, and the most that are compared.
  static constexpr std::int64_t kFewestSame = 2, kMostSame = 16;
  // Earlier places that are compared, the latest first: bounds the time of a text that repeats one pair.
  static constexpr int kMostPlaces = 64;

  // At most `count` guesses of what follows `ids`: of the places where the most ids before are the same, the latest one. A
  // guess that reaches the end of `ids` goes on with the guesses themselves, as in a text that repeats itself. Empty if there
  // is no such place. `ids` are those of the call before and what was appended. Valid until the next call.
  std::span<const std::int32_t> find(std::span<const std::int32_t> ids, std::int64_t count);

 private:
  // By pair of neighbours: where it ended last. previous_[i]: where the pair that ends at i ended before; -1: nowhere.
  std::unordered_map<std::uint64_t, std::int64_t> last_;
  std::vector<std::int64_t> previous_;
  std::vector<std::int32_t> found_;
};

}  // namespace weft
