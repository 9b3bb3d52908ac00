// What must be as it was when a run goes on from a checkpoint, and what may change.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "test/cpp/checkpoint_tools.h"

namespace weft {
namespace {

// What a run that goes on is told: of more steps, and of another device; nothing where both are as they were.
TEST_F(CheckpointTest, WhatIsNotAsItWasIsSaidWhenARunGoesOn) {
  save(3);
  const auto told = [&](std::int64_t more_steps, const std::string& device) {
    RunIdentity now = identity();
    now.steps += more_steps;
    now.device = device;
    const RunDirectory run(run_path());
    testing::internal::CaptureStderr();
    EXPECT_EQ(CheckpointKeeper(run, now, 2).resume(ResumeMode::must, *model_)->step, 3);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(told(0, "cpu"), "");
  const auto steps = static_cast<long long>(identity().steps);
  EXPECT_EQ(told(5, "cpu"),
            format("--steps: extended from %lld to %lld steps; the learning rate now follows the longer schedule\n",
                   steps, steps + 5));
  expect_contains(
      told(0, "a GPU"),
      "step_00000003' was computed on 'cpu', this run goes on with a GPU: the numbers will differ in rounding\n");
}

// Each value of a manifest, absent, null, changed or of another type: never accepted, and never another error. Only who made it
// may differ. Of the tensors of each file the first one has to do.
TEST_F(CheckpointTest, EachValueOfAManifestIsCompared) {
  save(3);
  const std::string path = step_path(3) + "/manifest.json";
  const Json whole = Json::parse(read_bytes(path));
  const Json flat = whole.flatten();
  ASSERT_GT(flat.size(), 20u);
  const auto opened = [&](const Json& manifest) {
    write_bytes(path, manifest.dump());
    return reason_of(Exit::bad_file, [&] { Checkpoint::open(step_path(3), 3); }) == "accepted";
  };
  EXPECT_TRUE(opened(whole));
  for (const auto& [name, value] : flat.items()) {
    if (name.find("/tensors/") != std::string::npos && name.find("/tensors/0/") == std::string::npos) continue;
    const Json::json_pointer pointer(name);
    std::vector<Json> others = {nullptr};
    if (value.is_number())
      others.insert(others.end(), {value.get<std::int64_t>() + 1, -1, std::to_string(value.get<int>())});
    if (value.is_string()) others.insert(others.end(), {value.get<std::string>() + "0", 7});
    for (const Json& other : others) {
      Json changed = whole;
      changed[pointer] = other;
      EXPECT_EQ(opened(changed), name == "/made_by") << name << " " << other;
    }
    Json without = whole;
    if (const auto parent = pointer.parent_pointer(); without[parent].is_object())
      without[parent].erase(pointer.back());
    if (without != whole) {
      EXPECT_EQ(opened(without), name == "/made_by") << name;
    }
  }
  for (const char* files : {"null", "{}", "[]", "[{}]", "[{}, {}]", "[{}, {}, {}]", "[1, 2]", "\"model.bin\""}) {
    Json changed = whole;
    changed["files"] = Json::parse(files);
    EXPECT_FALSE(opened(changed)) << files;
  }
  Json more = whole;
  more["files"].push_back(whole["files"][0]);
  EXPECT_FALSE(opened(more));
  for (std::size_t file = 0; file < whole["files"].size(); ++file) {
    const Json tensors = whole["files"][file]["tensors"];
    std::vector<Json> others = {Json::array(), Json::object(), tensors, tensors};
    others[2].erase(others[2].size() - 1);
    others[3].push_back(tensors[0]);
    for (const Json& other : others) {
      Json changed = whole;
      changed["files"][file]["tensors"] = other;
      EXPECT_FALSE(opened(changed)) << file << " " << other;
    }
    Json without = whole;
    without["files"][file].erase("tensors");
    EXPECT_FALSE(opened(without)) << file;
  }
  for (const char* other : {"null", "[]", "3", "{}", "\"manifest\""}) EXPECT_FALSE(opened(Json::parse(other))) << other;
}

// Each member of what state.bin says of the run, absent or, of its progress, null: refused as a bad file, but for what a run may do without
// and for what is compared when a run goes on.
TEST_F(CheckpointTest, EachMemberOfTheStateIsNeeded) {
  save(3);
  const std::string path = step_path(3) + "/state.bin", whole = read_bytes(path);
  const TensorFile file = TensorFile::open(path, FileKind::training_state);
  std::string reason;  // the last one
  const auto opened = [&](const Json& config) {
    const std::string changed_path = path + ".changed";
    TensorFileWriter writer(changed_path, FileKind::training_state, config);
    for (const TensorInfo& tensor : file.tensors()) writer.declare(tensor.name, tensor.dtype, tensor.shape);
    for (const TensorInfo& tensor : file.tensors()) writer.write(file.bytes(tensor).data(), tensor.bytes);
    writer.publish();
    fs::rename(changed_path, path);
    reason = reason_of(Exit::bad_file, [&] { Checkpoint::open(step_path(3), 3); });
    return reason == "accepted";
  };
  EXPECT_TRUE(opened(file.config()));
  Json of_another_model = file.config();  // of the same tensors
  of_another_model["model"]["norm_eps"] = 0.125;
  EXPECT_FALSE(opened(of_another_model));
  expect_contains(reason, "model: not that of model.bin");
  std::set<std::string> accepted;
  for (const char* part : {"/run", "/training", "/training/spikes"}) {
    const Json::json_pointer home(part);
    for (const auto& [name, value] : file.config()[home].items()) {
      Json without = file.config(), null = file.config();
      without[home].erase(name);
      null[home][name] = nullptr;
      if (opened(without)) accepted.insert(std::string(part) + "/" + name + " absent");
      if (home.back() != "run" && opened(null)) accepted.insert(std::string(part) + "/" + name + " null");
    }
  }
  std::set<std::string> expected = {"/training/loss null", "/training/val_loss null"};
  for (const char* name : {"began_from", "data", "device", "steps", "version", "world_size"}) {
    expected.insert(std::string("/run/") + name + " absent");
  }
  EXPECT_EQ(accepted, expected);
  for (const char* part : {"run", "training"}) {
    for (const char* other : {"null", "[]", "3"}) {
      Json changed = file.config();
      changed[part] = Json::parse(other);
      EXPECT_FALSE(opened(changed)) << part << " " << other;
    }
    Json without = file.config();
    without.erase(part);
    EXPECT_FALSE(opened(without)) << part;
  }
}

// Two runs at the same step, that differ in nothing but values: state.bin or model.bin of the other one is whole in itself.
TEST_F(CheckpointTest, AWholeFileThatIsNotTheManifestsIsRefused) {
  save(3);
  const std::string manifest = read_bytes(step_path(3) + "/manifest.json");
  std::map<std::string, std::string> other;
  for (const char* name : {"/model.bin", "/state.bin"}) other[name] = read_bytes(step_path(3) + name);
  fs::remove_all(run_path());
  {
    const RunDirectory run(run_path());
    const TrainState state = make_state(3);
    fill(TensorRole::parameter, 40);
    fill(TensorRole::state2, 50);
    CheckpointKeeper(run, identity(), 2).save(state, *model_);
  }
  for (const char* name : {"/model.bin", "/state.bin"}) {
    const std::string whole = read_bytes(step_path(3) + name);
    ASSERT_NE(whole, other[name]);
    write_bytes(step_path(3) + name, other[name]);
    expect_contains(error_of(Exit::bad_file, [&] { Checkpoint::open(step_path(3), 3); }),
                    "is not the tensor that the manifest describes");
    write_bytes(step_path(3) + name, whole);
  }
  EXPECT_EQ(resumed_step(), 3);
}

// A damaged newer checkpoint must not push a whole one out.
TEST_F(CheckpointTest, OnlyWholeOnesCountTowardsKeep) {
  save(2);
  save(4);
  fs::resize_file(step_path(4) + "/model.bin", 5000);
  const RunDirectory run(run_path());
  CheckpointKeeper keeper(run, identity(), 2);
  EXPECT_EQ(keeper.resume(ResumeMode::automatic, *model_)->step, 2);
  keeper.save(make_state(6), *model_);
  EXPECT_TRUE(fs::exists(step_path(2)));
  keeper.save(make_state(4), *model_);  // the run reaches the damaged step again and replaces it
  EXPECT_EQ(Checkpoint::open(step_path(4), 4).state().step, 4);
}

TEST_F(CheckpointTest, OtherSettingsAreRefusedByName) {
  save(3);
  settings_.lr = 0.5;
  const std::string message = error_of(Exit::usage, [&] { resumed_step(); });
  expect_contains(message, "--lr");
  expect_contains(message, "0.5");
  settings_ = micro_settings();
  settings_.seed = 4;
  expect_contains(error_of(Exit::usage, [&] { resumed_step(); }), "--seed");
  settings_ = micro_settings();
  settings_.schedule = "wsd";
  error_of(Exit::usage, [&] { resumed_step(); });
  settings_ = micro_settings();
  settings_.save_every = 3;  // decides no number
  EXPECT_EQ(resumed_step(), 3);
}

// Every field that decides the numbers, taken from the table itself: one changed at a time is refused by its name.
TEST_F(CheckpointTest, EachNumericSettingIsHeldByTheCheckpoint) {
  for (const bool all_fields : {false, true}) {
    fs::remove_all(run_path());
    settings_ = micro_settings();
    if (all_fields) {  // fields that stand there only where they mean something
      settings_.schedule = "wsd";
      settings_.moments = "bf16";
      settings_.virtual_ranks = 2;
    }
    save(3);
    const Json fields = settings_.numeric_settings();
    EXPECT_EQ(fields.size(), all_fields ? 18u : 15u);
    for (const auto& [key, value] : fields.items()) {
      const RunDirectory run(run_path());
      RunIdentity other = identity();
      Json& field = other.settings[key];
      if (value.is_string()) {
        field = value.get<std::string>() + "x";
      } else if (value.is_number_integer()) {
        field = value.get<std::int64_t>() + 1;
      } else {
        field = std::nextafter(value.get<double>(), 2.0);  // the smallest change there is
      }
      CheckpointKeeper keeper(run, other, 2);
      const std::string message = error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
      EXPECT_TRUE(message.starts_with("--" + key + ": ")) << message;
      other.settings.erase(key);
      CheckpointKeeper without(run, other, 2);
      expect_contains(error_of(Exit::usage, [&] { without.resume(ResumeMode::automatic, *model_); }),
                      "--'" + key + "': got nothing");
    }
  }
}

// What the options table has and the checkpoint does not hold decides no number, or is held in another way.
TEST(NumericSettings, AreAllOptionsButThese) {
  const std::set<std::string> others = {
      "config",       "model",        "norm",          "adapter",  // held as the model's configuration and began_from
      "train",                                                     // held as the shards' fingerprint
      "steps",        "epochs",                                    // held by themselves: they may grow
      "tokenizer",    "device",                                    // held, and said
      "vocab-size",                                                // held as the model's configuration
      "val",          "out",          "resume",        "save-every",    "keep",        "keep-best",    "eval",
      "gpu-memory",   "recompute",    "no-graph",      "max-minutes",   "on-nan",      "debug-inject", "val-every",
      "val-batches",  "sample-every", "sample-prompt", "sample-tokens", "temperature", "compare",      "bench",
      "operators",    "json",         "dry-run",       "print-config",  "color",       "verbose",      "threads",
      "gpus",         "shard",  // any number of them, and any sharding, gives the same bits
      "comm-timeout",
  };
  std::set<std::string> expected, got = others;
  for (const std::string& optimizer : optimizer_names()) {  // each has its own options
    const char* words[] = {"train_llama",
                           "--model",
                           "m.bin",
                           "--print-config",
                           "--schedule",
                           "wsd",
                           "--moments",
                           "bf16",
                           "--virtual-ranks",
                           "2",
                           "--optimizer",
                           optimizer.c_str(),
                           "--lora-r",
                           "3",
                           "--document-mask",
                           "--objective",
                           "dpo"};
    TrainSettings settings = *parse_train_options(static_cast<int>(std::size(words)), words, "test");
    settings.packed = true;  // as conversations make it
    for (const auto& [name, value] : settings.effective) expected.insert(name);
    const Json fields = settings.numeric_settings();
    for (const auto& [name, value] : fields.items()) {
      EXPECT_FALSE(others.contains(name)) << name;
      got.insert(name);
    }
  }
  EXPECT_EQ(got, expected) << "a new option belongs into numeric_settings() or into the list above";
}

// The text of each option reaches the field that the checkpoint holds.
TEST(NumericSettings, FollowTheCommandLine) {
  const std::map<std::string, std::string> given = {
      {"micro-batch", "3"},    {"seq-len", "5"},         {"batch-tokens", "30"},
      {"lr", "0.5"},           {"min-lr-ratio", "0.25"}, {"warmup-steps", "7"},
      {"schedule", "wsd"},     {"weight-decay", "0.5"},  {"beta1", "0.5"},
      {"beta2", "0.25"},       {"eps", "0.5"},           {"grad-clip", "0"},
      {"dropout", "0.5"},      {"seed", "77"},           {"precision", "fp32"},
      {"moments", "bf16"},     {"virtual-ranks", "2"},   {"wsd-decay-fraction", "0.5"},
      {"optimizer", "muon"},   {"muon-lr", "0.5"},       {"muon-momentum", "0.25"},
      {"lora-r", "3"},         {"lora-alpha", "0.5"},    {"lora-targets", "q,v"},
      {"lora-dropout", "0.25"}};
  std::vector<std::string> words = {"train_llama", "--model", "m.bin", "--print-config"};
  for (const auto& [name, value] : given) words.insert(words.end(), {"--" + name, value});
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const TrainSettings settings = *parse_train_options(static_cast<int>(argv.size()), argv.data(), "test");
  const Json fields = settings.numeric_settings();
  EXPECT_EQ(fields.size(), given.size());
  for (const auto& [name, value] : given) {
    const Json& field = fields.at(name);
    EXPECT_EQ(field.is_string() ? field : Json::parse(field.dump()),
              field.is_string() ? Json(value) : Json::parse(value))
        << name;
  }
  const Schedule schedule = settings.learning_rate();
  EXPECT_EQ(schedule.shape, ScheduleShape::wsd);
  EXPECT_EQ(schedule.peak, 0.5);
  EXPECT_EQ(schedule.min_ratio, 0.25);
  EXPECT_EQ(schedule.warmup_steps, 7);
  EXPECT_EQ(schedule.steps, 400);
  EXPECT_EQ(schedule.wsd_decay_fraction, 0.5);
  EXPECT_EQ(schedule.at(201), 0.5) << "the first decaying step: half of 400 lie behind, and nothing is lost yet";
  EXPECT_DOUBLE_EQ(schedule.at(301), 0.5 - 0.375 * std::sqrt(0.5));
}

TEST_F(CheckpointTest, StepsCanBeAddedNotTakenAway) {
  save(3);
  settings_.steps = 20;
  EXPECT_EQ(resumed_step(), 3);
  settings_.steps = 9;
  expect_contains(error_of(Exit::usage, [&] { resumed_step(); }), "--steps");
}

// In words, each way in which the shards may differ, and what to do.
TEST_F(CheckpointTest, OtherDataIsRefused) {
  const auto shards = [](std::initializer_list<Json> list) { return Json(std::vector<Json>(list)); };
  const Json a = {{"name", "a.bin"}, {"tokens", 200}, {"xxh3", "01"}};
  const Json b = {{"name", "b.bin"}, {"tokens", 300}, {"xxh3", "02"}};
  Json changed = b, renamed = b, damaged = b;
  changed["xxh3"] = "03";
  renamed["name"] = "c.bin";
  damaged["name"] = 7;
  damaged["tokens"] = "many";
  const struct {
    Json saved, now;
    const char* told;
  } cases[] = {
      {shards({a, b}), shards({a}), "now 1 shard, then 2."},
      {shards({a}), shards({a, b}), "now 2 shards, then 1."},
      {shards({a, b}), shards({b, a}), "the same shards come in another order."},
      {shards({a, b}), shards({a, a}), "shard 2 is 'a.bin' (200 tokens), and then it was 'b.bin' (300 tokens)."},
      {shards({a, b}), shards({a, changed}), "shard 2, 'b.bin' (300 tokens), has other content than then."},
      {shards({a, b}), shards({a, renamed}),
       "shard 2 is 'c.bin' (300 tokens), and then it was 'b.bin' (300 tokens), with the same content."},
      {shards({damaged}), shards({b}), "shard 1 is 'b.bin' (300 tokens), and then it was a shard (? tokens)"},
      {shards({7}), shards({b}), "and then it was no shard."},
      {Json(7), shards({b}), "now 1 shard, then 0."}};
  for (const auto& [saved, now, told] : cases) {
    RunIdentity then = identity(), other = identity();
    then.data = saved;
    other.data = now;
    fs::remove_all(run_path());
    const RunDirectory run(run_path());
    CheckpointKeeper(run, then, 2).save(make_state(3), *model_);
    CheckpointKeeper keeper(run, other, 2);
    const std::string said = error_of(Exit::bad_file, [&] { keeper.resume(ResumeMode::must, *model_); });
    expect_contains(said, "step_00000003' was trained on other data: ");
    expect_contains(said, told);
    expect_contains(said, "; in another --out --model '" + step_path(3) + "/model.bin' continues from these weights");
    EXPECT_EQ(said.find('{'), std::string::npos) << said;
  }
}

// It is that of the newest checkpoint whose state can be read.
TEST_F(CheckpointTest, TheWarmUpOfARunIsThatOfItsNewestCheckpoint) {
  EXPECT_FALSE(saved_warmup_steps(run_path()).has_value());
  settings_.warmup_steps = 7;
  save(3);
  EXPECT_EQ(saved_warmup_steps(run_path()), 7);
  settings_.warmup_steps = 9;
  save(5);
  EXPECT_EQ(saved_warmup_steps(run_path()), 9);
  fs::resize_file(step_path(5) + "/state.bin", 100);
  EXPECT_EQ(saved_warmup_steps(run_path()), 7);
  fs::remove_all(step_path(3));
  EXPECT_FALSE(saved_warmup_steps(run_path()).has_value());
}

TEST_F(CheckpointTest, AStepPastTheEndOfItsRunIsRefused) {
  const auto save_of_a_run = [&](std::int64_t steps) {
    RunIdentity shorter = identity();
    shorter.steps = steps;
    const RunDirectory run(run_path());
    CheckpointKeeper(run, shorter, 2).save(make_state(3), *model_);
  };
  save_of_a_run(3);
  EXPECT_EQ(resumed_step(), 3);
  save_of_a_run(2);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "step: got 3, but the run that made it had 2");
}

TEST_F(CheckpointTest, FewerShardsAreOtherData) {
  write_shard(temporary_.file("train2.bin"), patterned_tokens(200, 300));
  data_.emplace(temporary_.file("train*.bin"), 8);
  save(3);
  data_.emplace(temporary_.file("train.bin"), 8);
  expect_contains(error_of(Exit::bad_file, [&] { resumed_step(); }), "was trained on other data: now 1 shard, then 2");
}

TEST_F(CheckpointTest, OtherModelIsRefused) {
  save(3);
  const RunDirectory run(run_path());
  RunIdentity other = identity();
  other.model.num_layers = 2;
  CheckpointKeeper keeper(run, other, 2);
  expect_contains(error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); }), "num_layers");
}

