#include "llmc/train/loop.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "llmc/base/clock.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/infer/text_output.h"
#include "llmc/model/compare.h"
#include "llmc/train/measurement.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

// While the first rank waits for a save, the other ranks hear from it at this interval.
constexpr std::chrono::milliseconds kSaveHeartbeat(100);

std::string reward_text(const std::optional<PreferenceSums>& sums) {
  return sums ? format("  accuracy %.1f %%  margin %.3g", 100 * sums->accuracy(), sums->mean_margin()) : std::string();
}

// For printf's %lld.
long long wide(std::int64_t value) {
  return static_cast<long long>(value);
}

}  // namespace

std::optional<MeanLoss> mean_loss(TrainModel& model, const TokenDataset& data, std::int64_t micro_batch,
                                  std::int64_t batches, Communicator& ranks) {
  const Measurement measurement(data, micro_batch, batches);
  // One sum for each micro-batch, added in their order, so that the bits do not depend on which rank measures which.
  std::vector<double> sums(static_cast<std::size_t>(measurement.batches()));
  std::vector<std::int64_t> labels(sums.size());
  const bool complete = measurement.run(model, ranks, [&](std::int64_t number, const MicroBatch& batch) {
    const auto i = static_cast<std::size_t>(number);
    sums[i] = model.evaluate(batch.view(), &labels[i]);
  });
  if (!complete) return std::nullopt;
  ranks.gather(sums.data(), measurement.parts(ranks));
  ranks.gather(labels.data(), measurement.parts(ranks));
  const std::int64_t tokens = std::accumulate(labels.begin(), labels.end(), std::int64_t{0});
  return MeanLoss{std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(tokens), tokens};
}

std::optional<MeanLoss> mean_loss(TrainModel& model, const TokenDataset& data, std::int64_t micro_batch,
                                  std::int64_t batches) {
  SingleRank alone;
  return mean_loss(model, data, micro_batch, batches, alone);
}

TrainLoop::TrainLoop(Parts parts, TrainState start)
    : parts_(std::move(parts)),
      ranks_(parts_.ranks != nullptr ? *parts_.ranks : alone_),
      state_(std::move(start)),
      faults_(parse_faults(parts_.settings.debug_inject)),
      start_time_(Clock::now()),
      first_step_(state_.step + 1),
      saved_step_(state_.step) {
  keep_comparable_best();
  const bool saves = first_rank() || parts_.joint_save != nullptr;
  if (ranks_.size() > 1 && (parts_.settings.virtual_ranks % ranks_.size() != 0 ||
                            first_rank() != (parts_.checkpoints != nullptr) || saves != (parts_.copy != nullptr))) {
    fail(Exit::internal, "rank %d of %d: not the parts of this rank", ranks_.rank(), ranks_.size());
  }
  if (parts_.joint_save != nullptr) {
    saves_.emplace(std::move(parts_.joint_save), std::move(parts_.copy));
  } else if (parts_.checkpoints != nullptr) {
    saves_.emplace(*parts_.checkpoints, std::move(parts_.copy));
  }
  if (saves_) arm_save_fault(faults_);
}

// A run that goes on with another --val, or measures on more or less of it, does not compare with the lowest loss so far.
void TrainLoop::keep_comparable_best() {
  const TrainSettings& settings = parts_.settings;
  std::string measured_on;
  if (settings.keep_best && parts_.validation != nullptr) {
    const std::string data = parts_.validation->fingerprint().dump();
    measured_on = hash_text(xxh3_64(data + format(" %lld", wide(settings.val_batches * settings.micro_batch))));
  }
  if (state_.best && !(settings.keep_best && (state_.best_on.empty() || state_.best_on == measured_on))) {
    if (settings.keep_best && first_rank()) {
      log_warning(
          "--keep-best: the lowest loss so far, %.4f after step %lld, is of other data or another --val-batches: "
          "what comes is not compared with it",
          state_.best->val_loss, wide(state_.best->step));
    }
    state_.best.reset();
  }
  state_.best_on = measured_on;
  saved_best_ = state_.best;
}

// Sets what the first and the second signal print from now on.
void TrainLoop::announce_stop(const std::string& doing) const {
  if (!first_rank()) return on_stop(OnStop::finish);
  // "Or later": a save in the background may complete before the signal comes.
  const std::string newest =
      saved_step_ > 0 ? format("(step %lld or later)", wide(saved_step_)) : std::string("(if any)");
  on_stop(OnStop::finish, doing + "; a second signal stops at once",
          "stopped at once: steps after the newest checkpoint " + newest + " are lost");
}

