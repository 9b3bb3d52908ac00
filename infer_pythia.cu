// infer_pythia: runs GPT-NeoX / Pythia models. The table of contents of inference: options -> model -> prompt
// -> tokens.
#include <algorithm>
#include <chrono>
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
#ifdef WEFT_CUDA
#include "llmc/cuda/op/ceilings.h"
#include "llmc/cuda/runtime/device.h"
#include "llmc/cuda/transformer/neox.h"
#endif
#include "llmc/infer/bench.h"
#include "llmc/infer/fault_injection.h"
#include "llmc/infer/generate.h"
#include "llmc/infer/interactive.h"
#include "llmc/infer/perplexity.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/report.h"
#include "llmc/infer/text_output.h"
#include "llmc/model/compare.h"
#include "llmc/model/model_file.h"
#include "llmc/model/pythia.h"
#include "llmc/text/tokenizer.h"
#include "version.h"

namespace weft {
namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
constexpr std::uint64_t kMaxPromptBytes = 64 << 20;
constexpr std::uint64_t kMaxTextBytes = 4ull << 30;
// Positions of the cache where neither the user nor the input says how many are needed: no model of the family was made
// for more than 2,048, but a file may say millions.
constexpr std::int64_t kDefaultWindow = 8192;
// Of fp32 against PyTorch in fp32, relative to a tensor's largest value.
constexpr double kCpuTolerance = 1e-5, kGpuTolerance = 1e-4;

struct Options {
  std::string model, random_model, device = "auto", decode = "auto", dtype = "auto", color = "auto";
  std::int64_t context = 0;
  std::string prompt, prompt_file, prompt_ids, perplexity_file, compare_file, bench_contexts;
  bool interactive = false, bench = false, bench_layer = false, bench_timeline = false;
  bool special = false, ignore_eos = false, json = false;
  std::int64_t max_tokens = 128, top_k = 0, seed = 0, stride = 0;
  double temperature = 0, top_p = 1, min_p = 0;
  std::vector<std::string> stop, debug_inject;
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
               "how to decode; fused and graph need a GPU; auto: the fastest that this GPU and model have");
  table.choice("dtype", o.dtype, {"auto", "fp16", "bf16", "fp32"},
               "of weights and cache on the GPU; auto: as the file has them");
  table.integer("context", o.context, 0, kNoLimit,
                "positions of the K/V cache; 0: as many as needed, at most what the model was made for");

  table.group("What to do, exactly one of");
  table.text("prompt", o.prompt, "TEXT", "continue this text");
  table.text("prompt-file", o.prompt_file, "FILE", "continue the text of this file, every byte of it; - is stdin");
  table.text("prompt-ids", o.prompt_ids, "1,2,3", "continue these token ids; works without a tokenizer");
  table.flag("interactive", o.interactive, "continue each line of stdin, in one growing text");
  table.text("perplexity", o.perplexity_file, "FILE", "score the text of this file");
  table.flag("bench", o.bench, "time a prompt of 32 random ids and --max-tokens decode steps");
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

  table.group("Benchmark");
  table.text("bench-contexts", o.bench_contexts, "64,1024",
             "also decode after prompts of these lengths; default: none on the CPU, 64,1024,2000 on the GPU");
  table.flag("bench-layer", o.bench_layer,
             "instead: attention, MLP-up and GELU of one layer at context 64; needs a GPU");
  table.flag("bench-timeline", o.bench_timeline,
             "also when the phases of a fused token at context 64 end; needs --decode fused");
  table.text("random-model", o.random_model, "NAME",
             "instead of --model: random weights of this size, pythia-14m to pythia-12b; needs a GPU");

  table.group("Output");
  table.flag("json", o.json, "one JSON object instead of text");
  table.choice("color", o.color, {"auto", "always", "never"}, "colour of messages");
  table.repeated("debug-inject", o.debug_inject, "SPEC", decode_fault_help());
}

