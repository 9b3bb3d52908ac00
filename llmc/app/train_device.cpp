#include "llmc/app/train_device.h"

#include <sys/utsname.h>

#include <algorithm>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/log.h"
#include "llmc/comm/heartbeat.h"
#include "llmc/cpu/training.h"
#include "llmc/train/fault_injection.h"
#ifdef WEFT_CUDA
#include "llmc/cuda/inference/inference.h"
#include "llmc/cuda/op/gemm/matmul.h"
#include "llmc/cuda/training/training.h"
#endif

namespace weft {

namespace {

// --dry-run and --print-config accept --device cuda on a machine without a GPU, if the program was built with CUDA.
DeviceRequest request_of(const TrainSettings& settings) {
  const FaultPlan faults = parse_faults(settings.debug_inject);
  DeviceRequest request{settings.device, settings.dry_run || settings.print_config,
                        static_cast<int>(faults.gpu_arch.value_or(0)), std::nullopt};
  if (faults.gpu_free) request.pretended_free_bytes = static_cast<std::uint64_t>(*faults.gpu_free);
  if (settings.gpu_memory_bytes > 0) {
    request.device = "cuda";
    request.planned_gpu = "a GPU with " + settings.gpu_memory;
    request.planned_gpu_bytes = settings.gpu_memory_bytes;
  }
  return request;
}

DeviceChoice choose(const TrainSettings& settings, const RankTeam& team) {
  if (team.size() > 1 && settings.device != "cpu") see_own_gpu(team.local_rank());
  return choose_device(request_of(settings));
}

}  // namespace

struct TrainDevice::Links {
#ifdef WEFT_CUDA
  std::unique_ptr<cuda::DeviceRanks> gpus;
#endif
};

TrainDevice::~TrainDevice() = default;

TrainDevice::TrainDevice(TrainSettings& settings, const RankTeam& team)
    : choice_(choose(settings, team)),
      rank_(team.rank()),
      ranks_(team.size()),
      local_ranks_(team.local_size()),
      shard_(settings.shard_kind()),
      time_limit_s_(settings.comm_timeout) {
  announce_cpu(choice_);
  if (!choice_.gpu) shared_cores_.emplace();
  if (!choice_.gpu && settings.precision == "bf16") {
    fail(Exit::usage, "--precision: got bf16, the CPU computes in fp32 and fp8 only");
  }
  const std::string precision = settings.precision != "auto" ? settings.precision : choice_.gpu ? "bf16" : "fp32";
  settings.set_device(choice_.gpu ? "cuda" : "cpu", precision);
  const bool sharded = ranks_ > 1 && !settings.eval;  // each rank of --eval has a model of its own
  if (!choice_.gpu && sharded && shard_ == Shard::gradients) {
    fail(Exit::usage, "--shard: got gradients, which needs a GPU. Use optimizer or parameters");
  }
  const bool gradients_sharded = sharded && (shard_ == Shard::gradients || shard_ == Shard::parameters);
  if (choice_.gpu && gradients_sharded && settings.rank_accumulation() > 1) {
    fail(
        Exit::usage,
        "--shard: got %s with %lld micro-batches a rank and step, expected one. --virtual-ranks %lld makes each a rank "
        "of its own, and --shard optimizer takes any number",
        settings.shard.c_str(), static_cast<long long>(settings.rank_accumulation()),
        static_cast<long long>(settings.accumulation()));
  }
  if (settings.moments == "bf16" && (!choice_.gpu || precision == "fp32")) {
    fail(Exit::usage, "--moments: got bf16, which needs a GPU and --precision bf16 or fp8");
  }
}

std::vector<MemoryLine> TrainDevice::plan(const ModelConfig& config, const TrainOptions& options,
                                          [[maybe_unused]] std::int64_t sample_positions, Holds holds) const {
  if (options.precision == Precision::fp8) check_fp8_sizes(config, options.micro_batch, options.seq_len);
  const bool is_part = ranks_ > 1 && holds == Holds::part;
  const Shard shard = options.lora ? std::min(shard_, Shard::optimizer) : shard_;  // an adapter has no other
#ifdef WEFT_CUDA
  if (choice_.gpu) {
    std::vector<MemoryLine> lines =
        is_part ? cuda::plan_training(config, options, rank_, ranks_, shard) : cuda::plan_training(config, options);
    if (sample_positions == 0) return lines;
    for (MemoryLine& line : cuda::plan_samples(config, options.precision, sample_positions)) {
      lines.push_back(std::move(line));
    }
    if (options.lora) lines.push_back(cuda::plan_merged(config, options));
    return lines;
  }
#endif
  return is_part ? cpu::plan_training(config, options, rank_, ranks_, shard) : cpu::plan_training(config, options);
}

std::uint64_t TrainDevice::planned_bytes(const ModelConfig& config, const TrainOptions& options,
                                         std::int64_t sample_positions, Holds holds) const {
  const auto sharing = static_cast<std::uint64_t>(choice_.gpu ? 1 : local_ranks_);
  return sharing * total_bytes(plan(config, options, sample_positions, holds));
}

std::vector<RankField> TrainDevice::rank_fields() const {
  std::vector<RankField> fields = {{"device", choice_.name}};
#ifdef WEFT_CUDA
  if (choice_.gpu) {
    fields.push_back({"cuBLASLt", cuda::cublaslt_version()});
    fields.push_back({"NCCL", cuda::nccl_version()});
  }
#endif
  return fields;
}

std::string TrainDevice::gpu_id() const {
  if (choice_.id.empty()) return {};
  utsname system{};
  ::uname(&system);
  return std::string(system.nodename) + " " + choice_.id;
}

void TrainDevice::check_memory(const ModelConfig& config, const TrainOptions& options, std::int64_t batch_sequences,
                               std::int64_t sample_positions, Holds holds) const {
  TrainOptions smaller = options;
  const auto planned = [&] { return planned_bytes(config, smaller, sample_positions, holds); };
  const std::uint64_t available = choice_.available_bytes, needed = planned();
  if (needed <= available || available == 0) return;
  if (batch_sequences == 0) fail_plan(needed, choice_, "Make a reference dump of fewer or shorter sequences");
  do --smaller.micro_batch;
  while (smaller.micro_batch > 1 && (batch_sequences % smaller.micro_batch != 0 || planned() > available));
  const bool fits = smaller.micro_batch > 0 && planned() <= available;
  fail_plan(needed, choice_,
            fits ? format("--micro-batch %lld would fit", static_cast<long long>(smaller.micro_batch))
            : choice_.gpu
                ? "Not even --micro-batch 1 fits: try --recompute block, --moments bf16, a shorter --seq-len or "
                  "a smaller model"
                : "Not even --micro-batch 1 fits: try --recompute block, a shorter --seq-len or a smaller model");
}

std::unique_ptr<TrainModel> TrainDevice::make(const ModelConfig& config, const TrainOptions& options) const {
#ifdef WEFT_CUDA
  if (choice_.gpu) return cuda::make_training_model(config, options);
#endif
  return cpu::make_training_model(config, options);
}

std::unique_ptr<TrainModel> TrainDevice::make(const ModelConfig& config, const TrainOptions& options,
                                              Communicator& ranks) {
  if (ranks.size() == 1) return make(config, options);
  const Heartbeat patience(ranks);  // rank 0 may have to try GEMM plans for all
#ifdef WEFT_CUDA
  if (choice_.gpu) {
    links_ = std::make_unique<Links>();
    links_->gpus = cuda::make_device_ranks(ranks, time_limit_s_);
    log_info("%d ranks: gradients and parameters move by %s", ranks.size(), links_->gpus->name().c_str());
    return cuda::make_training_model(config, options, ranks, *links_->gpus, shard_);
  }
#endif
  return cpu::make_training_model(config, options, ranks, shard_);
}

}  // namespace weft
