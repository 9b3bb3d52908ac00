// The rules of requests on the GPU: rows of logits become what the host's apply() makes of them, bit for bit, and then again
// what they were.
#include "llmc/cuda/op/sample/logit_rows.h"

#include <cmath>
#include <limits>
#include <random>

#include "llmc/base/error.h"
#include "llmc/base/logit_rules.h"
#include "test/cpp/naive_rules.h"
#include "test/cpp/test_files.h"
#include "test/gpu/decode_tools.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;
using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kRows = 7;
constexpr std::int32_t kSlots = 3;

// Logits of every kind, zeros of both signs, infinities and NaN among them.
std::vector<float> random_logits(std::mt19937& random, std::size_t count) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, std::nanf(""), 1e-40f, 3e38f, -3e38f};
  std::normal_distribution<float> normal(0, 5);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = random() % 16 == 0 ? special[random() % std::size(special)] : normal(random);
  return logits;
}

Ids random_ids(std::mt19937& random, std::size_t count, std::int32_t vocab) {
  Ids ids(count);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab));
  return ids;
}

// Penalties whose products have to be rounded, too.
LogitRuleOptions rules_of(std::mt19937& random, std::int32_t vocab) {
  LogitRuleOptions options = random_rules(random, vocab);
  std::uniform_real_distribution<float> uniform(-2, 2);
  if (random() % 2 == 0) options.penalties = {std::exp(uniform(random)), uniform(random), uniform(random)};
  return options;
}

// Several rows of one step, some without rules; what is known of the ids before each differs, as with steps that are queued and
// with drafts.
TEST(LogitRows, AreThoseOfTheHostAndThenAsBefore) {
  std::mt19937 random(1);
  for (const std::int32_t vocab : {5, 40, 2000, 50304}) {
    LogitRowUpload upload(kRows);
    for (int round = 0; round < 40; ++round) {
      SCOPED_TRACE(std::to_string(vocab) + " ids, round " + std::to_string(round));
      const Ids last_ids = random_ids(random, kSlots, vocab);
      const auto V = static_cast<std::size_t>(vocab);
      const std::vector<float> logits = random_logits(random, kRows * V);
      std::vector<float> expected = logits;
      upload.begin(kRows);
      EXPECT_EQ(upload.rows(), nullptr);
      for (std::int64_t r = 0; r < kRows; ++r) {
        if (random() % 4 == 0) continue;
        LogitRules rules(rules_of(random, vocab), random_ids(random, random() % 1500, vocab));
        const Ids generated = random_ids(random, random() % 1500, vocab),
                  drafts = random_ids(random, random() % (kMostRecentIds + 1), vocab);
        const bool unknown = random() % 2 == 0;
        const LogitRow row =
            rules.row(generated, unknown ? std::span<const std::int32_t>(&kUnknownId, 1) : std::span(drafts));
        const auto slot = static_cast<std::int32_t>(random() % kSlots);
        upload.set(r, row, slot);
        apply(row, last_ids[static_cast<std::size_t>(slot)],
              std::span(expected).subspan(static_cast<std::size_t>(r) * V, V));
      }
      if (upload.rows() == nullptr) continue;
      const DeviceBuffer<float> gpu(logits);
      const DeviceBuffer<std::int32_t> gpu_last_ids(last_ids);
      edit_logits(upload.rows(), kRows, gpu.data(), vocab, gpu_last_ids.data(), false, nullptr);
      EXPECT_TRUE(same_bits(gpu.download(), expected));
      restore_logits(upload.rows(), kRows, gpu.data(), vocab, gpu_last_ids.data(), false, nullptr);
      EXPECT_TRUE(same_bits(gpu.download(), logits));
    }
  }
}

// More than one block of page-locked memory, twice: the second step begins where the first one did.
TEST(LogitRows, AnyNumberOfEditsHasRoom) {
  constexpr std::int32_t kVocab = 200'000;
  std::mt19937 random(2);
  LogitRuleOptions options;
  options.penalties.repetition = 1.5;
  LogitRowUpload upload(2);
  const DeviceLogitRow* rows = nullptr;
  for (int step = 0; step < 2; ++step) {
    const std::vector<float> logits = random_logits(random, 2 * kVocab);
    std::vector<float> expected = logits;
    upload.begin(2);
    for (const std::int64_t r : {0, 1}) {
      LogitRules rules(options, random_ids(random, 300'000, kVocab));
      const LogitRow row = rules.row({});
      upload.set(r, row, 0);
      apply(row, 0, std::span(expected).subspan(static_cast<std::size_t>(r) * kVocab, kVocab));
    }
    EXPECT_TRUE(rows == nullptr || rows == upload.rows()) << "a captured graph has the address";
    rows = upload.rows();
    const DeviceBuffer<float> gpu(logits);
    const DeviceBuffer<std::int32_t> last_ids(Ids{0});
    edit_logits(rows, 2, gpu.data(), kVocab, last_ids.data(), false, nullptr);
    EXPECT_TRUE(same_bits(gpu.download(), expected));
    restore_logits(rows, 2, gpu.data(), kVocab, last_ids.data(), false, nullptr);
    EXPECT_TRUE(same_bits(gpu.download(), logits));
  }
  LogitRow many;
  const Ids recent(kMostRecentIds + 1, 0);
  many.recent = recent;
  EXPECT_NE(error_of(Exit::internal, [&] { upload.set(0, many, 0); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { upload.set(2, LogitRow{}, 0); }), "");
}

}  // namespace
}  // namespace weft::cuda
