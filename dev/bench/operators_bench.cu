// Times the memory-bound GPU operators at the shapes of Llama-3.2-1B (16,384 tokens, C 2048, F 8192, V 128,256) and
// prints microseconds and GB/s beside a copy that moves as many bytes, measured in the same run.
//
//   nvcc -std=c++20 -O3 -I. -gencode arch=compute_90a,code=sm_90a dev/bench/operators_bench.cu build/release/libweft.a
//   ./a.out [norm embedding rope activations classifier optimizer sampler]
//
// GB/s counts each input read once and each output written once; the formula stands beside each row. Buffers rotate
// through a pool several times the size of L2, so that no launch finds its inputs there. Times are the median of 9
// batches of 10 launches.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "dev/bench/gpu_main.h"
#include "llmc/cuda/op/classifier/classifier.h"
#include "llmc/cuda/op/elementwise/embedding.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "llmc/cuda/op/optim/rank_sum.h"
#include "llmc/cuda/op/sample/sampler.h"
#include "llmc/cuda/runtime/error.h"

namespace {

using namespace weft;
using namespace weft::cuda;
using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr std::int64_t kRows = 16384, kC = 2048, kF = 8192, kV = 128256, kParameters = 1'235'814'400;
constexpr std::size_t kPoolBytes = std::size_t{26} << 30;
constexpr std::size_t kColdBytes = std::size_t{1} << 30;  // how much lies between two uses of a buffer

// Numbers of ordinary size, whether they are read as bf16 or as fp32: zeros would flatter the memory.
__global__ void fill_kernel(unsigned* words, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    unsigned x = static_cast<unsigned>(i * 2654435761u);
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    words[i] = (x & 0x807F807Fu) | 0x3F003F00u;  // +-0.5 .. +-1
  }
}

__global__ void copy_kernel(int4* to, const int4* from, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    to[i] = from[i];
}

class Pool {
 public:
  Pool() {
    check(cudaMalloc(&base_, kPoolBytes), "pool");
    fill_kernel<<<4096, 256>>>(reinterpret_cast<unsigned*>(base_), kPoolBytes / 4);
    check_launch("fill");
  }
  ~Pool() { cudaFree(base_); }
  Pool(const Pool&) = delete;

  // Starts to lay out the buffers of launch `turn`, which take `bytes` in all.
  void begin(int turn, std::size_t bytes) {
    const std::size_t slot = (bytes + 65535) / 65536 * 65536 + 65536;
    const std::size_t slots = std::max<std::size_t>(1, std::min(kColdBytes * 2, kPoolBytes) / slot);
    next_ = base_ + static_cast<std::size_t>(turn) % slots * slot;
  }
  template <typename T>
  T* take(std::int64_t count) {
    T* address = reinterpret_cast<T*>(next_);
    next_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return address;
  }

 private:
  char *base_ = nullptr, *next_ = nullptr;
};

double median_us(const std::function<void(int)>& launch, int batch = 10) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  int turn = 0;
  for (; turn < 3; ++turn) launch(turn);
  std::vector<double> times;
  for (int repeat = 0; repeat < 9; ++repeat) {
    check(cudaEventRecord(begin), "event");
    for (int i = 0; i < batch; ++i) launch(turn++);
    check(cudaEventRecord(end), "event");
    check(cudaEventSynchronize(end), "benchmark");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "event");
    times.push_back(1e3 * milliseconds / batch);
  }
  std::nth_element(times.begin(), times.begin() + 4, times.end());
  return times[4];
}

class Bench {
 public:
  Bench() {
    std::printf("%-48s %9s %10s %8s %8s %8s %7s  %s\n", "operator", "MB", "us", "GB/s", "copy", "memcpy", "of copy",
                "bytes");
  }