// What is wrong with the combination, found before any file is opened.
void check(const OptionTable& table, const Options& o) {
  if (table.given("random-model")) {
    if (!o.bench || table.given("model")) {
      fail(Exit::usage, "--random-model: only for --bench, in the place of --model");
    }
  } else if (!table.given("model")) {
    fail(Exit::usage, "--model: missing, expected a model file");
  }
  if (table.given("bench-contexts") && !o.bench) fail(Exit::usage, "--bench-contexts: only for --bench");
  if (o.bench_layer && (!o.bench || table.given("bench-contexts"))) {
    fail(Exit::usage, "--bench-layer: only for --bench, without --bench-contexts");
  }
  if (o.bench_timeline && (!o.bench || o.bench_layer || o.json)) {
    fail(Exit::usage, "--bench-timeline: only for --bench, without --bench-layer and --json");
  }
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

// Where and how a model runs. The only part of this program that knows both devices.
class Place {
 public:
  // The GPU where it was asked for or, with `auto`, where there is one that can be used.
  explicit Place(const Options& o) : options_(o) {
    const bool compare = !o.compare_file.empty();
#ifdef WEFT_CUDA
    if (o.device != "cpu") gpu_ = cuda::probe_device();
    const std::string problem = gpu_.problem;
    const Exit code = gpu_.code;
    on_gpu_ = gpu_.usable;
#else
    const std::string problem = "this program was built without nvcc and has no GPU code";
    const Exit code = Exit::environment;
#endif
    if (o.device == "cuda" && !on_gpu_) fail(code, "--device cuda: %s. --device cpu needs no GPU", problem.c_str());
    if (!on_gpu_) use_cpu(problem);
    if (compare && (o.dtype == "fp16" || o.dtype == "bf16")) {
      fail(Exit::usage, "--dtype: got %s, --compare is for fp32: what a dump holds", o.dtype.c_str());
    }
  }

  // Settles what depends on the model. `stored`: the dtype of its file.
  void choose(const ModelConfig& config, DType stored) {
#ifdef WEFT_CUDA
    if (!on_gpu_) return;
    neox_.dtype = options_.dtype == "fp16"                                     ? DType::f16
                  : options_.dtype == "bf16"                                   ? DType::bf16
                  : options_.dtype == "fp32" || !options_.compare_file.empty() ? DType::f32
                                                                               : stored;
    const std::string refusal = cuda::neox_refusal(config, neox_.dtype);
    if (!refusal.empty()) {
      if (options_.device == "cuda") fail(Exit::usage, "--device cuda: %s. Use --device cpu", refusal.c_str());
      return use_cpu(refusal);
    }
    neox_.layer_only = options_.bench_layer;
    choose_mode(config);
#endif
    (void)config;
    (void)stored;
  }

  bool on_gpu() const {
    return on_gpu_;
  }
  double tolerance() const {
    return on_gpu_ ? kGpuTolerance : kCpuTolerance;
  }
  RunPlace names() const {
#ifdef WEFT_CUDA
    if (on_gpu_) return {"cuda", cuda::decode_mode_name(neox_.mode)};
#endif
    return {"cpu", "reference"};
  }
  // GB/s of a plain read on the GPU; 0: nobody has measured.
  double read_ceiling() const {
#ifdef WEFT_CUDA
    if (on_gpu_) return cuda::measure_read_bandwidth();
#endif
    return 0;
  }

  std::unique_ptr<DecodeModel> load(const ModelFile& file, std::int64_t capacity) {
#ifdef WEFT_CUDA
    if (on_gpu_) {
      announce(file.config(), capacity);
      return load_on_gpu(file);
    }
#endif
    return cpu::load_neox(file, capacity);
  }
  std::unique_ptr<DecodeModel> make_random(const ModelConfig& config, std::int64_t capacity) {
#ifdef WEFT_CUDA
    if (on_gpu_) {
      announce(config, capacity);
      return cuda::random_neox(config, static_cast<std::uint64_t>(options_.seed), neox_);
    }
#endif
    (void)config;
    (void)capacity;
    fail(Exit::environment, "--random-model: needs a GPU. Use --model");
  }

 private:
  void use_cpu(const std::string& why) {
    on_gpu_ = false;
    if (options_.decode == "fused" || options_.decode == "graph") {
      fail(Exit::environment, "--decode %s: needs a GPU%s%s. On the CPU there is --decode reference",
           options_.decode.c_str(), why.empty() ? "" : ": ", why.c_str());
    }
    if (options_.dtype == "fp16" || options_.dtype == "bf16") {
      fail(Exit::usage, "--dtype: got %s, the CPU computes in fp32 only", options_.dtype.c_str());
    }
    if (options_.device == "auto") log_info("running on the CPU: %s", why.c_str());
  }

#ifdef WEFT_CUDA
  // auto: fused where it exists, else graph, and it says why.
  void choose_mode(const ModelConfig& config) {
    neox_.mode = options_.decode == "reference" ? cuda::DecodeMode::reference
                 : options_.decode == "graph"   ? cuda::DecodeMode::graph
                                                : cuda::DecodeMode::fused;
    if (neox_.mode != cuda::DecodeMode::fused) return;
    const std::string refusal = cuda::fused_refusal(config, neox_.dtype);
    if (refusal.empty()) return;
    if (options_.decode == "fused") {
      fail(Exit::environment, "--decode fused: %s. Use --decode graph", refusal.c_str());
    }
    neox_.mode = cuda::DecodeMode::graph;
    log_info("decode graph, not fused: %s", refusal.c_str());
  }

  // Refuses a plan that cannot fit before anything is allocated, with what would fit.
  void announce(const ModelConfig& config, std::int64_t capacity) {
    neox_.capacity = capacity;
    const auto planned = [&](std::int64_t positions, DType dtype) {
      cuda::NeoxOptions options = neox_;
      options.capacity = positions;
      options.dtype = dtype;
      return total_bytes(cuda::plan_neox(config, options));
    };
    log_info("running on %s in %s, decode %s", gpu_.name.c_str(), dtype_name(neox_.dtype),
             cuda::decode_mode_name(neox_.mode));
    const std::uint64_t needed = planned(capacity, neox_.dtype);
    if (needed <= gpu_.free_bytes) return;
    std::int64_t fitting = capacity;
    while (fitting > 1 && planned(fitting, neox_.dtype) > gpu_.free_bytes) fitting /= 2;
    std::string advice = "Use --device cpu";
    if (planned(fitting, neox_.dtype) <= gpu_.free_bytes) {
      advice = format("--context %lld would fit", static_cast<long long>(fitting));
    } else if (neox_.dtype == DType::f32 && planned(capacity, DType::f16) <= gpu_.free_bytes) {
      advice = "--dtype fp16 would fit";
    }
    fail(Exit::resources, "the plan needs %s of memory, %s has %s free. %s",
         human_bytes(static_cast<double>(needed)).c_str(), gpu_.name.c_str(),
         human_bytes(static_cast<double>(gpu_.free_bytes)).c_str(), advice.c_str());
  }

  std::unique_ptr<DecodeModel> load_on_gpu(const ModelFile& file) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    std::uint64_t all = 0;
    for (const TensorSpec& spec : file.table().specs()) all += file.file().at(spec.name).bytes;
    ProgressLine line;
    neox_.progress = [&](std::uint64_t done, std::uint64_t) {
      line.show(format("reading %s: %s of %s, %.1f GB/s", escaped(file.file().path()).c_str(),
                       human_bytes(static_cast<double>(done)).c_str(), human_bytes(static_cast<double>(all)).c_str(),
                       static_cast<double>(done) / seconds() / 1e9));
    };
    std::unique_ptr<DecodeModel> model = cuda::load_neox(file, neox_);
    line.clear();
    log_info("read %s in %.2f s, %.1f GB/s, every hash right", human_bytes(static_cast<double>(all)).c_str(), seconds(),
             static_cast<double>(all) / seconds() / 1e9);
    return model;
  }

  cuda::Device gpu_;
  cuda::NeoxOptions neox_;
#endif
  const Options& options_;
  bool on_gpu_ = false;
};

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

