// The ends of an inference step on the GPU, by themselves: rows of the embedding, the rows whose logits are wanted, and
// log-probabilities with the most likely ids, against plain loops on the host.
#include "llmc/cuda/op/elementwise/step_rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "llmc/cuda/op/sample/score_rows.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;
using Ids = std::vector<std::int32_t>;

template <typename S>
void check_embedding(std::int64_t C, float scale) {
  SCOPED_TRACE(type_name<S>() + " " + std::to_string(C) + " columns, scale " + std::to_string(scale));
  constexpr std::int64_t kVocab = 50;
  const Ids ids = {3, -1, 49, -3, -2, 0, 3}, last_ids = {11, 22, 33};
  const Floats weight = random_stored<S>(kVocab * C, 1);
  const DeviceBuffer<S> gpu_weight = on_device<S>(weight);
  const DeviceBuffer<std::int32_t> gpu_ids(ids), gpu_last_ids(last_ids);
  const auto rows = static_cast<std::int64_t>(ids.size());
  const DeviceBuffer<float> out(static_cast<std::size_t>(rows * C + 8));
  embed_rows(out.data(), gpu_ids.data(), gpu_last_ids.data(), gpu_weight.data(), scale, rows, C, nullptr);
  const Floats got = on_host(out);
  for (std::size_t r = 0; r < ids.size(); ++r) {
    const std::int32_t id = ids[r] >= 0 ? ids[r] : last_ids[static_cast<std::size_t>(-1 - ids[r])];
    const auto row = got.begin() + static_cast<std::ptrdiff_t>(r) * C;
    EXPECT_TRUE(std::equal(row, row + C, weight.begin() + id * C, [&](float a, float b) { return a == scale * b; }))
        << "row " << r;
  }
  EXPECT_TRUE(std::isnan(got[static_cast<std::size_t>(rows * C)])) << "written behind the end";
}

TEST(StepRows, EmbeddingsAreThoseOfTheIds) {
  for (const std::int64_t C : {8, 72, 1024, 1032, 2312}) {  // a block copies 1024 columns at a time
    for (const float scale : {1.0f, 33.9375f}) {
      check_embedding<float>(C, scale);
      check_embedding<bf16>(C, scale);
      check_embedding<fp16>(C, scale);
    }
  }
}

TEST(StepRows, WantedRowsAreGathered) {
  constexpr std::int64_t kRows = 300;
  const Ids wanted = {299, 0, 17, 17, 150};
  for (const std::int64_t C : {4, 72, 512, 516, 1284}) {  // 512 columns at a time
    SCOPED_TRACE(C);
    const Floats in = random_floats(kRows * C, 2);
    const DeviceBuffer<float> gpu_in(in), out(wanted.size() * static_cast<std::size_t>(C) + 4);
    const DeviceBuffer<std::int32_t> rows(wanted);
    gather_rows(out.data(), gpu_in.data(), rows.data(), static_cast<std::int64_t>(wanted.size()), C, false, nullptr);
    const Floats got = on_host(out);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const auto row = got.begin() + static_cast<std::ptrdiff_t>(i) * C;
      EXPECT_TRUE(std::equal(row, row + C, in.begin() + wanted[i] * C)) << "row " << i;
    }
    EXPECT_TRUE(std::isnan(got[wanted.size() * static_cast<std::size_t>(C)])) << "written behind the end";
  }
}

// ---- scores -----------------------------------------------------------------------------------------------------------
// What a row asks for.
struct Asked {
  std::int32_t slot, target, alternatives, id;
  SampleError error = SampleError::none;
};

