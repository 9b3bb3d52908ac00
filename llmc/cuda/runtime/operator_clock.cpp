#include "llmc/cuda/runtime/operator_clock.h"

#include <algorithm>

namespace weft::cuda {

void OperatorClock::begin(const char* name, double flops, double bytes) {
  calls_.emplace_back(name, flops, bytes);
  forget_implementation();
  check(cudaEventRecord(calls_.back().start, stream_), "operator clock");
}

OperatorTable OperatorClock::stop() {
  timing_ = false;
  OperatorTable table;
  if (calls_.empty()) return table;
  check(cudaEventSynchronize(calls_.back().stop), "operator clock");
  const auto elapsed = [](const Event& from, const Event& to) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, from, to), "operator clock");
    return static_cast<double>(ms);
  };
  for (const Call& call : calls_) {
    const auto same = [&](const OperatorTime& time) { return time.name == call.name; };
    auto row = std::find_if(table.operators.begin(), table.operators.end(), same);
    if (row == table.operators.end()) {
      row = table.operators.insert(row, {.name = call.name, .implementation = call.implementation});
    }
    ++row->calls;
    row->milliseconds += elapsed(call.start, call.stop);
    row->flops += call.flops;
    row->bytes += call.bytes;
  }
  table.milliseconds = elapsed(calls_.front().start, calls_.back().stop);
  calls_.clear();
  return table;
}

}  // namespace weft::cuda
