// A sample of what the model writes, for the people who watch a run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "llmc/model/train_model.h"
#include "llmc/text/tokenizer.h"
#include "llmc/train/options.h"

namespace weft {

class SampleWriter {
 public:
  // `tokenizer_json` as in RunIdentity, not empty. The model must outlive the writer.
  SampleWriter(const TrainSettings& settings, const std::string& tokenizer_json, TrainModel& model);
  ~SampleWriter();

  // Prompt and continuation after step `step`: the same for the same parameters, seed and step. Text of the
  // model, not escaped.
  std::string write(std::int64_t step);

 private:
  const TrainSettings& settings_;
  Tokenizer tokenizer_;
  std::vector<std::int32_t> prompt_;
  std::unique_ptr<DecodeModel> decoder_;
};

}  // namespace weft
