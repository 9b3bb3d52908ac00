// Checks the arguments, chooses an implementation, and packs matrices.

#include "llmc/cuda/op/gemm/quantized_matmul.h"

#include <string>

#include "llmc/cuda/hw/launch.cuh"
#include "llmc/cuda/op/gemm/quantized_matmul.cuh"
#include "llmc/cuda/runtime/implementation.h"

namespace weft::cuda {

namespace {

constexpr int kPackThreads = 256;

// Each iteration writes one word of a fragment: from row `row` of the tensor, 16 of K for each step in a word, lane position t.
template <typename Format>
__global__ void __launch_bounds__(kPackThreads)
    pack_kernel(std::byte* blocks, PackedPlace place, std::int64_t K, const std::byte* from, std::int64_t count) {
  using namespace quantized;
  constexpr int kSteps = quantized::kSteps<Format>, kBits = Format::kBits, kOfByte = 8 / kBits;
  constexpr int kWordsOfRow = kBlockDepth / 16 / kSteps * 4;  // words that one row has in a block
  const std::int64_t depths = ceil_div(K, kBlockDepth), words = count * depths * kWordsOfRow;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kPackThreads + threadIdx.x; i < words;
       i += std::int64_t{gridDim.x} * kPackThreads) {
    const std::int64_t row = i / (depths * kWordsOfRow), depth = i / kWordsOfRow % depths;
    const int t = static_cast<int>(i % 4), step = static_cast<int>(i / 4) % (kWordsOfRow / 4) * kSteps;  // step: 0 to 7
    unsigned word = 0;
#pragma unroll
    for (int e = 0; e < 4 * kSteps; ++e) {  // bits of e, from high to low: step, upper 8 of K, second of a pair
      const std::int64_t k = depth * kBlockDepth + (step + e / 4) * 16 + e / 2 % 2 * 8 + 2 * t + e % 2;
      unsigned q = 0;
      if (k < K) {
        const auto byte = static_cast<unsigned>(from[(row * K + k) / kOfByte]);
        q = byte >> (kBits * (k % kOfByte)) & ((1 << kBits) - 1);
      }
      word |= (q ^ Format::kFlip) << bit_of<Format>(e / 4, e / 2 % 2, e % 2);
    }
    const std::int64_t to = packed_row(place, row);
    const int in_block = static_cast<int>(to % kBlockRows), in_warp = in_block % 16;
    const int thread = in_block / 16 * kWarpSize + in_warp % 8 * 4 + t;
    const int index = 2 * (step % 4 / kSteps) + in_warp / 8;  // among the thread's words of half a block
    std::byte* const half =
        blocks + block_of(to, depth * kBlockDepth, K) * kBlockBytes<Format> + step / 4 * kHalfBytes<Format>;
    reinterpret_cast<unsigned*>(half + index / 4 * kPieceBytes)[thread * 4 + index % 4] = word;
  }
}

__global__ void __launch_bounds__(kPackThreads)
    pack_row_scales_kernel(float* scales, PackedPlace place, const float* from, std::int64_t count) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (row < count) scales[quantized::packed_row(place, row)] = from[row];
}

// Writes one half of the words of groups: half 0 is the scale, half 1 the zero point.
template <typename Format, typename From>
__global__ void __launch_bounds__(kPackThreads) pack_groups_kernel(std::byte* blocks, PackedPlace place, std::int64_t K,
                                                                   const From* from, std::int64_t count, int half) {
  using namespace quantized;
  const std::int64_t groups = ceil_div(K, kBlockDepth);
  const std::int64_t i = std::int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (i >= count * groups) return;
  const std::int64_t row = packed_row(place, i / groups), group = i % groups;
  std::byte* const words =
      blocks + block_of(row, group * kBlockDepth, K) * kBlockBytes<Format> + 2 * kHalfBytes<Format>;
  reinterpret_cast<std::uint16_t*>(words)[row % kBlockRows * 2 + half] = from[i];
}

dim3 blocks_for(std::int64_t threads) {
  return dim3(static_cast<unsigned>(ceil_div(threads, kPackThreads)));
}

// Packs one half of the words of groups, of all groups of `count` rows.
template <typename From>
void pack_groups(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const From* from, std::int64_t count,
                 int half, cudaStream_t stream) {
  if (count == 0) return;
  for_format(to.dtype, [&]<typename Format>() {
    if constexpr (Format::kGrouped) {
      pack_groups_kernel<Format><<<blocks_for(count * ceil_div(K, quantized::kBlockDepth)), kPackThreads, 0, stream>>>(
          to.blocks, place, K, from, count, half);
    } else {
      fail(Exit::internal, "quantized_matmul: groups of weights of type %s", dtype_name(to.dtype));
    }
  });
  check_launch("packing scales and zeros of groups");
}

template <typename T>
constexpr DType kTypeOf = std::is_same_v<T, bf16> ? DType::bf16 : DType::f16;

template <typename T>
void check_input(const T* x, const PackedMatrix& weight, std::int64_t K, std::int64_t OC) {
  const std::string reason = rows_matmul_unsupported_reason(K, OC, kTypeOf<T>);
  if (!reason.empty()) fail(Exit::usage, "%s", reason.c_str());
  const bool grouped = weight_format(weight.dtype).grouped;
  if (weight.in_rows) fail(Exit::internal, "quantized_matmul: a weight that is not in blocks");
  if (x == nullptr || weight.blocks == nullptr || (!grouped && weight.row_scales == nullptr))
    fail(Exit::internal, "quantized_matmul: x, weight or its scales are null");
  if (!aligned_to_16(x, weight.blocks))
    fail(Exit::internal, "quantized_matmul: x at %p and weight at %p, expected multiples of 16",
         static_cast<const void*>(x), static_cast<const void*>(weight.blocks));
}

