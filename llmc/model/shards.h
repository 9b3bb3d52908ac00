// How the ranks of a run divide its state: by ranges of the arenas, not by tensors, so that any number of ranks fits any
// model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/range.h"
#include "llmc/model/config.h"
#include "llmc/model/optimizer.h"
#include "llmc/model/tensor_table.h"

namespace weft {

// What is sharded. The bits of a step are the same for all of them.
enum class Shard {
  none,        // every rank has everything, and makes the whole update
  optimizer,   // a rank has the moments of its own range only, updates it, and receives the other parameters
  gradients,   // the gradients too: those of a layer are dropped once the ranks have exchanged them. On GPUs
  parameters,  // the parameters too: those of a layer are fetched for each pass and dropped after it (SectionBuffers)
};

// The ranges of `ranks` ranks, in elements of the arenas that have one type for all tensors: neighbours from 0 to
// arena_elements(), of about the same size. A border lies where a block begins, when each tensor is cut into blocks of
// `block` elements from its first one on, and tensors that the optimizer needs whole are one block; so what is computed in
// such blocks does not depend on the number of ranks. A model of fewer blocks than ranks leaves ranks with nothing.
std::vector<Range> cut_arena(const TensorTable& table, int ranks, std::int64_t block,
                             const Optimizer& optimizer = adamw_optimizer());

// The arena of a Llama in the order of the forward pass: the embedding, each layer, a head that is not tied. Neighbours from
// 0 to arena_elements(); the last layer's section has the final norm as well. Backward completes the gradients of a section
// after those of all sections behind it.
std::vector<Range> parameter_sections(const ModelConfig& config, const TensorTable& table);

// Memory in which a pass finds parameters that the ranks have sharded. Those of a section are fetched into its place
// before they are used, and stay until another section needs the place. Layers alternate between kLayerBuffers places,
// because the norm at the end of a layer belongs to the next one, and so that the next layer can be fetched while one
// computes. The embedding and a head that is not tied alternate in one more place.
class SectionBuffers {
 public:
  static constexpr std::size_t kLayerBuffers = 2;

  SectionBuffers() = default;  // no places: nothing is sharded
  // `sections`: parameter_sections() of a model of so many layers.
  SectionBuffers(std::span<const Range> sections, std::int64_t num_layers);

  std::int64_t elements() const { return elements_; }  // of all places
  std::int64_t begin_of(std::size_t section) const { return begins_[place_of_[section]]; }
  // Gives a section its place; false if it was there already.
  bool take(std::size_t section);
  // Takes all places to be empty, because the parameters have changed.
  void forget();

 private:
  std::vector<std::size_t> place_of_;      // of each section
  std::vector<std::int64_t> begins_;       // of each place
  std::vector<std::ptrdiff_t> occupants_;  // the section in each place; -1: none
  std::int64_t elements_ = 0;
};

// What moves between ranks at once, and what of it each rank has. A bucket is a few neighbouring sections or, of a large
// section, a piece: each rank has a part of every bucket, so that all ranks send and receive at the same time whichever
// section is complete.
struct Bucket {
  std::size_t section = 0;  // the first one: the bucket's gradients are complete, and its parameters needed, with it
  Range range;
  std::vector<Range> parts;  // one a rank: neighbours from range.begin to range.end
};

// The sections as buckets, in their order: small ones together until they have `elements`, large ones in pieces of up to
// four times as many. Cuts within a section lie at multiples of `block` of the arena, but where the optimizer needs a tensor
// whole, which makes a piece longer or shorter: at its nearer end. Parts may be empty.
std::vector<Bucket> cut_buckets(const TensorTable& table, std::span<const Range> sections, int ranks,
                                std::int64_t block, std::int64_t elements,
                                const Optimizer& optimizer = adamw_optimizer());

}  // namespace weft
