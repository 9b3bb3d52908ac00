// rows_matmul() with wgmma, for Hopper and 16 bits.
//
// K is cut into splits (split_count(), a function of the weight's size). Within a split one accumulator takes 16 values
// of k an instruction, in order; the splits' sums are added in order. Three kernels compute this. Each gives the same
// sum for an element, so the number of rows may choose the kernel. (wgmma adds in the same order whichever operand the
// weight is; the tests hold the kernels to that.)
//
//  - split_kernel (rows_matmul_split.cu), for steps that are bound by reading the weight. Rows of the weight are rows
//    of operand A (M), rows of x are columns of B (N), so a step of few rows wastes no tensor core work on rows that do
//    not exist. The splits of a tile are the blocks of a cluster and meet in distributed shared memory: each block
//    leaves its sums in its own, then adds up and finishes a share of the tile. The ring keeps 48 to 88 KB of the
//    weight in flight. With 64 rows of the weight two blocks fit in a multiprocessor, so the next kernel of the chain
//    can fetch weights before this one has ended.
//  - column_kernel (rows_matmul_column.cu), for the same steps where other heights divide the weight better. Rows of
//    the weight are columns of B, so a tile may have 80 or 224 of them, and each multiprocessor gets one where tiles of
//    64 rows would give some twice as many as others. With several splits, from 33 rows of x on, it may have 96 or 112
//    where tiles of 128 rows would leave up to a fourth of the multiprocessors idle; the splits meet as above.
//  - tile_kernel (rows_matmul_tile.cu), for steps that are bound by the tensor cores. Blocks are persistent. Two of them
//    form a cluster that shares rows of x, of which each fetches half for both. A block walks all splits of a tile and
//    adds each to a total in registers, half of the tile a warpgroup. With one split there is no total, so a warpgroup
//    has registers for the whole tile, and the two take turns: one multiplies while the other finishes its last tile.
//
// All fetch their first stages of weights before they wait for the kernel that writes x.
//
// With two inputs the stages of the second follow those of the first; a stage never holds both.
//
// With a gate a tile of 16 n rows of the weight is n times 8 rows of gate and the 8 rows of up for the same units. The
// tensor map is [units / 8][gate, up][8][K]: in the 128-byte swizzle 8 rows are a pattern of their own.

#include "llmc/cuda/op/gemm/rows_matmul_hopper.cuh"

namespace weft::cuda::rows {

template <typename T>
bool hopper_computes(const RowsMatmul<T>& io, const LaunchDevice&) {
  return (!gated(io.epilogue) || io.OC % 8 == 0) && hopper_multiprocessors() > 0;
}

template <typename T>
void hopper(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  launch_best_kernel(io, device, stream);
}

#define WEFT_INSTANTIATE(T)                                                 \
  template bool hopper_computes(const RowsMatmul<T>&, const LaunchDevice&); \
  template void hopper(const RowsMatmul<T>&, const LaunchDevice&, cudaStream_t);
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda::rows
