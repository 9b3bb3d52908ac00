// Tensor core building blocks for sm_80 and later, named so that a main loop reads as the algorithm.
//
// A tile lies in shared memory row by row, each row padded by 16 bytes. With HS a multiple of 16, a row is then an odd
// number of 16-byte chunks: the 8 rows that one phase of ldmatrix reads fall into 8 different groups of banks, and
// every address is base + constant. (An XOR swizzle would save the padding but cost an address register a chunk.)
//
// Fragments of mma.m16n8k16 with lane = 4 g + t: an accumulator holds (row g, columns 2t, 2t+1) and (row g+8, columns
// 2t, 2t+1). Two adjacent accumulators, rounded to 16 bits, are operand A of a GEMM over their 16 columns (PTX ISA,
// "Matrix Fragments for mma.m16n8k16"): P and dS pass from one GEMM to the next in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/hw/fragments.cuh"

namespace weft::cuda {

// Copies 16 bytes from global to shared memory, bypassing L1; zeros if not `valid`.
__device__ inline void copy_async(unsigned shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0));
}
// L2 policy for data that is read once: evicted before weights and code.
__device__ inline std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void copy_async(unsigned shared, const void* global, bool valid, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0), "l"(policy));
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until this thread's copies have completed; other threads see them after a barrier.
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Waits for all but the last `Newer` commit groups.
template <int Newer>
__device__ inline void wait_for_older_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newer) : "memory");
}

// ---- fragments --------------------------------------------------------------------------------------------------------
struct alignas(16) Fragment {
  unsigned word[4];
};

// Loads four 8 x 8 matrices; lane l passes the address of row l % 8 of matrix l / 8.
__device__ inline Fragment load_matrices(unsigned shared) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3])
               : "r"(shared)
               : "memory");
  return f;
}
__device__ inline Fragment load_matrices_transposed(unsigned shared) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3])
               : "r"(shared)
               : "memory");
  return f;
}

// c [16, 8] += a [16, 16] b [16, 8]; b0 holds b's rows 2t and 2t + 1, b1 rows 2t + 8 and 2t + 9.
template <typename T>
__device__ inline void multiply_add(float (&c)[4], const Fragment& a, unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
  }
}

// A tile [rows, HS] in shared memory. Without padding, one bulk copy can write it.
template <typename T, int HS, int Padding = 8>
struct Tile {
  static constexpr int kStride = HS + Padding;  // in elements
  static constexpr int kRowBytes = kStride * 2;
  static constexpr int kChunks = HS / 8;  // 16-byte chunks of a row, without the padding

  __host__ __device__ static constexpr int bytes(int rows) { return rows * kRowBytes; }
  // Byte offset of 16-byte chunk `chunk` of a row.
  __device__ static int offset(int row, int chunk) { return row * kRowBytes + chunk * 16; }

  // Starts the copy of Rows rows of a head by `Threads` threads; rows from `valid` on become zero.
  template <int Rows, int Threads>
  __device__ static void load(unsigned tile, const T* first_row, std::int64_t token_stride, int valid) {
#pragma unroll
    for (int i = 0; i < (Rows * kChunks + Threads - 1) / Threads; ++i) {
      const unsigned index = threadIdx.x + i * Threads, row = index / kChunks, chunk = index % kChunks;
      if (Rows * kChunks % Threads != 0 && row >= Rows) break;
      const bool inside = static_cast<int>(row) < valid;
      const T* source = inside ? first_row + row * token_stride + chunk * 8 : first_row;
      copy_async(tile + row * kRowBytes + chunk * 16, source, inside);
    }
  }

  // Lane offsets for ldmatrix. For rows of A, or for a transposed B stored as [K, N]: lanes 0..15 address rows 0..15 of
  // the first chunk, lanes 16..31 those of the second.
  __device__ static unsigned lane_by_rows() {
    return threadIdx.x % 16 * kRowBytes + threadIdx.x % 32 / 16 * 16;
  }
  // For B stored as [N, K]: lanes 0..7 and 8..15 address rows 0..7 of both chunks, lanes 16..31 rows 8..15.
  __device__ static unsigned lane_by_columns() {
    return (threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8) * kRowBytes + threadIdx.x / 8 % 2 * 16;
  }
  // Moves a lane's address in the tile by `rows` and `columns`.
  __device__ static unsigned moved(unsigned lane_address, int rows, int columns) {
    return lane_address + rows * kRowBytes + columns * 2;
  }
};

// The accumulators of c [M * 16, N * 8].
template <int M, int N>
struct Accumulators {
  float at[M][N][4];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) at[m][n][i] = 0;
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) at[m][n][i] *= factor;
  }
};

// Columns 16 k to 16 k + 15 of m16 tile m of c, rounded to T, as operand A.
template <typename T, int M, int N>
__device__ inline Fragment as_operand(const Accumulators<M, N>& c, int m, int k) {
  const auto& left = c.at[m][2 * k];
  const auto& right = c.at[m][2 * k + 1];
  return {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
          pack<T>(right[2], right[3])};
}

// A [M * 16, HS] in a tile, as the left operand of many GEMMs. It is read from shared memory each time: registers would
// save that traffic at small head dimensions, but using them for a third block a multiprocessor gains more (H200).
template <typename T, int HS, int M>
struct LeftOperand {
  unsigned address;  // with the lane's offset by rows
  __device__ explicit LeftOperand(unsigned tile) : address(tile + Tile<T, HS>::lane_by_rows()) {}
  __device__ Fragment rows(int m, int k) const {
    return load_matrices(address + m * 16 * Tile<T, HS>::kRowBytes + k * 32);
  }
};

