// Where draft tokens come from and how many are made: prompt lookup, the length of drafts; and verification by the CPU's
// models.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "generated_ids.h"
#include "inference_tools.h"
#include "llmc/app/decode_device.h"
#include "llmc/app/decode_session.h"
#include "llmc/cpu/inference.h"
#include "llmc/infer/draft_length.h"
#include "llmc/infer/draft_model.h"
#include "llmc/infer/draft_sequence.h"
#include "llmc/infer/engine_sequence.h"
#include "llmc/infer/fault_injection.h"
#include "llmc/infer/lookup.h"
#include "llmc/model/single_sequence.h"
#include "naive_rules.h"
#include "paged_fake.h"
#include "test_files.h"

namespace weft {
namespace {

using test::generated;
using Ids = std::vector<std::int32_t>;

Ids found(const Ids& ids, std::int64_t count) {
  Lookup lookup;
  const std::span<const std::int32_t> result = lookup.find(ids, count);
  return {result.begin(), result.end()};
}

// Both for as many positions, and together no more than was given.
TEST(DecodeDevice, AModelAndItsDraftShareTheMemoryOfKeysAndValues) {
  InferSettings settings;
  settings.device = "cpu";
  const ModelFile small = ModelFile::open("test/fixtures/golden/llama-hs32-gqa2.model.bin"),
                  large = ModelFile::open("test/fixtures/golden/llama-hs256-mqa.model.bin");
  for (const auto& [file, other] : {std::pair(&small, &large), std::pair(&large, &small)}) {
    DecodeDevice device(settings);
    device.expect_draft(other->config());
    device.choose(file->config(), DType::f32);
    const auto bytes = [](const ModelConfig& config, std::int64_t positions) {
      return kv_bytes(config, positions, sizeof(float));
    };
    const std::uint64_t given = bytes(file->config(), 640) + bytes(other->config(), 640);
    const std::unique_ptr<InferenceModel> model = device.load_inference(*file, given, 100);
    EXPECT_EQ(model->num_pages() * model->page_size(), 640);
    const std::unique_ptr<InferenceModel> draft = device.load_draft(*other, *model);
    EXPECT_EQ(draft->num_pages() * draft->page_size(), 640);
  }
}

TEST(Lookup, TheLongestMatchAndOfThoseTheLatest) {
  EXPECT_EQ(found({}, 3), Ids{});
  EXPECT_EQ(found({1}, 3), Ids{});
  EXPECT_EQ(found({1, 2, 3, 4, 1}, 3), Ids{});                       // one id is not enough
  EXPECT_EQ(found({1, 2, 3, 4, 1, 2}, 2), (Ids{3, 4}));              // a pair is
  EXPECT_EQ(found({1, 2, 3, 1, 2, 4, 1, 2}, 1), Ids{4});             // the latest of two pairs
  EXPECT_EQ(found({9, 1, 2, 3, 1, 2, 4, 9, 1, 2}, 1), Ids{3});       // three ids beat two
  EXPECT_EQ(found({1, 2, 3, 1, 2}, 7), (Ids{3, 1, 2, 3, 1, 2, 3}));  // beyond the end it goes on with itself
  EXPECT_EQ(found({5, 5, 5}, 4), (Ids{5, 5, 5, 5}));
  EXPECT_EQ(found({1, 2, 3, 1, 2}, 0), Ids{});
}

// Of matches of as many ids as are compared, or of more, the latest counts.
TEST(Lookup, LongerThanWhatIsComparedIsNoBetter) {
  Ids pattern(Lookup::kMostSame + 4);
  for (std::size_t i = 0; i < pattern.size(); ++i) pattern[i] = static_cast<std::int32_t>(100 + i);
  for (const std::int64_t repeated : {Lookup::kMostSame - 1, Lookup::kMostSame, Lookup::kMostSame + 1}) {
    Ids ids = pattern;
    ids.push_back(1);
    ids.insert(ids.end(), pattern.end() - repeated, pattern.end());
    ids.push_back(2);
    ids.insert(ids.end(), pattern.begin(), pattern.end());
    EXPECT_EQ(found(ids, 1), Ids{repeated < Lookup::kMostSame ? 1 : 2}) << repeated;
  }
}

// Called with longer and longer ids it finds what it finds at once; and that is what a plain search finds.
TEST(Lookup, AppendingIsTheSameAsTheWhole) {
  std::mt19937 random(3);
  Lookup growing;
  Ids ids;
  int hits = 0;
  for (int i = 0; i < 400; ++i) {
    ids.push_back(static_cast<std::int32_t>(random() % 6));
    std::int64_t best = -1, longest = Lookup::kFewestSame - 1;
    for (std::int64_t end = std::ssize(ids) - 2; end >= 1; --end) {
      std::int64_t same = 0;
      while (same <= end && same < Lookup::kMostSame &&
             ids[static_cast<std::size_t>(end - same)] == ids[ids.size() - 1 - static_cast<std::size_t>(same)])
        ++same;
      if (same > longest) longest = same, best = end;
    }
    const std::span<const std::int32_t> got = growing.find(ids, 1);
    ASSERT_EQ(Ids(got.begin(), got.end()), found(ids, 1)) << i;
    ASSERT_EQ(got.empty(), best < 0) << i;
    if (best >= 0) {
      ++hits;
      ASSERT_EQ(got[0], ids[static_cast<std::size_t>(best + 1)]) << i;
    }
  }
  EXPECT_GT(hits, 300);
}

TEST(DraftLength, ExpectedIds) {
  EXPECT_DOUBLE_EQ(expected_ids(0.5, 0), 1);
  EXPECT_DOUBLE_EQ(expected_ids(0.5, 3), 1.875);
  EXPECT_DOUBLE_EQ(expected_ids(1, 7), 8);
}

TEST(DraftLength, FollowsAcceptanceAndCosts) {
  const DraftCosts cheap{0.01, 0.1};
  EXPECT_EQ(best_draft_length(0, 7, 1, cheap), 0);
  EXPECT_EQ(best_draft_length(1, 7, 1, cheap), 7);
  EXPECT_EQ(best_draft_length(1, 3, 1, cheap), 3);
  EXPECT_EQ(best_draft_length(0.7, 7, 1, {0, 0}), 7);
  EXPECT_EQ(best_draft_length(0.9, 7, 1, {0, 0.9}), 0);   // a draft as dear as the model
  EXPECT_EQ(best_draft_length(0.7, 7, 64, {0.1, 0}), 0);  // many sequences: their rows are the cost
  // By hand, 0.7 and 0.11 a draft and row: (1 + 0.11 k) / E(k) is 0.653, 0.557, 0.525, 0.5194, 0.527 for k = 1 to 5.
  EXPECT_EQ(best_draft_length(0.7, 7, 1, cheap), 4);
}

TEST(DraftLength, EndsWhenNothingIsRightAndBeginsAgain) {
  const DraftCosts costs{0.01, 0.1};
  DraftLength length;
  EXPECT_GE(length.next(7, 1, costs), 3);
  for (int i = 0; i < 20; ++i) {
    const std::int64_t k = length.next(7, 1, costs);
    if (k > 0) length.verified(k, 0);
  }
  EXPECT_EQ(length.next(7, 1, costs), 0);
  // A trial of one draft token now and then, more and more rarely.
  std::vector<int> trials;
  for (int i = 0; i < 200; ++i) {
    length.generated_plainly();
    if (length.next(7, 1, costs) == 0) continue;
    EXPECT_EQ(length.next(7, 1, costs), 1);
    trials.push_back(i);
    length.verified(1, 0);
  }
  EXPECT_EQ(trials, (std::vector<int>{15, 47, 111}));
  for (int i = 0; i < 300; ++i) {
    const std::int64_t k = length.next(7, 1, costs);
    if (k > 0) length.verified(k, k);
    if (k == 0) length.generated_plainly();
  }
  EXPECT_EQ(length.next(7, 1, costs), 7);
}

// Those behind the first wrong one were never compared. About the last ten verifications count.
TEST(DraftLength, TheAcceptanceIsOfWhatWasCompared) {
  DraftLength length;
  double right = 1.4, compared = 2;
  EXPECT_DOUBLE_EQ(length.acceptance(), 0.7);
  const std::pair<std::int64_t, std::int64_t> verified[] = {{7, 1}, {7, 7}, {7, 0}, {7, 6}, {1, 0}, {1, 1}, {3, 2}};
  for (const auto& [drafted, accepted] : verified) {
    length.verified(drafted, accepted);
    right = 0.9 * right + static_cast<double>(accepted);
    compared = 0.9 * compared + static_cast<double>(std::min(drafted, accepted + 1));
    EXPECT_DOUBLE_EQ(length.acceptance(), right / compared) << accepted << " of " << drafted;
  }
  const double before = length.acceptance();
  length.generated_plainly();
  EXPECT_EQ(length.acceptance(), before);
}

// Pauses double up to 256 ids; a trial that is right makes the next one short again.
TEST(DraftLength, PausesAreOfSixteenTo256Ids) {
  const DraftCosts costs{0.01, 0.5};  // a draft token pays from an acceptance of 0.51 on
  DraftLength length;
  while (length.next(7, 1, costs) > 0) length.verified(7, 0);
  const auto pause = [&](std::int64_t most) {
    int ids = 0;
    for (; length.next(most, 1, costs) == 0 && ids < 1000; ++ids) length.generated_plainly();
    EXPECT_EQ(length.next(most, 1, costs), 1);
    return ids;
  };
  for (const int expected : {16, 32, 64, 128, 256, 256, 256}) {
    EXPECT_EQ(pause(7), expected);
    length.verified(1, 0);
  }
  EXPECT_EQ(pause(1), 256);
  EXPECT_EQ(length.next(0, 1, costs), 0) << "where there is no room for a draft";
  length.verified(1, 1);
  EXPECT_EQ(pause(7), 16);
}

// The trial after a pause is for a draft that does not pay: where one pays, its length is what pays best.
TEST(DraftLength, AfterAPauseADraftThatPaysHasItsLength) {
  const DraftCosts costs{0.01, 0.1};
  DraftLength length;
  for (int i = 0; i < 20; ++i) length.generated_plainly();
  const std::int64_t best = best_draft_length(length.acceptance(), 7, 1, costs);
  ASSERT_GT(best, 1);
  EXPECT_EQ(length.next(7, 1, costs), best);
}

TEST(RecentTimes, TheMedianWithoutTheFirst) {
  RecentTimes times;
  for (std::int64_t i = 0; i < RecentTimes::kFirst; ++i) times.add(100);
  EXPECT_EQ(times.median(), 0);
  for (const double seconds : {5, 1, 3}) times.add(seconds);
  EXPECT_EQ(times.seen(), 3);
  EXPECT_EQ(times.median(), 3);
  for (std::int64_t i = 0; i < RecentTimes::kWindow; ++i) times.add(i == 2 ? 1000 : 7);  // the others are forgotten
  EXPECT_EQ(times.median(), 7);
}

TEST(StepCosts, ALineThroughWhatWasSeen) {
  StepCosts costs;
  const auto add = [&](std::int64_t rows, double seconds, std::int64_t times = RecentTimes::kFirst + 3) {
    for (std::int64_t i = 0; i < times; ++i) costs.add(rows, i < RecentTimes::kFirst ? 50 : seconds);
  };
  EXPECT_EQ(costs.line(0.25).one_row, 0);
  EXPECT_EQ(costs.line(0.25).further_row, 0.25);
  add(5, 4);
  EXPECT_DOUBLE_EQ(costs.line(0.25).one_row, 2);  // 4 for 1 + 4 x 0.25
  EXPECT_DOUBLE_EQ(costs.line(0.25).further_row, 0.25);
  add(3, 100, RecentTimes::kFirst + 2);  // too few
  EXPECT_DOUBLE_EQ(costs.line(0.25).one_row, 2);
  add(7, 4.8);
  EXPECT_NEAR(costs.line(0.25).one_row, 2.4, 1e-12);  // 0.4 a row
  EXPECT_NEAR(costs.line(0.25).further_row, 0.4 / 2.4, 1e-12);
  StepCosts flat;
  for (const std::int64_t rows : {2, 8}) {
    for (int i = 0; i < 20; ++i) flat.add(rows, rows == 2 ? 1.1 : 1.0);
  }
  EXPECT_EQ(flat.line(0.25).further_row, 0);
  EXPECT_NEAR(flat.line(0.25).one_row, 1.05, 1e-12);
}

// ---- drafts for one sequence ------------------------------------------------------------------------------------------

// Holds ids, and samples as PagedFake does from all of them.
class FakeDrafter : public DecodeModel {
 public:
  explicit FakeDrafter(std::int64_t capacity, std::int64_t vocab_size = 64, std::int64_t wrong_of = 0)
      : capacity_(capacity), wrong_of_(wrong_of) {
    config_.vocab_size = config_.tokenizer_vocab = vocab_size;
    config_.max_positions = capacity;
  }
  const ModelConfig& config() const override { return config_; }
  std::vector<MemoryLine> memory() const override { return {}; }
  std::uint64_t bytes_per_token(std::int64_t) const override { return 1; }
  std::int64_t capacity() const override { return capacity_; }
  std::int64_t length() const override { return std::ssize(held); }
  void reset() override { held.clear(); }
  std::span<const float> prefill(std::span<const std::int32_t>) override { return {}; }
  std::span<const float> decode(std::int32_t) override { return {}; }
  std::vector<double> score(std::span<const std::int32_t>) override { return {}; }
  void keep_activations(bool) override {}
  std::vector<float> activation(const std::string&) override { return {}; }

