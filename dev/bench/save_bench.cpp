// What a save costs without a GPU: checkpoints of a model of that shape, from a copy of its state in host memory, beside
// the floors of the same run: touching, hashing and writing as many bytes. Build with the library:
//   g++ -std=c++20 -O3 -march=native -fopenmp -I. dev/bench/save_bench.cpp build/release/libweft.a -lopenblas
//       -lpcre2-8 -lutf8proc -o save_bench
//   ./save_bench CONFIG DIR [SAVES]       DIR must not exist; it is removed at the end
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/model/config.h"
#include "llmc/model/presets.h"
#include "llmc/model/tensor_table.h"
#include "llmc/train/checkpoint.h"

using namespace weft;

namespace {

double seconds_of(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class Copy final : public StateCopy {
 public:
  explicit Copy(const TensorTable& table) : table_(table), bytes_(state_copy_bytes(adamw_optimizer(), table)) {
    void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail(Exit::resources, "no memory for a copy of the state");
    values_ = static_cast<float*>(memory);
  }
  void take() override {
#pragma omp parallel for
    for (std::uint64_t i = 0; i < bytes_ / sizeof(float); ++i) values_[i] = static_cast<float>(i % 1000003) * 1e-6f;
  }
  const float* read(TensorRole role, const TensorSpec& spec, std::size_t first, std::size_t /*count*/,
                    float* /*buffer*/) const override {
    const std::int64_t part = role == TensorRole::parameter ? 0 : role == TensorRole::state1 ? 1 : 2;
    return values_ + part * table_.arena_elements() + spec.offset + first;
  }
  const void* data() const {
    return values_;
  }
  std::uint64_t bytes() const {
    return bytes_;
  }

 private:
  const TensorTable& table_;
  std::uint64_t bytes_;
  float* values_ = nullptr;
};

void report(const char* what, double seconds, std::uint64_t bytes) {
  std::printf("%-28s %7.3f s  %6.2f GB/s\n", what, seconds, static_cast<double>(bytes) / seconds * 1e-9);
  std::fflush(stdout);
}

void write_plainly(const std::string& path, const Copy& copy, std::uint64_t all, bool sync) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  constexpr std::uint64_t kPiece = 1 << 20;
  for (std::uint64_t done = 0; done < all; done += kPiece) {
    const std::uint64_t bytes = std::min(kPiece, all - done);
    if (::write(fd, static_cast<const char*>(copy.data()) + done, bytes) < 0) fail(Exit::resources, "cannot write");
  }
  if (sync) ::fsync(fd);
  ::close(fd);
}

void measure(const std::string& config, const std::string& directory, int saves) {
  RunIdentity identity;
  identity.model = preset_config(config);
  identity.settings = Json::object();
  identity.data = Json::array();
  identity.device = "cpu";
  identity.version = "save_bench";
  const TensorTable table(identity.model);
  Copy copy(table);
  const std::uint64_t some = std::min<std::uint64_t>(copy.bytes(), 2'000'000'000);
  report("first touch, all cores", seconds_of([&] { copy.take(); }), copy.bytes());
  std::uint64_t hash = 0;
  report("hash, one thread", seconds_of([&] { hash = xxh3_64(copy.data(), some); }), some);
  std::filesystem::create_directories(directory);
  const std::string plain = directory + "/plain";
  report("write, new pages", seconds_of([&] { write_plainly(plain, copy, some, false); }), some);
  ::unlink(plain.c_str());
  report("write and sync", seconds_of([&] { write_plainly(plain, copy, some, true); }), some);
  ::unlink(plain.c_str());
  const RunDirectory run(directory + "/run");
  CheckpointKeeper keeper(run, identity, 2);
  for (int i = 1; i <= saves; ++i) {
    TrainState state;
    state.step = i;
    report("save", seconds_of([&] { keeper.save(state, table, tensors_of(copy, {})); }), copy.bytes());
  }
  report("read back", seconds_of([&] { Checkpoint::open(keeper.last_path(), keeper.last_saved()); }), copy.bytes());
  std::printf("(hash %016llx)\n", static_cast<unsigned long long>(hash));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || std::filesystem::exists(argv[2])) {
    std::fprintf(stderr, "usage: save_bench CONFIG DIR [SAVES], where DIR does not exist\n");
    return 2;
  }
  measure(argv[1], argv[2], argc > 3 ? std::atoi(argv[3]) : 3);
  std::filesystem::remove_all(argv[2]);
  return 0;
}
