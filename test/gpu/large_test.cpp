// Tensors of more than 2^31 elements: every operator on its last rows against the same operator on those rows alone. The
// rest of each tensor holds one constant, so that an offset that wraps around reads or writes something else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/classifier/classifier.h"
#include "llmc/cuda/op/elementwise/embedding.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/op/gemm/matmul_swiglu.h"
#include "llmc/cuda/op/gemm/matmul_swiglu_fp8.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/op/optim/adamw.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/train_model.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using test::bf16;
using test::DeviceBuffer;
using test::random_stored;
using test::stored;

constexpr std::int64_t kBeyond = std::int64_t{1} << 31;

bool too_small_for(std::int64_t bytes) {
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "test: memory");
  return free_bytes < static_cast<std::size_t>(bytes) + (std::size_t{2} << 30);
}
#define SKIP_WITHOUT(bytes) \
  if (too_small_for(bytes)) GTEST_SKIP() << "needs " << ((bytes) >> 30) << " GiB of free GPU memory"

template <typename T>
std::vector<T> last(const DeviceBuffer<T>& buffer, std::size_t count) {
  std::vector<T> values(count);
  check(cudaMemcpy(values.data(), buffer.data() + buffer.size() - count, count * sizeof(T), cudaMemcpyDeviceToHost),
        "test: download");
  return values;
}

// `count` elements, of which all but the last are the same small number.
template <typename T>
DeviceBuffer<T> ending_with(std::int64_t count, const std::vector<T>& end) {
  DeviceBuffer<T> buffer(static_cast<std::size_t>(count));
  buffer.fill_bytes(0x3c);  // 0.0115 in bf16 and in float
  check(cudaMemcpy(buffer.data() + buffer.size() - end.size(), end.data(), end.size() * sizeof(T),
                   cudaMemcpyHostToDevice),
        "test: upload");
  return buffer;
}

template <typename T>
void expect_same_end(const DeviceBuffer<T>& large, const DeviceBuffer<T>& small, const char* what) {
  check(cudaDeviceSynchronize(), what);
  const std::vector<T> a = last(large, small.size()), b = small.download();
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0) << what;
}

std::vector<bf16> random_rows(std::int64_t count, unsigned seed, float scale = 1) {
  return stored<bf16>(random_stored<bf16>(count, seed, scale));
}

TEST(Large, Swiglu) {
  const std::int64_t F = 8192, R = 3, N = kBeyond / F + R;
  SKIP_WITHOUT(10 * N * F);
  const auto rows = random_rows(R * 2 * F, 1), gradient = random_rows(R * F, 2);
  const auto gate_up = ending_with<bf16>(N * 2 * F, rows);
  const DeviceBuffer<bf16> gate_up_end(rows), dout_end(gradient);
  {
    const DeviceBuffer<bf16> out(static_cast<std::size_t>(N * F)), out_end(gradient.size());
    swiglu_forward(out.data(), gate_up.data(), N, F, nullptr);
    swiglu_forward(out_end.data(), gate_up_end.data(), R, F, nullptr);
    expect_same_end(out, out_end, "swiglu_forward");
  }
  const auto dout = ending_with<bf16>(N * F, gradient);
  const DeviceBuffer<bf16> end(rows.size());
  swiglu_backward<bf16>(end.data(), dout_end.data(), gate_up_end.data(), R, F, nullptr, nullptr);
  swiglu_backward<bf16>(gate_up.data(), dout.data(), gate_up.data(), N, F, nullptr, nullptr);  // in place
  expect_same_end(gate_up, end, "swiglu_backward");
}

TEST(Large, MatmulSwiglu) {
  const std::int64_t C = 64, F = 8192, R = 130, N = kBeyond / F + R;
  if (!matmul_swiglu_computes(C, F)) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  SKIP_WITHOUT(6 * N * F + 4 * N * C);
  const auto rows = random_rows(R * C, 1);
  const DeviceBuffer<bf16> weight(random_rows(2 * F * C, 2, 0.1f)), rows_end(rows);
  const auto x = ending_with<bf16>(N * C, rows);
  const DeviceBuffer<bf16> gate_up(static_cast<std::size_t>(N * 2 * F)), product(static_cast<std::size_t>(N * F));
  const DeviceBuffer<bf16> gate_up_end(static_cast<std::size_t>(R * 2 * F)),
      product_end(static_cast<std::size_t>(R * F));
  gate_up_swiglu(gate_up.data(), product.data(), x.data(), weight.data(), N, C, F, nullptr);
  gate_up_swiglu(gate_up_end.data(), product_end.data(), rows_end.data(), weight.data(), R, C, F, nullptr);
  expect_same_end(gate_up, gate_up_end, "gate_up_swiglu");
  expect_same_end(product, product_end, "gate_up_swiglu: product");
  down_input_grad_swiglu(gate_up.data(), product.data(), x.data(), weight.data(), N, C, F, nullptr);
  down_input_grad_swiglu(gate_up_end.data(), product_end.data(), rows_end.data(), weight.data(), R, C, F, nullptr);
  expect_same_end(gate_up, gate_up_end, "down_input_grad_swiglu");
  expect_same_end(product, product_end, "down_input_grad_swiglu: product");
}

