// Tables that make up for the different Unicode versions of the libraries.
//
// A tokenizer's output is defined by the Hugging Face `tokenizers` library that trained it. That library
// carries three Unicode versions: its regular expressions (Oniguruma) know Unicode 16, its Digits (Rust)
// Unicode 17, its NFC tables stop at Unicode 9. PCRE2 10.42 knows Unicode 14 and utf8proc 2.8 knows
// Unicode 15. These tables hold the differences; they were measured against tokenizers 0.23.3, and
// test/cpp/tokenizer_test.cpp checks every code point.
#pragma once

#include <string>

namespace weft {

// Contents of a PCRE2 character class (UTF and UCP mode), without the brackets:
std::string letter_class();  // \p{L} of Unicode 16
std::string number_class();  // \p{N} of Unicode 16
std::string digits_class();  // \p{N} of Unicode 17
// White_Space. PCRE2's own \s also holds U+180E, which left the property in Unicode 6.3.
std::string whitespace_class();

// True for code points that were assigned after Unicode 9 and that NFC reorders or composes since then. The original's NFC
// (Unicode 9) does not know them: it leaves them as they are, and moves and composes no character across them.
bool inert_in_nfc_9(char32_t code_point);

}  // namespace weft
