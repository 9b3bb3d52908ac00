// What travels between a rank and the hub of its run: frames, a header of fixed size and `bytes` bytes behind it. All ranks
// are of one version of weft, which their first message says, so the layout has no versions of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

namespace weft {

// The first message of a connection, in one piece. What does not begin with the right magic and token is no rank of this run.
struct Hello {
  char magic[8] = {'w', 'e', 'f', 't', 'r', 'a', 'n', 'k'};
  std::uint64_t token = 0;
  std::int32_t rank = 0, size = 0;
  char version[96] = "";  // of weft
  std::uint64_t job = 0;  // RankIdentity::job; 0 from older versions
};
static_assert(sizeof(Hello) == 128);

enum class FrameKind : std::uint32_t {
  call = 0x7766'0001,  // a rank has come to a call; behind it what it brings
  reply,               // all ranks have come; behind it what the rank gets
  abort,               // the run has ended; behind it the reason
  leave,               // the rank ends as it should
  alive,               // who sends it is at work
};

enum class CallName : std::uint32_t { barrier, exchange, gather, broadcast };
inline constexpr const char* kCallNames[] = {"barrier()", "exchange()", "gather()", "broadcast()"};
inline const char* name_of(CallName call) {
  const auto index = static_cast<std::size_t>(call);
  return index < std::size(kCallNames) ? kCallNames[index] : "an unknown call";
}

struct FrameHeader {
  FrameKind kind = FrameKind::call;
  CallName call = CallName::barrier;
  std::int32_t root = 0;    // of a broadcast
  std::int32_t code = 0;    // of an abort: the exit code
  std::uint64_t sizes = 0;  // hash of the call's arguments, which have to be the same on all ranks
  std::uint64_t bytes = 0;
};
static_assert(sizeof(FrameHeader) == 32);

// The most bytes that all ranks together bring to one call, because the hub keeps them: longer transfers take several
// calls.
inline constexpr std::uint64_t kPieceBytes = 4 << 20;
inline constexpr std::size_t kLongestReason = 4096;  // of an abort, in bytes

// The most bytes behind a header. A call and its reply have kPieceBytes at most and, for each rank, the size of a piece
// and its rounding.
inline std::uint64_t most_bytes(FrameKind kind) {
  switch (kind) {
    case FrameKind::call:
    case FrameKind::reply:
      return 2 * kPieceBytes;
    case FrameKind::abort:
      return kLongestReason;
    case FrameKind::leave:
    case FrameKind::alive:
      break;
  }
  return 0;
}

inline bool is_frame(const FrameHeader& header) {
  return header.kind >= FrameKind::call && header.kind <= FrameKind::alive && header.bytes <= most_bytes(header.kind);
}

// Cut at kLongestReason.
inline std::string_view reason_for_frame(const std::string& reason) {
  return std::string_view(reason).substr(0, kLongestReason);
}

}  // namespace weft
