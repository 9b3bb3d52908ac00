// cuBLASLt thinks in columns: a row-major [N, C] is its column-major [C, N] with leading dimension C. So
//   forward      out^T [OC, N] = (W as [C, OC])^T  (x as [C, N])
//   input_grad   dx^T  [C, N]  = (W as [C, OC])    (dout as [OC, N])
//   weight_grad  dW^T  [C, OC] = (x as [C, N])     (dout as [OC, N])^T
#include "llmc/cuda/matmul.h"

#include <algorithm>

#include "llmc/cuda/common.cuh"
#include "llmc/cuda/stream.h"

namespace weft::cuda {

namespace {

void check_blas(cublasStatus_t status, const char* action) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const bool memory = status == CUBLAS_STATUS_ALLOC_FAILED;
  fail(memory ? Exit::resources : Exit::environment, "%s: %s", action, cublasLtGetStatusString(status));
}

template <typename T>
constexpr cudaDataType_t data_type();
template <>
constexpr cudaDataType_t data_type<float>() {
  return CUDA_R_32F;
}
template <>
constexpr cudaDataType_t data_type<bf16>() {
  return CUDA_R_16BF;
}
template <>
constexpr cudaDataType_t data_type<fp16>() {
  return CUDA_R_16F;
}

std::size_t type_bytes(cudaDataType_t type) {
  return type == CUDA_R_32F ? 4 : 2;
}

// The matrices of a product as cuBLASLt sees them.
struct Columns {
  std::int64_t a_rows, a_columns, b_rows, b_columns, d_rows, d_columns;
  cublasOperation_t a_operation, b_operation;
  cudaDataType_t d_type;
};

Columns columns(const MatmulShape& s) {
  switch (s.product) {
    case Product::forward:
      return {s.C, s.OC, s.C, s.N, s.OC, s.N, CUBLAS_OP_T, CUBLAS_OP_N, s.type};
    case Product::input_grad:
      return {s.C, s.OC, s.OC, s.N, s.C, s.N, CUBLAS_OP_N, CUBLAS_OP_N, s.type};
    case Product::weight_grad:
      return {s.C, s.N, s.OC, s.N, s.C, s.OC, CUBLAS_OP_N, CUBLAS_OP_T, CUDA_R_32F};
  }
  fail(Exit::internal, "matmul: unknown product");
}

__device__ std::uint32_t hash(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// One operand of a product, column-major [rows, columns], with K the length of the sums.
struct Operand {
  std::int64_t rows, columns, K;
  bool k_is_row;  // which index runs over the sum
  bool second_half_negated;
  std::uint32_t seed;
};

// Data for two purposes.
//
// For timing: uniform in [-1, 1), because the power a product draws, and with it the clock, depends on its data.
//
// For comparing algorithms: numbers of very different sizes whose products cancel, the second half of every sum being
// minus the first. The exact result is 0, so what comes out is rounding noise alone, and it differs as soon as the order
// of the additions does. On ordinary data a 16-bit result hides another order almost always.
template <typename T>
__global__ void fill_kernel(T* out, Operand operand, bool cancelling) {
  const std::int64_t count = operand.rows * operand.columns, stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    if (!cancelling) {
      const std::uint32_t bits = hash(static_cast<std::uint32_t>(i) + operand.seed);
      out[i] = from_float<T>(static_cast<float>(static_cast<int>(bits >> 16) - 32768) / 32768.0f);
      continue;
    }
    const std::int64_t row = i % operand.rows, column = i / operand.rows, half = operand.K / 2;
    const std::int64_t k = operand.k_is_row ? row : column, other = operand.k_is_row ? column : row;
    const bool second = k >= half;
    const std::uint32_t pair = static_cast<std::uint32_t>(second ? k - half : k);
    const std::uint32_t bits = hash(pair * 2654435761u + hash(static_cast<std::uint32_t>(other) + operand.seed));
    const float magnitude = ldexpf(1.0f + static_cast<float>(bits & 127) / 128.0f, -static_cast<int>((bits >> 7) % 12));
    const bool negative = ((bits >> 31) != 0) != (second && operand.second_half_negated);
    out[i] = from_float<T>(k >= 2 * half ? 0.0f : negative ? -magnitude : magnitude);
  }
}

void fill(void* out, cudaDataType_t type, const Operand& operand, bool cancelling, cudaStream_t stream) {
  constexpr int kBlocks = 1024, kThreads = 256;
  if (type == CUDA_R_32F) fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<float*>(out), operand, cancelling);
  if (type == CUDA_R_16BF) fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<bf16*>(out), operand, cancelling);
  if (type == CUDA_R_16F) fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<fp16*>(out), operand, cancelling);
  check_launch("fill");
}

