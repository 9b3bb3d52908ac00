// Attention over pages and the append to them, against the CPU and against themselves: every head dimension and storage type,
// several ratios of heads, every page size. Pages are shuffled, and what no row may read is NaN.
#include "llmc/cuda/op/attention/paged/paged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>

#include "llmc/base/error.h"
#include "llmc/cpu/paged_attention.h"
#include "llmc/cuda/op/attention/paged/append_to_pages.h"
#include "llmc/cuda/op/attention/paged/paged_work.h"
#include "llmc/model/config.h"
#include "test/gpu/operator_tools.h"

namespace weft::test {
namespace {

constexpr std::int64_t kHeadDims[] = {32, 64, 80, 96, 128, 256};
constexpr std::int64_t kPageSizes[] = {16, 32, 64};

template <typename T>
class CudaPagedAttention : public testing::Test {};
using Types = testing::Types<float, bf16, fp16>;
TYPED_TEST_SUITE(CudaPagedAttention, Types);

struct Heads {
  std::int64_t NKV, G, HS;  // G query heads read a K/V head
  std::int64_t NH() const { return NKV * G; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(HS)); }
};

// Queries, keys and values of every position of some sequences.
template <typename T>
struct Sequences {
  Heads heads;
  std::vector<std::int64_t> lengths;
  std::vector<std::vector<T>> q, k, v;  // [length][NH or NKV][HS] of each

  // With `fp8` the keys and values are numbers that rows of codes stand for.
  Sequences(const Heads& of, const std::vector<std::int64_t>& of_length, bool fp8 = false)
      : heads(of), lengths(of_length) {
    unsigned seed = 1;
    for (const std::int64_t length : lengths) {
      // Queries so large that the running maximum moves many times, by more and by less than what raises it.
      q.push_back(stored<T>(random_floats(length * heads.NH() * heads.HS, seed++, 6)));
      k.push_back(stored<T>(random_floats(length * heads.NKV * heads.HS, seed++)));
      v.push_back(stored<T>(random_floats(length * heads.NKV * heads.HS, seed++)));
      if (!fp8) continue;
      for (std::vector<T>* each : {&k.back(), &v.back()}) round_rows(*each, each == &v.back());
    }
  }

 private:
  // Rows of different magnitudes, as codes read again.
  void round_rows(std::vector<T>& rows, bool values) const {
    Floats wide = widened(rows);
    const auto HS = static_cast<std::size_t>(heads.HS);
    std::vector<std::uint8_t> codes(kKvUnit * HS);
    std::uint8_t scale = 0;
    for (std::size_t at = 0, row = 0; at < wide.size(); at += HS, ++row) {
      const int e = static_cast<int>(row % 3) - (values ? 2 : 1);
      for (std::size_t d = 0; d < HS; ++d) wide[at + d] = std::ldexp(wide[at + d], e);
      kv_store(KvKind::key, wide.data() + at, heads.HS, 0, codes.data(), &scale);
      kv_load(KvKind::key, codes.data(), &scale, heads.HS, 0, 1, wide.data() + at);
    }
    rows = stored<T>(wide);
  }
};

// Rows of a step: `rows` positions of a sequence.
struct Piece {
  std::size_t sequence;
  std::int64_t first, rows;
};

std::int64_t rows_of(const std::vector<Piece>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0},
                         [](std::int64_t sum, const Piece& piece) { return sum + piece.rows; });
}

// The pages of a step's sequences, in a random order of a pool that has more of them.
struct Tables {
  std::int64_t page_size, num_pages = 0;
  std::int32_t unused = 0;  // a page of no sequence
  std::vector<std::vector<std::int32_t>> of_sequence;

  Tables(const std::vector<std::int64_t>& lengths, std::int64_t size, unsigned seed) : page_size(size) {
    std::vector<std::int64_t> counts;
    for (const std::int64_t length : lengths) counts.push_back((length + size - 1) / size);
    num_pages = std::accumulate(counts.begin(), counts.end(), std::int64_t{3});
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
    unused = ids.back();
    auto next = ids.begin();
    for (const std::int64_t count : counts) {
      of_sequence.emplace_back(next, next + count);
      next += count;
    }
  }
  // A sequence's table in which pages in front of `position` are given back: another one, full of NaN, stands there.
  std::vector<std::int32_t> from(std::size_t sequence, std::int64_t position) const {
    std::vector<std::int32_t> pages = of_sequence[sequence];
    std::fill_n(pages.begin(), position / page_size, unused);
    return pages;
  }
  // Element of a page pool [page][NKV][page_size][HS].
  std::size_t at(std::size_t sequence, std::int64_t position, std::int64_t kv_head, const Heads& heads) const {
    const std::int64_t page = of_sequence[sequence][static_cast<std::size_t>(position / page_size)];
    return static_cast<std::size_t>(((page * heads.NKV + kv_head) * page_size + position % page_size) * heads.HS);
  }
};

// The windows of the layer and of the list of work; 0: none.
struct Windows {
  std::int64_t layer = 0, list = 0;
  // The first position that the row at `position` sees.
  std::int64_t first(std::int64_t position) const {
    return layer > 0 ? std::max<std::int64_t>(position + 1 - layer, 0) : 0;
  }
};

// The results of a step by row, and the rows' places in their sequences. kPadding rows follow, of which nothing is written.
constexpr std::int64_t kPadding = 3;

