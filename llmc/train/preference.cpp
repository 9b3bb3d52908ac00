#include "llmc/train/preference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/file/tensor_file.h"
#include "llmc/train/measurement.h"

namespace weft {

namespace {

// The pairs of a micro-batch; places count from its first token on.
std::vector<PairPlace> pairs_of(const TokenDataset& data, const MicroBatch& batch) {
  std::vector<PairPlace> pairs;
  for (std::size_t row = 0; row < batch.windows.size(); ++row) {
    if (batch.windows[row] == MicroBatch::kNoWindow) continue;
    const std::size_t begin = row * static_cast<std::size_t>(data.seq_len());
    for (PairPlace pair : data.pairs_of(batch.windows[row])) {
      pair.chosen += begin;
      pair.rejected += begin;
      pair.end += begin;
      pairs.push_back(pair);
    }
  }
  return pairs;
}

// One for each of `pairs`. Labels that are not learned have no loss.
std::vector<PairLogProbabilities> log_probabilities(TrainModel& model, const MicroBatch& batch,
                                                    std::span<const PairPlace> pairs) {
  std::vector<float> losses(batch.labels.size());
  model.label_losses(batch.view(), losses);
  const auto sum = [&](std::size_t begin, std::size_t end) {
    double total = 0;
    for (std::size_t t = begin; t < end; ++t) total -= losses[t];
    return total;
  };
  std::vector<PairLogProbabilities> of_pairs;
  for (const PairPlace& pair : pairs)
    of_pairs.push_back({sum(pair.chosen, pair.rejected), sum(pair.rejected, pair.end)});
  return of_pairs;
}

// log(1 + e^x) without overflow.
double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

}  // namespace

void PreferenceSums::add(const PreferenceSums& other) {
  loss += other.loss;
  margin += other.margin;
  pairs += other.pairs;
  preferred += other.preferred;
}

std::optional<std::vector<PairLogProbabilities>> pair_log_probabilities(TrainModel& model, const TokenDataset& data,
                                                                        std::int64_t micro_batch, Communicator& ranks) {
  const Measurement measurement(data, micro_batch, 0);
  // In the order of the micro-batches, so that those of a rank follow each other.
  std::vector<std::size_t> pair_at;
  std::vector<std::int64_t> begins = {0};
  for (std::int64_t number = 0; number < measurement.batches(); ++number) {
    for (const std::uint64_t window : measurement.windows(number)) {
      for (const PairPlace& pair : data.pairs_of(window)) pair_at.push_back(pair.pair);
    }
    begins.push_back(std::ssize(pair_at));
  }
  std::vector<PairLogProbabilities> measured(pair_at.size());
  const bool complete = measurement.run(model, ranks, [&](std::int64_t number, const MicroBatch& batch) {
    const std::vector<PairLogProbabilities> own = log_probabilities(model, batch, pairs_of(data, batch));
    std::copy(own.begin(), own.end(), measured.begin() + begins[static_cast<std::size_t>(number)]);
  });
  if (!complete) return std::nullopt;
  std::vector<Range> parts = measurement.parts(ranks);
  for (Range& part : parts) {
    part = {begins[static_cast<std::size_t>(part.begin)], begins[static_cast<std::size_t>(part.end)]};
  }
  ranks.gather(measured.data(), parts);
  std::vector<PairLogProbabilities> ordered(measured.size());
  for (std::size_t i = 0; i < measured.size(); ++i) ordered[pair_at[i]] = measured[i];
  return ordered;
}

Preference::Preference(const TokenDataset& data, std::vector<PairLogProbabilities> reference, double beta)
    : data_(data), reference_(std::move(reference)), beta_(beta) {
  if (std::ssize(reference_) != data.pairs()) {
    fail(Exit::internal, "a reference of %zu pairs, the data has %lld", reference_.size(),
         static_cast<long long>(data.pairs()));
  }
}

PreferenceSums Preference::compare(TrainModel& model, const MicroBatch& batch, std::vector<float>& weights) const {
  const std::vector<PairPlace> pairs = pairs_of(data_, batch);
  const std::vector<PairLogProbabilities> policy = log_probabilities(model, batch, pairs);
  PreferenceSums sums;
  weights.assign(batch.labels.size(), 0.0f);
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const PairLogProbabilities& reference = reference_[pairs[i].pair];
    const double margin = beta_ * ((policy[i].chosen - reference.chosen) - (policy[i].rejected - reference.rejected));
    sums.add({softplus(-margin), margin, 1, margin > 0 ? 1 : 0});
    const auto weight = static_cast<float>(beta_ / (1 + std::exp(margin)));
    std::fill(weights.begin() + static_cast<std::ptrdiff_t>(pairs[i].chosen),
              weights.begin() + static_cast<std::ptrdiff_t>(pairs[i].rejected), weight);
    std::fill(weights.begin() + static_cast<std::ptrdiff_t>(pairs[i].rejected),
              weights.begin() + static_cast<std::ptrdiff_t>(pairs[i].end), -weight);
  }
  return sums;
}

