// AdamW and the global gradient norm on the GPU. The specification is llmc/cpu/adamw.h.
//
// Master weights in four bytes: a bf16 parameter p and a 16-bit integer `low` together are exactly an fp32 master,
//   bits(master) = (bits(p) << 16) + low,
// with p the master rounded to nearest, ties away from zero. Only with this tie rule does the error always fit 16 bits
// (with ties to even, a tie above an even p would need low = +32768).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "llmc/base/philox.h"
#include "llmc/cuda/op/fp8/fp8.h"
#include "llmc/model/train_model.h"

namespace weft::cuda {

struct SplitMaster {
  std::uint16_t high;  // the bits of the bf16 parameter
  std::int16_t low;
};
// Both take the bits of an fp32 number. A NaN becomes the canonical one, so that `high` is a NaN as well.
WEFT_HOST_DEVICE inline SplitMaster split_master(std::uint32_t bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) bits = 0x7FC00000u;
  const std::uint32_t high = (bits + 0x8000u) >> 16;
  return {static_cast<std::uint16_t>(high), static_cast<std::int16_t>(bits - (high << 16))};
}
WEFT_HOST_DEVICE inline std::uint32_t join_master(SplitMaster split) {
  return (static_cast<std::uint32_t>(split.high) << 16) +
         static_cast<std::uint32_t>(static_cast<std::int32_t>(split.low));
}

// The norm of a step's gradient, on the device: the update reads it there, the host may read it later.
struct GradientNorm {
  double norm;              // 2-norm over all gradients
  float gradient_scale;     // min(1, clip / (norm + 1e-6)), or 1 without clipping
  std::int32_t non_finite;  // 1 if the norm is not finite: the update then writes nothing
};

// ---- update ---------------------------------------------------------------------------------------------------------
// One tensor of the arena: elements [begin, end) and whether they decay.
struct AdamWRange {
  std::int64_t begin = 0, end = 0;
  bool decay = false;
};
// The work of one thread block. The host cuts the ranges once and uploads the list; one launch over it updates every
// tensor.
struct AdamWBlock {
  std::int64_t begin = 0;
  // Where the block's moments and low halves, its gradients, and its parameters begin in their arenas: equal to `begin`
  // unless an arena holds only a part.
  std::int64_t state = 0, gradient = 0, parameter = 0;
  std::int32_t count = 0, decay = 0;
  std::int64_t second = 0;  // where its second moments begin, behind `state`, if their arena has another layout
};
// Blocks are cut at multiples of this many elements of the arena.
inline constexpr std::int64_t kAdamWBlockElements = 8192;
// Adjacent ranges with the same decay are merged; elements between ranges (padding) are never accessed.
std::vector<AdamWBlock> adamw_blocks(std::span<const AdamWRange> ranges);

// Updates `block_count` blocks. Parameters, gradients, first moments with low parts, and second moments are in arenas of up to
// four layouts, aligned to 16 bytes; a block's positions in them differ by multiples of 4. `blocks` is on the device. norm: on the
// device; its gradient_scale replaces step.gradient_scale, and if it is non_finite nothing is written. norm null:
// step.gradient_scale is used.
void adamw(float* parameters, const float* gradients, float* moment1, float* moment2, const AdamWBlock* blocks,
           std::int64_t block_count, const AdamWStep& step, const GradientNorm* norm, cudaStream_t stream);
// The same on bf16 parameters with their low parts: an fp32 master in four bytes.
void adamw(__nv_bfloat16* parameters, std::int16_t* low, const float* gradients, float* moment1, float* moment2,
           const AdamWBlock* blocks, std::int64_t block_count, const AdamWStep& step, const GradientNorm* norm,
           cudaStream_t stream);

