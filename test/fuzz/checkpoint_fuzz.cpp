// A checkpoint: manifest.json, model.bin and state.bin of one directory.
//
//   u8 flags   1: the manifest's sizes and hashes are left alone, otherwise made to agree with the files
//   u16 length and text of the manifest; the model, then the state, as tensor_bytes.h describes them
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/model/config.h"
#include "llmc/train/checkpoint.h"
#include "test/fuzz/memory_files.h"
#include "test/fuzz/target.h"
#include "test/fuzz/tensor_bytes.h"

namespace weft::fuzz {
namespace {

const std::string kDirectory = "fuzz/step_00000004";
constexpr std::int64_t kStep = 4;

void describe(Json& entry, const char* name, FileKind kind) {
  const std::string path = kDirectory + "/" + name;
  if (!entry.is_object()) return;
  entry["bytes"] = file_text(path).size();
  const TensorFile file = TensorFile::open(path, kind);
  Json list = Json::array();
  for (const TensorInfo& tensor : file.tensors()) {
    list.push_back({{"name", tensor.name}, {"bytes", tensor.bytes}, {"xxh3", hash_text(tensor.hash)}});
  }
  entry["tensors"] = std::move(list);
}

// As an attacker would: every check that is not a hash has to hold without its help.
std::string agreeing_manifest(std::string_view text) {
  try {
    Json manifest = parse_json(text, "manifest");
    if (!manifest.is_object() || !manifest.contains("files") || !manifest["files"].is_array() ||
        manifest["files"].size() != 2) {
      return std::string(text);
    }
    describe(manifest["files"][0], "model.bin", FileKind::model);
    describe(manifest["files"][1], "state.bin", FileKind::training_state);
    const TensorFile state = TensorFile::open(kDirectory + "/state.bin", FileKind::training_state);
    const Json& config = state.config();
    if (config.contains("run") && config["run"].is_object() && config["run"].contains("settings")) {
      manifest["settings_hash"] = hash_text(xxh3_64(config["run"]["settings"].dump()));
    }
    if (config.contains("model")) {
      manifest["config_hash"] = hash_text(xxh3_64(config_to_json(config_from_json(config["model"], "model")).dump()));
    }
    if (config.contains("training") && config["training"].is_object()) {
      for (const char* key : {"step", "updates", "windows"}) manifest[key] = config["training"].value(key, Json());
    }
    return manifest.dump();
  } catch (const Error&) {
    return std::string(text);
  }
}

// The run that wants to go on: that of the seeds.
const RunIdentity& wanting_run() {
  static const RunIdentity* identity = [] {
    auto* run = new RunIdentity;
    ModelConfig& config = run->model;
    config.vocab_size = config.tokenizer_vocab = 3;
    config.hidden_size = config.head_dim = config.rope.rotary_dim = 2;
    config.num_layers = config.num_heads = config.num_kv_heads = config.ffn_size = 1;
    config.max_positions = 8;
    config.norm_eps = 1e-5;
    config.rope.theta = 1e4;
    run->settings = {{"lr", 0.5}, {"seed", 1}};
    run->steps = 8;
    run->data = Json::array({{{"tokens", 9}}});
    run->device = "cpu";
    return run;
  }();
  return *identity;
}

void use(const Checkpoint& checkpoint) {
  const TrainState& state = checkpoint.state();
  FUZZ_CHECK(state.step == kStep && state.updates >= 0 && state.updates <= state.step);
  FUZZ_CHECK(TrainState::from_json(parse_json(state.to_json().dump(), "again"), "again") == state);
  SpikeDetector spikes = state.spikes;
  spikes.observe(1.0, 1.0);
  accepts([&] { checkpoint.require_same_run(wanting_run()); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const std::string_view manifest = input.take_text(input.take<std::uint16_t>());
  put_file(kDirectory + "/model.bin", tensor_file_bytes(input));
  put_file(kDirectory + "/state.bin", tensor_file_bytes(input));
  put_file(kDirectory + "/manifest.json", (flags & 1) != 0 ? std::string(manifest) : agreeing_manifest(manifest));
  accepts([&] { use(Checkpoint::open(kDirectory, kStep)); });
  return 0;
}

}  // namespace weft::fuzz