Exit TrainLoop::run() {
  while (state_.step < parts_.settings.steps) {
    const std::optional<Error> failed_save = saves_ ? report_save(saves_->poll()) : std::nullopt;
    const ControlFlags flags = flags_of_all(failed_save.has_value());
    if (flags.failed) fail_together(ranks_, failed_save);
    if (flags.stop) break;  // finish() saves
    announce_stop(format("finishing step %lld, then saving", wide(state_.step + 1)));
    try {
      if (flags.save && begun_save_ != state_.step) begin_save();
      Step step = train_step();
      after_step(step);
    } catch (const Error& error) {
      // The data and the guard report errors before the update: the parameters are good, and are saved. (A numeric error
      // of a save comes back from this save too, as a warning.) After errors of the device or of memory nothing in the
      // model can be trusted, and the last checkpoint has to do.
      // All ranks throw these together, so that they can save together.
      ending_ = true;
      if (error.code() == Exit::bad_file || error.code() == Exit::numeric) {
        save_now(false);
      } else {
        ranks_.abort(error);  // before a save in progress is waited for: the others need not wait that long
      }
      if (saves_) report_save(saves_->wait());
      throw;
    }
  }
  return finish();
}

// All that the ranks tell each other between two steps, in one call: meanwhile a GPU may be idle.
TrainLoop::ControlFlags TrainLoop::flags_of_all(bool failed) {
  // A save requested before the first step waits until that step is done: before it there is nothing new to save.
  ControlFlags any{stop_requested(), state_.step >= first_step_ && take_save_request(), failed, state_.best};
  const std::vector<ControlFlags> all = ranks_.gather(any);
  state_.best = all[0].best;
  for (const ControlFlags& of_rank : all) {
    any.stop |= of_rank.stop;
    any.save |= of_rank.save;
    any.failed |= of_rank.failed;
  }
  return any;
}

TrainLoop::Step TrainLoop::train_step() {
  Step step;
  step.number = state_.step + 1;
  inject_before_step(faults_, step.number);
  const Clock::time_point begin = Clock::now();
  // All of the step's data is read before anything is computed: an error of the data leaves the model as it was,
  // and a step that is run again sees the same windows.
  const std::vector<MicroBatch> batches = read_batches();
  StepStatistics statistics = compute(step.number, batches);
  if (statistics.label_count == 0) {
    fail(Exit::bad_file,
         "step %lld: nothing is learned in its rows, where each document has a single token. Leave --document-mask "
         "out, or "
         "raise --batch-tokens",
         wide(step.number));
  }
  step.skipped = !is_finite(statistics) && !recover(step.number, batches, statistics);
  step.loss = statistics.loss_sum / static_cast<double>(statistics.label_count);
  step.labels = statistics.label_count;
  step.preferences = preferences_;
  step.gradient_norm = statistics.gradient_norm;
  step.fp8 = statistics.fp8;
  step.learning_rate = parts_.settings.learning_rate().at(step.number);
  if (step.skipped) {
    ++state_.skipped;
  } else {
    apply(step);
  }
  state_.step = step.number;
  state_.windows = parts_.data.position();
  state_.micro_steps += static_cast<std::uint64_t>(parts_.settings.accumulation());
  step.seconds = seconds_since(begin);
  return step;
}

std::vector<MicroBatch> TrainLoop::read_batches() {
  std::vector<MicroBatch> batches;
  do_together(ranks_, [&] {
    for (std::int64_t i = 0; i < micro_batches(); ++i) batches.push_back(parts_.data.next());
  });
  return batches;
}

// The loss of a step is the sum over its learned tokens, of all micro-batches and ranks, divided by their number. The ranks
// know that number when all have computed, so the model divides by the tokens of the step, and this factor turns its
// gradient into that of the mean. It is exactly 1 where every token is learned. With a preference the pairs of the step stand in
// the place of the tokens.
double TrainLoop::tokens_per_label(std::int64_t labels) const {
  return static_cast<double>(parts_.settings.batch_tokens) / static_cast<double>(labels);
}

