// One sequence over an InferenceModel that keeps several steps queued: the ids are those of one step after the other, and what
// was queued in vain leaves no trace.
#include "llmc/model/single_sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "generated_ids.h"
#include "golden_cases.h"
#include "llmc/base/sampler.h"
#include "llmc/cpu/inference.h"
#include "naive_rules.h"
#include "paged_fake.h"
#include "test_files.h"

namespace weft {
namespace {

using test::generated;
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

// keep_logits() gives the logits of all rows of the last prompt, in pieces as in one, and the same as beside all activations.
TEST(SingleSequence, KeepsTheLogitsOfEveryRow) {
  const ModelFile file = ModelFile::open(golden_cases().front().model);
  const auto model = single_sequence(cpu::load_inference(file, one_sequence(kCapacity)), kCapacity);
  const Ids ids = prompt_of(11);
  const auto width = static_cast<std::size_t>(file.config().vocab_size);
  model->keep_activations(true);
  model->prefill(ids);
  const std::vector<float> all = model->activation("logits");
  ASSERT_EQ(all.size(), ids.size() * width);
  model->reset();
  model->keep_logits(true);
  model->prefill(std::span(ids).first(4));
  const std::vector<float> first = model->activation("logits");
  const std::span<const float> last = model->prefill(std::span(ids).subspan(4));
  const std::vector<float> rest = model->activation("logits");
  ASSERT_EQ(first.size() + rest.size(), all.size());
  EXPECT_TRUE(std::equal(first.begin(), first.end(), all.begin()));
  EXPECT_TRUE(std::equal(rest.begin(), rest.end(), all.begin() + std::ssize(first)));
  EXPECT_TRUE(std::equal(last.begin(), last.end(), all.end() - std::ssize(last)));
  model->keep_logits(false);
  model->reset();
  model->prefill(ids);
  EXPECT_TRUE(model->activation("logits").empty());
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
  for (const std::int64_t depth : {1, 2, 3, 16}) {
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

// Rules count what was in the cache before, as far as they are told.
TEST(SingleSequence, RulesAreObeyedAhead) {
  for (const std::int64_t depth : {1, 2, 3, 16}) {
    std::mt19937 random(static_cast<unsigned>(depth));
    for (int round = 0; round < 20; ++round) {
      const auto model = fake_sequence(depth, 4);
      GenerationRequest request = request_of(20);
      request.rules = random_rules(random, 64);
      request.rules.penalties.repetition = 1.5;
      const Ids earlier = {9, 8, 9}, prompt = prompt_of(5);
      model->prefill(earlier);
      request.earlier = earlier;
      Ids all = earlier, ids;
      all.insert(all.end(), prompt.begin(), prompt.end());
      const Ids before = all;
      while (std::ssize(ids) < request.max_ids) {
        std::vector<float> logits =
            PagedFake::logits_after(PagedFake::state_of(all), request.sampling.seed, std::ssize(all), 64);
        change_naively(request.rules, before, ids, logits);
        ids.push_back(static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin()));
        all.push_back(ids.back());
      }
      EXPECT_EQ(generated(*model, prompt, request), ids) << "depth " << depth << ", round " << round;
    }
  }
}

TEST(SingleSequence, ErrorsLeaveNothingQueued) {
  for (const std::int64_t depth : {1, 2, 3, 16}) {
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

// Knows the ids that follow a prompt, and what it was asked for.
class FakeDecoder final : public IdDecoder {
 public:
  // Feeds its ids to `model`, if there is one, which then can go on.
  FakeDecoder(Ids ids, std::int64_t prompt_size, std::shared_ptr<InferenceModel> model = nullptr)
      : ids_(std::move(ids)), prompt_size_(prompt_size), model_(std::move(model)) {}

  std::vector<MemoryLine> memory() const override { return {{"decoder", 5}}; }
  std::int64_t most_ids() const override { return 7; }
  std::int64_t most_first_ids() const override { return 5; }
  void launch(std::span<const std::int32_t> ids, std::int64_t position, std::int64_t count,
              const GenerationRequest& request, const DeviceDrafts&) override {
    EXPECT_FALSE(runs) << "a launch before the end of another";
    EXPECT_TRUE(!ids.empty() && std::ssize(ids) <= most_first_ids()) << ids.size();
    for (const std::int32_t id : ids) EXPECT_EQ(id, at(position++));
    --position;
    first_ids = std::ssize(ids);
    EXPECT_TRUE(count >= 1 && count <= most_ids()) << count;
    EXPECT_EQ(request.sampling.seed, 3u);
    runs = true;
    first_ = position + 1;
    left_ = count;
    ++launches;
    for (std::int64_t end = position + count; model_ != nullptr && position < end; ++position) {
      Ids pages(static_cast<std::size_t>(position / model_->page_size() + 1));
      std::iota(pages.begin(), pages.end(), 0);
      const std::int32_t id = at(position);
      Chunk chunk;
      chunk.pages = pages;
      chunk.first_position = position;
      chunk.ids = {&id, 1};
      model_->submit({&chunk, 1});
      model_->collect();
    }
  }
  std::int32_t wait(std::int64_t i) override {
    EXPECT_TRUE(runs && i < left_);
    return at(first_ + i);
  }
  void end() noexcept override { runs = false; }
  std::span<const float> decode(std::int32_t id, std::int64_t position) override {
    logits_ = {static_cast<float>(id), static_cast<float>(position)};
    return logits_;
  }
  std::string timeline(std::int32_t id, std::int64_t position) override {
    return std::to_string(id) + " at " + std::to_string(position);
  }

  bool runs = false;
  int launches = 0;
  std::int64_t first_ids = 0;  // of the last launch

 private:
  std::int32_t at(std::int64_t position) const { return ids_.at(static_cast<std::size_t>(position - prompt_size_)); }

  Ids ids_;
  std::int64_t prompt_size_, first_ = 0, left_ = 0;
  std::shared_ptr<InferenceModel> model_;
  std::vector<float> logits_;
};

// The model appends what is too much for one launch, all but its last id.
TEST(SingleSequence, ADecoderDrafts) {
  const Ids prompt = prompt_of(13), want = PagedFake::ids_after(prompt, 47, 3, 64);
  auto owned = std::make_unique<FakeDecoder>(want, std::ssize(prompt));
  FakeDecoder& decoder = *owned;
  const auto model = single_sequence(
      std::make_unique<PagedFake>(PagedFakeSizes{
          .page_size = 4, .num_pages = 15, .slots = 1, .max_rows = 4, .max_positions = kCapacity, .depth = 2}),
      kCapacity, nullptr, std::move(owned));
  ASSERT_TRUE(model->can_draft());
  const SamplingPlan plan = request_of(1).sampling;
  const auto want_from = [&](std::ptrdiff_t first, std::ptrdiff_t count) {
    return Ids(want.begin() + first, want.begin() + first + count);
  };
  Ids ids = prompt;
  for (const std::int32_t id : want_from(0, 3)) ids.push_back(id);
  model->start_draft(0, ids, 4, plan, {});
  EXPECT_EQ(decoder.first_ids, 1);
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(model->drafted(i), want[static_cast<std::size_t>(3 + i)]);
  EXPECT_EQ(model->length(), 16 + 3);
  model->start_draft(18, want_from(5, 2), 2, plan, {});  // one of them is there already
  EXPECT_EQ(decoder.first_ids, 2);
  EXPECT_EQ(model->drafted(1), want[8]);
  EXPECT_EQ(model->length(), 20 + 1);
  ids.resize(13);
  for (const std::int32_t id : want_from(0, 44)) ids.push_back(id);
  model->start_draft(0, ids, 1, plan, {});
  model->start_draft(57, want_from(44, 2), 2, plan, {});
  EXPECT_EQ(model->length(), 60) << "to the end of the context";
  EXPECT_NE(error_of(Exit::internal, [&] { model->start_draft(57, want_from(44, 2), 3, plan, {}); }).find("do not fit"),
            std::string::npos);
}

// Behind its positions the model goes on with the decoder's last id.
TEST(SingleSequence, ADecoderStopsAtItsLastPosition) {
  const Ids prompt = prompt_of(13), want = PagedFake::ids_after(prompt, 47, 3, 64);
  for (const std::int64_t positions : {0, 13, 14, 20, 21, 27, 58, 59, 60, 70}) {
    for (const std::int64_t depth : {1, 3}) {
      SCOPED_TRACE(testing::Message() << positions << " positions, depth " << depth);
      const auto paged = std::make_shared<PagedFake>(PagedFakeSizes{
          .page_size = 4, .num_pages = 15, .slots = 1, .max_rows = 4, .max_positions = kCapacity, .depth = depth});
      auto owned = std::make_unique<FakeDecoder>(want, std::ssize(prompt), paged);
      FakeDecoder& decoder = *owned;
      const auto model = single_sequence(paged, kCapacity, nullptr, std::move(owned), positions);
      EXPECT_EQ(generated(*model, prompt, request_of(47)), want);
      EXPECT_EQ(decoder.launches, (std::clamp<std::int64_t>(positions - 13, 0, 46) + 6) / 7);
      EXPECT_FALSE(decoder.runs);
      EXPECT_EQ(model->length(), 59);
      for (const std::size_t listen : {1, 2, 9, 30}) {
        model->reset();
        EXPECT_EQ(generated(*model, prompt, request_of(40), listen),
                  Ids(want.begin(), want.begin() + static_cast<std::ptrdiff_t>(listen)));
        EXPECT_EQ(model->length(), 12 + static_cast<std::int64_t>(listen));
      }
    }
  }
}

TEST(SingleSequence, ADecoderGoesOnAfterThePrompt) {
  const Ids prompt = prompt_of(13), want = PagedFake::ids_after(prompt, 47, 3, 64);
  auto owned = std::make_unique<FakeDecoder>(want, std::ssize(prompt));
  FakeDecoder& decoder = *owned;
  const auto model = single_sequence(
      std::make_unique<PagedFake>(PagedFakeSizes{
          .page_size = 4, .num_pages = 15, .slots = 1, .max_rows = 4, .max_positions = kCapacity, .depth = 2}),
      kCapacity, nullptr, std::move(owned));
  EXPECT_TRUE(model->samples());
  EXPECT_EQ(model->memory().back().name, "decoder");
  EXPECT_EQ(generated(*model, prompt, request_of(47)), want) << "to the end of the context";
  EXPECT_EQ(decoder.launches, 7);  // of 46 ids
  model->reset();
  EXPECT_EQ(generated(*model, prompt, request_of(1)), Ids(want.begin(), want.begin() + 1));
  EXPECT_EQ(decoder.launches, 7);
  for (const std::size_t listen : {1, 2, 5, 8}) {
    model->reset();
    EXPECT_EQ(generated(*model, prompt, request_of(20), listen),
              Ids(want.begin(), want.begin() + static_cast<std::ptrdiff_t>(listen)));
    EXPECT_FALSE(decoder.runs);
  }
  GenerationRequest stopping = request_of(40);
  stopping.stop_ids = {1000, want[11]};
  const auto stop = std::find(want.begin(), want.end(), want[11]) + 1;
  model->reset();
  EXPECT_EQ(generated(*model, prompt, stopping), Ids(want.begin(), stop));
  EXPECT_FALSE(decoder.runs);
  // It does not know rules: the model samples itself.
  const int launches = decoder.launches;
  GenerationRequest biased = request_of(9);
  biased.rules.logit_bias = {{17, 100.0f}};
  model->reset();
  EXPECT_EQ(generated(*model, prompt, biased), Ids(9, 17));
  EXPECT_EQ(decoder.launches, launches);
  model->reset();
  int ids = 0;
  EXPECT_THROW(model->generate_ids(prompt, request_of(9),
                                   [&](std::int32_t) {
                                     if (++ids == 4) throw Error(Exit::usage, "");
                                     return true;
                                   }),
               Error);
  EXPECT_FALSE(decoder.runs);

  model->reset();
  model->prefill(prompt);
  const std::span<const float> logits = model->decode(9);
  EXPECT_EQ(std::vector<float>(logits.begin(), logits.end()), (std::vector<float>{9, 13}));
  EXPECT_EQ(model->decode_timeline(8), "8 at 14");
  EXPECT_EQ(model->length(), 15);
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
