// Remembers between runs which algorithm of cuBLASLt computes a GEMM.
//
// Algorithms are chosen by timing, and two of them may add in different orders. So that a machine always gives the same
// bits, a choice is made once: it is kept in a cache file in the user's home and, for a training run, also in the run's
// directory, which a resumed run reads first. Where no cache file can be written, a choice would not outlive the
// process: remembers() is false, and only algorithms that add in the same order may be chosen (llmc/cuda/op/gemm/matmul.h).
//
// The user's file is $WEFT_CACHE_DIR/matmul-<hash>.txt, by default in $XDG_CACHE_HOME/weft or ~/.cache/weft. It is
// text: a title, the identity (GPU, driver, version of cuBLASLt), and for each GEMM a line with the 64 bytes of
// cuBLASLt's algorithm. The hash is that of the identity. A file with a damaged line is ignored with a warning, one of
// another identity silently; neither is an error.
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
  // `run_file`: in the run's directory; empty: none. Throws nothing: plans that cannot be read are timed again.
  MatmulPlans(std::string identity, std::string run_file);

  bool remembers() const { return !cache_file_.empty(); }
  // The plan of a GEMM, by its name; null if there is none.
  const StoredAlgorithm* find(const std::string& gemm) const;
  // Drops a remembered plan that the library no longer accepts: the next choice for this GEMM replaces it in the files too.
  void forget(const std::string& gemm);
  // Adds this process's choices and writes the files. If another process has chosen for the same GEMM in the meantime,
  // its choice stays, unless it is the one that forget() dropped: find() returns the valid one.
  void add(const StoredPlans& chosen);

  // text(): all plans in the file format. adopt(): replaces them by those of another process; Exit::environment if its
  // identity differs.
  std::string text() const { return text(plans_); }
  void adopt(const std::string& text);

 private:
  std::string text(const StoredPlans& plans) const;
  StoredPlans read(const std::string& path) const;
  void write_cache(const StoredPlans& chosen);
  // Adds a choice to plans that others may have added to: returns the plan that holds from now on.
  StoredAlgorithm agree(StoredPlans& shared, const std::string& gemm, const StoredAlgorithm& choice) const;

  std::string identity_, run_file_, cache_file_;
  StoredPlans plans_, refused_;
};

}  // namespace weft::cuda
