// Instructions of Hopper (sm_90a), one or two PTX instructions a function: mbarriers, bulk and tensor copies between
// global and shared memory, wgmma, register reallocation. ring.cuh, barriers.cuh and tile.cuh build pipelines and tiles
// from them.
//
// What a kernel must know:
//  - WEFT_BULK_COPY and WEFT_WGMMA tell whether the architecture being compiled has the first or the second half of
//    this header. Both are true in host compilation. A kernel that uses them encloses its body in `#if` and traps
//    otherwise; its launcher checks for compute capability 9.0 first.
//  - Everything is in weft::cuda::hopper; shared memory is addressed by 32-bit numbers (shared_address()).
//  - Bulk copies and wgmma access shared memory through the async proxy. Ordinary stores become visible to them after
//    fence_async_proxy_shared() in the writing threads and then a barrier.
//  - Operands of wgmma have 128-byte rows (64 elements of 16 bits) in the 128-byte swizzle: the 16-byte chunk c of row
//    r is stored at chunk c ^ (r % 8). Tensor copies write and read that form (CU_TENSOR_MAP_SWIZZLE_128B); a tile
//    starts at a multiple of 1024 bytes. Rows of 64 and 32 bytes exist too, for widths that are not a multiple of 64
//    columns: see swizzled_chunk().
// Sources: PTX ISA 9.0, "mbarrier", "cp.async.bulk", "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "llmc/base/fp8.h"
#include "llmc/cuda/hw/common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define WEFT_BULK_COPY 1
#else
#define WEFT_BULK_COPY 0
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WEFT_WGMMA 1
#else
#define WEFT_WGMMA 0
#endif

namespace weft::cuda::hopper {

constexpr int kWarpgroupSize = 128;

// Which dimension of an operand's tile runs along its rows.
enum class Major {
  k,   // rows of the tile are rows of a, or columns of b: [M or N, 64 of K]
  mn,  // rows of the tile are single values of k: [K, 64 of M or N], the operand is transposed
};
// L2 eviction priority of a copy: the cache policies that createpolicy.fractional produces for all of an access.
enum class L2 : std::uint64_t {
  normal = 0x1000000000000000,
  evict_first = 0x12f0000000000000,
  evict_last = 0x14f0000000000000,
};

// Where 16-byte chunk `chunk` of a row is stored, in a tile of RowBytes a row that starts at a multiple of 8 rows: a
// swizzle of 128, 64 or 32 bytes permutes the chunks of a row by the number of 128-byte lines before the row.
template <int RowBytes>
__host__ __device__ constexpr int swizzled_chunk(int row, int chunk) {
  return chunk ^ (row * RowBytes / 128 % (RowBytes / 16));
}

#if WEFT_BULK_COPY

// An mbarrier: 8 bytes of shared memory that count arrivals and bytes. A phase completes when `arrivals` threads have
// arrived and as many bytes have landed as were announced; the next phase begins at once. A waiter names the parity of
// the phase that it waits for: 0 for the first, 1 for the second, 0 for the third... Waiting for parity 1 on a fresh
// barrier returns at once.
__device__ inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Call after the last init and before the barrier that publishes the mbarriers to the block; makes them visible to
// copies, too.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// As `count` arrivals.
__device__ inline void mbarrier_arrive(unsigned barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of that parity is complete; the hardware may suspend the thread for a while first.
__device__ inline bool mbarrier_try(unsigned barrier, unsigned parity) {
  unsigned complete;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(complete)
               : "r"(barrier), "r"(parity)
               : "memory");
  return complete != 0;
}
// Waits for a phase, with a watchdog: after some 10 s (5 times 2^32 clocks) it writes to address 0, so that the kernel
// ends and the host sees an illegal address. (Not by __trap(): with one here ptxas 13.0 compiles the forward kernels of
// attention as if setmaxnreg gave them no registers, with spills and a wait after every wgmma. hopper_backward.cu has
// one that does no harm.)
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  constexpr unsigned kWatchdog = 5;
  if (mbarrier_try(barrier, parity)) return;
  unsigned start, now;
  asm volatile("mov.u32 %0, %%clock_hi;" : "=r"(start));
  while (!mbarrier_try(barrier, parity)) {
    asm volatile("mov.u32 %0, %%clock_hi;" : "=r"(now));
    if (now - start > kWatchdog) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(barrier) : "memory");
  }
}

