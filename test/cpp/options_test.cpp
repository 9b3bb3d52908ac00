#include "llmc/base/options.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <tuple>

#include "llmc/base/option_aliases.h"
#include "llmc/base/signals.h"
#include "llmc/infer/options.h"
#include "llmc/train/options.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

// A table with one option of each kind.
struct Sample {
  std::string model = "default.bin", device = "auto";
  std::int64_t steps = 5, offset = 0;
  double rate = 0.1;
  bool json = false;
  std::vector<std::string> stop;
  OptionTable table{"sample", "Shows options."};

  Sample() {
    table.version("sample 1.2.3");
    table.footer("Exit codes: 0 ok.");
    table.group("Input");
    table.text("model", model, "FILE",
               "the file that holds the model, its configuration, its tensors and its tokenizer");
    table.choice("device", device, {"auto", "cuda", "cpu"}, "where to run");
    table.group("Numbers");
    table.integer("steps", steps, 1, 4096, "how many");
    table.integer("offset", offset, -8, std::numeric_limits<std::int64_t>::max(), "where to begin");
    table.number("learning-rate", rate, 0, 1, "how fast");
    table.flag("json", json, "as an object");
    table.repeated("stop", stop, "TEXT", "stop before this text");
    table.short_name('m', "model");
    table.short_name('n', "steps");
    table.short_name('j', "json");
    table.only_in_help_all("offset");
  }

  OptionTable::Outcome parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "sample");
    return table.parse(static_cast<int>(arguments.size()), arguments.data());
  }
};

// The message of the usage error that these arguments must give; what it may not change is looked at, too.
std::string reason(const std::vector<const char*>& arguments) {
  Sample sample;
  try {
    sample.parse(arguments);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::usage);
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << (arguments.empty() ? "" : arguments.front());
  return "";
}

void expect_refused(const std::vector<const char*>& arguments, const std::vector<std::string>& parts) {
  const std::string message = reason(arguments);
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
  }
}

TEST(Options, DefaultsStand) {
  Sample sample;
  EXPECT_EQ(sample.parse({}), OptionTable::Outcome::run);
  EXPECT_EQ(sample.steps, 5);
  EXPECT_FALSE(sample.table.given("steps"));
}

TEST(Options, BothSpellingsOfAValue) {
  Sample sample;
  sample.parse({"--steps=7", "--learning-rate", "1e-3", "--json", "--device=cpu", "--offset", "-8"});
  EXPECT_EQ(sample.steps, 7);
  EXPECT_EQ(sample.rate, 1e-3);
  EXPECT_TRUE(sample.json);
  EXPECT_EQ(sample.device, "cpu");
  EXPECT_EQ(sample.offset, -8);
  EXPECT_TRUE(sample.table.given("steps"));
  EXPECT_FALSE(sample.table.given("model"));
}

TEST(Options, ATextMayHoldAnything) {
  Sample sample;
  sample.parse({"--model", "--steps=9", "--stop", "[a,b]", "--stop=", "--stop=--json", "--stop", "a=b\nc"});
  EXPECT_EQ(sample.model, "--steps=9");
  EXPECT_EQ(sample.steps, 5);
  EXPECT_EQ(sample.stop, (std::vector<std::string>{"[a,b]", "", "--json", "a=b\nc"}));
  EXPECT_FALSE(sample.json);
}

TEST(Options, AnEmptyValueDoesNotTakeTheNextArgument) {
  Sample sample;
  sample.parse({"--model=", "--json"});
  EXPECT_EQ(sample.model, "");
  EXPECT_TRUE(sample.json);
}

TEST(Options, IntegersAreStrict) {
  for (const char* bad : {"", "5x", " 5", "5 ", "+5", "0x5", "5.0", "1e2", "5,0", "abc", "-1", "0", "4097",
                          "99999999999999999999", "--jso", "\xd9\xa5"}) {
    expect_refused({"--steps", bad}, {"--steps: got '", "an integer from 1 to 4096"});
  }
  expect_refused({"--steps="}, {"--steps: got ''"});
  expect_refused({"--offset", "-9"}, {"an integer of at least -8"});
  for (const char* beyond : {"9223372036854775808", "99999999999999999999"}) {
    expect_refused({"--offset", beyond}, {beyond, "an integer of at least -8 and at most 9223372036854775807"});
  }
  for (const char* other : {"-99999999999999999999", "x", "", "1.5"}) {
    EXPECT_EQ(reason({"--offset", other}).find("at most"), std::string::npos) << other;
  }
}

TEST(Options, NumbersAreStrict) {
  for (const char* bad :
       {"", "0.5x", " 0.5", "0,5", "0x1p-1", "1e400", "1e-400", "nan", "inf", "-0.1", "1.001", "--", "1.5.2", "½"}) {
    expect_refused({"--learning-rate", bad}, {"--learning-rate: got '", "a number from 0 to 1"});
  }
  for (const char* good : {"0", "1", "0.5", ".5", "5e-1", "1E-3", "1."}) {
    Sample sample;
    EXPECT_EQ(sample.parse({"--learning-rate", good}), OptionTable::Outcome::run) << good;
  }
}

