// The reference dumps of models that the GPU computes, and by name those that it refuses.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "test/cpp/golden_cases.h"

namespace weft::test {

// The cases for whose configuration `reason` returns nothing. The others must be those of `refused`: the name of each without
// ".dump.bin", and a part of its reason.
inline std::vector<GoldenCase> computed_goldens(const std::vector<GoldenCase>& cases,
                                                const std::function<std::string(const ModelConfig&)>& reason,
                                                const std::map<std::string, std::string>& refused) {
  std::vector<GoldenCase> computed;
  std::map<std::string, std::string> reasons;
  for (const GoldenCase& golden : cases) {
    const std::string why = reason(ModelFile::open(golden.model).config());
    if (why.empty()) {
      computed.push_back(golden);
    } else {
      reasons[golden.name.substr(0, golden.name.find('.'))] = why;
    }
  }
  for (const auto& [name, why] : reasons) {
    const auto expected = refused.find(name);
    EXPECT_TRUE(expected != refused.end() && why.find(expected->second) != std::string::npos) << name << ": " << why;
  }
  for (const auto& [name, why] : refused) EXPECT_TRUE(reasons.contains(name)) << name << " is computed after all";
  return computed;
}

}  // namespace weft::test
