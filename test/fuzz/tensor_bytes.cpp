#include "test/fuzz/tensor_bytes.h"

#include <cstddef>

#include "llmc/base/dtype.h"
#include "llmc/base/hash.h"
#include "llmc/file/signature.h"
#include "llmc/file/tensor_file.h"

namespace weft::fuzz {

namespace {

constexpr std::size_t kRecordBytes = 352;
constexpr std::size_t kHeaderHash = 64, kTableOffset = 48, kDataOffset = 56, kTensorCount = 40;
constexpr std::size_t kRecordOffset = 328, kRecordSize = 336, kRecordHash = 344;

template <typename Number>
void put(std::vector<std::uint8_t>& file, std::size_t at, Number value) {
  if (at + sizeof value <= file.size()) std::memcpy(file.data() + at, &value, sizeof value);
}

template <typename Number>
Number get(const std::vector<std::uint8_t>& file, std::size_t at) {
  Number value{};
  if (at + sizeof value <= file.size()) std::memcpy(&value, file.data() + at, sizeof value);
  return value;
}

std::size_t up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Makes the hash of each tensor whose range lies in the file.
void hash_tensors(std::vector<std::uint8_t>& file) {
  const auto table = get<std::uint64_t>(file, kTableOffset), count = get<std::uint64_t>(file, kTensorCount);
  for (std::uint64_t i = 0; i < count && i < 64; ++i) {
    const std::uint64_t at = table + i * kRecordBytes;
    if (at > file.size() || file.size() - at < kRecordBytes) return;
    const auto offset = get<std::uint64_t>(file, at + kRecordOffset),
               bytes = get<std::uint64_t>(file, at + kRecordSize);
    if (offset <= file.size() && bytes <= file.size() - offset) {
      put(file, at + kRecordHash, xxh3_64(file.data() + offset, bytes));
    }
  }
}

void hash_header(std::vector<std::uint8_t>& file) {
  const auto end = get<std::uint64_t>(file, kDataOffset);
  if (end < kHeaderHash + 8 || end > file.size()) return;
  put<std::uint64_t>(file, kHeaderHash, 0);
  put(file, kHeaderHash, xxh3_64(file.data(), end));
}

// Bytes below 64: no float of them is infinite.
const std::string& values() {
  static const std::string all = [] {
    std::string bytes(kMaxFileBytes + 256, '\0');
    std::uint32_t state = 1;
    for (char& byte : bytes) byte = static_cast<char>((state = state * 1664525 + 1013904223) >> 26);
    return bytes;
  }();
  return all;
}

struct Tensor {
  std::string_view name;
  std::uint8_t dtype = 0, rank = 0;
  std::uint16_t shape[8] = {};
  std::uint64_t offset = 0, bytes = 0;
};

Tensor take_tensor(Input& input) {
  Tensor tensor;
  tensor.name = input.take_text(input.take<std::uint8_t>());
  tensor.dtype = input.take<std::uint8_t>();
  tensor.rank = input.take<std::uint8_t>() % 9;
  const std::uint64_t bits = tensor.dtype < kNumDTypes ? dtype_bits(static_cast<DType>(tensor.dtype)) : 8;
  std::uint64_t elements = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    tensor.shape[i] = input.take<std::uint16_t>();
    elements = std::min<std::uint64_t>(elements * tensor.shape[i], std::uint64_t{1} << 40);
  }
  tensor.bytes = elements * bits / 8;
  return tensor;
}

std::vector<std::uint8_t> from_description(Input& input) {
  const auto kind = input.take<std::uint8_t>(), family = input.take<std::uint8_t>();
  const std::string_view config = input.take_text(input.take<std::uint16_t>());
  std::vector<Tensor> tensors(input.take<std::uint8_t>() % 64);
  for (Tensor& tensor : tensors) tensor = take_tensor(input);
  const auto seed = input.take<std::uint8_t>();

  const std::size_t table = up(kHeaderPage + config.size(), 8);
  const std::size_t data = up(table + tensors.size() * kRecordBytes, kHeaderPage);
  std::uint64_t end = data;
  for (Tensor& tensor : tensors) {
    tensor.offset = (end + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    end = tensor.offset + tensor.bytes;
  }
  std::vector<std::uint8_t> file(std::min<std::uint64_t>(end, kMaxFileBytes));
  const auto copy = [&](std::size_t at, std::string_view text) {
    if (!text.empty() && at < file.size()) {
      std::memcpy(file.data() + at, text.data(), std::min(text.size(), file.size() - at));
    }
  };
  copy(0, kTensorFileMagic);
  const std::uint32_t words[] = {kTensorFileVersion, 0x01020304, kind, family};
  const std::uint64_t longs[] = {end, config.size(), tensors.size(), table, data};
  for (std::size_t i = 0; i < 4; ++i) put(file, 8 + 4 * i, words[i]);
  for (std::size_t i = 0; i < 5; ++i) put(file, 24 + 8 * i, longs[i]);
  copy(kHeaderPage, config);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const std::size_t at = table + i * kRecordBytes;
    copy(at, tensor.name.substr(0, 256));
    put<std::uint32_t>(file, at + 256, tensor.dtype);
    put<std::uint32_t>(file, at + 260, tensor.rank);
    for (std::size_t k = 0; k < 8; ++k) put<std::uint64_t>(file, at + 264 + 8 * k, tensor.shape[k]);
    put(file, at + kRecordOffset, tensor.offset);
    put(file, at + kRecordSize, tensor.bytes);
    if (tensor.offset < file.size()) {
      const std::uint64_t bytes = std::min<std::uint64_t>(tensor.bytes, file.size() - tensor.offset);
      copy(tensor.offset, std::string_view(values()).substr((seed + 37 * i) % 256, bytes));
    }
  }
  for (int changes = input.take<std::uint8_t>() % 16; changes > 0; --changes) {
    const auto where = input.take<std::uint16_t>();
    copy(where, input.take_text(input.take<std::uint8_t>() % 9));
  }
  return file;
}

}  // namespace

std::vector<std::uint8_t> tensor_file_bytes(Input& input) {
  const auto flags = input.take<std::uint8_t>();
  std::vector<std::uint8_t> file;
  if ((flags & 1) != 0) {
    const std::string_view rest = input.take_rest().substr(0, kMaxFileBytes);
    file.assign(rest.begin(), rest.end());
  } else {
    file = from_description(input);
  }
  if ((flags & 4) == 0) hash_tensors(file);
  if ((flags & 2) == 0) hash_header(file);
  return file;
}

}  // namespace weft::fuzz
