// Tensor files and the model files among them: header, configuration, table, hashes, values, tokenizer.
//
//   u8 modulo 3: what the caller asks for (a model, a training state, a dump), modulo 2: of which family
//   the file, as tensor_bytes.h describes it
#include <vector>

#include "llmc/file/tensor_file.h"
#include "llmc/model/model_file.h"
#include "test/fuzz/memory_files.h"
#include "test/fuzz/target.h"
#include "test/fuzz/tensor_bytes.h"

namespace weft::fuzz {
namespace {

constexpr const char* kPath = "fuzz/model.bin";

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

// What an opened file promises: every tensor lies in it, and can be read to the last byte.
void use(const TensorFile& file) {
  std::vector<float> values;
  std::uint64_t end = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    FUZZ_CHECK(tensor.offset >= end && tensor.offset + tensor.bytes <= file.file_bytes());
    FUZZ_CHECK(tensor.elements() * dtype_bits(tensor.dtype) == 8 * tensor.bytes);
    FUZZ_CHECK(file.find(tensor.name) == &tensor && &file.at(tensor.name) == &tensor);
    end = tensor.offset + tensor.bytes;
    const bool whole = accepts([&] { file.verify(tensor); });
    if (!is_float(tensor.dtype)) continue;
    values.resize(tensor.elements());
    FUZZ_CHECK(accepts([&] { file.read_f32(tensor, values.data()); }) == whole);
  }
  accepts([&] { file.verify_all(); });
  accepts([&] { file.at("no such tensor"); });
}

void use(const ModelFile& model) {
  std::vector<std::byte> values;
  for (const TensorSpec& spec : model.table().specs()) {
    values.resize(spec.bytes);
    const bool good = accepts([&] { model.read_tensor(spec, values.data()); });
    if (good && spec.kind != ValueKind::floats) FUZZ_CHECK(!first_invalid_value(spec.kind, spec.dtype, values));
  }
  const bool refused = !accepts([&] { model.require_trainable(); });
  FUZZ_CHECK(refused || !model.table().quantized());
  accepts([&] { model.tokenizer_json(); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto kind = input.take<std::uint8_t>();
  put_file(kPath, tensor_file_bytes(input));
  accepts([&] { use(TensorFile::open(kPath, static_cast<FileKind>(1 + kind % 3))); });
  if (kind % 3 == 0) {
    accepts([&] { use(ModelFile::open(kPath)); });
  }
  return 0;
}

}  // namespace weft::fuzz
