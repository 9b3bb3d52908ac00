// Chats of the server, without it: the body of a request, and its choices. test/python/test_chat.py has the whole way.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/serve/chat_choice.h"
#include "llmc/serve/chat_request.h"
#include "llmc/text/thoughts.h"
#include "test/cpp/byte_tokenizer.h"

namespace weft {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer one = Tokenizer::from_json(byte_tokenizer_json().dump(), "test");
  return one;
}

// "R:" and the content, "\n" behind it; "<|padding|>" begins an answer and "ab" ends one, as "stop here" does.
Json format_json() {
  Json rules = Json::array();
  for (const char* previous : {"start", "system", "user", "assistant"}) {
    for (const char* role : {"system", "user", "assistant"}) {
      rules.push_back({{"previous", previous},
                       {"role", role},
                       {"parts", {std::string(1, role[0]) + ":", {{"from", "content"}, {"steps", Json::array()}}}}});
    }
    if (std::string(previous) == "start") continue;
    rules.push_back({{"previous", previous}, {"role", "generation"}, {"parts", {"\n<|padding|><t>"}}});
    rules.push_back({{"previous", previous}, {"role", "end"}, {"parts", {"\n"}}});
  }
  return {{"version", 1},
          {"order", "any"},
          {"kinds", Json::array()},
          {"rules", rules},
          {"refusals", Json::array()},
          {"end", {"ab", "stop here"}},
          {"thoughts", {{"begin", "<t>"}, {"end", "</t>"}}}};
}

const Chat& chat() {
  static const Chat one(ChatFormat::from_json(format_json(), "test"), tokenizer());
  return one;
}

ModelConfig config() {
  ModelConfig c;
  set_family(c, "gpt_neox");
  c.vocab_size = tokenizer().vocab_size();
  c.max_positions = 100;
  c.eos_ids = {kEndOfText};
  return c;
}

RequestContext context() {
  static const ModelConfig c = config();
  RequestContext made{"tiny", &tokenizer(), Tokenizer::Special::text, &c, 8};
  made.chat = &chat();
  made.refusal = [](std::int64_t ids, std::int64_t) { return ids > 50 ? std::string("too long") : ""; };
  made.room = [](std::int64_t ids) { return 60 - ids; };
  return made;
}

TextRequest parse(const std::string& fields) {
  return parse_chat(R"({"messages": [{"role": "user", "content": "Hi"}])" + fields + "}", context());
}

RequestError refusal(const std::string& body, const RequestContext& of = context(), const Reserve& reserve = nullptr) {
  try {
    parse_chat(body, of, reserve);
  } catch (const RequestError& error) {
    return error;
  }
  ADD_FAILURE() << "accepted: " << body;
  return {0, ""};
}

TEST(ChatRequest, ThePromptAndWhatEndsAnAnswer) {
  const TextRequest request = parse("");
  std::vector<std::int32_t> ids = tokenizer().encode("u:Hi\n", false);
  ids.push_back(1);
  for (const std::int32_t id : ids_of("<t>")) ids.push_back(id);
  ASSERT_EQ(request.prompts.size(), 1u);
  EXPECT_EQ(request.prompts[0].ids, ids);
  EXPECT_EQ(request.options.stop_ids, std::vector<std::int32_t>{kAb});
  EXPECT_EQ(request.options.stop, std::vector<std::string>{"stop here"});
  EXPECT_EQ(request.options.max_tokens, 60 - std::ssize(ids)) << "as many as fit";
  EXPECT_EQ(request.options.sampler.temperature, 1);
  EXPECT_EQ(request.options.logprobs, -1);
  EXPECT_TRUE(request.in_thoughts);
  EXPECT_FALSE(request.stream || request.seeded || request.usage_in_events);
  EXPECT_EQ(parse(R"(, "ignore_eos": true)").options.stop, std::vector<std::string>());
  const TextRequest other = parse(R"(, "max_tokens": 7, "stop": "x", "logprobs": true, "top_logprobs": 4, "seed": 3)");
  EXPECT_EQ(other.options.max_tokens, 7);
  EXPECT_EQ(other.options.stop, (std::vector<std::string>{"x", "stop here"}));
  EXPECT_EQ(other.options.logprobs, 4);
  EXPECT_EQ(parse(R"(, "logprobs": true)").options.logprobs, 0);
}

