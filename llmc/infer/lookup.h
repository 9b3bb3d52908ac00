// Drafts without a model (prompt lookup): the ids that end a text are looked for earlier in it, prompt and output
// alike, and what came after them there is the draft. Pays where a text repeats itself or its prompt.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace weft {

class Lookup {
 public:
  // Ids that must be the same before a draft token is made, and the most that are compared.
  static constexpr std::int64_t kFewestSame = 2, kMostSame = 16;
  // The number of earlier places that are compared, the latest first: it bounds the time of a text that repeats one
  // pair.
  static constexpr int kMostPlaces = 64;

  // At most `count` draft tokens to follow `ids`, copied from the earlier place with the most equal ids before it; of
  // several such places the latest. A draft token that reaches the end of `ids` continues with the draft tokens themselves, as
  // in a text that repeats itself. Empty if there is no such place. `ids`: those of the previous call and what was
  // appended to them. Valid until the next call.
  std::span<const std::int32_t> find(std::span<const std::int32_t> ids, std::int64_t count);

 private:
  // last_: for each pair of neighbouring ids, where it ended last. previous_[i]: where the pair that ends at i ended
  // before; -1: nowhere.
  std::unordered_map<std::uint64_t, std::int64_t> last_;
  std::vector<std::int64_t> previous_;
  std::vector<std::int32_t> found_;
};

}  // namespace weft
