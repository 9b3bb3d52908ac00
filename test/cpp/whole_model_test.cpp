// The checks of whole_model_checks.h on the CPU.
#include "test/cpp/whole_model_checks.h"

#include <map>
#include <set>

#include "llmc/cpu/training.h"
#include "llmc/model/training_activations.h"

namespace weft {
namespace {

std::unique_ptr<TrainModel> make_cpu(const ModelConfig& config, const TrainOptions& options) {
  return cpu::make_training_model(config, options);
}

TEST(WholeModel, EachBranchOfEachMicroStepHasItsOwnMask) {
  test::expect_masks_of_their_own(make_cpu);
}

TEST(WholeModel, ValidationHasNoDropout) {
  test::expect_no_dropout_in_evaluate(make_cpu, 0);
  test::expect_no_dropout_in_evaluate(make_cpu, 0, test::small_neox(true));
  test::expect_no_dropout_in_evaluate(make_cpu, 0, test::small_gemma());
}

TEST(WholeModel, GradientsWithDropout) {
  for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
    for (const NormKind norm : {NormKind::rmsnorm, NormKind::layernorm}) {
      test::expect_gradients_with_dropout(make_cpu, recompute, norm);
    }
    for (const bool parallel : {true, false}) {
      SCOPED_TRACE(parallel ? "parallel" : "sequential");
      test::expect_gradients_with_dropout(make_cpu, recompute, test::small_neox(parallel));
    }
  }
}

// Recomputation gives the same bits: RecomputationOfPostNormsGivesTheSameBits.
TEST(WholeModel, GradientsWithPostNorms) {
  test::expect_gradients_with_dropout(make_cpu, Recompute::none, test::small_gemma());
  ModelConfig untied = test::small_gemma();
  untied.tied_embeddings = false;
  untied.norm = NormKind::layernorm;
  test::expect_gradients_with_dropout(make_cpu, Recompute::block, untied);
}

TEST(WholeModel, GradientsWithWindows) {
  for (const Recompute recompute : {Recompute::none, Recompute::block}) {
    test::expect_gradients_with_dropout(make_cpu, recompute, NormKind::rmsnorm, {2, 0, 5});
  }
}

const std::vector<std::vector<std::int64_t>> kDocuments = {{7, 1, 11}, {19}};  // of two rows

TEST(WholeModel, GradientsWithDocuments) {
  test::expect_gradients_with_dropout(make_cpu, Recompute::none, NormKind::rmsnorm, {}, kDocuments);
  test::expect_gradients_with_dropout(make_cpu, Recompute::block, NormKind::rmsnorm, {2, 0, 5}, kDocuments);
  ModelConfig neox = test::small_neox(true);
  neox.windows = {2, 0, 5};
  test::expect_gradients_with_dropout(make_cpu, Recompute::block, neox, kDocuments);
  test::expect_gradients_with_dropout(make_cpu, Recompute::none, test::small_gemma(), kDocuments);
}

TEST(WholeModel, PackedDocumentsAreThoseAlone) {
  test::expect_packed_documents_are_those_alone(make_cpu, {}, 1e-6);
  test::expect_packed_documents_are_those_alone(make_cpu, {30, 0, 5}, 1e-6, Recompute::block);
  test::expect_packed_documents_are_those_alone(make_cpu, {}, 1e-6, Recompute::none, test::small_neox(true));
  test::expect_packed_documents_are_those_alone(make_cpu, {30, 0, 5}, 1e-6, Recompute::norm, test::small_gemma());
}

TEST(WholeModel, DocumentsDoNotTouchEachOther) {
  test::expect_documents_do_not_touch(make_cpu, {});
  test::expect_documents_do_not_touch(make_cpu, {0, 70, 5});
  test::expect_documents_do_not_touch(make_cpu, {}, test::small_neox(true));
}

TEST(WholeModel, WeightsOfLabels) {
  test::expect_weights_of_labels(make_cpu, 1e-5);
}

// A row of one document is a row without any, bit for bit; and documents are for models that were made for them.
TEST(WholeModel, OneDocumentIsNone) {
  const ModelConfig config = test::small_llama();
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 19;
  test::TokenBatch text = test::random_tokens(config, 2 * 19, 3);
  const auto plain = make_cpu(config, options);
  options.document_mask = true;
  const auto masked = make_cpu(config, options);
  test::randomize_parameters(*plain);
  test::randomize_parameters(*masked);
  std::int64_t labels = 0;
  const double loss = plain->evaluate(text.batch(), &labels);
  EXPECT_EQ(masked->evaluate(text.batch(), &labels), loss);
  text.document_starts = test::packed_starts({{19}, {19}});
  EXPECT_EQ(masked->evaluate(text.batch(), &labels), loss);
  EXPECT_THROW(plain->evaluate(text.batch(), &labels), Error);
  text.document_starts.pop_back();
  EXPECT_THROW(masked->forward(text.batch(), 0, 1.0f), Error);
}

// With windows w of the layers a token reaches the next sum of (w - 1) positions, and none behind them.
TEST(WholeModel, ATokenReachesAsFarAsTheWindowsOfAllLayers) {
  constexpr std::int64_t T = 40, kChanged = 3;
  ModelConfig config = test::small_llama();
  TrainOptions options;
  options.seq_len = T;
  for (const auto& [windows, reach] : {std::pair<std::vector<std::int64_t>, std::int64_t>{{1, 1, 1}, 0},
                                       {{4, 4, 4}, 9},
                                       {{2, 17, 5}, 21},
                                       {{4, 0, 1}, T}}) {
    config.windows = windows;
    const auto model = make_cpu(config, options);
    test::randomize_parameters(*model);
    test::TokenBatch text = test::random_tokens(config, T, 1);
    const auto logits = [&] {
      model->forward(text.batch(), 0, 1.0f);
      return model->activation("final_norm");
    };
    const test::Floats before = logits();
    text.tokens[kChanged] = (text.tokens[kChanged] + 1) % static_cast<std::int32_t>(config.vocab_size);
    const test::Floats after = logits();
    for (std::int64_t t = 0; t < T; ++t) {
      const auto at = t * config.hidden_size;
      const bool same = std::equal(before.begin() + at, before.begin() + at + config.hidden_size, after.begin() + at);
      EXPECT_EQ(same, t < kChanged || t > kChanged + reach) << "position " << t << ", reach " << reach;
    }
  }
}

// The classifier takes 512 rows at once: 1,100 are two pieces and a rest.
TEST(WholeModel, PiecesOfAMicroBatchAddUp) {
  test::expect_pieces_add_up(make_cpu, 11, 100, test::kTolerance);
}

// An activation is there under its name where each layer keeps its own, and nowhere else: never that of another layer.
TEST(WholeModel, ActivationsAreThoseOfTheirLayerOrNone) {
  ModelConfig config = test::small_llama();
  config.head_dim = config.rope.rotary_dim = 24;
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 7;
  const test::TokenBatch text = test::random_tokens(config, 14, 1);
  std::map<std::string, test::Floats> kept;
  for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
    options.recompute = recompute;
    const auto model = make_cpu(config, options);
    test::randomize_parameters(*model);
    model->zero_gradients();
    model->forward(text.batch(), 0, 1.0f);
    const auto expect = [&](const std::string& name, std::int64_t columns, bool always) {
      SCOPED_TRACE(name + ", recompute " + std::to_string(static_cast<int>(recompute)));
      const test::Floats values = model->activation(name);
      if (recompute == Recompute::none) {
        ASSERT_EQ(std::ssize(values), 14 * columns);
        for (const auto& [other, before] : kept) EXPECT_NE(values, before) << "also under the name " << other;
        kept[name] = values;
      } else {
        EXPECT_EQ(values, always ? kept.at(name) : test::Floats());
      }
    };
    expect("embedding", config.hidden_size, true);
    for (const std::string layer : {"layers.0.", "layers.1.", "layers.2."}) {
      for (const char* name : {"input_norm", "post_attention_norm", "residual"}) {
        expect(layer + name, config.hidden_size, false);
      }
      for (const char* name : {"q", "attention"}) expect(layer + name, config.q_size(), false);
      for (const char* name : {"k", "v"}) expect(layer + name, config.kv_size(), false);
      expect(layer + "mlp_product", config.ffn_size, false);
    }
    expect("final_norm", config.hidden_size, true);
    expect("logits", config.vocab_size, true);
    for (const char* unknown : {"", "layers.3.residual", "layers.-1.residual", "layers.0.", "layers.0", "layers.0.Q",
                                "layers.x.q", "residual", "layers.0.residual_mid"}) {
      EXPECT_TRUE(model->activation(unknown).empty()) << unknown;
    }
  }
}