// Powers of ten and of two are different units.
TEST(Options, SizesOfMemoryInEveryUnit) {
  const std::pair<const char*, std::uint64_t> sizes[] = {
      {"3MB", 3'000'000},
      {"3MiB", 3'145'728},
      {"3GB", 3'000'000'000},
      {"3GiB", 3'221'225'472},
      {"3TB", 3'000'000'000'000},
      {"3TiB", 3'298'534'883'328},
      {"79.5 GiB", 85'362'475'008},
      {"0.5MB", 500'000},
      {"1000TB", 1'000'000'000'000'000},
      {"0.000001MB", 1},
  };
  for (const auto& [text, bytes] : sizes) EXPECT_EQ(memory_size("--size", text), bytes) << text;
  for (const char* bad : {"", "3", "GB", "3KB", "3kB", "3gb", "3GB ", "3GBs", "3 GB GB", "-1GB", "0GB", "nanGB",
                          "infGB", "0.0000009MB", "1001TB", "1e300GB", "0x3GB", " 3GB"}) {
    EXPECT_NE(error_of(Exit::usage, [&] { memory_size("--size", bad); }).find("--size: got "), std::string::npos)
        << bad;
  }
}

TEST(Options, ChoicesAreNamed) {
  expect_refused({"--device", "cdua"}, {"--device: got 'cdua'", "one of auto, cuda, cpu", "Did you mean cuda?"});
  expect_refused({"--device", "CUDA0"}, {"one of auto, cuda, cpu"});
  expect_refused({"--device="}, {"--device: got ''"});
}

TEST(Options, UnknownOptionsGetTheNearestName) {
  expect_refused({"--stepz", "4"}, {"unknown option '--stepz'", "did you mean --steps?"});
  expect_refused({"--stpes=4"}, {"unknown option '--stpes':", "did you mean --steps?"});
  expect_refused({"--learning_rate", "4"}, {"did you mean --learning-rate?"});
  expect_refused({"--learn", "4"}, {"did you mean --learning-rate?"});
  expect_refused({"--lea", "4"}, {"did you mean --learning-rate?"});
  expect_refused({"--le", "4"}, {"'--le': see --help"});
  expect_refused({"--xy", "4"}, {"'--xy': see --help"});
  expect_refused({"-steps", "4"}, {"did you mean --steps?"});
  expect_refused({"--versoin"}, {"did you mean --version?"});
  expect_refused({"--wholly-unrelated"}, {"unknown option '--wholly-unrelated': see --help"});
  expect_refused({"-1"}, {"unknown option '-1'"});
  expect_refused({"--\x1b[31mred"}, {"'--\\x1b[31mred'"});
}

TEST(Options, StrayArgumentsAreRefused) {
  for (const char* stray : {"file.bin", "-", "--", ""}) {
    expect_refused({"--json", stray}, {"unexpected argument '" + std::string(stray) + "'"});
  }
  expect_refused({"--", "--json"}, {"unexpected argument"});
}

TEST(Options, OnceMeansOnce) {
  expect_refused({"--steps", "1", "--steps=1"}, {"--steps: given 2 times, expected once"});
  expect_refused({"--json", "--json"}, {"--json: given 2 times"});
  expect_refused({"--model", "a", "--model", "b", "--model", "c"}, {"--model: given 3 times"});
}

TEST(Options, MissingValuesAndFlagsWithOne) {
  expect_refused({"--json", "--steps"}, {"--steps: value missing, expected an integer from 1 to 4096"});
  expect_refused({"--model"}, {"--model: value missing, expected FILE"});
  expect_refused({"--model", "--steps", "1"},
                 {"--model: value missing, --steps is an option. Write --model=--steps if it is the value"});
  expect_refused({"--json=false"}, {"--json: takes no value, got 'false'"});
  expect_refused({"--json="}, {"--json: takes no value"});
}

TEST(Options, EffectiveValuesInTableOrder) {
  Sample sample;
  sample.parse({"--stop", "a\"b", "--stop", "\xff", "--learning-rate=0.1"});
  const std::vector<std::pair<std::string, std::string>> expected = {{"model", "default.bin"},
                                                                     {"device", "auto"},
                                                                     {"steps", "5"},
                                                                     {"offset", "0"},
                                                                     {"learning-rate", "0.1"},
                                                                     {"json", "false"},
                                                                     {"stop", "[\"a\\\"b\",\"\xef\xbf\xbd\"]"}};
  EXPECT_EQ(sample.table.effective(), expected);
}

TEST(Options, HelpShowsTheTable) {
  const Sample sample;
  const std::string help = sample.table.help();
  for (const char* part :
       {"Shows options.", "Usage: sample", "\nInput:\n", "\nNumbers:\n", "--model FILE", "default default.bin",
        "--device auto|cuda|cpu", "from 1 to 4096; default 5", "from 0 to 1; default 0.1", "--json ",
        "may be given several times", "--help", "--version", "Exit codes: 0 ok."}) {
    EXPECT_NE(help.find(part), std::string::npos) << part << " is not in\n" << help;
  }
  EXPECT_NE(sample.table.help(true).find("of at least -8"), std::string::npos);
  EXPECT_EQ(help.find('\033'), std::string::npos);
  for (std::size_t begin = 0; begin < help.size();) {
    const std::size_t end = help.find('\n', begin);
    EXPECT_LE(end - begin, 80u) << help.substr(begin, end - begin);
    begin = end + 1;
  }
}

TEST(Options, ShortNamesAreTheLongOnes) {
  Sample sample;
  sample.parse({"-m", "x=y", "-n16", "-j"});
  EXPECT_EQ(sample.model, "x=y");
  EXPECT_EQ(sample.steps, 16);
  EXPECT_TRUE(sample.json);
  expect_refused({"-n"}, {"--steps: value missing"});
  expect_refused({"-n", "1", "--steps=2"}, {"--steps: given 2 times"});
  expect_refused({"-jx"}, {"--json: takes no value", "'x'"});
  expect_refused({"-x"}, {"unknown option '-x'"});
}

TEST(Options, HelpAllShowsWhatHelpLeavesOut) {
  const Sample sample;
  EXPECT_EQ(sample.table.help().find("--offset"), std::string::npos);
  EXPECT_NE(sample.table.help().find("--help-all"), std::string::npos);
  EXPECT_NE(sample.table.help(true).find("--offset"), std::string::npos);
  EXPECT_NE(sample.table.help().find("-m, --model FILE"), std::string::npos);
  Sample other;
  testing::internal::CaptureStdout();
  EXPECT_EQ(other.parse({"--help-all"}), OptionTable::Outcome::exit_ok);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), sample.table.help(true));
}

TEST(Options, HelpAndVersionGoToStdoutAndWin) {
  for (const char* option : {"--help", "-h", "--version", "-V"}) {
    Sample sample;
    testing::internal::CaptureStdout();
    EXPECT_EQ(sample.parse({"--steps", "wrong", option, "--unknown"}), OptionTable::Outcome::exit_ok);
    const std::string printed = testing::internal::GetCapturedStdout();
    EXPECT_EQ(printed,
              std::string("--version -V").find(option) != std::string::npos ? "sample 1.2.3\n" : sample.table.help());
  }
}

TEST(Options, WithoutAVersionThereIsNoSuchOption) {
  OptionTable table("sample", "Shows options.");
  const char* arguments[] = {"sample", "--version"};
  EXPECT_THROW(table.parse(2, arguments), Error);
  EXPECT_EQ(table.help().find("--version"), std::string::npos);
}

// What run_program makes of a body: its exit code, and what it said on stderr.
std::pair<int, std::string> outcome(const std::function<Exit()>& body) {
  testing::internal::CaptureStderr();
  const int code = run_program(body);
  return {code, testing::internal::GetCapturedStderr()};
}

TEST(RunProgram, TurnsFailuresIntoExitCodes) {
  using Outcome = std::pair<int, std::string>;
  EXPECT_EQ(outcome([] { return Exit::ok; }), (Outcome{0, ""}));
  EXPECT_EQ(outcome([] { return Exit::interrupted; }), (Outcome{130, ""}));
  EXPECT_EQ(outcome([]() -> Exit { fail(Exit::bad_file, "no such thing"); }), (Outcome{3, "error: no such thing\n"}));
  EXPECT_EQ(outcome([]() -> Exit { throw std::bad_alloc(); }), (Outcome{5, "error: out of memory\n"}));
  EXPECT_EQ(outcome([]() -> Exit { throw std::system_error(EAGAIN, std::generic_category(), "thread"); }),
            (Outcome{5,
                     "error: the system refuses a resource: 'thread: Resource temporarily unavailable'. See ulimit -u "
                     "and ulimit -v\n"}));
  for (const int number : {SIGPIPE, SIGXFSZ}) EXPECT_TRUE(is_ignored(number)) << "it is a write error instead";
  const Outcome bug = outcome([]() -> Exit { throw std::logic_error("odd\x1b"); });
  EXPECT_EQ(bug.first, 1);
  EXPECT_EQ(bug.second, "error: internal error: 'odd\\x1b'. This is a bug in weft, please report it\n");
  const Outcome own = outcome([]() -> Exit { fail(Exit::internal, "no tensor x"); });
  EXPECT_EQ(own.first, 1);
  EXPECT_EQ(own.second, "error: internal error: no tensor x. This is a bug in weft, please report it\n");
}

// Runs in a process of its own, whose stdout is `path`.
int run_with_stdout(const char* path, bool buffered) {
  if (std::freopen(path, "w", stdout) == nullptr) return 99;
  return run_program([buffered] {
    if (buffered) {
      std::fputs("a result", stdout);  // leaves the buffer only at the end of the program
    } else {
      write_stdout("a result");
    }
    return Exit::ok;
  });
}

// What the program answers to one argument.
template <typename Parser>
std::string refusal_of(const std::string& argument) {
  const char* const arguments[] = {"program", argument.c_str(), "7"};
  return error_of(Exit::usage, [&] { Parser("1").parse(3, arguments); });
}

// Each row of the table is of use in one of the programs, and none stands in the way of an option or of a better row.
TEST(OptionAliases, NamesOfOtherToolsAreUnderstood) {
  std::set<std::pair<std::string_view, std::string_view>> seen;
  for (const auto& [theirs, ours] : option_aliases()) {
    const std::string advice = "unknown option " + escaped(theirs) + ": did you mean --" + std::string(ours) + "?";
    const std::string train = refusal_of<TrainOptionParser>(std::string(theirs));
    const std::string infer = refusal_of<InferOptionParser>(std::string(theirs));
    EXPECT_TRUE(train == advice || infer == advice) << advice << "\n" << train << "\n" << infer;
    EXPECT_TRUE(seen.insert({theirs, ours}).second) << theirs << " is twice in the table";
  }
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"--batch-size", "--micro-batch", "--max-running"},
      {"--batch_size=8", "--micro-batch", "--max-running"},
      {"--learning-rate", "--lr", nullptr},
      {"--learning_rate", "--lr", nullptr},
      {"--num_train_epochs", "--epochs", nullptr},
      {"--ctx-size", "--seq-len", "--context"},
      {"--n-predict", nullptr, "--max-tokens"},
      {"--max_new_tokens", nullptr, "--max-tokens"},
      {"--port", nullptr, "--serve"},
      {"--host", nullptr, "--serve"},
      {"--temp", "--temperature", "--temperature"},
      {"-c", nullptr, "--context"},
      {"-n", "--steps", nullptr},
      {"-np", nullptr, "--max-running"},
      {"-ngl", "--device", "--device"},
      {"-t", "--seq-len", "--threads"},
      {"--max-grad-norm", "--grad-clip", nullptr}};
  for (const auto& [argument, train, infer] : cases) {
    if (train != nullptr) {
      expect_contains(refusal_of<TrainOptionParser>(argument), format("did you mean %s?", train));
    }
    if (infer != nullptr) expect_contains(refusal_of<InferOptionParser>(argument), format("did you mean %s?", infer));
  }
}

// What train_llama makes of options that are separated by spaces, started by itself or as one of `launched` ranks.
TrainSettings train_settings(const std::string& options, std::int64_t launched = 1) {
  std::istringstream text("train_llama " + options);
  std::vector<std::string> words;
  for (std::string word; text >> word;) words.push_back(word);
  std::vector<const char*> arguments;
  for (const std::string& word : words) arguments.push_back(word.c_str());
  return parse_train_options(static_cast<int>(arguments.size()), arguments.data(), "1", launched).value();
}

// Warm-up and decay fit into the run, to the step.
TEST(TrainOptionParser, TheScheduleFitsIntoTheRun) {
  const auto reason = [](const std::string& options) -> std::string {
    try {
      train_settings("--config tiny --print-config " + options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::usage);
      return std::string(error.what());
    }
    return "";
  };
  const std::pair<const char*, const char*> cases[] = {
      {"--steps 10", ""},
      {"--steps 10 --warmup-steps 10", ""},
      {"--steps 10 --warmup-steps 11", "--warmup-steps: got 11, expected at most --steps 10"},
      {"--steps 10 --schedule wsd", ""},
      {"--steps 100 --schedule wsd --warmup-steps 80", ""},
      {"--steps 100 --schedule wsd --warmup-steps 81", "81 warm-up (--warmup-steps) and 20 decay steps"},
      {"--steps 400 --schedule wsd --wsd-decay-fraction 0.75", ""},
      {"--steps 400 --schedule wsd --wsd-decay-fraction 0.7525", "100 warm-up (--warmup-steps) and 301 decay steps"},
      {"--steps 10 --schedule wsd --warmup-steps 4 --wsd-decay-fraction 0.6", ""},
      {"--steps 10 --schedule wsd --warmup-steps 5 --wsd-decay-fraction 0.6",
       "5 warm-up (--warmup-steps) and 6 decay steps"},
      {"--steps 10 --schedule cosine --warmup-steps 5 --wsd-decay-fraction 0.6", ""}};
  for (const auto& [options, words] : cases) {
    const std::string message = reason(options);
    EXPECT_EQ(message.empty(), *words == '\0') << options << ": " << message;
    expect_contains(message, words);
  }
}

// Defaults that follow other options, and that the user's own value replaces, also where it is the usual default.
// Each window is seen at least as often as --epochs says, and the default warm-up is that of so many steps.
TEST(TrainOptionParser, StepsFollowFromEpochs) {
  const auto parsed = [](const std::string& more) {
    std::vector<std::string> words = {"train_llama", "--config=tiny",   "--train=x",
                                      "--out=y",     "--micro-batch=2", "--seq-len=8"};
    std::istringstream options(more);
    for (std::string word; options >> word;) words.push_back(word);
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    return *parse_train_options(static_cast<int>(argv.size()), argv.data(), "test");
  };
  for (const auto& [options, windows, steps, warmup] : {std::tuple("--epochs 1", 10u, 5, 1),
                                                        {"--epochs 1", 11u, 6, 1},
                                                        {"--epochs 3", 11u, 17, 4},
                                                        {"--epochs 0.5", 10u, 3, 0},
                                                        {"--epochs 1e-9", 10u, 1, 0},
                                                        {"--epochs 2 --batch-tokens 64", 100u, 25, 6},
                                                        {"--epochs 100", 100u, 5000, 200},
                                                        {"--epochs 100 --warmup-steps 7", 100u, 5000, 7}}) {
    TrainSettings settings = parsed(options);
    settings.set_steps_of_epochs(windows);
    EXPECT_EQ(settings.steps, steps) << options;
    EXPECT_EQ(settings.warmup_steps, warmup) << options;
    const std::map<std::string, std::string> effective(settings.effective.begin(), settings.effective.end());
    EXPECT_EQ(effective.at("steps"), std::to_string(steps));
    EXPECT_EQ(effective.at("warmup-steps"), std::to_string(warmup));
  }
  TrainSettings long_warmup = parsed("--epochs 1 --warmup-steps 500");
  expect_contains(error_of(Exit::usage, [&] { long_warmup.set_steps_of_epochs(100); }),
                  "--warmup-steps: got 500, expected at most the 50 steps of --epochs");
  TrainSettings endless = parsed("--epochs 1000000");
  expect_contains(error_of(Exit::usage, [&] { endless.set_steps_of_epochs(std::uint64_t{1} << 40); }),
                  "--epochs: got 1e+06");
  expect_contains(error_of(Exit::usage, [&] { parsed("--epochs 1 --steps 3"); }), "--epochs and --steps: only one");
  expect_contains(error_of(Exit::usage, [&] { train_settings("--config tiny --print-config --epochs 1"); }),
                  "--epochs: only for training on --train");
}

TEST(TrainOptionParser, DefaultsThatFollowOtherOptionsYieldToWhatIsGiven) {
  const std::string eval = "--eval --model m --val v", train = "--config tiny --train t --out o";
  const struct {
    std::string options;
    std::int64_t launched;
    std::string name, value;
  } cases[] = {
      {eval, 1, "val-batches", "0"},
      {eval + " --val-batches 3", 1, "val-batches", "3"},
      {eval + " --val-batches 8", 1, "val-batches", "8"},
      {eval + " --val-batches 0", 1, "val-batches", "0"},
      {eval + " --val-batches 3", 2, "val-batches", "3"},
      {train, 1, "val-batches", "8"},
      {train + " --val-batches 3", 1, "val-batches", "3"},
      {train + " --micro-batch 2 --seq-len 16", 1, "batch-tokens", "32"},
      {train + " --micro-batch 2 --seq-len 16", 3, "batch-tokens", "96"},
      {train + " --micro-batch 2 --seq-len 16 --virtual-ranks 4", 2, "batch-tokens", "128"},
      {train + " --micro-batch 2 --seq-len 16 --batch-tokens 192", 3, "batch-tokens", "192"},
      {train, 1, "virtual-ranks", "1"},
      {train, 3, "virtual-ranks", "3"},
      {train + " --gpus 3", 1, "virtual-ranks", "3"},
      {train + " --virtual-ranks 6", 3, "virtual-ranks", "6"},
      {train + " --virtual-ranks 6", 1, "virtual-ranks", "6"},
      {train, 1, "warmup-steps", "100"},
      {train + " --steps 1", 1, "warmup-steps", "0"},
      {train + " --steps 799", 1, "warmup-steps", "199"},
      {train + " --steps 800", 1, "warmup-steps", "200"},
      {train + " --steps 80000", 1, "warmup-steps", "200"},
      {train + " --steps 400 --warmup-steps 200", 1, "warmup-steps", "200"},
      {train, 2, "sample-every", "100"},
      {train + " --shard parameters", 1, "sample-every", "100"},
      {train + " --shard parameters", 2, "sample-every", "0"},
      {train + " --shard parameters --sample-every 7", 1, "sample-every", "7"},
      {train + " --shard gradients --sample-every 7", 2, "sample-every", "7"},
      {train + " --shard parameters --sample-every 0", 2, "sample-every", "0"},
      {train, 1, "device", "auto"},
      {train + " --gpus 1", 1, "device", "cuda"},
  };
  for (const auto& [options, launched, name, value] : cases) {
    const auto effective = train_settings(options, launched).effective;
    const std::pair<std::string, std::string> expected{name, value};
    EXPECT_EQ(std::count(effective.begin(), effective.end(), expected), 1) << name << " of " << options;
  }
}

// Those that share the work, and those of them that this process starts.
TEST(TrainOptionParser, WhoStartsTheRanks) {
  const struct {
    std::string options;
    std::int64_t launched, ranks, starts;
  } cases[] = {{"", 1, 1, 0},
               {"", 3, 3, 0},
               {"--gpus 1", 1, 1, 0},
               {"--gpus 3", 1, 3, 3},
               {"--gpus 3", 3, 3, 0},
               {"--gpus 3 --dry-run", 1, 3, 0},
               {"--gpus 3 --print-config", 1, 3, 0},
               {"--gpus 3 --bench", 1, 3, 3},
               {"--debug-inject ranks@cpu=2", 1, 2, 2}};
  for (const auto& [options, launched, ranks, starts] : cases) {
    std::string run =
        options.find("--bench") == std::string::npos ? "--config tiny --train t --out o " : "--config tiny ";
    const TrainSettings settings = train_settings(run.append(options), launched);
    EXPECT_EQ(settings.ranks, ranks) << options << " on " << launched;
    EXPECT_EQ(settings.start_ranks, starts) << options << " on " << launched;
  }
}

// Each option of a step reaches its field of the model's options, and no other.
TEST(TrainOptionParser, WhatWasAskedForReachesTheModel) {
  const std::string train = "--config tiny --train t --out o --micro-batch 2 --seq-len 16 ";
  const auto fields = [](const TrainOptions& o) {
    return format("%d %d %d %d %g %d %d %d %d %d %d", static_cast<int>(o.micro_batch), static_cast<int>(o.seq_len),
                  static_cast<int>(o.precision), static_cast<int>(o.recompute), static_cast<double>(o.dropout),
                  static_cast<int>(o.seed), static_cast<int>(o.moments), static_cast<int>(o.virtual_ranks),
                  static_cast<int>(o.rank_micro_batches), o.accumulates, o.graph);
  };
  TrainOptions plain;
  plain.micro_batch = 2;
  plain.seq_len = 16;
  plain.seed = 1;
  plain.accumulates = false;
  const struct {
    const char* options;
    std::function<void(TrainOptions&)> change;
  } cases[] = {
      {"", [](TrainOptions&) {}},
      {"--precision fp32", [](TrainOptions&) {}},
      {"--precision bf16", [](TrainOptions& o) { o.precision = Precision::bf16; }},
      {"--precision fp8", [](TrainOptions& o) { o.precision = Precision::fp8; }},
      {"--recompute none", [](TrainOptions&) {}},
      {"--recompute norm", [](TrainOptions& o) { o.recompute = Recompute::norm; }},
      {"--recompute block", [](TrainOptions& o) { o.recompute = Recompute::block; }},
      {"--dropout 0.25", [](TrainOptions& o) { o.dropout = 0.25f; }},
      {"--seed 7", [](TrainOptions& o) { o.seed = 7; }},
      {"--moments fp32", [](TrainOptions&) {}},
      {"--moments bf16", [](TrainOptions& o) { o.moments = Precision::bf16; }},
      {"--no-graph", [](TrainOptions& o) { o.graph = false; }},
      {"--batch-tokens 32", [](TrainOptions&) {}},
      {"--batch-tokens 64", [](TrainOptions& o) { o.accumulates = true, o.rank_micro_batches = 2; }},
      {"--batch-tokens 96", [](TrainOptions& o) { o.accumulates = true, o.rank_micro_batches = 3; }},
      {"--virtual-ranks 2", [](TrainOptions& o) { o.accumulates = true, o.virtual_ranks = 2; }},
      {"--virtual-ranks 2 --batch-tokens 192",
       [](TrainOptions& o) { o.accumulates = true, o.virtual_ranks = 2, o.rank_micro_batches = 3; }},
  };
  for (const auto& [options, change] : cases) {
    TrainOptions expected = plain;
    change(expected);
    EXPECT_EQ(fields(train_settings(train + options).model_options()), fields(expected)) << options;
  }
}

// The message of the usage error that these options of train_llama must give; "" if they are accepted.
std::string train_unsupported_reason(const std::string& options, std::int64_t launched) {
  try {
    train_settings(options, launched);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::usage) << options;
    return error.what();
  }
  return "";
}

