#include "llmc/infer/completion.h"
#include "llmc/base/json.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/base/utf8.h"
#include "test/cpp/byte_tokenizer.h"
#include "test/cpp/paged_fake.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

ModelConfig byte_config() {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.vocab_size = 300;  // 259 tokens and padding rows
  config.tokenizer_vocab = 259;
  config.max_positions = 100;
  config.eos_ids = {kEndOfText};
  return config;
}

class Pieces : public CompletionSink {
 public:
  bool on_piece(CompletionPiece piece) override {
    EXPECT_FALSE(end.has_value());
    EXPECT_EQ(utf8_replace_invalid(piece.text), piece.text);
    if (piece.id.has_value()) ids.push_back(piece.id->id);
    text += piece.text;
    pieces.push_back(std::move(piece));
    return std::ssize(pieces) != leave_after;
  }
  void on_end(const CompletionEnd& reason) override {
    EXPECT_FALSE(end.has_value());
    end = reason;
  }

  std::vector<CompletionPiece> pieces;
  Ids ids;
  std::string text;
  std::optional<CompletionEnd> end;
  std::int64_t leave_after = -1;
};

// Hands ids to the listener of a completion, as the engine does, until it has enough of them.
std::shared_ptr<Pieces> feed(const CompletionOptions& options, const Ids& ids, RequestEnd reason,
                             const Tokenizer* tokenizer = &byte_tokenizer(), std::int64_t leave_after = -1) {
  auto pieces = std::make_shared<Pieces>();
  pieces->leave_after = leave_after;
  const Completion completion =
      make_completion({{byte_id('a'), byte_id('b')}, "ab"}, options, tokenizer, byte_config(), pieces);
  if (completion.request.score_prompt) completion.listener->on_prompt(std::vector<ScoredId>{{byte_id('b'), -1, {}}});
  for (const std::int32_t id : ids) {
    if (completion.listener->on_id({id, -0.5, {}})) continue;
    reason = RequestEnd::listener;
    break;
  }
  completion.listener->on_end(reason);
  return pieces;
}

TEST(Completion, OptionsAreRead) {
  CompletionOptions o;
  const Json object = {{"max_tokens", 7}, {"temperature", 0.5}, {"top_k", 3},         {"top_p", 1},    {"min_p", 0.25},
                       {"seed", 9},       {"stop", "x"},        {"ignore_eos", true}, {"logprobs", 2}, {"echo", true}};
  for (const auto& [name, value] : object.items()) EXPECT_TRUE(read_completion_option(name, value, o)) << name;
  EXPECT_FALSE(read_completion_option("model", "m", o));
  EXPECT_EQ(o.max_tokens, 7);
  EXPECT_EQ(o.sampler.temperature, 0.5);
  EXPECT_EQ(o.sampler.top_k, 3);
  EXPECT_EQ(o.sampler.top_p, 1);
  EXPECT_EQ(o.sampler.min_p, 0.25);
  EXPECT_EQ(o.sampler.seed, 9u);
  EXPECT_EQ(o.stop, std::vector<std::string>{"x"});
  EXPECT_TRUE(o.ignore_eos && o.echo);
  EXPECT_EQ(o.logprobs, 2);
  EXPECT_TRUE(read_completion_option("stop", Json::array({"a", "bc"}), o));
  EXPECT_EQ(o.stop, (std::vector<std::string>{"a", "bc"}));
  const std::vector<std::string> most(kMaxStopTexts, std::string(kMaxStopTextBytes, 'x'));  // just the limits
  EXPECT_TRUE(read_completion_option("stop", Json(most), o));
  EXPECT_EQ(o.stop, most);
}

