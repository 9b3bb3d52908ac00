// SentencePiece-style tokenizers: decoding against the Hugging Face `tokenizers` library (test/fixtures/tokenizer, made by
// scripts/make_tokenizer_vectors.py), streams, files that are refused, and time bounds. That encoding agrees, too, is tested
// in tokenizer_test.cpp.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "colliding_names.h"
#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/text_stream.h"
#include "llmc/text/normalizer.h"
#include "llmc/text/tokenizer.h"
#include "processor_time.h"
#include "test/cpp/tokenizer_files.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

// A tokenizer of few tokens: those of the bytes of é, but not of ж; without normalizer, pre-tokenizer and merges.
Json small() {
  return Json::parse(R"({
    "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": false, "merges": [],
              "vocab": {"<unk>": 0, "<s>": 1, "\u2581": 2, "a": 3, "b": 4, "<0xC3>": 5, "<0xA9>": 6, "ab": 7}},
    "added_tokens": [{"id": 1, "content": "<s>", "special": true}],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null,
    "decoder": {"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
      {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}})");
}

std::string streamed(const Tokenizer& tokenizer, const Ids& before, const Ids& ids) {
  StreamingDecoder stream(tokenizer, before);
  std::string text;
  for (const std::int32_t id : ids) {
    const std::string part = stream.push(id);
    EXPECT_EQ(utf8_replace_invalid(part), part) << "a part that is not UTF-8";
    text += part;
  }
  return text + stream.finish();
}

// ---- decoding --------------------------------------------------------------------------------------------------------

struct Decoded {
  bool skip_special;
  Ids ids;
  std::string text;
};

std::vector<Decoded> decoded_vectors(const std::string& name) {
  const MappedFile file(kFixtures + name + ".texts.bin");
  std::size_t position = 0;
  const auto take = [&](std::size_t bytes) {
    const std::string_view taken = file.text().substr(position, bytes);
    if (taken.size() != bytes) throw std::runtime_error("decoded vectors: short file");
    position += bytes;
    return taken;
  };
  const auto number = [&]<typename T>(T value) {
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  };
  if (take(8) != "WTOKTXT1") throw std::runtime_error("not a file of decoded vectors");
  std::vector<Decoded> vectors(number(std::uint32_t{}));
  for (Decoded& one : vectors) {
    one.skip_special = (number(std::uint8_t{}) & 8) != 0;
    one.ids.resize(number(std::uint32_t{}));
    for (std::int32_t& id : one.ids) id = number(std::uint16_t{});
    one.text = take(number(std::uint32_t{}));
  }
  return vectors;
}

class SentencePiece : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Tokenizer, SentencePiece,
                         testing::Values("llama2_style", "mistral_style", "metaspace_style", "gemma3_style"),
                         [](const auto& info) { return info.param; });

TEST_P(SentencePiece, DecodesEveryListOfIdsAsTheOriginal) {
  const Tokenizer tokenizer = parse(document(GetParam()));
  const std::vector<Decoded> vectors = decoded_vectors(GetParam());
  EXPECT_GE(vectors.size(), 500u);
  for (const Decoded& one : vectors) {
    ASSERT_EQ(tokenizer.decode(one.ids, one.skip_special), one.text) << testing::PrintToString(one.ids);
    if (one.skip_special) continue;
    ASSERT_EQ(streamed(tokenizer, {}, one.ids), one.text) << testing::PrintToString(one.ids);
  }
}

// Behind finish() a stream is at the beginning of another text, whatever the one before has left held back.
TEST_P(SentencePiece, AStreamThatHasEndedBeginsAnew) {
  const Tokenizer tokenizer = parse(document(GetParam()));
  StreamingDecoder stream(tokenizer);
  for (const Decoded& one : decoded_vectors(GetParam())) {
    if (one.skip_special) continue;
    std::string text;
    for (const std::int32_t id : one.ids) text += stream.push(id);
    ASSERT_EQ(text + stream.finish(), one.text) << testing::PrintToString(one.ids);
    ASSERT_EQ(stream.finish(), "");
  }
}

