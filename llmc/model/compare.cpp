#include "llmc/model/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "llmc/base/error.h"
#include "llmc/base/installed.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

constexpr std::string_view kActivation = "act.", kGradient = "grad.", kStepped = "adamw.param.";
constexpr const char* kLosses = "adamw.losses";

std::vector<std::int32_t> read_ids(const TensorFile& dump, const std::string& name) {
  const TensorInfo& tensor = dump.at(name);
  if (tensor.dtype != DType::i32) {
    fail(Exit::bad_file, "%s: %s: got dtype %s, expected i32", escaped(dump.path()).c_str(), name.c_str(),
         dtype_name(tensor.dtype));
  }
  dump.verify(tensor);
  std::vector<std::int32_t> ids(tensor.elements());
  if (!ids.empty()) std::memcpy(ids.data(), dump.bytes(tensor).data(), tensor.bytes);
  return ids;
}

void check_ids(const TensorFile& dump, const std::string& name, std::span<const std::int32_t> ids, std::int64_t vocab,
               bool ignored_allowed) {
  for (const std::int32_t id : ids) {
    if ((id < 0 || id >= vocab) && !(ignored_allowed && id == kIgnoredLabel)) {
      fail(Exit::bad_file, "%s: %s: id %d is outside the vocabulary of %lld", escaped(dump.path()).c_str(),
           name.c_str(), id, static_cast<long long>(vocab));
    }
  }
}

std::vector<float> read_values(const TensorFile& dump, const TensorInfo& tensor) {
  std::vector<float> values(tensor.elements());
  dump.read_f32(tensor, values.data());
  return values;
}

struct DumpBatch {
  std::int64_t B = 0, T = 0, label_count = 0;
  std::vector<std::int32_t> ids, labels;  // [B, T]
};

// The tensor input_ids [B, T] of the dump. B and T are at least 1, the file has data for them, and the labels have this
// shape.
const TensorInfo& batch_inputs(const TensorFile& dump) {
  const TensorInfo& inputs = dump.at("input_ids");
  if (inputs.shape.size() != 2 || inputs.bytes == 0 || dump.at("labels").shape != inputs.shape) {
    fail(Exit::bad_file, "%s: input_ids: got shape %s, expected [B, T] and labels of the same shape",
         escaped(dump.path()).c_str(), shape_text(inputs.shape).c_str());
  }
  return inputs;
}

void check_positions(const TensorFile& dump, std::int64_t positions, std::int64_t limit) {
  if (positions > limit) {
    fail(Exit::bad_file, "%s: input_ids: %lld positions do not fit in a context of %lld", escaped(dump.path()).c_str(),
         static_cast<long long>(positions), static_cast<long long>(limit));
  }
}

DumpBatch read_batch(const TensorFile& dump, std::int64_t vocab) {
  const TensorInfo& inputs = batch_inputs(dump);
  DumpBatch batch{inputs.shape[0], inputs.shape[1], 0, read_ids(dump, "input_ids"), read_ids(dump, "labels")};
  check_ids(dump, "input_ids", batch.ids, vocab, false);
  check_ids(dump, "labels", batch.labels, vocab, true);
  batch.label_count = static_cast<std::int64_t>(batch.labels.size()) -
                      std::count(batch.labels.begin(), batch.labels.end(), kIgnoredLabel);
  if (batch.label_count == 0) {
    fail(Exit::bad_file, "%s: labels: every label is ignored, expected at least one that counts",
         escaped(dump.path()).c_str());
  }
  return batch;
}

bool begins_with(const std::string& name, std::string_view prefix) {
  return name.compare(0, prefix.size(), prefix) == 0;
}

// "act.embedding" -> "act16.embedding": the same tensor from PyTorch's own 16-bit run.
std::string yardstick_name(const std::string& name) {
  const std::size_t dot = name.find('.');
  return dot == std::string::npos ? name + "16" : name.substr(0, dot) + "16" + name.substr(dot);
}

// Of a dump in fp8: what the tolerances of its tensors follow from, doc/tensor_file.md, "Reference dumps".
const Json* fp8_distances(const TensorFile& dump) {
  const Json::json_pointer key("/dump/fp8");
  return dump.config().contains(key) ? &dump.config().at(key) : nullptr;
}

