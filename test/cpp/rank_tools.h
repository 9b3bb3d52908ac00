// Ranks of each kind inside one process.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "llmc/comm/socket_ranks.h"
#include "llmc/comm/thread_ranks.h"

namespace weft {

enum class Ranks { threads, sockets };

// One thread for each of `ranks` ranks that meet over TCP; otherwise as run_thread_ranks().
inline void run_socket_ranks(int ranks, double time_limit_s, const std::function<void(Communicator&)>& work) {
  Socket listener = listen_at("127.0.0.1", 0);
  MeetingPoint point{"127.0.0.1", port_of(listener), listener.release()};
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    const auto keep = [&] {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!first) first = std::current_exception();
    };
    std::unique_ptr<Communicator> communicator;
    try {
      communicator = rendezvous({rank, ranks, 42, "test"}, point, time_limit_s);
      work(*communicator);
    } catch (const Error& error) {
      keep();
      if (communicator) communicator->abort(error);
    } catch (...) {
      keep();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

inline void run_ranks(Ranks kind, int ranks, double time_limit_s, const std::function<void(Communicator&)>& work) {
  if (kind == Ranks::threads) return run_thread_ranks(ranks, time_limit_s, work);
  run_socket_ranks(ranks, time_limit_s, work);
}

}  // namespace weft
