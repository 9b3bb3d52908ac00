#include "llmc/serve/completions_request.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "llmc/base/json.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer one = Tokenizer::from_json(read_bytes("test/fixtures/tokenizer/neox_style.tokenizer.json"),
                                                    "neox_style.tokenizer.json");
  return one;
}

ModelConfig config() {
  ModelConfig c;
  set_family(c, "gpt_neox");
  c.vocab_size = tokenizer().vocab_size() + 6;
  c.eos_ids = {0};
  c.max_positions = 64;
  return c;
}

TextRequest parse(const std::string& body) {
  static const ModelConfig c = config();
  return parse_completions(body, {"tiny", &tokenizer(), Tokenizer::Special::text, &c, 256});
}

// By hand: choices, times the tokens of all prompts that are echoed and generated, times what each of them brings.
TEST(CompletionsRequest, ValuesOfAnAnswer) {
  const auto values = [](const std::string& fields) {
    return answer_values(parse(R"({"prompt": [[5, 6, 7], [8]], )" + fields + "}"), config());
  };
  EXPECT_EQ(values(R"("max_tokens": 10)"), 20);
  EXPECT_EQ(values(R"("max_tokens": 10, "n": 3)"), 60);
  EXPECT_EQ(values(R"("max_tokens": 10, "stream": true)"), 0);
  EXPECT_EQ(values(R"("max_tokens": 10, "logprobs": 0)"), 40);
  EXPECT_EQ(values(R"("max_tokens": 10, "logprobs": 5)"), 140);
  EXPECT_EQ(values(R"("max_tokens": 10, "echo": true)"), 20);
  EXPECT_EQ(values(R"("max_tokens": 10, "echo": true, "logprobs": 5, "n": 2)"), 2 * 24 * 7);
  EXPECT_EQ(values(R"("max_tokens": 10, "echo": true, "logprobs": 5, "n": 2, "stream": true)"), 2 * 4 * 7);
  EXPECT_EQ(values(R"("max_tokens": 1000000)"), 61 + 63) << "to the last position";
  EXPECT_EQ(values(R"("max_tokens": 0, "echo": true, "logprobs": 20)"), 4 * 22);
}

