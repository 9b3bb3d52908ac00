// Comparisons that can fail: what --compare does with values that no comparison orders.
#include "llmc/model/compare.h"
#include "llmc/base/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "test/cpp/train_tools.h"

namespace weft {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

TEST(Distance, ByHand) {
  const std::vector<float> got = {1, 2, 3}, want = {1, 2, 4};
  const TensorDistance most = distance("t", got, want, 0.25);
  EXPECT_EQ(most.max_abs, 1);
  EXPECT_EQ(most.relative, 0.25);
  EXPECT_TRUE(most.pass);
  EXPECT_FALSE(distance("t", got, want, 0.2499).pass);
  EXPECT_DOUBLE_EQ(distance("t", got, want, 1, Norm::l2).relative, 1 / std::sqrt(21.0));
  EXPECT_DOUBLE_EQ(most.cosine, 17 / std::sqrt(14.0 * 21.0));
  EXPECT_TRUE(distance("t", want, want, 0).pass);
}

// At any place, in either tensor or in both, with any tolerance and in both norms.
TEST(Distance, ValuesThatAreNotFiniteNeverPass) {
  for (const float bad : {kNan, kInf, -kInf}) {
    for (std::size_t at = 0; at < 5; ++at) {
      const std::vector<float> good = {1, 2, 3, 4, 5};
      std::vector<float> damaged = good;
      damaged[at] = bad;
      for (const Norm norm : {Norm::max, Norm::l2, Norm::loss}) {
        for (const double tolerance : {0.0, 1e30, std::numeric_limits<double>::infinity()}) {
          for (const auto& [got, want] :
               {std::pair(damaged, good), std::pair(good, damaged), std::pair(damaged, damaged)}) {
            const TensorDistance row = distance("t", got, want, tolerance, norm);
            EXPECT_FALSE(row.pass) << bad << " at " << at;
            EXPECT_EQ(row.relative, std::numeric_limits<double>::infinity());
          }
        }
      }
    }
  }
}

TEST(Distance, ASmallLossIsComparedAbsolutely) {
  const std::vector<float> small = {0.25f, 0.5f}, off = {0.25f, 0.625f}, large = {0.25f, 4}, off_large = {0.25f, 5};
  EXPECT_DOUBLE_EQ(distance("loss", off, small, 0, Norm::loss).relative, 0.125);
  EXPECT_DOUBLE_EQ(distance("loss", off, small, 0).relative, 0.25);
  EXPECT_DOUBLE_EQ(distance("loss", off_large, large, 0, Norm::loss).relative, 0.25) << "from 1 on as any tensor";
  EXPECT_FALSE(distance("loss", off, small, 0.1249, Norm::loss).pass);
}

TEST(Distance, AnotherSizeNeverPasses) {
  const std::vector<float> one = {1}, two = {1, 2}, none;
  for (const double tolerance : {0.0, std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(distance("t", one, two, tolerance).pass);
    EXPECT_FALSE(distance("t", two, one, tolerance).pass);
    EXPECT_FALSE(distance("t", none, one, tolerance).pass);
  }
}

TEST(Comparison, PassesWhenEveryRowDoesAndThereIsOne) {
  Comparison comparison;
  EXPECT_FALSE(comparison.passed()) << "nothing was compared";
  comparison.rows = {{"a", 0, 0, 1, true}};
  EXPECT_TRUE(comparison.passed());
  comparison.rows.push_back({"b", 0, 0, 1, false});
  comparison.rows.push_back({"c", 0, 0, 1, true});
  EXPECT_FALSE(comparison.passed());
}

class CompareDump : public testing::Test {
 protected:
  // A dump of one sequence of 8 tokens whose activation is that of the model, or what a test puts into its place.
  void write(const std::vector<float>& activation, const std::vector<float>* sixteen_bit) {
    TensorFileWriter writer(path_, FileKind::reference_dump, config_);
    const auto count = static_cast<std::int64_t>(activation.size());
    writer.declare("input_ids", DType::i32, {1, 8});
    writer.declare("labels", DType::i32, {1, 8});
    writer.declare("act.embedding", DType::f32, {count});
    if (sixteen_bit != nullptr) {
      writer.declare("act16.embedding", DType::f32, {static_cast<std::int64_t>(sixteen_bit->size())});
    }
    writer.write(ids_.data(), ids_.size() * 4);
    writer.write(labels_.data(), labels_.size() * 4);
    writer.write_f32(activation.data(), activation.size());
    if (sixteen_bit != nullptr) writer.write_f32(sixteen_bit->data(), sixteen_bit->size());
    writer.publish();
  }
  Comparison compare(Precision precision, DType activations = DType::f32) {
    const auto make = [](TrainOptions options) {
      options.precision = Precision::fp32;  // as far from PyTorch's fp32 as any run with fewer bits may be
      std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), options);
      initialize_parameters(*model, 1);
      return model;
    };
    return compare_training(TensorFile::open(path_, FileKind::reference_dump), precision, 1e-5, make, activations);
  }
  std::vector<float> embedding() {
    TrainOptions options;
    options.seq_len = 8;
    const std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), options);
    initialize_parameters(*model, 1);
    model->forward({ids_, ids_}, 0, 1);
    return model->activation("embedding");
  }

  TemporaryDirectory directory_;
  const std::string path_ = directory_.file("dump.bin");
  const std::vector<std::int32_t> ids_ = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<std::int32_t> labels_ = ids_;
  Json config_ = Json::object();
};

