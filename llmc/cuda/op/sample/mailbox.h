// Passes sampled ids from the GPU to the host: a ring in page-locked memory. The GPU writes each id and its sequence
// number in one 8-byte word (mailbox.cuh). The host, which runs behind, reads the words in order; nothing is cleared or
// acknowledged. All ways of decoding publish through it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "llmc/base/sampling.h"
#include "llmc/cuda/runtime/arena.h"

namespace weft::cuda {

// Words of the ring: the most ids by which the GPU may be ahead of the host.
inline constexpr std::uint32_t kMailboxIds = 4096;
// Stop ids that the GPU checks, to end early; the host checks all of them.
inline constexpr std::size_t kMaxStopIds = 64;

struct MailboxWords {
  std::uint64_t ids[kMailboxIds];  // number n in word n % kMailboxIds: n << 32 | SampleError << 28 | id
};
inline constexpr int kMailboxErrorShift = 28;  // ids are below 2^28

class Mailbox {
 public:
  Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  MailboxWords* words() const { return memory_.at<MailboxWords>(0); }  // for the kernel that publishes

  // Reserves sequence numbers for the next `ids` ids, in the order in which they will be published; returns the first.
  // A reserved number is never reused, published or not.
  std::uint32_t reserve(std::int64_t ids);

  struct Sampled {
    std::int32_t id;
    SampleError error;
  };
  // Waits for the id with this number; nothing once ended() says that it will not be published. ended() is called while
  // polling and may throw. `stream` is the stream that publishes: Exit::internal if it has finished without publishing;
  // throws if CUDA reports that it has failed.
  std::optional<Sampled> wait(std::uint32_t sequence, cudaStream_t stream, const std::function<bool()>& ended) const;

 private:
  PinnedBuffer memory_;
  std::uint32_t next_ = 1;  // 0 is what zeroed words hold
};

}  // namespace weft::cuda
