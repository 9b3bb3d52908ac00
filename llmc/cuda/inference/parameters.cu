#include "llmc/cuda/inference/parameters.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/base/philox.h"
#include "llmc/base/signals.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/runtime/stream.h"

namespace weft::cuda {

namespace {

constexpr std::size_t kPieceBytes = 4 << 20;
// bytes copied and then hashed at a time, so that the hash reads them from the cache
constexpr std::size_t kHashBytes = 256 << 10;
constexpr unsigned kMaxWorkers = 8;
constexpr int kThreads = 256, kBlocks = 528;

// Encodes an invalid value: 2 * index of the first one, plus 1 if the file's value is finite and only S cannot
// represent it.
constexpr unsigned long long kNoBadValue = std::numeric_limits<unsigned long long>::max();

template <typename From, typename S>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(S* out, const From* in, std::int64_t count, std::int64_t first, unsigned long long* bad) {
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const float value = to_float(in[i]);
    S stored;
    if constexpr (std::is_same_v<From, S>) {
      stored = in[i];
    } else {
      stored = from_float<S>(value);
    }
    out[i] = stored;
    if (!isfinite(to_float(stored))) {
      atomicMin(bad, 2 * static_cast<unsigned long long>(first + i) + (isfinite(value) ? 1 : 0));
    }
  }
}

template <typename S>
void convert(S* out, const std::byte* in, DType dtype, std::int64_t count, std::int64_t first, unsigned long long* bad,
             cudaStream_t stream) {
  if (count == 0) return;
  if (dtype == DType::f32) {
    convert_kernel<<<kBlocks, kThreads, 0, stream>>>(out, reinterpret_cast<const float*>(in), count, first, bad);
  } else if (dtype == DType::bf16) {
    convert_kernel<<<kBlocks, kThreads, 0, stream>>>(out, reinterpret_cast<const bf16*>(in), count, first, bad);
  } else {
    convert_kernel<<<kBlocks, kThreads, 0, stream>>>(out, reinterpret_cast<const fp16*>(in), count, first, bad);
  }
  check_launch("parameter conversion");
}

MemoryPlan staging_plan(std::size_t bytes) {
  MemoryPlan plan("parameter staging");
  plan.add(bytes);
  return plan;
}

// The work that the threads share, and their results.
template <typename S>
struct Job {
  const ModelFile& file;
  std::span<const ParameterTarget<S>> targets;
  std::size_t piece_bytes = kPieceBytes;  // bytes of each of a thread's two buffers
  std::vector<const TensorSpec*> order;   // largest first, so that the last ones are short
  unsigned long long* bad;                // [specs], on the device
  std::atomic<std::size_t> next = 0;
  std::atomic<std::uint64_t> bytes_done = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::condition_variable finished;
  unsigned running = 0;
  // If several tensors are damaged, the first one in the table is reported.
  std::size_t error_index = std::numeric_limits<std::size_t>::max();
  std::exception_ptr error;

  Job(const ModelFile& file_, std::span<const ParameterTarget<S>> targets_, unsigned long long* bad_)
      : file(file_), targets(targets_), bad(bad_) {}
  void report(std::size_t index, std::exception_ptr what) {
    const std::lock_guard lock(mutex);
    failed = true;
    if (index < error_index) error_index = index, error = what;
  }
};

// Bytes of a row of a quantised tensor.
std::size_t row_bytes(const TensorSpec& spec) {
  return spec.bytes / static_cast<std::size_t>(spec.shape[0]);
}

// One thread: takes tensors one by one, and for each piece copies file -> page-locked memory, hashing it, and queues
// page-locked memory -> staging -> parameters.
template <typename S>
class Worker {
 public:
  explicit Worker(Job<S>& job) : job_(job), pinned_(2 * job.piece_bytes), staging_(staging_plan(2 * job.piece_bytes)) {}

  void run() {
    for (std::size_t i = job_.next++; i < job_.order.size() && !job_.failed; i = job_.next++) {
      const TensorSpec& spec = *job_.order[i];
      const std::size_t index = job_.file.table().index_of(spec.name);
      try {
        load(spec, index);
      } catch (...) {
        job_.report(index, std::current_exception());
      }
    }
    stream_.synchronize("loading parameters");
  }

