#include "llmc/serve/request_fields.h"

#include <algorithm>
#include <array>
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
    // OpenAI; the last ones belong to chats
    {"suffix", R"([""])"},
    {"presence_penalty", "[0]"},
    {"frequency_penalty", "[0]"},
    {"logit_bias", "[{}, []]"},
    {"response_format", R"([{"type": "text"}])"},
    {"prediction", "[]"},
    {"modalities", R"([["text"]])"},
    {"max_completion_tokens", "[]", "max_tokens"},
    {"top_logprobs", "[0]", "logprobs"},
    {"messages", "[]", "prompt"},
    {"tools", "[[]]"},
    {"tool_choice", R"(["none"])"},
    {"functions", "[[]]"},
    {"function_call", R"(["none"])"},
    {"reasoning_effort", R"(["none"])"},
    // vLLM
    {"repetition_penalty", "[1]"},
    {"length_penalty", "[1]"},
    {"min_tokens", "[0]"},
    {"use_beam_search", "[false]"},
    {"early_stopping", "[false]"},
    {"stop_token_ids", "[[]]", "stop"},
    {"include_stop_str_in_output", "[false]"},
    {"skip_special_tokens", "[false]"},  // weft writes them by name
    {"allowed_token_ids", "[[]]"},
    {"bad_words", "[[]]"},
    {"add_special_tokens", "[true]"},
    {"truncate_prompt_tokens", "[]"},
    {"prompt_embeds", "[]"},
    {"prompt_logprobs", "[]", "echo with logprobs"},
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
    {"repeat_penalty", "[1]"},
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
    {"min_new_tokens", "[0]"},
    {"max_new_tokens", "[]", "max_tokens"},
    {"sampling_seed", "[]", "seed"},
    {"sampling_params", "[{}]", "the fields by themselves"},
    {"input_ids", "[]", "prompt"},
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

std::string got(const std::string& name, const Json& value) {
  return escaped(name, 60) + ": got " + escaped(json_text(value), 60);
}

}  // namespace

std::string foreign_field_error(const std::string& name, const Json& value) {
  if (std::ranges::find(kIgnored, name) != std::end(kIgnored)) return "";
  const auto field = std::ranges::find(kRefused, name, &Refused::name);
  if (field == std::end(kRefused)) {
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
