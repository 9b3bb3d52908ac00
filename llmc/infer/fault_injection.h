// Faults on purpose (--debug-inject of infer_pythia), the counterpart of llmc/train/fault_injection.h. Tokens are
// counted from 1, over the whole process.
//
//   nan@token=N       a logit that decides token N is not a number; with --perplexity the loss of token N is none
//   kill@token=N      the process dies (SIGKILL) before token N
//   term@token=N      SIGTERM arrives before token N
//   hang@token=N      token N never comes
//   io-error@load     a page of the model file cannot be read
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/model/decode_model.h"

namespace weft {

struct DecodeFaults {
  std::optional<std::int64_t> nan_token, kill_token, term_token, hang_token;
  bool io_error_at_load = false;
};

const char* decode_fault_help();
// Exit::usage with the accepted forms.
DecodeFaults parse_decode_faults(const std::vector<std::string>& specs);

// Called before the model is loaded.
void inject_before_load(const DecodeFaults& faults);
// `model` itself where nothing is planned, otherwise a wrapper in which it happens.
std::unique_ptr<DecodeModel> with_faults(std::unique_ptr<DecodeModel> model, const DecodeFaults& faults);

}  // namespace weft
