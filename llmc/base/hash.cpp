#include "llmc/base/hash.h"

#include <xxhash.h>

#include <new>

namespace weft {

std::uint64_t xxh3_64(const void* data, std::size_t bytes) {
  return XXH3_64bits(data, bytes);
}

Xxh3Stream::Xxh3Stream() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(state_);
}
Xxh3Stream::~Xxh3Stream() {
  XXH3_freeState(state_);
}
void Xxh3Stream::reset() {
  XXH3_64bits_reset(state_);
}
void Xxh3Stream::update(const void* data, std::size_t bytes) {
  XXH3_64bits_update(state_, data, bytes);
}
std::uint64_t Xxh3Stream::digest() const {
  return XXH3_64bits_digest(state_);
}

}  // namespace weft