// The least and the largest values, each other than what the options had before.
TEST(Completion, TheLimitsOfEachOptionAreValues) {
  const Json least = {{"max_tokens", 0}, {"temperature", 0}, {"top_k", 0},          {"top_p", 0},    {"min_p", 0},
                      {"seed", 0},       {"stop", "x"},      {"ignore_eos", false}, {"logprobs", 0}, {"echo", false}};
  const Json largest = {{"max_tokens", INT64_MAX},
                        {"temperature", std::numeric_limits<double>::max()},
                        {"top_k", INT64_MAX},
                        {"top_p", 1},
                        {"min_p", 1},
                        {"seed", INT64_MAX},
                        {"stop", Json::array()},
                        {"ignore_eos", true},
                        {"logprobs", kMaxLogprobs},
                        {"echo", true}};
  CompletionOptions o;
  for (const Json& values : {largest, least, largest}) {
    for (const auto& [name, value] : values.items()) EXPECT_TRUE(read_completion_option(name, value, o)) << name;
    EXPECT_EQ(o.max_tokens, values["max_tokens"]);
    EXPECT_EQ(o.sampler.temperature, values["temperature"]);
    EXPECT_EQ(o.sampler.top_k, values["top_k"]);
    EXPECT_EQ(o.sampler.top_p, values["top_p"]);
    EXPECT_EQ(o.sampler.min_p, values["min_p"]);
    EXPECT_EQ(o.sampler.seed, values["seed"]);
    EXPECT_EQ(o.stop.size(), values["stop"].is_string() ? 1u : 0u);
    EXPECT_EQ(o.ignore_eos, values["ignore_eos"]);
    EXPECT_EQ(o.logprobs, values["logprobs"]);
    EXPECT_EQ(o.echo, values["echo"]);
  }
}

TEST(Completion, RulesAreRead) {
  CompletionOptions o;
  const auto read = [&](const char* name, const Json& value) { EXPECT_TRUE(read_completion_option(name, value, o)); };
  EXPECT_FALSE(o.rules.any());
  for (const double penalty : {-2.0, 2.0, 0.25}) {
    read("presence_penalty", penalty);
    EXPECT_EQ(o.rules.penalties.presence, static_cast<float>(penalty));
    read("frequency_penalty", -penalty);
    EXPECT_EQ(o.rules.penalties.frequency, static_cast<float>(-penalty));
  }
  read("repetition_penalty", 1.25);
  EXPECT_EQ(o.rules.penalties.repetition, 1.25f);
  for (const double far : {5e-324, std::numeric_limits<double>::max()}) {  // what no fp32 is
    read("repetition_penalty", far);
    EXPECT_TRUE(std::isnormal(o.rules.penalties.repetition));
  }
  read("logit_bias", {{"0", -100}, {"258", 100}, {"17", 0.5}});
  auto bias = o.rules.logit_bias;
  std::ranges::sort(bias);
  EXPECT_EQ(bias, (std::vector<std::pair<std::int32_t, float>>{{0, -100.0f}, {17, 0.5f}, {258, 100.0f}}));
  read("logit_bias", Json::array());
  EXPECT_TRUE(o.rules.logit_bias.empty());
  const std::vector<std::string> most(kMaxBadWords, std::string(kMaxStopTextBytes, 'x'));
  read("bad_words", most);
  EXPECT_EQ(o.rules.bad_words, most);
  read("min_tokens", 7);
  EXPECT_EQ(o.rules.min_tokens, 7);
  read("stop_token_ids", {5, 0});
  EXPECT_EQ(o.rules.stop_token_ids, (Ids{5, 0}));
  Json all = Json::object();
  for (std::size_t id = 0; id < kMaxLogitBias; ++id) all[std::to_string(id)] = 1;
  read("logit_bias", all);
  EXPECT_EQ(o.rules.logit_bias.size(), kMaxLogitBias);
  read("stop_token_ids", std::vector<int>(kMaxStopTokenIds, 3));
}

