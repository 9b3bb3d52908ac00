#include "llmc/file/tensor_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>

#include "llmc/base/checked.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/signals.h"
#include "llmc/base/utf8.h"
#include "llmc/file/data_check.h"
#include "llmc/file/signature.h"

namespace weft {

static_assert(std::endian::native == std::endian::little, "tensor files are read and written in place");

namespace {

using u64 = unsigned long long;  // what printf's %llu takes

// The header page and the tensor record as they lie in the file (doc/tensor_file.md).
struct Header {
  char magic[8];
  std::uint32_t version, byte_order, kind, family;
  std::uint64_t file_bytes, config_bytes, tensor_count, table_offset, data_offset, header_hash;
};
static_assert(sizeof(Header) == 72 && offsetof(Header, header_hash) == 64);

struct Record {
  char name[256];
  std::uint32_t dtype, rank;
  std::uint64_t shape[8];
  std::uint64_t offset, bytes, hash;
};
static_assert(sizeof(Record) == 352 && sizeof(Record::name) == kMaxTensorName + 1);

constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::uint32_t kSwappedByteOrder = 0x04030201;
constexpr std::uint64_t kTableAlignment = 8;
constexpr std::size_t kPiece = 1 << 20;  // hash, convert and write in pieces that stay in the cache
// Tensors from this size on are checked on a second thread: converting them takes a hundred times as long as starting it.
constexpr std::size_t kWorthAThread = 4 << 20;
constexpr const char* kDamaged = "The file is damaged: get or make it again";
constexpr const char* kAgain = "Get or make the file again";

// The header's numbers of families. Those that came later have the last one: the configuration names them.
constexpr std::array<const char*, 4> kFamilies = {"none", "llama", "gpt_neox", "another"};

// model.family of a configuration; null where there is none.
Json model_family(const Json& config) {
  const auto model = config.find("model");
  if (model == config.end() || !model->is_object()) return nullptr;
  return model->value("family", Json(nullptr));
}

// Nothing if it is no name.
std::optional<std::uint32_t> family_number(const Json& family) {
  if (family.is_null()) return 0;
  if (!family.is_string()) return std::nullopt;
  constexpr std::uint32_t kAnother = kFamilies.size() - 1;
  for (std::uint32_t i = 1; i < kAnother; ++i) {
    if (family == kFamilies[i]) return i;
  }
  return kAnother;
}

// Bytes of a tensor; nothing if they reach 2^63. Sizes of 0 are left out of that product, so that the answer does not
// depend on where in the shape they stand. A u4 tensor has passed whole_bytes(): half of its elements are bytes.
std::optional<std::uint64_t> payload_bytes(DType dtype, std::span<const std::int64_t> shape) {
  const bool packed = dtype_bits(dtype) < 8;
  std::uint64_t bytes = packed ? 1 : dtype_bytes(dtype);
  bool empty = false;
  for (const std::int64_t size : shape) {
    empty = empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) return std::nullopt;
    if (bytes > static_cast<std::uint64_t>(INT64_MAX)) return std::nullopt;
  }
  return empty ? 0 : packed ? bytes / 2 : bytes;
}

// Whether each row of the tensor ends with a byte: a u4 tensor's last size is even.
bool whole_bytes(DType dtype, std::span<const std::int64_t> shape) {
  return dtype_bits(dtype) >= 8 || (!shape.empty() && shape.back() % 2 == 0);
}

// 1 to 255 bytes of UTF-8 without C0 and C1 control characters.
bool valid_name(std::string_view name) {
  if (name.empty() || name.size() > kMaxTensorName) return false;
  while (!name.empty()) {
    const std::size_t length = utf8_sequence_length(name);
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(name[i]); };
    const bool control = byte(0) < 0x20 || byte(0) == 0x7F || (length == 2 && byte(0) == 0xC2 && byte(1) < 0xA0);
    if (length == 0 || control) return false;
    name.remove_prefix(length);
  }
  return true;
}

std::uint64_t table_offset_of(std::uint64_t config_bytes) {
  return align_up(checked_add(kHeaderPage, config_bytes, "config_bytes"), kTableAlignment, "config_bytes");
}

