// Command-line options from one table, which also produces --help: GNU long options, numbers with a range, suggestions
// for misspelled names. Built on CLI11. Also run_program(), the frame of every main().
//
// Usage errors are Exit::usage and name the option, what was given and what is accepted. Numbers are read the same way
// in every locale, and the whole argument must be a number: no trailing characters, no hexadecimal, nothing that
// overflows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
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

  // Each binds `--name VALUE` to a variable that already holds the default, which --help shows. `name` is
  // without the dashes. All but repeated() may be given once only.
  void text(const std::string& name, std::string& variable, const std::string& placeholder, const std::string& help);
  void choice(const std::string& name, std::string& variable, const std::vector<std::string>& values,
              const std::string& help);
  void integer(const std::string& name, std::int64_t& variable, std::int64_t low, std::int64_t high,
               const std::string& help);
  // For both kinds of numbers: if `high` is the greatest value of its type, --help names no upper bound.
  void number(const std::string& name, double& variable, double low, double high, const std::string& help);
  void flag(const std::string& name, bool& variable, const std::string& help);
  // May be given several times; the values in order.
  void repeated(const std::string& name, std::vector<std::string>& variable, const std::string& placeholder,
                const std::string& help);

  // Lets `-m` stand for an option that is in the table: "-m VALUE" or "-mVALUE".
  void short_name(char letter, const std::string& name);
  // What --help shows as the default of an option in the table whose default follows from something else.
  void default_note(const std::string& name, const std::string& text);
  // Leaves an option that is in the table out of --help: only --help-all shows it.
  void only_in_help_all(const std::string& name);
  // What --version and -V print; without it there are no such options.
  void version(const std::string& text);
  // Text at the end of --help, printed unchanged: exit codes, examples.
  void footer(const std::string& text);

  enum class Outcome { run, exit_ok };  // exit_ok: --help, --help-all or --version was printed on stdout
  Outcome parse(int argc, const char* const* argv);
  // What --help prints, or with `all` --help-all: at most 80 columns, no escapes.
  std::string help(bool all = false) const;

  // True if the option was given on the command line (not left at its default).
  bool given(const std::string& name) const;
  // Those of `names` that were given, as "--lr, --out" in a message; empty: none.
  std::string all_given(std::span<const char* const> names) const;
  // Every option with its effective value, in table order, for the start-up table and config.json. The values of a
  // repeated option are one JSON array. Texts are as the user gave them, except that U+FFFD replaces bytes that are not
  // UTF-8, which JSON cannot hold: pass them through escaped() before printing.
  std::vector<std::pair<std::string, std::string>> effective() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The bytes of a size such as "80GB", "79.5 GiB" or "500MB", the value of `option`. Anything else is Exit::usage.
std::uint64_t memory_size(const std::string& option, const std::string& text);

// Writes a result to stdout and flushes it. Throws OutputClosed if the reader has closed its end of the pipe; any other
// failure is Exit::resources (disk full) or Exit::environment.
void write_stdout(std::string_view text);
struct OutputClosed {};

// The whole main() of a program: runs `body` and turns an exception into one "error: ..." line and an exit code.
// Flushes stdout at the end, because a result that could not be written is an error, too. A closed pipe is not an
// error: its reader (`head`, for example) has all that it wanted, so the program ends silently with 0. Standard
// descriptors that the parent process closed are opened first, so that no file of the program gets their numbers.
int run_program(const std::function<Exit()>& body);

}  // namespace weft
