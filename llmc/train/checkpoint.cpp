#include "llmc/train/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <system_error>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/parallel.h"

namespace weft {

namespace {

constexpr const char* kModelName = "model.bin";  // one of the two
constexpr const char* kAdapterName = "adapter.bin";
constexpr const char* kStateName = "state.bin";
constexpr const char* kFp8Tensor = "fp8.amax";
constexpr const char* kManifestName = "manifest.json";
constexpr const char* kFormat = "weft checkpoint";
constexpr int kFormatVersion = 1;
constexpr std::size_t kMaxManifestBytes = 16 << 20;  // a model of 1,024 layers, the most allowed, needs 6 MB
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int64_t>::max();
// Limit for counters read from a file: they are counted on, and must stay far below 2^63.
constexpr std::int64_t kMaxCounter = 1'000'000'000'000'000'000;

const char* parameters_name(bool adapter) {
  return adapter ? kAdapterName : kModelName;
}

// The optimizer that a run's settings name.
const Optimizer& optimizer_of(const Json& settings, const std::string& source) {
  const std::string name = settings.contains("optimizer") ? json_string(settings, "optimizer", source) : "adamw";
  if (const Optimizer* optimizer = find_optimizer(name)) return *optimizer;
  fail(Exit::bad_file, "%s: optimizer: got %s, which this version does not have", source.c_str(),
       escaped(name).c_str());
}

std::vector<StateTensor> without_parameters(const Optimizer& optimizer, const TensorTable& table) {
  std::vector<StateTensor> tensors = state_tensors(optimizer, table);
  std::erase_if(tensors, [](const StateTensor& tensor) { return tensor.role == TensorRole::parameter; });
  return tensors;
}

Json optional_number(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

std::optional<double> read_optional(const Json& object, const char* key, const std::string& source) {
  if (object.contains(key) && object[key].is_null()) return std::nullopt;
  return json_number(object, key, source);
}

const Json& json_object(const Json& object, const char* key, const std::string& source) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_object()) fail(Exit::bad_file, "%s: %s: missing", source.c_str(), key);
  return *found;
}

// ---- writing ----

// Every field of a manifest except the list of files. The fields follow from the content of the files, so a load
// computes them again and compares.
Json manifest_head(const TrainState& state, const ModelConfig& model, const Json& settings) {
  return {{"format", kFormat},
          {"format_version", kFormatVersion},
          {"step", state.step},
          {"updates", state.updates},
          {"windows", state.windows},
          {"settings_hash", hash_text(xxh3_64(settings.dump()))},
          {"config_hash", hash_text(xxh3_64(config_to_json(model).dump()))},
          {"world_size", 1}};
}

Json describe_file(const std::string& path, std::span<const TensorInfo> tensors) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) fail(Exit::environment, "%s: cannot read its size: %s", escaped(path).c_str(), error.message().c_str());
  Json list = Json::array();
  for (const TensorInfo& tensor : tensors) {
    list.push_back({{"name", tensor.name}, {"bytes", tensor.bytes}, {"xxh3", hash_text(tensor.hash)}});
  }
  return {{"name", std::filesystem::path(path).filename().string()}, {"bytes", bytes}, {"tensors", std::move(list)}};
}

void write_tensor_of(const TensorSource& source, TensorRole role, const TensorSpec& spec, TensorFileWriter& writer) {
  writer.write_parts(static_cast<std::size_t>(spec.elements), [&](std::size_t first, std::size_t count, float* buffer) {
    return source.read(role, spec, first, count, buffer);
  });
}

std::string bad_value_text(const std::string& tensor, std::size_t element, float value) {
  return format("%s: element %zu is %g", tensor.c_str(), element, static_cast<double>(value));
}

// "moment2.NAME: element 3 is inf" for the first value that is not finite; empty if there is none.
std::string first_not_finite(const Optimizer& optimizer, const TensorTable& table, const TensorSource& source) {
  constexpr std::size_t kPiece = 1 << 18;  // values that are read at once
  std::vector<float> buffer(kPiece);
  for (const StateTensor& tensor : state_tensors(optimizer, table)) {
    const TensorSpec& spec = table.specs()[tensor.spec];
    const auto count = static_cast<std::size_t>(spec.elements);
    for (std::size_t first = 0; first < count; first += kPiece) {
      const std::size_t size = std::min(kPiece, count - first);
      const float* values = source.read(tensor.role, spec, first, size, buffer.data());
      const float* bad = std::find_if(values, values + size, [](float value) { return !std::isfinite(value); });
      if (bad == values + size) continue;
      return bad_value_text(state_tensor_name(optimizer, tensor.role, spec),
                            first + static_cast<std::size_t>(bad - values), *bad);
    }
  }
  return {};
}

