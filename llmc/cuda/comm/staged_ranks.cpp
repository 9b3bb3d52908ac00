// DeviceRanks through the host: each call copies what it sends into page-locked memory, lets the communicator move it,
// and copies what has arrived to the device, kPiece bytes of each part at a time.
#include <algorithm>
#include <vector>

#include "llmc/cuda/comm/device_ranks.h"
#include "llmc/cuda/runtime/arena.h"
#include "llmc/cuda/runtime/error.h"

namespace weft::cuda {

namespace {

constexpr std::int64_t kPiece = 4 << 20;  // bytes

class StagedRanks final : public DeviceRanks {
 public:
  explicit StagedRanks(Communicator& ranks)
      : ranks_(ranks), buffer_(2 * static_cast<std::uint64_t>(ranks.size()) * kPiece) {}

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  std::string name() const override { return "host memory"; }

  void exchange(const float* values, std::span<const Range> parts, float* received, cudaStream_t stream) override {
    constexpr std::int64_t kElements = kPiece / static_cast<std::int64_t>(sizeof(float));
    float* const sent = buffer_.at<float>(0);
    float* const come = sent + size() * kElements;
    const std::int64_t mine = parts[static_cast<std::size_t>(rank())].size();
    for_pieces(parts, kElements, [&](std::span<const Range> now, std::span<const Range> packed) {
      for (std::size_t r = 0; r < now.size(); ++r) {
        copy(sent + packed[r].begin, values + now[r].begin, now[r].size(), cudaMemcpyDeviceToHost, stream);
      }
      check(cudaStreamSynchronize(stream), kName);
      ranks_.exchange(sent, packed, come);
      const Range own = now[static_cast<std::size_t>(rank())];
      const std::int64_t first = own.begin - parts[static_cast<std::size_t>(rank())].begin;
      for (std::int64_t s = 0, row = 0; s < size(); ++s) {
        if (s == rank()) continue;
        copy(received + row++ * mine + first, come + s * own.size(), own.size(), cudaMemcpyHostToDevice, stream);
      }
      check(cudaStreamSynchronize(stream), kName);  // before the buffer is reused
    });
  }

  void gather(std::byte* values, std::span<const Range> parts, cudaStream_t stream) override {
    std::byte* const host = buffer_.at<std::byte>(0);
    for_pieces(parts, kPiece, [&](std::span<const Range> now, std::span<const Range> packed) {
      const auto me = static_cast<std::size_t>(rank());
      copy(host + packed[me].begin, values + now[me].begin, now[me].size(), cudaMemcpyDeviceToHost, stream);
      check(cudaStreamSynchronize(stream), kName);
      ranks_.gather_bytes(host, packed);
      for (std::size_t r = 0; r < now.size(); ++r) {
        if (r == me) continue;
        copy(values + now[r].begin, host + packed[r].begin, now[r].size(), cudaMemcpyHostToDevice, stream);
      }
      check(cudaStreamSynchronize(stream), kName);
    });
  }

  // exchange() and gather() have already waited for the other ranks.
  void wait(cudaStream_t stream, cudaEvent_t /*own*/, const char* action) override {
    check(cudaStreamSynchronize(stream), action);
  }

 private:
  static constexpr const char* kName = "exchange between ranks";

  template <typename T>
  static void copy(T* to, const T* from, std::int64_t count, cudaMemcpyKind kind, cudaStream_t stream) {
    if (count > 0) check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof(T), kind, stream), kName);
  }
  // Calls work(now, packed) for one piece of each part after another: `now`, the ranges of the pieces among the values;
  // `packed`, their ranges in a buffer that holds nothing else.
  template <typename Work>
  static void for_pieces(std::span<const Range> parts, std::int64_t piece, const Work& work) {
    for (std::int64_t first = 0; first < longest_of(parts); first += piece) {
      const std::vector<Range> now = pieces_of(parts, first, piece);
      std::vector<Range> packed;
      std::int64_t end = 0;
      for (const Range& part : now) {
        packed.push_back({end, end + part.size()});
        end = packed.back().end;
      }
      work(now, packed);
    }
  }

  Communicator& ranks_;
  PinnedBuffer buffer_;  // first half: what is sent; second half: what is received
};

}  // namespace

std::unique_ptr<DeviceRanks> make_staged_ranks(Communicator& ranks) {
  std::unique_ptr<DeviceRanks> made;
  do_together(ranks, [&] { made = std::make_unique<StagedRanks>(ranks); });
  return made;
}

}  // namespace weft::cuda
