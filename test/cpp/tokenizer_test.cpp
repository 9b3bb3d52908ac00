// The tokenizer against the Hugging Face `tokenizers` library (test/fixtures/tokenizer, made by
// scripts/make_tokenizer_vectors.py), against damaged files, and against its own time bounds.
#include "llmc/text/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "colliding_names.h"
#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/text/byte_alphabet.h"
#include "llmc/text/normalize.h"
#include "llmc/text/split_pattern.h"
#include "test/cpp/byte_tokenizer.h"
#include "test/cpp/processor_time.h"
#include "test/cpp/sanitized.h"
#include "test/cpp/test_files.h"
#include "test/cpp/tokenizer_files.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

Tokenizer load(const std::string& path) {
  return Tokenizer::from_json(MappedFile(path).text(), path);
}

Tokenizer fixture(const std::string& name) {
  return load(kFixtures + name + ".tokenizer.json");
}

// ---- the vectors ----------------------------------------------------------------------------------------------------

struct Vector {
  bool allow_special;
  bool add_bos;
  std::string text;
  Ids ids;
};

struct Vectors {
  std::vector<Vector> strings;
  std::uint32_t forms = 0;
  std::uint32_t chunks = 0;
  std::vector<std::uint64_t> hashes;
};

class VectorReader {
 public:
  explicit VectorReader(const std::string& path) : file_(path) {}

  Vectors read() {
    Vectors vectors;
    if (take(8) != "WTOKVEC1") throw std::runtime_error("not a file of tokenizer vectors");
    vectors.strings.resize(number<std::uint32_t>());
    for (Vector& vector : vectors.strings) {
      const auto flags = number<std::uint8_t>();
      vector.allow_special = flags & 1;
      vector.add_bos = flags & 2;
      vector.text = take(number<std::uint32_t>());
      vector.ids.resize(number<std::uint32_t>());
      for (std::int32_t& id : vector.ids) id = number<std::uint16_t>();
    }
    vectors.forms = number<std::uint32_t>();
    vectors.chunks = number<std::uint32_t>();
    vectors.hashes.resize(std::size_t{vectors.forms} * vectors.chunks);
    for (std::uint64_t& hash : vectors.hashes) hash = number<std::uint64_t>();
    return vectors;
  }

 private:
  std::string_view take(std::size_t bytes) {
    const std::string_view taken = file_.text().substr(position_, bytes);
    if (taken.size() != bytes) throw std::runtime_error("tokenizer vectors: short file");
    position_ += bytes;
    return taken;
  }
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  MappedFile file_;
  std::size_t position_ = 0;
};

std::string utf8(std::uint32_t c) {
  const auto tail = [c](int shift) { return static_cast<char>(0x80 | ((c >> shift) & 0x3F)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | (c >> 6)), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | (c >> 12)), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | (c >> 18)), tail(12), tail(6), tail(0)};
}

// chunk_text() of scripts/make_tokenizer_vectors.py.
std::string chunk_text(std::uint32_t form, std::uint32_t chunk) {
  std::string text;
  for (std::uint32_t point = chunk * 256; point < chunk * 256 + 256; ++point) {
    if (point >= 0xD800 && point < 0xE000) continue;
    const std::string c = utf8(point);
    if (form == 0) text += c;
    if (form == 1) text += c + "a " + c + "1 " + c + "! " + c + "  ";
    if (form == 2) text += "e" + c + "\u0334x\u0345" + c + "y" + c + "\u0301\u0323";
  }
  return text;
}

std::uint64_t fnv1a(const Ids& ids) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const std::int32_t id : ids) {
    for (const std::int32_t byte : {id & 0xFF, id >> 8})
      hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001B3;
  }
  return hash;
}

class TokenizerVectors : public testing::TestWithParam<const char*> {
 protected:
  const Tokenizer tokenizer_ = fixture(GetParam());
  const Vectors vectors_ = VectorReader(kFixtures + GetParam() + ".vectors.bin").read();
};

INSTANTIATE_TEST_SUITE_P(Tokenizer, TokenizerVectors,
                         testing::Values("neox_style", "llama3_style", "options", "llama2_style", "mistral_style",
                                         "metaspace_style", "gemma3_style"),
                         [](const auto& info) { return info.param; });