TensorFileWriter declare_model(const std::string& path, const RunIdentity& run, const TensorTable& table) {
  Json config = {{"model", config_to_json(run.model)}, {"made_by", "weft train_llama " + run.version}};
  config.update(run.chat);
  if (run.adapter) config.update({{kLora, lora_to_json(run.adapter->lora)}, {kAdapterBase, run.adapter->base}});
  TensorFileWriter writer(path, run.adapter ? FileKind::adapter : FileKind::model, config);
  for (const TensorSpec& spec : table.specs()) writer.declare(spec.name, DType::f32, spec.shape);
  if (!run.tokenizer.empty()) {
    writer.declare(kTokenizerTensor, DType::u8, {static_cast<std::int64_t>(run.tokenizer.size())});
  }
  return writer;
}

void fill_model(const RunIdentity& run, const TensorTable& table, const TensorSource& source,
                TensorFileWriter& writer) {
  for (const TensorSpec& spec : table.specs()) write_tensor_of(source, TensorRole::parameter, spec, writer);
  if (!run.tokenizer.empty()) writer.write(run.tokenizer.data(), run.tokenizer.size());
}

std::vector<std::int64_t> fp8_shape(const ModelConfig& model) {
  return {kFp8History, Fp8Slots{model.num_layers}.count()};
}

TensorFileWriter declare_training_state(const std::string& path, const RunIdentity& run, const TrainState& state,
                                        const TensorTable& table, bool has_fp8) {
  const Json identity = {{"settings", run.settings}, {"steps", run.steps},     {"data", run.data},
                         {"device", run.device},     {"version", run.version}, {"began_from", run.began_from},
                         {"world_size", 1}};
  TensorFileWriter writer(path, FileKind::training_state,
                          {{"model", config_to_json(run.model)}, {"run", identity}, {"training", state.to_json()}});
  const Optimizer& optimizer = optimizer_of(run.settings, path);
  for (const StateTensor& tensor : without_parameters(optimizer, table)) {
    const TensorSpec& spec = table.specs()[tensor.spec];
    writer.declare(state_tensor_name(optimizer, tensor.role, spec), DType::f32, spec.shape);
  }
  if (has_fp8) writer.declare(kFp8Tensor, DType::f32, fp8_shape(run.model));
  return writer;
}

void fill_training_state(const Optimizer& optimizer, const TensorTable& table, const TensorSource& source,
                         TensorFileWriter& writer) {
  for (const StateTensor& tensor : without_parameters(optimizer, table)) {
    write_tensor_of(source, tensor.role, table.specs()[tensor.spec], writer);
  }
  if (!source.fp8_state.empty()) writer.write(source.fp8_state.data(), source.fp8_state.size() * sizeof(float));
}

// ---- reading ----

void check_against_manifest(const Json& entry, const TensorFile& file, const std::string& source) {
  const std::string name = std::filesystem::path(file.path()).filename().string();
  if (json_string(entry, "name", source) != name) {
    fail(Exit::bad_file, "%s: files: got %s, expected %s", source.c_str(),
         escaped(json_string(entry, "name", source)).c_str(), name.c_str());
  }
  const auto bytes = static_cast<std::uint64_t>(json_int(entry, "bytes", 0, kMaxCount, source));
  if (bytes != file.file_bytes()) {
    fail(Exit::bad_file, "%s: %llu bytes, the manifest says %llu", escaped(file.path()).c_str(),
         static_cast<unsigned long long>(file.file_bytes()), static_cast<unsigned long long>(bytes));
  }
  const auto tensors = entry.find("tensors");
  if (tensors == entry.end() || !tensors->is_array() || tensors->size() != file.tensors().size()) {
    fail(Exit::bad_file, "%s: tensors: expected the %zu of %s", source.c_str(), file.tensors().size(), name.c_str());
  }
  for (std::size_t i = 0; i < tensors->size(); ++i) {
    const TensorInfo& tensor = file.tensors()[i];
    const Json expected = {{"name", tensor.name}, {"bytes", tensor.bytes}, {"xxh3", hash_text(tensor.hash)}};
    if ((*tensors)[i] != expected) {
      fail(Exit::bad_file, "%s: %s is not the tensor that the manifest describes", escaped(file.path()).c_str(),
           escaped(tensor.name).c_str());
    }
  }
}

