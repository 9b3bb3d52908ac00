#include "llmc/serve/completions_choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/serve/access.h"
#include "llmc/serve/answer_json.h"
#include "llmc/serve/chat_choice.h"
#include "llmc/serve/metrics.h"
#include "llmc/serve/page.h"
#include "llmc/serve/request_error.h"
#include "llmc/serve/request_id.h"
#include "llmc/serve/request_log.h"
#include "test/cpp/test_files.h"
#include "test/cpp/tokenizer_files.h"

namespace weft {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer one = parse(document("neox_style"));
  return one;
}

std::int32_t byte_id(unsigned char byte) {
  for (std::int32_t id = 0; id < tokenizer().vocab_size(); ++id) {
    if (tokenizer().token_bytes(id) == std::string(1, static_cast<char>(byte)) && !tokenizer().is_special(id))
      return id;
  }
  ADD_FAILURE() << "no token for byte " << static_cast<int>(byte);
  return 0;
}

CompletionPiece piece(const std::string& text, std::int32_t id, float logprob = -1) {
  CompletionPiece one;
  one.text = text;
  one.id = ScoredId{id, logprob, {{id, logprob}, {byte_id('z'), -3}}};
  return one;
}

// The piece that echoes a prompt.
CompletionPiece echo_of(const std::string& text, std::vector<ScoredId> scored = {}) {
  return {text, {}, std::move(scored), true};
}

std::shared_ptr<CompletionPrompt> prompt_of(std::vector<std::int32_t> ids, const std::string& text,
                                            std::size_t in_front = 0) {
  return std::make_shared<CompletionPrompt>(CompletionPrompt{std::move(ids), text, in_front});
}

Json written(CompletionsChoice& choice) {
  return Json::parse(choice.write());
}

TEST(CompletionsChoice, TextAndReason) {
  CompletionsChoice choice(3, &tokenizer(), -1, nullptr);
  EXPECT_FALSE(choice.pending());
  choice.add(piece("a \"b\"\n", 5));
  EXPECT_TRUE(choice.pending());
  EXPECT_EQ(written(choice),
            Json::parse(R"({"index": 3, "text": "a \"b\"\n", "logprobs": null, "finish_reason": null})"));
  EXPECT_FALSE(choice.pending());
  choice.finish(FinishedBy::stop);
  EXPECT_EQ(written(choice), Json::parse(R"({"index": 3, "text": "", "logprobs": null, "finish_reason": "stop"})"));
  CompletionsChoice cancelled(0, &tokenizer(), -1, nullptr);
  cancelled.finish(FinishedBy::cancelled);
  EXPECT_EQ(written(cancelled)["finish_reason"], "abort");
}

// The bytes of one character come as three tokens, and its text with the last one.
TEST(CompletionsChoice, TokensStandWhereTheirTextBegins) {
  CompletionsChoice choice(0, &tokenizer(), 1, nullptr);
  choice.add(piece("a", byte_id('a')));
  choice.add(piece("", byte_id(0xE2)));
  choice.add(piece("", byte_id(0x82)));
  EXPECT_EQ(written(choice)["logprobs"]["tokens"], Json({"a"}));
  EXPECT_FALSE(choice.pending());
  choice.add(piece("€", byte_id(0xAC)));
  choice.add(piece("b", byte_id('b'), -std::numeric_limits<float>::infinity()));
  choice.finish(FinishedBy::length);
  const Json all = written(choice)["logprobs"];
  EXPECT_EQ(all["tokens"], Json({"bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"}));
  EXPECT_EQ(all["text_offset"], Json({1, 1, 1, 2}));
  EXPECT_EQ(all["token_logprobs"], Json({-1.0, -1.0, -1.0, -9999.0}));
  EXPECT_EQ(all["top_logprobs"][0], Json({{"bytes:\\xe2", -1.0}, {"z", -3.0}}));
}

// "xy" is held back as the beginning of a stop text: its tokens come with it, or with the end.
TEST(CompletionsChoice, TokensOfAStopTextComeWithTheEnd) {
  CompletionsChoice choice(0, &tokenizer(), 0, nullptr);
  choice.add(piece("a", byte_id('a')));
  choice.add(piece("", byte_id('x')));
  choice.add(piece("", byte_id('y')));
  EXPECT_EQ(written(choice)["logprobs"]["tokens"], Json({"a"}));
  choice.add(piece("xyb", byte_id('b')));  // it was none
  EXPECT_EQ(written(choice)["logprobs"]["tokens"], Json({"x", "y", "b"}));
  choice.add(piece("", byte_id('x')));
  choice.add(piece("", byte_id('y')));
  choice.finish(FinishedBy::stop);
  const Json last = written(choice);
  EXPECT_EQ(last["logprobs"]["tokens"], Json({"x", "y"}));
  EXPECT_EQ(last["logprobs"]["text_offset"], Json({4, 4}));
  EXPECT_EQ(last["text"], "");
}