// The same with moments in bf16, rounded stochastically: up or down at random, with probabilities that make the
// rounding unbiased, so that increments far below half a unit of bf16 are not lost. The random bits are a function of
// (seed, step.step, element), so a resumed run rounds as the uninterrupted one.
void adamw(__nv_bfloat16* parameters, std::int16_t* low, const float* gradients, __nv_bfloat16* moment1,
           __nv_bfloat16* moment2, const AdamWBlock* blocks, std::int64_t block_count, const AdamWStep& step,
           const GradientNorm* norm, std::uint64_t seed, cudaStream_t stream);

// A matrix [rows, columns] of the arenas, multiples of 16, whose update writes its codes in e4m3 as well.
struct AdamWMatrix {
  std::int64_t begin = 0;  // its first element, a multiple of 16
  std::int64_t rows = 0, columns = 0;
  std::int64_t first_tile = 0;  // number of tiles of the matrices before it
  std::int32_t decay = 0;
  // Both layouts, with the scale of the next step: what quantize_fp8() makes of the updated parameters, bit for bit.
  Fp8Target codes;
};
// The number of thread blocks for a matrix. `first_tile` of a list follows from it.
std::int64_t adamw_tiles(std::int64_t rows, std::int64_t columns);
// Updates matrices [count] in the order of their tiles, `tiles` in all, with the bits of adamw() on split masters. The list
// is on the device; all arenas have one layout. Parameters in bf16 with moments in fp32, or in bf16 as above.
void adamw_fp8(__nv_bfloat16* parameters, std::int16_t* low, const float* gradients, float* moment1, float* moment2,
               const AdamWMatrix* matrices, std::int64_t count, std::int64_t tiles, const AdamWStep& step,
               cudaStream_t stream);
void adamw_fp8(__nv_bfloat16* parameters, std::int16_t* low, const float* gradients, __nv_bfloat16* moment1,
               __nv_bfloat16* moment2, const AdamWMatrix* matrices, std::int64_t count, std::int64_t tiles,
               const AdamWStep& step, std::uint64_t seed, cudaStream_t stream);

// Stochastic rounding of an fp32 number's bits to bf16's, with 16 random bits. Infinities and NaN are truncated.
WEFT_HOST_DEVICE inline std::uint16_t round_at_random(std::uint32_t bits, std::uint32_t random16) {
  const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
  return static_cast<std::uint16_t>((finite ? bits + random16 : bits) >> 16);
}
// The random words of elements 4 quad to 4 quad + 3 in update `step`: the low half of a word rounds the first moment,
// the high half the second.
WEFT_HOST_DEVICE inline PhiloxWords rounding_words(std::uint64_t seed, std::int64_t step, std::int64_t quad) {
  return philox(seed, (static_cast<std::uint64_t>(step) << 38) + static_cast<std::uint64_t>(quad),
                static_cast<std::uint64_t>(RandomStream::stochastic_rounding));
}

// squares[i] = the sum of squares of the gradients of blocks[i] (on the device), in a fixed order: in fp32 over eight
// elements of a thread, in double above. A sum of squares beyond fp32 (a gradient of 1e19) counts as not finite.
void block_squares(double* squares, const float* gradients, const AdamWBlock* blocks, std::int64_t block_count,
                   cudaStream_t stream);
// The norm from the squares [count] of all blocks of a model, added in a fixed order: the order of `order` [count], the
// index of each block's square, or of the squares themselves if it is null. So the bits of the norm do not depend on
// which ranks own the blocks. clip 0: no clipping.
void gradient_norm(GradientNorm* result, const double* squares, const std::int32_t* order, std::int64_t count,
                   float clip, cudaStream_t stream);

// Convert fp32 masters to bf16 parameters and low parts, and back, for loading and saving. [count] each.
void split_masters(__nv_bfloat16* parameters, std::int16_t* low, const float* masters, std::int64_t count,
                   cudaStream_t stream);
void join_masters(float* masters, const __nv_bfloat16* parameters, const std::int16_t* low, std::int64_t count,
                  cudaStream_t stream);

}  // namespace weft::cuda