// A start with another model, beginning or data, and often other settings as well, was most likely meant for a new directory: that
// comes first, and what differs after it.
TEST_F(CheckpointTest, AnotherRunInTheDirectoryIsNamedFirst) {
  save(3);
  const auto refused = [&](Exit code, const std::function<void(RunIdentity&)>& change) {
    const RunDirectory run(run_path());
    RunIdentity other = identity();
    change(other);
    other.settings["seed"] = 77;
    --other.steps;
    CheckpointKeeper keeper(run, other, 2);
    const std::string said = error_of(code, [&] { keeper.resume(ResumeMode::automatic, *model_); });
    const std::string first =
        format("--out: '%s' holds another run: 3 steps of a model with %lld layers of %lld, on 'train.bin' (",
               run_path().c_str(), static_cast<long long>(identity().model.num_layers),
               static_cast<long long>(identity().model.hidden_size));
    EXPECT_TRUE(said.starts_with(first)) << said;
    expect_contains(said, " tokens). Use another --out, or remove this one. --");
  };
  refused(Exit::usage, [](RunIdentity& run) { run.model.rope.theta *= 2; });
  refused(Exit::usage, [](RunIdentity& run) { run.began_from = "0123456789abcdef"; });
  refused(Exit::bad_file, [](RunIdentity& run) { run.data[0]["tokens"] = 3; });
}

