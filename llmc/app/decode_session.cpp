#include "llmc/app/decode_session.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <utility>

#include "llmc/app/paths.h"
#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/engine_sequence.h"
#include "llmc/infer/fault_injection.h"
#include "llmc/infer/prompt.h"
#include "llmc/model/presets.h"

namespace weft {

namespace {

ModelFile open_model(const std::string& path, const std::string& adapter = "") {
  refuse_model_directory(path);
  ModelFile file = ModelFile::open(path);
  if (!adapter.empty()) file.add_adapter("--adapter", ModelFile::open_adapter(adapter));
  return file;
}

// Empty if the file has none.
std::optional<Tokenizer> load_tokenizer(const ModelFile& file) {
  if (!file.has_tokenizer()) return std::nullopt;
  const std::string source = escaped(file.file().path()) + ": " + kTokenizerTensor;
  Tokenizer tokenizer = Tokenizer::from_json(file.tokenizer_json(), source);
  if (tokenizer.vocab_size() > file.config().vocab_size) {
    fail(Exit::bad_file, "%s: got %lld tokens, expected at most the model's %lld", source.c_str(),
         static_cast<long long>(tokenizer.vocab_size()), static_cast<long long>(file.config().vocab_size));
  }
  return tokenizer;
}

// Empty if the file has no chat format, or no tokenizer.
std::optional<Chat> load_chat(const ModelFile& file, const std::optional<Tokenizer>& tokenizer) {
  const Json members = file.chat_members();
  if (!members.contains(kChatFormat)) return std::nullopt;
  const std::string source = escaped(file.file().path()) + ": " + kChatFormat;
  ChatFormat format = ChatFormat::from_json(members[kChatFormat], source);
  if (!tokenizer) return std::nullopt;
  return Chat(std::move(format), *tokenizer);
}

std::string read_standard_input() {
  std::string text;
  char piece[1 << 16];
  while (std::cin.read(piece, sizeof piece), std::cin.gcount() > 0) {
    text.append(piece, static_cast<std::size_t>(std::cin.gcount()));
    if (text.size() > kMaxPromptBytes) {
      fail(Exit::bad_file, "standard input: more than the %llu bytes that a prompt may have",
           static_cast<unsigned long long>(kMaxPromptBytes));
    }
  }
  if (std::ferror(stdin) != 0) fail(Exit::bad_file, "standard input: cannot read. Is it closed?");
  return text;
}

std::string read_prompt_text(const InferSettings& settings) {
  if (settings.task == InferTask::prompt) return settings.prompt;
  return settings.prompt_file == "-" ? read_standard_input() : read_text_file(settings.prompt_file, kMaxPromptBytes);
}

// Logs one line about a loaded model. `room`: what its memory is for. `threads`: the CPU threads that compute; 0 if the GPU
// does.
template <typename Model>
void announce(const Model& model, const std::string& name, const std::string& source, std::int64_t threads,
              const std::string& room) {
  const std::string on_threads =
      threads > 0 ? format("; %lld thread%s", static_cast<long long>(threads), threads == 1 ? "" : "s") : "";
  log_info("%s: %lld layers of %lld, %s parameters from %s; %s for %s%s", name.c_str(),
           static_cast<long long>(model.config().num_layers), static_cast<long long>(model.config().hidden_size),
           human_count(static_cast<double>(TensorTable(model.config()).parameters())).c_str(), source.c_str(),
           human_bytes(static_cast<double>(total_bytes(model.memory()))).c_str(), room.c_str(), on_threads.c_str());
}

std::string context_of(const DecodeModel& model) {
  return format("a context of %lld", static_cast<long long>(model.capacity()));
}

// Calls make(), adds the faults that are planned, and logs one line about the model. `source`: where its parameters
// come from.
template <typename Make, typename Room>
auto ready_model(const InferSettings& settings, const DecodeDevice& device, const std::string& name,
                 const std::string& source, const Make& make, const Room& room) {
  const DecodeFaults faults = parse_decode_faults(settings.debug_inject);
  inject_before_load(faults);
  auto model = with_faults(make(), faults);
  announce(*model, name, source, device.gpu() ? 0 : settings.threads, room(*model));
  return model;
}

std::string pool_of(const InferenceModel& model, std::int64_t sequences) {
  return format("%lld sequences of %lld positions in all", static_cast<long long>(sequences),
                static_cast<long long>(model.num_pages() * model.page_size()));
}

constexpr const char* kRandomSource = "a random generator";
constexpr const char* kDrafts = "drafts";

// Where the parameters come from: "bf16", "bf16, weights int4", "bf16, with an adapter of rank 16".
std::string source_of(const ModelFile& file) {
  const Quantization& quantization = file.config().quantization;
  return std::string(dtype_name(file.dtype())) +
         (quantization.any() ? ", weights " + quantization_text(quantization) : "") +
         (file.adapter_rank() > 0
              ? format(", with an adapter of rank %lld", static_cast<long long>(file.adapter_rank()))
              : "");
}

void announce_draft(const SequenceDraft& draft, const std::string& name, const std::string& source,
                    std::int64_t threads) {
  if (draft.sequence) return announce(*draft.sequence, name, source, threads, std::string(kDrafts) + ", decode fused");
  announce(*draft.paged, name, source, threads, kDrafts);
}

DraftOptions drafts_of(const InferSettings& settings, const DecodeDevice& device, InferenceModel* draft) {
  DraftOptions options;
  options.lookup = settings.lookup;
  options.model = draft;
  options.row_cost = device.row_cost();
  options.acceptance = parse_decode_faults(settings.debug_inject).acceptance;
  return options;
}

}  // namespace

DecodeSession::DecodeSession(const InferSettings& settings)
    : settings_(settings),
      device_(settings),
      file_(open_model(settings.model, settings.adapter)),
      tokenizer_(load_tokenizer(file_)),
      chat_(load_chat(file_, tokenizer_)) {
  if (!settings.draft.empty()) {
    draft_file_.emplace(open_model(settings.draft));
    check_same_tokens(file_, tokenizer(), *draft_file_, "draft");
    device_.expect_draft(draft_file_->config());
  }
  device_.choose(file_.config(), file_.dtype(),
                 file_.adapter_beside() != nullptr ? file_.adapter_beside()->lora() : std::nullopt);
  rules_ = read_rules();
  generate_ = make_generate_options();
}

void check_same_tokens(const ModelFile& model, const Tokenizer* tokenizer, const ModelFile& other,
                       const std::string& option) {
  const auto refuse = [&](const std::string& why) {
    fail(Exit::usage, "--%s: %s: %s. It needs the tokenizer of %s", option.c_str(),
         escaped(other.file().path()).c_str(), why.c_str(), escaped(model.file().path()).c_str());
  };
  const auto wide = [](std::int64_t value) { return static_cast<long long>(value); };
  if (tokenizer == nullptr || !other.has_tokenizer()) {
    if (other.has_tokenizer()) refuse("it has a tokenizer, and the model has none to compare it with");
    if (tokenizer != nullptr) refuse("it has no tokenizer");
    const std::int64_t its = other.config().tokenizer_vocab, wanted = model.config().tokenizer_vocab;
    if (its != wanted) refuse(format("it was made for %lld tokens, not %lld", wide(its), wide(wanted)));
    return;
  }
  if (other.tokenizer_json() == model.tokenizer_json()) return;
  const Tokenizer own = *load_tokenizer(other);
  if (own.vocab_size() != tokenizer->vocab_size()) {
    refuse(format("its tokenizer has %lld tokens, not %lld", wide(own.vocab_size()), wide(tokenizer->vocab_size())));
  }
  for (std::int32_t id = 0; id < own.vocab_size(); ++id) {
    const std::string here = own.token_bytes(id), there = tokenizer->token_bytes(id);
    if (here != there) {
      refuse(format("its token %d is %s, not %s", id, escaped(here).c_str(), escaped(there).c_str()));
    }
  }
}

const Tokenizer& DecodeSession::need_tokenizer() const {
  if (tokenizer_) return *tokenizer_;
  fail(Exit::bad_file,
       "%s: %s: missing, so text cannot be read. Convert the model again with its tokenizer, or use --prompt-ids",
       escaped(settings_.model).c_str(), kTokenizerTensor);
}

const Chat& DecodeSession::need_chat() const {
  need_tokenizer();
  if (chat_) return *chat_;
  fail(Exit::bad_file,
       "%s: %s: missing, so there are no chats with this model. Convert a model that has a chat template, or give one "
       "to scripts/convert_hf.py with --chat-format; --interactive continues text",
       escaped(settings_.model).c_str(), kChatFormat);
}

Tokenizer::Special DecodeSession::special() const {
  return settings_.special ? Tokenizer::Special::allow : Tokenizer::Special::text;
}

DecodeSession::Prompt DecodeSession::prompt() const {
  if (settings_.task != InferTask::prompt_ids) {
    const Tokenizer& tokenizer = need_tokenizer();
    std::string text = read_prompt_text(settings_);
    return {start_ids(tokenizer.encode(text, true, special()), config()), std::move(text)};
  }
  std::vector<std::int32_t> ids = parse_ids(settings_.prompt_ids, config().vocab_size), known;
  if (!tokenizer_) return {std::move(ids), ""};
  std::copy_if(ids.begin(), ids.end(), std::back_inserter(known),
               [&](std::int32_t id) { return id < tokenizer_->vocab_size(); });  // the model may have rows beyond it
  std::string text = utf8_replace_invalid(tokenizer_->decode(known, !settings_.print_special));
  return {std::move(ids), std::move(text)};
}

GenerateOptions DecodeSession::make_generate_options() const {
  GenerateOptions generate;
  generate.max_tokens = settings_.max_tokens;
  generate.sampler = sampler_options(settings_);
  generate.sampler.vocab_limit = tokenizer_ ? tokenizer_->vocab_size() : config().tokenizer_vocab;
  if (!settings_.ignore_eos) generate.stop_ids = config().eos_ids;
  generate.stop_ids.insert(generate.stop_ids.end(), rules_.stop_token_ids.begin(), rules_.stop_token_ids.end());
  generate.rules = logit_rules(rules_, config().eos_ids, settings_.max_tokens, tokenizer(), config());
  generate.stop_texts = settings_.stop;
  generate.hide_special = !settings_.print_special && !settings_.json;  // JSON is for programs, as --batch and --serve
  return generate;
}

RequestedRules DecodeSession::read_rules() const {
  RequestedRules rules;
  rules.penalties.presence = static_cast<float>(settings_.presence_penalty);
  rules.penalties.frequency = static_cast<float>(settings_.frequency_penalty);
  rules.penalties.repetition = repetition_of(settings_.repetition_penalty);
  rules.min_tokens = settings_.min_tokens;
  // With the checks of the fields of requests, whose names their messages have.
  if (!settings_.bad_words.empty()) read_rule("bad_words", settings_.bad_words, rules);
  if (!settings_.logit_bias.empty()) {
    Json bias;
    try {
      bias = parse_json(settings_.logit_bias, "--logit-bias");
    } catch (const Error& error) {
      fail(Exit::usage, "%s", error.what());
    }
    read_rule("logit_bias", bias, rules);
  }
  if (!settings_.stop_token_ids.empty()) {
    rules.stop_token_ids = parse_ids(settings_.stop_token_ids, config().vocab_size, "--stop-token-ids");
  }
  return rules;
}

DraftOptions DecodeSession::draft_options(InferenceModel* draft) const {
  return drafts_of(settings_, device_, draft);
}

std::unique_ptr<InferenceModel> DecodeSession::load_draft(const InferenceModel& model) const {
  if (!draft_file_) return nullptr;
  std::unique_ptr<InferenceModel> draft = device_.load_draft(*draft_file_, model);
  announce(*draft, escaped(draft_file_->file().path()), source_of(*draft_file_), device_.gpu() ? 0 : settings_.threads,
           kDrafts);
  return draft;
}

SequenceDraft DecodeSession::load_sequence_draft(const InferenceModel& model) const {
  if (!draft_file_) return {};
  SequenceDraft draft = device_.load_sequence_draft(*draft_file_, model);
  announce_draft(draft, escaped(draft_file_->file().path()), source_of(*draft_file_),
                 device_.gpu() ? 0 : settings_.threads);
  return draft;
}

std::unique_ptr<DecodeModel> DecodeSession::load_model(std::int64_t capacity) const {
  const auto load = [&] {
    if (!settings_.drafts()) return device_.load(file_, capacity);
    std::unique_ptr<InferenceModel> model = device_.load_sequence(file_, capacity);
    SequenceDraft draft = load_sequence_draft(*model);
    return engine_sequence(std::move(model), capacity, std::move(draft), draft_options(nullptr));
  };
  return ready_model(settings_, device_, escaped(file_.file().path()), source_of(file_), load, context_of);
}

std::unique_ptr<InferenceModel> DecodeSession::load_inference(std::uint64_t kv_memory, std::int64_t sequences) const {
  return ready_model(
      settings_, device_, escaped(file_.file().path()), source_of(file_),
      [&] { return device_.load_inference(file_, kv_memory, sequences); },
      [&](const InferenceModel& model) { return pool_of(model, sequences); });
}

SamplerOptions sampler_options(const InferSettings& settings) {
  SamplerOptions options;
  options.temperature = settings.temperature;
  options.top_k = settings.top_k;
  options.top_p = settings.top_p;
  options.min_p = settings.min_p;
  options.seed = static_cast<std::uint64_t>(settings.seed);
  return options;
}

std::int64_t choose_capacity(const InferSettings& settings, const ModelConfig& config, std::int64_t needed) {
  if (settings.context == 0) return std::clamp<std::int64_t>(needed, 1, config.max_positions);
  if (settings.context <= config.max_positions) return settings.context;
  fail(Exit::usage, "--context: got %lld, expected at most the %lld positions that the model was made for",
       static_cast<long long>(settings.context), static_cast<long long>(config.max_positions));
}

std::unique_ptr<DecodeModel> make_random_model(const InferSettings& settings, const DecodeDevice& device,
                                               const ModelConfig& config, std::int64_t capacity) {
  const auto make = [&] {
    if (!settings.drafts()) return device.make_random(config, capacity);
    std::unique_ptr<InferenceModel> model = device.make_random_sequence(config, capacity);
    SequenceDraft draft;
    if (!settings.draft.empty()) {
      draft = device.make_random_draft(random_model_config(settings.draft, "--draft"), *model);
      announce_draft(draft, settings.draft, kRandomSource, device.gpu() ? 0 : settings.threads);
    }
    return engine_sequence(std::move(model), capacity, std::move(draft), drafts_of(settings, device, nullptr));
  };
  return ready_model(settings, device, settings.random_model, kRandomSource, make, context_of);
}

std::unique_ptr<InferenceModel> make_random_inference(const InferSettings& settings, const DecodeDevice& device,
                                                      const ModelConfig& config, std::int64_t sequences) {
  return ready_model(
      settings, device, settings.random_model, kRandomSource,
      [&] { return device.make_random_inference(config, settings.kv_bytes, sequences); },
      [&](const InferenceModel& model) { return pool_of(model, sequences); });
}

}  // namespace weft
