// Which algorithm of cuBLASLt computes a GEMM, remembered between runs.
//
// Algorithms are chosen by timing, and two of them may add in different orders. So that one machine always gives the
// same bits, a choice is made once: it is kept in a cache file in the user's home and, for a training run, also in the run's
// directory, which a resumed run reads first. Where no cache file can be written a choice would not outlive the
// process; remembers() is false then, and only algorithms that add in the same order may be chosen
// (llmc/cuda/op/matmul.h).
//
// The user's file is $WEFT_CACHE_DIR/matmul-<hash>.txt, by default in $XDG_CACHE_HOME/weft or ~/.cache/weft. It is text:
// a title, the identity (GPU, driver, version of cuBLASLt), and a line for each GEMM with the 64 bytes by which
// cuBLASLt knows an algorithm. The hash is that of the identity. A file of another identity or with a damaged line is
// ignored with a warning, never an error.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace weft::cuda {

using StoredAlgorithm = std::array<std::uint64_t, 8>;  // the content of a cublasLtMatmulAlgo_t
using StoredPlans = std::map<std::string, StoredAlgorithm>;

class MatmulPlans {
 public:
  // `run_file`: of the run's directory; empty: none. Throws nothing: what cannot be read is timed again.
  MatmulPlans(std::string identity, std::string run_file);

  bool remembers() const { return !cache_file_.empty(); }
  // The plan of a GEMM, by its name. Null: not known.
  const StoredAlgorithm* find(const std::string& gemm) const;
  // A remembered plan that this library no longer takes.
  void forget(const std::string& gemm) { plans_.erase(gemm); }
  // Adds choices of this process, and writes the files. Where another process has chosen for the same GEMM in the
  // meantime its choice stays: find() tells which one holds.
  void add(const StoredPlans& chosen);

  // All plans as a file has them, and those of another process instead of this one's: Exit::environment if its identity is
  // another one.
  std::string text() const { return text(plans_); }
  void adopt(const std::string& text);

 private:
  std::string text(const StoredPlans& plans) const;
  StoredPlans read(const std::string& path) const;
  void write_cache(const StoredPlans& chosen);

  std::string identity_, run_file_, cache_file_;
  StoredPlans plans_;
};

}  // namespace weft::cuda
