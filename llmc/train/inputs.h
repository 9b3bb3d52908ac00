// What a run reads: the model it starts from, the token shards and their tokenizer, and whether they fit
// together.
#pragma once

#include <optional>
#include <string>

#include "llmc/base/json.h"
#include "llmc/model/model_file.h"
#include "llmc/model/train_model.h"
#include "llmc/train/data_loader.h"
#include "llmc/train/options.h"

namespace weft {

struct TrainInputs {
  ModelConfig config;                       // of the model; a new one has the vocabulary of its data
  std::optional<ModelFile> weights;         // of --model, with the adapter of --adapter unless that is trained
  bool trains_adapter = false;              // --lora-r
  Quantization frozen_quantization;         // then of --model, or of --bench --config NAME:FORMAT
  std::optional<ModelFile> adapter;         // of --adapter, if it is trained further
  std::string base, began_from;             // header hash of --model, and RunIdentity's; empty without one
  std::string tokenizer, tokenizer_source;  // text of tokenizer.json and the file it is from; empty without one
  std::optional<TokenDataset> train, val;   // absent if not asked for
  // What its checkpoints say of chats: as chat_members() of --model, or with the chat format of the training shards, which
  // dev/prepare_data.py --chat writes beside them.
  Json chat;

  bool packed() const { return train && train->packs(); }
  bool masks_documents() const { return (train && train->masks_documents()) || (val && val->masks_documents()); }
};

// Opens everything that the settings name. Sizes that do not fit together are Exit::usage, shards of another
// tokenizer and damaged files Exit::bad_file. Allocates no memory for the model.
TrainInputs open_inputs(const TrainSettings& settings);

// What is trained: the parameters of --model, or initial ones; of an adapter those of --adapter, or initial ones.
void load_parameters(const TrainInputs& inputs, std::uint64_t seed, TrainModel& model);
// The frozen model beside which `model`, made with TrainOptions::lora, trains an adapter.
void load_frozen(const TrainInputs& inputs, TrainModel& model);

}  // namespace weft
