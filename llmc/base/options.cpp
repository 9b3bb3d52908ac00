#include "llmc/base/options.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <optional>

#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/option_aliases.h"
#include "llmc/base/signals.h"
#include "llmc/base/utf8.h"

namespace weft {

namespace {

constexpr std::size_t kHelpColumns = 80;
constexpr std::size_t kHelpIndent = 28;  // column of the descriptions

std::string number_text(double value) {
  char text[32];
  const std::to_chars_result end = std::to_chars(text, text + sizeof text, value);
  return std::string(text, end.ptr);
}

std::string join(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

// `text` as a number in the C locale's notation, if all of it is one: std::from_chars accepts no "+", no space, no
// "0x".
template <typename Number>
std::optional<Number> parse_number(const std::string& text) {
  Number value{};
  const std::from_chars_result end = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end.ec != std::errc{} || end.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

// Insertions, deletions and substitutions between two words (Levenshtein), one row of the table at a time.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// The word that the user probably meant: the one with the fewest edits, at most two or a third of the letters of
// `given`. A word that starts with `given` counts as one edit. Empty: no such word.
std::string nearest(std::string_view given, const std::vector<std::string>& words) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, given.size() / 3) + 1;
  for (const std::string& word : words) {
    const bool prefix = given.size() >= 3 && word.starts_with(given);
    const std::size_t distance = prefix ? 1 : edit_distance(given.substr(0, 64), word);
    if (distance < best_distance && distance < word.size()) {
      best_distance = distance;
      best = word;
    }
  }
  return best;
}

// `text` broken at spaces to fit between the columns kHelpIndent and kHelpColumns; a longer word gets a line of its
// own.
std::string wrapped(const std::string& text) {
  std::string out;
  std::size_t column = 0;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::size_t length = end - begin;
    if (column > 0 && column + 1 + length > kHelpColumns - kHelpIndent) {
      out += "\n" + std::string(kHelpIndent, ' ');
      column = 0;
    } else if (column > 0) {
      out += ' ';
      ++column;
    }
    out.append(text, begin, length);
    column += length;
    begin = end + 1;
  }
  return out;
}

Exit write_failure_code(int error) {
  return is_full(error) ? Exit::resources : Exit::environment;
}

}  // namespace

// One option: how it looks in --help, and what to do with its value.
struct Entry {
  std::string group, name, placeholder, help;
  std::string kind;    // "an integer", "a number", "one of"; empty: any text
  std::string bounds;  // "from 1 to 8", "of at least 0", the choices
  std::string limit;   // the greatest integer, where the bounds do not name it
  bool takes_value = true, repeatable = false, only_in_help_all = false;
  char letter = '\0';                             // of the short option; 0: none
  std::function<bool(const std::string&)> store;  // false: not acceptable
  std::function<std::string()> value;             // current value of the variable, as text
  std::vector<std::string> choices;
  std::string default_text;
  CLI::Option* option = nullptr;

  std::string expected() const { return kind.empty() ? placeholder : kind + " " + bounds; }
};

struct OptionTable::Impl {
  Impl(const std::string& program_name, const std::string& purpose_text)
      : program(program_name), purpose(purpose_text), app(purpose_text, program_name) {
    app.set_help_flag("-h,--help");
    app.set_help_all_flag("--help-all");
    app.allow_extras();  // unknown options are reported here, with a suggestion
  }

  void add(Entry entry);
  const Entry* find(std::string_view name) const;
  Entry& at(const std::string& name);  // Exit::internal if there is none
  const Entry* find_letter(char letter) const;
  std::vector<std::string> names() const;
  std::vector<std::string> normalized(int argc, const char* const* argv) const;
  std::string alias(std::string argument) const;
  [[noreturn]] void fail_unknown(const std::string& argument) const;
  void store(const Entry& entry) const;

  std::string program, purpose, current_group, footer_text, version_text;
  CLI::App app;
  std::vector<Entry> entries;
};