TEST(Large, MatmulSwigluFp8) {
  const std::int64_t C = 64, F = 8192, R = 144, N = kBeyond / F + R;
  if (!matmul_swiglu_fp8_computes()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  SKIP_WITHOUT(10 * N * F + N * C);
  const auto codes = [](std::int64_t count, std::uint32_t factor) {
    std::vector<std::uint8_t> values(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(i) * factor >> 24 & 0xB7);  // none is NaN
    }
    return values;
  };
  const auto rows = codes(R * C, 2654435761u);
  const DeviceBuffer<std::uint8_t> weight(codes(2 * F * C, 2246822519u)), rows_end(rows);
  const auto x = ending_with<std::uint8_t>(N * C, rows);
  const DeviceBuffer<float> one(std::vector<float>{1.0f});
  const Fp8Matrix w{weight.data(), one.data()};
  struct Results {
    explicit Results(std::int64_t count)  // n F
        : gate_up(static_cast<std::size_t>(2 * count)),
          out(static_cast<std::size_t>(count)),
          out_turned(out.size()),
          gradient(gate_up.size()),
          gradient_turned(gate_up.size()) {}
    DeviceBuffer<bf16> gate_up;
    DeviceBuffer<std::uint8_t> out, out_turned, gradient, gradient_turned;
  };
  const Results all(N * F), end(R * F);
  const auto compute = [&](const Results& to, const DeviceBuffer<std::uint8_t>& of, std::int64_t n) {
    const Fp8Matrix a{of.data(), one.data()};
    gate_up_swiglu_fp8(to.gate_up.data(), {to.out.data(), nullptr, one.data(), nullptr}, a, w, n, C, F, nullptr);
    down_input_grad_swiglu_fp8({to.gradient.data(), to.gradient_turned.data(), one.data(), nullptr},
                               {nullptr, to.out_turned.data(), one.data(), nullptr}, a, w, to.gate_up.data(), n, C, F,
                               nullptr);
  };
  compute(all, x, N);
  compute(end, rows_end, R);
  expect_same_end(all.gate_up, end.gate_up, "gate_up_swiglu_fp8");
  expect_same_end(all.out, end.out, "gate_up_swiglu_fp8: out");
  expect_same_end(all.gradient, end.gradient, "down_input_grad_swiglu_fp8");
  // The last row of the transposed layouts ends with these rows.
  EXPECT_EQ(last(all.gradient_turned, R), last(end.gradient_turned, R));
  EXPECT_EQ(last(all.out_turned, R), last(end.out_turned, R));
}

TEST(Large, Rope) {
  const std::int64_t B = 8, NH = 64, HS = 128, row = NH * HS, R = 2, T = kBeyond / (B * row) + R;
  SKIP_WITHOUT(2 * B * T * row);
  const auto values = random_rows(R * row, 5);
  const auto x = ending_with<bf16>(B * T * row, values);
  const DeviceBuffer<bf16> end(values);
  const auto cos = test::random_floats(T * HS / 2, 6), sin = test::random_floats(T * HS / 2, 7);
  const DeviceBuffer<float> cos_table(cos), sin_table(sin);
  const DeviceRopeTable table{cos_table.data(), sin_table.data(), T, HS / 2};
  rope_forward(HeadViewOf<bf16>{x.data(), T * row, row, HS}, table, B, T, NH, 0, nullptr);
  rope_forward(HeadViewOf<bf16>{end.data(), R * row, row, HS}, table, 1, R, NH, T - R, nullptr);
  expect_same_end(x, end, "rope_forward");
  rope_backward(HeadViewOf<bf16>{x.data(), T * row, row, HS}, table, B, T, NH, 0, nullptr);
  rope_backward(HeadViewOf<bf16>{end.data(), R * row, row, HS}, table, 1, R, NH, T - R, nullptr);
  expect_same_end(x, end, "rope_backward");
}

