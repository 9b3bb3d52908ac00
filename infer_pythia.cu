// infer_pythia: runs Pythia (GPT-NeoX) and Llama models. This file is an overview of inference: one function per task, from
// the options through the model and the prompt to the output.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/app/decode_device.h"
#include "llmc/app/decode_session.h"
#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/base/threads.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/batch.h"
#include "llmc/infer/batch_bench.h"
#include "llmc/infer/bench.h"
#include "llmc/infer/chat_terminal.h"
#include "llmc/infer/describe.h"
#include "llmc/infer/engine.h"
#include "llmc/infer/fault_injection.h"
#include "llmc/infer/generate.h"
#include "llmc/infer/interactive.h"
#include "llmc/infer/options.h"
#include "llmc/infer/perplexity.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/report.h"
#include "llmc/infer/text_output.h"
#include "llmc/model/compare.h"
#include "llmc/model/presets.h"
#include "llmc/serve/access.h"
#include "llmc/serve/server.h"
#include "version.h"

namespace weft {
namespace {

bool stop_requested() {
  return stop_signal() != 0;
}

Exit exit_after(bool interrupted) {
  return interrupted ? exit_after_signal(stop_signal()) : Exit::ok;
}

Exit run_prompt(const DecodeSession& s) {
  const InferSettings& settings = s.settings();
  const DecodeSession::Prompt prompt = s.prompt();
  const std::int64_t positions = std::min(settings.max_tokens, s.config().max_positions);
  const std::int64_t capacity =
      choose_capacity(settings, s.config(), static_cast<std::int64_t>(prompt.ids.size()) + positions);
  check_prompt_fits(prompt.ids.size(), 0, capacity);
  const Tokenizer* tokenizer = s.tokenizer();
  if (tokenizer == nullptr) log_info("the model file has no tokenizer: ids in the place of text");
  on_stop(OnStop::finish_soon, "", "stopped before the first token: there is no text yet");
  const std::unique_ptr<DecodeModel> model = s.load_model(capacity);

  TextOutput output;
  GenerateHooks hooks;
  hooks.interrupted = stop_requested;
  hooks.on_id = [&, first = true]() mutable {
    if (!std::exchange(first, false)) return;
    on_stop(OnStop::finish);
    if (!settings.json && !settings.no_echo) output.write_prompt(prompt.text);
  };
  if (!settings.json) hooks.on_text = [&output](std::string_view piece) { output.write(piece); };
  const GenerateResult result = generate(*model, tokenizer, prompt.ids, s.generate_options(), hooks);
  if (settings.json) {
    write_stdout(json_line(generation_json(*model, prompt.ids, result, s.device().path())));
  } else {
    if (tokenizer == nullptr) output.write(ids_text(result.ids));
    output.end_line();
    log_info("%s", (settings.stats ? statistics_line(*model, result) : short_statistics(result)).c_str());
  }
  return exit_after(result.finish_reason == FinishReason::interrupted);
}

Exit run_interactive(const DecodeSession& s) {
  const Tokenizer& tokenizer = s.need_tokenizer();
  const std::unique_ptr<DecodeModel> model = s.load_model(choose_capacity(s.settings(), s.config(), kDefaultWindow));
  return run_interactive(*model, tokenizer, s.special(), s.generate_options(), s.settings().stats);
}

Exit run_chat(const DecodeSession& s) {
  const Chat& chat = s.need_chat();
  const InferSettings& settings = s.settings();
  check_system_message(chat, settings.system);
  const std::unique_ptr<DecodeModel> model = s.load_model(choose_capacity(settings, s.config(), kDefaultWindow));
  return run_chat(*model, s.need_tokenizer(), chat, settings.system, s.generate_options(), settings.ignore_eos,
                  settings.stats);
}

// The engine for many requests on this model.
EngineOptions engine_options(const InferSettings& settings, const InferenceModel& model,
                             const DraftOptions& drafts = {}) {
  EngineOptions options;
  options.max_running = settings.max_running;
  options.rows_per_step = model.max_rows();
  options.prompt_rows = settings.prompt_rows;
  options.drafts = drafts;
  return options;
}

Exit run_batch(const DecodeSession& s) {
  const InferSettings& settings = s.settings();
  PolledLines input(settings.batch, kMaxRequestBytes);
  if (input.reads(settings.output)) {
    fail(Exit::usage, "--output: got %s, the file of --batch itself. Choose another name",
         escaped(settings.output).c_str());
  }
  AnswerFile output(settings.output);  // before the model is loaded, so that an error of the files is reported at once
  const std::unique_ptr<InferenceModel> model = s.load_inference(settings.kv_bytes, settings.max_running);
  const std::unique_ptr<InferenceModel> draft = s.load_draft(*model);
  const GenerateOptions& generate = s.generate_options();
  const CompletionOptions defaults = {.max_tokens = settings.max_tokens,
                                      .sampler = generate.sampler,
                                      .stop = settings.stop,
                                      .ignore_eos = settings.ignore_eos,
                                      .rules = s.requested_rules()};
  const EngineOptions engine = engine_options(settings, *model, s.draft_options(draft.get()));
  return run_batch(*model, s.tokenizer(), {defaults, s.special(), engine, s.file().content_hash()}, input, output);
}

// --against: both models on one text, token by token.
Exit run_divergence(const DecodeSession& s, std::span<const std::int32_t> ids, std::int64_t window,
                    std::int64_t stride) {
  InferSettings other = s.settings();
  other.model = other.against;
  // So that the same file, too, says what these options of --model change.
  other.kv_dtype = other.activations = "auto";
  const std::unique_ptr<DecodeModel> model = s.load_model(window);
  // Opened after the first model is loaded, because it looks at how much memory is free.
  const DecodeSession of_other(other);
  // Without a tokenizer it takes the ids of --model, as many as it was made for: divergence() compares their number.
  if (of_other.tokenizer() != nullptr) check_same_tokens(s.file(), s.tokenizer(), of_other.file(), "against");
  const std::unique_ptr<DecodeModel> against = of_other.load_model(choose_capacity(other, of_other.config(), window));
  if (against->capacity() < window) {
    fail(Exit::usage, "--context: got %lld, expected at most the %lld positions of --against",
         static_cast<long long>(window), static_cast<long long>(against->capacity()));
  }
  ProgressLine progress;
  DivergenceHooks hooks;
  hooks.interrupted = stop_requested;
  hooks.on_window = [&progress](std::int64_t done, std::int64_t all, double so_far) {
    on_stop(OnStop::finish,
            "stopping: the result covers the tokens compared so far; a second signal leaves without one",
            "left without a result");
    progress.show(format("window %lld of %lld, divergence %.6f", static_cast<long long>(done),
                         static_cast<long long>(all), so_far));
  };
  const DivergenceResult result = divergence(*model, *against, ids, window, stride, hooks);
  progress.clear();
  write_stdout(s.settings().json ? json_line(divergence_json(result, window, stride, s.device().path()))
                                 : divergence_text(result, window, stride));
  return exit_after(result.interrupted);
}

Exit run_perplexity(const DecodeSession& s) {
  const InferSettings& settings = s.settings();
  const Tokenizer& tokenizer = s.need_tokenizer();
  const std::string text = read_text_file(settings.perplexity, kMaxTextBytes);
  check_text(text, settings.perplexity);
  std::vector<std::int32_t> ids = tokenizer.encode(text, false, s.special());
  const std::optional<std::int32_t> start = document_start(s.config());
  if (start.has_value()) ids.insert(ids.begin(), *start);
  const std::int64_t window = choose_capacity(settings, s.config(), kDefaultWindow);
  const std::int64_t stride = settings.stride > 0 ? settings.stride : std::max<std::int64_t>(window / 2, 1);
  perplexity_windows(static_cast<std::int64_t>(ids.size()), window, stride);  // refuses a bad --stride before loading
  // If the whole text fits into one window, the cache only has to be as long as the text.
  const std::int64_t capacity = std::min(window, std::max<std::int64_t>(static_cast<std::int64_t>(ids.size()), 2));
  if (!settings.against.empty()) return run_divergence(s, ids, capacity, std::min(stride, capacity - 1));
  const std::unique_ptr<DecodeModel> model = s.load_model(capacity);

  ProgressLine progress;
  PerplexityHooks hooks;
  hooks.interrupted = stop_requested;
  hooks.on_loss = loss_faults(parse_decode_faults(settings.debug_inject));
  hooks.on_window = [&progress](std::int64_t done, std::int64_t all, double so_far) {
    on_stop(OnStop::finish, "stopping: the result covers the tokens scored so far; a second signal leaves without one",
            "left without a result");
    progress.show(format("window %lld of %lld, perplexity %.3f", static_cast<long long>(done),
                         static_cast<long long>(all), so_far));
  };
  PerplexityResult result =
      perplexity(*model, ids, static_cast<std::int64_t>(text.size()), std::min(stride, capacity - 1), hooks);
  progress.clear();
  if (!start.has_value()) ++result.of_tokens;  // the first token of the text, which has nothing before it
  const DecodePath path = s.device().path();
  write_stdout(settings.json ? json_line(perplexity_json(result, window, stride, path))
                             : perplexity_text(result, window, stride));
  return exit_after(result.interrupted);
}

using MakeModel = std::function<std::unique_ptr<DecodeModel>(std::int64_t capacity)>;

Exit run_bench(const InferSettings& settings, const ModelConfig& config, const DecodeDevice& device,
               const MakeModel& make) {
  const DecodePath path = device.path();
  const auto seed = static_cast<std::uint64_t>(settings.seed);
  const std::int64_t limit = choose_capacity(settings, config, config.max_positions);
  const std::int64_t longest = limit - 2;  // a context is followed by an id that is decoded and one that is sampled
  BenchOptions bench{settings.max_tokens, {}, seed, 0};
  if (!settings.bench_contexts.empty()) {
    bench.contexts = parse_integers("--bench-contexts", settings.bench_contexts, longest);
  } else if (device.gpu()) {
    for (const std::int64_t context : {64, 1024, 2000}) {
      if (context <= longest) bench.contexts.push_back(context);
    }
  }
  if (settings.bench_layer) {
    if (path.decode != "fused") {
      fail(Exit::environment, "--bench-layer: only the fused kernel computes a layer alone, and this is --decode %s",
           path.decode.c_str());
    }
    const LayerBenchResult result = run_layer_bench(*make(2 * kLayerContext), seed);
    write_stdout(settings.json ? json_line(layer_bench_json(result, path)) : layer_bench_text(result, path));
    return Exit::ok;
  }
  if (settings.bench_timeline && path.decode != "fused") {
    fail(Exit::environment, "--bench-timeline: only the fused kernel records one, and this is --decode %s",
         path.decode.c_str());
  }
  bench.read_ceiling = device.read_ceiling();
  const std::unique_ptr<DecodeModel> model = make(bench_capacity(bench, limit));
  const BenchResult result = run_bench(*model, bench);
  write_stdout(settings.json ? json_line(bench_json(result, path)) : bench_text(result));
  if (settings.bench_timeline) {
    model->reset();
    model->prefill(std::vector<std::int32_t>(static_cast<std::size_t>(kLayerContext), 1));
    write_stdout(model->decode_timeline(1));
  }
  return Exit::ok;
}

using MakeInference = std::function<std::unique_ptr<InferenceModel>(std::int64_t sequences)>;

Exit run_batch_bench(const InferSettings& settings, const DecodeDevice& device, const MakeInference& make) {
  BatchBenchOptions bench;
  bench.sequences = parse_integers("--bench-batch", settings.bench_batch, kMostRunning);
  bench.prompt = settings.bench_prompt;
  bench.tokens = settings.max_tokens;
  bench.sampler = sampler_options(settings);
  bench.rest = device.gpu();
  bench.read_ceiling = device.read_ceiling();
  const std::unique_ptr<InferenceModel> model = make(*std::max_element(bench.sequences.begin(), bench.sequences.end()));
  const BatchBenchResult result = run_batch_bench(*model, engine_options(settings, *model), bench);
  write_stdout(settings.json ? json_line(batch_bench_json(result, device.path())) : batch_bench_text(result));
  return Exit::ok;
}

Exit run_random_bench(const InferSettings& settings) {
  ModelConfig config = random_model_config(settings.random_model);
  DecodeDevice device(settings);
  if (!settings.draft.empty()) {
    const ModelConfig draft = random_model_config(settings.draft, "--draft");
    device.expect_draft(draft);
    // As if they had one tokenizer: nothing can be drafted behind an id that the draft model does not have.
    config.tokenizer_vocab = std::min(config.tokenizer_vocab, draft.tokenizer_vocab);
  }
  device.choose(config, published_dtype(config));
  if (settings.task == InferTask::bench_batch) {
    return run_batch_bench(settings, device, [&](std::int64_t sequences) {
      return make_random_inference(settings, device, config, sequences);
    });
  }
  return run_bench(settings, config, device,
                   [&](std::int64_t capacity) { return make_random_model(settings, device, config, capacity); });
}

Exit run_compare(const DecodeSession& s) {
  const TensorFile dump = TensorFile::open(s.settings().compare, FileKind::reference_dump);
  const std::int64_t capacity = choose_capacity(s.settings(), s.config(), decoding_positions(dump, s.config()));
  const Comparison comparison = compare_decoding(dump, s.device().compare_tolerance(), *s.load_model(capacity));
  for (const std::string& line : comparison.table()) write_stdout(line + "\n");
  return comparison.passed() ? Exit::ok : Exit::internal;
}

ServerOptions server_options(const InferSettings& s) {
  ServerOptions options;
  options.address = parse_host_port(s.serve, "--serve");
  options.model = s.served_name;
  if (options.model.empty()) options.model = utf8_replace_invalid(std::filesystem::path(s.model).stem().string());
  options.api_key = read_api_key(s.api_key_file);
  options.allowed_hosts = parse_allowed_hosts(s.allowed_host);
  options.log_requests = s.log_requests;
  options.version = WEFT_VERSION;
  options.http.connections = s.max_connections;
  options.http.body_bytes = static_cast<std::size_t>(s.max_body);
  options.http.all_body_bytes = std::max(options.http.all_body_bytes, 4 * options.http.body_bytes);
  options.http.read_seconds = s.read_seconds;
  options.http.idle_seconds = s.idle_seconds;
  options.http.write_seconds = s.write_seconds;
  options.max_queue = s.max_queue;
  options.drain_seconds = s.drain_seconds;
  options.request_seconds = s.request_seconds;
  return options;
}

ServedChat served_chat(const DecodeSession& s) {
  ServedChat served{s.chat()};
  const Json members = s.file().chat_members();
  const auto add = [&](const Json& from, const char* name) {
    if (from.is_object() && from.contains(name) && from[name].is_string()) served.tokenizer_info[name] = from[name];
  };
  add(members, kChatTemplate);
  for (const char* name : {"bos_token", "eos_token", "pad_token"}) add(members.value(kChatTokens, Json()), name);
  return served;
}

Exit run_serve(const DecodeSession& s) {
  const InferSettings& settings = s.settings();
  // It listens from here on, and answers 503 until run(): the model is still being loaded.
  CompletionsServer server(server_options(settings));
  const std::unique_ptr<InferenceModel> model = s.load_inference(settings.kv_bytes, settings.max_running);
  const std::unique_ptr<InferenceModel> draft = s.load_draft(*model);
  EngineOptions options = engine_options(settings, *model, s.draft_options(draft.get()));
  options.queued_seconds = kServedQueuedSeconds;
  Engine engine(*model, options);
  return server.run(engine, options, s.config(), s.tokenizer(), s.special(), served_chat(s));
}

Exit run_describe(const std::string& path) {
  std::vector<std::string> warnings;
  const Json description = describe_model(path, std::cin, warnings);
  for (const std::string& warning : warnings) log_warning("%s", warning.c_str());
  write_stdout(json_text(description, 1) + "\n");
  return Exit::ok;
}

Exit run(int argc, char** argv) {
  clean_thread_environment(argv);
  std::optional<InferSettings> settings =
      parse_infer_options(argc, argv, "infer_pythia " WEFT_VERSION " (" WEFT_BUILD ")");
  if (!settings) return Exit::ok;  // --help, --version
  settings->threads = set_threads(settings->threads);
  on_stop(OnStop::leave);  // until there is a result worth finishing
  install_signal_handlers();
  if (settings->task == InferTask::describe) return run_describe(settings->describe);
  if (!settings->random_model.empty()) return run_random_bench(*settings);

  const DecodeSession session(*settings);
  switch (settings->task) {
    case InferTask::interactive:
      return run_interactive(session);
    case InferTask::chat:
      return run_chat(session);
    case InferTask::batch:
      return run_batch(session);
    case InferTask::perplexity:
      return run_perplexity(session);
    case InferTask::compare:
      return run_compare(session);
    case InferTask::serve:
      return run_serve(session);
    case InferTask::bench:
      return run_bench(*settings, session.config(), session.device(),
                       [&](std::int64_t capacity) { return session.load_model(capacity); });
    case InferTask::bench_batch:
      return run_batch_bench(*settings, session.device(), [&](std::int64_t sequences) {
        return session.load_inference(settings->kv_bytes, sequences);
      });
    case InferTask::prompt:
    case InferTask::prompt_file:
    case InferTask::prompt_ids:
    case InferTask::describe:
      break;
  }
  return run_prompt(session);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  return weft::run_program([&] { return weft::run(argc, argv); });
}
