// A run directory, a model of a few thousand parameters, and its checkpoints.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/train/checkpoint.h"
#include "test/cpp/train_tools.h"

namespace weft {

namespace fs = std::filesystem;

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    write_shard(temporary_.file("train.bin"), patterned_tokens(200));
    data_.emplace(temporary_.file("train.bin"), 8);
    settings_ = micro_settings();
    model_ = micro_model(settings_);
  }

  // A state that differs from step to step in everything that a checkpoint keeps.
  TrainState make_state(std::int64_t step) {
    fill(TensorRole::parameter, static_cast<float>(step));
    fill(TensorRole::state1, static_cast<float>(step) + 0.25f);
    fill(TensorRole::state2, static_cast<float>(step) + 0.5f);
    TrainState state;
    state.step = step;
    state.updates = step > 0 ? step - 1 : 0;
    state.skipped = step - state.updates;
    state.windows = static_cast<std::uint64_t>(step) * 2;
    state.micro_steps = static_cast<std::uint64_t>(step);
    state.loss = 1.0 / 3.0 + static_cast<double>(step);
    for (int i = 0; i < 40; ++i) state.spikes.observe(3.0 / (i + 1), std::sqrt(i + 2.0));
    return state;
  }
  void fill(TensorRole role, float base) {
    std::vector<float> values;
    for (const TensorSpec& spec : model_->table().specs()) {
      values.resize(static_cast<std::size_t>(spec.elements));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = base + 1.0f / static_cast<float>(i + 3);
      model_->write_tensor(role, spec, values.data());
    }
  }

  RunIdentity identity() const { return micro_identity(settings_, *data_); }
  std::string run_path() const { return temporary_.file("run"); }
  std::string step_path(std::int64_t step) const {
    return run_path() + format("/step_%08lld", static_cast<long long>(step));
  }
  void save(std::int64_t step, std::int64_t keep = 100) {
    const RunDirectory run(run_path());
    CheckpointKeeper(run, identity(), keep).save(make_state(step), *model_);
  }
  // The step that a run would go on from; -1 for a fresh start.
  std::int64_t resumed_step(ResumeMode mode = ResumeMode::automatic) {
    const RunDirectory run(run_path());
    CheckpointKeeper keeper(run, identity(), 2);
    const std::optional<TrainState> state = keeper.resume(mode, *model_);
    return state ? state->step : -1;
  }

  TemporaryDirectory temporary_;
  std::optional<TokenDataset> data_;
  TrainSettings settings_;
  std::unique_ptr<TrainModel> model_;
};

}  // namespace weft
