// --bench: the speed of a training step on random tokens. Reads no data, saves nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/comm/communicator.h"
#include "llmc/model/operator_table.h"
#include "llmc/model/train_model.h"
#include "llmc/train/options.h"

namespace weft {

struct TrainBenchResult {
  std::int64_t tokens = 0;  // of a step, of all ranks
  int ranks = 1;
  double median_ms = 0, fastest_ms = 0, slowest_ms = 0;
  double flops_per_token = 0;  // training_flops_per_token()
  bool trains_adapter = false;
  double peak_flops = 0;  // dense bf16 of the ranks' GPUs by their datasheet; 0: unknown
  double first_loss = 0, last_loss = 0;
  std::uint64_t memory_bytes = 0;  // of the model of a rank: TrainModel::memory()

  double tokens_per_s() const { return static_cast<double>(tokens) / median_ms * 1e3; }
  double mfu() const { return peak_flops > 0 ? tokens_per_s() * flops_per_token / peak_flops : 0; }
};

// Multiplications and additions of a training step for each token of sequences of length T, forward and backward:
// 6 N_matmul for the N_matmul elements of all matrices but the embedding, and 6 L q T for causal attention in L layers with
// q = heads x head size. With an adapter 4 N_matmul + 6 L q T of the frozen model, whose weights have no gradients, and 6 for each
// of the adapter's parameters.
double training_flops_per_token(const ModelConfig& config, const std::optional<LoraConfig>& lora, std::int64_t T);

// Random parameters with the standard deviation of a new model's, in a fraction of the time of initialize_parameters().
// `trains_adapter`: also of the frozen model, and of B, which a new adapter has as zeros.
void bench_parameters(TrainModel& model, bool trains_adapter = false);

// Warm-up steps, then timed ones, each with data, accumulation, gradient norm and update as in training. The parameters
// must hold real values: the power a GPU draws, and with it its clock, depends on the numbers.
// Several ranks measure together, each with its share of the step.
TrainBenchResult bench_training(TrainModel& model, const TrainSettings& settings, const std::string& device_name,
                                Communicator& ranks);

// A few lines that say what was measured and how the share of the peak is computed.
std::vector<std::string> train_bench_text(const TrainBenchResult& result, const std::string& device_name);
Json train_bench_json(const TrainBenchResult& result, const TrainSettings& settings, const std::string& device_name);

// --bench --operators: a step's operators one by one, each the median of several steps. Exit::usage for a model
// that cannot time its operators (only those on a GPU can).
OperatorTable bench_operators(TrainModel& model, const TrainSettings& settings);
// For each operator its calls, time and rates, and its floor as a share of the time. The floor is the least time that the
// measured peaks of the GPU allow, bytes_per_s and flops_per_s of the table.
std::vector<std::string> operator_table_text(const OperatorTable& table, const std::string& device_name);
Json operator_table_json(const OperatorTable& table, const TrainSettings& settings, const std::string& device_name);

}  // namespace weft
