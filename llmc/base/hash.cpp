#include "llmc/base/hash.h"

// The packaged library is built for the oldest x86-64. Compiled inline here, xxHash uses this machine's vector unit and
// is twice as fast. AVX2 at most, because g++ 12 gives false warnings about the AVX-512 intrinsics.
#define XXH_INLINE_ALL
#ifdef __AVX2__
#define XXH_VECTOR XXH_AVX2
#endif
#include <xxhash.h>

#include <random>

#include "llmc/base/error.h"

namespace weft {

namespace {

std::uint64_t process_seed() {
  static const std::uint64_t seed = [] {
    std::random_device random;
    return static_cast<std::uint64_t>(random()) << 32 | random();
  }();
  return seed;
}

}  // namespace

std::string hash_text(std::uint64_t hash) {
  return format("%016llx", static_cast<unsigned long long>(hash));
}

struct Xxh3Stream::State {
  XXH3_state_t xxh;
};

std::uint64_t xxh3_64(const void* data, std::size_t bytes) {
  return XXH3_64bits(data, bytes);
}

std::size_t SeededHash::operator()(std::string_view text) const {
  return XXH3_64bits_withSeed(text.data(), text.size(), process_seed());
}
std::size_t SeededHash::operator()(std::uint64_t key) const {
  return XXH3_64bits_withSeed(&key, sizeof key, process_seed());
}

Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) {
  reset();
}
Xxh3Stream::~Xxh3Stream() = default;
void Xxh3Stream::reset() {
  XXH3_64bits_reset(&state_->xxh);
}
void Xxh3Stream::update(const void* data, std::size_t bytes) {
  XXH3_64bits_update(&state_->xxh, data, bytes);
}
std::uint64_t Xxh3Stream::digest() const {
  return XXH3_64bits_digest(&state_->xxh);
}

}  // namespace weft
