// The GEMMs before and after SwiGLU, in bf16 and in fp8: cuBLASLt and a kernel for SwiGLU, against the kernels of
// llmc/cuda/op/gemm/matmul_swiglu.h and matmul_swiglu_fp8.h that do both, at the shapes of a training step.
//
//   nvcc -std=c++20 -O3 -I. -gencode arch=compute_90a,code=sm_90a dev/bench/swiglu_bench.cu build/release/libweft.a
//   ./a.out [llama3.2-1b d12 ...]
//
// After a rest, the mean of 8 launches; and under load, where the power limit holds the clock down as in a step: slots of
// 80 ms of one side in shuffled rounds, the last 60 % of each slot, the median of 5 rounds. TF/s count the GEMM alone.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "dev/bench/gpu_main.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/gemm/matmul_swiglu.h"
#include "llmc/cuda/op/gemm/matmul_swiglu_fp8.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/stream.h"

namespace {

using namespace weft;
using namespace weft::cuda;

struct Shape {
  const char* name;
  std::int64_t N, C, F;
};
constexpr Shape kShapes[] = {{"llama3.2-1b", 16384, 2048, 8192},
                             {"llama3.2-3b", 16384, 3072, 8192},
                             {"llama3.1-8b", 16384, 4096, 14336},
                             {"d12", 32768, 768, 2048}};

struct Side {
  const char* name;
  std::function<void()> run;
};

float microseconds(const Side& side, int launches, cudaStream_t stream) {
  const Event start, stop;
  check(cudaEventRecord(start, stream), side.name);
  for (int i = 0; i < launches; ++i) side.run();
  check(cudaEventRecord(stop, stream), side.name);
  check(cudaEventSynchronize(stop), side.name);
  float ms = 0;
  check(cudaEventElapsedTime(&ms, start, stop), side.name);
  return ms * 1e3f / static_cast<float>(launches);
}

void compare(const Shape& shape, const char* operation, double flops, const std::vector<Side>& sides,
             cudaStream_t stream) {
  constexpr int kRounds = 5;
  constexpr float kSlot = 80e3f;
  constexpr auto kWarm = std::chrono::milliseconds(500);
  std::vector<float> rested;
  for (const Side& side : sides) {
    microseconds(side, 1, stream);
    usleep(200'000);
    rested.push_back(microseconds(side, 8, stream));
  }
  for (const auto end = std::chrono::steady_clock::now() + kWarm; std::chrono::steady_clock::now() < end;)
    microseconds(sides[0], 20, stream);
  std::vector<std::vector<float>> loaded(sides.size());
  std::vector<std::size_t> order(sides.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937 random(1);
  for (int round = 0; round < kRounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      const int launches = std::max(5, static_cast<int>(kSlot / rested[i]));
      microseconds(sides[i], launches * 2 / 5, stream);
      loaded[i].push_back(microseconds(sides[i], launches * 3 / 5, stream));
    }
  }
  for (std::size_t i = 0; i < sides.size(); ++i) {
    std::sort(loaded[i].begin(), loaded[i].end());
    const double rest = rested[i], load = loaded[i][kRounds / 2];
    std::printf("%-12s %-22s %-20s %8.1f us %4.0f TF/s; under load %8.1f us %4.0f TF/s (%.1f to %.1f)\n", shape.name,
                operation, sides[i].name, rest, flops / rest * 1e-6, load, flops / load * 1e-6,
                static_cast<double>(loaded[i].front()), static_cast<double>(loaded[i].back()));
  }
  std::fflush(stdout);
}

// Codes of e4m3, which as e5m2 are other numbers. What counts is their time, and that no gradient saturates: a square
// with one that does takes another way.
void run_fp8(const Shape& shape, Matmul& matmul, cudaStream_t stream) {
  const auto [name, N, C, F] = shape;
  const auto size = [](std::int64_t count) { return static_cast<std::uint64_t>(count); };
  MemoryPlan plan("bench");
  const std::uint64_t x_at = plan.add(size(N * C)), w_at = plan.add(size(2 * F * C)),
                      random_at = plan.add(size(4 * F * C)), gate_up_at = plan.add(size(N * 2 * F * 2)),
                      dswiglu_out_at = plan.add(size(N * F * 2)), out_at = plan.add(size(N * F)),
                      turned_at = plan.add(size(N * F)), gradient_at = plan.add(size(N * 2 * F)),
                      gradient_turned_at = plan.add(size(N * 2 * F)), numbers_at = plan.add(1024);
  const DeviceArena arena(plan);
  auto *x = arena.at<std::uint8_t>(x_at), *w = arena.at<std::uint8_t>(w_at);
  auto *gate_up = arena.at<bf16>(gate_up_at), *dswiglu_out = arena.at<bf16>(dswiglu_out_at),
       *random = arena.at<bf16>(random_at);
  auto *scale = arena.at<float>(numbers_at), *inverse = arena.at<float>(numbers_at + 256);
  auto* counters = arena.at<Fp8Counters>(numbers_at + 512);
  const float value = 256, inverse_value = 1 / value;
  check(cudaMemset(counters, 0, sizeof *counters), "bench");
  check(cudaMemcpy(scale, &value, sizeof value, cudaMemcpyHostToDevice), "bench");
  check(cudaMemcpy(inverse, &inverse_value, sizeof value, cudaMemcpyHostToDevice), "bench");
  matmul.fill_random(gate_up, N * C);
  matmul.fill_random(random, 2 * F * C);
  quantize_fp8(Fp8Format::e4m3, {x, nullptr, scale, nullptr}, gate_up, N, C, stream);
  quantize_fp8(Fp8Format::e4m3, {w, nullptr, scale, nullptr}, random, 2 * F, C, stream);
  const Fp8Matrix a{x, inverse}, b{w, inverse};
  const MatmulShape shapes[] = {{Gemm::forward, N, C, 2 * F, CUDA_R_8F_E4M3, Accumulate::no, false, false},
                                {Gemm::input_grad, N, F, C, CUDA_R_8F_E4M3, Accumulate::no, false, false}};
  matmul.prepare(shapes);
  const Fp8Target out{arena.at<std::uint8_t>(out_at), nullptr, scale, counters},
      out_again{nullptr, arena.at<std::uint8_t>(turned_at), scale, nullptr},
      gradient{arena.at<std::uint8_t>(gradient_at), arena.at<std::uint8_t>(gradient_turned_at), inverse, counters};
  const Side forward{"GEMM", [=, &matmul] { matmul.forward_fp8(gate_up, a, b, N, C, 2 * F); }};
  const Side backward{"GEMM", [=, &matmul] { matmul.input_grad_fp8(dswiglu_out, a, b, N, F, C); }};
  const double flops = 2.0 * static_cast<double>(N) * static_cast<double>(C) * static_cast<double>(F);
  compare(shape, "fp8 gate, up, swiglu", 2 * flops,
          {forward,
           {"GEMM and swiglu",
            [=] {
              forward.run();
              swiglu_forward_fp8(out, gate_up, N, F, stream);
            }},
           {"fused", [=] { gate_up_swiglu_fp8(gate_up, out, a, b, N, C, F, stream); }},
           {"fused, no codes", [=] { gate_up_swiglu_fp8(gate_up, {}, a, b, N, C, F, stream); }}},
          stream);
  compare(shape, "fp8 down dgrad, swiglu", flops,
          {backward,
           {"GEMM and swiglu",
            [=] {
              backward.run();
              swiglu_backward_fp8(gradient, out_again, dswiglu_out, gate_up, N, F, stream);
            }},
           {"fused", [=] { down_input_grad_swiglu_fp8(gradient, out_again, a, b, gate_up, N, C, F, stream); }}},
          stream);
}

void run(const Shape& shape, Matmul& matmul, cudaStream_t stream) {
  const auto [name, N, C, F] = shape;
  const auto bytes = [](std::int64_t count) { return static_cast<std::uint64_t>(count) * sizeof(bf16); };
  MemoryPlan plan("bench");
  const std::uint64_t x_at = plan.add(bytes(N * C)), w_at = plan.add(bytes(2 * F * C)),
                      gate_up_at = plan.add(bytes(N * 2 * F)), swiglu_out_at = plan.add(bytes(N * F)),
                      dswiglu_out_at = plan.add(bytes(N * F));
  const DeviceArena arena(plan);
  bf16 *x = arena.at<bf16>(x_at), *w = arena.at<bf16>(w_at), *gate_up = arena.at<bf16>(gate_up_at),
       *swiglu_out = arena.at<bf16>(swiglu_out_at), *dswiglu_out = arena.at<bf16>(dswiglu_out_at);
  matmul.fill_random(x, N * C);
  matmul.fill_random(w, 2 * F * C);
  const MatmulShape shapes[] = {{Gemm::forward, N, C, 2 * F, CUDA_R_16BF, Accumulate::no, false, false},
                                {Gemm::input_grad, N, F, C, CUDA_R_16BF, Accumulate::no, false, false}};
  matmul.prepare(shapes);
  const Side gemm_forward{"GEMM", [=, &matmul] { matmul.forward<bf16>(gate_up, x, w, nullptr, N, C, 2 * F); }};
  const Side gemm_backward{"GEMM", [=, &matmul] { matmul.input_grad<bf16>(dswiglu_out, x, w, N, F, C); }};
  const double flops = 2.0 * static_cast<double>(N) * static_cast<double>(C) * static_cast<double>(F);
  compare(shape, "gate, up, swiglu", 2 * flops,
          {gemm_forward,
           {"GEMM and swiglu",
            [=] {
              gemm_forward.run();
              swiglu_forward(swiglu_out, gate_up, N, F, stream);
            }},
           {"fused", [=] { gate_up_swiglu(gate_up, swiglu_out, x, w, N, C, F, stream); }}},
          stream);
  compare(shape, "down dgrad, swiglu", flops,
          {gemm_backward,
           {"GEMM and swiglu",
            [=] {
              gemm_backward.run();
              swiglu_backward<bf16>(gate_up, dswiglu_out, gate_up, N, F, nullptr, stream);
            }},
           {"fused", [=] { down_input_grad_swiglu(gate_up, nullptr, x, w, N, C, F, stream); }}},
          stream);
}

}  // namespace

int main(int argc, char** argv) {
  return gpu_main([&] {
    const Stream stream;
    Matmul matmul(stream);
    for (const Shape& shape : kShapes) {
      bool wanted = argc == 1;
      for (int i = 1; i < argc; ++i) wanted |= std::string(argv[i]) == shape.name;
      if (!wanted) continue;
      run(shape, matmul, stream);
      run_fp8(shape, matmul, stream);
    }
  });
}
