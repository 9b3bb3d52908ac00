#include "llmc/comm/frame_io.h"

#include <algorithm>

namespace weft {

namespace {

constexpr std::size_t kFirstBytes = 64 << 10;  // room for a body before the first of its bytes has come

}  // namespace

FrameReader::Got FrameReader::read(const Socket& socket) {
  constexpr std::size_t kHeader = sizeof(FrameHeader);
  while (got_ < kHeader) {
    const std::ptrdiff_t count = read_some(socket, bytes_of(header_).subspan(got_));
    if (count <= 0) return count == 0 ? Got::nothing : Got::closed;
    got_ += static_cast<std::size_t>(count);
    if (got_ < kHeader) continue;
    if (!is_frame(header_)) return Got::closed;
    body_.resize(std::min<std::size_t>(body_.size(), header_.bytes));
  }
  while (got_ - kHeader < header_.bytes) {
    const std::size_t have = got_ - kHeader;
    if (have == body_.size()) body_.resize(std::min<std::size_t>(header_.bytes, std::max(2 * have, kFirstBytes)));
    const std::ptrdiff_t count = read_some(socket, std::span(body_).subspan(have));
    if (count <= 0) return count == 0 ? Got::nothing : Got::closed;
    got_ += static_cast<std::size_t>(count);
  }
  got_ = 0;
  return Got::frame;
}

Error FrameReader::reason() const {
  return {static_cast<Exit>(header_.code), std::string(reinterpret_cast<const char*>(body_.data()), body_.size())};
}

void FrameWriter::begin(const FrameHeader& header, std::span<const std::byte> body) {
  FrameHeader with_size = header;
  with_size.bytes = body.size();
  const auto head = const_bytes_of(with_size);
  bytes_.clear();
  sent_ = 0;
  bytes_.reserve(head.size() + body.size());  // without memory for all of it nothing is sent
  bytes_.insert(bytes_.end(), head.begin(), head.end());
  bytes_.insert(bytes_.end(), body.begin(), body.end());
}

void FrameWriter::begin(FrameKind kind, std::span<const std::byte> body) {
  FrameHeader header;
  header.kind = kind;
  begin(header, body);
}

void FrameWriter::begin(const Error& abort) {
  FrameHeader header;
  header.kind = FrameKind::abort;
  header.code = static_cast<std::int32_t>(abort.code());
  const std::string reason = abort.what();
  const std::string_view text = reason_for_frame(reason);
  begin(header, std::as_bytes(std::span(text.data(), text.size())));
}

bool FrameWriter::write(const Socket& socket) {
  while (!done()) {
    const std::ptrdiff_t count = write_some(socket, std::span(bytes_).subspan(sent_));
    if (count <= 0) return count == 0;
    sent_ += static_cast<std::size_t>(count);
  }
  return true;
}

bool FrameWriter::write_all(const Socket& socket, Deadline deadline) {
  while (write(socket)) {
    if (done()) return true;
    if (SocketClock::now() >= deadline) return false;
    pollfd waiting{socket.fd(), POLLOUT, 0};
    wait_for_any({&waiting, 1}, deadline);
  }
  return false;
}

}  // namespace weft