void OptionTable::Impl::add(Entry entry) {
  entry.group = current_group;
  const std::string flag = "--" + entry.name;
  if (entry.takes_value) {
    entry.option = app.add_option(flag, [](const CLI::results_t&) { return true; });
    entry.option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  } else {
    entry.option = app.add_flag(flag);
  }
  entry.default_text = entry.value();
  entries.push_back(std::move(entry));
}

const Entry* OptionTable::Impl::find(std::string_view name) const {
  for (const Entry& entry : entries) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

Entry& OptionTable::Impl::at(const std::string& name) {
  for (Entry& entry : entries) {
    if (entry.name == name) return entry;
  }
  fail(Exit::internal, "no option --%s in the table", name.c_str());
}

const Entry* OptionTable::Impl::find_letter(char letter) const {
  for (const Entry& entry : entries) {
    if (entry.letter == letter && letter != '\0') return &entry;
  }
  return nullptr;
}

std::vector<std::string> OptionTable::Impl::names() const {
  std::vector<std::string> all = {"help", "help-all"};
  if (!version_text.empty()) all.push_back("version");
  for (const Entry& entry : entries) all.push_back(entry.name);
  return all;
}

// The arguments after the program's name, rewritten as "--name VALUE" so that CLI11 cannot read them differently:
// `--name=` is an empty value and does not take the next argument, a flag takes no value, and a value may begin with
// dashes but must be present, and behind a space it is not the name of an option.
std::vector<std::string> OptionTable::Impl::normalized(int argc, const char* const* argv) const {
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--") {
      arguments.insert(arguments.end(), argv + i, argv + argc);
      break;
    }
    const std::size_t equals = argument.find('=');
    const Entry* entry = nullptr;
    std::optional<std::string> value;  // the VALUE of --name=VALUE or -nVALUE
    if (argument.starts_with("--")) {
      entry = find(argument.substr(2, equals - 2));
      if (equals != std::string::npos) value = argument.substr(equals + 1);
    } else if (argument.size() >= 2 && argument[0] == '-' && (argument.size() == 2 || alias(argument).empty())) {
      entry = find_letter(argument[1]);
      if (argument.size() > 2) value = argument.substr(2);
    }
    if (entry == nullptr) {
      arguments.push_back(argument);
    } else if (!entry->takes_value) {
      if (value) fail(Exit::usage, "--%s: takes no value, got %s", entry->name.c_str(), escaped(*value).c_str());
      arguments.push_back("--" + entry->name);
    } else {
      if (!value && i + 1 == argc) {
        fail(Exit::usage, "--%s: value missing, expected %s", entry->name.c_str(), entry->expected().c_str());
      }
      if (!value && std::string_view(argv[i + 1]).starts_with("--") && find(argv[i + 1] + 2) != nullptr) {
        fail(Exit::usage, "--%s: value missing, %s is an option. Write --%s=%s if it is the value", entry->name.c_str(),
             argv[i + 1], entry->name.c_str(), argv[i + 1]);
      }
      arguments.push_back("--" + entry->name);
      arguments.push_back(value ? *value : argv[++i]);
    }
  }
  return arguments;
}

// The option of this table that other tools call `argument`; empty if there is none.
std::string OptionTable::Impl::alias(std::string argument) const {
  argument.resize(std::min(argument.find('='), argument.size()));
  std::replace(argument.begin(), argument.end(), '_', '-');
  for (const auto& [theirs, ours] : option_aliases()) {
    if (argument == theirs && find(ours) != nullptr) return std::string(ours);
  }
  return "";
}