// A mean over no labels is no number; one label is enough. Every other id has to be of the vocabulary.
TEST_F(CompareDump, LabelsCountOrAreIgnored) {
  const std::vector<float> values = embedding();
  labels_.assign(8, kIgnoredLabel);
  write(values, nullptr);
  expect_contains(error_of(Exit::bad_file, [&] { compare(Precision::fp32); }), "every label is ignored");
  labels_[3] = 31;
  write(values, nullptr);
  EXPECT_TRUE(compare(Precision::fp32).passed());
  for (const std::int32_t bad : {32, -1}) {
    labels_[3] = bad;
    write(values, nullptr);
    expect_contains(error_of(Exit::bad_file, [&] { compare(Precision::fp32); }), "outside the vocabulary");
  }
}

TEST_F(CompareDump, EachStepHasALoss) {
  const Json settings = {{"steps", 3},  {"learning_rate", 1e-3}, {"beta1", 0.9},    {"beta2", 0.95},
                         {"eps", 1e-8}, {"weight_decay", 0.1},   {"grad_clip", 1.0}};
  const auto message_with = [&](const Json& dump) {
    TensorFileWriter writer(path_, FileKind::reference_dump, {{"dump", dump}});
    writer.declare("input_ids", DType::i32, {1, 8});
    writer.declare("labels", DType::i32, {1, 8});
    writer.declare("adamw.losses", DType::f32, {2});
    writer.write(ids_.data(), ids_.size() * 4);
    writer.write(labels_.data(), labels_.size() * 4);
    writer.write_f32(std::vector<float>{3, 2}.data(), 2);
    writer.publish();
    return error_of(Exit::bad_file, [&] { compare(Precision::fp32); });
  };
  expect_contains(message_with({{"adamw", settings}}), "steps: got 3, expected one for each of the 2 adamw.losses");
  expect_contains(message_with({{"model", ""}}), "dump.adamw: missing, but there are adamw.losses");
  for (const auto& [key, value] : settings.items()) {  // each of them is read
    Json without = settings;
    without["steps"] = 2;
    without.erase(key);
    expect_contains(message_with({{"adamw", without}}), "dump.adamw: " + key + ":");
  }
}

