// The bodies of POST /v1/chat/completions, /tokenize and /detokenize: u8 flags, then the JSON. Flag 1: /tokenize; 2:
// /detokenize, instead of chats; 4: the model has no tokenizer, and so no chat format.
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/serve/chat_request.h"
#include "llmc/serve/tokenize_request.h"
#include "test/fuzz/served_chat.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

void use_chat(std::string_view body, const RequestContext& context) {
  const TextRequest request = parse_chat(body, context);
  FUZZ_CHECK(request.prompts.size() == 1 && !request.prompts[0].ids.empty());
  FUZZ_CHECK(request.n >= 1 && request.n <= kMaxChoices && request.sequences() <= context.max_sequences);
  check_ids(request.prompts[0].ids, neox_tokenizer().vocab_size());
  const CompletionOptions& options = request.options;
  FUZZ_CHECK(options.max_tokens >= 1 && !options.echo);
  FUZZ_CHECK(options.logprobs >= -1 && options.logprobs <= kMaxLogprobs);
  FUZZ_CHECK(request.stream || !request.include_usage);
  FUZZ_CHECK(options.stop_ids == context.chat->stop_ids());
  sampling_plan(options.sampler);  // refuses what is out of range
}

void use_tokenized(std::string_view body, const RequestContext& context) {
  const Json answer = Json::parse(json_text(tokenized(body, context)));
  const auto ids = answer["tokens"].get<std::vector<std::int32_t>>();
  check_ids(ids, neox_tokenizer().vocab_size());
  FUZZ_CHECK(answer["count"] == ids.size());
  FUZZ_CHECK(answer["token_strs"].is_null() || answer["token_strs"].size() == ids.size());
  // And back: every id that an answer has is one that a request may have.
  FUZZ_CHECK(detokenized(json_text({{"tokens", ids}}), context)["prompt"].is_string());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  RequestContext context{"tiny", nullptr, Tokenizer::Special::text, &neox_config(), 64};
  if ((flags & 4) == 0) {
    context.tokenizer = &neox_tokenizer();
    context.chat = &neox_chat();
  }
  const std::string_view body = input.take_rest();
  answers([&] {
    if ((flags & 1) != 0) return use_tokenized(body, context);
    if ((flags & 2) == 0) return use_chat(body, context);
    FUZZ_CHECK(Json::parse(json_text(detokenized(body, context)))["prompt"].is_string());
  });
  return 0;
}

}  // namespace weft::fuzz
