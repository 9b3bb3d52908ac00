// tokenizer.json: u8 flags, then the document.
//
// A valid vocabulary has an entry for each byte that UTF-8 uses: 243 that no fuzzer would keep together. So "@" in the
// document stands for these entries (ids from 0), and the fuzzer writes the rest. Flag 1: the document is taken as it is.
#include "llmc/text/byte_alphabet.h"
#include "llmc/text/tokenizer_json.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

std::string make_alphabet() {
  std::string entries;
  int id = 0;
  for (int byte = 0; byte < 256; ++byte) {
    if (byte == 0xC0 || byte == 0xC1 || byte >= 0xF5) continue;
    const std::string character = alphabet_character(static_cast<std::uint8_t>(byte));
    const std::string quoted = character == "\"" || character == "\\" ? "\\" + character : character;
    entries += (id > 0 ? ",\"" : "\"") + quoted + "\":" + std::to_string(id);
    ++id;
  }
  return entries;
}

std::string expanded(std::string_view document) {
  static const std::string alphabet = make_alphabet();
  std::string text(document);
  const std::size_t mark = text.find('@');
  if (mark != std::string::npos) text.replace(mark, 1, alphabet);
  return text;
}

void use(const TokenizerSpec& spec) {
  const auto size = static_cast<std::int32_t>(spec.contents.size());
  const auto is_id = [&](std::int32_t id) { return id >= 0 && id < size; };
  FUZZ_CHECK(spec.texts.size() == spec.contents.size() && spec.left_out.size() == spec.contents.size());
  FUZZ_CHECK(size <= kMaxVocabulary && spec.steps.size() <= kMaxSteps && spec.normalizers.size() <= kMaxSteps);
  FUZZ_CHECK(spec.decoder.before_bytes.size() + spec.decoder.after_bytes.size() <= kMaxSteps);
  for (const BpeMerge& merge : spec.merges) {
    FUZZ_CHECK(is_id(merge.left) && is_id(merge.right) && is_id(merge.result));
    const auto text = [&](std::int32_t id) -> const std::string& {
      return spec.contents[static_cast<std::size_t>(id)];
    };
    FUZZ_CHECK(text(merge.result).size() >= text(merge.left).size());
  }
  FUZZ_CHECK(spec.ignore_merges || spec.words.empty());
  for (const TokenizerSpec::Word& word : spec.words) FUZZ_CHECK(is_id(word.id) && !word.bytes.empty());
  for (const std::int32_t id : spec.base.byte_ids) FUZZ_CHECK(id == -1 || is_id(id));
  for (const auto& [character, id] : spec.base.characters) FUZZ_CHECK(is_id(id) && character < 0x110000);
  FUZZ_CHECK(!spec.base.unknown || is_id(*spec.base.unknown));
  for (const AddedToken& token : spec.added) FUZZ_CHECK(is_id(token.id) && !token.content.empty());
  FUZZ_CHECK(!spec.bos || is_id(*spec.bos));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const bool as_it_is = (input.take<std::uint8_t>() & 1) != 0;
  const std::string_view rest = input.take_rest();
  const std::string text = as_it_is ? std::string(rest) : expanded(rest);
  accepts([&] { use(parse_tokenizer_json(text, "fuzz: tokenizer.json")); });
  return 0;
}

}  // namespace weft::fuzz
