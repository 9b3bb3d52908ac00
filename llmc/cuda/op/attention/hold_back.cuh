// The order of the instructions of softmax and of a wait for GEMMs that run beside it.
#pragma once

namespace weft::cuda {

// A store that never happens: it keeps the assembler from putting what follows, the wait for a GEMM, in front of the exponentials of
// which `sum` is a sum. (Such sums are not negative, but only we know.) shared: any address of shared memory.
__device__ inline void hold_back(float sum, unsigned shared) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(sum), "r"(shared)
               : "memory");
}

}  // namespace weft::cuda
