// The bytes of answers (RFC 9112).
#pragma once

#include <string>

#include "llmc/serve/http.h"

namespace weft {

// All that stands before a body. `id`: of the request. `close`: no further answer follows on this connection. `old`: of
// HTTP/1.0, whose clients take a connection for closed unless they are told.
std::string response_head(const HttpResponse& response, const std::string& id, bool close, bool old);
// Of a stream, in chunks, or up to the end of the connection.
std::string stream_head(const std::string& content_type, const std::string& id, bool chunked, bool close);
std::string chunk(const std::string& data);  // not empty: an empty one ends the stream
inline constexpr const char* kLastChunk = "0\r\n\r\n";

}  // namespace weft
