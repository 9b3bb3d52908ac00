// The device of a generation: how it decodes, what its memory holds, and the model on it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "llmc/app/device.h"
#include "llmc/base/dtype.h"
#include "llmc/base/threads.h"
#include "llmc/infer/options.h"
#include "llmc/infer/report.h"
#include "llmc/model/config.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/model_file.h"

namespace weft {

class DecodeDevice {
 public:
  // `settings` must outlive this object. Exit::usage or Exit::environment where --decode or --dtype need another device.
  explicit DecodeDevice(const InferSettings& settings);

  // Settles what depends on the model; before load() and make_random(). `stored`: the dtype of its file. With --device
  // auto a model that the GPU cannot run goes to the CPU.
  void choose(const ModelConfig& config, DType stored);

  bool gpu() const { return choice_.gpu; }
  // Of a comparison in fp32 with PyTorch in fp32, relative to a tensor's largest value.
  double compare_tolerance() const { return choice_.gpu ? 1e-4 : 1e-5; }
  DecodePath path() const { return {choice_.gpu ? "cuda" : "cpu", decode_}; }
  // GB/s of a plain read on the GPU; 0 on the CPU: not measured.
  double read_ceiling() const;

  // The model with a K/V cache of `capacity` positions. Exit::resources with advice where it cannot fit.
  std::unique_ptr<DecodeModel> load(const ModelFile& file, std::int64_t capacity) const;
  // The same with random weights; needs a GPU.
  std::unique_ptr<DecodeModel> make_random(const ModelConfig& config, std::int64_t capacity) const;

 private:
  void use_cpu(const DeviceChoice& cpu);
  void choose_decode(const ModelConfig& config);
  void check_memory(const ModelConfig& config, std::int64_t capacity) const;

  const InferSettings& settings_;
  DeviceChoice choice_;
  std::optional<SharedCores> shared_cores_;  // on the CPU
  DType dtype_ = DType::f32;
  std::string decode_ = "reference";  // on a GPU graph and fused, too
};

}  // namespace weft
