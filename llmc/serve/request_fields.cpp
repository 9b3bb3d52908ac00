#include "llmc/serve/request_fields.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

// A field that would change the text, or what else the client gets. Gathered from the completion endpoints of OpenAI, vLLM
// (CompletionRequest of 2026-10), llama.cpp (server-schema.cpp of 2026-10; the names of older versions, too), SGLang
// (CompletionRequest and SamplingParams) and Text Generation Inference.
struct Refused {
  std::string_view name;
  const char* neutral;   // a JSON list of the values that ask for nothing; null always is one
  const char* way = "";  // how to ask this server for the same
};
constexpr Refused kRefused[] = {
    // OpenAI
    {"suffix", R"([""])"},
    {"response_format", R"([{"type": "text"}])"},
    {"prediction", "[]"},
    {"modalities", R"([["text"]])"},
    {"tools", "[[]]"},
    {"tool_choice", R"(["none", "auto"])"},
    {"functions", "[[]]"},
    {"function_call", R"(["none"])"},
    {"reasoning_effort", R"(["none"])"},
    {"verbosity", R"(["medium"])"},
    {"web_search_options", "[]"},
    {"audio", "[]"},
    // vLLM
    {"length_penalty", "[1]"},
    {"use_beam_search", "[false]"},
    {"early_stopping", "[false]"},
    {"include_stop_str_in_output", "[false]"},
    {"skip_special_tokens", "[false]"},  // weft writes them by name
    {"allowed_token_ids", "[[]]"},
    {"truncate_prompt_tokens", "[]"},
    {"prompt_embeds", "[]"},
    {"prompt_logprobs", "[]"},
    {"logprob_token_ids", "[[]]"},
    {"logits_processors", "[[]]"},
    {"structured_outputs", "[]"},
    {"guided_json", "[]"},
    {"guided_regex", "[]"},
    {"guided_choice", "[]"},
    {"guided_grammar", "[]"},
    {"guided_whitespace_pattern", "[]"},
    {"structural_tag", "[]"},
    {"thinking_token_budget", "[-1]"},
    {"repetition_detection", "[]"},
    {"watermarking", "[false]"},
    {"return_tokens_as_token_ids", "[false]"},
    {"return_token_ids", "[false]"},
    {"return_routed_experts", "[false]"},
    {"kv_transfer_params", "[{}]"},
    {"ec_transfer_params", "[{}]"},
    {"vllm_xargs", "[{}]"},
    // llama.cpp
    {"n_predict", "[]", "max_tokens"},
    {"n_cmpl", "[1]", "n"},
    {"n_indent", "[0]"},
    {"n_keep", "[0]"},
    {"n_discard", "[0]"},
    {"n_probs", "[0]", "logprobs"},
    {"min_keep", "[0]"},
    {"post_sampling_probs", "[false]"},
    {"t_max_predict_ms", "[-1, 0]", "--request-seconds of the server"},
    {"response_fields", "[[]]"},
    {"return_tokens", "[false]"},
    {"grammar", R"([""])"},
    {"grammar_lazy", "[false]"},
    {"grammar_triggers", "[[]]"},
    {"preserved_tokens", "[[]]"},
    {"json_schema", "[]"},
    {"repeat_penalty", "[1]", "repetition_penalty"},
    {"penalty_prompt", R"([""])"},
    {"typical_p", "[1]"},
    {"tfs_z", "[1]"},
    {"top_n_sigma", "[-1, 0]"},
    {"dynatemp_range", "[0]"},
    {"mirostat", "[0]"},
    {"adaptive_target", "[-1]"},
    {"dry_multiplier", "[0]"},
    {"xtc_probability", "[0]"},
    {"samplers", "[]"},
    {"lora", "[[]]"},
    {"image_data", "[[]]"},
    {"multimodal_data", "[[]]"},
    {"system_prompt", R"([""])"},
    {"input_prefix", R"([""])"},
    {"input_suffix", R"([""])"},
    {"input_extra", "[[]]"},
    // SGLang
    {"regex", "[]"},
    {"ebnf", "[]"},
    {"stop_regex", "[[]]", "stop"},
    {"no_stop_trim", "[false]"},
    {"min_new_tokens", "[0]", "min_tokens"},
    {"max_new_tokens", "[]", "max_tokens"},
    {"sampling_seed", "[]", "seed"},
    {"sampling_params", "[{}]", "the fields by themselves"},
    {"input_ids", "[]"},
    {"input_embeds", "[]"},
    {"return_logprob", "[false]", "logprobs"},
    {"top_logprobs_num", "[0]", "logprobs"},
    {"token_ids_logprob", "[[]]"},
    {"return_hidden_states", "[false]"},
    {"custom_logit_processor", "[]"},
    {"custom_params", "[{}]"},
    {"lora_path", "[]"},
    {"session_params", "[{}]"},
    // Text Generation Inference, TensorRT-LLM and others
    {"no_repeat_ngram_size", "[0]"},
    {"num_beams", "[1]"},
    {"beam_width", "[1]"},
    {"do_sample", "[]", "temperature"},
    {"truncate", "[]"},
    {"watermark", "[false]"},
    {"top_a", "[0]"},
    {"penalty_alpha", "[0]"},
    {"smoothing_factor", "[0]"},
    {"guidance_scale", "[1]"},
    {"negative_prompt", R"([""])"},
};

