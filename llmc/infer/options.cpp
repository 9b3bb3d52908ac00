#include "llmc/infer/options.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/installed.h"
#include "llmc/base/log.h"
#include "llmc/base/logit_rules.h"
#include "llmc/base/threads.h"
#include "llmc/infer/draft_length.h"
#include "llmc/infer/fault_injection.h"
#include "llmc/model/presets.h"

namespace weft {

namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

constexpr const char* kFooter =
    "Text goes to stdout as it is generated, messages and statistics go to stderr.\n"
    "Exit codes: 0 ok, 1 internal error or failed comparison, 2 usage, 3 bad input\n"
    "file, 4 environment (GPU), 5 out of memory or disk, 6 non-finite numbers,\n"
    "7 lines of a batch failed, 130 and 143 stopped by a signal.\n"
    "\n"
    "Example:\n"
    "  infer_pythia --model pythia-160m.bin --prompt 'Once upon a time'";

struct TaskName {
  InferTask task;
  const char* option;
};
constexpr TaskName kTasks[] = {
    {InferTask::prompt, "prompt"},
    {InferTask::prompt_file, "prompt-file"},
    {InferTask::prompt_ids, "prompt-ids"},
    {InferTask::interactive, "interactive"},
    {InferTask::chat, "chat"},
    {InferTask::batch, "batch"},
    {InferTask::serve, "serve"},
    {InferTask::perplexity, "perplexity"},
    {InferTask::bench, "bench"},
    {InferTask::bench_batch, "bench-batch"},
    {InferTask::compare, "compare"},
    {InferTask::describe, "describe"},
};

void add_model(OptionTable& table, InferSettings& s) {
  table.group("Model");
  table.text("model", s.model, "FILE",
             "model file: made by " + script_command("scripts/convert_hf.py") +
                 ", or model.bin of a checkpoint of train_llama");
  table.short_name('m', "model");
  table.text("adapter", s.adapter, "FILE",
             "LoRA adapter for the model's weights, quantised ones too: made by train_llama --lora-r, or by " +
                 script_command("scripts/convert_hf.py") + " from PEFT's files");
  table.choice("device", s.device, {"auto", "cuda", "cpu"}, "where to run; auto: the GPU if it can be used");
  table.choice(
      "decode", s.decode, {"auto", "fused", "graph", "reference"},
      "how to decode; fused and graph need a GPU; auto: the fastest that this GPU and model have. With many "
      "sequences or drafts auto is graph, and fused runs steps of up to 8 rows in one kernel, with other bits than "
      "steps of more");
  table.choice("dtype", s.dtype, {"auto", "fp16", "bf16", "fp32"},
               "of weights and cache on the GPU; auto: as the file has them");
  table.choice("kv-dtype", s.kv_dtype, {"auto", "fp8"},
               "of keys and values in the cache; auto: as the device computes; fp8: half of 16 bits, and a text may "
               "change; not with --decode fused of many sequences or drafts");
  table.choice(
      "activations", s.activations, {"auto", "fp8"},
      "of models whose weights are fp8: what the linear layers of the blocks multiply the weights with; auto: 16 "
      "bits on the GPU, fp32 on the CPU; fp8: codes with a scale for each row, on the GPU for Hopper alone");
  table.integer("context", s.context, 0, kNoLimit,
                "positions of the K/V cache; 0: as many as needed, at most what the model was made for");
  table.integer("threads", s.threads, 0, kMaxThreads, kThreadsHelp);
}

void add_tasks(OptionTable& table, InferSettings& s) {
  table.group("What to do, exactly one of");
  table.text("prompt", s.prompt, "TEXT", "continue this text");
  table.short_name('p', "prompt");
  table.text("prompt-file", s.prompt_file, "FILE", "continue the text of this file, every byte of it; - is stdin");
  table.text("prompt-ids", s.prompt_ids, "1,2,3", "continue these token ids; works without a tokenizer");
  table.flag("interactive", s.interactive,
             "continue each line of stdin, in one growing text; /help, /reset and /quit are commands");
  table.flag("chat", s.chat,
             "answer each line of stdin as a message, in the model's chat format; /help, /reset, /system and /quit are "
             "commands; without --max-tokens an answer has as many tokens as fit");
  table.text("batch", s.batch, "FILE",
             "answer each line of this file of requests, see doc/batch.md; - is stdin; needs --output");
  table.text("perplexity", s.perplexity, "FILE", "score the text of this file");
  table.flag(
      "bench", s.bench,
      "time a prompt of 32 random ids and --max-tokens decode steps, each by the device's clock (doc/threads.md)");
  table.text("bench-batch", s.bench_batch, "1,4,16",
             "time so many sequences at once, each a prompt of --bench-prompt random ids and --max-tokens tokens");
  table.text("compare", s.compare, "FILE", "run the inputs of a reference dump and compare every tensor with it");
  table.text(
      "describe", s.describe, "PATH",
      "print what a model is, as JSON: of a Hugging Face directory, its config.json, or a model file; - reads the "
      "configuration from stdin; needs no --model and no GPU");
  table.text(
      "serve", s.serve, "HOST:PORT",
      "serve OpenAI's APIs for completions and chats, and a page for browsers, as 127.0.0.1:8000; port 0: a free one");
}

void add_generation(OptionTable& table, InferSettings& s) {
  table.group("Generation");
  table.integer("max-tokens", s.max_tokens, 1, kNoLimit, "stop after so many tokens");
  table.short_name('n', "max-tokens");
  table.text("system", s.system, "TEXT", "of --chat: the system message");
  table.repeated("stop", s.stop, "TEXT", "stop before this text");
  table.flag("ignore-eos", s.ignore_eos, "do not stop at the end-of-text token");
  table.flag("special", s.special, "names of special tokens in the prompt are tokens, not text");
  table.number("temperature", s.temperature, 0, std::numeric_limits<double>::max(), "0: always the likeliest token");
  table.integer("top-k", s.top_k, 0, kNoLimit, "then keep the k likeliest tokens; 0: all");
  table.number("top-p", s.top_p, 0, 1, "then keep the likeliest tokens that make up this share");
  table.number("min-p", s.min_p, 0, 1, "then keep tokens of at least this share of the likeliest one");
  table.integer("seed", s.seed, 0, kNoLimit, "of the random numbers");
  table.number("presence-penalty", s.presence_penalty, -kMostPenalty, kMostPenalty,
               "make each generated token less likely by this much; doc/serving.md has the order of these");
  table.number("frequency-penalty", s.frequency_penalty, -kMostPenalty, kMostPenalty,
               "the same for each time that it was generated");
  table.number("repetition-penalty", s.repetition_penalty, 0, std::numeric_limits<double>::max(),
               "make tokens of the prompt and generated ones less likely by this factor; more than 0");
  table.text("logit-bias", s.logit_bias, "JSON",
             "make tokens more or less likely: {\"50256\": -100, ...} by their ids");
  table.repeated("bad-words", s.bad_words, "TEXT", "never generate this text");
  table.integer("min-tokens", s.min_tokens, 0, kNoLimit, "let nothing end the text before so many tokens");
  table.text("stop-token-ids", s.stop_token_ids, "1,2,3", "stop at these tokens, too");
  table.integer(
      "lookup", s.lookup, 0, kMostDrafted,
      "guess at most so many tokens at once from what followed the same ones before, and verify them in one step: "
      "the output stays the same; see doc/speculation.md");
  table.text(
      "draft", s.draft, "FILE",
      "guess tokens with this smaller model of the same tokenizer; after --random-model: the name of another one");
}

void add_batch(OptionTable& table, InferSettings& s) {
  table.group("Many requests at once");
  table.text("output", s.output, "FILE",
             "where --batch puts the answers; those that are in it already are not computed again; - is stdout");
  table.text(
      "kv-memory", s.kv_memory, "SIZE",
      "of the keys and values of all sequences, as 8GB, with those of --draft; default: what they can need, or what is "
      "free");
  table.integer("max-running", s.max_running, 1, kMostRunning, "sequences at once");
  table.integer(
      "prompt-rows", s.prompt_rows, 1, kNoLimit,
      "tokens of prompts in one step with sequences that generate: few keep their wait short, many that of the "
      "prompts");
}

void add_measurements(OptionTable& table, InferSettings& s) {
  table.group("Perplexity");
  table.integer("stride", s.stride, 0, kNoLimit,
                "tokens by which the window moves, less than the context; 0: half of it");
  table.text("against", s.against, "FILE",
             "instead of the perplexity: how far the distributions of the next token lie from those of this model, "
             "whose --kv-dtype and --activations are always auto");

  table.group("Benchmark");
  table.text("bench-contexts", s.bench_contexts, "64,1024",
             "also decode after prompts of these lengths; default: none on the CPU, 64,1024,2000 on the GPU");
  table.integer("bench-prompt", s.bench_prompt, 1, kNoLimit, "ids of each prompt of --bench-batch");
  table.flag("bench-layer", s.bench_layer,
             "instead: attention, MLP-up and GELU of one layer at context 64; needs --decode fused");
  table.flag("bench-timeline", s.bench_timeline,
             "also when the phases of a fused token at context 64 end; needs --decode fused and weights in 16 bits");
  table.text(
      "random-model", s.random_model, "NAME|FILE",
      "instead of --model: random weights of a preset of train_llama's --config, pythia-2.8b for example, or of a "
      "Hugging Face config.json; on a GPU also quantised: NAME:int8, :int4 or :fp8, with +head for a head in int8");
}

constexpr double kLongestWait = 1e6;  // seconds
constexpr std::int64_t kMostConnections = 1'000'000;
constexpr std::int64_t kLargestBody = 1 << 30;

void add_server(OptionTable& table, InferSettings& s) {
  table.group("Server");
  table.text("served-name", s.served_name, "NAME", "the model's name in the API; default: that of its file");
  table.text("api-key-file", s.api_key_file, "FILE",
             "ask for the key that this file holds; without it for that of WEFT_API_KEY, if there is one");
  table.repeated("allowed-host", s.allowed_host, "NAME",
                 "answer requests for this host, too, as a proxy passes them on, and no other but the server's own");
  table.flag("log-requests", s.log_requests, "a line of the log for each request: id, tokens, times, why it ended");
  table.integer("max-queue", s.max_queue, 0, kMostConnections, "completions that may wait, further ones are refused");
  table.integer("max-connections", s.max_connections, 1, kMostConnections,
                "open at once; a new one displaces an idle one");
  table.integer("max-body", s.max_body, 1, kLargestBody, "bytes of a request");
  table.number("request-seconds", s.request_seconds, 0, kLongestWait, "a completion ends after them; 0: no limit");
  table.number("read-seconds", s.read_seconds, 0.01, kLongestWait, "a request must have come in them");
  table.number("idle-seconds", s.idle_seconds, 0.01, kLongestWait, "a connection without a request is closed");
  table.number("write-seconds", s.write_seconds, 0.01, kLongestWait,
               "a client that takes neither 256 KiB nor all that waits is cut off");
  table.number("drain-seconds", s.drain_seconds, 0, kLongestWait, "for requests under way, after a stop signal");
}

void add_output(OptionTable& table, InferSettings& s) {
  table.group("Output");
  table.flag("json", s.json, "one JSON object instead of text");
  table.flag("no-echo", s.no_echo, "print the continuation alone, without the prompt before it");
  table.flag("print-special", s.print_special,
             "print special tokens of the answer, which are left out otherwise; --json has them always");
  table.flag("stats", s.stats,
             "every figure of a generation, after each answer with --interactive: times, speed, memory traffic and why "
             "it ended");
  table.choice("color", s.color, {"auto", "always", "never"}, "colour of messages");
  table.repeated("debug-inject", s.debug_inject, "SPEC", decode_fault_help());
  table.only_in_help_all("debug-inject");
}

// The task whose option was given; none or more than one is an error. `given`: set to that option, with its dashes.
InferTask requested_task(const OptionTable& table, std::string& given) {
  std::string all;
  InferTask task = InferTask::prompt;
  int count = 0;
  for (const auto& [candidate, option] : kTasks) {
    all += std::string(all.empty() ? "--" : ", --") + option;
    if (!table.given(option)) continue;
    given += std::string(given.empty() ? "--" : ", --") + option;
    task = candidate;
    ++count;
  }
  if (count == 0) fail(Exit::usage, "nothing to do: expected one of %s", all.c_str());
  if (count > 1) fail(Exit::usage, "%s: only one of them at a time", given.c_str());
  return task;
}

// Options that have no effect on some of the tasks.
struct WithoutEffect {
  std::vector<const char*> options;
  std::vector<InferTask> tasks;
};

// `task`: the option of the task, with its dashes.
void check_effects(const OptionTable& table, const InferSettings& s, const std::string& task) {
  using enum InferTask;
  static const WithoutEffect kRows[] = {
      {{"max-tokens", "seed"}, {serve, perplexity, compare, describe}},
      {{"temperature", "top-k", "top-p", "min-p"}, {serve, perplexity, compare, describe, bench}},
      {{"stop", "ignore-eos", "presence-penalty", "frequency-penalty", "repetition-penalty", "logit-bias", "bad-words",
        "min-tokens", "stop-token-ids"},
       {serve, perplexity, compare, describe, bench, bench_batch}},
      {{"lookup", "draft"}, {perplexity, compare, describe, bench_batch}},
      {{"special"}, {compare, describe, bench, bench_batch}},
      {{"adapter", "decode", "dtype", "kv-dtype", "activations", "context"}, {describe}},
  };
  std::vector<const char*> without;
  for (const WithoutEffect& row : kRows) {
    if (std::find(row.tasks.begin(), row.tasks.end(), s.task) == row.tasks.end()) continue;
    without.insert(without.end(), row.options.begin(), row.options.end());
  }
  const std::string all = table.all_given(without);
  if (all.empty()) return;
  fail(Exit::usage, "%s: not for %s, %s", all.c_str(), task.c_str(),
       s.task == serve ? "where each request has its own" : "on which it has no effect. Leave it out");
}

// The server's options are for the server alone.
void check_server(const OptionTable& table, const InferSettings& s) {
  const bool serve = s.task == InferTask::serve;
  for (const char* name :
       {"served-name", "api-key-file", "allowed-host", "log-requests", "max-queue", "max-connections", "max-body",
        "request-seconds", "read-seconds", "idle-seconds", "write-seconds", "drain-seconds"}) {
    if (table.given(name) && !serve) fail(Exit::usage, "--%s: only for --serve", name);
  }
  for (const auto& [name, value] : {std::pair("serve", &s.serve), std::pair("served-name", &s.served_name),
                                    std::pair("api-key-file", &s.api_key_file)}) {
    if (table.given(name) && value->empty()) fail(Exit::usage, "--%s: got '', expected a value", name);
  }
}

void check_rules(const OptionTable& table, const InferSettings& s) {
  if (std::find(s.stop.begin(), s.stop.end(), "") != s.stop.end()) {
    fail(Exit::usage, "--stop: got '', expected at least one character");
  }
  if (s.repetition_penalty == 0) fail(Exit::usage, "--repetition-penalty: got 0, expected a number greater than 0");
  if (s.min_tokens > s.max_tokens) {
    fail(Exit::usage, "--min-tokens: got %lld, expected at most the %lld of --max-tokens",
         static_cast<long long>(s.min_tokens), static_cast<long long>(s.max_tokens));
  }
  for (const auto& [name, value] :
       {std::pair("logit-bias", &s.logit_bias), std::pair("stop-token-ids", &s.stop_token_ids)}) {
    if (table.given(name) && value->empty()) fail(Exit::usage, "--%s: got '', expected a value", name);
  }
}

void check_fp8(const InferSettings& s) {
  struct Fp8 {
    bool wanted, in_fused;  // whether the fused kernel has it
    const char *option, *instead;
  };
  const bool steps = s.many_sequences() || s.drafts();  // of several rows, which have a kernel of their own
  for (const auto& [wanted, in_fused, option, instead] :
       {Fp8{s.kv_fp8(), !steps, "--kv-dtype", "reads keys and values of 16 bits in steps of several rows"},
        Fp8{s.fp8_activations(), false, "--activations", "multiplies in 16 bits"}}) {
    if (!wanted) continue;
    if (s.decode == "fused" && !in_fused) {
      fail(Exit::usage, "%s: got fp8, --decode fused %s. Use --decode graph", option, instead);
    }
    if (s.task == InferTask::compare)
      fail(Exit::usage, "%s: got fp8, --compare is for fp32: what a dump holds", option);
  }
}

void check_drafts(const OptionTable& table, const InferSettings& s) {
  if (table.given("draft") && s.draft.empty()) fail(Exit::usage, "--draft: got '', expected a value");
  const DecodeFaults faults = parse_decode_faults(s.debug_inject);
  if (faults.acceptance.has_value() && !s.drafts())
    fail(Exit::usage, "--debug-inject accept: needs --lookup or --draft");
  if (!s.drafts()) return;
  if (s.lookup > 0 && !s.draft.empty()) fail(Exit::usage, "--lookup, --draft: only one of them at a time");
  if (s.bench_layer || s.bench_timeline) {
    fail(Exit::usage, "--%s: does not go with --bench-layer and --bench-timeline",
         s.draft.empty() ? "lookup" : "draft");
  }
  if (!s.draft.empty() && !s.random_model.empty()) random_model_config(s.draft, "--draft");  // refuses an unknown name
}

// Options of the engine that runs many requests at once.
void check_many(const OptionTable& table, InferSettings& s) {
  const bool served = s.task == InferTask::batch || s.task == InferTask::serve;
  if (table.given("max-running") && !served) fail(Exit::usage, "--max-running: only for --batch and --serve");
  for (const char* name : {"kv-memory", "prompt-rows"}) {
    if (table.given(name) && !s.many_sequences()) {
      fail(Exit::usage, "--%s: only for --batch, --serve and --bench-batch", name);
    }
  }
  if (table.given("output") && s.task != InferTask::batch) fail(Exit::usage, "--output: only for --batch");
  if (s.many_sequences() && table.given("context")) {
    fail(Exit::usage, "--context: not for --batch, --serve and --bench-batch: --kv-memory is for all sequences");
  }
  if (s.task == InferTask::batch && !table.given("output")) {
    fail(Exit::usage, "--output: missing, expected a file for the answers of --batch, or - for stdout");
  }
  if (table.given("kv-memory")) s.kv_bytes = memory_size("--kv-memory", s.kv_memory);
}

void check_together(const OptionTable& table, InferSettings& s) {
  if (table.given("random-model")) {
    if (!(s.bench || table.given("bench-batch")) || table.given("model") || table.given("adapter")) {
      fail(Exit::usage, "--random-model: only for --bench and --bench-batch, in the place of --model and --adapter");
    }
  } else if (table.given("model") == table.given("describe")) {
    if (table.given("model")) fail(Exit::usage, "--describe: got --model as well, expected one of them");
    fail(Exit::usage, "--model: missing, expected a model file");
  }
  if (table.given("bench-contexts") && !s.bench) fail(Exit::usage, "--bench-contexts: only for --bench");
  if (s.bench_layer && (!s.bench || table.given("bench-contexts") || table.given("max-tokens"))) {
    fail(Exit::usage, "--bench-layer: only for --bench, without --bench-contexts and --max-tokens");
  }
  if (s.bench_timeline && (!s.bench || s.bench_layer || s.json)) {
    fail(Exit::usage, "--bench-timeline: only for --bench, without --bench-layer and --json");
  }
  if (table.given("bench-prompt") && !table.given("bench-batch")) {
    fail(Exit::usage, "--bench-prompt: only for --bench-batch");
  }
  std::string given;
  s.task = requested_task(table, given);
  for (const auto& [name, value] :
       {std::pair("model", &s.model), std::pair("prompt-file", &s.prompt_file), std::pair("prompt-ids", &s.prompt_ids),
        std::pair("batch", &s.batch), std::pair("output", &s.output), std::pair("perplexity", &s.perplexity),
        std::pair("bench-batch", &s.bench_batch), std::pair("compare", &s.compare), std::pair("against", &s.against),
        std::pair("describe", &s.describe)}) {
    if (table.given(name) && value->empty()) fail(Exit::usage, "--%s: got '', expected a value", name);
  }
  check_effects(table, s, given);
  check_many(table, s);
  check_server(table, s);
  if (s.json && (s.task == InferTask::interactive || s.task == InferTask::chat || s.task == InferTask::batch ||
                 s.task == InferTask::serve || s.task == InferTask::compare)) {
    fail(Exit::usage, "--json: does not go with %s", given.c_str());
  }
  if (table.given("stride") && s.task != InferTask::perplexity) fail(Exit::usage, "--stride: only for --perplexity");
  if (table.given("against") && s.task != InferTask::perplexity) fail(Exit::usage, "--against: only for --perplexity");
  if (s.no_echo && !s.prompted()) fail(Exit::usage, "--no-echo: only for --prompt, --prompt-file and --prompt-ids");
  const bool chats = s.task == InferTask::chat;
  if (table.given("system") && !chats) fail(Exit::usage, "--system: only for --chat");
  if (s.special && chats)
    fail(Exit::usage, "--special: does not go with --chat, whose messages name no special tokens");
  if (chats && !table.given("max-tokens")) s.max_tokens = std::numeric_limits<std::int64_t>::max();
  const bool generates = s.prompted() || s.task == InferTask::interactive || chats;
  if (s.print_special && chats)
    fail(Exit::usage,
         "--print-special: does not go with --chat, which shows those that the model writes within an answer");
  for (const auto& [name, given_flag] : {std::pair("stats", s.stats), std::pair("print-special", s.print_special)}) {
    if (given_flag && !generates) {
      fail(Exit::usage, "--%s: only for --prompt, --prompt-file, --prompt-ids, --interactive and --chat", name);
    }
  }
  if (s.task == InferTask::compare && (s.dtype == "fp16" || s.dtype == "bf16")) {
    fail(Exit::usage, "--dtype: got %s, --compare is for fp32: what a dump holds", s.dtype.c_str());
  }
  if (table.given("random-model") && !names_config_file(s.random_model)) {
    random_model_config(s.random_model);  // refuses an unknown name
  }
  check_fp8(s);
  check_rules(table, s);
  check_drafts(table, s);
}

}  // namespace

InferOptionParser::InferOptionParser(const std::string& version)
    : table_("infer_pythia", "Runs Llama, Mistral, Qwen, SmolLM3, Gemma 3 and Pythia models.") {
  table_.version(version);
  table_.footer(kFooter);
  add_model(table_, settings_);
  add_tasks(table_, settings_);
  add_generation(table_, settings_);
  add_batch(table_, settings_);
  add_measurements(table_, settings_);
  add_server(table_, settings_);
  add_output(table_, settings_);
}

std::optional<InferSettings> InferOptionParser::parse(int argc, const char* const* argv) {
  settings_ = InferSettings();
  if (table_.parse(argc, argv) == OptionTable::Outcome::exit_ok) return std::nullopt;
  set_color_mode(color_mode_from_name(settings_.color));
  check_together(table_, settings_);
  return settings_;
}

std::optional<InferSettings> parse_infer_options(int argc, const char* const* argv, const std::string& version) {
  return InferOptionParser(version).parse(argc, argv);
}

}  // namespace weft
