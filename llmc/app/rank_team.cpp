#include "llmc/app/rank_team.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "llmc/base/hash.h"
#include "llmc/base/log.h"
#include "llmc/comm/socket_ranks.h"
#include "llmc/comm/start_ranks.h"
#include "llmc/train/fault_injection.h"

namespace weft {

RankTeam::RankTeam(const TrainSettings& settings, const std::optional<LaunchedRank>& launched)
    : launched_(launched.value_or(LaunchedRank())), size_(settings.ranks) {
  if (!first()) log_as_rank(rank());
}

std::int64_t RankTeam::threads(std::int64_t option, const ThreadLimits& limits) const {
  if (option > 0 || launched_.local_size == 1) return option;
  return std::max<std::int64_t>(1, choose_threads(0, limits) / launched_.local_size);
}

void RankTeam::meet(const TrainSettings& settings, const std::string& version) {
  const int listener = inherited_listener();
  if (size_ == 1) return;
  const RankAddress place = address_of_first(launched_);
  const bool forged = parse_faults(settings.debug_inject).other_version == launched_.rank;
  RankIdentity self{rank(), size(), xxh3_64(launched_.run), forged ? "another version" : version, settings.out};
  MeetingPoint point{place.address, place.port, listener};
  Socket again;  // a second handle, because the first meeting closes the listener that it gets
  if (first()) {
    again = listener >= 0 ? Socket(listener) : listen_at(place.address, place.port);
    point.listener = duplicate_of(again).release();
  }
  communicator_ = rendezvous(self, point, settings.comm_timeout);
  ++self.token;
  if (first()) point.listener = again.release();
  save_communicator_ = rendezvous(self, point, settings.comm_timeout);
}

void RankTeam::abort(const Error& error) {
  communicator_->abort(error);
  save_communicator_->abort(error);
}

Exit RankTeam::together(const std::function<Exit()>& work) {
  try {
    return work();
  } catch (const Error& error) {
    abort(error);
    throw;
  } catch (const std::bad_alloc&) {
    abort(Error(Exit::resources, "out of memory"));
    throw;
  } catch (...) {
    abort(Error(Exit::internal, "ended by an exception"));
    throw;
  }
}

void RankTeam::leave_with(const Error& error) {
  log_error("%s", error.what());
  abort(error);
  communicator_.reset();
  ::_exit(static_cast<int>(error.code()));
}

}  // namespace weft