// The same in registers, loaded from row(i), a pointer to row i of A in global memory, or null for a row of zeros.
// Fragment layout: PTX ISA, "Matrix Fragments for mma.m16n8k16".
template <typename T, int HS, int M>
struct RegisterOperand {
  Fragment at[M][HS / 16];

  template <typename Row>
  __device__ void load(const Row& row) {
    load(row, [](const T* elements, int word) { return reinterpret_cast<const unsigned*>(elements)[word]; });
  }
  // The same with word(row(i), w) returning elements 2 w and 2 w + 1 of a row.
  template <typename Row, typename Word>
  __device__ void load(const Row& row, const Word& word) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* elements = row(m * 16 + half * 8 + g);
#pragma unroll
        for (int k = 0; k < HS / 16; ++k) {
          at[m][k].word[half] = elements ? word(elements, k * 8 + t) : 0;
          at[m][k].word[half + 2] = elements ? word(elements, k * 8 + t + 4) : 0;
        }
      }
    }
  }
  __device__ Fragment rows(int m, int k) const {
    return at[m][k];
  }
};

// c [., 16 columns from 8 n on] += rows * columns.
template <typename T, int M, int N>
__device__ inline void multiply_add(Accumulators<M, N>& c, const Fragment (&rows)[M], const Fragment& columns, int n) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    multiply_add<T>(c.at[m][n], rows[m], columns.word[0], columns.word[1]);
    multiply_add<T>(c.at[m][n + 1], rows[m], columns.word[2], columns.word[3]);
  }
}

// Both GEMMs below load the next fragment while the mma of the current one run.

// c += A B^T with A a LeftOperand or a RegisterOperand and B [N * 8, HS] in a tile (`b`: its address plus
// lane_by_columns()). Part of Parts: B has only the rows for that part of c's columns. Layout: the layout of B.
template <typename T, int HS, int Part = 0, int Parts = 1, typename Layout = Tile<T, HS>, int M, int N, typename Left>
__device__ inline void multiply_by_rows(Accumulators<M, N>& c, const Left& a, unsigned b) {
  static_assert(N % (2 * Parts) == 0);
  constexpr int kFirst = Part * N / Parts, kPerStep = N / Parts / 2, kFragments = HS / 16 * kPerStep;
  const auto load = [&](int i) { return load_matrices(Layout::moved(b, i % kPerStep * 16, i / kPerStep * 16)); };
  Fragment next = load(0), rows[M];
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    if (i % kPerStep == 0) {
#pragma unroll
      for (int m = 0; m < M; ++m) rows[m] = a.rows(m, i / kPerStep);
    }
    const Fragment columns = next;
    if (i + 1 < kFragments) next = load(i + 1);
    multiply_add<T>(c, rows, columns, kFirst + i % kPerStep * 2);
  }
}

// c += A B with A [M * 16, K * 16] in accumulators and B [K * 16, N * 8] in a tile (`b`: its address plus
// lane_by_rows(), at B's first column). Part of Parts: B has only the rows for that part of A's columns. Layout: the
// layout of B.
template <typename T, int HS, int Part = 0, int Parts = 1, typename Layout = Tile<T, HS>, int M, int N, int KN>
__device__ inline void multiply_by_columns(Accumulators<M, N>& c, const Accumulators<M, KN>& a, unsigned b) {
  static_assert(KN % (2 * Parts) == 0);
  constexpr int kFirst = Part * KN / Parts / 2, kPerStep = N / 2, kFragments = KN / Parts / 2 * kPerStep;
  const auto load = [&](int i) {
    return load_matrices_transposed(Layout::moved(b, i / kPerStep * 16, i % kPerStep * 16));
  };
  Fragment next = load(0), rows[M];
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    if (i % kPerStep == 0) {
#pragma unroll
      for (int m = 0; m < M; ++m) rows[m] = as_operand<T>(a, m, kFirst + i / kPerStep);
    }
    const Fragment columns = next;
    if (i + 1 < kFragments) next = load(i + 1);
    multiply_add<T>(c, rows, columns, i % kPerStep * 2);
  }
}

// Rounds a warp's M * 16 rows of accumulators to T and stores the first `valid` of them to columns [0, N * 8) of a
// head's rows, 16 bytes a lane. `staging`: M * 16 tile rows that only this warp uses.
template <typename T, int HS, int M, int N>
__device__ inline void store_rows(const Accumulators<M, N>& c, T* staging, T* first_row, std::int64_t token_stride,
                                  int valid) {
  constexpr int kStride = Tile<T, HS>::kStride, kChunks = N;
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      unsigned* upper = reinterpret_cast<unsigned*>(staging + (m * 16 + g) * kStride + n * 8 + t * 2);
      upper[0] = pack<T>(c.at[m][n][0], c.at[m][n][1]);
      upper[8 * kStride / 2] = pack<T>(c.at[m][n][2], c.at[m][n][3]);
    }
  }
  __syncwarp();
  for (int index = lane; index < M * 16 * kChunks; index += kWarpSize) {
    const int row = index / kChunks, chunk = index % kChunks;
    if (row < valid)
      store_pack(first_row + row * token_stride + chunk * 8, load_pack(staging + row * kStride + chunk * 8));
  }
}

}  // namespace weft::cuda
