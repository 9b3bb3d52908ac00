// Command lines: u8 mode, then the arguments, one a line.
//   mode 0   a table with an option of every kind, parsed again and again
//   mode 1   the small notations: --prompt-ids, --debug-inject
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "llmc/base/options.h"
#include "llmc/infer/prompt.h"
#include "llmc/train/fault_injection.h"
#include "test/fuzz/target.h"

namespace weft::fuzz {
namespace {

struct Values {
  std::string text, choice = "b";
  std::int64_t count = 3, wide = 0;
  double share = 0.5, positive = 1;
  bool flag = false;
  std::vector<std::string> list;
};

void define(OptionTable& table, Values& values) {
  table.group("All");
  table.text("text", values.text, "TEXT", "any text");
  table.choice("choice", values.choice, {"alpha", "b", "auto"}, "one of three");
  table.integer("count", values.count, 1, 8, "bounded");
  table.integer("wide", values.wide, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max(),
                "any");
  table.number("share", values.share, 0, 1, "bounded");
  table.number("positive", values.positive, 1e-20, std::numeric_limits<double>::max(), "open above");
  table.flag("flag", values.flag, "given or not");
  table.repeated("list", values.list, "TEXT", "any number of them");
}

void parse_all_kinds(const std::vector<const char*>& arguments) {
  // A program parses once. CLI11 remembers the order of all options it ever saw: the table is made anew now and then.
  static Values& values = *new Values;
  static std::unique_ptr<OptionTable> table;
  static int parsed = 0;
  if (parsed++ % 1000 == 0) {
    table = std::make_unique<OptionTable>("fuzz", "An option of every kind.");
    define(*table, values);
  }
  values = Values();
  const bool accepted = accepts([&] { table->parse(static_cast<int>(arguments.size()), arguments.data()); });
  if (!accepted) return;
  FUZZ_CHECK(values.count >= 1 && values.count <= 8 && values.share >= 0 && values.share <= 1);
  FUZZ_CHECK(std::isfinite(values.positive) && values.positive >= 1e-20);
  FUZZ_CHECK(values.choice == "alpha" || values.choice == "b" || values.choice == "auto");
  FUZZ_CHECK(table->effective().size() == 8);
}

void parse_small(std::string_view text) {
  accepts([&] {
    const std::vector<std::int32_t> ids = parse_ids(std::string(text), 1000);
    for (const std::int32_t id : ids) FUZZ_CHECK(id >= 0 && id < 1000);
    FUZZ_CHECK(!ids.empty() && parse_ids(ids_text(ids), 1000) == ids);
  });
  accepts([&] { parse_faults(lines(text)); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const bool table = input.take<std::uint8_t>() % 2 == 0;
  const std::string_view rest = input.take_rest();
  if (table) {
    const std::vector<std::string> words = lines(rest);
    std::vector<const char*> arguments = {"fuzz"};
    for (const std::string& word : words) arguments.push_back(word.c_str());
    parse_all_kinds(arguments);
  } else {
    parse_small(rest);
  }
  return 0;
}

}  // namespace weft::fuzz
