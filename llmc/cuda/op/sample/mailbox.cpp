#include "llmc/cuda/op/sample/mailbox.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "llmc/base/error.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

Mailbox::Mailbox() : memory_(sizeof(MailboxWords)) {
  std::memset(words(), 0, sizeof(MailboxWords));
}

std::uint32_t Mailbox::reserve(std::int64_t ids) {
  const std::uint32_t first = next_;
  next_ += static_cast<std::uint32_t>(ids);
  return first;
}

std::optional<Mailbox::Sampled> Mailbox::wait(std::uint32_t sequence, cudaStream_t stream,
                                              const std::function<bool()>& ended) const {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBetweenQueries{20};
  const std::atomic_ref<std::uint64_t> word(words()->ids[sequence % kMailboxIds]);
  std::uint64_t got = 0;
  const auto published = [&] {
    got = word.load(std::memory_order_acquire);
    return static_cast<std::uint32_t>(got >> 32) == sequence;
  };
  Clock::time_point next_query = Clock::now() + kBetweenQueries;
  while (!published()) {
    if (ended()) {
      if (published()) break;  // written before the end
      return std::nullopt;
    }
    if (Clock::now() < next_query) {
      std::this_thread::yield();
      continue;
    }
    next_query = Clock::now() + kBetweenQueries;
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaErrorNotReady) continue;
    check(status, "decoding");
    // The stream has finished, so everything that the GPU has written is visible now.
    if (published()) break;
    if (ended()) return std::nullopt;
    fail(Exit::internal, "decoding: the GPU has finished without publishing a token");
  }
  constexpr std::uint32_t kIdMask = (1u << kMailboxErrorShift) - 1;
  const auto low = static_cast<std::uint32_t>(got);
  return Sampled{static_cast<std::int32_t>(low & kIdMask), static_cast<SampleError>(low >> kMailboxErrorShift)};
}

}  // namespace weft::cuda
