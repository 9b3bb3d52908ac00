// A copy of parameters and states of the optimizer, or of the parts that a rank has, in page-locked host memory, for a thread
// that saves them while training continues. The copy runs beside the next step's forward and backward passes, which do not
// change them; the update waits for its event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "llmc/base/range.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

// On the host: values[i] is the fp32 master of the bf16 parameter high[i] and its low half (llmc/cuda/op/optim/adamw.h).
void join_host_masters(const std::uint16_t* high, const std::int16_t* low, float* values, std::size_t count);

class PinnedStateCopy final : public StateCopy {
 public:
  // The arenas on the device. `low` is null if parameters are fp32, otherwise they are bf16. Low halves and states
  // have the layout of the copy, one range after another. So have parameters if they are packed; otherwise they have
  // the layout of the table.
  struct Source {
    const std::byte *parameters, *low, *state1, *state2;
    std::uint64_t state_bytes;  // bytes of one state of one parameter: 4 or 2
    bool parameters_packed;
  };
  // Copies these ranges of the arena, and of second states those of `seconds`. take() records `copied` when the copy has ended. Stream and event belong to the
  // model.
  PinnedStateCopy(std::vector<Range> elements, PackedRanges seconds, const Source& source, cudaStream_t training,
                  cudaEvent_t copied);
  ~PinnedStateCopy() override { cudaStreamSynchronize(stream_); }

  void take() override;
  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                    float* buffer) const override;

 private:
  void copy(std::uint64_t offset, const std::byte* device, std::uint64_t bytes);
  // Where a role begins in the buffer. Each has four bytes an element, of which states in bf16 use the first half.
  std::uint64_t begin_of(TensorRole role) const;

  void copy_parameters(std::uint64_t element_bytes);

  PackedRanges elements_, seconds_;
  std::uint64_t count_;  // number of elements_
  Source source_;
  cudaStream_t training_;
  cudaEvent_t copied_;
  PinnedBuffer buffer_;
  Stream stream_;
  Event ready_{cudaEventDisableTiming};
};

}  // namespace weft::cuda