// A stepped parameter may be off by three times what PyTorch's steps make of an ulp, and in any case by the usual tolerance;
// what is no stepped parameter has that alone.
TEST_F(CompareDump, SteppedParametersMayErrThreeTimesWhatAnUlpLeadsTo) {
  const std::string name = "adamw.param.model.norm.weight";
  TrainOptions options;
  options.seq_len = 8;
  const std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), options);
  initialize_parameters(*model, 1);
  model->forward({ids_, ids_}, 0, 1.0f / 8);
  model->backward();
  model->statistics();
  AdamWStep step;
  step.learning_rate = 1e-3f;
  step.gradient_scale = 1;
  model->update(step);
  const TensorSpec& spec = model->table().at("model.norm.weight");
  std::vector<float> stepped(static_cast<std::size_t>(spec.elements));
  model->read_tensor(TensorRole::parameter, spec, stepped.data());
  const Json settings = {{"steps", 1},  {"learning_rate", 1e-3}, {"beta1", 0.9},  {"beta2", 0.95},
                         {"eps", 1e-8}, {"weight_decay", 0},     {"grad_clip", 0}};
  const auto compared = [&](double off, const Json& ulp) {
    Json dump = {{"adamw", settings}};
    if (!ulp.is_null()) dump["ulp"] = ulp;
    std::vector<float> reference = stepped;
    for (float& value : reference) value = static_cast<float>(value / (1 + off));
    TensorFileWriter writer(path_, FileKind::reference_dump, {{"dump", dump}});
    writer.declare("input_ids", DType::i32, {1, 8});
    writer.declare("labels", DType::i32, {1, 8});
    writer.declare("adamw.losses", DType::f32, {1});
    writer.declare(name, DType::f32, {spec.elements});
    writer.write(ids_.data(), ids_.size() * 4);
    writer.write(labels_.data(), labels_.size() * 4);
    const float loss = 0;  // that of the model is another: this row fails
    writer.write_f32(&loss, 1);
    writer.write_f32(reference.data(), reference.size());
    writer.publish();
    const Comparison result = compare(Precision::fp32);
    EXPECT_EQ(result.rows.size(), 2u);
    EXPECT_DOUBLE_EQ(result.rows[0].tolerance, ulp.is_object() && ulp.contains("adamw.losses") ? 3e-4 : 1e-5);
    return result.rows[1];
  };
  for (const Json& none :
       {Json(), Json::object(), Json({{"adamw.param.other", 1e-4}}), Json({{name, 0}}), Json({{name, 3e-6}})}) {
    EXPECT_EQ(compared(0, none).tolerance, 1e-5) << none;
    EXPECT_TRUE(compared(0.9e-5, none).pass) << none;
    EXPECT_FALSE(compared(1.1e-5, none).pass) << none;
  }
  const Json measured = {{name, 2e-5}, {"adamw.losses", 1e-4}};
  EXPECT_NEAR(compared(0, measured).tolerance, 6e-5, 1e-12);
  EXPECT_TRUE(compared(5.9e-5, measured).pass);
  EXPECT_FALSE(compared(6.1e-5, measured).pass);
  EXPECT_NEAR(compared(0, {{name, 1e-3}}).tolerance, 3e-3, 1e-12);
  for (const Json& bad : {Json(1.01e-3), Json(-1e-9), Json("1e-5"), Json(true)}) {
    expect_contains(error_of(Exit::bad_file, [&] { compared(0, {{name, bad}}); }), "dump.ulp: " + name + ": ");
  }
}

