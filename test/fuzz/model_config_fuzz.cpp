// JSON and the configuration of a model: the text that stands in a tensor file.
#include "llmc/base/json.h"
#include "llmc/model/config.h"
#include "llmc/model/tensor_table.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

// Sizes that a table and the memory plan are made from; their limits keep every product far below 2^63.
void use(const ModelConfig& config) {
  FUZZ_CHECK(config_from_json(parse_json(config_to_json(config).dump(), "again"), "again") == config);
  FUZZ_CHECK(config.num_heads % config.num_kv_heads == 0 && config.rope.rotary_dim <= config.head_dim);
  FUZZ_CHECK(rope_inverse_frequencies(config.rope).size() == static_cast<std::size_t>(config.rope.rotary_dim / 2));
  ModelConfig one_layer = config;
  one_layer.num_layers = 1;
  const TensorTable table(one_layer);
  std::int64_t sum = 0;
  for (const TensorSpec& spec : table.specs()) {
    FUZZ_CHECK(spec.elements > 0 && spec.offset >= sum && spec.offset + spec.elements <= table.arena_elements());
    sum += spec.elements;
  }
  FUZZ_CHECK(sum == table.parameters());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = Input(data, size).take_rest();
  accepts([&] {
    const Json object = parse_json(text, "fuzz: model");
    use(config_from_json(object, "fuzz: model"));
  });
  return 0;
}

}  // namespace weft::fuzz