__global__ void count_differences_kernel(const std::uint32_t* a, const std::uint32_t* b, std::int64_t words,
                                         unsigned* differences) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  bool different = false;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    different |= a[i] != b[i];
  }
  if (different) atomicOr(differences, 1u);  // order-free: only zero or not matters
}

// Device memory for the time of one measurement.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : bytes_(bytes) { check(cudaMalloc(&data_, bytes), "matmul: scratch memory"); }
  ~Scratch() { cudaFree(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace

const char* product_name(Product product) {
  return product == Product::forward ? "forward" : product == Product::input_grad ? "input grad" : "weight grad";
}

Matmul::Matmul(cudaStream_t stream) : stream_(stream) {
  check_blas(cublasLtCreate(&handle_), "cuBLASLt");
  check(cudaMalloc(&workspace_, kWorkspaceBytes), "cuBLASLt workspace");
}

Matmul::~Matmul() {
  for (auto& [shape, plan] : plans_) {
    cublasLtMatmulDescDestroy(plan.descriptor);
    cublasLtMatrixLayoutDestroy(plan.a);
    cublasLtMatrixLayoutDestroy(plan.b);
    cublasLtMatrixLayoutDestroy(plan.d);
  }
  cudaFree(workspace_);
  cublasLtDestroy(handle_);
}

Matmul::Plan Matmul::make_plan(const MatmulShape& shape) const {
  const Columns c = columns(shape);
  Plan plan;
  check_blas(cublasLtMatmulDescCreate(&plan.descriptor, CUBLAS_COMPUTE_32F, CUDA_R_32F), "matmul descriptor");
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulDescSetAttribute(plan.descriptor, attribute, &value, sizeof value), "matmul descriptor");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, c.a_operation);
  set(CUBLASLT_MATMUL_DESC_TRANSB, c.b_operation);
  if (shape.bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  const auto layout = [](cublasLtMatrixLayout_t* out, cudaDataType_t type, std::int64_t rows, std::int64_t cols) {
    check_blas(
        cublasLtMatrixLayoutCreate(out, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), rows),
        "matmul layout");
  };
  layout(&plan.a, shape.type, c.a_rows, c.a_columns);
  layout(&plan.b, shape.type, c.b_rows, c.b_columns);
  layout(&plan.d, c.d_type, c.d_rows, c.d_columns);
  const std::vector<Candidate> known = candidates(plan);
  if (known.empty()) {
    fail(Exit::environment, "matmul %s N %lld C %lld OC %lld: cuBLASLt knows no algorithm", product_name(shape.product),
         static_cast<long long>(shape.N), static_cast<long long>(shape.C), static_cast<long long>(shape.OC));
  }
  plan.algorithm = known[0].algorithm;
  return plan;
}

// Best first, by cuBLASLt's own estimate.
std::vector<Matmul::Candidate> Matmul::candidates(const Plan& plan) const {
  constexpr int kMost = 24;
  cublasLtMatmulPreference_t preference = nullptr;
  check_blas(cublasLtMatmulPreferenceCreate(&preference), "matmul preference");
  const std::size_t workspace = kWorkspaceBytes;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                       sizeof workspace);
  cublasLtMatmulHeuristicResult_t results[kMost];
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.descriptor, plan.a, plan.b, plan.d, plan.d,
                                                               preference, kMost, results, &found);
  cublasLtMatmulPreferenceDestroy(preference);
  std::vector<Candidate> list;
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; ++i) list.push_back({results[i].algo});
  return list;
}

