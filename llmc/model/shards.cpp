#include "llmc/model/shards.h"

namespace weft {

namespace {

// The first element at or behind `element` where a block begins; the end of the arena if there is none.
std::int64_t next_block(const TensorTable& table, std::int64_t element, std::int64_t block) {
  for (const TensorSpec& spec : table.specs()) {
    if (element <= spec.offset) return spec.offset;
    const std::int64_t begin = spec.offset + (element - spec.offset + block - 1) / block * block;
    if (begin < spec.offset + spec.elements) return begin;
  }
  return table.arena_elements();
}

}  // namespace

std::vector<Range> cut_arena(const TensorTable& table, int ranks, std::int64_t block) {
  const std::int64_t size = table.arena_elements();
  std::vector<Range> parts;
  for (std::int64_t r = 0, begin = 0; r < ranks; ++r) {
    // size / ranks + ..., not size * r / ranks: no product of a large arena and many ranks.
    const std::int64_t even = size / ranks * (r + 1) + size % ranks * (r + 1) / ranks;
    const std::int64_t end = r + 1 == ranks ? size : next_block(table, even, block);
    parts.push_back({begin, end});
    begin = end;
  }
  return parts;
}

}  // namespace weft
