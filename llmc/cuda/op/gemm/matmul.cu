// cuBLASLt's matrices are column-major: a row-major [N, C] is its column-major [C, N] with leading dimension C. So
//   forward      out^T [OC, N] = (W as [C, OC])^T  (x as [C, N])
//   input_grad   dx^T  [C, N]  = (W as [C, OC])    (dout as [OC, N])
//   weight_grad  dW^T  [C, OC] = (x as [C, N])     (dout as [OC, N])^T, and gram likewise
// In fp8 the first factor is always transposed and the second never, since the sum runs along the columns of both. So
// the gradients take W, x and dout transposed: W^T as [OC, C], x^T as [N, C], dout^T as [N, OC].
#include "llmc/cuda/op/gemm/matmul.h"

#include <cuda_fp8.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "llmc/cuda/hw/common.cuh"
#include "llmc/cuda/runtime/stream.h"

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
  const bool fp8 = type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
  return type == CUDA_R_32F ? 4 : fp8 ? 1 : 2;
}

// The matrices of a GEMM as cuBLASLt sees them.
struct ColumnMajor {
  std::int64_t a_rows, a_columns, b_rows, b_columns, d_rows, d_columns;
  cublasOperation_t a_operation, b_operation;
  cudaDataType_t d_type, a_type, b_type;
};

bool in_fp8(const MatmulShape& s) {
  return s.type == CUDA_R_8F_E4M3;
}

cudaDataType_t bias_type(const MatmulShape& s) {
  return in_fp8(s) ? CUDA_R_16BF : s.type;
}

ColumnMajor fp8_columns(const MatmulShape& s) {
  constexpr cudaDataType_t kInput = CUDA_R_8F_E4M3, kGradient = CUDA_R_8F_E5M2;
  switch (s.gemm) {
    case Gemm::forward:
      return {s.C, s.OC, s.C, s.N, s.OC, s.N, CUBLAS_OP_T, CUBLAS_OP_N, CUDA_R_16BF, kInput, kInput};
    case Gemm::input_grad:
      return {s.OC, s.C, s.OC, s.N, s.C, s.N, CUBLAS_OP_T, CUBLAS_OP_N, CUDA_R_16BF, kInput, kGradient};
    case Gemm::weight_grad:
      return {s.N, s.C, s.N, s.OC, s.C, s.OC, CUBLAS_OP_T, CUBLAS_OP_N, CUDA_R_32F, kInput, kGradient};
    case Gemm::gram:
      break;
  }
  fail(Exit::internal, "matmul: a GEMM that has no fp8");
}

ColumnMajor columns(const MatmulShape& s) {
  if (in_fp8(s)) return fp8_columns(s);
  switch (s.gemm) {
    case Gemm::forward:
      return {s.C, s.OC, s.C, s.N, s.OC, s.N, CUBLAS_OP_T, CUBLAS_OP_N, s.type, s.type, s.type};
    case Gemm::input_grad:
      return {s.C, s.OC, s.OC, s.N, s.C, s.N, CUBLAS_OP_N, CUBLAS_OP_N, s.type, s.type, s.type};
    case Gemm::weight_grad:
      return {s.C, s.N, s.OC, s.N, s.C, s.OC, CUBLAS_OP_N, CUBLAS_OP_T, CUDA_R_32F, s.type, s.type};
    case Gemm::gram:
      return {s.C, s.N, s.OC, s.N, s.C, s.OC, CUBLAS_OP_N, CUBLAS_OP_T, s.type, s.type, s.type};
  }
  fail(Exit::internal, "matmul: unknown GEMM");
}

