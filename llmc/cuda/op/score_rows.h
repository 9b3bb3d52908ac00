// What becomes of a row of logits after sampling: the sampled id goes to its sequence's slot and to the host, with
// log-probabilities and the most likely ids where they are wanted.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/base/sampling.h"
#include "llmc/model/inference_model.h"

namespace weft::cuda {

inline constexpr std::int64_t kMaxAlternatives = 20;  // of a row; the most that a request may ask for

struct RowScore {
  std::int32_t id;  // sampled; 0 if nothing was
  SampleError error;
  float sampled, target;  // log-probabilities
};

// Of a row's slot: nothing was sampled from it; an id was, which only the host needs.
inline constexpr std::int32_t kNotSampled = -1, kSampledForHost = -2;

// Everything lies in device memory.
struct ScoreRows {
  const float* logits = nullptr;  // [rows, V]
  std::int64_t rows = 0, V = 0;
  std::int64_t tokenizer_vocab = 0;  // ids from here on are padding rows: never among the most likely

  const std::int32_t* slots = nullptr;         // [rows]: where the sampled id goes, or one of the above
  const std::int32_t* targets = nullptr;       // [rows]: an id to score; -1: none
  const std::int32_t* alternatives = nullptr;  // [rows]: most likely ids; -1: the sampled id is not scored either
  const std::int32_t* ids = nullptr;           // [rows], from sample_rows()
  SampleError* errors = nullptr;               // [rows], from sample_rows(); none again afterwards
  std::int32_t* last_ids = nullptr;            // [slots]; 0 after an error
  RowScore* scores = nullptr;                  // [rows]
  IdLogprob* most_likely = nullptr;            // [rows, kMaxAlternatives]; only as many as wanted are written
};
// A log-probability is -(log(sum of e^(logit - greatest)) + (greatest - logit)) in fp32, over all V; its bits depend on the row
// alone. NaN where a logit of the row is. Greater logits rank first, equal ones by id, NaN last. Part of a chain
// (hw/launch.cuh) where `overlapping`.
void score_rows(const ScoreRows& io, bool overlapping, cudaStream_t stream);

}  // namespace weft::cuda
