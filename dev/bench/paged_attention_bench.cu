// Attention over pages at the shapes of Pythia-2.8B (32 heads of 80, fp16) and Llama-3.1-8B (32 heads and 8 K/V heads of 128,
// bf16): decoding for some sequences and contexts, with the append in the same launch and in one of its own, beside a kernel that
// only reads as many bytes; and chunks of a prompt.
//
//   nvcc -std=c++20 -O3 -I. -gencode arch=compute_90a,code=sm_90a dev/bench/paged_attention_bench.cu build/release/libweft.a
//   ./a.out [repetitions [page size ...]]
//
// GB/s counts keys and values of every position once. Several layers' pages, more than L2 holds, are used in turn, so that no
// launch finds its keys there (fp8 pages: of codes; their append is a launch of its own); a run is one launch a layer, captured
// in a graph, and the time the median run's divided by the layers. Pages are shuffled. TF/s of a chunk count half of all scores of its rows.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "dev/bench/gpu_main.h"
#include "llmc/base/philox.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/paged/append_to_pages.h"
#include "llmc/cuda/op/attention/paged/paged_attention.h"

namespace {

using namespace weft;
using namespace weft::cuda;

constexpr std::int64_t kColdBytes = std::int64_t{512} << 20;

// Uniform in [-sqrt 3, sqrt 3): variance 1.
template <typename S>
__global__ void fill_random(S* values, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x)
    values[i] = from_float<S>((2 * uniform01(philox(seed, static_cast<std::uint64_t>(i), 0).word[0]) - 1) * 1.7320508f);
}

// Of each of two tensors `count` times 16 bytes.
__global__ void read_kernel(const int4* keys, const int4* values, std::int64_t count, int* sink) {
  int sum = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int4 k = __ldcs(keys + i), v = __ldcs(values + i);
    sum ^= k.x ^ k.y ^ k.z ^ k.w ^ v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678) *sink = sum;  // practically never: keeps the loads
}

template <typename T>
class Memory {
 public:
  explicit Memory(std::int64_t count) : count_(std::max<std::int64_t>(count, 1)) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes()), "benchmark: allocation");
    check(cudaMemset(memory, 0, bytes()), "benchmark: memset");
    data_ = static_cast<T*>(memory);
  }
  explicit Memory(const std::vector<T>& values) : Memory(static_cast<std::int64_t>(values.size())) {
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "benchmark: upload");
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  T* data() const { return data_; }
  void fill(int byte) { check(cudaMemset(data_, byte, bytes()), "benchmark: memset"); }
  void randomize(std::uint64_t seed) {
    fill_random<<<4096, 256>>>(data_, count_, seed);
    check_launch("benchmark: fill");
  }

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(T); }
  std::int64_t count_;
  T* data_ = nullptr;
};