__device__ std::uint32_t hash(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// One operand of a GEMM, column-major [rows, columns], with K the length of the sums.
struct Operand {
  std::int64_t rows, columns, K;
  bool k_is_row;  // whether the row index runs over the sum
  bool second_half_negated;
  std::uint32_t seed;
};

// uniform: in [-1, 1), for timing, because the power that a GEMM draws, and with it the clock, depends on its data.
//
// The others are for comparing algorithms. many_magnitudes: numbers of very different sizes, so that even short sums
// are rounded. cancelling: such numbers, with the second half of every sum the negative of the first. The exact result
// is 0, so the computed one is rounding noise alone and differs as soon as the order of additions differs. On ordinary
// data the rounding to 16 bits nearly always hides a different order.
enum class Data { uniform, many_magnitudes, cancelling };

// Converts to the operand's type; fp8 GEMMs are timed on fp8 codes.
template <typename T>
__device__ T filled(float value) {
  if constexpr (sizeof(T) == 1) {
    return T(value);
  } else {
    return from_float<T>(value);
  }
}
template <typename T>
__global__ void fill_kernel(T* out, Operand operand, Data data) {
  const std::int64_t count = operand.rows * operand.columns, stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    if (data == Data::uniform) {
      const std::uint32_t bits = hash(static_cast<std::uint32_t>(i) + operand.seed);
      out[i] = filled<T>(static_cast<float>(static_cast<int>(bits >> 16) - 32768) / 32768.0f);
      continue;
    }
    const std::int64_t row = i % operand.rows, column = i / operand.rows, half = operand.K / 2;
    const std::int64_t k = operand.k_is_row ? row : column, other = operand.k_is_row ? column : row;
    const bool second = k >= half;
    const std::uint32_t pair = static_cast<std::uint32_t>(data == Data::cancelling && second ? k - half : k);
    const std::uint32_t bits = hash(pair * 2654435761u + hash(static_cast<std::uint32_t>(other) + operand.seed));
    const float magnitude = ldexpf(1.0f + static_cast<float>(bits & 127) / 128.0f, -static_cast<int>((bits >> 7) % 12));
    const bool negative = ((bits >> 31) != 0) != (data == Data::cancelling && second && operand.second_half_negated);
    out[i] = filled<T>(data == Data::cancelling && k >= 2 * half ? 0.0f : negative ? -magnitude : magnitude);
  }
}

void fill(void* out, cudaDataType_t type, const Operand& operand, Data kind, cudaStream_t stream) {
  constexpr int kBlocks = 1024, kThreads = 256;
  if (type == CUDA_R_32F) fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<float*>(out), operand, kind);
  if (type == CUDA_R_16BF) fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<bf16*>(out), operand, kind);
  if (type == CUDA_R_8F_E4M3) {
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__nv_fp8_e4m3*>(out), operand, kind);
  }
  if (type == CUDA_R_8F_E5M2) {
    fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<__nv_fp8_e5m2*>(out), operand, kind);
  }
  if (type == CUDA_R_16F) fill_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<fp16*>(out), operand, kind);
  check_launch("fill");
}

__global__ void any_difference_kernel(const std::uint32_t* a, const std::uint32_t* b, std::int64_t words,
                                      unsigned* differences) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  bool different = false;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    different |= a[i] != b[i];
  }
  if (different) atomicOr(differences, 1u);  // the order of the atomics does not matter: the flag is zero or one
}

// The name under which a plan is remembered.
std::string gemm_key(const MatmulShape& s) {
  const char* type = s.type == CUDA_R_32F ? "fp32" : s.type == CUDA_R_16BF ? "bf16" : in_fp8(s) ? "fp8" : "fp16";
  const std::string batch = s.batch > 1 ? format(" batch %lld", static_cast<long long>(s.batch)) : std::string();
  return format("%s N %lld C %lld OC %lld %s%s%s%s%s", gemm_name(s.gemm), static_cast<long long>(s.N),
                static_cast<long long>(s.C), static_cast<long long>(s.OC), type,
                s.accumulate == Accumulate::yes ? " accumulate" : "", s.bias ? " bias" : "", s.addend ? " addend" : "",
                batch.c_str());
}

// Everything that the meaning of a remembered algorithm depends on.
std::string library_identity() {
  int device = 0, driver = 0;
  check(cudaGetDevice(&device), "GPU");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "GPU");
  cudaDriverGetVersion(&driver);
  return format("%s, %d multiprocessors, driver %d, cuBLASLt %zu", properties.name, properties.multiProcessorCount,
                driver, cublasLtGetVersion());
}

