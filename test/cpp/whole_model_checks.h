// Checks of a whole training model that hold on either device: dropout as the model applies it, and micro-batches that
// cross the pieces in which the classifier works. Each takes a factory of models; test/cpp/whole_model_test.cpp runs them
// on the CPU, test/gpu/whole_model_test.cpp on the GPU.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/model/config.h"
#include "llmc/model/presets.h"
#include "llmc/model/train_model.h"
#include "test/cpp/gradient_check.h"

namespace weft::test {

using MakeModel = std::function<std::unique_ptr<TrainModel>(const ModelConfig&, const TrainOptions&)>;

struct TokenBatch {
  std::vector<std::int32_t> tokens, labels, document_starts = {};
  std::vector<float> label_weights = {};
  Batch batch() const { return {tokens, labels, document_starts, label_weights}; }
  Batch part(std::size_t first, std::size_t count) const {
    return {std::span(tokens).subspan(first, count), std::span(labels).subspan(first, count)};
  }
};

inline ModelConfig small_llama() {
  ModelConfig config = preset_config("tiny");
  config.num_layers = 3;
  config.hidden_size = 72;
  config.ffn_size = 200;
  config.vocab_size = config.tokenizer_vocab = 1003;
  return config;
}

// GPT-NeoX: LayerNorm, GELU, the heads of q, k and v after each other, of which a half rotates, biases, and both residuals.
inline ModelConfig small_neox(bool parallel) {
  ModelConfig config = small_llama();
  set_family(config, "gpt_neox");
  config.norm = NormKind::layernorm;
  config.parallel_residual = parallel;
  config.qkv_bias = config.output_bias = true;
  config.tied_embeddings = false;
  config.num_heads = config.num_kv_heads = 3;
  config.rope.rotary_dim = config.head_dim / 2;
  return config;
}

// Gemma 3: GeGLU, norms with 1 + weight before and behind attention and MLP, a scaled embedding, and a theta of its own where a
// layer has a window.
inline ModelConfig small_gemma() {
  ModelConfig config = small_llama();
  set_family(config, "gemma3_text");
  config.windows = {2, 0, 5};
  config.local_rope_theta = 50;
  config.attention_scale = 0.2;
  return config;
}

// Every tenth label or so is ignored.
inline TokenBatch random_tokens(const ModelConfig& config, std::int64_t rows, unsigned seed) {
  std::mt19937 generator(seed);
  TokenBatch batch;
  const auto vocab = static_cast<unsigned>(config.vocab_size);
  for (std::int64_t n = 0; n < rows; ++n) {
    batch.tokens.push_back(static_cast<std::int32_t>(generator() % vocab));
    batch.labels.push_back(generator() % 10 == 0 ? kIgnoredLabel : static_cast<std::int32_t>(generator() % vocab));
  }
  return batch;
}

// Weights large enough that every branch changes the residual stream by about its own size.
inline void randomize_parameters(TrainModel& model) {
  for (std::size_t i = 0; i < model.table().specs().size(); ++i) {
    const TensorSpec& spec = model.table().specs()[i];
    const bool matrix = spec.shape.size() == 2;
    const Floats values = random_floats(spec.elements, static_cast<unsigned>(100 + i), matrix ? 0.15f : 0.1f,
                                        spec.init == Init::ones ? 1.0f : 0.0f);
    model.write_tensor(TensorRole::parameter, spec, values.data());
  }
}

inline Floats read_values(TrainModel& model, TensorRole role, const TensorSpec& spec) {
  Floats values(static_cast<std::size_t>(spec.elements));
  model.read_tensor(role, spec, values.data());
  return values;
}

inline std::vector<Floats> all_gradients(TrainModel& model) {
  std::vector<Floats> gradients;
  for (const TensorSpec& spec : model.table().specs()) {
    gradients.push_back(read_values(model, TensorRole::gradient, spec));
  }
  return gradients;
}

// Batch::document_starts of rows that hold documents of these lengths.
inline std::vector<std::int32_t> packed_starts(const std::vector<std::vector<std::int64_t>>& rows) {
  std::vector<std::int32_t> starts;
  for (const std::vector<std::int64_t>& row : rows) {
    std::int64_t begin = 0;
    for (const std::int64_t length : row) {
      starts.insert(starts.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(begin));
      begin += length;
    }
  }
  return starts;
}

inline double training_loss(TrainModel& model, const Batch& batch, std::uint64_t micro_step) {
  model.zero_gradients();
  model.forward(batch, micro_step, 1.0f);
  return model.statistics().loss_sum;
}

// ---- dropout --------------------------------------------------------------------------------------------------------

// Which elements of the residual stream each branch left alone in micro-step `micro_step`: [2 l] those of layer l's
// attention, [2 l + 1] those of its MLP. Found from the stream itself: with one of the two output projections at zero the
// stream changes in a layer exactly where the other branch was kept.
inline std::vector<std::vector<bool>> dropped_elements(TrainModel& model, const Batch& batch,
                                                       std::uint64_t micro_step) {
  const std::int64_t layers = model.config().num_layers;
  std::vector<std::vector<bool>> dropped(static_cast<std::size_t>(2 * layers));
  for (int branch = 0; branch < 2; ++branch) {
    randomize_parameters(model);
    for (std::int64_t l = 0; l < layers; ++l) {
      const std::string silent = branch == 0 ? "mlp.down_proj" : "self_attn.o_proj";
      const TensorSpec& spec = model.table().at("model.layers." + std::to_string(l) + "." + silent + ".weight");
      model.write_tensor(TensorRole::parameter, spec, Floats(static_cast<std::size_t>(spec.elements), 0.0f).data());
    }
    model.zero_gradients();
    model.forward(batch, micro_step, 1.0f);
    Floats before = model.activation("embedding");
    for (std::int64_t l = 0; l < layers; ++l) {
      const Floats after = model.activation("layers." + std::to_string(l) + ".residual");
      std::vector<bool>& mask = dropped[static_cast<std::size_t>(2 * l + branch)];
      for (std::size_t i = 0; i < after.size(); ++i) mask.push_back(after[i] == before[i]);
      before = after;
    }
  }
  return dropped;
}

// Every branch of every micro-step has a mask of its own, of the right density, and the same one when it comes again.
inline void expect_masks_of_their_own(const MakeModel& make) {
  constexpr double kDropout = 0.3;
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 37;
  options.dropout = static_cast<float>(kDropout);
  options.seed = 5;
  const ModelConfig config = small_llama();
  const TokenBatch text = random_tokens(config, 2 * 37, 1);
  const auto model = make(config, options);

  struct Named {
    std::string name;
    std::vector<bool> dropped;
  };
  std::vector<Named> masks;
  const auto add = [&](TrainModel& from, std::uint64_t micro_step, const std::string& note) {
    const auto branches = dropped_elements(from, text.batch(), micro_step);
    for (std::size_t b = 0; b < branches.size(); ++b) {
      masks.push_back(
          {"micro-step " + std::to_string(micro_step) + ", branch " + std::to_string(b) + note, branches[b]});
    }
  };
  for (const std::uint64_t micro_step : {0u, 1u, 2u, 7u}) add(*model, micro_step, "");
  options.seed = 6;
  add(*make(config, options), 0, ", another seed");

  // Of masks that do not depend on each other p^2 + (1 - p)^2 of the elements agree.
  const double count = static_cast<double>(masks[0].dropped.size());
  const double agreement = kDropout * kDropout + (1 - kDropout) * (1 - kDropout);
  const double slack = 6 * 0.5 / std::sqrt(count);  // six standard deviations of a share of `count` elements
  for (std::size_t a = 0; a < masks.size(); ++a) {
    double dropped = 0;
    for (const bool one : masks[a].dropped) dropped += one ? 1 : 0;
    EXPECT_NEAR(dropped / count, kDropout, slack) << masks[a].name;
    for (std::size_t b = 0; b < a; ++b) {
      double same = 0;
      for (std::size_t i = 0; i < masks[a].dropped.size(); ++i) same += masks[a].dropped[i] == masks[b].dropped[i];
      EXPECT_NEAR(same / count, agreement, slack) << masks[a].name << " and " << masks[b].name;
    }
  }
  const auto again = dropped_elements(*model, text.batch(), 2);
  for (std::size_t b = 0; b < again.size(); ++b) {
    EXPECT_EQ(again[b], masks[2 * again.size() + b].dropped) << "branch " << b << " of micro-step 2, a second time";
  }
}

// Validation has no dropout, changes no mask and leaves gradients and statistics alone.
inline void expect_no_dropout_in_evaluate(const MakeModel& make, double tolerance,
                                          const ModelConfig& config = small_llama()) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 37;
  const TokenBatch text = random_tokens(config, 2 * 37, 2);
  std::int64_t labels = 0;
  const auto plain = make(config, options);
  randomize_parameters(*plain);
  const double expected = plain->evaluate(text.batch(), &labels);
  EXPECT_GT(labels, 0);

