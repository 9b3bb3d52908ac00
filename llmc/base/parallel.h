// Runs independent pieces of host work on a few threads of its own, apart from OpenMP's: for work that waits for files
// or memory.
#pragma once

#include <cstddef>
#include <functional>

namespace weft {

// Threads for such work: half of the cores, from 1 to 8. The other half stays free for what computes at the same time.
unsigned helper_threads();

// Calls work(0) ... work(count - 1) once each, on up to `threads` threads including the caller's; the calls begin in
// this order. After an exception no further call begins. When all running calls have ended, the exception of the lowest
// index is thrown: the same error with one thread or many.
void in_parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace weft