// lm_eval sums the entries of the context up to the last but one: the generated one must be there, whatever it is.
TEST(CompletionsChoice, EveryGeneratedTokenHasItsEntry) {
  const std::int32_t end = tokenizer().id_of("<|endoftext|>").value();
  const auto padding = static_cast<std::int32_t>(tokenizer().vocab_size());  // a row of the embedding without a token
  const auto prompt = prompt_of({byte_id('a'), byte_id('b')}, "ab");
  for (const std::int32_t last : {end, padding, byte_id('x'), byte_id(0xE2)}) {
    for (const FinishedBy reason : {FinishedBy::stop, FinishedBy::length, FinishedBy::cancelled}) {
      for (const bool echo : {true, false}) {
        CompletionsChoice choice(0, &tokenizer(), 1, prompt);
        if (echo) choice.add(echo_of("ab", {{byte_id('b'), -0.5, {}}}));
        choice.add(piece("c", byte_id('c'), -2));
        choice.add(piece("", last, -0.25));  // its text does not show
        choice.finish(reason);
        const Json one = written(choice), all = one["logprobs"];
        const std::size_t size = echo ? 4 : 2;
        for (const char* list : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
          ASSERT_EQ(all[list].size(), size) << list;
        }
        EXPECT_EQ(one["text"], echo ? "abc" : "c");
        EXPECT_EQ(all["token_logprobs"].back(), -0.25);
        EXPECT_EQ(all["text_offset"].back(), echo ? 3 : 1);
        if (last == end) {
          EXPECT_EQ(all["tokens"].back(), "<|endoftext|>");
          EXPECT_EQ(all["top_logprobs"].back(), Json({{"<|endoftext|>", -0.25}, {"z", -3.0}}));
        }
      }
    }
  }
}

// Offsets and what is shown count characters, also behind some that have several bytes.
TEST(CompletionsChoice, TokensAreHeldBackBehindCharactersOfSeveralBytes) {
  CompletionsChoice choice(0, &tokenizer(), 0, nullptr);
  choice.add(piece("", byte_id(0xE2)));
  choice.add(piece("", byte_id(0x82)));
  choice.add(piece("€", byte_id(0xAC)));
  EXPECT_EQ(written(choice)["logprobs"]["text_offset"], Json({0, 0, 0}));
  choice.add(piece("", byte_id('x')));  // the beginning of a stop text
  choice.add(piece("", byte_id('y')));
  EXPECT_FALSE(choice.pending());
  choice.add(piece("xyz", byte_id('z')));
  EXPECT_EQ(written(choice)["logprobs"]["text_offset"], Json({1, 2, 3}));
  choice.add(piece("", byte_id('x')));
  choice.finish(FinishedBy::stop);
  EXPECT_EQ(written(choice)["logprobs"]["text_offset"], Json::array({4}));
}

// What was held back becomes U+FFFD with the token behind it: that one begins after it.
TEST(CompletionsChoice, ATokenBehindABrokenCharacterBeginsAfterIt) {
  const std::int32_t end = tokenizer().id_of("<|endoftext|>").value();
  struct Case {
    std::int32_t second;
    const char* text;  // of the pieces with the second token, and of the one that follows it without a token
    const char* rest;
    Json tokens, offsets;
  };
  for (const Case& c : {Case{byte_id('b'), "\uFFFDb", "", {"bytes:\\xe2", "b"}, {0, 1}},
                        {end, "", "\uFFFD", {"bytes:\\xe2", "<|endoftext|>"}, {0, 1}},  // a stop id
                        {byte_id('x'), "\uFFFD", "", {"bytes:\\xe2", "x"}, {0, 1}},     // of a stop text
                        {byte_id(0x82), "", "\uFFFD", {"bytes:\\xe2", "bytes:\\x82"}, {0, 0}},
                        {byte_id(0xE2), "\uFFFD", "\uFFFD", {"bytes:\\xe2", "bytes:\\xe2"}, {0, 1}}}) {
    CompletionsChoice choice(0, &tokenizer(), 0, nullptr);
    choice.add(piece("", byte_id(0xE2)));
    choice.add(piece(c.text, c.second));
    if (*c.rest != '\0') choice.add({c.rest, {}, {}, false});
    choice.finish(FinishedBy::stop);
    const Json all = written(choice)["logprobs"];
    EXPECT_EQ(all["tokens"], c.tokens) << c.text;
    EXPECT_EQ(all["text_offset"], c.offsets) << c.text;
  }
}

