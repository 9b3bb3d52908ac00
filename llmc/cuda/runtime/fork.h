// Concurrent work in a second stream. A fork makes the second stream wait for what the first has queued so far; a join
// is an event of the second for which the first waits later. The forked work runs beside what follows in the first
// stream.
//
// Test tool: a missing wait rarely shows, because the work is usually done in time. set_stream_delay() makes work late
// on purpose: test/gpu/stream_order_test.cpp runs every use of a fork with delays and expects the same bits. Without a
// delay a call costs the host one load of a flag and the GPU nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// Where work can be delayed.
enum class DelayPoint {
  step,  // the first stream of a model, at the start of a forward pass, a backward pass, an update, a chunk of a prompt, an
  // inference step, and the copy of a piece of a model file
  forked,  // the second stream, at the start of the forked work
  count
};

// From now on each delay_point() of that kind queues a kernel that spins for `microseconds` (at most 1 s), in every
// model of this process; 0 ends that. Not to be called while another thread queues work.
void set_stream_delay(DelayPoint point, std::int64_t microseconds);

// Queues the delay set for this point, if any.
void delay_point(cudaStream_t stream, DelayPoint point);

// Makes `to` wait for everything that is queued in `from` now. `event` is used for that and may be reused at once.
// `action` names the work in errors. During a capture `to` becomes part of it.
void fork_stream(cudaStream_t from, cudaStream_t to, cudaEvent_t event, const char* action);

}  // namespace weft::cuda