// Every bit of a step of a Gemma 3 is what it is without recomputation.
TEST(WholeModel, RecomputationOfPostNormsGivesTheSameBits) {
  TrainOptions options;
  options.micro_batch = 2;
  options.seq_len = 19;
  options.dropout = 0.3f;
  const ModelConfig config = test::small_gemma();
  const test::TokenBatch text = test::random_tokens(config, 2 * 19, 3);
  std::vector<test::Floats> expected;
  for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
    options.recompute = recompute;
    const auto model = make_cpu(config, options);
    test::randomize_parameters(*model);
    model->zero_gradients();
    model->forward(text.batch(), 0, 0.1f);
    model->backward();
    const std::vector<test::Floats> gradients = test::all_gradients(*model);
    if (recompute == Recompute::none) expected = gradients;
    EXPECT_EQ(gradients, expected) << static_cast<int>(recompute);
  }
}

// The decoder of a model in training computes what the model computes, in every variant of a Llama, a GPT-NeoX and a Gemma 3.
TEST(WholeModel, ItsDecoderComputesWhatItComputes) {
  std::vector<ModelConfig> configs = {test::small_neox(true), test::small_neox(false), test::small_gemma()};
  for (const NormKind norm : {NormKind::rmsnorm, NormKind::layernorm}) {
    for (const bool tied : {false, true}) {
      for (const std::int64_t rotary_dim : {24, 10}) {
        ModelConfig config = test::small_llama();
        config.norm = norm;
        config.tied_embeddings = tied;
        config.head_dim = 24;
        config.rope.rotary_dim = rotary_dim;
        if (rotary_dim == 10) config.windows = {3, 0, 7};
        configs.push_back(config);
      }
    }
  }
  for (const ModelConfig& config : configs) {
    SCOPED_TRACE(config.family + ", " + norm_kind_name(config.norm) + (config.tied_embeddings ? ", tied, " : ", ") +
                 (config.parallel_residual ? "parallel, " : "") + std::to_string(config.rope.rotary_dim));
    TrainOptions options;
    options.seq_len = 9;
    const auto model = make_cpu(config, options);
    test::randomize_parameters(*model);
    const test::TokenBatch text = test::random_tokens(config, 9, 1);
    model->zero_gradients();
    model->forward(text.batch(), 0, 1.0f);
    const auto decoder = model->decoder(9);
    decoder->keep_activations(true);
    decoder->prefill(text.tokens);
    std::vector<std::string> names = {"embedding", "final_norm", "logits"};
    for (const std::string layer : {"layers.0.", "layers.1.", "layers.2."}) {
      for (const char* name :
           {"input_norm", "q", "k", "v", "attention", "post_attention_norm", "mlp_product", "residual"}) {
        names.push_back(layer + name);
      }
    }
    for (const std::string& name : names) {
      test::expect_close(decoder->activation(name), model->activation(name), name);
    }
  }
}