TEST(CompletionsRequest, AnAnswerOfTooManyValuesIsRefused) {
  const ModelConfig c = config();
  const auto refusal = [&](std::int64_t limit, const std::string& fields) -> std::string {
    try {
      parse_completions(R"({"prompt": [5], "max_tokens": 10, )" + fields + "}",
                        {"tiny", &tokenizer(), Tokenizer::Special::text, &c, 256, limit});
    } catch (const RequestError& error) {
      EXPECT_EQ(error.status(), 400);
      return error.param() + ": " + error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(10, R"("n": 1)"), "");
  EXPECT_EQ(
      refusal(19, R"("n": 2)"),
      "max_tokens: the answer may have 20 values, the tokens and log-probabilities of all choices, expected at most "
      "19. Stream it, or ask for fewer choices, tokens or alternatives");
  EXPECT_EQ(refusal(40, R"("n": 2, "logprobs": 0)"), "");
  EXPECT_TRUE(refusal(39, R"("n": 2, "logprobs": 0)").starts_with("logprobs: the answer may have 40 values"));
  EXPECT_EQ(refusal(39, R"("n": 2, "logprobs": 0, "stream": true)"), "");
  EXPECT_TRUE(refusal(3, R"("n": 2, "logprobs": 0, "stream": true, "echo": true)")
                  .ends_with(". Echo fewer prompts, choices or alternatives"));
}

struct Refusal {
  int status = 0;
  std::string param, message, code;
};
Refusal refusal(const std::string& body) {
  try {
    parse(body);
  } catch (const RequestError& error) {
    return {error.status(), error.param(), error.what(), error.api_code()};
  }
  ADD_FAILURE() << "accepted: " << body;
  return {};
}

TEST(CompletionsRequest, DefaultsAreThoseOfTheApi) {
  const TextRequest request = parse(R"({"model": "tiny", "prompt": "Once"})");
  ASSERT_EQ(request.prompts.size(), 1u);
  EXPECT_EQ(request.prompts[0].ids, tokenizer().encode("Once", true));
  EXPECT_EQ(request.prompts[0].text, "Once");
  EXPECT_EQ(request.n, 1);
  EXPECT_EQ(request.options.max_tokens, 16);
  EXPECT_EQ(request.options.sampler.temperature, 1);
  EXPECT_EQ(request.options.sampler.top_p, 1);
  EXPECT_EQ(request.options.logprobs, -1);
  EXPECT_FALSE(request.stream || request.include_usage || request.seeded || request.options.echo);
  EXPECT_FALSE(request.options.deadline.has_value());
}

TEST(CompletionsRequest, EveryFieldArrives) {
  const TextRequest request = parse(R"({"prompt": ["a", "b"], "n": 3, "max_tokens": 7, "temperature": 0.5,
      "top_p": 0.25, "top_k": 4, "min_p": 0.125, "seed": 11, "stop": ["x", "yz"], "logprobs": 5, "echo": true,
      "stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true, "best_of": 3, "user": "me"})");
  EXPECT_EQ(request.prompts.size(), 2u);
  EXPECT_EQ(request.sequences(), 6);
  EXPECT_EQ(request.options.max_tokens, 7);
  EXPECT_EQ(request.options.sampler.temperature, 0.5);
  EXPECT_EQ(request.options.sampler.top_p, 0.25);
  EXPECT_EQ(request.options.sampler.top_k, 4);
  EXPECT_EQ(request.options.sampler.min_p, 0.125);
  EXPECT_EQ(request.options.sampler.seed, 11u);
  EXPECT_EQ(request.options.stop, (std::vector<std::string>{"x", "yz"}));
  EXPECT_EQ(request.options.logprobs, 5);
  EXPECT_TRUE(request.seeded && request.stream && request.include_usage);
  EXPECT_TRUE(request.options.echo && request.options.ignore_eos);
}

TEST(CompletionsRequest, RulesArrive) {
  const TextRequest request =
      parse(R"({"prompt": "a", "max_tokens": 7, "presence_penalty": 0.5, "frequency_penalty": -1,
      "repetition_penalty": 1.25, "logit_bias": {"5": 1}, "min_tokens": 7, "stop_token_ids": [5], "bad_words": ["x"],
      "stop": null})");
  ASSERT_TRUE(request.options.logit_rules.has_value());
  const LogitRuleOptions& rules = *request.options.logit_rules;
  EXPECT_EQ(rules.penalties.presence, 0.5f);
  EXPECT_EQ(rules.penalties.frequency, -1.0f);
  EXPECT_EQ(rules.penalties.repetition, 1.25f);
  EXPECT_EQ(rules.logit_bias, (std::vector<std::pair<std::int32_t, float>>{{5, 1.0f}}));
  EXPECT_EQ(rules.min_tokens, 7);
  EXPECT_EQ(rules.end_ids, (std::vector<std::int32_t>{0, 5}));
  ASSERT_EQ(rules.bad_words.size(), 2u);
  EXPECT_EQ(rules.bad_words[0], tokenizer().encode("x", false));
  EXPECT_EQ(rules.bad_words[1], tokenizer().encode(" x", false));
  EXPECT_FALSE(parse(R"({"prompt": "a", "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
      "logit_bias": {}, "min_tokens": 0, "stop_token_ids": [], "bad_words": []})")
                   .options.logit_rules->any());
  EXPECT_FALSE(parse(R"({"prompt": "a", "presence_penalty": null, "logit_bias": null, "bad_words": null})")
                   .options.logit_rules->any());
}

TEST(CompletionsRequest, PromptsOfEveryKind) {
  EXPECT_EQ(parse(R"({"prompt": "ab"})").prompts.size(), 1u);
  EXPECT_EQ(parse(R"({"prompt": ["ab"]})").prompts.size(), 1u);
  const TextRequest ids = parse(R"({"prompt": [5, 6, 7]})");
  ASSERT_EQ(ids.prompts.size(), 1u);
  EXPECT_EQ(ids.prompts[0].ids, (std::vector<std::int32_t>{5, 6, 7}));
  EXPECT_EQ(ids.prompts[0].text, tokenizer().decode(ids.prompts[0].ids));
  const TextRequest lists = parse(R"({"prompt": [[5], [6, 7]]})");
  ASSERT_EQ(lists.prompts.size(), 2u);
  EXPECT_EQ(lists.prompts[1].ids, (std::vector<std::int32_t>{6, 7}));
  // An empty text is the token that begins a document.
  EXPECT_EQ(parse(R"({"prompt": ""})").prompts[0].ids, (std::vector<std::int32_t>{0}));
}

