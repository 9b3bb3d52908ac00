// Chat formats against scripts/chat_format.py (test/fixtures/chat, made by scripts/make_chat_vectors.py), and damaged ones.
#include "llmc/text/chat_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/infer/chat.h"
#include "test/cpp/processor_time.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

const std::string kVectors = "test/fixtures/chat/vectors.json";

Json vectors() {
  return parse_json(MappedFile(kVectors).text(), kVectors);
}

std::string text_of(const std::vector<TextSegment>& segments) {
  std::string text;
  for (const TextSegment& segment : segments) text += segment.text;
  return text;
}

void check_case(const ChatFormat& format, const Json& one) {
  std::vector<ChatMessage> messages;
  for (const Json& message : one["messages"]) messages.push_back({message[0], message[1]});
  const auto render = [&] { return format.render(messages, one["generation"], one["tail"]); };
  if (one.contains("refused")) {
    EXPECT_FALSE(error_of(Exit::usage, render).empty()) << one;
    return;
  }
  const std::vector<TextSegment> segments = render();
  ASSERT_EQ(segments.size(), one["segments"].size()) << one;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(segments[i].text, one["segments"][i][0].get<std::string>()) << one;
    EXPECT_EQ(segments[i].literal, one["segments"][i][1].get<bool>()) << one;
  }
}

TEST(ChatFormat, RendersWhatThePythonRendererRenders) {
  std::size_t rendered = 0;
  std::size_t refused = 0;
  for (const Json& entry : vectors()) {
    const ChatFormat format = ChatFormat::from_json(entry["format"], kVectors);
    for (const Json& one : entry["cases"]) {
      check_case(format, one);
      ++(one.contains("refused") ? refused : rendered);
    }
  }
  EXPECT_GT(rendered, 80U);
  EXPECT_GT(refused, 20U);
}

// A format that repeats the system message in every turn makes much of little.
TEST(ChatFormat, WhatIsRenderedIsLimited) {
  const ChatFormat format =
      ChatFormat::from_json(parse_json(R"({"version": 1, "order": "any", "kinds": [], "refusals": [],
      "end": [], "rules": [{"previous": "start", "role": "system", "parts": []},
        {"previous": "system", "role": "user", "parts": [{"from": "content", "steps": []}]},
        {"previous": "user", "role": "user", "when": {"system": "plain"}, "parts": [{"from": "system", "steps": []}]},
        {"previous": "user", "role": "end", "parts": []}]})",
                                       "a format"),
                            "a format");
  std::vector<ChatMessage> messages = {{"system", std::string(1 << 20, 'a')}, {"user", ""}};
  messages.resize(2 + 64, {"user", ""});
  EXPECT_EQ(text_of(format.render(messages, false)).size(), std::size_t{64} << 20);
  messages.push_back({"user", ""});
  EXPECT_NE(error_of(Exit::usage, [&] { format.render(messages, false); }).find("67108864 bytes"), std::string::npos);
}

TEST(ChatFormat, RefusesInTheWordsOfTheFormat) {
  const ChatFormat format = ChatFormat::from_json(vectors()[0]["format"], kVectors);
  const auto error = [&](const std::vector<ChatMessage>& messages) {
    return error_of(Exit::usage, [&] { format.render(messages, false); });
  };
  EXPECT_NE(error({{"system", "a|b"}, {"user", "c"}}).find("'no | in a system message'"), std::string::npos);
  EXPECT_NE(error({{"tool", "a"}}).find("'tool'"), std::string::npos);
  EXPECT_NE(error({{"system", ""}}).find("no message"), std::string::npos);
}

TEST(ChatFormat, KnowsEndAndThoughts) {
  const ChatFormat format = ChatFormat::from_json(vectors()[0]["format"], kVectors);
  EXPECT_EQ(format.end_tokens(), std::vector<std::string>{"<|im_end|>"});
  ASSERT_TRUE(format.thoughts().has_value());
  EXPECT_EQ(format.thoughts()->begin, "<think>");
  EXPECT_EQ(format.thoughts()->end, "</think>");
}

TEST(ChatFormat, EveryCharacterOfWhiteSpaceIsStripped) {
  const std::string space = "\t\n\v\f\r\x1C\x1D\x1E\x1F \u0085\u00A0\u1680\u2000\u200A\u2028\u2029\u202F\u205F\u3000";
  EXPECT_EQ(apply_chat_steps(space + "a\u200B" + space, {{ChatStepKind::strip, "", ""}}), "a\u200B");
  EXPECT_EQ(apply_chat_steps(space, {{ChatStepKind::rstrip, "", ""}}), "");
  EXPECT_EQ(apply_chat_steps("\u00FC\u00FCa\u00BC", {{ChatStepKind::strip, "\u00FC", ""}}),
            "a\u00BC");  // shares a byte
}

TEST(ChatFormat, StepsCutAtTheFirstOrTheLastMarker) {
  const auto done = [](ChatStepKind kind, const char* end = "") {
    return apply_chat_steps("a|b|c>d|e", {{kind, "|", end}});
  };
  EXPECT_EQ(done(ChatStepKind::after_first), "b|c>d|e");
  EXPECT_EQ(done(ChatStepKind::after_last), "e");
  EXPECT_EQ(done(ChatStepKind::before_first), "a");
  EXPECT_EQ(done(ChatStepKind::before_last), "a|b|c>d");
  EXPECT_EQ(done(ChatStepKind::delete_all), "abc>de");
  EXPECT_EQ(done(ChatStepKind::remove_spans, ">"), "ad");
  EXPECT_EQ(apply_chat_steps("abc", {{ChatStepKind::after_last, "|", ""}, {ChatStepKind::before_first, "|", ""}}),
            "abc");
}

