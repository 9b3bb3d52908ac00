// Linear layers by cuBLASLt, with one plan a shape.
//
// The weight is as Hugging Face stores it, [OC, C]. Storage type T is float, bf16 or fp16; accumulation is
// fp32, and T = float computes in true fp32, not TF32.
//
// A plan is chosen the first time a shape is prepared: cuBLASLt's candidates are timed on random data, and
// the fastest of those that give the same bits as its first suggestion is kept. So timing decides speed only,
// never a result: two runs on one type of GPU agree bit for bit although their clocks did not.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace weft::cuda {

enum class Accumulate { no, yes };  // = or +=

// The three products of a linear layer with N rows, C inputs and OC outputs.
enum class Product {
  forward,      // out [N, OC] (+)= x [N, C] W^T, plus bias [OC]
  input_grad,   // dx [N, C] (+)= dout [N, OC] W
  weight_grad,  // dW [OC, C] (+)= dout^T x, written in fp32
};
const char* product_name(Product product);

struct MatmulShape {
  Product product = Product::forward;
  std::int64_t N = 0, C = 0, OC = 0;
  cudaDataType_t type = CUDA_R_16BF;
  Accumulate accumulate = Accumulate::no;
  bool bias = false;

  auto operator<=>(const MatmulShape&) const = default;  // the key of the plan cache
};

class Matmul {
 public:
  // The workspace (split-K partial sums) is allocated here and belongs to this object; one stream uses it at
  // a time.
  explicit Matmul(cudaStream_t stream);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  static constexpr std::size_t kWorkspaceBytes = 64 << 20;

  // Times the candidates of a shape on scratch memory that is freed again. Call it for every shape before the
  // arenas are allocated; a shape that was not prepared runs on the first suggestion.
  void prepare(const MatmulShape& shape);

  template <typename T>
  void forward(T* out, const T* x, const T* weight, const T* bias, std::int64_t N, std::int64_t C, std::int64_t OC,
               Accumulate accumulate = Accumulate::no);
  template <typename T>
  void input_grad(T* dx, const T* dout, const T* weight, std::int64_t N, std::int64_t C, std::int64_t OC,
                  Accumulate accumulate = Accumulate::no);
  template <typename T>
  void weight_grad(float* dweight, const T* dout, const T* x, std::int64_t N, std::int64_t C, std::int64_t OC,
                   Accumulate accumulate = Accumulate::yes);

  // One line a prepared shape: TF/s of the first suggestion and of the plan that was kept.
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
  struct Candidate {  // a struct of our own: nvcc 13.0 crashes on a vector of cuBLASLt's unnamed ones
    cublasLtMatmulAlgo_t algorithm;
  };
  std::vector<Candidate> candidates(const Plan& plan) const;
  void run(const MatmulShape& shape, const void* a, const void* b, const void* bias, void* d);

  cudaStream_t stream_;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<MatmulShape, Plan> plans_;
  std::vector<std::string> report_;
};

}  // namespace weft::cuda
