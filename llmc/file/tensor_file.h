// The tensor file (.bin): weft's one flat binary container, for models, training state and reference dumps.
//
// doc/tensor_file.md describes the layout byte for byte. scripts/tensor_file.py implements it in Python, and both are
// tested with the same files in test/fixtures/tensor_file/. The reader maps the file and treats it as hostile: every size
// is checked before it is used, the file's length must equal what the header says, and each tensor has an XXH3-64.
//
// Anything wrong with a file is Exit::bad_file and names the file and the field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/file.h"
#include "llmc/base/hash.h"
#include "llmc/base/json_fwd.h"
#include "llmc/file/write_behind.h"

namespace weft {

enum class FileKind : std::uint32_t { model = 1, training_state = 2, reference_dump = 3, adapter = 4 };
const char* file_kind_name(FileKind kind);  // "model", "training state", "reference dump", "LoRA adapter"

inline constexpr std::uint32_t kTensorFileVersion = 1;
inline constexpr std::uint64_t kTensorAlignment = 256;  // of each tensor's data within the file
inline constexpr std::uint64_t kHeaderPage = 4096;      // fixed header, and alignment of the data section
inline constexpr std::size_t kMaxTensors = 65536;
inline constexpr std::size_t kMaxTensorName = 255;
inline constexpr std::size_t kMaxTensorRank = 8;
inline constexpr std::size_t kMaxConfigBytes = 16 << 20;

// One tensor, as the file's table describes it. An empty shape is a scalar: one element.
struct TensorInfo {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  // from the start of the file
  std::uint64_t bytes = 0;
  std::uint64_t hash = 0;  // XXH3-64 of the data

  std::uint64_t elements() const;  // product of the shape
};

std::string shape_text(std::span<const std::int64_t> shape);  // "[2048, 192]"

class TensorFile {
 public:
  // Maps `path` and validates header, configuration and table; does not read the tensor data. `expected` is the
  // kind that the caller needs; any other file (also a token shard, safetensors, a web page, ...) is refused with a
  // message that says what it is.
  static TensorFile open(const std::string& path, FileKind expected);

  const std::string& path() const { return file_.path(); }
  FileKind kind() const { return kind_; }
  const Json& config() const { return *config_; }  // a JSON object
  std::span<const TensorInfo> tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // nullptr if absent
  const TensorInfo& at(std::string_view name) const;    // absent: Exit::bad_file

  // The bytes of a tensor, without checking their hash.
  std::span<const std::byte> bytes(const TensorInfo& tensor) const;
  // Reads the tensor and compares its hash: a flipped bit is Exit::bad_file naming the tensor.
  void verify(const TensorInfo& tensor) const;
  // The same check for a caller that has hashed the bytes itself: `got` is its hash.
  void compare_hash(const TensorInfo& tensor, std::uint64_t got) const;
  // Every tensor, and that the gaps between them are zero: afterwards every byte of the file is known good.
  void verify_all() const;
  // Converts a float tensor (f32, f16, bf16) to fp32 and verifies its hash, which a second thread computes meanwhile if the
  // tensor is large. `out` holds tensor.elements() values.
  void read_f32(const TensorInfo& tensor, float* out) const;
  // The same; in addition a value that is not finite is Exit::bad_file naming it.
  void read_finite_f32(const TensorInfo& tensor, float* out) const;
  // The checks of read_finite_f32() without the conversion.
  void verify_finite(const TensorInfo& tensor) const;
  std::uint64_t file_bytes() const { return file_.size(); }
  // The hash of header, configuration and table. The table holds the hash of every tensor, so this one stands for the
  // content of the whole file.
  std::uint64_t header_hash() const { return header_hash_; }
  bool unchanged() const { return file_.unchanged(); }

 private:
  explicit TensorFile(MappedFile file) : file_(std::move(file)) {}
  void require_float(const TensorInfo& tensor) const;
  void read(const TensorInfo& tensor, float* out, bool finite) const;

  MappedFile file_;
  FileKind kind_ = FileKind::model;
  std::shared_ptr<const Json> config_;  // a pointer, because this header only declares Json
  std::uint64_t data_offset_ = 0, header_hash_ = 0;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, std::size_t, SeededHash> index_;  // keys are the names in tensors_
};

// Writes a tensor file: declare every tensor, then write each one's data in the order of declaration, then
// publish. Until publish() a file that was under `path` before stays there unchanged. A full disk is
// Exit::resources, found at the first write, which reserves the space of the whole file; misuse by the caller
// is Exit::internal. The header's family is that of config["model"]["family"].
class TensorFileWriter {
 public:
  TensorFileWriter(const std::string& path, FileKind kind, const Json& config);

  void declare(const std::string& name, DType dtype, std::vector<std::int64_t> shape);
  // Appends `bytes` bytes to the first tensor that is not complete. A tensor may be written in several pieces; one without
  // elements needs no call.
  void write(const void* data, std::size_t bytes);
  // Writes all of the next tensor from fp32 values, rounded to its declared float dtype piece by piece, in little memory.
  void write_f32(const float* data, std::size_t count);
  // Writes all of the next tensor, declared as fp32, from values that are computed piece by piece: part(first, count,
  // buffer) returns a pointer to elements first to first + count - 1, either `buffer` filled with them or memory that does
  // not change until publish(). From the first call on a second thread does the writing (WriteBehind).
  using Part = std::function<const float*(std::size_t first, std::size_t count, float* buffer)>;
  void write_parts(std::size_t count, const Part& part);
  // For a file whose data several processes write, each a part of it, at the offsets of tensors(): creates it at its
  // full size, filled with zeros, and returns the name that it has until publish(). Afterwards each tensor is either
  // passed to write() or reported by written_by_others().
  std::string share();
  // The next tensor has been written by others; its bytes have this hash.
  void written_by_others(std::uint64_t hash);
  // Fails with Exit::internal if any tensor is not complete.
  void publish();
  // The table; offsets are valid after share() or publish(), hashes after publish().
  std::span<const TensorInfo> tensors() const { return tensors_; }

 private:
  void begin();  // at the first write: assigns the offsets and creates the file
  void append(const void* data, std::size_t bytes);
  void require_next(std::size_t count) const;
  void pad_to(std::uint64_t offset);
  void start_tensor();
  void finish_tensor();
  std::vector<std::byte> header_bytes() const;  // everything before the data: header page, configuration, table

  std::string path_;
  FileKind kind_;
  std::uint32_t family_ = 0;
  std::string config_text_;
  std::vector<TensorInfo> tensors_;
  std::unordered_set<std::string, SeededHash> names_;
  std::unique_ptr<AtomicFile> file_;
  std::unique_ptr<WriteBehind> write_behind_;  // declared after file_, so destroyed before it
  bool shared_ = false;
  std::uint64_t written_ = 0;  // bytes given to file_ or write_behind_; of a shared file, where the next ones belong
  std::uint64_t file_bytes_ = 0;
  std::uint64_t data_offset_ = 0;
  std::size_t current_ = 0;          // the tensor being written
  std::uint64_t current_bytes_ = 0;  // bytes of it written so far
  struct Hasher;
  std::shared_ptr<Hasher> hasher_;
};

}  // namespace weft
