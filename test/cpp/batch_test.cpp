#include "llmc/infer/batch.h"
#include "llmc/base/json.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/base/file.h"
#include "llmc/base/signals.h"
#include "llmc/base/utf8.h"
#include "llmc/infer/line_input.h"
#include "test/cpp/byte_tokenizer.h"
#include "test/cpp/paged_fake.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

PagedFakeSizes sizes() {
  return {.vocab_size = 259, .num_pages = 40, .slots = 4, .max_rows = 32, .max_positions = 150, .depth = 2};
}

ModelConfig config() {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.vocab_size = config.tokenizer_vocab = 259;
  config.max_positions = 150;
  config.eos_ids = {kEndOfText};
  return config;
}

class BatchTest : public testing::Test {
 protected:
  // Runs the batch of these lines; the answers are in the file "out".
  Exit run(const std::string& lines, const CompletionOptions& defaults = {.max_tokens = 12}) {
    write_bytes(in_, lines);
    PagedFake model(sizes());
    model.change_config() = config_;
    PolledLines input(in_, kMaxRequestBytes);
    AnswerFile output(out_);
    return run_batch(model, &byte_tokenizer(), {defaults, special_, {4, 32, true}, weights_}, input, output);
  }

  std::vector<Json> answers() const {
    std::vector<Json> all;
    std::istringstream lines(read_bytes(out_));
    for (std::string line; std::getline(lines, line);) all.push_back(Json::parse(line));
    return all;
  }
  Json answer(const Json& id) const {
    Json found;
    for (const Json& one : answers()) {
      if (one["id"].dump() != id.dump()) continue;  // as Json, -1 equals 2^64 - 1
      EXPECT_TRUE(found.is_null()) << "two answers to " << id;
      found = one;
    }
    return found;
  }
  std::string error(const std::string& line) {
    write_bytes(out_, "");
    EXPECT_EQ(run(line + "\n"), Exit::failed_lines);
    const std::vector<Json> all = answers();
    EXPECT_EQ(all.size(), 1u) << line;
    if (all.size() != 1) return "";
    EXPECT_EQ(all[0]["finish_reason"], "error") << line;
    EXPECT_EQ(all[0]["line"], 1);
    // The id is known unless the line is no JSON.
    const std::string message = all[0].value("error", "");
    const bool known = line.starts_with("{\"id\": 1,") || line.starts_with("{\"id\": 1}");
    EXPECT_EQ(all[0]["id"], known && message.find("JSON") == std::string::npos ? Json(1) : Json()) << line;
    return message;
  }

  ModelConfig config_ = config();
  Tokenizer::Special special_ = Tokenizer::Special::text;
  std::string weights_;  // BatchSettings::model
  TemporaryDirectory directory_;
  const std::string in_ = directory_.file("in"), out_ = directory_.file("out");
};

TEST_F(BatchTest, EveryRequestIsAnsweredAsIfItWereAlone) {
  std::string lines;
  for (int i = 0; i < 60; ++i) {
    const std::string prompt = "request " + std::to_string(i % 7) + std::string(static_cast<std::size_t>(i), 'x');
    lines +=
        Json({{"id", i}, {"prompt", prompt}, {"max_tokens", 1 + i % 30}, {"seed", i}, {"ignore_eos", true}}).dump();
    lines += i % 5 == 0 ? "\n\n" : i % 5 == 1 ? "\n \t\r\n" : "\r\n";
  }
  lines += R"({"id": "by ids", "prompt_ids": [5, 6, 7], "seed": 3})";  // without a newline
  EXPECT_EQ(run(lines), Exit::ok);
  EXPECT_EQ(answers().size(), 61u);
  for (int i = 0; i < 60; ++i) {
    const std::string prompt = "request " + std::to_string(i % 7) + std::string(static_cast<std::size_t>(i), 'x');
    const Json got = answer(i);
    const Ids expected = PagedFake::ids_after(ids_of(prompt), 1 + i % 30, static_cast<std::uint64_t>(i), 259);
    EXPECT_EQ(got["prompt_ids"], ids_of(prompt));
    EXPECT_EQ(got["ids"], expected);
    EXPECT_EQ(got["text"], utf8_replace_invalid(byte_tokenizer().decode(expected)));
    EXPECT_EQ(got["finish_reason"], "length");
    EXPECT_FALSE(got.contains("error") || got.contains("logprobs"));
  }
  EXPECT_EQ(answer("by ids")["ids"].size(), 12u);  // the default
  EXPECT_EQ(read_bytes(out_).substr(0, 6), "{\"id\":");
}

// Ids that are alike in all but one thing, in one run and in a later one, which finds them in the file.
TEST_F(BatchTest, ANumberAndATextAreTwoIds) {
  const std::vector<Json> ids = {1,  "1",    "\"1\"",   -1,         "-1",       10,        "1 ",
                                 "", "null", INT64_MIN, UINT64_MAX, "\xc3\xa9", "\\u00e9", std::string(1024, '1')};
  std::string lines, backwards;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::string line = Json({{"id", ids[i]}, {"prompt", std::string(i + 1, 'x')}}).dump() + "\n";
    lines += line;
    backwards.insert(0, line);
  }
  EXPECT_EQ(run(lines), Exit::ok);
  const std::string file = read_bytes(out_);
  for (const std::string& again : {lines, backwards}) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ(answer(ids[i])["prompt_ids"], ids_of(std::string(i + 1, 'x'))) << ids[i];
    }
    EXPECT_EQ(answers().size(), ids.size());
    EXPECT_EQ(run(again), Exit::ok);
    EXPECT_EQ(read_bytes(out_), file) << "nothing is missing";
  }
  // An answer to the one is none to the other.
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
    write_bytes(out_, "");
    const auto line = [](const Json& id) { return Json({{"id", id}, {"prompt", "a"}}).dump() + "\n"; };
    EXPECT_EQ(run(line(ids[i])), Exit::ok);
    EXPECT_EQ(run(line(ids[i + 1])), Exit::ok);
    EXPECT_EQ(answers().size(), 2u) << ids[i];
  }
}

