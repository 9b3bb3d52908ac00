// DeviceRanks by NCCL. The library is loaded at its first use, so that programs also run on machines without it;
// nccl.h, found at build time, provides types and prototypes only. The communicator is non-blocking: every wait polls,
// and so notices a lost rank and its own time limit.
//
// An exchange is a group of sends and receives between all pairs. ncclReduceScatter would add in an order that depends
// on the number of ranks; ncclAllGather requires parts of equal size.
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/signals.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/comm/wait.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"

#if __has_include(<nccl.h>)
#include <nccl.h>
#define WEFT_NCCL
#endif

namespace weft::cuda {

#ifdef WEFT_NCCL

namespace {

// The functions of the loaded library. If it cannot be loaded they are null, and `problem` says why.
struct Nccl {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommGetAsyncError) get_async_error = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  std::string problem, version;

  Nccl() {
    constexpr const char* kFile = "libnccl.so.2";
    void* library = nullptr;
    if (const char* home = std::getenv("NCCL_HOME"); home != nullptr && *home != '\0') {
      library = dlopen((std::string(home) + "/lib/" + kFile).c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) library = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* reason = dlerror();
      problem = reason != nullptr ? reason : "libnccl.so.2 cannot be loaded";
      return;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr && problem.empty()) problem = std::string("libnccl.so.2 has no ") + name;
    };
    find(get_version, "ncclGetVersion");
    find(get_unique_id, "ncclGetUniqueId");
    find(init, "ncclCommInitRankConfig");
    find(finalize, "ncclCommFinalize");
    find(destroy, "ncclCommDestroy");
    find(abort, "ncclCommAbort");
    find(get_async_error, "ncclCommGetAsyncError");
    find(error_string, "ncclGetErrorString");
    find(last_error, "ncclGetLastError");
    find(send, "ncclSend");
    find(receive, "ncclRecv");
    find(group_start, "ncclGroupStart");
    find(group_end, "ncclGroupEnd");
    int number = 0;
    if (!problem.empty() || get_version(&number) != ncclSuccess) return;
    version = format("%d.%d.%d", number / 10000, number / 100 % 100, number % 100);
  }
};

// The library, loaded at the first call. NCCL reads its environment then, so the variable is set before.
const Nccl& nccl() {
  static const Nccl library = [] {
    setenv("NCCL_NVLS_ENABLE", "0", 0);  // the user's own value stays
    return Nccl();
  }();
  return library;
}

using Clock = std::chrono::steady_clock;

class NcclRanks final : public DeviceRanks {
 public:
  // What this rank needs of its own; no call between ranks.
  NcclRanks(Communicator& ranks, double time_limit_s) : ranks_(ranks), waiter_(ranks, time_limit_s) {
    if (rank() != 0) return;
    const ncclResult_t result = nccl().get_unique_id(&id_);
    if (result != ncclSuccess) fail(Exit::environment, "NCCL: %s", nccl().error_string(result));
  }
  // After a failure of any rank the communicator is not destroyed, because NCCL may wait forever for the others.
  ~NcclRanks() override {
    if (communicator_ == nullptr || given_up_ || std::uncaught_exceptions() > 0) return;
    ncclResult_t result = nccl().finalize(communicator_);
    const Clock::time_point begin = Clock::now();
    while (result == ncclInProgress && seconds_since(begin) < kFinalizeSeconds) {
      std::this_thread::yield();
      if (nccl().get_async_error(communicator_, &result) != ncclSuccess) return;
    }
    if (result == ncclSuccess) nccl().destroy(communicator_);
  }

  // The rest of the setup. A collective call.
  void connect() {
    ranks_.broadcast_bytes(reinterpret_cast<std::byte*>(id_.internal), sizeof id_.internal, 0);
    // For a first transfer below. After a failure the memory is not freed: that would wait for NCCL's kernels, which
    // wait for other ranks.
    void* probe = nullptr;
    std::optional<Stream> stream;
    do_together(ranks_, [&] {
      check(cudaMalloc(&probe, static_cast<std::size_t>(size())), "NCCL");
      stream.emplace();
    });
    // From here on the others wait for NCCL, so a rank that fails cannot tell them in a call: they notice when its
    // error ends the communication (Communicator::abort()).
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    finish(nccl().init(&communicator_, size(), id_, rank(), &config), "joining the ranks");
    // NCCL connects two GPUs at their first transfer. A first transfer here reports problems before the first step.
    std::vector<Range> parts;
    for (int r = 0; r < size(); ++r) parts.push_back({r, r + 1});
    gather(static_cast<std::byte*>(probe), parts, *stream);
    wait(*stream, nullptr, "the first exchange between the ranks");
    check(cudaFree(probe), "NCCL");
  }

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  std::string name() const override { return "NCCL " + nccl().version; }

