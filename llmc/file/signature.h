// The first bytes of a file: is it what was asked for, and if not, what is it?
#pragma once

#include <string_view>

#include "llmc/base/file.h"

namespace weft {

// PNG's idea: a first byte that is not ASCII, and line ends that a text-mode copy would damage visibly.
inline constexpr std::string_view kTensorFileMagic = "\x89WEFT\r\n\x1a";
inline constexpr std::string_view kTokenShardMagic = "\x89WTOK\r\n\x1a";

// Returns if `file` starts with `magic` (or is a non-empty beginning of it); otherwise Exit::bad_file saying
// what the file is, where it can be recognised, and what to do. `wanted`: "a tensor file".
void check_magic(const MappedFile& file, std::string_view magic, const char* wanted);

}  // namespace weft