// One step on the GPU: the outputs of the pieces, one after another. Positions of a sequence behind the last one that the
// step has of it, and in front of what its first row sees, are NaN, as is everything else in the pool. Runs twice, overlapping: the second finds the counters of the first.
// `fp8`: the pool holds codes and scales.
template <typename T>
std::vector<T> attend(const Sequences<T>& sequences, const std::vector<Piece>& pieces, std::int64_t page_size,
                      unsigned seed, cuda::PagedPath path = cuda::PagedPath::automatic,
                      const cuda::LaunchDevice& device = cuda::launch_device(), const Windows& windows = {},
                      bool fp8 = false) {
  const Heads& heads = sequences.heads;
  const Tables tables(sequences.lengths, page_size, seed);
  const auto pool = static_cast<std::size_t>(tables.num_pages * heads.NKV * page_size * heads.HS);
  std::vector<T> keys(pool), values(pool);
  std::memset(static_cast<void*>(keys.data()), 0xff, pool * sizeof(T));
  std::memset(static_cast<void*>(values.data()), 0xff, pool * sizeof(T));
  const std::size_t of_codes = fp8 ? pool : 0;
  std::vector<std::uint8_t> key_codes(of_codes, 0xff), value_codes = key_codes;
  std::vector<std::uint8_t> key_scales(of_codes / static_cast<std::size_t>(heads.HS), 0xff), value_scales = key_scales;
  std::vector<std::int64_t> begins = sequences.lengths, ends(sequences.lengths.size());
  for (const Piece& piece : pieces) {
    begins[piece.sequence] = std::min(begins[piece.sequence], windows.first(piece.first));
    ends[piece.sequence] = std::max(ends[piece.sequence], piece.first + piece.rows);
  }
  for (std::size_t s = 0; s < ends.size(); ++s) {
    for (std::int64_t position = begins[s]; position < ends[s]; ++position) {
      for (std::int64_t h = 0; h < heads.NKV; ++h) {
        const auto from = (position * heads.NKV + h) * heads.HS;
        const std::size_t to = tables.at(s, position, h, heads);
        if (fp8) {
          const auto store = [&](KvKind kind, const std::vector<T>& rows, std::vector<std::uint8_t>& codes,
                                 std::vector<std::uint8_t>& scales) {
            const Floats row = widened(std::vector<T>(rows.begin() + from, rows.begin() + from + heads.HS));
            kv_store(kind, row.data(), heads.HS, static_cast<std::int64_t>(to) / heads.HS, codes.data(), scales.data());
          };
          store(KvKind::key, sequences.k[s], key_codes, key_scales);
          store(KvKind::value, sequences.v[s], value_codes, value_scales);
          continue;
        }
        std::copy_n(sequences.k[s].begin() + from, heads.HS, keys.begin() + static_cast<std::ptrdiff_t>(to));
        std::copy_n(sequences.v[s].begin() + from, heads.HS, values.begin() + static_cast<std::ptrdiff_t>(to));
      }
    }
  }

  // Queries as GPT-NeoX has them: [NH][q, k, v][HS] a row.
  const std::int64_t rows = rows_of(pieces), all_rows = rows + kPadding, head_stride = 3 * heads.HS;
  std::vector<T> q(static_cast<std::size_t>(all_rows * heads.NH() * head_stride));
  std::memset(static_cast<void*>(q.data()), 0xff, q.size() * sizeof(T));
  std::vector<std::int32_t> positions, row_tables, block_tables;
  std::vector<cuda::PagedChunk> chunks;
  std::int64_t row = 0;
  for (const Piece& piece : pieces) {
    chunks.push_back({row, piece.rows, piece.first});
    const auto table = static_cast<std::int32_t>(block_tables.size());
    const std::vector<std::int32_t> pages = tables.from(piece.sequence, windows.first(piece.first));
    block_tables.insert(block_tables.end(), pages.begin(), pages.end());
    for (std::int64_t i = 0; i < piece.rows; ++i, ++row) {
      positions.push_back(static_cast<std::int32_t>(piece.first + i));
      row_tables.push_back(table);
      for (std::int64_t h = 0; h < heads.NH(); ++h) {
        const auto from = ((piece.first + i) * heads.NH() + h) * heads.HS;
        std::copy_n(sequences.q[piece.sequence].begin() + from, heads.HS,
                    q.begin() + (row * heads.NH() + h) * head_stride);
      }
    }
  }
  positions.insert(positions.end(), kPadding, -1);
  row_tables.insert(row_tables.end(), kPadding, 1 << 30);

  cuda::PagedAttentionShape shape;
  shape.NH = heads.NH(), shape.NKV = heads.NKV, shape.HS = heads.HS;
  shape.max_rows = all_rows;
  shape.max_chunks = static_cast<std::int64_t>(pieces.size());
  shape.max_positions = *std::max_element(sequences.lengths.begin(), sequences.lengths.end());
  shape.window = windows.list;
  std::vector<std::int64_t> work(cuda::paged_work_bytes(shape) / sizeof(std::int64_t));
  EXPECT_LE(cuda::write_paged_work(work.data(), shape, chunks), work.size() * sizeof(std::int64_t));

  const DeviceBuffer<T> gpu_q(q), gpu_keys(keys), gpu_values(values);
  const DeviceBuffer<std::int32_t> gpu_positions(positions), gpu_tables(row_tables), gpu_pages(block_tables);
  const DeviceBuffer<std::int64_t> gpu_work(work);
  DeviceBuffer<char> workspace(cuda::paged_attention_workspace(shape));
  workspace.fill_bytes(0);
  const auto out_size = static_cast<std::size_t>(all_rows * heads.NH() * heads.HS);
  const DeviceBuffer<T> first(out_size), second(out_size);
  cuda::PagedAttention<T> io;
  io.shape = shape;
  io.scale = heads.scale();
  io.window = windows.layer;
  io.q = {gpu_q.data(), 0, heads.NH() * head_stride, head_stride};
  io.kv = {gpu_keys.data(), gpu_values.data(), page_size, heads.NKV, heads.HS};
  std::vector<std::unique_ptr<DeviceBuffer<std::uint8_t>>> gpu_codes;
  if (fp8) {
    for (const auto* each : {&key_codes, &value_codes, &key_scales, &value_scales}) {
      gpu_codes.push_back(std::make_unique<DeviceBuffer<std::uint8_t>>(*each));
    }
    io.kv.codes = {gpu_codes[0]->data(), gpu_codes[1]->data(), gpu_codes[2]->data(), gpu_codes[3]->data()};
    io.decodes = cuda::paged_work_decodes(work.data());
  }
  io.rows = {gpu_positions.data(), gpu_tables.data(), gpu_pages.data(), all_rows};
  io.work = gpu_work.data();
  io.workspace = workspace.data();
  for (const DeviceBuffer<T>* out : {&first, &second}) {
    io.out = out->data();
    cuda::paged_attention(io, device, nullptr, path);
  }
  cuda::check(cudaDeviceSynchronize(), "test");
  expect_same_bits(first, second, "the second run");
  std::vector<T> out = first.download();
  const std::vector<T> poison = DeviceBuffer<T>(static_cast<std::size_t>(kPadding * heads.NH() * heads.HS)).download();
  const auto written = static_cast<std::size_t>(rows * heads.NH() * heads.HS);
  EXPECT_EQ(std::memcmp(out.data() + written, poison.data(), poison.size() * sizeof(T)), 0) << "padding rows";
  out.resize(written);
  return out;
}

// The same by the CPU, in fp32.
template <typename T>
Floats attend_on_cpu(const Sequences<T>& sequences, const std::vector<Piece>& pieces, std::int64_t window) {
  const Heads& heads = sequences.heads;
  constexpr std::int64_t kPage = 32;
  const Tables tables(sequences.lengths, kPage, 5);
  Floats keys(static_cast<std::size_t>(tables.num_pages * heads.NKV * kPage * heads.HS)), values(keys.size()), q;
  std::vector<cpu::PagedRows> work;
  std::int64_t row = 0;
  for (std::size_t s = 0; s < sequences.lengths.size(); ++s) {
    const Floats k = widened(sequences.k[s]), v = widened(sequences.v[s]);
    for (std::int64_t position = 0; position < sequences.lengths[s]; ++position) {
      for (std::int64_t h = 0; h < heads.NKV; ++h) {
        const auto from = (position * heads.NKV + h) * heads.HS;
        const auto to = static_cast<std::ptrdiff_t>(tables.at(s, position, h, heads));
        std::copy_n(k.begin() + from, heads.HS, keys.begin() + to);
        std::copy_n(v.begin() + from, heads.HS, values.begin() + to);
      }
    }
  }
  for (const Piece& piece : pieces) {
    const Floats of_sequence = widened(sequences.q[piece.sequence]);
    const std::int64_t width = heads.NH() * heads.HS;
    q.insert(q.end(), of_sequence.begin() + piece.first * width,
             of_sequence.begin() + (piece.first + piece.rows) * width);
    work.push_back({tables.of_sequence[piece.sequence], piece.first, piece.rows, row});
    row += piece.rows;
  }
  Floats out(q.size());
  cpu::paged_attention({heads.NH(), heads.scale(), heads.NH() * heads.HS, heads.HS, window}, out.data(), q.data(),
                       {keys.data(), values.data(), kPage, heads.NKV, heads.HS}, work);
  return out;
}

// Weights are rounded to T, which errs by its unit roundoff of a mean of |v|; the tensor's largest element is at least that.
template <typename T>
constexpr double tolerance() {
  return std::is_same_v<T, float> ? kArithmeticTolerance : unit_roundoff<T>();
}

template <typename T>
void check_with_cpu(const Heads& heads, std::int64_t page_size, const Windows& windows = {}) {
  SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " NKV " << heads.NKV << " G " << heads.G << " pages of "
                                  << page_size << " window " << windows.layer << " of " << windows.list);
  // Lengths beside the ends of key blocks, pages, splits and tiles; prompts, chunks of prompts, decoded rows.
  const Sequences<T> sequences(heads, {1, 33, 300, 530, 65, 31, 257, 513, 17});
  const std::vector<Piece> pieces = {{0, 0, 1},  {1, 0, 33},  {2, 0, 300}, {3, 529, 1}, {4, 60, 5},
                                     {5, 30, 1}, {6, 250, 7}, {7, 511, 2}, {8, 3, 14}};
  const std::vector<T> got =
      attend(sequences, pieces, page_size, 7, cuda::PagedPath::automatic, cuda::launch_device(), windows);
  expect_near<T>(widened(got), attend_on_cpu(sequences, pieces, windows.layer), "out", tolerance<T>());
}

TYPED_TEST(CudaPagedAttention, MatchesTheCpu) {
  std::size_t turn = 0;
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t G : {1, 2, 3, 4, 8, 16, 32})
      check_with_cpu<TypeParam>({G < 8 ? 2 : 1, G, HS}, kPageSizes[turn++ % std::size(kPageSizes)]);
  }
}

// Beside the sizes of pages, key blocks and splits, and longer than some of the sequences or all of them.
TYPED_TEST(CudaPagedAttention, WindowsMatchTheCpu) {
  std::size_t turn = 0;
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t window : {1, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400, 529, 530, 900}) {
      for (const std::int64_t list : {window, 2 * window, std::int64_t{0}}) {
        const std::int64_t G = std::array{1, 2, 3, 4, 20}[turn % 5];
        check_with_cpu<TypeParam>({2, G, HS}, kPageSizes[turn++ % std::size(kPageSizes)], {window, list});
      }
    }
  }
}