StepStatistics TrainLoop::compute(std::int64_t step, const std::vector<MicroBatch>& batches) {
  const float loss_scale = 1.0f / static_cast<float>(parts_.settings.batch_tokens);
  parts_.model.zero_gradients();
  const std::int64_t own = parts_.settings.rank_accumulation();
  std::vector<PreferenceSums> sums(batches.size());
  std::vector<float> weights;
  for (std::int64_t i = 0; i < std::ssize(batches); ++i) {
    // If this process computes several virtual ranks, micro-batches of other processes lie between those of two of
    // them.
    const std::int64_t number = (i / own * ranks_.size() + ranks_.rank()) * own + i % own;
    const MicroBatch& micro_batch = batches[static_cast<std::size_t>(i)];
    Batch batch = micro_batch.view();
    if (parts_.preference != nullptr) {
      sums[static_cast<std::size_t>(i)] = parts_.preference->compare(parts_.model, micro_batch, weights);
      batch.label_weights = weights;
    }
    parts_.model.forward(batch, state_.micro_steps + static_cast<std::uint64_t>(number), loss_scale);
    parts_.model.backward();
  }
  inject_gradient_fault(faults_, step, parts_.model);
  StepStatistics statistics = parts_.model.statistics();
  if (parts_.preference != nullptr) {
    preferences_ = sum_of_step(sums);
    statistics.loss_sum = preferences_->loss;
    statistics.label_count = preferences_->pairs;
  }
  statistics.gradient_norm *= tokens_per_label(statistics.label_count);
  return statistics;
}

// `sums`: of this process's micro-batches. Those of all are added in their order in the step, whichever process has them.
PreferenceSums TrainLoop::sum_of_step(std::span<const PreferenceSums> sums) {
  const std::int64_t own = parts_.settings.rank_accumulation(), count = std::ssize(sums), ranks = ranks_.size();
  std::vector<PreferenceSums> all(static_cast<std::size_t>(count * ranks));
  std::vector<Range> parts;
  for (std::int64_t rank = 0; rank < ranks; ++rank) parts.push_back({rank * count, (rank + 1) * count});
  std::copy(sums.begin(), sums.end(), all.begin() + ranks_.rank() * count);
  ranks_.gather(all.data(), parts);
  PreferenceSums total;
  for (std::int64_t number = 0; number < count * ranks; ++number) {
    const std::int64_t virtual_rank = number / own;
    const std::int64_t i = virtual_rank / ranks * own + number % own;
    total.add(all[static_cast<std::size_t>(virtual_rank % ranks * count + i)]);
  }
  return total;
}

// Called when loss or norm is not finite. True: the step was computed again and may be applied. False: it is
// skipped.
bool TrainLoop::recover(std::int64_t step, const std::vector<MicroBatch>& batches, StepStatistics& statistics) {
  const std::string bad = first_bad_gradient(parts_.model);
  const double loss = statistics.loss_sum / static_cast<double>(statistics.label_count);
  const std::string what = format("step %lld: loss %g, gradient norm %g, first bad gradient %s", wide(step), loss,
                                  statistics.gradient_norm, bad.empty() ? "none" : bad.c_str());
  parts_.log.write({{"type", "non_finite"},
                    {"step", step},
                    {"loss", loss},
                    {"grad_norm", statistics.gradient_norm},
                    {"tensor", bad},
                    {"windows", {state_.windows, parts_.data.position()}}});
  switch (on_non_finite_from_name(parts_.settings.on_nan)) {
    case OnNonFinite::skip:
      if (first_rank()) log_warning("%s: the update is skipped", what.c_str());
      return false;
    case OnNonFinite::rerun:
      statistics = compute(step, batches);
      if (is_finite(statistics)) {
        ++state_.transient;
        if (first_rank()) {
          log_warning("%s: transient, the same step computed again is finite. Suspect the hardware", what.c_str());
        }
        return true;
      }
      [[fallthrough]];
    case OnNonFinite::abort:
      break;
  }
  fail(Exit::numeric, "%s. The parameters are those of step %lld. Lower --lr, or go on with --on-nan skip",
       what.c_str(), wide(step - 1));
}

