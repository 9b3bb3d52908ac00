// Checks the first bytes of an input file, and says what a file of the wrong kind is instead.
#pragma once

#include <string_view>

#include "llmc/base/file.h"

namespace weft {

// As in PNG's signature, the first byte is not ASCII, and the line ends show whether a copy has translated them.
inline constexpr std::string_view kTensorFileMagic = "\x89WEFT\r\n\x1a";
inline constexpr std::string_view kTokenShardMagic = "\x89WTOK\r\n\x1a";

// Returns if `file` starts with `magic`, or is so short that it is only a beginning of it (the caller reports the size).
// Otherwise Exit::bad_file, which says what the file is, if it can be recognised, and what to do. `wanted` names the
// expected kind: "a tensor file".
void check_magic(const MappedFile& file, std::string_view magic, const char* wanted);

}  // namespace weft
