// One block a row. The three lists of a row may name an id more than once, so they are worked off one after the other, and
// taken back in the opposite order: `before` of a list is what the lists before it have left.
#include "llmc/cuda/op/sample/logit_rows.h"

#include <algorithm>
#include <cstring>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/launch.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::uint64_t kBlockBytes = 1 << 20;  // of page-locked memory, at least
constexpr std::uint64_t kAlignment = 16;

struct LogitRowsIo {
  const DeviceLogitRow* rows;
  float* logits;
  std::int64_t V;
  const std::int32_t* last_ids;
};

// The row of this block, and its recent ids; both in shared memory, because every thread needs them and they come from the
// host's.
struct SharedRow {
  DeviceLogitRow row;
  bool found[kMostRecentIds];  // recent ids that are among the edits
};
static_assert(sizeof(DeviceLogitRow) % sizeof(std::uint32_t) == 0);
static_assert(sizeof(DeviceLogitRow) / sizeof(std::uint32_t) <= kThreads);

__device__ void load_row(SharedRow& shared, const LogitRowsIo& io) {
  const auto* const from = reinterpret_cast<const std::uint32_t*>(io.rows + blockIdx.x);
  auto* const to = reinterpret_cast<std::uint32_t*>(&shared.row);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < static_cast<int>(sizeof(DeviceLogitRow) / sizeof(std::uint32_t))) to[thread] = from[thread];
  wait_for_predecessors();
  launch_dependents();
  __syncthreads();
  if (thread < shared.row.num_recent) {
    std::int32_t& id = shared.row.recent[thread];
    if (id == kUnknownId) id = io.last_ids[shared.row.slot];
    shared.found[thread] = false;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) edit_logits_kernel(const LogitRowsIo io) {
  __shared__ SharedRow shared;
  load_row(shared, io);
  const DeviceLogitRow& row = shared.row;
  float* const logits = io.logits + blockIdx.x * io.V;
  const int thread = static_cast<int>(threadIdx.x), recent = row.num_recent;
  for (int i = thread; i < row.num_edits; i += kThreads) {
    LogitEdit edit = row.edits[i];
    for (int r = 0; r < recent; ++r) {
      if (row.recent[r] != edit.id) continue;
      ++edit.generated;
      shared.found[r] = true;
    }
    row.before[i] = logits[edit.id];
    logits[edit.id] = edited_logit(logits[edit.id], edit, row.penalties);
  }
  __syncthreads();
  // All of them are read before one is changed: an id that comes twice has the same value in both places.
  float* const before_recent = row.before + row.num_edits;
  float logit = 0;
  if (thread < recent) before_recent[thread] = logit = logits[row.recent[thread]];
  __syncthreads();
  if (thread < recent && !shared.found[thread]) {
    const std::int32_t id = row.recent[thread];
    LogitEdit edit = {id, 0, 0, 0};
    bool first = true;
    for (int r = 0; r < recent; ++r) {
      edit.generated += row.recent[r] == id ? 1 : 0;
      first = first && (r >= thread || row.recent[r] != id);
    }
    if (first) logits[id] = edited_logit(logit, edit, row.penalties);
  }
  __syncthreads();
  float* const before_forbidden = before_recent + recent;
  for (int i = thread; i < row.num_forbidden; i += kThreads) before_forbidden[i] = logits[row.forbidden[i].id];
  __syncthreads();
  for (int i = thread; i < row.num_forbidden; i += kThreads) {
    const ForbiddenId forbidden = row.forbidden[i];
    if (forbidden.after != ForbiddenId::kAlways && forbidden.after != io.last_ids[row.slot]) continue;
    logits[forbidden.id] = -INFINITY;
  }
}

__global__ void __launch_bounds__(kThreads) restore_logits_kernel(const LogitRowsIo io) {
  __shared__ SharedRow shared;
  load_row(shared, io);
  const DeviceLogitRow& row = shared.row;
  float* const logits = io.logits + blockIdx.x * io.V;
  const int thread = static_cast<int>(threadIdx.x), recent = row.num_recent;
  const float* const before_recent = row.before + row.num_edits;
  for (int i = thread; i < row.num_forbidden; i += kThreads) {
    logits[row.forbidden[i].id] = before_recent[recent + i];
  }
  __syncthreads();
  if (thread < recent) logits[row.recent[thread]] = before_recent[thread];
  __syncthreads();
  for (int i = thread; i < row.num_edits; i += kThreads) logits[row.edits[i].id] = row.before[i];
}

}  // namespace

LogitRowUpload::LogitRowUpload(std::int64_t most_rows)
    : rows_(static_cast<std::uint64_t>(most_rows) * sizeof(DeviceLogitRow)) {}

void LogitRowUpload::begin(std::int64_t rows) {
  count_ = rows;
  any_ = false;
  block_ = used_ = 0;
}

// Memory for this step; what was taken stays where it is.
std::byte* LogitRowUpload::take(std::size_t bytes) {
  while (block_ < blocks_.size() && used_ + bytes > blocks_[block_]->bytes()) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    blocks_.push_back(std::make_unique<PinnedBuffer>(std::max<std::uint64_t>(bytes, kBlockBytes)));
  }
  std::byte* const begin = blocks_[block_]->at<std::byte>(used_);
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return begin;
}

void LogitRowUpload::set(std::int64_t r, const LogitRow& row, std::int32_t slot) {
  if (r < 0 || r >= count_ || std::ssize(row.recent) > kMostRecentIds) {
    fail(Exit::internal, "logit rows: row %lld of %lld, %zu recent ids", static_cast<long long>(r),
         static_cast<long long>(count_), row.recent.size());
  }
  if (!any_) std::memset(static_cast<void*>(all()), 0, static_cast<std::size_t>(count_) * sizeof(DeviceLogitRow));
  any_ = true;
  const auto copied = [&]<typename T>(const T* from, std::size_t count) {
    auto* const to = reinterpret_cast<T*>(take(count * sizeof(T)));
    std::copy_n(from, count, to);
    return to;
  };
  DeviceLogitRow& out = all()[r];
  out.edits = copied(row.edits.data(), row.edits.size());
  out.forbidden = copied(row.forbidden.data(), row.forbidden.size());
  out.before =
      reinterpret_cast<float*>(take((row.edits.size() + row.recent.size() + row.forbidden.size()) * sizeof(float)));
  out.num_edits = static_cast<std::int32_t>(row.edits.size());
  out.num_recent = static_cast<std::int32_t>(row.recent.size());
  out.num_forbidden = static_cast<std::int32_t>(row.forbidden.size());
  out.slot = slot;
  std::ranges::copy(row.recent, out.recent);
  out.penalties = row.penalties;
}

void edit_logits(const DeviceLogitRow* rows, std::int64_t count, float* logits, std::int64_t V,
                 const std::int32_t* last_ids, bool overlapping, cudaStream_t stream) {
  if (count == 0) return;
  launch_chained(edit_logits_kernel, dim3(static_cast<unsigned>(count)), dim3(kThreads), 0, stream, overlapping,
                 "edit_logits", LogitRowsIo{rows, logits, V, last_ids});
}

void restore_logits(const DeviceLogitRow* rows, std::int64_t count, float* logits, std::int64_t V,
                    const std::int32_t* last_ids, bool overlapping, cudaStream_t stream) {
  if (count == 0) return;
  launch_chained(restore_logits_kernel, dim3(static_cast<unsigned>(count)), dim3(kThreads), 0, stream, overlapping,
                 "restore_logits", LogitRowsIo{rows, logits, V, last_ids});
}

}  // namespace weft::cuda
