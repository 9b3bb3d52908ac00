// The lists of CopyRun.
#include <algorithm>
#include <limits>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/fused/packed_tiles.cuh"
#include "llmc/cuda/fused/plan.cuh"

namespace weft::cuda::fused {

namespace {

using Matrix = LayerParts::Matrix;

// Appends a block's runs to the lists of a plan.
class Copies {
 public:
  explicit Copies(std::vector<CopyRun>& list) : list_(list), first_(list.size()), complete_(first_) {}

  int first() const { return static_cast<int>(first_); }
  // What follows begins a run of its own. Returns the number of the block's runs before it.
  int cut() {
    complete_ = list_.size();
    return static_cast<int>(complete_ - first_);
  }

  // `bytes` from byte `from` on, `chunk` of them a stage.
  void bytes(Matrix matrix, std::int64_t from, std::int64_t bytes, std::int64_t chunk) {
    for (std::int64_t done = 0; done < bytes; done += chunk) add(matrix, from + done, std::min(chunk, bytes - done));
  }

  // Columns begin to begin + width - 1 of 16 bits of rows of a matrix with `columns` of them, chunk_rows rows a stage.
  void part_rows(Matrix matrix, RowRange rows, std::int64_t columns, std::int64_t begin, std::int64_t width,
                 int chunk_rows) {
    if (width == columns) {
      return bytes(matrix, 2 * rows.begin * columns, 2 * (rows.end - rows.begin) * columns, 2 * chunk_rows * columns);
    }
    for (int row = rows.begin; width > 0 && row < rows.end; row += chunk_rows) {
      add(matrix, 2 * (row * columns + begin), 2 * width, std::min(chunk_rows, rows.end - row), 2 * columns, 2 * width);
    }
  }
  void rows(Matrix matrix, RowRange rows, std::int64_t columns, int chunk_rows) {
    part_rows(matrix, rows, columns, 0, columns, chunk_rows);
  }

  // Rows of C elements of gate and the same rows of up, which lie F rows further on. A stage has `half` rows of gate, then the
  // same rows of up.
  void gated_rows(RowRange rows, std::int64_t C, std::int64_t F, int half) {
    for (int row = rows.begin; row < rows.end; row += half) {
      add(Matrix::up, 2 * row * C, 2 * C * std::min(half, rows.end - row), 2, 2 * F * C, 2 * half * C);
    }
  }

  // One part of a stream of quantised weights, which begins at `from`. Returns where it ends.
  template <typename Format>
  std::int64_t stream(std::int64_t from, const StreamShape& shape, const StreamPart& part) {
    for_each_stage<Format>(shape, part, [&](int, int rows, int, int groups) {
      const int bytes = set_bytes<Format>(rows, groups);
      add(Matrix::qkv, from, bytes);
      from += bytes;
    });
    return from;
  }

 private:
  void add(Matrix matrix, std::int64_t from, std::int64_t amount, int ranges = 1, std::int64_t apart = 0,
           std::int64_t stage_apart = 0) {
    const auto units = [](std::int64_t bytes) {
      if (bytes % kCopyUnit != 0 || bytes < 0 || bytes / kCopyUnit > std::numeric_limits<std::uint32_t>::max()) {
        fail(Exit::internal, "fused decoding: a copy of %lld bytes", static_cast<long long>(bytes));
      }
      return static_cast<std::uint32_t>(bytes / kCopyUnit);
    };
    const CopyRun next = {static_cast<std::uint32_t>(matrix),
                          units(from),
                          1,
                          0,
                          units(amount),
                          static_cast<std::uint32_t>(ranges),
                          units(apart),
                          units(stage_apart)};
    if (list_.size() > complete_ && continues(list_.back(), next)) {
      list_.back().step = next.from - (list_.back().from + (list_.back().stages - 1) * list_.back().step);
      ++list_.back().stages;
    } else {
      list_.push_back(next);
    }
  }
  // Whether `next` is one more stage of `run`.
  static bool continues(const CopyRun& run, const CopyRun& next) {
    const bool alike = run.matrix == next.matrix && run.amount == next.amount && run.ranges == next.ranges &&
                       run.apart == next.apart && run.stage_apart == next.stage_apart;
    return alike && (run.stages == 1 ? next.from > run.from : next.from == run.from + run.stages * run.step);
  }

