// A tensor file from a short description, so that a fuzzer spends its effort on the fields and not on the 4096-byte
// pages and hashes around them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "test/fuzz/target.h"

namespace weft::fuzz {

inline constexpr std::size_t kMaxFileBytes = 64 << 10;

// Takes a description and returns the bytes of a file:
//   u8 flags      1: the rest of the input is the file as it is, and only the two hashes below are made
//                 2: leave header_hash alone   4: leave the tensors' hashes alone
//   u8 kind, family; u16 length of the configuration; its text
//   u8 tensors; for each: u8 length of the name, name, u8 dtype, u8 rank, u16 per dimension (rank modulo 9)
//   u8 which data
//   u8 changes; for each u16 where, u8 length (modulo 9), and the bytes to put there before hashing
// Sizes, offsets and paddings are those that a writer would make; `changes` break them.
std::vector<std::uint8_t> tensor_file_bytes(Input& input);

}  // namespace weft::fuzz