StoredAlgorithm stored(const cublasLtMatmulAlgo_t& algorithm) {
  static_assert(sizeof(StoredAlgorithm) == sizeof algorithm);
  StoredAlgorithm result;
  std::memcpy(result.data(), &algorithm, sizeof algorithm);
  return result;
}
cublasLtMatmulAlgo_t restored(const StoredAlgorithm& words) {
  cublasLtMatmulAlgo_t algorithm;
  std::memcpy(&algorithm, words.data(), sizeof algorithm);
  return algorithm;
}

// out[0] and out[1]: the bits of max |a| and of max |a - b|, which order like the numbers; a NaN is the largest.
template <typename T>
__global__ void largest_difference_kernel(const T* a, const T* b, std::int64_t count, unsigned* out) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  unsigned value = 0, difference = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    value = max(value, __float_as_uint(fabsf(to_float(a[i]))));
    difference = max(difference, __float_as_uint(fabsf(to_float(a[i]) - to_float(b[i]))));
  }
  atomicMax(&out[0], value);
  atomicMax(&out[1], difference);
}

// Device memory for the duration of one measurement.
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

std::string cublaslt_version() {
  const std::size_t number = cublasLtGetVersion();
  return format("%zu.%zu.%zu", number / 10000, number / 100 % 100, number % 100);
}

const char* gemm_name(Gemm gemm) {
  return gemm == Gemm::forward      ? "forward"
         : gemm == Gemm::input_grad ? "input grad"
         : gemm == Gemm::gram       ? "gram"
                                    : "weight grad";
}

Matmul::Matmul(cudaStream_t stream, const std::string& run_plans)
    : stream_(stream), remembered_(library_identity(), run_plans) {
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
  const ColumnMajor c = columns(shape);
  Plan plan;
  check_blas(cublasLtMatmulDescCreate(&plan.descriptor, CUBLAS_COMPUTE_32F, CUDA_R_32F), "matmul descriptor");
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulDescSetAttribute(plan.descriptor, attribute, &value, sizeof value), "matmul descriptor");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, c.a_operation);
  set(CUBLASLT_MATMUL_DESC_TRANSB, c.b_operation);
  if (shape.bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  const auto layout = [&](cublasLtMatrixLayout_t* out, cudaDataType_t type, std::int64_t rows, std::int64_t cols) {
    check_blas(
        cublasLtMatrixLayoutCreate(out, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), rows),
        "matmul layout");
    if (shape.batch == 1) return;
    const auto batch = static_cast<std::int32_t>(shape.batch);
    const std::int64_t stride = batch_stride(rows * cols);
    check_blas(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
               "matmul layout");
    check_blas(
        cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
        "matmul layout");
  };
  if (in_fp8(shape)) {
    const std::int8_t fast = shape.gemm == Gemm::forward ? 1 : 0;
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast);
    // The suggestions may depend on whether there are scales; these placeholders are not read.
    const void* const scale = workspace_;
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scale);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scale);
    if (shape.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type(shape));
  }
  layout(&plan.a, c.a_type, c.a_rows, c.a_columns);
  layout(&plan.b, c.b_type, c.b_rows, c.b_columns);
  layout(&plan.d, c.d_type, c.d_rows, c.d_columns);
  const std::vector<Candidate> known = candidates(plan);
  if (known.empty()) {
    fail(Exit::environment, "matmul %s N %lld C %lld OC %lld: cuBLASLt knows no algorithm", gemm_name(shape.gemm),
         static_cast<long long>(shape.N), static_cast<long long>(shape.C), static_cast<long long>(shape.OC));
  }
  plan.algorithm = known[0].algorithm;
  return plan;
}

