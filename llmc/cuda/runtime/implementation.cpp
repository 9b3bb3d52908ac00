#include "llmc/cuda/runtime/implementation.h"

namespace weft::cuda {

namespace {

thread_local const char* last = "";

}  // namespace

void note_implementation(const char* name) {
  last = name;
}
void forget_implementation() {
  last = "";
}
const char* last_implementation() {
  return last;
}

}  // namespace weft::cuda