  bool can_draft() const override { return true; }
  void start_draft(std::int64_t kept, std::span<const std::int32_t> ids, std::int64_t count,
                   const SamplingPlan& sampling, const DeviceDrafts& to) override {
    ASSERT_TRUE(kept >= 0 && kept <= length() && !ids.empty() && count >= 1);
    ASSERT_LE(kept + std::ssize(ids) + count - 1, capacity_);
    held.resize(static_cast<std::size_t>(kept));
    held.insert(held.end(), ids.begin(), ids.end());
    fed += std::ssize(ids) + count - 1;
    drafts_.clear();
    for (std::int64_t i = 0; i < count; ++i) {
      if (i > 0) held.push_back(*drafts_.back());
      const bool poisoned = std::ranges::find(held, PagedFake::kPoison) != held.end();
      std::int32_t id =
          PagedFake::sampled_from(PagedFake::state_of(held), sampling.seed, length(), sampling.vocab_limit);
      if (wrong_of_ > 0 && (length() * 7) % wrong_of_ == 0) id = id == 5 ? 6 : 5;
      drafts_.push_back(poisoned ? std::nullopt : std::optional(id));
      if (to.ids != nullptr && !poisoned) to.ids[i] = id;
      if (poisoned) break;
    }
  }
  std::optional<std::int32_t> drafted(std::int64_t i) override { return drafts_.at(static_cast<std::size_t>(i)); }