// The line at the end counts what the engine did: of two equal prompts of nine ids the second finds two pages of four.
TEST_F(BatchTest, TheLastLineSaysWhatWasShared) {
  const Ids prompt = {3, 4, 5, 6, 7, 8, 9, 10, 11};
  std::string lines;
  for (const int id : {1, 2}) lines += Json({{"id", id}, {"prompt_ids", prompt}, {"max_tokens", 1}}).dump() + "\n";
  testing::internal::CaptureStderr();
  EXPECT_EQ(run(lines), Exit::ok);
  expect_contains(testing::internal::GetCapturedStderr(), "; 44 % of 18 prompt tokens were shared, 0 preemptions\n");
  // Without a prompt to share nothing is said of it.
  testing::internal::CaptureStderr();
  EXPECT_EQ(run(lines), Exit::ok);
  const std::string again = testing::internal::GetCapturedStderr();
  expect_contains(again, "answered 0 requests, 2 had an answer; 0 tokens in ");
  EXPECT_EQ(again.find("shared"), std::string::npos) << again;
}

// The members of each kind of answer, no more and no fewer: readers go by them.
TEST_F(BatchTest, EachKindOfAnswerHasItsMembers) {
  const std::string asked =
      "{\"id\": 1, \"prompt\": \"a\"}\n{\"id\": 2, \"prompt\": \"ab\", \"logprobs\": 0}\n"
      "{\"id\": 3, \"prompt\": \"abcd\", \"logprobs\": 1, \"echo\": true}\nno JSON\n{\"id\": 5, \"prompt\": 7}\n"
      "{\"id\": 7, \"prompt_ids\": [3, 1, 3]}\n{\"id\": 8, \"prompt\": \"abcd\", \"echo\": true, \"max_tokens\": 0}\n"
      "{\"id\": 9, \"prompt_ids\": [5], \"echo\": true, \"logprobs\": 0}\n";
  const auto told = [&](const std::string& lines) {
    testing::internal::CaptureStderr();
    run(lines);
    return testing::internal::GetCapturedStderr();
  };
  expect_contains(told(asked), "answered 5 requests, 3 with an error; 48 tokens in ");
  const std::map<Json, std::string> expected = {
      {1, "id prompt_ids ids text finish_reason request"},
      {2, "id prompt_ids ids text logprobs finish_reason request"},
      {3, "id prompt_ids ids text logprobs prompt_logprobs finish_reason request"},
      {nullptr, "id line finish_reason error"},
      {5, "id line finish_reason error"},
      {7, "id line prompt_ids ids text finish_reason error request"},
      {8, "id prompt_ids ids text finish_reason request"},
      {9, "id prompt_ids ids text logprobs prompt_logprobs finish_reason request"}};
  std::istringstream lines(read_bytes(out_));
  std::size_t count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const auto one = nlohmann::ordered_json::parse(line);
    std::string members;
    for (const auto& [name, value] : one.items()) members += (members.empty() ? "" : " ") + name;
    EXPECT_EQ(members, expected.at(Json::parse(one["id"].dump()))) << line;
  }
  EXPECT_EQ(count, expected.size());
  const std::string again = told(asked);
  expect_contains(again, ": 3 answers with an error are removed and tried again\n");
  expect_contains(again, " has 5 answers\n");
  expect_contains(again, "answered 0 requests, 3 with an error, 5 had an answer; 0 tokens in ");
  EXPECT_TRUE(answer(9)["prompt_logprobs"].empty()) << "the first id of a prompt has no log-probability";
  const std::string changed = told("\n{\"id\": 1, \"prompt\": \"z\"}\n{\"id\": 6, \"prompt\": \"y\"}\n");
  expect_contains(changed, "answered 1 request, 1 differ from what was answered under their id; 12 tokens in ");
  expect_contains(changed, "line 2: id '1': the output has an answer to another request");
}

TEST_F(BatchTest, NamesOfSpecialTokensAreReadAsAsked) {
  const std::string lines = R"({"id": 1, "prompt": "<|padding|>"})"
                            "\n"
                            R"({"id": 2, "prompt": "<|endoftext|>a"})";
  EXPECT_EQ(run(lines), Exit::ok);
  EXPECT_EQ(answer(1)["prompt_ids"], ids_of("<|padding|>"));
  EXPECT_EQ(answer(2)["prompt_ids"], ids_of("<|endoftext|>a"));
  write_bytes(out_, "");
  special_ = Tokenizer::Special::allow;
  EXPECT_EQ(run(lines), Exit::failed_lines);  // the id of <|padding|> is PagedFake::kPoison
  EXPECT_EQ(answer(1)["prompt_ids"], Ids{1});
  EXPECT_EQ(answer(2)["prompt_ids"], (Ids{kEndOfText, byte_id('a')}));
}