 private:
  void load(const TensorSpec& spec, std::size_t index) {
    const TensorInfo& tensor = job_.file.file().at(spec.name);
    std::span<const std::byte> data = job_.file.file().bytes(tensor);
    const bool floats = spec.kind == ValueKind::floats, as_stored = job_.file.as_stored(spec);
    DType dtype = tensor.dtype;
    std::vector<float> changed;  // by an adapter
    if (!as_stored) {
      changed.resize(static_cast<std::size_t>(spec.elements));
      job_.file.read_parameter(spec, changed.data());
      data = std::as_bytes(std::span(changed));
      dtype = DType::f32;
    }
    // Pieces are whole elements or, for packed matrices, whole rows.
    const std::size_t unit = floats ? dtype_bytes(dtype) : row_bytes(spec), piece = job_.piece_bytes / unit * unit;
    std::optional<std::size_t> invalid;
    Xxh3Stream hash;
    for (std::size_t done = 0; done < data.size() && !job_.failed; done += piece, turn_ ^= 1) {
      const std::size_t bytes = std::min(piece, data.size() - done);
      // the previous piece in this buffer has been copied
      check(cudaEventSynchronize(copied_[turn_]), "loading parameters");
      std::byte* pinned = pinned_.template at<std::byte>(turn_ * job_.piece_bytes);
      for (std::size_t part = 0; part < bytes; part += kHashBytes) {
        const std::size_t size = std::min(kHashBytes, bytes - part);
        std::memcpy(pinned + part, data.data() + done + part, size);
        hash.update(pinned + part, size);
      }
      std::byte* staged = staging_.template at<std::byte>(turn_ * job_.piece_bytes);
      delay_point(stream_, DelayPoint::step);
      check(cudaMemcpyAsync(staged, pinned, bytes, cudaMemcpyHostToDevice, stream_), "loading parameters");
      const auto first = static_cast<std::int64_t>(done / unit), count = static_cast<std::int64_t>(bytes / unit);
      if (floats) {
        check(cudaEventRecord(copied_[turn_], stream_), "loading parameters");
        convert(job_.targets[index].floats + first, staged, dtype, count, first, job_.bad + index, stream_);
      } else {
        if (!invalid) {
          invalid = first_invalid_value(spec.kind, spec.dtype, {pinned, bytes});
          if (invalid) *invalid += done * 8 / dtype_bits(spec.dtype);
        }
        check(cudaEventRecord(copied_[turn_], stream_), "loading parameters");
        pack(spec, job_.targets[index], staged, first, count);
      }
      job_.bytes_done += as_stored ? bytes : bytes / sizeof(float) * dtype_bytes(tensor.dtype);
    }
    if (job_.failed) return;
    if (as_stored) job_.file.file().compare_hash(tensor, hash.digest());
    if (invalid) job_.file.refuse_value(spec, *invalid);
  }

  // Packs `count` rows of a tensor, from row `first` on.
  void pack(const TensorSpec& spec, const ParameterTarget<S>& target, const std::byte* staged, std::int64_t first,
            std::int64_t count) {
    PackedPlace place = target.place;
    place.first += first;
    if (spec.kind == ValueKind::quants) {
      pack_weights(target.packed, place, target.K, staged, count, stream_);
    } else if (spec.kind == ValueKind::zeros) {
      pack_zeros(target.packed, place, target.K, reinterpret_cast<const std::uint8_t*>(staged), count, stream_);
    } else if (weight_format(target.packed.dtype).grouped) {
      pack_group_scales(target.packed, place, target.K, reinterpret_cast<const std::uint16_t*>(staged), count, stream_);
    } else {
      pack_row_scales(target.packed, place, reinterpret_cast<const float*>(staged), count, stream_);
    }
  }