// Everything that a step may do differently, for one sequence of several splits: the same bits.
template <typename T>
class Invariance {
 public:
  Invariance(const Heads& heads, std::int64_t length, const Windows& windows = {})
      : length_(length),
        sequences_(heads, {length, 70, 600}),
        row_(static_cast<std::size_t>(heads.NH() * heads.HS)),
        windows_(windows) {
    want_ = attend(sequences_, {{0, 0, length}}, 32, 1, cuda::PagedPath::automatic, cuda::launch_device(), windows);
  }

  void expect_same(const std::vector<Piece>& pieces, std::int64_t page_size, unsigned seed, const char* what,
                   cuda::PagedPath path = cuda::PagedPath::automatic,
                   const cuda::LaunchDevice& device = cuda::launch_device()) const {
    const std::vector<T> got = attend(sequences_, pieces, page_size, seed, path, device, windows_);
    std::size_t at = 0;
    std::int64_t different = 0, first_different = -1;
    for (const Piece& piece : pieces) {
      for (std::int64_t i = 0; i < piece.rows; ++i, at += row_) {
        if (piece.sequence != 0) continue;
        const std::size_t wanted = static_cast<std::size_t>(piece.first + i) * row_;
        if (std::memcmp(got.data() + at, want_.data() + wanted, row_ * sizeof(T)) == 0) continue;
        if (different++ == 0) first_different = piece.first + i;
      }
    }
    EXPECT_EQ(different, 0) << what << ": rows differ, the first at position " << first_different;
  }

  // Chunks of random lengths that cover the sequence, in a random order, between those of other sequences.
  std::vector<Piece> random_pieces(std::mt19937& random) const {
    std::vector<Piece> pieces = {{1, 69, 1}, {2, 0, 600}, {1, 3, 40}, {2, 599, 1}};
    for (std::int64_t first = 0; first < length_;) {
      const auto longest = random() % 3 == 0 ? 5u : 200u;
      const std::int64_t rows = std::min<std::int64_t>(1 + random() % longest, length_ - first);
      pieces.push_back({0, first, rows});
      first += rows;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    return pieces;
  }

  std::int64_t length() const { return length_; }

 private:
  std::int64_t length_;
  Sequences<T> sequences_;
  std::size_t row_;  // elements
  Windows windows_;
  std::vector<T> want_;
};

template <typename T>
void check_invariance(const Heads& heads, std::int64_t length, const Windows& windows, std::mt19937& random) {
  SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " NKV " << heads.NKV << " G " << heads.G << " window "
                                  << windows.layer << " of " << windows.list);
  const Invariance<T> same(heads, length, windows);
  // In each its later positions are NaN.
  for (const std::int64_t position :
       {0, 1, 15, 16, 31, 32, 63, 127, 255, 256, 257, 511, 512, 513, 548, 1023, 1024, 1299}) {
    if (position >= same.length()) continue;
    same.expect_same({{0, position, 1}}, 16, 2, "one row");
    const std::int64_t before = std::min<std::int64_t>(position, 6);
    same.expect_same({{0, position - before, before + 1}}, 64, 3, "at most 7 rows");
  }
  std::vector<Piece> rows;
  for (std::int64_t position = 0; position < same.length(); ++position) rows.push_back({0, position, 1});
  std::shuffle(rows.begin(), rows.end(), random);
  same.expect_same(rows, 32, 4, "row by row");
  // Steps of at most 256 rows are computed by other blocks; with so many items a warp takes several, of different lengths.
  const std::int64_t some = same.length() - 225;
  same.expect_same({{0, some, 225}}, 32, 8, "a chunk in a small step");
  rows.resize(225);
  same.expect_same(rows, 16, 9, "single rows in a small step");
  for (const std::int64_t page_size : kPageSizes) {
    same.expect_same({{0, 0, same.length()}}, page_size, 5, "other pages");
    same.expect_same(same.random_pieces(random), page_size, 6, "chunks among others");
    same.expect_same(same.random_pieces(random), page_size, 10, "on mma.sync", cuda::PagedPath::portable);
  }
}

TYPED_TEST(CudaPagedAttention, ARowsBitsAreItsOwn) {
  const Heads kinds[] = {{2, 1, 32}, {1, 4, 64},  {2, 1, 80},   {1, 3, 80},
                         {1, 3, 96}, {1, 4, 128}, {1, 20, 128}, {1, 2, 256}};
  std::mt19937 random(3);
  for (const Heads& heads : kinds) check_invariance<TypeParam>(heads, heads.G > 8 ? 550 : 1300, {}, random);
}

// The windows begin within key blocks and splits; the list has splits that the layer does not see.
TYPED_TEST(CudaPagedAttention, ARowsBitsAreItsOwnWithWindows) {
  const Heads kinds[] = {{2, 1, 32}, {1, 4, 64}, {1, 3, 80}, {1, 4, 128}, {1, 20, 128}, {1, 2, 256}};
  std::mt19937 random(7);
  std::size_t turn = 0;
  for (const Heads& heads : kinds) {
    for (const Windows& windows : {Windows{100, 100}, {257, 600}, {40, 0}, {700, 700}}) {
      if (turn++ % 2 == 0 || heads.HS == 128)
        check_invariance<TypeParam>(heads, heads.G > 8 ? 550 : 1300, windows, random);
    }
  }
}

// The same window, whatever the list begins with, and one as long as the text.
TYPED_TEST(CudaPagedAttention, TheListsWindowChangesNoBit) {
  for (const Heads& heads : {Heads{2, 1, 64}, Heads{2, 1, 80}, Heads{1, 4, 128}, Heads{1, 2, 256}}) {
    const Sequences<TypeParam> sequences(heads, {1300, 70, 600});
    const std::vector<Piece> pieces = {{0, 1299, 1}, {0, 900, 3}, {1, 69, 1}, {2, 400, 200}, {0, 1000, 1}};
    const auto run = [&](const Windows& windows) {
      return attend(sequences, pieces, 16, 5, cuda::PagedPath::automatic, cuda::launch_device(), windows);
    };
    for (const std::int64_t list : {0, 310, 1299, 5000})
      EXPECT_EQ(
          std::memcmp(run({300, list}).data(), run({300, 300}).data(), 206 * heads.NH() * heads.HS * sizeof(TypeParam)),
          0)
          << "HS " << heads.HS << ", a list of " << list;
    for (const Windows& whole : {Windows{1300, 1300}, {1300, 0}, {5000, 5000}})
      EXPECT_EQ(std::memcmp(run(whole).data(), run({}).data(), 206 * heads.NH() * heads.HS * sizeof(TypeParam)), 0)
          << "HS " << heads.HS << ", a window of " << whole.layer;
  }
}

// With few multiprocessors a block computes one tile after another, and a warp many items, more than it has lanes.
TYPED_TEST(CudaPagedAttention, BlocksThatComputeManyTilesChangeNoBit) {
  const Heads kinds[] = {{2, 1, 64}, {2, 1, 80}, {1, 4, 128}, {1, 2, 256}};
  const cuda::LaunchDevice few{2, cuda::launch_device().overlapping};
  std::mt19937 random(5);
  for (const Heads& heads : kinds) {
    SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " NKV " << heads.NKV << " G " << heads.G);
    for (const Windows& windows : {Windows{}, Windows{300, 0}, Windows{300, 500}}) {
      const Invariance<TypeParam> same(heads, 1300, windows);
      std::vector<Piece> rows;
      for (std::int64_t position = 0; position < same.length(); ++position) rows.push_back({0, position, 1});
      std::shuffle(rows.begin(), rows.end(), random);
      const auto automatic = cuda::PagedPath::automatic;
      same.expect_same({{0, 0, same.length()}}, 32, 11, "a prompt", automatic, few);
      same.expect_same(rows, 16, 12, "row by row", automatic, few);
      same.expect_same(same.random_pieces(random), 64, 13, "chunks among others", automatic, few);
      same.expect_same(same.random_pieces(random), 32, 14, "on mma.sync", cuda::PagedPath::portable, few);
    }
  }
}