TEST_F(BatchTest, LogprobsAndEcho) {
  EXPECT_EQ(
      run(R"({"id": 1, "prompt": "abc", "max_tokens": 3, "logprobs": 2, "echo": true, "ignore_eos": true, "stop": null})"
          "\n"
          R"({"id": 2, "prompt": "xyz", "max_tokens": 0, "logprobs": 0, "echo": true})"),
      Exit::ok);
  const Json both = answer(1);
  EXPECT_EQ(both["text"].get<std::string>().substr(0, 2), "ab");
  ASSERT_EQ(both["logprobs"].size(), 3u);
  EXPECT_EQ(both["logprobs"][0]["id"], both["ids"][0]);
  EXPECT_EQ(both["logprobs"][0]["top"].size(), 2u);
  ASSERT_EQ(both["prompt_logprobs"].size(), 1u);  // "ab" is one token
  EXPECT_EQ(both["prompt_logprobs"][0]["id"], byte_id('c'));
  const Json scored = answer(2);
  EXPECT_EQ(scored["text"], "xyz");
  EXPECT_TRUE(scored["ids"].empty());
  const auto state = PagedFake::state_of(ids_of("xy"));
  EXPECT_EQ(scored["prompt_logprobs"][1]["logprob"].get<float>(), PagedFake::logprob_from(state, byte_id('z')));
}

TEST_F(BatchTest, ABadLineIsAnAnswerWithAnErrorThatNamesTheField) {
  const std::map<std::string, std::string> cases = {
      {R"(no JSON)", "not valid JSON"},
      {R"([1, 2])", "expected an object"},
      {R"({"prompt": "x"})", "id: got none"},
      {R"({"id": 1.5, "prompt": "x"})", "id: got '1.5'"},
      {R"({"id": null, "prompt": "x"})", "id: got 'null'"},
      {R"({"id": ")" + std::string(1025, '1') + R"(", "prompt": "x"})", "a text of at most 1024 bytes or an integer"},
      {R"({"id": 1})", "prompt: got none"},
      {R"({"id": 1, "prompt": "x", "prompt_ids": [4]})", "prompt: got both"},
      {R"({"id": 1, "prompt": 5})", "prompt: got '5', expected a text"},
      {R"({"id": 1, "prompt_ids": [4, 259]})", "prompt_ids: id 2: got '259'"},
      {R"({"id": 1, "prompt_ids": []})", "prompt_ids: got '[]'"},
      {R"({"id": 1, "prompt_ids": 5})", "prompt_ids: got '5', expected integers from 0 to 258 in a list"},
      {R"({"id": 1, "prompt": "x", "temprature": 1})", "'temprature': unknown field"},
      {R"({"id": 1, "prompt": "x", "temperature": "hot"})", "temperature: got '\"hot\"', expected a number"},
      {R"({"id": 1, "prompt": "x", "top_p": 1.5})", "top_p: got '1.5', expected a number from 0 to 1"},
      {R"({"id": 1, "prompt": "x", "max_tokens": 0})", "max_tokens: got 0"},
      {R"({"id": 1, "prompt": "x", "stop": [""]})", "stop: got"},
      {R"({"id": 1, "id": 2, "prompt": "x"})", "'id' occurs twice"},
      {R"({"id": 1, "prompt": "x", "stop": [[[[[[[]]]]]]]})", "stop: got"},
      {R"({"id": 1, "prompt": "x", "stop": [[[[[[[[]]]]]]]]})", "nested deeper"},
      {R"({"id": 1, "prompt": ")" + std::string(200, 'x') + "\"}", "the prompt has 200 ids"},
  };
  for (const auto& [line, message] : cases) {
    const std::string got = error(line);
    EXPECT_NE(got.find(message), std::string::npos) << line << "\n" << got;
  }
  // The others are answered, and a second request of the same id is an error.
  write_bytes(out_, "");
  EXPECT_EQ(
      run("{\"id\": 1, \"prompt\": \"a\"}\nbad\n{\"id\": 1, \"prompt\": \"b\"}\n{\"id\": 2, \"prompt\": \"c\"}\n"),
      Exit::failed_lines);
  std::vector<Json> errors;
  for (const Json& one : answers()) {
    if (one["finish_reason"] == "error") errors.push_back(one);
  }
  ASSERT_EQ(errors.size(), 2u);
  EXPECT_EQ(errors[0]["id"], nullptr);
  EXPECT_EQ(errors[0]["line"], 2);
  EXPECT_EQ(errors[1]["line"], 3);
  EXPECT_NE(errors[1]["error"].get<std::string>().find("id: got '1' a second time"), std::string::npos);
  EXPECT_EQ(answers().size(), 4u);
  EXPECT_EQ(answer(2)["ids"].size(), 12u);
}

// The line is that of the request, and not the one that was read last when its error was found.
TEST_F(BatchTest, ErrorsThatComeLaterNameTheLineOfTheirRequest) {
  std::string lines;
  std::map<int, int> expected;  // line, by id
  for (int i = 0, line = 0; i < 20; ++i) {
    if (i % 3 == 0) {
      lines += "\n";
      ++line;
    }
    const bool bad = i % 4 == 1;
    lines += Json({{"id", i}, {"prompt_ids", {3, bad ? PagedFake::kPoison : 4, 5 + i}}}).dump() + "\n";
    ++line;
    if (bad) expected[i] = line;
  }
  EXPECT_EQ(run(lines), Exit::failed_lines);
  for (int i = 0; i < 20; ++i) {
    const Json got = answer(i);
    EXPECT_EQ(got["finish_reason"] == "error", expected.contains(i)) << i;
    EXPECT_EQ(got.value("line", 0), expected.contains(i) ? expected[i] : 0) << i;
    EXPECT_EQ(got["prompt_ids"][2], 5 + i);
  }
}