  options.dropout = 0.4f;
  const auto model = make(config, options);
  randomize_parameters(*model);
  const double trained = training_loss(*model, text.batch(), 3);
  EXPECT_GT(std::abs(trained - expected) / expected, 1e-3) << "training without dropout";
  std::int64_t again = 0;
  const double evaluated = model->evaluate(text.batch(), &again);
  EXPECT_NEAR(evaluated, expected, tolerance * expected);
  EXPECT_EQ(again, labels);
  EXPECT_EQ(model->evaluate(text.batch(), &again), evaluated);
  EXPECT_EQ(training_loss(*model, text.batch(), 3), trained) << "after a validation";
  EXPECT_NE(training_loss(*model, text.batch(), 4), trained);
}

// Backward with dropout is the derivative of forward with the same masks: for each tensor, the slope of the loss along the
// tensor's own gradient is the gradient's 2-norm. A mask that differs between the two passes changes it by about the
// dropout probability; the loss is good to some 1e-7 in fp32 and the step is chosen so that 1 % shows.
inline void expect_gradients_with_dropout(const MakeModel& make, Recompute recompute, const ModelConfig& config,
                                          const std::vector<std::vector<std::int64_t>>& documents = {}) {
  TrainOptions options;
  options.document_mask = !documents.empty();
  options.micro_batch = 2;
  options.seq_len = 19;
  options.dropout = 0.3f;
  options.seed = 9;
  options.recompute = recompute;
  TokenBatch text = random_tokens(config, 2 * 19, 3);
  text.document_starts = packed_starts(documents);
  const auto model = make(config, options);
  randomize_parameters(*model);
  constexpr std::uint64_t kMicroStep = 6;
  model->zero_gradients();
  model->forward(text.batch(), kMicroStep, 1.0f);
  model->backward();
  model->statistics();
  const std::vector<Floats> gradients = all_gradients(*model);
  for (std::size_t t = 0; t < gradients.size(); ++t) {
    const TensorSpec& spec = model->table().specs()[t];
    double squares = 0;
    for (const float g : gradients[t]) squares += static_cast<double>(g) * g;
    const double slope = std::sqrt(squares);
    ASSERT_GT(slope, 0) << spec.name;
    const Floats values = read_values(*model, TensorRole::parameter, spec);
    const double step = std::min(0.5 / slope, 0.02);  // moves the loss, about 250, by at most 0.5 to each side
    const auto loss_at = [&](double distance) {
      Floats moved = values;
      for (std::size_t i = 0; i < moved.size(); ++i) {
        moved[i] = static_cast<float>(static_cast<double>(values[i]) +
                                      distance * static_cast<double>(gradients[t][i]) / slope);
      }
      model->write_tensor(TensorRole::parameter, spec, moved.data());
      return training_loss(*model, text.batch(), kMicroStep);
    };
    // Richardson: the error of the third order cancels.
    const double wide = (loss_at(step) - loss_at(-step)) / (2 * step);
    const double narrow = (loss_at(step / 2) - loss_at(-step / 2)) / step;
    EXPECT_NEAR((4 * narrow - wide) / 3, slope, 0.01 * slope) << spec.name;
    model->write_tensor(TensorRole::parameter, spec, values.data());
  }
}

