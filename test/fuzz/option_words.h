// What the targets of both option tables share: a command line, one argument a line, given to a parser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "test/fuzz/target.h"

namespace weft::fuzz {

// check(settings) runs for every command line that Parser accepts and that asks for more than --help.
template <typename Parser, typename Check>
void parse_words(const std::uint8_t* data, std::size_t size, const Check& check) {
  const std::vector<std::string> words = lines(Input(data, size).take_rest());
  std::vector<const char*> arguments = {"fuzz"};
  for (const std::string& word : words) arguments.push_back(word.c_str());
  // Making the table takes most of the time of a parse. CLI11 remembers the order of all options it ever saw, so that it is
  // made anew now and then.
  static std::unique_ptr<Parser> parser;
  static int parsed = 0;
  if (parsed++ % 1000 == 0) parser = std::make_unique<Parser>("fuzz");
  accepts([&] {
    const auto settings = parser->parse(static_cast<int>(arguments.size()), arguments.data());
    if (settings) check(*settings);
  });
}

}  // namespace weft::fuzz