// Checks shape, hash, and that every value is finite: training cannot go on from a NaN, even one with a correct hash.
void check_values(const TensorFile& file, const std::string& name, const std::vector<std::int64_t>& shape) {
  const TensorInfo& tensor = file.at(name);
  if (tensor.shape != shape) {
    fail(Exit::bad_file, "%s: %s: got shape %s, expected %s", escaped(file.path()).c_str(), name.c_str(),
         shape_text(tensor.shape).c_str(), shape_text(shape).c_str());
  }
  file.verify_finite(tensor);
}

// "train_00000.bin (12000 tokens)": a shard of TokenDataset::fingerprint(), which a checkpoint may hold damaged.
std::string shard_text(const Json& shard) {
  if (!shard.is_object()) return "no shard";
  const Json name = shard.value("name", Json()), tokens = shard.value("tokens", Json());
  return format("%s (%s tokens)", name.is_string() ? escaped(name.get<std::string>()).c_str() : "a shard",
                tokens.is_number_integer() ? tokens.dump().c_str() : "?");
}

// What distinguishes shard `i` of --train from the one that the run was trained on.
std::string shard_difference(const Json& saved, const Json& now, std::size_t i) {
  if (std::is_permutation(saved.begin(), saved.end(), now.begin())) return "the same shards come in another order";
  const std::string was = shard_text(saved[i]), is = shard_text(now[i]);
  if (was == is) return format("shard %zu, %s, has other content than then", i + 1, is.c_str());
  const bool renamed = saved[i].is_object() && saved[i].value("xxh3", Json()) == now[i]["xxh3"];
  return format("shard %zu is %s, and then it was %s%s", i + 1, is.c_str(), was.c_str(),
                renamed ? ", with the same content" : "");
}

// Nothing if the shards are those of the run, otherwise what differs.
std::string data_difference(const Json& saved, const Json& now) {
  if (saved == now) return {};
  if (!saved.is_array() || saved.size() != now.size()) {
    return format("now %zu shard%s, then %zu", now.size(), now.size() == 1 ? "" : "s",
                  saved.is_array() ? saved.size() : 0);
  }
  const auto [was, is] = std::mismatch(saved.begin(), saved.end(), now.begin());
  return shard_difference(saved, now, static_cast<std::size_t>(was - saved.begin()));
}

// The first key in which two objects differ; empty if there is none.
std::string first_difference(const Json& saved, const Json& now) {
  for (const auto& [key, value] : now.items()) {
    if (!saved.contains(key) || saved[key] != value) return key;
  }
  for (const auto& [key, value] : saved.items()) {
    if (!now.contains(key)) return key;
  }
  return {};
}

std::string value_text(const Json& object, const std::string& key) {
  if (!object.contains(key)) return "nothing";
  return object[key].is_string() ? escaped(object[key].get<std::string>()) : escaped(object[key].dump());
}

}  // namespace

Json TrainState::to_json() const {
  Json json = {{"step", step},
               {"updates", updates},
               {"windows", windows},
               {"micro_steps", micro_steps},
               {"skipped", skipped},
               {"transient", transient},
               {"loss", optional_number(loss)},
               {"val_loss", optional_number(val_loss)},
               {"spikes", spikes.to_json()}};
  if (best) json["best"] = {{"step", best->step}, {"val_loss", best->val_loss}};
  if (!best_on.empty()) json["best_on"] = best_on;
  return json;
}

TrainState TrainState::from_json(const Json& object, const std::string& source) {
  TrainState state;
  state.step = json_int(object, "step", 0, kMaxSteps, source);
  state.updates = json_int(object, "updates", 0, state.step, source);
  state.windows = static_cast<std::uint64_t>(json_int(object, "windows", 0, kMaxCounter, source));
  state.micro_steps = static_cast<std::uint64_t>(json_int(object, "micro_steps", 0, kMaxCounter, source));
  state.skipped = json_int(object, "skipped", 0, state.step, source);
  state.transient = json_int(object, "transient", 0, state.step, source);
  state.loss = read_optional(object, "loss", source);
  state.val_loss = read_optional(object, "val_loss", source);
  state.spikes = SpikeDetector::from_json(json_object(object, "spikes", source), source);
  if (object.contains("best")) {
    const Json& best = json_object(object, "best", source);
    state.best = Best{json_int(best, "step", 0, state.step, source), json_number(best, "val_loss", source)};
  }
  if (object.contains("best_on")) state.best_on = json_string(object, "best_on", source);
  return state;
}