// Splits that one warp merges and those that many do; more than are merged at a time, twice and a rest. With windows also two
// rows of which one alone sees the first split.
TYPED_TEST(CudaPagedAttention, ManySplitsAreMergedInOrder) {
  const Heads kinds[] = {{1, 4, 64}, {2, 1, 80}, {1, 2, 256}};
  const cuda::LaunchDevice all = cuda::launch_device(), few{2, all.overlapping};
  constexpr auto kPath = cuda::PagedPath::automatic;
  for (const Heads& heads : kinds) {
    SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " NKV " << heads.NKV << " G " << heads.G);
    for (const Windows& windows : {Windows{}, Windows{9000, 0}, Windows{2500, 12000}}) {
      const Invariance<TypeParam> same(heads, 17'950, windows);  // 52 splits
      const std::int64_t uneven = windows.layer + 256 * 13 - 2;
      for (const std::int64_t position : {2047, 2048, 2303, 2304, 8191, 8192, 8703, 8704, 16384, 17'949}) {
        const std::vector<Piece> rows = {{0, position, 1}, {2, 599, 1}, {0, position - 2, 2}, {0, uneven, 2}};
        same.expect_same(rows, 32, 15, "decoded rows", kPath, position % 2 == 0 ? all : few);
      }
      same.expect_same({{0, 17'000, 1}, {0, 9000, 3}, {0, 2304, 1}}, 16, 16, "on mma.sync", cuda::PagedPath::portable);
    }
  }
}

// Splits of every length, and many times more of them than are merged at a time: single rows and few rows have the bits of a
// prompt's last ones, which walk all splits. The spans of a long split whose pages are looked up begin at these positions, too.
TYPED_TEST(CudaPagedAttention, SplitsOfEveryLength) {
  const std::vector<std::int64_t> positions = {255,    256,     511,     512,     8191,    8192,    8447,    8448,
                                               8703,   8704,    8959,    9215,    9216,    24'575,  24'576,  24'900,
                                               65'535, 131'071, 131'072, 131'500, 131'800, 132'095, 132'096, 133'200};
  constexpr std::int64_t kRows = 150;
  const cuda::LaunchDevice all = cuda::launch_device(), few{2, all.overlapping};
  constexpr auto kAutomatic = cuda::PagedPath::automatic, kPortable = cuda::PagedPath::portable;
  std::mt19937 random(11);
  for (const Heads& heads : {Heads{1, 1, 80}, Heads{1, 2, 128}, Heads{1, 1, 256}}) {
    const Sequences<TypeParam> sequences(heads, {positions.back() + 1});
    const auto row = static_cast<std::size_t>(heads.NH() * heads.HS);
    for (const Windows& windows : {Windows{}, Windows{33'000, 40'000}, Windows{1500, 2500}}) {
      std::vector<Piece> chunks;
      for (const std::int64_t position : positions) {
        const std::int64_t before = std::min(position, kRows);
        chunks.push_back({0, position - before, before + 1});
      }
      const std::vector<TypeParam> want = attend(sequences, chunks, 32, 1, kAutomatic, all, windows);
      // The last `count` rows of every chunk.
      const auto expect_same = [&](std::int64_t count, const char* what, cuda::PagedPath path,
                                   const cuda::LaunchDevice& device) {
        SCOPED_TRACE(testing::Message() << what << ", HS " << heads.HS << ", a window of " << windows.layer);
        std::vector<std::size_t> order(positions.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::shuffle(order.begin(), order.end(), random);
        std::vector<Piece> pieces;
        for (const std::size_t i : order) pieces.push_back({0, positions[i] + 1 - count, count});
        const std::vector<TypeParam> got = attend(sequences, pieces, 64, 2, path, device, windows);
        for (std::size_t n = 0; n < order.size(); ++n) {
          const auto end = static_cast<std::size_t>(
              rows_of({chunks.begin(), chunks.begin() + static_cast<std::ptrdiff_t>(order[n]) + 1}));
          const auto rows = static_cast<std::size_t>(count);
          EXPECT_EQ(std::memcmp(got.data() + n * rows * row, want.data() + (end - rows) * row,
                                rows * row * sizeof(TypeParam)),
                    0)
              << "at position " << positions[order[n]];
        }
      };
      expect_same(1, "decoded rows", kAutomatic, all);
      expect_same(1, "decoded rows on few multiprocessors", kAutomatic, few);
      expect_same(3, "few rows", kAutomatic, all);
      expect_same(130, "shorter chunks", kAutomatic, few);
      expect_same(20, "chunks on mma.sync", kPortable, all);
    }
  }
}

// Over codes every row has the bits that it has over 16-bit pages of the same numbers, which ARowsBitsAreItsOwn says are its own:
// prompts, decoded rows, chunks, with and without windows.
template <typename T>
void check_codes(const Heads& heads, std::int64_t length, const Windows& windows, std::mt19937& random) {
  SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " NKV " << heads.NKV << " G " << heads.G << " window "
                                  << windows.layer << " of " << windows.list);
  constexpr auto kAutomatic = cuda::PagedPath::automatic, kPortable = cuda::PagedPath::portable;
  const Sequences<T> sequences(heads, {length, 70, 300}, true);
  const cuda::LaunchDevice all = cuda::launch_device(), few{2, all.overlapping};
  const auto check = [&](const std::vector<Piece>& pieces, const char* what, cuda::PagedPath path,
                         const cuda::LaunchDevice& device) {
    const std::int64_t page_size = kPageSizes[random() % std::size(kPageSizes)];
    const std::vector<T> want = attend(sequences, pieces, page_size, 3, path, device, windows),
                         got = attend(sequences, pieces, page_size, 3, path, device, windows, true);
    ASSERT_EQ(got.size(), want.size());
    EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(T)), 0) << what << ", pages of " << page_size;
  };
  for (const std::int64_t position : {std::int64_t{0}, std::int64_t{16}, std::int64_t{255}, length - 1}) {
    check({{0, position, 1}}, "one row", kAutomatic, all);
    check({{1, 69, 1}, {0, position, 1}, {2, 299, 1}}, "decoded rows", kAutomatic, all);
    const std::int64_t before = std::min<std::int64_t>(position, 6);
    check({{0, position - before, before + 1}}, "few rows", kAutomatic, all);
  }
  if (length > 1000) return;
  check({{0, 0, length}}, "a prompt", kAutomatic, all);
  std::vector<Piece> rows;
  for (std::int64_t position = length - 270; position < length; ++position) rows.push_back({0, position, 1});
  std::shuffle(rows.begin(), rows.end(), random);
  check(rows, "row by row on few multiprocessors", kAutomatic, few);
  std::vector<Piece> pieces = {{1, 69, 1}, {2, 0, 300}, {1, 3, 40}, {2, 299, 1}};
  for (std::int64_t first = 0; first < length;) {
    const std::int64_t some = std::min<std::int64_t>(1 + random() % (random() % 3 == 0 ? 5u : 200u), length - first);
    pieces.push_back({0, first, some});
    first += some;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  check(pieces, "chunks", kAutomatic, all);
  check(pieces, "chunks on few multiprocessors", kAutomatic, few);
  check(pieces, "chunks on mma.sync", kPortable, all);
  check({{0, 252, 5}, {2, 240, 17}, {1, 60, 1}}, "rows that see one more split than those before them", kPortable, all);
}

template <typename T>
class CudaPagedCodes : public testing::Test {};
using CodeTypes = testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(CudaPagedCodes, CodeTypes);

TYPED_TEST(CudaPagedCodes, HaveTheBitsOfTheNumbersTheyStandFor) {
  std::mt19937 random(3);
  for (const Heads& heads :
       {Heads{2, 1, 32}, {1, 4, 64}, {1, 3, 80}, {1, 3, 96}, {1, 4, 128}, {1, 20, 128}, {1, 2, 256}}) {
    check_codes<TypeParam>(heads, 600, {}, random);
  }
  for (const Heads& heads : {Heads{1, 3, 80}, Heads{1, 4, 128}, Heads{1, 2, 256}}) {
    for (const Windows& windows : {Windows{100, 100}, {257, 600}, {40, 0}}) {
      check_codes<TypeParam>(heads, 600, windows, random);
    }
  }
  check_codes<TypeParam>({1, 4, 128}, 4600, {}, random);  // 18 splits, which many warps merge
}

TYPED_TEST(CudaPagedCodes, MatchTheCpu) {
  for (const std::int64_t HS : kHeadDims) {
    const Sequences<TypeParam> sequences({2, 2, HS}, {1, 33, 300, 530}, true);
    const std::vector<Piece> pieces = {{0, 0, 1}, {1, 0, 33}, {2, 250, 7}, {3, 529, 1}};
    const std::vector<TypeParam> got =
        attend(sequences, pieces, 32, 7, cuda::PagedPath::automatic, cuda::launch_device(), {}, true);
    expect_near<TypeParam>(widened(got), attend_on_cpu(sequences, pieces, 0), "out", tolerance<TypeParam>());
  }
}

// Behind the longest context of Llama 3.1, 274 splits: the last rows one by one, behind a chunk and at once, over 16 bits and over codes.
TYPED_TEST(CudaPagedCodes, RowsBehind131072PositionsAreTheirOwn) {
  constexpr std::int64_t kLength = 132'700, kRows = 69;
  const Heads heads{1, 2, 64};
  const Sequences<TypeParam> sequences(heads, {kLength}, true);
  std::vector<TypeParam> first;
  unsigned seed = 3;
  for (const bool fp8 : {false, true}) {
    for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{7}, kRows}) {
      std::vector<Piece> pieces = {{0, kLength - kRows, rows}};  // first, so that it finds slots for its splits
      for (std::int64_t r = kLength - kRows + rows; r < kLength; ++r) pieces.push_back({0, r, 1});
      const std::int64_t page_size = kPageSizes[seed % std::size(kPageSizes)];
      const std::vector<TypeParam> got =
          attend(sequences, pieces, page_size, seed++, cuda::PagedPath::automatic, cuda::launch_device(), {}, fp8);
      if (first.empty()) first = got;
      ASSERT_EQ(got.size(), first.size());
      EXPECT_EQ(std::memcmp(got.data(), first.data(), first.size() * sizeof(TypeParam)), 0)
          << (fp8 ? "codes" : "16 bits") << ", a chunk of " << rows;
    }
  }
  expect_near<TypeParam>(widened(first), attend_on_cpu(sequences, {{0, kLength - kRows, kRows}}, 0), "out",
                         tolerance<TypeParam>());
}

// ---- the list of work -----------------------------------------------------------------------------------------------
// What a list computes, piece by piece: (row of the step, query head within its group, split), and -1 for all splits.
struct Listed {
  std::multiset<std::tuple<std::int64_t, std::int64_t, std::int64_t>> parts;
  std::int64_t tiles = 0, items = 0, merges = 0;
  bool decodes = false;
};

// Where the splits of paged_work.h begin.
const std::vector<std::int64_t> kSplitBegins = [] {
  std::vector<std::int64_t> begins = {0};
  while (begins.back() < 1'100'000) {
    const std::int64_t begin = begins.back();
    begins.push_back(begin + (begin >= 131'072 ? 1024 : begin >= 8192 ? 512 : 256));
  }
  return begins;
}();
std::int64_t split_at(std::int64_t position) {
  return std::upper_bound(kSplitBegins.begin(), kSplitBegins.end(), position) - kSplitBegins.begin() - 1;
}

Listed check_list(const cuda::PagedAttentionShape& shape, const std::vector<cuda::PagedChunk>& chunks) {
  const std::int64_t G = shape.NH / shape.NKV;
  const std::size_t bound = cuda::paged_work_bytes(shape);
  std::vector<std::int64_t> work(bound / sizeof(std::int64_t));
  const std::size_t bytes = cuda::write_paged_work(work.data(), shape, chunks);
  EXPECT_LE(bytes, bound);
  const auto* header = reinterpret_cast<const cuda::PagedWorkHeader*>(work.data());
  const auto* entries = reinterpret_cast<const cuda::PagedWorkUnit*>(header + 1);
  EXPECT_EQ(bytes, sizeof *header +
                       static_cast<std::size_t>(header->tiles + header->items + header->merges) * sizeof *entries);
  Listed listed;
  listed.merges = header->merges;
  listed.tiles = header->tiles;
  listed.items = header->items;
  listed.decodes = cuda::paged_work_decodes(work.data());
  EXPECT_EQ(listed.decodes, header->tiles == 0 && std::ranges::all_of(chunks, [](const cuda::PagedChunk& chunk) {
                              return chunk.rows <= 1;
                            }));
  std::map<std::int64_t, std::int64_t> slots;                           // first: how many, once for each tile
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> many;  // (row, tile, first slot) of more than 8 splits
  std::int64_t longest = INT64_MAX;
  for (std::int64_t e = 0; e < listed.tiles + listed.items; ++e) {
    const cuda::PagedWorkUnit& item = entries[e];
    const bool tile = e < listed.tiles;
    if (e == listed.tiles) longest = INT64_MAX;
    const std::int64_t tile_rows = tile ? cuda::paged_tile_rows(shape.HS) : cuda::kPagedItemRows;
    const std::int64_t first = item.tile * tile_rows, end = std::min<std::int64_t>(item.rows * G, first + tile_rows);
    EXPECT_LT(first, end);
    const std::int64_t seen = item.first_position + (end - 1) / G + 1;
    const std::int64_t hidden =
        shape.window > 0 ? std::max<std::int64_t>(item.first_position + 1 - shape.window, 0) : 0;
    const std::int64_t splits = split_at(seen - 1) + 1 - split_at(hidden), begin = kSplitBegins[item.split];
    const std::int64_t length =
        tile ? seen : (std::min<std::int64_t>(seen, kSplitBegins[item.split + 1u]) - begin + 15) / 16;
    EXPECT_LE(length, longest) << "the longest first";
    EXPECT_GT(length, 0);
    longest = length;
    for (std::int64_t i = first; i < end; ++i)
      listed.parts.insert({item.first_row + i / G, i % G, tile ? -1 : item.split});
    if (tile) continue;
    EXPECT_EQ(item.partials >= 0, splits > 1);
    if (splits > 1) slots[item.partials] = (end - first) * splits;
    if (splits > 8) many.insert({item.first_row, item.tile, item.partials});
  }
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> merged;
  for (const cuda::PagedWorkUnit& item :
       std::span(entries + listed.tiles + listed.items, entries + listed.tiles + listed.items + listed.merges))
    EXPECT_TRUE(merged.insert({item.first_row, item.tile, item.partials}).second) << "merged twice";
  EXPECT_EQ(merged, many);
  std::int64_t free = 0;
  for (const auto& [begin, count] : slots) {
    EXPECT_GE(begin, free) << "slots are used twice";
    free = begin + count;
  }
  EXPECT_LE(free, cuda::paged_partial_slots(shape));
  return listed;
}

// Every row and head exactly once: as a part of a tile, or by all of the splits that it sees, and by none that neither its
// chunk's first nor last row sees.
void expect_complete(const Listed& listed, const cuda::PagedAttentionShape& shape,
                     const std::vector<cuda::PagedChunk>& chunks) {
  std::size_t expected = 0;
  for (const cuda::PagedChunk& chunk : chunks) {
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      for (std::int64_t g = 0; g < shape.NH / shape.NKV; ++g) {
        if (listed.parts.count({chunk.first_row + i, g, -1}) == 1) {
          ++expected;
          continue;
        }
        const std::int64_t begin =
            shape.window > 0 ? std::max<std::int64_t>(chunk.first_position + 1 - shape.window, 0) : 0;
        const std::int64_t last = split_at(chunk.first_position + chunk.rows - 1);
        for (std::int64_t split = split_at(begin); split <= last; ++split, ++expected)
          ASSERT_EQ(listed.parts.count({chunk.first_row + i, g, split}), 1u) << "row " << chunk.first_row + i;
      }
    }
  }
  EXPECT_EQ(listed.parts.size(), expected);
}

TEST(CudaPagedWork, ListsEveryRowOnce) {
  std::mt19937 random(1);
  for (const std::int64_t G : {1, 2, 3, 7, 16, 17, 71}) {
    for (const std::int64_t HS : {80, 256}) {
      cuda::PagedAttentionShape shape;
      shape.NKV = 2, shape.NH = 2 * G, shape.HS = HS;
      shape.max_rows = 700, shape.max_chunks = 40, shape.max_positions = G == 3 ? 140'000 : 3000;
      for (int step = 0; step < (G == 3 ? 4 : 20); ++step) {
        std::vector<cuda::PagedChunk> chunks;
        std::int64_t row = random() % 5;
        for (std::size_t s = 0, count = random() % 41; s < count; ++s) {
          const std::int64_t longest = random() % 4 == 0 ? 300 : random() % 2 == 0 ? 1 : 20;
          const std::int64_t rows = std::min<std::int64_t>(1 + random() % static_cast<unsigned>(longest), 700 - row);
          const std::int64_t position =
              random() % 3 == 0 ? 0 : random() % static_cast<unsigned>(shape.max_positions - rows + 1);
          chunks.push_back({row, rows, position});
          row += rows;
          if (row == 700) break;
        }
        for (const std::int64_t window : {0, 1, 256, 700, 2999, 20'000}) {
          SCOPED_TRACE(testing::Message() << "G " << G << " HS " << HS << " step " << step << " window " << window);
          shape.window = window;
          expect_complete(check_list(shape, chunks), shape, chunks);
        }
      }
    }
  }
}

TEST(CudaPagedWork, ChunksThatFindNoSlotAreTiles) {
  cuda::PagedAttentionShape shape;
  shape.NKV = 8, shape.NH = 32, shape.HS = 128;
  shape.max_rows = 512, shape.max_chunks = 256, shape.max_positions = 1'000'000;
  EXPECT_LE(cuda::paged_attention_workspace(shape), std::size_t{280} << 20);
  std::vector<cuda::PagedChunk> chunks;
  for (std::int64_t row = 0; row < 256; ++row) chunks.push_back({row, 1, 200'000 + 1000 * row});
  const Listed listed = check_list(shape, chunks);
  EXPECT_GT(listed.tiles, 0);
  EXPECT_GT(listed.items, 0);
  EXPECT_GT(listed.merges, 0);
  EXPECT_FALSE(listed.decodes);
  expect_complete(listed, shape, chunks);
}

TEST(CudaPagedWork, RefusesWhatIsBeyondTheShape) {
  cuda::PagedAttentionShape shape;
  shape.NKV = shape.NH = 2, shape.HS = 64;
  shape.max_rows = 8, shape.max_chunks = 2, shape.max_positions = 100;
  std::vector<std::int64_t> work(cuda::paged_work_bytes(shape) / sizeof(std::int64_t));
  const auto write = [&](const std::vector<cuda::PagedChunk>& chunks) {
    return cuda::write_paged_work(work.data(), shape, chunks);
  };
  EXPECT_EQ(write({}), sizeof(cuda::PagedWorkHeader));
  EXPECT_NO_THROW(write({{0, 8, 92}}));
  EXPECT_THROW(write({{0, 9, 0}}), Error);
  EXPECT_THROW(write({{1, 8, 0}}), Error);
  EXPECT_THROW(write({{0, 8, 93}}), Error);
  EXPECT_THROW(write({{0, 1, -1}}), Error);
  EXPECT_THROW(write({{0, 1, 0}, {1, 1, 0}, {2, 1, 0}}), Error);
  shape.HS = 72;
  EXPECT_THROW(cuda::paged_work_bytes(shape), Error);
  shape.HS = 64, shape.NH = 3;
  EXPECT_THROW(cuda::paged_work_bytes(shape), Error);
}

// ---- the append -----------------------------------------------------------------------------------------------------
// Rows of three sequences, with padding between and behind them, as [q heads | k heads | v heads].
// `fp8`: into codes and scales, which are those of the CPU for the rows that would be stored otherwise, byte for byte.
template <typename T>
void check_append(const Heads& heads, std::int64_t rotary, std::int64_t page_size, bool fp8 = false) {
  SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " rotary " << rotary << " G " << heads.G << " pages of "
                                  << page_size);
  const std::int64_t HS = heads.HS, NH = heads.NH(), width = (NH + 2 * heads.NKV) * HS;
  const Tables tables({5, 150, 70}, page_size, 9);
  const std::vector<Piece> pieces = {{1, 60, 9}, {0, 4, 1}, {2, 10, 33}};
  std::vector<std::int32_t> positions, row_tables, block_tables;
  std::vector<std::size_t> sequence_of;
  for (const Piece& piece : pieces) {
    for (std::int64_t i = 0; i <= piece.rows; ++i) {  // and one of padding
      positions.push_back(i < piece.rows ? static_cast<std::int32_t>(piece.first + i) : -1);
      row_tables.push_back(i < piece.rows ? static_cast<std::int32_t>(block_tables.size()) : 1 << 30);
      sequence_of.push_back(piece.sequence);
    }
    const auto& pages = tables.of_sequence[piece.sequence];
    block_tables.insert(block_tables.end(), pages.begin(), pages.end());
  }
  const auto rows = static_cast<std::int64_t>(positions.size());
  RopeConfig config;
  config.theta = 10000;
  config.rotary_dim = rotary;
  const RopeTable rope = rope_table(config, 150);
  Floats random = random_floats(rows * width, 1);
  for (std::size_t i = 0; fp8 && i < random.size(); ++i) {  // magnitudes from 2^-22 to infinity, and a head of zeros
    const std::size_t head = i / static_cast<std::size_t>(HS);
    random[i] = head % 38 == 37 ? 0 : std::ldexp(random[i] / 4, static_cast<int>(head % 38) - 20);
  }
  const std::vector<T> before = stored<T>(random);
  const Floats x = widened(before);
  const auto pool = static_cast<std::size_t>(tables.num_pages * heads.NKV * page_size * HS);
  std::vector<T> want = before;
  std::vector<T> want_keys = DeviceBuffer<T>(pool).download(), want_values = want_keys;
  std::vector<std::int64_t> rows_written;  // of the pool
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t position = positions[static_cast<std::size_t>(row)];
    if (position < 0) continue;
    // Of a head, as append_to_pages.h says; volatile: not fused by the compiler of the test.
    const auto rotated = [&](std::int64_t head, std::int64_t d) {
      const auto at = static_cast<std::size_t>(row * width + head * HS + d);
      const std::int64_t half = rope.half;
      if (d >= 2 * half) return before[at];
      const auto angle = static_cast<std::size_t>(position * half + d % std::max<std::int64_t>(half, 1));
      const float other = d < half ? x[at + static_cast<std::size_t>(half)] : x[at - static_cast<std::size_t>(half)];
      const volatile float product = other * rope.sin[angle];
      return stored<T>({std::fma(x[at], rope.cos[angle], d < half ? -product : product)})[0];
    };
    for (std::int64_t h = 0; h < heads.NKV; ++h) {
      const std::size_t to = tables.at(sequence_of[static_cast<std::size_t>(row)], position, h, heads);
      rows_written.push_back(static_cast<std::int64_t>(to) / HS);
    }
    for (std::int64_t d = 0; d < HS; ++d) {
      for (std::int64_t h = 0; h < NH; ++h) want[static_cast<std::size_t>(row * width + h * HS + d)] = rotated(h, d);
      for (std::int64_t h = 0; h < heads.NKV; ++h) {
        const std::size_t to =
            tables.at(sequence_of[static_cast<std::size_t>(row)], position, h, heads) + static_cast<std::size_t>(d);
        want_keys[to] = rotated(NH + h, d);
        want_values[to] = before[static_cast<std::size_t>(row * width + (NH + heads.NKV + h) * HS + d)];
      }
    }
  }

  const DeviceBuffer<float> cos(rope.cos), sin(rope.sin);
  const DeviceBuffer<T> packed(before), keys(pool), values(pool);
  const DeviceBuffer<std::int32_t> gpu_positions(positions), gpu_tables(row_tables), gpu_pages(block_tables);
  cuda::AppendToPages<T> io;
  io.q = {packed.data(), 0, width, HS};
  io.k = {packed.data() + NH * HS, 0, width, HS};
  io.v = {packed.data() + (NH + heads.NKV) * HS, 0, width, HS};
  io.NH = NH;
  io.kv = {keys.data(), values.data(), page_size, heads.NKV, HS};
  io.rows = {gpu_positions.data(), gpu_tables.data(), gpu_pages.data(), rows};
  io.rope = {cos.data(), sin.data(), rope.positions, rope.half};
  const DeviceBuffer<std::uint8_t> key_codes(pool), value_codes(pool), key_scales(pool), value_scales(pool);
  const std::vector<std::uint8_t> unwritten = key_codes.download();
  if (fp8) io.kv.codes = {key_codes.data(), value_codes.data(), key_scales.data(), value_scales.data()};
  cuda::append_to_pages(io, cuda::launch_device(), nullptr);
  expect_same_bits(packed, DeviceBuffer<T>(want), "queries, and k and v of the rows");
  if (fp8) {
    const auto expect_codes = [&](KvKind kind, const std::vector<T>& wanted, const DeviceBuffer<std::uint8_t>& codes,
                                  const DeviceBuffer<std::uint8_t>& scales, const char* what) {
      const Floats wide = widened(wanted);
      std::vector<std::uint8_t> want_codes = unwritten, want_scales = unwritten;
      for (std::size_t row = 0; row < rows_written.size(); ++row) {
        const std::int64_t at = rows_written[row];
        kv_store(kind, wide.data() + at * HS, HS, at, want_codes.data(), want_scales.data());
      }
      EXPECT_EQ(codes.download(), want_codes) << what;
      EXPECT_EQ(scales.download(), want_scales) << what;
    };
    expect_codes(KvKind::key, want_keys, key_codes, key_scales, "keys");
    expect_codes(KvKind::value, want_values, value_codes, value_scales, "values");
    return;
  }
  expect_same_bits(keys, DeviceBuffer<T>(want_keys), "keys");
  expect_same_bits(values, DeviceBuffer<T>(want_values), "values");
}

TYPED_TEST(CudaPagedAttention, AppendsRotatedKeysAndValues) {
  std::size_t turn = 0;
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t rotary : {std::int64_t{0}, std::int64_t{2}, HS / 4, HS / 4 + 2, HS / 2 + 6, HS}) {
      for (const Heads& heads : {Heads{3, 1, HS}, Heads{2, 4, HS}})
        check_append<TypeParam>(heads, rotary, kPageSizes[turn++ % std::size(kPageSizes)]);
    }
  }
}

TYPED_TEST(CudaPagedCodes, AreAppendedAsTheCpuStoresThem) {
  std::size_t turn = 0;
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t rotary : {std::int64_t{0}, std::int64_t{2}, HS / 4, HS / 4 + 2, HS / 2 + 6, HS}) {
      for (const Heads& heads : {Heads{3, 1, HS}, Heads{2, 4, HS}})
        check_append<TypeParam>(heads, rotary, kPageSizes[turn++ % std::size(kPageSizes)], true);
    }
  }
}

