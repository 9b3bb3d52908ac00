// Token embedding on the GPU, forward and backward, against the CPU.

#include "llmc/cuda/op/elementwise/embedding.h"

#include "llmc/cpu/embedding.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;
using Tokens = std::vector<std::int32_t>;

// How tokens repeat: like a text (few frequent, many rare), all different, all the same, or a long stretch of one.
enum class Repeats { text, none, all, half };

Tokens make_tokens(std::int64_t N, std::int64_t V, Repeats repeats) {
  std::mt19937 generator(7);
  std::uniform_real_distribution<double> uniform;
  Tokens tokens(static_cast<std::size_t>(N));
  for (std::size_t n = 0; n < tokens.size(); ++n) {
    const double u = uniform(generator);
    std::int64_t token = static_cast<std::int64_t>(std::pow(static_cast<double>(V), u)) - 1;
    if (repeats == Repeats::none) token = static_cast<std::int64_t>(n * 7919) % V;
    if (repeats == Repeats::all) token = V - 1;
    if (repeats == Repeats::half && n % 2 == 0) token = V / 2;
    tokens[n] = static_cast<std::int32_t>(std::clamp<std::int64_t>(token, 0, V - 1));
  }
  return tokens;
}

template <typename T, typename R>
void check_forward(std::int64_t N, std::int64_t C, std::int64_t V, float scale = 1) {
  SCOPED_TRACE("forward " + type_name<T>() + "/" + type_name<R>() + " C " + std::to_string(C));
  const Tokens tokens = make_tokens(N, V, Repeats::text);
  const Floats weight = random_stored<T>(V * C, 1);
  Floats out(static_cast<std::size_t>(N * C));
  cpu::embedding_forward(out.data(), tokens.data(), weight.data(), N, C, scale);
  const DeviceBuffer<std::int32_t> gpu_tokens(tokens);
  const DeviceBuffer<T> gpu_weight = on_device<T>(weight);
  const DeviceBuffer<R> gpu_out(out.size());
  embedding_forward(gpu_out.data(), gpu_tokens.data(), gpu_weight.data(), N, C, nullptr, scale);
  EXPECT_EQ(on_host(gpu_out), widened(stored<R>(out)));  // a copy, or one product: exact
}

TEST(Embedding, ForwardCopiesRows) {
  for (const std::int64_t C : {1, 7, 8, 64, 2048, 4100, 4104}) {
    check_forward<float, float>(37, C, 300);
    check_forward<bf16, bf16>(37, C, 300);
    check_forward<bf16, float>(37, C, 300);
    check_forward<fp16, fp16>(1, C, 5);
    check_forward<fp16, float>(1000, C, 5);
  }
}

TEST(Embedding, ForwardScalesRows) {
  for (const std::int64_t C : {1, 7, 64, 1152}) {
    check_forward<float, float>(37, C, 300, std::sqrt(72.0f));
    check_forward<bf16, bf16>(37, C, 300, 34);
    check_forward<bf16, float>(37, C, 300, 34);
  }
}

template <typename T>
void check_backward(std::int64_t N, std::int64_t C, std::int64_t V, Repeats repeats, float scale = 1) {
  SCOPED_TRACE("backward " + type_name<T>() + " N " + std::to_string(N) + " C " + std::to_string(C) + " V " +
               std::to_string(V) + " repeats " + std::to_string(static_cast<int>(repeats)));
  const Tokens tokens = make_tokens(N, V, repeats);
  const Floats dout = random_stored<T>(N * C, 2), before = random_floats(V * C, 3);
  Floats want = before;
  cpu::embedding_backward(want.data(), dout.data(), tokens.data(), N, C, scale);

  const DeviceBuffer<std::int32_t> gpu_tokens(tokens);
  const DeviceBuffer<T> gpu_dout = on_device<T>(dout);
  const DeviceBuffer<float> dweight(before), again(before);
  for (const DeviceBuffer<float>* target : {&dweight, &again}) {
    const DeviceBuffer<char> sorted(embedding_sort_bytes(N)), workspace(embedding_backward_workspace(N, C));
    embedding_sort(sorted.data(), gpu_tokens.data(), N, V, nullptr);
    embedding_backward(target->data(), gpu_dout.data(), sorted.data(), N, C, workspace.data(), nullptr, scale);
    check(cudaStreamSynchronize(nullptr), "embedding_backward");
  }
  expect_near<float>(on_host(dweight), want, "dweight");
  expect_same_bits(dweight, again, "dweight");
  EXPECT_EQ(on_host(gpu_dout), dout) << "dout is read only";
}

template <typename T>
void check_backward_shapes() {
  for (const Repeats repeats : {Repeats::text, Repeats::none, Repeats::all, Repeats::half}) {
    for (const std::int64_t N : {1, 7, 32, 33, 1000, 5000}) check_backward<T>(N, 64, 1000, repeats);
    check_backward<T>(200, 7, 50, repeats);
    check_backward<T>(1, 4100, 1, repeats);
    check_backward<T>(100, 1028, 3, repeats);  // columns of several blocks, and the last with a few
    check_backward<T>(100, 261, 3, repeats);
    check_backward<T>(2049, 8, 128'256, repeats);
    check_backward<T>(40'000, 16, 50'257, repeats);
    check_backward<T>(3000, 8, 600'000, repeats);  // three digits
    for (const std::int64_t C : {64, 261}) check_backward<T>(300, C, 50, repeats, 33.94f);
  }
  check_backward<T>(4096, 2048, 32'000, Repeats::text);
  for (const std::int64_t V : {300, 50'257, 600'000})  // more than a cluster sorts: one, two and three passes
    check_backward<T>(120'000, 8, V, Repeats::text);
}
TEST(Embedding, BackwardFp32) {
  check_backward_shapes<float>();
}
TEST(Embedding, BackwardBf16) {
  check_backward_shapes<bf16>();
}
TEST(Embedding, BackwardFp16) {
  check_backward_shapes<fp16>();
}

// One row a token: nothing to round, so the sum is exact, and in a token's rows the order is that of n.
TEST(Embedding, BackwardAddsRowsInTheirOrder) {
  const std::int64_t N = 30, C = 8;  // within one run: the very additions of the CPU
  Tokens tokens(N);
  for (std::size_t n = 0; n < tokens.size(); ++n) tokens[n] = static_cast<std::int32_t>(n % 3);
  const Floats dout = random_floats(N * C, 5, 1e3f);
  Floats want(3 * C, 0.0f);
  cpu::embedding_backward(want.data(), dout.data(), tokens.data(), N, C);
  const DeviceBuffer<std::int32_t> gpu_tokens(tokens);
  const DeviceBuffer<float> gpu_dout(dout), dweight(Floats(3 * C, 0.0f));
  const DeviceBuffer<char> sorted(embedding_sort_bytes(N)), workspace(embedding_backward_workspace(N, C));
  embedding_sort(sorted.data(), gpu_tokens.data(), N, 3, nullptr);
  embedding_backward(dweight.data(), gpu_dout.data(), sorted.data(), N, C, workspace.data(), nullptr);
  EXPECT_EQ(on_host(dweight), want);
}

}  // namespace
}  // namespace weft::cuda