// A bad word is its ids at the beginning of a text and behind a space; both once, if they are the same.
TEST(Completion, ARequestHasTheRulesOfItsOptions) {
  CompletionOptions options;
  options.max_tokens = 9;
  options.stop_ids = {7};
  options.rules = {.penalties = {1.5, 0.5, -1},
                   .logit_bias = {{5, 2.0f}},
                   .bad_words = {"ab", "  xy", "<|padding|>"},
                   .min_tokens = 9,
                   .stop_token_ids = {299, 8}};
  const auto make = [&](const Tokenizer* tokenizer = &byte_tokenizer()) {
    return make_completion({{1, 2}, ""}, options, tokenizer, byte_config(), std::make_shared<Pieces>()).request;
  };
  const EngineRequest made = make();
  EXPECT_EQ(made.rules.penalties.repetition, 1.5f);
  EXPECT_EQ(made.rules.penalties.frequency, 0.5f);
  EXPECT_EQ(made.rules.penalties.presence, -1.0f);
  EXPECT_EQ(made.rules.logit_bias, options.rules.logit_bias);
  const std::int32_t space = byte_id(' '), x = byte_id('x'), y = byte_id('y');
  EXPECT_EQ(made.rules.bad_words, (std::vector<Ids>{{kAb}, {space, kAb}, {x, y}, {space, x, y}, {1}, {space, 1}}));
  EXPECT_EQ(made.rules.min_tokens, 9);
  EXPECT_EQ(made.rules.end_ids, (Ids{kEndOfText, 7, 299, 8}));
  EXPECT_EQ(made.stop_ids, made.rules.end_ids);
  // The end of the text is not looked at then, but it is still no text before min_tokens.
  options.ignore_eos = true;
  EXPECT_EQ(make().stop_ids, (Ids{299, 8}));
  EXPECT_EQ(make().rules.end_ids, made.rules.end_ids);
  // What was made before is used.
  options.logit_rules = LogitRuleOptions{};
  EXPECT_FALSE(make().rules.any());
  options.logit_rules.reset();
  EXPECT_NE(error_of(Exit::usage, [&] { make(nullptr); }).find("bad_words: they need a tokenizer"), std::string::npos);
  options.rules.bad_words.clear();
  EXPECT_EQ(make(nullptr).rules.min_tokens, 9);
  options.rules.min_tokens = 10;
  EXPECT_EQ(error_of(Exit::usage, [&] { make(); }),
            "min_tokens: got 10, expected at most the 9 tokens that may be generated");
  options.rules = {.logit_bias = {{300, 1.0f}}};
  EXPECT_EQ(error_of(Exit::usage, [&] { make(); }), "logit_bias: got id 300, expected 0 to 299");
}

// Text that came before min_tokens ids is not searched; a stop text may begin in it.
TEST(Completion, StopTextsCountAfterMinTokens) {
  CompletionOptions options;
  options.stop = {"lo"};
  for (const auto& [min, text] : {std::pair(0, "hel"),
                                  {4, "hel"},
                                  {5, "hello, hel"},
                                  {11, "hello, hel"},
                                  {12, "hello, hello"},
                                  {13, "hello, hello"}}) {
    options.rules.min_tokens = min;
    const auto got = feed(options, ids_of("hello, hello"), RequestEnd::max_ids);
    EXPECT_EQ(got->text, text) << min;
    EXPECT_EQ(got->end->reason, min < 12 ? FinishedBy::stop : FinishedBy::length) << min;
  }
}