TEST(Large, Embedding) {
  const std::int64_t C = 16384, V = kBeyond / C + 3, N = V;
  SKIP_WITHOUT(8 * V * C);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(N));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 5);
  ids.back() = static_cast<std::int32_t>(V - 1);
  const DeviceBuffer<std::int32_t> tokens(ids);
  const auto row = random_rows(C, 8);
  {
    const auto weight = ending_with<bf16>(V * C, row);
    const DeviceBuffer<bf16> out(static_cast<std::size_t>(N * C)), end(row);
    embedding_forward(out.data(), tokens.data(), weight.data(), N, C, nullptr);
    expect_same_end(out, end, "embedding_forward");
  }
  const std::int64_t rows = 4096;  // of which the last one belongs to the last token
  const DeviceBuffer<std::int32_t> few(std::vector<std::int32_t>(ids.end() - rows, ids.end()));
  const auto dout = ending_with<bf16>(rows * C, row);
  const DeviceBuffer<char> sorted(embedding_sort_bytes(rows)), workspace(embedding_backward_workspace(rows, C));
  DeviceBuffer<float> dweight(static_cast<std::size_t>(V * C));
  dweight.fill_bytes(0);
  embedding_sort(sorted.data(), few.data(), rows, V, nullptr);
  embedding_backward(dweight.data(), dout.data(), sorted.data(), rows, C, workspace.data(), nullptr);
  const DeviceBuffer<float> end(test::widened(row));
  expect_same_end(dweight, end, "embedding_backward");
}

TEST(Large, ResidualNorm) {
  const std::int64_t C = 16384, R = 3, N = kBeyond / C + R;
  SKIP_WITHOUT(8 * N * C);
  const auto x_rows = random_rows(R * C, 9), skip_rows = random_rows(R * C, 10);
  const DeviceBuffer<bf16> weight(random_rows(C, 11, 0.1f)), x_end(x_rows), skip_end(skip_rows);
  const auto x = ending_with<bf16>(N * C, x_rows), skip = ending_with<bf16>(N * C, skip_rows);
  const DeviceBuffer<bf16> out(x.size()), out_end(x_end.size()), h_end(x_end.size());
  const DeviceBuffer<float> rstd(static_cast<std::size_t>(N)), rstd_end(static_cast<std::size_t>(R));
  ResidualNormShape shape{N, C};
  shape.eps = 1e-5f;
  ResidualNormForward<bf16, bf16> io;
  io.x = x.data();
  io.residual = skip.data();
  io.weight = weight.data();
  io.residual_out = skip.data();  // h replaces the residual
  io.out = out.data();
  io.rstd = rstd.data();
  residual_norm_forward(shape, io, nullptr);
  ResidualNormShape shape_end = shape;
  shape_end.rows = R;
  ResidualNormForward<bf16, bf16> io_end = io;
  io_end.x = x_end.data();
  io_end.residual = skip_end.data();
  io_end.residual_out = h_end.data();
  io_end.out = out_end.data();
  io_end.rstd = rstd_end.data();
  residual_norm_forward(shape_end, io_end, nullptr);
  expect_same_end(out, out_end, "residual_norm_forward");
  expect_same_end(skip, h_end, "residual_norm_forward: residual");
  expect_same_end(rstd, rstd_end, "residual_norm_forward: rstd");

  ResidualNormBackward<bf16, bf16> back;
  back.dout = x.data();
  back.residual_out = skip.data();
  back.weight = weight.data();
  back.rstd = rstd.data();
  back.dresidual = out.data();
  DeviceBuffer<float> dweight(static_cast<std::size_t>(C));
  dweight.fill_bytes(0);
  const DeviceBuffer<char> workspace(residual_norm_backward_workspace(C, 1));
  back.dweight = dweight.data();
  back.workspace = workspace.data();
  residual_norm_backward(shape, back, nullptr);
  ResidualNormBackward<bf16, bf16> back_end = back;
  back_end.dout = x_end.data();
  back_end.residual_out = h_end.data();
  back_end.rstd = rstd_end.data();
  back_end.dresidual = out_end.data();
  residual_norm_backward(shape_end, back_end, nullptr);
  expect_same_end(out, out_end, "residual_norm_backward");
}

