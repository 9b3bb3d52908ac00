#include "llmc/infer/generate.h"
#include "llmc/base/json.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <numbers>
#include <numeric>
#include <sstream>

#include "llmc/base/error.h"
#include "llmc/base/options.h"
#include "llmc/infer/bench.h"
#include "llmc/infer/divergence.h"
#include "llmc/infer/fault_injection.h"
#include "llmc/infer/line_input.h"
#include "llmc/infer/perplexity.h"
#include "llmc/infer/prompt.h"
#include "llmc/infer/report.h"
#include "llmc/infer/stop_text.h"
#include "llmc/infer/text_output.h"
#include "test/cpp/byte_tokenizer.h"
#include "test/cpp/paged_fake.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

constexpr std::int64_t kVocab = 300;  // 259 tokens and padding rows

ModelConfig fake_config() {
  ModelConfig config;
  set_family(config, "gpt_neox");
  config.vocab_size = kVocab;
  config.tokenizer_vocab = 259;
  config.eos_ids = {kEndOfText};
  return config;
}

// Follows a script: after the prompt, position by position, its ids are the likeliest. What it was asked is
// kept.
class ScriptedModel : public DecodeModel {
 public:
  ScriptedModel(std::vector<std::int32_t> script, std::int64_t capacity)
      : script_(std::move(script)), capacity_(capacity), logits_(kVocab, 0.0f) {}

  const ModelConfig& config() const override { return config_; }
  std::vector<MemoryLine> memory() const override { return {}; }
  std::uint64_t bytes_per_token(std::int64_t context) const override {
    return 1000 + static_cast<std::uint64_t>(context);
  }
  std::int64_t capacity() const override { return capacity_; }
  std::int64_t length() const override { return static_cast<std::int64_t>(ids_.size()); }
  void reset() override { ids_.clear(); }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override {
    EXPECT_FALSE(ids.empty());
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    EXPECT_LE(length(), capacity_) << "more ids than the cache holds";
    return next_logits();
  }
  std::span<const float> decode(std::int32_t id) override { return prefill({&id, 1}); }
  std::vector<double> score(std::span<const std::int32_t> ids) override {
    EXPECT_LE(static_cast<std::int64_t>(ids.size()), capacity_);
    scored_.emplace_back(ids.begin(), ids.end());
    std::vector<double> nll;
    for (std::size_t i = 1; i < ids.size(); ++i) nll.push_back(nll_of(ids[i - 1], ids[i]));
    return nll;
  }
  void keep_activations(bool) override {}
  std::vector<float> activation(const std::string&) override { return {}; }

  // A model of pairs: its loss depends on the token and the one before.
  static double nll_of(std::int32_t before, std::int32_t token) { return 0.5 + 0.01 * before + 0.001 * token; }

  const std::vector<std::int32_t>& ids() const { return ids_; }
  const std::vector<std::vector<std::int32_t>>& scored() const { return scored_; }

 private:
  std::span<const float> next_logits() {
    std::fill(logits_.begin(), logits_.end(), 0.0f);
    logits_.back() = 50.0f;  // a padding row, far ahead of every token
    if (step_ < script_.size()) logits_[static_cast<std::size_t>(script_[step_])] = 10.0f;
    ++step_;
    return logits_;
  }

  ModelConfig config_ = fake_config();
  std::vector<std::int32_t> script_;
  std::int64_t capacity_;
  std::size_t step_ = 0;
  std::vector<float> logits_;
  std::vector<std::int32_t> ids_;
  std::vector<std::vector<std::int32_t>> scored_;
};

struct Generated {
  GenerateResult result;
  std::vector<std::string> pieces;  // as they were streamed
};

Generated run(const std::vector<std::int32_t>& script, GenerateOptions options = {}, std::int64_t capacity = 1000,
              const std::function<bool()>& interrupted = nullptr) {
  options.sampler.vocab_limit = 259;
  if (options.stop_ids.empty()) options.stop_ids = {kEndOfText};
  ScriptedModel model(script, capacity);
  Generated run;
  GenerateHooks hooks;
  hooks.on_text = [&run](std::string_view piece) { run.pieces.emplace_back(piece); };
  hooks.interrupted = interrupted;
  const std::vector<std::int32_t> prompt = ids_of("Hi");
  run.result = generate(model, &byte_tokenizer(), prompt, options, hooks);

  std::string streamed;
  for (const std::string& piece : run.pieces) streamed += piece;
  EXPECT_EQ(streamed, run.result.text);
  // The cache holds the prompt and every id but the last.
  std::vector<std::int32_t> cached = prompt;
  cached.insert(cached.end(), run.result.ids.begin(), run.result.ids.end() - 1);
  EXPECT_EQ(model.ids(), cached);
  EXPECT_EQ(run.result.context, model.length());
  EXPECT_EQ(run.result.times.inter_token_ms.size() + 1, run.result.ids.size());
  return run;
}

TEST(Generate, StopsAtAStopId) {
  const Generated r = run({byte_id('o'), byte_id('k'), kEndOfText, byte_id('x')});
  EXPECT_EQ(r.result.text, "ok");
  EXPECT_EQ(r.result.ids, (std::vector<std::int32_t>{byte_id('o'), byte_id('k'), kEndOfText}));
  EXPECT_EQ(r.result.finish_reason, FinishReason::end_of_text);
  EXPECT_EQ(r.pieces.size(), 2u) << "text comes token by token";
}

TEST(Generate, StopsAtEachOfItsStopIds) {
  const std::vector<std::int32_t> ends = {kEndOfText, byte_id('k'), byte_id('l')};
  for (const std::int32_t end : ends) {
    const Generated r = run({byte_id('o'), end, byte_id('x')}, {.stop_ids = ends});
    EXPECT_EQ(r.result.text, "o") << end;
    EXPECT_EQ(r.result.ids, (std::vector<std::int32_t>{byte_id('o'), end}));
    EXPECT_EQ(r.result.finish_reason, FinishReason::end_of_text);
  }
  EXPECT_EQ(run(ids_of("oxy"), {.max_tokens = 3, .stop_ids = {byte_id('k')}}).result.text, "oxy");
}

