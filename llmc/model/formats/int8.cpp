#include "llmc/model/formats/int8.h"

namespace weft {

void dequantize_int8(float* out, const QuantizedMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t K) {
  const auto* q = static_cast<const std::int8_t*>(matrix.data) + first * K;
  for (std::int64_t i = 0; i < (last - first) * K; ++i) out[i] = static_cast<float>(q[i]);
}

}  // namespace weft
