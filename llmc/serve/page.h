// The page that a browser shows at "/": llmc/serve/page.html, put into the program by the assembler.
#pragma once

#include <string>

namespace weft {

// The page with `nonce` in the place of each {nonce}: the only scripts and styles that its policy lets run.
std::string browser_page(const std::string& nonce);
// The value of Content-Security-Policy that goes with it.
std::string browser_page_policy(const std::string& nonce);

}  // namespace weft