TEST(Completion, ValuesThatCannotBeAreRefusedByName) {
  const std::string long_stop(kMaxStopTextBytes + 1, 'x');
  const Json many(std::vector<std::string>(kMaxStopTexts + 1, "x"));
  Json too_much_bias = Json::object();
  for (std::size_t id = 0; id <= kMaxLogitBias; ++id) too_much_bias[std::to_string(id)] = 1;
  const std::vector<std::pair<std::string, Json>> bad = {
      {"max_tokens", -1},
      {"max_tokens", 1.5},
      {"max_tokens", "8"},
      {"max_tokens", nullptr},
      {"max_tokens", true},
      {"max_tokens", 9223372036854775808u},
      {"temperature", -0.1},
      {"temperature", "1"},
      {"temperature", true},
      {"top_k", -1},
      {"top_k", 2.0},
      {"top_p", 1.01},
      {"top_p", -0.01},
      {"min_p", 2},
      {"seed", -1},
      {"seed", 1e30},
      {"stop", ""},
      {"stop", 3},
      {"stop", Json::array({"a", 3})},
      {"stop", Json::array({""})},
      {"stop", long_stop},
      {"stop", many},
      {"ignore_eos", 1},
      {"logprobs", -1},
      {"logprobs", 21},
      {"logprobs", true},
      {"echo", "yes"},
      {"presence_penalty", 2.01},
      {"presence_penalty", -2.01},
      {"presence_penalty", "1"},
      {"frequency_penalty", 2.01},
      {"frequency_penalty", true},
      {"repetition_penalty", 0},
      {"repetition_penalty", -1},
      {"repetition_penalty", nullptr},
      {"logit_bias", 5},
      {"logit_bias", Json::array({1})},
      {"logit_bias", {{"a", 1}}},
      {"logit_bias", {{"-1", 1}}},
      {"logit_bias", {{"01", 1}}},
      {"logit_bias", {{"1 ", 1}}},
      {"logit_bias", {{"", 1}}},
      {"logit_bias", {{"2147483648", 1}}},
      {"logit_bias", too_much_bias},
      {"bad_words", "x"},
      {"bad_words", Json::array({1})},
      {"bad_words", Json::array({""})},
      {"bad_words", Json::array({" \n"})},
      {"bad_words", Json::array({long_stop})},
      {"bad_words", Json(std::vector<std::string>(kMaxBadWords + 1, "x"))},
      {"min_tokens", -1},
      {"min_tokens", 1.5},
      {"stop_token_ids", 5},
      {"stop_token_ids", Json::array({-1})},
      {"stop_token_ids", Json::array({1.0})},
      {"stop_token_ids", Json::array({2147483648u})},
      {"stop_token_ids", Json(std::vector<int>(kMaxStopTokenIds + 1, 3))}};
  for (const auto& each : bad) {
    CompletionOptions o;
    const std::string message = error_of(Exit::usage, [&] { read_completion_option(each.first, each.second, o); });
    EXPECT_EQ(message.find(std::string(each.first) + ": got "), 0u) << message;
    EXPECT_NE(message.find(", expected "), std::string::npos) << message;
  }
  CompletionOptions o;
  EXPECT_EQ(error_of(Exit::usage,
                     [&] {
                       read_completion_option("logit_bias", {{"5", 100.5}}, o);
                     }),
            "logit_bias: 5: got '100.5', expected a number from -100 to 100");
  CompletionOptions nothing;
  nothing.max_tokens = 0;
  EXPECT_EQ(error_of(Exit::usage, [&] { check_completion_options(nothing); }).find("max_tokens: got 0"), 0u);
  nothing.echo = true;
  check_completion_options(nothing);
}

TEST(Completion, ARequestHasWhatTheOptionsSay) {
  CompletionOptions options;
  options.max_tokens = 9;
  options.sampler = {.temperature = 0.5, .top_k = 4, .seed = 3};
  options.logprobs = 2;
  options.deadline = std::chrono::steady_clock::time_point(std::chrono::seconds(5));
  auto made =
      make_completion({{1, 2}, ""}, options, &byte_tokenizer(), byte_config(), std::make_shared<Pieces>()).request;
  EXPECT_EQ(made.prompt, (Ids{1, 2}));
  EXPECT_EQ(made.max_ids, 9);
  EXPECT_EQ(made.alternatives, 2);
  EXPECT_EQ(made.deadline, options.deadline);
  EXPECT_FALSE(made.score_prompt);
  EXPECT_EQ(made.stop_ids, Ids{kEndOfText});
  EXPECT_EQ(made.sampling.seed, 3u);
  EXPECT_EQ(made.sampling.top_k, 4u);
  EXPECT_EQ(made.sampling.vocab_limit, 259);  // padding rows are never sampled
  options.ignore_eos = options.echo = true;
  made = make_completion({{1, 2}, ""}, options, nullptr, byte_config(), std::make_shared<Pieces>()).request;
  EXPECT_TRUE(made.stop_ids.empty());
  EXPECT_TRUE(made.score_prompt);
  EXPECT_EQ(made.sampling.vocab_limit, 259);
  // The prompt is scored where its log-probabilities are asked for, and where there is nothing else to do.
  for (const auto& [echo, logprobs, max_tokens, scored] : {std::tuple(false, 2, 9, false),
                                                           {true, -1, 9, false},
                                                           {true, 0, 9, true},
                                                           {true, -1, 0, true},
                                                           {true, 0, 0, true}}) {
    CompletionOptions asked;
    asked.echo = echo;
    asked.logprobs = logprobs;
    asked.max_tokens = max_tokens;
    made = make_completion({{1, 2}, ""}, asked, nullptr, byte_config(), std::make_shared<Pieces>()).request;
    EXPECT_EQ(made.score_prompt, scored) << echo << logprobs << max_tokens;
  }
  options.stop = {"x"};
  error_of(Exit::usage, [&] {
    make_completion({{1}, ""}, options, nullptr, byte_config(), std::make_shared<Pieces>());
  });
}

