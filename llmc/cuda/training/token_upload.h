// Uploads tokens, labels, where documents begin and the weights of labels through page-locked copies of the last few micro-batches, so that the host can fill the
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
  // with document_starts and label_weights unless they are null; if the batch has none, they become those of rows of one document,
  // and ones.
  void upload(const Batch& batch, std::int32_t* tokens, std::int32_t* labels, std::int32_t* document_starts,
              float* label_weights, cudaStream_t stream) {
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
    if (label_weights != nullptr) {
      auto* const weights = reinterpret_cast<float*>(staged + 3 * rows_);
      std::fill_n(weights, rows_, 1.0f);
      std::copy(batch.label_weights.begin(), batch.label_weights.end(), weights);
      check(cudaMemcpyAsync(label_weights, weights, bytes, cudaMemcpyHostToDevice, stream), "token upload");
    }
    check(cudaEventRecord(copied_[slot], stream), "token upload");
  }

 private:
  static constexpr std::size_t kSlots = 4, kTensors = 4;
  std::int64_t rows_;
  PinnedBuffer buffer_;  // [kSlots][tokens, labels, document_starts, label_weights][N]
  Event copied_[kSlots] = {Event(cudaEventDisableTiming), Event(cudaEventDisableTiming), Event(cudaEventDisableTiming),
                           Event(cudaEventDisableTiming)};
  std::size_t next_ = 0;
};

}  // namespace weft::cuda
