// The norms of the residual stream: both LayerNorms of the parallel residual, or one norm. Every block normalizes all
// of x for itself, which is cheaper than sharing the result.
#pragma once

#include "llmc/cuda/fused/consumer.cuh"

namespace weft::cuda::fused {

#if WEFT_BULK_COPY

// This thread's elements of the weights and biases of norm1 and, if `both`, of norm2.
template <typename K>
__device__ __forceinline__ typename Consumer<K>::NormWeights Consumer<K>::load_norms(const Layer& layer,
                                                                                     bool both) const {
  NormWeights n;
  const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    const bool inside = piece(i) * kLaneElements < c.p.C;
    const auto get = [&](const S* from) { return load_early(reinterpret_cast<const uint4*>(from) + piece(i)); };
    n.weight1[i] = inside ? get(layer.norm1_weight) : zero;
    n.bias1[i] = inside ? get(layer.norm1_bias) : zero;
    n.weight2[i] = inside && both ? get(layer.norm2_weight) : zero;
    n.bias2[i] = inside && both ? get(layer.norm2_bias) : zero;
  }
  return n;
}

// Mean and 1 / sqrt(variance + eps) of x. Each warp computes the mean of its own elements and the sum of their squared
// deviations, and those of all warps are combined (Chan et al., "Updating formulae and a pairwise algorithm for
// computing sample variances", 1979): as exact as two passes over all elements, with one barrier. RMSNorm is the same
// with every mean 0. `rms` is a reference so that it occupies no register during the waits.
template <typename K>
__device__ __forceinline__ typename Consumer<K>::Moments Consumer<K>::moments_of(const float (&x)[kInputs],
                                                                                 const bool& rms) {
  const float C = static_cast<float>(c.p.C);
  float own_mean = 0, count = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    const int first = (i * c.p.warps_k + warp_k) * kWarpElements;
    count += static_cast<float>(max(0, min(kWarpElements, c.p.C - first)));
  }
  if (!rms) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kInputs; ++j) sum += x[j];  // elements past the end are 0
    own_mean = count > 0 ? warp_sum(sum) / count : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    const bool inside = piece(i) * kLaneElements < c.p.C;
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      const float d = inside ? x[i * kLaneElements + j] - own_mean : 0.0f;
      squares = fmaf(d, d, squares);
    }
  }
  squares = warp_sum(squares);
  float4* of_warps = c.flags.moments;
  if (lane == 0) of_warps[warp] = make_float4(own_mean, squares, count, 0);
  sync();
  const float4 moments = lane < c.p.warps_k ? of_warps[warp_r * c.p.warps_k + lane] : make_float4(0, 0, 0, 0);
  const float mean = rms ? 0.0f : warp_sum(moments.x * moments.z) / C, off = moments.x - mean;
  return {mean, rsqrtf(warp_sum(fmaf(off * off, moments.z, moments.y)) / C + c.p.eps)};
}

// x becomes norm1(x), other becomes norm2(x).
template <typename K>
__device__ __forceinline__ void Consumer<K>::normalize(const NormWeights& n, float (&x)[kInputs],
                                                       float (&other)[kInputs]) {
  const auto [mean, rstd] = moments_of(x, false);
#pragma unroll
  for (int j = 0; j < kInputs; ++j) x[j] -= mean;
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    float w[kLaneElements], b[kLaneElements];
    widen<S>(n.weight2[i], w);
    widen<S>(n.bias2[i], b);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j)
      other[i * kLaneElements + j] = fmaf(x[i * kLaneElements + j] * rstd, w[j], b[j]);
    widen<S>(n.weight1[i], w);
    widen<S>(n.bias1[i], b);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j)
      x[i * kLaneElements + j] = fmaf(x[i * kLaneElements + j] * rstd, w[j], b[j]);
  }
}

// This thread's elements of one norm's weight and bias; `bias` is null for RMSNorm.
template <typename K>
__device__ __forceinline__ typename Consumer<K>::NormWeight Consumer<K>::load_norm(const S* weight,
                                                                                   const S* bias) const {
  NormWeight n;
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    const bool inside = piece(i) * kLaneElements < c.p.C;
    const auto get = [&](const S* from) { return load_early(reinterpret_cast<const uint4*>(from) + piece(i)); };
    n.weight[i] = inside ? get(weight) : make_uint4(0, 0, 0, 0);
    n.bias[i] = inside && bias != nullptr ? get(bias) : make_uint4(0, 0, 0, 0);
  }
  return n;
}

// x becomes norm(x).
template <typename K>
__device__ __forceinline__ void Consumer<K>::normalize_one(const NormWeight& n, float (&x)[kInputs]) {
  const auto [mean, rstd] = moments_of(x, c.p.rms);
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    float w[kLaneElements], b[kLaneElements];
    widen<S>(n.weight[i], w);
    widen<S>(n.bias[i], b);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      float& value = x[i * kLaneElements + j];
      value = fmaf((value - mean) * rstd, w[j], b[j]);
    }
  }
}

// x becomes norm(x) but for a factor, which norm_factor() has behind the next barrier of the block. RMSNorm divides all
// elements by one number, so a matrix can be multiplied by x times the weights before that is known. LayerNorm is whole, with
// a barrier of its own, and its factor is 1.
template <typename K>
__device__ __forceinline__ void Consumer<K>::normalize_late(const NormWeight& n, int which, float (&x)[kInputs]) {
  if (!c.p.rms) return normalize_one(n, x);
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kInputs; ++j) squares = fmaf(x[j], x[j], squares);  // elements past the end are 0
  squares = warp_sum(squares);
  if (lane == 0) c.flags.squares[which][warp] = squares;
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    float w[kLaneElements];
    widen<S>(n.weight[i], w);
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) x[i * kLaneElements + j] *= w[j];
  }
}
template <typename K>
__device__ __forceinline__ float Consumer<K>::norm_factor(int which) const {
  if (!c.p.rms) return 1;
  float of_warp[kSequentialWarps];  // the first warps_k warps have all of x
#pragma unroll
  for (int w = 0; w < kSequentialWarps; ++w) of_warp[w] = w < c.p.warps_k ? c.flags.squares[which][w] : 0.0f;
  float squares = of_warp[0];
#pragma unroll
  for (int w = 1; w < kSequentialWarps; ++w) squares += of_warp[w];
  return rsqrtf(squares / static_cast<float>(c.p.C) + c.p.eps);
}

#endif  // WEFT_BULK_COPY

}  // namespace weft::cuda::fused
