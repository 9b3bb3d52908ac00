// A library that is loaded in front of a program (LD_PRELOAD) and that writes down when the GPU worked: one line "begin end
// name" in nanoseconds for each kernel, copy and fill, to the file TIMELINE_OUT.N of process N. dev/bench/timeline.py
// builds it, finds libcupti, and reads the lines.
#include <cupti.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr std::size_t kBufferBytes = 8 << 20;
// Records are handed over while the program runs: at its end CUDA may be gone before.
constexpr std::uint32_t kFlushMs = 50;

std::FILE* output() {
  static std::FILE* file =
      std::fopen((std::string(std::getenv("TIMELINE_OUT")) + "." + std::to_string(getpid())).c_str(), "w");
  return file;
}

void on_request(std::uint8_t** buffer, std::size_t* size, std::size_t* most_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = kBufferBytes;
  *most_records = 0;  // as many as fit
}

void write_line(std::uint64_t begin, std::uint64_t end, const char* name) {
  std::fprintf(output(), "%llu %llu %s\n", static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end),
               name);
}

void on_complete(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid_bytes) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<CUpti_ActivityKernel9*>(record);
      write_line(kernel->start, kernel->end, kernel->name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<CUpti_ActivityMemcpy5*>(record);
      write_line(copy->start, copy->end, "copy");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
      const auto* copy = reinterpret_cast<CUpti_ActivityMemcpyPtoP4*>(record);
      write_line(copy->start, copy->end, "copy between GPUs");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* fill = reinterpret_cast<CUpti_ActivityMemset4*>(record);
      write_line(fill->start, fill->end, "fill");
    }
  }
  std::free(buffer);
}

// Whether a call of CUPTI has succeeded; otherwise stderr says which one has not, and why.
bool succeeded(CUptiResult result, const char* call) {
  if (result == CUPTI_SUCCESS) return true;
  const char* reason = nullptr;
  cuptiGetResultString(result, &reason);
  std::fprintf(stderr, "timeline: %s: %s\n", call, reason != nullptr ? reason : "unknown error");
  return false;
}

void at_end() {
  succeeded(cuptiActivityFlushAll(1), "flush");
  std::fclose(output());
}

__attribute__((constructor)) void begin() {
  if (std::getenv("TIMELINE_OUT") == nullptr || output() == nullptr) return;
  bool recording = succeeded(cuptiActivityRegisterCallbacks(on_request, on_complete), "callbacks");
  for (const CUpti_ActivityKind kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET}) {
    recording = recording && succeeded(cuptiActivityEnable(kind), "recording");
  }
  recording = recording && succeeded(cuptiActivityFlushPeriod(kFlushMs), "period");
  if (recording) std::atexit(at_end);
}

}  // namespace
