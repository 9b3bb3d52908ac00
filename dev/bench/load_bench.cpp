// What validation and hashing cost beside loading a model file: a file of GB gigabytes of fp32 tensors, read into memory
// with and without its checks, in turn. Build with the library:
//   g++ -std=c++20 -O3 -march=native -fopenmp -I. dev/bench/load_bench.cpp build/release/libweft.a -o load_bench
//   ./load_bench FILE [GB [cold]]    makes FILE if it is not there; cold: the file leaves the page cache before each run
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/file/tensor_file.h"

using namespace weft;

namespace {

constexpr std::size_t kTensorBytes = 64 << 20;

double seconds_of(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void make(const std::string& path, std::size_t tensors) {
  std::vector<float> values(kTensorBytes / sizeof(float));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 2654435761u % 1000003) * 1e-6f;
  TensorFileWriter writer(path, FileKind::training_state, Json::object());
  for (std::size_t i = 0; i < tensors; ++i) {
    writer.declare(std::to_string(i), DType::f32, {static_cast<std::int64_t>(values.size())});
  }
  for (std::size_t i = 0; i < tensors; ++i) writer.write_f32(values.data(), values.size());
  writer.publish();
}

// Its pages are clean: the writer has synced them.
void leave_page_cache(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY);
  if (file < 0 || posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) != 0) std::printf("the page cache keeps the file\n");
  if (file >= 0) close(file);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "load_bench.bin";
  const double gigabytes = argc > 2 ? std::atof(argv[2]) : 5;
  if (!std::filesystem::exists(path)) make(path, static_cast<std::size_t>(gigabytes * 1e9 / kTensorBytes));
  const bool cold = argc > 3 && std::string(argv[3]) == "cold";
  const double open_seconds = seconds_of([&] { TensorFile::open(path, FileKind::training_state); });
  std::printf("open and validate: %.4f s\n", open_seconds);
  std::vector<double> plain, checked;
  for (int run = 0; run < 10; ++run) {
    if (cold) leave_page_cache(path);
    const TensorFile file = TensorFile::open(path, FileKind::training_state);
    // A new destination each time, as a model's arena is.
    void* memory = mmap(nullptr, file.file_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 5;
    auto* out = static_cast<float*>(memory);
    const bool with_checks = run % 2 == 1;
    const double seconds = seconds_of([&] {
      for (const TensorInfo& tensor : file.tensors()) {
        if (with_checks) {
          file.read_finite_f32(tensor, out);
        } else {
          convert_to_f32(file.bytes(tensor).data(), tensor.dtype, out, tensor.elements());
        }
        out += tensor.elements();
      }
    });
    munmap(memory, file.file_bytes());
    (with_checks ? checked : plain).push_back(seconds);
    std::printf("%-9s %.3f s, %.2f GB/s\n", with_checks ? "checked" : "plain", seconds,
                static_cast<double>(file.file_bytes()) / seconds * 1e-9);
  }
  const TensorFile file = TensorFile::open(path, FileKind::training_state);
  const double hash = seconds_of([&] {
    for (const TensorInfo& tensor : file.tensors()) file.verify(tensor);
  });
  std::sort(plain.begin(), plain.end());
  std::sort(checked.begin(), checked.end());
  std::printf("median: plain %.3f s, checked %.3f s: %+.1f %%; hashing alone %.3f s, %.1f GB/s\n", plain[2], checked[2],
              100 * (checked[2] / plain[2] - 1), hash, static_cast<double>(file.file_bytes()) / hash * 1e-9);
  return 0;
}
