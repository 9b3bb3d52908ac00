// llmc/app without a GPU: what it refuses and chooses for a program, and which rank this process is.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "llmc/app/decode_session.h"
#include "llmc/app/device.h"
#include "llmc/app/paths.h"
#include "llmc/app/rank_team.h"
#include "llmc/app/train_device.h"
#include "llmc/base/log.h"
#include "llmc/cpu/inference.h"
#include "llmc/model/presets.h"
#include "llmc/model/single_sequence.h"
#include "test/cpp/test_files.h"
#include "test/cpp/train_tools.h"

namespace weft {
namespace {

constexpr const char* kNeox = "test/fixtures/golden/neox-hs32-padded.model.bin";

// The message of the usage error of `work`; "" if there is none.
template <typename Work>
std::string usage_error(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::usage) << error.what();
    return error.what();
  }
  return "";
}

void expect_unsupported_reason(const std::string& message, const std::string& words, const std::string& of) {
  EXPECT_EQ(message.empty(), words.empty()) << of << ": " << message;
  EXPECT_NE(message.find(words), std::string::npos) << of << ": " << message;
}

// ---- files ----

TEST(AppPaths, ADirectoryInThePlaceOfAFileSaysWhatToGive) {
  const TemporaryDirectory directory;
  const auto make = [&](const std::string& name, const std::vector<std::string>& files) {
    std::filesystem::create_directory(directory.file(name));
    for (const std::string& file : files) write_bytes(directory.file(name + "/" + file), "x");
    return directory.file(name);
  };
  const std::string trained = make("trained", {"config.json"});
  for (const char* step : {"step_00000008", "step_00000020"}) make("trained/" + std::string(step), {"model.bin"});
  make("trained/step_00000030", {});
  make("trained/step_00000040.tmp", {"model.bin"});  // of a save that was interrupted
  const std::pair<std::string, std::string> models[] = {
      {trained, "Give the model file of its newest checkpoint: --model " +
                    escaped(directory.file("trained/step_00000020/model.bin"))},
      {make("hf a", {"config.json", "model.bin"}),
       "Convert it first: scripts/convert_hf.py " + escaped(directory.file("hf a")) + " -o model.bin"},
      {make("run", {"model.bin"}), "Give its model file: --model " + escaped(directory.file("run/model.bin"))},
      {make("other", {"model.txt"}), "Give a model file"}};
  for (const auto& [path, advice] : models) {
    const std::string message = error_of(Exit::bad_file, [&, path = path] { refuse_model_directory(path); });
    expect_contains(message, "--model: " + escaped(path) + ": this is a directory, not a regular file. " + advice);
    expect_contains(error_of(Exit::bad_file, [&, path = path] { refuse_tokenizer_directory(path); }),
                    "--tokenizer: " + escaped(path) +
                        ": this is a directory, not a regular file. Give its tokenizer.json: --tokenizer " +
                        escaped(path + "/tokenizer.json"));
  }
  for (const std::string& path : {directory.file("run/model.bin"), directory.file("none"), std::string()}) {
    EXPECT_NO_THROW(refuse_model_directory(path)) << path;
    EXPECT_NO_THROW(refuse_tokenizer_directory(path)) << path;
  }
  InferSettings settings;
  settings.device = "cpu";
  settings.model = directory.file("other");
  expect_contains(error_of(Exit::bad_file, [&] { DecodeSession{settings}; }), "this is a directory");
  settings.model = kNeox;
  settings.draft = directory.file("other");
  expect_contains(error_of(Exit::bad_file, [&] { DecodeSession{settings}; }), "this is a directory");
}

// ---- GPUs and the CPU ----

// Sets an environment variable, or removes it, until the end of the block.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    value != nullptr ? ::setenv(name, value, 1) : ::unsetenv(name);
  }
  ~Variable() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";