// ---- steps that decode --------------------------------------------------------------------------------------------------
// Who rotates queries and keys of a step and writes keys and values to their pages.
enum class Appends { before, attention };

// q, k and v of every position of some sequences as the GEMM writes them, not rotated, and the pages that steps fill. Rows are
// GPT-NeoX's [NH][q, k, v][HS] where every query head has its own K/V head, else [q heads | k heads | v heads].
template <typename T>
class PagedSteps {
 public:
  PagedSteps(const Heads& heads, std::int64_t rotary, std::int64_t page_size, const std::vector<std::int64_t>& lengths,
             const Windows& windows = {})
      : heads_(heads),
        windows_(windows),
        tables_(lengths, page_size, 11),
        width_((heads.NH() + 2 * heads.NKV) * heads.HS),
        keys_(pool_size()),
        values_(pool_size()),
        cos_(table(rotary, lengths).cos),
        sin_(table(rotary, lengths).sin) {
    shape_.NH = heads.NH(), shape_.NKV = heads.NKV, shape_.HS = heads.HS;
    shape_.max_positions = *std::max_element(lengths.begin(), lengths.end());
    shape_.max_chunks = std::ssize(lengths);
    shape_.window = windows.list;
    shape_.max_rows = std::accumulate(lengths.begin(), lengths.end(), kPadding);
    rope_ = {cos_.data(), sin_.data(), shape_.max_positions, rotary / 2};
    workspace_ = std::make_unique<DeviceBuffer<char>>(cuda::paged_attention_workspace(shape_));
    workspace_->fill_bytes(0);
    unsigned seed = 21;
    for (const std::int64_t length : lengths) packed_.push_back(stored<T>(random_floats(length * width_, seed++, 3)));
  }

