// One thread for each access: a few consecutive pairs that are rotated, or 16 bytes that are copied. Bytes moved: the
// rotated dimensions of q are read and written, k and v read once and written once.
//
// Codes need the largest magnitude of a row: there a warp has a head.
#include "llmc/cuda/op/attention/paged/append_to_pages.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/paged/code_rows.cuh"
#include "llmc/cuda/op/attention/train/attention.h"
#include "llmc/cuda/op/attention/train/launch.cuh"
#include "llmc/cuda/op/elementwise/rotate_pair.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T, int kCount>
struct alignas(std::min<std::size_t>(16, kCount * sizeof(T))) Few {
  T value[kCount];
};

// The accesses of a row, in this order: pieces of kWide pairs of the queries, then of the keys; 16-byte chunks of the
// keys that are not, or not wholly, rotated; 16-byte chunks of the values.
struct Accesses {
  int query_pieces, key_pieces, key_chunks, value_chunks;
  __host__ __device__ int all() const { return query_pieces + key_pieces + key_chunks + value_chunks; }
};

template <typename S, int kWide>
__host__ __device__ Accesses accesses(const AppendToPages<S>& io) {
  const int NH = static_cast<int>(io.NH), NKV = static_cast<int>(io.kv.NKV), HS = static_cast<int>(io.kv.HS);
  const int half = static_cast<int>(io.rope.half), pieces = half / kWide;
  return {NH * pieces, NKV * pieces, NKV * (HS / Pack<S>::size - 2 * half / Pack<S>::size), NKV * (HS / Pack<S>::size)};
}

// cos and sin of a piece of kWide pairs.
template <int kWide>
struct Angles {
  Few<float, kWide> cosine, sine;
};

// Rotates a piece at `from` and writes it to `to`, which may be the same.
template <typename S, int kWide>
__device__ void rotate(S* to, const S* from, int half, const Angles<kWide>& angles) {
  using Piece = Few<S, kWide>;
  Piece low = *reinterpret_cast<const Piece*>(from), high = *reinterpret_cast<const Piece*>(from + half);
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    float a = to_float(low.value[i]), z = to_float(high.value[i]);
    rotate_pair(a, z, angles.cosine.value[i], angles.sine.value[i]);
    low.value[i] = from_float<S>(a);
    high.value[i] = from_float<S>(z);
  }
  *reinterpret_cast<Piece*>(to) = low;
  *reinterpret_cast<Piece*>(to + half) = high;
}

// Grid: x = rows, y = blocks of a row's accesses.
template <typename S, int kWide>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendToPages<S> io) {
  constexpr int kPack = Pack<S>::size;
  launch_dependents();
  const Accesses count = accesses<S, kWide>(io);
  const int HS = static_cast<int>(io.kv.HS), half = static_cast<int>(io.rope.half), pieces = half / kWide;
  const int page_size = static_cast<int>(io.kv.page_size), row = blockIdx.x;
  int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  // The step's rows and the angles were complete before the chain began (paged_kv.h), so reading them need not wait.
  const int position = io.rows.positions[row];
  const bool active = position >= 0 && i < count.all(), rotates = i < count.query_pieces + count.key_pieces;
  const int d_rotated = rotates && active ? i % pieces * kWide : 0;
  Angles<kWide> angles{};
  std::int64_t page = 0;
  if (active && rotates) {
    const std::int64_t at = static_cast<std::int64_t>(position) * half + d_rotated;
    angles = {*reinterpret_cast<const Few<float, kWide>*>(io.rope.cos + at),
              *reinterpret_cast<const Few<float, kWide>*>(io.rope.sin + at)};
  }
  if (active && i >= count.query_pieces) page = io.rows.pages[io.rows.tables[row] + position / page_size];
  wait_for_predecessors();
  if (!active) return;
  if (i < count.query_pieces) {
    S* q = io.q.at(0, row, i / pieces) + d_rotated;
    return rotate<S, kWide>(q, q, half, angles);
  }
  i -= count.query_pieces;
  const auto stored = [&](S* tensor, int head) {
    return tensor + ((page * io.kv.NKV + head) * page_size + position % page_size) * HS;
  };
  if (i < count.key_pieces) {
    const int head = i / pieces;
    return rotate<S, kWide>(stored(io.kv.keys, head) + d_rotated, io.k.at(0, row, head) + d_rotated, half, angles);
  }
  i -= count.key_pieces;
  if (i < count.key_chunks) {
    const int per_head = HS / kPack - 2 * half / kPack, head = i / per_head;
    const int d = (2 * half / kPack + i % per_head) * kPack;
    const Pack<S> chunk = load_pack(io.k.at(0, row, head) + d);
    S* to = stored(io.kv.keys, head) + d;
    if (d >= 2 * half) return store_pack(to, chunk);
#pragma unroll
    for (int e = 0; e < kPack; ++e)  // the rotated dimensions end inside this chunk
      if (d + e >= 2 * half) to[e] = chunk.value[e];
    return;
  }
  i -= count.key_chunks;
  const int head = i / (HS / kPack), d = i % (HS / kPack) * kPack;
  store_pack(stored(io.kv.values, head) + d, load_pack(io.v.at(0, row, head) + d));
}

