#include "llmc/cuda/op/gemm/matmul_plans.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <sstream>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/hash.h"
#include "llmc/base/log.h"

namespace weft::cuda {

namespace fs = std::filesystem;

namespace {

constexpr const char* kTitle = "weft matmul plans 2";
constexpr std::uint64_t kMaxFileBytes = 10'000'000;

// Shared by all models of this process, so that they agree even if one was created before the other's choices were
// written.
std::mutex process_mutex;
std::map<std::string, StoredPlans>& process_plans() {
  static std::map<std::string, StoredPlans> plans;  // by identity
  return plans;
}

std::string cache_directory() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  if (const std::string own = variable("WEFT_CACHE_DIR"); !own.empty()) return own;
  if (const std::string xdg = variable("XDG_CACHE_HOME"); !xdg.empty()) return xdg + "/weft";
  if (const std::string home = variable("HOME"); !home.empty()) return home + "/.cache/weft";
  return {};
}

// Holds an exclusive lock on the directory's plans; held() is false where the file system refuses it.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& directory)
      : fd_(::open((directory + "/matmul.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_ >= 0 && ::flock(fd_, LOCK_EX) != 0) {
      ::close(fd_);
      fd_ = -1;
    }
  }
  ~DirectoryLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  bool held() const { return fd_ >= 0; }

 private:
  int fd_;
};

bool can_write(const std::string& directory) {
  if (directory.empty()) return false;
  std::error_code error;
  fs::create_directories(directory, error);
  return !error && DirectoryLock(directory).held() && ::access(directory.c_str(), W_OK) == 0;
}

// "<GEMM>: <eight words in hexadecimal>"
bool parse_line(const std::string& line, StoredPlans& plans) {
  const std::size_t colon = line.find(": ");
  if (colon == std::string::npos || colon == 0) return false;
  const std::string words = line.substr(colon + 2);
  StoredAlgorithm algorithm{};
  constexpr std::size_t kDigits = 16;
  if (words.size() != algorithm.size() * (kDigits + 1) - 1) return false;
  for (std::size_t i = 0; i < algorithm.size(); ++i) {
    const char* begin = words.data() + i * (kDigits + 1);
    const auto read = std::from_chars(begin, begin + kDigits, algorithm[i], 16);
    if (read.ec != std::errc{} || read.ptr != begin + kDigits) return false;
    if (i + 1 < algorithm.size() && begin[kDigits] != ' ') return false;
  }
  plans[line.substr(0, colon)] = algorithm;
  return true;
}

// False if the text is damaged or of another version.
bool parse(const std::string& text, std::string& identity, StoredPlans& plans) {
  std::istringstream lines(text);
  std::string title, line;
  std::getline(lines, title);
  std::getline(lines, identity);
  bool intact = title == kTitle;
  while (intact && std::getline(lines, line)) intact = parse_line(line, plans);
  return intact;
}

}  // namespace

MatmulPlans::MatmulPlans(std::string identity, std::string run_file)
    : identity_(std::move(identity)), run_file_(std::move(run_file)) {
  const std::string directory = cache_directory();
  if (can_write(directory)) {
    cache_file_ = format("%s/matmul-%016" PRIx64 ".txt", directory.c_str(), xxh3_64(identity_));
    plans_ = read(cache_file_);
    const std::lock_guard<std::mutex> lock(process_mutex);
    for (const auto& [gemm, algorithm] : process_plans()[identity_]) plans_[gemm] = algorithm;
  }
  if (run_file_.empty()) return;
  for (const auto& [gemm, algorithm] : read(run_file_)) plans_[gemm] = algorithm;
}

const StoredAlgorithm* MatmulPlans::find(const std::string& gemm) const {
  const auto found = plans_.find(gemm);
  return found != plans_.end() ? &found->second : nullptr;
}

void MatmulPlans::forget(const std::string& gemm) {
  if (auto entry = plans_.extract(gemm)) refused_[gemm] = entry.mapped();
}

StoredAlgorithm MatmulPlans::agree(StoredPlans& shared, const std::string& gemm, const StoredAlgorithm& choice) const {
  const auto [entry, added] = shared.try_emplace(gemm, choice);
  const auto refused = refused_.find(gemm);
  if (!added && refused != refused_.end() && refused->second == entry->second) entry->second = choice;
  return entry->second;
}

std::string MatmulPlans::text(const StoredPlans& plans) const {
  std::string content = std::string(kTitle) + "\n" + identity_ + "\n";
  for (const auto& [gemm, algorithm] : plans) {
    content += gemm + ":";
    for (const std::uint64_t word : algorithm) content += format(" %016" PRIx64, word);
    content += "\n";
  }
  return content;
}

StoredPlans MatmulPlans::read(const std::string& path) const {
  std::error_code error;
  if (!fs::exists(path, error)) return {};
  try {
    std::string identity;
    StoredPlans plans;
    if (!parse(read_text_file(path, kMaxFileBytes), identity, plans)) {
      log_warning("%s is damaged or of another version: matmul plans are chosen anew", escaped(path, 4096).c_str());
      return {};
    }
    return identity == identity_ ? plans : StoredPlans{};
  } catch (const Error& problem) {
    log_warning("%s. Matmul plans are chosen anew", problem.what());
    return {};
  }
}

void MatmulPlans::adopt(const std::string& text) {
  std::string identity;
  StoredPlans plans;
  if (!parse(text, identity, plans) || identity != identity_) {
    fail(Exit::environment,
         "matmul plans of another rank are for %s, this one has %s. All ranks need the same GPU, driver "
         "and cuBLASLt",
         escaped(identity).c_str(), escaped(identity_).c_str());
  }
  plans_ = std::move(plans);
}

void MatmulPlans::write_cache(const StoredPlans& chosen) {
  const DirectoryLock lock(parent_directory(cache_file_));
  const StoredPlans before = read(cache_file_);
  StoredPlans kept = before;
  for (const auto& [gemm, algorithm] : chosen) plans_[gemm] = agree(kept, gemm, algorithm);
  if (kept != before) write_file_atomically(cache_file_, text(kept));
}

void MatmulPlans::add(const StoredPlans& chosen) {
  plans_.insert(chosen.begin(), chosen.end());
  try {
    if (remembers() && !chosen.empty()) write_cache(chosen);
  } catch (const Error& problem) {
    log_warning("%s. Another run may choose other matmul plans", problem.what());
  }
  if (remembers()) {
    const std::lock_guard<std::mutex> lock(process_mutex);
    StoredPlans& process = process_plans()[identity_];
    for (const auto& [gemm, algorithm] : chosen) plans_[gemm] = agree(process, gemm, plans_[gemm]);
  }
  if (run_file_.empty()) return;
  try {
    const std::string content = text(plans_);
    std::error_code error;
    if (fs::exists(run_file_, error) && read_text_file(run_file_, kMaxFileBytes) == content) return;
    write_file_atomically(run_file_, content);
  } catch (const Error& problem) {
    log_warning("%s. A resumed run may choose other matmul plans", problem.what());
  }
}

}  // namespace weft::cuda