// A model that samples itself is asked for what the options say, and what it gives ends in the same ways.
TEST(Generate, AModelThatSamplesIsAskedForTheSame) {
  struct Sampling : ScriptedModel {
    using ScriptedModel::ScriptedModel;
    bool samples() const override { return true; }
    void generate_ids(std::span<const std::int32_t> prompt, const GenerationRequest& asked,
                      const std::function<bool(std::int32_t)>& on_id) override {
      request = asked;
      prefill(prompt);
      for (const std::int32_t id : ids_of("abcdefgh")) {
        if (!on_id(id)) return;
        prefill({&id, 1});
      }
    }
    std::optional<DraftCounts> draft_counts() const override { return DraftCounts{.chunks = 5}; }
    GenerationRequest request;
  };
  const auto generated = [](GenerateOptions options, std::int64_t max_ids) {
    options.sampler = {.temperature = 0.5, .top_k = 9, .seed = 3, .vocab_limit = 259};
    Sampling model({}, 20);
    const GenerateResult result = generate(model, &byte_tokenizer(), ids_of("Hi"), options, {});
    EXPECT_EQ(model.request.stop_ids, options.stop_ids);
    EXPECT_EQ(model.request.max_ids, max_ids);
    EXPECT_EQ(model.request.sampling.seed, 3u);
    EXPECT_EQ(model.request.sampling.top_k, 9u);
    EXPECT_FALSE(model.request.sampling.greedy);
    EXPECT_EQ(result.drafts->chunks, 5);
    EXPECT_EQ(result.context, std::ssize(result.ids) + 1);
    return result.text + ": " + finish_reason_text(result.finish_reason);
  };
  EXPECT_EQ(generated({.max_tokens = 3}, 3), "abc: --max-tokens");
  EXPECT_EQ(generated({.max_tokens = 100, .stop_ids = {kEndOfText, byte_id('c')}}, 18), "ab: the end of the text");
  EXPECT_EQ(generated({.max_tokens = 18, .stop_ids = {byte_id('z')}, .stop_texts = {"x", "de"}}, 18),
            "abc: a stop text");
}

TEST(Generate, StopsAtMaxTokens) {
  const Generated r = run(ids_of("abcdef"), {.max_tokens = 3});
  EXPECT_EQ(r.result.text, "abc");
  EXPECT_EQ(r.result.finish_reason, FinishReason::max_tokens);
  EXPECT_EQ(run(ids_of("abc"), {.max_tokens = 1}).result.text, "a");
}

TEST(Generate, StopsWhereTheContextEnds) {
  // 2 prompt ids in 6 positions leave place for 4.
  const Generated r = run(ids_of("abcdefgh"), {}, 6);
  EXPECT_EQ(r.result.text, "abcd");
  EXPECT_EQ(r.result.finish_reason, FinishReason::context_full);
  EXPECT_STREQ(finish_reason_name(FinishReason::context_full), "length");
  EXPECT_EQ(run(ids_of("abc"), {}, 3).result.text, "a");
  // The reason is the limit that was reached; --max-tokens where it asks for just what there is.
  for (const auto& [asked, got] : {std::pair(3, 3), std::pair(4, 4), std::pair(5, 4)}) {
    const GenerateResult result = run(ids_of("abcdefgh"), {.max_tokens = asked}, 6).result;
    EXPECT_EQ(std::ssize(result.ids), got) << asked;
    EXPECT_EQ(result.finish_reason, asked > 4 ? FinishReason::context_full : FinishReason::max_tokens) << asked;
  }
}

TEST(Generate, APromptThatFillsTheContextIsRefused) {
  for (const std::int64_t capacity : {1, 2}) {
    ScriptedModel model({}, capacity);
    const std::vector<std::int32_t> prompt = ids_of("Hi");
    const std::string error = error_of(Exit::usage, [&] { generate(model, nullptr, prompt, {}); });
    expect_contains(error, "2 tokens");
    expect_contains(error, format("context of %d", static_cast<int>(capacity)));
    EXPECT_EQ(model.length(), 0) << "nothing was computed";
  }
}

TEST(Generate, AStopTextMayStraddleTokens) {
  for (const std::vector<std::int32_t>& script :
       {ids_of("one.END two"), std::vector<std::int32_t>{byte_id('o'), byte_id('n'), byte_id('e'), byte_id('.'),
                                                         byte_id('E'), byte_id('N'), byte_id('D'), byte_id('x')}}) {
    const Generated r = run(script, {.stop_texts = {"END"}});
    EXPECT_EQ(r.result.text, "one.");
    EXPECT_EQ(r.result.finish_reason, FinishReason::stop_text);
    EXPECT_STREQ(finish_reason_name(FinishReason::stop_text), "stop");
    EXPECT_EQ(r.result.ids.size(), 7u) << "the tokens of the stop text are among the ids";
  }
  // The stop text begins inside a token and ends inside another.
  const Generated inside = run({byte_id('x'), kAb, kAb, byte_id('z')}, {.stop_texts = {"ba"}});
  EXPECT_EQ(inside.result.text, "xa");
  EXPECT_EQ(inside.result.ids.size(), 3u);
}

TEST(Generate, WhatOnlyBeganAStopTextIsShownAfterAll) {
  EXPECT_EQ(run(ids_of("E EN ENx"), {.max_tokens = 8, .stop_texts = {"END"}}).result.text, "E EN ENx");
  EXPECT_EQ(run(ids_of("it EN"), {.max_tokens = 5, .stop_texts = {"END"}}).result.text, "it EN");
  std::vector<std::int32_t> before_eos = ids_of("EN");
  before_eos.push_back(kEndOfText);
  EXPECT_EQ(run(before_eos, {.stop_texts = {"END"}}).result.text, "EN");
}

TEST(Generate, NoPieceEverHoldsABeginningOfTheStopText) {
  const Generated r = run(ids_of("aab aaab!"), {.max_tokens = 9, .stop_texts = {"aaab"}});
  EXPECT_EQ(r.result.text, "aab ");
  for (const std::string& piece : r.pieces) EXPECT_EQ(piece.find("aaa"), std::string::npos);
}

// A model whose logits come to the host, and what the rules make of them: the script's ids are the likeliest, by much.
TEST(Generate, RulesAreObeyedOnTheHost) {
  const std::vector<std::int32_t> script = ids_of("abcabc");
  GenerateOptions options{.max_tokens = 6};
  EXPECT_EQ(run(script, options).result.text, "abcabc");
  options.rules.bad_words = {ids_of("bc")};
  EXPECT_EQ(run(script, options).result.ids[2], kEndOfText) << "the lowest of all that are left";
  options.rules = {.logit_bias = {{byte_id('z'), 100.0f}}};
  EXPECT_EQ(run(script, options).result.text, "zzzzzz");
  options.rules.penalties.frequency = 2;
  options.max_tokens = 60;
  EXPECT_TRUE(run(ids_of(std::string(60, 'a')), options).result.text.starts_with(std::string(45, 'z') + "a"))
      << "100 - 45 * 2 is the 10 of the script";
  options = {.max_tokens = 6};
  options.rules = {.min_tokens = 2, .end_ids = {byte_id('a'), kEndOfText}};
  options.stop_ids = options.rules.end_ids;
  EXPECT_EQ(run(script, options).result.ids.size(), 4u) << "the second 'a' ends it";
  // What was said before counts for one of the penalties.
  options = {.max_tokens = 1};
  options.rules = {.penalties = {.repetition = 1000}, .logit_bias = {{byte_id('z'), 8.0f}}};
  EXPECT_EQ(run(ids_of("a"), options).result.text, "a");
  options.earlier = ids_of("a");
  EXPECT_EQ(run(ids_of("a"), options).result.text, "z");
  options.rules.logit_bias = {{300, 1.0f}};
  error_of(Exit::usage, [&] { run(script, options); });
}