  Job<S>& job_;
  Stream stream_;
  PinnedBuffer pinned_;
  DeviceArena staging_;
  Event copied_[2] = {Event(cudaEventDisableTiming), Event(cudaEventDisableTiming)};
  std::size_t turn_ = 0;
};

template <typename S>
std::vector<ParameterTarget<S>> targets_in_arena(const TensorTable& table, S* parameters) {
  std::vector<ParameterTarget<S>> targets;
  for (const TensorSpec& spec : table.specs()) targets.push_back({parameters + spec.offset, {}, {}, 0});
  return targets;
}

template <typename S>
void check_values(const ModelFile& file, const unsigned long long* device_bad) {
  const std::span<const TensorSpec> specs = file.table().specs();
  std::vector<unsigned long long> bad(specs.size());
  check(cudaMemcpy(bad.data(), device_bad, bad.size() * sizeof bad[0], cudaMemcpyDeviceToHost), "loading parameters");
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (bad[i] == kNoBadValue) continue;
    const std::string where = escaped(file.file().path()) + ": " + specs[i].name;
    if (bad[i] % 2 == 0) fail(Exit::bad_file, "%s: element %llu is not finite", where.c_str(), bad[i] / 2);
    fail(Exit::bad_file, "%s: element %llu does not fit in %s. Use --dtype bf16 or fp32", where.c_str(), bad[i] / 2,
         dtype_name(storage_dtype<S>()));
  }
}

}  // namespace

template <typename S>
void load_parameters(const ModelFile& file, S* parameters, const LoadProgress& progress) {
  load_parameters<S>(file, targets_in_arena(file.table(), parameters), progress);
}

template <typename S>
void load_parameters(const ModelFile& file, std::span<const ParameterTarget<S>> targets, const LoadProgress& progress) {
  const std::span<const TensorSpec> specs = file.table().specs();
  const DeviceArena bad(staging_plan(specs.size() * sizeof(unsigned long long)));
  Job<S> job(file, targets, bad.at<unsigned long long>(0));
  check(cudaMemset(job.bad, 0xff, specs.size() * sizeof(unsigned long long)), "loading parameters");
  check(cudaDeviceSynchronize(), "loading parameters");
  std::uint64_t bytes = 0;
  for (const TensorSpec& spec : specs) {
    job.order.push_back(&spec);
    bytes += file.file().at(spec.name).bytes;
    if (spec.kind != ValueKind::floats) job.piece_bytes = std::max(job.piece_bytes, row_bytes(spec));
  }
  std::stable_sort(job.order.begin(), job.order.end(),
                   [](const TensorSpec* a, const TensorSpec* b) { return a->elements > b->elements; });

  const std::size_t useful = std::min<std::size_t>(specs.size(), 1 + bytes / (4 * kPieceBytes));
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t workers = std::min<std::size_t>({kMaxWorkers, cores, useful});
  std::vector<std::thread> threads;
  threads.reserve(workers);
  const auto work = [&job] {
    try {
      Worker<S>(job).run();
    } catch (...) {
      job.report(0, std::current_exception());
    }
    const std::lock_guard lock(job.mutex);
    --job.running;
    job.finished.notify_one();
  };
  const auto start_one = [&] {
    const std::lock_guard lock(job.mutex);  // the thread cannot end before it is counted
    threads.emplace_back(work);
    ++job.running;
  };
  try {
    const SignalsElsewhere signals;
    while (threads.size() < workers) start_one();
  } catch (const std::system_error&) {  // no more threads for this user: those that started load everything
    if (threads.empty()) throw;
  }
  try {
    std::unique_lock lock(job.mutex);
    const auto done = [&job] { return job.running == 0; };
    while (!job.finished.wait_for(lock, std::chrono::milliseconds(100), done)) {
      if (progress) progress(job.bytes_done, bytes);
    }
  } catch (...) {  // from `progress`: the threads use the job, and end before it does
    job.report(specs.size(), std::current_exception());
  }
  for (std::thread& thread : threads) thread.join();
  if (job.error) std::rethrow_exception(job.error);
  check_values<S>(file, job.bad);
}

// ---- random parameters ------------------------------------------------------------------------------------------------
namespace {

template <typename S>
__global__ void __launch_bounds__(kThreads)
    randomize_kernel(S* out, std::int64_t count, Init init, std::uint64_t seed, std::uint64_t offset) {
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    float value = init == Init::ones ? 1.0f : 0.0f;
    if (init == Init::normal || init == Init::normal_residual) {  // Box-Muller
      const PhiloxWords words =
          philox(seed, offset + static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(RandomStream::init));
      const float radius = sqrtf(-2 * logf(1.0f - uniform01(words.word[0])));
      value = 0.02f * radius * cospif(2 * uniform01(words.word[1]));
    }
    out[i] = from_float<S>(value);
  }
}

