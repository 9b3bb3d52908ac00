#include "llmc/base/json.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"

namespace weft {

namespace {

constexpr std::size_t kMostTold = 20;  // a file may hold a million of them

void tell(std::vector<std::string>& tolerated, const std::string& text) {
  if (tolerated.size() < kMostTold) tolerated.push_back(text);
}

// A first pass that builds no values. It bounds their number and depth and refuses a key that occurs twice in one object, of which
// the library would silently keep the last. The library's parser could check this through a callback, but with one it
// searches all siblings at the end of each object: quadratic time for a long list of objects.
class Guard : public nlohmann::json_sax<Json> {
 public:
  Guard(const std::string& source, const JsonLimits& limits) : source_(source), limits_(limits) {}

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
  bool binary(binary_t&) override { return count(); }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& key) override {
    if (!keys_.back().insert(key).second) {
      if (limits_.tolerated != nullptr) {
        tell(*limits_.tolerated,
             format("%s: key %s occurs twice: the last one counts", source_.c_str(), escaped(key).c_str()));
        return true;
      }
      fail(Exit::bad_file, "%s: JSON key %s occurs twice in one object", source_.c_str(), escaped(key).c_str());
    }
    return true;
  }
  // Ends this pass without a message: the second pass meets the same error and reports it.
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  bool count() {
    if (values_++ == limits_.values) {
      fail(Exit::bad_file, "%s: more than %zu JSON values are not accepted", source_.c_str(), limits_.values);
    }
    return true;
  }
  bool open() {
    if (static_cast<int>(keys_.size()) >= limits_.depth) {
      fail(Exit::bad_file, "%s: JSON nested deeper than %d levels", source_.c_str(), limits_.depth);
    }
    keys_.emplace_back();
    return count();
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& source_;
  const JsonLimits& limits_;
  std::size_t values_ = 0;
  std::vector<std::unordered_set<std::string, SeededHash>> keys_;
};

const Json& member(const Json& object, const std::string& key, const std::string& source) {
  if (!object.is_object()) {
    fail(Exit::bad_file, "%s: got a JSON %s, expected an object", source.c_str(), object.type_name());
  }
  const auto found = object.find(key);
  if (found == object.end()) fail(Exit::bad_file, "%s: %s: missing", source.c_str(), key.c_str());
  return *found;
}

[[noreturn]] void wrong_type(const Json& value, const std::string& key, const char* expected,
                             const std::string& source) {
  const std::string got = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  fail(Exit::bad_file, "%s: %s: got %s, expected %s", source.c_str(), key.c_str(), escaped(got).c_str(), expected);
}

}  // namespace

std::string json_text(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

namespace {

// `text` with null in the place of the constants that Python writes for numbers that JSON has not.
std::string without_constants(std::string_view text, const std::string& source, std::vector<std::string>& tolerated) {
  std::string result;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t length = 1;
    if (quoted && text[i] == '\\') {
      length = std::min<std::size_t>(2, text.size() - i);
    } else if (text[i] == '"') {
      quoted = !quoted;
    } else if (!quoted) {
      for (const std::string_view constant : {"NaN", "Infinity", "-Infinity"}) {
        if (!text.substr(i).starts_with(constant)) continue;
        tell(tolerated, format("%s: %s is read as null", source.c_str(), std::string(constant).c_str()));
        result += "null";
        i += constant.size();
        length = 0;
        break;
      }
    }
    result += text.substr(i, length);
    i += length;
  }
  return result;
}

// What the parser says is wrong, without its own name and without the text itself: "unexpected ']'; expected '}' (byte 38)".
std::string reason_of(const Json::exception& problem) {
  const std::string_view said = problem.what();
  const auto* at = dynamic_cast<const Json::parse_error*>(&problem);
  if (at == nullptr) return "a number is out of range";
  const std::size_t dash = said.find(" - ");
  if (dash == said.npos) return escaped(said, 200);
  const std::string_view reason = said.substr(dash + 3);
  return std::string(reason.substr(0, reason.find("; last read:"))) + format(" (byte %zu)", at->byte);
}

}  // namespace

Json parse_json(std::string_view text, const std::string& source, const JsonLimits& limits) {
  if (text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff")) {
    fail(Exit::bad_file, "%s: this is UTF-16 text, expected UTF-8. Save it again as UTF-8", source.c_str());
  }
  if (text.size() > limits.bytes) {
    fail(Exit::bad_file, "%s: %zu bytes of JSON, at most %zu are accepted", source.c_str(), text.size(), limits.bytes);
  }
  std::string clean;
  if (limits.tolerated != nullptr) text = clean = without_constants(text, source, *limits.tolerated);
  Guard guard(source, limits);
  try {
    Json::sax_parse(text.begin(), text.end(), &guard);
    return Json::parse(text.begin(), text.end());
  } catch (const Json::exception& problem) {
    fail(Exit::bad_file, "%s: not valid JSON: %s", source.c_str(), reason_of(problem).c_str());
  }
}

std::optional<std::int64_t> json_integer(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
    return std::nullopt;
  }
  return value.get<std::int64_t>();
}

std::int64_t json_int(const Json& object, const std::string& key, std::int64_t low, std::int64_t high,
                      const std::string& source) {
  const Json& value = member(object, key, source);
  const std::optional<std::int64_t> number = json_integer(value);
  if (number && *number >= low && *number <= high) return *number;
  const std::string expected =
      format("an integer from %lld to %lld", static_cast<long long>(low), static_cast<long long>(high));
  wrong_type(value, key, expected.c_str(), source);
}

double json_number(const Json& object, const std::string& key, const std::string& source) {
  const Json& value = member(object, key, source);
  if (!value.is_number() || !std::isfinite(value.get<double>())) wrong_type(value, key, "a finite number", source);
  return value.get<double>();
}

bool json_bool(const Json& object, const std::string& key, const std::string& source) {
  const Json& value = member(object, key, source);
  if (!value.is_boolean()) wrong_type(value, key, "true or false", source);
  return value.get<bool>();
}

std::string json_string(const Json& object, const std::string& key, const std::string& source) {
  const Json& value = member(object, key, source);
  if (!value.is_string()) wrong_type(value, key, "a string", source);
  return value.get<std::string>();
}

}  // namespace weft
