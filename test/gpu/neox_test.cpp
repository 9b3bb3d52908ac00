// One sequence of a Pythia on the GPU: against the CPU reference, each way of decoding against the others, and to the end of its
// context. inference_test.cpp compares the tensors with PyTorch's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/base/error.h"
#include "llmc/base/sampler.h"
#include "llmc/cpu/inference.h"
#include "llmc/infer/engine_sequence.h"
#include "llmc/infer/generate.h"
#include "test/cpp/golden_cases.h"
#include "test/gpu/decode_tools.h"
#include "test/gpu/neox_models.h"
#include "test/gpu/sequences.h"

namespace weft {
namespace {

using test::expect_close;
using test::host_sampled;
using test::NeoxShape;
using test::same_bits;
using test::Way;

constexpr std::int64_t kContexts[] = {0, 1, 31, 32, 33, 127, 128, 129, 1000, 2047};

// The ways of decoding that exist for a storage type on this GPU.
std::vector<Way> ways_for(const ModelConfig& config, DType dtype) {
  std::vector<Way> ways = {Way::reference, Way::graph};
  if (cuda::fused_unsupported_reason(config, dtype).empty()) ways.push_back(Way::fused);
  return ways;
}

std::vector<float> copy(std::span<const float> values) {
  return {values.begin(), values.end()};
}

// A random model in a file, and the models made of it.
class Fixture {
 public:
  Fixture(const NeoxShape& shape, DType dtype, unsigned seed = 3, const test::Edit& edit = nullptr)
      : config_(test::neox_config(shape)), dtype_(dtype) {
    test::write_random_model(path(), config_, dtype, seed, edit);
  }
  std::string path() const { return directory_.file("model.bin"); }
  const ModelConfig& config() const { return config_; }
  std::unique_ptr<DecodeModel> on_gpu(Way way, std::int64_t capacity) const { return on_gpu(way, capacity, dtype_); }
  std::unique_ptr<DecodeModel> on_gpu(Way way, std::int64_t capacity, DType dtype) const {
    return test::loaded_sequence(ModelFile::open(path()), way, dtype, capacity);
  }
  std::unique_ptr<DecodeModel> on_cpu(std::int64_t capacity) const {
    return cpu::load_decoder(ModelFile::open(path()), capacity);
  }

 private:
  TemporaryDirectory directory_;
  ModelConfig config_;
  DType dtype_;
};

// One token after contexts of every awkward length, in every storage type and mode, and the prompt that led there.
void compare_contexts(const NeoxShape& shape, DType dtype) {
  SCOPED_TRACE(shape.name);
  const Fixture fixture(shape, dtype);
  const std::int64_t capacity = fixture.config().max_positions;
  const auto reference = fixture.on_cpu(capacity);
  const std::vector<std::int32_t> ids = test::random_tokens(2048, fixture.config().vocab_size, 5);
  std::vector<std::unique_ptr<DecodeModel>> models;
  for (const Way way : ways_for(fixture.config(), dtype)) models.push_back(fixture.on_gpu(way, capacity));
  for (const std::int64_t context : kContexts) {
    SCOPED_TRACE(context);
    const auto prompt = std::span(ids).first(static_cast<std::size_t>(context));
    reference->reset();
    std::vector<float> want_prompt;
    if (context > 0) want_prompt = copy(reference->prefill(prompt));
    const std::vector<float> want = copy(reference->decode(ids[prompt.size()]));
    std::vector<float> first;
    for (const auto& model : models) {
      model->reset();
      if (context > 0) expect_close("prompt", model->prefill(prompt), want_prompt, dtype);
      const std::vector<float> got = copy(model->decode(ids[prompt.size()]));
      expect_close("decode", got, want, dtype);
      EXPECT_EQ(model->length(), context + 1);
      if (model == models[0]) first = got;
      if (model == models[1]) {
        EXPECT_TRUE(same_bits(got, first)) << "the graph differs from its launches";
      }
    }
  }
}

TEST(CudaNeox, EveryModeMatchesTheCpuAtEveryContext) {
  for (const NeoxShape& shape : test::small_shapes()) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) compare_contexts(shape, dtype);
  }
}

TEST(CudaNeox, LayersOf2_8BMatchTheCpu) {
  compare_contexts(test::shape_2_8b(), DType::f16);
}

