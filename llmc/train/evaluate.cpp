#include "llmc/train/evaluate.h"

#include <cmath>

#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/train/loop.h"

namespace weft {

Exit evaluate(TrainModel& model, const TrainSettings& settings, const TrainInputs& inputs, Communicator& ranks) {
  load_frozen(inputs, model);
  load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), model);
  const TokenDataset& data = *inputs.val;
  const std::optional<MeanLoss> measured = mean_loss(model, data, settings.micro_batch, settings.val_batches, ranks);
  if (!measured) return exit_after_signal(static_cast<int>(largest(ranks, stop_signal())));
  const auto [loss, tokens] = *measured;
  if (!std::isfinite(loss)) {
    fail(Exit::numeric, "%s: the loss on %s is %g", escaped(settings.model).c_str(), escaped(settings.val).c_str(),
         loss);
  }
  if (ranks.rank() != 0) return Exit::ok;
  if (settings.json) {
    Json record = {{"model", settings.model},      {"val", settings.val}, {"val_loss", loss},
                   {"perplexity", std::exp(loss)}, {"tokens", tokens},    {"of_tokens", data.tokens()}};
    if (data.of_documents()) {
      record.update({{"of_learned_tokens", data.labels()},
                     {"conversations", data.documents()},
                     {"cut", data.shortened()},
                     {"left_out", data.too_long() + data.unlearned()}});
    }
    write_stdout(json_text(record) + "\n");
    return Exit::ok;
  }
  if (data.of_documents()) {
    const std::string which =
        tokens < data.labels() ? "--val-batches " + std::to_string(settings.val_batches) : std::string("all");
    const auto longer = [](std::int64_t count, const char* what) {
      return count > 0 ? format(", %lld longer ones %s", static_cast<long long>(count), what) : std::string();
    };
    write_stdout(
        format("val loss %.4f  perplexity %.4f  %lld of %lld learned tokens (%s) of %s in rows of %lld%s%s\n", loss,
               std::exp(loss), static_cast<long long>(tokens), static_cast<long long>(data.labels()), which.c_str(),
               counted(data.documents(), "conversation").c_str(), static_cast<long long>(data.seq_len()),
               longer(data.shortened(), "cut behind an answer").c_str(), longer(data.too_long(), "left out").c_str()));
    return Exit::ok;
  }
  const std::size_t shards = data.shards().size();
  const std::string which = tokens < data.labels()   ? "--val-batches " + std::to_string(settings.val_batches)
                            : data.masks_documents() ? std::string("all but the first of each document")
                            : shards == 1            ? std::string("all but the first")
                                                     : format("all but the first of each of %zu shards", shards);
  write_stdout(format("val loss %.4f  perplexity %.4f  %lld of %lld tokens (%s) in windows of %lld\n", loss,
                      std::exp(loss), static_cast<long long>(tokens), static_cast<long long>(data.tokens()),
                      which.c_str(), static_cast<long long>(data.seq_len())));
  return Exit::ok;
}

}  // namespace weft
