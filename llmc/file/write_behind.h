// A thread that writes to a file what another one has made: the pieces of a file are made and hashed while the pieces
// before them are on their way to the disk.
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

// Belongs to one thread that makes pieces; the file is the writing thread's from the first write() to the end of drain().
// An error of the file is thrown by the call that comes next. Where no thread is to be had write() writes.
class WriteBehind {
 public:
  static constexpr std::size_t kPiece = 1 << 20;  // at most so many bytes at once: one stays in the cache of a core

  explicit WriteBehind(AtomicFile& file);
  ~WriteBehind();  // what was not drained is given up
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  // Room for the next piece, kPiece bytes; waits until the thread is done with what lay there.
  std::byte* buffer();
  // Appends bytes that lie in the last buffer(), or anywhere where they stay as they are until drain().
  void write(const void* data, std::size_t bytes);
  // Waits until all of it is written.
  void drain();

 private:
  struct Piece {
    const void* data;
    std::size_t bytes;
  };
  static constexpr std::size_t kBuffers = 8;

  void run();
  void rethrow();  // with the lock held

  AtomicFile& file_;
  const std::unique_ptr<std::byte[]> buffers_;
  std::size_t next_buffer_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> queue_;  // its front is being written
  bool closed_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace weft
