// Threads meet under one mutex. A call goes through three states: the ranks come, each with the addresses of its own
// memory; when all are there, each copies what it is to get out of the memory of the others; when all have copied, they go,
// and the memory is their own again.
#include "llmc/comm/thread_ranks.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "llmc/base/signals.h"
#include "llmc/comm/rank_errors.h"

namespace weft {

namespace {

// What one rank has called.
struct Call {
  const char* name = "";
  std::vector<Range> parts;
  std::int64_t bytes = 0;
  int root = 0;
  const void* values = nullptr;  // of this rank

  bool same_as(const Call& other) const {
    return std::strcmp(name, other.name) == 0 && parts == other.parts && bytes == other.bytes && root == other.root;
  }
};

class Meeting {
 public:
  Meeting(int ranks, double time_limit_s)
      : time_limit_s_(time_limit_s),
        calls_(static_cast<std::size_t>(ranks)),
        states_(calls_.size(), State::elsewhere) {}

  std::size_t ranks() const { return calls_.size(); }

  // `copy` sees the calls of all ranks, and their memory as it was when they came. No rank returns, with a result or an
  // error, while another one may still read its memory.
  void meet(int rank, Call call, const std::function<void(std::span<const Call>)>& copy) {
    State& mine = states_[static_cast<std::size_t>(rank)];
    std::unique_lock<std::mutex> lock(mutex_);
    check();
    const char* const name = call.name;
    calls_[static_cast<std::size_t>(rank)] = std::move(call);
    mine = State::waiting;
    if (all(State::waiting)) {
      compare();
      set_all(ended_ ? State::elsewhere : State::copying);
    } else {
      wait_for_all(lock, name, mine);
    }
    if (mine != State::copying) throw *ended_;
    lock.unlock();
    copy(calls_);
    lock.lock();
    mine = State::copied;
    if (all(State::copied)) set_all(State::elsewhere);
    changed_.notify_all();
    // Copying waits for nothing, so this wait needs no limit.
    changed_.wait(lock, [&] { return mine == State::elsewhere || (ended_ && !any(State::copying)); });
    if (mine == State::elsewhere) return;  // all have copied, whatever has happened since
    mine = State::elsewhere;
    throw *ended_;
  }

  void abort(const Error& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    end(error);
  }
  // Both at once: who hears of it in one of them cannot end the other one for a reason that follows from it.
  static void abort(Meeting& one, Meeting& other, const Error& error) {
    const std::scoped_lock lock(one.mutex_, other.mutex_);
    one.end(error);
    other.end(error);
  }
  void require_going_on() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) throw *ended_;
  }
  // The thread of `rank` ends: nobody is to wait for it.
  void leave(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    states_[static_cast<std::size_t>(rank)] = State::left;
    left_ = std::min(left_, rank);
    if (any(State::waiting)) end(ended_rank(left_));
  }

 private:
  enum class State { elsewhere, waiting, copying, copied, left };
  static constexpr int kNobody = 1 << 30;

  bool all(State state) const { return std::count(states_.begin(), states_.end(), state) == std::ssize(states_); }
  bool any(State state) const { return std::find(states_.begin(), states_.end(), state) != states_.end(); }
  void set_all(State state) {
    std::fill(states_.begin(), states_.end(), state);
    changed_.notify_all();
  }
  void end(const Error& error) {
    if (!ended_) ended_ = error;
    changed_.notify_all();
  }
  void check() {
    if (!ended_ && left_ != kNobody) end(ended_rank(left_));
    if (ended_) throw *ended_;
  }
  void compare() {
    for (std::size_t r = 1; r < ranks(); ++r) {
      if (calls_[r].same_as(calls_[0])) continue;
      const bool same_name = std::strcmp(calls_[r].name, calls_[0].name) == 0;
      return end(different_calls(calls_[0].name, static_cast<int>(r), calls_[r].name, same_name));
    }
  }
  void wait_for_all(std::unique_lock<std::mutex>& lock, const char* name, State& mine) {
    const auto limit = std::chrono::duration<double>(time_limit_s_);
    const auto over = [&] { return mine != State::waiting || ended_.has_value(); };
    if (!changed_.wait_for(lock, limit, over)) {
      std::vector<int> late;
      for (std::size_t r = 0; r < ranks(); ++r) {
        if (states_[r] != State::waiting) late.push_back(static_cast<int>(r));
      }
      end(late_ranks(late, name, time_limit_s_));
    }
    if (mine == State::waiting) mine = State::elsewhere;
  }

