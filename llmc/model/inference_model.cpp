#include "llmc/model/inference_model.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/base/log.h"

namespace weft {

namespace {

constexpr std::uint64_t kFewestPages = 2;
constexpr std::uint64_t kMostPages = std::uint64_t{1} << 30;  // page ids are 32-bit numbers

}  // namespace

std::uint64_t kv_bytes(const ModelConfig& config, std::int64_t positions, std::uint64_t element_bytes) {
  return 2 * static_cast<std::uint64_t>(config.num_layers * config.kv_size()) * element_bytes *
         static_cast<std::uint64_t>(positions);
}

InferenceOptions pool_options(const ModelConfig& config, std::uint64_t bytes, std::int64_t sequences,
                              std::uint64_t element_bytes) {
  InferenceOptions options;
  options.slots = sequences;
  const std::uint64_t page = kv_bytes(config, options.page_size, element_bytes);
  const std::uint64_t of_sequence =
      (static_cast<std::uint64_t>(config.max_positions) + static_cast<std::uint64_t>(options.page_size) - 1) /
      static_cast<std::uint64_t>(options.page_size);
  const std::uint64_t most = std::min(kMostPages, of_sequence * static_cast<std::uint64_t>(sequences));
  const std::uint64_t pages = std::min(bytes / page, std::max(most, kFewestPages));
  if (pages < kFewestPages) {
    fail(Exit::resources, "K/V cache: got %s, expected at least the %s of %llu pages of %lld positions",
         human_bytes(static_cast<double>(bytes)).c_str(), human_bytes(static_cast<double>(kFewestPages * page)).c_str(),
         static_cast<unsigned long long>(kFewestPages), static_cast<long long>(options.page_size));
  }
  options.num_pages = static_cast<std::int64_t>(pages);
  return options;
}

}  // namespace weft