// What is read of a dump is read with its hash: one bit that is another, in any tensor, is damage and no difference.
TEST_F(CompareDump, EachTensorThatIsReadIsVerified) {
  write(embedding(), nullptr);
  const std::string whole = read_bytes(path_);
  std::vector<std::pair<std::string, std::size_t>> tensors;
  {
    const TensorFile dump = TensorFile::open(path_, FileKind::reference_dump);
    for (const TensorInfo& tensor : dump.tensors()) tensors.emplace_back(tensor.name, tensor.offset);
  }
  ASSERT_EQ(tensors.size(), 3u);
  for (const auto& [name, offset] : tensors) {
    std::string damaged = whole;
    damaged[offset] = static_cast<char>(damaged[offset] ^ 1);
    write_bytes(path_, damaged);
    const std::string message = error_of(Exit::bad_file, [&] { compare(Precision::fp32); });
    expect_contains(message, "tensor '" + name + "': XXH3-64");
  }
}

// The greedy ids of a dump: from a prompt of one id on, as many as the context holds, and one wrong id is a failure.
TEST_F(CompareDump, GreedyIdsUpToTheEndOfTheContext) {
  TrainOptions options;
  options.seq_len = 8;
  const std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), options);
  initialize_parameters(*model, 1);
  const std::unique_ptr<DecodeModel> decoder = model->decoder(12);
  const auto compared = [&](const std::vector<std::int32_t>& prompt, const std::vector<std::int32_t>& greedy) {
    TensorFileWriter writer(path_, FileKind::reference_dump, Json::object());
    const std::pair<const char*, const std::vector<std::int32_t>*> tensors[] = {
        {"input_ids", &ids_}, {"labels", &labels_}, {"greedy.prompt_ids", &prompt}, {"greedy.ids", &greedy}};
    for (const auto& [name, ids] : tensors) {
      const auto count = static_cast<std::int64_t>(ids->size());
      writer.declare(name, DType::i32,
                     *name == 'g' ? std::vector<std::int64_t>{count} : std::vector<std::int64_t>{1, count});
    }
    for (const auto& [name, ids] : tensors) writer.write(ids->data(), ids->size() * 4);
    writer.publish();
    return compare_decoding(TensorFile::open(path_, FileKind::reference_dump), 1e-5, *decoder);
  };
  std::vector<std::int32_t> likeliest;
  decoder->reset();
  std::span<const float> logits = decoder->prefill(std::vector<std::int32_t>{5});
  while (likeliest.size() < 11) {
    likeliest.push_back(static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    if (likeliest.size() < 11) logits = decoder->decode(likeliest.back());
  }
  EXPECT_TRUE(compared({5}, likeliest).passed());
  EXPECT_TRUE(decoder->activation("final_norm").empty()) << "nothing is kept after the batch";
  likeliest[7] ^= 1;
  EXPECT_FALSE(compared({5}, likeliest).passed());
  likeliest[7] ^= 1;
  expect_contains(error_of(Exit::bad_file, [&] { compared({}, likeliest); }), "greedy: 0 + 11 tokens");
  expect_contains(error_of(Exit::bad_file, [&] { compared({5, 5}, likeliest); }), "greedy: 2 + 11 tokens");
  for (const std::int32_t unknown : {-1, 32}) {
    expect_contains(error_of(Exit::bad_file, [&] { compared({unknown}, likeliest); }), "greedy.prompt_ids");
  }
}

// The context that a comparison needs is that of the longer one: of the batch, or of the greedy ids after their prompt.
TEST_F(CompareDump, DecodingNeedsTheBatchAndTheGreedyIds) {
  const auto positions = [&](std::int64_t prompt, std::int64_t greedy) {
    TensorFileWriter writer(path_, FileKind::reference_dump, config_);
    const std::vector<std::int32_t> ids(32, 1);
    std::vector<std::int64_t> counts = {8, 8};
    for (const char* name : {"input_ids", "labels"}) writer.declare(name, DType::i32, {1, 8});
    for (const auto& [name, count] : {std::pair("greedy.prompt_ids", prompt), std::pair("greedy.ids", greedy)}) {
      if (count < 0) continue;
      writer.declare(name, DType::i32, {count});
      counts.push_back(count);
    }
    for (const std::int64_t count : counts) writer.write(ids.data(), static_cast<std::size_t>(count) * 4);
    writer.publish();
    return decoding_positions(TensorFile::open(path_, FileKind::reference_dump), micro_config());
  };
  EXPECT_EQ(positions(-1, -1), 8) << "no greedy ids";
  EXPECT_EQ(positions(9, -1), 8);
  EXPECT_EQ(positions(-1, 9), 8);
  EXPECT_EQ(positions(1, 2), 8) << "shorter than the batch";
  EXPECT_EQ(positions(3, 5), 8);
  EXPECT_EQ(positions(3, 6), 9);
  EXPECT_EQ(positions(6, 3), 9);
}

