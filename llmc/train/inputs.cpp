#include "llmc/train/inputs.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/model/limits.h"
#include "llmc/model/presets.h"
#include "llmc/text/chat_format.h"
#include "llmc/text/tokenizer.h"
#include "llmc/train/initialize.h"

namespace weft {

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kMaxTokenizerBytes = 100'000'000;
constexpr std::uint64_t kMaxChatFormatBytes = 1 << 20;
constexpr std::int64_t kVocabularyRows = 128;  // a new model's vocabulary is padded to a multiple of this
// Hashing shards takes about a second per gigabyte. Data of at most this many tokens is verified at every start,
// larger data only in a dry run.
constexpr std::int64_t kVerifyTokens = 200'000'000;

// An adapter that is trained further begins with the values of --adapter; any other one is added to the weights.
void open_adapter(const TrainSettings& settings, TrainInputs& inputs) {
  const std::optional<LoraConfig> lora = settings.lora(lora_targets(inputs.config));
  if (lora) {
    if (const std::string reason = lora_unsupported_reason(*lora, inputs.config); !reason.empty()) {
      fail(Exit::usage, "--lora-r: %s", reason.c_str());
    }
  }
  if (settings.adapter.empty()) return;
  ModelFile adapter = ModelFile::open_adapter(settings.adapter);
  if (lora && *lora != *adapter.lora()) {
    fail(Exit::usage,
         "--adapter: %s has --lora-r %lld --lora-alpha %g --lora-targets %s. Give the same to train it further",
         escaped(settings.adapter).c_str(), static_cast<long long>(adapter.lora()->rank), adapter.lora()->alpha,
         adapter.lora()->target_names().c_str());
  }
  inputs.began_from += format(" %s", hash_text(adapter.file().header_hash()).c_str());
  if (!lora) return inputs.weights->add_adapter("--adapter", std::move(adapter));
  inputs.weights->require_fitting("--adapter", adapter);
  inputs.adapter = std::move(adapter);
}

void require_norm(const TrainSettings& settings, const std::string& path, NormKind norm) {
  if (settings.norm_given && settings.norm != norm_kind_name(norm)) {
    fail(Exit::usage, "--norm: got %s, but %s has %s", settings.norm.c_str(), escaped(path).c_str(),
         norm_kind_name(norm));
  }
}

void open_model(const TrainSettings& settings, TrainInputs& inputs) {
  if (settings.model.empty()) {
    inputs.config = settings.lora_r > 0         ? random_model_config(settings.config, "--config")
                    : settings.config_is_file() ? config_of_file(settings.config)
                                                : preset_config(settings.config);
    inputs.frozen_quantization = std::exchange(inputs.config.quantization, {});
    require_trainable(inputs.config, settings.config);
    if (inputs.config.norm == NormKind::layernorm) {  // of a family that has no other
      require_norm(settings, settings.config, inputs.config.norm);
    } else if (settings.norm == "layernorm") {
      inputs.config.norm = NormKind::layernorm;
    }
  } else {
    inputs.weights = ModelFile::open(settings.model);
    inputs.config = inputs.weights->config();
    inputs.began_from = inputs.base = hash_text(inputs.weights->file().header_hash());
    inputs.trains_adapter = settings.lora_r > 0;
    if (inputs.trains_adapter) inputs.frozen_quantization = std::exchange(inputs.config.quantization, {});
    if (settings.eval) inputs.config.quantization = {};  // the loss is that of the values
    require_trainable(inputs.config, settings.model);
    open_adapter(settings, inputs);
    require_norm(settings, settings.model, inputs.config.norm);
  }
  // With --compare the reference dump gives the sequence length.
  if (settings.compare.empty() && settings.seq_len > inputs.config.max_positions) {
    fail(Exit::usage, "--seq-len: got %lld, expected at most the %lld positions of the model",
         static_cast<long long>(settings.seq_len), static_cast<long long>(inputs.config.max_positions));
  }
}

void open_tokenizer(const TrainSettings& settings, TrainInputs& inputs) {
  std::error_code error;
  const std::optional<TokenDataset>& data = inputs.train ? inputs.train : inputs.val;
  const std::string beside = data ? data->directory() + "/tokenizer.json" : std::string();
  if (!settings.tokenizer.empty()) {
    inputs.tokenizer_source = settings.tokenizer;
  } else if (inputs.weights && inputs.weights->has_tokenizer()) {
    inputs.tokenizer_source = settings.model;
    inputs.tokenizer = inputs.weights->tokenizer_json();
    return;
  } else if (!beside.empty() && fs::symlink_status(beside, error).type() != fs::file_type::not_found) {
    inputs.tokenizer_source = beside;
  } else {
    return;
  }
  inputs.tokenizer = read_text_file(inputs.tokenizer_source, kMaxTokenizerBytes);
}

void open_chat(TrainInputs& inputs) {
  inputs.chat = inputs.weights ? inputs.weights->chat_members() : Json::object();
  if (!inputs.train) return;
  const std::string path = inputs.train->directory() + "/chat_format.json";
  std::error_code error;
  if (fs::symlink_status(path, error).type() == fs::file_type::not_found) return;
  const std::string source = escaped(path);
  Json format = parse_json(read_text_file(path, kMaxChatFormatBytes), source);
  ChatFormat::from_json(format, source);
  if (inputs.chat.value(kChatFormat, Json()) == format) return;
  // The template that the model came with writes another form.
  inputs.chat = {{kChatFormat, std::move(format)}};
}

// The vocabulary of a new model: --vocab-size if it is given, otherwise the ids of the training data, padded to a
// multiple of kVocabularyRows, with which GEMMs are faster. Without data (--bench, --print-config) that of the
// configuration stays.
void choose_vocabulary(const TrainSettings& settings, TrainInputs& inputs) {
  if (inputs.weights) return;
  ModelConfig& config = inputs.config;
  if (settings.vocab_size > 0) {
    config.vocab_size = settings.vocab_size;
  } else if (inputs.train) {
    const std::int64_t ids = inputs.train->vocab_size();
    config.vocab_size =
        std::max(ids, std::min(kMaxVocab, (ids + kVocabularyRows - 1) / kVocabularyRows * kVocabularyRows));
  }
  config.tokenizer_vocab = config.vocab_size;
}

void check_shards(const TokenDataset& data, const char* option, const TrainInputs& inputs) {
  const std::string name = escaped(data.shards().front().path());
  if (data.vocab_size() > inputs.config.vocab_size) {
    fail(Exit::usage, "%s: %s has a vocabulary of %lld, the model one of %lld. Choose another %s", option, name.c_str(),
         static_cast<long long>(data.vocab_size()), static_cast<long long>(inputs.config.vocab_size),
         inputs.weights ? "model or tokenizer" : "--vocab-size or tokenizer");
  }
  if (inputs.train && data.tokenizer_hash() != inputs.train->tokenizer_hash()) {
    fail(Exit::bad_file, "%s: %s was made with another tokenizer than the shards of --train", option, name.c_str());
  }
  if (!inputs.tokenizer.empty() && data.tokenizer_hash() != xxh3_64(inputs.tokenizer)) {
    fail(Exit::bad_file, "%s: %s was made with another tokenizer than that of %s", option, name.c_str(),
         escaped(inputs.tokenizer_source).c_str());
  }
}

// The objective and what the shards hold.
void check_kind(const TokenDataset& data, const char* option, const TrainSettings& settings) {
  if (data.of_pairs() == settings.dpo()) return;
  const std::string name = escaped(data.shards().front().path());
  if (data.of_pairs()) {
    fail(Exit::usage, "%s: %s holds pairs of answers, which --objective dpo trains on and measures", option,
         name.c_str());
  }
  fail(Exit::usage,
       "%s: %s holds %s, and --objective dpo needs pairs of answers. Prepare a chosen and a rejected one for each "
       "prompt (doc/fine_tuning.md)",
       option, name.c_str(), data.of_documents() ? "conversations" : "plain text");
}

void verify_data(const TokenDataset& data, bool dry_run) {
  if (dry_run || data.tokens() <= kVerifyTokens) data.verify();
}

// A model from scratch takes its special ids from the tokenizer of its data.
void adopt_tokenizer(TrainInputs& inputs) {
  ModelConfig& config = inputs.config;
  if (!inputs.weights && inputs.train) config.tokenizer_vocab = inputs.train->vocab_size();
  if (inputs.tokenizer.empty()) return;
  const Tokenizer tokenizer = Tokenizer::from_json(inputs.tokenizer, escaped(inputs.tokenizer_source));
  if (tokenizer.vocab_size() > config.vocab_size) {
    fail(Exit::usage, "--tokenizer: %s has %lld tokens, the model %lld", escaped(inputs.tokenizer_source).c_str(),
         static_cast<long long>(tokenizer.vocab_size()), static_cast<long long>(config.vocab_size));
  }
  if (inputs.weights) return;
  config.bos_id = tokenizer.bos_id();
  config.eos_ids.clear();
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {  // GPT-NeoX, Llama 3, Llama 2
    if (const auto id = tokenizer.id_of(name)) config.eos_ids.push_back(*id);
  }
}

// A run must not write where it reads: model.bin and state.bin beside the shards could match the pattern of --train.
void check_output(const TrainSettings& settings, const TrainInputs& inputs) {
  if (settings.out.empty()) return;
  std::error_code error;
  std::vector<std::string> sources;
  if (inputs.train) sources.push_back(inputs.train->directory());
  if (inputs.val) sources.push_back(inputs.val->directory());
  if (!settings.model.empty()) sources.push_back(parent_directory(settings.model));
  for (const std::string& source : sources) {
    if (!fs::equivalent(settings.out, source, error)) continue;
    fail(Exit::usage, "--out: %s holds the input files. Choose a directory of its own for the run",
         escaped(settings.out).c_str());
  }
  if (fs::exists(settings.out, error) && !fs::is_directory(settings.out, error)) {
    fail(Exit::usage, "--out: %s is not a directory", escaped(settings.out).c_str());
  }
}

}  // namespace