// A prompt in several chunks, and on top of what the cache holds.
TEST(CudaNeox, PromptsInPiecesMatchTheCpu) {
  NeoxShape shape{"long", 2, 64, 2, 512};
  shape.positions = 5000;
  const Fixture fixture(shape, DType::f16);
  const std::vector<std::int32_t> ids = test::random_tokens(4700, fixture.config().vocab_size, 6);
  const auto reference = fixture.on_cpu(5000), model = fixture.on_gpu(Way::graph, 5000);
  for (DecodeModel* each : {reference.get(), model.get()}) {
    each->prefill(std::span(ids).first(17));
    each->decode(ids[17]);
  }
  expect_close("prompt", model->prefill(std::span(ids).subspan(18, 4600)),
               reference->prefill(std::span(ids).subspan(18, 4600)), DType::f16);
  expect_close("decode", model->decode(ids[4618]), reference->decode(ids[4618]), DType::f16);
}

// The reference launches one kernel after the other; in a graph's place prompts of many rows compute the MLP beside attention, or
// do not, and of the last layer no more than somebody wants. None of it may show in a bit, in an empty cache nor on a full one.
TEST(CudaNeox, PromptsAreTheSameBitsWhateverRunsAtOnce) {
  const ModelConfig config = test::neox_config(test::shape_2_8b());
  const auto with_streams_from = [&](std::int64_t rows) {
    return test::sequence_of(Way::graph, DType::f16, 2048,
                             [&](const InferenceOptions& pool, cuda::GpuInferenceOptions options) {
                               options.two_stream_rows = rows;
                               return cuda::random_inference(config, 4, pool, options);
                             });
  };
  const auto serial = test::random_sequence(config, 4, Way::reference, DType::f16, 2048);
  const auto overlapped = with_streams_from(1), alone = with_streams_from(std::numeric_limits<std::int64_t>::max());
  const std::vector<std::int32_t> ids = test::random_tokens(2048, config.vocab_size, 13);
  for (const std::size_t first : {1, 7, 64, 129, 256, 257, 1000, 2000}) {
    for (DecodeModel* model : {serial.get(), overlapped.get(), alone.get()}) model->reset();
    for (const auto& piece : {std::span(ids).first(first), std::span(ids).subspan(first, 40)}) {
      const std::vector<float> want = copy(serial->prefill(piece));
      EXPECT_TRUE(same_bits(overlapped->prefill(piece), want)) << first << ", then " << piece.size();
      EXPECT_TRUE(same_bits(alone->prefill(piece), want)) << first << ", then " << piece.size() << ", one stream";
    }
    const std::vector<float> want = copy(serial->decode(5));
    EXPECT_TRUE(same_bits(overlapped->decode(5), want)) << first << ", then a token";
    EXPECT_TRUE(same_bits(alone->decode(5), want)) << first << ", then a token, one stream";
  }
}

// ---- generation -------------------------------------------------------------------------------------------------------

GenerateResult generated(DecodeModel& model, std::span<const std::int32_t> prompt, const GenerateOptions& options,
                         const GenerateHooks& hooks = {}) {
  model.reset();
  return generate(model, nullptr, prompt, options, hooks);
}

GenerateOptions generate_options(const ModelConfig& config, std::int64_t tokens) {
  GenerateOptions options;
  options.max_tokens = tokens;
  options.sampler.vocab_limit = config.tokenizer_vocab;
  return options;
}

TEST(CudaNeox, SampledIdsAreThoseOfTheHost) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    const Fixture fixture(test::small_shapes()[3], dtype);
    const std::vector<std::int32_t> prompt = test::random_tokens(40, fixture.config().vocab_size, 7);
    for (const Way way : ways_for(fixture.config(), dtype)) {
      SCOPED_TRACE(std::string(test::name_of(way)) + " " + dtype_name(dtype));
      const auto model = fixture.on_gpu(way, 256);
      ASSERT_TRUE(model->samples());
      GenerateOptions options = generate_options(fixture.config(), 100);
      const auto check = [&] {
        const GenerateResult result = generated(*model, prompt, options);
        EXPECT_EQ(result.ids, host_sampled(*model, prompt, options));
        EXPECT_EQ(result.context, 40 + 99);
        EXPECT_EQ(result.times.inter_token_ms.size(), 99u);
        for (const std::int32_t id : result.ids) EXPECT_LT(id, fixture.config().tokenizer_vocab) << "a padding row";
        return result.ids;
      };
      const std::vector<std::int32_t> greedy = check();
      options.sampler.temperature = 1.2;
      options.sampler.seed = 99;
      const std::vector<std::int32_t> warm = check();
      EXPECT_NE(warm, greedy);
      options.sampler.top_k = 40;
      options.sampler.top_p = 0.9;
      options.sampler.min_p = 0.01;
      EXPECT_NE(check(), warm);
    }
  }
}

