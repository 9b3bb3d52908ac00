// What validation and --eval have in common: micro-batches of windows that are spread evenly over a dataset, which ranks divide.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "llmc/base/range.h"
#include "llmc/comm/communicator.h"
#include "llmc/model/train_model.h"
#include "llmc/train/data_loader.h"

namespace weft {

class Measurement {
 public:
  // `batches` micro-batches of `micro_batch` windows, the same at every call; 0, or more than there are: every window once.
  // `data` must outlive this.
  Measurement(const TokenDataset& data, std::int64_t micro_batch, std::int64_t batches);

  std::int64_t batches() const { return batches_; }
  // The windows of micro-batch `batch`, in its order. Of the last one they may be fewer than its rows.
  std::vector<std::uint64_t> windows(std::int64_t batch) const;
  // Of each rank: the micro-batches that it measures.
  std::vector<Range> parts(Communicator& ranks) const { return shares(batches_, ranks.size()); }

  // Calls work(number, batch) for each of this rank's micro-batches; rows that only fill up the last one have no labels and
  // MicroBatch::kNoWindow. Where all ranks have to compute together (TrainModel::evaluates_together()) a rank may be given a
  // micro-batch of another one as well. False if a signal came meanwhile, on any rank. An error of one rank is an error of all.
  using Work = std::function<void(std::int64_t number, const MicroBatch& batch)>;
  bool run(const TrainModel& model, Communicator& ranks, const Work& work) const;

 private:
  void read(std::int64_t batch, MicroBatch& rows) const;

  const TokenDataset& data_;
  const std::int64_t micro_batch_;
  std::int64_t batches_;
};

}  // namespace weft
