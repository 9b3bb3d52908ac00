// The norms of q's and k's heads on the GPU, against the CPU.

#include "llmc/cuda/op/norm/head_norm.h"

#include <array>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/cpu/head_norm.h"
#include "llmc/cuda/runtime/device.h"
#include "test/cpp/test_files.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

constexpr float kBefore = 0.25f;  // what the gradients of weights hold before: = in place of += shows

// Rows of q, k and v: all heads of q, then of k, then of v; or q, k and v of one head after another.
struct Rows {
  HeadNormShape shape;
  bool per_head = false;

  std::int64_t tokens() const { return shape.B * shape.T; }
  std::int64_t heads() const { return shape.NH + shape.NKV; }
  std::int64_t size() const { return (shape.NH + 2 * shape.NKV) * shape.HS; }
  std::int64_t stride() const { return (per_head ? 3 : 1) * shape.HS; }
  template <typename T>
  HeadViewOf<T> q(T* rows) const {
    return {rows, shape.T * size(), size(), stride()};
  }
  template <typename T>
  HeadViewOf<T> k(T* rows) const {
    return q(rows + (per_head ? shape.HS : shape.NH * shape.HS));
  }
  std::string text() const {
    return format("%lld x %lld tokens, %lld + %lld heads of %lld%s", static_cast<long long>(shape.B),
                  static_cast<long long>(shape.T), static_cast<long long>(shape.NH), static_cast<long long>(shape.NKV),
                  static_cast<long long>(shape.HS), per_head ? ", per head" : "");
  }
  cpu::HeadNormShape on_cpu(std::int64_t count) const {
    return {shape.B, shape.T, count, shape.HS, shape.eps, shape.weight_offset};
  }
  // q and k of packed rows, in the layout that forward keeps.
  Floats unpacked(const Floats& rows) const {
    Floats all;
    for (std::int64_t n = 0; n < tokens(); ++n) {
      for (std::int64_t h = 0; h < heads(); ++h) {
        const bool of_q = h < shape.NH;
        const auto view = of_q ? q(rows.data()) : k(rows.data());
        const float* head = view.at(n / shape.T, n % shape.T, of_q ? h : h - shape.NH);
        all.insert(all.end(), head, head + shape.HS);
      }
    }
    return all;
  }
};

// Norm and rotation in one kernel are rope_forward() on what the norm alone gives: `normalized`, from x.
template <typename T>
void check_rotation(const Rows& rows, std::int64_t half, const Floats& x, const DeviceBuffer<T>& normalized,
                    const DeviceBuffer<T>& kept, const DeviceBuffer<T>& q_weight, const DeviceBuffer<T>& k_weight) {
  const HeadNormShape& shape = rows.shape;
  if (!head_norm_rotates<T>(half) || half == 0) return;
  SCOPED_TRACE("rotates 2 x " + std::to_string(half));
  const DeviceBuffer<float> cos(random_floats(shape.T * half, 5)), sin(random_floats(shape.T * half, 6));
  std::vector<std::int32_t> begins;  // of documents of 1, 2, 3, ... tokens
  for (std::int64_t n = 0, next = 0, length = 0; n < rows.tokens(); ++n) {
    const std::int64_t t = n % shape.T;
    if (t == 0) next = 0, length = 0;
    if (t == next) next = t + ++length;
    begins.push_back(static_cast<std::int32_t>(next - length));
  }
  const DeviceBuffer<std::int32_t> starts(begins);
  for (const bool documents : {false, true}) {
    const DeviceRopeTable rope{cos.data(), sin.data(), shape.T, half, documents ? starts.data() : nullptr};
    const DeviceBuffer<T> want = on_device<T>(on_host(normalized)), got = on_device<T>(x);
    rope_forward(rows.q(want.data()), rows.k(want.data()), rope, shape.B, shape.T, shape.NH, shape.NKV, 0, nullptr);
    const HeadNormForward<T> io = {rows.q(got.data()), rows.k(got.data()), q_weight.data(),
                                   k_weight.data(),    kept.data(),        rope};
    head_norm_forward(shape, io, nullptr);
    expect_same_bits(got, want, documents ? "rotated, of documents" : "rotated");
    EXPECT_EQ(on_host(kept), rows.unpacked(x)) << "the inputs";
  }
}

