// The lists of copies of the fused decode kernel, for every preset and every small shape, on GPUs of several sizes: needs no GPU.
#include <gtest/gtest.h>

#include "llmc/model/presets.h"
#include "test/cpp/quantized_models.h"
#include "test/gpu/copy_lists.h"
#include "test/gpu/neox_models.h"

namespace weft {
namespace {

std::vector<test::NamedConfig> models() {
  std::vector<test::NamedConfig> all;
  for (const std::string& name : preset_names()) all.push_back({name, preset_config(name)});
  for (const test::LlamaShape& shape : test::small_llamas()) all.push_back({shape.name, test::llama_config(shape)});
  for (const test::NeoxShape& shape : test::small_shapes()) all.push_back({shape.name, test::neox_config(shape)});
  for (const test::NamedConfig& qwen : test::small_qwens()) all.push_back(qwen);
  all.push_back({"one part", test::llama_config({"", 4, 2, 32, 2, 136, 200, false, false, 1003})});
  return all;
}

TEST(FusedCopies, CopyEveryByteOfEveryMatrixOnce) {
  int planned = 0;
  for (const test::NamedConfig& model : models()) {
    for (const int multiprocessors : {8, 78, 114, 132, 148}) {
      std::vector<const WeightFormat*> formats = {nullptr};
      formats.insert(formats.end(), std::begin(kWeightFormats), std::end(kWeightFormats));
      for (const WeightFormat* format : formats) {
        for (const bool head : {false, true}) {
          if (format == nullptr && head) continue;
          SCOPED_TRACE(model.name + ", " + (format == nullptr ? "16 bits" : format->name) + (head ? ", head" : "") +
                       ", " + std::to_string(multiprocessors) + " multiprocessors");
          const ModelConfig config = format == nullptr ? model.config : test::quantized(model.config, format, head);
          const std::string problem = cuda::copy_lists_problem(config, multiprocessors);
          if (problem.starts_with("not planned")) continue;
          EXPECT_EQ(problem, "");
          ++planned;
        }
      }
    }
  }
  EXPECT_GT(planned, 200) << "the test says nothing";
}

}  // namespace
}  // namespace weft
