// tokenize TOKENIZER_JSON < strings > tokens: lets a script compare weft's tokenizer with another one.
//
// Input (little endian), for each string: u8 flags (1: special tokens allowed, 2: add BOS), u32 length,
// bytes. Output for each: u32 count, i32 ids, u32 length, the bytes that the ids decode to through
// StreamingDecoder.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/text/tokenizer.h"

namespace weft {
namespace {

bool read_exactly(void* data, std::size_t bytes) {
  return std::fread(data, 1, bytes, stdin) == bytes;
}

void write_counted(const void* data, std::size_t count, std::size_t size) {
  const auto header = static_cast<std::uint32_t>(count);
  const bool written = std::fwrite(&header, sizeof header, 1, stdout) == 1 &&
                       (count == 0 || std::fwrite(data, size, count, stdout) == count);
  if (!written) fail(Exit::resources, "standard output: cannot write");
}

void answer(const Tokenizer& tokenizer, std::uint8_t flags, const std::string& text) {
  const auto special = flags & 1 ? Tokenizer::Special::allow : Tokenizer::Special::text;
  const std::vector<std::int32_t> ids = tokenizer.encode(text, flags & 2, special);
  StreamingDecoder stream(tokenizer);
  std::string decoded;
  for (const std::int32_t id : ids) decoded += stream.push(id);
  decoded += stream.finish();
  write_counted(ids.data(), ids.size(), sizeof ids[0]);
  write_counted(decoded.data(), decoded.size(), 1);
}

void run(const std::string& path) {
  const Tokenizer tokenizer = Tokenizer::from_json(MappedFile(path).text(), path);
  std::uint8_t flags = 0;
  while (read_exactly(&flags, sizeof flags)) {
    std::uint32_t length = 0;
    if (!read_exactly(&length, sizeof length)) fail(Exit::bad_file, "standard input: ends within a string");
    std::string text(length, '\0');
    if (!read_exactly(text.data(), length)) fail(Exit::bad_file, "standard input: ends within a string");
    answer(tokenizer, flags, text);
  }
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  try {
    if (argc != 2) weft::fail(weft::Exit::usage, "usage: tokenize TOKENIZER_JSON < strings > tokens");
    weft::run(argv[1]);
    return 0;
  } catch (const weft::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.code());
  }
}