Matmul::Plan& Matmul::plan(const MatmulShape& shape) {
  const auto found = plans_.find(shape);
  if (found != plans_.end()) return found->second;
  return plans_.emplace(shape, make_plan(shape)).first->second;
}

void Matmul::run(const MatmulShape& shape, const void* a, const void* b, const void* bias, void* d) {
  if (shape.N == 0) return;
  Plan& chosen = plan(shape);
  if (shape.bias) {
    check_blas(cublasLtMatmulDescSetAttribute(chosen.descriptor, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
               "matmul bias");
  }
  const float alpha = 1, beta = shape.accumulate == Accumulate::yes ? 1.0f : 0.0f;
  check_blas(cublasLtMatmul(handle_, chosen.descriptor, &alpha, a, chosen.a, b, chosen.b, &beta, d, chosen.d, d,
                            chosen.d, &chosen.algorithm, workspace_, kWorkspaceBytes, stream_),
             product_name(shape.product));
}

// Operands and results of one shape, for the time of its measurement.
struct Matmul::Trial {
  Matmul& matmul;
  MatmulShape shape;
  Operand a_operand, b_operand, bias_operand;
  Scratch a, b, bias, expected, result, differences;

  static std::size_t result_bytes(const Columns& c) {
    return (static_cast<std::size_t>(c.d_rows * c.d_columns) * type_bytes(c.d_type) + 3) / 4 * 4;
  }
  Trial(Matmul& matmul_, const MatmulShape& shape_, const Columns& c)
      : matmul(matmul_),
        shape(shape_),
        a_operand{c.a_rows,
                  c.a_columns,
                  c.a_operation == CUBLAS_OP_T ? c.a_rows : c.a_columns,
                  c.a_operation == CUBLAS_OP_T,
                  true,
                  1},
        b_operand{c.b_rows,
                  c.b_columns,
                  c.b_operation == CUBLAS_OP_N ? c.b_rows : c.b_columns,
                  c.b_operation == CUBLAS_OP_N,
                  false,
                  7},
        bias_operand{shape.OC, 1, shape.OC, true, false, 13},
        a(static_cast<std::size_t>(c.a_rows * c.a_columns) * type_bytes(shape.type)),
        b(static_cast<std::size_t>(c.b_rows * c.b_columns) * type_bytes(shape.type)),
        bias(static_cast<std::size_t>(shape.OC) * type_bytes(shape.type)),
        expected(result_bytes(c)),
        result(result_bytes(c)),
        differences(sizeof(unsigned)) {}

  void fill_operands(bool cancelling) const {
    fill(a.data(), shape.type, a_operand, cancelling, matmul.stream_);
    fill(b.data(), shape.type, b_operand, cancelling, matmul.stream_);
    fill(bias.data(), shape.type, bias_operand, false, matmul.stream_);
    if (cancelling) clear(bias);  // it would hide the noise
  }
  void clear(const Scratch& scratch) const {
    check(cudaMemsetAsync(scratch.data(), 0, scratch.bytes(), matmul.stream_), "matmul: clear");
  }
  void run(const Scratch& out) const { matmul.run(shape, a.data(), b.data(), bias.data(), out.data()); }

  // Whether the algorithm that the plan now holds gives the bits of `expected`.
  bool agrees() const {
    clear(result);
    clear(differences);
    run(result);
    count_differences_kernel<<<512, 256, 0, matmul.stream_>>>(
        static_cast<const std::uint32_t*>(expected.data()), static_cast<const std::uint32_t*>(result.data()),
        static_cast<std::int64_t>(result.bytes() / 4), static_cast<unsigned*>(differences.data()));
    check_launch("count_differences");
    unsigned different = 0;
    check(cudaMemcpyAsync(&different, differences.data(), sizeof different, cudaMemcpyDeviceToHost, matmul.stream_),
          "matmul: compare");
    check(cudaStreamSynchronize(matmul.stream_), "matmul: candidate");
    return different == 0;
  }
  float median_ms() const {
    constexpr int kWarmups = 1, kRepeats = 5;
    const Event start, stop;
    std::vector<float> times;
    for (int i = 0; i < kWarmups + kRepeats; ++i) {
      check(cudaEventRecord(start, matmul.stream_), "event");
      run(result);
      check(cudaEventRecord(stop, matmul.stream_), "event");
      check(cudaEventSynchronize(stop), "matmul: timing");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, start, stop), "event");
      if (i >= kWarmups) times.push_back(ms);
    }
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    return times[kRepeats / 2];
  }
};

