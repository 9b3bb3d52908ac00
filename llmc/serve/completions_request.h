// The body of POST /v1/completions: from JSON that anybody may have sent to prompts and options.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "llmc/serve/text_request.h"

namespace weft {

inline constexpr std::size_t kMaxPrompts = 1024;       // of one request
inline constexpr std::int64_t kDefaultMaxTokens = 16;  // the API's default

// A field that is not supported is refused unless it asks for nothing (request_fields.h). Throws RequestError, which names the
// field.
TextRequest parse_completions(std::string_view text, const RequestContext& context, const Reserve& reserve = nullptr);

}  // namespace weft
