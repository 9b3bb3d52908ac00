// tokenize TOKENIZER_JSON < strings > tokens: lets a script compare weft's tokenizer with another one.
//
// Input (little endian), for each string: u8 flags (1: special tokens allowed, 2: add BOS, 4: the bytes are i32 ids, 8: leave
// special tokens out of the text, 16: the bytes are segments, each u8 literal, u32 length, bytes), u32 length, bytes. Output for each: u32 count, i32 ids, u32 length, the text of the ids.
// The text comes through StreamingDecoder, piece by piece, and must be what decode() gives.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/utf8.h"
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

std::string streamed(const Tokenizer& tokenizer, const std::vector<std::int32_t>& ids) {
  StreamingDecoder decoder(tokenizer);
  std::string text;
  const auto add = [&](const std::string& part) {
    if (utf8_replace_invalid(part) != part) fail(Exit::internal, "a part of the text is not UTF-8");
    text += part;
  };
  for (const std::int32_t id : ids) add(decoder.push(id));
  add(decoder.finish());
  if (text != utf8_replace_invalid(tokenizer.decode(ids))) {
    fail(Exit::internal, "the text in pieces is not the text at once");
  }
  return text;
}

std::vector<TextSegment> segments_of(std::string_view bytes) {
  std::vector<TextSegment> segments;
  while (!bytes.empty()) {
    std::uint32_t length = 0;
    if (bytes.size() < 1 + sizeof length) fail(Exit::bad_file, "standard input: a segment ends early");
    std::memcpy(&length, bytes.data() + 1, sizeof length);
    const bool literal = bytes[0] != 0;
    bytes.remove_prefix(1 + sizeof length);
    if (bytes.size() < length) fail(Exit::bad_file, "standard input: a segment ends early");
    segments.push_back({std::string(bytes.substr(0, length)), literal});
    bytes.remove_prefix(length);
  }
  return segments;
}

void answer(const Tokenizer& tokenizer, std::uint8_t flags, const std::string& text) {
  std::vector<std::int32_t> ids;
  if (flags & 4) {
    ids.resize(text.size() / sizeof ids[0]);
    std::memcpy(ids.data(), text.data(), ids.size() * sizeof ids[0]);
  } else if (flags & 16) {
    ids = tokenizer.encode(segments_of(text));
  } else {
    const auto special = flags & 1 ? Tokenizer::Special::allow : Tokenizer::Special::text;
    ids = tokenizer.encode(text, flags & 2, special);
  }
  const std::string decoded = flags & 8 ? utf8_replace_invalid(tokenizer.decode(ids, true)) : streamed(tokenizer, ids);
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