// Tokens of a row of bytes wait for its end, and ids without text between them do not exchange places with them.
TEST(CompletionsChoice, BytesInARowHaveThePlacesOfTheirCharacters) {
  const Tokenizer llama = parse(document("llama2_style"));
  const auto byte = [&](const char* name) { return ScoredId{llama.id_of(name).value(), -1, {}}; };
  const ScoredId word{llama.encode("the", false).front(), -1, {}};
  const auto padding = static_cast<std::int32_t>(llama.vocab_size());  // a row of the embedding without a token
  CompletionsChoice choice(0, &llama, 0, nullptr);
  choice.add({"a", byte("<0x61>"), {}, false});
  choice.add({"", byte("<0xC3>"), {}, false});
  choice.add({"", ScoredId{padding, -1, {}}, {}, false});
  choice.add({"", byte("<0xA9>"), {}, false});
  choice.add({"\u00E9 the", word, {}, false});
  choice.add({"", byte("<0xE2>"), {}, false});
  choice.add({"\uFFFD", {}, {}, false});
  choice.finish(FinishedBy::length);
  const Json all = written(choice)["logprobs"];
  EXPECT_EQ(all["tokens"].size(), 6u) << all;
  EXPECT_EQ(all["text_offset"], Json({0, 1, 1, 1, 2, 2 + llama.token_bytes(word.id).size()}));
}

TEST(CompletionsChoice, EchoScoresThePrompt) {
  const std::int32_t start = tokenizer().id_of("<|endoftext|>").value();  // none of the text
  CompletionsChoice choice(0, &tokenizer(), 0, prompt_of({start, byte_id('a'), byte_id('b')}, "ab", 1));
  choice.add(echo_of("ab", {{byte_id('a'), -0.5, {}}, {byte_id('b'), -0.25, {}}}));
  choice.add(piece("c", byte_id('c')));
  choice.finish(FinishedBy::length);
  const Json one = written(choice);
  EXPECT_EQ(one["text"], "abc");
  const Json& all = one["logprobs"];
  EXPECT_EQ(all["tokens"], Json({"<|endoftext|>", "a", "b", "c"}));
  EXPECT_EQ(all["token_logprobs"], Json({nullptr, -0.5, -0.25, -1.0}));
  EXPECT_EQ(all["text_offset"], Json({0, 0, 1, 2}));
  EXPECT_EQ(all["top_logprobs"][0], Json());
  EXPECT_EQ(all["top_logprobs"][1], Json({{"a", -0.5}}));
}

// Sampling may draw an id that is none of the likeliest.
TEST(CompletionsChoice, TheTokenIsAmongItsAlternatives) {
  CompletionsChoice choice(0, &tokenizer(), 1, nullptr);
  CompletionPiece drawn = piece("a", byte_id('a'), -5);
  drawn.id->alternatives = {{byte_id('z'), -0.25}};
  choice.add(drawn);
  EXPECT_EQ(written(choice)["logprobs"]["top_logprobs"], Json::array({{{"a", -5.0}, {"z", -0.25}}}));
}

Json echoed(const Tokenizer& tokenizer, const CompletionPrompt& prompt) {
  CompletionsChoice choice(0, &tokenizer, 0, std::make_shared<const CompletionPrompt>(prompt));
  choice.add(echo_of(prompt.text));
  choice.finish(FinishedBy::length);
  return written(choice)["logprobs"];
}

// The text between the offset of a token and that of the next one is the token's, also where a name of a special token is a
// token, or text, or like the one that the tokenizer has put in front.
TEST(CompletionsChoice, EveryTokenOfAPromptIsTheTextAtItsOffset) {
  ModelConfig config;
  for (const char* file : {"llama2_style", "llama3_style", "neox_style"}) {
    const Tokenizer one = parse(document(file));
    config.vocab_size = config.tokenizer_vocab = one.vocab_size();
    const bool has_bos = one.bos_id().has_value();
    EXPECT_EQ(has_bos, file != std::string("neox_style"));
    const std::string name = one.token_bytes(has_bos ? *one.bos_id() : one.id_of("<|endoftext|>").value());
    ASSERT_GT(name.size(), 2u);
    for (const std::string& text : {name, name + "Hi", name + name + " the", "Hi" + name, "a" + name + "b" + name,
                                    name.substr(1) + " the", std::string("the \u20ac")}) {
      for (const Tokenizer::Special special : {Tokenizer::Special::text, Tokenizer::Special::allow}) {
        SCOPED_TRACE(std::string(file) + ": " + text);
        const CompletionPrompt prompt = prompt_from_text(text, &one, special, config, "prompt");
        EXPECT_EQ(prompt.in_front, has_bos ? 1u : 0u);
        const Json all = echoed(one, prompt);
        std::size_t at = 0;
        for (std::size_t i = 0; i < prompt.ids.size(); ++i) {
          // Of the character that the token's first byte is of.
          const std::size_t before = utf8_characters(text.substr(0, at + 1)) - (at < text.size() ? 1 : 0);
          EXPECT_EQ(all["text_offset"][i], before) << i << all;
          if (i < prompt.in_front) continue;
          std::string bytes = one.token_bytes(prompt.ids[i]);
          // A SentencePiece-style tokenizer puts a space of its own in front of a text, and behind special tokens.
          if (bytes.starts_with(" ") && !text.substr(at).starts_with(" ")) bytes.erase(0, 1);
          EXPECT_EQ(text.substr(at, bytes.size()), bytes) << i << all;
          at += bytes.size();
        }
        // The same ids without their text: all of them are text.
        const CompletionPrompt by_ids = prompt_from_ids(Json(prompt.ids), &one, config, "prompt");
        const Json offsets = echoed(one, by_ids)["text_offset"];
        EXPECT_EQ(by_ids.in_front, 0u);
        if (has_bos && prompt.ids.size() > 1) {
          EXPECT_EQ(offsets[1], utf8_characters(one.token_bytes(prompt.ids[0])));
        }
      }
    }
  }
}

