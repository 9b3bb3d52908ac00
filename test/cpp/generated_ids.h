// The ids that a DecodeModel generates, with a look at its length at each of them.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "llmc/model/decode_model.h"

namespace weft::test {

// Ends with what the request says, or behind id number `listen`.
inline std::vector<std::int32_t> generated(DecodeModel& model, const std::vector<std::int32_t>& prompt,
                                           const GenerationRequest& request, std::size_t listen = 1000) {
  std::vector<std::int32_t> ids;
  const std::int64_t before = model.length() + std::ssize(prompt);
  model.generate_ids(prompt, request, [&](std::int32_t id) {
    EXPECT_EQ(model.length(), before + std::ssize(ids));
    ids.push_back(id);
    return ids.size() < listen;
  });
  EXPECT_EQ(model.length(), before + std::ssize(ids) - 1);
  return ids;
}

}  // namespace weft::test