std::optional<PreferenceSums> Preference::measure(TrainModel& model, std::int64_t micro_batch, std::int64_t batches,
                                                  Communicator& ranks) const {
  const Measurement measurement(data_, micro_batch, batches);
  // One sum for each micro-batch, added in their order, so that the bits do not depend on which rank measures which.
  std::vector<PreferenceSums> sums(static_cast<std::size_t>(measurement.batches()));
  std::vector<float> unused;
  const bool complete = measurement.run(model, ranks, [&](std::int64_t number, const MicroBatch& batch) {
    sums[static_cast<std::size_t>(number)] = compare(model, batch, unused);
  });
  if (!complete) return std::nullopt;
  ranks.gather(sums.data(), measurement.parts(ranks));
  PreferenceSums total;
  for (const PreferenceSums& one : sums) total.add(one);
  return total;
}

// ---- the file -------------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kIdentity = "reference";

std::vector<PairLogProbabilities> read_pairs(const TensorFile& file, const char* name, std::int64_t pairs) {
  const TensorInfo& tensor = file.at(name);
  if (tensor.dtype != DType::i64 || tensor.shape != std::vector<std::int64_t>{pairs, 2}) {
    fail(Exit::bad_file, "%s: %s: got %s %s, expected i64 [%lld, 2]", escaped(file.path()).c_str(), name,
         dtype_name(tensor.dtype), shape_text(tensor.shape).c_str(), static_cast<long long>(pairs));
  }
  file.verify(tensor);
  std::vector<PairLogProbabilities> values(static_cast<std::size_t>(pairs));
  std::ranges::copy(file.bytes(tensor), reinterpret_cast<std::byte*>(values.data()));
  return values;
}

}  // namespace

void write_reference(const std::string& path, const Json& identity, const Reference& reference) {
  static_assert(sizeof(PairLogProbabilities) == 16 && std::endian::native == std::endian::little);
  TensorFileWriter writer(path, FileKind::training_state, {{kIdentity, identity}});
  writer.declare("train", DType::i64, {std::ssize(reference.train), 2});
  writer.declare("val", DType::i64, {std::ssize(reference.val), 2});
  for (const auto* pairs : {&reference.train, &reference.val}) {
    if (!pairs->empty()) writer.write(pairs->data(), pairs->size() * sizeof(PairLogProbabilities));
  }
  writer.publish();
}

std::optional<Reference> read_reference(const std::string& path, const Json& identity, std::int64_t train,
                                        std::int64_t val) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  try {
    const TensorFile file = TensorFile::open(path, FileKind::training_state);
    if (file.config().value(kIdentity, Json()) != identity) return std::nullopt;
    return Reference{read_pairs(file, "train", train), read_pairs(file, "val", val)};
  } catch (const Error& damage) {
    if (damage.code() != Exit::bad_file) throw;
    log_warning("%s. The reference is computed again", damage.what());
    return std::nullopt;
  }
}

}  // namespace weft