// Positions of the K/V cache: those asked for, or `needed` as far as the model was made for so many.
std::int64_t choose_capacity(const Options& o, const ModelConfig& config, std::int64_t needed) {
  if (o.context == 0) return std::clamp<std::int64_t>(needed, 1, config.max_positions);
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
  Place& place;

  Tokenizer::Special special() const { return options.special ? Tokenizer::Special::allow : Tokenizer::Special::text; }
};

void announce(const DecodeModel& model, const std::string& name, const char* dtype) {
  log_info("%s: %lld layers of %lld, %.1f M parameters from %s; %s for a context of %lld", name.c_str(),
           static_cast<long long>(model.config().num_layers), static_cast<long long>(model.config().hidden_size),
           static_cast<double>(TensorTable(model.config()).parameters()) / 1e6, dtype,
           human_bytes(static_cast<double>(total_bytes(model.memory()))).c_str(),
           static_cast<long long>(model.capacity()));
}

// Until it is done a signal ends the program at once; from then on there is a result to finish.
std::unique_ptr<DecodeModel> load_model(const Session& s, std::int64_t capacity) {
  const DecodeFaults faults = parse_decode_faults(s.options.debug_inject);
  inject_before_load(faults);
  std::unique_ptr<DecodeModel> model = with_faults(s.place.load(s.file, capacity), faults);
  install_signal_handlers();
  announce(*model, escaped(s.file.file().path()), dtype_name(s.file.dtype()));
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
  return interrupted ? exit_after_signal(stop_signal()) : Exit::ok;
}

