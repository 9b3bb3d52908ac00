// Where the Unicode versions of the libraries part.
//
// A tokenizer's output is defined by the Hugging Face `tokenizers` library that trained it. That library
// carries three Unicode versions: its regular expressions (Oniguruma) know Unicode 16, its Digits (Rust)
// Unicode 17, its NFC tables stop at Unicode 9. PCRE2 10.42 knows Unicode 14 and utf8proc 2.8 knows
// Unicode 15. These tables close the gaps; they were measured against tokenizers 0.23.3, and
// test/cpp/tokenizer_test.cpp holds every code point to them.
#pragma once

#include <string>

namespace weft {

// Contents of a PCRE2 character class (UTF and UCP mode), without the brackets:
std::string letter_class();  // \p{L} of Unicode 16
std::string number_class();  // \p{N} of Unicode 16
std::string digits_class();  // \p{N} of Unicode 17
// White_Space. PCRE2's own \s also holds U+180E, which left the property in Unicode 6.3.
std::string whitespace_class();

// True for code points without any effect in the NFC of Unicode 9 which a newer Unicode reorders or composes:
// they were assigned later, so the original's NFC leaves them, and everything across them, alone.
bool inert_in_nfc_9(char32_t code_point);

}  // namespace weft