inline void expect_gradients_with_dropout(const MakeModel& make, Recompute recompute, NormKind norm,
                                          const std::vector<std::int64_t>& windows = {},
                                          const std::vector<std::vector<std::int64_t>>& documents = {}) {
  ModelConfig config = small_llama();
  config.norm = norm;
  config.windows = windows;
  expect_gradients_with_dropout(make, recompute, config, documents);
}

// ---- documents ------------------------------------------------------------------------------------------------------

// The loss of each document of packed rows, and the gradients of all of them, are those of the documents alone, each a row of
// its own length: attention sees nothing else. Positions begin anew, which q and k show: scores depend on their differences
// alone.
inline void expect_packed_documents_are_those_alone(const MakeModel& make, const std::vector<std::int64_t>& windows,
                                                    double tolerance, Recompute recompute = Recompute::none,
                                                    ModelConfig config = small_llama()) {
  const std::vector<std::vector<std::int64_t>> rows = {{64, 1, 70, 15},
                                                       {9, 130, 11}};  // 64: a block of the CPU's attention
  config.windows = windows;
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 150;
  options.document_mask = true;
  options.recompute = recompute;
  TokenBatch text = random_tokens(config, 2 * 150, 8);
  text.document_starts = packed_starts(rows);
  const auto packed = make(config, options);
  randomize_parameters(*packed);
  packed->zero_gradients();
  packed->forward(text.batch(), 0, 0.01f);
  packed->backward();
  const StepStatistics all = packed->statistics();
  const std::vector<Floats> gradients = all_gradients(*packed);
  const std::string rotated[] = {"layers.0.q", "layers.0.k"};
  const Floats packed_rotated[] = {packed->activation(rotated[0]), packed->activation(rotated[1])};

  std::vector<std::vector<double>> sums;  // of the gradients of the documents alone
  for (const Floats& gradient : gradients) sums.emplace_back(gradient.size());
  double loss = 0;
  std::size_t begin = 0;
  for (const std::vector<std::int64_t>& row : rows) {
    for (const std::int64_t length : row) {
      const auto count = static_cast<std::size_t>(length);
      options.micro_batch = 1;
      options.seq_len = length;
      const auto alone = make(config, options);
      randomize_parameters(*alone);
      alone->zero_gradients();
      alone->forward(text.part(begin, count), 0, 0.01f);
      alone->backward();
      const double own = alone->statistics().loss_sum;
      loss += own;
      for (int i = 0; i < 2 && recompute == Recompute::none; ++i) {
        const Floats want = alone->activation(rotated[i]);
        const auto first = packed_rotated[i].begin() + static_cast<std::ptrdiff_t>(begin * (want.size() / count));
        expect_close(Floats(first, first + std::ssize(want)), want, rotated[i], 10 * tolerance);
      }
      const std::vector<Floats> parts = all_gradients(*alone);
      for (std::size_t t = 0; t < parts.size(); ++t) {
        for (std::size_t i = 0; i < parts[t].size(); ++i) sums[t][i] += static_cast<double>(parts[t][i]);
      }
      TokenBatch masked = text;  // the document's own labels alone
      std::fill(masked.labels.begin(), masked.labels.end(), kIgnoredLabel);
      const auto at = static_cast<std::ptrdiff_t>(begin), end = at + static_cast<std::ptrdiff_t>(length);
      std::copy(text.labels.begin() + at, text.labels.begin() + end, masked.labels.begin() + at);
      std::int64_t labels = 0;
      EXPECT_NEAR(packed->evaluate(masked.batch(), &labels), own, tolerance * own) << "document of " << length;
      begin += count;
    }
  }
  EXPECT_NEAR(all.loss_sum, loss, tolerance * loss);
  for (std::size_t t = 0; t < sums.size(); ++t) {
    expect_close(gradients[t], Floats(sums[t].begin(), sums[t].end()), packed->table().specs()[t].name, 10 * tolerance);
  }
}

