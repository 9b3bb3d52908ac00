// How attention and RoPE address heads: element (batch b, token t, head h, dimension d) of a view is
// data[b * batch_stride + t * token_stride + h * head_stride + d]. One kernel then reads packed Llama rows
// [q heads | k heads | v heads], GPT-NeoX rows [head][q, k, v] and a KV cache alike, without a permuted copy.
#pragma once

#include <cstdint>

namespace weft::cpu {

template <typename T>
struct HeadViewOf {
  T* data = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;  // in elements

  T* at(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return data + b * batch_stride + t * token_stride + h * head_stride;
  }
  operator HeadViewOf<const T>() const { return {data, batch_stride, token_stride, head_stride}; }
};

using HeadView = HeadViewOf<float>;
using ConstHeadView = HeadViewOf<const float>;

}  // namespace weft::cpu
