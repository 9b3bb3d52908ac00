// Training data: token shards as windows of T inputs and T labels, in shuffled order, read ahead by a thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "llmc/base/json_fwd.h"
#include "llmc/file/token_shard.h"
#include "llmc/model/train_model.h"
#include "llmc/train/data_order.h"
#include "llmc/train/packing.h"

namespace weft {

// What a list of windows is for. `training`: only whole windows, of T labels. `measurement`: every token but the first of
// each shard is a label, so that the last window of a shard may have fewer.
enum class WindowUse { training, measurement };

// How documents share the rows.
struct RowOptions {
  bool document_mask = false;  // windows of plain text say where documents begin, and no document predicts the next one
  bool pack = true;            // of shards with documents: several in a row, each with what it sees for itself
};

// B windows: tokens and labels, each [B, T], and if the dataset masks_documents() where documents begin, [B, T] too.
struct MicroBatch {
  static constexpr std::uint64_t kNoWindow = ~std::uint64_t{0};  // of a row that only fills up the batch
  std::vector<std::int32_t> tokens, labels, document_starts;
  std::vector<std::uint64_t> windows;  // [B]: which they are
  Batch view() const { return {tokens, labels, document_starts}; }
};

// Where in a window the labels of a pair's two answers are: [chosen, rejected) and [rejected, end).
struct PairPlace {
  std::size_t pair;  // its number among those of the dataset
  std::size_t chosen, rejected, end;
};

// Several shards as one list of windows. Window w of a text is tokens [w T, w T + T]: neighbours share one token, the
// last label of one and the first input of the next, and no window crosses the end of a text. A text is a shard. In
// training a shard too short for a window is joined to the text before it, or the next one if it is the first; what is left
// over at the end of a text, fewer than T tokens, is not used.
//
// Of shards with documents, such as conversations, a window is a row of whole documents, whatever it is for. A document of n
// tokens has n - 1 inputs and labels. Labels are the tokens that are learned. Documents of more than T + 1 tokens end behind
// the last learned tokens that fit, at the first one that is not learned: behind an answer. Those in which nothing fits, and
// those in which nothing is learned, have no window.
//
// Shards of pairs are the same, but the two documents of a pair lie in one window, one behind the other, or, if they do not fit
// whole into one, in none.
//
// A plain text has the token end_of_document_id() behind each document. With RowOptions::document_mask its windows are the
// same, and the rest of a document that another window has begun is a document.
class TokenDataset {
 public:
  // `pattern`: a shell pattern; the files that match are used in lexicographic order. Exit::bad_file: nothing matches,
  // there is no window, or the shards were made with different tokenizers, or are not of one kind, or document_mask is asked of a
  // text that does not say where documents end. Exit::usage: pairs are not to be packed.
  TokenDataset(const std::string& pattern, std::int64_t seq_len, WindowUse use = WindowUse::training,
               RowOptions rows = {});

  std::int64_t seq_len() const { return seq_len_; }
  std::uint64_t windows() const { return windows_; }
  std::int64_t tokens() const { return first_token_.back(); }
  // Of all windows. In training with document_mask no labels are left out of this number: they are not known before each
  // token has been read.
  std::int64_t labels() const;
  std::int64_t left_out() const;  // tokens that are no label although another one stands before them in their text
  bool of_documents() const { return !shards_.front().document_starts().empty(); }
  bool of_pairs() const { return shards_.front().of_pairs(); }
  bool packs() const { return of_documents() && options_.pack; }
  // Whether windows say where documents begin, for an attention that sees its own document alone.
  bool masks_documents() const { return of_documents() ? options_.pack : options_.document_mask; }
  std::int64_t documents() const { return std::ssize(documents_); }  // that have a window
  std::int64_t pairs() const { return of_pairs() ? documents() / 2 : 0; }
  // Of a shard of pairs: those of a window, in its order.
  std::vector<PairPlace> pairs_of(std::uint64_t window) const;
  std::int64_t inputs() const { return inputs_; }  // of all of these
  // What attention computes in packed rows, as a share of what it would in rows of one document each: by tiles of kTile
  // queries by kTile keys.
  double attention_share() const;
  // Of the documents: those with a window that end early because of their length, those without one because of their length,
  // and those in which nothing is learned.
  std::int64_t shortened() const { return shortened_; }
  std::int64_t too_long() const { return too_long_; }
  std::int64_t unlearned() const { return unlearned_; }
  std::int64_t vocab_size() const { return shards_.front().vocab_size(); }
  std::uint64_t tokenizer_hash() const { return shards_.front().tokenizer_hash(); }
  std::span<const TokenShard> shards() const { return shards_; }
  std::string directory() const;  // where the first shard lies