template <typename T>
void check_heads(const Rows& rows) {
  SCOPED_TRACE(type_name<T>() + " " + rows.text());
  const HeadNormShape& shape = rows.shape;
  const std::int64_t HS = shape.HS, count = rows.tokens() * rows.size();
  const Floats x = random_stored<T>(count, 1, 2.0f, 0.1f), dout = random_stored<T>(count, 2);
  const float mean = 1 - shape.weight_offset;
  const Floats q_weight = random_stored<T>(HS, 3, 0.3f, mean), k_weight = random_stored<T>(HS, 4, 0.3f, mean);

  Floats y = x, dx = dout;
  Floats dq_weight(static_cast<std::size_t>(HS), kBefore), dk_weight(static_cast<std::size_t>(HS), kBefore);
  cpu::head_norm_forward(rows.on_cpu(shape.NH), rows.q(y.data()), rows.q(x.data()), q_weight.data());
  cpu::head_norm_forward(rows.on_cpu(shape.NKV), rows.k(y.data()), rows.k(x.data()), k_weight.data());
  cpu::head_norm_backward(rows.on_cpu(shape.NH), rows.q(dx.data()), dq_weight.data(), rows.q(dout.data()),
                          rows.q(x.data()), q_weight.data());
  cpu::head_norm_backward(rows.on_cpu(shape.NKV), rows.k(dx.data()), dk_weight.data(), rows.k(dout.data()),
                          rows.k(x.data()), k_weight.data());

  const DeviceBuffer<T> gpu_y = on_device<T>(x), alone = on_device<T>(x), chained = on_device<T>(x);
  const DeviceBuffer<T> wq = on_device<T>(q_weight), wk = on_device<T>(k_weight);
  const DeviceBuffer<T> kept(static_cast<std::size_t>(rows.tokens() * rows.heads() * HS));
  const auto forward = [&](const DeviceBuffer<T>& at, T* keep, bool overlapping) {
    const HeadNormForward<T> io = {rows.q(at.data()), rows.k(at.data()), wq.data(), wk.data(), keep};
    head_norm_forward(shape, io, nullptr, overlapping);
  };
  forward(gpu_y, kept.data(), false);
  expect_near<T>(on_host(gpu_y), y, "y");  // values are v's as well: they are not touched
  EXPECT_EQ(on_host(kept), rows.unpacked(x)) << "the inputs";
  forward(alone, nullptr, false);
  expect_same_bits(alone, gpu_y, "y without the inputs");
  forward(chained, nullptr, launch_device().overlapping);
  expect_same_bits(chained, gpu_y, "y in a chain");
  if (!rows.per_head) {
    for (const std::int64_t half : {HS / 2, HS / 8 * 2}) check_rotation<T>(rows, half, x, gpu_y, kept, wq, wk);
  }

  const DeviceBuffer<char> workspace(head_norm_backward_workspace(HS));
  const auto backward = [&] {
    const DeviceBuffer<T> at = on_device<T>(dout);
    const Floats before(static_cast<std::size_t>(HS), kBefore);
    const DeviceBuffer<float> dq(before), dk(before);
    const HeadNormBackward<T> io = {rows.q(at.data()), rows.k(at.data()), kept.data(), wq.data(),
                                    wk.data(),         dq.data(),         dk.data(),   workspace.data()};
    head_norm_backward(shape, io, nullptr);
    return std::array<Floats, 3>{on_host(at), on_host(dq), on_host(dk)};
  };
  const std::array<Floats, 3> got = backward();
  expect_near<T>(got[0], dx, "dx");
  expect_near<float>(got[1], dq_weight, "dq_weight");
  expect_near<float>(got[2], dk_weight, "dk_weight");
  EXPECT_EQ(backward(), got) << "again";
}

