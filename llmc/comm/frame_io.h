// Reads and writes frames (llmc/comm/frames.h) piece by piece, as the connection takes them.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/comm/frames.h"
#include "llmc/comm/socket.h"

namespace weft {

class FrameReader {
 public:
  enum class Got { nothing, frame, closed };
  // Reads what is there, up to the end of one frame. `closed`: the connection has ended, or what comes is no frame. Memory
  // for the body grows with what has come, whatever the header claims.
  Got read(const Socket& socket);
  // The frame that was read last; valid until the next read().
  const FrameHeader& header() const { return header_; }
  std::vector<std::byte>& body() { return body_; }
  // The error that an abort tells.
  Error reason() const;

 private:
  FrameHeader header_;
  std::vector<std::byte> body_;
  std::size_t got_ = 0;  // bytes of header and body
};

class FrameWriter {
 public:
  void begin(const FrameHeader& header, std::span<const std::byte> body);
  // A frame whose header needs nothing but its kind.
  void begin(FrameKind kind, std::span<const std::byte> body = {});
  void begin(const Error& abort);
  bool done() const { return sent_ == bytes_.size(); }
  // Writes what the connection takes now; false: it has ended.
  bool write(const Socket& socket);
  // Writes all of it before the deadline; false if that cannot be.
  bool write_all(const Socket& socket, Deadline deadline);

 private:
  std::vector<std::byte> bytes_;
  std::size_t sent_ = 0;
};

}  // namespace weft