// Each check of options that involve one another, from both sides of where it begins. No words: accepted.
TEST(TrainOptionParser, EachCheckRefusesWhatItSaysAndNothingElse) {
  const std::string train = "--config tiny --train t --out o ", model = "--model m --train t --out o ";
  const std::string small = train + "--micro-batch 2 --seq-len 16 ", one = train + "--micro-batch 1 --seq-len 1 ";
  const struct {
    std::string options;
    std::int64_t launched;
    const char* words;
  } cases[] = {
      // The model.
      {"--train t --out o", 1, "--config or --model: one of the two is needed"},
      {train + "--model m", 1, "--config and --model: only one of the two"},
      {train, 1, ""},
      {model, 1, ""},
      {"--config huge --print-config", 1, "'huge'"},
      {"--config config.json --print-config", 1, ""},
      {"--config json --print-config", 1, "'json'"},
      {"--config x.jsonl --print-config", 1, "'x.jsonl'"},
      {"--config ./huge --print-config", 1, ""},
      {"--config huge/shape --print-config", 1, ""},
      {train + "--vocab-size 99", 1, ""},
      {model + "--vocab-size 99", 1, "--vocab-size: only with --config"},
      {model + "--vocab-size 0", 1, ""},
      {model + "--lora-r 4 --precision fp8", 1, ""},
      {"--config tiny:int4 --bench --lora-r 4", 1, ""},
      {"--config tiny:int5 --bench --lora-r 4", 1, "int5"},
      {"--config tiny:int4 --bench", 1, "'tiny:int4'"},
      // Ranks.
      {train + "--gpus 2", 1, ""},
      {train + "--gpus 2 --device cuda", 1, ""},
      {train + "--gpus 1 --device cpu", 1, "--gpus: got 1, but --device cpu uses no GPU"},
      {train + "--gpus 0 --device cpu", 1, ""},
      {train + "--gpus 2", 2, ""},
      {train + "--gpus 2", 3, "--gpus: got 2, but a launcher has started 3 ranks"},
      {train + "--gpus 1", 2, "--gpus: got 1, but a launcher has started 2 ranks"},
      {train + "--gpus 4", 2, "--gpus: got 4, but a launcher has started 2 ranks"},
      {train + "--virtual-ranks 3", 1, ""},
      {train + "--virtual-ranks 3", 3, ""},
      {train + "--virtual-ranks 6", 3, ""},
      {train + "--virtual-ranks 4", 3, "--virtual-ranks: got 4, expected a multiple of the 3 ranks"},
      {train + "--virtual-ranks 2", 4, "--virtual-ranks: got 2, expected a multiple of the 4 ranks"},
      {train + "--virtual-ranks 3 --gpus 2", 1, "--virtual-ranks: got 3, expected a multiple of the 2 ranks"},
      {"--model m --compare c", 1, ""},
      {"--model m --compare c", 2, "--compare: needs one rank"},
      {"--config tiny --bench --operators", 1, ""},
      {"--config tiny --bench --operators", 2, "--operators: needs one rank"},
      {"--config tiny --bench", 2, ""},
      {train + "--shard parameters --sample-every 5", 1, ""},
      {train + "--shard parameters --sample-every 5", 2, "--sample-every: got 5, but with --shard parameters"},
      {train + "--shard parameters --sample-every 0", 2, ""},
      {train + "--shard parameters", 2, ""},
      {train + "--shard gradients --sample-every 5", 2, ""},
      // The batch.
      {small + "--batch-tokens 96", 1, ""},
      {small + "--batch-tokens 95", 1, "--batch-tokens: got 95, expected a multiple of --micro-batch x --seq-len = 32"},
      {small + "--batch-tokens 16", 1, "--batch-tokens: got 16, expected a multiple of --micro-batch x --seq-len = 32"},
      {small + "--batch-tokens 96", 3, ""},
      {small + "--batch-tokens 96", 2, "--micro-batch x --seq-len = 32, for each of the 2 ranks"},
      {small + "--batch-tokens 96 --virtual-ranks 3", 1, ""},
      {small + "--batch-tokens 96 --virtual-ranks 2", 1, "--virtual-ranks: got 2, expected a divisor of the 3 micro"},
      {small + "--batch-tokens 192 --virtual-ranks 4", 2, "--virtual-ranks: got 4, expected a divisor of the 6 micro"},
      {one + "--steps 1000000000000 --batch-tokens 1000000", 1, ""},
      {one + "--steps 1000000000000 --batch-tokens 1000001", 1, "are more than 1000000000000000000 tokens"},
      {train + "--precision fp8 --virtual-ranks 6", 2, ""},
      {train + "--precision bf16 --virtual-ranks 2", 2, ""},
      {train + "--precision fp32 --virtual-ranks 2", 1, ""},
      // What the program is to do, and what that needs.
      {"--config tiny --compare c", 1, "--compare: needs --model"},
      {"--config tiny --eval --val v", 1, "--eval: needs --model"},
      {"--model m --eval", 1, "--eval: needs --val"},
      {"--model m --eval --val v", 1, ""},
      {"--config tiny --bench --json", 1, ""},
      {"--model m --eval --val v --json", 1, ""},
      {train + "--json", 1, "--json: only for --bench and --eval"},
      {train + "--dry-run --json", 1, "--json: only for"},
      {"--model m --compare c --json", 1, "--json: only for"},
      {"--config tiny --print-config --json", 1, "--json: only for"},
      {train + "--operators", 1, "--operators: only for --bench"},
      {"--model m --eval --val v --operators", 1, "--operators: only for --bench"},
      {train + "--keep-best", 1, "--keep-best: needs --val"},
      {train + "--keep-best --val v", 1, ""},
      {train + "--gpu-memory 80GB", 1, "--gpu-memory: only with --dry-run"},
      {"--config tiny --print-config --gpu-memory 80GB", 1, "--gpu-memory: only with --dry-run"},
      {train + "--dry-run --gpu-memory 80GB", 1, ""},
      {train + "--dry-run --gpu-memory 80GB --device cuda", 1, ""},
      {train + "--dry-run --gpu-memory 80GB --device cpu", 1, "--gpu-memory: not with --device cpu"},
      {train + "--dry-run --gpu-memory 80", 1, "--gpu-memory: got '80'"},
      {"--config tiny --out o", 1, "--train: needed"},
      {"--config tiny --dry-run", 1, "--train: needed"},
      {"--config tiny --train t", 1, "--out: needed"},
      {"--config tiny --train t --dry-run", 1, ""},
      {"--config tiny --print-config", 1, ""},
      {"--config tiny --bench", 1, ""},
  };
  for (const auto& [options, launched, words] : cases) {
    const std::string message = train_unsupported_reason(options, launched);
    EXPECT_EQ(message.empty(), *words == '\0') << options << " on " << launched << ": " << message;
    expect_contains(message, words);
  }
  EXPECT_EQ(train_settings(train + "--dry-run --gpu-memory 3GiB").gpu_memory_bytes, std::uint64_t{3} << 30);
  EXPECT_EQ(train_settings(train + "--dry-run").gpu_memory_bytes, 0u);
}