// With the same weights greedy text does not depend on how it is decoded: rounding moves a logit by a thousandth, and the
// two likeliest ids of a random model are further apart nearly always. A seed was chosen for which they are.
TEST(CudaNeox, GreedyTextIsTheSameInEveryModeAndOnTheCpu) {
  for (const NeoxShape& shape : test::small_shapes()) {
    SCOPED_TRACE(shape.name);
    const Fixture fixture(shape, DType::f16);
    const std::vector<std::int32_t> prompt = test::random_tokens(20, fixture.config().vocab_size, 8);
    const GenerateOptions options = generate_options(fixture.config(), 24);
    const std::vector<std::int32_t> want = generated(*fixture.on_cpu(64), prompt, options).ids;
    EXPECT_EQ(generated(*fixture.on_gpu(Way::graph, 64, DType::f32), prompt, options).ids, want);
    std::vector<std::int32_t> first;
    for (const Way way : ways_for(fixture.config(), DType::f16)) {
      const std::vector<std::int32_t> ids = generated(*fixture.on_gpu(way, 64), prompt, options).ids;
      if (first.empty()) first = ids;
      EXPECT_EQ(ids, first) << test::name_of(way);
    }
  }
}

// The greedy ids of the reference dumps' models in fp16, in every way of decoding, are those of the CPU in fp32, or the two greatest
// logits are closer than the storage type's rounding. Drafts change none of them, whichever draft tokens they are.
TEST(CudaNeox, GreedyIdsOfTheGoldens) {
  constexpr std::int64_t kCapacity = 40, kIds = 30;
  int goldens = 0, equal = 0, accepted = 0;
  for (const GoldenCase& golden : golden_cases("gpt_neox")) {
    const ModelFile file = ModelFile::open(golden.model);
    const ModelConfig& config = file.config();
    if (!cuda::inference_unsupported_reason(config, DType::f16).empty()) continue;
    ++goldens;
    SCOPED_TRACE(golden.name);
    const std::vector<std::int32_t> prompt = test::random_tokens(9, config.tokenizer_vocab, 5);
    SamplerOptions sampler;
    sampler.temperature = 0;
    sampler.vocab_limit = config.tokenizer_vocab;
    std::vector<std::int32_t> of_graph;
    for (const Way way : ways_for(config, DType::f16)) {
      SCOPED_TRACE(test::name_of(way));
      const auto model = test::loaded_sequence(file, way, DType::f16, kCapacity);
      const std::vector<std::int32_t> ids = test::generated(*model, prompt, sampler, kIds);
      if (way == Way::graph) of_graph = ids;
      const auto cpu = cpu::load_decoder(file, kCapacity);
      equal += test::equal_greedy_ids(*cpu, prompt, sampler, ids);
    }
    const auto drafted = [&](SequenceDraft draft, const DraftOptions& options) {
      const auto model = engine_sequence(cuda::load_inference(file, one_sequence(kCapacity), {DType::f16}), kCapacity,
                                         std::move(draft), options);
      EXPECT_EQ(test::generated(*model, prompt, sampler, kIds), of_graph);
      accepted += static_cast<int>(model->draft_counts()->accepted);
    };
    const DraftOptions costs = {.row_cost = 1e-3, .draft_cost = 0.05};
    DraftOptions lookup = costs;
    lookup.lookup = 5;
    drafted({}, lookup);
    drafted({cuda::load_inference(file, one_sequence(kCapacity), {DType::f16}), nullptr}, costs);
    if (cuda::fused_unsupported_reason(config, DType::f16).empty()) {
      drafted({nullptr, test::fused_sequence(file, DType::f16, kCapacity)}, costs);
    }
  }
  EXPECT_GE(goldens, 5);  // in 16 bits one has a width that no kernel has
  EXPECT_GT(equal, 2 * 20 * goldens);
  EXPECT_GT(accepted, 10 * goldens);
}

