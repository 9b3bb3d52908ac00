// Matrices of 16-bit elements in shared memory, in the swizzled form that tensor copies write and wgmma reads, and
// GEMMs of them. A tile is a type (element, rows, columns, bytes of a row) and an address, so that no kernel computes
// an offset:
//
//   tensor_load(q, map, barrier, token, head, batch);          // global to shared memory
//   gemm_async(S, q.k_major(), k.k_major());                   // S = Q K^T
//   gemm_add_async(O, P, v.mn_major());                        // O += P V, P in registers
//   q.store(q.lane_offset(row), O), tensor_store(map, q, ...)  // registers to shared to global memory
#pragma once

#include <cuda.h>

#include <cstdint>

#include "llmc/cuda/hw/fragments.cuh"
#include "llmc/cuda/hw/hopper.cuh"

namespace weft::cuda::hopper {

template <typename Tile, Major kMajor>
struct TileOperand;

// A tile [Rows, Columns]: column tiles of RowBytes / 2 columns (64, 32 or 16) one after the other, each of them Rows
// rows of RowBytes in the swizzle of that width. If Columns is not a multiple of a column tile's, the rest of the last
// one is padding. ColumnTileBytes: the distance from one column tile to the next, which a slice of rows inherits from
// its tile.
template <typename T, int Rows, int Columns, int RowBytes = 128, int ColumnTileBytes = (Rows * RowBytes)>
struct SwizzledTile {
  static_assert(sizeof(T) == 2 && Rows % 8 == 0 && Columns % 16 == 0);
  using Element = T;
  static constexpr int kRows = Rows, kColumns = Columns, kRowBytes = RowBytes, kColumnTileBytes = ColumnTileBytes;
  static constexpr int kTileColumns = RowBytes / 2, kColumnTiles = (Columns + kTileColumns - 1) / kTileColumns;
  static constexpr int kBytes = kColumnTiles * Rows * RowBytes;
  // The tile's storage, for structs that lay out shared memory.
  struct alignas(1024) Storage {
    unsigned char bytes[kBytes];
  };

  unsigned address;

  // Byte offset of 16-byte chunk `chunk` of a row, from the beginning of the tile.
  __host__ __device__ static constexpr int offset(int row, int chunk) {
    constexpr int kChunks = RowBytes / 16;
    return chunk / kChunks * ColumnTileBytes + row * RowBytes + swizzled_chunk<RowBytes>(row, chunk % kChunks) * 16;
  }

#if WEFT_WGMMA
  // The slice of R rows from `first` on, a multiple of 8.
  template <int R>
  __device__ SwizzledTile<T, R, Columns, RowBytes, ColumnTileBytes> rows(int first) const {
    return {address + first * RowBytes};
  }
  // One column tile. There is no next one, for which descriptors hold a distance of 16.
  __device__ SwizzledTile<T, Rows, kTileColumns, RowBytes, 16> column_tile(int i) const {
    return {address + i * ColumnTileBytes};
  }

  // As an operand of wgmma: rows of the tile are rows of a or columns of b (k_major), or single values of k (mn_major).
  template <Major kMajor>
  __device__ TileOperand<SwizzledTile, kMajor> operand() const {
    return {operand_descriptor<RowBytes>(address, kMajor == Major::k ? 16 : ColumnTileBytes)};
  }
  __device__ TileOperand<SwizzledTile, Major::k> k_major() const {
    return operand<Major::k>();
  }
  __device__ TileOperand<SwizzledTile, Major::mn> mn_major() const {
    return operand<Major::mn>();
  }