// Each task beside training, with the options of training that have no effect on it, and with others.
TEST(TrainOptionParser, OtherTasksRefuseWhatHasNoEffectOnThem) {
  using Words = std::vector<std::string>;
  const auto and_more = [](Words words, const std::vector<Words>& more) {
    for (const Words& some : more) words.insert(words.end(), some.begin(), some.end());
    return words;
  };
  const Words of_training = {"--steps 3",
                             "--lr 1",
                             "--min-lr-ratio 0",
                             "--warmup-steps 0",
                             "--schedule wsd",
                             "--weight-decay 0",
                             "--beta1 0",
                             "--beta2 0",
                             "--eps 1",
                             "--out o",
                             "--resume never",
                             "--save-every 1",
                             "--keep 3",
                             "--val-every 1",
                             "--sample-every 1",
                             "--sample-prompt x",
                             "--sample-tokens 3",
                             "--temperature 1",
                             "--max-minutes 3",
                             "--on-nan skip",
                             "--wsd-decay-fraction 0.1"};
  const Words of_muon = {"--optimizer muon --muon-lr 1", "--optimizer muon --muon-momentum 0"};
  const Words of_passes = {"--train t", "--grad-clip 1", "--dropout 0.5"};
  const Words of_measurement = {"--val v", "--val-batches 1"}, of_rows = {"--document-mask", "--no-pack"};
  const Words of_batches = {"--micro-batch 2", "--seq-len 16", "--batch-tokens 4096", "--seed 3"};
  struct Task {
    std::string option;
    Words without, with;
  };
  const Task tasks[] = {
      {"--bench", and_more(of_training, {of_muon, of_measurement, of_rows, {"--epochs 2", "--keep-best"}}),
       and_more({"--recompute block"}, {of_passes, of_batches})},
      {"--compare c",
       and_more(of_training, {of_measurement, of_rows, of_passes, of_batches, {"--epochs 2"}}),
       {"--precision fp32", "--recompute block", "--threads 1"}},
      {"--eval --val v", and_more(of_training, {of_muon, of_passes, {"--epochs 2", "--keep-best"}}),
       and_more({"--val-batches 3"}, {of_rows, of_batches})},
      {"--train t --dry-run", {}, and_more(of_training, {of_muon, of_measurement, of_rows, of_batches})},
      {"--print-config", {}, and_more(of_training, {of_muon, of_measurement, of_rows, of_passes, of_batches})}};
  for (const Task& task : tasks) {
    const std::string words = "--model m " + task.option + " ";
    EXPECT_EQ(train_unsupported_reason(words, 1), "");
    for (const std::string& option : task.without) {
      const std::string flag = option.substr(option.rfind("--"));
      expect_contains(train_unsupported_reason(words + option, 1), flag.substr(0, flag.find(' ')) + ": not for --");
    }
    for (const std::string& option : task.with) EXPECT_EQ(train_unsupported_reason(words + option, 1), "");
    for (const Task& other : tasks) {
      if (other.option == task.option) continue;
      expect_contains(train_unsupported_reason(words + other.option, 1), "only one of them at a time");
    }
  }
  expect_contains(train_unsupported_reason("--model m --bench --out o --lr 1", 1), "--lr, --out: not for --bench, on");
}