  // A step's outputs, [rows, NH, HS]. Attention runs twice, overlapping, and must give the same bits.
  std::vector<T> run(const std::vector<Piece>& pieces, Appends appends,
                     const cuda::LaunchDevice& device = cuda::launch_device()) {
    std::vector<T> packed;
    std::vector<std::int32_t> positions, row_tables, block_tables;
    std::vector<cuda::PagedChunk> chunks;
    for (const Piece& piece : pieces) {
      chunks.push_back({std::ssize(positions), piece.rows, piece.first});
      const auto begin = packed_[piece.sequence].begin() + piece.first * width_;
      packed.insert(packed.end(), begin, begin + piece.rows * width_);
      for (std::int64_t i = 0; i < piece.rows; ++i) {
        positions.push_back(static_cast<std::int32_t>(piece.first + i));
        row_tables.push_back(static_cast<std::int32_t>(block_tables.size()));
      }
      const std::vector<std::int32_t> pages = tables_.from(piece.sequence, windows_.first(piece.first));
      block_tables.insert(block_tables.end(), pages.begin(), pages.end());
    }
    const auto rows = std::ssize(positions), all_rows = rows + kPadding;
    positions.insert(positions.end(), kPadding, -1);
    row_tables.insert(row_tables.end(), kPadding, 1 << 30);
    packed.resize(static_cast<std::size_t>(all_rows * width_));
    std::vector<std::int64_t> work(cuda::paged_work_bytes(shape_) / sizeof(std::int64_t));
    EXPECT_LE(cuda::write_paged_work(work.data(), shape_, chunks), work.size() * sizeof(std::int64_t));
    const bool single = std::ranges::all_of(pieces, [](const Piece& piece) { return piece.rows == 1; });
    EXPECT_EQ(cuda::paged_work_decodes(work.data()), single);

    const DeviceBuffer<T> gpu_packed(packed);
    const DeviceBuffer<std::int32_t> gpu_positions(positions), gpu_tables(row_tables), gpu_pages(block_tables);
    const DeviceBuffer<std::int64_t> gpu_work(work);
    const auto out_size = static_cast<std::size_t>(all_rows * heads_.NH() * heads_.HS);
    const DeviceBuffer<T> first(out_size), second(out_size);
    const std::int64_t HS = heads_.HS;
    const bool neox = heads_.G == 1;
    const auto view = [&](std::int64_t begin) {
      return HeadViewOf<T>{gpu_packed.data() + begin, 0, width_, neox ? 3 * HS : HS};
    };
    cuda::AppendToPages<T> append;
    append.q = view(0);
    append.k = view(neox ? HS : heads_.NH() * HS);
    append.v = view(neox ? 2 * HS : (heads_.NH() + heads_.NKV) * HS);
    append.NH = heads_.NH();
    append.kv = {keys_.data(), values_.data(), tables_.page_size, heads_.NKV, HS};
    append.rows = {gpu_positions.data(), gpu_tables.data(), gpu_pages.data(), all_rows};
    append.rope = rope_;
    cuda::PagedAttention<T> io;
    io.shape = shape_;
    io.scale = heads_.scale();
    io.window = windows_.layer;
    io.q = append.q;
    io.kv = append.kv;
    io.rows = append.rows;
    io.work = gpu_work.data();
    io.workspace = workspace_->data();
    if (appends == Appends::before) {
      cuda::append_to_pages(append, device, nullptr);
    } else {
      io.k = append.k;
      io.v = append.v;
      io.rope = rope_;
    }
    for (const DeviceBuffer<T>* out : {&first, &second}) {
      io.out = out->data();
      cuda::paged_attention(io, device, nullptr);
    }
    std::vector<T> out = first.download();
    expect_same_bits(first, second, "the second run");
    if (appends == Appends::attention) expect_same_bits(gpu_packed, DeviceBuffer<T>(packed), "q, k and v of the rows");
    out.resize(static_cast<std::size_t>(rows * heads_.NH() * HS));
    return out;
  }