TEST_F(CompareDump, TheBatchIsOneOfRowsThatFitTheModel) {
  struct Ids {
    std::vector<std::int64_t> shape;
    DType dtype = DType::i32;
  };
  const auto error_with = [&](const Ids& inputs, const Ids& labels) {
    TensorFileWriter writer(path_, FileKind::reference_dump, config_);
    writer.declare("input_ids", inputs.dtype, inputs.shape);
    writer.declare("labels", labels.dtype, labels.shape);
    const std::vector<std::int32_t> ids(1024, 1);
    for (const Ids& one : {inputs, labels}) {
      std::int64_t count = 1;
      for (const std::int64_t length : one.shape) count *= length;
      writer.write(ids.data(), static_cast<std::size_t>(count) * 4);
    }
    writer.publish();
    return error_of(Exit::bad_file, [&] { compare(Precision::fp32); });
  };
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{8}, {2, 2, 2}, {0, 8}}) {
    expect_contains(error_with({shape}, {shape}), "input_ids: got shape " + shape_text(shape) + ", expected [B, T]");
  }
  expect_contains(error_with({{2, 4}}, {{1, 8}}), "labels of the same shape");
  expect_contains(error_with({{1, 8}, DType::f32}, {{1, 8}}), "input_ids: got dtype f32, expected i32");
  expect_contains(error_with({{1, 8}}, {{1, 8}, DType::f32}), "labels: got dtype f32, expected i32");
  const std::int64_t most = micro_config().max_positions;
  ASSERT_LT(most, 1024);
  expect_contains(error_with({{1, most + 1}}, {{1, most + 1}}),
                  format("do not fit in a context of %lld", static_cast<long long>(most)));
}

TEST_F(CompareDump, ANanInTheReferenceFails) {
  std::vector<float> values = embedding();
  ASSERT_EQ(values.size(), 8u * 16);
  write(values, nullptr);
  EXPECT_TRUE(compare(Precision::fp32).passed());
  values[77] = kNan;
  write(values, nullptr);
  EXPECT_FALSE(compare(Precision::fp32).passed());
}

// With bf16 the tolerance is made from the dump: one that is not finite would let everything pass.
TEST_F(CompareDump, AYardstickThatIsNoneIsRefused) {
  const std::vector<float> reference = embedding();
  std::vector<float> near = reference;
  for (float& value : near) value *= 1.001f;
  write(reference, &near);
  EXPECT_TRUE(compare(Precision::bf16).passed());
  for (const float bad : {kNan, kInf}) {
    std::vector<float> wrong(reference.size(), 5.0f), yardstick = near;
    yardstick[100] = bad;
    write(wrong, &yardstick);
    expect_contains(error_of(Exit::bad_file, [&] { compare(Precision::bf16); }), "act16.embedding");
  }
  near.pop_back();
  write(std::vector<float>(reference.size(), 5.0f), &near);
  expect_contains(error_of(Exit::bad_file, [&] { compare(Precision::bf16); }), "act16.embedding");
}