  std::vector<CopyRun>& list_;
  std::size_t first_, complete_;  // the block's first run; runs before it take no further stages
};

void list_parallel_layer(Copies& copies, const Plan& plan, BlockRows& own, bool layer_only) {
  const Sizes& p = plan.sizes;
  const auto rows = [&](Matrix matrix, RowRange of, std::int64_t columns) {
    copies.bytes(matrix, 2 * of.begin * columns, 2 * (of.end - of.begin) * columns, p.stage_bytes);
  };
  rows(Matrix::qkv, own.qkv, p.C);
  rows(Matrix::up, own.up, p.C);
  own.cached_at = copies.cut();
  if (!layer_only) rows(Matrix::down, own.out, p.F);
  rows(Matrix::dense, own.out, p.C);
}

void list_sequential_layer(Copies& copies, const Plan& plan, BlockRows& own, int block) {
  const Sizes& p = plan.sizes;
  const SequentialSizes& s = plan.sequential_sizes;
  const int chunk_rows = kChunkLoads / plan.shape.row_loads * p.warps_r,
            part_rows = kChunkLoads / (2 * plan.shape.row_loads) * p.warps_r;
  copies.rows(Matrix::qkv, own.qkv, p.C, chunk_rows);
  own.cached_at = copies.cut();
  copies.rows(Matrix::dense, own.out, s.q_size, chunk_rows);
  for (int part = 0; part < 2; ++part) {
    const RowRange rows = hidden_part(p, s.first_part, part, block, plan.blocks);
    if (s.gated) {
      copies.gated_rows(rows, p.C, p.F, chunk_rows / 2);
    } else {
      copies.rows(Matrix::up, rows, p.C, chunk_rows);
    }
  }
  copies.part_rows(Matrix::down, own.out, p.F, 0, s.first_part, part_rows);
  copies.part_rows(Matrix::down, own.out, p.F, s.first_part, p.F - s.first_part, part_rows);
}

void list_quantized_layer(Copies& copies, const Plan& plan, BlockRows& own, int block, DType type) {
  const Sizes& p = plan.sizes;
  const LayerParts parts =
      layer_parts(p, plan.sequential ? &plan.sequential_sizes : nullptr, plan.shape.row_loads, own, block, plan.blocks);
  std::int64_t end = 0;
  for (int i = 0; i < parts.count; ++i) {
    if (i == LayerParts::before_cache(plan.sequential)) own.cached_at = copies.cut();
    for_format(type, [&]<typename Format>() { end = copies.stream<Format>(end, StreamShape(p), parts.part[i]); });
  }
}

}  // namespace

void list_copies(Plan& plan, const ModelConfig& config, bool layer_only) {
  const Sizes& p = plan.sizes;
  const int row_loads = plan.shape.row_loads;
  for (int b = 0; b < plan.blocks; ++b) {
    BlockRows& own = plan.rows[static_cast<std::size_t>(b)];
    Copies copies(plan.copies);
    own.first_run = copies.first();
    if (const auto* weights = config.quantization.weights; weights != nullptr) {
      list_quantized_layer(copies, plan, own, b, weights->dtype);
    } else if (plan.sequential) {
      list_sequential_layer(copies, plan, own, b);
    } else {
      list_parallel_layer(copies, plan, own, layer_only);
    }
    own.layer_runs = copies.cut();
    if (config.quantization.head != nullptr) {
      copies.stream<HeadFormat>(0, StreamShape(p), {own.head.end - own.head.begin, groups_of(p.C), row_loads});
    } else if (!layer_only) {
      copies.rows(Matrix::qkv, own.head, p.C, kChunkLoads / row_loads * p.warps_r);
    }
    own.runs = copies.cut();
    plan.sizes.most_runs = std::max(plan.sizes.most_runs, own.runs);
  }
}

}  // namespace weft::cuda::fused
