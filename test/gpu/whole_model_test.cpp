// The checks of test/cpp/whole_model_checks.h on the GPU, in fp32, where a derivative can be compared with a difference of
// losses; CudaLlama.* holds bf16 to fp32.
#include "test/cpp/whole_model_checks.h"

#include "llmc/cuda/training/training.h"

namespace weft {
namespace {

std::unique_ptr<TrainModel> make_gpu(const ModelConfig& config, const TrainOptions& options) {
  return cuda::make_training_model(config, options);
}
std::unique_ptr<TrainModel> make_gpu_bf16(const ModelConfig& config, TrainOptions options) {
  options.precision = Precision::bf16;
  return cuda::make_training_model(config, options);
}

TEST(CudaWholeModel, EachBranchOfEachMicroStepHasItsOwnMask) {
  test::expect_masks_of_their_own(make_gpu);
}

// Without dropout a branch joins the stream in the epilogue of its GEMM, with dropout in the norm: other roundings.
TEST(CudaWholeModel, ValidationHasNoDropout) {
  test::expect_no_dropout_in_evaluate(make_gpu, 1e-5);
  test::expect_no_dropout_in_evaluate(make_gpu_bf16, 1e-3);
  test::expect_no_dropout_in_evaluate(make_gpu, 1e-5, test::small_neox(true));
  test::expect_no_dropout_in_evaluate(make_gpu, 1e-5, test::small_gemma());
}

TEST(CudaWholeModel, GradientsWithDropout) {
  for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
    for (const NormKind norm : {NormKind::rmsnorm, NormKind::layernorm}) {
      test::expect_gradients_with_dropout(make_gpu, recompute, norm);
    }
    for (const bool parallel : {true, false}) {
      SCOPED_TRACE(parallel ? "parallel" : "sequential");
      test::expect_gradients_with_dropout(make_gpu, recompute, test::small_neox(parallel));
    }
  }
}

TEST(CudaWholeModel, GradientsWithPostNorms) {
  for (const Recompute recompute : {Recompute::none, Recompute::norm, Recompute::block}) {
    test::expect_gradients_with_dropout(make_gpu, recompute, test::small_gemma());
  }
  ModelConfig untied = test::small_gemma();
  untied.tied_embeddings = false;
  untied.norm = NormKind::layernorm;
  test::expect_gradients_with_dropout(make_gpu, Recompute::block, untied);
}

TEST(CudaWholeModel, GradientsWithWindows) {
  for (const Recompute recompute : {Recompute::none, Recompute::block}) {
    test::expect_gradients_with_dropout(make_gpu, recompute, NormKind::rmsnorm, {2, 0, 5});
  }
}

TEST(CudaWholeModel, GradientsWithDocuments) {
  for (const Recompute recompute : {Recompute::none, Recompute::block}) {
    test::expect_gradients_with_dropout(make_gpu, recompute, NormKind::rmsnorm, {}, {{7, 1, 11}, {19}});
    test::expect_gradients_with_dropout(make_gpu, recompute, NormKind::rmsnorm, {2, 0, 5}, {{7, 1, 11}, {19}});
    test::expect_gradients_with_dropout(make_gpu, recompute, test::small_gemma(), {{7, 1, 11}, {19}});
  }
}

// In bf16 an activation errs by 2^-9 of itself, in the row as well as alone.
TEST(CudaWholeModel, PackedDocumentsAreThoseAlone) {
  test::expect_packed_documents_are_those_alone(make_gpu, {}, 1e-5);
  test::expect_packed_documents_are_those_alone(make_gpu, {30, 0, 5}, 1e-5, Recompute::block);
  test::expect_packed_documents_are_those_alone(make_gpu, {}, 1e-5, Recompute::none, test::small_neox(true));
  test::expect_packed_documents_are_those_alone(make_gpu, {30, 0, 5}, 1e-5, Recompute::norm, test::small_gemma());
  test::expect_packed_documents_are_those_alone(make_gpu_bf16, {}, 5e-3);
  test::expect_packed_documents_are_those_alone(make_gpu_bf16, {30, 0, 5}, 5e-3);
}

TEST(CudaWholeModel, DocumentsDoNotTouchEachOther) {
  for (const auto& make : {test::MakeModel(make_gpu), test::MakeModel(make_gpu_bf16)}) {
    test::expect_documents_do_not_touch(make, {});
    test::expect_documents_do_not_touch(make, {0, 70, 5});
  }
}

TEST(CudaWholeModel, WeightsOfLabels) {
  test::expect_weights_of_labels(make_gpu, 1e-5);
  test::expect_weights_of_labels(make_gpu_bf16, 2e-2);
}

// The classifier takes 4,096 rows at once: 8,281 are two pieces and a rest.
TEST(CudaWholeModel, PiecesOfAMicroBatchAddUp) {
  test::expect_pieces_add_up(make_gpu, 91, 91, 1e-4);
}

}  // namespace
}  // namespace weft
