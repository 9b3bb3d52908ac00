// The batch-invariant linear layers of llmc/cuda/op/gemm/rows_matmul.h beside cuBLASLt's best plan for the same shape: what
// invariance costs. Layers of Pythia-2.8B, Llama-3.1-8B and others in bf16. And the same layers with quantised weights
// (llmc/cuda/op/gemm/quantized_matmul.h), in fp16 for Pythia and in bf16 for the others; fp8x8: both operands in fp8
// (llmc/cuda/op/gemm/rows_matmul_fp8.h), with the kernel that makes codes of x.
//
//   make benches && build/release/dev/bench/rows_matmul_bench [MODEL ...] [bf16 int8 fp8 fp8x8 int4] [ROWS ...]
//
// A graph of launches goes through copies of the weight that are larger than L2 together, as the layers of a model do; the
// median of 7 replays. GB/s count weight and x, of the weight's read share: of a plain read of memory.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dev/bench/gpu_main.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/gemm/ceilings.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/gemm/quantized_matmul.h"
#include "llmc/cuda/op/gemm/rows_matmul.h"
#include "llmc/cuda/op/gemm/rows_matmul_fp8.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/captured_graph.h"
#include "llmc/cuda/runtime/stream.h"

namespace {

using namespace weft;
using namespace weft::cuda;

struct Shape {
  const char *model, *layer;
  std::int64_t K, OC;
  RowsEpilogue epilogue;
  std::int64_t K2 = 0;  // of a second input
};
constexpr Shape kShapes[] = {{"pythia-2.8b", "qkv", 2560, 7680, RowsEpilogue::store},
                             {"pythia-2.8b", "dense", 2560, 2560, RowsEpilogue::add},
                             {"pythia-2.8b", "up", 2560, 10240, RowsEpilogue::gelu},
                             {"pythia-2.8b", "down", 10240, 2560, RowsEpilogue::add},
                             {"pythia-2.8b", "both", 2560, 2560, RowsEpilogue::add, 10240},
                             {"pythia-2.8b", "head", 2560, 50304, RowsEpilogue::store_fp32},
                             {"llama-3.1-8b", "qkv", 4096, 6144, RowsEpilogue::store},
                             {"llama-3.1-8b", "output", 4096, 4096, RowsEpilogue::add},
                             {"llama-3.1-8b", "gate, up", 4096, 14336, RowsEpilogue::swiglu},
                             {"llama-3.1-8b", "down", 14336, 4096, RowsEpilogue::add},
                             {"llama-3.1-8b", "head", 4096, 128256, RowsEpilogue::store_fp32},
                             {"qwen3-8b", "gate, up", 4096, 12288, RowsEpilogue::swiglu},
                             {"qwen3-8b", "down", 12288, 4096, RowsEpilogue::add},
                             {"qwen3-8b", "head", 4096, 151936, RowsEpilogue::store_fp32},
                             {"qwen3-1.7b", "gate, up", 2048, 6144, RowsEpilogue::swiglu},
                             {"llama-3.2-1b", "gate, up", 2048, 8192, RowsEpilogue::swiglu}};
constexpr std::int64_t kRows[] = {1, 4, 16, 64, 128, 256, 2000};

// Microseconds of one of `launches` launches in a graph.
double microseconds(int launches, const std::function<void(int)>& launch, cudaStream_t stream) {
  constexpr int kReplays = 7;
  CapturedGraph graph("bench");
  graph.capture(stream, [&] {
    for (int i = 0; i < launches; ++i) launch(i);
  });
  const Event start, stop;
  std::vector<float> times;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rested: under load the power limit lowers the clock
  for (int replay = 0; replay <= kReplays; ++replay) {
    check(cudaEventRecord(start, stream), "bench");
    graph.launch(stream);
    check(cudaEventRecord(stop, stream), "bench");
    check(cudaEventSynchronize(stop), "bench");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "bench");
    if (replay > 0) times.push_back(ms);  // the first one warms up
  }
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return static_cast<double>(times[kReplays / 2]) * 1e3 / launches;
}