// Another vocabulary can be asked for where a run begins with new parameters; a model file has its own.
TEST_F(CheckpointTest, AnotherVocabularyCanBeAskedForOfANewModelAlone) {
  save(3);
  for (const char* began_from : {"", "0123456789abcdef"}) {
    const RunDirectory run(run_path());
    RunIdentity other = identity();
    other.model.vocab_size = 64;
    other.began_from = began_from;
    CheckpointKeeper keeper(run, other, 2);
    const std::string message = error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
    expect_contains(message, "--config or --model: vocab_size is '64', but ");
    EXPECT_EQ(message.ends_with(". With --config, --vocab-size '32' is the same model"), *began_from == '\0')
        << message;
  }
}

// The run remembers the model file that it began from: another one would be read, and then not used.
TEST_F(CheckpointTest, AnotherBeginningIsRefused) {
  const auto resume_from = [&](const std::string& began_from) {
    const RunDirectory run(run_path());
    RunIdentity now = identity();
    now.began_from = began_from;
    CheckpointKeeper keeper(run, now, 2);
    return keeper.resume(ResumeMode::automatic, *model_)->step;
  };
  const auto save_from = [&](const std::string& began_from) {
    fs::remove_all(run_path());
    const RunDirectory run(run_path());
    RunIdentity now = identity();
    now.began_from = began_from;
    CheckpointKeeper(run, now, 2).save(make_state(3), *model_);
  };
  save_from("0123456789abcdef");
  EXPECT_EQ(resume_from("0123456789abcdef"), 3);
  const std::string other = error_of(Exit::usage, [&] { resume_from("0123456789abcdee"); });
  expect_contains(other, ". --model: ");
  expect_contains(other, "0123456789abcdef");
  const std::string fresh = error_of(Exit::usage, [&] { resume_from(""); });
  expect_contains(fresh, ". --config: ");
  save_from("");
  EXPECT_EQ(resume_from(""), 3);
  const std::string model = error_of(Exit::usage, [&] { resume_from("0123456789abcdef"); });
  expect_contains(model, ". --model: ");
  expect_contains(model, "new parameters");
}

