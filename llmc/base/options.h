// Command-line options from one table that also makes --help: GNU long options, every value with a range, refused with
// the range and the nearest name. Built on CLI11.
//
// Usage errors are Exit::usage and name the option, what was given and what is accepted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/error.h"

namespace weft {

class OptionTable {
 public:
  OptionTable(const std::string& program, const std::string& purpose);
  ~OptionTable();
  OptionTable(const OptionTable&) = delete;
  OptionTable& operator=(const OptionTable&) = delete;

  // Starts a section of --help; later options belong to it.
  void group(const std::string& title);

  // Each binds `--name VALUE` to a variable that already holds the default, which --help shows.
  void text(const std::string& name, std::string& variable, const std::string& placeholder, const std::string& help);
  void choice(const std::string& name, std::string& variable, const std::vector<std::string>& values,
              const std::string& help);
  void integer(const std::string& name, std::int64_t& variable, std::int64_t low, std::int64_t high,
               const std::string& help);
  void number(const std::string& name, double& variable, double low, double high, const std::string& help);
  void flag(const std::string& name, bool& variable, const std::string& help);
  // May be given several times; the values in order.
  void repeated(const std::string& name, std::vector<std::string>& variable, const std::string& placeholder,
                const std::string& help);

  // Text at the end of --help: exit codes, examples.
  void footer(const std::string& text);

  enum class Outcome { run, exit_ok };  // exit_ok: --help or --version was printed on stdout
  Outcome parse(int argc, const char* const* argv);

  // True if the option was given on the command line (not left at its default).
  bool given(const std::string& name) const;
  // Every option with its effective value, in table order: the start-up table and config.json.
  std::vector<std::pair<std::string, std::string>> effective() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Runs `body` and turns what it throws into one "error: ..." line and an exit code: the whole main() of a program.
int run_program(const std::function<Exit()>& body);

}  // namespace weft
