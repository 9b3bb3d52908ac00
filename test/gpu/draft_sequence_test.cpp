// A draft model in the fused kernel: its draft tokens are those of a model that is fed id by id, whatever was right before, and
// what an engine makes of them is the plain output.
#include "llmc/infer/draft_sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "llmc/cuda/inference/fused_tokens.h"
#include "llmc/cuda/inference/inference.h"
#include "llmc/infer/engine_sequence.h"
#include "llmc/model/single_sequence.h"
#include "test/cpp/generated_ids.h"
#include "test/cpp/inference_tools.h"
#include "test/gpu/neox_models.h"
#include "test/gpu/sequences.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

class Fixture {
 public:
  Fixture(const ModelConfig& config, unsigned seed) : path_(directory_.file("model.bin")) {
    test::write_random_model(path_, config, DType::f16, seed, nullptr);
  }
  ModelFile file() const { return ModelFile::open(path_); }
  std::unique_ptr<InferenceModel> paged(std::int64_t capacity) const {
    return cuda::load_inference(file(), one_sequence(capacity), {});
  }
  std::unique_ptr<DecodeModel> fused(std::int64_t capacity, bool kv_fp8 = false) const {
    return test::loaded_sequence(file(), test::Way::fused, DType::f16, capacity, kv_fp8);
  }

 private:
  TemporaryDirectory directory_;
  std::string path_;
};

ModelConfig config_of(bool llama) {
  return llama ? test::llama_config(test::small_llamas()[1]) : test::neox_config({"neox", 4, 64, 3, 1024});
}
std::string reason() {
  for (const bool llama : {false, true}) {
    if (std::string why = cuda::fused_unsupported_reason(config_of(llama), DType::f16); !why.empty()) return why;
  }
  return "";
}

SamplingPlan plan_of(double temperature, const ModelConfig& config) {
  SamplerOptions sampler;
  sampler.temperature = temperature;
  sampler.seed = 7;
  sampler.vocab_limit = config.tokenizer_vocab;
  return sampling_plan(sampler);
}

// `count` ids after the first `given` of `ids` as a prompt and each of the others fed alone.
Ids one_by_one(DecodeModel& model, const Ids& ids, std::int64_t given, std::int64_t count, const SamplingPlan& plan) {
  model.start_draft(0, std::span(ids).first(static_cast<std::size_t>(given)), 1, plan, {});
  std::int32_t next = *model.drafted(0);
  Ids sampled;
  for (std::int64_t i = given; i < std::ssize(ids) + count; ++i) {
    if (i < std::ssize(ids)) {
      next = ids[static_cast<std::size_t>(i)];
    } else {
      sampled.push_back(next);
    }
    model.start_draft(i, {&next, 1}, 1, plan, {});
    next = *model.drafted(0);
  }
  return sampled;
}

TEST(CudaDraftSequence, DraftTokensAreThoseOfAModelThatIsFedIdById) {
  if (!reason().empty()) GTEST_SKIP() << reason();
  for (const auto& [llama, kv_fp8] : {std::pair{false, false}, {true, false}, {true, true}}) {
    const Fixture fixture(config_of(llama), 3);
    const auto model = fixture.fused(60, kv_fp8), plain = fixture.fused(60, kv_fp8);
    ASSERT_TRUE(model->can_draft());
    for (const double temperature : {0.0, 0.9}) {
      const SamplingPlan plan = plan_of(temperature, model->config());
      DraftSequence drafts(*model, 10000);
      const auto drafted = [&](const Ids& ids, std::int64_t count) {
        drafts.start(ids, plan, count);
        const std::span<const std::int32_t> found = drafts.finish();
        return Ids(found.begin(), found.end());
      };
      for (std::int64_t k = 1; k <= kMostDrafted; ++k) {
        for (std::int64_t right = 0; right <= k; ++right) {
          SCOPED_TRACE(std::string(llama ? "llama" : "neox") + (kv_fp8 ? " in fp8" : "") + ", temperature " +
                       std::to_string(temperature) + ", " + std::to_string(right) + " of " + std::to_string(k));
          // Another first id each time: the prompt is computed anew.
          Ids ids = test::random_tokens(12, model->config().tokenizer_vocab, static_cast<unsigned>(8 * k + right));
          const Ids first = drafted(ids, k);
          EXPECT_EQ(first, one_by_one(*plain, ids, 12, k, plan));
          ASSERT_EQ(std::ssize(first), k);
          ids.insert(ids.end(), first.begin(), first.begin() + right);
          const std::int32_t next = right < k ? first[static_cast<std::size_t>(right)] : 4;
          ids.push_back((next + 1) % 500);
          EXPECT_EQ(drafted(ids, 3), one_by_one(*plain, ids, 12, 3, plan));
          if (HasFailure()) return;
        }
      }
    }
    DraftSequence drafts(*model, 10000);
    const SamplingPlan plan = plan_of(0, model->config());
    EXPECT_EQ(drafts.start(Ids(58, 3), plan, 7), 3) << "two positions are left, and the last draft token needs none";
    EXPECT_EQ(drafts.finish().size(), 3u);
    EXPECT_EQ(drafts.start(Ids(61, 3), plan, 7), 0);
  }
}

// The ids of a model that verifies draft tokens are those of the model without: over prompts, turns, stop ids, temperatures, to
// the last position of both. The draft model is the same one, whose kernel adds in another order, another one, and a shorter
// one.
TEST(CudaDraftSequence, AnEngineGivesThePlainOutput) {
  if (!reason().empty()) GTEST_SKIP() << reason();
  constexpr std::int64_t kCapacity = 120;
  for (const bool llama : {false, true}) {
    const Fixture fixture(config_of(llama), 3), other(config_of(!llama), 4);
    for (const int form : {0, 1, 2}) {
      SCOPED_TRACE(std::string(llama ? "llama" : "neox") + ", draft " + std::to_string(form));
      const auto drafted =
          engine_sequence(fixture.paged(kCapacity), kCapacity,
                          {nullptr, form == 1 ? other.fused(kCapacity) : fixture.fused(form == 2 ? 50 : kCapacity)},
                          {.row_cost = 1e-3, .draft_cost = 0.05});
      const auto plain = single_sequence(fixture.paged(kCapacity), kCapacity);
      std::int64_t accepted = 0;
      for (const double temperature : {0.0, 0.7, 1.2}) {
        for (const std::size_t listen : {std::size_t{1000}, std::size_t{11}}) {
          drafted->reset();
          plain->reset();
          GenerationRequest request;
          request.sampling = plan_of(temperature, plain->config());
          Ids prompt = test::random_tokens(9, plain->config().tokenizer_vocab, static_cast<unsigned>(listen));
          for (int turn = 0; plain->length() + std::ssize(prompt) < kCapacity; ++turn) {
            request.max_ids = std::min<std::int64_t>(41, kCapacity - plain->length() - std::ssize(prompt));
            const Ids want = test::generated(*plain, prompt, request, listen);
            EXPECT_EQ(test::generated(*drafted, prompt, request, listen), want) << "turn " << turn;
            accepted += drafted->draft_counts()->accepted;
            prompt = {want.back(), 5, static_cast<std::int32_t>(8 + turn)};
            request.stop_ids = {want[want.size() / 2]};
            if (HasFailure()) return;
          }
        }
      }
      if (form != 1) {
        EXPECT_GT(accepted, 50);
      }
    }
  }
}

}  // namespace
}  // namespace weft