void run(const Shape& shape, std::int64_t rows, double read_bandwidth, Matmul& matmul, cudaStream_t stream) {
  constexpr std::int64_t kBeyondCache = 256 << 20;
  const LaunchDevice device = launch_device();
  const std::int64_t K = shape.K + shape.K2,
                     weight_rows = shape.epilogue == RowsEpilogue::swiglu ? 2 * shape.OC : shape.OC;
  const std::int64_t weight_bytes = weight_rows * K * static_cast<std::int64_t>(sizeof(bf16));
  const int copies = static_cast<int>(ceil_div(kBeyondCache, weight_bytes)) + 1, launches = std::max(copies, 24);
  const auto bytes = [](std::int64_t count) { return static_cast<std::uint64_t>(count) * sizeof(bf16); };
  MemoryPlan plan("bench");
  const std::uint64_t weight_at = plan.add(bytes(copies * weight_rows * K)), x_at = plan.add(bytes(rows * K)),
                      out_at = plan.add(bytes(2 * rows * weight_rows)), bias_at = plan.add(bytes(shape.OC));
  const DeviceArena arena(plan);
  bf16 *weight = arena.at<bf16>(weight_at), *x = arena.at<bf16>(x_at), *out = arena.at<bf16>(out_at),
       *bias = arena.at<bf16>(bias_at);
  matmul.fill_random(weight, copies * weight_rows * K);
  matmul.fill_random(x, rows * K);
  matmul.fill_random(bias, shape.OC);
  check(cudaMemsetAsync(out, 0, bytes(2 * rows * weight_rows), stream), "bench");
  const bool fp32 = shape.epilogue == RowsEpilogue::add || shape.epilogue == RowsEpilogue::store_fp32;
  const bool biased = std::string(shape.model).starts_with("pythia") && shape.epilogue != RowsEpilogue::store_fp32;
  const double ours = microseconds(
      launches,
      [&](int i) {
        RowsMatmul<bf16> io;
        io.x = x, io.weight = weight + i % copies * weight_rows * K, io.bias = biased ? bias : nullptr;
        io.rows = rows, io.K = shape.K, io.OC = shape.OC, io.epilogue = shape.epilogue;
        if (shape.K2 > 0) {
          io.x2 = x + rows * shape.K, io.weight2 = io.weight + weight_rows * shape.K, io.bias2 = io.bias;
          io.K2 = shape.K2;
        }
        if (fp32) {
          io.out_fp32 = reinterpret_cast<float*>(out);
        } else {
          io.out = out;
        }
        rows_matmul(io, device, stream);
      },
      stream);
  const MatmulShape lt{Gemm::forward, rows, K, weight_rows, CUDA_R_16BF, Accumulate::no, biased, false};
  matmul.prepare(lt);
  const double theirs = microseconds(
      launches,
      [&](int i) {
        matmul.forward<bf16>(out, x, weight + i % copies * weight_rows * K, biased ? bias : nullptr, rows, K,
                             weight_rows);
      },
      stream);
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(K) * static_cast<double>(weight_rows);
  const double moved = static_cast<double>(weight_bytes) + static_cast<double>(bytes(rows * K));
  std::printf(
      "%-12s %-8s %5lld -> %6lld, %4lld rows: %8.2f us, %5.0f GB/s, %4.0f TF/s, %3.0f %% of a read; "
      "cuBLASLt %8.2f us, ratio %.2f\n",
      shape.model, shape.layer, static_cast<long long>(K), static_cast<long long>(shape.OC),
      static_cast<long long>(rows), ours, moved / ours * 1e-3, flops / ours * 1e-6,
      100 * static_cast<double>(weight_bytes) / ours * 1e-3 / read_bandwidth, theirs, ours / theirs);
  std::fflush(stdout);
}

constexpr const char* kBothInFp8 = "fp8x8";
constexpr std::pair<const char*, DType> kFormats[] = {
    {"int8", DType::i8}, {"fp8", DType::e4m3}, {kBothInFp8, DType::e4m3}, {"int4", DType::u4}};