// A dump in fp8 is for models in fp8, and no other dump is.
void check_precision(const TensorFile& dump, Precision precision) {
  const bool fp8 = fp8_distances(dump) != nullptr;
  if (fp8 == (precision == Precision::fp8)) return;
  const std::string problem = fp8 ? "this dump is in fp8, expected one in fp32. Use train_llama --precision fp8"
                                  : "missing, expected a dump in fp8. Make one with " +
                                        script_command("scripts/dump_reference.py") + " --precision fp8";
  fail(Exit::bad_file, "%s: dump.fp8: %s", escaped(dump.path()).c_str(), problem.c_str());
}

// How far the tensor of the dump is, in the 2-norm, from what another computation made of it; nullopt: nothing was measured.
std::optional<double> fp8_distance(const TensorFile& dump, const std::string& computation, const std::string& name) {
  const std::string source = escaped(dump.path()) + ": dump.fp8";
  const Json& all = *fp8_distances(dump);
  if (!all.is_object() || !all.contains(computation) || !all.at(computation).is_object()) {
    fail(Exit::bad_file, "%s.%s: missing, expected an object", source.c_str(), computation.c_str());
  }
  const Json& of_tensors = all.at(computation);
  if (!of_tensors.contains(name)) return std::nullopt;
  return json_number(of_tensors, name, source + "." + computation);
}

// The tolerance of a tensor in a comparison of models in fp8: compare.h. Three is the factor of 16 bits; two is sqrt(2), and room
// for how much that distance differs between tensors. Losses are a few numbers, which rounding may leave alone by luck.
std::optional<double> fp8_tolerance(const TensorFile& dump, DType activations, const std::string& name) {
  constexpr double kNoise = 3, kRounding = 2;
  const bool bf16 = activations == DType::bf16;
  const std::optional<double> noise = fp8_distance(dump, bf16 ? "bf16" : "noise", name);
  const std::optional<double> rounding = fp8_distance(dump, "rounding", name);
  const std::optional<double> plain = bf16 ? fp8_distance(dump, "plain_bf16", name) : 0;
  if (!noise || !rounding || !plain) return std::nullopt;
  if (name == kLosses) return kNoise * *noise;
  return std::min(kNoise * *noise, kRounding * *rounding + kNoise * *plain);
}

// Beyond this share of a parameter as a tolerance hardly an error of an optimizer would be found.
constexpr double kLargestUlpDistance = 1e-3;

// Of a dump in fp32: how far a tensor of the AdamW steps is from PyTorch's, in the norm in which it is compared, when every
// weight begins one unit in the last place away. 0: not measured.
double ulp_distance(const TensorFile& dump, const std::string& name) {
  const Json::json_pointer key("/dump/ulp");
  if (!dump.config().contains(key) || !dump.config().at(key).contains(name)) return 0;
  const std::string source = escaped(dump.path()) + ": dump.ulp";
  const double distance = json_number(dump.config().at(key), name, source);
  if (distance >= 0 && distance <= kLargestUlpDistance) return distance;
  fail(Exit::bad_file,
       "%s: %s: got %g, expected 0 to %g: the steps of this dump say nothing. Make one with a lower --lr",
       source.c_str(), name.c_str(), distance, kLargestUlpDistance);
}

class Checker {
 public:
  Checker(const TensorFile& dump, double tolerance, Precision precision = Precision::fp32,
          DType activations = DType::f32)
      : dump_(dump), precision_(precision), activations_(activations), tolerance_(tolerance) {
    result_.tolerance = precision == Precision::fp32 ? tolerance : 0;
  }