// Other tokens of one document change no bit of the loss and the gradients of the documents before and behind it in the row.
inline void expect_documents_do_not_touch(const MakeModel& make, const std::vector<std::int64_t>& windows,
                                          ModelConfig config = small_llama()) {
  config.windows = windows;
  TrainOptions options;
  options.seq_len = 150;
  options.document_mask = true;
  TokenBatch text = random_tokens(config, 150, 9);
  text.document_starts = packed_starts({{40, 60, 50}});
  // The document in the middle has the larger ids, so that whatever they are the others' are sorted alike, and no label.
  for (std::size_t t = 0; t < 150; ++t) {
    const bool middle = t >= 40 && t < 100;
    text.tokens[t] = text.tokens[t] % 400 + (middle ? 500 : 0);
    if (middle) text.labels[t] = kIgnoredLabel;
  }
  const auto model = make(config, options);
  randomize_parameters(*model);
  const auto computed = [&] {
    model->zero_gradients();
    model->forward(text.batch(), 0, 0.01f);
    model->backward();
    return std::pair(model->statistics().loss_sum, all_gradients(*model));
  };
  const auto before = computed();
  for (std::size_t t = 40; t < 100; ++t) text.tokens[t] = 500 + (text.tokens[t] - 500 + 123) % 400;
  const auto after = computed();
  EXPECT_EQ(before.first, after.first);
  for (std::size_t i = 0; i < before.second.size(); ++i) {
    EXPECT_EQ(before.second[i], after.second[i]) << model->table().specs()[i].name;
  }
  // Where it is one document with the one behind it, that one's loss is another.
  text.document_starts = packed_starts({{40, 110}});
  EXPECT_NE(computed().first, before.first);
}

