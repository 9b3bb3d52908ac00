// RoPE, SwiGLU, GeGLU, GELU and the arenas on the GPU, against the CPU.

#include "llmc/cpu/gelu.h"
#include "llmc/cpu/rope.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/cuda/op/elementwise/gelu.h"
#include "llmc/cuda/op/elementwise/rope.h"
#include "llmc/cuda/op/elementwise/swiglu.h"
#include "llmc/cuda/runtime/arena.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;

// ---- SwiGLU and GeGLU -------------------------------------------------------------------------------------------------
// Gates from far below to far above 0: there e^-g overflows or vanishes.
template <typename T>
Floats gates_and_ups(std::int64_t N, std::int64_t F) {
  Floats values = random_stored<T>(N * 2 * F, 1, 3);
  const Floats extremes = {-100, -89, -20, 0, 20, 89, 100};
  for (std::size_t i = 0; i < std::min<std::size_t>(extremes.size(), static_cast<std::size_t>(F)); ++i)
    values[i] = extremes[i];
  return widened(stored<T>(values));
}

// Either activation on both devices.
template <typename T>
struct Gated {
  const char* name;
  decltype(cpu::swiglu_forward)* cpu_forward;
  decltype(cpu::swiglu_backward)* cpu_backward;
  decltype(swiglu_forward<T>)* forward;
  decltype(swiglu_backward<T>)* backward;
};
template <typename T>
const Gated<T> kSwiglu = {"swiglu", cpu::swiglu_forward, cpu::swiglu_backward, swiglu_forward<T>, swiglu_backward<T>};
template <typename T>
const Gated<T> kGeglu = {"geglu", cpu::geglu_tanh_forward, cpu::geglu_tanh_backward, geglu_tanh_forward<T>,
                         geglu_tanh_backward<T>};

template <typename T>
void check_gated(const Gated<T>& f, std::int64_t N, std::int64_t F) {
  SCOPED_TRACE(f.name + (" " + type_name<T>()) + " " + std::to_string(N) + " x " + std::to_string(F));
  const auto n = static_cast<std::size_t>(N * F);
  const Floats gate_up = gates_and_ups<T>(N, F), dout = random_stored<T>(N * F, 2);
  Floats out(n), dgate_up(2 * n);
  f.cpu_forward(out.data(), gate_up.data(), N, F);
  f.cpu_backward(dgate_up.data(), dout.data(), gate_up.data(), N, F);

  const DeviceBuffer<T> gpu_gate_up = on_device<T>(gate_up), gpu_dout = on_device<T>(dout);
  const DeviceBuffer<T> gpu_out(n), gpu_dgate_up(2 * n), again(n);
  f.forward(gpu_out.data(), gpu_gate_up.data(), N, F, nullptr);
  expect_near<T>(on_host(gpu_out), out, "out");
  f.backward(gpu_dgate_up.data(), gpu_dout.data(), gpu_gate_up.data(), N, F, again.data(), nullptr);
  expect_near<T>(on_host(gpu_dgate_up), dgate_up, "dgate_up");
  expect_same_bits(again, gpu_out, "out again");

  // In place, dgate_up over gate_up and out over dout; and without out.
  const DeviceBuffer<T> alone(2 * n);
  f.backward(alone.data(), gpu_dout.data(), gpu_gate_up.data(), N, F, nullptr, nullptr);
  expect_same_bits(alone, gpu_dgate_up, "dgate_up without out");
  f.backward(gpu_gate_up.data(), gpu_dout.data(), gpu_gate_up.data(), N, F, gpu_dout.data(), nullptr);
  expect_same_bits(gpu_gate_up, gpu_dgate_up, "dgate_up in place");
  expect_same_bits(gpu_dout, gpu_out, "out over dout");
}