  const DeviceBuffer<T>& keys() const { return keys_; }
  const DeviceBuffer<T>& values() const { return values_; }
  std::size_t row_size() const { return static_cast<std::size_t>(heads_.NH() * heads_.HS); }

 private:
  static RopeTable table(std::int64_t rotary, const std::vector<std::int64_t>& lengths) {
    RopeConfig config;
    config.theta = 10000;
    config.rotary_dim = rotary;
    return rope_table(config, *std::max_element(lengths.begin(), lengths.end()));
  }
  std::size_t pool_size() const {
    return static_cast<std::size_t>(tables_.num_pages * heads_.NKV * tables_.page_size * heads_.HS);
  }

  Heads heads_;
  Windows windows_;
  Tables tables_;
  std::int64_t width_;  // elements of a packed row
  DeviceBuffer<T> keys_, values_;
  DeviceBuffer<float> cos_, sin_;
  cuda::PagedAttentionShape shape_;
  cuda::DeviceRopeTable rope_;
  std::unique_ptr<DeviceBuffer<char>> workspace_;
  std::vector<std::vector<T>> packed_;  // [length, width] of each sequence
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// A row of each sequence, then the next one: beside the ends of key blocks, of pages and of splits. Once on so few multiprocessors
// that all warps of a block compute, several items each.
template <typename T>
void check_decoding(const Heads& heads, std::int64_t rotary, std::int64_t page_size, const Windows& windows = {},
                    const std::vector<std::int64_t>& positions = {0, 1, 15, 16, 31, 32, 47, 63, 254, 255, 256, 300, 511,
                                                                  512, 600}) {
  SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " NKV " << heads.NKV << " G " << heads.G << " rotary "
                                  << rotary << " pages of " << page_size << " window " << windows.layer);
  std::vector<std::int64_t> lengths;
  std::vector<Piece> before, step;
  for (std::size_t s = 0; s < positions.size(); ++s) {
    lengths.push_back(positions[s] + 3);
    if (positions[s] > 0) before.push_back({s, 0, positions[s]});
    step.push_back({s, positions[s], 1});
  }
  PagedSteps<T> want(heads, rotary, page_size, lengths, windows), got(heads, rotary, page_size, lengths, windows);
  want.run(before, Appends::before);
  got.run(before, Appends::before);
  const cuda::LaunchDevice all = cuda::launch_device(), few{2, all.overlapping};
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(same_bits(got.run(step, Appends::attention, i == 1 ? few : all), want.run(step, Appends::before)))
        << "step " << i;
    expect_same_bits(got.keys(), want.keys(), "keys in pages");
    expect_same_bits(got.values(), want.values(), "values in pages");
    for (Piece& piece : step) ++piece.first;
  }
}

