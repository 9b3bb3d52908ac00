// Sampled ids on their way from the GPU to the host: a ring in page-locked memory. The GPU writes each id in one 8-byte
// word with its sequence number (mailbox.cuh), and the host, which runs behind, reads the words in order; nothing is
// cleared or acknowledged. All ways of decoding publish through it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "llmc/base/sampling.h"
#include "llmc/cuda/runtime/arena.h"

namespace weft::cuda {

// The GPU may be so many ids ahead of the host.
inline constexpr std::uint32_t kMailboxIds = 4096;
// Stop ids that the GPU compares with what it samples, to end early; the host compares all of them.
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

  // Sequence numbers for the next `ids` ids, in the order in which they will be published; returns the first. A number
  // that was reserved is used up, published or not.
  std::uint32_t reserve(std::int64_t ids);

  struct Sampled {
    std::int32_t id;
    SampleError error;
  };
  // The id of this number, as soon as the GPU has published it, or nothing once ended() says that it never will be: that is
  // called between looks at the word and may throw. `stream` is where it is published: Exit::internal if the stream has
  // finished without it, and what CUDA reports if it has failed.
  std::optional<Sampled> wait(std::uint32_t sequence, cudaStream_t stream, const std::function<bool()>& ended) const;

 private:
  PinnedBuffer memory_;
  std::uint32_t next_ = 1;  // 0 is what fresh words say
};

}  // namespace weft::cuda