TEST(Completion, EachIdHasAPieceAndTheTextIsWhole) {
  const std::string text = "h\xc3\xa9llo";
  const auto got = feed({}, ids_of(text), RequestEnd::max_ids);
  EXPECT_EQ(got->ids, ids_of(text));
  EXPECT_EQ(got->pieces.size(), text.size());
  EXPECT_EQ(got->text, text);
  EXPECT_EQ(got->pieces[1].text, "");  // half a character
  EXPECT_EQ(got->pieces[2].text, "\xc3\xa9");
  EXPECT_EQ(got->pieces[0].id->logprob, -0.5f);
  EXPECT_EQ(got->end->reason, FinishedBy::length);
  EXPECT_EQ(got->end->prompt_ids, 2);
  EXPECT_EQ(got->end->generated_ids, std::ssize(text));
  // What is held back comes at the end, without an id.
  const auto cut = feed({}, ids_of("x\xc3"), RequestEnd::full);
  EXPECT_EQ(cut->text, "x\xef\xbf\xbd");
  EXPECT_EQ(cut->pieces.size(), 3u);
  EXPECT_FALSE(cut->pieces[2].id.has_value());
  EXPECT_EQ(cut->end->reason, FinishedBy::length);
}

TEST(Completion, AStopTextEndsItAndNeverShows) {
  CompletionOptions options;
  options.stop = {"END", "llo w"};
  const auto got = feed(options, ids_of("hello world"), RequestEnd::max_ids);
  EXPECT_EQ(got->text, "he");
  EXPECT_EQ(got->ids, ids_of("hello w"));
  EXPECT_EQ(got->end->reason, FinishedBy::stop);
  EXPECT_EQ(got->end->message, "");
  const auto begun = feed(options, ids_of("see EN"), RequestEnd::max_ids);
  EXPECT_EQ(begun->text, "see EN");
  EXPECT_EQ(begun->end->reason, FinishedBy::length);
  // Half a character becomes U+FFFD when no more can come, and that may complete a stop text.
  options.stop = {"e\xef\xbf\xbd"};
  for (const RequestEnd end : {RequestEnd::max_ids, RequestEnd::full}) {
    const auto late = feed(options, ids_of("see\xc3"), end);
    EXPECT_EQ(late->text, "se");
    EXPECT_EQ(late->end->reason, FinishedBy::stop);
  }
}

TEST(Completion, AStopIdHasNoText) {
  Ids ids = ids_of("hi");
  ids.push_back(kEndOfText);
  const auto got = feed({}, ids, RequestEnd::stop_id);
  EXPECT_EQ(got->text, "hi");
  EXPECT_EQ(got->ids, ids);
  EXPECT_EQ(got->end->reason, FinishedBy::stop);
  CompletionOptions ignore;
  ignore.ignore_eos = true;
  EXPECT_EQ(feed(ignore, ids, RequestEnd::max_ids)->text, "hi<|endoftext|>");
}

// What a stop text or a character that has begun held back is text once nothing can complete it.
TEST(Completion, AStopIdReleasesWhatWasHeldBack) {
  CompletionOptions options;
  options.stop = {"END"};
  for (const auto& [text, shown] : {std::pair("see EN", "see EN"), std::pair("x\xc3", "x\xef\xbf\xbd")}) {
    Ids ids = ids_of(text);
    ids.push_back(kEndOfText);
    const auto got = feed(options, ids, RequestEnd::stop_id);
    EXPECT_EQ(got->text, shown);
    EXPECT_EQ(got->end->reason, FinishedBy::stop);
  }
}

