#include "llmc/text/json_node.h"

#include "llmc/base/error.h"
#include "llmc/base/utf8.h"

namespace weft {

namespace {

const Json kNull;

}  // namespace

Node Node::operator[](const std::string& key) const {
  if (!json_->is_object()) refuse("an object");
  const auto found = json_->find(key);
  return {found == json_->end() ? kNull : *found, path_.empty() ? key : path_ + "." + key, *source_};
}

Node Node::entry(const std::string& key) const {
  const Node member = (*this)[key];
  return {*member.json_, path_ + "[" + escaped(key) + "]", *source_};
}

Node Node::operator[](std::size_t index) const {
  return {(*json_)[index], format("%s[%zu]", path_.c_str(), index), *source_};
}

std::size_t Node::list_size() const {
  if (!json_->is_array()) refuse("a list");
  return json_->size();
}

const std::string& Node::text() const {
  if (!json_->is_string()) refuse("a string");
  return json_->get_ref<const std::string&>();
}

bool Node::flag(bool absent) const {
  if (is_null()) return absent;
  if (!json_->is_boolean()) refuse("true or false");
  return json_->get<bool>();
}

std::int64_t Node::integer(std::int64_t low, std::int64_t high, const char* what) const {
  const std::optional<std::int64_t> value = json_integer(*json_);
  if (value && *value >= low && *value <= high) return *value;
  refuse(format("a %s from %lld to %lld", what, static_cast<long long>(low), static_cast<long long>(high)).c_str());
}

const std::string& Node::character() const {
  const std::string& value = text();
  if (value.empty() || utf8_sequence_length(value) != value.size()) refuse("one character");
  return value;
}

void Node::refuse(const char* expected) const {
  const std::string got = json_->dump(-1, ' ', true, Json::error_handler_t::replace);
  fail(Exit::bad_file, "%s: %s: got %s, expected %s", source_->c_str(), path_.c_str(), escaped(got).c_str(), expected);
}

void Node::problem(const std::string& what) const {
  fail(Exit::bad_file, "%s: %s: %s", source_->c_str(), path_.c_str(), what.c_str());
}

}  // namespace weft