// A phase of an mbarrier, for mbarrier_wait_all().
struct BarrierPhase {
  unsigned barrier, parity;
};
// Waits for all of these phases. The first questions are issued together: where all are complete, that takes as long as
// one.
template <int N>
__device__ inline void mbarrier_wait_all(const BarrierPhase (&phases)[N]) {
  bool complete = true;
#pragma unroll
  for (int i = 0; i < N; ++i) complete &= mbarrier_try(phases[i].barrier, phases[i].parity);
  if (complete) return;
#pragma unroll
  for (int i = 0; i < N; ++i) mbarrier_wait(phases[i].barrier, phases[i].parity);
}

// Orders this thread's ordinary stores to shared memory before bulk copies and wgmma that read them.
__device__ inline void fence_async_proxy_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Orders ordinary accesses to global memory and those of bulk copies; needed in the threads on both sides.
__device__ inline void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- bulk copies of consecutive bytes -------------------------------------------------------------------------------
// Addresses and sizes are multiples of 16. One thread issues a copy.
__device__ inline void bulk_load(unsigned shared, const void* global, unsigned bytes, unsigned barrier,
                                 L2 keep = L2::normal) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}
// Prefetches bytes of global memory to L2.
__device__ inline void bulk_prefetch(const void* global, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
__device__ inline void bulk_store(void* global, unsigned shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
// global[i] += shared[i] in fp32. Additions to one address happen in the order in which copies complete.
__device__ inline void bulk_add(float* global, unsigned shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
// Makes a group of this thread's bulk stores and additions since the last commit.
__device__ inline void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the latest Groups groups have read their shared memory, which may then be overwritten.
template <int Groups = 0>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}
// Waits until all but the latest Groups groups have written global memory.
template <int Groups = 0>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Groups) : "memory");
}

