// What a client has not taken yet of what a connection sends.
//
// Counts the bytes, also among those of all connections, and says when they are too many: of a whole answer, which then
// is another one, and of a stream, whose client is then cut off. Knows no socket. Used on the thread of the
// connections.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/serve/http.h"

namespace weft {

class SendQueue {
 public:
  // `unsent_bytes`: of all connections.
  SendQueue(const HttpLimits& limits, std::atomic<std::size_t>& unsent_bytes)
      : limits_(limits), unsent_bytes_(unsent_bytes) {}
  ~SendQueue() { release(); }
  SendQueue(const SendQueue&) = delete;
  SendQueue& operator=(const SendQueue&) = delete;

  void push(std::string piece) {
    const std::size_t bytes = piece.size();
    if (bytes == 0) return;
    pieces_.push_back(std::move(piece));
    held_ += bytes;
    unsent_bytes_ += bytes;
  }
  bool empty() const { return pieces_.empty(); }
  // The next bytes, as pieces in memory.
  template <typename Buffer>
  std::vector<Buffer> buffers() const {
    std::vector<Buffer> buffers;
    for (const std::string& piece : pieces_) {
      if (buffers.size() == kBuffersAtOnce) break;
      buffers.emplace_back(piece.data(), piece.size());
    }
    buffers.front() += front_taken_;
    return buffers;
  }
  // The client has taken them.
  void take(std::size_t bytes) {
    held_ -= bytes;
    unsent_bytes_ -= bytes;
    taken_ += bytes;
    front_taken_ += bytes;
    while (!pieces_.empty() && front_taken_ >= pieces_.front().size()) {
      front_taken_ -= pieces_.front().size();
      pieces_.pop_front();
    }
  }
  std::size_t taken() const { return taken_; }  // ever

  // Whether an answer of `bytes` may follow.
  bool has_room(std::size_t bytes) const {
    return bytes <= kSmallBytes || unsent_bytes_ + bytes <= limits_.all_unsent_bytes;
  }
  // Whether the client does not keep up with a stream, of which `bytes` are to follow.
  bool falls_behind(std::size_t bytes) {
    if (held_ + bytes > limits_.all_unsent_bytes / 4) return true;
    if (held_ + bytes > kSmallBytes && unsent_bytes_ + bytes > limits_.all_unsent_bytes) return true;
    if (held_ <= limits_.backlog_bytes) {
      stall_.reset();
      return false;
    }
    const auto now = std::chrono::steady_clock::now();
    if (stall_ && now < stall_->until) return false;
    const bool stalls = stall_ && taken_ - stall_->taken < limits_.backlog_bytes;
    stall_ = {taken_, now + duration_of(limits_.stall_seconds)};
    return stalls;
  }
  // Nothing is sent any more: the bytes count no longer. They stay where they are, for a write that is pending.
  void release() { unsent_bytes_ -= std::exchange(held_, 0); }

 private:
  static constexpr std::size_t kSmallBytes = 64 << 10;  // of an answer that passes whatever waits for clients
  static constexpr std::size_t kBuffersAtOnce = 64;     // pieces in one write
  // While more than backlog_bytes are here: since when, in bytes taken, and until when the client has to take as many.
  struct Stall {
    std::size_t taken;
    std::chrono::steady_clock::time_point until;
  };

  const HttpLimits& limits_;
  std::atomic<std::size_t>& unsent_bytes_;
  std::deque<std::string> pieces_;
  std::size_t held_ = 0, taken_ = 0;
  std::size_t front_taken_ = 0;  // bytes of pieces_.front()
  std::optional<Stall> stall_;
};

}  // namespace weft