// Of those that its process may see; a single one is the launcher's choice.
TEST(Device, ARankTakesItsOwnOfTheGpusThatItSees) {
  const struct {
    const char* before;
    int local_rank;
    const char* after;
  } cases[] = {{nullptr, 0, "0"}, {nullptr, 3, "3"}, {"4,5", 0, "4"},
               {"4,5", 1, "5"},   {"5,0,2", 2, "2"}, {"GPU-a,MIG-b/1/0", 1, "MIG-b/1/0"},
               {"6", 0, "6"},     {"6", 3, "6"},     {"GPU-a", 1, "GPU-a"},
               {"", 1, ""}};
  for (const auto& [before, local_rank, after] : cases) {
    const Variable visible(kVisible, before);
    see_own_gpu(local_rank);
    EXPECT_STREQ(std::getenv(kVisible), after) << local_rank << " of " << (before != nullptr ? before : "all");
  }
  const Variable visible(kVisible, "4,5");
  EXPECT_EQ(
      error_of(Exit::environment, [] { see_own_gpu(2); }),
      "CUDA_VISIBLE_DEVICES: got '4,5', expected a GPU for each rank of this machine: this is its rank 2, from 0");
  EXPECT_STREQ(std::getenv(kVisible), "4,5");
}

LaunchedRank launched_as(std::int64_t rank, std::int64_t local_rank, std::int64_t ranks = 4, std::int64_t local = 2) {
  return {"test", rank, ranks, local_rank, local, "127.0.0.1", 1, "", false};
}

// Runs in a process of its own, as a rank of the second of two machines: CUDA reads the variable only once.
[[noreturn]] void say_what_a_rank_sees(const std::string& device, std::int64_t ranks) {
  ::setenv(kVisible, "4,5", 1);
  TrainSettings settings;
  settings.device = device;
  settings.ranks = ranks;
  const RankTeam team(settings, ranks > 1 ? launched_as(3, 1) : LaunchedRank());
  const TrainDevice made(settings, team);
  log_warning("%s", std::getenv(kVisible));
  std::_Exit(0);
}

TEST(DeviceDeathTest, OnlyARankOfSeveralThatMayUseAGpuLeavesTheOthersAlone) {
  EXPECT_EXIT(say_what_a_rank_sees("auto", 4), testing::ExitedWithCode(0), "warning: 5\n$");
  EXPECT_EXIT(say_what_a_rank_sees("cpu", 4), testing::ExitedWithCode(0), "warning: 4,5\n$");
  EXPECT_EXIT(say_what_a_rank_sees("auto", 1), testing::ExitedWithCode(0), "warning: 4,5\n$");
}

TEST(Device, TheCpuIsAnnouncedOnlyWhereItWasNotAskedFor) {
  const auto announced = [](const DeviceChoice& choice) {
    testing::internal::CaptureStderr();
    announce_cpu(choice);
    return testing::internal::GetCapturedStderr();
  };
  DeviceRequest request;
  request.device = "cpu";
  const DeviceChoice asked = choose_device(request), instead = choose_cpu("no GPU");
  for (const DeviceChoice& choice : {asked, instead}) {
    EXPECT_FALSE(choice.gpu);
    EXPECT_EQ(choice.name, "CPU");
    EXPECT_EQ(choice.id, "");
    EXPECT_GT(choice.available_bytes, 0u);
  }
  EXPECT_EQ(announced(asked), "");
  EXPECT_EQ(announced(instead), "running on the CPU: no GPU\n");
  EXPECT_EQ(announced(instead), "") << "said once";
  EXPECT_EQ(announced(choose_cpu("no driver")), "running on the CPU: no driver\n");
  EXPECT_EQ(announced(asked), "");
  EXPECT_EQ(announced({true, "a GPU", 1, "0", "no reason"}), "");
}

// ---- infer_pythia ----

