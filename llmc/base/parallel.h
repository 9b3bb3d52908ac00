// Independent pieces of host work on a few threads of their own, beside OpenMP's: for work that waits for files or memory.
#pragma once

#include <cstddef>
#include <functional>

namespace weft {

// Half of the cores, at most eight: the other half belongs to what runs beside. At least 1.
unsigned helper_threads();

// Calls work(0) ... work(count - 1), each once, on up to `threads` threads of which the caller is one. They begin in this
// order. If some of them throw, the exception of the first in this order is thrown when all that had begun have ended, and
// no more begin: with one thread or many, the same error.
void in_parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace weft