// Special tokens are left out of the text, wherever they come; stop texts see them, and ids have them.
TEST(Generate, SpecialTokensAreHiddenButStop) {
  constexpr std::int32_t kPadding = 1;
  const std::vector<std::int32_t> script = {kPadding, byte_id('a'), kPadding,        kPadding,       byte_id('\xc3'),
                                            kPadding, byte_id('b'), byte_id('\xc3'), byte_id('\xa9')};
  const auto text = [&](GenerateOptions options) {
    options.max_tokens = static_cast<std::int64_t>(script.size());
    const Generated r = run(script, options);
    std::string pieces;
    for (const std::string& piece : r.pieces) pieces += piece;
    EXPECT_EQ(pieces, r.result.text);
    EXPECT_TRUE(r.result.ids.size() <= script.size() && r.result.ids.front() == kPadding);
    return r.result.text;
  };
  const std::string pad = "<|padding|>", bad = "\xef\xbf\xbd", e = "\xc3\xa9";
  EXPECT_EQ(text({}), pad + "a" + pad + pad + bad + pad + "b" + e);
  EXPECT_EQ(text({.hide_special = true}), "a" + bad + "b" + e) << "half a character before a special token stays";
  EXPECT_EQ(text({.stop_texts = {"g|>" + bad}, .hide_special = true}), "a");
  EXPECT_EQ(text({.stop_texts = {pad + "b"}, .hide_special = true}), "a" + bad);
  EXPECT_EQ(text({.stop_texts = {pad + pad}, .hide_special = true}), "a");
  EXPECT_EQ(text({.stop_texts = {pad + "x", "b" + e + "x"}, .hide_special = true}), "a" + bad + "b" + e)
      << "what only began a stop text";
}

TEST(Generate, CharactersAreWholeOrReplaced) {
  // U+00E9 is two bytes and U+1F600 four, each byte a token of its own.
  const Generated r = run(ids_of("\xc3\xa9\xf0\x9f\x98\x80"), {.max_tokens = 6});
  EXPECT_EQ(r.pieces, (std::vector<std::string>{"\xc3\xa9", "\xf0\x9f\x98\x80"}));
  // Cut inside a character: U+FFFD at the end, not half a character.
  EXPECT_EQ(run(ids_of("a\xf0\x9f\x98"), {.max_tokens = 4}).result.text, "a\xef\xbf\xbd");
}

// What the end of the text makes of half a character can be a stop text, too.
TEST(Generate, TheEndMayCompleteAStopText) {
  const Generated r = run(ids_of("a\xe2"), {.max_tokens = 2, .stop_texts = {"\xef\xbf\xbd"}});
  EXPECT_EQ(r.result.text, "a");
  EXPECT_EQ(r.result.finish_reason, FinishReason::stop_text);
}

TEST(Generate, ASignalEndsItAfterTheToken) {
  int asked = 0;
  const Generated r = run(ids_of("abcdef"), {}, 1000, [&asked] { return ++asked == 3; });
  EXPECT_EQ(r.result.text, "abc");
  EXPECT_EQ(r.result.finish_reason, FinishReason::interrupted);
}

TEST(Generate, PaddingRowsAreOutOfReach) {
  const Generated r = run(ids_of("ab"), {.max_tokens = 2});
  EXPECT_EQ(r.result.text, "ab") << "the model's greatest logit belongs to a padding row";
}

TEST(Generate, TokensDependOnTheirPositionNotOnTheCall) {
  // One generation of eight tokens, or two of four with the cache kept, draw the same random numbers.
  GenerateOptions options{.max_tokens = 8, .sampler = {.temperature = 5, .seed = 9, .vocab_limit = 259}};
  const std::vector<std::int32_t> prompt = ids_of("Hi");
  ScriptedModel whole({}, 100);
  const std::vector<std::int32_t> expected = generate(whole, nullptr, prompt, options).ids;
  options.max_tokens = 4;
  ScriptedModel halves({}, 100);
  std::vector<std::int32_t> got = generate(halves, nullptr, prompt, options).ids;
  const std::vector<std::int32_t> last = {got.back()};
  const std::vector<std::int32_t> second = generate(halves, nullptr, last, options).ids;
  got.insert(got.end(), second.begin(), second.end());
  EXPECT_EQ(got, expected);
}

// A SentencePiece-style decoder takes the space in front of a text away, which the text after a prompt is not.
TEST(Generate, TheTextGoesOnWhereThePromptEnds) {
  const Tokenizer tokenizer = Tokenizer::from_json(
      R"({"model": {"type": "BPE", "merges": [], "vocab": {"</s>": 0, "<s>": 1, "\u2581": 2, "a": 3, "b": 4}},
          "added_tokens": [{"id": 0, "content": "</s>", "special": true}, {"id": 1, "content": "<s>", "special": true}],
          "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}})",
      "test tokenizer");
  const auto text_after = [&](const std::vector<std::int32_t>& prompt) {
    ScriptedModel model({2, 4, 2, 3}, 100);
    GenerateOptions options;
    options.max_tokens = 4;
    options.sampler.vocab_limit = 5;
    return generate(model, &tokenizer, prompt, options).text;
  };
  EXPECT_EQ(text_after({1, 2, 3}), " b a");
  EXPECT_EQ(text_after({1}), "b a");
}

TEST(Generate, WithoutATokenizerThereIsNoTextAndNoStopText) {
  ScriptedModel model(ids_of("abc"), 100);
  const std::vector<std::int32_t> prompt = {5};
  EXPECT_EQ(generate(model, nullptr, prompt, {.max_tokens = 3}).text, "");
  ScriptedModel other({}, 100);
  error_of(Exit::usage, [&] { generate(other, nullptr, prompt, {.stop_texts = {"x"}}); });
  error_of(Exit::usage, [&] { generate(other, &byte_tokenizer(), prompt, {.stop_texts = {""}}); });
}

TEST(GenerateTimes, LeaveOutTheFirstToken) {
  GenerateTimes times;
  EXPECT_TRUE(std::isnan(times.inter_token_percentile(50)));
  EXPECT_TRUE(std::isnan(times.tokens_per_second()));
  times.first_token_ms = 1000;
  for (int i = 200; i >= 1; --i) times.inter_token_ms.push_back(i);
  EXPECT_EQ(times.inter_token_percentile(50), 100);
  EXPECT_EQ(times.inter_token_percentile(99), 198);
  EXPECT_DOUBLE_EQ(times.tokens_per_second(), 200 / 20.1);
}

TEST(StopText, EndsWithTheFirstByteThatCompletesOne) {
  // "abcd" began earlier, but "bc" is complete first, however the text is cut into pieces.
  for (std::size_t cut = 0; cut <= 5; ++cut) {
    StopTextFilter filter({"abcd", "bc"});
    const std::string text = "xabcd";
    std::string shown = filter.push(text.substr(0, cut));
    shown += filter.push(text.substr(cut));
    shown += filter.finish();
    EXPECT_EQ(shown, "xa") << cut;
    EXPECT_TRUE(filter.stopped());
  }
  for (const std::vector<std::string>& stops : {std::vector<std::string>{"c", "abc"}, {"abc", "c"}}) {
    StopTextFilter filter(stops);
    EXPECT_EQ(filter.push("xabc"), "x") << "of several that end together the longest counts";
    EXPECT_EQ(filter.push("more"), "");
  }
}

