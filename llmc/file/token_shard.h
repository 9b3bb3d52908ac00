// Token shards: the training text as token ids, written by dev/prepare_data.py; the layout is
// doc/token_shard.md.
//
// open() checks the header and where documents begin: shards may be far larger than memory. verify() reads all of a shard
// and checks its hash.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/base/file.h"

namespace weft {

class TokenShard {
 public:
  // Maps the file and validates its header and documents; Exit::bad_file names the field. A file of another kind is refused with a
  // message that says what it is. A shard without tokens is refused.
  static TokenShard open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  std::int64_t count() const { return count_; }
  std::int64_t vocab_size() const { return vocab_size_; }
  std::uint64_t tokenizer_hash() const { return tokenizer_hash_; }         // XXH3-64 of the text of tokenizer.json
  std::int64_t end_of_document_id() const { return end_of_document_id_; }  // -1: none
  DType dtype() const { return dtype_; }
  // Whether documents come in pairs: two answers to one prompt, the chosen one and then the rejected one.
  bool of_pairs() const { return of_pairs_; }
  // Where each document begins, and count(). Empty in a shard that knows of no documents: all its tokens are learned.
  std::span<const std::int64_t> document_starts() const { return starts_; }
  // Tokens [begin, begin + out.size()), which must lie in the shard (otherwise Exit::internal). An id >=
  // vocab_size() is Exit::bad_file with its position; a shard replaced since open() is Exit::bad_file.
  void read(std::int64_t begin, std::span<std::int32_t> out) const;
  // Of the same tokens as read(): 1 for each that is learned, otherwise 0. Errors as there.
  void read_learned(std::int64_t begin, std::span<std::uint8_t> out) const;
  void verify() const;  // reads everything: checks the data hash and every id

 private:
  explicit TokenShard(MappedFile file) : file_(std::move(file)) {}
  const std::byte* tokens() const;
  const std::byte* behind_tokens() const;  // where the documents' starts begin
  void read_starts(std::size_t documents);
  void check_read(std::int64_t begin, std::size_t size) const;

  MappedFile file_;
  DType dtype_ = DType::u16;
  std::int64_t count_ = 0, vocab_size_ = 0, end_of_document_id_ = -1;
  std::uint64_t tokenizer_hash_ = 0, data_hash_ = 0;
  std::vector<std::int64_t> starts_;
  bool of_pairs_ = false;
};

}  // namespace weft