// A new model takes its special ids from the tokenizer: it is named when it is what was exchanged.
TEST_F(CheckpointTest, AMissingTokenizerIsBlamedAndNotTheModel) {
  const auto message = [&](const std::string& saved, const std::string& now, std::int64_t layers = 1) {
    fs::remove_all(run_path());
    const RunDirectory run(run_path());
    RunIdentity one = identity(), other = identity();
    one.tokenizer = saved;
    one.model.bos_id = saved.empty() ? std::nullopt : std::optional<std::int32_t>(1);
    other.tokenizer = now;
    other.model.bos_id = now.empty() ? std::nullopt : std::optional<std::int32_t>(2);
    other.model.num_layers = layers;
    CheckpointKeeper(run, one, 2).save(make_state(3), *model_);
    CheckpointKeeper keeper(run, other, 2);
    return error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
  };
  const std::string removed = message("{}", "");
  EXPECT_TRUE(removed.starts_with("--tokenizer: ")) << removed;
  expect_contains(removed, "was made with a tokenizer, this start has none");
  expect_contains(message("{}", "[]"), "this start has another one");
  expect_contains(message("", "{}"), "was made without a tokenizer, this start has one");
  expect_contains(message("{}", "", 2), "--config or --model: ");
}

// Whichever of the ids the new tokenizer has changed. The same text with other ids is no other tokenizer.
TEST_F(CheckpointTest, AnotherTokenizerIsBlamedForEachIdThatComesFromIt) {
  using Ids = std::vector<std::int32_t>;
  const auto message = [&](std::optional<std::int32_t> bos, const Ids& eos, const std::string& tokenizer,
                           std::int64_t layers = 1) {
    const RunDirectory run(run_path());
    RunIdentity other = identity();
    other.tokenizer = tokenizer;
    other.model.bos_id = bos;
    other.model.eos_ids = eos;
    other.model.num_layers = layers;
    CheckpointKeeper keeper(run, other, 2);
    return error_of(Exit::usage, [&] { keeper.resume(ResumeMode::automatic, *model_); });
  };
  {
    const RunDirectory run(run_path());
    RunIdentity now = identity();
    now.model.bos_id = 1;
    now.model.eos_ids = {2, 3};
    CheckpointKeeper(run, now, 2).save(make_state(3), *model_);
  }
  const std::string same = identity().tokenizer;
  for (const auto& [bos, eos, key] : {std::tuple(std::optional<std::int32_t>(4), Ids{2, 3}, "bos_id"),
                                      {std::nullopt, Ids{2, 3}, "bos_id"},
                                      {1, Ids{2}, "eos_ids"},
                                      {1, Ids{}, "eos_ids"},
                                      {1, Ids{3, 2}, "eos_ids"},
                                      {4, Ids{5}, "bos_id"}}) {
    const std::string another = message(bos, eos, "{}");
    EXPECT_TRUE(another.starts_with("--tokenizer: ")) << another;
    expect_contains(another, "was made with a tokenizer, this start has another one");
    expect_contains(message(bos, eos, ""), "was made with a tokenizer, this start has none");
    const std::string ids = message(bos, eos, same);
    expect_contains(ids, format(". --config or --model: %s is ", key));
    const std::string more = message(bos, eos, "{}", 2);
    expect_contains(more, ". --config or --model: ");
  }
}