// A stop text that ends in the piece where none may end is no stop text; one that only begins there is.
TEST(StopText, OneMayBeginWhereNoneMayEnd) {
  for (std::size_t cut = 0; cut <= 8; ++cut) {
    StopTextFilter filter({"aba", "b"});
    const std::string text = "xabaaba-";
    std::string shown;
    for (std::size_t i = 0; i < cut; ++i) shown += filter.push(text.substr(i, 1), false);
    shown += filter.push(text.substr(cut));
    shown += filter.finish();
    const char* const expected[] = {"xa", "xa", "xa", "x", "xabaa", "xabaa", "xaba", "xabaaba-", "xabaaba-"};
    EXPECT_EQ(shown, expected[cut]) << cut;
  }
}

TEST(StopText, AnEmptyOneIsRefusedWhereverItStands) {
  for (const std::vector<std::string>& stops :
       {std::vector<std::string>{""}, {"", "a"}, {"a", ""}, {"a", "", "b"}, {"a", "b", ""}}) {
    expect_contains(error_of(Exit::usage, [&] { StopTextFilter{stops}; }), "--stop: got ''");
  }
  EXPECT_EQ(StopTextFilter({}).push("a"), "a");
}

// All words of two letters.
std::vector<std::string> words(std::size_t shortest, std::size_t longest) {
  std::vector<std::string> all;
  for (std::size_t length = shortest; length <= longest; ++length) {
    for (std::size_t bits = 0; bits < std::size_t{1} << length; ++bits) {
      std::string& word = all.emplace_back();
      for (std::size_t i = 0; i < length; ++i) word += (bits >> i & 1) != 0 ? 'b' : 'a';
    }
  }
  return all;
}

// Every two stop texts in every text: byte by byte, what is shown is what cannot belong to a stop text any more.
TEST(StopText, WhatIsHeldBackIsTheLongestBeginningOfAStopText) {
  for (const std::string& one : words(1, 3)) {
    for (const std::string& other : words(1, 3)) {
      for (const std::string& text : words(6, 6)) {
        StopTextFilter filter({one, other});
        std::string shown;
        for (std::size_t end = 1; end <= text.size() && !filter.stopped(); ++end) {
          shown += filter.push(text.substr(end - 1, 1));
          const std::string seen = text.substr(0, end);
          std::size_t complete = 0, begun = 0;
          for (const std::string& stop : {one, other}) {
            if (seen.ends_with(stop)) complete = std::max(complete, stop.size());
            for (std::size_t n = 1; n < stop.size(); ++n) {
              if (seen.ends_with(stop.substr(0, n))) begun = std::max(begun, n);
            }
          }
          ASSERT_EQ(filter.stopped(), complete > 0) << one << " " << other << " " << seen;
          ASSERT_EQ(shown, seen.substr(0, end - (complete > 0 ? complete : begun)))
              << one << " " << other << " " << seen;
        }
        const bool stopped = filter.stopped();
        shown += filter.finish();
        StopTextFilter at_once({one, other});
        std::string whole = at_once.push(text);
        whole += at_once.finish();
        ASSERT_EQ(whole, shown);
        ASSERT_EQ(at_once.stopped(), stopped);
        ASSERT_EQ(stopped ? text : shown, text);
      }
    }
  }
}

TEST(Prompt, AnEmptyOneStartsADocument) {
  ModelConfig config = fake_config();
  EXPECT_EQ(start_ids({}, config), (std::vector<std::int32_t>{kEndOfText}));
  EXPECT_EQ(start_ids({7, 8}, config), (std::vector<std::int32_t>{7, 8}));
  config.bos_id = 42;
  EXPECT_EQ(start_ids({}, config), (std::vector<std::int32_t>{42}));
  config.bos_id.reset();
  config.eos_ids.clear();
  error_of(Exit::usage, [&] { start_ids({}, config); });
}

TEST(Prompt, IdsAreStrict) {
  EXPECT_EQ(parse_ids("0,7,299", 300), (std::vector<std::int32_t>{0, 7, 299}));
  EXPECT_EQ(ids_text(parse_ids("0,7,299", 300)), "0,7,299");
  for (const char* bad :
       {"", ",", "1,", ",1", "1,,2", "1 2", "1, 2", "-1", "300", "1x", "0x1", "1.0", "99999999999999999999"}) {
    EXPECT_NE(error_of(Exit::usage, [&] { parse_ids(bad, 300); }), "") << bad;
  }
}