std::uint64_t data_offset_of(std::uint64_t config_bytes, std::uint64_t tensor_count) {
  const std::uint64_t table_bytes = checked_mul(tensor_count, sizeof(Record), "tensor_count");
  return align_up(checked_add(table_offset_of(config_bytes), table_bytes, "tensor_count"), kHeaderPage, "tensor_count");
}

// The hash of all bytes before the data, with the field header_hash itself taken as zero.
std::uint64_t hash_header(const std::byte* bytes, std::uint64_t data_offset) {
  const std::uint64_t zero = 0;
  Xxh3Stream stream;
  stream.update(bytes, offsetof(Header, header_hash));
  stream.update(&zero, sizeof zero);
  stream.update(bytes + sizeof(Header), data_offset - sizeof(Header));
  return stream.digest();
}

// The checks of TensorFile::open up to the tensor table, in the order that gives the most specific message.
class Validator {
 public:
  explicit Validator(const MappedFile& file) : file_(file), where_(escaped(file.path())) {}

  Header header() const {
    check_magic(file_, kTensorFileMagic, "a tensor file");
    if (file_.size() < kHeaderPage) {
      fail(Exit::bad_file, "%s: truncated: got %llu bytes, expected at least %llu. %s", where_.c_str(),
           u64{file_.size()}, u64{kHeaderPage}, kAgain);
    }
    Header header;
    std::memcpy(&header, file_.data(), sizeof header);
    check_version(header);
    check_file_bytes(header);
    check_layout(header);
    const std::uint64_t hash = hash_header(file_.data(), header.data_offset);
    if (hash != header.header_hash) {
      fail(Exit::bad_file,
           "%s: header_hash: got %016llx, expected %016llx. The header is damaged: get or make the "
           "file again",
           where_.c_str(), u64{hash}, u64{header.header_hash});
    }
    return header;
  }

  FileKind kind(const Header& header, FileKind expected) const {
    if (header.kind < 1 || header.kind > 4) {
      fail(Exit::bad_file,
           "%s: kind: got %u, expected 1 (model), 2 (training state), 3 (reference dump) or 4 (LoRA adapter)",
           where_.c_str(), header.kind);
    }
    const FileKind kind = static_cast<FileKind>(header.kind);
    if (kind != expected) {
      fail(Exit::bad_file, "%s: kind: this is a %s, expected a %s", where_.c_str(), file_kind_name(kind),
           file_kind_name(expected));
    }
    return kind;
  }

  Json config(const Header& header) const {
    const std::string_view text = file_.text().substr(kHeaderPage, header.config_bytes);
    if (!text.starts_with('{')) {
      fail(Exit::bad_file, "%s: configuration: expected a JSON object", where_.c_str());
    }
    return parse_json(text, where_ + ": configuration", {.bytes = kMaxConfigBytes, .values = kMaxConfigValues});
  }

  void family(const Header& header, const Json& config) const {
    if (header.family >= kFamilies.size()) {
      fail(Exit::bad_file, "%s: family: got %u, expected 0 (none), 1 (llama), 2 (gpt_neox) or 3 (another)",
           where_.c_str(), header.family);
    }
    const Json named = model_family(config);
    if (family_number(named) == header.family) return;
    const std::string text = named.is_null()     ? "none"
                             : named.is_string() ? escaped(named.get<std::string>())
                                                 : escaped(named.dump());
    fail(Exit::bad_file, "%s: family: got %s, expected the configuration's model.family, %s", where_.c_str(),
         kFamilies[header.family], text.c_str());
  }

  void padding(const Header& header) const {
    const std::uint64_t table_end = header.table_offset + header.tensor_count * sizeof(Record);
    zero(sizeof(Header), kHeaderPage, "header page");
    zero(kHeaderPage + header.config_bytes, header.table_offset, "configuration");
    zero(table_end, header.data_offset, "tensor table");
  }

  // Bytes [begin, end) of the file are zero.
  void zero(std::uint64_t begin, std::uint64_t end, const char* section) const {
    const auto set = [](std::byte byte) { return byte != std::byte{0}; };
    if (std::any_of(file_.data() + begin, file_.data() + end, set)) {
      fail(Exit::bad_file, "%s: %s: padding is not zero. %s", where_.c_str(), section, kDamaged);
    }
  }