// Tokens beside the blocks of backward, heads beside the lanes of a warp and the threads of a block, grouped heads.
template <typename T>
void check_shapes() {
  for (const std::int64_t HS : {32, 64, 80, 96, 128, 256, 8, 24}) {
    for (const std::int64_t T_ : {1, 2, 3, 4, 5, 33, 257}) {
      check_heads<T>({{1, T_, 3, 1, HS, 1e-6f}});
      if (testing::Test::HasFailure()) return;
    }
    check_heads<T>({{3, 7, 5, 5, HS, 1e-5f}, true});
    check_heads<T>({{2, 33, 16, 8, HS, 1e-3f}});
    check_heads<T>({{1, 5, 71, 13, HS, 1e-6f}});  // more heads than a block has at once
    if (testing::Test::HasFailure()) return;
  }
  check_heads<T>({{1, 1000, 8, 2, 128, 1e-6f}});
  check_heads<T>({{3, 1111, 2, 1, 64, 1e-6f}});  // more tokens than backward has blocks
}

TEST(HeadNorm, WeightsMayHaveAnOffset) {
  for (const std::int64_t HS : {32, 80, 256}) {
    const Rows rows{{1, 37, 3, 1, HS, 1e-6f, 1.0f}};
    check_heads<float>(rows);
    check_heads<bf16>(rows);
    check_heads<fp16>(rows);
  }
}

TEST(HeadNorm, Fp32) {
  check_shapes<float>();
}
TEST(HeadNorm, Bf16) {
  check_shapes<bf16>();
}
TEST(HeadNorm, Fp16) {
  check_shapes<fp16>();
}

// A head's bits are its own: alone, and among others.
TEST(HeadNorm, BitsOfAHeadDependOnItAlone) {
  for (const std::int64_t HS : {32, 80, 128, 256}) {
    const Rows many{{1, 37, 6, 2, HS, 1e-6f}};
    const Floats x = random_stored<bf16>(many.tokens() * many.size(), 1);
    const DeviceBuffer<bf16> weight = on_device<bf16>(random_stored<bf16>(HS, 3, 0.3f, 1.0f));
    const auto normalized = [&](const Rows& rows, const Floats& values) {
      const DeviceBuffer<bf16> at = on_device<bf16>(values);
      head_norm_forward<bf16>(rows.shape, {rows.q(at.data()), rows.k(at.data()), weight.data(), weight.data()},
                              nullptr);
      return rows.unpacked(on_host(at));
    };
    const Floats want = normalized(many, x), inputs = many.unpacked(x);
    for (const std::int64_t head : {0L, 5L, 6L, 7L, 8L * 20 + 3, 8L * 36 + 7}) {
      const auto begin = [&](const Floats& of) { return of.begin() + head * HS; };
      Floats pair(begin(inputs), begin(inputs) + HS);
      pair.insert(pair.end(), begin(inputs), begin(inputs) + HS);
      pair.resize(static_cast<std::size_t>(3 * HS));  // and a v
      const Floats got = normalized({{1, 1, 1, 1, HS, 1e-6f}}, pair);
      EXPECT_TRUE(std::equal(got.begin(), got.begin() + HS, begin(want))) << HS << ", head " << head << " as q";
      EXPECT_TRUE(std::equal(got.begin() + HS, got.end(), begin(want))) << HS << ", head " << head << " as k";
    }
  }
}

TEST(HeadNorm, HeadsThatItCannotReadAreRefused) {
  const DeviceBuffer<bf16> x(4096), weight(512);
  const auto refused = [&](const HeadNormShape& shape, std::int64_t shift) {
    const HeadViewOf<bf16> q = {x.data() + shift, 3 * shape.HS, 3 * shape.HS, shape.HS};
    const HeadViewOf<bf16> k = {q.data + shape.HS, q.batch_stride, q.token_stride, q.head_stride};
    return error_of(Exit::internal, [&] {
      head_norm_forward<bf16>(shape, {q, k, weight.data(), weight.data()}, nullptr);
    });
  };
  for (const std::int64_t HS : {0, 12, 264}) EXPECT_NE(refused({1, 1, 1, 1, HS, 1e-6f}, 0), "") << HS;
  EXPECT_NE(refused({1, 1, 1, 1, 64, 1e-6f}, 1), "");
}

}  // namespace
}  // namespace weft::cuda
