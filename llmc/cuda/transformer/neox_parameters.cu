#include "llmc/cuda/transformer/neox_parameters.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/base/philox.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/fork.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/neox_layout.h"

namespace weft::cuda {

namespace {

constexpr std::size_t kPieceBytes = 4 << 20;
constexpr std::size_t kHashBytes = 256 << 10;  // copied and hashed together, so that the hash finds them in the cache
constexpr unsigned kMaxWorkers = 8;
constexpr int kThreads = 256, kBlocks = 528;

// What is wrong with a tensor's values: 2 * index of the first bad one, plus 1 where the file's value is finite and only S
// cannot hold it.
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

// The work that the threads share, and what they report.
struct Job {
  const ModelFile& file;
  std::vector<const TensorSpec*> order;  // largest first: the last ones to finish are short
  unsigned long long* bad;               // [specs], on the device
  std::atomic<std::size_t> next = 0;
  std::atomic<std::uint64_t> bytes_done = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::condition_variable finished;
  unsigned running = 0;
  // Of several damaged tensors the first of the table is reported.
  std::size_t error_index = std::numeric_limits<std::size_t>::max();
  std::exception_ptr error;

  Job(const ModelFile& file_, unsigned long long* bad_) : file(file_), bad(bad_) {}
  void report(std::size_t index, std::exception_ptr what) {
    const std::lock_guard lock(mutex);
    failed = true;
    if (index < error_index) error_index = index, error = what;
  }
};

// One thread: takes tensors, and for each piece copies file -> page-locked memory, hashing on the way, and queues
// page-locked memory -> staging -> parameters.
template <typename S>
class Worker {
 public:
  Worker(Job& job, S* parameters)
      : job_(job), parameters_(parameters), pinned_(2 * kPieceBytes), staging_(staging_plan(2 * kPieceBytes)) {}

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
    const std::span<const std::byte> data = job_.file.file().bytes(tensor);
    const std::size_t element = dtype_bytes(tensor.dtype);
    Xxh3Stream hash;
    for (std::size_t done = 0; done < data.size() && !job_.failed; done += kPieceBytes, turn_ ^= 1) {
      const std::size_t bytes = std::min(kPieceBytes, data.size() - done);
      check(cudaEventSynchronize(copied_[turn_]), "loading parameters");  // the piece before the last has left
      std::byte* pinned = pinned_.template at<std::byte>(turn_ * kPieceBytes);
      for (std::size_t part = 0; part < bytes; part += kHashBytes) {
        const std::size_t size = std::min(kHashBytes, bytes - part);
        std::memcpy(pinned + part, data.data() + done + part, size);
        hash.update(pinned + part, size);
      }
      std::byte* staged = staging_.template at<std::byte>(turn_ * kPieceBytes);
      delay_point(stream_, DelayPoint::step);
      check(cudaMemcpyAsync(staged, pinned, bytes, cudaMemcpyHostToDevice, stream_), "loading parameters");
      check(cudaEventRecord(copied_[turn_], stream_), "loading parameters");
      const auto first = static_cast<std::int64_t>(done / element);
      convert(parameters_ + spec.offset + first, staged, tensor.dtype, static_cast<std::int64_t>(bytes / element),
              first, job_.bad + index, stream_);
      job_.bytes_done += bytes;
    }
    if (!job_.failed) job_.file.file().compare_hash(tensor, hash.digest());
  }

  Job& job_;
  S* parameters_;
  Stream stream_;
  PinnedBuffer pinned_;
  DeviceArena staging_;
  Event copied_[2] = {Event(cudaEventDisableTiming), Event(cudaEventDisableTiming)};
  std::size_t turn_ = 0;
};

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
  const std::span<const TensorSpec> specs = file.table().specs();
  const DeviceArena bad(staging_plan(specs.size() * sizeof(unsigned long long)));
  Job job(file, bad.at<unsigned long long>(0));
  check(cudaMemset(job.bad, 0xff, specs.size() * sizeof(unsigned long long)), "loading parameters");
  check(cudaDeviceSynchronize(), "loading parameters");
  std::uint64_t bytes = 0;
  for (const TensorSpec& spec : specs) {
    job.order.push_back(&spec);
    bytes += file.file().at(spec.name).bytes;
  }
  std::stable_sort(job.order.begin(), job.order.end(),
                   [](const TensorSpec* a, const TensorSpec* b) { return a->elements > b->elements; });

  const std::size_t useful = std::min<std::size_t>(specs.size(), 1 + bytes / (4 * kPieceBytes));
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  job.running = static_cast<unsigned>(std::min<std::size_t>({kMaxWorkers, cores, useful}));
  std::vector<std::thread> threads;
  for (unsigned i = job.running; i > 0; --i) {
    threads.emplace_back([&job, parameters] {
      try {
        Worker<S>(job, parameters).run();
      } catch (...) {
        job.report(0, std::current_exception());
      }
      const std::lock_guard lock(job.mutex);
      --job.running;
      job.finished.notify_one();
    });
  }
  {
    std::unique_lock lock(job.mutex);
    const auto done = [&job] { return job.running == 0; };
    while (!job.finished.wait_for(lock, std::chrono::milliseconds(100), done)) {
      if (progress) progress(job.bytes_done, bytes);
    }
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

}  // namespace

template <typename S>
void randomize_parameters(const TensorTable& table, std::uint64_t seed, S* parameters) {
  for (const TensorSpec& spec : table.specs()) {
    randomize_kernel<<<kBlocks, kThreads>>>(parameters + spec.offset, spec.elements, spec.init, seed,
                                            static_cast<std::uint64_t>(spec.offset));
    check_launch("random parameters");
  }
  check(cudaDeviceSynchronize(), "random parameters");
}

template <typename S>
NeoxWeights<S, S> bind_neox(const ModelConfig& config, const TensorTable& table, const S* parameters) {
  const NeoxParameters<const S> found(config, table, parameters);
  const auto norm = [](const NormParameters<const S>& each) { return Norm<S>{each.weight, each.bias}; };
  const auto linear = [](const LinearParameters<const S>& each) { return Linear<S, S>{each.weight, each.bias}; };
  NeoxWeights<S, S> weights;
  weights.embedding = found.embedding;
  for (const NeoxLayerParameters<const S>& layer : found.layers) {
    weights.layers.push_back({norm(layer.input_norm), norm(layer.post_norm), linear(layer.qkv), linear(layer.dense),
                              linear(layer.up), linear(layer.down)});
  }
  weights.final_norm = norm(found.final_norm);
  weights.head = found.head;
  return weights;
}

#define WEFT_INSTANTIATE(S)                                                     \
  template void load_parameters<S>(const ModelFile&, S*, const LoadProgress&);  \
  template void randomize_parameters<S>(const TensorTable&, std::uint64_t, S*); \
  template NeoxWeights<S, S> bind_neox<S>(const ModelConfig&, const TensorTable&, const S*);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
