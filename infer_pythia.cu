// infer_pythia: runs GPT-NeoX / Pythia models. The table of contents of inference: options -> model -> prompt
// -> tokens.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/cpu/neox.h"
#include "llmc/infer/bench.h"
#include "llmc/infer/generate.h"
#include "llmc/infer/interactive.h"
#include "llmc/infer/perplexity.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/report.h"
#include "llmc/infer/text_output.h"
#include "llmc/model/compare.h"
#include "llmc/model/model_file.h"
#include "llmc/text/tokenizer.h"
#include "version.h"

namespace weft {
namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
constexpr std::uint64_t kMaxPromptBytes = 64 << 20;
constexpr std::uint64_t kMaxTextBytes = 4ull << 30;
constexpr double kCompareTolerance = 1e-5;  // fp32 against PyTorch in fp32, relative to a tensor's largest value

struct Options {
  std::string model, device = "auto", decode = "auto", color = "auto";
  std::int64_t context = 0;
  std::string prompt, prompt_file, prompt_ids, perplexity_file, compare_file;
  bool interactive = false, bench = false;
  bool special = false, ignore_eos = false, json = false;
  std::int64_t max_tokens = 128, top_k = 0, seed = 0, stride = 0;
  double temperature = 0, top_p = 1, min_p = 0;
  std::vector<std::string> stop;
};

constexpr const char* kFooter =
    "Text goes to stdout as it is generated, messages and statistics go to stderr.\n"
    "Exit codes: 0 ok, 1 internal error or failed comparison, 2 usage, 3 bad input\n"
    "file, 4 environment (GPU), 5 out of memory or disk, 6 non-finite numbers,\n"
    "130 and 143 stopped by a signal.\n"
    "\n"
    "Example:\n"
    "  infer_pythia --model pythia-160m.bin --prompt 'Once upon a time'";

void define(OptionTable& table, Options& o) {
  table.version("infer_pythia " WEFT_VERSION " (" WEFT_BUILD ")");
  table.footer(kFooter);

  table.group("Model");
  table.text("model", o.model, "FILE", "model file, made by scripts/convert_hf.py");
  table.choice("device", o.device, {"auto", "cuda", "cpu"}, "where to run; auto: the GPU if it can be used");
  table.choice("decode", o.decode, {"auto", "fused", "graph", "reference"},
               "how to decode; fused and graph need a GPU");
  table.integer("context", o.context, 0, kNoLimit, "positions of the K/V cache; 0: all that the model was made for");

  table.group("What to do, exactly one of");
  table.text("prompt", o.prompt, "TEXT", "continue this text");
  table.text("prompt-file", o.prompt_file, "FILE", "continue the text of this file, every byte of it; - is stdin");
  table.text("prompt-ids", o.prompt_ids, "1,2,3", "continue these token ids; works without a tokenizer");
  table.flag("interactive", o.interactive, "continue each line of stdin, in one growing text");
  table.text("perplexity", o.perplexity_file, "FILE", "score the text of this file");
  table.flag("bench", o.bench, "time the prefill of 32 random ids and --max-tokens decode steps");
  table.text("compare", o.compare_file, "FILE", "run the inputs of a reference dump and compare every tensor with it");

  table.group("Generation");
  table.integer("max-tokens", o.max_tokens, 1, kNoLimit, "stop after so many tokens");
  table.repeated("stop", o.stop, "TEXT", "stop before this text");
  table.flag("ignore-eos", o.ignore_eos, "do not stop at the end-of-text token");
  table.flag("special", o.special, "names of special tokens in the prompt are tokens, not text");
  table.number("temperature", o.temperature, 0, std::numeric_limits<double>::max(), "0: always the likeliest token");
  table.integer("top-k", o.top_k, 0, kNoLimit, "then keep the k likeliest tokens; 0: all");
  table.number("top-p", o.top_p, 0, 1, "then keep the likeliest tokens that make up this share");
  table.number("min-p", o.min_p, 0, 1, "then keep tokens of at least this share of the likeliest one");
  table.integer("seed", o.seed, 0, kNoLimit, "of the random numbers");

  table.group("Perplexity");
  table.integer("stride", o.stride, 0, kNoLimit,
                "tokens by which the window moves, less than the context; 0: half of it");

  table.group("Output");
  table.flag("json", o.json, "one JSON object instead of text");
  table.choice("color", o.color, {"auto", "always", "never"}, "colour of messages");
}

// What is wrong with the combination, found before any file is opened.
void check(const OptionTable& table, const Options& o) {
  if (!table.given("model")) fail(Exit::usage, "--model: missing, expected a model file");
  std::string modes, given;
  for (const char* mode : {"prompt", "prompt-file", "prompt-ids", "interactive", "perplexity", "bench", "compare"}) {
    modes += std::string(modes.empty() ? "--" : ", --") + mode;
    if (table.given(mode)) given += std::string(given.empty() ? "--" : ", --") + mode;
  }
  if (given.empty()) fail(Exit::usage, "nothing to do: expected one of %s", modes.c_str());
  if (given.find(',') != std::string::npos) fail(Exit::usage, "%s: only one of them at a time", given.c_str());
  for (const auto& [name, value] :
       {std::pair("model", &o.model), std::pair("prompt-file", &o.prompt_file), std::pair("prompt-ids", &o.prompt_ids),
        std::pair("perplexity", &o.perplexity_file), std::pair("compare", &o.compare_file)}) {
    if (table.given(name) && value->empty()) fail(Exit::usage, "--%s: got '', expected a value", name);
  }
  if (o.json && (o.interactive || table.given("compare"))) {
    fail(Exit::usage, "--json: does not go with %s", given.c_str());
  }
  if (table.given("stride") && !table.given("perplexity")) fail(Exit::usage, "--stride: only for --perplexity");
}

// The device and the way to decode that were asked for, as far as this build and this machine have them.
RunPlace choose_place(const Options& o) {
  if (o.device == "cuda") {
    fail(Exit::environment, "--device cuda: this build has no GPU path for Pythia. Use --device cpu");
  }
  if (o.decode == "fused" || o.decode == "graph") {
    fail(Exit::environment,
         "--decode %s: needs a GPU, and this build has no GPU path for Pythia. On the CPU there "
         "is --decode reference",
         o.decode.c_str());
  }
  if (o.device == "auto") log_info("running on the CPU: this build has no GPU path for Pythia");
  return {"cpu", "reference"};
}

// The tokenizer in the model file; nothing if it has none.
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

const Tokenizer& need_tokenizer(const std::optional<Tokenizer>& tokenizer, const Options& o) {
  if (tokenizer.has_value()) return *tokenizer;
  fail(Exit::bad_file,
       "%s: %s: missing, so text cannot be read. Convert the model again with its tokenizer, or use "
       "--prompt-ids",
       escaped(o.model).c_str(), kTokenizerTensor);
}

std::int64_t choose_capacity(const Options& o, const ModelConfig& config) {
  if (o.context == 0) return config.max_positions;
  if (o.context <= config.max_positions) return o.context;
  fail(Exit::usage, "--context: got %lld, expected at most the %lld positions that the model was made for",
       static_cast<long long>(o.context), static_cast<long long>(config.max_positions));
}

std::string read_prompt_text(const Options& o) {
  if (o.prompt_file.empty()) return o.prompt;
  if (o.prompt_file != "-") return read_text_file(o.prompt_file, kMaxPromptBytes);
  std::string text;
  char piece[1 << 16];
  while (std::cin.read(piece, sizeof piece), std::cin.gcount() > 0) {
    text.append(piece, static_cast<std::size_t>(std::cin.gcount()));
    if (text.size() > kMaxPromptBytes) {
      fail(Exit::bad_file, "standard input: more than the %llu bytes that a prompt may have",
           static_cast<unsigned long long>(kMaxPromptBytes));
    }
  }
  return text;
}

// Everything that the ways to run share.
struct Session {
  const Options& options;
  const ModelFile& file;
  const std::optional<Tokenizer>& tokenizer;
  RunPlace place;
  std::int64_t capacity;