// Blank lines and lines that are too long count as well.
TEST_F(BatchTest, ErrorsNameTheirLine) {
  write_bytes(in_, std::string(101, 'x') + "\n\nbad\n");
  {
    PagedFake model(sizes());
    PolledLines input(in_, 100);
    AnswerFile output(out_);
    EXPECT_EQ(run_batch(model, nullptr, {{}, Tokenizer::Special::text, {4, 32, true}}, input, output),
              Exit::failed_lines);
  }
  const std::vector<Json> all = answers();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0]["line"], 1);
  EXPECT_NE(all[0]["error"].get<std::string>().find("this line has more than"), std::string::npos);
  EXPECT_EQ(all[1]["line"], 3);
}

TEST_F(BatchTest, LogitsThatAreNotFiniteAreAnErrorOfTheirRequest) {
  EXPECT_EQ(run("{\"id\": 1, \"prompt_ids\": [3, 1, 3]}\n{\"id\": 2, \"prompt\": \"c\"}\n"), Exit::failed_lines);
  EXPECT_EQ(answer(1)["finish_reason"], "error");
  EXPECT_NE(answer(1)["error"].get<std::string>().find("not finite"), std::string::npos);
  EXPECT_EQ(answer(2)["finish_reason"], "length");
}

TEST_F(BatchTest, RunningAgainGoesOnWithWhatIsMissing) {
  std::string first, all;
  for (int i = 0; i < 10; ++i) {
    const std::string line = Json({{"id", i}, {"prompt", "p" + std::to_string(i)}}).dump() + "\n";
    all += line;
    if (i % 2 == 0) first += line;
  }
  EXPECT_EQ(run(all), Exit::ok);
  std::map<Json, Json> expected;
  for (const Json& one : answers()) expected[one["id"]] = one;
  write_bytes(out_, "");
  EXPECT_EQ(run(first + "{\"id\": 7, \"prompt\": 3}\n"), Exit::failed_lines);
  // A killed run leaves a line without its end. Once with an answer with an error before it, once without.
  const std::string with_error = read_bytes(out_);
  EXPECT_EQ(run(first), Exit::ok);
  const std::string without = read_bytes(out_);
  EXPECT_LT(without.size(), with_error.size());
  for (const std::string& before : {with_error, without}) {
    for (const std::string& torn :
         {std::string("{\"id\":9,\"prompt_ids\":[1"), std::string("{"), std::string("{\"id\":9"),
          std::string("{\"id\":9,\"pr"), std::string("{\"id\":\"a\\\\\",\"line\":7"), std::string("{\"id\":\"a\\\"b"),
          std::string("{\"id\":null,\"line\":3,\"fin"),
          std::string("{\"id\":9,\"prompt_ids\":[1],\"finish_reason\":\"stop\",\"request\":\"x\"}")}) {
      write_bytes(out_, before + torn);
      EXPECT_EQ(run(all), Exit::ok);
      const std::string after = read_bytes(out_);
      EXPECT_EQ(answers().size(), 10u) << torn;
      for (const auto& [id, one] : expected) EXPECT_EQ(answer(id), one);
      EXPECT_EQ(run(all), Exit::ok);  // nothing is missing
      EXPECT_EQ(read_bytes(out_), after);
    }
  }
}

// Of several answers with an error, with others before, between and behind them, none stays.
TEST_F(BatchTest, EveryErrorIsRemovedAndTriedAgain) {
  for (const std::string pattern : {"e", "ee", "aea", "eaea", "aeaaeea"}) {
    write_bytes(out_, "");
    std::string bad, good;
    for (std::size_t i = 0; i < pattern.size(); ++i) {
      const std::string id = "{\"id\": " + std::to_string(i) + ", \"prompt\": ";
      good += id + "\"a\"}\n";
      bad += id + (pattern[i] == 'e' ? "5}\n" : "\"a\"}\n");
    }
    EXPECT_EQ(run(bad), Exit::failed_lines);
    EXPECT_EQ(run(good), Exit::ok);
    EXPECT_EQ(answers().size(), pattern.size()) << pattern;
    for (std::size_t i = 0; i < pattern.size(); ++i) EXPECT_EQ(answer(i)["prompt_ids"], ids_of("a")) << pattern;
  }
}

// Only three members of an answer are kept while the file is read, so scores may be as many as a long context has.
TEST_F(BatchTest, AnAnswerOfMillionsOfScoresIsFoundAgain) {
  EXPECT_EQ(run("{\"id\": 1, \"prompt\": \"a\"}\n"), Exit::ok);
  Json long_answer = answer(1);
  std::string line = json_text(long_answer);
  std::string scores = "\"top\":[0";
  for (int i = 0; i < 5'100'000; ++i) scores += ",0";
  line.insert(1, scores + "],");
  write_bytes(out_, line + "\n");
  EXPECT_EQ(run("{\"id\": 1, \"prompt\": \"a\"}\n"), Exit::ok);
  EXPECT_EQ(read_bytes(out_), line + "\n");
}