// ---- weights of labels ------------------------------------------------------------------------------------------------

// Gradients are linear in the weights of labels, losses do not depend on them, and weights of 1 are none: the same bits. Each is
// computed three times in a row with others between, so that a GPU replays its graph with new weights. The losses of the labels
// add up to that of evaluate(), and asking for them in the middle of a step changes nothing.
inline void expect_weights_of_labels(const MakeModel& make, double tolerance) {
  constexpr std::size_t kRows = 7 * 91;
  constexpr float kOfEven = 2.5f, kOfOdd = -0.75f;
  TrainOptions options;
  options.micro_batch = 7;
  options.seq_len = 91;
  ModelConfig config = small_llama();
  config.num_layers = 1;
  const auto plain = make(config, options);
  options.label_weights = true;
  const auto weighted = make(config, options);
  randomize_parameters(*plain);
  randomize_parameters(*weighted);
  const TokenBatch text = random_tokens(config, kRows, 4);
  TokenBatch ones = text, mixed = text, halves[2] = {text, text};
  ones.label_weights.assign(kRows, 1.0f);
  for (std::size_t t = 0; t < kRows; ++t) {
    mixed.label_weights.push_back(t % 2 == 0 ? kOfEven : kOfOdd);
    halves[1 - t % 2].labels[t] = kIgnoredLabel;
  }
  const auto computed = [](TrainModel& model, const TokenBatch& batch) {
    model.zero_gradients();
    model.forward(batch.batch(), 0, 0.01f);
    model.backward();
    const StepStatistics statistics = model.statistics();
    return std::tuple(statistics.loss_sum, statistics.label_count, all_gradients(model));
  };
  const auto expected = computed(*plain, text);
  const auto of_mixed = computed(*weighted, mixed);
  for (int turn = 0; turn < 3; ++turn) {
    EXPECT_EQ(computed(*weighted, ones), expected);
    EXPECT_EQ(computed(*weighted, text), expected);
    EXPECT_EQ(computed(*weighted, mixed), of_mixed);
  }
  EXPECT_EQ(std::get<0>(of_mixed), std::get<0>(expected));
  EXPECT_EQ(std::get<1>(of_mixed), std::get<1>(expected));
  const auto even = computed(*plain, halves[0]), odd = computed(*plain, halves[1]);
  for (std::size_t i = 0; i < plain->table().specs().size(); ++i) {
    Floats sum = std::get<2>(even)[i];
    for (std::size_t e = 0; e < sum.size(); ++e) sum[e] = kOfEven * sum[e] + kOfOdd * std::get<2>(odd)[i][e];
    expect_close(std::get<2>(of_mixed)[i], sum, plain->table().specs()[i].name, tolerance);
  }

  Floats losses(kRows, -1.0f);
  weighted->zero_gradients();
  weighted->label_losses(mixed.batch(), losses);
  weighted->forward(mixed.batch(), 0, 0.01f);
  weighted->backward();
  Floats again(kRows);
  weighted->label_losses(mixed.batch(), again);
  EXPECT_EQ(losses, again);
  EXPECT_EQ(all_gradients(*weighted), std::get<2>(of_mixed));
  EXPECT_EQ(weighted->statistics().loss_sum, std::get<0>(of_mixed));
  double total = 0;
  for (std::size_t t = 0; t < kRows; ++t) {
    total += losses[t];
    EXPECT_EQ(losses[t] == 0, text.labels[t] == kIgnoredLabel) << t;
  }
  std::int64_t labels = 0;
  EXPECT_NEAR(total, weighted->evaluate(text.batch(), &labels), 1e-9 * total);
  EXPECT_THROW(plain->forward(mixed.batch(), 0, 0.01f), Error);
  mixed.label_weights.pop_back();
  EXPECT_THROW(weighted->forward(mixed.batch(), 0, 0.01f), Error);
}