void TrainLoop::apply(const Step& step) {
  const TrainSettings& settings = parts_.settings;
  const float clip = clip_factor(step.gradient_norm, settings.grad_clip);
  const auto scale = clip * static_cast<float>(tokens_per_label(step.labels));
  parts_.model.update(settings.optimizer_step(state_.updates + 1, step.number, scale));
  inject_moment_fault(faults_, step.number, parts_.model);
  ++state_.updates;
  state_.loss = step.loss;
  if (const std::optional<Spike> spike = state_.spikes.observe(step.loss, step.gradient_norm)) {
    report_spike(step, *spike);
  }
}

void TrainLoop::report_spike(const Step& step, const Spike& spike) {
  if (!first_rank()) return;
  const double clip = parts_.settings.grad_clip;
  const bool warming_up = step.number <= 2 * parts_.settings.warmup_steps;
  log_warning(
      "step %lld: spike of the %s: gradient norm %.3g (running %.3g), loss %.3f (running %.3f). %s. If spikes "
      "recur: lower --lr%s%s",
      wide(step.number),
      spike.of_loss && spike.of_norm ? "loss and the gradient norm"
      : spike.of_loss                ? "loss"
                                     : "gradient norm",
      step.gradient_norm, spike.norm_level, step.loss, spike.loss_level,
      clip > 0 && step.gradient_norm > clip ? format("The update was clipped to norm %g", clip).c_str()
                                            : "The update was not clipped",
      warming_up ? " or raise --warmup-steps" : "", clip > 0 ? "" : ", and set --grad-clip 1");
  parts_.log.write({{"type", "spike"},
                    {"step", step.number},
                    {"loss", step.loss},
                    {"loss_level", spike.loss_level},
                    {"grad_norm", step.gradient_norm},
                    {"grad_norm_level", spike.norm_level},
                    {"windows", {state_.windows, parts_.data.position()}}});
}

// At most one warning in a hundred steps.
void TrainLoop::report_saturation(const Step& step) {
  constexpr std::int64_t kSteps = 100;
  if (step.fp8->worst_share <= kFp8SaturationWarning) return;
  if (saturated_step_ > 0 && step.number < saturated_step_ + kSteps) return;
  saturated_step_ = step.number;
  log_warning(
      "step %lld: fp8 saturates: %.2g %% of the values of %s were beyond its range (doc/precision.md). If that recurs: "
      "lower "
      "--lr, or use --precision bf16",
      wide(step.number), 100 * step.fp8->worst_share, step.fp8->worst.c_str());
}

bool TrainLoop::due(std::int64_t every) const {
  return state_.step == parts_.settings.steps || (every > 0 && state_.step % every == 0);
}

bool TrainLoop::stop_requested() const {
  const double limit = parts_.settings.max_minutes * 60;
  return stop_signal() != 0 || (limit > 0 && seconds_since(start_time_) >= limit);
}

void TrainLoop::after_step(Step& step) {
  const TrainSettings& settings = parts_.settings;
  if (parts_.validation != nullptr && due(settings.val_every)) {
    inject_term(faults_.term_validation, state_.step);
    validate(step);
    if (step.val) {
      state_.val_loss = step.val->loss;
      validated_step_ = state_.step;
    }
  }
  // One that is not finite would stay the lowest, and no checkpoint that has it can be read.
  const bool new_best = settings.keep_best && step.val && std::isfinite(step.val->loss) &&
                        (!state_.best || step.val->loss < state_.best->val_loss);
  if (new_best) state_.best = TrainState::Best{state_.step, step.val->loss};
  report(step);
  if (parts_.sample && settings.sample_every > 0 && due(settings.sample_every) && stop_signal() == 0) write_sample();
  if (state_.step == settings.steps) return;
  if (new_best || (settings.save_every > 0 && due(settings.save_every))) begin_save();
}

void TrainLoop::validate(Step& step) {
  const TrainSettings& settings = parts_.settings;
  if (parts_.val_preference == nullptr) {
    step.val = mean_loss(parts_.model, *parts_.validation, settings.micro_batch, settings.val_batches, ranks_);
    return;
  }
  step.val_preferences =
      parts_.val_preference->measure(parts_.model, settings.micro_batch, settings.val_batches, ranks_);
  if (step.val_preferences) step.val = MeanLoss{step.val_preferences->mean_loss(), step.val_preferences->pairs};
}