  // launch(pool) lays out its buffers, `footprint` bytes in all, and launches once.
  void row(const std::string& name, double bytes, const std::string& formula, std::size_t footprint,
           const std::function<void(Pool&)>& launch, int batch = 10) {
    const double us = median_us(
        [&](int turn) {
          pool_.begin(turn, footprint);
          launch(pool_);
        },
        batch);
    const auto half = static_cast<std::size_t>(std::min(bytes, 8e9) / 2) / 16 * 16;
    const double copy = 2.0 * half / median_us([&](int turn) { copy_once(turn, half, false); }, batch);
    const double memcpy_rate = 2.0 * half / median_us([&](int turn) { copy_once(turn, half, true); }, batch);
    const double rate = bytes / us;
    std::printf("%-48s %9.1f %10.1f %8.0f %8.0f %8.0f %6.1f%%  %s\n", name.c_str(), bytes / 1e6, us, rate / 1e3,
                copy / 1e3, memcpy_rate / 1e3, 100 * rate / std::max(copy, memcpy_rate), formula.c_str());
    std::fflush(stdout);
  }

 private:
  void copy_once(int turn, std::size_t half, bool by_driver) {
    pool_.begin(turn, 2 * half);
    char *from = pool_.take<char>(static_cast<std::int64_t>(half)),
         *to = pool_.take<char>(static_cast<std::int64_t>(half));
    if (by_driver) {
      check(cudaMemcpyAsync(to, from, half, cudaMemcpyDeviceToDevice), "copy");
    } else {
      copy_kernel<<<132 * 8, 256>>>(reinterpret_cast<int4*>(to), reinterpret_cast<const int4*>(from), half / 16);
    }
  }
  Pool pool_;
};

