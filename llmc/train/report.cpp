#include "llmc/train/report.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"

namespace weft {

namespace {

constexpr double kRoundedUp = 1.1;  // --epochs become whole steps: with more than this factor a line says so

Json host_facts() {
  utsname system{};
  ::uname(&system);
  return {{"name", system.nodename},
          {"system", std::string(system.sysname) + " " + system.release},
          {"machine", system.machine},
          {"cpus", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"memory_bytes", available_host_memory()}};
}

std::string data_line(const char* name, const TokenDataset& data) {
  const auto windows = static_cast<std::int64_t>(data.windows());
  const std::string rows = !data.of_documents() ? counted(windows, "window")
                           : data.of_pairs()    ? counted(data.pairs(), "pair") + " in " + counted(windows, "row")
                           : !data.packs()
                               ? counted(windows, "conversation") + " in rows"
                               : counted(data.documents(), "conversation") + " in " + counted(windows, "row");
  return format("  %s: %s, %s tokens, %s of %lld", name,
                counted(static_cast<std::int64_t>(data.shards().size()), "shard").c_str(),
                human_count(static_cast<double>(data.tokens())).c_str(), rows.c_str(),
                static_cast<long long>(data.seq_len()));
}

// Of shards with documents: how full the rows are, how much of them is learned, and what is cut or has no row.
std::string documents_text(const TokenDataset& data) {
  if (!data.of_documents()) return data.masks_documents() ? ", each document for itself" : "";
  const double places = static_cast<double>(data.windows()) * static_cast<double>(data.seq_len());
  std::string text;
  if (data.packs()) {
    text += format(" (%.1f %% full, %.1f %% of the attention of whole rows)",
                   100.0 * static_cast<double>(data.inputs()) / places, 100.0 * data.attention_share());
  }
  text += format(", %.1f %% of the rows learned", 100.0 * static_cast<double>(data.labels()) / places);
  if (data.shortened() > 0) {
    text += format(", %lld longer ones cut behind an answer", static_cast<long long>(data.shortened()));
  }
  if (data.too_long() > 0) text += format(", %lld longer ones left out", static_cast<long long>(data.too_long()));
  if (data.unlearned() > 0) text += format(", %lld without a learned token", static_cast<long long>(data.unlearned()));
  return text;
}

// Without --verbose only the settings that the user gave, and those that say most about a run.
std::vector<std::string> settings_table(const TrainSettings& settings) {
  static const std::set<std::string> kAlways = {"device", "precision", "threads", "lr", "seed"};
  std::vector<std::string> lines;
  std::size_t left_out = 0;
  for (const auto& [name, value] : settings.effective) {
    if (value.empty() || value == "[]") continue;
    if (!settings.verbose && !settings.given.contains(name) && !kAlways.contains(name)) {
      ++left_out;
      continue;
    }
    const std::string text = escaped(value, 4096);
    const bool plain = text.size() == value.size() + 2;  // nothing is escaped: only the quotes were added
    lines.push_back(format("  %-20s %s", name.c_str(), plain ? value.c_str() : text.c_str()));
  }
  if (left_out > 0) lines.push_back(format("  and %zu defaults: --verbose shows them", left_out));
  return lines;
}

// What no option shows: the size of a step, and how much of the data the run sees.
std::vector<std::string> plan_lines(const TrainSettings& s, const TrainInputs& inputs) {
  const double all_tokens = static_cast<double>(s.steps) * static_cast<double>(s.batch_tokens);
  std::vector<std::string> lines;
  const std::string ranks = s.virtual_ranks > 1
                                ? format(" on each of %lld %sranks", static_cast<long long>(s.virtual_ranks),
                                         s.virtual_ranks > s.ranks ? "virtual " : "")
                                : "";
  lines.push_back(format("  a step: %lld tokens = %lld x %lld, accumulated %s%s; the run: %s tokens",
                         static_cast<long long>(s.batch_tokens), static_cast<long long>(s.micro_batch),
                         static_cast<long long>(s.seq_len), counted(s.rank_accumulation(), "time").c_str(),
                         ranks.c_str(), human_count(all_tokens).c_str()));
  if (!inputs.train) return lines;
  const double epoch = static_cast<double>(inputs.train->windows()) * static_cast<double>(s.seq_len);
  const double epochs = all_tokens / epoch;
  const std::int64_t left_out = inputs.train->left_out();
  lines.push_back(data_line("train", *inputs.train) + documents_text(*inputs.train) + format(", %.2f epochs", epochs) +
                  (left_out > 0 ? format(", %lld tokens fill no window", static_cast<long long>(left_out)) : ""));
  if (s.epochs > 0 && epochs > kRoundedUp * s.epochs) {
    lines.push_back(format(
        "  --epochs %g became %.2f: the run has %s, of %s each. A smaller --micro-batch, or "
        "--batch-tokens, comes closer",
        s.epochs, epochs, counted(s.steps, "step").c_str(), counted(s.batch_tokens / s.seq_len, "sequence").c_str()));
  }
  if (!inputs.val) {
    lines.push_back("  no validation data (--val)");
    return lines;
  }
  const auto asked = static_cast<std::uint64_t>(s.val_batches * s.micro_batch);
  const std::string share =
      asked > 0 && asked < inputs.val->windows()
          ? format(", measured on %llu of them", static_cast<unsigned long long>(asked))
          : format(", measured on all: %lld tokens", static_cast<long long>(inputs.val->labels()));
  lines.push_back(data_line("val", *inputs.val) + documents_text(*inputs.val) + share);
  return lines;
}

}  // namespace

std::vector<std::string> start_report(const TrainSettings& settings, const TrainInputs& inputs,
                                      const std::vector<MemoryLine>& memory) {
  std::vector<std::string> lines = {"settings"};
  const auto append = [&lines](const std::vector<std::string>& more) {
    lines.insert(lines.end(), more.begin(), more.end());
  };
  append(settings_table(settings));
  const ModelConfig& model = inputs.config;
  const bool padded = inputs.train && !inputs.weights && model.vocab_size != inputs.train->vocab_size();
  const std::string of_data =
      padded ? format(" for %lld ids", static_cast<long long>(inputs.train->vocab_size())) +
                   (settings.vocab_size > 0 ? " (--vocab-size)" : " (padded to a multiple of 128; --vocab-size)")
             : std::string();
  lines.push_back(format("model: %lld layers of %lld, %lld heads on %lld, vocabulary %lld%s, %s parameters",
                         static_cast<long long>(model.num_layers), static_cast<long long>(model.hidden_size),
                         static_cast<long long>(model.num_heads), static_cast<long long>(model.num_kv_heads),
                         static_cast<long long>(model.vocab_size), of_data.c_str(),
                         human_count(static_cast<double>(TensorTable(model).parameters())).c_str()));
  if (const std::optional<LoraConfig> lora = settings.lora()) {
    lines.push_back(format("adapter: rank %lld, alpha %g, targets %s, %s parameters; the model is frozen",
                           static_cast<long long>(lora->rank), lora->alpha, lora->target_names().c_str(),
                           human_count(static_cast<double>(TensorTable(model, *lora).parameters())).c_str()));
  }
  lines.push_back("data");
  append(plan_lines(settings, inputs));
  lines.push_back(settings.ranks == 1
                      ? format("memory on %s", settings.device.c_str())
                      : format("memory on %s, of each of the %lld ranks (--shard %s)", settings.device.c_str(),
                               static_cast<long long>(settings.ranks), settings.shard.c_str()));
  append(memory_table(memory));
  return lines;
}

std::vector<TuningWay> tuning_ways(const TrainSettings& settings, const ModelConfig& model) {
  TrainOptions options = settings.model_options();
  std::optional<LoraConfig> lora = std::exchange(options.lora, std::nullopt);
  if (!lora) lora = LoraConfig{16, 32, parse_lora_targets("--lora-targets", "all", lora_targets(model))};
  if (!lora_unsupported_reason(*lora, model).empty()) return {};
  options.frozen_quantization = {};
  std::vector<TuningWay> ways = {{"all weights", options}};
  options.lora = lora;
  // fp8 has a line of its own, where a GPU saves memory by it.
  TrainOptions in_fp8 = options;
  in_fp8.precision = Precision::fp8;
  if (options.precision == Precision::fp8) {
    options.precision = settings.device == "cpu" ? Precision::fp32 : Precision::bf16;
  }
  const std::string adapter =
      format("LoRA, rank %lld, targets %s", static_cast<long long>(lora->rank), lora->target_names().c_str());
  ways.push_back({adapter, options});
  if (settings.device == "cuda" && fp8_unsupported_reason(model, in_fp8.micro_batch, in_fp8.seq_len).empty()) {
    ways.push_back({"LoRA, the same with --precision fp8", in_fp8});
  }
  for (const WeightFormat* weights : weight_formats()) {
    options.frozen_quantization.weights = weights;
    ways.push_back({format("QLoRA, the same beside %s", weights->name), options});
  }
  return ways;
}

std::vector<std::string> tuning_table(const std::vector<TuningWay>& ways, std::uint64_t available,
                                      const std::function<std::uint64_t(const TrainOptions&)>& needed) {
  if (ways.empty()) return {};
  const auto size = [](std::uint64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  std::vector<std::string> lines = {available > 0 ? format("what fits in %s", size(available).c_str())
                                                  : std::string("what each way of tuning needs")};
  std::size_t width = 0;
  for (const TuningWay& way : ways) width = std::max(width, way.name.size());
  for (const TuningWay& way : ways) {
    const std::uint64_t bytes = needed(way.options);
    const char* const fits = available == 0 ? "" : bytes <= available ? "  fits" : "  too large";
    lines.push_back(format("  %-*s  %9s%s", static_cast<int>(width), way.name.c_str(), size(bytes).c_str(), fits));
  }
  return lines;
}

Json config_record(const TrainSettings& settings, const ModelConfig& model) {
  Json options = Json::object();
  for (const auto& [name, value] : settings.effective) options[name] = value;
  return {{"settings", options}, {"model", config_to_json(model)}};
}

Json header_record(const TrainSettings& settings, const TrainInputs& inputs, const std::vector<MemoryLine>& memory,
                   const std::string& version) {
  Json record = config_record(settings, inputs.config);
  record["type"] = "header";
  record["version"] = version;
  record["device"] = settings.device;
  record["parameters"] = TensorTable(inputs.config).parameters();
  if (inputs.trains_adapter) {
    record["trained_parameters"] = trained_table(inputs.config, settings.model_options()).parameters();
  }
  record["tokens_per_step"] = settings.batch_tokens;
  record["memory_bytes"] = total_bytes(memory);
  record["host"] = host_facts();
  if (settings.ranks > 1) record["ranks"] = settings.ranks;
  if (inputs.train) record["train"] = inputs.train->fingerprint();
  if (inputs.val) record["val"] = inputs.val->fingerprint();
  return record;
}

}  // namespace weft