// ---- pieces ---------------------------------------------------------------------------------------------------------

// One micro-batch of `sequences` gives the loss, the gradients and the validation loss of as many micro-batches of one
// sequence: with sequences * T beyond twice the rows that the classifier takes at once, and a ragged rest, each row meets its
// own label and each piece adds to the head's gradient.
inline void expect_pieces_add_up(const MakeModel& make, std::int64_t sequences, std::int64_t T, double tolerance) {
  TrainOptions options;
  options.seq_len = T;
  ModelConfig config = small_llama();
  config.num_layers = 1;
  const TokenBatch text = random_tokens(config, sequences * T, 4);

  options.micro_batch = sequences;
  const auto whole = make(config, options);
  randomize_parameters(*whole);
  whole->zero_gradients();
  whole->forward(text.batch(), 0, 0.01f);
  whole->backward();
  const StepStatistics expected = whole->statistics();
  std::int64_t labels = 0;
  const double evaluated = whole->evaluate(text.batch(), &labels);
  EXPECT_EQ(labels, expected.label_count);

  options.micro_batch = 1;
  const auto parts = make(config, options);
  randomize_parameters(*parts);
  parts->zero_gradients();
  double evaluated_parts = 0;
  const auto rows = static_cast<std::size_t>(T);
  for (std::size_t s = 0; s < static_cast<std::size_t>(sequences); ++s) {
    parts->forward(text.part(s * rows, rows), s, 0.01f);
    parts->backward();
  }
  const StepStatistics sum = parts->statistics();
  for (std::size_t s = 0; s < static_cast<std::size_t>(sequences); ++s) {
    evaluated_parts += parts->evaluate(text.part(s * rows, rows), &labels);
  }
  EXPECT_EQ(sum.label_count, expected.label_count);
  EXPECT_NEAR(sum.loss_sum, expected.loss_sum, tolerance * expected.loss_sum);
  EXPECT_NEAR(evaluated_parts, evaluated, tolerance * evaluated);
  for (const TensorSpec& spec : whole->table().specs()) {
    expect_close(read_values(*parts, TensorRole::gradient, spec), read_values(*whole, TensorRole::gradient, spec),
                 spec.name, tolerance);
  }
}

}  // namespace weft::test