TEST(TextOutput, NothingThatSteersATerminalPasses) {
  EXPECT_EQ(terminal_safe("plain \xc3\xa9 \xf0\x9f\x98\x80\n\ttext"), "plain \xc3\xa9 \xf0\x9f\x98\x80\n\ttext");
  EXPECT_EQ(terminal_safe("\033[2J\r\b\a\x7f"), "\\x1b[2J\\x0d\\x08\\x07\\x7f");
  EXPECT_EQ(terminal_safe(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(terminal_safe("\xc2\x9b"
                          "2J"),
            "\\xc2\\x9b"
            "2J");
  EXPECT_EQ(terminal_safe("\xff"), "\\xff");
  // The last controls of both ranges, and the first characters after them: a space and a no-break space.
  EXPECT_EQ(terminal_safe("\x1f \x7e"), "\\x1f \x7e");
  EXPECT_EQ(terminal_safe("\xc2\x80\xc2\x9f\xc2\xa0\xc2\xbf"), "\\xc2\\x80\\xc2\\x9f\xc2\xa0\xc2\xbf");
}

// What stdout gets from `write`, as a terminal or as a pipe.
std::string stdout_of(bool terminal, const std::function<void(TextOutput&)>& write) {
  int ends[2] = {-1, -1};
  if (terminal) {
    ends[0] = ::posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT_TRUE(::grantpt(ends[0]) == 0 && ::unlockpt(ends[0]) == 0);
    ends[1] = ::open(::ptsname(ends[0]), O_RDWR | O_NOCTTY);
    termios raw{};  // a newline stays one
    EXPECT_EQ(::tcgetattr(ends[1], &raw), 0);
    ::cfmakeraw(&raw);
    EXPECT_EQ(::tcsetattr(ends[1], TCSANOW, &raw), 0);
  } else {
    EXPECT_EQ(::pipe(ends), 0);
  }
  std::fflush(stdout);
  const int before = ::dup(STDOUT_FILENO);
  ::dup2(ends[1], STDOUT_FILENO);
  TextOutput output;
  write(output);
  write_stdout(".");
  ::dup2(before, STDOUT_FILENO);
  ::close(before);
  std::string text;
  for (char byte = 0; ::read(ends[0], &byte, 1) == 1 && byte != '.';) text += byte;
  for (const int end : ends) ::close(end);
  return text;
}

// "|" stands for end_line().
TEST(TextOutput, ALineIsEndedOnATerminalIfItIsOpen) {
  struct Case {
    std::vector<std::string> pieces;
    std::string on_terminal;
  };
  for (const Case& c : std::vector<Case>{{{"|"}, ""},
                                         {{"a", "|"}, "a\n"},
                                         {{"a\n", "|"}, "a\n"},
                                         {{"a", "b\n", "|"}, "ab\n"},
                                         {{"a", "\n", "|"}, "a\n"},
                                         {{"a\n", "b", "|"}, "a\nb\n"},
                                         {{"a\nb", "|"}, "a\nb\n"},
                                         {{"a", "", "|"}, "a\n"},
                                         {{"a\n", "", "|"}, "a\n"},
                                         {{"a", "|", "|"}, "a\n"},
                                         {{"a", "|", "b", "|"}, "a\nb\n"},
                                         {{"a\n", "|", "b\n", "|"}, "a\nb\n"},
                                         {{"\033", "|"}, "\\x1b\n"}}) {
    std::string plain;
    for (const std::string& piece : c.pieces) plain += piece == "|" ? "" : piece;
    for (const bool terminal : {true, false}) {
      const std::string got = stdout_of(terminal, [&](TextOutput& output) {
        for (const std::string& piece : c.pieces) piece == "|" ? output.end_line() : output.write(piece);
      });
      EXPECT_EQ(got, terminal ? c.on_terminal : plain) << escaped(plain);
    }
  }
}

TEST(Report, TheObjectHasEveryFieldAndNullForTheUnknown) {
  ScriptedModel model(ids_of("abc"), 100);
  const std::vector<std::int32_t> prompt = ids_of("Hi");
  const GenerateResult one = generate(model, nullptr, prompt, {.max_tokens = 1});
  const Json object = generation_json(model, prompt, one, {"cpu", "reference"});
  EXPECT_EQ(object.size(), 12u);
  for (const char* key : {"itl_ms_p50", "itl_ms_p99", "tokens_per_s", "gb_per_s"}) {
    EXPECT_TRUE(object.at(key).is_null()) << key;
  }
  EXPECT_EQ(object.at("prompt_ids"), Json(prompt));
  EXPECT_EQ(object.at("bytes_per_token"), 1002);

  GenerateResult many = one;
  many.times.inter_token_ms = {2, 2, 2, 2};
  many.context = 20;
  const Json measured = generation_json(model, prompt, many, {"cpu", "reference"});
  EXPECT_EQ(measured.at("tokens_per_s"), 500.0);
  EXPECT_EQ(measured.at("bytes_per_token"), 1018) << "in the middle of the generation";
  EXPECT_DOUBLE_EQ(measured.at("gb_per_s").get<double>(), 1018 * 500.0 / 1e9);
  EXPECT_EQ(json_line({{"text", "\xff"}}), "{\"text\":\"\xef\xbf\xbd\"}\n");
}

TEST(Perplexity, WindowsScoreEveryTokenOnceWithEnoughContext) {
  for (const std::int64_t window : {2, 3, 8, 9}) {
    for (std::int64_t stride = 1; stride < window; ++stride) {
      for (std::int64_t count = 1; count <= 40; ++count) {
        std::int64_t next = 1;
        for (const PerplexityWindow& w : perplexity_windows(count, window, stride)) {
          ASSERT_EQ(w.first_scored, next) << "each token once, in order";
          ASSERT_LE(w.end - w.begin, window);
          ASSERT_LT(w.first_scored, w.end) << "no window for nothing";
          ASSERT_GE(w.first_scored - w.begin, w.begin == 0 ? 1 : window - stride);
          next = w.end;
        }
        ASSERT_EQ(next, count);
      }
    }
  }
  error_of(Exit::usage, [] { perplexity_windows(10, 8, 8); });
  error_of(Exit::usage, [] { perplexity_windows(10, 8, 0); });
  error_of(Exit::usage, [] { perplexity_windows(10, 1, 1); });
}

TEST(Perplexity, AgreesWithTheClosedForm) {
  // The model looks one token back, so the windows must not matter.
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 57; ++i) ids.push_back((i * 37) % 101);
  std::vector<double> nll;
  for (std::size_t i = 1; i < ids.size(); ++i) nll.push_back(ScriptedModel::nll_of(ids[i - 1], ids[i]));
  double mean = 0, variance = 0;
  for (const double value : nll) mean += value / static_cast<double>(nll.size());
  for (const double value : nll) variance += (value - mean) * (value - mean) / static_cast<double>(nll.size() - 1);

  for (const std::int64_t capacity : {2, 8, 57, 500}) {
    for (const std::int64_t stride : {std::int64_t{1}, capacity / 2, capacity - 1}) {
      ScriptedModel model({}, capacity);
      const PerplexityResult result = perplexity(model, ids, 200, stride);
      EXPECT_EQ(result.tokens, 56);
      EXPECT_EQ(result.windows, static_cast<std::int64_t>(model.scored().size()));
      EXPECT_NEAR(result.mean_nll, mean, 1e-12);
      EXPECT_NEAR(result.standard_error, std::sqrt(variance / 56), 1e-12);
      EXPECT_NEAR(result.perplexity(), std::exp(mean), 1e-10);
      EXPECT_NEAR(result.bits_per_byte(), mean * 56 / std::numbers::ln2 / 200, 1e-12);
    }
  }
}

// Its logits depend on the id alone, and the rows of padding, of which it has `padding`, are far ahead of the others.
class RowsModel : public ScriptedModel {
 public:
  static constexpr std::int64_t kIds = 7;

  RowsModel(std::int64_t padding, double temperature) : ScriptedModel({}, 400), temperature_(temperature) {
    rows_config_.vocab_size = kIds + padding;
    rows_config_.tokenizer_vocab = kIds;
  }
  const ModelConfig& config() const override { return rows_config_; }
  std::span<const float> prefill(std::span<const std::int32_t> ids) override {
    EXPECT_LE(ids.size(), 128u) << "more logits than are kept at a time";
    kept_.clear();
    for (const std::int32_t id : ids) {
      for (std::int32_t i = 0; keeps && i < rows_config_.vocab_size; ++i) kept_.push_back(logit(id, i));
    }
    return ScriptedModel::prefill(ids);
  }
  void keep_logits(bool keep) override { keeps = keep; }
  std::vector<float> activation(const std::string&) override { return kept_; }
  float logit(std::int32_t id, std::int32_t i) const {
    if (id == poison) return std::numeric_limits<float>::quiet_NaN();
    return i < kIds ? static_cast<float>(std::sin(5.0 * id + 3.0 * i) / temperature_) : 90.0f;
  }
  // -log of the share of id i after `id`, among the ids of the tokenizer.
  double loss(std::int32_t id, std::int32_t i) const {
    double sum = 0;
    for (std::int32_t j = 0; j < kIds; ++j) sum += std::exp(static_cast<double>(logit(id, j)));
    return std::log(sum) - logit(id, i);
  }

  bool keeps = false;
  std::int32_t poison = -1;

 private:
  ModelConfig rows_config_ = fake_config();
  double temperature_;
  std::vector<float> kept_;
};

// Every figure from its definition, with padding of different sizes, over windows of several pieces or of less than one.
TEST(Divergence, EveryFigureByItsDefinition) {
  RowsModel q(3, 1), p(9, -0.7);
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < 300; ++i) ids.push_back(i * i % RowsModel::kIds);
  std::vector<double> divergences, losses_q, losses_p, differences;
  double same = 0;
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
    double sum = 0;
    std::int32_t top_p = 0, top_q = 0;
    for (std::int32_t j = 0; j < RowsModel::kIds; ++j) {
      sum += std::exp(-p.loss(ids[i], j)) * (q.loss(ids[i], j) - p.loss(ids[i], j));
      if (p.loss(ids[i], j) < p.loss(ids[i], top_p)) top_p = j;
      if (q.loss(ids[i], j) < q.loss(ids[i], top_q)) top_q = j;
    }
    divergences.push_back(sum);
    losses_q.push_back(q.loss(ids[i], ids[i + 1]));
    losses_p.push_back(p.loss(ids[i], ids[i + 1]));
    differences.push_back(losses_q.back() - losses_p.back());
    same += top_p == top_q ? 1 : 0;
  }
  const auto mean = [](const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  };
  const auto error_of_mean = [&](const std::vector<double>& values) {
    double squares = 0;
    for (const double value : values) squares += (value - mean(values)) * (value - mean(values));
    const auto n = static_cast<double>(values.size());
    return std::sqrt(squares / (n - 1) / n);
  };
  for (const auto& [window, stride] : {std::pair(300, 299), std::pair(300, 1), std::pair(200, 77), std::pair(20, 7)}) {
    SCOPED_TRACE(format("windows of %d, %d apart", window, stride));
    std::int64_t windows = 0, all = 0;
    double last = 0;
    DivergenceHooks hooks;
    hooks.on_window = [&](std::int64_t done, std::int64_t count, double so_far) {
      EXPECT_EQ(done, ++windows);
      all = count;
      last = so_far;
    };
    const DivergenceResult result = divergence(q, p, ids, window, stride, hooks);
    EXPECT_EQ(windows, all);
    EXPECT_EQ(last, result.mean);
    EXPECT_EQ(result.tokens, 299);
    EXPECT_NEAR(result.mean, mean(divergences), 1e-9);
    EXPECT_NEAR(result.standard_error, error_of_mean(divergences), 1e-9);
    EXPECT_NEAR(result.largest, std::ranges::max(divergences), 1e-9);
    EXPECT_NEAR(result.same_top, same / 299, 1e-12);
    EXPECT_NEAR(result.nll, mean(losses_q), 1e-9);
    EXPECT_NEAR(result.nll_against, mean(losses_p), 1e-9);
    EXPECT_NEAR(result.nll_difference_error, error_of_mean(differences), 1e-9);
    EXPECT_FALSE(result.interrupted || q.keeps || p.keeps);
  }
  // Before the second piece of 128.
  int polls = 0;
  DivergenceHooks hooks;
  hooks.interrupted = [&polls] { return ++polls == 2; };
  hooks.on_window = [](std::int64_t, std::int64_t, double) { ADD_FAILURE() << "no window is done"; };
  const DivergenceResult cut = divergence(q, p, ids, 300, 1, hooks);
  EXPECT_TRUE(cut.interrupted);
  EXPECT_EQ(cut.tokens, 128);
  EXPECT_NEAR(cut.nll, mean({losses_q.begin(), losses_q.begin() + 128}), 1e-9);

  const std::span<const std::int32_t> two = std::span(ids).first(2);
  EXPECT_EQ(divergence(q, p, two, 300, 1).tokens, 1);
  expect_contains(error_of(Exit::bad_file, [&] { divergence(q, p, two.first(1), 300, 1); }), "no token to score");
  EXPECT_TRUE(std::isnan(divergence(q, p, two, 300, 1).standard_error));
  EXPECT_TRUE(std::isnan(divergence(q, p, two, 300, 1).nll_difference_error));
  EXPECT_EQ(divergence(q, p, std::vector<std::int32_t>{1, RowsModel::kIds + 1}, 300, 1).nll, 0)
      << "an id beyond those of the tokenizer has no loss";
  EXPECT_NEAR(divergence(q, p, std::vector<std::int32_t>{1, RowsModel::kIds - 1}, 300, 1).nll,
              q.loss(1, RowsModel::kIds - 1), 1e-9);
  for (RowsModel* const each : {&q, &p}) {
    each->poison = 2;  // the fourth id, 9 % 7
    expect_contains(error_of(Exit::numeric, [&] { divergence(q, p, ids, 300, 1); }), "at token 4 is not finite");
    each->poison = -1;
  }
}

