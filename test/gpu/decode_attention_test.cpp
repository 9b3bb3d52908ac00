// RoPE and cache of a prompt, and attention of one token, against the CPU: every head dimension, rotations of all dimensions
// of a head, of some and of none, empty caches and others.
#include "llmc/cuda/op/attention/paged/decode_attention.h"

#include <cmath>
#include <cstring>

#include "llmc/cpu/attention.h"
#include "llmc/cpu/rope.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {
namespace {

constexpr std::int64_t kHeadDims[] = {32, 64, 80, 96, 128, 256};

template <typename T>
class CudaDecodeAttention : public testing::Test {};
using Types = testing::Types<float, bf16, fp16>;
TYPED_TEST_SUITE(CudaDecodeAttention, Types);

// On both sides.
struct Rope {
  RopeTable table;
  DeviceBuffer<float> cos, sin;

  Rope(std::int64_t rotary, std::int64_t positions) : Rope(make(rotary, positions)) {}
  explicit Rope(RopeTable made) : table(std::move(made)), cos(table.cos), sin(table.sin) {}
  static RopeTable make(std::int64_t rotary, std::int64_t positions) {
    RopeConfig config;
    config.theta = 10000;
    config.rotary_dim = rotary;
    return rope_table(config, positions);
  }
  cuda::DeviceRopeTable device() const { return {cos.data(), sin.data(), table.positions, table.half}; }
};

// The index of (row, head, q k or v, dimension) in packed rows, and of (head, position, dimension) in a cache.
struct Indices {
  std::int64_t NH, HS, capacity;
  std::size_t packed(std::int64_t row, std::int64_t head, std::int64_t kind, std::int64_t d) const {
    return static_cast<std::size_t>(((row * NH + head) * 3 + kind) * HS + d);
  }
  std::size_t cached(std::int64_t head, std::int64_t position, std::int64_t d) const {
    return static_cast<std::size_t>((head * capacity + position) * HS + d);
  }
};

template <typename T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

struct PromptCase {
  std::int64_t NH, rows, first;
};

template <typename T>
void check_prompt(const PromptCase& c, std::int64_t HS, std::int64_t rotary) {
  SCOPED_TRACE(testing::Message() << "HS " << HS << " rotary " << rotary << " NH " << c.NH << " rows " << c.rows
                                  << " from " << c.first);
  const std::int64_t capacity = c.first + c.rows + 3;
  const Indices at{c.NH, HS, capacity};
  const Rope rope(rotary, capacity);
  const Floats input = random_stored<T>(c.rows * c.NH * 3 * HS, 1);
  Floats rotated = input;
  for (std::int64_t kind = 0; kind < 2; ++kind) {
    cpu::rope_forward({rotated.data() + kind * HS, 0, c.NH * 3 * HS, 3 * HS}, rope.table, 1, c.rows, c.NH, c.first);
  }
  const DeviceBuffer<T> qkv = on_device<T>(input);
  const auto cache_size = static_cast<std::size_t>(c.NH * capacity * HS);
  const DeviceBuffer<T> keys(cache_size), values(cache_size);  // NaN
  cuda::rope_and_append<T, T>(qkv.data(), keys.data(), values.data(), {c.NH, HS}, c.rows, capacity, c.first,
                              rope.device(), nullptr);

  const std::vector<T> got_qkv = qkv.download(), got_keys = keys.download(), got_values = values.download(),
                       before = stored<T>(input);
  const T poison = DeviceBuffer<T>(1).download()[0];
  Floats got, want;       // rotated elements
  std::size_t wrong = 0;  // elements that should be copies of others, bit for bit, and are not
  for (std::int64_t head = 0; head < c.NH; ++head) {
    for (std::int64_t position = 0; position < capacity; ++position) {
      const std::int64_t row = position - c.first;
      for (std::int64_t d = 0; d < HS; ++d) {
        const T key = got_keys[at.cached(head, position, d)], value = got_values[at.cached(head, position, d)];
        if (row < 0 || row >= c.rows) {
          wrong += same_bits(key, poison) && same_bits(value, poison) ? 0 : 1;
          continue;
        }
        const std::size_t q = at.packed(row, head, 0, d), k = at.packed(row, head, 1, d),
                          v = at.packed(row, head, 2, d);
        wrong += same_bits(value, before[v]) && same_bits(got_qkv[v], before[v]) ? 0 : 1;
        if (d >= rotary) {
          wrong += same_bits(key, before[k]) && same_bits(got_qkv[q], before[q]) ? 0 : 1;
          continue;
        }
        got.insert(got.end(), {widened<T>({key})[0], widened<T>({got_qkv[q]})[0]});
        want.insert(want.end(), {rotated[k], rotated[q]});
      }
    }
  }
  EXPECT_EQ(wrong, 0u);
  expect_near<T>(got, want, "rotated");
}

TYPED_TEST(CudaDecodeAttention, PromptsAreRotatedAndGoToTheCache) {
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t rotary : {std::int64_t{0}, std::int64_t{2}, HS / 4, HS / 4 + 2, HS / 2 + 6, HS}) {
      for (const PromptCase& c :
           {PromptCase{1, 1, 0}, PromptCase{5, 3, 0}, PromptCase{16, 2, 40}, PromptCase{7, 33, 9}})
        check_prompt<TypeParam>(c, HS, rotary);
    }
  }
}

