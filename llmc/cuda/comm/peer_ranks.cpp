// DeviceRanks for GPUs of one machine that can access each other's memory: copies by the copy engines, which unlike
// NCCL's sends use no multiprocessor. Each rank reads what is meant for it from the memory of the others.
//
// Two counters for each pair of ranks keep the order. They lie in the memory of the rank that waits for them and grow
// by one with each call. A rank signals the others that its values are ready, waits in its stream for theirs, copies,
// and signals that it has read; its call ends, in its stream, when all others have read its values. The driver writes
// and waits in stream order (cuStreamWriteValue32, cuStreamWaitValue32); neither a kernel nor the host waits.
#include <cudaTypedefs.h>

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/comm/wait.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/driver_function.h"
#include "llmc/cuda/runtime/error.h"
#include "llmc/cuda/runtime/stream.h"

namespace weft::cuda {

namespace {

constexpr const char* kName = "exchange between ranks";

// What a rank tells the others about memory that it shares.
struct Exported {
  cudaIpcMemHandle_t handle{};
  const void* address = nullptr;  // in the owner's process
  std::uint64_t bytes = 0;
  std::uint64_t process = 0;
  int device = 0;
};

// A random number that identifies this process. A process id would not: two containers may each have a process 1.
std::uint64_t this_process() {
  static const std::uint64_t number = [] {
    std::random_device random;
    return static_cast<std::uint64_t>(random()) << 32 | random();
  }();
  return number;
}

// Counters that the other ranks write into this rank's memory, [size] each: `ready`: calls for which rank r has its
// values ready; `read`: calls in which rank r has read this rank's values.
struct Counters {
  std::uint32_t* ready = nullptr;
  std::uint32_t* read = nullptr;
};

class PeerRanks final : public DeviceRanks {
 public:
  // What this rank needs of its own; no call between ranks.
  PeerRanks(Communicator& ranks, double time_limit_s)
      : ranks_(ranks), waiter_(ranks, time_limit_s), counters_(counter_plan(ranks.size())) {
    counters_.clear(release_stream_);
    release_stream_.synchronize(kName);
  }
  ~PeerRanks() override { close(); }

  // The rest of the setup. A collective call.
  void connect() {
    const std::vector<std::byte*> theirs = open(counters_.at<std::byte>(0), counters_.bytes());
    for (std::byte* base : theirs) counters_of_.push_back(counters_at(base));
    probe();
  }

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  std::string name() const override { return "copy engines"; }

  void share(std::byte* memory, std::uint64_t bytes) override {
    if (bytes > 0) shared_.push_back({memory, bytes, open(memory, bytes)});
  }

  void exchange(const float* values, std::span<const Range> parts, float* received, cudaStream_t stream) override {
    const Range mine = parts[me()];
    const auto bytes = static_cast<std::size_t>(mine.size()) * sizeof(float);
    call(stream, [&](std::size_t other) {
      const auto row = static_cast<std::int64_t>(other < me() ? other : other - 1);
      const auto* from = reinterpret_cast<const float*>(of_rank(other, reinterpret_cast<const std::byte*>(values)));
      copy(received + row * mine.size(), from + mine.begin, bytes, stream);
    });
  }

  void gather(std::byte* values, std::span<const Range> parts, cudaStream_t stream) override {
    call(stream, [&](std::size_t other) {
      const Range part = parts[other];
      copy(values + part.begin, of_rank(other, values) + part.begin, static_cast<std::size_t>(part.size()), stream);
    });
  }

  void wait(cudaStream_t stream, cudaEvent_t own, const char* action) override {
    try {
      waiter_.wait(stream, own, action, [] {});
    } catch (...) {
      release();
      throw;
    }
  }

 private:
  struct Shared {
    std::byte* memory;
    std::uint64_t bytes;
    std::vector<std::byte*> of_rank;
  };

  std::size_t me() const { return static_cast<std::size_t>(rank()); }
  static MemoryPlan counter_plan(int size) {
    MemoryPlan plan("counters of the ranks");
    plan.add(2 * static_cast<std::uint64_t>(size) * sizeof(std::uint32_t));
    return plan;
  }
  Counters counters_at(std::byte* base) const {
    auto* const first = reinterpret_cast<std::uint32_t*>(base);
    return {first, first + size()};
  }

  // Shares `memory` and returns the address at which this process can access each rank's. A collective call.
  std::vector<std::byte*> open(std::byte* memory, std::uint64_t bytes) {
    Exported mine;
    mine.address = memory;
    mine.bytes = bytes;
    do_together(ranks_, [&] {
      mine.process = this_process();
      check(cudaGetDevice(&mine.device), kName);
      check(cudaIpcGetMemHandle(&mine.handle, memory), kName);
    });
    const std::vector<Exported> all = ranks_.gather(mine);
    std::vector<std::byte*> addresses;
    do_together(ranks_, [&] {
      for (const Exported& each : all) addresses.push_back(reach(each));
    });
    return addresses;
  }

  // Closes all opened handles but the first `keep`.
  void close(std::size_t keep = 0) noexcept {
    for (; opened_.size() > keep; opened_.pop_back()) cudaIpcCloseMemHandle(opened_.back());
    cudaGetLastError();
  }

