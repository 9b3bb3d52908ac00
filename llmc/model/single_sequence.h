// A DecodeModel over an InferenceModel: one sequence that has all the pages.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"

namespace weft {

// Decodes the ids of the one sequence after its prompt, many of them a launch, in the model's pages: page i holds the positions
// [i * page_size, (i + 1) * page_size).
class IdDecoder {
 public:
  virtual ~IdDecoder() = default;

  virtual std::vector<MemoryLine> memory() const = 0;  // beside the model's
  virtual std::int64_t most_ids() const = 0;           // of a launch
  virtual std::int64_t most_first_ids() const = 0;     // that a launch can be given
  // Feeds `ids`, 1 to most_first_ids() of them, from `position` on, and then each id that it samples: `count` of them,
  // or fewer if one is a stop id. Where `to` is given, they are written there too. All earlier work of the model, and
  // the previous launch, must have ended.
  virtual void launch(std::span<const std::int32_t> ids, std::int64_t position, std::int64_t count,
                      const GenerationRequest& request, const DeviceDrafts& to = {}) = 0;
  // Id i of the launch, as soon as the host has it. Exit::numeric if its logits were not finite.
  virtual std::int32_t wait(std::int64_t i) = 0;
  // Waits until a launch has ended; one that runs is cancelled.
  virtual void end() noexcept = 0;
  // Feeds `id` at `position` and returns the logits; valid until the next call.
  virtual std::span<const float> decode(std::int32_t id, std::int64_t position) = 0;
  // The same, with DecodeModel::decode_timeline()'s table.
  virtual std::string timeline(std::int32_t id, std::int64_t position) = 0;
};

// Options of a model for one sequence of at most `capacity` positions.
InferenceOptions one_sequence(std::int64_t capacity);

// `model` was made with one_sequence(capacity). `wait_for_weights`, if there is one, is called by each reset(): it returns when
// whatever changes the weights is done. `decoder`, if there is one, decodes what follows a prompt, as far as it is fed at the first
// `decoder_positions` positions; it may refer to the model, which decodes the rest.
std::unique_ptr<DecodeModel> single_sequence(std::shared_ptr<InferenceModel> model, std::int64_t capacity,
                                             std::function<void()> wait_for_weights = nullptr,
                                             std::unique_ptr<IdDecoder> decoder = nullptr,
                                             std::int64_t decoder_positions = std::numeric_limits<std::int64_t>::max());

}  // namespace weft