void TrainLoop::report(const Step& step) {
  if (!first_rank()) return;
  const TrainSettings& settings = parts_.settings;
  const double tokens_per_s = static_cast<double>(settings.batch_tokens) / step.seconds;
  Json record = {{"type", "step"},
                 {"step", step.number},
                 {"tokens", step.number * settings.batch_tokens},
                 {"loss", step.loss},
                 {"lr", step.learning_rate},
                 {"grad_norm", step.gradient_norm},
                 {"tokens_per_s", tokens_per_s},
                 {"dt_ms", step.seconds * 1000},
                 {"skipped", step.skipped}};
  if (step.preferences) {
    record["pairs"] = step.preferences->pairs;
    record["reward_accuracy"] = step.preferences->accuracy();
    record["reward_margin"] = step.preferences->mean_margin();
  } else if (step.labels != settings.batch_tokens) {
    record["learned_tokens"] = step.labels;
  }
  if (ranks_.size() > 1) record["tokens_per_s_rank"] = tokens_per_s / ranks_.size();
  if (step.val) {
    record["val_loss"] = step.val->loss;
    record[step.val_preferences ? "val_pairs" : "val_tokens"] = step.val->tokens;
  }
  if (step.val_preferences) {
    record["val_reward_accuracy"] = step.val_preferences->accuracy();
    record["val_reward_margin"] = step.val_preferences->mean_margin();
  }
  if (step.fp8) {
    constexpr const char* kNames[] = {"input", "weight", "gradient"};
    for (const Fp8Kind kind : kFp8Kinds) {
      const auto i = static_cast<std::size_t>(kind);
      const Fp8Statistics::Kind& counts = step.fp8->kinds[i];
      record["fp8"][kNames[i]] = {
          {"values", counts.values}, {"saturated", counts.saturated}, {"flushed", counts.flushed}};
    }
    report_saturation(step);
  }
  parts_.log.write(std::move(record));

  mean_step_seconds_ += (step.seconds - mean_step_seconds_) * (step.number == first_step_ ? 1.0 : 0.1);
  const double left = static_cast<double>(settings.steps - step.number) * mean_step_seconds_;
  const std::string line = format(
      "step %lld/%lld  loss %.4f%s  lr %.2e  norm %.3f  %.0f tok/s  %s left%s%s%s", wide(step.number),
      wide(settings.steps), step.loss, reward_text(step.preferences).c_str(), step.learning_rate, step.gradient_norm,
      tokens_per_s, human_seconds(left).c_str(), step.val ? format("  val %.4f", step.val->loss).c_str() : "",
      reward_text(step.val_preferences).c_str(), step.skipped ? "  skipped" : "");
  // Every step of a short run, about sixty of a long one, and a step that ends 15 seconds after the last line.
  const std::int64_t interval = std::max<std::int64_t>(1, settings.steps / 60);
  const bool print =
      step.val || step.skipped || step.number == first_step_ || due(interval) || seconds_since(last_line_) > 15;
  if (!print) return progress_.show(line);
  log_info("%s", line.c_str());
  last_line_ = Clock::now();
}

void TrainLoop::write_sample() {
  try {
    inject_term(faults_.term_sample, state_.step);
    const std::string text = parts_.sample(state_.step);
    log_info("sample: %s", terminal_safe(text).c_str());
    parts_.log.write({{"type", "sample"}, {"step", state_.step}, {"text", text}});
  } catch (const Error& error) {  // a sample that fails must not end the training
    log_warning("no sample: %s", error.what());
  }
}

// Starts a save, which goes on in the background once the state is copied.
void TrainLoop::begin_save() {
  begun_save_ = state_.step;
  const Clock::time_point begin = Clock::now();
  settle_save();
  if (const double waited = seconds_since(begin); waited > 1 && first_rank()) {
    log_info("step %lld waited %.1f s for the checkpoint before: saving takes longer than --save-every allows",
             wide(state_.step), waited);
  }
  if (to_be_saved()) start_save();
}

// Whether this state still has to be saved: the first rank knows, and tells the others.
bool TrainLoop::to_be_saved() {
  return ranks_.broadcast(parts_.checkpoints != nullptr && parts_.checkpoints->last_saved() != state_.step);
}

void TrainLoop::start_save() {
  if (saves_) {
    saves_->start(state_, parts_.model);
  } else {
    take_part_in_copy(parts_.model);
  }
}

