// Communication between the GPUs of a run's ranks: moves values in device memory, unchanged, in stream order. As in
// llmc/comm/communicator.h, all ranks make the same calls in the same order, with the same sizes.
//
// Three implementations: the copy engines of GPUs of one machine that can access each other's memory, NCCL, and host
// memory by the Communicator. None of them adds values, so all give the same bits.
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
  // What moves the values, such as "NCCL 2.28.9".
  virtual std::string name() const = 0;

  // Registers memory in which the values of exchange() and gather() lie; valid as long as this object. All ranks call
  // it in the same order; the same offset means the same value on every rank.
  virtual void share(std::byte* /*memory*/, std::uint64_t /*bytes*/) {}

  // All-to-all: rank d receives elements parts[d] of every other rank's `values`. received [size - 1,
  // parts[rank].size()] gets those of the other ranks in rank order. The parts need not cover all elements and may be
  // empty. `received` does not overlap `values`.
  virtual void exchange(const float* values, std::span<const Range> parts, float* received, cudaStream_t stream) = 0;
  // All-gather in place: rank r provides bytes parts[r] of `values`; afterwards every rank has all parts. They do not
  // overlap.
  virtual void gather(std::byte* values, std::span<const Range> parts, cudaStream_t stream) = 0;

  // Returns when the work in `stream` has ended. Throws if a rank is lost or the time limit is exceeded. `own`: an
  // event after the part of this rank's work that waits for no other rank. The time until it completes does not count,
  // and all ranks then synchronise, so that an error can name the one that is late. Null: only this rank waits. Kernel
  // errors are those of cuda::check(). `action` names the work in errors.
  virtual void wait(cudaStream_t stream, cudaEvent_t own, const char* action) = 0;
};

// The version of the NCCL library that this process loads, as "2.28.9"; empty if it finds none or was built without its
// header.
std::string nccl_version();

// Chooses copy engines if all ranks are on one machine and can access each other's memory; else NCCL, if all ranks can
// load it and each has its own GPU; else host memory, with a warning of rank 0 that says why. The environment variable
// WEFT_EXCHANGE of rank 0 ("nccl" or "host") overrides the choice. The rank's GPU must be current; `ranks` must outlive
// the result. Exit::environment if NCCL fails, or a rank does not arrive within the time limit. Sets NCCL_NVLS_ENABLE=0
// (no NVLink multicast) unless the user has set it.
std::unique_ptr<DeviceRanks> make_device_ranks(Communicator& ranks, double time_limit_s);

// The implementations. If one rank cannot set up what it needs of its own, all throw. If ranks are threads of one
// process, no rank may free GPU memory while another one is in a call of make_peer_ranks()'s object: freeing waits for
// all GPUs of the process, and so for that call.
std::unique_ptr<DeviceRanks> make_peer_ranks(Communicator& ranks, double time_limit_s);
std::unique_ptr<DeviceRanks> make_nccl_ranks(Communicator& ranks, double time_limit_s);
// Values pass through page-locked host memory, and the host waits in each call: for tests on one GPU, and for ranks
// without NCCL.
std::unique_ptr<DeviceRanks> make_staged_ranks(Communicator& ranks);

}  // namespace weft::cuda