// The most likely ids lie where one thread has several of them, beyond each other's loads and searches, and some are equal.
void check_scores(std::int64_t V) {
  SCOPED_TRACE(std::to_string(V) + " logits");
  const auto last = static_cast<std::int32_t>(V - 1);
  const std::vector<Asked> asked = {{2, -1, 20, last}, {kNotSampled, last, 20, 0},
                                    {0, 7, 0, 1},      {kSampledForHost, -1, 5, 3},
                                    {1, 0, -1, 2},     {3, -1, 3, 0, SampleError::infinite}};
  const auto rows = static_cast<std::int64_t>(asked.size());
  const std::int64_t tokenizer_vocab = V - 3;
  Floats logits = random_floats(rows * V, static_cast<unsigned>(V), 3.0f);
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(r * V);
    for (std::int64_t i = 0; 5 + r + 1024 * i < V; ++i) row[5 + r + 1024 * i] = 20.0f + static_cast<float>(i % 7);
    std::fill(row + tokenizer_vocab, row + V, 27.0f);  // padding: counts in the sum, is never an alternative
  }
  Ids slots, targets, alternatives, ids;
  std::vector<SampleError> errors;
  for (const Asked& one : asked) {
    slots.push_back(one.slot);
    targets.push_back(one.target);
    alternatives.push_back(one.alternatives);
    ids.push_back(one.id);
    errors.push_back(one.error);
  }
  const DeviceBuffer<float> gpu_logits(logits);
  const DeviceBuffer<std::int32_t> gpu_slots(slots), gpu_targets(targets), gpu_alternatives(alternatives), gpu_ids(ids),
      last_ids(Ids(4, -7));
  const DeviceBuffer<SampleError> gpu_errors(errors);
  const DeviceBuffer<RowScore> scores(asked.size());
  const DeviceBuffer<IdLogprob> most_likely(asked.size() * static_cast<std::size_t>(kMaxAlternatives));
  ScoreRows io;
  io.logits = gpu_logits.data();
  io.rows = rows, io.V = V, io.tokenizer_vocab = tokenizer_vocab;
  io.slots = gpu_slots.data(), io.targets = gpu_targets.data(), io.alternatives = gpu_alternatives.data();
  io.ids = gpu_ids.data(), io.errors = gpu_errors.data(), io.last_ids = last_ids.data();
  io.scores = scores.data(), io.most_likely = most_likely.data();
  score_rows(io, false, nullptr);

  EXPECT_EQ(last_ids.download(), (Ids{1, 2, last, 0}));
  EXPECT_EQ(gpu_errors.download(), std::vector<SampleError>(asked.size(), SampleError::none));
  const std::vector<RowScore> got = scores.download();
  const std::vector<IdLogprob> found = most_likely.download();
  for (std::size_t r = 0; r < asked.size(); ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    const Asked& one = asked[r];
    const float* row = logits.data() + r * static_cast<std::size_t>(V);
    double sum = 0;
    for (std::int64_t v = 0; v < V; ++v) sum += std::exp(static_cast<double>(row[v]) - 27.0);
    const auto logprob = [&](std::int32_t id) { return row[id] - 27.0 - std::log(sum); };
    const auto expect_logprob = [&](float value, std::int32_t id) {
      EXPECT_NEAR(value, logprob(id), 1e-5 * std::abs(logprob(id)) + 1e-5) << "id " << id;
    };
    const bool sampled = one.slot != kNotSampled;
    EXPECT_EQ(got[r].id, sampled ? one.id : 0);
    EXPECT_EQ(got[r].error, one.error);
    const bool scored = sampled && one.error == SampleError::none && one.alternatives >= 0;
    if (scored) expect_logprob(got[r].sampled, one.id);
    if (one.target >= 0) expect_logprob(got[r].target, one.target);
    if (!scored && one.target < 0) continue;
    Ids order(static_cast<std::size_t>(tokenizer_vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return row[a] > row[b]; });
    const auto count = static_cast<std::size_t>(std::clamp<std::int64_t>(one.alternatives, 0, tokenizer_vocab));
    for (std::size_t i = 0; i < count; ++i) {
      const IdLogprob& other = found[r * static_cast<std::size_t>(kMaxAlternatives) + i];
      ASSERT_EQ(other.id, order[i]) << "alternative " << i;
      expect_logprob(other.logprob, order[i]);
    }
  }
}

TEST(StepRows, ScoresAreThoseOfTheHost) {
  // A thread has one id or several, of one load, two or more; a warp searches an owner's ids once, twice or more often.
  for (const std::int64_t V : {15, 1000, 1024, 1027, 8195, 20'003, 32'771, 50'257, 128'256}) check_scores(V);
}

}  // namespace
}  // namespace weft::cuda