TEST(CompletionsRequest, NullIsTheDefault) {
  const TextRequest request = parse(R"({"prompt": "a", "n": null, "max_tokens": null, "temperature": null,
      "stop": null, "logprobs": null, "echo": null, "stream": null, "stream_options": null, "suffix": null,
      "logit_bias": null, "best_of": null, "model": null, "seed": null, "something_new": null, "top_k": -1})");
  EXPECT_EQ(request.options.max_tokens, 16);
  EXPECT_EQ(request.options.sampler.top_k, 0);
  EXPECT_FALSE(request.seeded);
}

// Nobody knows whether it would change the text: a misspelled one would.
TEST(CompletionsRequest, AnUnknownFieldIsRefused) {
  for (const char* name : {"temprature", "Temperature", "something_new", "", "a\\nb"}) {
    const Refusal got = refusal(std::string(R"({"prompt": "a", ")") + name + R"(": {"a": [1]}})");
    EXPECT_EQ(got.status, 400) << name;
    EXPECT_NE(got.message.find("this server does not know"), std::string::npos) << got.message;
    EXPECT_EQ(got.message.find('\n'), std::string::npos);
  }
}

// OpenAI's seeds have 64 bits and a sign; -1 asks for any, as in llama.cpp and vLLM.
TEST(CompletionsRequest, SeedsOfEveryKind) {
  const auto seed = [](const std::string& text) { return parse(R"({"prompt": "a", "seed": )" + text + "}"); };
  EXPECT_FALSE(seed("-1").seeded);
  for (const auto& [text, value] : {std::pair("0", std::uint64_t{0}),
                                    {"7", 7},
                                    {"-2", UINT64_MAX - 1},
                                    {"4294967295", UINT32_MAX},
                                    {"-9223372036854775808", std::uint64_t{1} << 63},
                                    {"9223372036854775807", INT64_MAX},
                                    {"18446744073709551615", UINT64_MAX}}) {
    EXPECT_TRUE(seed(text).seeded) << text;
    EXPECT_EQ(seed(text).options.sampler.seed, value) << text;
  }
  for (const char* bad : {"18446744073709551616", "-9223372036854775809", "1.5", "\"7\"", "true", "[1]"}) {
    const Refusal got = refusal(std::string(R"({"prompt": "a", "seed": )") + bad + "}");
    EXPECT_EQ(got.param, "seed") << bad;
    EXPECT_NE(got.message.find("an integer of 64 bits"), std::string::npos) << got.message;
  }
}

// A text that certainly has too many ids is refused by its bytes; one that may fit is tokenized, and refused by its ids.
TEST(CompletionsRequest, APromptThatCannotFitIsNotTokenized) {
  static const ModelConfig c = config();
  RequestContext context{"tiny", &tokenizer(), Tokenizer::Special::text, &c, 256};
  context.refusal = [](std::int64_t ids, std::int64_t) {
    return ids > 64 ? format("at most 64, not %d", static_cast<int>(ids)) : "";
  };
  const auto message = [&](const std::string& prompt) -> std::string {
    try {
      parse_completions(R"({"prompt": )" + prompt + "}", context);
    } catch (const RequestError& error) {
      EXPECT_EQ(error.status(), 400);
      EXPECT_EQ(error.param(), "prompt");
      EXPECT_EQ(error.api_code(), "context_length_exceeded");
      return error.what();
    }
    return "";
  };
  const std::string huge(4'000'000, 'a');
  const auto quoted = [](const std::string& text) { return "\"" + text + "\""; };
  EXPECT_NE(message(quoted(huge)).find("prompt: its 4000000 bytes are at least"), std::string::npos);
  EXPECT_NE(message("[\"a\", " + quoted(huge) + "]").find("prompt[1]: its 4000000 bytes"), std::string::npos);
  std::string words;
  for (int i = 0; i < 100; ++i) words += "q ";
  const std::string ids = message(quoted(words));  // too many, but not certainly
  EXPECT_EQ(ids.find("bytes"), std::string::npos) << ids;
  EXPECT_NE(ids.find("at most 64"), std::string::npos) << ids;
  EXPECT_EQ(message(quoted("a")), "");
  EXPECT_EQ(message("[5, 6]"), "");
  std::string list = "[5";
  for (int i = 0; i < 64; ++i) list += ", 99999999";  // not ids of this model: not read
  EXPECT_EQ(message(list + "]"), "prompt: at most 64, not 65");
}

// Nothing is tokenized where there is no place.
TEST(CompletionsRequest, ThereIsRoomBeforeAnythingIsTokenized) {
  static const ModelConfig c = config();
  const RequestContext context{"tiny", &tokenizer(), Tokenizer::Special::text, &c, 256};
  std::int64_t asked = 0;
  try {
    parse_completions(R"({"prompt": ["a", "b", 5], "n": 4})", context, [&](std::int64_t completions) {
      asked = completions;
      throw RequestError(429, "full");  // and not 400, for the last one
    });
    ADD_FAILURE() << "accepted";
  } catch (const RequestError& error) {
    EXPECT_EQ(error.status(), 429);
  }
  EXPECT_EQ(asked, 12);
}

TEST(CompletionsRequest, ZeroAndFalseAreValuesAndNotTheDefault) {
  const TextRequest request = parse(R"({"prompt": "a", "max_tokens": 0, "temperature": 0, "top_p": 0, "top_k": 0,
      "min_p": 0, "seed": 0, "logprobs": 0, "echo": true, "ignore_eos": false, "stream": false, "stop": []})");
  EXPECT_EQ(request.options.max_tokens, 0);
  EXPECT_EQ(request.options.sampler.temperature, 0);
  EXPECT_EQ(request.options.sampler.top_p, 0);
  EXPECT_EQ(request.options.sampler.seed, 0u);
  EXPECT_TRUE(request.seeded);
  EXPECT_EQ(request.options.logprobs, 0);
  EXPECT_FALSE(request.stream || request.include_usage || request.options.ignore_eos);
  EXPECT_TRUE(parse(R"({"prompt": "a", "seed": 9223372036854775807})").seeded);
  EXPECT_FALSE(parse(R"({"prompt": "a", "echo": false})").options.echo);
  EXPECT_FALSE(parse(R"({"prompt": "a", "stream": true, "stream_options": {"include_usage": false}})").include_usage);
}