TrainInputs open_inputs(const TrainSettings& settings) {
  TrainInputs inputs;
  open_model(settings, inputs);
  const RowOptions rows{settings.document_mask, !settings.no_pack};
  if (!settings.train.empty()) inputs.train.emplace(settings.train, settings.seq_len, WindowUse::training, rows);
  if (!settings.val.empty() && (inputs.train || settings.eval)) {
    inputs.val.emplace(settings.val, settings.seq_len, WindowUse::measurement, rows);
  }
  if (inputs.train) check_kind(*inputs.train, "--train", settings);
  if (inputs.val) check_kind(*inputs.val, "--val", settings);
  choose_vocabulary(settings, inputs);
  open_tokenizer(settings, inputs);
  open_chat(inputs);
  check_output(settings, inputs);
  if (inputs.train) check_shards(*inputs.train, "--train", inputs);
  if (inputs.val) check_shards(*inputs.val, "--val", inputs);
  adopt_tokenizer(inputs);
  if (inputs.train) verify_data(*inputs.train, settings.dry_run);
  if (inputs.val) verify_data(*inputs.val, settings.dry_run);
  return inputs;
}

void load_parameters(const TrainInputs& inputs, std::uint64_t seed, TrainModel& model) {
  const std::optional<ModelFile>& source = inputs.trains_adapter ? inputs.adapter : inputs.weights;
  if (!source) return initialize_parameters(model, seed);
  std::vector<float> values;
  for (const TensorSpec& spec : model.table().specs()) {
    values.resize(static_cast<std::size_t>(spec.elements));
    source->read_values(spec, values.data());
    model.write_tensor(TensorRole::parameter, spec, values.data());
  }
}

void load_frozen(const TrainInputs& inputs, TrainModel& model) {
  if (!inputs.trains_adapter) return;
  std::vector<float> values;
  std::vector<std::byte> bytes;
  const TensorTable table = model.frozen_table();
  for (const TensorSpec& spec : table.specs()) {
    if (spec.kind != ValueKind::floats) {
      bytes.resize(spec.bytes);
      inputs.weights->read_quantized(spec, bytes.data());
      model.write_frozen_quantized(spec, bytes.data());
      continue;
    }
    values.resize(static_cast<std::size_t>(spec.elements));
    inputs.weights->read_values(spec, values.data());
    model.write_frozen(spec, values.data());
  }
}

}  // namespace weft