  Tokenizer::Special special() const { return options.special ? Tokenizer::Special::allow : Tokenizer::Special::text; }
};

// The one place that knows which implementation runs. Until it is done a signal ends the program at once; from then on
// there is a result to finish.
std::unique_ptr<DecodeModel> load_model(const Session& s) {
  std::unique_ptr<DecodeModel> model = cpu::load_neox(s.file, s.capacity);
  const std::uint64_t bytes = total_bytes(model->memory());
  log_info("%s: %lld layers of %lld, %.1f M parameters from %s; %s for a context of %lld",
           escaped(s.file.file().path()).c_str(), static_cast<long long>(s.file.config().num_layers),
           static_cast<long long>(s.file.config().hidden_size), static_cast<double>(s.file.table().parameters()) / 1e6,
           dtype_name(s.file.dtype()), human_bytes(static_cast<double>(bytes)).c_str(),
           static_cast<long long>(s.capacity));
  install_signal_handlers();
  return model;
}

GenerateOptions generate_options(const Session& s) {
  const Options& o = s.options;
  GenerateOptions generate;
  generate.max_tokens = o.max_tokens;
  generate.sampler = {
      o.temperature, o.top_k, o.top_p, o.min_p, static_cast<std::uint64_t>(o.seed), s.file.config().tokenizer_vocab};
  if (s.tokenizer.has_value()) generate.sampler.vocab_limit = s.tokenizer->vocab_size();
  if (!o.ignore_eos) generate.stop_ids = s.file.config().eos_ids;
  generate.stop_texts = o.stop;
  return generate;
}

bool stop_requested() {
  return stop_signal() != 0;
}

Exit exit_after(bool interrupted) {
  if (!interrupted) return Exit::ok;
  return stop_signal() == SIGINT ? Exit::interrupted : Exit::terminated;
}

Exit run_prompt(const Session& s) {
  const Options& o = s.options;
  const std::vector<std::int32_t> prompt =
      o.prompt_ids.empty()
          ? start_ids(need_tokenizer(s.tokenizer, o).encode(read_prompt_text(o), true, s.special()), s.file.config())
          : parse_ids(o.prompt_ids, s.file.config().vocab_size);
  check_prompt_fits(prompt.size(), 0, s.capacity);
  if (!s.tokenizer.has_value()) log_info("the model file has no tokenizer: ids in the place of text");
  const std::unique_ptr<DecodeModel> model = load_model(s);

  TextOutput output;
  GenerateHooks hooks;
  hooks.interrupted = stop_requested;
  if (!o.json) hooks.on_text = [&output](std::string_view piece) { output.write(piece); };
  const Tokenizer* tokenizer = s.tokenizer.has_value() ? &*s.tokenizer : nullptr;
  const GenerateResult result = generate(*model, tokenizer, prompt, generate_options(s), hooks);
  if (o.json) {
    write_stdout(json_line(generation_json(*model, prompt, result, s.place)));
  } else {
    if (tokenizer == nullptr) output.write(ids_text(result.ids));
    output.end_line();
    log_info("%s", statistics_line(*model, result).c_str());
  }
  return exit_after(result.finish_reason == FinishReason::interrupted);
}

Exit run_perplexity(const Session& s) {
  const Tokenizer& tokenizer = need_tokenizer(s.tokenizer, s.options);
  const std::string text = read_text_file(s.options.perplexity_file, kMaxTextBytes);
  if (text.empty()) fail(Exit::bad_file, "%s: empty", escaped(s.options.perplexity_file).c_str());
  std::vector<std::int32_t> ids = tokenizer.encode(text, false, s.special());
  const std::optional<std::int32_t> start = document_start(s.file.config());
  if (start.has_value()) ids.insert(ids.begin(), *start);
  const std::int64_t stride = s.options.stride > 0 ? s.options.stride : std::max<std::int64_t>(s.capacity / 2, 1);
  perplexity_windows(static_cast<std::int64_t>(ids.size()), s.capacity, stride);
  const std::unique_ptr<DecodeModel> model = load_model(s);

  ProgressLine progress;
  PerplexityHooks hooks;
  hooks.interrupted = stop_requested;
  hooks.on_window = [&progress](std::int64_t done, std::int64_t all, double so_far) {
    progress.show(format("window %lld of %lld, perplexity %.3f", static_cast<long long>(done),
                         static_cast<long long>(all), so_far));
  };
  const PerplexityResult result = perplexity(*model, ids, static_cast<std::int64_t>(text.size()), stride, hooks);
  progress.clear();
  write_stdout(s.options.json ? json_line(perplexity_json(result, s.capacity, stride, s.place))
                              : perplexity_text(result, s.capacity, stride));
  return exit_after(result.interrupted);
}

Exit run_benchmark(const Session& s) {
  const std::unique_ptr<DecodeModel> model = load_model(s);
  const BenchResult result =
      run_bench(*model, s.options.max_tokens, static_cast<std::uint64_t>(s.options.seed), stop_requested);
  write_stdout(s.options.json ? json_line(bench_json(result, s.place)) : bench_text(result));
  return exit_after(result.interrupted);
}

Exit run_compare(const Session& s) {
  const TensorFile dump = TensorFile::open(s.options.compare_file, FileKind::reference_dump);
  const Comparison comparison = compare_decoding(dump, kCompareTolerance, *load_model(s));
  for (const std::string& line : comparison.table()) write_stdout(line + "\n");
  return comparison.passed() ? Exit::ok : Exit::internal;
}

Exit run(int argc, const char* const* argv) {
  OptionTable table("infer_pythia", "Runs GPT-NeoX / Pythia models.");
  Options options;
  define(table, options);
  if (table.parse(argc, argv) == OptionTable::Outcome::exit_ok) return Exit::ok;
  set_color_mode(options.color == "always"  ? ColorMode::always
                 : options.color == "never" ? ColorMode::never
                                            : ColorMode::automatic);
  check(table, options);

  const RunPlace place = choose_place(options);
  const ModelFile file = ModelFile::open(options.model, Family::gpt_neox);
  const std::optional<Tokenizer> tokenizer = load_tokenizer(file);
  const Session session{options, file, tokenizer, place, choose_capacity(options, file.config())};

  if (options.interactive) {
    const Tokenizer& text = need_tokenizer(tokenizer, options);
    return run_interactive(*load_model(session), text, session.special(), generate_options(session));
  }
  if (options.bench) return run_benchmark(session);
  if (table.given("perplexity")) return run_perplexity(session);
  if (table.given("compare")) return run_compare(session);
  return run_prompt(session);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