  // tokens and labels of one window, each [T]. A label that is not learned is kIgnoredLabel. So are those behind the end of
  // a shorter window, where the tokens begin again at its first, for the ranges that fp8 sees to be those of text.
  // If the dataset masks_documents(), document_starts [T] are where in the window the document of each token begins, as
  // Visibility takes them; what is behind the end is a document of its own. Otherwise they are empty.
  // Exit::bad_file if the shard was replaced since it was opened.
  void read_window(std::uint64_t window, std::span<std::int32_t> tokens, std::span<std::int32_t> labels,
                   std::span<std::int32_t> document_starts = {}) const;
  // Memory for `rows` windows, and a window as one of them.
  MicroBatch make_batch(std::int64_t rows) const;
  void read_row(std::uint64_t window, MicroBatch& batch, std::int64_t row) const;
  void verify() const;  // every shard's data hash and every id

  // A measurement of `rows` rows, spread evenly over all `windows`: the window that row `row` < `rows` reads.
  static std::uint64_t spread_window(std::uint64_t row, std::uint64_t rows, std::uint64_t windows);

  // [{"name", "tokens", "xxh3"}, ...]: what a checkpoint records of the data. The hash is that of the shard's
  // header, which contains the hash of its tokens.
  Json fingerprint() const;

 private:
  struct Text {
    std::int64_t begin, end;  // of the tokens of all shards, one after another
    std::uint64_t first_window = 0;
  };
  struct Document {
    std::size_t shard;
    std::int64_t begin, tokens;  // in the shard
  };
  static constexpr std::int64_t kTile = 128;  // of attention_share(): that of the kernels for Hopper

  void add_text(std::int64_t count);
  void add_documents(std::size_t shard);
  void add_pairs(std::size_t shard);
  void add_document(const Document& document, std::int64_t labels);
  std::int64_t longest_cut(std::span<const std::uint8_t> learned) const;
  void require_document_ends() const;
  void count_unlearned_ends();
  void require_windows(const std::string& pattern) const;
  std::uint64_t windows_of(const Text& text) const;
  std::size_t read_text(std::uint64_t window, std::span<std::int32_t> tokens, std::span<std::int32_t> labels) const;
  std::size_t read_documents(std::uint64_t window, std::span<std::int32_t> tokens, std::span<std::int32_t> labels,
                             std::span<std::int32_t> document_starts) const;
  std::size_t read_document(const Document& document, std::span<std::int32_t> tokens,
                            std::span<std::int32_t> labels) const;
  void part_documents(std::span<const std::int32_t> tokens, std::span<std::int32_t> labels,
                      std::span<std::int32_t> document_starts) const;
  void read(std::int64_t begin, std::span<std::int32_t> tokens) const;

  std::int64_t seq_len_;
  WindowUse use_;
  RowOptions options_;
  std::vector<TokenShard> shards_;
  std::vector<std::int64_t> first_token_ = {0};              // of each shard, and their end
  std::vector<Text> texts_;                                  // of shards without documents
  std::vector<Document> documents_;                          // that have a window
  PackedRows rows_;                                          // of documents_
  std::int64_t inputs_ = 0, shortened_ = 0;                  // of those that have a window
  std::int64_t too_long_ = 0, unlearned_ = 0, learned_ = 0;  // documents without one; labels of those that have one
  std::int64_t unlearned_ends_ = 0;  // of a measurement with document_mask: first tokens of documents behind others
  std::uint64_t windows_ = 0;
};

// One rank's share of the micro-batches: `micro_batches` consecutive ones, after those of the rank before. After the
// last rank comes the first again, for the next step or, if a step takes several rounds, for the same one.
struct DataShare {
  std::int64_t rank = 0, ranks = 1;
  std::int64_t micro_batches = 1;  // of a rank in one round
};

// Hands out a rank's share of the micro-batches in the run's order. Its only state is the number of windows that all
// ranks together have consumed.
class DataLoader {
 public:
  // Begins at window number `position` of the run, where a step begins. The dataset must outlive the loader.
  DataLoader(const TokenDataset& data, std::int64_t micro_batch, std::uint64_t seed, std::uint64_t position,
             DataShare share = {});
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // The next B windows. An error of the reading thread is thrown here, after all batches read before it; the
  // position then still is that of the last good batch.
  MicroBatch next();
  std::uint64_t position() const { return position_; }  // windows consumed, if every rank has called next() as often
  std::uint64_t epoch() const { return position_ / order_.count(); }

 private:
  void read_ahead();
  MicroBatch read(std::uint64_t position) const;
  std::uint64_t position_of(std::uint64_t batch) const;  // the first window of this rank's micro-batch number `batch`

  const TokenDataset& data_;
  const std::int64_t micro_batch_;
  const DataOrder order_;
  const DataShare share_;
  const std::uint64_t begin_;  // the position at the start
  std::uint64_t position_;     // after the last next(); the thread counts for itself

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<MicroBatch> ready_;  // guarded by mutex_, as are the next two
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;  // last member: it starts when everything else exists
};

}  // namespace weft