TEST(DecodeDevice, TheCpuRefusesWhatNeedsAGpu) {
  const auto outcome = [](const std::string& decode, const std::string& dtype) {
    InferSettings settings;
    settings.device = "cpu";
    settings.decode = decode;
    settings.dtype = dtype;
    try {
      DecodeDevice device(settings);
      device.choose(preset_config("tiny"), DType::bf16);
      EXPECT_FALSE(device.gpu());
      EXPECT_EQ(device.path().device, "cpu");
      EXPECT_EQ(device.path().decode, "reference");
      EXPECT_EQ(device.read_ceiling(), 0);
    } catch (const Error& error) {
      expect_contains(error.what(), error.code() == Exit::usage ? "--dtype: got " + dtype + ", the CPU computes in fp32"
                                                                : "--decode " + decode + ": needs a GPU. On the CPU");
      return error.code();
    }
    return Exit::ok;
  };
  for (const char* dtype : {"auto", "fp32"}) {
    for (const char* decode : {"auto", "reference"}) EXPECT_EQ(outcome(decode, dtype), Exit::ok) << decode << dtype;
    for (const char* decode : {"fused", "graph"}) EXPECT_EQ(outcome(decode, dtype), Exit::environment) << decode;
  }
  for (const char* dtype : {"fp16", "bf16"}) {
    for (const char* decode : {"auto", "reference"}) EXPECT_EQ(outcome(decode, dtype), Exit::usage) << decode << dtype;
  }
}

TEST(DecodeDevice, RandomModelsOnTheCpuAreOfFloatsThatFit) {
  InferSettings settings;
  settings.device = "cpu";
  const DecodeDevice device(settings);
  const auto make = [&](const ModelConfig& config) { device.make_random_inference(config, 0, 2); };
  EXPECT_NO_THROW(make(preset_config("tiny")));
  for (const char* quantized : {"pythia-14m:int8", "pythia-14m:int4+head"}) {
    const ModelConfig config = random_model_config(quantized);
    expect_contains(error_of(Exit::usage, [&] { make(config); }), "Use a model without ':'");
    expect_contains(error_of(Exit::usage, [&] { device.make_random(config, 8); }), "Use a model without ':'");
  }
  ModelConfig large = random_model_config("pythia-12b");
  large.num_layers = 2000;
  const std::string message = error_of(Exit::resources, [&] { make(large); });
  expect_contains(message, "the parameters need ");
  expect_contains(message, " are free");
}

TEST(DecodeSession, AContextMayHaveAllPositionsOfTheModel) {
  ModelConfig config;
  config.max_positions = 2048;
  const auto capacity = [&](std::int64_t context, std::int64_t needed) {
    InferSettings settings;
    settings.context = context;
    return choose_capacity(settings, config, needed);
  };
  const struct {
    std::int64_t context, needed, capacity;
  } cases[] = {{0, 0, 1}, {0, 1, 1}, {0, 7, 7},       {0, 2048, 2048}, {0, 2049, 2048},    {0, 9999999, 2048},
               {1, 7, 1}, {7, 1, 7}, {2047, 1, 2047}, {2048, 1, 2048}, {2048, 9999, 2048}, {2047, 0, 2047}};
  for (const auto& [context, needed, expected] : cases) {
    EXPECT_EQ(capacity(context, needed), expected) << context << ", " << needed;
  }
  for (const std::int64_t context : {2049, 4096}) {
    EXPECT_EQ(error_of(Exit::usage, [&] { capacity(context, 1); }),
              format("--context: got %lld, expected at most the 2048 positions that the model was made for",
                     static_cast<long long>(context)));
  }
}

// kNeox with this tokenizer, or with "" without one, and with two ends of a text.
std::string with_tokenizer(const TemporaryDirectory& directory, const std::string& text) {
  const TensorFile source = TensorFile::open(kNeox, FileKind::model);
  Json config = source.config();
  config["model"]["eos_ids"] = {4, 7};
  const std::string path = directory.file("model.bin");
  TensorFileWriter writer(path, FileKind::model, config);
  const auto for_tensors = [&](const auto& work) {
    for (const TensorInfo& tensor : source.tensors()) {
      if (tensor.name != kTokenizerTensor) work(tensor);
    }
  };
  for_tensors([&](const TensorInfo& tensor) { writer.declare(tensor.name, tensor.dtype, tensor.shape); });
  if (!text.empty()) writer.declare(kTokenizerTensor, DType::u8, {std::ssize(text)});
  for_tensors([&](const TensorInfo& tensor) { writer.write(source.bytes(tensor).data(), tensor.bytes); });
  writer.write(text.data(), text.size());
  writer.publish();
  return path;
}

