#include "llmc/cpu/optimizer.h"

#include "llmc/base/error.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/muon.h"

namespace weft::cpu {

const OptimizerUpdate& update_of(const Optimizer& optimizer) {
  static const OptimizerUpdate kUpdates[] = {{adamw_optimizer(), adamw_update, adamw_workspace},
                                             {muon_optimizer(), muon_update, muon_workspace}};
  for (const OptimizerUpdate& row : kUpdates) {
    if (&row.optimizer == &optimizer) return row;
  }
  fail(Exit::internal, "%s has no update on the CPU", optimizer.name());
}

}  // namespace weft::cpu