__global__ void __launch_bounds__(kThreads)
    randomize_quants_kernel(std::uint8_t* out, std::int64_t count, WeightFormat format, std::uint64_t seed,
                            std::uint64_t offset) {
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const PhiloxWords words =
        philox(seed, offset + static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(RandomStream::init));
    out[i] = format.random_q(static_cast<std::uint8_t>(words.word[0]));
  }
}
template <typename T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* out, T value, std::int64_t count) {
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) out[i] = value;
}

// A packed matrix with random values, scales and zero points.
void randomize_packed(const TensorSpec& spec, std::uint64_t seed, const PackedMatrix& to, const PackedPlace& place,
                      std::int64_t K) {
  const WeightFormat& format = weight_format(to.dtype);
  const auto scale = static_cast<float>(0.02 / format.random_deviation);
  const std::int64_t rows = spec.shape[0], groups = rows * quant_groups(K);
  MemoryPlan plan("random parameters");
  const std::uint64_t quants_at = plan.add(spec.bytes), scales_at = plan.add(static_cast<std::uint64_t>(groups) * 4),
                      zeros_at = plan.add(static_cast<std::uint64_t>(groups));
  const DeviceArena arena(plan);
  auto* const quants = arena.at<std::uint8_t>(quants_at);
  randomize_quants_kernel<<<kBlocks, kThreads>>>(quants, static_cast<std::int64_t>(spec.bytes), format, seed,
                                                 static_cast<std::uint64_t>(spec.offset));
  check_launch("random parameters");
  pack_weights(to, place, K, reinterpret_cast<const std::byte*>(quants), rows, nullptr);
  if (format.grouped) {
    auto* const scales = arena.at<std::uint16_t>(scales_at);
    auto* const zeros = arena.at<std::uint8_t>(zeros_at);
    fill_kernel<<<kBlocks, kThreads>>>(scales, f32_to_f16(scale), groups);
    fill_kernel<<<kBlocks, kThreads>>>(zeros, kRandomZero, groups);
    check_launch("random parameters");
    pack_group_scales(to, place, K, scales, rows, nullptr);
    pack_zeros(to, place, K, zeros, rows, nullptr);
  } else {
    auto* const scales = arena.at<float>(scales_at);
    fill_kernel<<<kBlocks, kThreads>>>(scales, scale, rows);
    check_launch("random parameters");
    pack_row_scales(to, place, scales, rows, nullptr);
  }
  check(cudaDeviceSynchronize(), "random parameters");  // before the arena is freed
}

}  // namespace

template <typename S>
void randomize_parameters(const TensorTable& table, std::uint64_t seed, std::span<const ParameterTarget<S>> targets) {
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const TensorSpec& spec = table.specs()[i];
    if (spec.kind == ValueKind::quants) randomize_packed(spec, seed, targets[i].packed, targets[i].place, targets[i].K);
    if (spec.kind != ValueKind::floats) continue;
    randomize_kernel<<<kBlocks, kThreads>>>(targets[i].floats, spec.elements, spec.init, seed,
                                            static_cast<std::uint64_t>(spec.offset));
    check_launch("random parameters");
  }
  check(cudaDeviceSynchronize(), "random parameters");
}
template <typename S>
void randomize_parameters(const TensorTable& table, std::uint64_t seed, S* parameters) {
  randomize_parameters<S>(table, seed, targets_in_arena(table, parameters));
}

#define WEFT_INSTANTIATE(S)                                                                                      \
  template void load_parameters<S>(const ModelFile&, std::span<const ParameterTarget<S>>, const LoadProgress&);  \
  template void load_parameters<S>(const ModelFile&, S*, const LoadProgress&);                                   \
  template void randomize_parameters<S>(const TensorTable&, std::uint64_t, std::span<const ParameterTarget<S>>); \
  template void randomize_parameters<S>(const TensorTable&, std::uint64_t, S*);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
