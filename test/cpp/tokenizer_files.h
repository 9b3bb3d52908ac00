// The tokenizer files of test/fixtures/tokenizer, changed by tests, and how they are refused.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/text/tokenizer.h"
#include "test/cpp/test_files.h"

namespace weft {

inline const std::string kFixtures = "test/fixtures/tokenizer/";

inline Json document(const std::string& name) {
  const MappedFile file(kFixtures + name + ".tokenizer.json");
  return Json::parse(file.text());
}

inline Tokenizer parse(const Json& json) {
  return Tokenizer::from_json(json.dump(), "t.json");
}

using Change = std::function<void(Json&)>;

// Another value at a place, such as "/model/type"; "-" is the place behind the last one of a list.
inline Change set(const std::string& place, const Json& value) {
  return [=](Json& json) { json[Json::json_pointer(place)] = value; };
}

// The message with which the changed file is refused; or "accepted".
inline std::string reason_of_change(const std::string& name, const Change& change) {
  Json json = document(name);
  change(json);
  return reason_of(Exit::bad_file, [&] { parse(json); });
}

// One line with all of these words.
inline void expect_reason(const std::string& message, const std::vector<std::string>& words) {
  expect_contains(message, "t.json: ");
  for (const std::string& word : words) expect_contains(message, word);
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

}  // namespace weft