std::string tokenizer_of(std::int64_t tokens) {
  Json document = {{"model", {{"type", "BPE"}, {"merges", Json::array()}, {"vocab", Json::object()}}},
                   {"added_tokens", Json::array()},
                   {"decoder", {{"type", "Fuse"}}}};
  for (std::int64_t id = 0; id < tokens; ++id) document["model"]["vocab"]["t" + std::to_string(id)] = id;
  return document.dump();
}

TEST(DecodeSession, WhatATokenizerIsNeededFor) {
  const TemporaryDirectory directory;
  InferSettings settings;
  settings.device = "cpu";
  settings.model = with_tokenizer(directory, "");
  const DecodeSession without(settings);
  EXPECT_EQ(without.tokenizer(), nullptr);
  expect_contains(error_of(Exit::bad_file, [&] { without.need_tokenizer(); }), "missing, so text cannot be read");
  settings.task = InferTask::prompt;
  settings.prompt = "t1";
  expect_contains(error_of(Exit::bad_file, [&] { without.prompt(); }), "or use --prompt-ids");
  settings.task = InferTask::prompt_ids;
  settings.prompt_ids = "3,1";
  EXPECT_EQ(without.prompt().ids, (std::vector<std::int32_t>{3, 1}));
  const std::int64_t rows = without.config().vocab_size;
  settings.prompt_ids = std::to_string(rows);
  error_of(Exit::usage, [&] { without.prompt(); });

  InferSettings other = settings;
  for (const std::int64_t tokens : {rows, rows - 1}) {
    other.model = with_tokenizer(directory, tokenizer_of(tokens));
    const DecodeSession with(other);
    EXPECT_EQ(with.need_tokenizer().vocab_size(), tokens);
  }
  other.model = with_tokenizer(directory, tokenizer_of(rows + 1));
  expect_contains(error_of(Exit::bad_file, [&] { DecodeSession{other}; }), "expected at most the model's");
}

// Rows past the tokens are rows of the model: they can be asked for, and no more than there are.
TEST(DecodeSession, IdsOfAPromptMayBeRowsOfPadding) {
  InferSettings settings;
  settings.device = "cpu";
  settings.model = kNeox;
  settings.task = InferTask::prompt_ids;
  const DecodeSession session(settings);
  const std::int64_t tokens = session.config().tokenizer_vocab, rows = session.config().vocab_size;
  ASSERT_LT(tokens, rows);
  for (const std::int64_t id : {tokens, rows - 1}) {
    settings.prompt_ids = std::to_string(id);
    EXPECT_EQ(session.prompt().ids, (std::vector<std::int32_t>{static_cast<std::int32_t>(id)}));
  }
  settings.prompt_ids = std::to_string(rows);
  expect_contains(error_of(Exit::usage, [&] { session.prompt().ids; }),
                  format("from 0 to %lld", static_cast<long long>(rows - 1)));
}

// Each option reaches its field, and no other.
TEST(DecodeSession, WhatWasAskedForReachesTheGeneration) {
  const TemporaryDirectory directory;
  InferSettings settings;
  settings.device = "cpu";
  settings.model = with_tokenizer(directory, "");
  settings.max_tokens = 11;
  settings.temperature = 0.25;
  settings.top_k = 12;
  settings.top_p = 0.5;
  settings.min_p = 0.125;
  settings.seed = 13;
  settings.stop = {"x", "yz"};
  settings.lookup = 3;
  settings.debug_inject = {"accept=0.75"};
  const DecodeSession session(settings);
  const GenerateOptions options = session.generate_options();
  EXPECT_EQ(options.max_tokens, 11);
  EXPECT_EQ(options.stop_texts, settings.stop);
  EXPECT_TRUE(options.hide_special);
  for (bool InferSettings::*const shows : {&InferSettings::json, &InferSettings::print_special}) {
    InferSettings other = settings;
    other.*shows = true;
    EXPECT_FALSE(DecodeSession(other).generate_options().hide_special);
  }
  EXPECT_EQ(options.stop_ids, (std::vector<std::int32_t>{4, 7}));
  EXPECT_EQ(options.sampler.temperature, 0.25);
  EXPECT_EQ(options.sampler.top_k, 12);
  EXPECT_EQ(options.sampler.top_p, 0.5);
  EXPECT_EQ(options.sampler.min_p, 0.125);
  EXPECT_EQ(options.sampler.seed, 13u);
  EXPECT_EQ(options.sampler.vocab_limit, session.config().tokenizer_vocab);
  EXPECT_LT(session.config().tokenizer_vocab, session.config().vocab_size);
  settings.ignore_eos = true;
  EXPECT_TRUE(DecodeSession(settings).generate_options().stop_ids.empty());

  EXPECT_EQ(session.special(), Tokenizer::Special::text);
  settings.special = true;
  EXPECT_EQ(session.special(), Tokenizer::Special::allow);

  const auto draft = cpu::load_inference(session.file(), one_sequence(8));
  const DraftOptions drafts = session.draft_options(draft.get());
  EXPECT_EQ(drafts.lookup, 3);
  EXPECT_EQ(drafts.model, draft.get());
  EXPECT_EQ(drafts.row_cost, session.device().row_cost());
  EXPECT_EQ(drafts.acceptance, 0.75);
  settings.debug_inject.clear();
  EXPECT_FALSE(session.draft_options(nullptr).acceptance.has_value());

  InferSettings other = settings;
  other.model = with_tokenizer(directory, tokenizer_of(5));
  EXPECT_EQ(DecodeSession(other).generate_options().sampler.vocab_limit, 5);
}

