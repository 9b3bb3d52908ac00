// Work that a stream hands to another: a fork makes the second stream wait for what the first has queued so far, and a join
// is an event of the second for which the first waits later. What is forked runs beside what follows in the first stream.
//
// Test tool: a missing wait rarely shows, because the work that should have been waited for is usually done in time.
// set_stream_delay() makes it late, on purpose: test/gpu/stream_order_test.cpp runs every use of a fork with delays and wants
// the same bits. Without a delay a call costs the host one load of a flag and the GPU nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::cuda {

// Where work can be made late.
enum class DelayPoint {
  step,  // the first stream of a model, at the start of a forward pass, a backward pass, an update, a chunk of a prompt, an
  // inference step, and the copy of a piece of a model file
  forked,  // the second stream, at the start of what was handed to it
  count
};

// From now on a kernel that spins for so many microseconds, at most 1 s, is queued at each delay_point() of that kind, in
// every model of this process; 0 ends that. Not while another thread queues work.
void set_stream_delay(DelayPoint point, std::int64_t microseconds);

// Queues the delay that was asked for, if any.
void delay_point(cudaStream_t stream, DelayPoint point);

// `to` goes on after everything that is queued in `from` now. `event` carries that and may be used again at once. `action`
// names the work in errors. Inside of a capture `to` becomes part of it.
void fork_stream(cudaStream_t from, cudaStream_t to, cudaEvent_t event, const char* action);

}  // namespace weft::cuda
