// Keeps the instructions of softmax before the wait for a GEMM that runs meanwhile.
#pragma once

namespace weft::cuda {

// A predicated store that never executes. It depends on `sum`, a sum of exponentials, so the assembler cannot move what
// follows, the wait for a GEMM, before them. (The sum is never negative, but the assembler cannot know that.) shared:
// any shared-memory address.
__device__ inline void hold_back(float sum, unsigned shared) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(sum), "r"(shared)
               : "memory");
}

}  // namespace weft::cuda
