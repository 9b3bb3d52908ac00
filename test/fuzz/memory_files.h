// Files for fuzz targets: they live in memory, and the readers of weft find them under their names.
//
// memory_files.cpp takes the place of MappedFile and read_text_file of llmc/base/file.cpp at link time (fuzz.mk makes
// those weak), so the readers run as they are, with two gains: thousands of files a second, and each file in a heap
// block of exactly its size, where AddressSanitizer sees a read of one byte too many (a mapped file ends with its page).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace weft::fuzz {

void put_file(const std::string& path, std::span<const std::uint8_t> content);
inline void put_file(const std::string& path, std::string_view content) {
  put_file(path, std::span(reinterpret_cast<const std::uint8_t*>(content.data()), content.size()));
}
void remove_files();

// The content of a file that was put or written; ends the process where there is none.
std::string_view file_text(const std::string& path);

}  // namespace weft::fuzz
