// The device that infer_pythia runs on: chooses the device, the dtype and the way of decoding, checks that the model
// fits into memory, and loads it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "llmc/app/device.h"
#include "llmc/base/dtype.h"
#include "llmc/base/threads.h"
#include "llmc/infer/engine_sequence.h"
#include "llmc/infer/options.h"
#include "llmc/infer/report.h"
#include "llmc/model/config.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"
#include "llmc/model/model_file.h"

namespace weft {

class DecodeDevice {
 public:
  // Chooses the device. `settings` must outlive this object. Exit::usage or Exit::environment if it is the CPU
  // and --decode or --dtype need a GPU.
  explicit DecodeDevice(const InferSettings& settings);

  // A draft model of this shape will share the memory. To be called before choose().
  void expect_draft(const ModelConfig& config) { draft_ = config; }
  // Chooses the dtype and the way of decoding for this model; to be called before anything is loaded or made. `stored`:
  // the dtype of the model's file; `lora`: of ModelFile::adapter_beside(). With --device auto, a model that the GPU cannot run goes to
  // the CPU.
  void choose(const ModelConfig& config, DType stored, const std::optional<LoraConfig>& lora = std::nullopt);

  bool gpu() const { return choice_.gpu; }
  // A guess of DraftOptions::row_cost, the cost of a further row in a step: a GPU reads the weights either way, a CPU
  // has little arithmetic to spare. A rough value is enough: it decides about when there are too many guesses.
  double row_cost() const { return choice_.gpu ? 0.01 : 0.15; }
  // Tolerance of a comparison with PyTorch, both in fp32, relative to a tensor's largest value.
  double compare_tolerance() const { return choice_.gpu ? 1e-4 : 1e-5; }
  DecodePath path() const { return {choice_.gpu ? "cuda" : "cpu", decode_}; }
  // GB/s of a kernel that only reads the GPU's memory; 0 on the CPU: not measured.
  double read_ceiling() const;

  // Loads the model, with a K/V cache of `capacity` positions. Exit::resources, with advice, if it does not fit.
  std::unique_ptr<DecodeModel> load(const ModelFile& file, std::int64_t capacity) const;
  // Loads the model for at most `sequences` sequences at once, with K/V pages in `kv_memory` bytes; 0: in most of what is
  // free, but no more than so many sequences can fill. Exit::resources, with how much is needed, if it does not fit.
  std::unique_ptr<InferenceModel> load_inference(const ModelFile& file, std::uint64_t kv_memory,
                                                 std::int64_t sequences) const;
  // The model for one sequence of `capacity` positions, as an InferenceModel.
  std::unique_ptr<InferenceModel> load_sequence(const ModelFile& file, std::int64_t capacity) const;
  // The draft model for all sequences of `model`, with as many positions in its pages. Exit::usage if the GPU cannot run it.
  std::unique_ptr<InferenceModel> load_draft(const ModelFile& file, const InferenceModel& model) const;
  // The draft model for the one sequence of `model`: in the fused kernel where --decode is auto or fused and the GPU has it,
  // otherwise as load_draft() makes it.
  SequenceDraft load_sequence_draft(const ModelFile& file, const InferenceModel& model) const;
  // The same with random weights; on the CPU for GPT-NeoX only (Exit::usage).
  std::unique_ptr<DecodeModel> make_random(const ModelConfig& config, std::int64_t capacity) const;
  std::unique_ptr<InferenceModel> make_random_inference(const ModelConfig& config, std::uint64_t kv_memory,
                                                        std::int64_t sequences) const;
  std::unique_ptr<InferenceModel> make_random_sequence(const ModelConfig& config, std::int64_t capacity) const;
  SequenceDraft make_random_draft(const ModelConfig& config, const InferenceModel& model) const;

 private:
  void use_cpu(const DeviceChoice& cpu);
  void choose_decode(const ModelConfig& config, bool many);
  void announce_gpu() const;
  void check_memory(const ModelConfig& config, std::int64_t capacity) const;
  std::uint64_t planned(const ModelConfig& config, std::int64_t capacity, std::int64_t rows, DType dtype) const;
  // Pools: of many sequences, of one, of the draft model for all sequences of `model`.
  InferenceOptions many_pool(const ModelConfig& config, std::uint64_t kv_memory, std::int64_t sequences) const;
  InferenceOptions sequence_pool(std::int64_t capacity) const;
  InferenceOptions draft_pool(const ModelConfig& config, const InferenceModel& model) const;
  // Whether small steps of this model run in the fused kernel (GpuInferenceOptions::fused_steps), and what that takes, with the
  // draft model's.
  bool fused_steps(const ModelConfig& config) const;
  std::uint64_t steps_memory(const ModelConfig& config) const;
  // Whether a draft model for one sequence runs in the fused kernel.
  bool fuses_draft(const ModelConfig& config) const;
  // The DecodeModel of make(pool) for one sequence on the GPU.
  using MakePages = std::function<std::unique_ptr<InferenceModel>(const InferenceOptions& pool)>;
  std::unique_ptr<DecodeModel> one_on_gpu(const ModelConfig& config, std::int64_t capacity,
                                          const MakePages& make) const;
  SequenceDraft sequence_draft(const ModelConfig& config, const InferenceModel& model, const MakePages& make) const;
  // The model on the chosen device, from a file or with random weights.
  std::unique_ptr<InferenceModel> load_pages(const ModelFile& file, const InferenceOptions& pool,
                                             bool fp8_activations = false) const;
  std::unique_ptr<InferenceModel> random_pages(const ModelConfig& config, const InferenceOptions& pool,
                                               bool fp8_activations = false) const;

  const InferSettings& settings_;
  DeviceChoice choice_;
  std::optional<ModelConfig> draft_;
  std::optional<LoraConfig> lora_;           // of an adapter beside the model's weights
  std::optional<SharedCores> shared_cores_;  // only if the CPU computes
  DType dtype_ = DType::f32;
  std::string decode_ = "reference";  // on a GPU also "graph" or "fused"
};

}  // namespace weft
