// The environments of launchers, whole and damaged.
#include "llmc/comm/launcher.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "test/cpp/test_files.h"

namespace weft {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<LaunchedRank> launched(const Variables& variables) {
  return launched_rank([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "16"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_PORT", "29500"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"LOCAL_WORLD_SIZE", "4"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kSlurm = {{"SLURM_PROCID", "9"},  {"SLURM_NTASKS", "64"}, {"SLURM_STEP_NUM_TASKS", "16"},
                          {"SLURM_LOCALID", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NODELIST", "gpu[03-05,9]"}};

TEST(Launcher, NoneIsNone) {
  EXPECT_FALSE(launched({}).has_value());
  EXPECT_FALSE(launched({{"MASTER_ADDR", "somewhere"}, {"MASTER_PORT", "x"}, {"WORLD_SIZE", "2"}}).has_value());
}

void expect_rank(const Variables& variables, const LaunchedRank& expected) {
  const LaunchedRank rank = *launched(variables);
  EXPECT_STREQ(rank.launcher, expected.launcher);
  EXPECT_EQ(rank.rank, expected.rank);
  EXPECT_EQ(rank.size, expected.size);
  EXPECT_EQ(rank.local_rank, expected.local_rank);
  EXPECT_EQ(rank.local_size, expected.local_size);
  EXPECT_EQ(rank.address, expected.address);
  EXPECT_EQ(rank.port, expected.port);
}

TEST(Launcher, WhatEachLauncherSays) {
  expect_rank(kTorchrun, {"torchrun", 5, 16, 1, 4, "10.0.0.1", 29500, "", false});
  expect_rank(kOpenMpi, {"Open MPI", 3, 4, 1, 2, "", 0, "", false});
  // The size is that of the step, not of the job. Nobody tells how many share a machine: rank 1 of it has one before it.
  expect_rank(kSlurm, {"Slurm", 9, 16, 1, 2, "gpu03", 0, "", false});
  Variables variables = kSlurm;
  variables["MASTER_ADDR"] = "fe80::1%eth0";
  variables["MASTER_PORT"] = "1";
  expect_rank(variables, {"Slurm", 9, 16, 1, 2, "fe80::1%eth0", 1, "", false});  // what the user says goes before
}

// There SLURM_PROCID is 0, and the other tasks of the job are not this program.
TEST(Launcher, ABatchScriptOfSlurmIsNoTask) {
  Variables variables = kSlurm;
  variables.erase("SLURM_STEP_ID");
  variables.erase("SLURM_STEP_NUM_TASKS");
  variables["SLURM_PROCID"] = "0";
  EXPECT_FALSE(launched(variables).has_value());
}

TEST(Launcher, TheInnermostLauncherCounts) {
  Variables all = kSlurm;
  all.insert(kOpenMpi.begin(), kOpenMpi.end());
  EXPECT_STREQ(launched(all)->launcher, "Open MPI");
  all.insert(kTorchrun.begin(), kTorchrun.end());
  EXPECT_STREQ(launched(all)->launcher, "torchrun");
}

TEST(Launcher, RanksOfOneMachine) {
  Variables slurm = kSlurm;
  for (const auto& [text, size] : {std::pair("8(x2)", 8), {"3,1", 3}, {"99", 16}, {"x", 2}, {"-4", 2}, {"", 2}}) {
    slurm["SLURM_STEP_TASKS_PER_NODE"] = text;
    EXPECT_EQ(launched(slurm)->local_size, size) << text;
  }
}

TEST(Launcher, WhereTheRanksMeet) {
  const auto meet = [](const Variables& variables) { return address_of_first(*launched(variables)); };
  EXPECT_EQ(meet(kTorchrun).address, "10.0.0.1");
  EXPECT_EQ(meet(kTorchrun).port, 29500);
  Variables torchrun = kTorchrun;
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "True";  // torchrun itself listens at MASTER_PORT
  EXPECT_EQ(meet(torchrun).port, 29501);
  torchrun["MASTER_PORT"] = "65535";
  EXPECT_EQ(meet(torchrun).port, 65534);
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_EQ(meet(torchrun).port, 65535);

  // Nobody tells a port: it follows from the job, so that two jobs do not meet.
  Variables slurm = kSlurm;
  slurm["SLURM_JOB_ID"] = "4711";
  EXPECT_EQ(meet(slurm).address, "gpu03");
  const std::int64_t port = meet(slurm).port;
  EXPECT_GE(port, 20'000);
  EXPECT_LT(port, 30'000);
  Variables other = slurm;
  other["SLURM_PROCID"] = "3";
  EXPECT_EQ(meet(other).port, port);
  other["SLURM_STEP_ID"] = "1";
  EXPECT_NE(meet(other).port, port);
  EXPECT_NE(launched(other)->run, launched(slurm)->run);
  slurm["WEFT_RUN_ID"] = "mine";
  EXPECT_NE(launched(slurm)->run, launched(kSlurm)->run);

  EXPECT_EQ(error_of(Exit::environment, [&] { meet(kOpenMpi); }),
            "MASTER_ADDR: not set, expected the name or address of the machine of rank 0: Open MPI does not tell");
  Variables one_machine = kOpenMpi;
  one_machine["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4";
  EXPECT_EQ(meet(one_machine).address, "127.0.0.1");
}

TEST(Launcher, WhatIsMissingIsNamed) {
  const std::pair<const Variables*, std::vector<const char*>> cases[] = {
      {&kTorchrun, {"WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}},
      {&kOpenMpi, {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}},
      {&kSlurm, {"SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"}}};
  for (const auto& [whole, needed] : cases) {
    for (const char* variable : needed) {
      Variables variables = *whole;
      variables.erase(variable);
      const std::string message = error_of(Exit::environment, [&] { launched(variables); });
      EXPECT_TRUE(message.starts_with(std::string(variable) + ": not set, but ")) << message;
    }
  }
}

// Each character that is no control: letters, digits and what names and addresses are written with, and none beside them.
TEST(Launcher, EachCharacterOfAnAddress) {
  const std::string good = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-._:%";
  for (int c = 1; c < 256; ++c) {
    Variables variables = kTorchrun;
    variables["MASTER_ADDR"] = std::string("a") + static_cast<char>(c);
    if (good.find(static_cast<char>(c)) != std::string::npos) {
      EXPECT_EQ(launched(variables)->address, variables["MASTER_ADDR"]);
    } else {
      expect_contains(error_of(Exit::environment, [&] { launched(variables); }), "MASTER_ADDR");
    }
  }
}

// All that names a start: two of them on one machine must not meet.
TEST(Launcher, EachVariableOfAStartIsInItsName) {
  const std::tuple<const Variables*, const char*, const char*> cases[] = {
      {&kTorchrun, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"},
      {&kOpenMpi, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
      {&kSlurm, "SLURM_JOB_ID", "SLURM_STEP_ID"}};
  for (const auto& [launcher, first, second] : cases) {
    Variables variables = *launcher;
    std::set<std::string> names;
    const std::vector<const char*> all = {first, second, "WEFT_RUN_ID"};
    for (const char* variable : all) variables[variable] = "7";
    names.insert(launched(variables)->run);
    for (const char* variable : all) {
      Variables other = variables;
      other[variable] = "8";
      names.insert(launched(other)->run);
    }
    EXPECT_EQ(names.size(), 4u) << first;
  }
}

TEST(Launcher, TheLimitsThemselvesAreGood) {
  Variables variables = kTorchrun;
  variables["WORLD_SIZE"] = "65536";
  variables["RANK"] = variables["LOCAL_RANK"] = variables["MASTER_PORT"] = "65535";
  variables["LOCAL_WORLD_SIZE"] = "65536";
  variables["MASTER_ADDR"] = std::string(253, 'a');
  expect_rank(variables, {"torchrun", 65535, 65536, 65535, 65536, std::string(253, 'a'), 65535, "", false});
  variables = kTorchrun;
  variables["RANK"] = variables["LOCAL_RANK"] = "0";
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = variables["MASTER_PORT"] = "1";
  variables["MASTER_ADDR"] = "a";
  expect_rank(variables, {"torchrun", 0, 1, 0, 1, "a", 1, "", false});
}

TEST(Launcher, WhatCannotBeIsRefused) {
  const std::string long_name(254, 'a');
  const std::pair<const char*, std::vector<std::string>> cases[] = {
      {"RANK", {"", "-1", "16", "1.0", "0x1", " 1", "1 ", "five", "99999999999999999999"}},
      {"WORLD_SIZE", {"", "0", "-4", "65537", "16\n", "9223372036854775808"}},
      {"LOCAL_RANK", {"", "-1", "16", "1e1"}},
      {"MASTER_PORT", {"", "0", "65536", "-1", "http"}},
      {"MASTER_ADDR", {"", "a b", "-v", "$(reboot)", "host\n", "host/path", "\xff", long_name}}};
  for (const auto& [variable, values] : cases) {
    for (const std::string& value : values) {
      Variables variables = kTorchrun;
      variables[variable] = value;
      const std::string message = error_of(Exit::environment, [&] { launched(variables); });
      EXPECT_TRUE(message.starts_with(std::string(variable) + ": got '")) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos);
    }
  }
}

TEST(Launcher, TheFirstOfSlurmsNodes) {
  const std::pair<const char*, const char*> good[] = {{"one", "one"},         {"a,b", "a"},
                                                      {"gpu[3]", "gpu3"},     {"gpu[03-05,9]", "gpu03"},
                                                      {"n[9,3-5]x,y", "n9x"}, {"rack[1-2]node[007-8]", "rack1node007"},
                                                      {"a.b-c_d", "a.b-c_d"}};
  for (const auto& [nodes, first] : good) EXPECT_EQ(first_node(nodes), first) << nodes;
  for (const char* nodes :
       {"", ",a", "gpu[", "gpu[]", "gpu[,1]", "gpu[-1]", "gpu[1-2", "a]b", "[a b]", "a[1];rm", "-a"}) {
    expect_contains(error_of(Exit::environment, [&] { first_node(nodes); }), "SLURM_STEP_NODELIST: got ");
  }
}

}  // namespace
}  // namespace weft
