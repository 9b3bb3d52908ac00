// Data order and loader: every window once an epoch, exact positions, and what happens to shards that do not
// fit.
#include "llmc/train/data_loader.h"
#include "llmc/base/json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "test/cpp/train_tools.h"

namespace weft {
namespace {

TEST(DataOrder, EachEpochIsAPermutation) {
  for (std::uint64_t count = 1; count <= 150; ++count) {
    const DataOrder order(count, 42);
    for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<std::uint64_t> seen;
      for (std::uint64_t i = 0; i < count; ++i) seen.insert(order.window_at(epoch * count + i));
      ASSERT_EQ(seen.size(), count) << count << " windows, epoch " << epoch;
      ASSERT_EQ(*seen.rbegin(), count - 1);
    }
  }
}

TEST(DataOrder, EpochsAndSeedsDiffer) {
  const DataOrder order(1000, 1), other(1000, 2);
  int same_epoch = 0, same_seed = 0, in_place = 0;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    same_epoch += order.window_at(i) == order.window_at(1000 + i);
    same_seed += order.window_at(i) == other.window_at(i);
    in_place += order.window_at(i) == i;
  }
  // A random permutation agrees with another one in one place on average; ten has a probability below 1e-6.
  EXPECT_LT(same_epoch, 10);
  EXPECT_LT(same_seed, 10);
  EXPECT_LT(in_place, 10);
}

// Every window should come first equally often: chi-square over 20,000 epochs of 10 windows, 9 degrees of
// freedom.
TEST(DataOrder, FirstPlaceIsUniform) {
  const DataOrder order(10, 3);
  std::vector<int> count(10);
  for (std::uint64_t epoch = 0; epoch < 20000; ++epoch) ++count[order.window_at(epoch * 10)];
  double chi_square = 0;
  for (const int n : count) chi_square += (n - 2000.0) * (n - 2000.0) / 2000.0;
  EXPECT_LT(chi_square, 33.7) << "p < 1e-4";
}

TEST(DataOrder, CountsBeyond32Bits) {
  const std::uint64_t count = (std::uint64_t{1} << 40) + 12345;
  const DataOrder order(count, 5);
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 1000; ++i) seen.insert(order.window_at(count - 500 + i));
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_LT(*seen.rbegin(), count);
  EXPECT_GT(*seen.rbegin(), std::uint64_t{1} << 32);
}

std::vector<std::uint16_t> numbered(std::size_t count, std::uint16_t begin) {
  std::vector<std::uint16_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), begin);
  return tokens;
}

class Loader : public testing::Test {
 protected:
  // Three shards of 30, 9 and 52 tokens: at T = 8 they hold 3, 1 and 6 windows. Tokens count up through all
  // of them.
  void SetUp() override {
    const std::size_t sizes[] = {30, 9, 52};
    std::uint16_t token = 0;
    for (int shard = 0; shard < 3; ++shard) {
      std::vector<std::uint16_t> tokens(sizes[shard]);
      std::iota(tokens.begin(), tokens.end(), token);
      token = static_cast<std::uint16_t>(token + tokens.size());
      write_shard(shard_path(shard), tokens, 1000);
    }
  }
  std::string shard_path(int shard) const { return directory_.file(format("train_%d.bin", shard)); }
  std::string pattern() const { return directory_.file("train_*.bin"); }

  TemporaryDirectory directory_;
};

TEST_F(Loader, WindowsStayInsideTheirShard) {
  const TokenDataset data(pattern(), 8);
  ASSERT_EQ(data.windows(), 10u);
  EXPECT_EQ(data.tokens(), 91);
  const std::int32_t expected_first[] = {0, 8, 16, 30, 39, 47, 55, 63, 71, 79};
  std::vector<std::int32_t> tokens(8), labels(8);
  for (std::uint64_t window = 0; window < 10; ++window) {
    data.read_window(window, tokens, labels);
    for (int t = 0; t < 8; ++t) {
      EXPECT_EQ(tokens[t], expected_first[window] + t);
      EXPECT_EQ(labels[t], tokens[t] + 1);
    }
  }
}