// A launch reads packed weights, or codes in rows; the share is that of these bytes. `both`: x is made codes first.
template <typename T>
void run_quantized(const Shape& shape, std::int64_t rows, const char* name, DType format, double read_bandwidth,
                   const Matmul& matmul, cudaStream_t stream) {
  const bool both = name == kBothInFp8;
  constexpr std::uint64_t kBeyondCache = 256 << 20;
  const LaunchDevice device = launch_device();
  const std::int64_t outputs = packed_rows(shape.OC, shape.epilogue == RowsEpilogue::swiglu);
  const std::uint64_t first_bytes = packed_block_bytes(format, outputs, shape.K),
                      second_bytes = shape.K2 > 0 ? packed_block_bytes(format, outputs, shape.K2) : 0,
                      weight_bytes = first_bytes + second_bytes, scale_bytes = packed_scale_bytes(format, outputs);
  const int copies = static_cast<int>(kBeyondCache / weight_bytes) + 1, launches = std::max(copies, 24);
  const auto bytes = [](std::int64_t count) { return static_cast<std::uint64_t>(count) * sizeof(T); };
  const auto fill = [&](const DeviceArena& arena, std::uint64_t at, std::uint64_t size) {
    matmul.fill_random(arena.at<bf16>(at), static_cast<std::int64_t>(size / sizeof(bf16)));
  };
  MemoryPlan plan("bench");
  const std::uint64_t weight_at = plan.add(static_cast<std::uint64_t>(copies) * weight_bytes),
                      scales_at = plan.add(scale_bytes), x_bytes = bytes(rows * (shape.K + shape.K2)),
                      x_at = plan.add(x_bytes), out_at = plan.add(2 * bytes(rows * outputs)),
                      bias_at = plan.add(bytes(shape.OC)), codes_at = plan.add(x_bytes),
                      code_scales_at = plan.add(static_cast<std::uint64_t>(rows) * sizeof(float));
  const DeviceArena arena(plan);
  fill(arena, weight_at, static_cast<std::uint64_t>(copies) * weight_bytes);
  fill(arena, scales_at, scale_bytes);
  fill(arena, x_at, x_bytes);
  fill(arena, bias_at, bytes(shape.OC));
  check(cudaMemsetAsync(arena.at<T>(out_at), 0, 2 * bytes(rows * outputs), stream), "bench");
  const bool biased = std::string(shape.model).starts_with("pythia") && shape.epilogue != RowsEpilogue::store_fp32;
  const double time = microseconds(
      launches,
      [&](int i) {
        RowsMatmul<T> io;
        io.x = arena.at<T>(x_at), io.bias = biased ? arena.at<T>(bias_at) : nullptr;
        io.rows = rows, io.K = shape.K, io.OC = shape.OC, io.epilogue = shape.epilogue;
        io.out = arena.at<T>(out_at), io.out_fp32 = arena.at<float>(out_at);
        const PackedMatrix first = {
            arena.at<std::byte>(weight_at) + static_cast<std::uint64_t>(i % copies) * weight_bytes,
            arena.at<float>(scales_at), format};
        PackedMatrix second = first;
        second.blocks += first_bytes;
        if (both) {
          const Fp8Rows x = {arena.at<std::uint8_t>(codes_at), arena.at<float>(code_scales_at)};
          quantize_rows_fp8(x, io.x, rows, io.K, device, stream);
          const Fp8Rows weight = {reinterpret_cast<std::uint8_t*>(first.blocks), first.row_scales};
          return rows_matmul_fp8(io, x, weight, device, stream);
        }
        if (shape.K2 > 0) io.x2 = io.x + rows * shape.K, io.bias2 = io.bias, io.K2 = shape.K2;
        quantized_matmul(io, first, second, device, stream);
      },
      stream);
  const double flops =
      2.0 * static_cast<double>(rows) * static_cast<double>(shape.K + shape.K2) * static_cast<double>(outputs);
  const double read = static_cast<double>(weight_bytes);
  std::printf(
      "%-12s %-8s %5lld -> %6lld, %4lld rows, %-4s: %8.2f us, %6.1f MB, %5.0f GB/s, %4.0f TF/s, %3.0f %% of a read\n",
      shape.model, shape.layer, static_cast<long long>(shape.K + shape.K2), static_cast<long long>(shape.OC),
      static_cast<long long>(rows), name, time, read * 1e-6, read / time * 1e-3, flops / time * 1e-6,
      100 * read / time * 1e-3 / read_bandwidth);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  return gpu_main([&] {
    std::vector<std::int64_t> all_rows;
    std::vector<std::string> models, types;
    for (int i = 1; i < argc; ++i) {
      if (std::atoll(argv[i]) > 0) {
        all_rows.push_back(std::atoll(argv[i]));
      } else {
        const std::string word = argv[i];
        (word.find('-') == std::string::npos ? types : models).push_back(word);
      }
    }
    const auto wanted = [](const std::vector<std::string>& list, const char* name) {
      return list.empty() || std::find(list.begin(), list.end(), name) != list.end();
    };
    if (all_rows.empty()) all_rows.assign(std::begin(kRows), std::end(kRows));
    const double read_bandwidth = measure_read_bandwidth();
    std::printf("plain read: %.0f GB/s\n", read_bandwidth);
    const Stream stream;
    Matmul matmul(stream);
    for (const Shape& shape : kShapes) {
      if (!wanted(models, shape.model)) continue;
      for (const std::int64_t rows : all_rows) {
        if (wanted(types, "bf16")) run(shape, rows, read_bandwidth, matmul, stream);
        for (const auto& [name, format] : kFormats) {
          if (!wanted(types, name)) continue;
          if (name == kBothInFp8 && (shape.K2 > 0 || !rows_matmul_fp8_unsupported_gpu().empty())) continue;
          const auto quantized =
              std::string(shape.model).starts_with("pythia") ? run_quantized<fp16> : run_quantized<bf16>;
          quantized(shape, rows, name, format, read_bandwidth, matmul, stream);
        }
      }
    }
  });
}