// cuBLASLt's suggestions, best first by its own estimate, then variants of them with other tile orders and cluster
// shapes. On an H200 the fastest is a variant for two shapes of three, by 1 to 14 %. Partial sums of split-K are added
// in fp32.
std::vector<Matmul::Candidate> Matmul::candidates(const Plan& plan) const {
  constexpr int kMaxSuggestions = 64;
  cublasLtMatmulPreference_t preference = nullptr;
  check_blas(cublasLtMatmulPreferenceCreate(&preference), "matmul preference");
  const std::size_t workspace = kWorkspaceBytes;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                       sizeof workspace);
  const std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                       sizeof reductions);
  const std::uint32_t alignment = 16;  // alignment of rows within a tensor; cuBLASLt assumes 256 bytes by default
  for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment);
  }
  cublasLtMatmulHeuristicResult_t results[kMaxSuggestions];
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.descriptor, plan.a, plan.b, plan.d, plan.d,
                                                               preference, kMaxSuggestions, results, &found);
  cublasLtMatmulPreferenceDestroy(preference);
  std::vector<Candidate> list;
  std::set<StoredAlgorithm> seen;
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; ++i) {
    if (seen.insert(stored(results[i].algo)).second) list.push_back({results[i].algo});
  }
  constexpr std::uint16_t kClusters[] = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1,
                                         CUBLASLT_CLUSTER_SHAPE_1x2x1};
  for (std::size_t i = 0, suggested = list.size(); i < suggested; ++i) {
    for (const std::uint32_t swizzle : {0u, 1u}) {
      for (const std::uint16_t cluster : kClusters) {
        cublasLtMatmulAlgo_t variant = list[i].algorithm;
        const auto set = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, const auto& value) {
          return cublasLtMatmulAlgoConfigSetAttribute(&variant, attribute, &value, sizeof value) ==
                 CUBLAS_STATUS_SUCCESS;
        };
        const bool known =
            set(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, swizzle) && set(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster);
        if (known && !seen.contains(stored(variant)) && usable(plan, variant)) {
          seen.insert(stored(variant));
          list.push_back({variant});
        }
      }
    }
  }
  return list;
}

Matmul::Plan& Matmul::plan(const MatmulShape& shape) {
  const auto found = plans_.find(shape);
  if (found != plans_.end()) return found->second;
  return plans_.emplace(shape, make_plan(shape)).first->second;
}

bool Matmul::usable(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm) const {
  cublasLtMatmulHeuristicResult_t result{};
  return cublasLtMatmulAlgoCheck(handle_, plan.descriptor, plan.a, plan.b, plan.d, plan.d, &algorithm, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= kWorkspaceBytes;
}

void Matmul::run(const MatmulShape& shape, const void* a, const void* b, const void* bias, const void* addend, void* d,
                 const float* a_scale, const float* b_scale, float product, float factor) {
  if (shape.N == 0) return;
  Plan& chosen = plan(shape);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulDescSetAttribute(chosen.descriptor, attribute, &value, sizeof value), "matmul operand");
  };
  if (shape.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (in_fp8(shape)) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a_scale);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b_scale);
  }
  const float alpha = product, beta = shape.accumulate == Accumulate::yes || shape.addend ? factor : 0.0f;
  const cublasStatus_t status =
      cublasLtMatmul(handle_, chosen.descriptor, &alpha, a, chosen.a, b, chosen.b, &beta, shape.addend ? addend : d,
                     chosen.d, d, chosen.d, &chosen.algorithm, workspace_, kWorkspaceBytes, stream_);
  if (status != CUBLAS_STATUS_SUCCESS) check_blas(status, ("matmul " + gemm_key(shape)).c_str());
}

void Matmul::fill_random(bf16* data, std::int64_t count) const {
  fill(data, CUDA_R_16BF, {count, 1, count, true, false, static_cast<std::uint32_t>(count)}, Data::uniform, stream_);
}

// The operands, results and checks with which the algorithms of one shape are timed.
struct Matmul::Trial {
  Matmul& matmul;
  MatmulShape shape;
  Operand a_operand, b_operand, bias_operand;
  Scratch a, b, bias, addend, expected, result, differences, scale;
  Event start, stop;