TEST(CudaNeox, TheSameBitsEveryTime) {
  const Fixture fixture(test::small_shapes()[0], DType::f16);
  const std::vector<std::int32_t> prompt = test::random_tokens(300, fixture.config().vocab_size, 9);
  for (const Way way : ways_for(fixture.config(), DType::f16)) {
    SCOPED_TRACE(test::name_of(way));
    const auto model = fixture.on_gpu(way, 512);
    std::vector<float> first;
    for (int run = 0; run < 100; ++run) {
      model->reset();
      model->prefill(prompt);
      const std::vector<float> logits = copy(model->decode(5));
      if (run == 0) first = logits;
      ASSERT_TRUE(same_bits(logits, first)) << "run " << run;
    }
  }
}

TEST(CudaNeox, GenerationEndsWhereItShould) {
  const Fixture fixture(test::small_shapes()[1], DType::f16);
  const std::vector<std::int32_t> prompt = test::random_tokens(10, fixture.config().vocab_size, 10);
  for (const Way way : ways_for(fixture.config(), DType::f16)) {
    SCOPED_TRACE(test::name_of(way));
    const auto model = fixture.on_gpu(way, 64);
    GenerateOptions options = generate_options(fixture.config(), 40);
    options.sampler.temperature = 2;
    const std::vector<std::int32_t> all = generated(*model, prompt, options).ids;
    ASSERT_EQ(all.size(), 40u);

    // Stopped by the id at 0 or at 7, and on from there: the cache is that of a model which was fed the same ids one by one,
    // whatever was queued beyond the stop.
    for (const std::size_t at : {std::size_t{0}, std::size_t{7}}) {
      const std::size_t end = static_cast<std::size_t>(std::find(all.begin(), all.end(), all[at]) - all.begin()) + 1;
      const auto begin = all.begin(), stop = begin + static_cast<std::ptrdiff_t>(end);
      model->reset();
      model->prefill(prompt);
      std::vector<float> want;
      for (auto id = begin; id != stop; ++id) want = copy(model->decode(*id));

      options.stop_ids = {all[at]};  // the first id that is equal to it ends the text
      const GenerateResult stopped = generated(*model, prompt, options);
      EXPECT_EQ(stopped.finish_reason, FinishReason::end_of_text);
      EXPECT_EQ(stopped.ids, std::vector(begin, stop));
      EXPECT_EQ(model->length(), 10 + static_cast<std::int64_t>(end) - 1);
      EXPECT_TRUE(same_bits(model->decode(all[end - 1]), want)) << "stopped at " << end - 1;

      generated(*model, prompt, options);
      GenerateOptions rest = options;
      rest.stop_ids = {};
      rest.max_tokens = 40 - static_cast<std::int64_t>(end);
      EXPECT_EQ(generate(*model, nullptr, std::span(all).subspan(end - 1, 1), rest).ids, std::vector(stop, all.end()));
    }

    options.stop_ids = {};
    int asked = 0;
    GenerateHooks hooks;
    hooks.interrupted = [&asked] { return ++asked == 5; };
    const GenerateResult cut = generated(*model, prompt, options, hooks);
    EXPECT_EQ(cut.finish_reason, FinishReason::interrupted);
    EXPECT_EQ(cut.ids, std::vector(all.begin(), all.begin() + 5));
    EXPECT_EQ(model->length(), 14);
    // And on from there: the last id is fed first, as an interactive session does.
    GenerateOptions rest = options;
    rest.max_tokens = 35;
    EXPECT_EQ(generate(*model, nullptr, std::span(all).subspan(4, 1), rest).ids,
              std::vector(all.begin() + 5, all.end()));

    options.max_tokens = 1000;  // the context ends it
    EXPECT_EQ(generated(*model, prompt, options).ids.size(), 54u);
    EXPECT_EQ(model->length(), 63);
    const std::vector<std::int32_t> full(64, 1);
    expect_contains(error_of(Exit::usage, [&] { generated(*model, full, options); }), "context of 64");
    model->reset();
    model->prefill(full);
    expect_contains(error_of(Exit::internal, [&] { model->decode(1); }), "64 of 64 positions");
  }
}

