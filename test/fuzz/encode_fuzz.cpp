// Text through the tokenizers of test/fixtures/tokenizer, there and back: u8 flags, then the text.
// Flags: 1 special tokens allowed, 2 with BOS, the rest chooses the tokenizer.
#include <fstream>
#include <iterator>
#include <vector>

#include "llmc/base/utf8.h"
#include "llmc/text/normalize.h"
#include "llmc/text/tokenizer.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

struct Subject {
  Tokenizer tokenizer;
  bool nfc = false;      // the text comes back as its NFC
  bool exact = false;    // the text comes back
  bool unknown = false;  // the unknown token, a special one, stands for characters without a token
};

Tokenizer load(const std::string& name) {
  const std::string path = "test/fixtures/tokenizer/" + name + ".tokenizer.json";
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.empty()) {
    std::fprintf(stderr, "%s: cannot read; run from the root of the repository\n", path.c_str());
    std::exit(1);
  }
  return Tokenizer::from_json(text, path);
}

const std::vector<Subject>& subjects() {
  static const std::vector<Subject>* all = [] {
    auto* made = new std::vector<Subject>;
    made->push_back({load("neox_style"), true, false});
    made->push_back({load("llama3_style"), false, true});
    made->push_back({load("options"), false, false});
    made->push_back({load("llama2_style"), false, false, true});
    made->push_back({load("mistral_style"), false, false, true});
    made->push_back({load("metaspace_style"), false, false, true});
    return made;
  }();
  return *all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const Subject& subject = subjects()[(flags >> 2) % subjects().size()];
  const Tokenizer& tokenizer = subject.tokenizer;
  const std::string_view text = input.take_rest();
  const bool allow = (flags & 1) != 0, bos = (flags & 2) != 0 && tokenizer.bos_id();

  const auto ids = tokenizer.encode(text, bos, allow ? Tokenizer::Special::allow : Tokenizer::Special::text);
  FUZZ_CHECK(!bos || (!ids.empty() && ids.front() == tokenizer.bos_id()));
  const auto body = std::span(ids).subspan(bos ? 1 : 0);
  FUZZ_CHECK(tokenizer.least_ids(text) <= std::ssize(body));
  const std::string decoded = tokenizer.decode(body);
  const std::string valid = utf8_replace_invalid(text);
  FUZZ_CHECK(utf8_replace_invalid(valid) == valid);
  if (subject.exact) FUZZ_CHECK(decoded == valid);
  if (subject.nfc) FUZZ_CHECK(normalize(decoded, NormalForm::nfc) == normalize(valid, NormalForm::nfc));
  if (!allow && !subject.unknown) {
    for (const std::int32_t id : body) FUZZ_CHECK(!tokenizer.is_special(id));
  }
  StreamingDecoder stream(tokenizer);
  std::string streamed;
  for (const std::int32_t id : body) {
    const std::string piece = stream.push(id);
    FUZZ_CHECK(utf8_replace_invalid(piece) == piece);
    streamed += piece;
  }
  FUZZ_CHECK(streamed + stream.finish() == utf8_replace_invalid(decoded));
  // Any ids at all, not only those that encode() makes: two bytes of the input each.
  std::vector<std::int32_t> any;
  Input again(data, size);
  while (!again.empty()) any.push_back(again.take<std::uint16_t>() % static_cast<std::int32_t>(tokenizer.vocab_size()));
  StreamingDecoder other(tokenizer);
  std::string text_of_any;
  for (const std::int32_t id : any) text_of_any += other.push(id);
  FUZZ_CHECK(text_of_any + other.finish() == utf8_replace_invalid(tokenizer.decode(any)));
  return 0;
}

}  // namespace weft::fuzz