  // Of the matrices [rows, columns] of an operand.
  static std::int64_t elements_of(const MatmulShape& s, std::int64_t rows, std::int64_t columns) {
    return s.batch == 1 ? rows * columns : s.batch * batch_stride(rows * columns);
  }
  static std::size_t result_bytes(const MatmulShape& s, const ColumnMajor& c) {
    return (static_cast<std::size_t>(elements_of(s, c.d_rows, c.d_columns)) * type_bytes(c.d_type) + 3) / 4 * 4;
  }
  Trial(Matmul& matmul_, const MatmulShape& shape_, const ColumnMajor& c)
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
        a(static_cast<std::size_t>(elements_of(shape, c.a_rows, c.a_columns)) * type_bytes(c.a_type)),
        b(static_cast<std::size_t>(elements_of(shape, c.b_rows, c.b_columns)) * type_bytes(c.b_type)),
        bias(static_cast<std::size_t>(shape.OC) * type_bytes(bias_type(shape))),
        addend(shape.addend ? result_bytes(shape, c) : 4),
        expected(result_bytes(shape, c)),
        result(result_bytes(shape, c)),
        differences(2 * sizeof(unsigned)),
        scale(sizeof(float)) {
    clear(addend);
    const float one = 1;
    check(cudaMemcpyAsync(scale.data(), &one, sizeof one, cudaMemcpyHostToDevice, matmul.stream_), "matmul: scale");
  }

  // Sets the algorithm for the next run.
  void select(const cublasLtMatmulAlgo_t& algorithm) const { matmul.plan(shape).algorithm = algorithm; }
  void fill_operands(Data data) const {
    for (std::int64_t i = 0; i < shape.batch; ++i) {
      const auto at = [&](const Scratch& scratch, const Operand& operand, cudaDataType_t type) {
        const std::int64_t elements = i * batch_stride(operand.rows * operand.columns);
        return static_cast<std::byte*>(scratch.data()) + static_cast<std::size_t>(elements) * type_bytes(type);
      };
      const ColumnMajor c = columns(shape);
      fill(at(a, a_operand, c.a_type), c.a_type, a_operand, data, matmul.stream_);
      fill(at(b, b_operand, c.b_type), c.b_type, b_operand, data, matmul.stream_);
    }
    fill(bias.data(), bias_type(shape), bias_operand, Data::uniform, matmul.stream_);
    if (data == Data::cancelling) clear(bias);  // a bias would hide the noise
  }
  void clear(const Scratch& scratch) const {
    check(cudaMemsetAsync(scratch.data(), 0, scratch.bytes(), matmul.stream_), "matmul: clear");
  }
  void run(const Scratch& out) const {
    const auto* one = static_cast<const float*>(scale.data());
    matmul.run(shape, a.data(), b.data(), bias.data(), addend.data(), out.data(), one, one);
  }
  void compute_expected() const {
    clear(expected);
    run(expected);
  }
  // Whether the selected algorithm gives the bits of `expected`.
  bool same_bits() const {
    clear(result);
    clear(differences);
    run(result);
    any_difference_kernel<<<512, 256, 0, matmul.stream_>>>(
        static_cast<const std::uint32_t*>(expected.data()), static_cast<const std::uint32_t*>(result.data()),
        static_cast<std::int64_t>(result.bytes() / 4), static_cast<unsigned*>(differences.data()));
    check_launch("any_difference");
    unsigned different = 0;
    check(cudaMemcpyAsync(&different, differences.data(), sizeof different, cudaMemcpyDeviceToHost, matmul.stream_),
          "matmul: compare");
    check(cudaStreamSynchronize(matmul.stream_), "matmul: candidate");
    return different == 0;
  }
  // Whether the selected algorithm computes the same GEMM as `expected`, on uniform data, up to the order of its
  // additions: an error of 2^-6 of the largest element is more than any rounding and less than any missing or doubled
  // tile.
  template <typename T>
  bool near_expected_as() const {
    const std::int64_t count = elements_of(shape, columns(shape).d_rows, columns(shape).d_columns);
    clear(result);
    clear(differences);
    run(result);
    largest_difference_kernel<<<512, 256, 0, matmul.stream_>>>(static_cast<const T*>(expected.data()),
                                                               static_cast<const T*>(result.data()), count,
                                                               static_cast<unsigned*>(differences.data()));
    check_launch("largest_difference");
    float largest[2];
    check(cudaMemcpyAsync(largest, differences.data(), sizeof largest, cudaMemcpyDeviceToHost, matmul.stream_),
          "matmul: compare");
    check(cudaStreamSynchronize(matmul.stream_), "matmul: candidate");
    return largest[1] <= 0x1p-6f * largest[0];
  }
  bool near_expected() const {
    const cudaDataType_t type = columns(shape).d_type;
    return type == CUDA_R_32F    ? near_expected_as<float>()
           : type == CUDA_R_16BF ? near_expected_as<bf16>()
                                 : near_expected_as<fp16>();
  }
  // Whether the selected algorithm gives the same bits every time.
  bool is_deterministic() const {
    compute_expected();
    return same_bits() && same_bits();
  }
  float milliseconds() const {
    check(cudaEventRecord(start, matmul.stream_), "event");
    run(result);
    check(cudaEventRecord(stop, matmul.stream_), "event");
    check(cudaEventSynchronize(stop), "matmul: timing");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "event");
    return ms;
  }
};