// ---- train_llama ----

TEST(TrainDevice, TheCpuRefusesWhatNeedsAGpu) {
  const struct {
    const char *precision, *moments, *shard;
    std::int64_t ranks;
    const char *becomes, *reason;
  } cases[] = {{"auto", "fp32", "optimizer", 1, "fp32", ""},
               {"fp32", "fp32", "optimizer", 1, "fp32", ""},
               {"fp8", "fp32", "optimizer", 1, "fp8", ""},
               {"bf16", "fp32", "optimizer", 1, "", "--precision: got bf16, the CPU computes in fp32 and fp8 only"},
               {"auto", "bf16", "optimizer", 1, "", "--moments: got bf16, which needs a GPU"},
               {"fp32", "bf16", "optimizer", 1, "", "--moments: got bf16, which needs a GPU"},
               {"fp8", "bf16", "optimizer", 1, "", "--moments: got bf16, which needs a GPU"},
               {"auto", "fp32", "gradients", 1, "fp32", ""},
               {"auto", "fp32", "gradients", 2, "", "--shard: got gradients, which needs a GPU"},
               {"auto", "fp32", "optimizer", 2, "fp32", ""},
               {"auto", "fp32", "parameters", 2, "fp32", ""},
               {"auto", "fp32", "none", 2, "fp32", ""}};
  for (const auto& [precision, moments, shard, ranks, becomes, reason] : cases) {
    const std::string of = format("%s, %s, %s, %d", precision, moments, shard, static_cast<int>(ranks));
    TrainSettings settings;
    settings.device = "cpu";
    settings.precision = precision;
    settings.moments = moments;
    settings.shard = shard;
    settings.ranks = ranks;
    settings.effective = {{"device", "cpu"}, {"precision", precision}, {"moments", moments}};
    const RankTeam team(settings, launched_as(0, 0, ranks, ranks));
    const std::string message = usage_error([&, becomes = becomes] {
      const TrainDevice device(settings, team);
      EXPECT_FALSE(device.gpu());
      EXPECT_EQ(device.name(), "CPU");
      EXPECT_EQ(device.gpu_id(), "");
      const std::vector<RankField> fields = device.rank_fields();
      ASSERT_EQ(fields.size(), 1u);
      EXPECT_EQ(settings.device, "cpu");
      EXPECT_EQ(settings.precision, becomes) << of;
      EXPECT_EQ(settings.effective[1].second, becomes) << of;
    });
    expect_unsupported_reason(message, reason, of);
  }
}

