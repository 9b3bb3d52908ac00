// The bodies of POST /tokenize and /detokenize: from JSON that anybody may have sent to the answer. Names and shapes are those
// of vLLM.
#pragma once

#include <string_view>

#include "llmc/base/json_fwd.h"
#include "llmc/serve/text_request.h"

namespace weft {

// Both throw RequestError, which names the field; 400 without a tokenizer.
Json tokenized(std::string_view text, const RequestContext& context);
Json detokenized(std::string_view text, const RequestContext& context);
// The tokenizer of the model. 400 without one.
const Tokenizer& need_tokenizer(const RequestContext& context);

}  // namespace weft