// Times in two rounds: each candidate once, then the fastest ones alternately, so that clock and temperature are the
// same for all.
cublasLtMatmulAlgo_t Matmul::choose(const MatmulShape& shape) {
  constexpr float kWarmUpMilliseconds = 10, kRequiredSpeed = 0.99f;  // a later candidate must be faster by this factor
  constexpr std::size_t kFinalists = 8, kRounds = 7;
  const Plan& chosen = plan(shape);
  std::vector<Candidate> list = candidates(chosen);
  const Trial trial(*this, shape, columns(shape));
  if (!remembered_.remembers()) {
    for (const Data data : {Data::cancelling, Data::many_magnitudes, Data::uniform}) {
      trial.fill_operands(data);
      trial.select(list[0].algorithm);
      trial.compute_expected();
      std::erase_if(list, [&](const Candidate& candidate) {
        trial.select(candidate.algorithm);
        return !trial.same_bits();
      });
    }
  }
  trial.fill_operands(Data::uniform);
  struct Timing {
    std::size_t index;
    std::vector<float> ms;
    float median() {
      std::nth_element(ms.begin(), ms.begin() + static_cast<std::ptrdiff_t>(ms.size() / 2), ms.end());
      return ms[ms.size() / 2];
    }
  };
  const auto measure = [&](Timing& timing) {
    trial.select(list[timing.index].algorithm);
    timing.ms.push_back(trial.milliseconds());
  };
  trial.select(list[0].algorithm);
  for (float spent = 0; spent < kWarmUpMilliseconds;) spent += std::max(trial.milliseconds(), 0.1f);
  std::vector<Timing> timings;
  for (std::size_t i = 0; i < list.size(); ++i) {
    timings.push_back({i, {}});
    measure(timings.back());  // the first run of a kernel loads its code
    timings.back().ms.clear();
    measure(timings.back());
  }
  std::stable_sort(timings.begin() + 1, timings.end(), [](const Timing& x, const Timing& y) { return x.ms < y.ms; });
  timings.resize(std::min(timings.size(), 1 + kFinalists));  // the first suggestion and the fastest others
  for (Timing& timing : timings) timing.ms.clear();
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (Timing& timing : timings) measure(timing);
  }
  std::sort(timings.begin(), timings.end(), [](const Timing& x, const Timing& y) { return x.index < y.index; });
  trial.select(list[0].algorithm);
  trial.compute_expected();
  std::erase_if(timings, [&](const Timing& timing) {
    trial.select(list[timing.index].algorithm);
    return !trial.near_expected();
  });
  if (timings.empty()) fail(Exit::environment, "matmul %s: cuBLASLt contradicts itself", gemm_key(shape).c_str());
  trial.fill_operands(Data::cancelling);
  const float first_ms = timings[0].median();
  float best_ms = first_ms;
  std::size_t best = 0;
  for (Timing& timing : timings) {
    if (timing.median() > kRequiredSpeed * best_ms) continue;
    trial.select(list[timing.index].algorithm);
    if (!trial.is_deterministic()) continue;
    best = timing.index;
    best_ms = timing.median();
  }
  const double flops = 2.0 * static_cast<double>(shape.batch) * static_cast<double>(shape.N) *
                       static_cast<double>(shape.C) * static_cast<double>(shape.OC);
  report_.push_back(format("%-55s %7.1f us %4.0f TF/s (first suggestion %4.0f; number %zu of %zu)",
                           gemm_key(shape).c_str(), best_ms * 1e3, flops / best_ms * 1e-9, flops / first_ms * 1e-9,
                           best, list.size()));
  return list[best].algorithm;
}

