#pragma once

#include <string>
#include <utility>

#include "llmc/base/error.h"

namespace weft {

// A request that is refused: the status and the fields of the API's error object.
class RequestError : public Error {
 public:
  RequestError(int status, const std::string& message, std::string param = "", std::string code = "")
      : Error(Exit::usage, message), status_(status), param_(std::move(param)), code_(std::move(code)) {}
  int status() const { return status_; }
  const std::string& param() const { return param_; }  // the field; empty: none
  const std::string& api_code() const { return code_; }

 private:
  int status_;
  std::string param_, code_;
};

}  // namespace weft