void OptionTable::Impl::fail_unknown(const std::string& argument) const {
  const std::size_t dashes = std::min(argument.find_first_not_of('-'), argument.size());
  if (dashes == 0 || dashes == argument.size()) {
    const bool file = ::access(argument.c_str(), F_OK) == 0;
    fail(Exit::usage, "unexpected argument %s: every argument belongs to an option, see --help%s",
         escaped(argument).c_str(),
         file ? ". It is a file: has the shell expanded a pattern? Quote patterns, as in --train 'data/*.bin'" : "");
  }
  std::string guess = alias(argument);
  if (guess.empty()) guess = nearest(argument.substr(dashes, argument.find('=') - dashes), names());
  fail(Exit::usage, "unknown option %s: %s", escaped(argument.substr(0, argument.find('='))).c_str(),
       guess.empty() ? "see --help" : ("did you mean --" + guess + "?").c_str());
}

void OptionTable::Impl::store(const Entry& entry) const {
  const std::vector<std::string>& given = entry.option->results();
  if (given.size() > 1 && !entry.repeatable) {
    fail(Exit::usage, "--%s: given %zu times, expected once", entry.name.c_str(), given.size());
  }
  for (const std::string& value : given) {
    if (entry.store(value)) continue;
    const std::string guess = nearest(value, entry.choices);
    const bool beyond = !entry.limit.empty() && value.find_first_not_of("0123456789") == std::string::npos &&
                        !value.empty() && !parse_number<std::int64_t>(value);
    fail(Exit::usage, "--%s: got %s, expected %s%s%s", entry.name.c_str(), escaped(value).c_str(),
         entry.expected().c_str(), beyond ? (" and at most " + entry.limit).c_str() : "",
         guess.empty() ? "" : (". Did you mean " + guess + "?").c_str());
  }
}

OptionTable::OptionTable(const std::string& program, const std::string& purpose)
    : impl_(std::make_unique<Impl>(program, purpose)) {}
OptionTable::~OptionTable() = default;

void OptionTable::group(const std::string& title) {
  impl_->current_group = title;
}
void OptionTable::footer(const std::string& text) {
  impl_->footer_text = text;
}

void OptionTable::version(const std::string& text) {
  impl_->version_text = text;
  impl_->app.set_version_flag("-V,--version", text);
}

void OptionTable::short_name(char letter, const std::string& name) {
  impl_->at(name).letter = letter;
}

void OptionTable::default_note(const std::string& name, const std::string& text) {
  impl_->at(name).default_text = text;
}

void OptionTable::only_in_help_all(const std::string& name) {
  impl_->at(name).only_in_help_all = true;
}

void OptionTable::text(const std::string& name, std::string& variable, const std::string& placeholder,
                       const std::string& help) {
  Entry entry;
  entry.name = name;
  entry.placeholder = placeholder;
  entry.help = help;
  entry.store = [&variable](const std::string& value) {
    variable = value;
    return true;
  };
  entry.value = [&variable] { return utf8_replace_invalid(variable); };
  impl_->add(std::move(entry));
}

void OptionTable::choice(const std::string& name, std::string& variable, const std::vector<std::string>& values,
                         const std::string& help) {
  Entry entry;
  entry.name = name;
  entry.placeholder = join(values, "|");
  entry.help = help;
  entry.kind = "one of";
  entry.bounds = join(values, ", ");
  entry.choices = values;
  entry.store = [&variable, values](const std::string& value) {
    variable = value;
    return std::find(values.begin(), values.end(), value) != values.end();
  };
  entry.value = [&variable] { return variable; };
  impl_->add(std::move(entry));
}

void OptionTable::integer(const std::string& name, std::int64_t& variable, std::int64_t low, std::int64_t high,
                          const std::string& help) {
  Entry entry;
  entry.name = name;
  entry.placeholder = "N";
  entry.help = help;
  entry.kind = "an integer";
  if (high == std::numeric_limits<std::int64_t>::max()) {
    entry.bounds = "of at least " + std::to_string(low);
    entry.limit = std::to_string(high);
  } else {
    entry.bounds = "from " + std::to_string(low) + " to " + std::to_string(high);
  }
  entry.store = [&variable, low, high](const std::string& text) {
    const std::optional<std::int64_t> value = parse_number<std::int64_t>(text);
    if (value.has_value()) variable = *value;
    return value.has_value() && *value >= low && *value <= high;
  };
  entry.value = [&variable] { return std::to_string(variable); };
  impl_->add(std::move(entry));
}