// Saves while training waits. A save that fails is a warning, unless it is the last one or the state holds a value that is
// not finite.
void TrainLoop::save_now(bool last) {
  settle_save();
  if (!to_be_saved()) return;
  std::optional<BackgroundSave::Result> result;
  if (ranks_.size() == 1) {
    result = saves_->save_now(state_, parts_.model);
  } else {
    start_save();
    result = wait_for_save();
    if (!first_rank()) result.reset();  // the first rank reports the outcome for all
  }
  if (last && result && result->error && result->error->code() != Exit::numeric) {
    fail_together(ranks_,
                  Error(Exit::resources, format("the last checkpoint could not be saved: %s", result->error->what())));
  }
  fail_together(ranks_, report_save(result));
}

// Waits for the save in progress, if there is one, and returns its result on the ranks that save.
std::optional<BackgroundSave::Result> TrainLoop::wait_for_save() {
  if (ranks_.size() == 1) return saves_->wait();
  std::optional<BackgroundSave::Result> result;
  bool waiting = true;
  while (waiting) {
    if (saves_) {
      if (std::optional<BackgroundSave::Result> done = saves_->wait_at_most(kSaveHeartbeat)) result = std::move(done);
    }
    waiting = largest(ranks_, saves_ && saves_->in_progress() ? 1 : 0) != 0;
  }
  return result;
}

// Waits for the save in progress and reports it. If it has failed, the first rank has another best checkpoint, and all must
// compare the next validation with the same one.
void TrainLoop::settle_save() {
  fail_together(ranks_, report_save(wait_for_save()));
  state_.best = ranks_.broadcast(state_.best);
}

// Reports a save; returns its error if that has to end the run. Of a joint save only the first rank knows the outcome.
std::optional<Error> TrainLoop::report_save(const std::optional<BackgroundSave::Result>& result) {
  if (!result || !first_rank()) return std::nullopt;
  if (result->error) {
    // One that is not on the disk is no best checkpoint: the next validation is compared with the one before.
    if (state_.best && state_.best->step == result->step) state_.best = saved_best_;
    // Training on from moments that are not finite would only move the parameters away from the last good checkpoint, and
    // without a rank to save with there would be no other one.
    if ((result->error->code() == Exit::numeric || result->was_last) && !ending_) return result->error;
    log_warning("no checkpoint of step %lld: %s%s", wide(result->step), result->error->what(),
                ending_ ? "" : ". Training goes on");
    return std::nullopt;
  }
  saved_step_ = result->step;
  if (result->best && result->best->step == result->step) saved_best_ = result->best;
  log_info("saved %s (%.1f s)", escaped(result->path).c_str(), result->seconds);
  parts_.log.write({{"type", "save"},
                    {"step", result->step},
                    {"seconds", result->seconds},
                    {"stalled_seconds", result->stalled_seconds}});
  return std::nullopt;
}

Exit TrainLoop::finish() {
  progress_.clear();
  announce_stop(format("saving step %lld", wide(state_.step)));
  save_now(true);
  const TrainSettings& settings = parts_.settings;
  const auto signal = static_cast<int>(largest(ranks_, stop_signal()));
  if (!first_rank()) return exit_after_signal(signal);
  const std::string path = parts_.checkpoints->last_path();
  if (state_.step < settings.steps) {
    log_info("stopped by %s after step %lld: the same command goes on from there",
             signal == 0 ? "--max-minutes" : ::strsignal(signal), wide(state_.step));
  }
  if (const std::string best = parts_.checkpoints->best_path(); state_.best && !best.empty()) {
    log_info("lowest loss on --val: %.4f after step %lld, kept in %s", state_.best->val_loss, wide(state_.best->step),
             escaped(best, 4096).c_str());
  }
  const auto loss_text = [](const std::optional<double>& loss) { return loss ? format("%.4f", *loss) : "none"; };
  // The last validation may be some steps back if a signal or the time limit ended the run.
  const std::string validated =
      validated_step_ && *validated_step_ != state_.step ? format(" (step %lld)", wide(*validated_step_)) : "";
  const std::string validation = parts_.validation == nullptr
                                     ? ""
                                     : format("  val loss %s%s", loss_text(state_.val_loss).c_str(), validated.c_str());
  write_stdout(format("step %lld  train loss %s%s  checkpoint %s\n", wide(state_.step), loss_text(state_.loss).c_str(),
                      validation.c_str(), escaped(path, 4096).c_str()));
  return exit_after_signal(signal);
}

}  // namespace weft
