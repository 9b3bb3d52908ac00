// Writes log.jsonl, the record of a run that other tools read: one JSON object a line, written as soon as it is known.
//
//   {"type": "header", ...}  settings, model, version, host: once per start
//   {"type": "resume", "step": N, ...}  what follows replaces earlier records of steps above N
//   {"type": "step", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "dt_ms", "skipped", "time", ...}
//            with --precision fp8 "fp8": {"input"|"weight"|"gradient": {"values", "saturated", "flushed"}};
//            "tokens_per_s" is that of all ranks together, "tokens_per_s_rank" (with several) that of one; "val_loss" where
//            it was measured; a number that is not finite is null
//   {"type": "sample", "step", "text"}, {"type": "save", "step", ...}, {"type": "non_finite", "step", ...}
//   {"type": "spike", "step", "loss", "loss_level", "grad_norm", "grad_norm_level", "windows": [begin, end]}
//
// Numbers keep every bit: reading one back gives the same double.
#pragma once

#include <string>

#include "llmc/base/json_fwd.h"

namespace weft {

class RunLog {
 public:
  // Appends to `path`; a last line that a killed run left unfinished is ended first. A log that cannot be opened or
  // written, or that is no regular file (open_own_file()), is one warning, and the run goes on without it.
  explicit RunLog(const std::string& path);
  RunLog() = default;  // writes nothing: for ranks other than the first
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  // Adds "time", seconds since 1970.
  void write(Json record);

 private:
  void give_up(const std::string& problem);
  void end_after(int error);  // of append_line()

  std::string path_;
  int fd_ = -1;
};

}  // namespace weft
