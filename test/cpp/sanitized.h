// Under a sanitizer a program runs 4 to 50 times as long, and what a sanitizer looks for is in most cases of a long list or in
// none: there, loops over hundreds of cases that are alike take a part of them. The release build takes all.
// Asked of the program that runs: the objects of the tests are the same with AddressSanitizer and without (Makefile).
#pragma once

// Defined in a sanitizer's runtime, null without it.
extern "C" {
void __asan_init() __attribute__((weak));  // NOLINT(bugprone-reserved-identifier)
void __tsan_init() __attribute__((weak));  // NOLINT(bugprone-reserved-identifier)
}

namespace weft::test {

inline bool sanitized() {
  return __asan_init != nullptr || __tsan_init != nullptr;
}

// The step of a loop over cases: every n-th of them under a sanitizer.
inline int every_nth(int n) {
  return sanitized() ? n : 1;
}

}  // namespace weft::test