TEST_F(BatchTest, AnAnswerFileKeepsItsMode) {
  EXPECT_EQ(run("no JSON\n"), Exit::failed_lines);
  ASSERT_EQ(::chmod(out_.c_str(), 0600), 0);
  EXPECT_EQ(run("{\"id\": 1, \"prompt\": \"a\"}\n"), Exit::ok);  // writes a file without the error
  struct stat info {};
  ASSERT_EQ(::stat(out_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
}

TEST_F(BatchTest, InputKnowsItsFileUnderEveryName) {
  write_bytes(in_, "");
  write_bytes(out_, "");
  const std::string link = directory_.file("link");
  ASSERT_EQ(::symlink(in_.c_str(), link.c_str()), 0);
  const PolledLines input(in_, kMaxRequestBytes);
  EXPECT_TRUE(input.reads(in_) && input.reads(link));
  EXPECT_FALSE(input.reads(out_) || input.reads(directory_.file("none")) || input.reads("-"));
  const PolledLines device("/dev/null", kMaxRequestBytes);
  EXPECT_FALSE(device.reads("/dev/null"));
}

TEST_F(BatchTest, AnotherRequestUnderAnIdThatWasAnsweredIsRefused) {
  EXPECT_EQ(run("{\"id\": \"a\", \"prompt\": \"x\"}\n"), Exit::ok);
  const Json before = answer("a");
  for (const std::string& changed :
       {std::string(R"({"id": "a", "prompt": "y"})"), std::string(R"({"id": "a", "prompt": "x", "seed": 1})"),
        std::string(R"({"id": "a", "prompt": "x", "max_tokens": 13})"),
        std::string(R"({"id": "a", "prompt": "x", "temperature": 0.5})"),
        std::string(R"({"id": "a", "prompt": "x", "top_k": 3})"),
        std::string(R"({"id": "a", "prompt": "x", "top_p": 0.5})"),
        std::string(R"({"id": "a", "prompt": "x", "min_p": 0.5})"),
        std::string(R"({"id": "a", "prompt": "x", "ignore_eos": true})"),
        std::string(R"({"id": "a", "prompt": "x", "logprobs": 1})"),
        std::string(R"({"id": "a", "prompt": "x", "echo": true})"),
        std::string(R"({"id": "a", "prompt": "x", "presence_penalty": 1})"),
        std::string(R"({"id": "a", "prompt": "x", "frequency_penalty": 1})"),
        std::string(R"({"id": "a", "prompt": "x", "repetition_penalty": 2})"),
        std::string(R"({"id": "a", "prompt": "x", "logit_bias": {"5": 1}})"),
        std::string(R"({"id": "a", "prompt": "x", "bad_words": ["q"]})"),
        std::string(R"({"id": "a", "prompt": "x", "min_tokens": 1})"),
        std::string(R"({"id": "a", "prompt": "x", "stop_token_ids": [5]})"),
        std::string(R"({"id": "a", "prompt": "x", "stop": "q"})")}) {
    EXPECT_EQ(run(changed + "\n{\"id\": \"b\", \"prompt\": \"x\"}\n"), Exit::bad_file) << changed;
    EXPECT_EQ(answer("a"), before);
    EXPECT_FALSE(answer("b").is_null());
  }
  EXPECT_EQ(run(R"({"id": "a", "prompt_ids": [122], "max_tokens": 12})"), Exit::ok);  // the same in other words
  config_.norm_eps = 1e-3;
  EXPECT_EQ(run(R"({"id": "a", "prompt": "x", "max_tokens": 12})"), Exit::bad_file) << "another model";
}

TEST_F(BatchTest, AnAnswerOfOtherWeightsIsAnother) {
  const std::string request = "{\"id\": \"a\", \"prompt\": \"x\"}\n";
  weights_ = "";  // as it was written when an answer did not say
  EXPECT_EQ(run(request), Exit::ok);
  weights_ = "0123";
  EXPECT_EQ(run(request), Exit::ok);
  EXPECT_EQ(answers().size(), 1u);
  write_bytes(out_, "");
  EXPECT_EQ(run(request), Exit::ok);
  EXPECT_EQ(run(request), Exit::ok);
  const Json before = answer("a");
  for (const char* other : {"4567", "0123+89ab"}) {
    weights_ = other;
    EXPECT_EQ(run(request), Exit::bad_file) << other;
    EXPECT_EQ(answer("a"), before);
  }
}

TEST_F(BatchTest, FilesThatAreNoAnswersStayAsTheyAre) {
  for (const std::string& content :
       {std::string("my notes\n"), std::string("my notes"), std::string("{\"id\": 1, \"prompt\": \"x\"}\n"),
        std::string("[]\n"), std::string("{\"id\":1,\"finish_reason\":\"stop\"}\n"),
        std::string("{\"id\":1,\"finish_reason\":\"error\"}\nnotes\n"),
        std::string("{\"finish_reason\":\"stop\",\"request\":\"x\"}\n"), std::string("{\"id\":1,\"request\":\"x\"}\n"),
        std::string("{\"id\":1,\"finish_reason\":\"stop\",\"request\":\"x\"}\n"
                    "{\"id\":1,\"finish_reason\":\"stop\",\"request\":\"x\"}\n"),
        std::string("\n"), std::string("{\"id\":1,\"finish_reason\":\"stop\",\"request\":\"x\"}\n\n"),
        // No line has an end: whole requests, and answers of a server, whole and cut.
        std::string("{\"id\":1,\"prompt\":\"x\"}"), std::string("{\"id\":\"a\",\"prompt_ids\":[1,2]}"),
        std::string("{\"id\":\"cmpl-1\",\"object\":\"text_completion\"}"), std::string("{\"id\":\"cmpl-1\",\"obj"),
        std::string("{\"id\":\"a\\\"\",\"o"), std::string("{\"id\":12,\"prompt\":\"x"), std::string("{\"id\":1}"),
        std::string("{\"id\":true"), std::string("{\"id\":{\"a\":1}"), std::string("{\"id\":1x")}) {
    write_bytes(out_, content);
    const std::string message = error_of(Exit::bad_file, [&] { run("{\"id\": 1, \"prompt\": \"x\"}\n"); });
    EXPECT_NE(message.find("line "), std::string::npos) << message;
    EXPECT_EQ(read_bytes(out_), content);
  }
}

TEST_F(BatchTest, NothingIsWrittenThroughALinkOrBesideAnotherRun) {
  write_bytes(directory_.file("target"), "");
  ASSERT_EQ(::symlink(directory_.file("target").c_str(), out_.c_str()), 0);
  EXPECT_NE(error_of(Exit::environment, [&] { AnswerFile file(out_); }).find("symbolic link"), std::string::npos);
  ASSERT_EQ(::unlink(out_.c_str()), 0);
  ASSERT_EQ(::link(directory_.file("target").c_str(), out_.c_str()), 0);
  EXPECT_NE(error_of(Exit::environment, [&] { AnswerFile file(out_); }).find("hard link"), std::string::npos);
  ASSERT_EQ(::unlink(out_.c_str()), 0);
  AnswerFile mine(out_);
  EXPECT_NE(error_of(Exit::environment, [&] { AnswerFile file(out_); }).find("another run"), std::string::npos);
  error_of(Exit::environment, [&] { AnswerFile file(directory_.file("no/such/place")); });
}

// Raises a signal in its tenth step.
class Stopped : public PagedFake {
 public:
  using PagedFake::PagedFake;
  void submit(std::span<const Chunk> work) override {
    if (++steps_ == 10) ::raise(SIGINT);
    PagedFake::submit(work);
  }

 private:
  int steps_ = 0;
};

// Two of eight are answered when the signal comes, the others are under way or wait. In a process of its own, because a stop
// cannot be taken back.
TEST_F(BatchTest, WhatASignalCutsOffHasNoAnswer) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto leave = [this] {
    install_signal_handlers();
    std::string lines;
    for (int i = 0; i < 8; ++i) {
      lines += Json({{"id", i}, {"prompt", "ab"}, {"max_tokens", i < 2 ? 3 : 50}, {"ignore_eos", true}}).dump() + "\n";
    }
    write_bytes(in_, lines);
    Exit code = Exit::ok;
    {
      Stopped model(sizes());
      model.change_config() = config();
      PolledLines input(in_, kMaxRequestBytes);
      AnswerFile output(out_);
      code = run_batch(model, &byte_tokenizer(), {{}, Tokenizer::Special::text, {4, 32, true}}, input, output);
    }
    const std::vector<Json> all = answers();
    bool whole = all.size() == 2;
    for (const Json& one : all) whole = whole && one["ids"].size() == 3 && one["finish_reason"] == "length";
    std::filesystem::remove_all(directory_.file(""));
    ::_exit(whole ? static_cast<int>(code) : 1);
  };
  EXPECT_EXIT(leave(), testing::ExitedWithCode(130), "answered 2 requests; ");
}

// The lock is of the file that has the name now, also after it was written anew without its errors.
TEST_F(BatchTest, TheLockOutlivesTheRemovalOfErrors) {
  write_bytes(out_, "{\"id\":1,\"finish_reason\":\"error\"}\n");
  AnswerFile mine(out_);
  EXPECT_EQ(read_bytes(out_), "");
  error_of(Exit::environment, [&] { AnswerFile file(out_); });
  mine.write({{"id", 1}, {"finish_reason", "stop"}});
  EXPECT_EQ(read_bytes(out_), "{\"id\":1,\"finish_reason\":\"stop\"}\n");
}

// While the file is written anew, the file without the errors is locked before it takes the name.
TEST_F(BatchTest, NobodyComesInWhileErrorsAreRemoved) {
  static std::string path;
  static int refused;
  path = out_;
  refused = 0;
  write_bytes(out_, "{\"id\":1,\"finish_reason\":\"error\"}\n");
  set_call_fault([](const char* call, const std::string& of) {
    if (std::strcmp(call, "lock") == 0 || of == path) return true;
    const std::string message = error_of(Exit::environment, [] { AnswerFile second(path); });
    refused += message.find("another run") != std::string::npos;
    return true;
  });
  const AnswerFile mine(out_);
  set_call_fault(nullptr);
  EXPECT_EQ(refused, 2) << "before the new file takes the name, and after it";
}

// Between opening and locking the file another run ends, which has put a new file in the place of this one.
TEST_F(BatchTest, AFileThatWasReplacedBeforeItWasLockedIsNotWritten) {
  static std::string path;
  static int locks;
  path = out_;
  locks = 0;
  write_bytes(out_, "");
  set_call_fault([](const char* call, const std::string& of) {
    if (std::strcmp(call, "lock") == 0 && of == path && locks++ == 0) write_file_atomically(path, "");
    return true;
  });
  AnswerFile mine(out_);
  set_call_fault(nullptr);
  EXPECT_EQ(locks, 2);
  mine.write({{"id", 1}, {"finish_reason", "stop"}});
  EXPECT_EQ(read_bytes(out_), "{\"id\":1,\"finish_reason\":\"stop\"}\n");
}

// Answers that nobody finds are no success: whatever became of the file, before an answer or at the end.
TEST_F(BatchTest, AnOutputThatIsTakenAwayEndsTheRun) {
  const std::string folder = directory_.file("folder"), inside = folder + "/out", other = directory_.file("other");
  struct Case {
    const char* words;
    std::function<void()> take_away;
  };
  const std::vector<Case> cases = {
      {"was removed, renamed or replaced", [&] { std::filesystem::remove(inside); }},
      {"was removed, renamed or replaced", [&] { std::filesystem::rename(inside, other); }},
      {"was removed, renamed or replaced",
       [&] {
         write_bytes(other, read_bytes(inside));
         std::filesystem::rename(other, inside);
       }},
      {"was removed, renamed or replaced", [&] { std::filesystem::remove_all(folder); }},
      {"was removed, renamed or replaced", [&] { std::filesystem::rename(folder, folder + ".away"); }},
      {"another process has changed it", [&] { std::filesystem::resize_file(inside, 0); }},
      {"another process has changed it", [&] { std::filesystem::resize_file(inside, 10000); }}};
  for (const Case& c : cases) {
    for (const bool at_the_end : {false, true}) {
      std::filesystem::remove_all(folder);
      std::filesystem::remove_all(folder + ".away");
      std::filesystem::create_directory(folder);
      AnswerFile file(inside);
      file.write({{"id", 1}, {"finish_reason", "stop"}});
      file.sync();
      c.take_away();
      const std::string message = error_of(Exit::environment, [&] {
        if (at_the_end) return file.sync();
        file.write({{"id", 2}, {"finish_reason", "stop"}});
      });
      expect_contains(message, c.words);
      expect_contains(message, "--output: ");
    }
  }
  // The whole run, at its second answer.
  write_bytes(in_, "{\"id\": 1, \"prompt\": \"a\"}\n{\"id\": 2, \"prompt\": \"b\"}\n");
  PagedFake model(sizes());
  model.change_config() = config_;
  PolledLines input(in_, kMaxRequestBytes);
  AnswerFile output(out_);
  std::filesystem::remove(out_);
  error_of(Exit::environment, [&] {
    run_batch(model, &byte_tokenizer(), {{.max_tokens = 3}, special_, {4, 32, true}}, input, output);
  });
}

// Whoever reads the exit code alone learns that lines have failed: of this run, and not of one before it.
TEST_F(BatchTest, FailedLinesHaveAnExitCode) {
  const std::string good = "{\"id\": 1, \"prompt\": \"a\"}\n", bad = "{\"id\": 2, \"prompt\": 3}\n";
  EXPECT_EQ(run(good), Exit::ok);
  EXPECT_EQ(run(good + bad), Exit::failed_lines);
  EXPECT_EQ(run(good), Exit::ok);
  EXPECT_EQ(run("{\"id\": 1, \"prompt\": \"b\"}\n"), Exit::bad_file);
  EXPECT_EQ(run("{\"id\": 1, \"prompt\": \"b\"}\n" + bad), Exit::failed_lines);
}

TEST_F(BatchTest, AFullDiskLeavesWholeLines) {
  AnswerFile file(out_);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 100;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    for (int i = 0; i < 10; ++i) file.write({{"id", i}, {"text", "0123456789"}});
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(error.code(), Exit::resources);
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("Run again"), std::string::npos) << message;
  EXPECT_EQ(answers().size(), 3u);
  EXPECT_EQ(read_bytes(out_).back(), '\n');
}

