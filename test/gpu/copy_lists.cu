#include "test/gpu/copy_lists.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/fused/packed_tiles.cuh"
#include "llmc/cuda/fused/plan.cuh"

namespace weft::cuda {

namespace {

using namespace fused;

constexpr int kHead = 4;  // behind LayerParts::Matrix

using Range = std::pair<std::int64_t, std::int64_t>;  // bytes: begin, end

// Ranges cover [0, bytes) once.
bool covers(std::vector<Range> ranges, std::int64_t bytes) {
  std::sort(ranges.begin(), ranges.end());
  std::int64_t end = 0;
  for (const Range& range : ranges) {
    if (range.first != end) return false;
    end = range.second;
  }
  return end == bytes;
}

// The bytes that a block's runs begin to end - 1 copy, in order; appended by matrix. Returns false if a stage does not hold them.
bool add_ranges(const CopyRun* runs, int begin, int end, bool head, int stage_bytes,
                std::map<int, std::vector<Range>>& ranges) {
  for (int i = begin; i < end; ++i) {
    const CopyRun& run = runs[i];
    const std::int64_t amount = std::int64_t{run.amount} * kCopyUnit;
    const std::int64_t filled = (run.ranges - 1) * std::int64_t{run.stage_apart} * kCopyUnit + amount;
    const bool apart = run.ranges == 1 || run.stage_apart * std::int64_t{kCopyUnit} >= amount;
    if (run.stages == 0 || amount == 0 || !apart || filled > stage_bytes) return false;
    for (std::int64_t stage = 0; stage < run.stages; ++stage) {
      for (std::int64_t n = 0; n < run.ranges; ++n) {
        const std::int64_t from = (run.from + stage * run.step + n * run.apart) * kCopyUnit;
        ranges[head ? kHead : static_cast<int>(run.matrix)].push_back({from, from + amount});
      }
    }
  }
  return true;
}

std::int64_t stream_bytes(const Plan& plan, const BlockRows& own, int block, DType type) {
  std::int64_t bytes = 0;
  const LayerParts parts = layer_parts(plan.sizes, plan.sequential ? &plan.sequential_sizes : nullptr,
                                       plan.shape.row_loads, own, block, plan.blocks);
  for (int i = 0; i < parts.count; ++i) {
    for_format(type, [&]<typename Format>() { bytes += part_bytes<Format>(StreamShape(plan.sizes), parts.part[i]); });
  }
  return bytes;
}

}  // namespace

std::string copy_lists_problem(const ModelConfig& config, int multiprocessors) {
  Device device;
  device.arch = 90;
  device.multiprocessors = multiprocessors;
  device.shared_bytes = 227 << 10;
  const Plan plan = plan_of(config, device, {});
  if (!plan.reason.empty()) return "not planned: " + plan.reason;
  const bool quantized = config.quantization.any(), quantized_head = config.quantization.head != nullptr;
  constexpr int kMostRuns = 20;  // in 16 bits: what is alike is one run
  if (!quantized && plan.sizes.most_runs > kMostRuns) return format("%d runs a block", plan.sizes.most_runs);
  std::map<int, std::vector<Range>> of_all;
  for (int b = 0; b < plan.blocks; ++b) {
    const BlockRows& own = plan.rows[static_cast<std::size_t>(b)];
    const CopyRun* runs = plan.copies.data() + own.first_run;
    if (own.runs > plan.sizes.most_runs || own.cached_at < 0 || own.cached_at > own.layer_runs) {
      return format("block %d: %d runs of at most %d, keys and values before run %d of %d", b, own.runs,
                    plan.sizes.most_runs, own.cached_at, own.layer_runs);
    }
    std::map<int, std::vector<Range>> of_block;
    if (!add_ranges(runs, 0, own.layer_runs, false, plan.sizes.stage_bytes, of_block) ||
        !add_ranges(runs, own.layer_runs, own.runs, true, plan.sizes.stage_bytes, of_block)) {
      return format("block %d: a stage does not hold what is copied to it", b);
    }
    if (quantized) {
      const std::int64_t bytes = stream_bytes(plan, own, b, config.quantization.weights->dtype);
      const std::vector<Range>& stream = of_block[LayerParts::qkv];
      if (!std::is_sorted(stream.begin(), stream.end()) || !covers(stream, bytes)) {
        return format("block %d: not its stream of %lld bytes in order", b, static_cast<long long>(bytes));
      }
    }
    for (const auto& [matrix, ranges] : of_block) {
      of_all[matrix].insert(of_all[matrix].end(), ranges.begin(), ranges.end());
    }
  }
  const auto check = [&](int matrix, const char* name, std::int64_t elements) {
    return covers(of_all[matrix], 2 * elements) ? "" : format("%s is not copied once", name);
  };
  const std::int64_t C = config.hidden_size, F = config.ffn_size;
  std::string problem;
  if (!quantized) {
    problem = check(LayerParts::qkv, "qkv", config.qkv_size() * C);
    if (problem.empty()) problem = check(LayerParts::up, "up", (config.gated() ? 2 : 1) * F * C);
    if (problem.empty()) problem = check(LayerParts::down, "down", F * C);
    if (problem.empty()) problem = check(LayerParts::dense, "output", config.q_size() * C);
  }
  if (problem.empty() && !quantized_head) problem = check(kHead, "the head", config.vocab_size * C);
  return problem;
}

}  // namespace weft::cuda