  Ids held;
  std::int64_t fed = 0;

 private:
  ModelConfig config_;
  std::int64_t capacity_, wrong_of_;
  std::vector<std::optional<std::int32_t>> drafts_;
};

Ids drafts_for(DraftSequence& drafts, const Ids& ids, std::int64_t count, std::uint64_t seed = 3) {
  SamplingPlan plan;
  plan.seed = seed;
  const std::int64_t started = drafts.start(ids, plan, count);
  const std::span<const std::int32_t> result = drafts.finish();
  EXPECT_LE(std::ssize(result), started);
  return {result.begin(), result.end()};
}

// However many of k draft tokens are right, the next ones are those of a model that computes the sequence anew; and nothing is
// computed that was there.
TEST(DraftSequence, KeepsWhatWasRightOfEveryDraft) {
  for (std::int64_t k = 1; k <= kMostDrafted; ++k) {
    for (std::int64_t right = 0; right <= k; ++right) {
      SCOPED_TRACE(std::to_string(right) + " of " + std::to_string(k));
      FakeDrafter model(200);
      DraftSequence drafts(model, 64);
      Ids ids = {4, 9, 2};
      const Ids first = drafts_for(drafts, ids, k);
      EXPECT_EQ(first, PagedFake::ids_after(ids, k, 3, 64));
      ids.insert(ids.end(), first.begin(), first.begin() + right);
      ids.push_back(right < k ? (first[static_cast<std::size_t>(right)] == 8 ? 9 : 8) : 30);
      const std::int64_t before = model.fed;
      EXPECT_EQ(drafts_for(drafts, ids, 4), PagedFake::ids_after(ids, 4, 3, 64));
      EXPECT_EQ(model.fed - before, (right == k ? 2 : 1) + 3);
    }
  }
}

TEST(DraftSequence, OtherTextsAndTheSameAgain) {
  FakeDrafter model(200);
  DraftSequence drafts(model, 64);
  for (const Ids& ids : {Ids{4, 9, 2}, Ids{4, 9, 2}, Ids{4}, Ids{7, 7, 7, 7}, Ids{4, 9, 2, 11, 12, 13}, Ids{4, 9}}) {
    EXPECT_EQ(drafts_for(drafts, ids, 3), PagedFake::ids_after(ids, 3, 3, 64));
  }
}

TEST(DraftSequence, EndsWhereTheModelDoes) {
  FakeDrafter model(10, 20);
  DraftSequence drafts(model, 64);
  EXPECT_EQ(drafts_for(drafts, {4, 9, 2, 1 + 1, 5, 6, 7}, 7).size(), 4u);  // the last draft token needs no position
  EXPECT_EQ(drafts_for(drafts, Ids(10, 3), 7).size(), 1u);
  EXPECT_EQ(drafts_for(drafts, Ids(11, 3), 7), Ids{});
  EXPECT_EQ(drafts_for(drafts, {4, 20}, 2), Ids{}) << "an id that it does not know";
  EXPECT_EQ(drafts_for(drafts, {4, PagedFake::kPoison}, 2), Ids{});
  EXPECT_EQ(drafts_for(drafts, {4, 5}, 2), PagedFake::ids_after({4, 5}, 2, 3, 20)) << "and goes on";
}

// ---- a sequence with an engine of its own ---------------------------------------------------------------------------

constexpr std::int64_t kCapacity = 80;

PagedFakeSizes sizes_of_one(std::int64_t depth) {
  return {.page_size = 4, .num_pages = 20, .slots = 1, .max_rows = 12, .max_positions = kCapacity, .depth = depth};
}

// `paged`: the form of the draft model; if it is not, `on_device`: draft tokens go to the model's place for them.
std::unique_ptr<DecodeModel> fake_sequence(std::int64_t depth, std::int64_t wrong_of, bool paged = true,
                                           bool on_device = false) {
  PagedFakeSizes of_draft = sizes_of_one(depth);
  of_draft.wrong_of = wrong_of;
  if (!paged) {
    PagedFakeSizes of_model = sizes_of_one(depth);
    of_model.device_drafts = on_device;
    return engine_sequence(std::make_unique<PagedFake>(of_model), kCapacity,
                           {nullptr, std::make_unique<FakeDrafter>(kCapacity - 9, 64, wrong_of)},
                           {.row_cost = 1e-3, .draft_cost = 0.05});
  }
  return engine_sequence(std::make_unique<PagedFake>(sizes_of_one(depth)), kCapacity,
                         {std::make_unique<PagedFake>(of_draft), nullptr}, {.row_cost = 1e-3, .draft_cost = 0.05});
}

// At whichever id they come, and however many ids came before.
TEST(EngineSequence, LogitsThatAreNotFiniteAreAnError) {
  GenerationRequest request;
  request.sampling.seed = 3;
  request.max_ids = 8;
  for (const int token : {1, 2, 3, 8}) {
    const auto model = engine_sequence(with_faults(std::make_unique<PagedFake>(sizes_of_one(1)),
                                                   parse_decode_faults({"nan@token=" + std::to_string(token)})),
                                       kCapacity, {}, {.lookup = 2});
    EXPECT_NE(error_of(Exit::numeric, [&] { generated(*model, Ids{7, 4, 9}, request); }), "") << "token " << token;
  }
}

// Several turns of one text, as --interactive has them, to the last position; ended by number, stop id and listener.
TEST(EngineSequence, TurnsGiveTheIdsOfPlainDecoding) {
  for (const std::int64_t form : {0, 1, 2, 3, 4, 5}) {
    const std::int64_t depth = 1 + form % 2;
    const auto drafted = fake_sequence(depth, 3, form<2, form> 3);
    const auto plain = single_sequence(std::make_unique<PagedFake>(sizes_of_one(depth)), kCapacity);
    GenerationRequest request;
    request.sampling.seed = 3;
    std::int64_t accepted = 0;
    for (const std::size_t listen : {std::size_t{1000}, std::size_t{5}}) {
      drafted->reset();
      plain->reset();
      Ids prompt = {7, 4, 9};
      for (int turn = 0; plain->length() + std::ssize(prompt) < kCapacity; ++turn) {
        request.max_ids = std::min<std::int64_t>(14, kCapacity - plain->length() - std::ssize(prompt));
        const Ids expected = generated(*plain, prompt, request, listen);
        EXPECT_EQ(generated(*drafted, prompt, request, listen), expected) << "turn " << turn;
        prompt = {expected.back(), 5, static_cast<std::int32_t>(8 + turn)};
        request.stop_ids = {expected[expected.size() / 2]};  // it may come again
        accepted += drafted->draft_counts()->accepted;
      }
      const DraftCounts counts = *drafted->draft_counts();
      EXPECT_GT(counts.chunks, 0);
      EXPECT_LE(counts.accepted, counts.drafted);
      // The counts are of the last turn alone: one id has no draft tokens.
      drafted->reset();
      request.max_ids = 1;
      generated(*drafted, {7, 4, 9}, request, 1);
      const DraftCounts one = *drafted->draft_counts();
      EXPECT_EQ(one.chunks, 1);
      EXPECT_EQ(one.ids, 1);
      EXPECT_EQ(one.verifications + one.drafted + one.accepted, 0);
    }
    EXPECT_GT(accepted, 10);
  }
}

// Rules are told what is drafted, so the device does not draw drafts for them on its own.
TEST(EngineSequence, RulesGiveTheIdsOfPlainDecoding) {
  std::mt19937 random(1);
  std::int64_t verifications = 0;
  for (const std::int64_t form : {0, 1, 2, 3, 4, 5}) {
    const std::int64_t depth = 1 + form % 2;
    const auto drafted = fake_sequence(depth, 3, form<2, form> 3);
    const auto plain = single_sequence(std::make_unique<PagedFake>(sizes_of_one(depth)), kCapacity);
    GenerationRequest request;
    request.sampling.seed = 3;
    Ids prompt = {7, 4, 9};
    for (int turn = 0; plain->length() + std::ssize(prompt) < kCapacity - 14; ++turn) {
      request.max_ids = 14;
      request.rules = random_rules(random, 64);
      const Ids expected = generated(*plain, prompt, request);
      EXPECT_EQ(generated(*drafted, prompt, request), expected) << "turn " << turn;
      verifications += drafted->draft_counts()->verifications;
      request.earlier.insert(request.earlier.end(), prompt.begin(), prompt.end());
      request.earlier.insert(request.earlier.end(), expected.begin(), expected.end() - 1);
      prompt = {expected.back(), 5, static_cast<std::int32_t>(8 + turn)};
    }
  }
  EXPECT_GT(verifications, 20);
}

// Every count of a text, from the ids that the draft model gets wrong: how many draft tokens are made is DraftLength's to say,
// and those before the first wrong one count. A wrong draft token that stayed in the draft model's pages would make all later
// ones wrong.
TEST(EngineSequence, DraftsAreThoseThatDraftLengthAsksFor) {
  constexpr std::int64_t kIds = 76;
  const DraftCosts costs{1e-3, 0.05};
  const Ids prompt = {7, 4, 9};
  for (const std::int64_t wrong_of : {0, 1, 2, 3, 5, 11}) {
    SCOPED_TRACE(wrong_of);
    PagedFakeSizes sizes = sizes_of_one(1), of_draft = sizes;
    sizes.max_rows = of_draft.max_rows = 64;
    of_draft.wrong_of = wrong_of;
    const auto model =
        engine_sequence(std::make_unique<PagedFake>(sizes), kCapacity, {std::make_unique<PagedFake>(of_draft), nullptr},
                        {.row_cost = costs.row, .draft_cost = costs.draft});
    GenerationRequest request;
    request.max_ids = kIds;
    const Ids ids = generated(*model, prompt, request);
    ASSERT_EQ(ids, PagedFake::ids_after(prompt, kIds, 0, 64));

    Ids all = prompt;
    all.insert(all.end(), ids.begin(), ids.end());
    const auto is_wrong = [&](std::int64_t number) {  // the draft token of id `number`
      const auto before = static_cast<std::size_t>(std::ssize(prompt) + number);
      return wrong_of > 0 &&
             PagedFake::state_of(std::span(all).first(before)) % static_cast<std::uint64_t>(wrong_of) == 0;
    };
    DraftLength length;
    DraftCounts expected;
    for (std::int64_t done = 0; done < kIds; ++expected.chunks) {
      const std::int64_t wanted = length.next(kMostDrafted, 1, costs), drafted = std::min(wanted, kIds - done - 1);
      std::int64_t right = 0;
      if (done > 0 && drafted > 0) {  // the first id is that of the prompt's step
        while (right < drafted && !is_wrong(done + right)) ++right;
        length.verified(drafted, right);
        ++expected.verifications;
        expected.drafted += drafted;
        expected.accepted += right;
      } else if (wanted == 0) {
        length.generated_plainly();
      }
      done += right + 1;
    }
    const DraftCounts counts = *model->draft_counts();
    EXPECT_EQ(counts.chunks, expected.chunks);
    EXPECT_EQ(counts.ids, kIds);
    EXPECT_EQ(counts.verifications, expected.verifications);
    EXPECT_EQ(counts.drafted, expected.drafted);
    EXPECT_EQ(counts.accepted, expected.accepted);
    EXPECT_GT(expected.verifications, 4);
  }
}

// Without a cost that is given, costs are measured: a draft model that takes ten times as long as the model is given up, one that
// takes a tenth drafts to the end.
TEST(EngineSequence, WhatDraftsCostIsMeasured) {
  class Slow : public PagedFake {
   public:
    Slow(const PagedFakeSizes& sizes, int ms) : PagedFake(sizes), ms_(ms) {}
    std::span<const ChunkResult> collect() override {
      std::this_thread::sleep_for(std::chrono::milliseconds(ms_));
      return PagedFake::collect();
    }

   private:
    int ms_;
  };
  const auto drafted = [](int of_model, int of_draft) {
    const auto model =
        engine_sequence(std::make_unique<Slow>(sizes_of_one(1), of_model), kCapacity,
                        {std::make_unique<Slow>(sizes_of_one(1), of_draft), nullptr}, {.row_cost = 1e-3});
    GenerationRequest request;
    request.max_ids = 70;
    generated(*model, {7, 4, 9}, request);
    return model->draft_counts()->drafted;
  };
  EXPECT_LT(drafted(2, 20), 45);  // those of the first rounds, and a few that try again
  EXPECT_GT(drafted(20, 2), 55);
}

// The draft model's lines come behind the model's own and say whose they are, in either form of it.
TEST(EngineSequence, ItsMemoryNamesTheDrafts) {
  struct Paged : PagedFake {
    Paged(const PagedFakeSizes& sizes, std::uint64_t bytes_of_it) : PagedFake(sizes), bytes(bytes_of_it) {}
    std::vector<MemoryLine> memory() const override { return {{"weights", bytes}, {"cache", bytes + 1}}; }
    std::uint64_t bytes;
  };
  struct Drafter : FakeDrafter {
    using FakeDrafter::FakeDrafter;
    std::vector<MemoryLine> memory() const override { return {{"weights", 50}, {"cache", 51}}; }
  };
  for (const int form : {0, 1, 2}) {
    SequenceDraft draft;
    if (form == 1) draft.paged = std::make_unique<Paged>(sizes_of_one(1), 50);
    if (form == 2) draft.sequence = std::make_unique<Drafter>(kCapacity);
    const auto model = engine_sequence(std::make_unique<Paged>(sizes_of_one(1), 10), kCapacity, std::move(draft), {});
    std::string lines;
    for (const MemoryLine& line : model->memory())
      lines += format("%s %d, ", line.name.c_str(), static_cast<int>(line.bytes));
    EXPECT_EQ(lines,
              form == 0 ? "weights 10, cache 11, " : "weights 10, cache 11, draft: weights 50, draft: cache 51, ");
  }
}

TEST(EngineSequence, AScoreCanBeInterrupted) {
  const auto model = fake_sequence(1, 3);
  model->interrupt_score([] { return true; });
  EXPECT_TRUE(model->score(Ids{7, 4, 9}).empty());
  model->interrupt_score({});
  EXPECT_EQ(model->score(Ids{7, 4, 9}).size(), 2u);
}

// What on_id throws comes out, and the sequence can go on.
TEST(EngineSequence, AnExceptionOfTheListener) {
  const auto model = fake_sequence(2, 3);
  GenerationRequest request;
  request.max_ids = 20;
  int ids = 0;
  EXPECT_THROW(model->generate_ids(Ids{4, 5}, request,
                                   [&](std::int32_t) {
                                     if (++ids == 6) fail(Exit::resources, "full");
                                     return true;
                                   }),
               Error);
  EXPECT_EQ(model->length(), 2 + 5);
  model->reset();
  EXPECT_EQ(generated(*model, {4, 5}, request), PagedFake::ids_after({4, 5}, 20, 0, 64));
}

TEST(EngineSequence, DamagedLogitsAreAnError) {
  const auto model = fake_sequence(1, 3);
  GenerationRequest request;
  request.max_ids = 20;
  EXPECT_THROW(model->generate_ids(Ids{4, PagedFake::kPoison}, request, [](std::int32_t) { return true; }), Error);
}

// Logits, scores and generation take turns in one sequence.
TEST(EngineSequence, WhatTheHostSamplesIsTheSame) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin");
  const auto model = engine_sequence(cpu::load_inference(file, one_sequence(40)), 40, {}, {.lookup = 3});
  const auto plain = cpu::load_decoder(file, 40);
  GenerationRequest request;
  request.sampling = sampling_plan({});
  request.max_ids = 6;
  const auto both = [&](const auto& work) { return std::pair(work(*model), work(*plain)); };
  const auto logits_after = [](const Ids& ids) {
    return [ids](DecodeModel& m) {
      const std::span<const float> logits = m.prefill(ids);
      return std::vector<float>(logits.begin(), logits.end());
    };
  };
  const auto [a, b] = both(logits_after({3, 1, 4}));
  EXPECT_EQ(a, b);
  const Ids expected = [&] {
    Ids ids;
    Sampler sampler{SamplingPlan{}};
    std::span<const float> logits = plain->prefill(Ids{1, 5});
    while (ids.size() < 6) {
      ids.push_back(sampler.sample(logits, plain->length()));
      if (ids.size() < 6) logits = plain->decode(ids.back());
    }
    return ids;
  }();
  EXPECT_EQ(generated(*model, {1, 5}, request), expected);
  const auto [c, d] = both(logits_after({expected.back(), 2}));
  EXPECT_EQ(c, d);
  EXPECT_EQ(model->length(), plain->length());
  const auto [e, f] = both([](DecodeModel& m) { return m.score(Ids{3, 1, 4, 1, 5}); });
  EXPECT_EQ(e, f);
  EXPECT_EQ(model->length(), plain->length());
}

// ---- which model may draft for which -----------------------------------------------------------------------------------

// A tokenizer of the tokens a, b, c, ...: the first of them is `first`.
std::string letters(int count, char first) {
  Json vocab = Json::object();
  vocab[std::string(1, first)] = 0;
  for (int id = 1; id < count; ++id) vocab[std::string(1, static_cast<char>('a' + id))] = id;
  return Json{{"version", "1.0"},
              {"added_tokens", Json::array()},
              {"decoder", {{"type", "Fuse"}}},
              {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}}
      .dump();
}

// Tokenizers by what they hold: none, the same text, the same tokens in another text, other tokens, fewer.
TEST(CheckSameTokens, EveryPairOfTokenizers) {
  const TemporaryDirectory directory;
  auto model_with = [&, number = 0](const std::string& tokenizer, int vocabulary) mutable {
    const TensorFile source = TensorFile::open("test/fixtures/golden/neox-hs32-padded.model.bin", FileKind::model);
    Json config = source.config();
    config["model"]["tokenizer_vocab"] = vocabulary;
    const std::string path = directory.file(std::to_string(number++));
    TensorFileWriter writer(path, FileKind::model, config);
    const auto for_tensors = [&](const auto& work) {
      for (const TensorInfo& tensor : source.tensors()) {
        if (tensor.name != kTokenizerTensor) work(tensor);
      }
    };
    for_tensors([&](const TensorInfo& tensor) { writer.declare(tensor.name, tensor.dtype, tensor.shape); });
    if (!tokenizer.empty()) writer.declare(kTokenizerTensor, DType::u8, {std::ssize(tokenizer)});
    for_tensors(
        [&](const TensorInfo& tensor) { writer.write(source.bytes(tensor).data(), source.bytes(tensor).size()); });
    writer.write(tokenizer.data(), tokenizer.size());
    writer.publish();
    return ModelFile::open(path);
  };
  const auto reason = [](const ModelFile& model, const ModelFile& draft) -> std::string {
    std::optional<Tokenizer> tokenizer;
    if (model.has_tokenizer()) tokenizer = Tokenizer::from_json(model.tokenizer_json(), "test");
    const std::string text =
        reason_of(Exit::usage, [&] { check_same_tokens(model, tokenizer ? &*tokenizer : nullptr, draft, "draft"); });
    const std::string before = "--draft: " + escaped(draft.file().path()) + ": ",
                      behind = ". It needs the tokenizer of " + escaped(model.file().path());
    if (text == "accepted") return "";
    EXPECT_TRUE(text.starts_with(before) && text.ends_with(behind)) << text;
    return text.substr(before.size(), text.size() - before.size() - behind.size());
  };
  const ModelFile none = model_with("", 20), none_of_fewer = model_with("", 19), own = model_with(letters(8, 'a'), 8),
                  again = model_with(letters(8, 'a') + " ", 8), others = model_with(letters(8, 'z'), 8),
                  fewer = model_with(letters(7, 'a'), 7), other_configuration = model_with(letters(8, 'a'), 20);
  EXPECT_EQ(reason(none, none), "");
  EXPECT_EQ(reason(none, none_of_fewer), "it was made for 19 tokens, not 20");
  EXPECT_EQ(reason(none_of_fewer, none), "it was made for 20 tokens, not 19");
  EXPECT_EQ(reason(none, own), "it has a tokenizer, and the model has none to compare it with");
  EXPECT_EQ(reason(own, none), "it has no tokenizer");
  EXPECT_EQ(reason(own, own), "");
  EXPECT_EQ(reason(own, again), "") << "the same tokens";
  EXPECT_EQ(reason(own, other_configuration), "");
  EXPECT_EQ(reason(own, others), "its token 0 is 'z', not 'a'");
  std::string last = letters(8, 'a');
  last.replace(last.find("\"h\""), 3, "\"y\"");
  EXPECT_EQ(reason(own, model_with(last, 8)), "its token 7 is 'y', not 'h'");
  EXPECT_EQ(reason(own, fewer), "its tokenizer has 7 tokens, not 8");
  EXPECT_EQ(reason(fewer, own), "its tokenizer has 8 tokens, not 7");
}

// Whatever it guessed before, and wherever that was wrong: what it drafts is what it would draft after these ids alone.
TEST(DraftModel, OnlyDraftTokensThatWereRightAreKept) {
  PagedFake model({});
  DraftModel drafts(model, 64);
  DraftModel::State state(drafts.pool());
  SamplingPlan plan;
  plan.seed = 5;
  Ids ids = {3, 9, 4};
  for (std::size_t round = 0; round < 40; ++round) {
    const std::int64_t count = 1 + static_cast<std::int64_t>(round) % 4;
    Ids got;
    DraftModel::Job job{&state, ids, &plan, count, &got};
    drafts.draft({&job, 1});
    ASSERT_EQ(got, PagedFake::ids_after(ids, count, 5, 64)) << round;
    const std::size_t right = round / 4 % (got.size() + 1);
    ids.insert(ids.end(), got.begin(), got.begin() + static_cast<std::ptrdiff_t>(right));
    ids.push_back(right < got.size() && got[right] == 7 ? 8 : 7);
    for (std::size_t i = 0; i < round % 3; ++i) ids.push_back(9);  // generated without drafts
    if (round == 25) drafts.release(state);                        // and begins anew
  }
  drafts.release(state);
  EXPECT_EQ(drafts.inconsistency(), "");
  EXPECT_EQ(drafts.pages_in_use(), 0);
}

// A draft model has the positions, slots and rows of the model that it drafts for, and no page less.
TEST(DraftModelPool, HasThePositionsOfTheModel) {
  const ModelFile file = ModelFile::open("test/fixtures/golden/neox-hs32-padded.model.bin");
  InferSettings settings;
  settings.device = "cpu";
  const DecodeDevice device(settings);
  const InferenceOptions options{.num_pages = 7, .page_size = 5, .slots = 3, .max_rows = 11, .max_positions = 20};
  const auto model = cpu::load_inference(file, options);
  const std::unique_ptr<InferenceModel> draft = device.load_draft(file, *model);
  EXPECT_EQ(draft->max_positions(), 20);
  EXPECT_EQ(draft->slots(), 3);
  EXPECT_EQ(draft->max_rows(), 11);
  EXPECT_GE(draft->num_pages() * draft->page_size(), 35);
  // One that was made for fewer positions has its own.
  for (const std::int64_t more : {-1, 0, 1, 500}) {
    const PagedFake long_model({.max_positions = file.config().max_positions + more});
    EXPECT_EQ(device.load_draft(file, long_model)->max_positions(),
              file.config().max_positions + std::min<std::int64_t>(more, 0));
  }
}

// ---- the CPU's models -----------------------------------------------------------------------------------------------

const char* const kModels[] = {"neox-hs32-padded", "llama-hs32-gqa2"};

std::string model_path(const std::string& name) {
  return "test/fixtures/golden/" + name + ".model.bin";
}

InferenceOptions pool(std::int64_t pages) {
  return {.num_pages = pages, .page_size = 4, .slots = test::kSlots, .max_rows = 64, .max_positions = 48};
}

TEST(CpuSpeculation, AVerificationSamplesWhatSingleRowsSample) {
  for (const char* name : kModels) {
    SCOPED_TRACE(name);
    const auto model = cpu::load_inference(ModelFile::open(model_path(name)), pool(24));
    test::expect_drafts_verified(*model);
  }
}

TEST(CpuInference, RulesAreObeyedWhateverIsKnown) {
  for (const char* name : kModels) {
    SCOPED_TRACE(name);
    const auto model = cpu::load_inference(ModelFile::open(model_path(name)), pool(24));
    test::expect_rules_obeyed(*model);
  }
}

// Lookups, the model as its own draft model, and one of other weights, through the engine.
TEST(CpuSpeculation, DraftsChangeNoBitOfAnyRequest) {
  for (const char* name : kModels) {
    SCOPED_TRACE(name);
    const ModelFile file = ModelFile::open(model_path(name));
    const auto model = cpu::load_inference(file, pool(20)), draft = cpu::load_inference(file, pool(20));
    for (const bool lookup : {true, false}) {
      DraftOptions drafts{
          .lookup = lookup ? 5 : 0, .model = lookup ? nullptr : draft.get(), .row_cost = 1e-3, .draft_cost = 0.05};
      const EngineStatistics sum = test::expect_engine_changes_nothing(*model, 3, 14, 1, drafts);
      EXPECT_GT(sum.drafts.verifications, lookup ? 20 : 80);
      EXPECT_GT(sum.drafts.accepted, lookup ? 5 : 200);
    }
  }
}

}  // namespace
}  // namespace weft
