#include "llmc/file/signature.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "llmc/base/error.h"
#include "llmc/base/installed.h"

namespace weft {

namespace {

struct Description {
  const char* what;    // nullptr: not recognised
  std::string advice;  // may be empty
};

std::string convert(const char* what) {
  return std::string("convert ") + what + " with " + script_command("scripts/convert_hf.py");
}

bool is_reversed(std::string_view head, std::string_view magic) {
  return head.size() >= magic.size() && std::equal(magic.rbegin(), magic.rend(), head.begin());
}

// "\x89WEFT" with translated line ends after it, or with the top bit of the first byte lost.
bool is_damaged_magic(std::string_view head) {
  if (head.size() < 5 || (head[0] != '\x89' && head[0] != '\t')) return false;
  return head.substr(1, 4) == "WEFT" || head.substr(1, 4) == "WTOK";
}

// A safetensors file is a u64 header length, then a JSON object of that length.
bool is_safetensors(std::string_view head, std::uint64_t size) {
  if (head.size() <= 8 || head[8] != '{') return false;
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, head.data(), 8);
  return header_bytes <= size - 8;
}

Description describe_binary(std::string_view head, std::uint64_t size) {
  if (head.starts_with(kTensorFileMagic)) return {"a tensor file", ""};
  if (head.starts_with(kTokenShardMagic)) return {"a token shard", ""};
  if (is_reversed(head, kTensorFileMagic) || is_reversed(head, kTokenShardMagic)) {
    return {"written in the other byte order", "make it again on a little-endian machine"};
  }
  if (is_damaged_magic(head)) return {"damaged by a text-mode copy", "copy it again in binary mode"};
  // in front of the magics of two bytes: it begins with the length of its header, any number
  if (is_safetensors(head, size)) return {"a safetensors file", convert("it")};
  if (head.starts_with("\x1f\x8b")) return {"gzip-compressed", "unpack it with gunzip"};
  if (head.starts_with("PK\x03\x04")) return {"a zip archive or a PyTorch checkpoint", convert("it")};
  if (head.starts_with("\x80\x02")) return {"a Python pickle or an old PyTorch checkpoint", convert("it")};
  if (head.starts_with("GGUF")) {
    return {"a GGUF file", convert("the original Hugging Face checkpoint")};
  }
  return {nullptr, ""};
}

Description describe_text(std::string_view head, bool of_shards) {
  if (head.starts_with("version https://git-lfs")) {
    return {"a git-lfs pointer", "fetch the file itself with 'git lfs pull'"};
  }
  std::string_view text = head.starts_with("\xef\xbb\xbf") ? head.substr(3) : head;
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  if (text.starts_with('<')) {
    return {"something that looks like a web page", "the download failed: get it again"};
  }
  if (text.starts_with("{\"error")) {
    return {"JSON text that looks like a web page's error message", "if it was downloaded, get it again"};
  }
  if (text.starts_with('{') || text.starts_with('[')) {
    // Shards are given by a pattern, and their tokenizer lies beside them.
    return {"JSON text", of_shards ? "name the shards alone, as 'train_*.bin' does" : ""};
  }
  return {nullptr, ""};
}

}  // namespace

void check_magic(const MappedFile& file, std::string_view magic, const char* wanted) {
  const std::string path = escaped(file.path());
  if (file.size() == 0) {
    fail(Exit::bad_file, "%s: 0 bytes, expected %s. Download failed? get it again", path.c_str(), wanted);
  }
  const std::string_view head = file.text().substr(0, 64);
  if (head.starts_with(magic) || magic.starts_with(head)) return;
  Description found = describe_binary(head, file.size());
  if (found.what == nullptr) found = describe_text(head, magic == kTokenShardMagic);
  if (found.what != nullptr) {
    fail(Exit::bad_file, "%s: magic: this is %s, expected %s%s%s", path.c_str(), found.what, wanted,
         found.advice.empty() ? "" : ". ", found.advice.c_str());
  }
  const auto printable = [](unsigned char c) { return c >= 0x20 ? c != 0x7F : c == '\n' || c == '\t' || c == '\r'; };
  if (std::all_of(head.begin(), head.end(), printable)) {
    const std::string advice =
        magic == kTokenShardMagic ? ". Make shards of it with " + script_command("dev/prepare_data.py") : "";
    fail(Exit::bad_file, "%s: magic: got %s, this is plain text, expected %s%s", path.c_str(),
         escaped(head.substr(0, 8)).c_str(), wanted, advice.c_str());
  }
  fail(Exit::bad_file, "%s: magic: got %s, expected %s: not %s", path.c_str(), escaped(head.substr(0, 8)).c_str(),
       escaped(magic).c_str(), wanted);
}

}  // namespace weft
