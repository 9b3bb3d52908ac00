// The tensor file (.bin): weft's one flat binary container, for models, training state and reference dumps.
//
// Layout, byte for byte, is doc/tensor_file.md; scripts/tensor_file.py is the same in Python, and both are
// held together by the vectors in test/fixtures/tensor_file/. The reader maps the file and treats it as
// hostile: every size is checked before it is used, the file's length must equal what the header says, and
// each tensor has an XXH3-64.
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
#include "llmc/base/json.h"
#include "llmc/file/write_behind.h"

namespace weft {

enum class FileKind : std::uint32_t { model = 1, training_state = 2, reference_dump = 3 };
const char* file_kind_name(FileKind kind);  // "model", "training state", "reference dump"

inline constexpr std::uint32_t kTensorFileVersion = 1;
inline constexpr std::uint64_t kTensorAlignment = 256;  // of each tensor's data within the file
inline constexpr std::uint64_t kHeaderPage = 4096;      // fixed header, and alignment of the data section
inline constexpr std::size_t kMaxTensors = 65536;
inline constexpr std::size_t kMaxTensorName = 255;
inline constexpr std::size_t kMaxTensorRank = 8;
inline constexpr std::size_t kMaxConfigBytes = 16 << 20;

// What the table says of one tensor. An empty shape is a scalar: one element.
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
  // Maps `path` and validates header, configuration and table; does not read the tensor data. `expected`:
  // what the caller needs; another kind of file (also a token shard, safetensors, a web page, ...) is refused
  // by what it is.
  static TensorFile open(const std::string& path, FileKind expected);

  const std::string& path() const { return file_.path(); }
  FileKind kind() const { return kind_; }
  const Json& config() const { return config_; }  // a JSON object
  std::span<const TensorInfo> tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // nullptr if absent
  const TensorInfo& at(std::string_view name) const;    // absent: Exit::bad_file

  // The bytes of a tensor, with no check of their hash.
  std::span<const std::byte> bytes(const TensorInfo& tensor) const;
  // Reads the tensor and compares its hash: a flipped bit is Exit::bad_file naming the tensor.
  void verify(const TensorInfo& tensor) const;
  // The same for a caller who has read and hashed the bytes already.
  void compare_hash(const TensorInfo& tensor, std::uint64_t got) const;
  // Every tensor, and that the gaps between them are zero: afterwards every byte of the file is known good.
  void verify_all() const;
  // A float tensor (f32, f16, bf16) as fp32; verifies its hash, of a large tensor on a thread beside the conversion.
  // `out` holds tensor.elements() values.
  void read_f32(const TensorInfo& tensor, float* out) const;
  // The same, and a value that is not finite is Exit::bad_file naming it.
  void read_finite_f32(const TensorInfo& tensor, float* out) const;
  // What read_finite_f32() checks, without the values.
  void verify_finite(const TensorInfo& tensor) const;
  std::uint64_t file_bytes() const { return file_.size(); }
  // Of header, configuration and table, which holds the hash of every tensor: equal for files with equal content.
  std::uint64_t header_hash() const { return header_hash_; }
  bool unchanged() const { return file_.unchanged(); }

 private:
  explicit TensorFile(MappedFile file) : file_(std::move(file)) {}
  void require_float(const TensorInfo& tensor) const;
  void read(const TensorInfo& tensor, float* out, bool finite) const;

  MappedFile file_;
  FileKind kind_ = FileKind::model;
  Json config_;
  std::uint64_t data_offset_ = 0, header_hash_ = 0;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, std::size_t, SeededHash> index_;  // keys are the names in tensors_
};

// Writes a tensor file: declare every tensor, then write each one's data in the order of declaration, then
// publish. Until publish() nothing stands under `path` but what stood there before. A full disk is
// Exit::resources, found at the first write, which reserves the space of the whole file; misuse by the caller
// is Exit::internal. The header's family is that of config["model"]["family"].
class TensorFileWriter {
 public:
  TensorFileWriter(const std::string& path, FileKind kind, const Json& config);

  void declare(const std::string& name, DType dtype, std::vector<std::int64_t> shape);
  // Appends `bytes` of the next unfinished tensor; a tensor may be written in several pieces, an empty one
  // needs none.
  void write(const void* data, std::size_t bytes);
  // The whole next tensor from fp32 values, rounded to its declared float dtype in bounded pieces.
  void write_f32(const float* data, std::size_t count);
  // The whole next tensor, which is of fp32, piece by piece: part(first, count, buffer) returns `count` values from element
  // `first` on, in `buffer` or anywhere where they stay as they are until publish(). From the first call on a thread writes
  // what this one makes.
  using Part = std::function<const float*(std::size_t first, std::size_t count, float* buffer)>;
  void write_parts(std::size_t count, const Part& part);
  // Fails with Exit::internal if any tensor is not complete.
  void publish();
  // The finished table with offsets and hashes; valid after publish().
  std::span<const TensorInfo> tensors() const { return tensors_; }

 private:
  void begin();  // lays the file out at the first write
  void append(const void* data, std::size_t bytes);
  void require_next(std::size_t count) const;
  void pad_to(std::uint64_t offset);
  void start_tensor();
  void finish_tensor();
  std::vector<std::byte> header_bytes() const;  // page, configuration and table: all before the data

  std::string path_;
  FileKind kind_;
  std::uint32_t family_ = 0;
  std::string config_text_;
  std::vector<TensorInfo> tensors_;
  std::unordered_set<std::string, SeededHash> names_;
  std::unique_ptr<AtomicFile> file_;
  std::unique_ptr<WriteBehind> behind_;  // after file_: it ends first
  std::uint64_t written_ = 0;            // handed to one of them
  std::uint64_t file_bytes_ = 0;
  std::uint64_t data_offset_ = 0;
  std::size_t current_ = 0;          // the tensor being written
  std::uint64_t current_bytes_ = 0;  // of it, so far
  struct Hasher;
  std::shared_ptr<Hasher> hasher_;
};

}  // namespace weft