TEST(Large, Classifier) {
  const std::int64_t V = 131064, row = 131072, R = 3, N = kBeyond / row + R;
  SKIP_WITHOUT(2 * N * row);
  const auto rows = random_rows(R * row, 12);
  const auto logits = ending_with<bf16>(N * row, rows);
  const DeviceBuffer<bf16> end(rows);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(N), 7);
  for (std::int64_t i = 0; i < R; ++i) ids[static_cast<std::size_t>(N - R + i)] = static_cast<std::int32_t>(V - 1 - i);
  const DeviceBuffer<std::int32_t> labels(ids), labels_end(std::vector<std::int32_t>(ids.end() - R, ids.end()));
  const DeviceBuffer<float> losses(ids.size()), losses_end(static_cast<std::size_t>(R));
  classifier(logits.data(), losses.data(), labels.data(), N, V, row, 0.5f, true, nullptr);
  classifier(end.data(), losses_end.data(), labels_end.data(), R, V, row, 0.5f, true, nullptr);
  check(cudaDeviceSynchronize(), "classifier");
  expect_same_end(losses, losses_end, "classifier: losses");
  expect_same_end(logits, end, "classifier: gradient");
}

TEST(Large, Attention) {
  for (const std::int64_t HS : {64, 128}) {
    SCOPED_TRACE(HS);
    const std::int64_t NH = 4096 / HS, NKV = NH / 4, T = 1024, q = NH * HS, kv = NKV * HS;
    const std::int64_t B = kBeyond / (T * q) + 2;
    AttentionShape shape{B, T, T, NH, NKV, HS, true, 0.1f};
    SKIP_WITHOUT(2 * B * T * (4 * q + 4 * kv) + static_cast<std::int64_t>(attention_backward_workspace(shape)));
    const auto view = [&](const DeviceBuffer<bf16>& buffer, std::int64_t width) {
      return HeadViewOf<bf16>{buffer.data(), T * width, width, HS};
    };
    const auto q_rows = random_rows(T * q, 13), k_rows = random_rows(T * kv, 14), v_rows = random_rows(T * kv, 15),
               g_rows = random_rows(T * q, 16);
    const auto queries = ending_with<bf16>(B * T * q, q_rows), keys = ending_with<bf16>(B * T * kv, k_rows),
               values = ending_with<bf16>(B * T * kv, v_rows), dout = ending_with<bf16>(B * T * q, g_rows);
    const DeviceBuffer<bf16> q1(q_rows), k1(k_rows), v1(v_rows), g1(g_rows);
    const DeviceBuffer<bf16> out(queries.size()), dq(queries.size()), dk(keys.size()), dv(keys.size());
    const DeviceBuffer<bf16> out1(q1.size()), dq1(q1.size()), dk1(k1.size()), dv1(k1.size());
    const DeviceBuffer<float> lse(static_cast<std::size_t>(B * NH * T)), lse1(static_cast<std::size_t>(NH * T));
    const DeviceBuffer<char> workspace(attention_backward_workspace(shape));
    attention_forward<bf16>(shape, view(out, q), lse.data(), view(queries, q), view(keys, kv), view(values, kv),
                            nullptr);
    attention_backward<bf16>(shape, view(dq, q), view(dk, kv), view(dv, kv), view(dout, q), view(out, q), lse.data(),
                             view(queries, q), view(keys, kv), view(values, kv), workspace.data(), nullptr);
    check(cudaDeviceSynchronize(), "attention");
    shape.B = 1;
    attention_forward<bf16>(shape, view(out1, q), lse1.data(), view(q1, q), view(k1, kv), view(v1, kv), nullptr);
    attention_backward<bf16>(shape, view(dq1, q), view(dk1, kv), view(dv1, kv), view(g1, q), view(out1, q), lse1.data(),
                             view(q1, q), view(k1, kv), view(v1, kv), workspace.data(), nullptr);
    expect_same_end(out, out1, "attention_forward");
    expect_same_end(lse, lse1, "attention_forward: lse");
    expect_same_end(dq, dq1, "attention_backward: dq");
    expect_same_end(dk, dk1, "attention_backward: dk");
    expect_same_end(dv, dv1, "attention_backward: dv");
  }
}

