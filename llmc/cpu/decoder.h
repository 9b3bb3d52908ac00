// Base class of the CPU decoders of both families: the K/V cache, running a prompt in chunks, logits, scoring, and keeping
// activations for comparison. A family adds run_layers(), the list of operators from ids to the final norm.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/threads.h"
#include "llmc/cpu/head_view.h"
#include "llmc/model/decode_model.h"

namespace weft::cpu {

class Decoder : public DecodeModel {
 public:
  Decoder(const ModelConfig& config, std::int64_t capacity);

  const ModelConfig& config() const final { return config_; }
  std::int64_t capacity() const final { return capacity_; }
  std::int64_t length() const final { return length_; }
  void reset() final { length_ = 0; }
  std::span<const float> prefill(std::span<const std::int32_t> ids) final;
  std::span<const float> decode(std::int32_t id) final;
  std::vector<double> score(std::span<const std::int32_t> ids) final;
  void keep_activations(bool keep) final { keep_ = keep; }
  std::vector<float> activation(const std::string& name) final;
  std::uint64_t bytes_per_token(std::int64_t context) const final;

 protected:
  // Tokens that are computed at once: bounds the scratch memory of a long prompt.
  static constexpr std::int64_t kChunk = 256;

  // Runs ids.size() <= kChunk tokens at positions length() ..., appends their keys and values, and leaves the
  // output of the final norm in final_norm() [ids.size(), C].
  virtual void run_layers(std::span<const std::int32_t> ids) = 0;
  virtual const float* head() const = 0;           // [V, C]
  virtual std::uint64_t weight_bytes() const = 0;  // read for one token

  float* final_norm() { return final_norm_.data(); }
  const RopeTable& rope() const { return rope_; }
  std::uint64_t cache_bytes() const { return cache_arena_.bytes(); }

  // Rotates q and k, appends k and v of `rows` tokens to layer l's cache, and attends over all cached
  // positions. q, k, v view `rows` tokens; out [rows, NH HS].
  void attend(std::int64_t l, HeadView q, HeadView k, HeadView v, std::int64_t rows, float* out);

  bool keeping() const { return keep_; }
  // Adds `rows` rows of the activation `name`; a prompt that runs in several chunks adds several times.
  void keep(const std::string& name, const float* data, std::int64_t rows, std::int64_t columns);
  void keep_heads(const std::string& name, ConstHeadView heads, std::int64_t rows, std::int64_t count);

 private:
  HeadView cache_view(std::int64_t which, std::int64_t l) const;  // which: 0 keys, 1 values
  void check_room(std::size_t ids) const;

  ModelConfig config_;
  std::int64_t capacity_, length_ = 0;
  HostArena cache_arena_;  // keys, then values, each [L, NKV, capacity, HS]; first: it refuses what cannot fit
  RopeTable rope_;
  std::vector<float> final_norm_;  // [kChunk, C]
  std::vector<float> logits_;      // [V]
  StepThreads threads_;            // of decode()
  bool keep_ = false;
  std::map<std::string, std::vector<float>> kept_;
};

}  // namespace weft::cpu
