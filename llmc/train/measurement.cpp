#include "llmc/train/measurement.h"

#include <algorithm>
#include <optional>

#include "llmc/base/ceil_div.h"
#include "llmc/base/error.h"
#include "llmc/base/signals.h"

namespace weft {

Measurement::Measurement(const TokenDataset& data, std::int64_t micro_batch, std::int64_t batches)
    : data_(data),
      micro_batch_(micro_batch),
      batches_(ceil_div(static_cast<std::int64_t>(data.windows()), micro_batch)) {
  if (batches > 0) batches_ = std::min(batches_, batches);
}

std::vector<std::uint64_t> Measurement::windows(std::int64_t batch) const {
  const std::uint64_t all = data_.windows(), B = static_cast<std::uint64_t>(micro_batch_);
  const std::uint64_t rows = std::min(static_cast<std::uint64_t>(batches_) * B, all);
  std::vector<std::uint64_t> windows;
  for (std::uint64_t row = static_cast<std::uint64_t>(batch) * B; windows.size() < B && row < all; ++row) {
    windows.push_back(TokenDataset::spread_window(row, rows, all));
  }
  return windows;
}

void Measurement::read(std::int64_t batch, MicroBatch& rows) const {
  const std::vector<std::uint64_t> chosen = windows(batch);
  const auto T = static_cast<std::size_t>(data_.seq_len());
  for (std::size_t b = 0; b < static_cast<std::size_t>(micro_batch_); ++b) {
    const bool exists = b < chosen.size();
    data_.read_row(exists ? chosen[b] : 0, rows, static_cast<std::int64_t>(b));
    if (exists) continue;
    std::fill_n(rows.labels.begin() + static_cast<std::ptrdiff_t>(b * T), T, kIgnoredLabel);
    rows.windows[b] = MicroBatch::kNoWindow;
  }
}

bool Measurement::run(const TrainModel& model, Communicator& ranks, const Work& work) const {
  MicroBatch batch = data_.make_batch(micro_batch_);
  const std::vector<Range> all = parts(ranks);
  const Range mine = all[static_cast<std::size_t>(ranks.rank())];
  bool stopped = false;
  std::optional<Error> error;
  // Where all ranks have to compute together, all take as many turns as the first one, which has the most
  // micro-batches. A rank with one fewer measures some micro-batch again in the last turn.
  const bool together = ranks.size() > 1 && model.evaluates_together();
  for (std::int64_t turn = 0; turn < (together ? all[0] : mine).size() && !stopped && !error; ++turn) {
    const std::int64_t number = std::min(mine.begin + turn, batches_ - 1);
    const auto attempt = [&](const auto& step) {
      try {
        step();
      } catch (const Error& caught) {
        error = caught;
      }
    };
    attempt([&] { read(number, batch); });
    stopped = stop_signal() != 0;
    if (together) {
      fail_together(ranks, error);
      stopped = largest(ranks, stopped ? 1 : 0) != 0;
    }
    if (stopped || error) break;
    if (together) {
      work(number, batch);  // the other ranks are in the same call: an error of this one ends it for them too
    } else {
      attempt([&] { work(number, batch); });
    }
  }
  fail_together(ranks, error);
  return largest(ranks, stopped ? 1 : 0) == 0;
}

}  // namespace weft
