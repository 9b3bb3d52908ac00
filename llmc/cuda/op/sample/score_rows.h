// After sampling from rows of logits: passes each sampled id to its sequence's slot and to the host, with
// log-probabilities and the most likely ids where they are wanted.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/base/sampling.h"
#include "llmc/model/inference_model.h"

namespace weft::cuda {

inline constexpr std::int64_t kMaxAlternatives = 20;  // most likely ids of a row: the most that a request may ask for

struct RowScore {
  std::int32_t id;  // the sampled id; 0 if nothing was sampled
  SampleError error;
  float sampled, target;  // log-probabilities
};

// In the place of a row's slot: nothing was sampled from the row; or its id goes to the host only.
inline constexpr std::int32_t kNotSampled = -1, kSampledForHost = -2;

// All pointers are device memory.
struct ScoreRows {
  const float* logits = nullptr;  // [rows, V]
  std::int64_t rows = 0, V = 0;
  std::int64_t tokenizer_vocab = 0;  // ids from here on only pad the vocabulary and are never among the most likely

  const std::int32_t* slots = nullptr;    // [rows]: slot of last_ids for the sampled id, or one of the above
  const std::int32_t* targets = nullptr;  // [rows]: an id to score; -1: none
  // [rows]: number of most likely ids; -1: the sampled id is not scored either
  const std::int32_t* alternatives = nullptr;
  const std::int32_t* ids = nullptr;  // [rows], from sample_rows()
  SampleError* errors = nullptr;      // [rows], from sample_rows(); reset to `none`
  std::int32_t* last_ids = nullptr;   // [slots]; gets the sampled ids, 0 after an error
  RowScore* scores = nullptr;         // [rows]; null: `*scores_at`, which may differ each time a graph is replayed
  RowScore* const* scores_at = nullptr;
  IdLogprob* most_likely = nullptr;  // [rows, kMaxAlternatives]; only `alternatives` of them are written
};
// A log-probability is -(log(sum of e^(logit - greatest)) + (greatest - logit)) in fp32, over all V logits; its bits
// depend on the row alone. NaN if the row has a NaN. The most likely ids: larger logits first, equal ones by id, NaN
// last. Part of a chain (hw/launch.cuh) if `overlapping`.
void score_rows(const ScoreRows& io, bool overlapping, cudaStream_t stream);

}  // namespace weft::cuda