  void check(const std::string& name, std::span<const float> got, Norm norm = Norm::max) {
    const std::vector<float> want = read_values(dump_, dump_.at(name));
    if (precision_ == Precision::fp8) {
      if (got.empty() && activations_ == DType::bf16 && begins_with(name, kActivation)) return;
      const std::optional<double> allowed = fp8_tolerance(dump_, activations_, name);
      if (allowed) result_.rows.push_back(distance(name, got, want, std::max(tolerance_, *allowed), Norm::l2));
    } else if (precision_ == Precision::fp32) {
      const double allowed = begins_with(name, "adamw.") ? kFactor * ulp_distance(dump_, name) : 0;
      result_.rows.push_back(distance(name, got, want, std::max(tolerance_, allowed), norm));
    } else if (const TensorInfo* yardstick = dump_.find(yardstick_name(name))) {
      const TensorDistance own = distance(name, read_values(dump_, *yardstick), want, 0, Norm::l2);
      if (!std::isfinite(own.relative)) {  // as a tolerance it would let everything pass
        fail(Exit::bad_file, "%s: %s: expected finite values of the shape of %s", escaped(dump_.path()).c_str(),
             escaped(yardstick->name).c_str(), escaped(name).c_str());
      }
      result_.rows.push_back(distance(name, got, want, kFactor * own.relative, Norm::l2));
    }
  }
  // Calls fetch(tensor name without the prefix) for every tensor of the dump that begins with `prefix`.
  void check_all(std::string_view prefix, const std::function<std::vector<float>(const std::string&)>& fetch,
                 Norm norm = Norm::max) {
    for (const TensorInfo& tensor : dump_.tensors()) {
      if (begins_with(tensor.name, prefix)) check(tensor.name, fetch(tensor.name.substr(prefix.size())), norm);
    }
  }
  void add(TensorDistance row) { result_.rows.push_back(std::move(row)); }
  Comparison finish() { return std::move(result_); }

 private:
  static constexpr double kFactor = 3;  // of PyTorch's own error on the same tensor
  const TensorFile& dump_;
  Precision precision_;
  DType activations_;
  double tolerance_;
  Comparison result_;
};

// A parameter or its gradient. Empty if the model has none of this name: that differs from every tensor of the dump.
std::vector<float> model_values(TrainModel& model, TensorRole role, const std::string& name) {
  const TensorSpec* spec = model.table().find(name);
  if (spec == nullptr) return {};
  std::vector<float> values(static_cast<std::size_t>(spec->elements));
  model.read_tensor(role, *spec, values.data());
  return values;
}

const Json& adamw_settings(const TensorFile& dump) {
  const Json::json_pointer key("/dump/adamw");
  if (dump.config().contains(key)) return dump.config().at(key);
  fail(Exit::bad_file, "%s: dump.adamw: missing, but there are adamw.losses", escaped(dump.path()).c_str());
}

void compare_steps(const TensorFile& dump, TrainModel& model, const Batch& batch, std::int64_t label_count,
                   Checker& checker) {
  const std::string source = escaped(dump.path()) + ": dump.adamw";
  const Json& settings = adamw_settings(dump);
  const std::uint64_t losses_given = dump.at(kLosses).elements();
  const std::int64_t steps = json_int(settings, "steps", 1, 100'000, source);
  if (static_cast<std::uint64_t>(steps) != losses_given) {
    fail(Exit::bad_file, "%s: steps: got %lld, expected one for each of the %llu adamw.losses", source.c_str(),
         static_cast<long long>(steps), static_cast<unsigned long long>(losses_given));
  }
  const double clip = json_number(settings, "grad_clip", source);
  AdamWStep step;
  step.learning_rate = static_cast<float>(json_number(settings, "learning_rate", source));
  step.beta1 = static_cast<float>(json_number(settings, "beta1", source));
  step.beta2 = static_cast<float>(json_number(settings, "beta2", source));
  step.eps = static_cast<float>(json_number(settings, "eps", source));
  step.weight_decay = static_cast<float>(json_number(settings, "weight_decay", source));
  std::vector<float> losses;
  for (step.step = 1; step.step <= steps; ++step.step) {
    model.zero_gradients();
    model.forward(batch, 0, 1.0f / static_cast<float>(label_count));
    model.backward();
    const StepStatistics statistics = model.statistics();
    losses.push_back(static_cast<float>(statistics.loss_sum / static_cast<double>(label_count)));
    step.gradient_scale = clip_factor(statistics.gradient_norm, clip);
    model.update(step);
  }
  checker.check(kLosses, losses, Norm::loss);
  checker.check_all(
      kStepped, [&](const std::string& name) { return model_values(model, TensorRole::parameter, name); }, Norm::l2);
}

// Mean of -log softmax(logits[n])[labels[n]] over counted labels, in double precision.
double mean_loss(std::span<const float> logits, std::span<const std::int32_t> labels) {
  const std::size_t V = logits.size() / labels.size();
  double sum = 0;
  std::int64_t counted = 0;
  for (std::size_t n = 0; n < labels.size(); ++n) {
    if (labels[n] == kIgnoredLabel) continue;
    const auto row = logits.subspan(n * V, V);
    const double largest = *std::max_element(row.begin(), row.end());
    double exponentials = 0;
    for (const float logit : row) exponentials += std::exp(logit - largest);
    sum += largest + std::log(exponentials) - row[static_cast<std::size_t>(labels[n])];
    ++counted;
  }
  return sum / static_cast<double>(counted);
}

void compare_greedy(const TensorFile& dump, DecodeModel& model, Checker& checker) {
  const std::size_t given = dump.at("greedy.prompt_ids").elements(), wanted = dump.at("greedy.ids").elements();
  if (given == 0 || given + wanted > static_cast<std::size_t>(model.capacity())) {
    fail(Exit::bad_file, "%s: greedy: %zu + %zu tokens do not fit in a context of %lld", escaped(dump.path()).c_str(),
         given, wanted, static_cast<long long>(model.capacity()));
  }
  const std::vector<std::int32_t> prompt = read_ids(dump, "greedy.prompt_ids");
  check_ids(dump, "greedy.prompt_ids", prompt, model.config().vocab_size, false);
  model.reset();
  std::span<const float> logits = model.prefill(prompt);
  std::vector<std::int32_t> ids;
  while (ids.size() < wanted) {
    const auto real = logits.first(static_cast<std::size_t>(model.config().tokenizer_vocab));  // no padded rows
    ids.push_back(static_cast<std::int32_t>(std::max_element(real.begin(), real.end()) - real.begin()));
    if (ids.size() < wanted) logits = model.decode(ids.back());
  }
  // Ids must agree exactly: as floats (all below 2^24) with tolerance 0.
  const std::vector<std::int32_t> want = read_ids(dump, "greedy.ids");
  const std::vector<float> got_values(ids.begin(), ids.end()), want_values(want.begin(), want.end());
  checker.add(distance("greedy.ids", got_values, want_values, 0));
}

}  // namespace

