// Byte-pair encoding of the tokens of one piece of text: of all pairs of neighbouring tokens the one whose merge has
// the lowest rank is replaced by the merged token, the leftmost one among equals, until no pair has a merge. Source:
// Sennrich, Haddow, Birch 2016, "Neural Machine Translation of Rare Words with Subword Units"; the order of ties is
// that of the Hugging Face `tokenizers` library.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

// A merge of the neighbours `left` and `right` into `result`; its rank is its index in the list.
struct BpeMerge {
  std::int32_t left;
  std::int32_t right;
  std::int32_t result;
};

class Bpe {
 public:
  // Working memory of encode(), reused from call to call by one thread.
  class Scratch {
    friend class Bpe;
    struct Symbol {
      std::int32_t id;         // -1: merged into its left neighbour
      std::uint32_t previous;  // index, or kNone
      std::uint32_t next;
    };
    std::vector<Symbol> symbols;
    std::vector<std::uint64_t> candidates;  // a min-heap of rank << 32 | index of the left symbol
  };

  // Most tokens that merge() takes: indices are 32 bits wide. It needs about 20 bytes of scratch for each of them.
  static constexpr std::uint64_t kMaxTokens = 1u << 28;

  // No two merges may have the same left and right.
  explicit Bpe(const std::vector<BpeMerge>& merges);

  // Appends to `ids` what the merges make of `tokens` (at most kMaxTokens, none below 0) in O(n log n).
  void merge(std::span<const std::int32_t> tokens, Scratch& scratch, std::vector<std::int32_t>& ids) const;

 private:
  struct Entry {
    std::uint64_t pair;  // left << 32 | right, or kEmpty
    std::uint32_t rank;
    std::int32_t result;
  };
  std::size_t slot_of(std::uint64_t key) const;
  const Entry* find(std::int32_t left, std::int32_t right) const;
  // Appends the pair of symbol `left` and the next one to the candidates if it has a merge; with `heapify` keeps the heap
  // in order.
  void add_candidate(Scratch& scratch, std::uint32_t left, bool heapify) const;
  // Replaces symbol `left` and the next one by `result`, and adds the two new pairs.
  void merge_at(Scratch& scratch, std::uint32_t left, std::int32_t result) const;

  std::vector<Entry> entries_;  // hash table with open addressing: a power of two of slots, at most half of them used
  std::uint64_t multiplier_;    // odd, random in each process
  int shift_;                   // 64 - log2 of the number of slots
};

}  // namespace weft
