// The GPU's side of a Mailbox: publishes an id or an error under its sequence number.
#pragma once

#include "llmc/cuda/hw/memory_order.cuh"
#include "llmc/cuda/op/sample/mailbox.h"

namespace weft::cuda {

__device__ inline void publish(MailboxWords* mailbox, std::uint32_t sequence, std::int32_t id, SampleError error) {
  const std::uint32_t low = static_cast<std::uint32_t>(error) << kMailboxErrorShift | static_cast<std::uint32_t>(id);
  store_relaxed_system(&mailbox->ids[sequence % kMailboxIds], static_cast<std::uint64_t>(sequence) << 32 | low);
}

}  // namespace weft::cuda
