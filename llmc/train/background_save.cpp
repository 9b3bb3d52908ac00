#include "llmc/train/background_save.h"

#include <system_error>

#include "llmc/base/clock.h"
#include "llmc/base/error_from.h"
#include "llmc/base/log.h"
#include "llmc/base/signals.h"

namespace weft {

namespace {

constexpr double kShareOfFreeMemory = 0.8;
constexpr auto kMessageInterval = std::chrono::seconds(60);  // between two messages of wait()

std::string bytes_text(std::uint64_t bytes) {
  return human_bytes(static_cast<double>(bytes));
}

}  // namespace

SavePlan plan_saves(const TrainSettings& settings, const ModelConfig& config, std::uint64_t planned_host_bytes) {
  const bool in_between = settings.save_every > 0 && settings.save_every < settings.steps;
  if (!in_between && !settings.keep_best) return {};
  const TrainOptions options = settings.model_options();
  const std::uint64_t copy = state_copy_bytes(*options.optimizer, trained_table(config, options)),
                      free = free_host_memory();
  const double limit = kShareOfFreeMemory * static_cast<double>(free);
  if (static_cast<double>(planned_host_bytes) + static_cast<double>(copy) <= limit) {
    return {true, format("saves: in the background, from a copy of the state in %s of host memory (%s are free)",
                         bytes_text(copy).c_str(), bytes_text(free).c_str())};
  }
  return {false,
          format("saves: training waits for each. A copy of the state to save in the background would take %s of "
                 "host memory, %s are free",
                 bytes_text(copy).c_str(), bytes_text(free).c_str())};
}

BackgroundSave::BackgroundSave(CheckpointKeeper& keeper, std::unique_ptr<StateCopy> copy)
    : keeper_(&keeper), copy_(std::move(copy)) {}

BackgroundSave::BackgroundSave(std::unique_ptr<JointSave> joint, std::unique_ptr<StateCopy> copy)
    : keeper_(nullptr), joint_(std::move(joint)), copy_(std::move(copy)) {}

BackgroundSave::~BackgroundSave() {
  const std::optional<Result> result = wait();
  if (result && result->error && (joint_ == nullptr || joint_->is_first())) {
    log_warning("no checkpoint of step %lld: %s", static_cast<long long>(result->step), result->error->what());
  }
}

// Every error becomes part of the result: an exception that leaves a thread ends the process.
void BackgroundSave::write(const TrainState& state, const TensorTable& table, const TensorSource& source,
                           Result& result) const {
  result.step = state.step;
  result.best = state.best;
  result.error = error_from([&] {
    result.path =
        joint_ != nullptr ? joint_->save(state, *copy_, source.fp8_state) : keeper_->save(state, table, source);
  });
  result.was_last = joint_ != nullptr && joint_->ended();
  result.seconds = seconds_since(begin_);
}

BackgroundSave::Result BackgroundSave::save_now(const TrainState& state, TrainModel& model) {
  begin_ = Clock::now();
  Result result;
  if (copy_ != nullptr) copy_->take();
  write(state, model.table(), copy_ != nullptr ? tensors_of(*copy_, model.fp8_state()) : tensors_of(model), result);
  result.stalled_seconds = result.seconds;
  return result;
}

void BackgroundSave::start(const TrainState& state, TrainModel& model) {
  if (started_) fail(Exit::internal, "a save is in progress");
  if (copy_ == nullptr) {
    result_ = save_now(state, model);
    stalled_seconds_ = result_.stalled_seconds;
    started_ = done_ = true;
    return;
  }
  begin_ = Clock::now();
  try {
    copy_->take();
  } catch (const Error& error) {
    if (joint_ != nullptr) joint_->abort(error);
    throw;
  }
  state_ = state;
  fp8_state_ = model.fp8_state();
  result_ = {};
  done_ = false;
  const auto body = [this, &table = model.table()] {
    write(state_, table, tensors_of(*copy_, fp8_state_), result_);
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    changed_.notify_all();
  };
  started_ = true;
  try {
    const SignalsElsewhere signals;
    thread_ = std::thread(body);
  } catch (const std::system_error&) {  // the user's limit of threads is reached: save on this one
    body();
  }
  // Kept outside of result_, which the other thread may be writing.
  stalled_seconds_ = seconds_since(begin_);
}

std::optional<BackgroundSave::Result> BackgroundSave::take_result() {
  if (thread_.joinable()) thread_.join();
  result_.stalled_seconds = stalled_seconds_;
  started_ = false;
  return std::move(result_);
}

std::optional<BackgroundSave::Result> BackgroundSave::wait_at_most(std::chrono::milliseconds limit) {
  if (!started_) return std::nullopt;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, limit, [this] { return done_; })) return std::nullopt;
  }
  return take_result();
}

std::optional<BackgroundSave::Result> BackgroundSave::wait() {
  while (started_) {
    if (std::optional<Result> result = wait_at_most(kMessageInterval)) return result;
    const double seconds = seconds_since(begin_);
    log_info("still writing the checkpoint of step %lld after %s; a second SIGTERM or SIGINT gives it up",
             static_cast<long long>(state_.step), human_seconds(seconds).c_str());
  }
  return std::nullopt;
}

}  // namespace weft