// The way that --bench-timeline takes. Only the fused kernel records one.
TEST(CudaNeox, OnlyFusedDecodingHasATimeline) {
  const Fixture fixture(test::small_shapes()[0], DType::f16);
  const std::vector<std::int32_t> prompt = test::random_tokens(10, fixture.config().vocab_size, 10);
  for (const Way way : ways_for(fixture.config(), DType::f16)) {
    SCOPED_TRACE(test::name_of(way));
    const auto model = fixture.on_gpu(way, 64);
    model->prefill(prompt);
    const std::string text = model->decode_timeline(1);
    if (way != Way::fused) {
      EXPECT_EQ(text, "");
      continue;
    }
    for (const char* row : {"end of a phase, us", "x here", "norms done", "QKV done", "up done", "query here",
                            "attention done", "MLP up here", "down done", "attention here", "x written"}) {
      expect_contains(text, row);
    }
    EXPECT_EQ(model->length(), 11);
    const std::vector<float> after = copy(model->decode(2));
    model->reset();
    model->prefill(prompt);
    model->decode(1);
    EXPECT_TRUE(same_bits(model->decode(2), after));
  }
}

// The GPU compares the first kMaxStopIds stop ids, the host all of them.
TEST(CudaNeox, ManyStopIds) {
  const Fixture fixture(test::small_shapes()[0], DType::f16);
  const std::vector<std::int32_t> prompt = test::random_tokens(10, fixture.config().vocab_size, 10);
  for (const Way way : ways_for(fixture.config(), DType::f16)) {
    const auto model = fixture.on_gpu(way, 64);
    GenerateOptions options = generate_options(fixture.config(), 30);
    options.sampler.temperature = 2;
    const std::vector<std::int32_t> all = generated(*model, prompt, options).ids;
    const auto stop = std::find(all.begin(), all.end(), all[12]);
    for (const std::size_t others :
         {std::size_t{0}, std::size_t{20}, std::size_t{63}, std::size_t{64}, std::size_t{100}}) {
      SCOPED_TRACE(testing::Message() << test::name_of(way) << " behind " << others << " others");
      options.stop_ids.assign(others, 1 << 20);
      options.stop_ids.push_back(all[12]);
      const GenerateResult stopped = generated(*model, prompt, options);
      EXPECT_EQ(stopped.ids, std::vector(all.begin(), stop + 1));
      EXPECT_EQ(stopped.finish_reason, FinishReason::end_of_text);
    }
  }
}

TEST(CudaNeox, DamagedLogitsAreAnError) {
  // A finite weight so large that logits overflow fp32.
  const Fixture fixture(test::small_shapes()[3], DType::f32, 3, [](const TensorSpec& spec, std::vector<float>& values) {
    if (spec.name == "gpt_neox.final_layer_norm.weight") values.assign(values.size(), 3e38f);
    if (spec.name == "embed_out.weight") {
      for (float& value : values) value *= 100;
    }
  });
  const std::vector<std::int32_t> prompt = {1, 2, 3};
  for (const Way way : {Way::reference, Way::graph}) {
    const auto model = fixture.on_gpu(way, 32);
    error_of(Exit::numeric, [&] { generated(*model, prompt, generate_options(fixture.config(), 5)); });
  }
}

TEST(CudaNeox, ScoresMatchTheCpu) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Fixture fixture(test::small_shapes()[0], dtype);
    const std::vector<std::int32_t> ids = test::random_tokens(700, fixture.config().vocab_size, 11);
    const std::vector<double> want = fixture.on_cpu(700)->score(ids);
    const std::vector<double> got = fixture.on_gpu(Way::graph, 700)->score(ids);
    ASSERT_EQ(got.size(), want.size());
    double mean_got = 0, mean_want = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      mean_got += got[i] / static_cast<double>(got.size());
      mean_want += want[i] / static_cast<double>(got.size());
      if (dtype == DType::f32) {
        EXPECT_NEAR(got[i], want[i], 1e-3) << i;
      }
    }
    EXPECT_NEAR(mean_got, mean_want, dtype == DType::bf16 ? 1e-2 : 1e-3) << dtype_name(dtype);
  }
}

// More ids than are computed at once, twice and a rest: each is scored as what follows it.
TEST(CudaNeox, ScoresOfSeveralChunksMatchTheCpu) {
  NeoxShape shape{"long", 2, 32, 1, 264};
  shape.positions = 5000;
  const Fixture fixture(shape, DType::f32);
  const std::vector<std::int32_t> ids = test::random_tokens(4300, fixture.config().vocab_size, 14);
  const std::vector<double> want = fixture.on_cpu(4300)->score(ids);
  const std::vector<double> got = fixture.on_gpu(Way::graph, 4300)->score(ids);
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-3) << i;
}