template <typename T>
void check_arguments(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2) {
  check_input(io.x, weight, io.K, io.OC);
  if (io.K2 != 0) {
    check_input(io.x2, weight2, io.K2, io.OC);
    if (io.epilogue != RowsEpilogue::add)
      fail(Exit::internal, "quantized_matmul: a second input, and the sums are not added to the residual stream");
    if (weight.dtype != weight2.dtype)
      fail(Exit::internal, "quantized_matmul: two inputs with weights of types %s and %s", dtype_name(weight.dtype),
           dtype_name(weight2.dtype));
  }
  const bool fp32 = io.epilogue == RowsEpilogue::add || io.epilogue == RowsEpilogue::store_fp32;
  if (fp32 ? io.out_fp32 == nullptr : io.out == nullptr) fail(Exit::internal, "quantized_matmul: the result is null");
  if (gated(io.epilogue) && io.bias != nullptr) fail(Exit::internal, "quantized_matmul: a bias with a gate");
}

// Two inputs are two launches.
template <typename T>
void portable_in_turn(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
                      const LaunchDevice& device, cudaStream_t stream) {
  RowsMatmul<T> first = io;
  first.K2 = 0;
  quantized::portable(first, weight, device, stream);
  if (io.K2 == 0) return;
  RowsMatmul<T> second = first;
  second.x = io.x2, second.bias = io.bias2, second.K = io.K2;
  second.x_is_older = false;
  quantized::portable(second, weight2, device, stream);
}

template <typename T>
constexpr Implementation<RowsMatmul<T>, PackedMatrix, PackedMatrix, LaunchDevice> kImplementations[] = {
    {"wgmma",
     [](const RowsMatmul<T>&, const PackedMatrix&, const PackedMatrix&, const LaunchDevice&) {
       return hopper_multiprocessors() > 0;
     },
     quantized::hopper<T>},
    {"mma.sync",
     [](const RowsMatmul<T>&, const PackedMatrix&, const PackedMatrix&, const LaunchDevice&) { return true; },
     portable_in_turn<T>},
};

}  // namespace

std::int64_t packed_rows(std::int64_t OC, bool gated) {
  return gated ? ceil_div(OC, 8) * 16 : OC;
}
std::uint64_t packed_block_bytes(DType dtype, std::int64_t rows, std::int64_t K) {
  return static_cast<std::uint64_t>(ceil_div(rows, quantized::kBlockRows) * ceil_div(K, quantized::kBlockDepth)) *
         for_format(dtype, [&]<typename Format>() { return std::uint64_t{quantized::kBlockBytes<Format>}; });
}
std::uint64_t packed_scale_bytes(DType dtype, std::int64_t rows) {
  const auto filled = static_cast<std::uint64_t>(ceil_div(rows, quantized::kBlockRows) * quantized::kBlockRows);
  return weight_format(dtype).grouped ? 0 : filled * sizeof(float);
}

void pack_weights(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::byte* from,
                  std::int64_t count, cudaStream_t stream) {
  constexpr unsigned kPackBlocks = 1056;
  if (count == 0) return;
  if (to.in_rows) {
    return check(cudaMemcpyAsync(to.blocks + place.first * K, from, static_cast<std::size_t>(count * K),
                                 cudaMemcpyDeviceToDevice, stream),
                 "copying weights");
  }
  for_format(to.dtype, [&]<typename Format>() {
    pack_kernel<Format><<<kPackBlocks, kPackThreads, 0, stream>>>(to.blocks, place, K, from, count);
  });
  check_launch("packing weights");
}
void pack_row_scales(const PackedMatrix& to, const PackedPlace& place, const float* from, std::int64_t count,
                     cudaStream_t stream) {
  if (count == 0) return;
  pack_row_scales_kernel<<<blocks_for(count), kPackThreads, 0, stream>>>(to.row_scales, place, from, count);
  check_launch("packing scales");
}
void pack_group_scales(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::uint16_t* from,
                       std::int64_t count, cudaStream_t stream) {
  pack_groups(to, place, K, from, count, 0, stream);
}
void pack_zeros(const PackedMatrix& to, const PackedPlace& place, std::int64_t K, const std::uint8_t* from,
                std::int64_t count, cudaStream_t stream) {
  pack_groups(to, place, K, from, count, 1, stream);
}

template <typename T>
void quantized_matmul(const RowsMatmul<T>& io, const PackedMatrix& weight, const PackedMatrix& weight2,
                      const LaunchDevice& device, cudaStream_t stream, RowsPath path) {
  if (io.rows == 0) return;
  check_arguments(io, weight, weight2);
  if (path == RowsPath::portable) return portable_in_turn(io, weight, weight2, device, stream);
  launch_first("quantized_matmul", kImplementations<T>, stream, io, weight, weight2, device);
}

template void quantized_matmul<bf16>(const RowsMatmul<bf16>&, const PackedMatrix&, const PackedMatrix&,
                                     const LaunchDevice&, cudaStream_t, RowsPath);
template void quantized_matmul<fp16>(const RowsMatmul<fp16>&, const PackedMatrix&, const PackedMatrix&,
                                     const LaunchDevice&, cudaStream_t, RowsPath);

}  // namespace weft::cuda
