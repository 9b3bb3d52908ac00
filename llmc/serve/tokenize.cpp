// What the model's tokens are: POST /tokenize and /detokenize, GET /tokenizer_info. Names and shapes are those of vLLM.
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/serve/access.h"
#include "llmc/serve/routes.h"
#include "llmc/serve/text_request.h"
#include "llmc/serve/tokenize_request.h"

namespace weft {

namespace {

// The body of a POST.
std::string take_body(const Call& call) {
  call.service.check_ready();
  check_json_body(call.exchange->request());
  return call.exchange->take_body();
}

Json text_or_null(const Tokenizer& tokenizer, std::optional<std::int32_t> id) {
  if (!id || *id >= tokenizer.vocab_size()) return nullptr;
  return utf8_replace_invalid(tokenizer.token_bytes(*id));
}

}  // namespace

std::optional<HttpResponse> tokenize(const Call& call) {
  return json_response(tokenized(take_body(call), call.service.context));
}

std::optional<HttpResponse> detokenize(const Call& call) {
  return json_response(detokenized(take_body(call), call.service.context));
}

std::optional<HttpResponse> show_tokenizer(const Call& call) {
  call.service.check_ready();
  const RequestContext& context = call.service.context;
  const Tokenizer& tokenizer = need_tokenizer(context);
  const std::vector<std::int32_t>& ends = context.config->eos_ids;
  Json info = {{"tokenizer_class", "PreTrainedTokenizerFast"},
               {"model_max_length", context.config->max_positions},
               {"bos_token", text_or_null(tokenizer, context.config->bos_id)},
               {"eos_token", ends.empty() ? Json() : text_or_null(tokenizer, ends.front())},
               {"pad_token", nullptr},
               {"chat_template", nullptr}};
  info.update(context.tokenizer_info);
  return json_response(info);
}

}  // namespace weft
