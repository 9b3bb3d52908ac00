// rows_matmul() with wgmma, for Hopper and 16 bits.
//
// K is cut into splits (split_count(), a function of the weight's size): within a split one accumulator takes 16 values of k an
// instruction, in order; the splits' sums are added in order. Three kernels compute this, and an element is the same sum in all
// of them, so that the step's number of rows may choose. (wgmma adds the same whichever operand the weight is; the tests hold
// that together.)
//
//  - split_kernel (rows_matmul_split.cu), for steps that are bound by reading the weight. Rows of the weight are rows of a (M), rows of x are columns
//    of b (N), so that a step of a few rows wastes no tensor core work on rows that do not exist. The splits of a tile are
//    the blocks of a cluster, which meet in distributed shared memory: each leaves its sums in its own, and adds up and
//    finishes a share of the tile. Its ring keeps 48 to 88 KB of the weight in flight; with 64 rows of the weight two blocks
//    fit in a multiprocessor, so that the next kernel of the chain fetches weights before this one has ended.
//  - column_kernel (rows_matmul_column.cu), for the same steps where there is one split and its tiles of 64 rows would leave some multiprocessors
//    with twice as many as others. Rows of the weight are columns of b, so a tile may have 80 or 224 of them, and each
//    multiprocessor gets one.
//  - tile_kernel (rows_matmul_tile.cu), for steps that are bound by the tensor cores. A block walks all splits of a tile and adds each to a total
//    in registers. Blocks stay, tile after tile; two of them form a cluster, have the same rows of x, and each fetches
//    half of those for both.
// All fetch their first round of weights before they wait for the kernel that writes x.
//
// With two inputs the stages of the second follow those of the first, each input in whole stages.
//
// With SwiGLU a tile of 16 n rows of the weight is n times 8 rows of gate and the 8 of up that belong to them, by a tensor map
// over [units / 8][gate, up][8][K]: in the 128-byte swizzle 8 rows are a pattern of their own.

#include "llmc/cuda/op/rows_matmul_hopper.cuh"

namespace weft::cuda::rows {

namespace {

// The height of column_kernel's tiles for which the busiest multiprocessor has the fewest rows of the weight; 0 where tiles of 64
// rows are as good, up to a tenth.
template <int... kHeights>
int best_height(std::int64_t weight_rows) {
  constexpr std::int64_t kMultiprocessors = 132;
  const auto most_rows = [&](std::int64_t height) {
    return ceil_div(ceil_div(weight_rows, height), kMultiprocessors) * height;
  };
  int best = 0;
  std::int64_t least = most_rows(kWeightRows) * 9 / 10;
  for (const int height : {kHeights...}) {
    if (most_rows(height) < least) best = height, least = most_rows(height);
  }
  return best;
}

}  // namespace

template <typename T>
bool hopper_computes(const RowsMatmul<T>& io) {
  return (io.epilogue != RowsEpilogue::swiglu || io.OC % 8 == 0) && hopper_multiprocessors() > 0;
}

// Which kernel is a matter of time alone. Above 64 rows a layer with one split has tiles enough for tile_kernel, which reads x and
// weight fewer times; with several splits its tiles would occupy a third of the multiprocessors.
template <typename T>
void hopper(const RowsMatmul<T>& io, const LaunchDevice& device, cudaStream_t stream) {
  const int splits = splits_of(io), height = best_height<80, 224>(weight_rows(io));
  const std::int64_t most_rows = height == 80 ? 192 : 128;  // of column_kernel
  if (splits == 1 && io.K2 == 0 && io.rows <= most_rows && height > 0)
    return launch_column_kernel(io, height, device, stream);
  if (io.rows <= (splits > 1 ? 256 : 64)) return launch_split_kernel(io, device, stream);
  launch_tile_kernel(io, device, stream);
}

#define WEFT_INSTANTIATE(T)                            \
  template bool hopper_computes(const RowsMatmul<T>&); \
  template void hopper(const RowsMatmul<T>&, const LaunchDevice&, cudaStream_t);
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda::rows