TEST(CompletionsRequest, WhatWouldChangeTheTextIsRefusedUnlessNeutral) {
  parse(R"({"prompt": "a", "suffix": "", "use_beam_search": false, "response_format": {"type": "text"}})");
  for (const char* field : {R"("suffix": "x")", R"("use_beam_search": true)", R"("best_of": 2)",
                            R"("guided_regex": "a*")", R"("response_format": {"type": "json_object"})"}) {
    const Refusal got = refusal(std::string(R"({"prompt": "a", )") + field + "}");
    EXPECT_EQ(got.status, 400) << field;
    EXPECT_EQ("\"" + got.param + "\"", std::string(field).substr(0, std::string(field).find(':'))) << got.message;
  }
}

// Fields of other servers that would change the text or what the client gets, each with the value that asks for nothing ("null":
// no other) and one that does.
TEST(CompletionsRequest, EachUnsupportedFieldIsRefusedUnlessNeutral) {
  struct Field {
    const char *name, *neutral, *other;
  };
  for (const Field& field : std::vector<Field>{{"suffix", R"("")", R"("x")"},
                                               {"length_penalty", "1", "0"},
                                               {"use_beam_search", "false", "true"},
                                               {"allowed_token_ids", "[]", "[5]"},
                                               {"response_format", R"({"type": "text"})", R"({"type": "json_object"})"},
                                               {"guided_json", "null", R"({"type": "object"})"},
                                               {"guided_regex", "null", R"("a*")"},
                                               {"guided_choice", "null", R"(["a"])"},
                                               {"guided_grammar", "null", R"("x")"},
                                               {"structured_outputs", "null", R"({"regex": "a"})"},
                                               {"truncate_prompt_tokens", "null", "5"},
                                               {"include_stop_str_in_output", "false", "true"},
                                               {"skip_special_tokens", "false", "true"},
                                               {"add_special_tokens", "true", "false"},
                                               {"prompt_embeds", "null", R"("AAAA")"},
                                               {"prompt_logprobs", "null", "1"},
                                               {"logits_processors", "[]", R"(["x"])"},
                                               {"return_token_ids", "false", "true"},
                                               {"grammar", R"("")", R"("root ::= \"a\"")"},
                                               {"json_schema", "null", R"({"type": "object"})"},
                                               {"repeat_penalty", "1.0", "1.3"},
                                               {"n_predict", "null", "3"},
                                               {"n_predict", "null", "-1"},
                                               {"n_probs", "0", "3"},
                                               {"n_indent", "0", "2"},
                                               {"typical_p", "1", "0.5"},
                                               {"tfs_z", "1", "0.5"},
                                               {"top_n_sigma", "-1", "1"},
                                               {"mirostat", "0", "2"},
                                               {"dry_multiplier", "0", "0.8"},
                                               {"xtc_probability", "0", "0.5"},
                                               {"dynatemp_range", "0", "0.5"},
                                               {"samplers", "null", R"(["top_k"])"},
                                               {"lora", "[]", R"([{"id": 0, "scale": 1}])"},
                                               {"regex", "null", R"("[0-9]+")"},
                                               {"ebnf", "null", R"("root ::= \"a\"")"},
                                               {"stop_regex", "[]", R"("[a-z]")"},
                                               {"no_stop_trim", "false", "true"},
                                               {"max_new_tokens", "null", "5"},
                                               {"min_new_tokens", "0", "5"},
                                               {"sampling_seed", "null", "5"},
                                               {"custom_logit_processor", "null", R"("x")"},
                                               {"return_hidden_states", "false", "true"},
                                               {"max_completion_tokens", "null", "5"},
                                               {"messages", "null", R"([{"role": "user", "content": "a"}])"},
                                               {"tools", "[]", R"([{"type": "function"}])"},
                                               {"no_repeat_ngram_size", "0", "2"},
                                               {"best_of", "1", "2"}}) {
    const auto body = [&](const char* value) {
      return std::string(R"({"prompt": "a", ")") + field.name + "\": " + value + "}";
    };
    EXPECT_EQ(parse(body(field.neutral)).sequences(), 1) << field.name;
    EXPECT_EQ(parse(body("null")).sequences(), 1) << field.name;
    const Refusal got = refusal(body(field.other));
    EXPECT_EQ(got.status, 400) << field.name;
    EXPECT_EQ(got.param, field.name);
  }
}