TensorDistance distance(const std::string& name, std::span<const float> got, std::span<const float> want,
                        double tolerance, Norm norm) {
  TensorDistance row;
  row.name = name;
  row.tolerance = tolerance;
  if (got.size() != want.size()) {
    row.max_abs = row.relative = std::numeric_limits<double>::infinity();
    return row;
  }
  double largest = 0, dot = 0, got_square = 0, want_square = 0, difference_square = 0;
  bool finite = true;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double a = got[i], b = want[i];
    finite = finite && std::isfinite(a) && std::isfinite(b);
    row.max_abs = std::max(row.max_abs, std::abs(a - b));
    largest = std::max(largest, std::abs(b));
    difference_square += (a - b) * (a - b);
    dot += a * b;
    got_square += a * a;
    want_square += b * b;
  }
  if (row.max_abs > 0) {
    if (norm == Norm::loss) largest = std::max(largest, 1.0);
    row.relative = norm == Norm::l2 ? std::sqrt(difference_square / want_square) : row.max_abs / largest;
  }
  if (got_square > 0 && want_square > 0) row.cosine = dot / std::sqrt(got_square) / std::sqrt(want_square);
  // std::max passes over a NaN, so the figures above mean nothing if there is one.
  if (!finite) row.max_abs = row.relative = std::numeric_limits<double>::infinity();
  row.pass = finite && row.relative <= tolerance;
  return row;
}

bool Comparison::passed() const {
  return !rows.empty() && std::all_of(rows.begin(), rows.end(), [](const TensorDistance& row) { return row.pass; });
}

std::vector<std::string> Comparison::table() const {
  std::size_t width = 6, failures = 0;
  for (const TensorDistance& row : rows) width = std::max(width, row.name.size());
  const int w = static_cast<int>(width);
  std::vector<std::string> lines = {format("%-*s  %10s  %10s  %10s  %10s  %12s", w, "tensor", "max abs", "relative",
                                           "allowed", "rel / eps", "cosine")};
  for (const TensorDistance& row : rows) {
    lines.push_back(format("%-*s  %10.3g  %10.3g  %10.3g  %10.1f  %12.9f  %s", w, row.name.c_str(), row.max_abs,
                           row.relative, row.tolerance, row.relative / std::numeric_limits<float>::epsilon(),
                           row.cosine, row.pass ? "ok" : "FAIL"));
    failures += row.pass ? 0 : 1;
  }
  lines.push_back(
      format("%zu tensors, %zu failed (%s)", rows.size(), failures,
             tolerance > 0 ? "relative to each tensor's largest value" : "in the 2-norm, relative to each tensor's"));
  return lines;
}

