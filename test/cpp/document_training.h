// What the tests of conversations and of pairs of answers share: documents of which some tokens are not learned, the loss of
// one of them alone, which is the witness, and a run of the training loop.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llmc/train/loop.h"
#include "test/cpp/train_tools.h"

namespace weft {

class DocumentTraining : public testing::Test {
 protected:
  using IsLearned = std::function<bool(std::size_t)>;  // whether token i is

  void SetUp() override {
    omp_set_num_threads(1);
    settings_ = micro_settings();
    settings_.steps = 1;
    settings_.warmup_steps = 0;
    settings_.grad_clip = 0;
  }
  void TearDown() override { omp_set_num_threads(threads_); }

  struct Sum {
    double loss = 0;
    std::int64_t labels = 0;
    double mean() const { return loss / static_cast<double>(labels); }
  };
  // The losses of tokens [begin, begin + size) without padding or others beside them, from a model that has the parameters of
  // `model`.
  Sum alone(TrainModel& model, std::size_t begin, std::size_t size, const IsLearned& is_learned) const {
    const std::size_t count = size - 1;
    TrainOptions options = settings_.model_options();
    options.micro_batch = 1;
    options.seq_len = static_cast<std::int64_t>(count);
    const std::unique_ptr<TrainModel> own = cpu::make_training_model(micro_config(), options);
    for (const TensorSpec& spec : model.table().specs()) {
      std::vector<float> values(static_cast<std::size_t>(spec.elements));
      model.read_tensor(TensorRole::parameter, spec, values.data());
      own->write_tensor(TensorRole::parameter, spec, values.data());
    }
    std::vector<std::int32_t> tokens(count), labels(count);
    for (std::size_t t = 0; t < count; ++t) {
      tokens[t] = tokens_[begin + t];
      labels[t] = is_learned(begin + t + 1) ? tokens_[begin + t + 1] : kIgnoredLabel;
    }
    Sum sum;
    sum.loss = own->evaluate({tokens, labels}, &sum.labels);
    return sum;
  }

  // Runs the loop; `at_update` sees the step before each update. With a preference `data` is also that of validation. Returns
  // the record of the last step.
  Json train(TrainModel& inner, const TokenDataset& data, const std::string& name,
             const std::function<void(const AdamWStep&)>& at_update, const Preference* preference = nullptr) const {
    HookedModel model(inner);
    model.before_update = at_update;
    const RunDirectory directory(temporary_.file(name));
    CheckpointKeeper checkpoints(directory, micro_identity(settings_, data), settings_.keep);
    RunLog log(directory.file("log.jsonl"));
    DataLoader loader(data, settings_.micro_batch, 1, 0);
    TrainLoop::Parts parts{settings_, model, loader, &checkpoints, log, nullptr, nullptr, model.make_state_copy()};
    if (preference != nullptr) {
      parts.validation = &data;
      parts.preference = parts.val_preference = preference;
    }
    testing::internal::CaptureStdout();
    TrainLoop(std::move(parts), {}).run();
    testing::internal::GetCapturedStdout();
    Json last;
    for (const Json& record : json_lines(directory.file("log.jsonl"))) {
      if (record["type"] == "step") last = record;
    }
    return last;
  }

  const int threads_ = omp_get_max_threads();
  TemporaryDirectory temporary_;
  std::vector<std::uint16_t> tokens_;
  TrainSettings settings_;
};

}  // namespace weft
