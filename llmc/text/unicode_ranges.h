// Tables that make up for the different Unicode versions of the libraries.
//
// A tokenizer's output is defined by the Hugging Face `tokenizers` library that trained it. That library
// carries three Unicode versions: its regular expressions (Oniguruma) know Unicode 16, its Digits (Rust)
// Unicode 17, its NFC tables stop at Unicode 9. PCRE2 10.42 knows Unicode 14 and utf8proc 2.8 knows
// Unicode 15. These tables hold the differences; they were measured against tokenizers 0.23.3, and
// test/cpp/tokenizer_test.cpp checks every code point.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace weft {

// Contents of a PCRE2 character class (UTF and UCP mode), without the brackets:
std::string number_class();  // \p{N} of Unicode 16
std::string digits_class();  // \p{N} of Unicode 17
// White_Space. PCRE2's own \s also holds U+180E, which left the property in Unicode 6.3.
std::string whitespace_class();

// Alphabetic, marks, decimal digits, Pc: \w within brackets. Outside of them the original's \w has ², ³, ¹, ¼, ½ and ¾ as well.
std::string word_class();

// The characters of `members` that are not in `without` (which may be empty).
struct CharacterClass {
  std::string members;
  std::string without;
};
// A general category (L, Lu and so on; not C, Cn, Cs) or one of the scripts Han, Hiragana, Katakana and Hangul, of Unicode 16.
std::optional<CharacterClass> property_class(std::string_view name);
CharacterClass punctuation_class();  // what the pre-tokenizer Punctuation splits at

// True for code points that were assigned after Unicode 9 and that NFC reorders or composes since then. The original's NFC
// (Unicode 9) does not know them: it leaves them as they are, and moves and composes no character across them.
bool inert_in_nfc_9(char32_t code_point);
// Those, and the code points that have got a compatibility decomposition since.
bool inert_in_nfkc_9(char32_t code_point);

}  // namespace weft