// Three times the error that PyTorch's own run has, both in the 2-norm; a tensor without such a run is not compared.
TEST_F(CompareDump, InSixteenBitsTheToleranceIsThreeTimesPyTorchsError) {
  const std::vector<float> model = embedding();
  const auto scaled = [&](double by) {
    std::vector<float> values = model;
    for (float& value : values) value = static_cast<float>(value * by);
    return values;
  };
  for (const auto& [reference, passes] : {std::pair(1 / 1.0295, true), std::pair(1 / 1.0305, false)}) {
    const std::vector<float> pytorch = scaled(1.01 * reference);
    write(scaled(reference), &pytorch);
    const Comparison result = compare(Precision::bf16);
    ASSERT_EQ(result.rows.size(), 1u);
    EXPECT_EQ(result.passed(), passes) << result.rows[0].relative;
    EXPECT_NEAR(result.rows[0].tolerance, 0.03, 1e-5);
    expect_contains(result.table().back(), "in the 2-norm");
  }
  write(model, nullptr);
  EXPECT_TRUE(compare(Precision::bf16).rows.empty());
  std::vector<float> one_off = model;
  one_off[3] += 1;
  write(model, &one_off);
  const Comparison exact = compare(Precision::fp32);
  EXPECT_TRUE(exact.passed()) << "in fp32 no other run counts";
  EXPECT_EQ(exact.rows.at(0).tolerance, 1e-5);
  expect_contains(exact.table().back(), "1 tensors, 0 failed (relative to each tensor's largest value)");
}

// Three times what noise makes of a tensor, or twice what rounding makes of it; in bf16 with what bf16 makes of it without fp8.
TEST_F(CompareDump, InFp8TheDumpBringsTheToleranceOfEachTensor) {
  std::vector<float> values = embedding();
  const auto measured = [&](double noise, double rounding, double bf16, double plain) {
    Json fp8 = Json::object();
    const std::pair<const char*, double> all[] = {
        {"noise", noise}, {"rounding", rounding}, {"bf16", bf16}, {"plain_bf16", plain}};
    for (const auto& [key, value] : all) fp8[key] = {{"act.embedding", value}};
    return fp8;
  };
  const auto compared = [&](const Json& fp8, DType activations = DType::f32) {
    config_ = {{"dump", {{"fp8", fp8}}}};
    write(values, nullptr);
    return compare(Precision::fp8, activations);
  };
  EXPECT_TRUE(compared(measured(0, 0, 0, 0)).passed()) << "1e-5 is the least";
  for (float& value : values) value *= 1.01f;  // 0.0099 apart
  EXPECT_TRUE(compared(measured(0.004, 1, 0, 0)).passed());
  EXPECT_FALSE(compared(measured(0.003, 1, 1, 1)).passed());
  EXPECT_TRUE(compared(measured(1, 0.0055, 0, 0)).passed());
  EXPECT_FALSE(compared(measured(1, 0.0045, 1, 1)).passed());
  EXPECT_TRUE(compared(measured(0, 1, 0.004, 0), DType::bf16).passed());
  EXPECT_FALSE(compared(measured(1, 1, 0.003, 0), DType::bf16).passed());
  EXPECT_FALSE(compared(measured(1, 0.0045, 1, 0), DType::bf16).passed());
  EXPECT_TRUE(compared(measured(0, 0.0045, 1, 0.001), DType::bf16).passed());

  Json damaged = measured(1, 1, 1, 1);
  damaged["noise"] = Json::object();
  EXPECT_TRUE(compared(damaged).rows.empty()) << "nothing was measured of it";
  for (const char* key : {"noise", "rounding"}) {
    damaged = measured(1, 1, 1, 1);
    damaged[key]["act.embedding"] = "1";
    expect_contains(error_of(Exit::bad_file, [&] { compared(damaged); }),
                    "dump.fp8." + std::string(key) + ": act.embedding");
    damaged[key] = 5;
    expect_contains(error_of(Exit::bad_file, [&] { compared(damaged); }), "dump.fp8." + std::string(key) + ": missing");
    damaged.erase(key);
    expect_contains(error_of(Exit::bad_file, [&] { compared(damaged); }), "dump.fp8." + std::string(key) + ": missing");
  }
  expect_contains(error_of(Exit::bad_file, [&] { compared(1); }), "dump.fp8.noise: missing");
}

