// The norm of a branch, its addition to the residual stream and the next norm on the GPU, against the CPU.
#include "llmc/cuda/op/norm/post_norm.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cpu/residual_norm.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/runtime/device.h"
#include "test/cpp/test_files.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

ResidualNormShape shape_of(std::int64_t rows, std::int64_t C, NormKind kind, float offset) {
  ResidualNormShape shape;
  shape.rows = rows, shape.C = C;
  shape.kind = kind;
  shape.eps = 1e-3f;
  shape.weight_offset = offset;
  return shape;
}

// What the operator reads.
template <typename T>
struct Inputs {
  Floats branch, residual, weights[2], biases[2];  // of the branch's norm, of the next one; a bias may be empty

  Inputs(const ResidualNormShape& shape, bool with_bias)
      : branch(random_floats(shape.rows * shape.C, 1, 3.0f, 0.2f)), residual(random_floats(shape.rows * shape.C, 2)) {
    for (unsigned i = 0; i < 2; ++i) {
      weights[i] = random_stored<T>(shape.C, 3 + i, 0.3f, 1 - shape.weight_offset);
      if (with_bias) biases[i] = random_stored<T>(shape.C, 5 + i);
    }
  }
};

struct Outputs {
  Floats h, out;
  bool operator==(const Outputs&) const = default;
};

const float* or_null(const Floats& values) {
  return values.empty() ? nullptr : values.data();
}

// As llmc/cpu/inference_layers.cpp computes it. Null is what is left out.
template <typename T>
Outputs on_cpu(const ResidualNormShape& shape, const Inputs<T>& in, bool has_branch) {
  Outputs result{in.residual, Floats(in.residual.size())};
  Floats branch = in.branch;
  cpu::ResidualNormForward io;
  if (has_branch) {
    io.x = io.out = branch.data();
    io.weight = in.weights[0].data();
    io.bias = or_null(in.biases[0]);
    cpu::residual_norm_forward(shape, io);
    io.residual = io.residual_out = result.h.data();
  } else {
    io.residual = result.h.data();
  }
  io.weight = in.weights[1].data();
  io.bias = or_null(in.biases[1]);
  io.out = result.out.data();
  cpu::residual_norm_forward(shape, io);
  return result;
}

template <typename T>
Outputs on_gpu(const ResidualNormShape& shape, const Inputs<T>& in, bool has_branch, bool has_out,
               bool overlapping = false) {
  constexpr std::size_t kMore = 8;  // which must stay as it is
  const auto with_more = [](Floats values) {
    values.resize(values.size() + kMore, 77.0f);
    return values;
  };
  const DeviceBuffer<float> branch(in.branch), stream(with_more(in.residual));
  const DeviceBuffer<T> weights[2] = {on_device<T>(in.weights[0]), on_device<T>(in.weights[1])};
  const DeviceBuffer<T> biases[2] = {on_device<T>(in.biases[0]), on_device<T>(in.biases[1])};
  const DeviceBuffer<T> out = on_device<T>(with_more(Floats(in.residual.size(), 0.5f)));
  PostNorm<T> io;
  io.residual = stream.data();
  if (has_branch) {
    io.branch = branch.data();
    io.branch_weight = weights[0].data();
    io.branch_bias = in.biases[0].empty() ? nullptr : biases[0].data();
    io.residual_out = stream.data();
  }
  if (has_out) {
    io.weight = weights[1].data();
    io.bias = in.biases[1].empty() ? nullptr : biases[1].data();
    io.out = out.data();
  }
  post_norm(shape, io, nullptr, overlapping);
  Outputs result{on_host(stream), on_host(out)};
  for (Floats* values : {&result.h, &result.out}) {
    EXPECT_TRUE(std::all_of(values->end() - kMore, values->end(), [](float value) { return value == 77.0f; }))
        << "written behind the end";
    values->resize(values->size() - kMore);
  }
  return result;
}

