#include "llmc/cuda/comm/device_ranks.h"

#include <cstdlib>
#include <fstream>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/base/log.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

// Identifies the machine: two machines may share a host name, but not a boot id.
std::string boot_id() {
  std::string boot;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, boot);
  return boot;
}

// The bus address of the current GPU, unique within this machine.
std::string bus_id() {
  char bus[32] = "";
  int device = 0;
  check(cudaGetDevice(&device), "GPU");
  check(cudaDeviceGetPCIBusId(bus, sizeof bus, device), "GPU");
  return bus;
}

}  // namespace

std::unique_ptr<DeviceRanks> make_device_ranks(Communicator& ranks, double time_limit_s) {
  const char* const given = std::getenv("WEFT_EXCHANGE");
  const std::string wanted = ranks.broadcast_text(given != nullptr ? given : "");
  if (wanted == "host") return make_staged_ranks(ranks);
  const std::vector<std::uint64_t> machines = ranks.gather(xxh3_64(boot_id())),
                                   gpus = ranks.gather(xxh3_64(boot_id() + " " + bus_id()));
  bool one_machine = true, shared = false;
  for (std::size_t r = 0; r < gpus.size(); ++r) {
    one_machine &= machines[r] == machines[0];
    for (std::size_t s = 0; s < r; ++s) shared |= gpus[r] == gpus[s];
  }
  if (one_machine && !shared && wanted != "nccl") {
    try {
      return make_peer_ranks(ranks, time_limit_s);
    } catch (const Error& error) {
      ranks.check();  // throws if the cause was a lost rank
      if (ranks.rank() == 0) log_info("the GPUs do not reach each other's memory: %s", error.what());
    }
  }
  const bool without = largest(ranks, nccl_version().empty() ? 1 : 0) != 0;
  if (!shared && !without) return make_nccl_ranks(ranks, time_limit_s);
  if (ranks.rank() == 0) {
    log_warning(
        "%s: the ranks exchange gradients through host memory, which is slow",
        shared ? "two ranks have the same GPU" : "a rank finds no NCCL (libnccl.so.2; NCCL_HOME= names its folder)");
  }
  return make_staged_ranks(ranks);
}

}  // namespace weft::cuda
