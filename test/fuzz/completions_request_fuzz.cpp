// The body of POST /v1/completions: u8 flags, then the JSON. Flag 1: the model has no tokenizer; 2: names of special tokens
// are tokens.
#include "llmc/base/json.h"
#include "llmc/serve/completions_request.h"
#include "test/fuzz/served_chat.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

constexpr std::int64_t kMaxSequences = 64;

void use(const TextRequest& request) {
  FUZZ_CHECK(!request.prompts.empty() && request.n >= 1 && request.n <= kMaxChoices);
  FUZZ_CHECK(request.sequences() <= kMaxSequences);
  for (const CompletionPrompt& prompt : request.prompts) {
    FUZZ_CHECK(!prompt.ids.empty());
    check_ids(prompt.ids, neox_config().vocab_size);
    FUZZ_CHECK(Json::parse(json_text(Json(prompt.text))) == prompt.text);
  }
  const CompletionOptions& options = request.options;
  FUZZ_CHECK(options.max_tokens >= (options.echo ? 0 : 1));
  FUZZ_CHECK(options.logprobs >= -1 && options.logprobs <= kMaxLogprobs && options.stop.size() <= kMaxStopTexts);
  FUZZ_CHECK(request.stream || !request.include_usage);
  for (const std::string& stop : options.stop) FUZZ_CHECK(!stop.empty());
  sampling_plan(options.sampler);  // refuses what is out of range
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const RequestContext context{"tiny", (flags & 1) != 0 ? nullptr : &neox_tokenizer(),
                               (flags & 2) != 0 ? Tokenizer::Special::allow : Tokenizer::Special::text, &neox_config(),
                               kMaxSequences};
  const std::string_view body = input.take_rest();
  answers([&] { use(parse_completions(body, context)); });
  return 0;
}

}  // namespace weft::fuzz