TEST(Completion, EchoComesFirst) {
  CompletionOptions options;
  options.echo = true;
  const auto plain = feed(options, ids_of("c"), RequestEnd::max_ids);
  EXPECT_EQ(plain->text, "abc");
  EXPECT_TRUE(plain->pieces[0].is_prompt);
  EXPECT_TRUE(plain->pieces[0].prompt.empty());
  EXPECT_EQ(plain->pieces.size(), 2u);
  options.logprobs = 0;
  const auto scored = feed(options, ids_of("c"), RequestEnd::max_ids);
  ASSERT_EQ(scored->pieces.size(), 2u);
  ASSERT_EQ(scored->pieces[0].prompt.size(), 1u);
  EXPECT_EQ(scored->pieces[0].prompt[0].logprob, -1.0f);
  options.max_tokens = 0;
  const auto alone = feed(options, {}, RequestEnd::max_ids);
  EXPECT_EQ(alone->text, "ab");
  EXPECT_EQ(alone->end->reason, FinishedBy::length);
}

TEST(Completion, EveryOtherEndSaysWhy) {
  const auto gone = feed({}, ids_of("hello"), RequestEnd::max_ids, &byte_tokenizer(), 2);
  EXPECT_EQ(gone->ids, ids_of("he"));
  EXPECT_EQ(gone->end->reason, FinishedBy::cancelled);
  EXPECT_EQ(gone->end->message, "the receiver has gone");
  const auto cancelled = feed({}, ids_of("x\xc3"), RequestEnd::cancelled);
  EXPECT_EQ(cancelled->text, "x");  // nothing comes after a cancellation
  EXPECT_EQ(cancelled->end->reason, FinishedBy::cancelled);
  EXPECT_EQ(cancelled->end->message, "cancelled");
  const auto late = feed({.stop = {"lord"}}, ids_of("hello"), RequestEnd::deadline);
  EXPECT_EQ(late->text, "hello");  // what was held back for a stop text, too
  EXPECT_EQ(late->end->reason, FinishedBy::cancelled);
  EXPECT_NE(late->end->message.find("time limit"), std::string::npos);
  const auto damaged = feed({}, {}, RequestEnd::not_finite);
  EXPECT_EQ(damaged->end->reason, FinishedBy::error);
  EXPECT_NE(damaged->end->message.find("not finite"), std::string::npos);
  EXPECT_STREQ(finished_by_name(FinishedBy::stop), "stop");
  EXPECT_STREQ(finished_by_name(FinishedBy::error), "error");
}

TEST(Completion, PromptsOfBothKinds) {
  const ModelConfig config = byte_config();
  const Tokenizer* tokenizer = &byte_tokenizer();
  const CompletionPrompt text = prompt_from_text("hi", tokenizer, Tokenizer::Special::text, config, "prompt");
  EXPECT_EQ(text.ids, ids_of("hi"));
  EXPECT_EQ(text.text, "hi");
  EXPECT_EQ(prompt_from_text("", tokenizer, Tokenizer::Special::text, config, "prompt").ids, Ids{kEndOfText});
  EXPECT_EQ(prompt_from_text("a\xff", tokenizer, Tokenizer::Special::text, config, "prompt").text, "a\xef\xbf\xbd");
  const CompletionPrompt ids = prompt_from_ids(Json(Ids{byte_id('h'), 299, byte_id('i')}), tokenizer, config, "prompt");
  EXPECT_EQ(ids.ids, (Ids{byte_id('h'), 299, byte_id('i')}));
  EXPECT_EQ(ids.text, "hi");  // a padding row has no text
  // The last id with a text, and the first and the last padding row.
  const CompletionPrompt edge = prompt_from_ids(Json(Ids{kEndOfText, kAb, 259, 299}), tokenizer, config, "prompt");
  EXPECT_EQ(edge.ids, (Ids{kEndOfText, kAb, 259, 299}));
  EXPECT_EQ(edge.text, "<|endoftext|>ab");
  EXPECT_EQ(prompt_from_ids(Json(Ids{299}), nullptr, config, "prompt").text, "");
  for (const Json& bad : {Json::array(), Json::array({300}), Json::array({-1}), Json::array({1.5}), Json::array({"a"}),
                          Json::array({18446744073709551615u}), Json("text"), Json(nullptr), Json::array({{1}})}) {
    const std::string message = error_of(Exit::usage, [&] { prompt_from_ids(bad, tokenizer, config, "prompt_ids"); });
    EXPECT_EQ(message.find("prompt_ids: "), 0u) << message;
    EXPECT_NE(message.find("integers from 0 to 299"), std::string::npos) << message;
  }
  EXPECT_EQ(error_of(Exit::usage, [&] { prompt_from_text("x", nullptr, Tokenizer::Special::text, config, "prompt"); })
                .find("prompt: "),
            0u);
}