  TensorInfo record(const Header& header, std::uint64_t index) const {
    Record record;
    std::memcpy(&record, file_.data() + header.table_offset + index * sizeof record, sizeof record);
    TensorInfo tensor;
    tensor.name = record_name(record, index);
    const std::string where = where_ + ": tensor " + escaped(tensor.name);
    if (record.dtype >= kNumDTypes) {
      fail(Exit::bad_file, "%s: dtype: got %u, expected 0 to %u", where.c_str(), record.dtype, kNumDTypes - 1);
    }
    tensor.dtype = static_cast<DType>(record.dtype);
    tensor.shape = record_shape(record, where);
    const std::string shape = shape_text(tensor.shape);
    if (!whole_bytes(tensor.dtype, tensor.shape)) {
      fail(Exit::bad_file, "%s: shape: got %s, expected an even last size for %s", where.c_str(), shape.c_str(),
           dtype_name(tensor.dtype));
    }
    const std::optional<std::uint64_t> bytes = payload_bytes(tensor.dtype, tensor.shape);
    if (!bytes) {
      fail(Exit::bad_file, "%s: shape: the product of %s does not fit in 63 bits", where.c_str(), shape.c_str());
    }
    if (record.bytes != *bytes) {
      fail(Exit::bad_file, "%s: bytes: got %llu, expected %llu for %s %s", where.c_str(), u64{record.bytes},
           u64{*bytes}, dtype_name(tensor.dtype), shape.c_str());
    }
    tensor.offset = record.offset;
    tensor.bytes = record.bytes;
    tensor.hash = record.hash;
    return tensor;
  }

  // The end of `tensor`, which must begin at the first aligned byte after `previous_end`.
  std::uint64_t end_of(const TensorInfo& tensor, std::uint64_t previous_end) const {
    const std::string where = where_ + ": tensor " + escaped(tensor.name);
    const std::uint64_t expected = align_up(previous_end, kTensorAlignment, where);
    if (tensor.offset != expected) {
      fail(Exit::bad_file, "%s: offset: got %llu, expected %llu", where.c_str(), u64{tensor.offset}, u64{expected});
    }
    const std::uint64_t end = checked_add(tensor.offset, tensor.bytes, where);
    if (end > file_.size()) {
      fail(Exit::bad_file, "%s: ends at byte %llu, but the file has %llu", where.c_str(), u64{end}, u64{file_.size()});
    }
    return end;
  }

  void last_byte(std::uint64_t end) const {
    if (end != file_.size()) {
      fail(Exit::bad_file, "%s: file_bytes: got %llu, expected %llu, the end of the last tensor", where_.c_str(),
           u64{file_.size()}, u64{end});
    }
  }

 private:
  // The byte order comes first: in a file with swapped bytes no other number means anything, the version included.
  void check_version(const Header& header) const {
    if (header.byte_order != kByteOrder) {
      fail(Exit::bad_file, "%s: byte_order: got 0x%08x, expected 0x%08x. %s", where_.c_str(), header.byte_order,
           kByteOrder, header.byte_order == kSwappedByteOrder ? "It was made on a big-endian machine" : kDamaged);
    }
    if (header.version != kTensorFileVersion) {
      fail(Exit::bad_file, "%s: version: got %u, expected %u. %s", where_.c_str(), header.version, kTensorFileVersion,
           header.version != 0 ? "It was made by a newer tool: update weft" : kDamaged);
    }
  }

  void check_file_bytes(const Header& header) const {
    if (header.file_bytes > file_.size()) {
      fail(Exit::bad_file, "%s: truncated: got %llu bytes, expected %llu. %s", where_.c_str(), u64{file_.size()},
           u64{header.file_bytes}, kAgain);
    }
    if (header.file_bytes < file_.size()) {
      fail(Exit::bad_file, "%s: file_bytes: got %llu bytes, expected %llu: %llu too many. %s", where_.c_str(),
           u64{file_.size()}, u64{header.file_bytes}, u64{file_.size() - header.file_bytes}, kAgain);
    }
  }

  void check_layout(const Header& header) const {
    check_at_most("config_bytes", header.config_bytes, kMaxConfigBytes);
    check_at_most("tensor_count", header.tensor_count, kMaxTensors);
    check_equal("table_offset", header.table_offset, table_offset_of(header.config_bytes));
    check_equal("data_offset", header.data_offset, data_offset_of(header.config_bytes, header.tensor_count));
    if (header.data_offset > file_.size()) {
      fail(Exit::bad_file, "%s: data_offset: got %llu, expected at most the file's %llu bytes", where_.c_str(),
           u64{header.data_offset}, u64{file_.size()});
    }
  }

