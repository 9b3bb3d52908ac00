#include "llmc/model/shards.h"

#include <algorithm>
#include <utility>

#include "llmc/base/ceil_div.h"
#include "llmc/model/tensor_names.h"

namespace weft {

namespace {

// The first element at or after `element` where a block begins, or the nearer end of a tensor that must not be cut; the end
// of the arena if there is none.
std::int64_t next_block(const TensorTable& table, std::int64_t element, std::int64_t block,
                        const Optimizer& optimizer) {
  for (const TensorSpec& spec : table.specs()) {
    if (element <= spec.offset) return spec.offset;
    if (optimizer.needs_whole(spec)) {
      if (element - spec.offset <= spec.elements / 2) return spec.offset;
      continue;
    }
    const std::int64_t begin = spec.offset + ceil_div(element - spec.offset, block) * block;
    if (begin < spec.offset + spec.elements) return begin;
  }
  return table.arena_elements();
}

}  // namespace

std::vector<Range> cut_arena(const TensorTable& table, int ranks, std::int64_t block, const Optimizer& optimizer) {
  const std::int64_t size = table.arena_elements();
  std::vector<Range> parts;
  for (std::int64_t r = 0, begin = 0; r < ranks; ++r) {
    const std::int64_t end =
        r + 1 == ranks ? size : next_block(table, even_border(size, ranks, r + 1), block, optimizer);
    parts.push_back({begin, end});
    begin = end;
  }
  return parts;
}

std::vector<Range> parameter_sections(const ModelConfig& config, const TensorTable& table) {
  const ModelNames& names = names_of(config);
  const bool whole = table.find(weight_of(names.embedding)) != nullptr;  // else the table of an adapter
  const std::size_t tensors = table.specs().size() / static_cast<std::size_t>(config.num_layers);  // of each layer
  std::vector<std::int64_t> begins = {0};
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    begins.push_back(whole ? table.at(weight_of(names.block(l).input_norm)).offset
                           : table.specs()[static_cast<std::size_t>(l) * tensors].offset);
  }
  if (whole && !config.tied_embeddings) begins.push_back(table.at(weight_of(names.head)).offset);
  begins.push_back(table.arena_elements());
  std::vector<Range> sections;
  for (std::size_t s = 0; s + 1 < begins.size(); ++s) sections.push_back({begins[s], begins[s + 1]});
  return sections;
}

SectionBuffers::SectionBuffers(std::span<const Range> sections, std::int64_t num_layers) {
  const auto layers = static_cast<std::size_t>(num_layers);
  const std::size_t layer_places = std::min(layers, kLayerBuffers);
  std::vector<std::int64_t> sizes(1 + layer_places);
  for (std::size_t s = 0; s < sections.size(); ++s) {
    const bool is_layer = s >= 1 && s <= layers;
    place_of_.push_back(is_layer ? 1 + (s - 1) % kLayerBuffers : 0);
    sizes[place_of_[s]] = std::max(sizes[place_of_[s]], sections[s].size());
  }
  for (const std::int64_t size : sizes) {
    begins_.push_back(elements_);
    elements_ += size;
  }
  occupants_.assign(sizes.size(), -1);
}

bool SectionBuffers::take(std::size_t section) {
  std::ptrdiff_t& occupant = occupants_[place_of_[section]];
  const bool is_new = occupant != static_cast<std::ptrdiff_t>(section);
  occupant = static_cast<std::ptrdiff_t>(section);
  return is_new;
}

void SectionBuffers::forget() {
  std::fill(occupants_.begin(), occupants_.end(), -1);
}

namespace {

// The tensors that the optimizer needs whole, with the padding behind each, in the order of the arena.
std::vector<Range> whole_ranges(const TensorTable& table, const Optimizer& optimizer) {
  std::vector<Range> ranges;
  const auto specs = table.specs();
  for (std::size_t s = 0; s < specs.size(); ++s) {
    if (!optimizer.needs_whole(specs[s])) continue;
    ranges.push_back({specs[s].offset, s + 1 < specs.size() ? specs[s + 1].offset : table.arena_elements()});
  }
  return ranges;
}

// Where to cut behind `after`, if at `element` is best: at the next multiple of `block` or, where that is not in front of the
// next of these ranges, at that one's begin or nearer end.
std::int64_t next_cut(std::span<const Range> whole, std::int64_t element, std::int64_t block, std::int64_t after) {
  const std::int64_t cut = ceil_div(element, block) * block;
  const auto range = std::partition_point(whole.begin(), whole.end(), [&](const Range& r) { return r.end <= element; });
  if (range == whole.end() || range->begin >= cut) return cut;
  const bool begin_is_nearer = element - range->begin <= range->size() / 2;
  return begin_is_nearer && range->begin > after ? range->begin : range->end;
}

}  // namespace

std::vector<Bucket> cut_buckets(const TensorTable& table, std::span<const Range> sections, int ranks,
                                std::int64_t block, std::int64_t elements, const Optimizer& optimizer) {
  const std::vector<Range> whole = whole_ranges(table, optimizer);
  std::vector<Bucket> buckets;
  const auto add = [&](std::size_t section, const Range& range) {
    Bucket bucket{section, range, {}};
    std::int64_t begin = range.begin;
    for (std::int64_t r = 0; r < ranks; ++r) {
      const std::int64_t even = range.begin + even_border(range.size(), ranks, r + 1);
      const std::int64_t end =
          r + 1 == ranks ? range.end : std::min(next_cut(whole, even, block, begin - 1), range.end);
      bucket.parts.push_back({begin, end});
      begin = end;
    }
    buckets.push_back(std::move(bucket));
  };
  const std::int64_t largest = ceil_div(4 * elements, block) * block;
  for (std::size_t s = 0; s < sections.size();) {
    if (sections[s].size() == 0) {
      ++s;
      continue;
    }
    const std::size_t first = s;
    Range range = sections[s++];
    while (range.size() < elements && s < sections.size() && sections[s].size() < elements)
      range.end = sections[s++].end;
    while (range.size() > largest) {
      const std::int64_t cut = next_cut(whole, range.begin / block * block + largest, block, range.begin);
      if (cut >= range.end) break;
      add(first, {range.begin, cut});
      range.begin = cut;
    }
    add(first, range);
  }
  return buckets;
}

}  // namespace weft