// min_tokens is about every end, that of the format, too, and about what there is room for.
TEST(ChatRequest, RulesKnowTheFormat) {
  const LogitRuleOptions rules =
      *parse(R"(, "min_tokens": 20, "stop_token_ids": [9], "ignore_eos": true)").options.logit_rules;
  EXPECT_EQ(rules.end_ids, (std::vector<std::int32_t>{kEndOfText, kAb, 9}));
  EXPECT_EQ(rules.min_tokens, 20);
  const auto refused = [](const std::string& fields) {
    const RequestError error = refusal(R"({"messages": [{"role": "user", "content": "Hi"}], )" + fields + "}");
    EXPECT_EQ(error.status(), 400);
    return error.param();
  };
  EXPECT_EQ(refused(R"("min_tokens": 60)"), "min_tokens");
  EXPECT_EQ(refused(R"("min_tokens": 6, "max_tokens": 5)"), "min_tokens");
  EXPECT_EQ(refused(R"("presence_penalty": 3)"), "presence_penalty");
  EXPECT_EQ(refused(R"("logit_bias": {"9999": 1})"), "logit_bias");
}

TEST(ChatRequest, AnAnswerThatIsContinuedIsInThoughtsIfItOpensThem) {
  const auto in_thoughts = [](const std::string& content) {
    return parse_chat(R"({"messages": [{"role": "user", "content": "<t>"}, {"role": "assistant", "content": ")" +
                          content + R"("}], "continue_final_message": true})",
                      context())
        .in_thoughts;
  };
  EXPECT_FALSE(in_thoughts("a"));
  EXPECT_TRUE(in_thoughts("<t>a"));
  EXPECT_FALSE(in_thoughts("<t>a</t>b"));
}

// Its size is known before it is tokenized; places are taken before, too, and not for a request that is refused anyway.
TEST(ChatRequest, PlacesAndSizes) {
  std::int64_t reserved = 0;
  const auto reserve = [&](std::int64_t completions) { reserved += completions; };
  EXPECT_EQ(refusal(R"({"messages": [{"role": "x"}]})", context(), reserve).param(), "messages");
  EXPECT_EQ(refusal(R"({"messages": [{"role": "user", "content": "a"}], "n": 9})", context(), reserve).param(), "n");
  EXPECT_EQ(reserved, 0);
  const RequestError long_one =
      refusal(R"({"n": 3, "messages": [{"role": "user", "content": ")" + std::string(20'000, 'a') + R"("}]})",
              context(), reserve);
  EXPECT_EQ(reserved, 3);
  EXPECT_EQ(long_one.api_code(), "context_length_exceeded");
  EXPECT_NE(std::string(long_one.what()).find("are at least"), std::string::npos) << long_one.what();
  RequestContext without = context();
  without.chat = nullptr;
  EXPECT_EQ(refusal(R"({"messages": [{"role": "user", "content": "a"}]})", without).status(), 400);
}

// ---- thoughts --------------------------------------------------------------------------------------------------------

using Divided = std::pair<std::string, std::string>;

Divided divided(const std::vector<std::string>& pieces, bool inside) {
  ThoughtDivider divider({"<t>", "</t>"}, inside);
  Divided all;
  const auto take = [&](const ThoughtDivider::Parts& parts) {
    all.first += parts.thoughts;
    all.second += parts.said;
  };
  for (const std::string& piece : pieces) take(divider.push(piece));
  take(divider.finish());
  return all;
}

// Whatever the pieces are, the parts are the same: at once, byte by byte, and in two pieces at every place.
TEST(ThoughtDivider, PiecesDoNotMatter) {
  struct Case {
    std::string text;
    bool inside;
    Divided expected;
  };
  const std::vector<Case> cases = {
      {"<t>\n why \n</t>\n\nso \n", false, {"why", "so \n"}},
      {"  \n<t>why</t>so", false, {"why", "so"}},
      {" so <t>no</t>", false, {"", " so <t>no</t>"}},
      {"so", false, {"", "so"}},
      {" \n", false, {"", " \n"}},
      {"<t", false, {"", "<t"}},
      {"<t>", false, {"", ""}},
      {"", true, {"", ""}},
      {"\nwhy < / </t </t>so</t>", true, {"why < / </t", "so</t>"}},
      {"why \n\n not</t>  ", true, {"why \n\n not", ""}},
      {"why </", true, {"why </", ""}},
      {"why \n", true, {"why", ""}},
      {"</t>so", true, {"", "so"}},
      {" \n</t>\n<t>so", true, {"", "<t>so"}},
      {"<t>a<t>b</t>c</t>", false, {"a<t>b", "c</t>"}},
      {"</</t>", true, {"</", ""}},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(divided({c.text}, c.inside), c.expected) << c.text;
    std::vector<std::string> bytes;
    for (const char byte : c.text) bytes.emplace_back(1, byte);
    EXPECT_EQ(divided(bytes, c.inside), c.expected) << c.text;
    for (std::size_t at = 0; at <= c.text.size(); ++at) {
      EXPECT_EQ(divided({c.text.substr(0, at), c.text.substr(at)}, c.inside), c.expected) << c.text << " at " << at;
    }
  }
}

