// Added tokens: strings that are cut out of the text before anything else looks at it.
//
// Matching is leftmost-longest. The order of operations, also in its corners (a match that is rejected still
// consumes its text; lstrip stops at the previous token, rstrip does not look ahead at the next), is that of
// AddedVocabulary in the Hugging Face `tokenizers` library.
#pragma once

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
  // `tokens`: their contents as they are to be matched. Of equal contents the first counts.
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  // Calls `on_text(part)` and `on_token(id)` in the order of `text`, valid UTF-8. With `allow_special` false
  // the special tokens are text.
  void split(std::string_view text, bool allow_special, const std::function<void(std::string_view)>& on_text,
             const std::function<void(std::int32_t)>& on_token) const;

 private:
  const AddedToken* longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;            // sorted by content
  std::vector<std::uint32_t> first_by_byte_;  // 257 places in tokens_: those that begin with byte b, up to b + 1's
};

}  // namespace weft
