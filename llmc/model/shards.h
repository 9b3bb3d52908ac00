// How the ranks of a run divide its state: by ranges of the arenas, not by tensors, so that any number of ranks fits any
// model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/range.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_table.h"

namespace weft {

// What is divided. The bits of a step are the same for all of them.
enum class Shard {
  none,       // every rank has everything, and makes the whole update
  optimizer,  // a rank has the moments of its own range alone, updates that, and gets the other parameters from the others
  gradients,  // the gradients of the step as well; those of a layer go as soon as the ranks have exchanged them. On a GPU
};

// The ranges of `ranks` ranks, in elements of the arenas that have one type for all tensors: neighbours from 0 to
// arena_elements(), of about the same size. A border lies where a block begins, when each tensor is cut into blocks of
// `block` elements from its first one on; so what is computed in such blocks does not depend on the number of ranks. A model
// of fewer blocks than ranks leaves ranks with nothing.
std::vector<Range> cut_arena(const TensorTable& table, int ranks, std::int64_t block);

// The arena of a Llama in the order of the forward pass: the embedding, each layer, a head that is not tied. Neighbours from
// 0 to arena_elements(); the last layer's section has the final norm as well. Backward completes the gradients of a section
// after those of all sections behind it.
std::vector<Range> llama_sections(const ModelConfig& config, const TensorTable& table);

// What moves between ranks at once, and what of it each rank has. A bucket is a few neighbouring sections or, of a large
// section, a piece: each rank has a part of every bucket, so that all ranks send and receive at the same time whichever
// section is complete.
struct Bucket {
  std::size_t section = 0;  // the first one: the bucket's gradients are complete, and its parameters needed, with it
  Range range;
  std::vector<Range> parts;  // one a rank: neighbours from range.begin to range.end
};

// The sections as buckets, in their order: small ones together until they have `elements`, large ones in pieces of up to
// four times as many. Cuts within a section lie at multiples of `block` of the arena; parts may be empty.
std::vector<Bucket> cut_buckets(std::span<const Range> sections, int ranks, std::int64_t block, std::int64_t elements);

}  // namespace weft