// A field that is not read back is as if the run had begun there: each of them has a value that is not its default.
TEST(TrainStateTest, EveryFieldComesBack) {
  const TrainState state = some_state();
  const Json json = state.to_json(), untouched = TrainState{}.to_json();
  for (const auto& [key, value] : json.items()) EXPECT_NE(value, untouched.value(key, Json())) << key;
  const TrainState back = TrainState::from_json(json, "state");
  EXPECT_TRUE(back == state) << back.to_json().dump() << "\n" << json.dump();
}

// Counters so large that what is added to them would not fit are no counters of a run.
TEST(TrainStateTest, CountersNearTheEndOfTheirTypeAreRefused) {
  const Json good = TrainState{}.to_json();
  for (const char* key : {"step", "updates", "windows", "micro_steps", "skipped", "transient"}) {
    for (const std::uint64_t value : {(std::uint64_t{1} << 63) - 1, (std::uint64_t{1} << 63) - 2,
                                      std::uint64_t{1} << 62, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
      Json state = good;
      state["step"] = std::int64_t{1'000'000'000'000};
      state[key] = value;
      expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(state, "state"); }), key);
    }
  }
  Json spikes = good;
  spikes["spikes"]["observed"] = (std::uint64_t{1} << 63) - 1;
  expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(spikes, "state"); }), "observed");
  Json best = good;
  best["best"] = {{"step", 1}, {"val_loss", 1.5}};
  expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(best, "state"); }), "step");
  best["step"] = 1;
  EXPECT_EQ(TrainState::from_json(best, "state").best, (TrainState::Best{1, 1.5}));
  Json large = good;
  for (const char* key : {"step", "updates"}) large[key] = std::int64_t{1'000'000'000'000};
  EXPECT_EQ(TrainState::from_json(large, "state").step, 1'000'000'000'000);
}

// What a run counts of its steps is at most all of them.
TEST(TrainStateTest, NoCountOfStepsIsBeyondTheStep) {
  TrainState state = some_state(90);
  state.updates = state.skipped = state.transient = state.best->step = 90;
  const Json good = state.to_json();
  EXPECT_TRUE(TrainState::from_json(good, "state") == state);
  for (const char* key : {"/updates", "/skipped", "/transient", "/best/step"}) {
    Json bad = good;
    bad[Json::json_pointer(key)] = 91;
    expect_contains(error_of(Exit::bad_file, [&] { TrainState::from_json(bad, "state"); }),
                    std::string(key).substr(std::string(key).rfind('/') + 1) + ": got '91'");
  }
}

}  // namespace
}  // namespace weft