void Matmul::prepare(std::span<const MatmulShape> shapes) {
  StoredPlans fresh;
  for (const MatmulShape& shape : shapes) {
    if (shape.N == 0 || fresh.contains(gemm_key(shape))) continue;
    const StoredAlgorithm* known = remembered_.find(gemm_key(shape));
    if (known != nullptr && usable(plan(shape), restored(*known))) continue;
    remembered_.forget(gemm_key(shape));
    fresh[gemm_key(shape)] = stored(choose(shape));
  }
  remembered_.add(fresh);
  for (const MatmulShape& shape : shapes) {
    if (shape.N > 0) plan(shape).algorithm = restored(*remembered_.find(gemm_key(shape)));
  }
}

template <typename T>
void Matmul::forward(T* out, const T* x, const T* weight, const T* bias, std::int64_t N, std::int64_t C,
                     std::int64_t OC, Accumulate accumulate, const T* addend) {
  if (addend != nullptr && accumulate == Accumulate::yes) fail(Exit::internal, "matmul: two addends");
  run({Gemm::forward, N, C, OC, data_type<T>(), accumulate, bias != nullptr, addend != nullptr}, weight, x, bias,
      addend, out);
}

template <typename T>
void Matmul::input_grad(T* dx, const T* dout, const T* weight, std::int64_t N, std::int64_t C, std::int64_t OC,
                        Accumulate accumulate) {
  run({Gemm::input_grad, N, C, OC, data_type<T>(), accumulate, false}, weight, dout, nullptr, nullptr, dx);
}

template <typename T>
void Matmul::weight_grad(float* dweight, const T* dout, const T* x, std::int64_t N, std::int64_t C, std::int64_t OC,
                         Accumulate accumulate) {
  run({Gemm::weight_grad, N, C, OC, data_type<T>(), accumulate, false}, x, dout, nullptr, nullptr, dweight);
}

void Matmul::forward_fp8(bf16* out, const Fp8Matrix& x, const Fp8Matrix& weight, std::int64_t N, std::int64_t C,
                         std::int64_t OC, const bf16* addend, const bf16* bias) {
  run({Gemm::forward, N, C, OC, CUDA_R_8F_E4M3, Accumulate::no, bias != nullptr, addend != nullptr}, weight.codes,
      x.codes, bias, addend, out, weight.scale, x.scale);
}

void Matmul::input_grad_fp8(bf16* dx, const Fp8Matrix& dout, const Fp8Matrix& weight_transposed, std::int64_t N,
                            std::int64_t C, std::int64_t OC) {
  run({Gemm::input_grad, N, C, OC, CUDA_R_8F_E4M3, Accumulate::no, false}, weight_transposed.codes, dout.codes, nullptr,
      nullptr, dx, weight_transposed.scale, dout.scale);
}

void Matmul::weight_grad_fp8(float* dweight, const Fp8Matrix& dout_transposed, const Fp8Matrix& x_transposed,
                             std::int64_t N, std::int64_t C, std::int64_t OC, Accumulate accumulate) {
  run({Gemm::weight_grad, N, C, OC, CUDA_R_8F_E4M3, accumulate, false}, x_transposed.codes, dout_transposed.codes,
      nullptr, nullptr, dweight, x_transposed.scale, dout_transposed.scale);
}

#define WEFT_INSTANTIATE(T)                                                                                          \
  template void Matmul::forward<T>(T*, const T*, const T*, const T*, std::int64_t, std::int64_t, std::int64_t,       \
                                   Accumulate, const T*);                                                            \
  template void Matmul::input_grad<T>(T*, const T*, const T*, std::int64_t, std::int64_t, std::int64_t, Accumulate); \
  template void Matmul::weight_grad<T>(float*, const T*, const T*, std::int64_t, std::int64_t, std::int64_t,         \
                                       Accumulate);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(bf16)
WEFT_INSTANTIATE(fp16)
#undef WEFT_INSTANTIATE

}  // namespace weft::cuda