  // Byte offset of this lane's address for stmatrix in the 16 rows from `first_row` on (a multiple of 8): row first_row
  // + lane % 16, columns 0 to 7 or 8 to 15.
  __device__ static unsigned lane_offset(int first_row) {
    const int lane = threadIdx.x % kWarpSize;
    return (first_row + lane % 16) * RowBytes + swizzled_chunk<RowBytes>(lane % 16, lane / 16) * 16;
  }
  // Address of columns 16 i to 16 i + 15 of the same rows: xor permutes the chunks of a row.
  __device__ unsigned columns_at(unsigned lane_offset, int i) const {
    constexpr int kPairs = kTileColumns / 16;
    return ((address + lane_offset) ^ (i % kPairs * 32)) + i / kPairs * ColumnTileBytes;
  }
  // Writes 16 rows from words of round_to_operand(), four for each 16 columns.
  template <int W>
  __device__ void store(unsigned lane_offset, const unsigned (&words)[W]) const {
#pragma unroll
    for (int i = 0; i < W / 4; ++i)
      store_matrices(columns_at(lane_offset, i), words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
  // Rounds accumulators of wgmma and writes them `first_row` rows (a multiple of 8) below the lane's offset.
  template <int R>
  __device__ void store(unsigned lane_offset, const float (&d)[R], int first_row = 0) const {
#pragma unroll
    for (int i = 0; i < R / 8; ++i) {
      const float* v = &d[8 * i];
      store_matrices(columns_at(lane_offset, i) + first_row * RowBytes, pack<T>(v[0], v[1]), pack<T>(v[2], v[3]),
                     pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
    }
  }
#endif
};

#if WEFT_WGMMA

// A tile as an operand of wgmma. One instruction, a step, covers 16 values of k.
template <typename Tile, Major kMajor>
struct TileOperand {
  using Element = typename Tile::Element;
  static constexpr int kSteps = (kMajor == Major::k ? Tile::kColumns : Tile::kRows) / 16;

  std::uint64_t descriptor;

  // The descriptor for step `i`; with Major::k from row `first_row` of the tile on, a multiple of 8.
  __device__ std::uint64_t step(int i, int first_row = 0) const {
    if constexpr (kMajor == Major::k) {
      constexpr int kTileSteps = Tile::kTileColumns / 16;
      return advance_descriptor(
          descriptor, i / kTileSteps * Tile::kColumnTileBytes + i % kTileSteps * 32 + first_row * Tile::kRowBytes);
    } else {
      return advance_descriptor(descriptor, i * 16 * Tile::kRowBytes);
    }
  }
  // A tile of the same type `bytes` further on; if that is a constant, it costs no register.
  __device__ TileOperand moved(unsigned bytes) const { return {advance_descriptor(descriptor, bytes)}; }
};

// The GEMMs below are issued by a warpgroup, one wgmma for every 16 values of k. The caller calls wgmma_fence() before,
// and wgmma_commit() and wgmma_wait() after them.

// d = a b. If registers are scarce, call forget(d) first: the compiler then need not keep the old values.
template <typename TileA, Major A, typename TileB, Major B, int R>
__device__ inline void gemm_async(float (&d)[R], const TileOperand<TileA, A>& a, const TileOperand<TileB, B>& b) {
  static_assert(TileOperand<TileA, A>::kSteps == TileOperand<TileB, B>::kSteps);
#pragma unroll
  for (int i = 0; i < TileOperand<TileA, A>::kSteps; ++i)
    wgmma_async<typename TileA::Element, A, B>(d, a.step(i), b.step(i), i > 0);
}
// d += a b with a in registers, in the form of round_to_operand(); without `accumulate` d = a b.
template <typename TileB, Major B, int W, int R>
__device__ inline void gemm_add_async(float (&d)[R], const unsigned (&a)[W], const TileOperand<TileB, B>& b,
                                      bool accumulate = true) {
  static_assert(4 * TileOperand<TileB, B>::kSteps == W);
#pragma unroll
  for (int i = 0; i < W / 4; ++i)
    wgmma_async<typename TileB::Element, B>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b.step(i),
                                            accumulate || i > 0);
}

// Copies a tile from or to [B, heads, tokens, columns] by a map of encode_head_map() whose boxes are column tiles: one
// copy for each. Issued by one thread; the barrier counts Tile::kBytes.
template <typename Tile>
__device__ inline void tensor_load(const Tile& tile, const CUtensorMap& map, unsigned barrier, int token, int head,
                                   int batch, L2 keep = L2::normal) {
#pragma unroll
  for (int i = 0; i < Tile::kColumnTiles; ++i)
    tensor_load(tile.address + i * Tile::kColumnTileBytes, &map, barrier, i * Tile::kTileColumns, token, head, batch,
                keep);
}
template <typename Tile>
__device__ inline void tensor_store(const CUtensorMap& map, const Tile& tile, int token, int head, int batch) {
#pragma unroll
  for (int i = 0; i < Tile::kColumnTiles; ++i)
    tensor_store(&map, tile.address + i * Tile::kColumnTileBytes, i * Tile::kTileColumns, token, head, batch);
}

#endif  // WEFT_WGMMA

}  // namespace weft::cuda::hopper
