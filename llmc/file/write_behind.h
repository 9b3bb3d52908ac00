// Writes a file on a second thread: while one piece goes to the disk, the thread that fills the file computes and hashes
// the next one.
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

// Used by one thread, which fills the file; the file itself is the writing thread's from the first write() to the end of
// drain(). An error of the file is thrown by the next call. Where no thread can be started write() writes by itself.
class WriteBehind {
 public:
  static constexpr std::size_t kPiece = 1
                                        << 20;  // most bytes of a piece: it stays in a core's cache until it is hashed

  explicit WriteBehind(AtomicFile& file);
  ~WriteBehind();  // pieces that drain() has not waited for are not written
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
