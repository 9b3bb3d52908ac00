// Linear layers by cuBLASLt, with one plan per shape.
//
// The weight is as Hugging Face stores it, [OC, C]. Storage type T is float, bf16 or fp16; accumulation is fp32, and T
// = float computes in true fp32, not TF32.
//
// Operands in fp8 (sm_89 and later) are codes with one scale for the whole tensor. fp8 GEMMs sum along contiguous
// elements only, so the gradients need the weight, the input and the gradient of the output transposed. Inputs and
// weights are e4m3, gradients of outputs e5m2; outputs and gradients of inputs are stored in bf16. A tensor core keeps
// about 14 bits of a sum: the forward GEMM accumulates in it throughout (fast accumulation), the gradients add to fp32
// every few instructions. Scales are aligned as matrices are.
//
// A plan is chosen the first time a shape is prepared: cuBLASLt's candidates, all tiles and split-K included, are timed
// alternately on random data, and the fastest one that gives the same bits every time is kept; a later candidate
// replaces an earlier one only if it is at least 1 % faster. Candidates may add in different orders, so the choice is
// remembered (llmc/cuda/op/gemm/matmul_plans.h): timing decides once, and from then on every run gives the same bits. Where
// it cannot be remembered, only candidates with the bits of the first suggestion are eligible.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda/op/gemm/matmul_plans.h"

namespace weft::cuda {

enum class Accumulate { no, yes };  // = or +=

// The GEMMs of a linear layer with N rows, C inputs and OC outputs.
enum class Gemm {
  forward,      // out [N, OC] (+)= x [N, C] W^T, plus bias [OC], plus addend [N, OC]
  input_grad,   // dx [N, C] (+)= dout [N, OC] W
  weight_grad,  // dW [OC, C] (+)= dout^T x, written in fp32
  gram,         // [OC, C] = dout^T x, written in T: with dout = x all dot products of x's columns
};
const char* gemm_name(Gemm gemm);

// An fp8 matrix: its elements are the values of the codes times *scale; both on the device.
struct Fp8Matrix {
  const std::uint8_t* codes = nullptr;
  const float* scale = nullptr;
};
// The version of the library that this process has loaded, as "13.0.2".
std::string cublaslt_version();

struct MatmulShape {
  Gemm gemm = Gemm::forward;
  std::int64_t N = 0, C = 0, OC = 0;
  cudaDataType_t type = CUDA_R_16BF;  // CUDA_R_8F_E4M3: fp8 operands, in e4m3 or e5m2 as described above
  Accumulate accumulate = Accumulate::no;
  bool bias = false;
  bool addend = false;     // Gemm::forward and, in a batch, others; without accumulation
  std::int64_t batch = 1;  // GEMMs at once: see Matmul::batched()

  auto operator<=>(const MatmulShape&) const = default;  // the key of the plan cache
};

class Matmul {
 public:
  // Allocates and owns the workspace for the partial sums of split-K, which only one stream may use at a time.
  // `run_plans`: the plan file in the run directory; empty: none.
  explicit Matmul(cudaStream_t stream, const std::string& run_plans = {});
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  static constexpr std::size_t kWorkspaceBytes = 64 << 20;

  // Chooses the plans of these shapes: remembered ones, or by timing on scratch memory that is freed again. Call it
  // once for all shapes, before the arenas are allocated. A shape that was not prepared uses cuBLASLt's first
  // suggestion.
  void prepare(std::span<const MatmulShape> shapes);
  void prepare(const MatmulShape& shape) { prepare({&shape, 1}); }
  // plans(): the current plans as text, for another process that must compute the same bits. adopt_plans(): replaces
  // the remembered plans by those of another process; Exit::environment if they are for another GPU, driver or
  // cuBLASLt.
  std::string plans() const { return remembered_.text(); }
  void adopt_plans(const std::string& plans) { remembered_.adopt(plans); }

  template <typename T>
  void forward(T* out, const T* x, const T* weight, const T* bias, std::int64_t N, std::int64_t C, std::int64_t OC,
               Accumulate accumulate = Accumulate::no, const T* addend = nullptr);
  template <typename T>
  void input_grad(T* dx, const T* dout, const T* weight, std::int64_t N, std::int64_t C, std::int64_t OC,
                  Accumulate accumulate = Accumulate::no);
  template <typename T>
  void weight_grad(float* dweight, const T* dout, const T* x, std::int64_t N, std::int64_t C, std::int64_t OC,
                   Accumulate accumulate = Accumulate::yes);

  // A batch of GEMMs, out = product * (left right^T, left right or left^T right) + factor * addend, as shape.gemm says: left
  // is x of forward and dout of the gradients, right the weight or x. The matrices of each operand lie behind each other,
  // batch_stride() of their size apart. The addend, unless it is null, has the shape of out; it may be an operand too, out not.
  static constexpr std::int64_t batch_stride(std::int64_t elements) { return (elements + 7) / 8 * 8; }
  template <typename T>
  void batched(const MatmulShape& shape, T* out, const T* left, const T* right, float product = 1,
               const T* addend = nullptr, float factor = 1) {
    run(shape, right, left, nullptr, addend, out, nullptr, nullptr, product, factor);
  }

  // The same in fp8. All sizes are multiples of 16, codes are aligned to 16 bytes.
  // out [N, OC] = x [N, C] W^T, plus addend [N, OC] and bias [OC] unless they are null.
  void forward_fp8(__nv_bfloat16* out, const Fp8Matrix& x, const Fp8Matrix& weight, std::int64_t N, std::int64_t C,
                   std::int64_t OC, const __nv_bfloat16* addend = nullptr, const __nv_bfloat16* bias = nullptr);
  // dx [N, C] = dout [N, OC] W, from the transposed weight [C, OC].
  void input_grad_fp8(__nv_bfloat16* dx, const Fp8Matrix& dout, const Fp8Matrix& weight_transposed, std::int64_t N,
                      std::int64_t C, std::int64_t OC);
  // dW [OC, C] (+)= dout^T x, from the transposed dout [OC, N] and x [C, N].
  void weight_grad_fp8(float* dweight, const Fp8Matrix& dout_transposed, const Fp8Matrix& x_transposed, std::int64_t N,
                       std::int64_t C, std::int64_t OC, Accumulate accumulate);

  // Fills `data` with values uniform in [-1, 1): the power that a GEMM draws, and with it the clock, depends on its
  // data.
  void fill_random(__nv_bfloat16* data, std::int64_t count) const;

  // One line for each shape that was timed: TFLOP/s of the first suggestion and of the plan that was kept.
  const std::vector<std::string>& report() const { return report_; }

 private:
  struct Plan {
    cublasLtMatmulDesc_t descriptor = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
  };
  struct Trial;
  Plan& plan(const MatmulShape& shape);
  Plan make_plan(const MatmulShape& shape) const;
  struct Candidate {  // wrapped, because nvcc 13.0 crashes on a vector of cuBLASLt's unnamed struct
    cublasLtMatmulAlgo_t algorithm;
  };
  std::vector<Candidate> candidates(const Plan& plan) const;
  bool usable(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm) const;
  cublasLtMatmulAlgo_t choose(const MatmulShape& shape);
  void run(const MatmulShape& shape, const void* a, const void* b, const void* bias, const void* addend, void* d,
           const float* a_scale = nullptr, const float* b_scale = nullptr, float product = 1, float factor = 1);

  cudaStream_t stream_;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  MatmulPlans remembered_;
  std::map<MatmulShape, Plan> plans_;
  std::vector<std::string> report_;
};

}  // namespace weft::cuda
