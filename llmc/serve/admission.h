// How much requests may have under way at once. Whoever asks for more is refused with 429, before anything is computed.
//
// Two limits hold for all requests together: completions, which are counted from their reservation to their end in the
// engine, and values of large answers, from their reservation until nobody has the answer. How the engine shares its
// places among those that it has is the scheduler's (llmc/infer/scheduler.h); here each request becomes a group of its
// own. Any thread may call.
#pragma once

#include <atomic>
#include <cstdint>

#include "llmc/base/error.h"
#include "llmc/serve/request_error.h"

namespace weft {

// What one request has of a limit. It is given back at its end, but for what was passed on.
class Reservation {
 public:
  explicit Reservation(std::atomic<std::int64_t>& taken) : taken_(taken) {}
  ~Reservation() { taken_ -= mine_; }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Returns how much all have with these.
  std::int64_t take(std::int64_t amount) {
    mine_ += amount;
    return taken_ += amount;
  }
  void pass_on() { --mine_; }  // one, to the engine: completion_ended() gives it back

 private:
  std::atomic<std::int64_t>& taken_;
  std::int64_t mine_ = 0;
};

class Admission {
 public:
  // `answer_values`: the most of one answer.
  explicit Admission(std::int64_t answer_values) : max_values_(kAnswersInMemory * answer_values) {}

  // Of nothing, as yet.
  Reservation of_completions() { return Reservation(completions_); }
  Reservation of_values() { return Reservation(values_); }
  // Adds to a reservation. 429: all have too much with it.
  void take_completions(Reservation& reservation, std::int64_t completions, std::int64_t most) const {
    if (reservation.take(completions) <= most) return;
    throw RequestError(429, format("%lld completions are under way: try again later", static_cast<long long>(most)), "",
                       "queue_full");
  }
  void take_values(Reservation& reservation, std::int64_t values) const {
    if (reservation.take(values > kSmallAnswer ? values : 0) <= max_values_) return;
    throw RequestError(429, "the answers under way are too large: try again later", "", "queue_full");
  }
  void completion_ended() { --completions_; }
  std::uint64_t new_group() { return ++last_group_; }  // EngineRequest::group of a request

  std::int64_t completions() const { return completions_; }
  std::int64_t values() const { return values_; }

 private:
  static constexpr std::int64_t kAnswersInMemory = 4;    // of the largest, under way at once
  static constexpr std::int64_t kSmallAnswer = 1 << 12;  // values of one that counts nothing of that

  const std::int64_t max_values_;
  std::atomic<std::int64_t> completions_{0}, values_{0};
  std::atomic<std::uint64_t> last_group_{0};
};

}  // namespace weft
