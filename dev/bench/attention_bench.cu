// Speed of flash attention, forward and backward, on the shapes that flash-attention's charts use: causal, 16k tokens a
// batch, bf16, random data; 32 query heads and 8 K/V heads. Prints TF/s; the backward pass is counted as 2.5 times the
// forward's operations, a causal mask as half of them. Then at T 8192 a window of 1024, documents of 512 tokens, and one
// document, which shows what the kernels that can hide past keys cost where none is hidden; only pairs that see each other are
// counted. dev/bench/attention_baseline.py measures PyTorch on the same causal shapes.
//
//   attention_bench [portable] [repetitions [head dimension ...]]
//
// `portable` measures the kernels for any GPU from sm_80 on instead of those that this GPU would get.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "dev/bench/gpu_main.h"
#include "llmc/base/error.h"
#include "llmc/base/philox.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/attention/train/paths.h"

namespace {

using namespace weft;
using namespace weft::cuda;

constexpr std::int64_t kTokens = 16384, kHeads = 32, kKVHeads = 8;

// Uniform in [-sqrt 3, sqrt 3): variance 1.
__global__ void fill_random(bf16* values, std::int64_t count, std::uint64_t seed) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) values[i] = from_float<bf16>((2 * uniform01(philox(seed, i, 0).word[0]) - 1) * 1.7320508f);
}

template <typename T>
T* allocate(std::int64_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)), "benchmark: allocation");
  return static_cast<T*>(memory);
}

bf16* random_tensor(std::int64_t count, std::uint64_t seed) {
  bf16* tensor = allocate<bf16>(count);
  fill_random<<<static_cast<unsigned>(ceil_div(count, 256)), 256>>>(tensor, count, seed);
  check_launch("benchmark: fill");
  return tensor;
}

// Median milliseconds of `repetitions` runs after three that warm up.
float median_ms(int repetitions, const std::function<void()>& run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "benchmark: event");
  check(cudaEventCreate(&end), "benchmark: event");
  std::vector<float> times;
  for (int i = -3; i < repetitions; ++i) {
    check(cudaEventRecord(begin), "benchmark: record");
    run();
    check(cudaEventRecord(end), "benchmark: record");
    check(cudaEventSynchronize(end), "benchmark: kernels");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "benchmark: time");
    if (i >= 0) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// `window`, `document`: tokens; 0: none.
void measure(std::int64_t T, std::int64_t HS, int repetitions, bool portable, std::int64_t window = 0,
             std::int64_t document = 0) {
  AttentionShape shape;
  shape.window = window;
  std::int32_t* starts = nullptr;
  if (document > 0) {
    std::vector<std::int32_t> of_tokens;
    for (std::int64_t i = 0; i < kTokens; ++i)
      of_tokens.push_back(static_cast<std::int32_t>(i % T / document * document));
    starts = allocate<std::int32_t>(kTokens);
    check(cudaMemcpy(starts, of_tokens.data(), of_tokens.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice),
          "benchmark: documents");
    shape.document_starts = starts;
  }
  shape.B = kTokens / T, shape.TQ = T, shape.TK = T, shape.NH = kHeads, shape.NKV = kKVHeads, shape.HS = HS;
  shape.scale = 1 / sqrtf(static_cast<float>(HS));
  const std::int64_t row = (kHeads + 2 * kKVHeads) * HS, out_row = kHeads * HS;
  bf16 *qkv = random_tensor(kTokens * row, 1), *dqkv = allocate<bf16>(kTokens * row);
  bf16 *out = allocate<bf16>(kTokens * out_row), *dout = random_tensor(kTokens * out_row, 2);
  float* lse = allocate<float>(kTokens * kHeads);
  char* workspace = allocate<char>(static_cast<std::int64_t>(attention_backward_workspace(shape)));
  const auto packed = [&](bf16* rows, std::int64_t first_head) {
    return HeadViewOf<bf16>{rows + first_head * HS, T * row, row, HS};
  };
  const HeadViewOf<bf16> out_view = {out, T * out_row, out_row, HS}, dout_view = {dout, T * out_row, out_row, HS};
  const float forward = median_ms(repetitions, [&] {
    if (portable)
      return portable_forward<bf16>(
          {shape, out_view, lse, packed(qkv, 0), packed(qkv, kHeads), packed(qkv, kHeads + kKVHeads)}, nullptr);
    attention_forward<bf16>(shape, out_view, lse, packed(qkv, 0), packed(qkv, kHeads), packed(qkv, kHeads + kKVHeads),
                            nullptr);
  });
  const float backward = median_ms(repetitions, [&] {
    if (portable)
      return portable_backward<bf16>({shape, packed(dqkv, 0), packed(dqkv, kHeads), packed(dqkv, kHeads + kKVHeads),
                                      dout_view, out_view, lse, packed(qkv, 0), packed(qkv, kHeads),
                                      packed(qkv, kHeads + kKVHeads), reinterpret_cast<RowStatistics*>(workspace)},
                                     nullptr);
    attention_backward<bf16>(shape, packed(dqkv, 0), packed(dqkv, kHeads), packed(dqkv, kHeads + kKVHeads), dout_view,
                             out_view, lse, packed(qkv, 0), packed(qkv, kHeads), packed(qkv, kHeads + kKVHeads),
                             workspace, nullptr);
  });
  // Keys that a query sees, on average.
  const double longest = static_cast<double>(document > 0 ? document : T), w = static_cast<double>(window);
  const double seen = window > 0 ? w * (1 - w / (2 * longest)) : longest / 2;
  const double operations = 4.0 * kTokens * seen * kHeads * HS;
  const std::string what = window > 0     ? format("window %d", int(window))
                           : document > 0 ? format("documents of %d", int(document))
                                          : "";
  std::printf("hd%-4d T %-6d forward %7.3f ms %6.1f TF/s   backward %7.3f ms %6.1f TF/s   %s\n", int(HS), int(T),
              forward, operations / forward / 1e9, backward, 2.5 * operations / backward / 1e9, what.c_str());
  std::fflush(stdout);
  for (void* memory :
       {static_cast<void*>(qkv), static_cast<void*>(dqkv), static_cast<void*>(out), static_cast<void*>(dout),
        static_cast<void*>(lse), static_cast<void*>(workspace), static_cast<void*>(starts)})
    check(cudaFree(memory), "benchmark: free");
}

}  // namespace

int main(int argc, char** argv) {
  const bool portable = argc > 1 && std::strcmp(argv[1], "portable") == 0;
  if (portable) --argc, ++argv;
  const int repetitions = argc > 1 ? std::max(1, std::atoi(argv[1])) : 21;
  return gpu_main([&] {
    std::printf("weft attention%s, bf16, causal, %d tokens, %d/%d heads, median of %d\n", portable ? " (portable)" : "",
                int(kTokens), int(kHeads), int(kKVHeads), repetitions);
    std::vector<std::int64_t> head_dims = {64, 80, 128};
    if (argc > 2) head_dims.clear();
    for (int i = 2; i < argc; ++i) head_dims.push_back(std::atoi(argv[i]));
    for (const std::int64_t HS : head_dims) {
      for (const std::int64_t T : {1024, 2048, 4096, 8192, 16384}) measure(T, HS, repetitions, portable);
      measure(8192, HS, repetitions, portable, 1024);
      measure(8192, HS, repetitions, portable, 0, 512);
      measure(8192, HS, repetitions, portable, 0, 8192);
    }
  });
}
