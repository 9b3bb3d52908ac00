#include "llmc/comm/launcher.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"

namespace weft {

namespace {

constexpr std::int64_t kMostRanks = 1 << 16;
constexpr std::size_t kLongestName = 253;  // of a machine (RFC 1035, section 2.3.4)

struct Launcher {
  const char *name, *rank, *size, *local_rank, *local_size;
  const char* run[2];  // variables that together name one start
};
constexpr Launcher kTorchrun = {"torchrun",         "RANK",
                                "WORLD_SIZE",       "LOCAL_RANK",
                                "LOCAL_WORLD_SIZE", {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}};
constexpr Launcher kOpenMpi = {"Open MPI",
                               "OMPI_COMM_WORLD_RANK",
                               "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE",
                               {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}};
constexpr Launcher kSlurm = {"Slurm",
                             "SLURM_PROCID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_LOCALID",
                             "SLURM_STEP_TASKS_PER_NODE",
                             {"SLURM_JOB_ID", "SLURM_STEP_ID"}};
constexpr const char* kOwnRun = "WEFT_RUN_ID";

constexpr std::int64_t kFirstPort = 20'000, kPorts = 10'000;  // below those that systems give to clients
constexpr std::int64_t kLastPort = 65535;

[[noreturn]] void refuse(const char* variable, const std::string& value, const std::string& expected) {
  fail(Exit::environment, "%s: got %s, expected %s", variable, escaped(value).c_str(), expected.c_str());
}

std::string value_of(const Environment& environment, const Launcher& launcher, const char* variable) {
  const char* const value = environment(variable);
  if (value == nullptr) {
    fail(Exit::environment, "%s: not set, but %s is: %s sets both. Unset %s to start without it", variable,
         launcher.rank, launcher.name, launcher.rank);
  }
  return value;
}

std::int64_t number(const char* variable, const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t value = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end.ec != std::errc{} || end.ptr != text.data() + text.size() || value < least || value > most) {
    refuse(variable, text,
           format("a number from %lld to %lld", static_cast<long long>(least), static_cast<long long>(most)));
  }
  return value;
}

// What may stand in the name of a machine, or in an IPv4 or IPv6 address with its zone.
bool is_name(const std::string& text) {
  const auto good = [](unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || std::strchr("-._:%", c);
  };
  return !text.empty() && text.size() <= kLongestName && text[0] != '-' && text.find('\0') == std::string::npos &&
         std::all_of(text.begin(), text.end(), good);
}

// "4", or Slurm's "4(x2),3": its first number, which is that of most nodes. It only decides how the ranks of a machine
// share its cores, so a text that is no number counts as local_rank + 1.
std::int64_t local_size(const char* text, const LaunchedRank& rank) {
  std::int64_t value = 0;
  if (text != nullptr) std::from_chars(text, text + std::strlen(text), value);
  return std::clamp(value, rank.local_rank + 1, rank.size);
}

LaunchedRank read(const Environment& environment, const Launcher& launcher) {
  const auto get = [&](const char* variable, std::int64_t least, std::int64_t most) {
    return number(variable, value_of(environment, launcher, variable), least, most);
  };
  LaunchedRank result;
  result.launcher = launcher.name;
  result.size = get(launcher.size, 1, kMostRanks);
  result.rank = get(launcher.rank, 0, result.size - 1);
  result.local_rank = get(launcher.local_rank, 0, result.size - 1);
  result.local_size = local_size(environment(launcher.local_size), result);
  for (const char* variable : {launcher.run[0], launcher.run[1], kOwnRun}) {
    const char* const value = environment(variable);
    result.run += format("%s/", value != nullptr ? value : "");
  }
  return result;
}

}  // namespace

std::string first_node(const std::string& nodes) {
  std::string name;
  std::size_t at = 0;
  while (at < nodes.size() && nodes[at] != ',') {
    if (nodes[at] != '[') {
      name += nodes[at++];
      continue;
    }
    // The first number of a list such as [03-05,9].
    const std::size_t close = nodes.find(']', at), end = nodes.find_first_of("-,]", at);
    if (close == std::string::npos || end == at + 1) refuse("SLURM_STEP_NODELIST", nodes, "a list of nodes");
    name += nodes.substr(at + 1, end - at - 1);
    at = close + 1;
  }
  if (!is_name(name)) refuse("SLURM_STEP_NODELIST", nodes, "a list of nodes");
  return name;
}

std::optional<LaunchedRank> launched_rank(const Environment& environment) {
  const auto is_set = [&](const char* variable) { return environment(variable) != nullptr; };
  LaunchedRank result;
  if (is_set(kTorchrun.rank)) {
    result = read(environment, kTorchrun);
    for (const char* variable : {"MASTER_ADDR", "MASTER_PORT"}) value_of(environment, kTorchrun, variable);
  } else if (is_set(kOpenMpi.rank)) {
    result = read(environment, kOpenMpi);
  } else if (is_set(kSlurm.rank) && is_set("SLURM_STEP_ID")) {
    result = read(environment, kSlurm);
    result.address = first_node(value_of(environment, kSlurm, "SLURM_STEP_NODELIST"));
  } else {
    return std::nullopt;
  }
  if (is_set("MASTER_ADDR")) {
    result.address = environment("MASTER_ADDR");
    if (!is_name(result.address)) refuse("MASTER_ADDR", result.address, "the name or address of a machine");
  }
  if (is_set("MASTER_PORT")) result.port = number("MASTER_PORT", environment("MASTER_PORT"), 1, kLastPort);
  const char* const store = environment("TORCHELASTIC_USE_AGENT_STORE");
  result.port_is_taken = store != nullptr && std::strcmp(store, "True") == 0;
  return result;
}

RankAddress address_of_first(const LaunchedRank& rank) {
  RankAddress result{rank.address, rank.port};
  if (result.address.empty() && rank.local_size == rank.size) result.address = "127.0.0.1";
  if (result.address.empty()) {
    fail(Exit::environment,
         "MASTER_ADDR: not set, expected the name or address of the machine of rank 0: %s does not tell",
         rank.launcher);
  }
  if (result.port == 0) {
    result.port = kFirstPort + static_cast<std::int64_t>(xxh3_64(rank.run) % static_cast<std::uint64_t>(kPorts));
  } else if (rank.port_is_taken) {
    result.port += result.port < kLastPort ? 1 : -1;
  }
  return result;
}

}  // namespace weft