Exit run_prompt(const Session& s) {
  const Options& o = s.options;
  const std::vector<std::int32_t> prompt =
      o.prompt_ids.empty()
          ? start_ids(need_tokenizer(s.tokenizer, o).encode(read_prompt_text(o), true, s.special()), s.file.config())
          : parse_ids(o.prompt_ids, s.file.config().vocab_size);
  const std::int64_t positions = s.file.config().max_positions;
  const std::int64_t capacity =
      choose_capacity(o, s.file.config(), static_cast<std::int64_t>(prompt.size()) + std::min(o.max_tokens, positions));
  check_prompt_fits(prompt.size(), 0, capacity);
  if (!s.tokenizer.has_value()) log_info("the model file has no tokenizer: ids in the place of text");
  const std::unique_ptr<DecodeModel> model = load_model(s, capacity);

  TextOutput output;
  GenerateHooks hooks;
  hooks.interrupted = stop_requested;
  if (!o.json) hooks.on_text = [&output](std::string_view piece) { output.write(piece); };
  const Tokenizer* tokenizer = s.tokenizer.has_value() ? &*s.tokenizer : nullptr;
  const GenerateResult result = generate(*model, tokenizer, prompt, generate_options(s), hooks);
  if (o.json) {
    write_stdout(json_line(generation_json(*model, prompt, result, s.place.names())));
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
  const std::int64_t window = choose_capacity(s.options, s.file.config(), kDefaultWindow);
  const std::int64_t stride = s.options.stride > 0 ? s.options.stride : std::max<std::int64_t>(window / 2, 1);
  perplexity_windows(static_cast<std::int64_t>(ids.size()), window, stride);
  // A text that is shorter than the window is one window.
  const std::int64_t capacity = std::min(window, std::max<std::int64_t>(static_cast<std::int64_t>(ids.size()), 2));
  const std::unique_ptr<DecodeModel> model = load_model(s, capacity);

  ProgressLine progress;
  PerplexityHooks hooks;
  hooks.interrupted = stop_requested;
  hooks.on_window = [&progress](std::int64_t done, std::int64_t all, double so_far) {
    progress.show(format("window %lld of %lld, perplexity %.3f", static_cast<long long>(done),
                         static_cast<long long>(all), so_far));
  };
  const PerplexityResult result =
      perplexity(*model, ids, static_cast<std::int64_t>(text.size()), std::min(stride, capacity - 1), hooks);
  progress.clear();
  write_stdout(s.options.json ? json_line(perplexity_json(result, window, stride, s.place.names()))
                              : perplexity_text(result, window, stride));
  return exit_after(result.interrupted);
}

Exit run_benchmark(const Options& o, const ModelConfig& config, Place& place,
                   const std::function<std::unique_ptr<DecodeModel>(std::int64_t capacity)>& load) {
  BenchOptions bench{o.max_tokens, {}, static_cast<std::uint64_t>(o.seed), 0};
  const std::int64_t limit = choose_capacity(o, config, config.max_positions);
  if (!o.bench_contexts.empty()) {
    bench.contexts = parse_contexts(o.bench_contexts, limit);
  } else if (place.on_gpu()) {
    for (const std::int64_t context : {64, 1024, 2000}) {
      if (context < limit) bench.contexts.push_back(context);
    }
  }
  if (o.bench_layer) {
    if (!place.on_gpu()) fail(Exit::environment, "--bench-layer: needs a GPU");
    const LayerBenchResult result = run_layer_bench(*load(2 * kLayerContext), static_cast<std::uint64_t>(o.seed));
    write_stdout(o.json ? json_line(layer_bench_json(result, place.names())) : layer_bench_text(result, place.names()));
    return Exit::ok;
  }
  if (o.bench_timeline && place.names().decode != "fused") {
    fail(Exit::environment, "--bench-timeline: only the fused kernel records one, and this is --decode %s",
         place.names().decode.c_str());
  }
  bench.read_ceiling = place.read_ceiling();
  const std::unique_ptr<DecodeModel> model = load(bench_capacity(bench, limit));
  const BenchResult result = run_bench(*model, bench, stop_requested);
  write_stdout(o.json ? json_line(bench_json(result, place.names())) : bench_text(result));
  if (o.bench_timeline && !result.interrupted) {
    model->reset();
    model->prefill(std::vector<std::int32_t>(static_cast<std::size_t>(kLayerContext), 1));
    write_stdout(model->decode_timeline(1));
  }
  return exit_after(result.interrupted);
}

Exit run_random_benchmark(const Options& o) {
  const ModelConfig config = pythia_config(o.random_model);
  Place place(o);
  place.choose(config, DType::f16);
  return run_benchmark(o, config, place, [&](std::int64_t capacity) {
    std::unique_ptr<DecodeModel> model = place.make_random(config, capacity);
    install_signal_handlers();
    announce(*model, o.random_model, "a random generator");
    return model;
  });
}

Exit run_compare(const Session& s) {
  const TensorFile dump = TensorFile::open(s.options.compare_file, FileKind::reference_dump);
  const std::int64_t capacity = choose_capacity(s.options, s.file.config(), decoding_positions(dump));
  const Comparison comparison = compare_decoding(dump, s.place.tolerance(), *load_model(s, capacity));
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
  parse_decode_faults(options.debug_inject);  // refused before any file is opened

  if (table.given("random-model")) return run_random_benchmark(options);
  Place place(options);
  const ModelFile file = ModelFile::open(options.model, Family::gpt_neox);
  const std::optional<Tokenizer> tokenizer = load_tokenizer(file);
  place.choose(file.config(), file.dtype());
  const Session session{options, file, tokenizer, place};

  if (options.interactive) {
    const Tokenizer& text = need_tokenizer(tokenizer, options);
    const std::int64_t capacity = choose_capacity(options, file.config(), kDefaultWindow);
    return run_interactive(*load_model(session, capacity), text, session.special(), generate_options(session));
  }
  if (options.bench) {
    return run_benchmark(options, file.config(), place,
                         [&](std::int64_t capacity) { return load_model(session, capacity); });
  }
  if (table.given("perplexity")) return run_perplexity(session);
  if (table.given("compare")) return run_compare(session);
  return run_prompt(session);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
