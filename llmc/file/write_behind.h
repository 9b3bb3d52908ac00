// Writes a file on a thread of its own: while one piece goes to the disk, the caller computes and hashes the next one.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "llmc/base/file.h"

namespace weft {

// One thread calls all functions. From the first write() until drain() returns, only the writing thread may use the file.
// An error of the file is thrown by the next call. If no thread can be started, write() writes directly.
class WriteBehind {
 public:
  // Most bytes of a piece: small enough to stay in a core's cache from when it is computed until it is hashed.
  static constexpr std::size_t kPiece = 1 << 20;

  explicit WriteBehind(AtomicFile& file);
  ~WriteBehind();  // finishes the piece that is being written and drops the others: drain() first
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  // A buffer of kPiece bytes for the next piece; waits until the buffer's previous piece is written.
  std::byte* buffer();
  // Appends `bytes` bytes of `data`: the buffer that buffer() returned last, or memory that does not change until drain()
  // returns.
  void write(const void* data, std::size_t bytes);
  // Waits until everything is written.
  void drain();

 private:
  struct Piece {
    const void* data;
    std::size_t bytes;
  };
  static constexpr std::size_t kBuffers = 8;

  void run();
  void rethrow();  // throws error_, if there is one; call it with mutex_ locked

  AtomicFile& file_;
  const std::unique_ptr<std::byte[]> buffers_;
  std::size_t next_buffer_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> queue_;  // the front one is being written
  bool closed_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace weft