TEST(PolledLines, LinesComeInPiecesOfAnySize) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  {
    PolledLines lines(format("/dev/fd/%d", ends[0]), 8);
    std::string line;
    const auto send = [&](const std::string& text) {
      ASSERT_EQ(::write(ends[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
    };
    using Result = PolledLines::Result;
    EXPECT_EQ(lines.next(line, 0), Result::not_yet);
    send("ab");
    EXPECT_EQ(lines.next(line, 0), Result::not_yet);
    send("c\n\nlonger than eight");
    EXPECT_EQ(lines.next(line, 0), Result::line);
    EXPECT_EQ(line, "abc");
    EXPECT_EQ(lines.next(line, 0), Result::line);
    EXPECT_EQ(line, "");
    EXPECT_EQ(lines.next(line, 1), Result::not_yet);
    // The limit is that of the line, however many pieces it comes in.
    for (const auto& [first, second, result] :
         {std::tuple(" bytes\n1234", "5678\n", Result::line), std::tuple("1234", "56789\n", Result::too_long)}) {
      send(first);
      if (first[0] == ' ') {
        EXPECT_EQ(lines.next(line, 0), Result::too_long);
      }
      EXPECT_EQ(lines.next(line, 0), Result::not_yet);
      send(second);
      EXPECT_EQ(lines.next(line, 0), result) << first;
    }
    send("longer than eight\n12345678\nlast");
    EXPECT_EQ(lines.next(line, 0), Result::too_long);
    EXPECT_EQ(lines.next(line, 0), Result::line);
    EXPECT_EQ(line, "12345678");
    ::close(ends[1]);
    EXPECT_EQ(lines.next(line, 0), Result::line);
    EXPECT_EQ(line, "last");
    EXPECT_EQ(lines.next(line, 0), Result::end);
    EXPECT_EQ(lines.next(line, 0), Result::end);
    EXPECT_EQ(lines.progress(), "");
  }
  ::close(ends[0]);
}

// The lines of a text, one that is too long as "too long".
std::vector<std::string> lines_of(const std::string& text, std::size_t limit) {
  std::vector<std::string> lines;
  std::istringstream input(text);
  for (std::string line; std::getline(input, line);) lines.push_back(line.size() > limit ? "too long" : line);
  return lines;
}

// Appends what comes until there is no more for now; true at the end.
bool take_lines(PolledLines& input, std::vector<std::string>& lines) {
  using Result = PolledLines::Result;
  std::string line;
  Result result = input.next(line, 0);
  for (; result == Result::line || result == Result::too_long; result = input.next(line, 0)) {
    lines.push_back(result == Result::line ? line : "too long" + line);
  }
  return result == Result::end;
}

// Every text of up to six characters: with and without a newline at its end, with lines that are empty, of just the limit and
// longer. From a pipe in two pieces, from a file, and from a stream by the reader of --interactive.
TEST(PolledLines, EveryTextIsCutIntoItsLines) {
  constexpr std::size_t kLimit = 2;
  const TemporaryDirectory directory(memory_files());
  for (std::size_t length = 0; length <= 6; ++length) {
    for (std::size_t bits = 0; bits < std::size_t{1} << length; ++bits) {
      std::string text;
      for (std::size_t i = 0; i < length; ++i) text += (bits >> i & 1) != 0 ? '\n' : static_cast<char>('a' + i);
      const std::vector<std::string> expected = lines_of(text, kLimit);
      for (std::size_t cut = 0; cut <= length; ++cut) {
        int ends[2];
        ASSERT_EQ(::pipe(ends), 0);
        PolledLines input(format("/dev/fd/%d", ends[0]), kLimit);
        ::close(ends[0]);
        std::vector<std::string> lines;
        ASSERT_EQ(::write(ends[1], text.data(), cut), static_cast<ssize_t>(cut));
        EXPECT_FALSE(take_lines(input, lines));
        ASSERT_EQ(::write(ends[1], text.data() + cut, length - cut), static_cast<ssize_t>(length - cut));
        ::close(ends[1]);
        EXPECT_TRUE(take_lines(input, lines));
        EXPECT_EQ(lines, expected) << escaped(text) << " " << cut;
        EXPECT_TRUE(take_lines(input, lines)) << "and it stays the end";
        EXPECT_EQ(lines.size(), expected.size());
      }
      std::vector<std::string> of_file, of_stream;
      write_bytes(directory.file("lines"), text);
      PolledLines input(directory.file("lines"), kLimit);
      EXPECT_TRUE(take_lines(input, of_file));
      EXPECT_EQ(of_file, expected) << escaped(text);
      std::istringstream stream(text);
      using Result = LineInput::Result;
      std::string line;
      for (Result r = read_line(stream, line, kLimit); r != Result::end; r = read_line(stream, line, kLimit)) {
        of_stream.push_back(r == Result::line ? line : "too long" + line);
      }
      EXPECT_EQ(of_stream, expected) << escaped(text);
    }
  }
}

TEST(PolledLines, ProgressIsTheShareOfTheFileThatWasRead) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("lines");
  constexpr std::size_t kPiece = 1 << 16;  // read at once
  write_bytes(path,
              std::string(kPiece - 1, 'a') + "\n" + std::string(kPiece, 'b') + "\n" + std::string(2 * kPiece - 1, 'c'));
  PolledLines lines(path, 1 << 20);
  std::string line;
  for (const char* expected : {", 0 % of the input read", ", 25 % of the input read", ", 75 % of the input read",
                               ", 100 % of the input read"}) {
    EXPECT_EQ(lines.progress(), expected);
    lines.next(line, 0);
  }
  write_bytes(path, "");
  EXPECT_EQ(PolledLines(path, 8).progress(), "");
}

TEST(PolledLines, LinesGoAcrossTheEndsOfPieces) {
  const TemporaryDirectory directory;
  std::string all;
  std::vector<std::string> expected;
  for (std::size_t i = 0; all.size() < 300'000; ++i) {
    expected.push_back(std::string(i * 37 % 5000, static_cast<char>('a' + i % 26)));
    all += expected.back() + "\n";
  }
  expected.push_back(std::string((1 << 16) - 1, 'z'));  // with its newline as long as a piece
  write_bytes(directory.file("lines"), all + expected.back() + "\n");
  PolledLines lines(directory.file("lines"), 1 << 16);
  std::string line;
  for (const std::string& one : expected) {
    ASSERT_EQ(lines.next(line, 0), PolledLines::Result::line);
    ASSERT_EQ(line, one);
  }
  EXPECT_EQ(lines.next(line, 0), PolledLines::Result::end);
}

TEST(PolledLines, FilesThatCannotBeRead) {
  const TemporaryDirectory directory;
  for (const auto& [name, problem] : {std::pair("none", "cannot open: No such file"), {".", "this is a directory"}}) {
    const std::string path = directory.file(name);
    EXPECT_TRUE(error_of(Exit::bad_file, [&] { PolledLines(path, 8); }).starts_with(escaped(path) + ": " + problem));
  }
  // Opens, and fails at the first read.
  PolledLines memory("/proc/self/mem", 8);
  std::string none;
  expect_contains(error_of(Exit::bad_file, [&] { memory.next(none, 0); }), "'/proc/self/mem': cannot read: ");
  write_bytes(directory.file("some"), "a\nb");
  PolledLines lines(directory.file("some"), 8);
  std::string line;
  EXPECT_EQ(lines.next(line, 0), PolledLines::Result::line);
  EXPECT_EQ(lines.progress(), ", 100 % of the input read");
}

}  // namespace
}  // namespace weft