// What is missing, or given with nothing in it, or does not go with drafts and random models.
TEST(InferOptionParser, ChecksWhatIsMissingEmptyOrDrafted) {
  using Words = std::vector<std::string>;
  const auto reason = [](const Words& words) -> std::string {
    std::vector<const char*> arguments = {"infer_pythia"};
    for (const std::string& word : words) arguments.push_back(word.c_str());
    try {
      parse_infer_options(static_cast<int>(arguments.size()), arguments.data(), "1.2.3");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::usage);
      return error.what();
    }
    return "";
  };
  const auto joined = [](Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const Words tasks[] = {{"--bench"},         {"--bench-batch=1"}, {"--prompt=y"},
                         {"--prompt-file=y"}, {"--prompt-ids=1"},  {"--batch=y", "--output=-"},
                         {"--interactive"},   {"--serve=a:1"},     {"--perplexity=y"},
                         {"--compare=y"}};
  for (const Words& task : tasks) {
    EXPECT_EQ(reason(joined({"-mx"}, task)), "");
    expect_contains(reason(task), "--model: missing");
    EXPECT_EQ(reason(joined({"--random-model=tiny"}, task)).empty(), task[0].starts_with("--bench")) << task[0];
    expect_contains(reason(joined({"--random-model=tiny", "-mx"}, task)), "--random-model: only for");
    if (task.size() > 1) continue;
    expect_contains(reason(joined({"-mx", "--output=y"}, task)), "--output: only for --batch");
  }
  expect_contains(reason({"-mx", "--batch=y"}), "--output: missing");

  // What is empty names nothing; an empty prompt is one.
  EXPECT_EQ(reason({"-mx", "--prompt="}), "");
  const std::pair<const char*, Words> named[] = {{"model", {"-py"}},
                                                 {"prompt-file", {"-mx"}},
                                                 {"prompt-ids", {"-mx"}},
                                                 {"perplexity", {"-mx"}},
                                                 {"compare", {"-mx"}},
                                                 {"bench-batch", {"-mx"}},
                                                 {"serve", {"-mx"}},
                                                 {"batch", {"-mx", "--output=y"}},
                                                 {"output", {"-mx", "--batch=y"}},
                                                 {"against", {"-mx", "--perplexity=y"}},
                                                 {"draft", {"-mx", "-py"}},
                                                 {"served-name", {"-mx", "--serve=a:1"}},
                                                 {"api-key-file", {"-mx", "--serve=a:1"}}};
  for (const auto& [name, words] : named) {
    const std::string option = std::string("--") + name;
    EXPECT_EQ(reason(joined(words, {option + "=y"})), "");
    expect_contains(reason(joined(words, {option + "="})), option + ": got '', expected a value");
  }

  // Drafts: two sources, what they do not speed up, and a fault that needs one.
  EXPECT_EQ(reason({"-mx", "-py", "--draft=x", "--lookup=0"}), "");
  for (const char* layer : {"--bench-layer", "--bench-timeline"}) {
    for (const char* source : {"--lookup=1", "--draft=x"}) {
      expect_contains(reason({"-mx", "--bench", layer, source}), "does not go with --bench-layer and --bench-timeline");
    }
  }
  for (const char* source : {"--lookup=1", "--draft=x"}) {
    EXPECT_EQ(reason({"-mx", "-py", source, "--debug-inject=accept=0.5"}), "");
  }
  expect_contains(reason({"-mx", "-py", "--lookup=0", "--debug-inject=accept=0.5"}), "needs --lookup or --draft");
  EXPECT_EQ(reason({"--random-model=tiny", "--bench", "--draft=pythia-14m"}), "");
  expect_contains(reason({"--random-model=tiny", "--bench", "--draft=x"}), "--draft: got 'x', expected one of");
}

