// The functions of cuBLASLt that weft calls, looked up at run time under their own names, so that no program links with
// the library: loading its half gigabyte takes 0.08 s, seven times as long as all other work at the start of a program
// that computes on the CPU. The first call loads it, from the program's run path (the CUDA toolkit that built it),
// LD_LIBRARY_PATH or the system's list; if it cannot be loaded, or lacks a function, that call throws
// Exit::environment.
#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdint>
#include <string>

#include "llmc/base/error.h"

namespace {

struct Library {
  std::string file = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  std::string problem;

  Library() {
    if (handle != nullptr) return;
    const char* reason = dlerror();
    problem = reason != nullptr ? reason : file;
  }
};

void* look_up(const char* name) {
  static const Library library;
  if (library.handle == nullptr) {
    weft::fail(weft::Exit::environment,
               "cuBLASLt of CUDA %d cannot be loaded: %s; install the CUDA toolkit, or name its library folder in "
               "LD_LIBRARY_PATH",
               CUBLAS_VER_MAJOR, library.problem.c_str());
  }
  void* function = dlsym(library.handle, name);
  if (function == nullptr) {
    weft::fail(weft::Exit::environment, "%s has no %s; install the CUDA toolkit with which this program was built",
               library.file.c_str(), name);
  }
  return function;
}

template <typename Function>
Function* look_up(const char* name, Function*) {
  return reinterpret_cast<Function*>(look_up(name));
}

}  // namespace

// The library's function of this name, looked up once.
#define LOADED(name)                                    \
  ([] {                                                 \
    static const auto function = look_up(#name, &name); \
    return function;                                    \
  }())

std::size_t cublasLtGetVersion() {
  return LOADED(cublasLtGetVersion)();
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return LOADED(cublasLtGetStatusString)(status);
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return LOADED(cublasLtCreate)(handle);
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return LOADED(cublasLtDestroy)(handle);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* descriptor, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  return LOADED(cublasLtMatmulDescCreate)(descriptor, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor) {
  return LOADED(cublasLtMatmulDescDestroy)(descriptor);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t descriptor, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  return LOADED(cublasLtMatmulDescSetAttribute)(descriptor, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t columns, std::int64_t leading) {
  return LOADED(cublasLtMatrixLayoutCreate)(layout, type, rows, columns, leading);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return LOADED(cublasLtMatrixLayoutDestroy)(layout);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                std::size_t bytes) {
  return LOADED(cublasLtMatrixLayoutSetAttribute)(layout, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return LOADED(cublasLtMatmulPreferenceCreate)(preference);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return LOADED(cublasLtMatmulPreferenceDestroy)(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    std::size_t bytes) {
  return LOADED(cublasLtMatmulPreferenceSetAttribute)(preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  return LOADED(cublasLtMatmulAlgoGetHeuristic)(handle, operation, a, b, c, d, preference, wanted, results, found);
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, const void* value,
                                                    std::size_t bytes) {
  return LOADED(cublasLtMatmulAlgoConfigSetAttribute)(algorithm, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  return LOADED(cublasLtMatmulAlgoCheck)(handle, operation, a, b, c, d, algorithm, result);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  return LOADED(cublasLtMatmul)(handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                                algorithm, workspace, workspace_bytes, stream);
}
