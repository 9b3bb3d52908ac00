#include "llmc/train/rank_fields.h"

#include <set>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

// Options that may differ between ranks: paths, because the content of the files is compared instead, and options that
// change neither the numbers nor the calls that all ranks make together.
const std::set<std::string>& own_options() {
  static const std::set<std::string> names = {"config",      "model",        "train",   "val",          "tokenizer",
                                              "out",         "gpus",         "threads", "debug-inject", "color",
                                              "max-minutes", "comm-timeout", "json",    "verbose"};
  return names;
}

void add_shards(std::vector<RankField>& fields, const char* option, const std::optional<TokenDataset>& data) {
  const Json shards = data ? data->fingerprint() : Json::array();
  fields.push_back({format("%s, number of shards", option), std::to_string(shards.size())});
  for (std::size_t i = 0; i < shards.size(); ++i) {
    fields.push_back({format("%s, shard %zu", option, i + 1), shards[i].dump()});
  }
}

}  // namespace

std::vector<RankField> rank_fields(const TrainSettings& settings, const TrainInputs& inputs) {
  std::vector<RankField> fields;
  for (const auto& [name, value] : settings.effective) {
    if (!own_options().contains(name)) fields.push_back({"--" + name, value});
  }
  const Json model = config_to_json(inputs.config);
  for (const auto& [key, value] : model.items()) fields.push_back({"model, " + key, value.dump()});
  fields.push_back({"--model, header hash", inputs.began_from});
  fields.push_back({"tokenizer, hash", hash_text(xxh3_64(inputs.tokenizer))});
  add_shards(fields, "--train", inputs.train);
  add_shards(fields, "--val", inputs.val);
  return fields;
}

}  // namespace weft
