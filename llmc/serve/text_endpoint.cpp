#include "llmc/serve/text_endpoint.h"

#include <chrono>
#include <random>
#include <utility>
#include <vector>

#include "llmc/base/clock.h"
#include "llmc/infer/completion.h"
#include "llmc/serve/access.h"
#include "llmc/serve/answer.h"

namespace weft {

namespace {

// 63 random bits.
std::uint64_t random_seed() {
  std::random_device random;  // 32 bits each
  const std::uint64_t high = random(), low = random();
  return high << 31 | low >> 1;
}

void submit(Service& service, const std::shared_ptr<Answer>& answer, const TextAdapter& adapter,
            const TextRequest& request, Reservation& places) {
  service.admission.take_values(answer->values, request.values);
  // Again after the reservation: a server that drains waits for all completions that are reserved.
  service.check_ready();
  const RequestContext& context = service.context;
  const bool scored = request.options.logprobs >= 0;
  const std::uint64_t group = service.admission.new_group();
  std::vector<Completion> completions;
  for (const CompletionPrompt& prompt : request.prompts) {
    answer->usage.prompt_tokens += static_cast<std::int64_t>(prompt.ids.size());
    const auto shared = scored ? std::make_shared<const CompletionPrompt>(prompt) : nullptr;
    for (std::int64_t i = 0; i < request.n; ++i) {
      const std::size_t choice = answer->choices.size();
      CompletionOptions own = request.options;
      own.sampler.seed += static_cast<std::uint64_t>(i);
      answer->choices.push_back(adapter.make_choice(static_cast<std::int64_t>(choice), request, context, shared));
      completions.push_back(
          make_completion(prompt, own, context.tokenizer, *context.config, service.answers.sink(answer, choice)));
      completions.back().request.group = group;
    }
  }
  service.answers.submit(answer, *service.engine, std::move(completions), places);
}

}  // namespace

std::optional<HttpResponse> create_text(const TextAdapter& adapter, const Call& call) {
  Service& service = call.service;
  const auto answer = std::make_shared<Answer>(service.metrics, service.admission);
  answer->arrival = std::chrono::steady_clock::now();
  service.check_ready();
  check_json_body(call.exchange->request());
  Reservation places = service.admission.of_completions();
  TextRequest request = adapter.parse(call.exchange->take_body(), service.context, [&](std::int64_t completions) {
    service.admission.take_completions(places, completions, service.context.max_sequences);
  });
  if (!request.seeded) request.options.sampler.seed = random_seed();
  if (service.options.request_seconds > 0) {
    request.options.deadline = answer->arrival + duration_of(service.options.request_seconds);
  }
  answer->exchange = call.exchange;
  answer->head = answer_head(adapter.id_prefix, call.exchange->request().id, service.options.model);
  answer->head.object = adapter.object;
  answer->head.event_object = adapter.event_object;
  answer->head.prompt_details = adapter.prompt_details;
  answer->head.usage_follows = request.include_usage;
  answer->stream = request.stream;
  answer->include_usage = request.include_usage;
  answer->usage_in_events = request.usage_in_events;
  answer->choices_of_prompt = static_cast<std::size_t>(request.n);
  submit(service, answer, adapter, request, places);
  return std::nullopt;
}

}  // namespace weft