// What changes no text, whatever it is.
TEST(CompletionsRequest, HintsAndNamesOfTheClientAreIgnored) {
  for (const char* name : {"user", "metadata", "request_id", "priority", "cache_salt", "cache_prompt", "id_slot", "rid",
                           "mirostat_tau", "dry_base", "repeat_last_n", "spaces_between_special_tokens"}) {
    for (const char* value : {"null", "true", "5", R"("x")", R"({"a": 1})"}) {
      EXPECT_EQ(parse(std::string(R"({"prompt": "a", ")") + name + "\": " + value + "}").sequences(), 1) << name;
    }
  }
}

// The largest that is accepted, and the first one that is not.
TEST(CompletionsRequest, EachLimitHasTwoSides) {
  const auto repeated = [](const std::string& part, std::size_t times) {
    std::string text = part;
    for (std::size_t i = 1; i < times; ++i) text += "," + part;
    return text;
  };
  struct Case {
    std::string accepted, refused;
  };
  for (const Case& c : std::vector<Case>{
           {R"("prompt": "a", "n": 128)", R"("prompt": "a", "n": 129)"},
           {R"("prompt": ["a", "b"], "n": 128)", R"("prompt": ["a", "b", "c"], "n": 86)"},
           {R"("prompt": "a", "max_tokens": 9223372036854775807)",
            R"("prompt": "a", "max_tokens": 9223372036854775808)"},
           {R"("prompt": "a", "max_tokens": 1)", R"("prompt": "a", "max_tokens": 0)"},
           {R"("prompt": "a", "logprobs": 20)", R"("prompt": "a", "logprobs": 21)"},
           {R"("prompt": "a", "top_p": 1)", R"("prompt": "a", "top_p": 1.0000001)"},
           {R"("prompt": "a", "temperature": 0)", R"("prompt": "a", "temperature": -0.0000001)"},
           {R"("prompt": "a", "stop": [)" + repeated("\"x\"", 16) + "]",
            R"("prompt": "a", "stop": [)" + repeated("\"x\"", 17) + "]"},
           {R"("prompt": "a", "stop": ")" + std::string(1024, 'x') + "\"",
            R"("prompt": "a", "stop": ")" + std::string(1025, 'x') + "\""},
           {R"("prompt": "a", "user": [[[[[[[1]]]]]]])", R"("prompt": "a", "user": [[[[[[[[1]]]]]]]])"},
           {R"("prompt": [)" + repeated("5", 999'000) + "]", R"("prompt": [)" + repeated("5", 1'000'000) + "]"},
       }) {
    EXPECT_GE(parse("{" + c.accepted + "}").sequences(), 1) << c.accepted.substr(0, 80);
    EXPECT_EQ(refusal("{" + c.refused + "}").status, 400) << c.refused.substr(0, 80);
  }
}

