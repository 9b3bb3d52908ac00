// What all APIs for text have in common, from a body to the choices that the engine works on. An API is an adapter: it
// parses its body to a TextRequest, and its choices write its JSON.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "llmc/serve/answer_choice.h"
#include "llmc/serve/routes.h"
#include "llmc/serve/text_request.h"

namespace weft {

struct TextAdapter {
  std::string_view id_prefix, object, event_object;  // of AnswerHead
  bool prompt_details;
  TextRequest (*parse)(std::string_view body, const RequestContext& context, const Reserve& reserve);
  // `prompt`: null without log-probabilities.
  std::unique_ptr<AnswerChoice> (*make_choice)(std::int64_t index, const TextRequest& request,
                                               const RequestContext& context,
                                               std::shared_ptr<const CompletionPrompt> prompt);
};

// An Endpoint with this adapter.
std::optional<HttpResponse> create_text(const TextAdapter& adapter, const Call& call);

}  // namespace weft
