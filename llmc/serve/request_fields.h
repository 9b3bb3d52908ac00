// Fields of requests: readers, and those that other servers of these APIs know and this one does not.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "llmc/base/json_fwd.h"
#include "llmc/serve/request_error.h"

namespace weft {

// 400: "<name>: got ..., expected ...".
[[noreturn]] void refuse_field(const std::string& name, const Json& got, const std::string& expected);

// The member `name` of `body`; null counts as not given.
bool read_flag(const Json& body, const std::string& name, bool otherwise = false);
std::int64_t read_count(const Json& body, const std::string& name, std::int64_t otherwise, std::int64_t high);

// Runs a reader that other programs use, too, and turns its error into a RequestError about the field `name`. The messages
// of these readers begin with the field: "temperature: got ...".
template <typename Read>
auto for_field(const std::string& name, Read&& read) {
  try {
    return std::forward<Read>(read)();
  } catch (const RequestError&) {
    throw;
  } catch (const Error& error) {
    if (error.code() != Exit::usage && error.code() != Exit::bad_file) throw;
    throw RequestError(400, error.what(), name);
  }
}

enum class TextApi { completions, chat };

// What is wrong with the field `name` of a request for text, none of those that this server has, with a `value` other
// than null. Empty: nothing, because it changes neither the text nor what the client gets of it. All that is not known to be
// so is wrong: a client that asks for something and does not get it has to be told.
std::string foreign_field_error(const std::string& name, const Json& value, TextApi api);

}  // namespace weft