TEST(ThoughtDivider, WhatIsCertainIsNotHeldBack) {
  ThoughtDivider divider({"<t>", "</t>"}, false);
  EXPECT_EQ(divider.push("<t>why").thoughts, "why");
  EXPECT_EQ(divider.push(" ").thoughts, "");
  EXPECT_EQ(divider.push("not").thoughts, " not");
  EXPECT_EQ(divider.push("<").thoughts, "");
  EXPECT_EQ(divider.push("</").thoughts, "<");
  EXPECT_EQ(divider.push("x").thoughts, "</x");
  EXPECT_EQ(divider.push("</t>so").said, "so");
  EXPECT_EQ(divider.push(" ").said, " ");
}

// As ThoughtDivider, but thoughts that are not empty stay as they were written.
TEST(EmptyThoughtsFilter, EmptyThoughtsGoAndOthersStay) {
  const auto expect = [](bool inside, const std::vector<std::pair<std::string, std::string>>& cases) {
    for (const auto& [text, expected] : cases) {
      for (std::size_t at = 0; at <= text.size(); ++at) {
        EmptyThoughtsFilter filter({"<t>", "</t>"}, inside);
        std::string shown = filter.push(text.substr(0, at));
        shown += filter.push(text.substr(at));
        shown += filter.finish();
        EXPECT_EQ(shown, expected) << text << " at " << at;
      }
    }
  };
  expect(false, {{"<t>\n\n</t>\n\nso <t></t>", "so <t></t>"},
                 {" <t></t>so", "so"},
                 {"<t></t>\n", ""},
                 {"<t> why </t>\nso", "<t> why </t>\nso"},
                 {"<t>why", "<t>why"},
                 {" \nso", " \nso"},
                 {"<t", "<t"},
                 {"<tt>so", "<tt>so"}});
  expect(true, {{"\n</t>\n\nso", "so"}, {" why</t>so", " why</t>so"}, {"</ t></t>so", "</ t></t>so"}});
}

// ---- choices ---------------------------------------------------------------------------------------------------------

CompletionPiece piece(const std::string& text, std::int32_t id) {
  CompletionPiece one;
  one.text = text;
  one.id = ScoredId{id, -1, {{id, -1}, {byte_id('z'), -3}}};
  return one;
}

TEST(ChatChoice, AWholeMessage) {
  ChatChoice choice(2, &tokenizer(), 1, nullptr, false, std::nullopt);
  EXPECT_FALSE(choice.pending());
  choice.add(piece("a", byte_id('a')));
  choice.add(piece("", byte_id('\xE2')));
  choice.finish(FinishedBy::length);
  EXPECT_EQ(Json::parse(choice.write()), Json::parse(R"({"index": 2, "finish_reason": "length",
      "message": {"role": "assistant", "content": "a", "refusal": null}, "logprobs": {"refusal": null, "content": [
        {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]},
                                                                     {"token": "z", "logprob": -3.0, "bytes": [122]}]},
        {"token": "bytes:\\xe2", "logprob": -1.0, "bytes": [226], "top_logprobs": [
          {"token": "bytes:\\xe2", "logprob": -1.0, "bytes": [226]}, {"token": "z", "logprob": -3.0, "bytes": [122]}]}]}})"));
  ChatChoice empty(0, &tokenizer(), -1, nullptr, false, ThoughtDivider({"<t>", "</t>"}, false));
  empty.finish(FinishedBy::cancelled);
  EXPECT_EQ(Json::parse(empty.write()), Json::parse(R"({"index": 0, "finish_reason": "abort", "logprobs": null,
      "message": {"role": "assistant", "reasoning_content": "", "content": "", "refusal": null}})"));
}

// The role comes first and alone, with the first token even if that shows nothing; then what is new.
TEST(ChatChoice, Deltas) {
  ChatChoice choice(0, &tokenizer(), -1, nullptr, true, ThoughtDivider({"<t>", "</t>"}, false));
  EXPECT_FALSE(choice.pending());
  const auto next = [&] { return Json::parse(choice.write()); };
  choice.add(piece("<t", byte_id('t')));
  ASSERT_TRUE(choice.pending());
  EXPECT_EQ(next(), Json::parse(R"({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
      "finish_reason": null})"));
  EXPECT_FALSE(choice.pending());
  choice.add(piece(">why</t>so", byte_id('o')));
  EXPECT_EQ(next()["delta"], Json({{"reasoning_content", "why"}, {"content", "so"}}));
  EXPECT_FALSE(choice.pending());
  choice.finish(FinishedBy::stop);
  ASSERT_TRUE(choice.pending());
  EXPECT_EQ(next(), Json::parse(R"({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"})"));
  EXPECT_FALSE(choice.pending());
}

}  // namespace
}  // namespace weft