template <typename T>
T* uploaded(const std::vector<T>& values) {
  void* address = nullptr;
  check(cudaMalloc(&address, values.size() * sizeof(T)), "upload");
  check(cudaMemcpy(address, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  return static_cast<T*>(address);
}
template <typename T>
T* allocated(std::size_t bytes) {
  void* address = nullptr;
  check(cudaMalloc(&address, bytes), "allocation");
  check(cudaMemset(address, 0, bytes), "allocation");
  return static_cast<T*>(address);
}

// residual + branch -> stream and norm, as Llama's block has it.
template <typename R>
void bench_norm(Bench& bench, std::int64_t C, const char* stream) {
  const std::int64_t n = kRows * C;
  ResidualNormShape shape;
  shape.rows = kRows;
  shape.C = C;
  shape.eps = 1e-5f;
  bf16* weight = uploaded(std::vector<bf16>(static_cast<std::size_t>(C), __float2bfloat16(1.0f)));
  float* rstd = uploaded(std::vector<float>(kRows, 1.5f));
  float* dweight = allocated<float>(static_cast<std::size_t>(C) * 4);
  void* workspace = allocated<char>(residual_norm_backward_workspace(C, 1));
  const auto bytes = [&](int in_t, int in_r) {
    return static_cast<double>(n) * (2 * in_t + static_cast<int>(sizeof(R)) * in_r);
  };
  const auto forward = [&](Pool& pool) {
    ResidualNormForward<bf16, R> io;
    io.x = pool.take<bf16>(n);
    io.residual = pool.take<R>(n);
    io.residual_out = pool.take<R>(n);
    io.out = pool.take<bf16>(n);
    io.weight = weight;
    io.rstd = rstd;
    residual_norm_forward(shape, io, nullptr);
  };
  const auto alone = [&](Pool& pool) {  // the GEMM before has added the branch to the stream: what training runs
    ResidualNormForward<bf16, R> io;
    io.residual = pool.take<R>(n);
    io.out = pool.take<bf16>(n);
    io.weight = weight;
    io.rstd = rstd;
    residual_norm_forward(shape, io, nullptr);
  };
  const auto backward = [&](bool both) {
    return [&, both](Pool& pool) {
      ResidualNormBackward<bf16, R> io;
      io.dout = pool.take<bf16>(n);
      io.residual_out = pool.take<R>(n);
      io.dresidual_out = pool.take<R>(n);
      io.dresidual = pool.take<R>(n);
      if (both) io.dx = pool.take<bf16>(n);
      io.weight = weight;
      io.rstd = rstd;
      io.dweight = dweight;
      io.workspace = workspace;
      residual_norm_backward(shape, io, nullptr);
    };
  };
  const std::string name = " C " + std::to_string(C) + stream;
  bench.row("norm forward" + name, bytes(2, 2), "x, residual -> residual_out, out",
            static_cast<std::size_t>(bytes(2, 2)), forward);
  bench.row("norm forward, stream alone" + name, bytes(1, 1), "residual -> out", static_cast<std::size_t>(bytes(1, 1)),
            alone);
  bench.row("norm backward" + name, bytes(1, 3), "dout, h, dres -> dres", static_cast<std::size_t>(bytes(1, 3)),
            backward(false));
  bench.row("norm backward +dx" + name, bytes(2, 3), "dout, h, dres -> dres, dx", static_cast<std::size_t>(bytes(2, 3)),
            backward(true));
}

// Both norms of a layer of Pythia-2.8B for a prompt of 2000: x is added to the fp32 stream in place, two outputs.
void bench_prompt_norms(Bench& bench) {
  ResidualNormShape shape;
  shape.rows = 2000;
  shape.C = 2560;
  shape.kind = NormKind::layernorm;
  shape.eps = 1e-5f;
  const std::int64_t n = shape.rows * shape.C;
  const fp16* weights = uploaded(std::vector<fp16>(static_cast<std::size_t>(4 * shape.C), __float2half(0.5f)));
  bench.row("norms of a prompt, 2000 x 2560", 14.0 * static_cast<double>(n), "x, stream -> stream, 2 out",
            static_cast<std::size_t>(14 * n), [&](Pool& pool) {
              ResidualNormForward<fp16, float> io;
              io.x = pool.take<fp16>(n);
              io.residual = io.residual_out = pool.take<float>(n);
              io.weight = weights;
              io.bias = weights + shape.C;
              io.weight2 = weights + 2 * shape.C;
              io.bias2 = weights + 3 * shape.C;
              io.out = pool.take<fp16>(n);
              io.out2 = pool.take<fp16>(n);
              residual_norm_forward(shape, io, nullptr);
            });
}

void bench_embedding(Bench& bench) {
  std::mt19937 generator(1);
  std::uniform_real_distribution<double> uniform;
  std::vector<std::int32_t> tokens(kRows);  // log-uniform ids: few frequent tokens, many rare ones, like a text
  for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(std::pow(double(kV), uniform(generator))) - 1;
  const double distinct = static_cast<double>(std::set<std::int32_t>(tokens.begin(), tokens.end()).size());
  std::int32_t* ids = uploaded(tokens);
  bf16* weight = allocated<bf16>(static_cast<std::size_t>(kV * kC) * 2);
  float* dweight = allocated<float>(static_cast<std::size_t>(kV * kC) * 4);
  void* sorted = allocated<char>(embedding_sort_bytes(kRows));
  void* workspace = allocated<char>(embedding_backward_workspace(kRows, kC));
  const std::size_t size = static_cast<std::size_t>(kRows * kC) * 2;
  bench.row("embedding forward", 2.0 * size, "2 N C 2", size,
            [&](Pool& pool) { embedding_forward(pool.take<bf16>(kRows * kC), ids, weight, kRows, kC, nullptr); });
  bench.row("embedding sort", 4.0 * kRows, "4 N", 0, [&](Pool&) { embedding_sort(sorted, ids, kRows, kV, nullptr); });
  bench.row("embedding backward", size + distinct * kC * 8, "N C 2 + distinct tokens C 8", size, [&](Pool& pool) {
    embedding_backward(dweight, pool.take<bf16>(kRows * kC), sorted, kRows, kC, workspace, nullptr);
  });
}

void bench_rope(Bench& bench) {
  const std::int64_t T = 2048, NH = 32, NKV = 8, HS = 64, row = (NH + 2 * NKV) * HS;
  const float* table = uploaded(std::vector<float>(static_cast<std::size_t>(T * HS / 2), 0.7f));
  const std::size_t size = static_cast<std::size_t>(kRows * row) * 2;
  bench.row("rope q and k", 2.0 * kRows * (NH + NKV) * HS * 2, "2 N (q + kv) 2", size, [&](Pool& pool) {
    bf16* qkv = pool.take<bf16>(kRows * row);
    const HeadViewOf<bf16> q{qkv, T * row, row, HS}, k{qkv + NH * HS, T * row, row, HS};
    rope_forward(q, k, {table, table, T, HS / 2}, kRows / T, T, NH, NKV, 0, nullptr);
  });
}

void bench_activations(Bench& bench) {
  const std::int64_t n = kRows * kF;
  const std::size_t size = static_cast<std::size_t>(n) * 2;
  bench.row("swiglu forward", 3.0 * size, "3 N F 2", 3 * size, [&](Pool& pool) {
    const bf16* gate_up = pool.take<bf16>(2 * n);
    swiglu_forward(pool.take<bf16>(n), gate_up, kRows, kF, nullptr);
  });
  const auto backward = [&](bool with_out) {
    return [&, with_out](Pool& pool) {
      bf16* gate_up = pool.take<bf16>(2 * n);
      bf16* dout = pool.take<bf16>(n);
      swiglu_backward(gate_up, dout, gate_up, kRows, kF, with_out ? dout : nullptr, nullptr);
    };
  };
  bench.row("swiglu backward", 5.0 * size, "5 N F 2", 3 * size, backward(false));
  bench.row("swiglu backward + product", 6.0 * size, "6 N F 2", 3 * size, backward(true));
}

void bench_classifier(Bench& bench) {
  std::int32_t* labels = uploaded(std::vector<std::int32_t>(kRows, 5));
  float* losses = allocated<float>(kRows * 4);
  auto* total = allocated<LossTotal>(sizeof(LossTotal));
  for (const auto& [rows, V] : {std::pair<std::int64_t, std::int64_t>{2048, kV}, {4096, 50304}, {1024, 262144}}) {
    const std::size_t size = static_cast<std::size_t>(rows * V) * 2;
    const std::string shape = ", " + std::to_string(rows) + " x " + std::to_string(V);
    for (const bool gradient : {true, false}) {
      bench.row("classifier" + shape + (gradient ? "" : ", loss"), (gradient ? 2.0 : 1.0) * static_cast<double>(size),
                gradient ? "2 rows V 2" : "rows V 2", size, [&, rows = rows, V = V](Pool& pool) {
                  classifier(pool.take<bf16>(rows * V), losses, labels, rows, V, V, 1e-4f, gradient, nullptr);
                });
    }
  }
  bench.row("add_losses", 8.0 * kRows, "8 N", 0, [&](Pool&) { add_losses(total, losses, labels, kRows, nullptr); });
}

void bench_optimizer(Bench& bench) {
  const std::vector<AdamWBlock> list = adamw_blocks(std::vector<AdamWRange>{{0, kParameters, true}});
  const AdamWBlock* blocks = uploaded(list);
  auto* norm = allocated<GradientNorm>(sizeof(GradientNorm));
  const auto block_count = static_cast<std::int64_t>(list.size());
  auto* squares = allocated<double>(list.size() * sizeof(double));
  AdamWStep step;
  step.learning_rate = 1e-6f;
  const std::size_t size = static_cast<std::size_t>(kParameters) * 4;
  bench.row(
      "gradient norm, 1.24 B", 1.0 * size, "4 P", size,
      [&](Pool& pool) {
        block_squares(squares, pool.take<float>(kParameters), blocks, block_count, nullptr);
        gradient_norm(norm, squares, nullptr, block_count, 1.0f, nullptr);
      },
      3);
  for (const int ranks : {2, 8}) {
    const std::int64_t part = kParameters / ranks / 4 * 4;
    bench.row("sum of " + std::to_string(ranks) + " ranks, 1.24 B", 4.0 * static_cast<double>((ranks + 1) * part),
              "4 (R + 1) P / R", static_cast<std::size_t>(ranks * part) * 4 + 4096, [ranks, part](Pool& pool) {
                const float* pieces[8];
                for (int r = 0; r < ranks; ++r) pieces[r] = pool.take<float>(part);
                add_ranks(const_cast<float*>(pieces[0]), std::span(pieces, static_cast<std::size_t>(ranks)), part,
                          nullptr);
              });
  }
  bench.row(
      "adamw, split masters, 1.24 B", 7.0 * size, "28 P", 4 * size + 4096,
      [&](Pool& pool) {
        auto* p = pool.take<bf16>(kParameters);
        auto* low = pool.take<std::int16_t>(kParameters);
        auto *g = pool.take<float>(kParameters), *m = pool.take<float>(kParameters), *v = pool.take<float>(kParameters);
        adamw(p, low, g, m, v, blocks, static_cast<std::int64_t>(list.size()), step, norm, nullptr);
      },
      3);
  bench.row(
      "adamw, fp32, 1.24 B", 7.0 * size, "28 P", 4 * size + 4096,
      [&](Pool& pool) {
        auto* p = pool.take<float>(kParameters);
        auto *g = pool.take<float>(kParameters), *m = pool.take<float>(kParameters), *v = pool.take<float>(kParameters);
        adamw(p, g, m, v, blocks, static_cast<std::int64_t>(list.size()), step, norm, nullptr);
      },
      3);
}

// Microseconds alone: the logits lie in L2, where the head has just left them.
void bench_sampler(Bench&) {
  for (const std::int64_t V : {std::int64_t{50304}, kV}) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal(0, 2.5f);
    std::vector<float> values(static_cast<std::size_t>(V));
    for (float& value : values) value = normal(generator);
    const float* logits = uploaded(values);
    auto* id = allocated<std::int32_t>(4);
    auto* error = allocated<SampleError>(4);
    auto* position = allocated<std::int64_t>(8);
    for (const SamplerOptions& options :
         {SamplerOptions{}, SamplerOptions{.temperature = 1}, SamplerOptions{.temperature = 1, .top_k = 50},
          SamplerOptions{.temperature = 1, .top_p = 0.9}, SamplerOptions{.temperature = 1, .min_p = 0.05},
          SamplerOptions{.temperature = 0.8, .top_k = 50, .top_p = 0.95, .min_p = 0.02}}) {
      const SamplingPlan* plan = uploaded(std::vector<SamplingPlan>{sampling_plan(options)});
      const auto us = [&](bool clusters) {
        return median_us([&](int) { sample(id, error, logits, 1, V, V, plan, position, nullptr, clusters); });
      };
      std::printf("sampler V %-6lld temperature %.1f top-k %2lld top-p %.2f min-p %.2f %10.1f us, one block %6.1f\n",
                  static_cast<long long>(V), options.temperature, static_cast<long long>(options.top_k), options.top_p,
                  options.min_p, us(true), us(false));
    }
  }
}

void bench_norms(Bench& bench) {
  for (const std::int64_t C : {768, 1024, 2048, 3072, 4096, 8192, 16384}) bench_norm<bf16>(bench, C, "");
  for (const std::int64_t C : {1024, 2048, 4096, 8192, 16384}) bench_norm<float>(bench, C, " fp32 stream");
  bench_prompt_norms(bench);
}

struct Section {
  const char* name;
  void (*run)(Bench& bench);
};
constexpr Section kSections[] = {{"norm", bench_norms},
                                 {"embedding", bench_embedding},
                                 {"rope", bench_rope},
                                 {"activations", bench_activations},
                                 {"classifier", bench_classifier},
                                 {"optimizer", bench_optimizer},
                                 {"sampler", bench_sampler}};

}  // namespace

// Arguments: names of sections; none: all.
int main(int argc, char** argv) {
  return gpu_main([&] {
    Bench bench;
    for (const Section& section : kSections) {
      const bool named =
          std::any_of(argv + 1, argv + argc, [&](const char* a) { return std::string(a) == section.name; });
      if (argc == 1 || named) section.run(bench);
    }
  });
}