void Matmul::prepare(const MatmulShape& shape) {
  if (plans_.contains(shape)) return;
  Plan& chosen = plan(shape);
  const cublasLtMatmulAlgo_t first = chosen.algorithm;
  const Trial trial(*this, shape, columns(shape));

  trial.fill_operands(true);
  trial.clear(trial.expected);
  trial.run(trial.expected);
  std::vector<Candidate> equal;
  for (const Candidate& candidate : candidates(chosen)) {
    chosen.algorithm = candidate.algorithm;
    if (trial.agrees()) equal.push_back(candidate);
  }
  chosen.algorithm = first;
  trial.fill_operands(false);
  const float first_ms = trial.median_ms();
  float best_ms = first_ms;
  cublasLtMatmulAlgo_t best = first;
  for (const Candidate& candidate : equal) {
    chosen.algorithm = candidate.algorithm;
    const float ms = trial.median_ms();
    if (ms < best_ms) {
      best_ms = ms;
      best = candidate.algorithm;
    }
  }
  chosen.algorithm = best;
  const double flops =
      2.0 * static_cast<double>(shape.N) * static_cast<double>(shape.C) * static_cast<double>(shape.OC);
  report_.push_back(format("%-11s N %-6lld C %-6lld OC %-6lld  %6.1f us  %5.0f TF/s (first suggestion %5.0f)",
                           product_name(shape.product), static_cast<long long>(shape.N),
                           static_cast<long long>(shape.C), static_cast<long long>(shape.OC), best_ms * 1e3,
                           flops / best_ms * 1e-9, flops / first_ms * 1e-9));
}

template <typename T>
void Matmul::forward(T* out, const T* x, const T* weight, const T* bias, std::int64_t N, std::int64_t C,
                     std::int64_t OC, Accumulate accumulate) {
  run({Product::forward, N, C, OC, data_type<T>(), accumulate, bias != nullptr}, weight, x, bias, out);
}

template <typename T>
void Matmul::input_grad(T* dx, const T* dout, const T* weight, std::int64_t N, std::int64_t C, std::int64_t OC,
                        Accumulate accumulate) {
  run({Product::input_grad, N, C, OC, data_type<T>(), accumulate, false}, weight, dout, nullptr, dx);
}

template <typename T>
void Matmul::weight_grad(float* dweight, const T* dout, const T* x, std::int64_t N, std::int64_t C, std::int64_t OC,
                         Accumulate accumulate) {
  run({Product::weight_grad, N, C, OC, data_type<T>(), accumulate, false}, x, dout, nullptr, dweight);
}

#define WEFT_INSTANTIATE(T)                                                                                          \
  template void Matmul::forward<T>(T*, const T*, const T*, const T*, std::int64_t, std::int64_t, std::int64_t,       \
                                   Accumulate);                                                                      \
  template void Matmul::input_grad<T>(T*, const T*, const T*, std::int64_t, std::int64_t, std::int64_t, Accumulate); \
  template void Matmul::weight_grad<T>(float*, const T*, const T*, std::int64_t, std::int64_t, std::int64_t,         \
                                       Accumulate);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