template <typename T>
void check_rows(const ResidualNormShape& shape, bool with_bias) {
  SCOPED_TRACE(format("%s, %s, %lld rows of %lld, offset %g%s", type_name<T>().c_str(), norm_kind_name(shape.kind),
                      static_cast<long long>(shape.rows), static_cast<long long>(shape.C),
                      static_cast<double>(shape.weight_offset), with_bias ? ", biases" : ""));
  const Inputs<T> in(shape, with_bias);
  const Outputs want = on_cpu(shape, in, true), got = on_gpu(shape, in, true, true);
  expect_near<float>(got.h, want.h, "h");
  expect_near<T>(got.out, want.out, "out");
  EXPECT_TRUE(on_gpu(shape, in, true, true, launch_device().overlapping) == got) << "in a chain";
  const Outputs added = on_gpu(shape, in, true, false);
  EXPECT_EQ(added.h, got.h) << "without the next norm";
  EXPECT_EQ(added.out, Floats(in.residual.size(), 0.5f)) << "without the next norm";
  const Outputs normalized = on_gpu(shape, in, false, true);
  EXPECT_EQ(normalized.h, in.residual) << "without a branch";
  expect_near<T>(normalized.out, on_cpu(shape, in, false).out, "out without a branch");
}

// The widths at which another spread of a row begins, and some that fill none.
template <typename T>
void check_widths() {
  for (const std::int64_t C :
       {8, 24, 256, 264, 512, 520, 1024, 1032, 1152, 2048, 2056, 2560, 2568, 3840, 4096, 5376, 8192, 8200, 16384}) {
    for (const std::int64_t rows : {1, 3, 17}) check_rows<T>(shape_of(rows, C, NormKind::rmsnorm, 1), false);
    if (testing::Test::HasFailure()) return;
  }
  for (const std::int64_t C : {72, 1152, 2568}) {
    check_rows<T>(shape_of(5, C, NormKind::rmsnorm, 0), false);
    check_rows<T>(shape_of(5, C, NormKind::layernorm, 0), true);
    check_rows<T>(shape_of(5, C, NormKind::layernorm, 1), true);
  }
  check_rows<T>(shape_of(2000, 1152, NormKind::rmsnorm, 1), false);
}

TEST(PostNorm, Fp32) {
  check_widths<float>();
}
TEST(PostNorm, Bf16) {
  check_widths<bf16>();
}
TEST(PostNorm, Fp16) {
  check_widths<fp16>();
}

TEST(PostNorm, BitsOfARowDependOnItAlone) {
  for (const std::int64_t C : {72, 1152, 4104}) {
    const ResidualNormShape many = shape_of(300, C, NormKind::rmsnorm, 1), one = shape_of(1, C, NormKind::rmsnorm, 1);
    const Inputs<bf16> in(many, false);
    const Outputs all = on_gpu(many, in, true, true);
    for (const std::int64_t row : {0, 7, 8, 131, 299}) {
      const auto row_of = [&](const Floats& values) {
        const auto begin = values.begin() + row * C;
        return Floats(begin, begin + C);
      };
      Inputs<bf16> alone = in;
      alone.branch = row_of(in.branch), alone.residual = row_of(in.residual);
      EXPECT_TRUE(on_gpu(one, alone, true, true) == (Outputs{row_of(all.h), row_of(all.out)})) << C << ", row " << row;
    }
  }
}

TEST(PostNorm, WidthsThatItCannotReadAreRefused) {
  const DeviceBuffer<float> stream(20000);
  PostNorm<float> io;
  io.residual = stream.data();
  for (const std::int64_t C : {std::int64_t{0}, std::int64_t{12}, kMaxNormWidth + 8}) {
    const auto call = [&] { post_norm(shape_of(1, C, NormKind::rmsnorm, 1), io, nullptr); };
    EXPECT_NE(error_of(Exit::internal, call), "") << C;
  }
}

}  // namespace
}  // namespace weft::cuda