TEST_P(TokenizerVectors, EncodesEveryStringAsTheOriginal) {
  int wrong = 0;
  for (const Vector& vector : vectors_.strings) {
    const auto special = vector.allow_special ? Tokenizer::Special::allow : Tokenizer::Special::text;
    const Ids ids = tokenizer_.encode(vector.text, vector.add_bos, special);
    if (ids != vector.ids && ++wrong <= 5) {
      ADD_FAILURE() << escaped(vector.text) << " special " << vector.allow_special << "\n got "
                    << testing::PrintToString(ids) << "\nwant " << testing::PrintToString(vector.ids);
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << vectors_.strings.size();
}

// Of every text of the vectors, of the longest tokens in a row, and of what normalizing makes shortest.
TEST_P(TokenizerVectors, NoTextHasFewerIdsThanItsBytesSay) {
  const auto check = [&](const std::string& text) {
    for (const auto special : {Tokenizer::Special::text, Tokenizer::Special::allow}) {
      EXPECT_LE(tokenizer_.least_ids(text), std::ssize(tokenizer_.encode(text, false, special))) << text.substr(0, 80);
    }
  };
  for (const Vector& vector : vectors_.strings) check(vector.text);
  std::string longest;
  for (std::int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
    const std::string bytes = tokenizer_.token_bytes(id);
    if (bytes.size() > longest.size()) longest = bytes;
  }
  for (const std::string& part :
       {longest, std::string("\u212A"), std::string("\u1FBE\u0308\u0301"), std::string("\u1112\u1161\u11AB"),
        std::string(" "), std::string("\U0001F600"), std::string("\n")}) {
    std::string text;
    for (int i = 0; i < 300; ++i) text += part;
    check(text);
  }
}

TEST_P(TokenizerVectors, EncodesEveryCodePointAsTheOriginal) {
  ASSERT_EQ(vectors_.chunks, 0x1100u);
  std::string wrong;
  for (std::uint32_t form = 0; form < vectors_.forms; ++form) {
    for (std::uint32_t chunk = 0; chunk < vectors_.chunks; chunk += test::every_nth(8)) {
      const Ids ids = tokenizer_.encode(chunk_text(form, chunk), false);
      if (fnv1a(ids) != vectors_.hashes[form * vectors_.chunks + chunk]) wrong += format(" U+%X/%u", chunk * 256, form);
    }
  }
  EXPECT_EQ(wrong, "") << "chunks of 256 code points / form";
}

// The added tokens of `options` take whitespace away and are composed, and SentencePiece's ▁ and unknown tokens are not what
// they stand for, so decoding does not give back these texts.
TEST_P(TokenizerVectors, DecodingGivesTheNormalizedTextBack) {
  if (GetParam() != std::string("neox_style") && GetParam() != std::string("llama3_style")) return;
  for (const Vector& vector : vectors_.strings) {
    const std::string valid = utf8_replace_invalid(vector.text);
    const std::string expected = GetParam() == std::string("neox_style") ? normalize(valid, NormalForm::nfc) : valid;
    const std::string prefix = vector.add_bos && tokenizer_.bos_id() ? "<|begin_of_text|>" : "";
    ASSERT_EQ(tokenizer_.decode(vector.ids), prefix + expected) << escaped(vector.text);
  }
}

TEST_P(TokenizerVectors, StreamingGivesTheSameTextAsDecodingAtOnce) {
  StreamingDecoder used(tokenizer_);  // for one text after the other
  for (const Vector& vector : vectors_.strings) {
    StreamingDecoder stream(tokenizer_);
    std::string text, text_of_used;
    for (const std::int32_t id : vector.ids) {
      const std::string part = stream.push(id);
      ASSERT_EQ(utf8_replace_invalid(part), part) << "a part that is not UTF-8";
      text += part;
      text_of_used += used.push(id);
    }
    const std::string expected = utf8_replace_invalid(tokenizer_.decode(vector.ids));
    ASSERT_EQ(text + stream.finish(), expected);
    ASSERT_EQ(text_of_used + used.finish(), expected);
  }
}

// ---- streaming, decoding, special tokens ----------------------------------------------------------------------------

TEST(StreamingDecoder, HoldsBackIncompleteCharactersAtEverySplit) {
  const Tokenizer tokenizer = fixture("neox_style");
  const std::string pieces[] = {"\xF0\x9F\x98\x80", "\xE2\x82", "\xFF", "\xC3\xA9",
                                "\xED\xA0\x80",     "\xF0\x9F", "a",    "\xC0"};
  for (const std::string& first : pieces) {
    for (const std::string& second : pieces) {
      const std::string bytes = first + second + first;
      Ids ids;
      for (const char byte : bytes)
        ids.push_back(*tokenizer.id_of(alphabet_character(static_cast<std::uint8_t>(byte))));
      StreamingDecoder stream(tokenizer);
      std::string text;
      for (std::size_t split = 0; split < ids.size(); ++split) {
        text += stream.push(ids[split]);
        const std::string so_far = bytes.substr(0, split + 1);
        const std::string complete = so_far.substr(0, so_far.size() - utf8_incomplete_suffix(so_far));
        ASSERT_EQ(text, utf8_replace_invalid(complete)) << escaped(bytes) << " after " << split + 1;
      }
      EXPECT_EQ(text + stream.finish(), utf8_replace_invalid(bytes));
      EXPECT_EQ(stream.finish(), "");
    }
  }
}

// The text of `ids`, decoded one by one, and where each begins in it, in characters.
std::pair<std::string, std::vector<std::size_t>> streamed(const Tokenizer& tokenizer, const Ids& ids) {
  StreamingDecoder stream(tokenizer);
  std::string text;
  std::vector<std::size_t> all;
  const auto take = [&](const auto& decode) {
    std::vector<std::size_t> begins;
    const std::string part = decode(&begins);
    for (const std::size_t begin : begins) all.push_back(utf8_characters(text) + begin);
    text += part;
  };
  for (const std::int32_t id : ids) take([&](auto* begins) { return stream.push(id, begins); });
  take([&](auto* begins) { return stream.finish(begins); });
  return {text, all};
}

// In characters of the text: for each token, those before the one that its first byte belongs to.
TEST(StreamingDecoder, TokensBeginWhereTheirBytesDo) {
  for (const char* name : {"neox_style", "llama3_style"}) {
    const Tokenizer tokenizer = fixture(name);
    std::mt19937 random(3);
    for (int text = 0; text < 2000; ++text) {
      Ids ids;
      std::string bytes;
      std::vector<std::size_t> first_bytes;
      while (ids.size() < 12) {
        // Mostly single bytes of characters of several bytes, of which few come out whole.
        const auto byte = static_cast<std::uint8_t>(0x80 + random() % 0x80);
        const std::int32_t id = random() % 4 > 0 ? *tokenizer.id_of(alphabet_character(byte))
                                                 : static_cast<std::int32_t>(random() % tokenizer.vocab_size());
        ids.push_back(id);
        first_bytes.push_back(bytes.size());
        bytes += tokenizer.token_bytes(id);
      }
      std::vector<std::size_t> ends;  // of the characters, or of what becomes U+FFFD, in bytes
      for (std::size_t at = 0; at < bytes.size(); ends.push_back(at)) {
        const std::string_view rest = std::string_view(bytes).substr(at);
        std::size_t taken = utf8_sequence_length(rest);
        for (std::size_t more = 1; taken == 0 && more <= 4; ++more) {
          const std::string_view part = rest.substr(0, more);
          if (utf8_incomplete_suffix(part) != part.size() || part.size() < more)
            taken = std::max<std::size_t>(1, more - 1);
        }
        at += std::max<std::size_t>(1, taken);
      }
      const auto& [shown, got] = streamed(tokenizer, ids);
      ASSERT_EQ(shown, utf8_replace_invalid(bytes));
      ASSERT_EQ(utf8_characters(shown), ends.size());
      ASSERT_EQ(got.size(), ids.size());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const auto before = static_cast<std::size_t>(std::ranges::upper_bound(ends, first_bytes[i]) - ends.begin());
        // A token without bytes stands where the text before it ends for certain.
        if (!tokenizer.token_bytes(ids[i]).empty()) {
          ASSERT_EQ(got[i], before) << escaped(bytes) << ", token " << i;
        }
      }
    }
  }
}

// Byte tokens in a row are text if they are valid UTF-8, and otherwise each a character of its own.
TEST(StreamingDecoder, ByteTokensBeginWithTheirCharacterOrEachItsOwn) {
  const Tokenizer tokenizer = fixture("llama2_style");
  const std::int32_t word = tokenizer.encode("the", false).front();
  ASSERT_EQ(tokenizer.token_bytes(word).front(), ' ');
  const std::size_t length = tokenizer.token_bytes(word).size();
  const auto row = [&](std::string_view bytes) {
    Ids ids;
    for (const char byte : bytes) ids.push_back(*tokenizer.id_of(format("<0x%02X>", static_cast<std::uint8_t>(byte))));
    return ids;
  };
  const auto joined = [](std::initializer_list<Ids> parts) {
    Ids all;
    for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  using Begins = std::vector<std::size_t>;
  struct Case {
    Ids ids;
    Begins begins;
    std::string text;
  };
  const std::string rest = tokenizer.token_bytes(word),
                    first = rest.substr(1);  // the first space of a text is taken away
  for (const Case& c : {Case{joined({{word}, row("\xE4\xBD\xA0\xE5\xA5\xBD"), {word}}),
                             {0, length - 1, length - 1, length - 1, length, length, length, length + 1},
                             first + "\u4F60\u597D" + rest},
                        {joined({row("a\xC3\xA9"), {word}}), {0, 1, 1, 2}, "a\u00E9" + rest},
                        {joined({row("\xE2\x82"), {word}}), {0, 1, 2}, "\uFFFD\uFFFD" + rest},
                        {row("\xC3\xA9\xFF\xC3\xA9"), {0, 1, 2, 3, 4}, "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD"},
                        {row("\xC3\xA9\xE2"), {0, 1, 2}, "\uFFFD\uFFFD\uFFFD"},
                        {joined({row(" "), row("b")}), {0, 0}, "b"},
                        {joined({row("ab"), {word}, row("c")}), {0, 1, 2, length + 2}, "ab" + rest + "c"}}) {
    const auto& [text, got] = streamed(tokenizer, c.ids);
    EXPECT_EQ(text, c.text);
    EXPECT_EQ(got, c.begins) << c.text;
  }
}

TEST(Tokenizer, SpecialTokensAreTextUnlessAllowed) {
  const Tokenizer tokenizer = fixture("neox_style");
  const std::int32_t end = tokenizer.id_of("<|endoftext|>").value();
  EXPECT_TRUE(tokenizer.is_special(end));
  EXPECT_EQ(tokenizer.encode("<|endoftext|>", false, Tokenizer::Special::allow), Ids{end});
  const Ids as_text = tokenizer.encode("<|endoftext|>", false);
  EXPECT_GT(as_text.size(), 1u);
  EXPECT_EQ(tokenizer.decode(as_text), "<|endoftext|>");
  EXPECT_EQ(tokenizer.decode(Ids{end, as_text[0]}, true), tokenizer.decode(Ids{as_text[0]}));
  const std::int32_t spaces = tokenizer.id_of("    ").value();  // added, not special: a token in both modes
  EXPECT_FALSE(tokenizer.is_special(spaces));
  EXPECT_EQ(tokenizer.encode("    ", false), Ids{spaces});
}

// What lies between two special tokens of literals is one run, whatever it is joined from. Names in contents, and those that only a
// border makes, are text.
TEST(Tokenizer, SegmentsHaveSpecialTokensInLiteralsAlone) {
  const Tokenizer tokenizer = Tokenizer::from_json(byte_tokenizer_json().dump(), "test");
  const auto joined = [](std::initializer_list<Ids> parts) {
    Ids ids;
    for (const Ids& part : parts) ids.insert(ids.end(), part.begin(), part.end());
    return ids;
  };
  const Ids padding = tokenizer.encode("<|padding|>", false), end = tokenizer.encode("<|endoftext|>", false);
  EXPECT_EQ(tokenizer.encode(std::vector<TextSegment>{
                {"<|endoftext|>a", true}, {"b<|padding|>", false}, {"<|end", true}, {"oftext|>", true}, {"", false}}),
            joined({{kEndOfText, kAb}, padding, end}));
  EXPECT_EQ(tokenizer.encode(std::vector<TextSegment>{{"<|padding|", false}, {"><|padding|><|pad", true}}),
            joined({padding, {1}, tokenizer.encode("<|pad", false)}));
  EXPECT_EQ(tokenizer.encode(std::span<const TextSegment>()), Ids());
  EXPECT_EQ(tokenizer.encode(std::vector<TextSegment>{{"\xC3", false}, {"\xA9", true}}),
            tokenizer.encode("\uFFFD\uFFFD", false));
}

// A special token takes the white space beside it, from contents too; an unknown one of another literal is not looked for there.
TEST(Tokenizer, SpecialTokensOfLiteralsTakeTheWhiteSpaceBesideThem) {
  Json json = byte_tokenizer_json();
  json["added_tokens"][0]["lstrip"] = json["added_tokens"][0]["rstrip"] = true;
  const Tokenizer tokenizer = Tokenizer::from_json(json.dump(), "test");
  EXPECT_EQ(
      tokenizer.encode(std::vector<TextSegment>{
          {"a \n", false}, {"\t<|endoftext|>\n", true}, {" \u3000", false}, {"b <|padding|> ", true}, {" ", false}}),
      (Ids{byte_id('a'), kEndOfText, byte_id('b'), byte_id(' '), 1, byte_id(' '), byte_id(' ')}));
  EXPECT_EQ(tokenizer.encode(std::vector<TextSegment>{{"<|endoftext|>", true}, {" ", false}, {"<|endoftext|>", true}}),
            (Ids{kEndOfText, kEndOfText}));
}

TEST(Tokenizer, AddBosFollowsThePostProcessor) {
  const Tokenizer neox = fixture("neox_style");
  const Tokenizer llama = fixture("llama3_style");
  EXPECT_EQ(neox.bos_id(), std::nullopt);
  EXPECT_EQ(neox.encode("", true), Ids{});
  EXPECT_EQ(llama.bos_id(), llama.id_of("<|begin_of_text|>"));
  EXPECT_EQ(llama.encode("", true), Ids{llama.bos_id().value()});
  EXPECT_EQ(llama.encode("", false), Ids{});
  Ids with_bos = llama.encode("in front of a text", true);
  ASSERT_FALSE(with_bos.empty());
  EXPECT_EQ(with_bos.front(), llama.bos_id());
  with_bos.erase(with_bos.begin());
  EXPECT_EQ(with_bos, llama.encode("in front of a text", false));
}

// A large text is known to have many ids, and by how many bytes a token has. Where bytes may be left out, or white space goes with
// a token, nothing is known.
TEST(Tokenizer, TheLeastIdsFollowFromTheLongestToken) {
  const std::string text = read_bytes(kFixtures + "neox_style.tokenizer.json");
  const Tokenizer tokenizer = Tokenizer::from_json(text, "t.json");
  std::size_t longest = 0;
  for (std::int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    longest = std::max(longest, tokenizer.token_bytes(id).size());
  }
  EXPECT_EQ(tokenizer.least_ids(""), 0);
  EXPECT_EQ(tokenizer.least_ids("a"), 1);
  const auto bytes = static_cast<std::int64_t>(4 * longest);  // of a token, four times as many before NFC
  EXPECT_EQ(tokenizer.least_ids(std::string(static_cast<std::size_t>(1000 * bytes), 'a')), 1000);
  EXPECT_EQ(tokenizer.least_ids(std::string(static_cast<std::size_t>(1000 * bytes + 1), 'a')), 1001);
  for (const char* strips : {"lstrip", "rstrip"}) {
    Json changed = Json::parse(text);
    changed["added_tokens"].back()[strips] = true;
    EXPECT_EQ(parse(changed).least_ids(std::string(1'000'000, 'a')), 0) << strips;
  }
}

TEST(Tokenizer, IdsOutOfRangeAreRefused) {
  const Tokenizer tokenizer = fixture("neox_style");
  for (const std::int64_t id : {std::int64_t{-1}, tokenizer.vocab_size()}) {
    error_of(Exit::usage, [&] { tokenizer.decode(Ids{static_cast<std::int32_t>(id)}); });
    EXPECT_FALSE(tokenizer.is_special(static_cast<std::int32_t>(id)));
  }
}

TEST(Tokenizer, CanBeMoved) {
  Tokenizer first = fixture("llama3_style");
  const Ids ids = first.encode("nothing moved", true);
  const Tokenizer second = std::move(first);
  EXPECT_EQ(second.encode("nothing moved", true), ids);
}

// ---- both engines of PCRE2 ------------------------------------------------------------------------------------------

constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

PreTokenizerStep split_step(const std::string& pattern, SplitBehavior behavior = SplitBehavior::isolated,
                            bool invert = false) {
  const SplitPattern translated = translate_split_pattern(pattern);
  EXPECT_EQ(translated.problem, "") << pattern;
  return {.pattern = translated.pcre2, .behavior = behavior, .invert = invert};
}

using Pieces = std::vector<std::string>;

Pieces pieces_of(const PreTokenizer& pre_tokenizer, const std::string& text) {
  PreTokenizer::Scratch scratch;
  scratch.begin_text(text.size());
  Pieces pieces;
  pre_tokenizer.split(text, true, scratch, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

// The rules differ in a few places, and a sample that has them all tells each from each.
TEST(PreTokenizer, EachRuleHasItsOwnPieces) {
  const std::string text = "I'm 12345 DON'T\t(x)\n\n y2  ";
  const std::vector<std::pair<PreTokenizerStep, Pieces>> expected = {
      {gpt2_step(), {"I", "'m", " 12345", " DON", "'", "T", "\t", "(", "x", ")", "\n\n", " y", "2", "  "}},
      {split_step(kLlama3), {"I", "'m", " ", "123", "45", " DON", "'T", "\t", "(x", ")\n\n", " y", "2", "  "}},
      {digits_step(true), {"I'm ", "1", "2", "3", "4", "5", " DON'T\t(x)\n\n y", "2", "  "}},
      {digits_step(false), {"I'm ", "12345", " DON'T\t(x)\n\n y", "2", "  "}},
      {punctuation_step(), {"I", "'", "m 12345 DON", "'", "T\t", "(", "x", ")", "\n\n y2  "}},
      {whitespace_step(), {"I'm", "12345", "DON'T", "(x)", "y2"}},
      {PreTokenizerStep{}, {text}}};
  for (const auto& [step, pieces] : expected) EXPECT_EQ(pieces_of(PreTokenizer({step}), text), pieces);
}

// As tokenizers 0.23.3 gives them.
TEST(PreTokenizer, AMatchIsAPieceOrGoesWithItsNeighbour) {
  const auto pieces = [](SplitBehavior behavior, bool invert, const char* pattern = "-") {
    return pieces_of(PreTokenizer({split_step(pattern, behavior, invert)}), "-a--b-");
  };
  EXPECT_EQ(pieces(SplitBehavior::isolated, false), (Pieces{"-", "a", "-", "-", "b", "-"}));
  EXPECT_EQ(pieces(SplitBehavior::removed, false), (Pieces{"a", "b"}));
  EXPECT_EQ(pieces(SplitBehavior::removed, true), (Pieces{"-", "-", "-", "-"}));
  EXPECT_EQ(pieces(SplitBehavior::with_previous, false), (Pieces{"-", "a-", "-", "b-"}));
  EXPECT_EQ(pieces(SplitBehavior::with_previous, true), (Pieces{"-a", "-", "-b", "-"}));
  EXPECT_EQ(pieces(SplitBehavior::with_next, false), (Pieces{"-a", "-", "-b", "-"}));
  EXPECT_EQ(pieces(SplitBehavior::with_next, true), (Pieces{"-", "a-", "-", "b-"}));
  EXPECT_EQ(pieces(SplitBehavior::contiguous, false), (Pieces{"-", "a", "--", "b", "-"}));
  // Matches of nothing part the characters, but for those behind a match.
  EXPECT_EQ(pieces(SplitBehavior::isolated, false, ""), (Pieces{"-", "a", "-", "-", "b", "-"}));
  EXPECT_EQ(pieces(SplitBehavior::isolated, false, "(?=b)"), (Pieces{"-a--", "b-"}));
}

TEST(PreTokenizer, InterpreterAndCompilerAgree) {
  const Vectors vectors = VectorReader(kFixtures + "llama3_style.vectors.bin").read();
  for (const PreTokenizerStep& step :
       {gpt2_step(), split_step(kLlama3), split_step(R"([\p{Lu}&&[^A-C]]+(?<=\w)|\p{Mn})"), digits_step(true),
        digits_step(false), punctuation_step()}) {
    const PreTokenizer compiled({step}), interpreted({step}, false);
    for (std::size_t i = 0; i < vectors.strings.size(); i += 10) {
      const std::string text = utf8_replace_invalid(vectors.strings[i].text);
      ASSERT_EQ(pieces_of(compiled, text), pieces_of(interpreted, text)) << escaped(text);
    }
    const std::string spaces(1'000'000, ' ');
    ASSERT_EQ(pieces_of(compiled, spaces), pieces_of(interpreted, spaces));
  }
}

// A match is tried in windows of 256 bytes, 1,024, 4,096: what lies across their ends is seen whole, characters of several
// bytes and what only looks ahead too.
TEST(PreTokenizer, WindowsOfAMatchDoNotShow) {
  for (const bool use_jit : {true, false}) {
    const PreTokenizer pre_tokenizer({split_step(R"( ?é+\b|x(?=y)|a+b|\s+(?!\S)|\s+|a)")}, use_jit);
    for (const std::size_t length :
         {1, 124, 127, 128, 129, 252, 255, 256, 257, 510, 512, 1023, 1024, 1025, 4096, 5000}) {
      std::string accents;
      for (std::size_t i = 0; i < length; ++i) accents += "é";
      const std::string run(length, 'a'), spaces(length, ' ');
      EXPECT_EQ(pieces_of(pre_tokenizer, " " + accents + "-"), (Pieces{" " + accents, "-"})) << length;
      EXPECT_EQ(pieces_of(pre_tokenizer, run + "b!"), (Pieces{run + "b", "!"})) << length;
      EXPECT_EQ(pieces_of(pre_tokenizer, run + "!").size(), length + 1);
      EXPECT_EQ(pieces_of(pre_tokenizer, spaces + "xy"),
                (length == 1 ? Pieces{" ", "x", "y"} : Pieces{spaces.substr(1), " ", "x", "y"}))
          << length;
    }
  }
}

// Whatever a text does to a pattern, it ends: with pieces, or with one line. The same pattern goes on with other texts.
TEST(PreTokenizer, ATextThatTakesTooLongIsRefused) {
  const auto refused = [](const PreTokenizer& pre_tokenizer, const std::string& text) {
    return reason_of(Exit::usage, [&] { pieces_of(pre_tokenizer, text); }).find("takes too long at byte ") !=
           std::string::npos;
  };
  const std::string bomb = std::string(40, 'a') + "!";
  std::string bombs;  // each of them is cheap
  for (int i = 0; i < 2000; ++i) bombs += std::string(17, 'a') + "!";
  for (const bool use_jit : {true, false}) {
    const PreTokenizer twice({split_step("(a+)+$")}, use_jit);
    EXPECT_TRUE(refused(twice, bomb));
    EXPECT_TRUE(refused(twice, bombs));
    EXPECT_EQ(pieces_of(twice, "aaaa!aa"), (Pieces{"aaaa!", "aa"}));
    // No step of PCRE2's: from each place it looks for the end of a run.
    const PreTokenizer to_the_end({split_step("a+[bc]")}, use_jit);
    EXPECT_TRUE(refused(to_the_end, std::string(1'000'000, 'a')));
    EXPECT_EQ(pieces_of(to_the_end, std::string(1'000'000, 'a') + "b").size(), 1u);
    // Many steps of one match are no reason: a word of a megabyte.
    EXPECT_EQ(pieces_of(PreTokenizer({split_step("(?:ab|c)+")}, use_jit), std::string(100'000, 'c')).size(), 1u);
  }
}

TEST(SplitPattern, WhatMeansSomethingElseOrNothingIsRefused) {
  for (const char* pattern :
       {"(",         ")",      "[",           "[]",      "[^]",    "a**",         "a{2}?",       "(?:a?)*",
        "(?:a*?)*",  "(a)\\1", "(?<n>a)",     "(?m:a)",  "a(?i)b", "(?i:\u00e9)", "(?i:\\p{L})", "(?i:ss)",
        "\\G",       "\\K",    "\\R",         "\\X",     "\\pL",   "\\p{C}",      "\\p{Letter}", "\\x{0}",
        "\\x{D800}", "\\xE9",  "[[:alpha:]]", "[a-c-e]", "[c-a]",  "[\\w-x]",     "(?<=a+)b",    "(?<=(?=a))b",
        "^*",        "{",      "a{",          "a{,}",    "a{3,2}", "a{1001}",     "(?:a{0,2}+)", "\\"}) {
    EXPECT_NE(translate_split_pattern(pattern).problem, "") << pattern;
  }
  EXPECT_EQ(translate_split_pattern("a)").problem, "at character 2: got ), expected no ) without (");
  EXPECT_EQ(translate_split_pattern("a{1000}").problem, "");
}

TEST(SplitPattern, TheLargestPatternIsOneThatPcre2Takes) {
  EXPECT_EQ(translate_split_pattern(std::string(5999, 'a')).problem, "");
  EXPECT_EQ(translate_split_pattern(std::string(6000, 'a')).problem, "");
  EXPECT_EQ(translate_split_pattern(std::string(6001, 'a')).problem, "is too large: 48008, at most 48000 are accepted");
  EXPECT_EQ(translate_split_pattern(std::string(8193, 'a')).problem, "has 8193 bytes, at most 8192 are accepted");
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '(') + "a" + std::string(static_cast<std::size_t>(depth), ')');
  };
  EXPECT_EQ(translate_split_pattern(nested(29)).problem, "");
  EXPECT_NE(translate_split_pattern(nested(30)).problem, "");
  // The dearest parts of each kind, as many as go in.
  for (const std::string part :
       {"\\b", "\\p{L}", "[\\W\\P{M}]", "(?:ab)", "(?i:a)", "(?:\\p{Lo}{2,}x){1,9}", "[a-z&&[^c]]"}) {
    const auto repeated = [&](std::size_t times) {
      std::string text;
      for (std::size_t i = 0; i < times; ++i) text += part;
      return text;
    };
    std::size_t fits = 1, too_many = 8193;  // the largest number of times, by bisection
    while (too_many - fits > 1) {
      const std::size_t middle = (fits + too_many) / 2;
      (translate_split_pattern(repeated(middle)).problem.empty() ? fits : too_many) = middle;
    }
    EXPECT_NO_THROW(PreTokenizer({split_step(repeated(fits))})) << part << " * " << fits;
  }
}

// ---- time bounds: B84, B85 ----------------------------------------------------------------------

// Generous, for a slow and busy machine under sanitizers; a quadratic algorithm would take hours.
constexpr double kTimeBound = 60;

double seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(TokenizerTime, LongWordsAndRunsAreNotQuadratic) {
  const int shorter = test::every_nth(8);
  std::string marks = "a";
  for (int i = 0; i < 200'000 / shorter; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0323";
  const std::pair<const char*, std::string> cases[] = {
      {"one word of 10 MB", std::string(10'000'000 / shorter, 'a')},
      {"1 M spaces", std::string(1'000'000 / shorter, ' ')},
      {"1 M spaces and a letter", std::string(1'000'000 / shorter, ' ') + "x"},
      {"1 M line breaks", std::string(1'000'000 / shorter, '\n')},
      {"1 M digits", std::string(1'000'000 / shorter, '7')},
      {"1 M quotes", std::string(1'000'000 / shorter, '\'')},
      {"200,000 combining marks out of order", marks},
  };
  for (const char* name : {"neox_style", "llama3_style"}) {
    const Tokenizer tokenizer = fixture(name);
    for (const auto& [what, text] : cases) {
      Ids ids;
      EXPECT_LT(seconds([&, &text = text] { ids = tokenizer.encode(text, false); }), kTimeBound) << what;
      EXPECT_EQ(tokenizer.decode(ids), name == std::string("neox_style") ? normalize(text, NormalForm::nfc) : text)
          << what;
    }
  }
}

// ---- damaged and unsupported files: B74 to B81 ----------------------------------------------------------------------

std::string reason(const Change& change, const std::string& name = "neox_style") {
  return reason_of_change(name, change);
}

void expect_refused(const Change& change, const std::vector<std::string>& words) {
  expect_reason(reason(change), words);
}

TEST(TokenizerFile, AcceptsBothSpellingsOfMerges) {
  Json json = document("neox_style");
  Json pairs = Json::array();
  for (const Json& merge : json["model"]["merges"]) {
    const std::string text = merge.get<std::string>();
    const std::size_t space = text.find(' ');
    pairs.push_back({text.substr(0, space), text.substr(space + 1)});
  }
  json["model"]["merges"] = pairs;
  const std::string text = "the quick brown fox, 12345 naïve 中国";
  EXPECT_EQ(parse(json).encode(text, true), fixture("neox_style").encode(text, true));
}

TEST(TokenizerFile, RefusesMoreAddedTokensThanTheirAutomatonMayTake) {
  expect_refused(
      [](Json& j) {
        std::int32_t id = static_cast<std::int32_t>(j["model"]["vocab"].size());
        for (const Json& token : j["added_tokens"]) id = std::max(id, token["id"].get<std::int32_t>() + 1);
        for (int i = 0; i < 4097; ++i) {
          j["added_tokens"].push_back(
              {{"content", std::string(4088, 'z') + std::to_string(10'000'000 + i)}, {"id", id++}});
        }
      },
      {"added_tokens", "16777216 bytes"});
}

TEST(TokenizerFile, RefusesBadMerges) {
  expect_refused(set("/model/merges/-", "zzz q"), {"model.merges[", "zzz", "not in the vocabulary"});
  expect_refused(set("/model/merges/-", "q Ġthe"), {"not in the vocabulary"});
  expect_refused(set("/model/merges/-", "a b c"), {"model.merges[", "left right"});
  expect_refused(set("/model/merges/-", "ab"), {"left right"});
  expect_refused(set("/model/merges/-", {"a", "b", "c"}), {"left"});
  expect_refused(set("/model/merges/-", {"a", 1}), {"a string"});
  for (const char* merge : {"5", "null", R"({"left": "a", "right": "b"})"}) {
    expect_refused(set("/model/merges/-", Json::parse(merge)), {"model.merges[", "\"left right\" or"});
  }
  expect_refused(set("/model/merges", nullptr), {"model.merges", "a list"});
}

TEST(TokenizerFile, TokensThatCollideCostNoMoreThanOthers) {
  expect_no_collisions([](const std::vector<std::string>& names) {
    Json json = document("neox_style");
    Json& vocab = json["model"]["vocab"];
    const std::int32_t first = static_cast<std::int32_t>(vocab.size());
    std::int32_t next = first;
    for (const std::string& name : names) vocab[name] = next++;
    for (Json& token : json["added_tokens"]) {
      const std::int32_t id = token["id"];
      if (id >= first) token["id"] = id + next - first;
    }
    const std::string text = json.dump();
    return processor_seconds([&] { Tokenizer::from_json(text, "t.json"); });
  });
}

TEST(TokenizerFile, RefusesBadIds) {
  expect_refused(set("/model/vocab/zzz", 5), {"model.vocab", "id 5 belongs to both"});
  expect_refused(set("/model/vocab/zzz", 50'000), {"model.vocab", "no token has the id", "holes"});
  expect_refused(set("/model/vocab/zzz", 1ll << 31), {"model.vocab['zzz']", "2147483648"});
  expect_refused(set("/model/vocab/zzz", 1ull << 63), {"model.vocab['zzz']"});
  expect_refused(set("/model/vocab/zzz", 1'000'000), {"model.vocab['zzz']", "999999"});
  expect_refused(set("/model/vocab/zzz", -1), {"model.vocab['zzz']", "-1"});
  expect_refused(set("/model/vocab/<0x-1>", 1.5), {"model.vocab['<0x-1>']", "1.5"});
  expect_refused(set("/model/vocab/zzz", "7"), {"model.vocab['zzz']"});
  expect_refused(set("/model/vocab/", 1'999), {"model.vocab", "empty"});
  expect_refused([](Json& j) { j["model"]["vocab"][std::string(5000, 'z')] = 1'999; }, {"model.vocab", "5000 bytes"});
  expect_refused(set("/model/vocab", Json::array()), {"model.vocab"});
  expect_refused(set("/model/vocab", Json::object()), {"t.json"});
}

TEST(TokenizerFile, RefusesAnIncompleteByteAlphabet) {
  const auto rename = [](Json& j, const std::string& from, const std::string& to) {
    Json& vocab = j["model"]["vocab"];
    vocab[to] = vocab[from];
    vocab.erase(from);
    j["model"]["merges"] = Json::array();
  };
  expect_refused([&](Json& j) { rename(j, "Q", "QQQQ"); }, {"model.vocab", "0x51", "'Q'"});
  EXPECT_EQ(reason([&](Json& j) { rename(j, alphabet_character(0xFF), "QQQQ"); }),
            "accepted");  // never in UTF-8
}

TEST(TokenizerFile, RefusesBadAddedTokens) {
  const auto with = [](const char* content, std::int64_t id) {
    return [=](Json& j) { j["added_tokens"].push_back({{"content", content}, {"id", id}, {"special", false}}); };
  };
  const std::int64_t size = fixture("neox_style").vocab_size();
  EXPECT_EQ(reason(with("zzz", size)), "accepted");
  expect_refused(with("zzz", size + 1), {"holes"});
  expect_refused(with("zzz", 5), {"added_tokens[", "id 5 belongs to both"});
  expect_refused(with("<|padding|>", size), {"added_tokens[", "each added token once"});
  expect_refused(with("a", size), {"added_tokens[", "its id in the vocabulary"});
  expect_refused(with("", size), {"added_tokens[", "empty"});
  expect_refused([&](Json& j) { with("yyy", size + 1)(j), with("zzz", size)(j); }, {"order of their ids"});
  expect_refused(set("/added_tokens/0/special", "yes"), {"added_tokens[0].special", "true or false"});
}

// Without the key a special token is sought in the text as it is, any other in the normalized one.
TEST(TokenizerFile, TheDefaultOfNormalizedIsForTokensThatAreNotSpecial) {
  const auto [decomposed, composed] = std::pair("<e\xCC\x81>", "<\xC3\xA9>");
  for (const bool special : {true, false}) {
    Json json = document("neox_style");
    ASSERT_FALSE(json["normalizer"].is_null());
    const auto id = static_cast<std::int32_t>(fixture("neox_style").vocab_size());
    json["added_tokens"].push_back({{"content", decomposed}, {"id", id}, {"special", special}});
    const Tokenizer tokenizer = parse(json);
    EXPECT_EQ(tokenizer.is_special(id), special);
    EXPECT_FALSE(tokenizer.is_special(id + 1));
    EXPECT_EQ(tokenizer.encode(decomposed, false, Tokenizer::Special::allow), Ids{id}) << special;
    EXPECT_EQ(tokenizer.encode(composed, false, Tokenizer::Special::allow) == Ids{id}, !special) << special;
  }
}

TEST(TokenizerFile, RefusesWhatItDoesNotSupportByName) {
  expect_refused(set("/normalizer", {{"type", "Lowercase"}}), {"normalizer.type", "Lowercase"});
  expect_refused(set("/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}}),
                 {"normalizer.normalizers[0].type", "Lowercase"});
  expect_refused(set("/pre_tokenizer", {{"type", "Metaspace"}}), {"pre_tokenizer.type", "Metaspace"});
  expect_refused(set("/pre_tokenizer", nullptr), {"pre_tokenizer"});
  expect_refused(set("/decoder/type", "Metaspace"), {"decoder.type", "Metaspace"});
  expect_refused(set("/decoder", nullptr), {"decoder"});
  expect_refused(set("/post_processor/type", "BertProcessing"), {"post_processor.type", "BertProcessing"});
  expect_refused(set("/model/type", "Unigram"), {"model.type", "Unigram"});
  expect_refused(set("/model/dropout", 0.1), {"model.dropout"});
  expect_refused(set("/model/continuing_subword_prefix", "##"), {"model.continuing_subword_prefix"});
  expect_refused(set("/model/end_of_word_suffix", "</w>"), {"model.end_of_word_suffix"});
}

// weft adds no tokens to a text and takes none away; every byte has a token, so none is unknown.
TEST(TokenizerFile, WhatChangesNoIdIsIgnored) {
  const std::string text = "a text of more than two tokens";
  const Ids expected = fixture("neox_style").encode(text, true);
  const auto ids = [&](const Change& change) {
    Json json = document("neox_style");
    change(json);
    return parse(json).encode(text, true);
  };
  EXPECT_EQ(ids([](Json& j) { j["truncation"] = {{"max_length", 2}, {"strategy", "LongestFirst"}}; }), expected);
  EXPECT_EQ(ids([](Json& j) { j["padding"] = {{"strategy", {{"Fixed", 99}}}, {"pad_id", 0}}; }), expected);
  EXPECT_EQ(ids(set("/model/unk_token", "<|endoftext|>")), expected);
  EXPECT_EQ(ids(set("/model/byte_fallback", true)), expected);
  EXPECT_EQ(ids([](Json& j) { j["model"]["merges"].insert(j["model"]["merges"].begin(), "#version: 0.2"); }), expected);
}

// Of a merge that is repeated the last place counts: a and b are merged after b and c.
TEST(TokenizerFile, ARepeatedMergeHasTheRankOfItsLastPlace) {
  const auto ids = [](const Json& merges) {
    const Json json = {
        {"model",
         {{"type", "BPE"}, {"merges", merges}, {"vocab", {{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"bc", 4}}}}},
        {"decoder", {{"type", "Fuse"}}}};
    return parse(json).encode("abc", false);
  };
  EXPECT_EQ(ids({"a b", "b c"}), (Ids{3, 2}));
  EXPECT_EQ(ids({"a b", "b c", "a b"}), (Ids{0, 4}));
}

// What switches an option off, in each of its spellings, is accepted, and so is a file without the option.
TEST(TokenizerFile, OptionsThatAreOffAreAccepted) {
  for (const char* option : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    for (const Json& off : {Json(nullptr), Json(false), Json(""), Json(0), Json(0.0)}) {
      EXPECT_EQ(reason([&](Json& j) { j["model"][option] = off; }), "accepted") << option << " " << off;
    }
    EXPECT_EQ(reason([&](Json& j) { j["model"].erase(option); }), "accepted") << option;
  }
  for (const char* part : {"truncation", "padding", "post_processor", "normalizer", "added_tokens"}) {
    EXPECT_EQ(reason([&](Json& j) { j[part] = nullptr; }), "accepted") << part;
    EXPECT_EQ(reason([&](Json& j) { j.erase(part); }), "accepted") << part;
  }
}

// A flag that is not in the file, or null, has the default of the original.
TEST(TokenizerFile, FlagsThatAreAbsentHaveTheirDefaults) {
  const auto ids = [](const Json& json, const std::string& text) {
    return parse(json).encode(text, true, Tokenizer::Special::allow);
  };
  const auto expect_default = [&](const std::function<Json&(Json&)>& place, const char* key, bool expected,
                                  const std::string& text) {
    Json json = document("neox_style");
    place(json)[key] = expected;
    const Ids by_default = ids(json, text);
    place(json)[key] = !expected;
    EXPECT_NE(ids(json, text), by_default) << key << " makes no difference here";
    place(json)[key] = nullptr;
    EXPECT_EQ(ids(json, text), by_default) << key;
    place(json).erase(key);
    EXPECT_EQ(ids(json, text), by_default) << key;
  };
  const auto byte_level = [](Json& j) -> Json& { return j["pre_tokenizer"]; };
  expect_default(byte_level, "use_regex", true, "\uFFFDa");
  expect_default(byte_level, "add_prefix_space", true, "the quick");
  const auto added = [](Json& j) -> Json& { return j["added_tokens"][0]; };
  const std::string token = document("neox_style")["added_tokens"][0]["content"];
  expect_default(added, "lstrip", false, "a " + token + " b");
  expect_default(added, "rstrip", false, "a " + token + " b");
  expect_default(added, "single_word", false, "a" + token + "b");
}

TEST(TokenizerFile, TheLimitsThemselvesAreGood) {
  const auto id = static_cast<std::int64_t>(fixture("neox_style").vocab_size());
  const auto with_token = [&](std::size_t bytes) {
    return [=](Json& j) { j["added_tokens"].push_back({{"content", std::string(bytes, 'z')}, {"id", id}}); };
  };
  EXPECT_EQ(reason(with_token(4096)), "accepted");
  expect_refused(with_token(4097), {"4097 bytes, at most 4096"});
  const auto pre_tokenizers = [](std::size_t digits) {
    return [=](Json& j) {
      Json list = Json::array_t(digits, {{"type", "Digits"}});
      list.push_back(j["pre_tokenizer"]);
      j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", list}};
    };
  };
  EXPECT_EQ(reason(pre_tokenizers(7)), "accepted");
  expect_refused(pre_tokenizers(8), {"more than 8 pre-tokenizers"});
}

TEST(TokenizerFile, RefusesPatternsAndTemplatesItDoesNotKnow) {
  const auto expect = [](const Change& change, const char* words) {
    expect_contains(reason(change, "llama3_style"), words);
  };
  const auto split = [](const char* key, const Json& value) {
    return set(std::string("/pre_tokenizer/pretokenizers/0/") + key, value);
  };
  const auto single = [](Json& j) -> Json& { return j["post_processor"]["processors"][1]["single"]; };
  expect(split("pattern/Regex", "(a)\\1"),
         "pretokenizers[0].pattern.Regex: at character 4: got \\, expected an escape that is known");
  expect(split("pattern", {{"String", std::string(257, 'x')}}), "pretokenizers[0].pattern.String: got 257 bytes");
  expect(split("behavior", "removed"), "behavior");
  expect(split("invert", 1), "invert");
  expect([&](Json& j) { single(j).push_back(single(j)[0]); }, "single");
  expect([&](Json& j) { single(j).insert(single(j).begin(), single(j)[0]); }, "in front of the text");
  expect([&](Json& j) { single(j) = Json::array(); }, "in front of the text");
  expect(
      [](Json& j) {
        for (Json& token : j["post_processor"]["processors"][1]["special_tokens"]) token["ids"].push_back(0);
      },
      "expected one id");
  expect([&](Json& j) { std::swap(single(j)[0], single(j)[1]); }, "single");
  // A second template, in the same list or in one within it, with a token or without.
  const auto processors = [](Json& j) -> Json& { return j["post_processor"]["processors"]; };
  expect([&](Json& j) { processors(j).push_back(processors(j)[1]); }, "processors[2].single");
  expect(
      [&](Json& j) {
        Json second = processors(j)[1];
        second["single"].erase(0);
        processors(j).push_back({{"type", "Sequence"}, {"processors", {second}}});
      },
      "processors[2].processors[0].single");
  expect(set("/post_processor/processors/1/special_tokens", Json::object()), "special_tokens");
}

TEST(TokenizerFile, RefusesWhatIsNotATokenizer) {
  for (const char* text : {"", "{", "[]", "{}", "null", "{\"model\":{}}", "{\"model\":{\"type\":\"BPE\"}}", "\xFF"}) {
    EXPECT_THROW(Tokenizer::from_json(text, "t.json"), Error) << text;
  }
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "{\"normalizer\":";
  EXPECT_THROW(Tokenizer::from_json(deep, "t.json"), Error);
}

// ---- the published tokenizer, where it is at hand -------------------------------------------------------------------

TEST(TokenizerShared, PublishedNeoxTokenizer) {
  const char* directory = std::getenv("WEFT_SHARED_DATA");
  if (directory == nullptr) GTEST_SKIP() << "WEFT_SHARED_DATA is not set";
  const Tokenizer tokenizer = load(std::string(directory) + "/gpt-neox-20b.tokenizer.json");
  EXPECT_EQ(tokenizer.vocab_size(), 50'277);
  EXPECT_EQ(tokenizer.encode("Hello, world!", true), (Ids{12092, 13, 1533, 2}));
  EXPECT_EQ(tokenizer.encode(std::string(24, ' '), false), Ids{50'254});
  EXPECT_EQ(tokenizer.id_of("<|endoftext|>"), 0);
}

// encode() remembers 65,536 words of at most 32 bytes: past that number, and for words around that length, the ids are those
// of a call that remembers nothing.
TEST(Tokenizer, TheCacheOfWordsChangesNothing) {
  const Tokenizer tokenizer = fixture("neox_style");
  std::string text;
  std::vector<std::string> words;
  for (int i = 0; i < 140'003; ++i) {  // full after less than half of them
    std::string word = " ";
    for (int rest = i; rest > 0 || word.size() < 3; rest /= 26) word += static_cast<char>('a' + rest % 26);
    words.push_back(word);
  }
  for (const std::size_t length : {31u, 32u, 33u, 34u}) words.push_back(" " + std::string(length - 1, 'q'));
  const std::size_t distinct = words.size();
  for (std::size_t i = 0; i < distinct; i += 7) words.push_back(words[distinct - 1 - i]);  // again, remembered or not
  Ids expected;
  for (const std::string& word : words) {
    text += word;
    const Ids ids = tokenizer.encode(word, false);
    expected.insert(expected.end(), ids.begin(), ids.end());
  }
  EXPECT_TRUE(tokenizer.encode(text, false) == expected);
}

// ---- added tokens

// What split() hands on, as text: parts in brackets, tokens by their id.
std::string split_text(const AddedTokenMatcher& matcher, std::string_view text, bool allow_special = true) {
  std::string out;
  matcher.split(
      text, allow_special, [&](std::string_view part) { out += "[" + std::string(part) + "]"; },
      [&](std::int32_t id) { out += std::to_string(id); });
  return out;
}

// Every character of the property White_Space (Unicode 15, PropList.txt), and its neighbours, which have it not.
TEST(AddedTokens, StripEachWhiteSpaceAndNothingBesideIt) {
  const std::vector<std::pair<char32_t, char32_t>> ranges = {
      {0x09, 0x0D},     {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
      {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
  AddedToken token{.content = "<x>", .id = 7, .lstrip = true, .rstrip = true};
  const AddedTokenMatcher matcher({token});
  for (const auto& [first, last] : ranges) {
    for (char32_t c = first - 1; c <= last + 1; ++c) {
      const std::string character = utf8(c);
      const bool space = c >= first && c <= last;
      const std::string kept = space ? "" : character;
      EXPECT_EQ(split_text(matcher, "a" + character + "<x>" + character + "b"), "[a" + kept + "]7[" + kept + "b]")
          << format("U+%04X", static_cast<unsigned>(c));
      // Next to others, and at the ends of the text.
      EXPECT_EQ(split_text(matcher, character + " <x> " + character),
                space ? "7" : "[" + character + "]7[" + character + "]")
          << format("U+%04X", static_cast<unsigned>(c));
    }
  }
}

// What is part of a word: a character of each category on both sides of the line, and those that \w has beside them.
TEST(AddedTokens, ASingleWordStandsBetweenCharactersOfNoWord) {
  AddedToken token{.content = "x", .id = 7, .single_word = true};
  const AddedTokenMatcher matcher({token});
  const std::vector<std::pair<char32_t, bool>> characters = {
      {U'a', true},     {U'Z', true},     {0x01C5, true},   {0x02B0, true},   {0x05D0, true},   {0x0301, true},
      {0x0903, true},   {0x20DD, true},   {U'0', true},     {0x0660, true},   {0x2160, true},   {U'_', true},
      {0x203F, true},   {0x200B, false},  {0x200C, true},   {0x200D, true},   {0x200E, false},  {0x24B5, false},
      {0x24B6, true},   {0x24E9, true},   {0x24EA, false},  {0x1F12F, false}, {0x1F130, true},  {0x1F149, true},
      {0x1F14A, false}, {0x1F14F, false}, {0x1F150, true},  {0x1F169, true},  {0x1F16A, false}, {0x1F16F, false},
      {0x1F170, true},  {0x1F189, true},  {0x1F18A, false}, {U' ', false},    {U'-', false},    {U'(', false},
      {0xB2, false},    {0xA9, false},    {U'$', false},    {U'+', false},    {U'.', false},    {0x2028, false}};
  for (const auto& [c, word] : characters) {
    const std::string character = utf8(c), whole = character + "x", after = "x" + character;
    EXPECT_EQ(split_text(matcher, whole), word ? "[" + whole + "]" : "[" + character + "]7") << format("U+%04X", c);
    EXPECT_EQ(split_text(matcher, after), word ? "[" + after + "]" : "7[" + character + "]") << format("U+%04X", c);
  }
}

// Leftmost-longest by looking at every token at every position: the definition.
std::string split_by_definition(const std::vector<AddedToken>& tokens, std::string_view text, bool allow_special) {
  std::string out;
  std::size_t done = 0;
  for (std::size_t position = 0; position < text.size();) {
    const AddedToken* longest = nullptr;
    for (const AddedToken& token : tokens) {
      if (!text.substr(position).starts_with(token.content)) continue;
      if (longest == nullptr || token.content.size() > longest->content.size()) longest = &token;
    }
    if (longest == nullptr) {
      ++position;
      continue;
    }
    const std::size_t begin = position;
    position += longest->content.size();
    if (longest->special && !allow_special) continue;
    if (done < begin) out += "[" + std::string(text.substr(done, begin - done)) + "]";
    out += std::to_string(longest->id);
    done = position;
  }
  if (done < text.size()) out += "[" + std::string(text.substr(done)) + "]";
  return out;
}

// Few letters, so that tokens overlap, contain each other and begin within each other; blocks of every small size, so that
// each text crosses many of them.
TEST(AddedTokens, AreLeftmostLongestWhateverTheBlock) {
  std::uint32_t random = 1;
  const auto next = [&](std::uint32_t limit) {
    random = random * 1664525 + 1013904223;
    return (random >> 16) % limit;
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<AddedToken> tokens(1 + next(6));
    for (AddedToken& token : tokens) {
      for (std::uint32_t length = 1 + next(5); token.content.size() < length;) {
        token.content += static_cast<char>('a' + next(2));
      }
      token.id = static_cast<std::int32_t>(&token - tokens.data());
      token.special = next(4) == 0;
    }
    std::string text;
    while (text.size() < 40) text += static_cast<char>('a' + next(3));
    const bool allow_special = next(2) == 0;
    const std::string expected = split_by_definition(tokens, text, allow_special);
    for (const std::size_t block : {1u, 2u, 3u, 7u, 19u, 40u, 1000u}) {
      ASSERT_EQ(split_text(AddedTokenMatcher(tokens, block), text, allow_special), expected)
          << text << " in blocks of " << block;
    }
  }
}

TEST(AddedTokens, NoneOfThemLeaveTheTextWhole) {
  const AddedTokenMatcher none({});
  EXPECT_EQ(split_text(none, "text"), "[text]");
  EXPECT_EQ(split_text(none, ""), "");
}

// A token of 4,096 bytes whose first 4,095 are everywhere in the text costs what one of 16 bytes costs. Trying it at each
// position cost 250 times as much.
TEST(AddedTokens, TheTimeIsThatOfTheTextAlone) {
  const std::string text(1 << 21, 'a');
  const auto seconds = [&](std::size_t length) {
    AddedToken token;
    token.content = std::string(length - 1, 'a') + "b";
    const AddedTokenMatcher matcher({token});
    return processor_seconds([&] { EXPECT_EQ(split_text(matcher, text).size(), text.size() + 2); });
  };
  const double few = std::min(seconds(16), seconds(16));
  EXPECT_LT(seconds(4096), 10 * few + 0.05);
  // The same with a token that ends in what the text consists of.
  AddedToken front;
  front.content = "b" + std::string(4095, 'a');
  const AddedTokenMatcher matcher({front});
  EXPECT_LT(processor_seconds([&] { split_text(matcher, text); }), 10 * few + 0.05);
}

}  // namespace
}  // namespace weft
