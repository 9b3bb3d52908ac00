// Uploads tokens, labels and where documents begin through page-locked copies of the last few micro-batches, so that the host can fill the
// next one while the GPU still reads the previous one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

class TokenUpload {
 public:
  explicit TokenUpload(std::int64_t N)
      : rows_(N), buffer_(kSlots * kTensors * static_cast<std::uint64_t>(N) * sizeof(std::int32_t)) {}

  // Copies the batch's N tokens and labels to the device, in the order of the stream; the batch may change afterwards. So it does
  // with document_starts unless they are null; if the batch has none, they become those of rows of one document.
  void upload(const Batch& batch, std::int32_t* tokens, std::int32_t* labels, std::int32_t* document_starts,
              cudaStream_t stream) {
    const std::size_t slot = next_++ % kSlots;
    const std::size_t bytes = static_cast<std::size_t>(rows_) * sizeof(std::int32_t);
    // The slot's last copy was queued kSlots micro-batches ago and has ended long since, so this rarely waits.
    check(cudaEventSynchronize(copied_[slot]), "token upload");
    auto* staged = buffer_.at<std::int32_t>(slot * kTensors * bytes);
    std::memcpy(staged, batch.tokens.data(), bytes);
    std::memcpy(staged + rows_, batch.labels.data(), bytes);
    delay_point(stream, DelayPoint::step);
    check(cudaMemcpyAsync(tokens, staged, bytes, cudaMemcpyHostToDevice, stream), "token upload");
    check(cudaMemcpyAsync(labels, staged + rows_, bytes, cudaMemcpyHostToDevice, stream), "token upload");
    if (document_starts != nullptr) {
      std::int32_t* const starts = staged + 2 * rows_;
      std::fill_n(starts, rows_, 0);
      std::copy(batch.document_starts.begin(), batch.document_starts.end(), starts);
      check(cudaMemcpyAsync(document_starts, starts, bytes, cudaMemcpyHostToDevice, stream), "token upload");
    }
    check(cudaEventRecord(copied_[slot], stream), "token upload");
  }

 private:
  static constexpr std::size_t kSlots = 4, kTensors = 3;
  std::int64_t rows_;
  PinnedBuffer buffer_;  // [kSlots][tokens, labels, document_starts][N]
  Event copied_[kSlots] = {Event(cudaEventDisableTiming), Event(cudaEventDisableTiming), Event(cudaEventDisableTiming),
                           Event(cudaEventDisableTiming)};
  std::size_t next_ = 0;
};

}  // namespace weft::cuda