  std::byte* reach(const Exported& memory) {
    auto* const address = static_cast<std::byte*>(const_cast<void*>(memory.address));
    if (memory.process != this_process()) {
      void* opened = nullptr;
      check(cudaIpcOpenMemHandle(&opened, memory.handle, cudaIpcMemLazyEnablePeerAccess), kName);
      opened_.push_back(opened);
      return static_cast<std::byte*>(opened);
    }
    int own = 0;
    check(cudaGetDevice(&own), kName);
    if (own == memory.device) return address;
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(memory.device, 0);
    if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      check(enabled, kName);
    }
    return address;
  }

  // The address in rank `other`'s memory that corresponds to `memory` here.
  const std::byte* of_rank(std::size_t other, const std::byte* memory) const {
    // newest first: an older one may have been freed
    for (auto shared = shared_.rbegin(); shared != shared_.rend(); ++shared) {
      if (memory >= shared->memory && memory < shared->memory + shared->bytes) {
        return shared->of_rank[other] + (memory - shared->memory);
      }
    }
    fail(Exit::internal, "an exchange of memory that is not shared");
  }

  // Runs one exchange: read(other) queues the copies from the memory of rank `other`, whose values stay unchanged
  // meanwhile.
  template <typename Read>
  void call(cudaStream_t stream, const Read& read) {
    ++calls_;
    const auto others =
        [&](const auto& work) {  // beginning with the next rank, so that not all read from one rank at the same time
          for (std::size_t i = 1; i < counters_of_.size(); ++i) work((me() + i) % counters_of_.size());
        };
    const Counters own = counters_of_[me()];
    others([&](std::size_t other) { write(counters_of_[other].ready + me(), stream); });
    others([&](std::size_t other) {
      wait_for(own.ready + other, stream);
      read(other);
      write(counters_of_[other].read + me(), stream);
    });
    others([&](std::size_t other) { wait_for(own.read + other, stream); });
  }

  void write(std::uint32_t* counter, cudaStream_t stream) const {
    check_driver(write_(stream, reinterpret_cast<CUdeviceptr>(counter), calls_, CU_STREAM_WRITE_VALUE_DEFAULT));
  }
  void wait_for(std::uint32_t* counter, cudaStream_t stream) const {
    check_driver(wait_(stream, reinterpret_cast<CUdeviceptr>(counter), calls_, CU_STREAM_WAIT_VALUE_GEQ));
  }
  static void check_driver(CUresult result) {
    if (result != CUDA_SUCCESS) fail(Exit::environment, "%s: the driver says %d", kName, static_cast<int>(result));
  }
  static void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
    if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), kName);
  }

  // Ends the waits in this rank's streams for lost ranks, so that memory can be freed; the values are invalid anyway.
  void release() noexcept {
    constexpr std::uint32_t kFarAhead = 1u << 30;
    for (int i = 0; i < 2 * size(); ++i) {
      write_(release_stream_, reinterpret_cast<CUdeviceptr>(counters_.at<std::uint32_t>(0) + i), calls_ + kFarAhead,
             CU_STREAM_WRITE_VALUE_DEFAULT);
    }
  }

  // Checks by a first transfer that values arrive unchanged.
  void probe() {
    const auto bytes = static_cast<std::uint64_t>(size());
    MemoryPlan plan("probe of the ranks");
    plan.add(bytes);
    const auto value = [](std::size_t r) { return static_cast<unsigned char>(r * 7 + 3); };
    std::optional<DeviceArena> memory;
    std::optional<Stream> stream;
    do_together(ranks_, [&] {
      memory.emplace(plan);
      stream.emplace();
      check(cudaMemsetAsync(memory->at<std::byte>(me()), value(me()), 1, *stream), kName);
    });
    const std::size_t opened = opened_.size();
    share(memory->at<std::byte>(0), bytes);
    std::vector<Range> parts;
    for (int r = 0; r < size(); ++r) parts.push_back({r, r + 1});
    const std::optional<Error> error = error_from([&] {
      // A rank that cannot queue its part must say so before the others wait for it.
      do_together(ranks_, [&] { gather(memory->at<std::byte>(0), parts, *stream); });
      do_together(ranks_, [&] {
        wait(*stream, nullptr, "the first exchange between the ranks");
        std::vector<unsigned char> got(bytes);
        check(cudaMemcpy(got.data(), memory->at<std::byte>(0), bytes, cudaMemcpyDeviceToHost), kName);
        for (std::size_t r = 0; r < got.size(); ++r) {
          if (got[r] != value(r)) fail(Exit::environment, "rank %zu's memory cannot be read", r);
        }
      });
    });
    if (error) release();
    // Close before the owner frees the memory: a later allocation at the same address could otherwise not be opened.
    close(opened);
    shared_.clear();
    fail_together(ranks_, error);
  }

  Communicator& ranks_;
  Waiter waiter_;
  const PFN_cuStreamWriteValue32_v11070 write_ =
      driver_function<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32");
  const PFN_cuStreamWaitValue32_v11070 wait_ = driver_function<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32");
  const Stream release_stream_;
  DeviceArena counters_;
  std::vector<Counters> counters_of_;  // the counters of each rank
  std::vector<Shared> shared_;
  std::vector<void*> opened_;
  std::uint32_t calls_ = 0;
};

}  // namespace

std::unique_ptr<DeviceRanks> make_peer_ranks(Communicator& ranks, double time_limit_s) {
  std::unique_ptr<PeerRanks> made;
  do_together(ranks, [&] { made = std::make_unique<PeerRanks>(ranks, time_limit_s); });
  made->connect();
  return made;
}

}  // namespace weft::cuda