template <typename T>
void check_gated_shapes(const Gated<T>& f) {
  for (const std::int64_t F : {1, 7, 8, 100, 517, 1536, 4104, 8192}) {
    for (const std::int64_t N : {1, 7}) check_gated(f, N, F);
  }
  check_gated(f, 1000, 264);
  check_gated(f, 70'000, 9);  // more rows than a second grid dimension holds
}
// Each operand in turn at an address that no 16-byte access may touch: the values are those of aligned ones.
template <typename T>
void check_unaligned_gated(const Gated<T>& f) {
  const std::int64_t N = 3, F = 264, n = N * F;
  const Floats gate_up = random_stored<T>(2 * n, 1, 3), dout = random_stored<T>(n, 2);
  struct Places {
    std::int64_t gate_up = 0, dout = 0, out = 0, dgate_up = 0;
  };
  const auto run = [&](const Places& at) {
    const auto behind = [](const Floats& values, std::int64_t skipped) {
      Floats all(static_cast<std::size_t>(skipped), 0.0f);
      all.insert(all.end(), values.begin(), values.end());
      return on_device<T>(all);
    };
    const DeviceBuffer<T> x = behind(gate_up, at.gate_up), d = behind(dout, at.dout), out(n + at.out),
                          again(n + at.out), dx(2 * n + at.dgate_up);
    f.forward(out.data() + at.out, x.data() + at.gate_up, N, F, nullptr);
    f.backward(dx.data() + at.dgate_up, d.data() + at.dout, x.data() + at.gate_up, N, F, again.data() + at.out,
               nullptr);
    Floats all;
    for (const auto& [buffer, skipped] : {std::pair{&out, at.out}, {&again, at.out}, {&dx, at.dgate_up}}) {
      const Floats values = on_host(*buffer);
      all.insert(all.end(), values.begin() + skipped, values.end());
    }
    return all;
  };
  const Floats want = run({});
  for (const Places& at : {Places{.gate_up = 1}, Places{.dout = 1}, Places{.out = 1}, Places{.dgate_up = 1}})
    EXPECT_EQ(run(at), want) << type_name<T>() << " " << at.gate_up << at.dout << at.out << at.dgate_up;
}
TEST(SwiGlu, OperandsMayBeginAnywhere) {
  check_unaligned_gated(kSwiglu<float>);
  check_unaligned_gated(kSwiglu<bf16>);
  check_unaligned_gated(kSwiglu<fp16>);
}

TEST(SwiGlu, Fp32) {
  check_gated_shapes(kSwiglu<float>);
}
TEST(SwiGlu, Bf16) {
  check_gated_shapes(kSwiglu<bf16>);
}
TEST(SwiGlu, Fp16) {
  check_gated_shapes(kSwiglu<fp16>);
}

TEST(GeGlu, Fp32) {
  check_gated_shapes(kGeglu<float>);
  check_unaligned_gated(kGeglu<float>);
}
TEST(GeGlu, Bf16) {
  check_gated_shapes(kGeglu<bf16>);
  check_unaligned_gated(kGeglu<bf16>);
}
TEST(GeGlu, Fp16) {
  check_gated_shapes(kGeglu<fp16>);
  check_unaligned_gated(kGeglu<fp16>);
}

// ---- GELU -------------------------------------------------------------------------------------------------------------
// From where it is 0 to where it is x itself, with its least value and the steepest place of its derivative.
template <typename T>
void check_gelu(std::int64_t count) {
  SCOPED_TRACE("gelu " + type_name<T>() + " " + std::to_string(count));
  const auto n = static_cast<std::size_t>(count);
  Floats values = random_stored<T>(count, 1, 2);
  const Floats chosen = {-100, -14, -6, -1.4142f, -0.7518f, -1e-3f, 0, 1e-3f, 0.7518f, 1.4142f, 6, 14, 100};
  for (std::size_t i = 0; i < std::min(chosen.size(), n); ++i) values[i] = chosen[i];
  const Floats x = widened(stored<T>(values)), dout = random_stored<T>(count, 2);
  Floats out(n), dx(n);
  cpu::gelu_forward(out.data(), x.data(), count);
  cpu::gelu_backward(dx.data(), dout.data(), x.data(), count);

  const DeviceBuffer<T> gpu_x = on_device<T>(x), gpu_dout = on_device<T>(dout);
  const DeviceBuffer<T> gpu_out(n), gpu_dx(n), gelu_out(n), alone(n), in_place = on_device<T>(x);
  gelu_forward(gpu_out.data(), gpu_x.data(), count, nullptr);
  expect_near<T>(on_host(gpu_out), out, "out");
  gelu_backward(gpu_dx.data(), gpu_dout.data(), gpu_x.data(), count, gelu_out.data(), nullptr);
  expect_near<T>(on_host(gpu_dx), dx, "dx");
  expect_same_bits(gelu_out, gpu_out, "gelu_out");

  // In place; dx over x and gelu_out over dout; and without gelu_out.
  gelu_forward(in_place.data(), in_place.data(), count, nullptr);
  expect_same_bits(in_place, gpu_out, "out over x");
  gelu_backward<T>(alone.data(), gpu_dout.data(), gpu_x.data(), count, nullptr, nullptr);
  expect_same_bits(alone, gpu_dx, "dx without gelu_out");
  gelu_backward(gpu_x.data(), gpu_dout.data(), gpu_x.data(), count, gpu_dout.data(), nullptr);
  expect_same_bits(gpu_x, gpu_dx, "dx over x");
  expect_same_bits(gpu_dout, gpu_out, "gelu_out over dout");
}

// Each operand in turn at an address that no 16-byte access may touch: the values are those of aligned ones.
template <typename T>
void check_unaligned_gelu() {
  const std::int64_t n = 264;
  const Floats x = random_stored<T>(n, 1, 2), dout = random_stored<T>(n, 2);
  const auto run = [&](int moved) {
    const auto behind = [&](const Floats& values, int operand) {
      Floats all(moved == operand ? 1 : 0, 0.0f);
      all.insert(all.end(), values.begin(), values.end());
      return on_device<T>(all);
    };
    const auto skip = [moved](int operand) { return moved == operand ? 1 : 0; };
    const DeviceBuffer<T> gpu_x = behind(x, 0), gpu_dout = behind(dout, 1), out(n + skip(2)), dx(n + skip(3));
    const DeviceBuffer<T> again(n + skip(4));
    gelu_forward(out.data() + skip(2), gpu_x.data() + skip(0), n, nullptr);
    gelu_backward(dx.data() + skip(3), gpu_dout.data() + skip(1), gpu_x.data() + skip(0), n, again.data() + skip(4),
                  nullptr);
    Floats all;
    for (const auto& [buffer, skipped] : {std::pair{&out, skip(2)}, {&dx, skip(3)}, {&again, skip(4)}}) {
      const Floats values = on_host(*buffer);
      all.insert(all.end(), values.begin() + skipped, values.end());
    }
    return all;
  };
  const Floats want = run(-1);
  for (int operand = 0; operand < 5; ++operand) EXPECT_EQ(run(operand), want) << type_name<T>() << " " << operand;
}

TEST(Gelu, Fp32) {
  for (const std::int64_t count : {1, 7, 8, 517, 4104, 70'000}) check_gelu<float>(count);
  check_unaligned_gelu<float>();
}
TEST(Gelu, Bf16) {
  for (const std::int64_t count : {1, 7, 8, 517, 4104, 70'000}) check_gelu<bf16>(count);
  check_unaligned_gelu<bf16>();
}

// ---- RoPE -------------------------------------------------------------------------------------------------------------
struct RopeCase {
  std::int64_t B, T, NH, NKV, HS, rotary_dim, first_position;
  std::vector<std::int32_t> starts = {};  // document_starts; none: one document
};

RopeConfig rope_config(std::int64_t rotary_dim) {
  RopeConfig config;
  config.theta = 10000;
  config.rotary_dim = rotary_dim;
  return config;
}

// Packed rows [q heads | k heads | v heads]; v and whatever lies past rotary_dim must come back untouched.
template <typename T>
struct PackedRows {
  RopeCase c;
  DeviceBuffer<T> data;

  std::int64_t row() const { return (c.NH + 2 * c.NKV) * c.HS; }
  HeadViewOf<T> heads(std::int64_t offset) const { return {data.data() + offset, c.T * row(), row(), c.HS}; }
  HeadViewOf<T> q() const { return heads(0); }
  HeadViewOf<T> k() const { return heads(c.NH * c.HS); }
};

Floats cpu_rotated(const RopeCase& c, Floats values, const RopeTable& table, bool forward) {
  const std::int64_t row = (c.NH + 2 * c.NKV) * c.HS;
  const auto rotate = forward ? cpu::rope_forward : cpu::rope_backward;
  const std::int32_t* const starts = c.starts.empty() ? nullptr : c.starts.data();
  rotate({values.data(), c.T * row, row, c.HS}, table, c.B, c.T, c.NH, c.first_position, starts);
  rotate({values.data() + c.NH * c.HS, c.T * row, row, c.HS}, table, c.B, c.T, c.NKV, c.first_position, starts);
  return values;
}

template <typename T>
void check_rope(const RopeCase& c) {
  SCOPED_TRACE("rope " + type_name<T>() + " HS " + std::to_string(c.HS) + " rotary " + std::to_string(c.rotary_dim));
  const RopeTable table = rope_table(rope_config(c.rotary_dim), c.first_position + c.T);
  const DeviceBuffer<float> cosine(table.cos), sine(table.sin);
  const DeviceBuffer<std::int32_t> starts(c.starts);
  const DeviceRopeTable gpu_table{cosine.data(), sine.data(), table.positions, table.half,
                                  c.starts.empty() ? nullptr : starts.data()};
  const Floats x = random_stored<T>(c.B * c.T * (c.NH + 2 * c.NKV) * c.HS, 1);
  for (const bool forward : {true, false}) {
    const PackedRows<T> pair{c, on_device<T>(x)}, apart{c, on_device<T>(x)};
    if (forward) {
      rope_forward(pair.q(), pair.k(), gpu_table, c.B, c.T, c.NH, c.NKV, c.first_position, nullptr);
      rope_forward(apart.q(), gpu_table, c.B, c.T, c.NH, c.first_position, nullptr);
      rope_forward(apart.k(), gpu_table, c.B, c.T, c.NKV, c.first_position, nullptr);
    } else {
      rope_backward(pair.q(), pair.k(), gpu_table, c.B, c.T, c.NH, c.NKV, c.first_position, nullptr);
      rope_backward(apart.q(), gpu_table, c.B, c.T, c.NH, c.first_position, nullptr);
      rope_backward(apart.k(), gpu_table, c.B, c.T, c.NKV, c.first_position, nullptr);
    }
    expect_near<T>(on_host(pair.data), cpu_rotated(c, x, table, forward), forward ? "forward" : "backward", 1e-6);
    expect_same_bits(pair.data, apart.data, "q and k in one launch");
  }
}

template <typename T>
void check_rope_shapes() {
  check_rope<T>({2, 5, 4, 2, 64, 64, 0});
  check_rope<T>({1, 1, 32, 8, 128, 128, 4000});  // one token of decoding
  check_rope<T>({1, 7, 9, 3, 64, 64, 3});
  check_rope<T>({2, 3, 4, 4, 80, 20, 1});  // GPT-NeoX: a quarter of the head turns; half = 10
  check_rope<T>({1, 3, 2, 1, 6, 6, 0});
  check_rope<T>({3, 100, 40, 8, 32, 16, 11});
  check_rope<T>({1, 3, 66, 7, 128, 128, 0});  // more heads than a block takes at once, twice and a rest
  check_rope<T>({1, 2, 40, 13, 20, 20, 0});
  check_rope<T>({2, 5, 4, 2, 64, 64, 0, {0, 0, 2, 3, 3, 0, 1, 1, 1, 4}});  // documents
  check_rope<T>({1, 4, 2, 1, 20, 16, 0, {0, 1, 1, 3}});
  check_rope<T>({2, 3, 2, 1, 20, 16, 1});  // pairs fill 16 bytes, but not every head begins at a multiple of them
}
TEST(Rope, Fp32) {
  check_rope_shapes<float>();
}
TEST(Rope, Bf16) {
  check_rope_shapes<bf16>();
}
TEST(Rope, Fp16) {
  check_rope_shapes<fp16>();
}

// ---- arenas -----------------------------------------------------------------------------------------------------------
TEST(DeviceArena, HoldsItsPlanAndClears) {
  MemoryPlan plan("test");
  plan.add(1000);
  const std::uint64_t second = plan.add(5 * sizeof(float));
  DeviceArena arena(plan);
  EXPECT_EQ(arena.bytes(), plan.bytes());
  check(cudaMemset(arena.at<char>(0), 0xff, arena.bytes()), "poison");
  arena.clear(nullptr);
  Floats values(5, 1.0f);
  check(cudaMemcpy(values.data(), arena.at<float>(second), 5 * sizeof(float), cudaMemcpyDeviceToHost), "download");
  EXPECT_EQ(values, Floats(5, 0.0f));
  DeviceArena empty(MemoryPlan("empty"));
  EXPECT_NO_THROW(empty.clear(nullptr));
}

TEST(DeviceArena, SaysWhatDoesNotFit) {
  MemoryPlan plan("activations");
  plan.add(std::uint64_t{1} << 50);
  try {
    DeviceArena arena(plan);
    FAIL() << "a petabyte was allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::resources);
    const std::string what = error.what();
    for (const char* words : {"activations", "1125899906842624 bytes", "free"})
      EXPECT_NE(what.find(words), std::string::npos) << what;
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(PinnedBuffer, HoldsBytes) {
  PinnedBuffer buffer(64);
  *buffer.at<int>(60) = 7;
  EXPECT_EQ(*buffer.at<int>(60), 7);
  EXPECT_EQ(buffer.bytes(), 64u);
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, buffer.at<char>(0)), "attributes");
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
}

}  // namespace
}  // namespace weft::cuda
