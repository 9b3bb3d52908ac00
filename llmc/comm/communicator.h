// Communication between the ranks of a run. In every call a rank passes memory of its own process. Values move as bytes
// and are never added on the way, so that no sum depends on how the ranks are connected: who wants one adds the pieces
// in the order of the ranks.
//
// All ranks make the same calls in the same order, with the same sizes. A call that cannot be completed throws Error on
// every rank that is in it, and so does each call after it:
//   - a rank did not come within the time limit, or its process has died: Exit::environment, which names it;
//   - a rank has called abort(): with the code that it gave, and "rank R: " before its reason;
//   - the ranks are in different calls, or their sizes differ: Exit::internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/error_from.h"
#include "llmc/base/range.h"

namespace weft {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Returns when all ranks have called it.
  virtual void barrier() = 0;
  // Rank d gets the elements parts[d] of every rank's `values`: received [size, parts[rank].size()] has those of rank s in
  // row s. One range for each rank; they may leave elements out, and be empty. `received` is apart from `values`.
  virtual void exchange(const float* values, std::span<const Range> parts, float* received) = 0;
  // Rank r has the bytes parts[r] of `values`; afterwards every rank has all parts. What lies between them stays. The
  // parts do not overlap.
  virtual void gather_bytes(std::byte* values, std::span<const Range> parts) = 0;
  // `bytes` bytes of rank `root`, on all ranks.
  virtual void broadcast_bytes(std::byte* values, std::int64_t bytes, int root) = 0;
  // Ends the communication, from any thread: each rank's present and future calls throw. The first abort is the one
  // that they throw.
  virtual void abort(const Error& error) noexcept = 0;
  // Throws if the communication has ended, and returns at once if not: for a rank that waits for the others in another
  // way, such as NCCL. Only on the thread that makes the calls.
  virtual void check() = 0;

  // Seconds after which a rank that is long at work has to give a sign, so that the others go on waiting for it (Heartbeat);
  // 0: nobody asks for one.
  virtual double sign_interval_s() const { return 0; }
  // From any thread.
  virtual void beat() noexcept {}

  // Elements parts[r] of rank r, on all ranks.
  template <typename T>
  void gather(T* values, std::span<const Range> parts) {
    std::vector<Range> bytes;
    for (const Range& part : parts) bytes.push_back({part.begin * kBytes<T>, part.end * kBytes<T>});
    gather_bytes(reinterpret_cast<std::byte*>(values), bytes);
  }
  // One value of each rank, in the order of the ranks.
  template <typename T>
  std::vector<T> gather(const T& mine) {
    std::vector<T> all(static_cast<std::size_t>(size()));
    std::vector<Range> parts;
    for (int r = 0; r < size(); ++r) parts.push_back({r, r + 1});
    all[static_cast<std::size_t>(rank())] = mine;
    gather(all.data(), parts);
    return all;
  }
  template <typename T>
  T broadcast(T value, int root = 0) {
    broadcast_bytes(reinterpret_cast<std::byte*>(&value), kBytes<T>, root);
    return value;
  }
  std::string broadcast_text(std::string text, int root = 0);

 private:
  template <typename T>
  static constexpr std::int64_t kBytes = static_cast<std::int64_t>(sizeof(T));
};

// A rank alone: every call returns at once.
class SingleRank final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void barrier() override {}
  void exchange(const float* values, std::span<const Range> parts, float* received) override;
  void gather_bytes(std::byte*, std::span<const Range>) override {}
  void broadcast_bytes(std::byte*, std::int64_t, int) override {}
  void abort(const Error&) noexcept override {}
  void check() override {}
};

// The largest of all ranks' numbers. Of flags: whether any rank has set it.
std::int64_t largest(Communicator& ranks, std::int64_t mine);

// Throws on every rank if one has an error: on that rank its own, on the others one with its code and "rank R: " before
// its reason. Of several errors the others throw that of the lowest rank. So no rank waits for one that has given up,
// and afterwards all ranks are at the same place between two calls.
void fail_together(Communicator& ranks, const std::optional<Error>& mine);

// Each rank calls work(), which makes no call between ranks. If it throws on any rank, all fail together.
template <typename Work>
void do_together(Communicator& ranks, const Work& work) {
  fail_together(ranks, error_from(work));
}

// `count` pieces of work over the ranks: rank r does those of range r. Their sizes differ by one at most.
std::vector<Range> shares(std::int64_t count, int ranks);

}  // namespace weft