// Grid: x = rows, y = blocks of a row's heads: queries, keys, values.
template <typename S, int HS>
__global__ void __launch_bounds__(kThreads) append_codes_kernel(const __grid_constant__ AppendToPages<S> io) {
  using Rotation = WarpRotation<S, HS>;
  launch_dependents();
  const int NH = static_cast<int>(io.NH), NKV = static_cast<int>(io.kv.NKV), row = blockIdx.x;
  const int page_size = static_cast<int>(io.kv.page_size);
  int head = static_cast<int>(blockIdx.y * (kThreads / kWarpSize) + threadIdx.x / kWarpSize);
  const int position = io.rows.positions[row];
  const bool active = position >= 0 && head < NH + 2 * NKV, rotates = active && head < NH + NKV;
  // The step's rows and the angles were complete before the chain began (paged_kv.h), so reading them need not wait.
  const Rotation rotation(io.rope.cos, io.rope.sin, rotates ? static_cast<int>(io.rope.half) : 0,
                          rotates ? position : 0);
  std::int64_t page = 0;
  if (active && head >= NH) page = io.rows.pages[io.rows.tables[row] + position / page_size];
  wait_for_predecessors();
  if (!active) return;
  const bool query = head < NH, key = !query && rotates;
  if (!query) head -= key ? NH : NH + NKV;
  const S* from = query ? io.q.at(0, row, head) : key ? io.k.at(0, row, head) : io.v.at(0, row, head);
  const typename Rotation::Head loaded = rotation.load(from);
  unsigned words[Rotation::kWords];
#pragma unroll
  for (int i = 0; i < Rotation::kWords; ++i) words[i] = rotation.rotate(loaded, i);
  if (query) {
    __syncwarp();  // all lanes have loaded what some of them overwrite
    unsigned* to = reinterpret_cast<unsigned*>(io.q.at(0, row, head));
#pragma unroll
    for (int i = 0; i < Rotation::kWords; ++i) {
      if (Rotation::word(i) < HS / 2) to[Rotation::word(i)] = words[i];
    }
    return;
  }
  const std::int64_t at = (page * NKV + head) * page_size + position % page_size;
  store_codes<S, HS>(key ? KvKind::key : KvKind::value, words, scale_of<S>(words), at, io.kv.codes);
}

template <typename S>
void launch_codes(const AppendToPages<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t blocks = ceil_div(io.NH + 2 * io.kv.NKV, kThreads / kWarpSize);
  for_head_dimension(io.kv.HS, "append to pages", [&]<int HS>() {
    launch_chained(append_codes_kernel<S, HS>, dim3(static_cast<unsigned>(io.rows.rows), static_cast<unsigned>(blocks)),
                   dim3(kThreads), 0, stream, device.overlapping, "append_to_pages", io);
  });
}

template <typename S>
void check_arguments(const AppendToPages<S>& io) {
  const PagedKv<S>& kv = io.kv;
  const bool pages = kv.page_size == 16 || kv.page_size == 32 || kv.page_size == 64;
  if (!pages || !attention_supports(kv.HS) || io.NH < 1 || kv.NKV < 1 || io.rope.half < 0 || 2 * io.rope.half > kv.HS) {
    fail(Exit::internal,
         "append to pages: %lld positions a page, %lld and %lld heads of %lld, %lld of them rotated: expected 16, 32 "
         "or 64 "
         "positions, a head dimension of 32, 64, 80, 96, 128 or 256, and not more of it rotated",
         static_cast<long long>(kv.page_size), static_cast<long long>(io.NH), static_cast<long long>(kv.NKV),
         static_cast<long long>(kv.HS), static_cast<long long>(2 * io.rope.half));
  }
  constexpr std::int64_t kPack = Pack<S>::size;
  const auto fits = [](const auto& view) {
    return aligned_to_16(view.data) && view.token_stride % kPack == 0 && view.head_stride % kPack == 0;
  };
  if (fits(io.q) && fits(io.k) && fits(io.v) && aligned_to_16(kv.keys, kv.values, io.rope.cos, io.rope.sin)) return;
  fail(Exit::internal, "append to pages: a tensor that does not begin on a 16-byte boundary");
}

template <typename S, int kWide>
void launch(const AppendToPages<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  const std::int64_t blocks = ceil_div(accesses<S, kWide>(io).all(), kThreads);
  launch_chained(append_kernel<S, kWide>, dim3(static_cast<unsigned>(io.rows.rows), static_cast<unsigned>(blocks)),
                 dim3(kThreads), 0, stream, device.overlapping, "append_to_pages", io);
}

}  // namespace

template <typename S>
void append_to_pages(const AppendToPages<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  check_arguments(io);
  if (io.rows.rows == 0) return;
  if (io.kv.fp8()) {
    if constexpr (std::is_same_v<S, float>)
      fail(Exit::internal, "append to pages: codes from fp32");
    else
      return launch_codes(io, device, stream);
  }
  if (io.rope.half % Pack<S>::size == 0) return launch<S, Pack<S>::size>(io, device, stream);
  if (io.rope.half % 2 == 0) return launch<S, 2>(io, device, stream);
  launch<S, 1>(io, device, stream);
}

template void append_to_pages<float>(const AppendToPages<float>&, const LaunchDevice&, cudaStream_t);
template void append_to_pages<bf16>(const AppendToPages<bf16>&, const LaunchDevice&, cudaStream_t);
template void append_to_pages<fp16>(const AppendToPages<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda
