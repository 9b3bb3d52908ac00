// How attention and RoPE address heads, on both devices: element (batch b, token t, head h, dimension d) of a view is
// data[b * batch_stride + t * token_stride + h * head_stride + d]. One kernel then reads packed Llama rows
// [q heads | k heads | v heads], GPT-NeoX rows [head][q, k, v] and a KV cache alike, without a permuted copy.
#pragma once

#include <cstdint>
#include <type_traits>

#include "llmc/base/host_device.h"
#include "llmc/model/visibility.h"

namespace weft {

template <typename T>
struct HeadViewOf {
  T* data = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;  // in elements

  WEFT_HOST_DEVICE T* at(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return data + b * batch_stride + t * token_stride + h * head_stride;
  }
  // A view to write through is a view to read through.
  template <typename U>
  requires(std::is_same_v<U, const T> && !std::is_const_v<T>) WEFT_HOST_DEVICE operator HeadViewOf<U>() const {
    return {data, batch_stride, token_stride, head_stride};
  }
};

struct AttentionShape {
  std::int64_t B = 0;
  std::int64_t TQ = 0;                   // queries; they are the last TQ of the TK positions
  std::int64_t TK = 0;                   // keys and values, >= TQ
  std::int64_t NH = 0, NKV = 0, HS = 0;  // query head h reads K/V head h / (NH / NKV)
  bool causal = true;
  float scale = 0;                                // 1 / sqrt(HS) in every model here
  std::int64_t window = 0;                        // keys that a query sees, its own included; 0: no limit
  const std::int32_t* document_starts = nullptr;  // [B, TQ] positions, null: one document (Visibility)

  // What the queries of sequence b see.
  WEFT_HOST_DEVICE Visibility visibility(std::int64_t b) const {
    const int queries = static_cast<int>(TQ), keys = static_cast<int>(TK);
    return {keys - queries, keys, causal, static_cast<int>(window),
            document_starts ? document_starts + b * TQ : nullptr};
  }
  // Whether some query may not see all keys before it.
  bool hides_past() const { return document_starts != nullptr || (window > 0 && window < TK); }
};

}  // namespace weft