// Where normalization has changed the text, what follows stands where it was given.
TEST(CompletionsChoice, OffsetsSurviveNormalization) {
  ModelConfig config;
  config.vocab_size = config.tokenizer_vocab = tokenizer().vocab_size();
  const std::string text = "cafe\u0301 and re\u0301sume\u0301 or \u1112\u1161\u11ab: the end";
  const CompletionPrompt prompt = prompt_from_text(text, &tokenizer(), Tokenizer::Special::text, config, "prompt");
  const std::string decoded = tokenizer().decode(prompt.ids);
  ASSERT_LT(utf8_characters(decoded), utf8_characters(text)) << "NFC joins characters";
  const Json offsets = echoed(tokenizer(), prompt)["text_offset"];
  ASSERT_EQ(offsets.size(), prompt.ids.size());
  std::size_t ascii = 0;
  std::int64_t before = 0;
  for (std::size_t i = 0; i < prompt.ids.size(); ++i) {
    const std::string bytes = tokenizer().token_bytes(prompt.ids[i]);
    const std::int64_t offset = offsets[i].get<std::int64_t>();
    EXPECT_GE(offset, before);
    before = offset;
    if (!std::ranges::all_of(bytes, [](char c) { return c > 0; })) continue;
    ++ascii;
    std::size_t at = 0;  // in bytes
    while (utf8_characters(text.substr(0, at)) < static_cast<std::size_t>(offset) ||
           (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) {
      ++at;
    }
    // The base of a joined letter belongs to the token of the whole.
    EXPECT_EQ(text.substr(at, bytes.size()), bytes) << i << " at " << offset;
  }
  EXPECT_GT(ascii, 10u);
}

// Normalization may have made more characters of a prompt than it was given.
TEST(CompletionsChoice, OffsetsStayWithinThePromptAsItWasGiven) {
  CompletionsChoice choice(0, &tokenizer(), 0, prompt_of({byte_id('a'), byte_id('b'), byte_id('c')}, "a"));
  choice.add(echo_of("a"));
  choice.add(piece("d", byte_id('d')));
  EXPECT_EQ(written(choice)["logprobs"]["text_offset"], Json({0, 1, 1, 1}));
}

// A special token that the prompt names is part of its text wherever it stands; one that was put in front is not.
TEST(CompletionsChoice, SpecialTokensOfAPromptHaveTheirText) {
  const auto prompt =
      prompt_of({byte_id('a'), tokenizer().id_of("<|padding|>").value(), byte_id('b')}, "a<|padding|>b");
  for (const bool in_front : {false, true}) {
    if (in_front) prompt->ids.insert(prompt->ids.begin(), tokenizer().id_of("<|endoftext|>").value());
    prompt->in_front = in_front;
    CompletionsChoice choice(0, &tokenizer(), 0, prompt);
    choice.add(echo_of(prompt->text));
    Json offsets = {0, 1, 12};
    if (in_front) offsets.insert(offsets.begin(), 0);
    EXPECT_EQ(written(choice)["logprobs"]["text_offset"], offsets);
  }
}

TEST(CompletionsChoice, AnEmptyPromptKeepsItsToken) {
  CompletionsChoice choice(0, &tokenizer(), 0, prompt_of({0}, ""));
  choice.add(echo_of(""));
  EXPECT_TRUE(choice.pending());
  EXPECT_EQ(written(choice)["logprobs"]["tokens"].size(), 1u);
}

// A SentencePiece-style token begins with its space, which the first token of a text loses. Text and offsets of what is
// generated continue the prompt; a token for one byte is written as that byte.
TEST(CompletionsChoice, OffsetsContinueThePromptOfASentencePieceTokenizer) {
  const Tokenizer llama = parse(document("llama2_style"));
  const auto prompt = prompt_of(llama.encode("the", true), "the", 1);
  ASSERT_EQ(prompt->ids.front(), llama.bos_id().value());
  const std::vector<std::int32_t> word = llama.encode("a", false);
  ASSERT_TRUE(llama.token_bytes(word[0]).starts_with(" "));
  const std::int32_t byte = llama.id_of("<0xE2>").value();
  for (const bool echo : {false, true}) {
    CompletionsChoice choice(0, &llama, 0, prompt);
    std::vector<ScoredId> scored;
    for (std::size_t i = 1; i < prompt->ids.size(); ++i) scored.push_back({prompt->ids[i], -1, {}});
    if (echo) choice.add(echo_of("the", scored));
    choice.add({" ", ScoredId{word[0], -1, {}}, {}, false});
    choice.add({"", ScoredId{byte, -1, {}}, {}, false});
    choice.add({"\uFFFDb", {}, {}, false});
    choice.finish(FinishedBy::length);
    const Json all = written(choice)["logprobs"];
    const std::size_t first = echo ? prompt->ids.size() : 0;
    ASSERT_EQ(all["tokens"].size(), first + 2);
    EXPECT_EQ(all["tokens"][first], llama.token_bytes(word[0]));
    EXPECT_EQ(all["tokens"][first + 1], "bytes:\\xe2");
    const std::int64_t begin = echo ? 3 : 0;
    EXPECT_EQ(all["text_offset"][first], begin);
    EXPECT_EQ(all["text_offset"][first + 1], begin + static_cast<std::int64_t>(llama.token_bytes(word[0]).size()));
    if (echo) {
      EXPECT_EQ(all["text_offset"][1], 0);
    }
  }
}

TEST(CompletionsChoice, WithoutATokenizerIdsAreNamed) {
  CompletionsChoice choice(0, nullptr, 0, nullptr);
  choice.add({"", ScoredId{7, -1, {}}, {}, false});
  EXPECT_TRUE(choice.pending());
  EXPECT_EQ(written(choice)["logprobs"]["tokens"], Json({"token_id:7"}));
}

TEST(AnswerJson, Objects) {
  AnswerHead head{"cmpl-1", 5, "a \"model\""};
  std::vector<std::unique_ptr<AnswerChoice>> choices;
  for (int i = 0; i < 2; ++i) choices.push_back(std::make_unique<CompletionsChoice>(i, nullptr, -1, nullptr));
  const Json body = Json::parse(answer_body(head, choices, {3, 4, 2}));
  EXPECT_EQ(body, Json::parse(R"({"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "a \"model\"",
      "choices": [{"index": 0, "text": "", "logprobs": null, "finish_reason": null},
                  {"index": 1, "text": "", "logprobs": null, "finish_reason": null}],
      "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}})"));
  EXPECT_NE(answer_head("x-", "1", "a").id, answer_head("x-", "2", "a").id);
  head.prompt_details = true;
  head.object = "chat.completion";
  const Json with_details = Json::parse(answer_body(head, choices, {3, 4, 2}));
  EXPECT_EQ(with_details["usage"]["prompt_tokens_details"], Json({{"cached_tokens", 2}}));
  EXPECT_EQ(with_details["object"], "chat.completion");
}

// The time in seconds, as the API has it, and the id of the request.
TEST(AnswerJson, AHeadIsOfNow) {
  const std::int64_t before = std::time(nullptr);
  const AnswerHead head = answer_head("cmpl-", "a-request", "tiny");
  EXPECT_GE(head.created, before);
  EXPECT_LE(head.created, std::time(nullptr));
  EXPECT_EQ(head.model, "tiny");
  EXPECT_FALSE(head.usage_follows);
  EXPECT_EQ(head.id, "cmpl-a-request");
}

TEST(AnswerJson, Events) {
  AnswerHead head{"cmpl-1", 5, "m"};
  head.event_object = "chat.completion.chunk";
  std::string event = answer_event(head, R"({"text":"a\nb"})");
  ASSERT_TRUE(event.starts_with("data: {") && event.ends_with("}\n\n"));
  EXPECT_EQ(event.find('\n'), event.size() - 2);  // one line: a line end in the text is escaped
  EXPECT_FALSE(Json::parse(event.substr(6)).contains("usage"));
  head.usage_follows = true;
  event = answer_event(head, "{}");
  EXPECT_TRUE(Json::parse(event.substr(6))["usage"].is_null());
  event = usage_event(head, {1, 2});
  EXPECT_EQ(Json::parse(event.substr(6))["choices"], Json::array());
  EXPECT_EQ(Json::parse(event.substr(6))["usage"]["total_tokens"], 3);
  EXPECT_EQ(Json::parse(event.substr(6))["object"], "chat.completion.chunk");
  const AnswerUsage so_far{5, 1, 0};
  event = answer_event(head, "{}", &so_far);
  EXPECT_EQ(Json::parse(event.substr(6))["usage"]["total_tokens"], 6);
}

TEST(AnswerJson, ErrorsHaveTheFormOfTheApi) {
  EXPECT_EQ(Json::parse(error_body(400, "n: got 0", "n")),
            Json::parse(
                R"({"error": {"message": "n: got 0", "type": "invalid_request_error", "param": "n", "code": null}})"));
  EXPECT_EQ(Json::parse(error_body(429, "full", "", "queue_full"))["error"]["code"], "queue_full");
  EXPECT_EQ(Json::parse(error_body(400, "\xff\xfe"))["error"]["message"], "\xEF\xBF\xBD\xEF\xBF\xBD");
}

// Clients choose by the type whether to try again: what is their fault, and what the server's.
TEST(AnswerJson, EachStatusHasItsTypeOfError) {
  const std::pair<int, const char*> types[] = {
      {400, "invalid_request_error"}, {401, "authentication_error"},  {403, "permission_error"},
      {404, "not_found_error"},       {405, "invalid_request_error"}, {413, "invalid_request_error"},
      {415, "invalid_request_error"}, {429, "rate_limit_error"},      {431, "invalid_request_error"},
      {499, "invalid_request_error"}, {500, "server_error"},          {503, "server_error"}};
  for (const auto& [status, type] : types) {
    EXPECT_EQ(Json::parse(error_body(status, "x"))["error"]["type"], type) << status;
    EXPECT_EQ(Json::parse(error_event(status, "x").substr(6))["error"]["type"], type) << status;
  }
}

// ---- ids and the log -----------------------------------------------------------------------------------------------

TEST(RequestId, IsTheClientsIfItIsSane) {
  for (const std::string& given :
       {std::string("a"), std::string(128, 'x'), std::string("Root=1-67891233:azAZ09_./+=@")}) {
    EXPECT_EQ(request_id(given), given);
  }
  for (const std::string& given :
       {std::string(), std::string(129, 'x'), std::string("a b"), std::string("a\"b"), std::string("a\\b"),
        std::string("a\nb"), std::string("\x7f"), std::string("caf\xC3\xA9"), std::string("a\0b", 3),
        std::string("a,b"), std::string("<b>")}) {
    const std::string made = request_id(given);
    EXPECT_EQ(made.size(), 32u) << given;
    EXPECT_EQ(made.find_first_not_of("0123456789abcdef"), std::string::npos) << made;
    EXPECT_NE(made.substr(0, 8), made.substr(8, 8));
    EXPECT_NE(made, request_id(given));
  }
}

TEST(RequestLog, ALineSaysWhatWasComputed) {
  HttpRequest request;
  request.id = "an-id";
  request.method = "GET";
  request.path = "/a 'b'\n";
  EXPECT_EQ(request_line(request, 404), R"(request id=an-id method=GET path='/a \'b\'\x0a' status=404)");

  RequestFigures figures;
  figures.prompt_tokens = 9;
  figures.cached_tokens = 4;
  request.path = "/v1/completions";
  const auto tail = [&](int status) {
    const std::string line = request_line(request, status, &figures);
    return line.substr(line.find(" status="));
  };
  EXPECT_EQ(tail(kClientClosed),
            " status=499 prompt_tokens=9 cached_tokens=4 completion_tokens=0 first_ms=- token_ms=- finish=");
  figures.add(FinishedBy::stop, 1, {0.5, 0, 0});
  EXPECT_EQ(tail(200),
            " status=200 prompt_tokens=9 cached_tokens=4 completion_tokens=1 first_ms=500.00 token_ms=- finish=stop");
  // The first token of all choices, the mean time between tokens of the same choice, and each reason once.
  figures.add(FinishedBy::length, 4, {0.25, 0.009, 3});
  figures.add(FinishedBy::length, 2, {0.75, 0.007, 1});
  figures.add(FinishedBy::cancelled, 0, {});
  EXPECT_EQ(tail(200),
            " status=200 prompt_tokens=9 cached_tokens=4 completion_tokens=7 first_ms=250.00 token_ms=4.00 "
            "finish=stop,length,abort");
}

// ---- metrics ----------------------------------------------------------------------------------------------------------

TEST(ServerMetrics, HistogramsCountUpwards) {
  Histogram histogram({0.5, 1, 2});
  for (const double value : {0.25, 0.5, 0.75, 5.0}) histogram.observe(value);
  EXPECT_EQ(histogram.text("h", "Help.", "a=\"b\""),
            "# HELP h Help.\n# TYPE h histogram\nh_bucket{a=\"b\",le=\"0.5\"} 2\nh_bucket{a=\"b\",le=\"1\"} 3\n"
            "h_bucket{a=\"b\",le=\"2\"} 3\nh_bucket{a=\"b\",le=\"+Inf\"} 4\nh_sum{a=\"b\"} 6.5\nh_count{a=\"b\"} 4\n");
}

TEST(ServerMetrics, NamesAreThoseOfVllm) {
  ServerMetrics metrics;
  metrics.first_token(0.02);
  metrics.inter_token(0.004);
  metrics.ended(FinishedBy::length, 1);
  metrics.ended(FinishedBy::cancelled, 1);
  metrics.answered(429);
  // Every field has a value of its own.
  const EngineStatistics engine = {
      .running = 3,
      .waiting = 2,
      .pages = 64,
      .pages_in_use = 16,
      .pages_cached = 5,
      .steps = 7,
      .rows = 11,
      .prompt_ids = 100,
      .generated_ids = 5'000'000'000,
      .prefix_ids = 13,
      .preemptions = 17,
      .drafts = {.chunks = 43, .ids = 1, .verifications = 31, .drafted = 41, .accepted = 37}};
  const std::string text = metrics.text("a\"b", &engine,
                                        {.connections = 19,
                                         .refused = 23,
                                         .displaced = 47,
                                         .cut_off = 29,
                                         .body_bytes = 53,
                                         .unsent_bytes = 59,
                                         .waiting = 61},
                                        {.completions = 67, .values = 71, .answers = 73});
  for (const auto& [name, value] :
       std::map<std::string, std::string>{{"vllm:num_requests_running", "3"},
                                          {"vllm:num_requests_waiting", "2"},
                                          {"vllm:kv_cache_usage_perc", "0.25"},
                                          {"vllm:prompt_tokens_total", "100"},
                                          {"vllm:generation_tokens_total", "5000000000"},
                                          {"vllm:num_preemptions_total", "17"},
                                          {"vllm:prefix_cache_queries_total", "100"},
                                          {"vllm:prefix_cache_hits_total", "13"},
                                          {"vllm:spec_decode_num_drafts_total", "31"},
                                          {"vllm:spec_decode_num_draft_tokens_total", "41"},
                                          {"vllm:spec_decode_num_accepted_tokens_total", "37"},
                                          {"weft:sampled_chunks_total", "43"},
                                          {"weft:kv_pages", "64"},
                                          {"weft:kv_pages_in_use", "16"},
                                          {"weft:kv_pages_cached", "5"},
                                          {"weft:steps_total", "7"},
                                          {"weft:rows_total", "11"},
                                          {"weft:connections", "19"},
                                          {"weft:connections_refused_total", "23"},
                                          {"weft:connections_displaced_total", "47"},
                                          {"weft:body_bytes", "53"},
                                          {"weft:unsent_bytes", "59"},
                                          {"weft:requests_to_read", "61"},
                                          {"weft:completions", "67"},
                                          {"weft:answer_values", "71"},
                                          {"weft:answers", "73"},
                                          {"weft:streams_cut_off_total", "29"}}) {
    expect_contains(text, "\n" + name + "{model_name=\"a\\\"b\"} " + value + "\n");
    const char* type = name.ends_with("_total") ? "counter" : "gauge";
    expect_contains(text, "# TYPE " + name + " " + type + "\n");
  }
  for (const char* line : {"vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.02\"} 1\n",
                           "vllm:inter_token_latency_seconds_count{model_name=\"a\\\"b\"} 1\n",
                           "vllm:e2e_request_latency_seconds_sum{model_name=\"a\\\"b\"} 2\n",
                           "vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"length\"} 1\n",
                           "vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"abort\"} 1\n",
                           "weft:http_responses_total{model_name=\"a\\\"b\",code=\"429\"} 1\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line;
  }
  EXPECT_EQ(metrics.text("m", nullptr, {}, {}).find("vllm:num_requests_running"), std::string::npos);
  expect_contains(metrics.text("a\nb\\", nullptr, {}, {}), "weft:connections{model_name=\"a\\nb\\\\\"} 0\n");
}

// Each reason and each status has a count of its own, and each request its time.
TEST(ServerMetrics, EndsAreCountedByTheirReason) {
  ServerMetrics metrics;
  const std::pair<FinishedBy, const char*> reasons[] = {{FinishedBy::stop, "stop"},
                                                        {FinishedBy::length, "length"},
                                                        {FinishedBy::cancelled, "abort"},
                                                        {FinishedBy::error, "error"}};
  int count = 0;
  for (const auto& [reason, name] : reasons) {
    ++count;
    for (int i = 0; i < count; ++i) metrics.ended(reason, 0.25);
    for (int i = 0; i < count; ++i) metrics.answered(400 + count);
  }
  const std::string text = metrics.text("m", nullptr, {}, {});
  for (int i = 1; i <= count; ++i) {
    expect_contains(text, format("\nvllm:request_success_total{model_name=\"m\",finished_reason=\"%s\"} %d\n",
                                 reasons[i - 1].second, i));
    expect_contains(text, format("\nweft:http_responses_total{model_name=\"m\",code=\"%d\"} %d\n", 400 + i, i));
  }
  expect_contains(text, "\nvllm:e2e_request_latency_seconds_count{model_name=\"m\"} 10\n");
  expect_contains(text, "\nvllm:e2e_request_latency_seconds_sum{model_name=\"m\"} 2.5\n");
  expect_contains(text, "\nvllm:time_to_first_token_seconds_count{model_name=\"m\"} 0\n");
}

// ---- hosts -----------------------------------------------------------------------------------------------------------

TEST(ServerAccess, AllowedHostsAreAnsweredToAndNoOthers) {
  const std::vector<std::string> named = parse_allowed_hosts({"Weft.Example", "[2001:db8::1]", "10.0.0.7"});
  const auto allows = [](const AccessRules& rules, const std::string& host, const std::string& origin = "") {
    HttpRequest request;
    request.host = host;
    request.origin = origin;
    try {
      check_access(request, rules, true);
    } catch (const RequestError& error) {
      EXPECT_EQ(error.status(), 403);
      return false;
    }
    return true;
  };
  for (const bool loopback : {true, false}) {
    const AccessRules rules{"127.0.0.1", named, loopback, ""};
    for (const char* host :
         {"weft.example", "WEFT.example:8443", "[2001:DB8::1]", "10.0.0.7:80", "localhost:8000", "127.0.0.1"}) {
      EXPECT_TRUE(allows(rules, host)) << host;
    }
    for (const char* host :
         {"example", "weft.example.org", "a.weft.example", "10.0.0.8", "[2001:db8::2]", "2001:db8::1"}) {
      EXPECT_FALSE(allows(rules, host)) << host;
    }
    // A page that the server has sent through a proxy with TLS may use it, those of others may not.
    EXPECT_TRUE(allows(rules, "weft.example", "https://weft.example"));
    EXPECT_FALSE(allows(rules, "weft.example", "https://other.example"));
  }
  EXPECT_FALSE(allows({"127.0.0.1", {}, true, ""}, "weft.example"));
  EXPECT_TRUE(allows({"0.0.0.0", {}, false, ""}, "weft.example"));  // anybody's name for it
  for (const char* bad :
       {"", "https://weft.example", "weft.example:443", "a b", "weft.example/", "*", "::1", "[::1]:80"}) {
    expect_contains(error_of(Exit::usage, [&] { parse_allowed_hosts({"a", bad}); }), "--allowed-host: got");
  }
}

// ---- keys and the page ------------------------------------------------------------------------------------------------

TEST(ServerKey, IsComparedWhole) {
  EXPECT_TRUE(same_key("secret", "secret"));
  for (const char* given : {"", "secre", "secrets", "secretsecret", "Secret", "terces"}) {
    EXPECT_FALSE(same_key(given, "secret")) << given;
  }
  EXPECT_FALSE(same_key("", ""));
}

TEST(ServerKey, ComesFromAFileOrTheEnvironment) {
  const TemporaryDirectory folder;
  write_bytes(folder.file("key"), "  a-key\n");
  EXPECT_EQ(read_api_key(folder.file("key")), "a-key");
  for (const char* bad : {"", "\n", "two words", "caf\xC3\xA9", "a\nb"}) {
    write_bytes(folder.file("key"), bad);
    EXPECT_NE(error_of(Exit::bad_file, [&] { read_api_key(folder.file("key")); }).find("expected a key"),
              std::string::npos);
  }
  error_of(Exit::bad_file, [&] { read_api_key(folder.file("absent")); });
  // Any printable character; and no longer than a file of 4096 bytes.
  for (const std::string& good : {std::string("!"), std::string("~"), std::string(4096, 'k')}) {
    write_bytes(folder.file("key"), good);
    EXPECT_EQ(read_api_key(folder.file("key")), good);
  }
  for (const std::string& bad :
       {std::string("a\x7f"), std::string("a\tb"), std::string("a\0b", 3), std::string(4097, 'k')}) {
    write_bytes(folder.file("key"), bad);
    error_of(Exit::bad_file, [&] { read_api_key(folder.file("key")); });
  }
  // The file goes before the environment, and an empty variable is no way to ask for none.
  const char* const variable = "WEFT_API_KEY";
  write_bytes(folder.file("key"), "of-the-file");
  ::setenv(variable, " of-the-variable\n", 1);
  EXPECT_EQ(read_api_key(""), "of-the-variable");
  EXPECT_EQ(read_api_key(folder.file("key")), "of-the-file");
  for (const char* bad : {"", " ", "two words"}) {
    ::setenv(variable, bad, 1);
    expect_contains(error_of(Exit::usage, [] { read_api_key(""); }), variable);
  }
  ::unsetenv(variable);
  EXPECT_EQ(read_api_key(""), "");
}

TEST(ServerPage, NeedsNothingFromElsewhere) {
  const std::string page = browser_page("abc");
  EXPECT_EQ(page.find("{nonce}"), std::string::npos);
  EXPECT_NE(page.find("<script nonce=\"abc\">"), std::string::npos);
  EXPECT_NE(page.find("</html>"), std::string::npos);
  for (const char* word : {"http:", "https:", "//cdn", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                           "eval(", "onclick=", "onload=", "style=", "localStorage", "src=", "@import", "url("}) {
    EXPECT_EQ(page.find(word), std::string::npos) << word;
  }
  const std::string policy = browser_page_policy("abc");
  EXPECT_NE(policy.find("default-src 'none'; script-src 'nonce-abc'"), std::string::npos);
  EXPECT_EQ(policy.find("unsafe"), std::string::npos);
}

}  // namespace
}  // namespace weft