Checkpoint Checkpoint::open(const std::string& path, std::int64_t step, Values values) {
  const std::string manifest_path = path + "/" + kManifestName, source = escaped(manifest_path);
  const Json manifest = parse_json(read_text_file(manifest_path, kMaxManifestBytes), source,
                                   {.bytes = kMaxManifestBytes, .values = kMaxConfigValues});
  const auto files = manifest.is_object() ? manifest.find("files") : manifest.end();
  if (files == manifest.end() || !files->is_array() || files->size() != 2 || !(*files)[0].is_object() ||
      !(*files)[1].is_object()) {
    fail(Exit::bad_file, "%s: files: expected %s or %s, and %s", source.c_str(), kModelName, kAdapterName, kStateName);
  }
  const bool adapter = (*files)[0].value("name", Json()) == kAdapterName;
  const std::string parameters = path + "/" + parameters_name(adapter);
  Checkpoint checkpoint(adapter ? ModelFile::open_adapter(parameters) : ModelFile::open(parameters),
                        TensorFile::open(path + "/" + kStateName, FileKind::training_state));
  checkpoint.model_.require_trainable();
  check_against_manifest((*files)[0], checkpoint.model_.file(), source);
  check_against_manifest((*files)[1], checkpoint.training_, source);
  checkpoint.read_state(manifest, step);
  if (values == Values::unknown) checkpoint.check_tensors();
  return checkpoint;
}

void Checkpoint::read_state(const Json& manifest, std::int64_t step) {
  const std::string source = escaped(training_.path());
  run_ = json_object(training_.config(), "run", source);
  state_ = TrainState::from_json(json_object(training_.config(), "training", source), source);
  const Json head = manifest_head(state_, model(), json_object(run_, "settings", source));
  for (const auto& [key, value] : head.items()) {
    if (manifest.value(key, Json()) == value) continue;
    fail(Exit::bad_file, "%s: %s: the manifest disagrees with the files",
         escaped(parent_directory(training_.path())).c_str(), key.c_str());
  }
  if (state_.step != step) {
    fail(Exit::bad_file, "%s: step: got %lld, expected the %lld of its name", source.c_str(),
         static_cast<long long>(state_.step), static_cast<long long>(step));
  }
  if (training_.config().value("model", Json()) != model_.file().config()["model"]) {
    fail(Exit::bad_file, "%s: model: not that of %s", source.c_str(), parameters_name(model_.lora().has_value()));
  }
}

void Checkpoint::check_tensors() const {
  const Optimizer& made_with = optimizer();
  const std::vector<StateTensor> tensors = state_tensors(made_with, model_.table());
  in_parallel(tensors.size(), helper_threads(), [&](std::size_t i) {
    const TensorRole role = tensors[i].role;
    const TensorSpec& spec = model_.table().specs()[tensors[i].spec];
    check_values(role == TensorRole::parameter ? model_.file() : training_, state_tensor_name(made_with, role, spec),
                 spec.shape);
  });
  if (model_.has_tokenizer()) model_.tokenizer_json();  // verifies its hash
  if (in_fp8()) check_values(training_, kFp8Tensor, fp8_shape(model()));
}

const Optimizer& Checkpoint::optimizer() const {
  return optimizer_of(run_["settings"], escaped(training_.path()));
}

// Decided by the settings, not by the file, so that a missing history of scales is found to be damage.
bool Checkpoint::in_fp8() const {
  return run_["settings"].value("precision", Json()) == "fp8";
}

void Checkpoint::require_same_model(const RunIdentity& run, const std::string& source) const {
  if (model_.lora().has_value() != run.adapter.has_value()) {
    fail(Exit::usage, "--lora-r: %s was made %s it. %s, or start in another --out", source.c_str(),
         model_.lora() ? "with" : "without", model_.lora() ? "Give it again" : "Leave it out");
  }
  const Json saved = config_to_json(model());
  Json now = config_to_json(run.model);
  // A new model takes these keys from its tokenizer. If nothing else differs, the tokenizer was replaced.
  Json with_saved_ids = now;
  for (const char* key : {"bos_id", "eos_ids"}) with_saved_ids[key] = saved[key];
  const std::string saved_tokenizer = model_.has_tokenizer() ? model_.tokenizer_json() : std::string();
  if (saved != now && with_saved_ids == saved && saved_tokenizer != run.tokenizer) {
    fail(Exit::usage, "--tokenizer: %s was made %s, this start has %s. %s", source.c_str(),
         saved_tokenizer.empty() ? "without a tokenizer" : "with a tokenizer",
         run.tokenizer.empty()     ? "none"
         : saved_tokenizer.empty() ? "one"
                                   : "another one",
         saved_tokenizer.empty()
             ? "Start in another --out"
             : "Put its tokenizer.json back beside the training shards, or name it with --tokenizer");
  }
  const std::string key = first_difference(saved, now);
  if (key.empty()) return;
  const std::string advice = key == "vocab_size" && run.began_from.empty()
                                 ? ". With --config, --vocab-size " + value_text(saved, key) + " is the same model"
                                 : std::string();
  refuse_other_run(Exit::usage,
                   format("--config or --model: %s is %s, but %s has %s%s", key.c_str(), value_text(now, key).c_str(),
                          source.c_str(), value_text(saved, key).c_str(), advice.c_str()));
}