TEST(CompletionsRequest, EveryRefusalNamesItsField) {
  struct Case {
    const char *body, *param, *words;
  };
  for (const Case& c : std::vector<Case>{
           {"", "", "not valid JSON"},
           {"[]", "", "expected an object"},
           {"{", "", "not valid JSON"},
           {R"({"prompt": "a"} x)", "", "not valid JSON"},
           {R"({"prompt": "a", "prompt": "b"})", "", "occurs twice"},
           {R"({"prompt": [[[[[[[[[1]]]]]]]]]})", "", "nested deeper than 8"},
           {"{\"prompt\": \"\xff\"}", "", "not valid JSON"},
           {"{}", "prompt", "missing"},
           {R"({"prompt": null})", "prompt", "expected a text, a list of texts"},
           {R"({"prompt": 5})", "prompt", "expected a text, a list of texts"},
           {R"({"prompt": {}})", "prompt", "expected a text, a list of texts"},
           {R"({"prompt": []})", "prompt", "at least one"},
           {R"({"prompt": [[]]})", "prompt", "prompt[0]"},
           {R"({"prompt": ["a", 1]})", "prompt[1]", "of one kind"},
           {R"({"prompt": ["a", [1]]})", "prompt[1]", "of one kind"},
           {R"({"prompt": [[1], "a"]})", "prompt[1]", "of one kind"},
           {R"({"prompt": [[1], 1]})", "prompt[1]", "of one kind"},
           {R"({"prompt": [1, "a"]})", "prompt", "id 2"},
           {R"({"prompt": [1, [1]]})", "prompt", "id 2"},
           {R"({"prompt": [1.5]})", "prompt", "id 1"},
           {R"({"prompt": [-1]})", "prompt", "id 1"},
           {R"({"prompt": [5, 4294967296]})", "prompt", "id 2: got '4294967296'"},
           {R"({"prompt": [18446744073709551615]})", "prompt", "id 1"},
           {R"({"prompt": [1000000]})", "prompt", "expected integers from 0 to"},
           {R"({"prompt": "a", "n": 0})", "n", "an integer from 1 to 128"},
           {R"({"prompt": "a", "n": 129})", "n", "an integer from 1 to 128"},
           {R"({"prompt": "a", "n": -1})", "n", "got '-1'"},
           {R"({"prompt": "a", "n": 2.0})", "n", "an integer"},
           {R"({"prompt": "a", "n": 18446744073709551615})", "n", "an integer"},
           {R"({"prompt": ["a", "b", "c"], "n": 128})", "n", "at most 256 completions"},
           {R"({"prompt": "a", "max_tokens": 0})", "max_tokens", "at least 1"},
           {R"({"prompt": "a", "max_tokens": -1})", "max_tokens", "got '-1'"},
           {R"({"prompt": "a", "max_tokens": 1e3})", "max_tokens", "an integer"},
           {R"({"prompt": "a", "max_tokens": 9223372036854775808})", "max_tokens", "an integer"},
           {R"({"prompt": "a", "max_tokens": "5"})", "max_tokens", "an integer"},
           {R"({"prompt": "a", "temperature": -0.1})", "temperature", "at least 0"},
           {R"({"prompt": "a", "temperature": "hot"})", "temperature", "a number"},
           {R"({"prompt": "a", "temperature": 1e999})", "", "a number is out of range"},
           {R"({"prompt": "a", "top_p": 1.1})", "top_p", "from 0 to 1"},
           {R"({"prompt": "a", "min_p": -1})", "min_p", "from 0 to 1"},
           {R"({"prompt": "a", "top_k": -2})", "top_k", "an integer of at least 0"},
           {R"({"prompt": "a", "seed": 1.5})", "seed", "an integer"},
           {R"({"prompt": "a", "stop": ""})", "stop", "a text of 1 to"},
           {R"({"prompt": "a", "stop": ["x", ""]})", "stop", "a text of 1 to"},
           {R"({"prompt": "a", "stop": ["1","2","3","4","5","6","7","8","9","a","b","c","d","e","f","g","h"]})", "stop",
            "at most 16"},
           {R"({"prompt": "a", "stop": 5})", "stop", "a text"},
           {R"({"prompt": "a", "presence_penalty": 2.5})", "presence_penalty", "from -2 to 2"},
           {R"({"prompt": "a", "frequency_penalty": "1"})", "frequency_penalty", "from -2 to 2"},
           {R"({"prompt": "a", "repetition_penalty": 0})", "repetition_penalty", "greater than 0"},
           {R"({"prompt": "a", "logit_bias": {"5": 101}})", "logit_bias", "logit_bias: 5: got '101'"},
           {R"({"prompt": "a", "logit_bias": {"x": 1}})", "logit_bias", "got '\"x\"'"},
           {R"({"prompt": "a", "logit_bias": {"1000000": 1}})", "logit_bias", "got id 1000000, expected 0 to"},
           {R"({"prompt": "a", "bad_words": "x"})", "bad_words", "at most 256"},
           {R"({"prompt": "a", "min_tokens": 17})", "min_tokens", "at most the 16"},
           {R"({"prompt": "a", "stop_token_ids": [1000000]})", "stop_token_ids", "got id 1000000"},
           {R"({"prompt": "a", "stop_token_ids": ["a"]})", "stop_token_ids", "an integer"},
           {R"({"prompt": "a", "repeat_penalty": 1.5})", "repeat_penalty", "Here it is repetition_penalty"},
           {R"({"prompt": "a", "logprobs": 21})", "logprobs", "from 0 to 20"},
           {R"({"prompt": "a", "logprobs": -1})", "logprobs", "from 0 to 20"},
           {R"({"prompt": "a", "logprobs": true})", "logprobs", "from 0 to 20"},
           {R"({"prompt": "a", "echo": 1})", "echo", "true or false"},
           {R"({"prompt": "a", "stream": "yes"})", "stream", "true or false"},
           {R"({"prompt": "a", "stream_options": {}})", "stream_options", "goes with stream"},
           {R"({"prompt": "a", "stream": true, "stream_options": []})", "stream_options", "an object"},
           {R"({"prompt": "a", "stream": true, "stream_options": {"include_usage": 1}})", "include_usage",
            "true or false"},
           {R"({"prompt": "a", "model": 5})", "model", "a text"},
       }) {
    const Refusal got = refusal(c.body);
    EXPECT_EQ(got.status, 400) << c.body;
    EXPECT_EQ(got.param, c.param) << c.body;
    EXPECT_NE(got.message.find(c.words), std::string::npos) << c.body << "\n" << got.message;
    EXPECT_EQ(got.message.find('\n'), std::string::npos);
    EXPECT_LT(got.message.size(), 400u);
  }
}

