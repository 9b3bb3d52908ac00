// cpu_bits: prints each CPU kernel's name and a hash of its results on fixed inputs with ragged sizes. test/run.py compares the
// lines of builds that differ in what the compiler tunes for, which may change no bit.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/matmul_rows.h"
#include "llmc/cpu/paged_attention.h"
#include "llmc/cpu/residual_norm.h"
#include "llmc/cpu/rope.h"
#include "llmc/cpu/swiglu.h"

namespace weft::cpu {
namespace {

using Floats = std::vector<float>;

// Each call gives other values, the same in every build.
Floats some(std::int64_t count) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

void print(const char* name, const Floats& values) {
  std::printf("%s %016llx\n", name,
              static_cast<unsigned long long>(xxh3_64(values.data(), values.size() * sizeof(float))));
}

void linear() {
  const std::int64_t C = 101, OC = 37;
  for (const std::int64_t N : {1, 2, 4, 11}) {
    const Floats x = some(N * C), weight = some(OC * C), bias = some(OC);
    Floats out(static_cast<std::size_t>(N * OC));
    matmul_rows_forward(out.data(), x.data(), {weight.data(), {}}, bias.data(), N, C, OC);
    print("matmul_rows", out);
    if (N > 4) continue;  // those are OpenBLAS's
    matmul_forward(out.data(), x.data(), weight.data(), bias.data(), N, C, OC);
    print("matmul of few rows", out);
  }
}

void paged() {
  const std::int64_t NH = 4, NKV = 2, HS = 37, P = 16, pages = 5, position = 61, rows = 6;
  Floats keys = some(pages * NKV * P * HS), values = some(pages * NKV * P * HS);
  const Floats q = some(rows * NH * HS);
  Floats out(q.size());
  std::vector<std::int32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  const PagedRows work = {table, position, rows, 0};
  paged_attention({NH, 0.16f, NH * HS, HS}, out.data(), q.data(), {keys.data(), values.data(), P, NKV, HS},
                  std::span(&work, 1));
  print("paged_attention", out);
}

void attention(std::int64_t T) {
  const AttentionShape shape = {.B = 2, .TQ = T, .TK = T, .NH = 4, .NKV = 2, .HS = 37, .causal = true, .scale = 0.16f};
  const std::int64_t size = shape.B * T * shape.NH * shape.HS, kv_size = size / 2;
  const auto view = [&](auto* data, std::int64_t heads) {
    return HeadViewOf<std::remove_pointer_t<decltype(data)>>{data, T * heads * shape.HS, heads * shape.HS, shape.HS};
  };
  const Floats q = some(size), k = some(kv_size), v = some(kv_size), dout = some(size);
  Floats out(q.size()), lse(static_cast<std::size_t>(shape.B * shape.NH * T)), dq(q.size()), dk(k.size()), dv(v.size());
  attention_forward(shape, view(out.data(), 4), lse.data(), view(q.data(), 4), view(k.data(), 2), view(v.data(), 2));
  attention_backward(shape, view(dq.data(), 4), view(dk.data(), 2), view(dv.data(), 2), view(dout.data(), 4),
                     view(std::as_const(out).data(), 4), lse.data(), view(q.data(), 4), view(k.data(), 2),
                     view(v.data(), 2));
  print("attention out", out);
  print("attention lse", lse);
  print("attention dq", dq);
  print("attention dk", dk);
  print("attention dv", dv);
}

void norm(NormKind kind) {
  const std::int64_t rows = 35, C = 101;
  const ResidualNormShape shape = {.rows = rows, .C = C, .kind = kind, .eps = 1e-5f};
  const Floats x = some(rows * C), residual = some(rows * C), weight = some(C), dout = some(rows * C);
  Floats h(x.size()), out(x.size()), mean(static_cast<std::size_t>(rows)), rstd(mean.size());
  ResidualNormForward forward;
  forward.x = x.data(), forward.residual = residual.data(), forward.weight = weight.data();
  forward.residual_out = h.data(), forward.out = out.data(), forward.mean = mean.data(), forward.rstd = rstd.data();
  residual_norm_forward(shape, forward);
  Floats dx(x.size()), dweight(weight.size());
  ResidualNormBackward backward;
  backward.dout = dout.data(), backward.residual_out = h.data(), backward.x = x.data();
  backward.weight = weight.data(), backward.mean = mean.data(), backward.rstd = rstd.data();
  backward.dx = dx.data(), backward.dweight = dweight.data();
  residual_norm_backward(shape, backward);
  print("norm out", out);
  print("norm rstd", rstd);
  print("norm dx", dx);
  print("norm dweight", dweight);
}

void pointwise() {
  const std::int64_t N = 5, F = 101;
  const Floats gate_up = some(N * 2 * F), dout = some(N * F);
  Floats out(dout.size()), dgate_up(gate_up.size());
  swiglu_forward(out.data(), gate_up.data(), N, F);
  swiglu_backward(dgate_up.data(), dout.data(), gate_up.data(), N, F);
  print("swiglu out", out);
  print("swiglu dgate_up", dgate_up);
  gelu_forward(out.data(), dout.data(), N * F);
  print("gelu out", out);
  RopeTable table = {N, 19, some(N * 19), some(N * 19)};
  Floats heads = some(N * 2 * 38);
  rope_forward({heads.data(), N * 2 * 38, 2 * 38, 38}, table, 1, N, 2, 0);
  print("rope", heads);
}

void loss_and_update() {
  const std::int64_t N = 3, V = 2011;
  Floats logits = some(N * V), losses(static_cast<std::size_t>(N));
  const std::vector<std::int32_t> labels = {0, 7, 2010};
  classifier(logits.data(), losses.data(), labels.data(), N, V, 0.25f, true);
  print("classifier losses", losses);
  print("classifier gradient", logits);
  const std::int64_t count = kAdamWBlock + 101;
  Floats parameters = some(count), m = some(count), v = some(count);
  const Floats gradients = some(count);
  for (float& value : v) value *= value;
  adamw(parameters.data(), gradients.data(), m.data(), v.data(), count, true, {.step = 3, .learning_rate = 0.01f});
  print("adamw", parameters);
  print("sum of squares", {static_cast<float>(sum_of_squares(gradients.data(), count))});
}

}  // namespace
}  // namespace weft::cpu

int main() {
  using namespace weft;
  cpu::linear();
  cpu::paged();
  for (const std::int64_t T : {7, 131}) cpu::attention(T);
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::layernorm}) cpu::norm(kind);
  cpu::pointwise();
  cpu::loss_and_update();
}
