// The rules of requests on the GPU: changes rows of logits before they are sampled from, and takes the changes back before
// they are scored. llmc/base/logit_row.h defines what changes; the result equals the host's apply() bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "llmc/base/logit_row.h"
#include "llmc/cuda/runtime/arena.h"

namespace weft::cuda {

// A LogitRow where kernels find it. All pointers are page-locked host memory: each value is read or written once, which
// costs no more than a copy, and nothing limits how many there are. A row without rules is all zeros.
struct DeviceLogitRow {
  const LogitEdit* edits;
  const ForbiddenId* forbidden;
  float* before;  // [num_edits + num_recent + num_forbidden]: what the changes have replaced
  std::int32_t num_edits, num_recent, num_forbidden;
  std::int32_t slot;  // of last_ids, for kUnknownId
  std::int32_t recent[kMostRecentIds];
  LogitPenalties penalties;
};

// The rows of one step, filled by the host.
class LogitRowUpload {
 public:
  explicit LogitRowUpload(std::int64_t most_rows);

  // Begins a step of so many rows, none of which has rules yet. No step that reads the one before may be in flight.
  void begin(std::int64_t rows);
  // Copies `row`. Exit::resources if the system has no more page-locked memory.
  void set(std::int64_t r, const LogitRow& row, std::int32_t slot);
  // [rows], always at the same address; null if no row of the step has rules.
  const DeviceLogitRow* rows() const { return any_ ? all() : nullptr; }

 private:
  DeviceLogitRow* all() const { return rows_.at<DeviceLogitRow>(0); }
  std::byte* take(std::size_t bytes);

  PinnedBuffer rows_;
  std::int64_t count_ = 0;  // rows of the step
  bool any_ = false;
  std::vector<std::unique_ptr<PinnedBuffer>> blocks_;  // what rows_ points to
  std::size_t block_ = 0;                              // that is filled
  std::uint64_t used_ = 0;                             // of its bytes
};

// Changes the fp32 logits [count, V], whose first row is that of rows[0]. last_ids [slots]: as in ScoreRows. Both are parts of a
// chain (hw/launch.cuh) if `overlapping`.
void edit_logits(const DeviceLogitRow* rows, std::int64_t count, float* logits, std::int64_t V,
                 const std::int32_t* last_ids, bool overlapping, cudaStream_t stream);
// Takes back what edit_logits() has changed, with the same arguments and the same last_ids.
void restore_logits(const DeviceLogitRow* rows, std::int64_t count, float* logits, std::int64_t V,
                    const std::int32_t* last_ids, bool overlapping, cudaStream_t stream);

}  // namespace weft::cuda
