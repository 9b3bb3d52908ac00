// The elements of an array that a thread of a memory-bound kernel holds: a few consecutive ones, moved by accesses of
// 16 or 8 bytes if size and alignment allow it, otherwise a single one. A kernel is written once and instantiated for
// both.
#pragma once

#include <type_traits>

#include "llmc/cuda/hw/common.cuh"

namespace weft::cuda {

// Prefetches the cache line of `address` to L2.
__device__ inline void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// kCount consecutive elements in their storage type: 16-bit values take half the registers of their fp32 values until
// they are used.
template <typename T, int kCount>
struct Elements {
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static constexpr bool kPacked = kBytes % 8 == 0;
  using Word = std::conditional_t<kBytes % 16 == 0, int4, int2>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  static_assert(kPacked || kCount == 1);

  alignas(kPacked ? sizeof(Word) : sizeof(T)) T value[kCount];

  __device__ void load(const T* address) {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(value)[i] = reinterpret_cast<const Word*>(address)[i];
    } else {
      value[0] = *address;
    }
  }
  // One store instruction a word: the compiler would split a plain assignment of a word whose halves were computed
  // separately into several stores.
  __device__ void store(T* address) const {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        __stwb(reinterpret_cast<Word*>(address) + i, reinterpret_cast<const Word*>(value)[i]);
    } else {
      *address = value[0];
    }
  }
  // Evict-first: for data that is not read again soon, so that it does not displace data that is.
  __device__ void store_streaming(T* address) const {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        __stcs(reinterpret_cast<Word*>(address) + i, reinterpret_cast<const Word*>(value)[i]);
    } else {
      store(address);
    }
  }
  __device__ void clear() {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(value)[i] = Word{};  // +0 in every type
    } else {
      value[0] = from_float<T>(0.0f);
    }
  }

  // 16-bit values are extracted from 32-bit registers: read one by one, the compiler gives each a register of its own.
  __device__ float get(int i) const {
    if constexpr (kPacked && sizeof(T) == 2) {
      const unsigned word = reinterpret_cast<const unsigned*>(value)[i / 2];
      if constexpr (std::is_same_v<T, bf16>) {
        return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
      } else {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? word & 0xFFFFu : word >> 16)));
      }
    } else {
      return to_float(value[i]);
    }
  }
  // Rounds 16-bit values two at a time: one instruction produces both halves of a register.
  __device__ void set(const float (&from)[kCount]) {
#pragma unroll
    for (int i = 0; i + 1 < kCount; i += 2) set_pair(i, from[i], from[i + 1]);
    if constexpr (kCount == 1) value[0] = from_float<T>(from[0]);
  }

 private:
  __device__ void set_pair(int i, float a, float b) {
    if constexpr (std::is_same_v<T, bf16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
      reinterpret_cast<unsigned*>(value)[i / 2] = *reinterpret_cast<const unsigned*>(&pair);
    } else if constexpr (std::is_same_v<T, fp16>) {
      const __half2 pair = __floats2half2_rn(a, b);
      reinterpret_cast<unsigned*>(value)[i / 2] = *reinterpret_cast<const unsigned*>(&pair);
    } else {
      value[i] = a;
      value[i + 1] = b;
    }
  }
};

// to [C] = scale from [C], by all kThreads threads of a block.
template <int kThreads, int kCount, typename To, typename From>
__device__ void scale_row(To* to, const From* from, std::int64_t C, float scale) {
  for (std::int64_t c = threadIdx.x * kCount; c < C; c += kThreads * kCount) {
    Elements<From, kCount> row;
    row.load(from + c);
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = scale * row.get(i);
    Elements<To, kCount> result;
    result.set(values);
    result.store(to + c);
  }
}

// Calls launch(count) with the number of elements of a thread as a compile-time constant: kWide if accesses of that
// width are aligned, else 1.
template <int kWide, typename Launch>
void with_count(bool aligned, const Launch& launch) {
  if (aligned) {
    launch(std::integral_constant<int, kWide>{});
  } else {
    launch(std::integral_constant<int, 1>{});
  }
}

template <typename... Pointers>
bool aligned_to_16(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace weft::cuda