// Query heads that share keys and values are heads with equal keys and values of their own: the same loss, the same logits of
// model and decoder, and gradients that are the sums of the others'.
TEST(WholeModel, HeadsThatShareKeysAreHeadsWithEqualKeys) {
  constexpr std::int64_t HS = 8;
  struct Heads {
    std::int64_t all, of_keys;
  };
  for (const auto& [NH, NKV] : {Heads{10, 2}, Heads{12, 2}, Heads{14, 2}, Heads{16, 2}, Heads{15, 3}, Heads{9, 1}}) {
    SCOPED_TRACE(std::to_string(NH) + " heads, " + std::to_string(NKV) + " of keys");
    const std::int64_t group = NH / NKV;
    ModelConfig config = test::small_llama();
    config.num_layers = 2;
    config.vocab_size = config.tokenizer_vocab = 61;
    config.head_dim = config.rope.rotary_dim = HS;
    config.num_heads = NH;
    config.num_kv_heads = NKV;
    ModelConfig own_keys = config;
    own_keys.num_kv_heads = NH;
    TrainOptions options;
    options.seq_len = 9;
    const auto shared = make_cpu(config, options), own = make_cpu(own_keys, options);
    test::randomize_parameters(*shared);
    const auto shares = [](const TensorSpec& spec) {
      return spec.name.find("k_proj") != std::string::npos || spec.name.find("v_proj") != std::string::npos;
    };
    const std::int64_t head = HS * config.hidden_size;  // elements of one head's rows
    for (const TensorSpec& spec : shared->table().specs()) {
      const test::Floats values = test::read_values(*shared, TensorRole::parameter, spec);
      test::Floats repeated = values;
      if (shares(spec)) {
        repeated.clear();
        for (std::int64_t h = 0; h < NH; ++h) {
          const auto from = values.begin() + h / group * head;
          repeated.insert(repeated.end(), from, from + head);
        }
      }
      own->write_tensor(TensorRole::parameter, own->table().at(spec.name), repeated.data());
    }
    const test::TokenBatch text = test::random_tokens(config, 9, 1);
    const double loss = test::training_loss(*shared, text.batch(), 0);
    EXPECT_NEAR(loss, test::training_loss(*own, text.batch(), 0), 1e-5 * loss);
    test::expect_close(shared->activation("logits"), own->activation("logits"), "logits");
    const auto decoder = shared->decoder(9);
    decoder->keep_activations(true);
    decoder->prefill(text.tokens);
    test::expect_close(decoder->activation("logits"), own->activation("logits"), "logits of the decoder");
    shared->backward();
    own->backward();
    for (const TensorSpec& spec : shared->table().specs()) {
      const test::Floats got = test::read_values(*shared, TensorRole::gradient, spec);
      test::Floats want = test::read_values(*own, TensorRole::gradient, own->table().at(spec.name));
      if (shares(spec)) {
        test::Floats sums(got.size(), 0.0f);
        for (std::int64_t h = 0; h < NH; ++h) {
          for (std::int64_t i = 0; i < head; ++i) {
            sums[static_cast<std::size_t>(h / group * head + i)] += want[static_cast<std::size_t>(h * head + i)];
          }
        }
        want = sums;
      }
      test::expect_close(got, want, spec.name, 1e-4);  // the sums are taken in another order
    }
  }
}

// The ranges of counters of all (micro-step, branch) of a run are different.
TEST(WholeModel, DropoutOffsetsAreDistinct) {
  for (const std::int64_t branches : {2, 6, 64}) {
    std::set<std::uint64_t> seen;
    for (std::uint64_t micro_step = 0; micro_step < 500; ++micro_step) {
      for (std::int64_t branch = 0; branch < branches; ++branch) {
        EXPECT_TRUE(seen.insert(dropout_offset(micro_step, branch, branches)).second) << micro_step << ", " << branch;
      }
    }
    // A range has room for the elements of the largest micro-batch: four a counter.
    std::uint64_t before = *seen.begin();
    for (const std::uint64_t offset : seen) {
      if (offset != before) {
        EXPECT_GE(offset - before, std::uint64_t{1} << 40);
      }
      before = offset;
    }
  }
}

}  // namespace
}  // namespace weft