TEST(Large, Matmul) {
  const std::int64_t C = 64, OC = 16384, R = 5, N = kBeyond / OC + R;
  SKIP_WITHOUT(2 * N * OC);
  const Stream stream;
  Matmul matmul(stream);
  const auto x_rows = random_rows(R * C, 17);
  const DeviceBuffer<bf16> weight(random_rows(OC * C, 18)), x_end(x_rows);
  const auto x = ending_with<bf16>(N * C, x_rows);
  const DeviceBuffer<bf16> out(static_cast<std::size_t>(N * OC)), out_end(static_cast<std::size_t>(R * OC));
  matmul.forward<bf16>(out.data(), x.data(), weight.data(), nullptr, N, C, OC);
  matmul.forward<bf16>(out_end.data(), x_end.data(), weight.data(), nullptr, R, C, OC);
  const DeviceBuffer<bf16> dx(x.size()), dx_end(x_end.size());
  matmul.input_grad<bf16>(dx.data(), out.data(), weight.data(), N, C, OC);
  matmul.input_grad<bf16>(dx_end.data(), out_end.data(), weight.data(), R, C, OC);
  stream.synchronize("test");
  // Two shapes may have two algorithms: the last bit may differ.
  test::expect_near<bf16>(test::widened(last(out, out_end.size())), test::on_host(out_end), "out", 1e-2);
  test::expect_near<bf16>(test::widened(last(dx, dx_end.size())), test::on_host(dx_end), "dx", 1e-2);
}

TEST(Large, AdamW) {
  const std::int64_t R = 8192, count = kBeyond + R;
  SKIP_WITHOUT(16 * count);
  const auto parameter_end = random_rows(R, 19);
  const auto floats = [&](unsigned seed) { return test::random_floats(R, seed); };
  std::vector<float> v_end = floats(22);
  for (float& value : v_end) value = std::abs(value);
  const auto parameters = ending_with<bf16>(count, parameter_end);
  const DeviceBuffer<std::int16_t> low = ending_with<std::int16_t>(count, std::vector<std::int16_t>(R, 5));
  const auto gradients = ending_with<float>(count, floats(20)), m = ending_with<float>(count, floats(21)),
             v = ending_with<float>(count, v_end);
  const DeviceBuffer<bf16> parameters1(parameter_end);
  const DeviceBuffer<std::int16_t> low1(std::vector<std::int16_t>(R, 5));
  const DeviceBuffer<float> gradients1(floats(20)), m1(floats(21)), v1(v_end);
  AdamWStep step;
  step.step = 3;
  step.learning_rate = 0.01f;
  step.weight_decay = 0.1f;
  const auto update = [&](std::int64_t elements, const auto& p, const auto& l, const auto& g, const auto& a,
                          const auto& b) {
    const AdamWRange range{0, elements, true};
    const DeviceBuffer<AdamWBlock> blocks(adamw_blocks({&range, 1}));
    adamw(p.data(), l.data(), g.data(), a.data(), b.data(), blocks.data(), static_cast<std::int64_t>(blocks.size()),
          step, nullptr, nullptr);
    check(cudaDeviceSynchronize(), "adamw");
  };
  update(count, parameters, low, gradients, m, v);
  update(R, parameters1, low1, gradients1, m1, v1);
  expect_same_end(parameters, parameters1, "adamw: parameters");
  expect_same_end(low, low1, "adamw: low halves");
  expect_same_end(m, m1, "adamw: first moments");
  expect_same_end(v, v1, "adamw: second moments");

  // The sum of squares of the constant and of the end.
  float constant = 0;
  std::memset(&constant, 0x3c, sizeof constant);
  double squares = static_cast<double>(constant) * constant * static_cast<double>(count - R);
  for (const float value : floats(20)) squares += static_cast<double>(value) * value;
  const DeviceBuffer<GradientNorm> norm(1);
  const AdamWRange all{0, count, true};
  const DeviceBuffer<AdamWBlock> blocks(adamw_blocks({&all, 1}));
  const DeviceBuffer<double> sums(blocks.size());
  const auto block_count = static_cast<std::int64_t>(blocks.size());
  block_squares(sums.data(), gradients.data(), blocks.data(), block_count, nullptr);
  gradient_norm(norm.data(), sums.data(), nullptr, block_count, 0, nullptr);
  EXPECT_NEAR(norm.download()[0].norm, std::sqrt(squares), 1e-4 * std::sqrt(squares));
}

}  // namespace
}  // namespace weft::cuda