// Each condition of an option that does not go with others, alone: what it needs, and each that it excludes.
TEST(InferOptionParser, ChecksEachOptionOfABenchmark) {
  const auto accepted = [](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "infer_pythia");
    try {
      return parse_infer_options(static_cast<int>(arguments.size()), arguments.data(), "1.2.3").has_value();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::usage);
      return false;
    }
  };
  EXPECT_TRUE(accepted({"-mx", "--bench", "--bench-layer", "--json"}));
  EXPECT_FALSE(accepted({"-mx", "--bench", "--bench-layer", "--bench-contexts=8"}));
  EXPECT_FALSE(accepted({"-mx", "--bench", "--bench-layer", "--max-tokens=8"}));
  EXPECT_FALSE(accepted({"--random-model=pythia-14m", "--adapter=x", "--bench"}));
  EXPECT_FALSE(accepted({"-mx", "--bench", "--bench-timeline", "--bench-layer"}));
  EXPECT_FALSE(accepted({"-mx", "--bench", "--bench-timeline", "--json"}));
  EXPECT_TRUE(accepted({"--random-model=pythia-14m", "--bench"}));
  EXPECT_FALSE(accepted({"--random-model=pythia-15m", "--bench"}));
  EXPECT_TRUE(accepted({"--random-model=pythia-14m", "--bench-batch=1,4", "--bench-prompt=7", "--json"}));
  EXPECT_TRUE(accepted({"-mx", "--bench-batch=1", "--kv-memory=1GB", "--top-k=3"}));
}

