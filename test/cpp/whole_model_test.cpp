// The checks of whole_model_checks.h on the CPU.
#include "test/cpp/whole_model_checks.h"

#include <set>

#include "llmc/cpu/llama.h"
#include "llmc/model/llama_layout.h"

namespace weft {
namespace {

std::unique_ptr<TrainModel> make_cpu(const ModelConfig& config, const TrainOptions& options) {
  return cpu::make_llama(config, options);
}

TEST(WholeModel, EachBranchOfEachMicroStepHasItsOwnMask) {
  test::expect_masks_of_their_own(make_cpu);
}

TEST(WholeModel, ValidationHasNoDropout) {
  test::expect_no_dropout_in_evaluate(make_cpu, 0);
}

TEST(WholeModel, GradientsWithDropout) {
  for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
    for (const NormKind norm : {NormKind::rmsnorm, NormKind::layernorm}) {
      test::expect_gradients_with_dropout(make_cpu, recompute, norm);
    }
  }
}

// The classifier takes 512 rows at once: 1,100 are two pieces and a rest.
TEST(WholeModel, PiecesOfAMicroBatchAddUp) {
  test::expect_pieces_add_up(make_cpu, 11, 100, test::kTolerance);
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