// --shard says how ranks divide a training state. Each rank of --eval has a whole model, so no value is refused.
TEST(TrainDevice, AnEvaluationDividesNothing) {
  for (const bool planned_gpu : {false, true}) {
    TrainSettings settings = micro_settings();
    settings.ranks = settings.virtual_ranks = 2;
    settings.batch_tokens = 2 * 2 * 16;  // two micro-batches a rank
    settings.gpu_memory_bytes = planned_gpu ? 80'000'000'000 : 0;
    for (const char* shard : {"none", "optimizer", "gradients", "parameters"}) {
      settings.shard = shard;
      for (const bool eval : {false, true}) {
        settings.eval = eval;
        std::string reason;
        try {
          TrainSettings chosen = settings;
          const RankTeam team(settings, launched_as(0, 0, 2, 2));
          const TrainDevice device(chosen, team);
          EXPECT_EQ(device.gpu(), planned_gpu);
        } catch (const Error& error) {
          if (error.code() == Exit::environment) GTEST_SKIP() << "a build for the CPU alone plans for no GPU";
          reason = error.what();
        }
        const bool refused =
            !eval && (shard == std::string("gradients") || (planned_gpu && shard == std::string("parameters")));
        expect_unsupported_reason(reason,
                                  !refused      ? ""
                                  : planned_gpu ? "2 micro-batches a rank and step, expected one"
                                                : "which needs a GPU",
                                  format("%s%s%s", shard, eval ? ", --eval" : "", planned_gpu ? ", GPU" : ""));
      }
    }
  }
}

TEST(TrainDevice, APlanInFp8ChecksTheSizes) {
  TrainSettings settings = micro_settings();
  const RankTeam team(settings, std::nullopt);
  const TrainDevice device(settings, team);
  TrainOptions options = settings.model_options();
  EXPECT_NO_THROW(device.plan(micro_config(), options, 0));
  options.precision = Precision::fp8;
  expect_contains(error_of(Exit::usage, [&] { device.plan(micro_config(), options, 0); }), "multiple of 16");
}

// Runs in a process of its own: the messages of a process are those of one rank for good.
[[noreturn]] void speak_as(const std::optional<LaunchedRank>& launched) {
  TrainSettings settings;
  settings.ranks = launched ? launched->size : 1;
  const RankTeam team(settings, launched);
  log_info("news");
  log_warning("a warning");
  std::_Exit(team.first() ? 1 : 0);
}

// By its number in the run, not on its machine: the first of the second machine is not the first.
TEST(RankTeamDeathTest, MessagesNameTheRankOfTheRun) {
  EXPECT_EXIT(speak_as(launched_as(3, 1)), testing::ExitedWithCode(0), "^rank 3: warning: a warning\n$");
  EXPECT_EXIT(speak_as(launched_as(2, 0)), testing::ExitedWithCode(0), "^rank 2: warning: a warning\n$");
  EXPECT_EXIT(speak_as(launched_as(0, 0)), testing::ExitedWithCode(1), "^news\nwarning: a warning\n$");
  EXPECT_EXIT(speak_as(std::nullopt), testing::ExitedWithCode(1), "^news\nwarning: a warning\n$");
}

TEST(RankTeam, TheNumbersAreThoseOfTheLauncher) {
  TrainSettings settings;
  settings.ranks = 6;
  const RankTeam team(settings, launched_as(0, 0, 6, 3));
  EXPECT_EQ(team.rank(), 0);
  EXPECT_EQ(team.size(), 6);
  EXPECT_EQ(team.local_rank(), 0);
  EXPECT_EQ(team.local_size(), 3);
  settings.ranks = 1;
  const RankTeam alone(settings, std::nullopt);
  EXPECT_TRUE(alone.first());
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.local_size(), 1);
}

TEST(RankTeamDeathTest, TheEndOfTheWorkIsTheEndOfTheProcess) {
  const TrainSettings settings;
  RankTeam team(settings, std::nullopt);
  for (const Exit code : {Exit::ok, Exit::internal, Exit::interrupted, Exit::terminated}) {
    EXPECT_EQ(team.together([&] { return code; }), code);
  }
  EXPECT_EXIT(team.leave_with(Error(Exit::numeric, "the loss is nan")), testing::ExitedWithCode(6),
              "^error: the loss is nan\n$");
  EXPECT_EXIT(team.leave_with(Error(Exit::environment, "gone")), testing::ExitedWithCode(4), "^error: gone\n$");
}

}  // namespace
}  // namespace weft
