// An operator's implementations as rows of a table. The first row that computes the arguments on the current GPU is
// launched, so a kernel for a new architecture, or for some sizes alone, is a row above those that it replaces.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "llmc/base/error.h"

namespace weft::cuda {

// Arguments: what the operator is called with, checked.
template <typename... Arguments>
struct Implementation {
  const char* name;  // its arithmetic, as `train_llama --bench --operators` shows it: "wgmma"; a string literal
  bool (*computes)(const Arguments&...);
  void (*launch)(const Arguments&..., cudaStream_t);
};

// What computed the operator that this thread launched last; empty after forget_implementation(). Some operators
// have no table: those of one kernel, and GEMMs, whose plans are cuBLASLt's.
void note_implementation(const char* name);
void forget_implementation();
const char* last_implementation();

// Exit::internal if no row computes the arguments.
template <std::size_t N, typename... Arguments>
void launch_first(const char* op, const Implementation<Arguments...> (&table)[N], cudaStream_t stream,
                  const Arguments&... arguments) {
  for (const Implementation<Arguments...>& row : table) {
    if (!row.computes(arguments...)) continue;
    note_implementation(row.name);
    return row.launch(arguments..., stream);
  }
  fail(Exit::internal, "%s: no kernel computes these arguments", op);
}

}  // namespace weft::cuda
