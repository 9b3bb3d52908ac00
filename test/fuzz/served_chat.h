// What the targets that read requests share: a tokenizer, a model's configuration, a chat format, and what is checked.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/json.h"
#include "llmc/infer/chat.h"
#include "llmc/model/config.h"
#include "llmc/serve/answer_json.h"
#include "llmc/serve/request_error.h"
#include "llmc/text/tokenizer.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {

// memory_files.h has its own files, so that this one is read directly.
inline std::string read_fixture(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.empty()) {
    std::fprintf(stderr, "%s: cannot read; run from the root of the repository\n", path.c_str());
    std::exit(1);
  }
  return text;
}

inline const Tokenizer& neox_tokenizer() {
  static const auto* one = [] {
    const std::string path = "test/fixtures/tokenizer/neox_style.tokenizer.json";
    return new Tokenizer(Tokenizer::from_json(read_fixture(path), path));
  }();
  return *one;
}

// Six ids more than the tokenizer has.
inline const ModelConfig& neox_config() {
  static const ModelConfig one = [] {
    ModelConfig made;
    made.vocab_size = neox_tokenizer().vocab_size() + 6;
    made.max_positions = 4096;
    made.eos_ids = {0};
    return made;
  }();
  return one;
}

// With a special token of neox_tokenizer(), and one that ends its turns.
inline const Chat& neox_chat() {
  static const Chat* one = [] {
    const char* const format = R"({"version": 1, "order": "any",
        "kinds": [{"role": "system", "tests": {"empty": true}, "kind": "absent"},
                  {"role": "assistant", "tests": {"contains": "</think>"}, "kind": "thought"},
                  {"role": "user", "tests": {"starts": "!"}, "refuse": "no commands"}],
        "rules": [{"previous": "start", "role": "system", "parts": ["<|endoftext|>S", {"from": "content", "steps": [["strip"]]}]},
                  {"previous": "start", "role": "user", "parts": ["<|endoftext|>U", {"from": "content", "steps": []}]},
                  {"previous": "system", "role": "user", "parts": ["\nU", {"from": "content", "steps": [["rstrip"]]}]},
                  {"previous": "user", "role": "user", "when": {"zone": "last_user", "system": "plain"},
                   "parts": ["\nU", {"from": "system", "steps": []}, "\n", {"from": "content", "steps": []}]},
                  {"previous": "user", "role": "user", "parts": ["\nU", {"from": "content", "steps": []}]},
                  {"previous": "user", "role": "assistant", "when": {"kind": "thought"},
                   "parts": ["\nA", {"from": "content", "steps": [["remove", "<think>", "</think>"], ["lstrip", "\n"]]}, "<|endoftext|>"]},
                  {"previous": "user", "role": "assistant", "parts": ["\nA", {"from": "content", "steps": []}, "<|endoftext|>"]},
                  {"previous": "assistant", "role": "user", "parts": ["\nU", {"from": "content", "steps": []}]},
                  {"previous": "assistant", "role": "end", "parts": []},
                  {"previous": "user", "role": "end", "when": {"last": true}, "parts": ["\n"]},
                  {"previous": "user", "role": "generation", "parts": ["\nA<think>"]}],
        "refusals": [{"previous": "assistant", "role": "assistant", "message": "one answer at a time"}],
        "end": ["<|endoftext|>", "\nU"], "thoughts": {"begin": "<think>", "end": "</think>"}})";
    return new Chat(ChatFormat::from_json(parse_json(format, "chat_format"), "chat_format"), neox_tokenizer());
  }();
  return *one;
}

inline void check_ids(const std::vector<std::int32_t>& ids, std::int64_t vocab_size) {
  for (const std::int32_t id : ids) FUZZ_CHECK(id >= 0 && id < vocab_size);
}

// accepts() for what reads the body of a request: the answer to one that is refused is JSON, whatever the request held.
template <typename Read>
void answers(Read&& read) {
  accepts([&] {
    try {
      std::forward<Read>(read)();
    } catch (const RequestError& error) {
      FUZZ_CHECK(error.status() == 400 || error.status() == 404);
      const Json answer = Json::parse(error_body(error.status(), error.what(), error.param(), error.api_code()));
      FUZZ_CHECK(answer["error"]["message"].is_string());
      throw;
    }
  });
}

}  // namespace weft::fuzz
