// 16 bytes of an array as one value. A load or store is one LDG.128 or STG.128 a thread: a warp moves 512 contiguous
// bytes, four cache lines. Addresses are aligned to 16 bytes.
#pragma once

#include <cuda_runtime.h>

namespace weft::cuda {

template <typename T>
struct alignas(16) Pack {
  static constexpr int size = 16 / static_cast<int>(sizeof(T));
  T value[size];
};

template <typename T>
__device__ inline Pack<T> load_pack(const T* address) {
  Pack<T> pack;
  *reinterpret_cast<int4*>(&pack) = *reinterpret_cast<const int4*>(address);
  return pack;
}
// Evict-first: for data that is read once, so that it does not displace data that will be read again.
template <typename T>
__device__ inline Pack<T> load_pack_streaming(const T* address) {
  Pack<T> pack;
  *reinterpret_cast<int4*>(&pack) = __ldcs(reinterpret_cast<const int4*>(address));
  return pack;
}
template <typename T>
__device__ inline void store_pack(T* address, const Pack<T>& pack) {
  *reinterpret_cast<int4*>(address) = *reinterpret_cast<const int4*>(&pack);
}

}  // namespace weft::cuda