void OptionTable::number(const std::string& name, double& variable, double low, double high, const std::string& help) {
  Entry entry;
  entry.name = name;
  entry.placeholder = "X";
  entry.help = help;
  entry.kind = "a number";
  entry.bounds = high >= std::numeric_limits<double>::max() ? "of at least " + number_text(low)
                                                            : "from " + number_text(low) + " to " + number_text(high);
  entry.store = [&variable, low, high](const std::string& text) {
    const std::optional<double> value = parse_number<double>(text);
    if (value.has_value()) variable = *value;
    return value.has_value() && std::isfinite(*value) && *value >= low && *value <= high;
  };
  entry.value = [&variable] { return number_text(variable); };
  impl_->add(std::move(entry));
}

void OptionTable::flag(const std::string& name, bool& variable, const std::string& help) {
  Entry entry;
  entry.name = name;
  entry.help = help;
  entry.takes_value = false;
  entry.store = [&variable](const std::string&) { return variable = true; };
  entry.value = [&variable] { return std::string(variable ? "true" : "false"); };
  impl_->add(std::move(entry));
}

void OptionTable::repeated(const std::string& name, std::vector<std::string>& variable, const std::string& placeholder,
                           const std::string& help) {
  Entry entry;
  entry.name = name;
  entry.placeholder = placeholder;
  entry.help = help;
  entry.repeatable = true;
  entry.store = [&variable](const std::string& value) {
    variable.push_back(value);
    return true;
  };
  entry.value = [&variable] { return json_text(variable); };
  impl_->add(std::move(entry));
}

OptionTable::Outcome OptionTable::parse(int argc, const char* const* argv) {
  std::vector<std::string> arguments = impl_->normalized(argc, argv);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 expects the first argument last
  try {
    impl_->app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    write_stdout(help());
    return Outcome::exit_ok;
  } catch (const CLI::CallForAllHelp&) {
    write_stdout(help(true));
    return Outcome::exit_ok;
  } catch (const CLI::CallForVersion&) {
    write_stdout(impl_->version_text + "\n");
    return Outcome::exit_ok;
  } catch (const CLI::ParseError& error) {
    fail(Exit::usage, "%s", escaped(error.what()).c_str());
  }
  const std::vector<std::string> unknown = impl_->app.remaining();
  if (!unknown.empty()) impl_->fail_unknown(unknown.front());
  for (const Entry& entry : impl_->entries) impl_->store(entry);
  return Outcome::run;
}

std::string OptionTable::help(bool all) const {
  const auto line = [](const std::string& left, const std::string& text) {
    const bool fits = left.size() + 2 <= kHelpIndent;
    const std::string gap = fits ? std::string(kHelpIndent - left.size(), ' ') : "\n" + std::string(kHelpIndent, ' ');
    return left + gap + wrapped(text) + "\n";
  };
  std::string out = impl_->purpose + "\n\nUsage: " + impl_->program + " [--option VALUE]...\n";
  std::string group;
  for (const Entry& entry : impl_->entries) {
    if (entry.only_in_help_all && !all) continue;
    if (entry.group != group) out += "\n" + entry.group + ":\n";
    group = entry.group;
    std::string notes = entry.choices.empty() ? entry.bounds : "";  // choices already stand in the left column
    if (entry.takes_value && !entry.repeatable && !entry.default_text.empty()) {
      notes += (notes.empty() ? "default " : "; default ") + entry.default_text;
    }
    if (entry.repeatable) notes = "may be given several times";
    const std::string letter = entry.letter != '\0' ? std::string("-") + entry.letter + ", " : "";
    out += line("  " + letter + "--" + entry.name + (entry.takes_value ? " " + entry.placeholder : ""),
                entry.help + (notes.empty() ? "" : " (" + notes + ")"));
  }
  out += "\nAbout:\n" + line("  -h, --help", "print this and exit");
  const auto hidden = [](const Entry& entry) { return entry.only_in_help_all; };
  if (std::any_of(impl_->entries.begin(), impl_->entries.end(), hidden)) {
    out += line("  --help-all", "print this and the options for tests, and exit");
  }
  if (!impl_->version_text.empty()) out += line("  -V, --version", "print the version and exit");
  if (!impl_->footer_text.empty()) out += "\n" + impl_->footer_text + "\n";
  return out;
}

