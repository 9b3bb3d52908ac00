#include "llmc/serve/page.h"

#include <cstddef>
#include <string_view>

// The path is from the root of the repository, where make runs the compiler.
__asm__(
    ".section .rodata\n"
    ".hidden weft_browser_page, weft_browser_page_end\n"
    ".global weft_browser_page, weft_browser_page_end\n"
    "weft_browser_page: .incbin \"llmc/serve/page.html\"\n"
    "weft_browser_page_end:\n"
    ".previous\n");
extern "C" const char weft_browser_page[], weft_browser_page_end[];

namespace weft {

std::string browser_page(const std::string& nonce) {
  static constexpr std::string_view kMark = "{nonce}";
  std::string page(weft_browser_page, weft_browser_page_end);
  for (std::size_t at = page.find(kMark); at != std::string::npos; at = page.find(kMark, at + nonce.size())) {
    page.replace(at, kMark.size(), nonce);
  }
  return page;
}

std::string browser_page_policy(const std::string& nonce) {
  return "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce +
         "'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
}

}  // namespace weft
