// POST /v1/completions.
#include <memory>
#include <utility>

#include "llmc/serve/completions_choice.h"
#include "llmc/serve/completions_request.h"
#include "llmc/serve/text_endpoint.h"

namespace weft {

namespace {

std::unique_ptr<AnswerChoice> make_completion_choice(std::int64_t index, const TextRequest& request,
                                                     const RequestContext& context,
                                                     std::shared_ptr<const CompletionPrompt> prompt) {
  return std::make_unique<CompletionsChoice>(index, context.tokenizer, request.options.logprobs, std::move(prompt));
}

constexpr TextAdapter kCompletions = {"cmpl-", "text_completion", "text_completion",
                                      false,   parse_completions, make_completion_choice};

}  // namespace

std::optional<HttpResponse> create_completion(const Call& call) {
  return create_text(kCompletions, call);
}

}  // namespace weft
