#include "llmc/train/evaluate.h"

#include <algorithm>
#include <cmath>

#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/options.h"
#include "llmc/base/signals.h"
#include "llmc/train/loop.h"

namespace weft {

Exit evaluate(TrainModel& model, const TrainSettings& settings, const TrainInputs& inputs, Communicator& ranks) {
  load_parameters(inputs, static_cast<std::uint64_t>(settings.seed), model);
  const TokenDataset& data = *inputs.val;
  const std::optional<double> loss = mean_loss(model, data, settings.micro_batch, settings.val_batches, ranks);
  if (!loss) return exit_after_signal(static_cast<int>(largest(ranks, stop_signal())));
  if (!std::isfinite(*loss)) {
    fail(Exit::numeric, "%s: the loss on %s is %g", escaped(settings.model).c_str(), escaped(settings.val).c_str(),
         *loss);
  }
  if (ranks.rank() != 0) return Exit::ok;
  const std::uint64_t asked = static_cast<std::uint64_t>(settings.val_batches * settings.micro_batch);
  const std::uint64_t windows = asked == 0 ? data.windows() : std::min(asked, data.windows());
  const auto tokens = static_cast<std::int64_t>(windows) * data.seq_len();
  if (settings.json) {
    write_stdout(json_text({{"model", settings.model},
                            {"val", settings.val},
                            {"val_loss", *loss},
                            {"perplexity", std::exp(*loss)},
                            {"tokens", tokens}}) +
                 "\n");
  } else {
    write_stdout(format("val loss %.4f  perplexity %.4f  %lld tokens in windows of %lld\n", *loss, std::exp(*loss),
                        static_cast<long long>(tokens), static_cast<long long>(data.seq_len())));
  }
  return Exit::ok;
}

}  // namespace weft
