#include "llmc/serve/answer_json.h"

#include <chrono>

#include "llmc/base/error.h"
#include "llmc/base/json.h"

namespace weft {

namespace {

// The members of every object, with an open brace before them and a comma behind.
std::string begin_object(const AnswerHead& head, std::string_view object) {
  std::string out = R"({"id":")";
  out.append(head.id).append(R"(","object":")").append(object);
  out.append(R"(","created":)").append(std::to_string(head.created));
  return out.append(R"(,"model":)").append(json_quoted(head.model)).append(",");
}

std::string usage_object(const AnswerHead& head, const AnswerUsage& usage) {
  std::string out = format(R"({"prompt_tokens":%lld,"completion_tokens":%lld,"total_tokens":%lld)",
                           static_cast<long long>(usage.prompt_tokens), static_cast<long long>(usage.completion_tokens),
                           static_cast<long long>(usage.prompt_tokens + usage.completion_tokens));
  if (head.prompt_details) {
    out += format(R"(,"prompt_tokens_details":{"cached_tokens":%lld})", static_cast<long long>(usage.cached_tokens));
  }
  return out += "}";
}

const char* error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

}  // namespace

AnswerHead answer_head(std::string_view prefix, const std::string& request_id, const std::string& model) {
  AnswerHead head;
  head.id = std::string(prefix) + request_id;
  head.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  head.model = model;
  return head;
}

std::string answer_body(const AnswerHead& head, const std::vector<std::unique_ptr<AnswerChoice>>& choices,
                        const AnswerUsage& usage) {
  std::string out = begin_object(head, head.object) + "\"choices\":[";
  for (std::size_t i = 0; i < choices.size(); ++i) out.append(i > 0 ? "," : "").append(choices[i]->write());
  return out.append("],\"usage\":").append(usage_object(head, usage)).append("}");
}

std::string answer_event(const AnswerHead& head, const std::string& choice, const AnswerUsage* usage) {
  std::string out = "data: " + begin_object(head, head.event_object) + "\"choices\":[" + choice + "]";
  if (usage != nullptr) {
    out.append(",\"usage\":").append(usage_object(head, *usage));
  } else if (head.usage_follows) {
    out += ",\"usage\":null";
  }
  return out += "}\n\n";
}

std::string usage_event(const AnswerHead& head, const AnswerUsage& usage) {
  return "data: " + begin_object(head, head.event_object) + "\"choices\":[],\"usage\":" + usage_object(head, usage) +
         "}\n\n";
}

std::string error_body(int status, const std::string& message, const std::string& param, const std::string& code) {
  const auto text_or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  return json_text({{"error",
                     {{"message", message},
                      {"type", error_type(status)},
                      {"param", text_or_null(param)},
                      {"code", text_or_null(code)}}}});
}

std::string error_event(int status, const std::string& message) {
  return "data: " + error_body(status, message) + "\n\n";
}

}  // namespace weft