// Of one API alone: looked at before those of all.
constexpr Refused kRefusedInCompletions[] = {
    {"max_completion_tokens", "[]", "max_tokens"},
    {"top_logprobs", "[0]", "logprobs"},
    {"messages", "[]", "prompt, or POST /v1/chat/completions"},
    {"add_special_tokens", "[true]"},
    {"prompt_logprobs", "[]", "echo with logprobs"},
    {"input_ids", "[]", "prompt"},
};
constexpr Refused kRefusedInChat[] = {
    {"prompt", "[]", "messages, or POST /v1/completions"},
    {"best_of", "[1]", "n"},
    {"add_special_tokens", "[false]"},  // the chat format has those that it wants
    {"chat_template", "[]"},
    {"chat_template_kwargs", "[{}]", "--chat-option of the converter"},
    {"documents", "[[]]"},
    {"mm_processor_kwargs", "[{}]"},
    {"include_reasoning", "[true]"},
    {"separate_reasoning", "[true]"},
    {"stream_reasoning", "[true]"},
    {"reasoning_format", R"(["auto", "deepseek"])"},
    {"reasoning_in_content", "[false]"},
    {"thinking_forced_open", "[false]"},
    {"enable_thinking", "[]", "--chat-option of the converter"},
};

// Fields that change no text of this server, whatever they hold: names for the client's own use, hints for caches, queues and
// routers, and settings of samplers that are off unless a field above turns them on.
constexpr std::string_view kIgnored[] = {
    // OpenAI
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    // vLLM
    "request_id",
    "session_id",
    "priority",
    "cache_salt",
    "truncation_side",
    "spaces_between_special_tokens",
    "guided_decoding_backend",
    "stream_interval",
    "return_token_offsets",
    "return_mm_kwargs",
    "routed_experts_prompt_start",
    // llama.cpp
    "cache_prompt",
    "id_slot",
    "slot_id",
    "n_cache_reuse",
    "timings_per_token",
    "return_progress",
    "verbose",
    "sse_ping_interval",
    "backend_sampling",
    "repeat_last_n",
    "penalize_nl",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_decay",
    "dynatemp_exponent",
    "xtc_threshold",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "grammar_type",
    "speculative.n_max",
    "speculative.n_min",
    "speculative.p_min",
    "speculative.type",
    // SGLang
    "rid",
    "extra_key",
    "data_parallel_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "log_metrics",
    "logprob_start_len",
    "return_text_in_logprobs",
    "return_cached_tokens_details",
};

const Refused* row_of(std::span<const Refused> rows, const std::string& name) {
  const auto found = std::ranges::find(rows, name, &Refused::name);
  return found == rows.end() ? nullptr : &*found;
}

std::string got(const std::string& name, const Json& value) {
  return escaped(name, 60) + ": got " + escaped(json_text(value), 60);
}

}  // namespace

[[noreturn]] void refuse_field(const std::string& name, const Json& got, const std::string& expected) {
  const std::string shown = escaped(json_text(got), 60);
  throw RequestError(400, format("%s: got %s, expected %s", name.c_str(), shown.c_str(), expected.c_str()), name);
}

bool read_flag(const Json& body, const std::string& name, bool otherwise) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return otherwise;
  if (!found->is_boolean()) refuse_field(name, *found, "true or false");
  return found->get<bool>();
}

std::int64_t read_count(const Json& body, const std::string& name, std::int64_t otherwise, std::int64_t high) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return otherwise;
  const std::optional<std::int64_t> count = json_integer(*found);
  if (count && *count >= 1 && *count <= high) return *count;
  refuse_field(name, *found,
               high == INT64_MAX ? "an integer of at least 1"
                                 : format("an integer from 1 to %lld", static_cast<long long>(high)));
}

std::string foreign_field_error(const std::string& name, const Json& value, TextApi api) {
  if (std::ranges::find(kIgnored, name) != std::end(kIgnored)) return "";
  const Refused* field = api == TextApi::chat ? row_of(kRefusedInChat, name) : row_of(kRefusedInCompletions, name);
  if (field == nullptr) field = row_of(kRefused, name);
  if (field == nullptr) {
    return got(name, value) + ", a field that this server does not know: it would have no effect. Leave it out";
  }
  std::string expected = "null";
  for (const Json& neutral : Json::parse(field->neutral)) {
    if (value == neutral) return "";
    expected += " or " + json_text(neutral);
  }
  const std::string way = *field->way == '\0' ? "" : std::string(". Here it is ") + field->way;
  return got(name, value) + ", expected " + expected + ": it is not supported" + way;
}

}  // namespace weft
