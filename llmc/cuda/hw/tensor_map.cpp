#include "llmc/cuda/hw/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "llmc/base/error.h"
#include "llmc/cuda/runtime/driver_function.h"

namespace weft::cuda {

CUtensorMap encode_tensor_map(const void* data, CUtensorMapDataType type, std::initializer_list<std::uint64_t> size,
                              std::initializer_list<std::int64_t> stride, std::initializer_list<std::uint32_t> box) {
  static const auto encode = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  constexpr std::size_t kMostDimensions = 5;
  const std::size_t dimensions = size.size();
  if (dimensions < 2 || dimensions > kMostDimensions || stride.size() != dimensions - 1 || box.size() != dimensions)
    fail(Exit::internal, "tensor map: %zu sizes, %zu strides, %zu box sizes", dimensions, stride.size(), box.size());
  cuuint64_t strides[kMostDimensions];
  cuuint32_t steps[kMostDimensions];
  std::fill(std::begin(steps), std::end(steps), 1);
  for (std::size_t i = 0; i + 1 < dimensions; ++i)
    strides[i] = size.begin()[i + 1] == 1 ? 16 : static_cast<cuuint64_t>(stride.begin()[i]);
  cuuint64_t sizes[kMostDimensions];
  std::copy(size.begin(), size.end(), sizes);
  const std::uint32_t columns = box.begin()[0];
  const CUtensorMapSwizzle swizzle = columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
  if (columns != 64 && columns != 32 && columns != 16)
    fail(Exit::internal, "tensor map: boxes of %u columns", static_cast<unsigned>(columns));
  CUtensorMap map;
  const CUresult result = encode(&map, type, static_cast<cuuint32_t>(dimensions), const_cast<void*>(data), sizes,
                                 strides, box.begin(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail(Exit::internal, "tensor map: the driver refuses %zu dimensions of %llu x %llu at %p: error %d", dimensions,
         static_cast<unsigned long long>(sizes[0]), static_cast<unsigned long long>(sizes[1]), data,
         static_cast<int>(result));
  return map;
}

template <typename T>
CUtensorMap encode_head_map(const HeadViewOf<T>& view, std::int64_t B, std::int64_t tokens, std::int64_t heads,
                            std::int64_t HS, int rows, int columns) {
  constexpr bool kBf16 = std::is_same_v<std::remove_const_t<T>, __nv_bfloat16>;
  static_assert(sizeof(T) == 2);
  constexpr std::int64_t bytes = sizeof(T);
  return encode_tensor_map(view.data, kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           {static_cast<std::uint64_t>(HS), static_cast<std::uint64_t>(tokens),
                            static_cast<std::uint64_t>(heads), static_cast<std::uint64_t>(B)},
                           {view.token_stride * bytes, view.head_stride * bytes, view.batch_stride * bytes},
                           {static_cast<std::uint32_t>(columns), static_cast<std::uint32_t>(rows), 1, 1});
}

#define WEFT_INSTANTIATE(T)                                                                                           \
  template CUtensorMap encode_head_map<T>(const HeadViewOf<T>&, std::int64_t, std::int64_t, std::int64_t,             \
                                          std::int64_t, int, int);                                                    \
  template CUtensorMap encode_head_map<const T>(const HeadViewOf<const T>&, std::int64_t, std::int64_t, std::int64_t, \
                                                std::int64_t, int, int);
WEFT_INSTANTIATE(__nv_bfloat16)
WEFT_INSTANTIATE(__half)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
