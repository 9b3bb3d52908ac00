#include "llmc/train/save_writers.h"

#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/error_from.h"
#include "llmc/base/file.h"

namespace weft {

namespace {

constexpr const char* kProbeName = "ranks.probe";
constexpr long kNfs = 0x6969;  // NFS_SUPER_MAGIC of <linux/magic.h>

bool is_nfs(const std::string& directory) {
  struct statfs info {};
  return ::statfs(directory.c_str(), &info) == 0 && info.f_type == kNfs;
}

std::string wanted_by_first(Communicator& ranks) {
  const char* const given = std::getenv("WEFT_SAVE");
  const std::string wanted = ranks.broadcast_text(given != nullptr ? given : "");
  if (!wanted.empty() && wanted != "first" && wanted != "ranks") {
    fail(Exit::usage, "WEFT_SAVE: got %s, expected first or ranks", escaped(wanted).c_str());
  }
  return wanted;
}

// The probe file has a 64-bit number for each rank. Rank 0 writes its number at its own place; every other rank that
// reads it there writes the same number at its place.
std::uint64_t number_at(const std::string& path, std::size_t rank, std::size_t ranks) {
  const MappedFile file(path);
  std::uint64_t number = 0;
  if (file.size() == ranks * sizeof number) std::memcpy(&number, file.data() + rank * sizeof number, sizeof number);
  return number;
}

void answer(const std::string& path, std::uint64_t number, std::size_t rank, std::size_t ranks) {
  if (number_at(path, 0, ranks) != number) fail(Exit::environment, "%s: not what rank 0 has written", path.c_str());
  SharedFile file(path);
  file.write(rank * sizeof number, &number, sizeof number);
  file.sync();
}

// Tests whether all ranks can write into one file in this directory, that of rank 0. Returns why not; empty if they
// can.
std::string problem_of(Communicator& ranks, const std::string& directory) {
  const std::string path = ranks.broadcast_text(directory) + "/" + kProbeName;
  const auto size = static_cast<std::size_t>(ranks.size()), rank = static_cast<std::size_t>(ranks.rank());
  const std::uint64_t number = ranks.broadcast(std::uint64_t{std::random_device()()} << 32 | 1);
  const auto all_do = [&](const std::function<void()>& work) {
    const std::optional<Error> error = error_from(work);
    const std::vector<char> failed = ranks.gather(static_cast<char>(error ? 1 : 0));
    const auto first = static_cast<int>(std::find(failed.begin(), failed.end(), 1) - failed.begin());
    if (first == ranks.size()) return std::string();
    return format("rank %d: %s", first, ranks.broadcast_text(error ? error->what() : "", first).c_str());
  };
  std::string problem = all_do([&] {
    if (rank != 0) return;
    std::vector<std::uint64_t> numbers(size);
    numbers[0] = number;
    write_file_atomically(path, {reinterpret_cast<const char*>(numbers.data()), size * sizeof number});
  });
  if (problem.empty()) {
    problem = all_do([&] {
      if (rank != 0) answer(path, number, rank, size);
    });
  }
  if (problem.empty()) {
    problem = all_do([&] {
      for (std::size_t r = 0; rank == 0 && r < size; ++r) {
        if (number_at(path, r, size) != number) {
          fail(Exit::environment, "%s: without what rank %zu has written", escaped(path).c_str(), r);
        }
      }
    });
  }
  if (rank == 0) ::unlink(path.c_str());
  return problem;
}

}  // namespace

SaveWriters choose_save_writers(Communicator& ranks, const std::string& directory, Shard shard, bool one_machine) {
  if (ranks.size() == 1 || shard == Shard::none) return {};
  const std::string wanted = wanted_by_first(ranks);
  if (wanted == "first") return {false, "WEFT_SAVE=first"};
  if (!one_machine && wanted != "ranks" && ranks.broadcast(ranks.rank() == 0 && is_nfs(directory))) {
    return {false, "--out is on NFS, where several machines may not write one page of a file at the same time"};
  }
  const std::string problem = problem_of(ranks, directory);
  if (problem.empty()) return {true, ""};
  return {false, "the ranks do not write one --out: " + problem};
}

}  // namespace weft