// Each time is from one token to the next: together they are no more than the whole took.
TEST(Generate, TimesDoNotOverlap) {
  GenerateOptions options;
  options.max_tokens = 800;
  const auto begin = std::chrono::steady_clock::now();
  const GenerateTimes times = run(std::vector<std::int32_t>(800, byte_id('a')), options).result.times;
  const double whole_ms = 1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  ASSERT_EQ(times.inter_token_ms.size(), 799u);
  EXPECT_LE(std::accumulate(times.inter_token_ms.begin(), times.inter_token_ms.end(), times.first_token_ms), whole_ms);
}

// A tenth of the bytes, and no more, need not be UTF-8.
TEST(Perplexity, ATextMayHaveATenthOfOtherBytes) {
  for (const std::string& text : {std::string("a"), "\xff" + std::string(9, 'a'), "\xff\xff" + std::string(18, 'a')}) {
    EXPECT_NO_THROW(check_text(text, "file")) << escaped(text);
  }
  for (const std::string& text : {std::string(), std::string("a\0b", 3), std::string("\xff"),
                                  "\xff" + std::string(8, 'a'), "\xff\xff" + std::string(17, 'a')}) {
    EXPECT_NE(error_of(Exit::bad_file, [&] { check_text(text, "file"); }), "") << escaped(text);
  }
}

TEST(Perplexity, EdgesAndFailures) {
  ScriptedModel model({}, 8);
  const std::vector<std::int32_t> two = {0, 5};
  EXPECT_EQ(perplexity(model, two, 1, 4).tokens, 1);
  EXPECT_TRUE(std::isnan(perplexity(model, two, 1, 4).standard_error));
  const std::vector<std::int32_t> one = {0};
  error_of(Exit::bad_file, [&] { perplexity(model, one, 0, 4); });

  const std::vector<std::int32_t> many(30, 3);
  PerplexityHooks hooks;
  int windows = 0;
  hooks.on_window = [&windows](std::int64_t, std::int64_t, double) { ++windows; };
  hooks.interrupted = [&windows] { return windows == 2; };
  const PerplexityResult cut = perplexity(model, many, 30, 4, hooks);
  EXPECT_TRUE(cut.interrupted);
  EXPECT_EQ(cut.tokens, 11);
  EXPECT_TRUE(std::isnan(cut.bits_per_byte()));

  struct Broken : ScriptedModel {
    Broken() : ScriptedModel({}, 8) {}
    std::vector<double> score(std::span<const std::int32_t> ids) override {
      return std::vector<double>(ids.size() - 1, std::nan(""));
    }
  } broken;
  error_of(Exit::numeric, [&] { perplexity(broken, many, 30, 4); });
}

