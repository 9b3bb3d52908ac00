// Added tokens: strings that are cut out of the text before anything else looks at it.
//
// Matching is leftmost-longest. The order of operations, also in its corners (a match that is rejected still
// consumes its text; lstrip stops at the previous token, rstrip does not look ahead at the next), is that of
// AddedVocabulary in the Hugging Face `tokenizers` library.
//
// The time is linear in the text, whatever the tokens are: an automaton of the reversed tokens (Aho and Corasick, "Efficient
// string matching", 1975) reads the text from right to left and knows, at every byte, the longest token that begins there.
// Reading from left to right would find where tokens end, and had to go back after each match.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

struct AddedToken {
  std::string content;
  std::int32_t id = 0;
  bool special = false;      // control token: plain text unless asked for, left out by decode(skip_special)
  bool normalized = false;   // matched in the normalized text instead of the raw text
  bool lstrip = false;       // takes the whitespace before it
  bool rstrip = false;       // takes the whitespace after it
  bool single_word = false;  // only between characters that are not part of a word
};

// The tokens of one pass. Call for the raw text with those not `normalized`, then for what is left with the
// others.
class AddedTokenMatcher {
 public:
  // `tokens`: their contents as they are to be matched, none of them empty. Of equal contents the first counts. The memory
  // is about 20 bytes for each byte of the contents; `block`: of text that is searched at once, a size for tests.
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens, std::size_t block = kBlock);

  // Calls `on_text(part)` and `on_token(id)` in the order of `text`, valid UTF-8. With `allow_special` false
  // the special tokens are text.
  void split(std::string_view text, bool allow_special, const std::function<void(std::string_view)>& on_text,
             const std::function<void(std::int32_t)>& on_token) const;

 private:
  static constexpr std::size_t kBlock = 1 << 20;
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Match {
    std::size_t begin;
    std::uint32_t token;  // in tokens_
  };

  void add_nodes();
  void add_failure_links();
  std::uint32_t child(std::uint32_t node, unsigned char byte) const;
  std::uint32_t step(std::uint32_t node, unsigned char byte) const;
  void find_matches(std::string_view text, std::size_t begin, std::size_t end, std::vector<Match>& matches) const;

  std::vector<AddedToken> tokens_;  // sorted by their reversed contents
  std::size_t longest_ = 0;         // bytes of a content
  std::size_t block_;

  // The trie of the reversed contents, breadth first, so that the children of a node stand in a row, sorted by their byte:
  // those of node n are first_child_[n] to first_child_[n + 1] - 1. Node 0 is the root.
  std::vector<std::uint32_t> first_child_;
  std::vector<unsigned char> byte_;        // on the way from the parent
  std::vector<std::uint32_t> failure_;     // the node of the longest proper suffix that is in the trie
  std::vector<std::uint32_t> token_;       // the longest that ends here or at a node reached by failure links; or kNone
  std::vector<std::uint32_t> root_child_;  // by byte; 0: none
};

}  // namespace weft