void Checkpoint::require_same_beginning(const RunIdentity& run, const std::string& source) const {
  if (!run_.contains("began_from")) return;  // made by a version that did not record it
  const std::string saved = json_string(run_, "began_from", source);
  if (saved == run.began_from) return;
  if (saved.empty()) {
    refuse_other_run(Exit::usage, format("--model: %s began with new parameters (--config)", source.c_str()));
  }
  refuse_other_run(
      Exit::usage,
      format("%s: %s began from a model file with header hash %s, %s", run.began_from.empty() ? "--config" : "--model",
             source.c_str(), escaped(saved).c_str(),
             run.began_from.empty() ? "not with new parameters" : ("this one has " + run.began_from).c_str()));
}

void Checkpoint::require_same_data(const RunIdentity& run, const std::string& source) const {
  const std::string difference = data_difference(run_.value("data", Json()), run.data);
  if (difference.empty()) return;
  const bool adapter = model_.lora().has_value();
  refuse_other_run(
      Exit::bad_file,
      format("--train: %s was trained on other data: %s. Bring that data back to resume; in another --out --%s %s "
             "continues from these weights",
             source.c_str(), difference.c_str(), adapter ? "adapter" : "model",
             escaped(parent_directory(training_.path()) + "/" + parameters_name(adapter)).c_str()));
}

// Of a start whose model, beginning or data are others: most likely its --out was meant to be new.
void Checkpoint::refuse_other_run(Exit code, const std::string& difference) const {
  const Json data = run_.value("data", Json());
  const std::size_t shards = data.is_array() ? data.size() : 0;
  fail(code,
       "--out: %s holds another run: %lld steps of a model with %lld layers of %lld, on %s%s. Use another --out, or "
       "remove this one. %s",
       escaped(parent_directory(parent_directory(training_.path()))).c_str(), static_cast<long long>(state_.step),
       static_cast<long long>(model().num_layers), static_cast<long long>(model().hidden_size),
       shards > 0 ? shard_text(data[0]).c_str() : "no shard", shards > 1 ? " and more" : "", difference.c_str());
}

void Checkpoint::require_same_run(const RunIdentity& run) const {
  const std::string source = escaped(parent_directory(training_.path()));
  require_same_model(run, source);
  require_same_beginning(run, source);
  require_same_data(run, source);
  const Json& saved = json_object(run_, "settings", source);
  const std::string now = optimizer_of(run.settings, source).name(), before = optimizer().name();
  if (now != before) {
    fail(Exit::usage,
         "--optimizer: got %s, but %s was made with %s, whose state it cannot continue. Give the same one, or start in "
         "another --out",
         now.c_str(), source.c_str(), before.c_str());
  }
  if (const std::string key = first_difference(saved, run.settings); !key.empty()) {
    fail(Exit::usage, "--%s: got %s, but %s was made with %s. Give the same value, or start in another --out",
         run.settings.contains(key) ? key.c_str() : escaped(key).c_str(), value_text(run.settings, key).c_str(),
         source.c_str(), value_text(saved, key).c_str());
  }
  const std::int64_t saved_steps = json_int(run_, "steps", 1, kMaxSteps, source);
  if (state_.step > saved_steps) {
    fail(Exit::bad_file, "%s: step: got %lld, but the run that made it had %lld", source.c_str(),
         static_cast<long long>(state_.step), static_cast<long long>(saved_steps));
  }
  const char* const option = run.of_epochs ? "--epochs" : "--steps";
  if (run.steps < saved_steps) {
    fail(Exit::usage, "%s: got %lld steps, but %s belongs to a run of %lld. Steps can be added, not taken away", option,
         static_cast<long long>(run.steps), source.c_str(), static_cast<long long>(saved_steps));
  }
  if (run.steps > saved_steps) {
    log_info("%s: extended from %lld to %lld steps; the learning rate now follows the longer schedule", option,
             static_cast<long long>(saved_steps), static_cast<long long>(run.steps));
  }
  const std::string saved_device = json_string(run_, "device", source);
  if (saved_device != run.device) {
    log_warning("%s was computed on %s, this run goes on with %s: the numbers will differ in rounding", source.c_str(),
                escaped(saved_device).c_str(), run.device.c_str());
  }
}

