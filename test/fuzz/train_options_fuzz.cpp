// The command line of train_llama, one argument a line: its table, and what it checks of the values together.
#include <cmath>

#include "llmc/base/json.h"
#include "llmc/train/options.h"
#include "test/fuzz/option_words.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  using namespace weft::fuzz;
  parse_words<TrainOptionParser>(data, size, [](const TrainSettings& s) {
    FUZZ_CHECK(s.accumulation() >= 1 && s.model.empty() != s.config.empty());
    s.numeric_settings().dump();
    const double rate = s.learning_rate().at(1);
    FUZZ_CHECK(std::isfinite(rate) && rate >= 0 && rate <= s.lr);
  });
  return 0;
}
