// Faults on purpose, for tests: --debug-inject of infer_pythia. llmc/train/fault_injection.h is the counterpart for
// training. Tokens are counted from 1, over the whole process: those that are generated, and with --perplexity those whose
// loss counts. Of many sequences at once (--batch, --serve): in the order in which the steps report them.
//
//   nan@token=N       a logit that token N is chosen from is NaN; with --perplexity the loss of token N is NaN. Of many
//                     sequences only that one fails
//   kill@token=N      the process dies (SIGKILL) before token N
//   term@token=N      SIGTERM arrives before token N
//   hang@token=N      the process waits for ever before token N
//   io-error@load     a page of the model file cannot be read
//   accept=P          a drafted id counts as right with probability P, whatever the model says: for measurements of --lookup
//                     and --draft. The text then has no meaning
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/model/decode_model.h"
#include "llmc/model/inference_model.h"

namespace weft {

struct DecodeFaults {
  std::optional<std::int64_t> nan_token, kill_token, term_token, hang_token;
  bool io_error_at_load = false;
  std::optional<double> acceptance;
};

const char* decode_fault_help();
// Exit::usage with the accepted forms.
DecodeFaults parse_decode_faults(const std::vector<std::string>& specs);

// Called before the model is loaded.
void inject_before_load(const DecodeFaults& faults);
// `model` itself if no fault at a token is planned, otherwise a wrapper that makes it happen when that token is generated.
std::unique_ptr<DecodeModel> with_faults(std::unique_ptr<DecodeModel> model, const DecodeFaults& faults);
std::unique_ptr<InferenceModel> with_faults(std::unique_ptr<InferenceModel> model, const DecodeFaults& faults);
// For PerplexityHooks::on_loss: the faults at tokens that are scored. Empty if none is planned.
std::function<double(double)> loss_faults(const DecodeFaults& faults);

}  // namespace weft
