// Added tokens: strings such as <|endoftext|> that become one token wherever they occur. They are matched before the rest of
// the text is pre-tokenized and encoded.
//
// Matching is leftmost-longest. Its details are those of AddedVocabulary in the Hugging Face `tokenizers` library: a match
// that is rejected still consumes its text, lstrip stops at the previous token, and rstrip takes whitespace even where the
// next token begins in it.
//
// The time is linear in the text, whatever the tokens are: an automaton of the reversed tokens (Aho and Corasick, "Efficient
// string matching", 1975) reads the text from right to left, and so knows at every byte the longest token that begins there.
// Read from left to right it would know where tokens end, and would have to go back after each match.
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

// What lstrip and rstrip take: where the white space at the end of `text` begins, and where that at its beginning ends.
std::size_t spaces_begin(std::string_view text);
std::size_t spaces_end(std::string_view text);

// Finds the added tokens of one pass. The first pass finds those that are not `normalized`, in the raw text; the second
// finds the others, in the normalized text between them.
class AddedTokenMatcher {
 public:
  // `tokens`: with contents as they occur in the text of the pass, none empty. If two have the same content the first is
  // used. Takes about 20 bytes of memory for each byte of the contents. `block`: bytes of text that are searched at once;
  // only tests change it.
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
    std::uint32_t token;  // index in tokens_
  };

  void add_nodes();
  void add_failure_links();
  std::uint32_t child(std::uint32_t node, unsigned char byte) const;
  std::uint32_t step(std::uint32_t node, unsigned char byte) const;
  void find_matches(std::string_view text, std::size_t begin, std::size_t end, std::vector<Match>& matches) const;

  std::vector<AddedToken> tokens_;  // sorted by their reversed contents
  std::size_t longest_ = 0;         // bytes of the longest content
  std::size_t block_;

  // The trie of the reversed contents. Nodes are numbered breadth first, so that the children of node n are the nodes
  // first_child_[n] to first_child_[n + 1] - 1, sorted by byte. Node 0 is the root.
  std::vector<std::uint32_t> first_child_;
  std::vector<unsigned char> byte_;     // of the edge from the parent
  std::vector<std::uint32_t> failure_;  // the node of the longest proper suffix that is in the trie
  std::vector<std::uint32_t> token_;    // index of the longest that ends here or on the path of failure links; or kNone
  std::vector<std::uint32_t> root_child_;  // child of the root by byte; 0: none
};

}  // namespace weft