TEST(ChatFormat, TheLongestConversationIsRendered) {
  const ChatFormat chatml = ChatFormat::from_json(vectors()[2]["format"], kVectors);
  std::vector<ChatMessage> messages(ChatFormat::kMaxMessages, {"user", "a"});
  EXPECT_EQ(text_of(chatml.render(messages, true)).size(), ChatFormat::kMaxMessages * 29 + 22);
  messages.push_back({"user", "a"});
  EXPECT_NE(error_of(Exit::usage, [&] { chatml.render(messages, true); }).find("4097 messages"), std::string::npos);
}

// `path`: a JSON pointer into the first format. null removes the member.
struct Damage {
  const char* path;
  Json value;
  const char* words;
};

// A conversation is rendered and tokenized once: ten of 100 turns cost about as much as one of 1,000, which would cost several
// times as much if it were the square of the length.
TEST(ChatFormat, TheCostGrowsWithTheLength) {
  const Tokenizer tokenizer =
      Tokenizer::from_json(read_text_file("models/tiny-llama/tokenizer.json", 10'000'000), "tokenizer.json");
  const Json format = parse_json(read_text_file("models/tiny-llama/chat_format.json", 100'000), "chat_format.json");
  const Chat chat(ChatFormat::from_json(format, "chat_format.json"), tokenizer);
  std::vector<ChatMessage> messages;
  for (int i = 0; i < 1001; ++i) {
    messages.push_back({i % 2 == 0 ? "user" : "assistant", "Once upon a time number " + std::to_string(i * 7919)});
  }
  const auto seconds = [&](std::size_t turns) {
    double least = 1e9;
    for (int run = 0; run < 5; ++run) {
      least = std::min(least, processor_seconds([&] {
                         for (std::size_t done = 0; done < 1000; done += turns) {
                           const std::vector<TextSegment> segments =
                               chat.render(std::span(messages).first(turns + 1), Chat::Tail::answer);
                           EXPECT_GT(chat.ids(segments).size(), turns);
                         }
                       }));
    }
    return least;
  };
  EXPECT_LT(seconds(1000), 2 * seconds(100));
}

TEST(ChatFormat, ADamagedFormatIsRefusedWithThePlace) {
  const Json whole = vectors()[0]["format"];
  const std::string long_text(65537, 'x');
  const std::vector<Damage> damages = {
      {"/version", 2, "version"},
      {"/order", "odd", "order"},
      {"/more", 1, "'more'"},
      {"/rules", Json::object(), "rules"},
      {"/rules/0/previous", "tool", "rules[0].previous"},
      {"/rules/0/role", "start", "rules[0].role"},
      {"/rules/0/when/shape", 1, "rules[0].when"},
      {"/rules/0/when/last", 1, "rules[0].when.last"},
      {"/rules/0/when/kind", "odd", "rules[0].when.kind"},
      {"/rules/0/when/zone", "here", "rules[0].when.zone"},
      {"/rules/0/parts/0", "", "rules[0].parts[0]"},
      {"/rules/0/parts/0", long_text, "rules[0].parts[0]"},
      {"/rules/0/parts", Json(17, "a"), "rules[0].parts"},
      {"/rules/0/parts/1", {{"from", "tool"}, {"steps", Json::array()}}, "rules[0].parts[1].from"},
      {"/rules/0/parts/1", {{"from", "system"}, {"steps", Json::array()}}, "rules[0].parts"},
      {"/rules/0/parts/1/steps", Json(9, Json::array({"strip"})), "rules[0].parts[1].steps"},
      {"/rules/0/parts/1/steps", Json::array({Json::array()}), "rules[0].parts[1].steps[0]"},
      {"/rules/0/parts/1/steps", Json::array({Json::array({"odd"})}), "rules[0].parts[1].steps[0]"},
      {"/rules/0/parts/1/steps", Json::array({Json::array({"delete"})}), "rules[0].parts[1].steps[0]"},
      {"/rules/0/role", "end", "rules[0].parts"},
      {"/kinds/0/tests", Json::object(), "kinds[0].tests"},
      {"/kinds/0/tests/empty", false, "kinds[0].tests.empty"},
      {"/kinds/0/kind", "none", "kinds[0].kind"},
      {"/kinds/0/role", "user", "kinds[0].kind"},
      {"/kinds/0/refuse", "no", "kinds[0]"},
      {"/refusals/0/message", 1, "refusals[0].message"},
      {"/end", Json(65, "a"), "end"},
      {"/thoughts", {{"begin", "a"}}, "thoughts.end"},
      {"/options", 1, "options"},
  };
  for (const Damage& damage : damages) {
    Json damaged = whole;
    damaged[Json::json_pointer(damage.path)] = damage.value;
    const std::string message = error_of(Exit::bad_file, [&] { ChatFormat::from_json(damaged, "x"); });
    EXPECT_NE(message.find(damage.words), std::string::npos) << damage.path << ": " << message;
    EXPECT_LT(message.size(), 400U);
  }
  for (const char* member : {"version", "order", "rules", "kinds", "refusals", "end"}) {
    Json damaged = whole;
    damaged.erase(member);
    EXPECT_NE(error_of(Exit::bad_file, [&] { ChatFormat::from_json(damaged, "x"); }).find(member), std::string::npos);
  }
}

}  // namespace
}  // namespace weft