TEST(Perplexity, AnInterruptedWindowCountsAsFarAsItWent) {
  // Scores three ids at once, and is interrupted in the middle of the second window.
  struct Slow : ScriptedModel {
    Slow() : ScriptedModel({}, 8) {}
    std::vector<double> score(std::span<const std::int32_t> ids) override {
      std::vector<double> nll = ScriptedModel::score(ids);
      std::size_t done = 0;
      while (done < nll.size() && !score_interrupted()) done = std::min(done + 3, nll.size());
      nll.resize(done);
      return nll;
    }
  } model;
  const std::vector<std::int32_t> many(30, 3);
  PerplexityHooks hooks;
  int polls = 0;
  hooks.interrupted = [&polls] { return ++polls > 7; };  // before a window and its three pieces, twice
  const PerplexityResult cut = perplexity(model, many, 30, 4, hooks);
  EXPECT_TRUE(cut.interrupted);
  EXPECT_EQ(cut.windows, 1);
  EXPECT_EQ(cut.tokens, 7 + 3) << "six losses of the window that begins at id 4: three are of the overlap";
  EXPECT_NEAR(cut.mean_nll, ScriptedModel::nll_of(3, 3), 1e-12);
  EXPECT_EQ(model.score(std::span(many).first(8)).size(), 7u) << "nobody polls after that";
  EXPECT_FALSE(perplexity(model, many, 30, 4).interrupted);
}

TEST(Faults, OfScoredTokensAreOfThoseThatCount) {
  const std::vector<std::int32_t> many(30, 3);
  for (const std::int64_t token : {1, 7, 8, 11, 12, 29}) {
    PerplexityHooks hooks;
    const DecodeFaults faults = parse_decode_faults({format("nan@token=%lld", static_cast<long long>(token))});
    hooks.on_loss = loss_faults(faults);
    const std::unique_ptr<DecodeModel> model =
        with_faults(std::make_unique<ScriptedModel>(std::vector<std::int32_t>{}, 8), faults);
    expect_contains(error_of(Exit::numeric, [&] { perplexity(*model, many, 30, 4, hooks); }),
                    format("the loss of token %lld is not finite", static_cast<long long>(token)));
  }
  PerplexityHooks hooks;
  hooks.on_loss = loss_faults(parse_decode_faults({"nan@token=30"}));
  ScriptedModel model({}, 8);
  EXPECT_EQ(perplexity(model, many, 30, 4, hooks).tokens, 29) << "there is no thirtieth";
  EXPECT_FALSE(loss_faults({})) << "no fault, no function";
}

TEST(Faults, MalformedSpecsOfDecodingAreRefused) {
  for (const char* spec : {"", "nan", "nan@token", "nan@token=", "nan@token=x", "nan@token=-1", "nan@token=0",
                           "nan@token=3x", "nan@token=99999999999999999999", "boom@token=3", "accept=", "accept=1.1",
                           "accept=-0.1", "accept=nan", "accept=0.5x", "accept"}) {
    expect_contains(error_of(Exit::usage, [&] { parse_decode_faults({spec}); }), "--debug-inject");
  }
  EXPECT_EQ(parse_decode_faults({"nan@token=1"}).nan_token, 1);
  EXPECT_EQ(parse_decode_faults({"accept=0.7"}).acceptance, 0.7);
}

volatile std::sig_atomic_t terminations = 0;

// Each fault at a token alone, for one sequence, for many and for losses; the others are no reason to look at tokens.
TEST(Faults, EachFaultAtATokenAloneIsOne) {
  const auto wrapped = [](const char* spec) {
    const DecodeFaults faults = parse_decode_faults({spec});
    auto one = std::make_unique<ScriptedModel>(std::vector<std::int32_t>{}, 8);
    auto many = std::make_unique<PagedFake>(PagedFakeSizes{});
    const DecodeModel* const plain_one = one.get();
    const InferenceModel* const plain_many = many.get();
    const bool of_one = with_faults(std::move(one), faults).get() != plain_one;
    EXPECT_EQ(with_faults(std::move(many), faults).get() != plain_many, of_one) << spec;
    EXPECT_EQ(static_cast<bool>(loss_faults(faults)), of_one) << spec;
    return of_one;
  };
  for (const char* spec : {"nan@token=2", "kill@token=2", "term@token=2", "hang@token=2"}) EXPECT_TRUE(wrapped(spec));
  for (const char* spec : {"accept=0.5", "io-error@load"}) EXPECT_FALSE(wrapped(spec));

  terminations = 0;
  const auto before = std::signal(SIGTERM, [](int) { terminations = terminations + 1; });
  const DecodeFaults faults = parse_decode_faults({"term@token=2"});
  const std::function<double(double)> loss = loss_faults(faults);
  const std::unique_ptr<DecodeModel> model =
      with_faults(std::make_unique<ScriptedModel>(std::vector<std::int32_t>{}, 8), faults);
  const std::function<void()> tokens[] = {[&] { EXPECT_EQ(loss(1.5), 1.5); }, [&] { model->decode(3); }};
  for (const auto& token : tokens) {
    const int so_far = terminations;
    for (const int expected : {0, 1, 1}) {
      token();
      EXPECT_EQ(terminations - so_far, expected);
    }
  }
  std::signal(SIGTERM, before);
}

