// The weights of a model on the device: one description (llmc/model/block_weights.h) for the paged model, the persistent kernel
// and the decoder of one sequence. S is the storage type of what is not packed.
#pragma once

#include <string>
#include <vector>

#include "llmc/cuda/op/gemm/quantized_matmul.h"
#include "llmc/model/block_weights.h"

namespace weft::cuda {

template <typename S>
using DeviceLinear = weft::Linear<const S, PackedMatrix>;
template <typename S>
using DeviceBlock = BlockWeights<const S, PackedMatrix>;
template <typename S>
using DeviceWeights = ModelWeights<const S, PackedMatrix>;

// Those of a model that is not quantised, in an arena of the layout of `table` with S for all tensors.
template <typename S>
DeviceWeights<S> bind_plain(const ModelConfig& config, const TensorTable& table, const S* parameters) {
  struct Source : ArenaSource<const S> {
    PackedMatrix packed(const std::vector<std::string>&) const { return {}; }
  };
  return bind_weights<const S, PackedMatrix>(config, Source{{table, parameters, Offsets::elements}});
}

}  // namespace weft::cuda
