// Generates text during training, so that people who watch a run see what the model writes.
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
  // `tokenizer_json` as in RunIdentity, not empty. Exit::usage if the prompt leaves no room in the model's positions.
  SampleWriter(const TrainSettings& settings, const std::string& tokenizer_json, const ModelConfig& config);
  ~SampleWriter();

  std::int64_t positions() const { return positions_; }  // capacity of the decoder that attach() asks for
  // Once, before the first write(). The model must outlive the writer.
  void attach(TrainModel& model) { decoder_ = model.decoder(positions_); }

  // Prompt and continuation after step `step`: the same for the same parameters, seed and step. The generated
  // text is not escaped.
  std::string write(std::int64_t step);

 private:
  const TrainSettings& settings_;
  Tokenizer tokenizer_;
  std::vector<std::int32_t> prompt_;
  std::int64_t positions_ = 0;
  std::unique_ptr<DecodeModel> decoder_;
};

}  // namespace weft