// Each copies one box of a tensor map (tensor_map.h); x is the innermost coordinate. Loads fill what is outside of the
// tensor with zeros and count the whole box on the barrier; stores skip it.
__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ inline void tensor_load(unsigned shared, const CUtensorMap* map, unsigned barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void tensor_load(unsigned shared, const CUtensorMap* map, unsigned barrier, int x, int y, int z,
                                   L2 keep = L2::normal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}
__device__ inline void tensor_load(unsigned shared, const CUtensorMap* map, unsigned barrier, int x, int y, int z,
                                   int w, L2 keep = L2::normal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}
__device__ inline void tensor_store(const CUtensorMap* map, unsigned shared, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ inline void tensor_store(const CUtensorMap* map, unsigned shared, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements from registers; lane l passes the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrices(unsigned shared, unsigned w0, unsigned w1, unsigned w2, unsigned w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(w0), "r"(w1),
               "r"(w2), "r"(w3)
               : "memory");
}
__device__ inline void store_matrices_transposed(unsigned shared, unsigned w0, unsigned w1, unsigned w2, unsigned w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(w0), "r"(w1),
               "r"(w2), "r"(w3)
               : "memory");
}

#endif  // WEFT_BULK_COPY

#if WEFT_WGMMA

// Multicast: copies one box to the same address in each block of the cluster whose bit is set in `blocks`, counted
// there by the mbarrier at the same address. (PTX ISA: at full speed on sm_90a, not on every later GPU.)
__device__ inline void tensor_load_to_cluster(unsigned shared, const CUtensorMap* map, unsigned barrier, int x, int y,
                                              std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

// Releases or requests registers, the same in all warps of a warpgroup: afterwards a thread has N (a multiple of 8).
// The kernel needs __launch_bounds__(threads, 1), and each role its own branch.
template <int N>
__device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// The matrix descriptor of an operand that starts at `tile`, for c [64, N] += a [64, K] b [K, N] with swizzled tiles of
// RowBytes (128, 64 or 32) a row. For Major::mn with more columns than a tile has, `column_tile_bytes` is the distance
// from one tile to the next; otherwise the hardware ignores it. tile.cuh has descriptors of typed tiles.
template <int RowBytes = 128>
__device__ inline std::uint64_t operand_descriptor(unsigned tile, unsigned column_tile_bytes = 16) {
  static_assert(RowBytes == 128 || RowBytes == 64 || RowBytes == 32);
  constexpr std::uint64_t kSwizzle = std::uint64_t{RowBytes == 128 ? 1 : RowBytes == 64 ? 2 : 3} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{8 * RowBytes >> 4} << 32;
  return kSwizzle | kEightRows | (std::uint64_t{column_tile_bytes >> 4} << 16) | ((tile & 0x3ffff) >> 4);
}
// The descriptor of an operand `bytes` further on.
__device__ inline std::uint64_t advance_descriptor(std::uint64_t descriptor, unsigned bytes) {
  return descriptor + (bytes >> 4);
}

// Needed before the first wgmma, and whenever ordinary instructions have accessed the accumulators or register
// operands.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Makes a group of the wgmma issued since the last commit.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the latest Groups groups are still running.
template <int Groups = 0>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}
// Keeps the compiler from moving uses of the values across this point: accumulators, once a wait has made them valid.
template <int N>
__device__ inline void pin(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int N>
__device__ inline void pin(unsigned (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(values[i])::"memory");
}
// Call before accumulators are overwritten by a new sum: the compiler then need not keep the old values.
template <int N>
__device__ inline void forget(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(values[i]));
}

// An accumulator of N columns is float d[N / 2] a thread: with warp w of the warpgroup and lane = 4 g + t, d[4 j + i]
// is row 16 w + g + 8 (i / 2), column 8 j + 2 t + i % 2. The register operand of step s of 16 values of k holds, in
// this order, columns 16 s + 2t, + 1 of row g, the same of row g + 8, columns 16 s + 8 + 2t, + 1 of row g, the same of
// row g + 8: accumulators d[8 s] to d[8 s + 7], rounded and packed in pairs.
template <int N>
struct Wgmma;

// clang-format off
#define WEFT_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WEFT_D16 WEFT_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WEFT_D24 WEFT_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WEFT_D32 WEFT_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WEFT_D40 WEFT_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WEFT_D48 WEFT_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WEFT_D56 WEFT_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WEFT_D64 WEFT_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WEFT_D72 WEFT_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WEFT_D80 WEFT_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WEFT_D88 WEFT_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WEFT_D92 WEFT_D88 ", %88, %89, %90, %91"
#define WEFT_D96 WEFT_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WEFT_D104 WEFT_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WEFT_D112 WEFT_D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WEFT_D120 WEFT_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WEFT_D128 WEFT_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WEFT_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WEFT_O8 WEFT_8(0)
#define WEFT_O16 WEFT_O8, WEFT_8(8)
#define WEFT_O24 WEFT_O16, WEFT_8(16)
#define WEFT_O32 WEFT_O24, WEFT_8(24)
#define WEFT_O40 WEFT_O32, WEFT_8(32)
#define WEFT_O48 WEFT_O40, WEFT_8(40)
#define WEFT_O56 WEFT_O48, WEFT_8(48)
#define WEFT_O64 WEFT_O56, WEFT_8(56)
#define WEFT_O72 WEFT_O64, WEFT_8(64)
#define WEFT_O80 WEFT_O72, WEFT_8(72)
#define WEFT_O88 WEFT_O80, WEFT_8(80)
#define WEFT_O92 WEFT_O88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WEFT_O96 WEFT_O88, WEFT_8(88)
#define WEFT_O104 WEFT_O96, WEFT_8(96)
#define WEFT_O112 WEFT_O104, WEFT_8(104)
#define WEFT_O120 WEFT_O112, WEFT_8(112)
#define WEFT_O128 WEFT_O120, WEFT_8(120)
// r0... are the numbers of the operands that follow the R accumulators.
#define WEFT_WGMMA_SHARED(N, R, TYPES, r0, r1, r2, r3, r4)                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2 ", 0;\n"                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" WEFT_D##R "}, %" #r0 ", %" #r1           \
               ", p, 1, 1, %" #r3 ", %" #r4 ";\n}"                                                                   \
               : WEFT_O##R                                                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int(TransposeA)), "n"(int(TransposeB)))
#define WEFT_WGMMA_REGISTERS(N, R, TYPES, r0, r1, r2, r3, r4, r5, r6)                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5 ", 0;\n"                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" WEFT_D##R "}, {%" #r0 ", %" #r1 ", %" #r2\
               ", %" #r3 "}, %" #r4 ", p, 1, 1, %" #r6 ";\n}"                                                        \
               : WEFT_O##R                                                                                           \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int(TransposeB)))
#define WEFT_WGMMA_CODES(N, R, TYPES, r0, r1, r2)                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2 ", 0;\n"                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" WEFT_D##R "}, %" #r0 ", %" #r1           \
               ", p, 1, 1;\n}"                                                                                       \
               : WEFT_O##R                                                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define WEFT_WGMMA_OF(N, R, r0, r1, r2, r3, r4, r5, r6)                                                              \
  template <>                                                                                                        \
  struct Wgmma<N> {                                                                                                  \
    template <bool Bf16, bool TransposeA, bool TransposeB>                                                           \
    __device__ static void shared(float (&d)[R], std::uint64_t a, std::uint64_t b, bool accumulate) {                \
      if constexpr (Bf16)                                                                                            \
        WEFT_WGMMA_SHARED(N, R, "bf16.bf16", r0, r1, r2, r3, r4);                                                    \
      else                                                                                                           \
        WEFT_WGMMA_SHARED(N, R, "f16.f16", r0, r1, r2, r3, r4);                                                      \
    }                                                                                                                \
    template <bool Bf16, bool TransposeB>                                                                            \
    __device__ static void registers(float (&d)[R], unsigned a0, unsigned a1, unsigned a2, unsigned a3,              \
                                     std::uint64_t b, bool accumulate) {                                             \
      if constexpr (Bf16)                                                                                            \
        WEFT_WGMMA_REGISTERS(N, R, "bf16.bf16", r0, r1, r2, r3, r4, r5, r6);                                         \
      else                                                                                                           \
        WEFT_WGMMA_REGISTERS(N, R, "f16.f16", r0, r1, r2, r3, r4, r5, r6);                                           \
    }                                                                                                                \
    template <Fp8Format A>                                                                                           \
    __device__ static void codes(float (&d)[R], std::uint64_t a, std::uint64_t b, bool accumulate) {                 \
      if constexpr (A == Fp8Format::e4m3)                                                                            \
        WEFT_WGMMA_CODES(N, R, "e4m3.e4m3", r0, r1, r2);                                                             \
      else                                                                                                           \
        WEFT_WGMMA_CODES(N, R, "e5m2.e4m3", r0, r1, r2);                                                             \
    }                                                                                                                \
  };
WEFT_WGMMA_OF(16, 8, 8, 9, 10, 11, 12, 13, 14)
WEFT_WGMMA_OF(32, 16, 16, 17, 18, 19, 20, 21, 22)
WEFT_WGMMA_OF(48, 24, 24, 25, 26, 27, 28, 29, 30)
WEFT_WGMMA_OF(64, 32, 32, 33, 34, 35, 36, 37, 38)
WEFT_WGMMA_OF(80, 40, 40, 41, 42, 43, 44, 45, 46)
WEFT_WGMMA_OF(96, 48, 48, 49, 50, 51, 52, 53, 54)
WEFT_WGMMA_OF(112, 56, 56, 57, 58, 59, 60, 61, 62)
WEFT_WGMMA_OF(128, 64, 64, 65, 66, 67, 68, 69, 70)
WEFT_WGMMA_OF(144, 72, 72, 73, 74, 75, 76, 77, 78)
WEFT_WGMMA_OF(160, 80, 80, 81, 82, 83, 84, 85, 86)
WEFT_WGMMA_OF(176, 88, 88, 89, 90, 91, 92, 93, 94)
WEFT_WGMMA_OF(184, 92, 92, 93, 94, 95, 96, 97, 98)
WEFT_WGMMA_OF(192, 96, 96, 97, 98, 99, 100, 101, 102)
WEFT_WGMMA_OF(208, 104, 104, 105, 106, 107, 108, 109, 110)
WEFT_WGMMA_OF(224, 112, 112, 113, 114, 115, 116, 117, 118)
WEFT_WGMMA_OF(240, 120, 120, 121, 122, 123, 124, 125, 126)
WEFT_WGMMA_OF(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef WEFT_8
#undef WEFT_WGMMA_SHARED
#undef WEFT_WGMMA_REGISTERS
#undef WEFT_WGMMA_CODES
// clang-format on
#undef WEFT_WGMMA_OF

// d [64, N] += a [64, 16] b [16, N], with descriptors of both operands; without `accumulate` d is overwritten.
template <typename T, Major A = Major::k, Major B = Major::k, int R>
__device__ inline void wgmma_async(float (&d)[R], std::uint64_t a, std::uint64_t b, bool accumulate) {
  Wgmma<2 * R>::template shared<std::is_same_v<T, bf16>, A == Major::mn, B == Major::mn>(d, a, b, accumulate);
}
// The same with a in registers.
template <typename T, Major B = Major::k, int R>
__device__ inline void wgmma_async(float (&d)[R], unsigned a0, unsigned a1, unsigned a2, unsigned a3, std::uint64_t b,
                                   bool accumulate) {
  Wgmma<2 * R>::template registers<std::is_same_v<T, bf16>, B == Major::mn>(d, a0, a1, a2, a3, b, accumulate);
}

// d [64, N] += a [64, 32] b [32, N] on codes of fp8, a in the format A and b in e4m3, both Major::k: the 128 bytes of a
// tile's row are 128 values of k. The tensor core keeps about 14 bits of a sum.
template <Fp8Format A, int R>
__device__ inline void wgmma_async_fp8(float (&d)[R], std::uint64_t a, std::uint64_t b, bool accumulate) {
  Wgmma<2 * R>::template codes<A>(d, a, b, accumulate);
}

#endif  // WEFT_WGMMA

}  // namespace weft::cuda::hopper