  void exchange(const float* values, std::span<const Range> parts, float* received, cudaStream_t stream) override {
    const std::int64_t mine = parts[static_cast<std::size_t>(rank())].size();
    each_other([&](int other, std::int64_t row) {
      const Range part = parts[static_cast<std::size_t>(other)];
      send(values + part.begin, part.size(), ncclFloat32, other, stream);
      receive(received + row * mine, mine, ncclFloat32, other, stream);
    });
  }

  void gather(std::byte* values, std::span<const Range> parts, cudaStream_t stream) override {
    const Range mine = parts[static_cast<std::size_t>(rank())];
    each_other([&](int other, std::int64_t) {
      const Range part = parts[static_cast<std::size_t>(other)];
      send(values + mine.begin, mine.size(), ncclUint8, other, stream);
      receive(values + part.begin, part.size(), ncclUint8, other, stream);
    });
  }

  void wait(cudaStream_t stream, cudaEvent_t own, const char* action) override {
    give_up_on_error([&] { waiter_.wait(stream, own, action, [&] { look(action); }); });
  }

 private:
  static constexpr double kFinalizeSeconds = 5;

  void look(const char* action) const {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = nccl().get_async_error(communicator_, &state);
    if (asked != ncclSuccess) refuse(asked, action);
    if (state != ncclSuccess && state != ncclInProgress) refuse(state, action);
  }

  template <typename Work>
  void give_up_on_error(const Work& work) {
    try {
      work();
    } catch (...) {
      give_up();
      throw;
    }
  }

  // Aborts NCCL's kernels that wait for lost ranks, so that memory can be freed. Aborting may itself block forever, so
  // another thread does it.
  void give_up() {
    if (given_up_ || communicator_ == nullptr) return;
    given_up_ = true;
    try {
      const SignalsElsewhere signals;
      std::thread([abort = nccl().abort, communicator = communicator_] { abort(communicator); }).detach();
    } catch (const std::exception&) {  // no thread can be created: the process ends without the abort
    }
  }

  [[noreturn]] void refuse(ncclResult_t result, const char* action) const {
    const char* detail = nccl().last_error(communicator_);
    fail(Exit::environment, "%s: NCCL %s: %s%s%s", action, nccl().version.c_str(), nccl().error_string(result),
         detail != nullptr && *detail != '\0' ? ": " : "", detail != nullptr ? escaped(detail).c_str() : "");
  }

  // Returns when NCCL has queued what `result` stands for.
  void finish(ncclResult_t result, const char* action) {
    give_up_on_error([&] {
      const auto done = [&] {
        if (result == ncclInProgress) {
          const ncclResult_t asked = nccl().get_async_error(communicator_, &result);
          if (asked != ncclSuccess) result = asked;
        }
        return result != ncclInProgress;
      };
      waiter_.until(done, action, [] {});
      if (result != ncclSuccess) refuse(result, action);
    });
  }

  // Calls work(rank, index among the other ranks) for every other rank, within one NCCL group.
  template <typename Work>
  void each_other(const Work& work) {
    check_call(nccl().group_start());
    for (int other = 0; other < size(); ++other) {
      if (other != rank()) work(other, other < rank() ? other : other - 1);
    }
    finish(nccl().group_end(), kName);
  }
  void send(const void* values, std::int64_t count, ncclDataType_t type, int to, cudaStream_t stream) const {
    if (count > 0) check_call(nccl().send(values, static_cast<std::size_t>(count), type, to, communicator_, stream));
  }
  void receive(void* values, std::int64_t count, ncclDataType_t type, int from, cudaStream_t stream) const {
    if (count > 0)
      check_call(nccl().receive(values, static_cast<std::size_t>(count), type, from, communicator_, stream));
  }
  void check_call(ncclResult_t result) const {
    if (result != ncclSuccess && result != ncclInProgress) refuse(result, kName);
  }

  static constexpr const char* kName = "exchange between ranks";
  Communicator& ranks_;
  Waiter waiter_;
  ncclUniqueId id_{};  // of rank 0, for connect()
  ncclComm_t communicator_ = nullptr;
  bool given_up_ = false;
};

}  // namespace

std::string nccl_version() {
  return nccl().version;
}

std::unique_ptr<DeviceRanks> make_nccl_ranks(Communicator& ranks, double time_limit_s) {
  std::unique_ptr<NcclRanks> made;
  do_together(ranks, [&] {
    if (!nccl().problem.empty()) fail(Exit::environment, "%s", nccl().problem.c_str());
    made = std::make_unique<NcclRanks>(ranks, time_limit_s);
  });
  made->connect();
  return made;
}

#else

std::string nccl_version() {
  return {};
}

std::unique_ptr<DeviceRanks> make_nccl_ranks(Communicator& ranks, double /*time_limit_s*/) {
  fail_together(ranks, Error(Exit::environment, "this program was built without nccl.h: NCCL_HOME= names its folder"));
  return nullptr;
}

#endif

}  // namespace weft::cuda
