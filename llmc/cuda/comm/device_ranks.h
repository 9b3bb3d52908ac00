// What the GPUs of a run's ranks say to each other: values in device memory, moved as they are, in the order of a stream.
// The rule is that of llmc/comm/communicator.h: all ranks make the same calls in the same order, with the same sizes.
//
// Three ways: the copy engines of GPUs of one machine that reach each other's memory, NCCL, and through host memory by the
// Communicator. None of them adds values, so all give the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "llmc/base/range.h"
#include "llmc/comm/communicator.h"

namespace weft::cuda {

class DeviceRanks {
 public:
  virtual ~DeviceRanks() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "NCCL 2.28.9", or what else moves the values.
  virtual std::string name() const = 0;

  // Memory in which the values of exchange() and gather() lie; valid as long as this object. Of all ranks, which call it in
  // the same order: what has the same place in it is the same.
  virtual void share(std::byte* /*memory*/, std::uint64_t /*bytes*/) {}

  // Rank d gets the elements parts[d] of every other rank's `values`: received [size - 1, parts[rank].size()] has those of
  // the others, in their order. The parts may leave elements out, and be empty. `received` is apart from `values`.
  virtual void exchange(const float* values, std::span<const Range> parts, float* received, cudaStream_t stream) = 0;
  // Rank r has the bytes parts[r] of `values`; afterwards every rank has all parts, which do not overlap.
  virtual void gather(std::byte* values, std::span<const Range> parts, cudaStream_t stream) = 0;

  // Returns when the work of `stream` has ended. Throws if the ranks have ended, or if it takes longer than the time limit.
  // `own`: an event behind the work of this rank that waits for no other one. The time until it comes does not count, and
  // all ranks wait with one: who is late is named. Null: only this rank waits. Errors of kernels are those of
  // cuda::check(). `action` names the work in errors.
  virtual void wait(cudaStream_t stream, cudaEvent_t own, const char* action) = 0;
};

// The library that this process loads: "2.28.9"; empty where it finds none, or was built without its header.
std::string nccl_version();

// By the copy engines where all ranks are on one machine and reach each other's memory; else by NCCL, if all can load it and
// each has a GPU of its own; else through the host, with a warning of the first rank that says why. The environment variable
// WEFT_EXCHANGE of the first rank, "nccl" or "host", chooses one. Call it with the rank's GPU as the current one. `ranks`
// outlives it. Exit::environment if NCCL refuses, or a rank does not come within the time limit. Sets NCCL_NVLS_ENABLE=0 (no
// NVLink multicast) unless the user has set it.
std::unique_ptr<DeviceRanks> make_device_ranks(Communicator& ranks, double time_limit_s);

// The ways by themselves. With ranks that are threads of one process no rank may free memory of its GPU while another one is
// in a call of make_peer_ranks()'s object: CUDA then waits for all GPUs of the process, and so for that call.
std::unique_ptr<DeviceRanks> make_peer_ranks(Communicator& ranks, double time_limit_s);
std::unique_ptr<DeviceRanks> make_nccl_ranks(Communicator& ranks, double time_limit_s);
// Values pass through page-locked memory, and the host waits for each call: what tests on one GPU use, and ranks without
// NCCL.
std::unique_ptr<DeviceRanks> make_staged_ranks(Communicator& ranks);

}  // namespace weft::cuda