TYPED_TEST(CudaPagedAttention, StepsThatDecodeHaveTheBitsOfTwoLaunches) {
  std::size_t turn = 0;
  for (const std::int64_t HS : kHeadDims) {
    for (const std::int64_t rotary : {std::int64_t{0}, std::int64_t{2}, HS / 4, HS / 4 + 2, HS / 2 + 6, HS}) {
      for (const Heads& heads : {Heads{3, 1, HS}, Heads{2, 4, HS}, Heads{1, 20, HS}})
        check_decoding<TypeParam>(heads, rotary, kPageSizes[turn++ % std::size(kPageSizes)]);
    }
  }
}

// The step crosses from 8 to 9 splits, of which many warps merge each row, and from 32 to 33, the first one of 512 positions. Its
// own rows are in both spans of such a split.
TYPED_TEST(CudaPagedAttention, StepsThatDecodeLongSequences) {
  for (const Heads& heads : {Heads{2, 1, 64}, Heads{1, 4, 80}, Heads{1, 20, 128}, Heads{1, 2, 256}}) {
    for (const Windows& windows : {Windows{}, Windows{3000, 3000}})
      check_decoding<TypeParam>(heads, heads.HS / 4, 32, windows, {2046, 8190, 0, 300, 5000, 8846, 9100});
  }
}

TYPED_TEST(CudaPagedAttention, StepsThatDecodeWithWindows) {
  std::size_t turn = 0;
  for (const std::int64_t HS : kHeadDims) {
    for (const Windows& windows : {Windows{1, 1}, {17, 40}, {64, 0}, {300, 300}}) {
      for (const Heads& heads : {Heads{3, 1, HS}, Heads{2, 4, HS}, Heads{1, 20, HS}})
        check_decoding<TypeParam>(heads, HS / 4, kPageSizes[turn++ % std::size(kPageSizes)], windows);
    }
  }
}

// Every position of three sequences, decoded one by one, against the prompts at once.
TYPED_TEST(CudaPagedAttention, DecodedRowByRowIsAChunk) {
  const Heads kinds[] = {{2, 1, 64}, {2, 1, 80}, {1, 4, 128}};
  for (const auto& [heads, windows] : {std::pair{kinds[0], Windows{}},
                                       {kinds[1], Windows{}},
                                       {kinds[2], Windows{}},
                                       {kinds[0], Windows{33, 0}},
                                       {kinds[1], Windows{100, 100}},
                                       {kinds[2], Windows{20, 30}}}) {
    SCOPED_TRACE(testing::Message() << "HS " << heads.HS << " G " << heads.G << " window " << windows.layer);
    const std::vector<std::int64_t> lengths = {290, 270, 40};
    PagedSteps<TypeParam> chunk(heads, heads.HS / 4, 16, lengths, windows),
        decoded(heads, heads.HS / 4, 16, lengths, windows);
    const std::vector<TypeParam> want = chunk.run({{0, 0, 290}, {1, 0, 270}, {2, 0, 40}}, Appends::before);
    const std::size_t row = chunk.row_size();
    for (std::int64_t position = 0; position < lengths[0]; ++position) {
      std::vector<Piece> step;
      std::vector<TypeParam> of_chunk;
      std::int64_t first_row = 0;
      for (std::size_t s = 0; s < lengths.size(); first_row += lengths[s++]) {
        if (position >= lengths[s]) continue;
        step.push_back({s, position, 1});
        const auto begin = want.begin() + (first_row + position) * static_cast<std::int64_t>(row);
        of_chunk.insert(of_chunk.end(), begin, begin + static_cast<std::int64_t>(row));
      }
      ASSERT_TRUE(same_bits(decoded.run(step, Appends::attention), of_chunk)) << "position " << position;
    }
    expect_same_bits(decoded.keys(), chunk.keys(), "keys in pages");
    expect_same_bits(decoded.values(), chunk.values(), "values in pages");
  }
}

TYPED_TEST(CudaPagedAttention, RefusesOtherPagesAndViews) {
  const DeviceBuffer<TypeParam> memory(4096);
  cuda::PagedAttention<TypeParam> io;
  io.shape.NH = io.shape.NKV = 1, io.shape.HS = 64;
  io.shape.max_rows = io.shape.max_chunks = io.shape.max_positions = 1;
  io.kv = {memory.data(), memory.data(), 48, 1, 64};
  EXPECT_THROW(cuda::paged_attention(io, cuda::launch_device(), nullptr), Error);
  io.kv.page_size = 16;
  io.rows.rows = 65'536;
  EXPECT_THROW(cuda::paged_attention(io, cuda::launch_device(), nullptr), Error) << "more rows than a list can name";
  io.rows.rows = 0;
  io.q = {memory.data() + 1, 0, 64, 64};
  EXPECT_THROW(cuda::paged_attention(io, cuda::launch_device(), nullptr), Error);
  io.q = {memory.data(), 0, 64, 64};
  io.rows.rows = 1;
  io.k = io.q;
  EXPECT_THROW(cuda::paged_attention(io, cuda::launch_device(), nullptr), Error) << "keys without values";
  io.v = {memory.data() + 1, 0, 64, 64};
  EXPECT_THROW(cuda::paged_attention(io, cuda::launch_device(), nullptr), Error);
  io.v = io.q;
  io.rope.half = 33;
  EXPECT_THROW(cuda::paged_attention(io, cuda::launch_device(), nullptr), Error);
  io.rope.half = 0;
  io.shape.window = 5;
  for (const std::int64_t window : {-1, 0, 6}) {
    io.window = window;
    EXPECT_THROW(cuda::paged_attention(io, cuda::launch_device(), nullptr), Error) << "a window of " << window;
  }
  cuda::AppendToPages<TypeParam> append;
  append.NH = 1;
  append.q = {memory.data(), 0, 64, 64};
  append.k = append.v = append.q;
  append.kv = {memory.data(), memory.data(), 48, 1, 64};
  EXPECT_THROW(cuda::append_to_pages(append, cuda::launch_device(), nullptr), Error);
  append.kv.page_size = 16;
  append.rope.half = 33;
  EXPECT_THROW(cuda::append_to_pages(append, cuda::launch_device(), nullptr), Error);
}

}  // namespace
}  // namespace weft::test