TEST_F(Loader, EveryWindowOncePerEpoch) {
  const TokenDataset data(pattern(), 8);
  DataLoader loader(data, 3, 1, 0);  // 3 does not divide 10: batches reach across the end of an epoch
  std::vector<std::int32_t> first;
  for (int batch = 0; batch < 10; ++batch) {
    const MicroBatch micro = loader.next();
    ASSERT_EQ(micro.tokens.size(), 24u);
    for (std::size_t b = 0; b < 3; ++b) first.push_back(micro.tokens[b * 8]);
    for (std::size_t i = 0; i < 24; ++i) EXPECT_EQ(micro.labels[i], micro.tokens[i] + 1);
  }
  EXPECT_EQ(loader.position(), 30u);
  EXPECT_EQ(loader.epoch(), 3u);
  std::vector<std::vector<std::int32_t>> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    epochs.emplace_back(first.begin() + epoch * 10, first.begin() + epoch * 10 + 10);
    EXPECT_EQ(std::set<std::int32_t>(epochs.back().begin(), epochs.back().end()).size(), 10u);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST_F(Loader, GoesOnExactlyFromAnyPosition) {
  const TokenDataset data(pattern(), 8);
  DataLoader whole(data, 2, 9, 0);
  for (std::uint64_t position = 0; position < 40; position += 2) {
    DataLoader later(data, 2, 9, position);
    EXPECT_EQ(later.position(), position);
    const MicroBatch expected = whole.next(), got = later.next();
    EXPECT_EQ(got.tokens, expected.tokens);
    EXPECT_EQ(got.labels, expected.labels);
  }
}

TEST_F(Loader, ReplacedShardStopsTheRunAfterTheGoodBatches) {
  const TokenDataset data(pattern(), 8);
  DataLoader loader(data, 1, 1, 0);
  loader.next();
  std::filesystem::remove(shard_path(2));
  write_shard(shard_path(2), patterned_tokens(52), 1000);
  std::uint64_t position = loader.position();
  const std::string message = error_of(Exit::bad_file, [&] {
    for (int i = 0; i < 30; ++i) {
      loader.next();
      position = loader.position();
    }
  });
  expect_contains(message, "train_2.bin");
  EXPECT_EQ(loader.position(), position) << "a batch that was not delivered does not count";
  error_of(Exit::bad_file, [&] { loader.next(); });  // and the error stays
}

TEST_F(Loader, RemovedShardIsAnError) {
  const TokenDataset data(pattern(), 8);
  std::filesystem::remove(shard_path(0));
  DataLoader loader(data, 4, 1, 0);
  error_of(Exit::bad_file, [&] {
    for (int i = 0; i < 10; ++i) loader.next();
  });
}

TEST_F(Loader, IdOutsideTheVocabularySurfacesInTheConsumer) {
  std::vector<std::uint16_t> tokens = patterned_tokens(40);
  tokens[20] = 999;
  write_shard(directory_.file("bad.bin"), tokens, 32);
  const TokenDataset data(directory_.file("bad.bin"), 8);
  DataLoader loader(data, 5, 1, 0);
  expect_contains(error_of(Exit::bad_file, [&] { loader.next(); }), "999");
  error_of(Exit::bad_file, [&] { data.verify(); });
}

// Also in tokens that no window has.
TEST_F(Loader, EachTokenOfEachShardIsVerified) {
  TokenDataset(pattern(), 8).verify();
  for (int shard = 0; shard < 3; ++shard) {
    const std::string whole = read_bytes(shard_path(shard));
    for (const std::size_t place : {std::size_t{256}, whole.size() - 2}) {
      std::string flipped = whole;
      flipped[place] = static_cast<char>(flipped[place] ^ 1);
      write_bytes(shard_path(shard), flipped);
      const TokenDataset data(pattern(), 8);
      const std::string message = error_of(Exit::bad_file, [&] { data.verify(); });
      expect_contains(message, format("train_%d.bin': data_hash: ", shard));
    }
    write_bytes(shard_path(shard), whole);
  }
  TokenDataset(pattern(), 8).verify();
}

// Everything before the bad window comes, also where the thread that reads ahead has met it long before.
TEST_F(Loader, AnErrorComesInItsPlace) {
  constexpr std::uint64_t kWindows = 5, kSeed = 1;  // as many as are read ahead, and one
  const DataOrder order(kWindows, kSeed);
  for (std::uint64_t good = 0; good < kWindows; ++good) {
    std::vector<std::uint16_t> tokens = patterned_tokens(8 * kWindows + 1);
    tokens[8 * order.window_at(good) + 3] = 999;
    write_shard(directory_.file("bad.bin"), tokens, 32);
    const TokenDataset data(directory_.file("bad.bin"), 8);
    DataLoader loader(data, 1, kSeed, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (std::uint64_t i = 0; i < good; ++i) ASSERT_NO_THROW(loader.next()) << i << " of " << good;
    expect_contains(error_of(Exit::bad_file, [&] { loader.next(); }), "999");
    EXPECT_EQ(loader.position(), good);
  }
}

// Of each window of a dataset its first token and how many labels it has. Tokens and labels count up, and behind the labels
// a window begins again.
std::vector<std::pair<std::int32_t, std::int64_t>> windows_of(const TokenDataset& data) {
  const auto T = static_cast<std::size_t>(data.seq_len());
  std::vector<std::pair<std::int32_t, std::int64_t>> windows;
  std::vector<std::int32_t> tokens(T), labels(T);
  for (std::uint64_t window = 0; window < data.windows(); ++window) {
    data.read_window(window, tokens, labels);
    const auto count =
        static_cast<std::size_t>(std::find(labels.begin(), labels.end(), kIgnoredLabel) - labels.begin());
    for (std::size_t t = 0; t < T; ++t) {
      EXPECT_EQ(tokens[t], tokens[0] + static_cast<std::int32_t>(t % count));
      EXPECT_EQ(labels[t], t < count ? tokens[t] + 1 : kIgnoredLabel);
    }
    windows.emplace_back(tokens[0], count);
  }
  return windows;
}

// In training: before the shard that fills a window alone, behind it, and between two; several that fill one together.
TEST_F(Loader, AShortShardIsJoinedToItsNeighbour) {
  using Windows = std::vector<std::pair<std::int32_t, std::int64_t>>;
  const auto cut = [this](std::initializer_list<int> sizes) {  // tokens 0, 1, ... in shards of these sizes
    for (int shard = 0; shard < 9; ++shard) std::remove(shard_path(shard).c_str());
    int number = 0;
    std::uint16_t token = 0;
    for (const int size : sizes) {
      std::vector<std::uint16_t> tokens(static_cast<std::size_t>(size));
      std::iota(tokens.begin(), tokens.end(), token);
      token = static_cast<std::uint16_t>(token + size);
      write_shard(shard_path(number++), tokens, 1000);
    }
    return TokenDataset(pattern(), 8);
  };
  EXPECT_EQ(windows_of(cut({9, 9})), (Windows{{0, 8}, {9, 8}})) << "neither is short";
  EXPECT_EQ(windows_of(cut({9, 8})), (Windows{{0, 8}, {8, 8}})) << "tokens 0 to 16";
  EXPECT_EQ(windows_of(cut({9, 7})), (Windows{{0, 8}})) << "too few for a second window";
  EXPECT_EQ(windows_of(cut({8, 9})), (Windows{{0, 8}, {8, 8}}));
  EXPECT_EQ(windows_of(cut({1, 1, 2, 5})), (Windows{{0, 8}}));
  EXPECT_EQ(windows_of(cut({4, 4, 4, 4, 4, 5})), (Windows{{0, 8}, {8, 8}, {16, 8}}));
  EXPECT_EQ(windows_of(cut({20, 3, 20, 1})), (Windows{{0, 8}, {8, 8}, {23, 8}, {31, 8}}));
  const TokenDataset data = cut({20, 3, 20, 1});
  EXPECT_EQ(data.labels(), 32);
  EXPECT_EQ(data.left_out(), 10) << "22 and 20 labels, of which 16 each are in windows";
  expect_contains(error_of(Exit::bad_file, [&] { cut({8}); }),
                  "train_*.bin': 8 tokens, at least 9 are needed for --seq-len 8. Lower --seq-len, or give more text");
  expect_contains(error_of(Exit::bad_file, [&] { cut({1, 3, 4}); }), ": 8 tokens, at least 9");
}

// Every token but the first of each shard is one label of a measurement.
TEST_F(Loader, AMeasurementHasEveryTokenOnce) {
  using Windows = std::vector<std::pair<std::int32_t, std::int64_t>>;
  const auto measured = [this](std::int64_t seq_len) {
    return TokenDataset(pattern(), seq_len, WindowUse::measurement);
  };
  EXPECT_EQ(
      windows_of(measured(8)),
      (Windows{
          {0, 8}, {8, 8}, {16, 8}, {24, 5}, {30, 8}, {39, 8}, {47, 8}, {55, 8}, {63, 8}, {71, 8}, {79, 8}, {87, 3}}));
  EXPECT_EQ(windows_of(measured(100)), (Windows{{0, 29}, {30, 8}, {39, 51}}));
  for (const std::int64_t seq_len : {1, 2, 7, 8, 9, 29, 30, 51, 100}) {
    const TokenDataset data = measured(seq_len);
    EXPECT_EQ(data.labels(), 29 + 8 + 51) << seq_len;
    EXPECT_EQ(data.left_out(), 0);
    std::int64_t labels = 0;
    for (const auto& [first, count] : windows_of(data)) labels += count;
    EXPECT_EQ(labels, data.labels()) << seq_len;
  }
  write_shard(shard_path(1), {7}, 1000);
  EXPECT_EQ(measured(100).labels(), 29 + 51) << "a single token has nothing before it";
  EXPECT_EQ(windows_of(measured(100)), (Windows{{0, 29}, {39, 51}}));
  write_shard(directory_.file("val_0.bin"), {7}, 1000);
  expect_contains(
      error_of(Exit::bad_file, [&] { TokenDataset(directory_.file("val_*.bin"), 8, WindowUse::measurement); }),
      "val_*.bin': 1 tokens, at least 2 in a shard are needed");
}

// Conversations of 4, 9, 2, 10, 3 and 1 tokens in two shards, at T = 8: the fourth is too long and has no answer that ends
// in time, in the fifth only the first token is learned, which is no label, and the last has no label.
TEST_F(Loader, AConversationIsOneRowWhoseLabelsAreWhatIsLearned) {
  const std::vector<std::uint16_t> first = numbered(15, 0), second = numbered(14, 15);
  const std::set<std::size_t> learned = {2, 3, 4, 9, 12, 14};
  write_document_shard(
      directory_.file("chat_0.bin"), first, {4, 9, 2}, [&](std::size_t t) { return learned.contains(t); }, 1000);
  write_document_shard(
      directory_.file("chat_1.bin"), second, {10, 3, 1}, [](std::size_t t) { return t <= 10 || t == 13; }, 1000);
  constexpr std::int32_t kNo = kIgnoredLabel;
  for (const WindowUse use : {WindowUse::training, WindowUse::measurement}) {
    const TokenDataset data(directory_.file("chat_*.bin"), 8, use, {.pack = false});
    ASSERT_TRUE(data.of_documents());
    EXPECT_FALSE(data.masks_documents());
    ASSERT_EQ(data.windows(), 3u);
    EXPECT_EQ(data.tokens(), 29);
    EXPECT_EQ(data.labels(), 2 + 2 + 1) << "token 4 is the first of its conversation: nothing predicts it";
    EXPECT_EQ(data.left_out(), 0);
    EXPECT_EQ(data.too_long(), 1);
    EXPECT_EQ(data.unlearned(), 2);
    const std::vector<std::vector<std::int32_t>> tokens = {
        {0, 1, 2, 0, 1, 2, 0, 1}, {4, 5, 6, 7, 8, 9, 10, 11}, {13, 13, 13, 13, 13, 13, 13, 13}};
    const std::vector<std::vector<std::int32_t>> labels = {{kNo, 2, 3, kNo, kNo, kNo, kNo, kNo},
                                                           {kNo, kNo, kNo, kNo, 9, kNo, kNo, 12},
                                                           {14, kNo, kNo, kNo, kNo, kNo, kNo, kNo}};
    std::vector<std::int32_t> got_tokens(8), got_labels(8);
    for (std::uint64_t window = 0; window < 3; ++window) {
      data.read_window(window, got_tokens, got_labels);
      EXPECT_EQ(got_tokens, tokens[window]);
      EXPECT_EQ(got_labels, labels[window]);
    }
  }
  const TokenDataset longer(directory_.file("chat_*.bin"), 9, WindowUse::training, {.pack = false});
  EXPECT_EQ(longer.windows(), 4u);
  EXPECT_EQ(longer.labels(), 5 + 9);
  EXPECT_EQ(longer.too_long(), 0);
  expect_contains(
      error_of(Exit::bad_file, [&] { TokenDataset(directory_.file("chat_1.bin"), 8); }),
      "of 3 conversations 1 have no answer that ends within --seq-len 8, and in the others nothing is learned");
}

// The same conversations and three more, of 5, 3 and 3 tokens: rows that hold several, and what their labels and documents are.
TEST_F(Loader, ConversationsArePackedIntoRows) {
  const std::vector<std::uint16_t> first = numbered(15, 0), second = numbered(11, 15);
  const std::set<std::size_t> learned = {2, 3, 4, 9, 12, 14};
  write_document_shard(
      directory_.file("chat_0.bin"), first, {4, 9, 2}, [&](std::size_t t) { return learned.contains(t); }, 1000);
  write_document_shard(
      directory_.file("chat_1.bin"), second, {5, 3, 3}, [](std::size_t t) { return t > 2; }, 1000);
  constexpr std::int32_t kNo = kIgnoredLabel;
  const std::vector<std::vector<std::int32_t>> tokens = {
      {4, 5, 6, 7, 8, 9, 10, 11}, {15, 16, 17, 18, 0, 1, 2, 13}, {20, 21, 23, 24, 20, 21, 23, 24}};
  const std::vector<std::vector<std::int32_t>> labels = {
      {kNo, kNo, kNo, kNo, 9, kNo, kNo, 12}, {kNo, kNo, 18, 19, kNo, 2, 3, 14}, {21, 22, 24, 25, kNo, kNo, kNo, kNo}};
  const std::vector<std::vector<std::int32_t>> starts = {
      {0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 4, 4, 4, 7}, {0, 0, 2, 2, 4, 4, 4, 4}};
  for (const WindowUse use : {WindowUse::training, WindowUse::measurement}) {
    const TokenDataset data(directory_.file("chat_*.bin"), 8, use);
    ASSERT_TRUE(data.packs() && data.masks_documents());
    ASSERT_EQ(data.windows(), 3u);
    EXPECT_EQ(data.documents(), 6);
    EXPECT_EQ(data.inputs(), 8 + 8 + 4);
    EXPECT_EQ(data.labels(), 2 + 5 + 4);
    EXPECT_EQ(data.attention_share(), 1) << "a row is a single tile";
    MicroBatch batch = data.make_batch(3);
    for (std::uint64_t row = 0; row < 3; ++row) data.read_row(row, batch, static_cast<std::int64_t>(row));
    for (std::size_t row = 0; row < 3; ++row) {
      const auto part = [&](const std::vector<std::int32_t>& all) {
        return std::vector<std::int32_t>(all.begin() + static_cast<std::ptrdiff_t>(8 * row),
                                         all.begin() + static_cast<std::ptrdiff_t>(8 * row + 8));
      };
      EXPECT_EQ(part(batch.tokens), tokens[row]);
      EXPECT_EQ(part(batch.labels), labels[row]);
      EXPECT_EQ(part(batch.document_starts), starts[row]);
    }
    EXPECT_THROW(data.read_window(0, std::span(batch.tokens).first(8), std::span(batch.labels).first(8)), Error)
        << "rows without where documents begin";
    EXPECT_EQ(data.fingerprint(), TokenDataset(directory_.file("chat_*.bin"), 8, use, {.pack = false}).fingerprint());
  }
}

// A conversation of 14 tokens, with answers at tokens 2 and 3, 6, and 9 to 11.
TEST_F(Loader, ALongConversationEndsBehindAnAnswer) {
  const std::set<std::size_t> learned = {2, 3, 6, 9, 10, 11};
  write_document_shard(
      directory_.file("chat_0.bin"), patterned_tokens(14), {14}, [&](std::size_t t) { return learned.contains(t); },
      1000);
  struct Cut {
    std::int64_t seq_len, tokens, labels;
  };
  for (const Cut& cut : {Cut{13, 14, 6}, {12, 12, 6}, {11, 12, 6}, {10, 7, 3}, {6, 7, 3}, {5, 4, 2}, {3, 4, 2}}) {
    for (const bool pack : {true, false}) {
      const TokenDataset data(directory_.file("chat_*.bin"), cut.seq_len, WindowUse::training, {.pack = pack});
      EXPECT_EQ(data.inputs(), cut.tokens - 1) << cut.seq_len;
      EXPECT_EQ(data.labels(), cut.labels) << cut.seq_len;
      EXPECT_EQ(data.shortened(), cut.seq_len < 13 ? 1 : 0);
      EXPECT_EQ(data.too_long(), 0);
    }
  }
  expect_contains(error_of(Exit::bad_file, [&] { TokenDataset(directory_.file("chat_0.bin"), 2); }),
                  "of 1 conversations 1 have no answer that ends within --seq-len 2");
}

// Documents that end by the id 9, in windows of 4 over joined shards.
TEST_F(Loader, WindowsOfTextKnowTheirDocuments) {
  const auto written = [&](int shard, const std::vector<std::uint16_t>& tokens, std::int64_t end = 9) {
    write_shard(directory_.file(format("text_%d.bin", shard)), tokens, 32, 7, end);
  };
  const std::string pattern = directory_.file("text_*.bin");
  written(0, {1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 9});
  written(1, {8, 9, 1});
  constexpr std::int32_t kNo = kIgnoredLabel;
  const RowOptions masked{.document_mask = true};
  const TokenDataset data(pattern, 4, WindowUse::training, masked), plain(pattern, 4);
  ASSERT_EQ(data.windows(), 3u);
  EXPECT_EQ(plain.windows(), 3u);
  const std::vector<std::vector<std::int32_t>> labels = {{2, 9, kNo, 9}, {kNo, kNo, 5, 6}, {7, 9, kNo, 9}};
  const std::vector<std::vector<std::int32_t>> starts = {{0, 0, 0, 3}, {0, 1, 2, 2}, {0, 0, 0, 3}};
  std::vector<std::int32_t> tokens(4), same(4), own(4), begin(4);
  for (std::uint64_t window = 0; window < 3; ++window) {
    plain.read_window(window, same, own);
    data.read_window(window, tokens, own, begin);
    EXPECT_EQ(tokens, same);
    EXPECT_EQ(own, labels[window]);
    EXPECT_EQ(begin, starts[window]);
  }
  const TokenDataset measured(pattern, 4, WindowUse::measurement, masked);
  EXPECT_EQ(measured.labels(), 13 - 1 - 4) << "between the shards, and behind four of the five ends of documents";
  EXPECT_EQ(measured.left_out(), 0);
  std::int64_t counted = 0;
  for (std::uint64_t window = 0; window < measured.windows(); ++window) {
    measured.read_window(window, tokens, own, begin);
    counted += std::count_if(own.begin(), own.end(), [](std::int32_t label) { return label != kNo; });
  }
  EXPECT_EQ(counted, measured.labels());
  measured.read_window(2, tokens, own, begin);  // tokens 8 to 10: two labels, and no third
  EXPECT_EQ(begin, (std::vector<std::int32_t>{0, 0, 2, 2}));

  written(1, {8, 9, 1}, -1);
  expect_contains(
      error_of(Exit::bad_file, [&] { TokenDataset(pattern, 4, WindowUse::training, masked); }),
      "text_1.bin': does not say where documents end (end_of_document_id), which --document-mask has to know");
  EXPECT_EQ(TokenDataset(pattern, 4).windows(), 3u);
  written(1, {8, 9, 1}, 8);
  expect_contains(error_of(Exit::bad_file, [&] { TokenDataset(pattern, 4, WindowUse::training, masked); }),
                  "text_1.bin': end_of_document_id: got 8, but ");
  written(0, {9, 9, 9, 9, 9, 9});
  written(1, {9});
  expect_contains(error_of(Exit::bad_file, [&] { TokenDataset(pattern, 4, WindowUse::measurement, masked); }),
                  ": 7 tokens, each of them a document");
}

// What each rank reads of packed rows is its share of one order, from any position on.
TEST_F(Loader, RanksDivideThePackedRows) {
  std::vector<std::size_t> lengths;
  for (std::size_t i = 0; i < 40; ++i) lengths.push_back(2 + i * 7 % 8);
  write_document_shard(directory_.file("chat_0.bin"),
                       patterned_tokens(std::accumulate(lengths.begin(), lengths.end(), std::size_t{0})), lengths,
                       [](std::size_t) { return true; });
  const TokenDataset data(directory_.file("chat_0.bin"), 8), again(directory_.file("chat_0.bin"), 8);
  for (const std::int64_t ranks : {1, 2, 3}) {
    DataLoader all(data, 2, 9, 12);
    std::vector<std::unique_ptr<DataLoader>> readers;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      readers.push_back(std::make_unique<DataLoader>(again, 2, 9, 12, DataShare{rank, ranks, 2}));
    }
    for (int step = 0; step < 8; ++step) {
      for (const auto& reader : readers) {
        for (int i = 0; i < 2; ++i) {
          const MicroBatch got = reader->next(), want = all.next();
          ASSERT_EQ(got.tokens, want.tokens);
          ASSERT_EQ(got.labels, want.labels);
          ASSERT_EQ(got.document_starts, want.document_starts);
        }
      }
    }
  }
}

TEST_F(Loader, ConversationsAndPlainTextAreNotMixed) {
  write_document_shard(
      directory_.file("train_9.bin"), patterned_tokens(20), {20}, [](std::size_t) { return true; }, 1000);
  expect_contains(error_of(Exit::bad_file, [&] { TokenDataset(pattern(), 8); }),
                  "train_9.bin': holds conversations, and");
  write_document_shard(
      shard_path(0), patterned_tokens(9), {9}, [](std::size_t) { return true; }, 1000);
  expect_contains(error_of(Exit::bad_file, [&] { TokenDataset(pattern(), 8); }), "train_1.bin': holds plain text, and");
}

TEST_F(Loader, FingerprintKnowsWhatIsLearned) {
  const auto written = [&](std::size_t learned) {
    write_document_shard(
        directory_.file("chat_0.bin"), patterned_tokens(9), {9}, [&](std::size_t t) { return t == learned; }, 1000);
    return TokenDataset(directory_.file("chat_0.bin"), 8).fingerprint();
  };
  EXPECT_NE(written(3), written(4));
}

TEST_F(Loader, RefusesShardsThatDoNotFit) {
  expect_contains(error_of(Exit::bad_file, [&] { TokenDataset(directory_.file("none_*.bin"), 8); }), "none_");
  EXPECT_EQ(TokenDataset(pattern(), 8).shards().size(), 3u);
  for (const auto& [vocabulary, hash] : {std::pair(1000, 8), std::pair(999, 7)}) {  // each of the two differs alone
    write_shard(directory_.file("train_3.bin"), patterned_tokens(30), static_cast<std::uint64_t>(vocabulary),
                static_cast<std::uint64_t>(hash));
    expect_contains(error_of(Exit::bad_file, [&] { TokenDataset(pattern(), 8); }), "another tokenizer");
  }
}

TEST_F(Loader, FingerprintKnowsContentAndOrder) {
  const Json before = TokenDataset(pattern(), 8).fingerprint();
  EXPECT_EQ(before, TokenDataset(pattern(), 4).fingerprint());
  ASSERT_EQ(before.size(), 3u);
  EXPECT_EQ(before[1]["name"], "train_1.bin");
  EXPECT_EQ(before[1]["tokens"], 9);
  write_shard(shard_path(1), {5, 5, 5, 5, 5, 5, 5, 5, 5}, 1000);
  const Json after = TokenDataset(pattern(), 8).fingerprint();
  EXPECT_EQ(after[0], before[0]);
  EXPECT_NE(after[1]["xxh3"], before[1]["xxh3"]) << "same name and size, other tokens";
}

// What the ranks read is what one reader of all micro-batches reads: of each step the first rank has the first ones.
TEST_F(Loader, RanksDivideTheStep) {
  const TokenDataset data(pattern(), 8);
  for (const std::int64_t ranks : {1, 2, 3}) {
    for (const std::int64_t micro_batches : {1, 2}) {
      DataLoader all(data, 2, 9, 12);
      std::vector<std::unique_ptr<DataLoader>> readers;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        readers.push_back(std::make_unique<DataLoader>(data, 2, 9, 12, DataShare{rank, ranks, micro_batches}));
      }
      for (int step = 0; step < 5; ++step) {
        for (const auto& reader : readers) {
          for (std::int64_t i = 0; i < micro_batches; ++i) ASSERT_EQ(reader->next().tokens, all.next().tokens);
        }
        for (const auto& reader : readers) EXPECT_EQ(reader->position(), all.position());
      }
    }
  }
}

TEST_F(Loader, EndsWhileTheThreadWaitsOrReads) {
  const TokenDataset data(pattern(), 8);
  for (int i = 0; i < 50; ++i) {
    DataLoader loader(data, 2, 1, 0);
    if (i % 2 == 0) loader.next();
  }
}

}  // namespace
}  // namespace weft