// Median microseconds of a run, which is captured once.
double median_us(int repetitions, const std::function<void(cudaStream_t)>& run) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "benchmark: stream");
  check(cudaDeviceSynchronize(), "benchmark: inputs");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "benchmark: capture");
  run(stream);
  check(cudaStreamEndCapture(stream, &graph), "benchmark: capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "benchmark: graph");
  check(cudaEventCreate(&begin), "benchmark: event");
  check(cudaEventCreate(&end), "benchmark: event");
  std::vector<double> times;
  for (int i = -3; i < repetitions; ++i) {
    check(cudaEventRecord(begin, stream), "benchmark: record");
    check(cudaGraphLaunch(executable, stream), "benchmark: launch");
    check(cudaEventRecord(end, stream), "benchmark: record");
    check(cudaEventSynchronize(end), "benchmark: kernels");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "benchmark: time");
    if (i >= 0) times.push_back(1e3 * static_cast<double>(ms));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Model {
  const char* name;
  std::int64_t NH, NKV, HS, rotary;
};

enum class Appends { before, attention };

// A step of `sequences` sequences, of each `rows` rows that end at `context` positions.
template <typename S>
class Step {
 public:
  Step(const Model& model, std::int64_t sequences, std::int64_t rows, std::int64_t context, std::int64_t page_size,
       bool fp8 = false)
      : sequences_(sequences),
        element_(fp8 ? 1 : std::int64_t{sizeof(S)}),
        pages_of_each_(ceil_div(context, page_size)),
        layer_(sequences * pages_of_each_ * model.NKV * page_size * model.HS),
        layers_(std::max<std::int64_t>(4, ceil_div(kColdBytes, 2 * layer_ * element_))),
        keys_(layers_ * layer_),
        values_(layers_ * layer_),
        scales_(fp8 ? layers_ * layer_ / model.HS : 0),
        qkv_(sequences * rows * (model.NH + 2 * model.NKV) * model.HS),
        cos_(table(model, context).cos),
        sin_(table(model, context).sin),
        out_(sequences * rows * model.NH * model.HS),
        positions_(positions(sequences, rows, context)),
        tables_(tables(sequences, rows, pages_of_each_)),
        pages_(shuffled(sequences * pages_of_each_)),
        shape_{model.NH, model.NKV, model.HS, sequences * rows, sequences, context},
        workspace_(static_cast<std::int64_t>(paged_attention_workspace(shape_))),
        work_(list(shape_, sequences, rows, context)) {
    keys_.randomize(1);
    values_.randomize(2);
    qkv_.randomize(3);
    if (fp8) scales_.fill(127);
    io_.shape = shape_;
    io_.scale = 1 / std::sqrt(static_cast<float>(model.HS));
    const auto heads = [&](std::int64_t first) {
      return HeadViewOf<S>{qkv_.data() + first * model.HS, 0, (model.NH + 2 * model.NKV) * model.HS, model.HS};
    };
    append_.q = heads(0);
    append_.k = heads(model.NH);
    append_.v = heads(model.NH + model.NKV);
    append_.NH = model.NH;
    append_.rope = {cos_.data(), sin_.data(), context, model.rotary / 2};
    io_.q = append_.q;
    io_.kv = {nullptr, nullptr, page_size, model.NKV, model.HS};
    io_.rows = {positions_.data(), tables_.data(), pages_.data(), sequences * rows};
    io_.work = work_.data();
    io_.decodes = rows == 1;
    io_.workspace = workspace_.data();
    io_.out = out_.data();
  }

  std::int64_t layers() const { return layers_; }
  std::int64_t layer_bytes() const { return 2 * layer_ * element_; }
  void attend(std::int64_t layer, Appends appends, const LaunchDevice& device, cudaStream_t stream) {
    if (element_ == 1) {  // codes lie in the first half of the memory, to the second half a prompt's are widened
      const auto codes = [&](const Memory<S>& of) {
        return reinterpret_cast<std::uint8_t*>(of.data()) + layer * layer_;
      };
      std::uint8_t* const scales = scales_.data() + layer * (layer_ / io_.kv.HS);
      io_.kv.codes = {codes(keys_), codes(values_), scales, scales};
      io_.kv.keys = keys_.data() + layers_ * layer_ / 2;
      io_.kv.values = values_.data() + layers_ * layer_ / 2;
    } else {
      io_.kv.keys = keys_.data() + layer * layer_;
      io_.kv.values = values_.data() + layer * layer_;
    }
    append_.kv = io_.kv;
    append_.rows = io_.rows;
    const bool before = appends == Appends::before;
    io_.k = before ? HeadViewOf<const S>{} : append_.k;
    io_.v = before ? HeadViewOf<const S>{} : append_.v;
    io_.rope = append_.rope;
    if (before) append_to_pages(append_, device, stream);
    paged_attention(io_, device, stream);
  }
  // Median microseconds of a layer.
  double layer_us(int repetitions, Appends appends, const LaunchDevice& device) {
    return median_us(repetitions,
                     [&](cudaStream_t stream) {
                       for (std::int64_t l = 0; l < layers_; ++l) attend(l, appends, device, stream);
                     }) /
           static_cast<double>(layers_);
  }
  void read(std::int64_t layer, const LaunchDevice& device, cudaStream_t stream) const {
    read_kernel<<<static_cast<unsigned>(8 * device.multiprocessors), 256, 0, stream>>>(
        reinterpret_cast<const int4*>(keys_.data()) + layer * layer_ * element_ / 16,
        reinterpret_cast<const int4*>(values_.data()) + layer * layer_ * element_ / 16, layer_ * element_ / 16,
        sink_.data());
    check_launch("benchmark: read");
  }

 private:
  static RopeTable table(const Model& model, std::int64_t positions) {
    RopeConfig config;
    config.theta = 10000;
    config.rotary_dim = model.rotary;
    return rope_table(config, positions);
  }
  static std::vector<std::int32_t> positions(std::int64_t sequences, std::int64_t rows, std::int64_t context) {
    std::vector<std::int32_t> result;
    for (std::int64_t s = 0; s < sequences; ++s)
      for (std::int64_t i = 0; i < rows; ++i) result.push_back(static_cast<std::int32_t>(context - rows + i));
    return result;
  }
  static std::vector<std::int32_t> tables(std::int64_t sequences, std::int64_t rows, std::int64_t pages) {
    std::vector<std::int32_t> result;
    for (std::int64_t s = 0; s < sequences; ++s)
      result.insert(result.end(), static_cast<std::size_t>(rows), static_cast<std::int32_t>(s * pages));
    return result;
  }
  static std::vector<std::int32_t> shuffled(std::int64_t count) {
    std::vector<std::int32_t> result(static_cast<std::size_t>(count));
    std::iota(result.begin(), result.end(), 0);
    std::shuffle(result.begin(), result.end(), std::mt19937(1));
    return result;
  }
  static std::vector<char> list(const PagedAttentionShape& shape, std::int64_t sequences, std::int64_t rows,
                                std::int64_t context) {
    std::vector<PagedChunk> chunks;
    for (std::int64_t s = 0; s < sequences; ++s) chunks.push_back({s * rows, rows, context - rows});
    std::vector<char> work(paged_work_bytes(shape));
    work.resize(write_paged_work(work.data(), shape, chunks));
    return work;
  }

  std::int64_t sequences_, element_, pages_of_each_, layer_, layers_;  // element_: bytes of a stored element
  Memory<S> keys_, values_;
  Memory<std::uint8_t> scales_;
  Memory<S> qkv_;
  Memory<float> cos_, sin_;
  Memory<S> out_;
  Memory<std::int32_t> positions_, tables_, pages_;
  PagedAttentionShape shape_;
  Memory<char> workspace_, work_;
  Memory<int> sink_{1};
  AppendToPages<S> append_;
  PagedAttention<S> io_;
};

template <typename S>
void measure(const Model& model, std::int64_t page_size, int repetitions, const LaunchDevice& device,
             bool fp8 = false) {
  const auto decode = [&](std::int64_t sequences, std::int64_t context) {
    Step<S> step(model, sequences, 1, context, page_size, fp8);
    const double two_us = step.layer_us(repetitions, Appends::before, device);
    const double us = fp8 ? two_us : step.layer_us(repetitions, Appends::attention, device);
    const double read_us = median_us(repetitions,
                                     [&](cudaStream_t stream) {
                                       for (std::int64_t l = 0; l < step.layers(); ++l) step.read(l, device, stream);
                                     }) /
                           static_cast<double>(step.layers());
    const double positions =
        static_cast<double>(sequences * context * 2 * model.NKV * model.HS) * (fp8 ? 1 : sizeof(S));
    const double rate = positions / us * 1e-3, read_rate = static_cast<double>(step.layer_bytes()) / read_us * 1e-3;
    std::printf(
        "%-12s pages of %-3d %4d sequences, context %6d  %8.1f us %6.0f GB/s, in two launches %8.1f us, a read %6.0f "
        "GB/s, share %.2f\n",
        model.name, int(page_size), int(sequences), int(context), us, rate, two_us, read_rate, rate / read_rate);
    std::fflush(stdout);
  };
  for (const std::int64_t sequences : {1, 4, 16, 64, 128}) {
    for (const std::int64_t context : {192, 2000}) decode(sequences, context);
  }
  for (const std::int64_t sequences : {1, 8}) {
    for (const std::int64_t context : {8192, 32768, 100000}) decode(sequences, context);
  }
  const std::pair<std::int64_t, std::int64_t> chunks[] = {{512, 512}, {2000, 2000}, {8192, 8192}, {2048, 32768}};
  for (const auto& [rows, context] : chunks) {
    Step<S> step(model, 1, rows, context, page_size, fp8);
    const double us = step.layer_us(repetitions, Appends::before, device);
    const double operations = 4.0 * static_cast<double>((2 * context - rows) * rows * model.NH * model.HS) / 2;
    std::printf("%-12s pages of %-3d a chunk of %4d rows at %5d and its append  %8.1f us %6.1f TF/s\n", model.name,
                int(page_size), int(rows), int(context), us, operations / us * 1e-6);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return gpu_main([&] {
    const int repetitions = argc > 1 ? std::max(1, std::atoi(argv[1])) : 21;
    std::vector<std::int64_t> page_sizes = {16, 32, 64};
    if (argc > 2) page_sizes.clear();
    for (int i = 2; i < argc; ++i) page_sizes.push_back(std::atoi(argv[i]));
    const LaunchDevice device = launch_device();
    for (const std::int64_t page_size : page_sizes) {
      measure<fp16>({"pythia-2.8b", 32, 32, 80, 20}, page_size, repetitions, device);
      measure<bf16>({"llama3.1-8b", 32, 8, 128, 128}, page_size, repetitions, device);
      measure<bf16>({"8b, fp8", 32, 8, 128, 128}, page_size, repetitions, device, true);
    }
  });
}
