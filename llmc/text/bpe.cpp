#include "llmc/text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "llmc/base/hash.h"

namespace weft {

namespace {

constexpr std::uint32_t kNone = UINT32_MAX;
constexpr std::uint64_t kEmpty = UINT64_MAX;

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

// Multiply-shift hashing (Dietzfelbinger et al. 1997): the high bits of the key times an odd number. The number is random
// in each process, so that nobody can make a file whose merges all collide.
std::size_t Bpe::slot_of(std::uint64_t key) const {
  return (key * multiplier_) >> shift_;
}

Bpe::Bpe(const std::vector<BpeMerge>& merges) : multiplier_(SeededHash()("merges") | 1) {
  const std::size_t slots = std::bit_ceil(2 * merges.size() + 2);
  shift_ = 64 - std::countr_zero(slots);
  entries_.assign(slots, Entry{kEmpty, 0, 0});
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const std::uint64_t key = pair_key(merges[rank].left, merges[rank].right);
    std::size_t slot = slot_of(key);
    while (entries_[slot].pair != kEmpty) slot = (slot + 1) & (slots - 1);
    entries_[slot] = {key, static_cast<std::uint32_t>(rank), merges[rank].result};
  }
}

const Bpe::Entry* Bpe::find(std::int32_t left, std::int32_t right) const {
  const std::uint64_t key = pair_key(left, right);
  for (std::size_t slot = slot_of(key);; slot = (slot + 1) & (entries_.size() - 1)) {
    if (entries_[slot].pair == key) return &entries_[slot];
    if (entries_[slot].pair == kEmpty) return nullptr;
  }
}

void Bpe::add_candidate(Scratch& scratch, std::uint32_t left, bool heapify) const {
  const auto& symbol = scratch.symbols[left];
  if (symbol.next == kNone) return;
  const Entry* merge = find(symbol.id, scratch.symbols[symbol.next].id);
  if (merge == nullptr) return;
  scratch.candidates.push_back(static_cast<std::uint64_t>(merge->rank) << 32 | left);
  if (heapify) std::push_heap(scratch.candidates.begin(), scratch.candidates.end(), std::greater<>());
}

void Bpe::merge_at(Scratch& scratch, std::uint32_t left, std::int32_t result) const {
  auto& symbol = scratch.symbols[left];
  auto& right = scratch.symbols[symbol.next];
  symbol.id = result;
  symbol.next = right.next;
  if (right.next != kNone) scratch.symbols[right.next].previous = left;
  right.id = -1;
  if (symbol.previous != kNone) add_candidate(scratch, symbol.previous, true);
  add_candidate(scratch, left, true);
}

void Bpe::merge(std::span<const std::int32_t> tokens, Scratch& scratch, std::vector<std::int32_t>& ids) const {
  if (tokens.empty()) return;
  const auto length = static_cast<std::uint32_t>(tokens.size());
  auto& symbols = scratch.symbols;
  auto& candidates = scratch.candidates;
  symbols.resize(length);
  candidates.clear();
  for (std::uint32_t i = 0; i < length; ++i) {
    symbols[i] = {tokens[i], i == 0 ? kNone : i - 1, i + 1 == length ? kNone : i + 1};
  }
  for (std::uint32_t i = 0; i + 1 < length; ++i) add_candidate(scratch, i, false);
  std::make_heap(candidates.begin(), candidates.end(), std::greater<>());
  while (!candidates.empty()) {
    std::pop_heap(candidates.begin(), candidates.end(), std::greater<>());
    const std::uint64_t candidate = candidates.back();
    candidates.pop_back();
    const auto left = static_cast<std::uint32_t>(candidate);
    // The pair may be gone since it was queued; a pair with another rank has its own entry in the heap.
    if (symbols[left].id < 0 || symbols[left].next == kNone) continue;
    const Entry* merge = find(symbols[left].id, symbols[symbols[left].next].id);
    if (merge != nullptr && merge->rank == candidate >> 32) merge_at(scratch, left, merge->result);
  }
  for (std::uint32_t i = 0; i != kNone; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace weft
