// The command-line options of infer_pythia: their table, their values, and the checks that involve more than one of
// them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/base/options.h"

namespace weft {

// What to do with the model: exactly one of these is asked for.
enum class InferTask {
  prompt,
  prompt_file,
  prompt_ids,
  interactive,
  chat,
  batch,
  serve,
  perplexity,
  bench,
  bench_batch,
  compare,
  describe
};

inline constexpr std::int64_t kMostRunning = 4096;  // sequences at once

// One field per option, with its default; names and meanings are those of --help. A size of 0 means "not given".
struct InferSettings {
  std::string model, adapter, random_model, device = "auto", decode = "auto", dtype = "auto";
  std::string activations = "auto", kv_dtype = "auto";
  std::int64_t context = 0, threads = 0;

  std::string prompt, prompt_file, prompt_ids, batch, perplexity, bench_batch, compare, describe;
  bool interactive = false, chat = false, bench = false;
  std::string system;  // of --chat

  std::int64_t max_tokens = 128, top_k = 0, seed = 0;
  double temperature = 0, top_p = 1, min_p = 0;
  double presence_penalty = 0, frequency_penalty = 0, repetition_penalty = 1;
  std::string logit_bias, stop_token_ids;  // as they were given
  std::vector<std::string> bad_words;
  std::int64_t min_tokens = 0;
  std::int64_t lookup = 0;
  std::string draft;
  std::vector<std::string> stop;
  bool ignore_eos = false, special = false, print_special = false;

  std::string output;             // of --batch
  std::string kv_memory;          // as it was given
  std::uint64_t kv_bytes = 0;     // the same in bytes
  std::int64_t max_running = 64;  // sequences at once
  std::int64_t prompt_rows = 128;

  std::int64_t stride = 0;
  std::string against;
  std::string bench_contexts;
  std::int64_t bench_prompt = 128;  // ids of each prompt of --bench-batch
  bool bench_layer = false, bench_timeline = false;

  std::string serve, served_name, api_key_file;
  std::vector<std::string> allowed_host;
  bool log_requests = false;
  std::int64_t max_queue = 1024, max_connections = 1024, max_body = 4 << 20;
  double drain_seconds = 30, request_seconds = 0, read_seconds = 30, idle_seconds = 60, write_seconds = 30;

  bool json = false, stats = false, no_echo = false;
  std::string color = "auto";
  std::vector<std::string> debug_inject;

  InferTask task = InferTask::prompt;  // the one whose option was given
  bool kv_fp8() const { return kv_dtype == "fp8"; }
  bool fp8_activations() const { return activations == "fp8"; }
  bool drafts() const { return lookup > 0 || !draft.empty(); }
  bool prompted() const {  // the task continues one text
    return task == InferTask::prompt || task == InferTask::prompt_file || task == InferTask::prompt_ids;
  }
  bool many_sequences() const {  // the task runs on the engine
    return task == InferTask::batch || task == InferTask::serve || task == InferTask::bench_batch;
  }
};

// The table of the options and the settings that it fills.
class InferOptionParser {
 public:
  explicit InferOptionParser(const std::string& version);
  // Empty: --help or --version was printed. Also checks what involves several options (no task or two tasks, options
  // that exclude each other), before any file is opened: Exit::usage. Each call starts from the defaults.
  std::optional<InferSettings> parse(int argc, const char* const* argv);

 private:
  InferSettings settings_;
  OptionTable table_;
};

// The same with a parser made for this call.
std::optional<InferSettings> parse_infer_options(int argc, const char* const* argv, const std::string& version);

}  // namespace weft
