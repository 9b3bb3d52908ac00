// A row's accesses are a few neighbouring pairs that are rotated, or 16 bytes that are copied. A thread has some of them, and all its
// loads are issued before the first result is stored. Bytes moved: the rotated dimensions of q are read and written, k and v read
// once and written once.
#include "llmc/cuda/op/append_to_pages.h"

#include <algorithm>

#include "llmc/base/error.h"
#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/elements.cuh"
#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/attention/attention.h"
#include "llmc/cuda/op/rotate_pair.cuh"

namespace weft::cuda {

namespace {

constexpr int kThreads = 256;

template <typename T, int kCount>
struct alignas(std::min<std::size_t>(16, kCount * sizeof(T))) Few {
  T value[kCount];
};

// Of a row, in this order: pieces of kWide pairs of the queries, of the keys; chunks of 16 bytes of the keys that RoPE does
// not turn, or not all of; chunks of the values.
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

// One access of a row, in three steps.
template <typename S, int kWide>
struct Access {
  static constexpr int kPack = Pack<S>::size;
  using Piece = Few<S, kWide>;

  const S* from = nullptr;  // null: there is none
  S* to = nullptr;          // the same as `from` for queries
  int half = 0;             // of the rotated dimensions; 0: 16 bytes are copied
  int first = 0;            // of these, the first element that is not a rotated one
  Angles<kWide> angles;
  Piece low, high;
  Pack<S> chunk;

  // Number i of the row's accesses, the row being at `position` >= 0, in page `page`. Reads nothing that an operator writes.
  __device__ void find(const AppendToPages<S>& io, const Accesses& count, int row, int position, std::int64_t page,
                       int i) {
    if (i >= count.all()) return;
    const int HS = static_cast<int>(io.kv.HS), turned = 2 * static_cast<int>(io.rope.half);
    const int page_size = static_cast<int>(io.kv.page_size);
    const auto stored = [&](S* tensor, int head) {
      return tensor + ((page * io.kv.NKV + head) * page_size + position % page_size) * HS;
    };
    if (i < count.query_pieces + count.key_pieces) {
      const int pieces = turned / 2 / kWide, d = i % pieces * kWide;
      const bool of_query = i < count.query_pieces;
      const int head = (of_query ? i : i - count.query_pieces) / pieces;
      half = turned / 2;
      from = (of_query ? io.q.at(0, row, head) : io.k.at(0, row, head)) + d;
      to = of_query ? io.q.at(0, row, head) + d : stored(io.kv.keys, head) + d;
      const std::int64_t at = static_cast<std::int64_t>(position) * half + d;
      angles = {*reinterpret_cast<const Few<float, kWide>*>(io.rope.cos + at),
                *reinterpret_cast<const Few<float, kWide>*>(io.rope.sin + at)};
      return;
    }
    i -= count.query_pieces + count.key_pieces;
    if (i < count.key_chunks) {
      const int per_head = HS / kPack - turned / kPack, head = i / per_head;
      const int d = (turned / kPack + i % per_head) * kPack;
      from = io.k.at(0, row, head) + d;
      to = stored(io.kv.keys, head) + d;
      first = max(0, turned - d);  // the rotated dimensions may end inside this chunk
      return;
    }
    i -= count.key_chunks;
    const int head = i / (HS / kPack), d = i % (HS / kPack) * kPack;
    from = io.v.at(0, row, head) + d;
    to = stored(io.kv.values, head) + d;
  }
  __device__ void load() {
    if (from == nullptr) return;
    if (half > 0) {
      low = *reinterpret_cast<const Piece*>(from), high = *reinterpret_cast<const Piece*>(from + half);
    } else {
      chunk = load_pack(from);
    }
  }
  __device__ void store() {
    if (from == nullptr) return;
    if (half > 0) {
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float x = to_float(low.value[i]), z = to_float(high.value[i]), c = angles.cosine.value[i],
                    s = angles.sine.value[i];
        low.value[i] = from_float<S>(rotated(x, z, c, -s));
        high.value[i] = from_float<S>(rotated(z, x, c, s));
      }
      *reinterpret_cast<Piece*>(to) = low;
      *reinterpret_cast<Piece*>(to + half) = high;
    } else if (first == 0) {
      store_pack(to, chunk);
    } else {
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        if (e >= first) to[e] = chunk.value[e];
    }
  }
};

// Accesses of a thread: as many as registers have room for.
template <int kWide>
constexpr int kEach = kWide > 2 ? 2 : 4;

// Grid: x = rows, y = blocks of a row's accesses.
template <typename S, int kWide>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendToPages<S> io) {
  let_successor_start();
  const Accesses count = accesses<S, kWide>(io);
  const int row = blockIdx.x, first = static_cast<int>(blockIdx.y * kEach<kWide> * kThreads + threadIdx.x);
  // The step's rows and the angles were there before the chain began (paged_kv.h): their lookups do not wait for it.
  const int position = io.rows.positions[row];
  Access<S, kWide> access[kEach<kWide>];
  if (position >= 0) {
    const std::int64_t page = io.rows.pages[io.rows.tables[row] + position / static_cast<int>(io.kv.page_size)];
#pragma unroll
    for (int i = 0; i < kEach<kWide>; ++i) access[i].find(io, count, row, position, page, first + i * kThreads);
  }
  wait_for_predecessors();
#pragma unroll
  for (int i = 0; i < kEach<kWide>; ++i) access[i].load();
#pragma unroll
  for (int i = 0; i < kEach<kWide>; ++i) access[i].store();
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
  const std::int64_t blocks = ceil_div(accesses<S, kWide>(io).all(), kEach<kWide> * kThreads);
  launch_chained(append_kernel<S, kWide>, dim3(static_cast<unsigned>(io.rows.rows), static_cast<unsigned>(blocks)),
                 dim3(kThreads), 0, stream, device.overlapping, "append_to_pages", io);
}

}  // namespace

template <typename S>
void append_to_pages(const AppendToPages<S>& io, const LaunchDevice& device, cudaStream_t stream) {
  check_arguments(io);
  if (io.rows.rows == 0) return;
  if (io.rope.half % Pack<S>::size == 0) return launch<S, Pack<S>::size>(io, device, stream);
  if (io.rope.half % 2 == 0) return launch<S, 2>(io, device, stream);
  launch<S, 1>(io, device, stream);
}

template void append_to_pages<float>(const AppendToPages<float>&, const LaunchDevice&, cudaStream_t);
template void append_to_pages<bf16>(const AppendToPages<bf16>&, const LaunchDevice&, cudaStream_t);
template void append_to_pages<fp16>(const AppendToPages<fp16>&, const LaunchDevice&, cudaStream_t);

}  // namespace weft::cuda