void Checkpoint::load(TrainModel& model) const {
  std::vector<float> values;
  for (const TensorSpec& spec : model.table().specs()) {
    values.resize(static_cast<std::size_t>(spec.elements));
    model_.read_parameter(spec, values.data());
    model.write_tensor(TensorRole::parameter, spec, values.data());
  }
  const Optimizer& made_with = optimizer();
  for (const StateTensor& tensor : without_parameters(made_with, model.table())) {
    const TensorSpec& spec = model.table().specs()[tensor.spec];
    values.resize(static_cast<std::size_t>(spec.elements));
    training_.read_f32(training_.at(state_tensor_name(made_with, tensor.role, spec)), values.data());
    model.write_tensor(tensor.role, spec, values.data());
  }
  if (!in_fp8()) return;
  const TensorInfo& tensor = training_.at(kFp8Tensor);
  values.resize(tensor.elements());
  training_.read_f32(tensor, values.data());
  model.set_fp8_state(values);
}

CheckpointKeeper::CheckpointKeeper(const RunDirectory& directory, RunIdentity identity, std::int64_t keep)
    : directory_(directory), identity_(std::move(identity)), keep_(static_cast<std::size_t>(keep)) {
  if (keep < 2) fail(Exit::usage, "--keep: got %lld, expected at least 2", static_cast<long long>(keep));
}

std::string CheckpointKeeper::last_path() const {
  return intact_.empty() ? std::string() : directory_.checkpoint_path(last_saved());
}

std::string CheckpointKeeper::best_path() const {
  return best_ ? directory_.checkpoint_path(*best_) : std::string();
}

std::optional<Checkpoint> CheckpointKeeper::newest_intact(ResumeMode mode) const {
  const std::vector<RunDirectory::Entry> entries = directory_.checkpoints();
  for (const RunDirectory::Entry& entry : entries) {
    const std::string path = directory_.file(entry.name);
    try {
      if (!entry.problem.empty()) fail(Exit::bad_file, "%s: %s", escaped(path).c_str(), entry.problem.c_str());
      directory_.require_access(entry);
      return Checkpoint::open(path, entry.step);
    } catch (const Error& error) {
      if (error.code() != Exit::bad_file) throw;
      if (mode == ResumeMode::must && entry.step >= 0) {
        fail(Exit::bad_file, "--resume must: the newest checkpoint is damaged: %s", error.what());
      }
      log_warning("skipping a damaged checkpoint: %s", error.what());
    }
  }
  const std::string where = escaped(directory_.path());
  if (!entries.empty()) {
    fail(Exit::bad_file, "%s: none of its %zu checkpoints is whole. Repair or remove them, or choose another --out",
         where.c_str(), entries.size());
  }
  if (mode == ResumeMode::must) fail(Exit::bad_file, "--resume must: %s holds no checkpoint", where.c_str());
  return std::nullopt;
}

// The newest checkpoint up to a step that was the best one when it was saved. The one that a state names may have been deleted
// since, or was never complete.
std::optional<std::int64_t> CheckpointKeeper::newest_best(std::int64_t up_to) const {
  for (const RunDirectory::Entry& entry : directory_.checkpoints()) {
    if (entry.step < 0 || entry.step > up_to || !entry.problem.empty()) continue;
    try {
      const std::optional<TrainState::Best> best =
          Checkpoint::open(directory_.file(entry.name), entry.step, Checkpoint::Values::checked).state().best;
      if (best && best->step == entry.step) return entry.step;
    } catch (const Error&) {  // damaged: nothing to be kept
    }
  }
  return std::nullopt;
}

std::optional<std::int64_t> saved_warmup_steps(const std::string& out) {
  std::error_code missing;
  if (!std::filesystem::is_directory(out, missing)) return std::nullopt;
  for (const RunDirectory::Entry& entry : RunDirectory::checkpoints_in(out)) {
    try {
      const std::string path = out + "/" + entry.name + "/" + kStateName;
      const Json run = TensorFile::open(path, FileKind::training_state).config().value("run", Json());
      return json_int(json_object(run, "settings", path), "warmup-steps", 0, kMaxSteps, path);
    } catch (const std::exception&) {  // damaged: resume() says what is wrong with it
    }
  }
  return std::nullopt;
}

std::optional<TrainState> CheckpointKeeper::resume(ResumeMode mode, TrainModel& model) {
  if (mode == ResumeMode::never && !directory_.was_empty()) {
    fail(Exit::usage, "--resume never: %s is not empty. Choose another --out", escaped(directory_.path()).c_str());
  }
  const std::optional<Checkpoint> checkpoint = newest_intact(mode);
  if (checkpoint) checkpoint->require_same_run(identity_);
  directory_.remove_leftovers();  // only now: the directory is this run's
  if (!checkpoint) return std::nullopt;
  checkpoint->load(model);
  intact_.insert(checkpoint->state().step);
  best_ = checkpoint->state().best ? newest_best(checkpoint->state().best->step) : std::nullopt;
  return checkpoint->state();
}

TensorSource tensors_of(TrainModel& model) {
  const auto tensor = std::make_shared<std::vector<float>>();  // a model can only read out complete tensors
  return {[&model, tensor](TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count,
                           float* buffer) -> const float* {
            if (first == 0) {
              tensor->resize(static_cast<std::size_t>(spec.elements));
              model.read_tensor(role, spec, tensor->data());
            }
            std::copy_n(tensor->data() + first, count, buffer);
            return buffer;
          },
          false, model.fp8_state()};
}

TensorSource tensors_of(const StateCopy& copy, std::vector<float> fp8_state) {
  return {[&copy](TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t count, float* buffer) {
            return copy.read(role, spec, first, count, buffer);
          },
          true, std::move(fp8_state)};
}

void take_part_in_copy(TrainModel& model) {
  std::vector<float> values;
  for (const StateTensor& tensor : state_tensors(model.optimizer(), model.table())) {
    const TensorSpec& spec = model.table().specs()[tensor.spec];
    values.resize(static_cast<std::size_t>(spec.elements));
    model.read_tensor(tensor.role, spec, values.data());
  }
}

std::optional<TrainState> resume_on_all(Communicator& ranks, CheckpointKeeper* keeper, ResumeMode mode,
                                        TrainModel& model) {
  std::optional<TrainState> state;
  do_together(ranks, [&] {
    if (keeper != nullptr) state = keeper->resume(mode, model);
  });
  const std::string path = ranks.broadcast_text(state ? keeper->last_path() : std::string());
  const std::int64_t step = ranks.broadcast(state ? state->step : 0);
  if (path.empty()) return std::nullopt;
  do_together(ranks, [&] {
    if (keeper != nullptr) return;
    const Checkpoint checkpoint = Checkpoint::open(path, step);
    checkpoint.load(model);
    state = checkpoint.state();
  });
  return state;
}

void CheckpointKeeper::write(const std::string& path, const TrainState& state, const TensorTable& table,
                             const TensorSource& source) const {
  const std::string model_path = path + "/" + parameters_name(identity_.adapter.has_value()),
                    training_path = path + "/" + kStateName;
  TensorFileWriter model = declare_model(model_path, identity_, table);
  TensorFileWriter training = declare_training_state(training_path, identity_, state, table, !source.fp8_state.empty());
  // Both files may be filled at the same time, unless an injected fault counts bytes in the order of the files. They
  // are synced and renamed one after the other.
  in_parallel(2, source.for_many_threads && !write_fault_armed() ? 2 : 1, [&](std::size_t file) {
    if (file == 0) {
      fill_model(identity_, table, source, model);
      model.publish();
    } else {
      fill_training_state(optimizer_of(identity_.settings, path), table, source, training);
    }
  });
  training.publish();
  write_manifest(path, state, model, training);
}

void CheckpointKeeper::write_manifest(const std::string& directory, const TrainState& state,
                                      const TensorFileWriter& model, const TensorFileWriter& training) const {
  Json manifest = manifest_head(state, identity_.model, identity_.settings);
  manifest["made_by"] = "weft train_llama " + identity_.version;
  manifest["files"] = {describe_file(directory + "/" + parameters_name(identity_.adapter.has_value()), model.tensors()),
                       describe_file(directory + "/" + kStateName, training.tensors())};
  write_file_atomically(directory + "/" + kManifestName, manifest.dump(1) + "\n");
}

std::string CheckpointKeeper::save(const TrainState& state, const TensorTable& table, const TensorSource& source) {
  try {
    const std::string temporary = directory_.begin_checkpoint(state.step);
    write(temporary, state, table, source);
    read_back(temporary, state, table, source);
    directory_.commit_checkpoint(state.step);
  } catch (...) {
    directory_.discard_checkpoint(state.step);
    throw;
  }
  return keep(state);
}