// One token over a context, with launches that overlap and without, on all multiprocessors and on few, which leaves few splits
// that are long; each twice: the second run finds the tickets of the first.
template <typename T>
void check_token(std::int64_t NH, std::int64_t HS, std::int64_t rotary, std::int64_t context) {
  SCOPED_TRACE(testing::Message() << "HS " << HS << " rotary " << rotary << " NH " << NH << " context " << context);
  const std::int64_t capacity = context + 2;
  const Indices at{NH, HS, capacity};
  const Rope rope(rotary, capacity);
  const Floats input = random_stored<T>(NH * 3 * HS, 1);
  Floats keys = random_stored<T>(NH * capacity * HS, 2), values = random_stored<T>(NH * capacity * HS, 3);
  const Floats old_keys = keys, old_values = values;
  Floats rotated = input;
  for (std::int64_t kind = 0; kind < 2; ++kind) {
    cpu::rope_forward({rotated.data() + kind * HS, 0, NH * 3 * HS, 3 * HS}, rope.table, 1, 1, NH, context);
  }
  for (std::int64_t head = 0; head < NH; ++head) {
    for (std::int64_t d = 0; d < HS; ++d) {
      keys[at.cached(head, context, d)] = rotated[at.packed(0, head, 1, d)];
      values[at.cached(head, context, d)] = rotated[at.packed(0, head, 2, d)];
    }
  }
  AttentionShape shape;
  shape.B = shape.TQ = 1;
  shape.TK = context + 1;
  shape.NH = shape.NKV = NH;
  shape.HS = HS;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(HS));
  Floats want(static_cast<std::size_t>(NH * HS)), rounded = widened(stored<T>(keys));  // attention reads what it stored
  cpu::attention_forward(shape, {want.data(), 0, NH * HS, HS}, nullptr, {rotated.data(), 0, NH * 3 * HS, 3 * HS},
                         {rounded.data(), 0, HS, capacity * HS}, {values.data(), 0, HS, capacity * HS});

  const cuda::LaunchDevice this_gpu = cuda::launch_device();
  const DeviceBuffer<T> qkv = on_device<T>(input);
  const DeviceBuffer<std::int64_t> position(std::vector<std::int64_t>{context});
  for (const cuda::LaunchDevice& device :
       {cuda::LaunchDevice{this_gpu.multiprocessors, false}, this_gpu, cuda::LaunchDevice{1, this_gpu.overlapping},
        cuda::LaunchDevice{4, this_gpu.overlapping}}) {
    SCOPED_TRACE(testing::Message() << device.multiprocessors << " multiprocessors");
    const DeviceBuffer<T> gpu_keys = on_device<T>(old_keys), gpu_values = on_device<T>(old_values);
    DeviceBuffer<char> partials(cuda::decode_attention_workspace({NH, HS}, device));
    partials.fill_bytes(0);
    const DeviceBuffer<T> first(want.size()), second(want.size());
    cuda::DecodeAttention<T, T> io;
    io.heads = {NH, HS};
    io.qkv = qkv.data();
    io.keys = gpu_keys.data();
    io.values = gpu_values.data();
    io.capacity = capacity;
    io.position = position.data();
    io.rope = rope.device();
    io.partials = reinterpret_cast<float*>(partials.data());
    for (const DeviceBuffer<T>* out : {&first, &second}) {
      io.out = out->data();
      cuda::decode_attention(io, device, nullptr);
      cuda::check(cudaDeviceSynchronize(), "test");
    }
    expect_near<T>(on_host(first), want, "out");
    expect_same_bits(first, second, "the second run");
    expect_near<T>(on_host(gpu_keys), keys, "keys");
    expect_near<T>(on_host(gpu_values), values, "values");
  }
}

TYPED_TEST(CudaDecodeAttention, TokensMatchTheCpu) {
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t context : {0, 1, 127, 128, 129, 500, 1000}) check_token<TypeParam>(3, HS, HS / 4, context);
    check_token<TypeParam>(1, HS, HS, 300);
    check_token<TypeParam>(5, HS, 0, 64);
  }
}

}  // namespace
}  // namespace weft::test
