// Work that one stream hands to another, made late on purpose (llmc/cuda/runtime/fork.h): every delay must leave the bits as
// they are. Without its wait each of these reads too early: the update that must not overtake the background copy of the
// state, a sample that must not overtake the update, the sort of the tokens and the embedding's gradient, uploads of tokens that reuse a page-locked slot, MLP-up beside
// attention in a prompt, the pieces of a model file on their way to the GPU, and the description of an inference step, whose
// page-locked memory the step after the next uses again. And a tensor that is written while the copy engine is busy.
#include <gtest/gtest.h>

#include <cstring>

#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/cuda/training/training.h"
#include "llmc/model/single_sequence.h"
#include "test/cpp/whole_model_checks.h"
#include "test/gpu/device_buffer.h"
#include "test/gpu/neox_models.h"
#include "test/gpu/sequences.h"

namespace weft {
namespace {

using cuda::DelayPoint;

// Ends the delay when a test ends, however it ends.
class Delay {
 public:
  Delay(DelayPoint point, std::int64_t microseconds) : point_(point) { cuda::set_stream_delay(point, microseconds); }
  ~Delay() { cuda::set_stream_delay(point_, 0); }
  Delay(const Delay&) = delete;
  Delay& operator=(const Delay&) = delete;

 private:
  DelayPoint point_;
};

void append(test::Floats& all, const test::Floats& values) {
  all.insert(all.end(), values.begin(), values.end());
}

// Losses, gradients after each step, the state as background copies saw it, and the last parameters.
test::Floats train(bool graph, Precision precision) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 37;
  options.precision = precision;
  options.graph = graph;
  options.dropout = 0.1f;
  const ModelConfig config = test::small_llama();
  const auto model = cuda::make_training_model(config, options);
  test::randomize_parameters(*model);
  const auto copy = model->make_state_copy();
  const TensorSpec& watched = model->table().at("model.layers.2.mlp.down_proj.weight");
  test::Floats result, buffer(static_cast<std::size_t>(watched.elements));
  constexpr int kMicroBatches = 6;  // more than the page-locked slots that hold tokens on their way
  for (int step = 1; step <= 3; ++step) {
    model->zero_gradients();
    std::uint64_t number = static_cast<std::uint64_t>(step) * kMicroBatches;
    for (int i = 0; i < kMicroBatches; ++i, ++number) {
      const test::TokenBatch text = test::random_tokens(config, 2 * 37, static_cast<unsigned>(number));
      model->forward(text.batch(), number, 0.01f);
      model->backward();
    }
    const StepStatistics statistics = model->statistics();
    result.push_back(static_cast<float>(statistics.loss_sum));
    append(result, test::read_values(*model, TensorRole::gradient, model->table().at("model.embed_tokens.weight")));
    AdamWStep update;
    update.learning_rate = 1e-2f;
    update.step = 2 * step - 1;
    model->update(update);
    copy->take();
    update.step = 2 * step;
    model->update(update);  // queued at once: its wait alone keeps it from overtaking the copy
    for (const TensorRole role : {TensorRole::parameter, TensorRole::state1, TensorRole::state2}) {
      const float* values = copy->read(role, watched, 0, buffer.size(), buffer.data());
      result.insert(result.end(), values, values + buffer.size());
    }
  }
  for (const TensorSpec& spec : model->table().specs()) {
    append(result, test::read_values(*model, TensorRole::parameter, spec));
  }
  return result;
}

bool same_bits(const test::Floats& a, const test::Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(StreamOrder, TrainingWithDelays) {
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    for (const bool graph : {false, true}) {
      SCOPED_TRACE(std::string(graph ? "graph" : "eager") + (precision == Precision::fp32 ? ", fp32" : ", bf16"));
      const test::Floats expected = train(graph, precision);
      {
        const Delay delay(DelayPoint::step, 3'000);
        EXPECT_TRUE(same_bits(train(graph, precision), expected)) << "the first stream late";
      }
      const Delay delay(DelayPoint::forked, 20'000);
      EXPECT_TRUE(same_bits(train(graph, precision), expected)) << "the second stream late";
    }
  }
}

// While other copies keep the copy engine busy, the values of a tensor arrive late: the next pass has to wait for them.
TEST(StreamOrder, APassWaitsForTheTensorThatWasWrittenBefore) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 37;
  options.precision = Precision::fp32;
  ModelConfig config = test::small_llama();
  config.tied_embeddings = false;
  config.vocab_size = config.tokenizer_vocab = 20'003;
  const auto model = cuda::make_training_model(config, options);
  test::randomize_parameters(*model);
  const test::TokenBatch text = test::random_tokens(config, 2 * 37, 1);
  const TensorSpec& head = model->table().at("lm_head.weight");
  const test::Floats values[] = {test::random_floats(head.elements, 1, 0.1f),
                                 test::random_floats(head.elements, 2, 0.1f)};
  const auto loss_with = [&](const test::Floats& of_head, bool wait) {
    model->write_tensor(TensorRole::parameter, head, of_head.data());
    if (wait) cuda::check(cudaDeviceSynchronize(), "test");
    std::int64_t labels = 0;
    return model->evaluate(text.batch(), &labels);
  };
  const double expected[] = {loss_with(values[0], true), loss_with(values[1], true)};
  EXPECT_NE(expected[0], expected[1]);

  constexpr std::size_t kBytes = 256 << 20;
  const cuda::PinnedBuffer source(kBytes);
  const test::DeviceBuffer<std::byte> target(kBytes);
  const cuda::Stream busy;
  for (int i = 0; i < 20; ++i) {
    for (int k = 0; k < 2; ++k) {
      cuda::check(cudaMemcpyAsync(target.data(), source.at<std::byte>(0), kBytes, cudaMemcpyHostToDevice, busy),
                  "test");
    }
    EXPECT_EQ(loss_with(values[i % 2], false), expected[i % 2]) << i;
  }
  busy.synchronize("test");
}

test::Floats prompt_logits(const std::string& path, std::int64_t ids) {
  const auto model = test::loaded_sequence(ModelFile::open(path), test::Way::graph, DType::f16, ids + 1);
  const std::vector<std::int32_t> prompt = test::random_tokens(ids, model->config().vocab_size, 5);
  const std::span<const float> logits = model->prefill(prompt);
  return {logits.begin(), logits.end()};
}

// A sample between two steps has the parameters of the last update, which is only queued when the sample begins.
TEST(StreamOrder, SamplesFollowTheUpdates) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 37;
  options.precision = Precision::bf16;
  const ModelConfig config = test::small_llama();
  const test::TokenBatch text = test::random_tokens(config, 2 * 37, 1);
  const std::span<const std::int32_t> prompt = std::span(text.batch().tokens).first(20);
  const auto logits = [&](bool wait) {
    const auto model = cuda::make_training_model(config, options);
    test::randomize_parameters(*model);
    const auto decoder = model->decoder(40);
    model->zero_gradients();
    model->forward(text.batch(), 0, 0.01f);
    model->backward();
    model->statistics();
    AdamWStep update;
    update.learning_rate = 1e-2f;
    // Inference is delayed as an update is: several of them are still under way when its first step begins.
    for (update.step = 1; update.step <= 5; ++update.step) model->update(update);
    if (wait) test::read_values(*model, TensorRole::parameter, model->table().at("model.embed_tokens.weight"));
    decoder->reset();
    const std::span<const float> result = decoder->prefill(prompt);
    return test::Floats(result.begin(), result.end());
  };
  const test::Floats expected = logits(true);
  const Delay delay(DelayPoint::step, 20'000);
  EXPECT_EQ(logits(false), expected);
}

TEST(StreamOrder, PromptsAndLoadingWithDelays) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model.bin");
  test::write_random_model(path, test::neox_config(test::shape_2_8b()), DType::f16, 3);
  const test::Floats expected = prompt_logits(path, 300);
  {
    const Delay delay(DelayPoint::step, 20'000);
    EXPECT_TRUE(same_bits(prompt_logits(path, 300), expected)) << "the first stream late";
  }
  const Delay delay(DelayPoint::forked, 20'000);
  EXPECT_TRUE(same_bits(prompt_logits(path, 300), expected)) << "the second stream late";
}

std::vector<std::int32_t> generated(const std::string& path) {
  constexpr std::int64_t kCapacity = 200;
  cuda::GpuInferenceOptions options;
  options.dtype = DType::bf16;
  const auto model =
      single_sequence(cuda::load_inference(ModelFile::open(path), one_sequence(kCapacity), options), kCapacity);
  EXPECT_TRUE(model->samples());
  GenerationRequest request;
  request.sampling = sampling_plan({.temperature = 0.9, .seed = 4});
  request.max_ids = 60;
  std::vector<std::int32_t> ids;
  model->generate_ids(test::random_tokens(100, 500, 5), request, [&](std::int32_t id) {
    ids.push_back(id);
    return true;
  });
  return ids;
}

TEST(StreamOrder, InferenceWithDelays) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("model.bin");
  test::write_random_model(path, test::llama_config(test::small_llamas()[1]), DType::bf16, 3);
  const std::vector<std::int32_t> expected = generated(path);
  ASSERT_EQ(expected.size(), 60u);
  const Delay delay(DelayPoint::step, 3'000);
  EXPECT_EQ(generated(path), expected);
}

}  // namespace
}  // namespace weft