// Each option that is for some tasks only, with every task: alone it is accepted by these and refused by name by the others.
TEST(InferOptionParser, EachOptionIsForItsTasks) {
  const std::map<std::string, std::vector<std::string>> tasks = {{"prompt", {"--prompt=y"}},
                                                                 {"prompt-file", {"--prompt-file=y"}},
                                                                 {"prompt-ids", {"--prompt-ids=1"}},
                                                                 {"interactive", {"--interactive"}},
                                                                 {"batch", {"--batch=y", "--output=z"}},
                                                                 {"serve", {"--serve=a:1"}},
                                                                 {"perplexity", {"--perplexity=y"}},
                                                                 {"bench", {"--bench"}},
                                                                 {"bench-batch", {"--bench-batch=1"}},
                                                                 {"compare", {"--compare=y"}},
                                                                 {"describe", {"--describe=y"}}};
  InferOptionParser parser("1");
  const auto outcome = [&](std::vector<std::string> words) -> std::string {
    if (words.front() != "--describe=y") words.insert(words.begin(), "-mx");
    words.insert(words.begin(), "infer_pythia");
    std::vector<const char*> arguments;
    for (const std::string& word : words) arguments.push_back(word.c_str());
    try {
      parser.parse(static_cast<int>(arguments.size()), arguments.data());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::usage);
      return error.what();
    }
    return "accepted";
  };
  const auto all_but = [&](const std::set<std::string>& excluded) {
    std::set<std::string> names;
    for (const auto& [name, words] : tasks) {
      if (!excluded.contains(name)) names.insert(name);
    }
    return names;
  };
  std::vector<std::pair<std::string, std::set<std::string>>> rules = {
      {"--max-running=3", {"batch", "serve"}},
      {"--kv-memory=1GB", {"batch", "serve", "bench-batch"}},
      {"--prompt-rows=3", {"batch", "serve", "bench-batch"}},
      {"--context=3", all_but({"batch", "serve", "bench-batch", "describe"})},
      {"--json", all_but({"interactive", "batch", "serve", "compare"})},
      {"--dtype=fp16", all_but({"compare", "describe"})},
      {"--dtype=bf16", all_but({"compare", "describe"})},
      {"--dtype=fp32", all_but({"describe"})},
      {"--dtype=auto", all_but({"describe"})},
      {"--device=cpu", all_but({})},
      {"--threads=1", all_but({})},
      {"--special", all_but({"bench", "bench-batch", "compare", "describe"})},
      {"--stride=3", {"perplexity"}},
      {"--against=w", {"perplexity"}},
      {"--stats", {"prompt", "prompt-file", "prompt-ids", "interactive"}},
      {"--print-special", {"prompt", "prompt-file", "prompt-ids", "interactive"}},
      {"--no-echo", {"prompt", "prompt-file", "prompt-ids"}},
      {"--bench-contexts=3", {"bench"}},
      {"--bench-layer", {"bench"}},
      {"--bench-timeline", {"bench"}},
      {"--bench-prompt=3", {"bench-batch"}},
      {"--lookup=3", all_but({"perplexity", "compare", "bench-batch", "describe"})},
      {"--draft=w", all_but({"perplexity", "compare", "bench-batch", "describe"})}};
  for (const char* option : {"--served-name=w", "--api-key-file=w", "--allowed-host=w", "--log-requests",
                             "--max-queue=3", "--max-connections=3", "--max-body=3", "--request-seconds=3",
                             "--read-seconds=3", "--idle-seconds=3", "--write-seconds=3", "--drain-seconds=3"}) {
    rules.push_back({option, {"serve"}});
  }
  for (const char* option : {"--adapter=w", "--decode=graph", "--kv-dtype=auto", "--activations=auto"}) {
    rules.push_back({option, all_but({"describe"})});
  }
  for (const char* option : {"--max-tokens=3", "--seed=3"}) {
    rules.push_back({option, all_but({"serve", "perplexity", "compare", "describe"})});
  }
  for (const char* option : {"--temperature=1", "--top-k=3", "--top-p=0.5", "--min-p=0.5"}) {
    rules.push_back({option, all_but({"serve", "perplexity", "compare", "describe", "bench"})});
  }
  for (const char* option :
       {"--stop=w", "--ignore-eos", "--presence-penalty=1", "--frequency-penalty=1", "--repetition-penalty=2",
        "--logit-bias={}", "--bad-words=w", "--min-tokens=3", "--stop-token-ids=1"}) {
    rules.push_back({option, all_but({"serve", "perplexity", "compare", "describe", "bench", "bench-batch"})});
  }
  for (const auto& [option, wanted] : rules) {
    for (const auto& [task, words] : tasks) {
      std::vector<std::string> with = words;
      with.push_back(option);
      const std::string got = outcome(with);
      EXPECT_EQ(got == "accepted", wanted.contains(task)) << option << " with --" << task << ": " << got;
      if (got != "accepted") expect_contains(got, option.substr(0, option.find('=')));
    }
  }
  for (const auto& [task, words] : tasks) {
    for (const auto& [other, more] : tasks) {
      if (task == other) continue;
      std::vector<std::string> both = words;
      both.insert(both.end(), more.begin(), more.end());
      expect_contains(outcome(both), task == "describe" || other == "describe" ? "--describe" : "only one of them at");
    }
  }
  expect_contains(outcome({"--bench", "--stop=w", "-n3", "--top-k=3"}), "--top-k, --stop: not for --bench, on which");
}