// What a stream gives after every prefix of the ids is the beginning of what it gives in the end.
TEST_P(SentencePiece, StreamsNeverTakeTextBack) {
  const Tokenizer tokenizer = parse(document(GetParam()));
  for (const Decoded& one : decoded_vectors(GetParam())) {
    for (std::size_t cut = 0; cut <= one.ids.size(); ++cut) {
      const Ids before(one.ids.begin(), one.ids.begin() + static_cast<std::ptrdiff_t>(cut));
      StreamingDecoder stream(tokenizer);
      std::string text;
      for (const std::int32_t id : before) text += stream.push(id);
      ASSERT_TRUE(tokenizer.decode(one.ids).starts_with(text)) << testing::PrintToString(before);
    }
  }
}

TEST(SentencePieceDecoder, OneWrongByteMakesTheWholeRowWrong) {
  const Tokenizer tokenizer = parse(small());
  EXPECT_EQ(tokenizer.decode(Ids{5, 6, 5, 6}), "éé");
  EXPECT_EQ(tokenizer.decode(Ids{5, 6, 5}), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer.decode(Ids{5, 6, 6, 3, 5, 6}), "\uFFFD\uFFFD\uFFFDaé");
  StreamingDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(5), "");
  EXPECT_EQ(stream.push(6), "") << "a wrong byte may follow";
  EXPECT_EQ(stream.push(3), "éa");
  EXPECT_EQ(stream.push(6), "\uFFFD") << "nothing can make this byte right";
  EXPECT_EQ(stream.push(5), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

// The token of a byte is <0x, two digits and >; what looks nearly so is text.
TEST(SentencePieceDecoder, OnlyTwoDigitsAreAByte) {
  Json json = small();
  const std::vector<std::string> words = {"<0x41",  "<0x4>",  "<0x041>", "<0x410>", "<0x4g>",
                                          "<0x4/>", "<0x4:>", "<0X41>",  "x0x41>",  "<0x41)"};
  std::int32_t id = 8;
  for (const std::string& word : words) json["model"]["vocab"][word] = id++;
  json["model"]["vocab"]["<0x4a>"] = id;
  const Tokenizer tokenizer = parse(json);
  for (std::size_t i = 0; i < words.size(); ++i) {
    EXPECT_EQ(tokenizer.decode(Ids{3, static_cast<std::int32_t>(8 + i)}), "a" + words[i]);
  }
  EXPECT_EQ(tokenizer.decode(Ids{3, id}), "aJ");
}

// A special token that spells a byte is left out before bytes become characters.
TEST(SentencePieceDecoder, ASpecialTokenMaySpellAByte) {
  Json json = small();
  json["added_tokens"].push_back({{"id", 5}, {"content", "<0xC3>"}, {"special", true}});
  const Tokenizer tokenizer = parse(json);
  for (const Ids& ids : {Ids{3, 5, 6, 4}, Ids{5}, Ids{6, 5}, Ids{3, 5, 1, 6}, Ids{5, 5, 4}}) {
    TextStream stream(&tokenizer, {}, {}, true, 0);
    std::string text;
    for (const std::int32_t id : ids) text += stream.push(id);
    EXPECT_EQ(text + stream.finish(), utf8_replace_invalid(tokenizer.decode(ids, true)));
  }
}

TEST(SentencePieceDecoder, OnlyTheFirstSpaceOfATextIsTakenAway) {
  const Tokenizer tokenizer = parse(small());
  EXPECT_EQ(tokenizer.decode(Ids{2, 3, 2, 3}), "a a");
  EXPECT_EQ(tokenizer.decode(Ids{2, 2, 3}), " a");
  EXPECT_EQ(tokenizer.decode(Ids{1, 2, 3}), "<s> a");
  EXPECT_EQ(tokenizer.decode(Ids{1, 2, 3}, true), "a");
  EXPECT_EQ(streamed(tokenizer, {}, {2, 3}), "a");
  StreamingDecoder stream(tokenizer);
  for (int text = 0; text < 2; ++text) {  // finish() ends one text and begins another
    EXPECT_EQ(stream.push(2), "");
    EXPECT_EQ(stream.push(3), "a");
    EXPECT_EQ(stream.push(2), " ");
    EXPECT_EQ(stream.finish(), "");
  }
}

TEST(SentencePieceDecoder, GoesOnWhereAPromptEnds) {
  const Tokenizer tokenizer = parse(small());
  EXPECT_EQ(streamed(tokenizer, Ids{1, 2, 3}, Ids{2, 4}), " b");
  EXPECT_EQ(streamed(tokenizer, Ids{1}, Ids{2, 4}), "b") << "nothing has been shown of a special token";
  EXPECT_EQ(streamed(tokenizer, Ids{-1, 999}, Ids{2, 4}), "b");
  EXPECT_EQ(streamed(tokenizer, Ids{5}, Ids{6, 3}), "\uFFFDa") << "the prompt's byte has been shown as wrong";
  Json metaspace = small();
  metaspace["decoder"] = {{"type", "Metaspace"}, {"replacement", "\u2581"}};
  EXPECT_EQ(streamed(parse(metaspace), Ids{3}, Ids{2, 4}), " b");
  EXPECT_EQ(streamed(parse(metaspace), {}, Ids{2, 4}), "b");
}

Json step(const char* type, const Json& more = Json::object()) {
  Json made = {{"type", type}};
  made.update(more);
  return made;
}

Json replace(const std::string& from, const std::string& to) {
  return step("Replace", {{"pattern", {{"String", from}}}, {"content", to}});
}

// Each step works on what the one before has made. The texts are those of the original.
TEST(SentencePieceDecoder, StepsFollowEachOther) {
  const auto metaspace = [](const Json& scheme, const char* replacement = "\u2581") {
    return step("Metaspace", {{"replacement", replacement}, {"prepend_scheme", scheme}});
  };
  const auto strip = [](const char* what, int count) {
    return step("Strip", {{"content", what}, {"start", count}, {"stop", 0}});
  };
  const Json bytes = step("ByteFallback"), fuse = step("Fuse");
  Json json = small();
  json["model"]["vocab"].update({{"\u2581a", 8}, {"<0xE2>", 9}, {"<0x96>", 10}, {"<0x81>", 11}});
  const std::pair<Json::array_t, std::vector<std::string>> cases[] = {
      {{metaspace("always")}, {"a  a", " ab", "b b"}},
      {{metaspace(nullptr)}, {"a  a", " ab", "b b"}},
      {{metaspace("first")}, {"a  a", " ab", "b b"}},
      {{metaspace("never")}, {" a  a", "  ab", "b b"}},
      {{metaspace("always"), replace("a", "b")}, {"b  b", " bb", "b b"}},
      {{metaspace("always"), replace("a", "\u2581")}, {"\u2581  \u2581", " \u2581b", "b b"}},
      {{metaspace("always"), replace(" ", "a")}, {"aaaa", "aab", "bab"}},
      {{replace("b", "\u2581"), metaspace("always")}, {"a  a", " a ", "  "}},
      {{metaspace("never"), replace("a", "b")}, {" b  b", "  bb", "b b"}},
      {{bytes, metaspace("always"), replace("b", "a")}, {"a  a", " aa", "a a", "a ", "é a", "\uFFFD\uFFFD a"}},
      {{bytes, replace("b", "\u2581"), metaspace("first")}, {"a  a", " a ", "  ", "a ", "é a", "\uFFFD\uFFFD a"}},
      {{bytes, metaspace("never")}, {" a  a", "  ab", "b b", " a ", "é a", "\uFFFD\uFFFD a"}},
      {{replace("\u2581", "<"), bytes}, {"<a<<a", "<<ab", "b<b", "\u2581a\u2581", "é<a", "\uFFFD\uFFFD<a"}},
      {{bytes, replace("é", "\u2581"), metaspace("always")}, {"a  a", " ab", "b b", "a ", " a", "\uFFFD\uFFFD a"}},
      {{replace("a", "\u2581"), bytes, metaspace("always")}, {"   ", "  b", "b b", "  ", "é  ", "\uFFFD\uFFFD  "}},
      {{replace("a", "\u2581"), bytes, metaspace("never"), replace("b", "a")},
       {"     ", "   a", "a a", "   ", "é  ", "\uFFFD\uFFFD  "}},
      {{bytes, metaspace("always", "\uFFFD")},
       {"\u2581a\u2581\u2581a", "\u2581\u2581ab", "b\u2581b", "\u2581a\u2581", "é\u2581a", " \u2581a"}},
      {{bytes, replace("\uFFFD", "a"), metaspace("always")}, {"a  a", " ab", "b b", "a ", "é a", "aa a"}},
      {{metaspace("always"), fuse, replace("a", " "), strip(" ", 2)}, {"  ", "b", "b b"}},
      {{metaspace("first"), fuse, strip("b", 1)}, {"a  a", " ab", " b"}},
      {{fuse, strip("\u2581", 0)}, {"\u2581a\u2581\u2581a", "\u2581\u2581ab", "b\u2581b"}},
      {{fuse, strip("\u2581", 2)}, {"a\u2581\u2581a", "ab", "b\u2581b"}}};
  const Ids ids[] = {{8, 2, 8}, {2, 2, 3, 4}, {4, 2, 4}, {9, 10, 11, 3, 9, 10, 11}, {5, 6, 8}, {9, 10, 2, 3}};
  for (const auto& [steps, texts] : cases) {
    for (const bool nested : {false, true}) {
      json["decoder"] = step("Sequence", {{"decoders", steps}});
      if (nested)
        json["decoder"] =
            step("Sequence", {{"decoders", {json["decoder"], step("Sequence", {{"decoders", Json::array()}})}}});
      const Tokenizer tokenizer = parse(json);
      for (std::size_t i = 0; i < texts.size(); ++i) {
        EXPECT_EQ(tokenizer.decode(ids[i]), texts[i]) << json["decoder"];
        EXPECT_EQ(streamed(tokenizer, {}, ids[i]), texts[i]) << json["decoder"];
      }
    }
  }
}

// ---- encoding: what the vectors show among much else ----------------------------------------------------------------

TEST(SentencePieceEncoder, UnknownTokensWaitBehindByteTokens) {
  Json json = small();
  EXPECT_EQ(parse(json).encode("жéжa", false), (Ids{5, 6, 0, 0, 3}));
  json["model"]["fuse_unk"] = nullptr;
  EXPECT_EQ(parse(json).encode("жéжa", false), (Ids{5, 6, 0, 0, 3}));
  json["model"].erase("fuse_unk");
  EXPECT_EQ(parse(json).encode("жéжa", false), (Ids{5, 6, 0, 0, 3}));
  json["model"]["fuse_unk"] = true;
  EXPECT_EQ(parse(json).encode("жéжa", false), (Ids{5, 6, 0, 3}));
  json["model"]["byte_fallback"] = false;
  EXPECT_EQ(parse(json).encode("жéaж", false), (Ids{0, 3, 0}));
  json["model"]["unk_token"] = nullptr;
  EXPECT_EQ(parse(json).encode("жéaж", false), (Ids{3}));
}

// In every order of two kinds, twice the same, and through the file.
TEST(Normalizer, EachStepWorksOnWhatTheOneBeforeHasMade) {
  using Kind = NormalizerStep::Kind;
  const NormalizerStep compose{Kind::form, "", ""}, letter{Kind::prepend, "", "e"}, again{Kind::prepend, "", "x"};
  const NormalizerStep accent{Kind::replace, "x", "\u0301"}, back{Kind::replace, "é", "y"},
      space{Kind::replace, "y", "zz"};
  struct Case {
    std::vector<NormalizerStep> steps;
    const char *text, *expected;
  };
  for (const auto& [steps, text, expected] : {Case{{}, "e\u0301", "e\u0301"},
                                              Case{{compose}, "e\u0301", "é"},
                                              Case{{compose}, "", ""},
                                              Case{{letter}, "a", "ea"},
                                              Case{{letter}, "", ""},
                                              Case{{accent}, "xex", "\u0301e\u0301"},
                                              Case{{letter, compose}, "\u0301b", "éb"},
                                              Case{{compose, letter}, "\u0301b", "e\u0301b"},
                                              Case{{accent, compose}, "ex", "é"},
                                              Case{{compose, accent}, "ex", "e\u0301"},
                                              Case{{compose, back}, "e\u0301a", "ya"},
                                              Case{{back, compose}, "e\u0301a", "éa"},
                                              Case{{again, accent}, "ex", "\u0301e\u0301"},
                                              Case{{accent, again}, "ex", "xe\u0301"},
                                              Case{{letter, again}, "a", "xea"},
                                              Case{{letter, letter}, "a", "eea"},
                                              Case{{back, space}, "éy", "zzzz"},
                                              Case{{space, back}, "éy", "yzz"},
                                              Case{{compose, compose}, "e\u0301", "é"},
                                              Case{{letter, accent, compose, back, space}, "xe", "zze"}}) {
    EXPECT_EQ(Normalizer(steps).apply(text), expected);
    EXPECT_EQ(Normalizer(steps).changes_nothing(), steps.empty());
  }
  Json json = small();
  const Json nfc = step("NFC"), from_a = replace("a", "\u0301"), prepend = step("Prepend", {{"prepend", "e"}});
  const auto ids = [&](const Json::array_t& steps, const char* text) {
    json["normalizer"] = step("Sequence", {{"normalizers", steps}});
    return parse(json).encode(text, false);
  };
  EXPECT_EQ(ids({prepend, step("Sequence", {{"normalizers", {from_a, nfc}}})}, "ab"), (Ids{5, 6, 4}));
  EXPECT_EQ(ids({step("Sequence", {{"normalizers", {nfc, prepend}}}), from_a}, "ab"), (Ids{0, 0, 4}));
}

TEST(SentencePieceEncoder, MetaspaceInAllItsForms) {
  Json json = small();
  json["model"]["merges"] = {"a b"};
  const auto ids = [&](const char* scheme, bool split, const char* text) {
    json["pre_tokenizer"] = {
        {"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", scheme}, {"split", split}};
    return parse(json).encode(text, false, Tokenizer::Special::allow);
  };
  EXPECT_EQ(ids("always", true, "a<s>ab ab"), (Ids{2, 3, 1, 2, 7, 2, 7}));
  EXPECT_EQ(ids("first", true, "a<s>ab ab"), (Ids{2, 3, 1, 7, 2, 7}));
  EXPECT_EQ(ids("first", true, "<s>ab"), (Ids{1, 7}));
  EXPECT_EQ(ids("never", true, "a<s>ab ab"), (Ids{3, 1, 7, 2, 7}));
  EXPECT_EQ(ids("always", false, " a"), (Ids{2, 3}));
  EXPECT_EQ(ids("always", false, ""), Ids{});
  // A merge across ▁ happens only where nothing is split.
  json["model"]["vocab"]["b\u2581"] = 8;
  json["model"]["merges"] = {"b \u2581"};
  EXPECT_EQ(ids("never", false, "ab a"), (Ids{3, 8, 3}));
  EXPECT_EQ(ids("never", true, "ab a"), (Ids{3, 4, 2, 3}));
}

// ---- files -----------------------------------------------------------------------------------------------------------

std::string reason(const Change& change, const std::string& name = "llama2_style") {
  return reason_of_change(name, change);
}

void expect_refused(const Change& change, const std::vector<std::string>& words) {
  expect_reason(reason(change), words);
}

TEST(SentencePieceFile, RefusesModelsThatItDoesNotKnow) {
  expect_refused(set("/model/type", "Unigram"), {"model.type", "Unigram"});
  expect_refused(set("/model/unk_token", "<nope>"), {"model.unk_token", "<nope>", "model.vocab"});
  expect_refused(set("/model/unk_token", 0), {"model.unk_token", "a string"});
  expect_refused(set("/model/byte_fallback", 1), {"model.byte_fallback", "true or false"});
  expect_refused(set("/model/fuse_unk", "yes"), {"model.fuse_unk", "true or false"});
  expect_refused(set("/model/dropout", 0.5), {"model.dropout"});
  expect_refused(set("/model/continuing_subword_prefix", "##"), {"continuing_subword_prefix"});
  expect_refused(set("/model/end_of_word_suffix", "</w>"), {"end_of_word_suffix"});
  expect_refused(set("/model/vocab/zzz", 9'999), {"holes"});
  expect_refused(set("/model/merges/-", {"q", "zzz"}), {"model.merges[", "zzz"});
}

TEST(SentencePieceFile, RefusesNormalizersAndPreTokenizersThatItDoesNotKnow) {
  const auto normalizer = [](const Json& value) { return [=](Json& j) { j["normalizer"] = value; }; };
  expect_refused(normalizer(step("Lowercase")), {"normalizer.type", "Lowercase", "Prepend"});
  expect_refused(normalizer(step("Precompiled")), {"normalizer.type", "Precompiled"});
  expect_refused(normalizer(replace("  ", "\u2581")), {"normalizer.pattern.String", "one character"});
  expect_refused(normalizer(replace(" ", "")), {"normalizer.content", "one character"});
  expect_refused(normalizer(step("Replace", {{"pattern", {{"Regex", " "}}}, {"content", "x"}})), {"pattern.String"});
  expect_refused(normalizer(step("Prepend")), {"normalizer.prepend", "a string"});
  expect_refused(normalizer(step("Prepend", {{"prepend", ""}})), {"normalizer.prepend", "got 0 bytes"});
  expect_refused(normalizer(step("Prepend", {{"prepend", std::string(65, 'x')}})), {"got 65 bytes", "64"});
  expect_refused(normalizer(step("Sequence", {{"normalizers", Json::array_t(9, step("NFC"))}})), {"more than 8"});
  EXPECT_EQ(reason(normalizer(step("Sequence", {{"normalizers", Json::array_t(8, step("NFC"))}}))), "accepted");
  EXPECT_EQ(reason(normalizer(step("Prepend", {{"prepend", std::string(64, 'x')}}))), "accepted");

  const auto pre = [](const Json& value) { return [=](Json& j) { j["pre_tokenizer"] = value; }; };
  const Json metaspace = step("Metaspace", {{"replacement", "\u2581"}});
  const auto with = [&](const Json& more) {
    Json made = metaspace;
    made.update(more);
    return pre(made);
  };
  EXPECT_EQ(reason(pre(metaspace)), "accepted");
  EXPECT_EQ(reason(with({{"add_prefix_space", true}, {"str_rep", "\u2581"}})), "accepted");
  EXPECT_EQ(reason(with({{"add_prefix_space", false}, {"prepend_scheme", "never"}})), "accepted");
  expect_refused(with({{"add_prefix_space", false}}), {"pre_tokenizer.add_prefix_space", "prepend_scheme"});
  expect_refused(with({{"replacement", ""}}), {"pre_tokenizer.replacement", "one character"});
  expect_refused(with({{"replacement", "__"}}), {"pre_tokenizer.replacement", "one character"});
  expect_refused(with({{"replacement", nullptr}}), {"pre_tokenizer.replacement", "a string"});
  expect_refused(with({{"prepend_scheme", "sometimes"}}), {"pre_tokenizer.prepend_scheme", "sometimes"});
  expect_refused(with({{"split", 1}}), {"pre_tokenizer.split", "true or false"});
  expect_refused(with({{"prepend_scheme", "first"}}), {"prepend_scheme", "normalized"});
  for (const bool normalized : {false, true}) {
    const std::string got = reason([&](Json& j) {
      with({{"prepend_scheme", "first"}})(j);
      for (Json& token : j["added_tokens"]) token["normalized"] = normalized;
    });
    EXPECT_EQ(got == "accepted", !normalized) << got;
  }
  expect_refused(pre(step("Sequence", {{"pretokenizers", {metaspace, metaspace}}})), {"second Metaspace"});
  expect_refused(
      pre(step("Sequence",
               {{"pretokenizers",
                 {step("Digits"), step("Metaspace", {{"replacement", "\u2581"}, {"prepend_scheme", "first"}})}}})),
      {"the first pre-tokenizer alone"});
  expect_refused(pre(step("BertPreTokenizer")), {"pre_tokenizer.type", "BertPreTokenizer", "Metaspace"});
  expect_refused(pre(step("ByteLevel")), {"no token for the byte"});  // byte-level tokens know no unknown characters
}

TEST(SentencePieceFile, RefusesDecodersThatItDoesNotKnow) {
  const auto decoder = [](const Json& value) { return [=](Json& j) { j["decoder"] = value; }; };
  const auto sequence = [&](const Json::array_t& list) { return decoder(step("Sequence", {{"decoders", list}})); };
  const Json strip = step("Strip", {{"content", " "}, {"start", 1}, {"stop", 0}});
  const Json metaspace = step("Metaspace", {{"replacement", "\u2581"}});
  const Json fuse = step("Fuse"), bytes = step("ByteFallback"), spaces = replace("\u2581", " ");
  for (const Json& list : {Json::array({spaces}), Json::array({bytes, metaspace}), Json::array({spaces, bytes}),
                           Json::array({spaces, bytes, fuse}), Json::array({bytes, fuse, spaces, strip})}) {
    EXPECT_EQ(reason(sequence(list)), "accepted") << list;
  }
  expect_refused(decoder(nullptr), {"decoder", "null", "a decoder"});
  expect_refused(decoder(step("WordPiece")), {"decoder.type", "WordPiece"});
  expect_refused(sequence({step("CTC")}), {"decoder.decoders[0].type", "CTC"});
  expect_refused(sequence({bytes, strip}), {"decoder.decoders[1].type", "Fuse before Strip"});
  expect_refused(sequence({fuse, strip, spaces}), {"Strip as the last"});
  expect_refused(sequence({fuse, bytes}), {"ByteFallback, before Fuse"});
  expect_refused(sequence({metaspace, bytes}), {"before Fuse and Metaspace"});
  expect_refused(sequence({bytes, bytes}), {"one ByteFallback"});
  for (const Json& before : {fuse, metaspace}) {
    expect_refused(sequence({before, metaspace}), {"one Metaspace, before Fuse"});
  }
  expect_refused(sequence({replace("\u2581\u2581", " ")}), {"decoders[0].pattern.String", "one character"});
  const auto stripping = [&](const Json& more) {
    Json made = strip;
    made.update(more);
    return sequence({fuse, made});
  };
  expect_refused(stripping({{"stop", 1}}), {"decoders[1].stop", "got '1', expected 0"});
  expect_refused(stripping({{"content", "  "}}), {"decoders[1].content", "one character"});
  expect_refused(stripping({{"start", -1}}), {"decoders[1].start", "from 0 to 1048576"});
  expect_refused(stripping({{"start", 1'048'577}}), {"decoders[1].start", "from 0 to 1048576"});
  expect_refused(stripping({{"stop", nullptr}}), {"decoders[1].stop", "expected 0"});
  for (const int start : {0, 1'048'576}) EXPECT_EQ(reason(stripping({{"start", start}})), "accepted") << start;
  expect_refused(sequence(Json::array_t(9, fuse)), {"more than 8"});
  EXPECT_EQ(reason(sequence(Json::array_t(8, fuse))), "accepted");
}

// ---- time ------------------------------------------------------------------------------------------------------------

// Without a pre-tokenizer a text is one word, however long. Eight times the text may take eight times as long and somewhat
// more (n log n, caches); a quadratic algorithm takes 64 times as long.
TEST(SentencePieceTime, AWordOfMegabytesIsNotQuadratic) {
  const Tokenizer tokenizer = parse(document("llama2_style"));
  std::string prose;
  const char* words[] = {"the ", "stone ", "Жуж ", "\n", "dodo ", "\u2581\u2581", "shing, "};
  for (std::uint32_t i = 0, random = 1; prose.size() < 2'000'000; ++i) {
    random = random * 1664525 + 1013904223;
    prose += words[(random >> 16) % 7];
  }
  const std::string texts[] = {prose, std::string(2'000'000, ' '), std::string(2'000'000, 'e')};
  for (const std::string& text : texts) {
    Ids ids;
    const auto encode = [&](std::size_t bytes) {
      const std::string part = utf8_replace_invalid(text.substr(0, bytes));
      return processor_seconds([&] { ids = tokenizer.encode(part, false); });
    };
    const double few = std::min(encode(text.size() / 8), encode(text.size() / 8));
    EXPECT_LT(encode(text.size()), 25 * few + 0.1);
    const double decoding = processor_seconds([&] { EXPECT_EQ(streamed(tokenizer, {}, ids), tokenizer.decode(ids)); });
    EXPECT_LT(decoding, 10 + 100 * few);
  }
}

// A row of byte tokens is held back until it ends: each byte is looked at once.
TEST(SentencePieceTime, ALongRowOfBytesIsNotQuadratic) {
  const Tokenizer tokenizer = parse(small());
  Ids ids;
  for (int i = 0; i < 1'000'000; ++i) ids.push_back(5 + i % 2);
  EXPECT_LT(processor_seconds([&] { EXPECT_EQ(streamed(tokenizer, {}, ids).size(), ids.size()); }), 10);
}

}  // namespace
}  // namespace weft