// The token that begins a text, where the tokenizer has one, is part of every prompt that is a text, and not of its echo.
TEST(Completion, APromptBeginsAsItsTokenizerSays) {
  const auto read = [](const std::string& text) {
    return prompt_from_text(text, &starting_byte_tokenizer(), Tokenizer::Special::text, byte_config(), "prompt");
  };
  EXPECT_EQ(read("hi").ids, (Ids{1, byte_id('h'), byte_id('i')}));
  EXPECT_EQ(read("hi").text, "hi");
  EXPECT_EQ(read("").ids, Ids{1});
}

// The name of a special token is that token where it is asked for, and otherwise its letters; echo shows it either way.
TEST(Completion, NamesOfSpecialTokensAreReadAsAsked) {
  const std::string text = "<|padding|>x<|endoftext|>";
  const auto read = [&](Tokenizer::Special special) {
    return prompt_from_text(text, &byte_tokenizer(), special, byte_config(), "prompt");
  };
  EXPECT_EQ(read(Tokenizer::Special::text).ids, ids_of(text));
  EXPECT_EQ(read(Tokenizer::Special::allow).ids, (Ids{1, byte_id('x'), kEndOfText}));
  for (const Tokenizer::Special special : {Tokenizer::Special::text, Tokenizer::Special::allow}) {
    EXPECT_EQ(read(special).text, text);
  }
}

TEST(Completion, ThroughTheEngine) {
  PagedFake model({.vocab_size = 259, .depth = 2});
  model.change_config() = byte_config();
  model.change_config().vocab_size = 259;
  Engine engine(model, {.max_running = 4, .rows_per_step = 16});
  CompletionOptions options;
  options.max_tokens = 40;
  options.ignore_eos = true;
  options.sampler.seed = 4;
  const auto whole = std::make_shared<Pieces>();
  Completion first = make_completion({ids_of("prompt"), ""}, options, &byte_tokenizer(), model.config(), whole);
  engine.submit(first.request, first.listener);
  while (engine.step()) {
  }
  EXPECT_EQ(whole->ids, PagedFake::ids_after(ids_of("prompt"), 40, 4, 259));
  EXPECT_EQ(whole->text, utf8_replace_invalid(byte_tokenizer().decode(whole->ids)));
  // The same completion up to a text in its middle.
  options.stop = {byte_tokenizer().decode(Ids{whole->ids[20], whole->ids[21]})};
  if (utf8_replace_invalid(options.stop[0]) != options.stop[0]) options.stop = {"\xef\xbf\xbd"};
  const auto stopped = std::make_shared<Pieces>();
  Completion second = make_completion({ids_of("prompt"), ""}, options, &byte_tokenizer(), model.config(), stopped);
  engine.submit(second.request, second.listener);
  while (engine.step()) {
  }
  EXPECT_EQ(stopped->text, whole->text.substr(0, whole->text.find(options.stop[0])));
  EXPECT_EQ(stopped->end->reason, FinishedBy::stop);
  EXPECT_EQ(engine.statistics().pages_in_use, 0);
}

}  // namespace
}  // namespace weft
