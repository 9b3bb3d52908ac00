// One sequence over an InferenceModel that keeps several steps queued: the ids are those of one step after the other, and what
// was queued in vain leaves no trace.
#include "llmc/model/single_sequence.h"

#include <gtest/gtest.h>

#include <numeric>

#include "golden_cases.h"
#include "llmc/base/sampler.h"
#include "llmc/cpu/inference.h"
#include "paged_fake.h"
#include "test_files.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kCapacity = 60;

std::unique_ptr<DecodeModel> fake_sequence(std::int64_t depth, std::int64_t max_rows) {
  return single_sequence(std::make_unique<PagedFake>(PagedFakeSizes{.page_size = 4,
                                                                    .num_pages = 15,
                                                                    .slots = 1,
                                                                    .max_rows = max_rows,
                                                                    .max_positions = kCapacity,
                                                                    .depth = depth}),
                         kCapacity);
}

Ids prompt_of(std::int64_t size) {
  Ids ids(static_cast<std::size_t>(size));
  std::iota(ids.begin(), ids.end(), 2);
  return ids;
}

GenerationRequest request_of(std::int64_t max_ids) {
  GenerationRequest request;
  request.sampling.seed = 3;
  request.max_ids = max_ids;
  return request;
}

Ids generated(DecodeModel& model, const Ids& prompt, const GenerationRequest& request, std::size_t listen = 1000) {
  Ids ids;
  const std::int64_t before = model.length() + std::ssize(prompt);
  model.generate_ids(prompt, request, [&](std::int32_t id) {
    EXPECT_EQ(model.length(), before + std::ssize(ids));
    ids.push_back(id);
    return ids.size() < listen;
  });
  EXPECT_EQ(model.length(), before + std::ssize(ids) - 1);
  return ids;
}

// Each sequence begins when its weights are there.
TEST(SingleSequence, AResetWaitsForTheWeights) {
  int waits = 0;
  const auto model = single_sequence(
      std::make_unique<PagedFake>(PagedFakeSizes{
          .page_size = 4, .num_pages = 15, .slots = 1, .max_rows = 4, .max_positions = kCapacity, .depth = 1}),
      kCapacity, [&] { ++waits; });
  model->prefill(prompt_of(5));
  EXPECT_EQ(waits, 0);
  model->reset();
  EXPECT_EQ(waits, 1);
  model->score(prompt_of(5));
  EXPECT_EQ(waits, 2);
}

TEST(SingleSequence, KeepsAheadAndGivesTheSameIds) {
  for (const std::int64_t depth : {1, 2, 3}) {
    for (const std::int64_t max_rows : {1, 4, 7, 64}) {
      SCOPED_TRACE("depth " + std::to_string(depth) + ", rows " + std::to_string(max_rows));
      const auto model = fake_sequence(depth, max_rows);
      EXPECT_EQ(model->samples(), depth > 1);
      const Ids prompt = prompt_of(13), want = PagedFake::ids_after(prompt, 47, 3, 64);
      EXPECT_EQ(generated(*model, prompt, request_of(47)), want) << "to the end of the context";
      model->reset();
      EXPECT_EQ(generated(*model, prompt, request_of(1)), Ids(want.begin(), want.begin() + 1));
      model->reset();
      EXPECT_EQ(generated(*model, prompt, request_of(20), 5), Ids(want.begin(), want.begin() + 5));
      // The text goes on behind the id that the cache does not hold yet: steps that were queued in vain have left nothing.
      EXPECT_EQ(generated(*model, {want[4]}, request_of(10)), Ids(want.begin() + 5, want.begin() + 15));
      GenerationRequest stopping = request_of(40);
      stopping.stop_ids = {1000, want[6]};
      const auto stop = std::find(want.begin(), want.end(), want[6]) + 1;
      model->reset();
      EXPECT_EQ(generated(*model, prompt, stopping), Ids(want.begin(), stop));
    }
  }
}

TEST(SingleSequence, ErrorsLeaveNothingQueued) {
  for (const std::int64_t depth : {1, 2, 3}) {
    const auto model = fake_sequence(depth, 4);
    Ids damaged = prompt_of(9);
    damaged[5] = PagedFake::kPoison;
    EXPECT_THROW(generated(*model, damaged, request_of(5)), Error);
    model->reset();
    EXPECT_THROW(
        model->generate_ids(prompt_of(9), request_of(9), [](std::int32_t) -> bool { throw Error(Exit::usage, ""); }),
        Error);
    model->reset();
    const Ids prompt = prompt_of(9);
    EXPECT_EQ(generated(*model, prompt, request_of(9)), PagedFake::ids_after(prompt, 9, 3, 64));
    model->reset();
    EXPECT_NE(
        error_of(Exit::internal, [&] { generated(*model, prompt, request_of(52)); }).find("51 positions are left"),
        std::string::npos);
    EXPECT_NE(error_of(Exit::internal, [&] { generated(*model, prompt, request_of(0)); }).find("0 ids"),
              std::string::npos);
    EXPECT_NE(error_of(Exit::internal, [&] { generated(*model, prompt_of(61), request_of(1)); }).find("do not fit"),
              std::string::npos);
  }
}

// On the CPU the ids of generate_ids() are those that Sampler picks from the logits of prefill() and decode().
TEST(SingleSequence, IdsAreThoseOfTheHostsSampler) {
  for (const GoldenCase& golden : golden_cases()) {
    SCOPED_TRACE(golden.name);
    const auto model = cpu::load_decoder(ModelFile::open(golden.model), 40);
    const Ids prompt = prompt_of(11);
    for (const double temperature : {0.0, 0.9}) {
      SamplerOptions options;
      options.temperature = temperature;
      options.vocab_limit = model->config().tokenizer_vocab;
      Sampler sampler(options);
      model->reset();
      std::span<const float> logits = model->prefill(prompt);
      Ids want;
      while (true) {
        want.push_back(sampler.sample(logits, model->length()));
        if (want.size() == 20) break;
        logits = model->decode(want.back());
      }
      model->reset();
      EXPECT_EQ(generated(*model, prompt, {sampling_plan(options), {}, 20}), want);
    }
  }
}

}  // namespace
}  // namespace weft