// What a model without a tokenizer cannot do; ids it takes.
TEST(CompletionsRequest, WithoutATokenizerTextIsRefusedByItsField) {
  static const ModelConfig c = config();
  const auto asked = [](const std::string& body) {
    return parse_completions(body, {"tiny", nullptr, Tokenizer::Special::text, &c, 256});
  };
  for (const auto& [body, param] : {std::pair(R"({"prompt": "a"})", "prompt"),
                                    {R"({"prompt": ["a"]})", "prompt"},
                                    {R"({"prompt": [5], "stop": "x"})", "stop"}}) {
    try {
      asked(body);
      ADD_FAILURE() << "accepted: " << body;
    } catch (const RequestError& error) {
      EXPECT_EQ(error.status(), 400);
      EXPECT_EQ(error.param(), param);
      expect_contains(error.what(), "has no");
    }
  }
  EXPECT_EQ(asked(R"({"prompt": [5], "stop": null})").prompts[0].ids, std::vector<std::int32_t>{5});
}

// In a single text and in each of several.
TEST(CompletionsRequest, NamesOfSpecialTokensAreReadAsTheServerSays) {
  static const ModelConfig c = config();
  const std::string name = "<|endoftext|>";
  const std::int32_t id = tokenizer().id_of(name).value();
  for (const auto special : {Tokenizer::Special::text, Tokenizer::Special::allow}) {
    const RequestContext context{"tiny", &tokenizer(), special, &c, 256};
    for (const std::string& body :
         {R"({"prompt": ")" + name + "\"}", R"({"prompt": [")" + name + R"(", ")" + name + "\"]}"}) {
      for (const CompletionPrompt& prompt : parse_completions(body, context).prompts) {
        EXPECT_EQ(prompt.ids == std::vector<std::int32_t>{id}, special == Tokenizer::Special::allow) << body;
        EXPECT_EQ(prompt.ids, tokenizer().encode(name, true, special)) << body;
      }
    }
  }
}