// Losses are a few numbers, which rounding may leave alone by luck: they are judged by three times the noise.
TEST_F(CompareDump, InFp8LossesAreJudgedByTheNoise) {
  TrainOptions options;
  options.seq_len = 8;
  const std::unique_ptr<TrainModel> model = cpu::make_training_model(micro_config(), options);
  initialize_parameters(*model, 1);
  model->zero_gradients();
  model->forward({ids_, labels_}, 0, 0.125f);
  const auto loss = static_cast<float>(1.01 * model->statistics().loss_sum / 8);  // 0.0099 apart
  const auto passes = [&](double noise, double rounding) {
    const Json fp8 = {{"noise", {{"adamw.losses", noise}}}, {"rounding", {{"adamw.losses", rounding}}}};
    const Json adamw = {{"steps", 1},  {"learning_rate", 0}, {"beta1", 0.9},    {"beta2", 0.95},
                        {"eps", 1e-8}, {"weight_decay", 0},  {"grad_clip", 1.0}};
    TensorFileWriter writer(path_, FileKind::reference_dump, {{"dump", {{"fp8", fp8}, {"adamw", adamw}}}});
    writer.declare("input_ids", DType::i32, {1, 8});
    writer.declare("labels", DType::i32, {1, 8});
    writer.declare("adamw.losses", DType::f32, {1});
    writer.write(ids_.data(), ids_.size() * 4);
    writer.write(labels_.data(), labels_.size() * 4);
    writer.write_f32(&loss, 1);
    writer.publish();
    const Comparison result = compare(Precision::fp8);
    EXPECT_EQ(result.rows.size(), 1u);
    return result.passed();
  };
  EXPECT_TRUE(passes(0.004, 0));
  EXPECT_FALSE(passes(0.003, 1));
}

// A GPU in bf16 keeps some activations in fp8 alone: they are left out. In fp32 what the model lacks is a difference.
TEST_F(CompareDump, InFp8ActivationsThatBf16DoesNotKeepAreLeftOut) {
  Json fp8 = Json::object();
  for (const char* key : {"noise", "rounding", "bf16", "plain_bf16"})
    fp8[key] = {{"act.unknown", 1}, {"grad.unknown", 1}};
  for (const std::string name : {"act.unknown", "grad.unknown"}) {
    TensorFileWriter writer(path_, FileKind::reference_dump, {{"dump", {{"fp8", fp8}}}});
    writer.declare("input_ids", DType::i32, {1, 8});
    writer.declare("labels", DType::i32, {1, 8});
    writer.declare(name, DType::f32, {1});
    writer.write(ids_.data(), ids_.size() * 4);
    writer.write(labels_.data(), labels_.size() * 4);
    writer.write_f32(std::vector<float>{1}.data(), 1);
    writer.publish();
    const Comparison exact = compare(Precision::fp8, DType::f32), bf16 = compare(Precision::fp8, DType::bf16);
    EXPECT_FALSE(exact.passed());
    EXPECT_EQ(exact.rows.size(), 1u) << name;
    EXPECT_EQ(bf16.rows.size(), name[0] == 'a' ? 0u : 1u) << name;
  }
}

TEST_F(CompareDump, InFp8IsForModelsInFp8) {
  write(embedding(), nullptr);
  expect_contains(error_of(Exit::bad_file, [&] { compare(Precision::fp8); }), "dump.fp8: missing");
  config_ = {{"dump", {{"fp8", Json::object()}}}};
  write(embedding(), nullptr);
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    expect_contains(error_of(Exit::bad_file, [&] { compare(precision); }), "dump.fp8: this dump is in fp8");
  }
}

}  // namespace
}  // namespace weft