// Runs in a process of its own: the descriptors are those of the whole process.
void expect_occupied_descriptors() {
  for (const int fd : {0, 1, 2}) ::close(fd);
  int opened = -1;
  bool written = true;
  run_program([&] {
    opened = ::open("/dev/zero", O_RDONLY);
    written = ::write(1, "x", 1) == 1;
    return Exit::ok;
  });
  ::_exit(opened > 2 && !written ? 0 : 1);
}

TEST(RunProgramDeathTest, NoFileGetsTheNumberOfAClosedDescriptor) {
  EXPECT_EXIT(expect_occupied_descriptors(), testing::ExitedWithCode(0), "");
}

TEST(RunProgramDeathTest, AFullDiskIsAnError) {
  for (const bool buffered : {false, true}) {
    EXPECT_EXIT(std::_Exit(run_with_stdout("/dev/full", buffered)), testing::ExitedWithCode(5),
                "error: standard output: cannot write: No space left on device");
  }
}

TEST(RunProgramDeathTest, AClosedPipeIsQuiet) {
  const auto run_with_closed_pipe = [](bool buffered) {
    int ends[2];
    if (::pipe(ends) != 0 || ::dup2(ends[1], STDOUT_FILENO) < 0) return 99;
    ::close(ends[0]);
    ::close(ends[1]);
    return run_program([buffered] {
      for (int i = 0; i < 100; ++i) {
        if (buffered) std::printf("%01000d\n", i);
        if (!buffered) write_stdout("a result");
      }
      return Exit::ok;
    });
  };
  for (const bool buffered : {false, true}) {
    EXPECT_EXIT(std::_Exit(run_with_closed_pipe(buffered)), testing::ExitedWithCode(0), "^$");
  }
}

}  // namespace
}  // namespace weft
