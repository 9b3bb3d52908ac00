// The formats of quantised weights for which kernels are compiled. A format is a type with
//
//   kType, kGrouped, kOfHead    as in WeightFormat
//   kBits                       of q: 4 or 8
// for op/gemm/quantized_matmul.cuh:
//   kFlip                       bits of q that are stored inverted
//   Group<T>                    scale and zero point of a row's group, from their word; NoGroup without groups
//   convert<T>(out, word, group) a word as pairs of T: out[i] has its elements i and i + 16 / kBits. Exact, or rounded once
//                               where the group's scale is in it
// for fused/quantized_rows.cuh:
//   kTiles                      tiles of 8 rows of a warp in a stage
//   kIntegers                   whether integer mma multiplies: by four digits in 8 bits, else by three in fp16
//   kDigitBits                  activations are scaled so that the largest is below 2^kDigitBits
//   fixed_point(x, half, j, up) the integer of which four digits are made (kIntegers)
//   multiply(c, w, b)           c += a group's weights times its digits
//   sum_of_group(b)             of a group's activations, in digits (kGrouped)
#pragma once

#include "llmc/base/error.h"
#include "llmc/cuda/formats/fp8.cuh"
#include "llmc/cuda/formats/int4.cuh"
#include "llmc/cuda/formats/int8.cuh"

namespace weft::cuda {

template <typename... Formats>
struct FormatList {};
using WeightFormats = FormatList<Int8, Int4, Fp8>;
using HeadFormat = Int8;  // the one that a head may have
static_assert(HeadFormat::kOfHead);

// call.operator()<Format>() with the format that has this dtype. Exit::internal if there is none.
template <typename Call, typename First, typename... Others>
auto for_format(DType dtype, const Call& call, FormatList<First, Others...>) {
  if (dtype == First::kType) return call.template operator()<First>();
  if constexpr (sizeof...(Others) > 0) {
    return for_format(dtype, call, FormatList<Others...>{});
  } else {
    fail(Exit::internal, "no kernel computes with weights in %s", dtype_name(dtype));
  }
}
template <typename Call>
auto for_format(DType dtype, const Call& call) {
  return for_format(dtype, call, WeightFormats{});
}

}  // namespace weft::cuda
