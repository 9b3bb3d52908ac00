// What each operator of a training step costs and the least that it could cost: train_llama --bench --operators.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// One operator, added up over its calls in one step.
struct OperatorTime {
  std::string name;
  std::string implementation;  // which of several kernels computed it; empty: there is one, or the library chooses
  std::int64_t calls = 0;
  double milliseconds = 0;
  // What the mathematics asks for: the multiplications and additions of GEMMs, and the bytes of every operand read once
  // and every result written once.
  double flops = 0, bytes = 0;
};

struct OperatorTable {
  std::vector<OperatorTime> operators;  // in the order of their first call
  double milliseconds = 0;              // from the first operator's begin to the last one's end
  // Ceilings measured in the same run: a copy within the device's memory (bytes read plus bytes written), and the GEMM of
  // two matrices of 8192 x 8192.
  double bytes_per_s = 0, flops_per_s = 0;

  // The least time in which this device could do the operator's work.
  double floor_milliseconds(const OperatorTime& time) const {
    const double memory = time.bytes / bytes_per_s, arithmetic = time.flops / flops_per_s;
    return 1e3 * (memory > arithmetic ? memory : arithmetic);
  }
};

}  // namespace weft