bool OptionTable::given(const std::string& name) const {
  return impl_->at(name).option->count() > 0;
}

std::string OptionTable::all_given(std::span<const char* const> names) const {
  std::string all;
  for (const char* const name : names) {
    if (given(name)) all.append(all.empty() ? "--" : ", --").append(name);
  }
  return all;
}

std::vector<std::pair<std::string, std::string>> OptionTable::effective() const {
  std::vector<std::pair<std::string, std::string>> values;
  for (const Entry& entry : impl_->entries) values.emplace_back(entry.name, entry.value());
  return values;
}

std::uint64_t memory_size(const std::string& option, const std::string& text) {
  const std::pair<const char*, double> units[] = {{"GB", 1e9},     {"GiB", 0x1p30}, {"MB", 1e6},
                                                  {"MiB", 0x1p20}, {"TB", 1e12},    {"TiB", 0x1p40}};
  double number = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::size_t unit = text.find_first_not_of(' ', static_cast<std::size_t>(end.ptr - text.data()));
  for (const auto& [name, bytes] : units) {
    if (end.ec != std::errc{} || unit == std::string::npos || text.substr(unit) != name) continue;
    if (number >= 1 / bytes && number * bytes <= 1e15) return static_cast<std::uint64_t>(number * bytes);
  }
  fail(Exit::usage, "%s: got %s, expected a size such as 80GB or 79.5GiB", option.c_str(), escaped(text).c_str());
}

void write_stdout(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (std::fflush(stdout) == 0 && written) return;
  if (errno == EPIPE) throw OutputClosed{};
  fail(write_failure_code(errno), "standard output: cannot write: %s", std::strerror(errno));
}

namespace {

// Opens /dev/null on each standard descriptor that is closed, in the opposite direction, as gnulib's stdopen does:
// stdin for writing, stdout and stderr for reading. Using one is then an error and no result is lost silently. False if
// it fails.
bool occupy_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) != -1 || errno != EBADF) continue;
    if (::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd) return false;
  }
  return true;
}

}  // namespace

int run_program(const std::function<Exit()>& body) {
  const char* kBug = "This is a bug in weft, please report it";
  if (!occupy_standard_descriptors()) return static_cast<int>(Exit::environment);
  // With these ignored, a closed pipe and a file beyond `ulimit -f` are write errors and do not kill the process.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  install_bus_error_handler();
  Exit code = Exit::internal;
  try {
    code = body();
    write_stdout("");
  } catch (const OutputClosed&) {
    code = Exit::ok;
  } catch (const Error& error) {
    code = error.code();
    if (code == Exit::internal) {
      log_error("internal error: %s. %s", error.what(), kBug);
    } else {
      log_error("%s", error.what());
    }
  } catch (const std::bad_alloc&) {
    code = Exit::resources;
    log_error("out of memory");
  } catch (const std::system_error& error) {  // from std::thread: this user may start no more threads
    code = Exit::resources;
    log_error("the system refuses a resource: %s. See ulimit -u and ulimit -v", escaped(error.what()).c_str());
  } catch (const std::exception& error) {
    log_error("internal error: %s. %s", escaped(error.what()).c_str(), kBug);
  }
  return static_cast<int>(code);
}

}  // namespace weft