TEST(CompletionsRequest, AnotherModelIsNotFound) {
  const Refusal got = refusal(R"({"prompt": "a", "model": "gpt-5"})");
  EXPECT_EQ(got.status, 404);
  EXPECT_EQ(got.code, "model_not_found");
  EXPECT_NE(got.message.find("expected 'tiny'"), std::string::npos) << got.message;
}

TEST(CompletionsRequest, EchoAloneMayGenerateNothing) {
  EXPECT_EQ(parse(R"({"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 0})").options.max_tokens, 0);
}

TEST(CompletionsRequest, TooManyPromptsAreRefusedBeforeTheyAreRead) {
  static const ModelConfig c = config();
  const auto asked = [](std::size_t prompts) {
    std::string body = R"({"prompt": ["a")";
    for (std::size_t i = 1; i < prompts; ++i) body += ",\"a\"";
    return parse_completions(body + "]}", {"tiny", &tokenizer(), Tokenizer::Special::text, &c, 1'000'000});
  };
  EXPECT_EQ(asked(kMaxPrompts).prompts.size(), kMaxPrompts);
  try {
    asked(kMaxPrompts + 1);
    ADD_FAILURE() << "accepted";
  } catch (const RequestError& error) {
    EXPECT_EQ(error.param(), "prompt");
    expect_contains(error.what(),
                    format("prompt: got %zu prompts, expected at most %zu", kMaxPrompts + 1, kMaxPrompts));
  }
}

// Texts and lists of ids alike; what is refused are the completions, the prompts times n.
TEST(CompletionsRequest, CompletionsOfOneRequestAreLimited) {
  const auto body = [](const std::string& prompt, int prompts, int n) {
    std::string text = R"({"n": )" + std::to_string(n) + R"(, "prompt": [)";
    for (int i = 0; i < prompts; ++i) text += (i > 0 ? "," : "") + prompt;
    return text + "]}";
  };
  for (const std::string prompt : {"\"a\"", "[5, 6]"}) {
    for (const auto& [prompts, n] : {std::pair(1, 128), {2, 128}, {256, 1}, {85, 3}}) {
      const TextRequest request = parse(body(prompt, prompts, n));
      EXPECT_EQ(request.sequences(), prompts * n);
      EXPECT_EQ(request.prompts.size(), static_cast<std::size_t>(prompts));
    }
    for (const auto& [prompts, n] : {std::pair(3, 128), {257, 1}, {129, 2}, {86, 3}}) {
      const Refusal got = refusal(body(prompt, prompts, n));
      EXPECT_EQ(got.param, "n");
      EXPECT_NE(got.message.find("for " + std::to_string(prompts) + " prompts, expected at most 256"),
                std::string::npos)
          << got.message;
    }
  }
  // Ids in one list are one prompt, however many.
  EXPECT_EQ(parse(body("5", 300, 128)).sequences(), 128);
}

// A value takes two bytes of the body and many more of memory.
TEST(CompletionsRequest, TooManyValuesAreRefusedWhileTheyAreRead) {
  std::string body = R"({"user": [0)";
  for (std::size_t i = 0; i < kMaxRequestValues; ++i) body += ",0";
  const Refusal got = refusal(body + "]}");
  EXPECT_EQ(got.status, 400);
  EXPECT_NE(got.message.find("more than 1000000 JSON values"), std::string::npos) << got.message;
}

TEST(CompletionsRequest, WithoutATokenizerIdsAreServed) {
  const ModelConfig c = config();
  const RequestContext context{"tiny", nullptr, Tokenizer::Special::text, &c, 256};
  EXPECT_EQ(parse_completions(R"({"prompt": [5]})", context).prompts[0].ids, (std::vector<std::int32_t>{5}));
  EXPECT_THROW(parse_completions(R"({"prompt": "a"})", context), RequestError);
  EXPECT_THROW(parse_completions(R"({"prompt": [5], "stop": "x"})", context), RequestError);
}

}  // namespace
}  // namespace weft