  void check_at_most(const char* field, std::uint64_t got, std::uint64_t limit) const {
    if (got > limit) {
      fail(Exit::bad_file, "%s: %s: got %llu, expected at most %llu", where_.c_str(), field, u64{got}, u64{limit});
    }
  }

  void check_equal(const char* field, std::uint64_t got, std::uint64_t expected) const {
    if (got != expected) {
      fail(Exit::bad_file, "%s: %s: got %llu, expected %llu", where_.c_str(), field, u64{got}, u64{expected});
    }
  }

  std::string record_name(const Record& record, std::uint64_t index) const {
    std::size_t length = sizeof record.name;  // without the zeros at the end
    while (length > 0 && record.name[length - 1] == '\0') --length;
    const std::string_view name(record.name, length);
    if (!valid_name(name)) {
      fail(Exit::bad_file,
           "%s: tensor %llu: name: got %s, expected 1 to 255 bytes of UTF-8 without control "
           "characters, padded with zeros",
           where_.c_str(), u64{index}, escaped(name).c_str());
    }
    return std::string(name);
  }

  static std::vector<std::int64_t> record_shape(const Record& record, const std::string& where) {
    if (record.rank > kMaxTensorRank) {
      fail(Exit::bad_file, "%s: rank: got %u, expected at most %zu", where.c_str(), record.rank, kMaxTensorRank);
    }
    std::vector<std::int64_t> shape;
    for (std::uint32_t i = 0; i < record.rank; ++i) {
      if (record.shape[i] > static_cast<std::uint64_t>(INT64_MAX)) {
        fail(Exit::bad_file, "%s: shape: got %llu, expected sizes below 2^63", where.c_str(), u64{record.shape[i]});
      }
      shape.push_back(static_cast<std::int64_t>(record.shape[i]));
    }
    const auto set = [](std::uint64_t size) { return size != 0; };
    if (std::any_of(record.shape + record.rank, std::end(record.shape), set)) {
      fail(Exit::bad_file, "%s: shape: sizes past the rank are not zero", where.c_str());
    }
    return shape;
  }

  const MappedFile& file_;
  std::string where_;
};

}  // namespace

const char* file_kind_name(FileKind kind) {
  switch (kind) {
    case FileKind::model:
      return "model";
    case FileKind::training_state:
      return "training state";
    case FileKind::reference_dump:
      return "reference dump";
    case FileKind::adapter:
      return "LoRA adapter";
  }
  return "unknown kind";
}

