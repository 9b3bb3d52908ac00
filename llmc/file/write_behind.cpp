#include "llmc/file/write_behind.h"

#include <algorithm>
#include <system_error>

#include "llmc/base/signals.h"

namespace weft {

// new, not make_unique, which would fill the buffers with zeros first.
WriteBehind::WriteBehind(AtomicFile& file) : file_(file), buffers_(new std::byte[kBuffers * kPiece]) {
  try {
    const SignalsElsewhere signals;
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {  // the user's limit of threads is reached: write() writes directly
  }
}

WriteBehind::~WriteBehind() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    if (queue_.size() > 1) queue_.resize(1);
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void WriteBehind::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Piece piece = queue_.front();
    if (!error_) {
      lock.unlock();
      std::exception_ptr error;
      try {
        file_.write(piece.data, piece.bytes);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      error_ = error;
    }
    queue_.pop_front();
    changed_.notify_all();
  }
}

void WriteBehind::rethrow() {
  if (error_) std::rethrow_exception(error_);
}

std::byte* WriteBehind::buffer() {
  std::byte* const next = buffers_.get() + next_buffer_ * kPiece;
  next_buffer_ = (next_buffer_ + 1) % kBuffers;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto in_use = [next](const Piece& piece) { return piece.data == next; };
  changed_.wait(lock, [&] { return std::none_of(queue_.begin(), queue_.end(), in_use); });
  rethrow();
  return next;
}

void WriteBehind::write(const void* data, std::size_t bytes) {
  if (!thread_.joinable()) return file_.write(data, bytes);
  std::unique_lock<std::mutex> lock(mutex_);
  // At most kBuffers pieces wait: a longer queue would only delay the report of a full disk.
  changed_.wait(lock, [this] { return queue_.size() < kBuffers; });
  rethrow();
  queue_.push_back({data, bytes});
  changed_.notify_all();
}

void WriteBehind::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty(); });
  rethrow();
}

}  // namespace weft
