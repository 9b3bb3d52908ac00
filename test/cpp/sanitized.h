// Under a sanitizer a program runs 4 to 50 times as long, and what a sanitizer looks for is in most cases of a long list or in
// none: there, loops over hundreds of cases that are alike take a part of them. The release build takes all.
#pragma once

namespace weft::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// The step of a loop over cases: every n-th of them under a sanitizer.
constexpr int every_nth(int n) {
  return kSanitized ? n : 1;
}

}  // namespace weft::test