  const double time_limit_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;  // of each rank; written under the mutex, read by the others while all are copying
  std::vector<State> states_;
  std::optional<Error> ended_;
  int left_ = kNobody;  // the lowest rank whose thread has ended
};

Error error_of_rank(int rank, const Error& error) {
  return Error(error.code(), format("rank %d: %s", rank, error.what()));
}

class ThreadRank final : public Communicator {
 public:
  ThreadRank(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meeting_.ranks()); }

  void barrier() override {
    meeting_.meet(rank_, {"barrier()", {}, 0, 0, nullptr}, [](std::span<const Call>) {});
  }

  void exchange(const float* values, std::span<const Range> parts, float* received) override {
    meeting_.meet(rank_, {"exchange()", {parts.begin(), parts.end()}, 0, 0, values}, [&](std::span<const Call> calls) {
      const Range mine = parts[static_cast<std::size_t>(rank_)];
      for (const Call& call : calls) {
        const float* const theirs = static_cast<const float*>(call.values);
        received = std::copy(theirs + mine.begin, theirs + mine.end, received);
      }
    });
  }

  void gather_bytes(std::byte* values, std::span<const Range> parts) override {
    meeting_.meet(rank_, {"gather()", {parts.begin(), parts.end()}, 0, 0, values}, [&](std::span<const Call> calls) {
      for (std::size_t r = 0; r < calls.size(); ++r) {
        const std::byte* const theirs = static_cast<const std::byte*>(calls[r].values);
        if (theirs != values) std::copy(theirs + parts[r].begin, theirs + parts[r].end, values + parts[r].begin);
      }
    });
  }

  void broadcast_bytes(std::byte* values, std::int64_t bytes, int root) override {
    meeting_.meet(rank_, {"broadcast()", {}, bytes, root, values}, [&](std::span<const Call> calls) {
      const std::byte* const theirs = static_cast<const std::byte*>(calls[static_cast<std::size_t>(root)].values);
      if (rank_ != root) std::copy(theirs, theirs + bytes, values);
    });
  }

  void check() override { meeting_.require_going_on(); }

  void abort(const Error& error) noexcept override {
    try {
      meeting_.abort(error_of_rank(rank_, error));
    } catch (...) {  // no memory for the reason: leave() ends the others without it
    }
  }

 private:
  Meeting& meeting_;
  const int rank_;
};

}  // namespace

void run_thread_ranks(int ranks, double time_limit_s, const std::function<void(Communicator&)>& work) {
  run_thread_ranks(ranks, time_limit_s, [&](Communicator& communicator, Communicator&) { work(communicator); });
}

void run_thread_ranks(int ranks, double time_limit_s,
                      const std::function<void(Communicator&, Communicator& beside)>& work) {
  Meeting meeting(ranks, time_limit_s), meeting_beside(ranks, time_limit_s);
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    ThreadRank communicator(meeting, rank), beside(meeting_beside, rank);
    const auto abort = [&](const Error& error) noexcept {
      try {
        Meeting::abort(meeting, meeting_beside, error_of_rank(rank, error));
      } catch (...) {  // no memory for the reason: leave() ends the others without it
      }
    };
    const auto keep = [&] {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!first) first = std::current_exception();
    };
    try {
      work(communicator, beside);
    } catch (const Error& error) {
      keep();
      abort(error);
    } catch (...) {
      keep();
      abort(Error(Exit::internal, "ended by an exception"));
    }
    meeting.leave(rank);
    meeting_beside.leave(rank);
  };
  std::vector<std::jthread> threads;  // their destructors join: no exception leaves them running
  try {
    const SignalsElsewhere signals;
    threads.reserve(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  } catch (const std::exception& problem) {  // no memory, or no more threads for this user
    const Error error(Exit::environment,
                      format("rank %td: its thread cannot start: %s", std::ssize(threads), problem.what()));
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!first) first = std::make_exception_ptr(error);
    }
    Meeting::abort(meeting, meeting_beside, error);
  }
  for (std::jthread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace weft