std::uint64_t TensorInfo::elements() const {
  std::uint64_t product = 1;
  for (const std::int64_t size : shape) product *= static_cast<std::uint64_t>(size);
  return product;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// ---- reading ----------------------------------------------------------------------------------------------------------

TensorFile TensorFile::open(const std::string& path, FileKind expected) {
  TensorFile file{MappedFile(path)};
  const Validator validate(file.file_);
  const Header header = validate.header();
  file.kind_ = validate.kind(header, expected);
  file.config_ = std::make_shared<const Json>(validate.config(header));
  validate.family(header, *file.config_);
  validate.padding(header);

  file.data_offset_ = header.data_offset;
  file.header_hash_ = header.header_hash;
  file.tensors_.reserve(header.tensor_count);  // at most kMaxTensors, and validated: the table lies within the file
  std::uint64_t end = header.data_offset;
  for (std::uint64_t i = 0; i < header.tensor_count; ++i) {
    const TensorInfo& tensor = file.tensors_.emplace_back(validate.record(header, i));
    if (!file.index_.emplace(tensor.name, i).second) {
      fail(Exit::bad_file, "%s: tensor %s: the name occurs twice", escaped(path).c_str(), escaped(tensor.name).c_str());
    }
    end = validate.end_of(tensor, end);
  }
  validate.last_byte(end);
  return file;
}

const TensorInfo* TensorFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorInfo& TensorFile::at(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  if (tensor == nullptr) {
    fail(Exit::bad_file, "%s: tensor %s: missing", escaped(path()).c_str(), escaped(name).c_str());
  }
  return *tensor;
}

std::span<const std::byte> TensorFile::bytes(const TensorInfo& tensor) const {
  return {file_.data() + tensor.offset, tensor.bytes};
}

void TensorFile::compare_hash(const TensorInfo& tensor, std::uint64_t got) const {
  if (got != tensor.hash) {
    fail(Exit::bad_file,
         "%s: tensor %s: XXH3-64: got %016llx, expected %016llx. The data is damaged: get or make the "
         "file again",
         escaped(path()).c_str(), escaped(tensor.name).c_str(), u64{got}, u64{tensor.hash});
  }
}

void TensorFile::verify(const TensorInfo& tensor) const {
  compare_hash(tensor, xxh3_64(bytes(tensor).data(), tensor.bytes));
}

void TensorFile::verify_all() const {
  const Validator validate(file_);
  std::uint64_t end = data_offset_;
  for (const TensorInfo& tensor : tensors_) {
    validate.zero(end, tensor.offset, "data section");
    verify(tensor);
    end = tensor.offset + tensor.bytes;
  }
}

void TensorFile::require_float(const TensorInfo& tensor) const {
  if (tensor.dtype == DType::f32 || tensor.dtype == DType::f16 || tensor.dtype == DType::bf16) return;
  fail(Exit::bad_file, "%s: tensor %s: dtype: got %s, expected f32, f16 or bf16", escaped(path()).c_str(),
       escaped(tensor.name).c_str(), dtype_name(tensor.dtype));
}

void TensorFile::verify_finite(const TensorInfo& tensor) const {
  read(tensor, nullptr, true);
}

void TensorFile::read_f32(const TensorInfo& tensor, float* out) const {
  read(tensor, out, false);
}

void TensorFile::read_finite_f32(const TensorInfo& tensor, float* out) const {
  read(tensor, out, true);
}

// The check and the conversion read the same bytes and do not need each other's result: on a second core the check of a
// large tensor costs no time.
void TensorFile::read(const TensorInfo& tensor, float* out, bool finite) const {
  require_float(tensor);
  const std::span<const std::byte> data = bytes(tensor);
  DataCheck check(data, tensor.dtype, finite);
  std::thread checker;
  if (out != nullptr && data.size() >= kWorthAThread) {
    try {
      const SignalsElsewhere signals;
      checker = std::thread([&check, &data] { check.process(0, data.size()); });
    } catch (const std::system_error&) {  // the user's limit of threads is reached: this thread checks as well
    }
  }
  const std::size_t element = dtype_bytes(tensor.dtype);
  for (std::size_t done = 0; done < data.size(); done += kPiece) {
    const std::size_t piece = std::min(kPiece, data.size() - done);
    if (!checker.joinable()) check.process(done, done + piece);
    if (out != nullptr) convert_to_f32(data.data() + done, tensor.dtype, out + done / element, piece / element);
  }
  if (checker.joinable()) checker.join();
  compare_hash(tensor, check.hash());
  if (const std::optional<std::size_t> bad = check.first_not_finite()) {
    fail(Exit::bad_file, "%s: %s: element %zu is not finite", escaped(path()).c_str(), escaped(tensor.name).c_str(),
         *bad);
  }
}

// ---- writing ----------------------------------------------------------------------------------------------------------

struct TensorFileWriter::Hasher : Xxh3Stream {};

TensorFileWriter::TensorFileWriter(const std::string& path, FileKind kind, const Json& config)
    : path_(path), kind_(kind), hasher_(std::make_shared<Hasher>()) {
  const std::optional<std::uint32_t> family = config.is_object() ? family_number(model_family(config)) : std::nullopt;
  if (!family) fail(Exit::internal, "%s: model.family of the configuration is no name", escaped(path).c_str());
  family_ = *family;
  try {
    config_text_ = config.dump();  // compact, keys sorted: scripts/tensor_file.py writes the same
  } catch (const Json::exception& problem) {
    fail(Exit::internal, "%s: configuration: %s", escaped(path).c_str(), problem.what());
  }
  if (config_text_.size() > kMaxConfigBytes) {
    fail(Exit::internal, "%s: configuration of %zu bytes: at most %zu are accepted", escaped(path).c_str(),
         config_text_.size(), kMaxConfigBytes);
  }
}

void TensorFileWriter::declare(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
  const auto negative = [](std::int64_t size) { return size < 0; };
  const bool valid_shape =
      shape.size() <= kMaxTensorRank && std::none_of(shape.begin(), shape.end(), negative) && whole_bytes(dtype, shape);
  const std::optional<std::uint64_t> bytes = valid_shape ? payload_bytes(dtype, shape) : std::nullopt;
  if (file_ != nullptr || tensors_.size() == kMaxTensors || !bytes || !valid_name(name) ||
      !names_.insert(name).second) {
    fail(Exit::internal,
         "%s: cannot declare tensor %s, %s %s: after the first write, or not a new valid name and shape",
         escaped(path_).c_str(), escaped(name).c_str(), dtype_name(dtype), shape_text(shape).c_str());
  }
  TensorInfo& tensor = tensors_.emplace_back();
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes = *bytes;
}

void TensorFileWriter::begin() {
  if (file_ != nullptr) return;
  data_offset_ = data_offset_of(config_text_.size(), tensors_.size());
  std::uint64_t end = data_offset_;
  for (TensorInfo& tensor : tensors_) {
    tensor.offset = align_up(end, kTensorAlignment, tensor.name);
    end = checked_add(tensor.offset, tensor.bytes, tensor.name);
  }
  if (end > static_cast<std::uint64_t>(INT64_MAX)) {
    fail(Exit::internal, "%s: %llu bytes are too large for a file", escaped(path_).c_str(), u64{end});
  }
  file_bytes_ = end;
  file_ = std::make_unique<AtomicFile>(path_, file_bytes_);
  pad_to(data_offset_);
  start_tensor();
}

void TensorFileWriter::pad_to(std::uint64_t offset) {
  static constexpr std::array<std::byte, kHeaderPage> zeros{};
  if (shared_) written_ = offset;  // share() has filled the file with zeros
  while (written_ < offset) append(zeros.data(), std::min<std::uint64_t>(zeros.size(), offset - written_));
}

// With write_behind_ the bytes must not change until publish().
void TensorFileWriter::append(const void* data, std::size_t bytes) {
  if (shared_) {
    file_->rewrite(written_, data, bytes);
  } else if (write_behind_ != nullptr) {
    write_behind_->write(data, bytes);
  } else {
    file_->write(data, bytes);
  }
  written_ += bytes;
}

// Moves to the first tensor from current_ on that has bytes, finishing the empty ones on the way.
void TensorFileWriter::start_tensor() {
  for (; current_ < tensors_.size(); ++current_) {
    pad_to(tensors_[current_].offset);
    hasher_->reset();
    current_bytes_ = 0;
    if (tensors_[current_].bytes > 0) return;
    tensors_[current_].hash = hasher_->digest();
  }
}

void TensorFileWriter::finish_tensor() {
  tensors_[current_].hash = hasher_->digest();
  ++current_;
  start_tensor();
}

void TensorFileWriter::write(const void* data, std::size_t bytes) {
  begin();
  if (bytes == 0) return;
  if (current_ == tensors_.size() || bytes > tensors_[current_].bytes - current_bytes_) {
    fail(Exit::internal, "%s: more data than declared%s%s", escaped(path_).c_str(),
         current_ < tensors_.size() ? " for tensor " : "",
         current_ < tensors_.size() ? escaped(tensors_[current_].name).c_str() : "");
  }
  const auto* cursor = static_cast<const std::byte*>(data);
  for (std::size_t done = 0; done < bytes; done += kPiece) {
    const std::size_t piece = std::min(kPiece, bytes - done);
    const std::byte* from = cursor + done;
    if (write_behind_ != nullptr) {  // it writes later, but the caller may change its bytes when this function returns
      std::byte* const buffer = write_behind_->buffer();
      std::memcpy(buffer, from, piece);
      from = buffer;
    }
    hasher_->update(from, piece);
    append(from, piece);
  }
  current_bytes_ += bytes;
  if (current_bytes_ == tensors_[current_].bytes) finish_tensor();
}

void TensorFileWriter::require_next(std::size_t count) const {
  if (current_ == tensors_.size() || current_bytes_ != 0 || tensors_[current_].elements() != count) {
    fail(Exit::internal, "%s: %zu values do not match the next declared tensor", escaped(path_).c_str(), count);
  }
}

void TensorFileWriter::write_parts(std::size_t count, const Part& part) {
  begin();
  if (count == 0) return;  // an empty tensor is already finished
  require_next(count);
  if (shared_ || tensors_[current_].dtype != DType::f32)
    fail(Exit::internal, "%s: parts are of fp32", escaped(path_).c_str());
  if (write_behind_ == nullptr) write_behind_ = std::make_unique<WriteBehind>(*file_);
  constexpr std::size_t kValues = WriteBehind::kPiece / sizeof(float);
  for (std::size_t first = 0; first < count; first += kValues) {
    const std::size_t values = std::min(kValues, count - first);
    const float* data = part(first, values, reinterpret_cast<float*>(write_behind_->buffer()));
    hasher_->update(data, values * sizeof(float));
    append(data, values * sizeof(float));
  }
  current_bytes_ = tensors_[current_].bytes;
  finish_tensor();
}

void TensorFileWriter::write_f32(const float* data, std::size_t count) {
  begin();
  if (count == 0) return;  // an empty tensor is already finished
  require_next(count);
  const DType dtype = tensors_[current_].dtype;
  if (dtype == DType::f32) return write(data, count * sizeof(float));
  std::vector<std::uint16_t> converted(std::min(count, kPiece / sizeof(std::uint16_t)));
  for (std::size_t done = 0; done < count; done += converted.size()) {
    const std::size_t piece = std::min(converted.size(), count - done);
    convert_from_f32(data + done, dtype, converted.data(), piece);  // refuses dtypes that are not float
    write(converted.data(), piece * sizeof(std::uint16_t));
  }
}

std::string TensorFileWriter::share() {
  begin();
  if (current_bytes_ > 0) fail(Exit::internal, "%s: shared after the first write", escaped(path_).c_str());
  file_->extend(file_bytes_);
  shared_ = true;
  return file_->temporary();
}

void TensorFileWriter::written_by_others(std::uint64_t hash) {
  if (!shared_ || current_ == tensors_.size() || current_bytes_ > 0) {
    fail(Exit::internal, "%s: no tensor that others could have written", escaped(path_).c_str());
  }
  tensors_[current_++].hash = hash;
  start_tensor();
}

void TensorFileWriter::publish() {
  begin();
  if (current_ < tensors_.size()) {
    fail(Exit::internal, "%s: tensor %s: %llu of %llu bytes written", escaped(path_).c_str(),
         escaped(tensors_[current_].name).c_str(), u64{current_bytes_}, u64{tensors_[current_].bytes});
  }
  if (write_behind_ != nullptr) write_behind_->drain();
  const std::vector<std::byte> head = header_bytes();
  file_->rewrite(0, head.data(), head.size());
  file_->publish();
}

std::vector<std::byte> TensorFileWriter::header_bytes() const {
  std::vector<std::byte> head(data_offset_);
  Header header{};
  std::memcpy(header.magic, kTensorFileMagic.data(), sizeof header.magic);
  header.version = kTensorFileVersion;
  header.byte_order = kByteOrder;
  header.kind = static_cast<std::uint32_t>(kind_);
  header.family = family_;
  header.file_bytes = file_bytes_;
  header.config_bytes = config_text_.size();
  header.tensor_count = tensors_.size();
  header.table_offset = table_offset_of(config_text_.size());
  header.data_offset = data_offset_;
  std::memcpy(head.data(), &header, sizeof header);
  std::memcpy(head.data() + kHeaderPage, config_text_.data(), config_text_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const TensorInfo& tensor = tensors_[i];
    Record record{};
    std::memcpy(record.name, tensor.name.data(), tensor.name.size());
    record.dtype = static_cast<std::uint32_t>(tensor.dtype);
    record.rank = static_cast<std::uint32_t>(tensor.shape.size());
    for (std::size_t k = 0; k < tensor.shape.size(); ++k) record.shape[k] = static_cast<std::uint64_t>(tensor.shape[k]);
    record.offset = tensor.offset;
    record.bytes = tensor.bytes;
    record.hash = tensor.hash;
    std::memcpy(head.data() + header.table_offset + i * sizeof record, &record, sizeof record);
  }
  header.header_hash = hash_header(head.data(), data_offset_);
  std::memcpy(head.data(), &header, sizeof header);
  return head;
}

}  // namespace weft
