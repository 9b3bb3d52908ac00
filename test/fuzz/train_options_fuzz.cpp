// The command line of train_llama, one argument a line: its table, and what it checks of the values together.
#include <cmath>
#include <memory>
#include <vector>

#include "llmc/train/options.h"
#include "test/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  using namespace weft::fuzz;
  const std::vector<std::string> words = lines(Input(data, size).take_rest());
  std::vector<const char*> arguments = {"fuzz"};
  for (const std::string& word : words) arguments.push_back(word.c_str());
  // Making the table takes most of the time of a parse. CLI11 remembers the order of all options it ever saw, so that it is
  // made anew now and then.
  static std::unique_ptr<TrainOptionParser> parser;
  static int parsed = 0;
  if (parsed++ % 1000 == 0) parser = std::make_unique<TrainOptionParser>("fuzz");
  accepts([&] {
    const auto settings = parser->parse(static_cast<int>(arguments.size()), arguments.data());
    if (!settings) return;
    FUZZ_CHECK(settings->accumulation() >= 1 && settings->model.empty() != settings->config.empty());
    settings->numeric_settings().dump();
    const double rate = settings->learning_rate().at(1);
    FUZZ_CHECK(std::isfinite(rate) && rate >= 0 && rate <= settings->lr);
  });
  return 0;
}
