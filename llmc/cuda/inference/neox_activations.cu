// Copies activations to the host, for comparison with a reference.
#include "llmc/cuda/inference/neox_decoder.cuh"

namespace weft::cuda {

// Keeps q (rotated) from the packed rows, and k (rotated) and v from the cache.
template <typename S>
void NeoxDecoder<S>::keep_heads(std::int64_t l, std::int64_t rows) {
  const std::int64_t NH = config_.num_heads, HS = config_.head_dim, capacity = options_.capacity;
  const std::vector<float> packed = download(b_.qkv, rows * NH * 3 * HS);
  const std::vector<float> k = download(keys(l), NH * HS * capacity), v = download(values(l), NH * HS * capacity);
  const std::string prefix = "layers." + std::to_string(l) + ".";
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t h = 0; h < NH; ++h) {
      const auto append = [&](const char* name, const std::vector<float>& from, std::int64_t offset) {
        std::vector<float>& kept = kept_[prefix + name];
        kept.insert(kept.end(), from.begin() + offset, from.begin() + offset + HS);
      };
      append("q", packed, (t * NH + h) * 3 * HS);
      append("k", k, (h * capacity + length_ + t) * HS);
      append("v", v, (h * capacity + length_ + t) * HS);
    }
  }
  keep(prefix + "attention", b_.attention, rows * NH * HS);
}

template class NeoxDecoder<float>;
template class NeoxDecoder<bf16>;
template class NeoxDecoder<fp16>;

}  // namespace weft::cuda
