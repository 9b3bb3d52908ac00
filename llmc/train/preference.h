// Direct preference optimisation (Rafailov et al., 2023): a model learns from pairs of answers to one prompt, of which one is
// preferred, measured against the model that the run began with.
//
// An answer's reward is beta (log p(answer) - log p_ref(answer)), where log p is the sum over its learned tokens. A pair's margin
// is the reward of the chosen answer minus that of the rejected one, and its loss -log sigmoid(margin) (equation 7). A step's
// loss is the mean over its pairs, of all micro-batches and ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/comm/communicator.h"
#include "llmc/model/train_model.h"
#include "llmc/train/data_loader.h"

namespace weft {

// Of a pair's two answers: log p, the sum over the learned tokens.
struct PairLogProbabilities {
  double chosen = 0, rejected = 0;
  bool operator==(const PairLogProbabilities&) const = default;
};

// Sums over some pairs.
struct PreferenceSums {
  double loss = 0, margin = 0;
  std::int64_t pairs = 0, preferred = 0;  // preferred: of them, those in which the chosen answer has the larger reward

  void add(const PreferenceSums& other);
  double mean_loss() const { return loss / static_cast<double>(pairs); }
  double mean_margin() const { return margin / static_cast<double>(pairs); }
  double accuracy() const { return static_cast<double>(preferred) / static_cast<double>(pairs); }
};

// log p of all pairs of a dataset, in their order. Nothing if a signal came meanwhile. Ranks divide the work; an error of one
// is an error of all.
std::optional<std::vector<PairLogProbabilities>> pair_log_probabilities(TrainModel& model, const TokenDataset& data,
                                                                        std::int64_t micro_batch, Communicator& ranks);

// The pairs of a dataset beside the reference.
class Preference {
 public:
  // `reference`: pair_log_probabilities() of the reference. `data` must outlive this.
  Preference(const TokenDataset& data, std::vector<PairLogProbabilities> reference, double beta);

  // The pairs of a micro-batch. `weights` gets Batch::label_weights that make the gradient of the model's losses that of
  // PreferenceSums::loss: of the labels of chosen answers beta sigmoid(-margin), of rejected ones the negative of that.
  PreferenceSums compare(TrainModel& model, const MicroBatch& batch, std::vector<float>& weights) const;
  // A measurement, as mean_loss() is one of text.
  std::optional<PreferenceSums> measure(TrainModel& model, std::int64_t micro_batch, std::int64_t batches,
                                        Communicator& ranks) const;

 private:
  const TokenDataset& data_;
  const std::vector<PairLogProbabilities> reference_;
  const double beta_;
};

// What a run compares with: the reference's log p of the pairs of --train and of --val.
struct Reference {
  std::vector<PairLogProbabilities> train, val;
};
// The file of a run's reference: a tensor file whose i64 hold the bits of doubles. `identity` says what it was computed from.
void write_reference(const std::string& path, const Json& identity, const Reference& reference);
// Nothing if there is no such file, or it is of another identity or damaged, which is a warning. `train`, `val`: how many pairs.
std::optional<Reference> read_reference(const std::string& path, const Json& identity, std::int64_t train,
                                        std::int64_t val);

}  // namespace weft
