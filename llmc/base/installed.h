// What weft's scripts are called, for messages: make install gives them names of their own.
#pragma once

#include <string>

namespace weft {

// The command for a script of the source tree such as "scripts/convert_hf.py": that path, or "weft-convert-hf" if this
// program is installed, that is, if a command of that name lies beside it.
std::string script_command(const std::string& script);

}  // namespace weft
