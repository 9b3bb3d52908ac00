#include "llmc/comm/launcher.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "llmc/base/error.h"

namespace weft {

namespace {

constexpr std::int64_t kMostRanks = 1 << 16;
constexpr std::size_t kLongestName = 253;  // of a machine (RFC 1035, section 2.3.4)

struct Launcher {
  const char *name, *rank, *size, *local_rank;
};
constexpr Launcher kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"};
constexpr Launcher kOpenMpi = {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK"};
constexpr Launcher kSlurm = {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"};

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

LaunchedRank read(const Environment& environment, const Launcher& launcher) {
  const auto get = [&](const char* variable, std::int64_t least, std::int64_t most) {
    return number(variable, value_of(environment, launcher, variable), least, most);
  };
  LaunchedRank result;
  result.launcher = launcher.name;
  result.size = get(launcher.size, 1, kMostRanks);
  result.rank = get(launcher.rank, 0, result.size - 1);
  result.local_rank = get(launcher.local_rank, 0, result.size - 1);
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
  if (is_set("MASTER_PORT")) result.port = number("MASTER_PORT", environment("MASTER_PORT"), 1, 65535);
  return result;
}

}  // namespace weft
