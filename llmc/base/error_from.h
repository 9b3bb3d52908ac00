// Errors of work whose failure is told to somebody else: another thread, or the other ranks.
#pragma once

#include <exception>
#include <new>
#include <optional>

#include "llmc/base/error.h"

namespace weft {

// Calls work() and returns what it throws as an Error: std::bad_alloc becomes Exit::resources, any other std::exception
// Exit::environment. Empty if it throws nothing.
template <typename Work>
std::optional<Error> error_from(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(Exit::resources, "out of memory");
  } catch (const std::exception& error) {
    return Error(Exit::environment, escaped(error.what()));
  }
  return std::nullopt;
}

}  // namespace weft