// Called when the checkpoint of `state` is complete: records it, removes old ones and returns its path.
std::string CheckpointKeeper::keep(const TrainState& state) {
  intact_.insert(state.step);
  if (state.best && state.best->step == state.step) best_ = state.step;  // only now may the previous best be removed
  remove_old();
  return directory_.checkpoint_path(state.step);
}

SharedCheckpoint CheckpointKeeper::begin_shared(const TrainState& state, const TensorTable& table,
                                                std::vector<float> fp8_state) const {
  const std::string path = directory_.begin_checkpoint(state.step);
  SharedCheckpoint files{path,
                         declare_model(path + "/" + parameters_name(identity_.adapter.has_value()), identity_, table),
                         declare_training_state(path + "/" + kStateName, identity_, state, table, !fp8_state.empty()),
                         std::move(fp8_state),
                         {},
                         {},
                         {}};
  files.model_path = files.model.share();
  files.training_path = files.training.share();
  const std::size_t count = table.specs().size();
  for (std::size_t i = 0; i < count; ++i) files.offsets.push_back(files.model.tensors()[i].offset);
  const std::size_t states = without_parameters(optimizer_of(identity_.settings, path), table).size();
  for (std::size_t i = 0; i < states; ++i) files.offsets.push_back(files.training.tensors()[i].offset);
  return files;
}

std::string CheckpointKeeper::commit_shared(SharedCheckpoint& files, const TrainState& state, const TensorTable& table,
                                            std::span<const TensorRead> tensors) {
  const Optimizer& optimizer = optimizer_of(identity_.settings, files.directory);
  const std::vector<StateTensor> all = state_tensors(optimizer, table);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorRole role = all[i].role;
    if (tensors[i].first_bad >= 0) {
      throw not_finite(state, bad_value_text(state_tensor_name(optimizer, role, table.specs()[all[i].spec]),
                                             static_cast<std::size_t>(tensors[i].first_bad), tensors[i].bad_value));
    }
    (role == TensorRole::parameter ? files.model : files.training).written_by_others(tensors[i].hash);
  }
  if (!identity_.tokenizer.empty()) files.model.write(identity_.tokenizer.data(), identity_.tokenizer.size());
  if (!files.fp8_state.empty()) files.training.write(files.fp8_state.data(), files.fp8_state.size() * sizeof(float));
  files.model.publish();
  files.training.publish();
  write_manifest(files.directory, state, files.model, files.training);
  Checkpoint::open(files.directory, state.step, Checkpoint::Values::checked);
  directory_.commit_checkpoint(state.step);
  return keep(state);
}

Error CheckpointKeeper::not_finite(const TrainState& state, const std::string& value) const {
  return {Exit::numeric,
          format("step %lld: %s. %s. Lower --lr or --grad-clip", static_cast<long long>(state.step), value.c_str(),
                 intact_.empty() ? "There is no older checkpoint"
                                 : ("The newest checkpoint is " + escaped(last_path())).c_str())};
}

// Nothing older is removed before the new checkpoint has been read from the disk and found intact. A value that is not
// finite makes the read fail like damage does; so the source is searched for one, to report the true cause.
void CheckpointKeeper::read_back(const std::string& path, const TrainState& state, const TensorTable& table,
                                 const TensorSource& source) const {
  try {
    Checkpoint::open(path, state.step);
  } catch (const Error& error) {
    if (error.code() != Exit::bad_file) throw;
    if (const std::string value = first_not_finite(optimizer_of(identity_.settings, path), table, source);
        !value.empty())
      throw not_finite(state, value);
    throw;
  }
}

// Removes what is older than the newest `keep_` checkpoints that this process has found intact. One that it has not read
// may be damaged, so it does not count among them.
void CheckpointKeeper::remove_old() const {
  if (intact_.size() < keep_) return;
  const std::int64_t oldest_kept = *std::next(intact_.rbegin(), static_cast<std::ptrdiff_t>(keep_) - 1);
  for (const RunDirectory::Entry& entry : directory_.checkpoints()) {
    if (entry.step < 0 || entry.step >= oldest_kept || !entry.problem.empty()) continue;
    if (entry.step == best_) continue;
    try {
      directory_.remove_checkpoint(entry.step);
    } catch (const Error& error) {  // costs only disk space
      log_warning("%s", error.what());
    }
  }
}

}  // namespace weft
