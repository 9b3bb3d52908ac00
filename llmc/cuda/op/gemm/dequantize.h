// A quantised matrix as floats, for GEMMs of many rows, whose time it hardly changes: reads a matrix once and writes it once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "llmc/model/formats/weight_format.h"

namespace weft::cuda {

// out [rows, K]: the values of `matrix`, which lies on the device as in a file, each rounded to T once; T is float or bf16. In
// float these are the values of ModelFile::read_values(). Exit::internal for a format without kernels.
template <typename T>
void dequantize(T* out, const QuantizedMatrix& matrix, std::int64_t rows, std::int64_t K, cudaStream_t stream);

}  // namespace weft::cuda