namespace {

TrainOptions batch_options(const TensorFile& dump, Precision precision) {
  check_precision(dump, precision);
  const TensorInfo& inputs = batch_inputs(dump);
  TrainOptions options;
  options.micro_batch = inputs.shape[0];
  options.seq_len = inputs.shape[1];
  options.precision = precision;
  return options;
}

}  // namespace

TrainOptions training_options(const TensorFile& dump, Precision precision, const ModelConfig& config) {
  const TrainOptions options = batch_options(dump, precision);
  check_positions(dump, options.seq_len, config.max_positions);
  return options;
}

Comparison compare_training(const TensorFile& dump, Precision precision, double tolerance,
                            const std::function<std::unique_ptr<TrainModel>(const TrainOptions&)>& make,
                            DType activations) {
  const TrainOptions options = batch_options(dump, precision);
  const std::unique_ptr<TrainModel> model = make(options);
  check_positions(dump, options.seq_len, model->config().max_positions);
  const DumpBatch batch = read_batch(dump, model->config().vocab_size);

  Checker checker(dump, tolerance, precision, activations);
  const Batch inputs_and_labels{batch.ids, batch.labels};
  model->zero_gradients();
  model->forward(inputs_and_labels, 0, 1.0f / static_cast<float>(batch.label_count));
  checker.check_all(kActivation, [&](const std::string& name) { return model->activation(name); });
  model->backward();
  const float loss = static_cast<float>(model->statistics().loss_sum / static_cast<double>(batch.label_count));
  // One number may come out close by luck, so PyTorch's error on it is no yardstick; adamw.losses has ten.
  if (dump.find("loss") != nullptr && precision == Precision::fp32) checker.check("loss", {&loss, 1}, Norm::loss);
  checker.check_all(kGradient,
                    [&](const std::string& name) { return model_values(*model, TensorRole::gradient, name); });
  if (dump.find(kLosses) != nullptr) {
    compare_steps(dump, *model, inputs_and_labels, batch.label_count, checker);
  }
  return checker.finish();
}

std::int64_t decoding_positions(const TensorFile& dump, const ModelConfig& config) {
  std::int64_t positions = batch_inputs(dump).shape[1];
  check_positions(dump, positions, config.max_positions);
  const TensorInfo *prompt = dump.find("greedy.prompt_ids"), *ids = dump.find("greedy.ids");
  if (prompt != nullptr && ids != nullptr) {
    positions = std::max(positions, static_cast<std::int64_t>(prompt->elements() + ids->elements()));
  }
  return positions;
}

Comparison compare_decoding(const TensorFile& dump, double tolerance, DecodeModel& model) {
  check_precision(dump, Precision::fp32);
  const DumpBatch batch = read_batch(dump, model.config().vocab_size);
  check_positions(dump, batch.T, model.capacity());
  model.keep_activations(true);
  std::unordered_map<std::string, std::vector<float>> gathered;  // the B sequences one after another
  std::vector<float> logits;
  for (std::int64_t b = 0; b < batch.B; ++b) {
    model.reset();
    model.prefill(
        std::span(batch.ids).subspan(static_cast<std::size_t>(b * batch.T), static_cast<std::size_t>(batch.T)));
    for (const TensorInfo& tensor : dump.tensors()) {
      if (!begins_with(tensor.name, kActivation)) continue;
      const std::vector<float> values = model.activation(tensor.name.substr(kActivation.size()));
      std::vector<float>& all = gathered[tensor.name];
      all.insert(all.end(), values.begin(), values.end());
    }
    const std::vector<float> values = model.activation("logits");
    logits.insert(logits.end(), values.begin(), values.end());
  }
  model.keep_activations(false);

  Checker checker(dump, tolerance);
  checker.check_all(kActivation, [&](const std::string& name) { return gathered[std::string(kActivation) + name]; });
  const float loss = static_cast<float>(mean_loss(logits, batch.labels));
  if (dump.find("loss") != nullptr) checker.check("loss", {&loss, 1}, Norm::loss);
  if (dump.find("greedy.ids") != nullptr) compare_greedy(dump, model, checker);
  return checker.finish();
}

float clip_factor(double gradient_norm, double limit) {
  return limit > 0 ? static_cast<float>(std::min(1.0, limit / (gradient_norm + 1e-6))) : 1.0f;
}

}  // namespace weft