// ---- loading ----------------------------------------------------------------------------------------------------------

TEST(CudaNeox, FilesConvertToEveryStorageType) {
  const Fixture fixture(test::small_shapes()[4], DType::f32);
  const std::vector<std::int32_t> prompt = test::random_tokens(50, fixture.config().vocab_size, 12);
  const std::vector<float> want = copy(fixture.on_cpu(64)->prefill(prompt));
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    expect_close("prompt", fixture.on_gpu(Way::graph, 64, dtype)->prefill(prompt), want, dtype);
  }
}

TEST(CudaNeox, DamagedFilesAreRefusedByName) {
  const std::string name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight";
  const NeoxShape shape = test::small_shapes()[1];
  const auto with_value = [&](float value, DType stored) {
    return Fixture(shape, stored, 3, [&, value](const TensorSpec& spec, std::vector<float>& values) {
      if (spec.name == name) values[77] = value;
    });
  };
  const auto load = [](const Fixture& fixture, DType dtype) { fixture.on_gpu(Way::graph, 32, dtype); };

  for (const DType stored : {DType::f32, DType::f16, DType::bf16}) {
    const Fixture broken = with_value(std::nanf(""), stored);
    const std::string message = error_of(Exit::bad_file, [&] { load(broken, DType::f32); });
    expect_contains(message, name);
    expect_contains(message, "element 77 is not finite");
  }
  const Fixture large = with_value(1e6f, DType::f32);
  const std::string message = error_of(Exit::bad_file, [&] { load(large, DType::f16); });
  expect_contains(message, name);
  expect_contains(message, "element 77 does not fit in f16");
  load(large, DType::bf16);

  const Fixture whole(shape, DType::f16);
  std::string bytes = read_bytes(whole.path());
  const ModelFile file = ModelFile::open(whole.path());
  bytes[file.file().at(name).offset + 100] ^= 1;
  write_bytes(whole.path(), bytes);
  const std::string flipped = error_of(Exit::bad_file, [&] { load(whole, DType::f16); });
  expect_contains(flipped, name);
  expect_contains(flipped, "XXH3-64");
}

TEST(CudaNeox, ThePlanIsWhatIsAllocated) {
  const ModelConfig config = test::neox_config(test::small_shapes()[2]);
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const Way way : ways_for(config, dtype)) {
      std::vector<MemoryLine> planned = cuda::plan_inference(config, test::pool_for(way, 300), dtype);
      if (way == Way::fused) std::ranges::copy(cuda::plan_fused_tokens(config), std::back_inserter(planned));
      const std::vector<MemoryLine> reported = test::random_sequence(config, 1, way, dtype, 300)->memory();
      ASSERT_EQ(planned.size(), reported.size());
      for (std::size_t i = 0; i < planned.size(); ++i) {
        EXPECT_EQ(planned[i].name, reported[i].name);
        EXPECT_EQ(planned[i].bytes, reported[i].bytes) << planned[i].name;
      }
    }
  }
}

// Every kernel of a prompt and of a token, for compute-sanitizer (test/python/test_train_gpu.py runs it over this suite):
// contexts of one and of several splits, rows that are full tiles and cut ones. What the numbers are is not looked at here.
TEST(Sanitized, DecodingOfNeox) {
  const std::vector<NeoxShape> shapes = test::small_shapes();
  for (const auto& [shape, dtype] :
       {std::pair(shapes[0], DType::f16), std::pair(shapes[4], DType::f16), std::pair(shapes[3], DType::f32)}) {
    const ModelConfig config = test::neox_config(shape);
    const auto model = test::random_sequence(config, 1, Way::reference, dtype, 310);
    const std::vector<std::int32_t> prompt = test::random_tokens(301, config.vocab_size, 1);
    GenerateOptions options = generate_options(config, 3);
    options.sampler.temperature = 1;
    EXPECT_EQ(generated(*model, prompt, options).ids.size(), 3u);
    EXPECT_EQ(model->score(std::span(prompt).first(70)).size(), 69u);
  }
}

}  // namespace
}  // namespace weft