// Of many sequences ids are counted as the steps report them, right drafts included; only the sequence of the bad one fails.
TEST(Faults, OfManySequencesOneFails) {
  class Scripted : public PagedFake {
   public:
    Scripted() : PagedFake(PagedFakeSizes{.slots = 5, .depth = 3}) {}
    std::span<const ChunkResult> collect() override {
      results_.assign(4, {});
      for (std::int32_t id = 0; id < 3; ++id) results_[0].accepted.push_back({id, 0, {}});
      results_[0].sampled = ScoredId{3, 0, {}};
      results_[1].error = SampleError::not_a_number;
      results_[2].targets.resize(2);  // a prompt that is not complete
      results_[3].sampled = ScoredId{4, 0, {}};
      return results_;
    }

   private:
    std::vector<ChunkResult> results_;
  };
  for (int token = 1; token <= 11; ++token) {
    SCOPED_TRACE(token);
    const std::unique_ptr<InferenceModel> model =
        with_faults(std::make_unique<Scripted>(), parse_decode_faults({"nan@token=" + std::to_string(token)}));
    const Scripted plain;
    EXPECT_EQ(model->slots(), plain.slots());
    EXPECT_EQ(model->depth(), plain.depth());
    EXPECT_EQ(model->page_size(), plain.page_size());
    EXPECT_EQ(model->num_pages(), plain.num_pages());
    EXPECT_EQ(model->max_rows(), plain.max_rows());
    EXPECT_EQ(model->max_positions(), plain.max_positions());
    EXPECT_EQ(model->config(), plain.config());
    // An id that is dropped because of a bad one before it is no token: after a bad draft the count goes on with the next
    // chunk.
    int counted = 0;
    for (int step = 0; step < 2; ++step) {
      std::size_t accepted = 0;
      bool bad = false;
      for (; accepted < 3 && !bad; accepted += bad ? 0 : 1) bad = ++counted == token;
      const bool first = !bad && ++counted != token, last = ++counted != token;
      const std::span<const ChunkResult> results = model->collect();
      ASSERT_EQ(results.size(), 4u);
      EXPECT_EQ(results[0].accepted.size(), accepted);
      EXPECT_EQ(results[0].sampled.has_value(), first);
      EXPECT_EQ(results[0].error, first ? SampleError::none : SampleError::not_a_number);
      EXPECT_EQ(results[1].error, SampleError::not_a_number);
      EXPECT_EQ(results[2].error, SampleError::none);
      EXPECT_EQ(results[2].targets.size(), 2u);
      EXPECT_EQ(results[3].sampled.has_value(), last);
      EXPECT_EQ(results[3].error, last ? SampleError::none : SampleError::not_a_number);
    }
  }
}

// Of one sequence: the logits of the token have one NaN, the others none, and then the host has to sample.
TEST(Faults, OfOneSequenceTheLogitsOfTheTokenAreDamaged) {
  struct Sampling : ScriptedModel {
    Sampling() : ScriptedModel({}, 8) {}
    bool samples() const override { return true; }
    std::optional<DraftCounts> draft_counts() const override { return DraftCounts{.chunks = 3}; }
  };
  const auto made = [](const char* spec) {
    return with_faults(std::make_unique<Sampling>(), parse_decode_faults({spec}));
  };
  const std::unique_ptr<DecodeModel> model = made("nan@token=2");
  for (const std::ptrdiff_t expected : {0, 1, 0}) {
    const std::span<const float> logits = model->decode(3);
    EXPECT_EQ(std::ranges::count_if(logits, [](float logit) { return std::isnan(logit); }), expected);
    EXPECT_EQ(std::isnan(logits[kVocab / 2]), expected > 0) << "among the ids that can be sampled";
  }
  EXPECT_FALSE(model->samples());
  EXPECT_TRUE(made("kill@token=9")->samples());
  EXPECT_EQ(made("kill@token=9")->draft_counts()->chunks, 3);
  EXPECT_EQ(model->capacity(), 8);
  EXPECT_EQ(model->length(), 3);
  model->reset();
  EXPECT_EQ(model->length(), 0);
  EXPECT_EQ(model->bytes_per_token(5), 1005u);
}

TEST(Bench, FitsTheContextOrSaysSo) {
  ScriptedModel model({}, 64);
  EXPECT_EQ(run_bench(model, {32}).main.decode.inter_token_ms.size(), 32u);
  error_of(Exit::usage, [&] { run_bench(model, {33}); });
  error_of(Exit::usage, [&] { run_bench(model, {std::numeric_limits<std::int64_t>::max()}); });
  ScriptedModel tiny({}, 20);
  error_of(Exit::usage, [&] { run_bench(tiny, {1}); });
  EXPECT_EQ(run_bench(model, {10}).main.tokens, 10);
  BenchOptions options{10};
  options.read_ceiling = 7;
  EXPECT_EQ(run_bench(model, options).read_ceiling, 7);
}

// The cache has room for the longest of what is measured, in any order, and for no more than the limit.
TEST(Bench, TheCacheIsThatOfTheLongestNeed) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const auto capacity = [](std::int64_t tokens, std::vector<std::int64_t> contexts, std::int64_t limit = 5000) {
    BenchOptions options{tokens};
    options.contexts = std::move(contexts);
    return bench_capacity(options, limit);
  };
  EXPECT_EQ(capacity(1, {}), 65) << "of --bench-layer";
  EXPECT_EQ(capacity(32, {}), 65);
  EXPECT_EQ(capacity(33, {}), 66);
  EXPECT_EQ(capacity(200, {}), 233);
  EXPECT_EQ(capacity(200, {168}), 233);
  EXPECT_EQ(capacity(200, {169}), 234);
  for (const std::vector<std::int64_t>& contexts :
       {std::vector<std::int64_t>{1000, 64}, {64, 1000}, {1, 1000, 2}, {1000}}) {
    EXPECT_EQ(capacity(200, contexts), 1065);
    EXPECT_EQ(capacity(2000, contexts), 2033);
    EXPECT_EQ(capacity(200, contexts, 1065), 1065);
    EXPECT_EQ(capacity(200, contexts, 1064), 1064);
  }
  EXPECT_EQ(capacity(kMost, {1000}, 100), 100);
  EXPECT_EQ(capacity(1, {}, 10), 10);
}

// At each context 64 tokens, or as many as fit: one position is that of the id after them.
TEST(Bench, EachContextIsMeasuredAsFarAsItFits) {
  BenchOptions options{10};
  options.contexts = {1, 35, 36, 98};
  ScriptedModel model({}, 100);
  const BenchResult result = run_bench(model, options);
  EXPECT_EQ(result.main.prompt, 32);
  ASSERT_EQ(result.contexts.size(), 4u);
  const std::int64_t expected[] = {64, 64, 63, 1};
  for (std::size_t i = 0; i < 4; ++i) {
    const BenchPoint& point = result.contexts[i];
    EXPECT_EQ(point.prompt, options.contexts[i]);
    EXPECT_EQ(point.tokens, expected[i]);
    EXPECT_EQ(std::ssize(point.decode.inter_token_ms), expected[i]);
    EXPECT_EQ(point.traffic.bytes_per_token, static_cast<std::uint64_t>(1000 + point.prompt + point.tokens / 2));
  }
  options.contexts = {98, 99};
  EXPECT_EQ(run_bench(model, options).contexts.size(), 1u);
}

TEST(LineInput, KeepsNoMoreThanTheLimit) {
  using Result = LineInput::Result;
  std::istringstream input("12345\n123456\n\n1234567890\nlast");
  std::string line;
  EXPECT_EQ(read_line(input, line, 5), Result::line);
  EXPECT_EQ(line, "12345");
  EXPECT_EQ(read_line(input, line, 5), Result::too_long);
  EXPECT_EQ(line, "");
  EXPECT_EQ(read_line(input, line, 5), Result::line);
  EXPECT_EQ(line, "") << "an empty line is a line";
  EXPECT_EQ(read_line(input, line, 5), Result::too_long);
  EXPECT_EQ(read_line(input, line, 5), Result::line);
  EXPECT_EQ(line, "last") << "without an end";
  EXPECT_EQ(read_line(input, line, 5), Result::end);
}

}  // namespace
}  // namespace weft
