// A value of a JSON document, with the path that names it in messages: "<source>: <path>: got X, expected Y".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "llmc/base/json.h"

namespace weft {

class Node {
 public:
  Node(const Json& json, std::string path, const std::string& source)
      : json_(&json), path_(std::move(path)), source_(&source) {}

  const Json& json() const { return *json_; }
  const std::string& path() const { return path_; }
  bool is_null() const { return json_->is_null(); }

  Node operator[](const std::string& key) const;  // a member; one that is absent reads as null, as in the original
  Node entry(const std::string& key) const;  // a member whose key the file chooses, such as a token: the path quotes it
  Node operator[](std::size_t index) const;  // of a list
  std::size_t list_size() const;             // the others refuse a value of another type
  const std::string& text() const;
  bool flag(bool absent) const;
  std::int64_t integer(std::int64_t low, std::int64_t high, const char* what) const;  // "a <what> from <low> to <high>"
  const std::string& character() const;                                               // a text of one character

  // Exit::bad_file: got this value, expected that.
  [[noreturn]] void refuse(const char* expected) const;
  // The same without quoting the value: for a value that is too long, or one that is not wrong by itself.
  [[noreturn]] void problem(const std::string& what) const;

 private:
  const Json* json_;
  std::string path_;
  const std::string* source_;
};

}  // namespace weft
