#include "llmc/train/data_loader.h"

#include <algorithm>
#include <filesystem>

#include "llmc/base/ceil_div.h"
#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"

namespace weft {

namespace {

constexpr std::size_t kReadyBatches = 4;  // micro-batches read ahead: they hide a slow read and take little memory
constexpr std::uint64_t kShardHeaderBytes = 256;

void require_same_tokenizer(const TokenShard& first, const TokenShard& shard) {
  if (shard.tokenizer_hash() == first.tokenizer_hash() && shard.vocab_size() == first.vocab_size()) return;
  fail(Exit::bad_file, "%s: made with another tokenizer than %s. Prepare all shards with one tokenizer",
       escaped(shard.path()).c_str(), escaped(first.path()).c_str());
}

std::string kind_of(const TokenShard& shard) {
  if (shard.of_pairs()) return "pairs of answers";
  return shard.document_starts().empty() ? "plain text" : "conversations";
}

void require_same_kind(const TokenShard& first, const TokenShard& shard) {
  if (kind_of(first) == kind_of(shard)) return;
  fail(Exit::bad_file, "%s: holds %s, and %s %s. Train on one kind", escaped(shard.path()).c_str(),
       kind_of(shard).c_str(), escaped(first.path()).c_str(), kind_of(first).c_str());
}

std::string header_hash(const TokenShard& shard) {
  const MappedFile file(shard.path());
  return hash_text(xxh3_64(file.data(), std::min(file.size(), kShardHeaderBytes)));
}

}  // namespace

TokenDataset::TokenDataset(const std::string& pattern, std::int64_t seq_len, WindowUse use, RowOptions rows)
    : seq_len_(seq_len), use_(use), options_(rows) {
  for (const std::string& path : expand_glob(pattern)) {
    TokenShard shard = TokenShard::open(path);
    if (!shards_.empty()) {
      require_same_tokenizer(shards_.front(), shard);
      require_same_kind(shards_.front(), shard);
    }
    shards_.push_back(std::move(shard));
    if (of_pairs()) {
      add_pairs(shards_.size() - 1);
    } else if (of_documents()) {
      add_documents(shards_.size() - 1);
    } else {
      add_text(shards_.back().count());
    }
    first_token_.push_back(tokens() + shards_.back().count());
  }
  if (!of_documents() && options_.document_mask) require_document_ends();
  if (options_.pack) {
    const std::size_t together = of_pairs() ? 2 : 1;  // documents that share a row
    std::vector<std::int64_t> lengths(documents_.size() / together);
    for (std::size_t i = 0; i < documents_.size(); ++i) lengths[i / together] += documents_[i].tokens - 1;
    rows_ = rows_of_units(pack_rows(lengths, seq_len_), together);
  } else if (of_pairs()) {
    fail(Exit::usage, "--no-pack: %s holds pairs of answers, and those of a pair share a row. Leave it out",
         escaped(pattern).c_str());
  } else {
    rows_ = single_rows(documents_.size());
  }
  windows_ = rows_.count();
  for (Text& text : texts_) {
    text.first_window = windows_;
    windows_ += windows_of(text);
  }
  if (masks_documents() && use_ == WindowUse::measurement) count_unlearned_ends();
  require_windows(pattern);
}

// The shard that follows those before: tokens() is where it begins.
void TokenDataset::add_text(std::int64_t count) {
  const std::int64_t begin = tokens(), end = begin + count;
  const bool joined = use_ == WindowUse::training && !texts_.empty() &&
                      (count <= seq_len_ || texts_.back().end - texts_.back().begin <= seq_len_);
  if (joined) {
    texts_.back().end = end;
  } else {
    texts_.push_back({begin, end});
  }
}

void TokenDataset::add_documents(std::size_t shard) {
  const std::span<const std::int64_t> starts = shards_[shard].document_starts();
  std::vector<std::uint8_t> learned(static_cast<std::size_t>(seq_len_) + 1);
  for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
    std::int64_t tokens = starts[i + 1] - starts[i];
    const bool longer = tokens - 1 > seq_len_;
    const auto marks = std::span(learned).first(static_cast<std::size_t>(longer ? seq_len_ + 1 : tokens - 1));
    shards_[shard].read_learned(starts[i] + 1, marks);
    if (longer) tokens = longest_cut(marks);
    if (tokens == 0) {
      ++too_long_;
      continue;
    }
    const auto labels = std::count(marks.begin(), marks.begin() + (tokens - 1), std::uint8_t{1});
    if (labels == 0) {
      ++unlearned_;
      continue;
    }
    add_document({shard, starts[i], tokens}, labels);
    shortened_ += longer ? 1 : 0;
  }
}

// Documents of a pair have a window both, or neither: they are not cut.
void TokenDataset::add_pairs(std::size_t shard) {
  const std::span<const std::int64_t> starts = shards_[shard].document_starts();
  std::vector<std::uint8_t> learned;
  for (std::size_t i = 0; i + 2 < starts.size(); i += 2) {
    if (starts[i + 2] - starts[i] - 2 > seq_len_) {
      ++too_long_;
      continue;
    }
    std::int64_t labels[2];
    for (std::size_t answer = 0; answer < 2; ++answer) {
      learned.resize(static_cast<std::size_t>(starts[i + answer + 1] - starts[i + answer] - 1));
      shards_[shard].read_learned(starts[i + answer] + 1, learned);
      labels[answer] = std::count(learned.begin(), learned.end(), std::uint8_t{1});
    }
    if (labels[0] == 0 || labels[1] == 0) {
      ++unlearned_;
      continue;
    }
    for (std::size_t answer = 0; answer < 2; ++answer) {
      add_document({shard, starts[i + answer], starts[i + answer + 1] - starts[i + answer]}, labels[answer]);
    }
  }
}

void TokenDataset::add_document(const Document& document, std::int64_t labels) {
  documents_.push_back(document);
  inputs_ += document.tokens - 1;
  learned_ += labels;
}

std::vector<PairPlace> TokenDataset::pairs_of(std::uint64_t window) const {
  std::vector<PairPlace> pairs;
  const std::span<const std::size_t> row = rows_.row(window);
  std::size_t begin = 0;
  for (std::size_t i = 0; i + 1 < row.size(); i += 2) {
    const auto chosen = static_cast<std::size_t>(documents_[row[i]].tokens - 1);
    const auto rejected = static_cast<std::size_t>(documents_[row[i + 1]].tokens - 1);
    pairs.push_back({row[i] / 2, begin, begin + chosen, begin + chosen + rejected});
    begin = pairs.back().end;
  }
  return pairs;
}

// Of a document of more than T + 1 tokens: how many it has up to the end of the last answer that fits; 0: none does.
// `learned` [T + 1]: of the tokens behind the first.
std::int64_t TokenDataset::longest_cut(std::span<const std::uint8_t> learned) const {
  for (std::size_t end = learned.size() - 1; end > 0; --end) {
    if (learned[end - 1] != 0 && learned[end] == 0) return static_cast<std::int64_t>(end) + 1;
  }
  return 0;
}

void TokenDataset::require_document_ends() const {
  for (const TokenShard& shard : shards_) {
    if (shard.end_of_document_id() < 0) {
      fail(Exit::bad_file,
           "%s: does not say where documents end (end_of_document_id), which --document-mask has to know. Prepare the "
           "text "
           "again, with a token for that (--eos)",
           escaped(shard.path()).c_str());
    }
    if (shard.end_of_document_id() != shards_.front().end_of_document_id()) {
      fail(Exit::bad_file, "%s: end_of_document_id: got %lld, but %s has %lld. Prepare all shards with one --eos",
           escaped(shard.path()).c_str(), static_cast<long long>(shard.end_of_document_id()),
           escaped(shards_.front().path()).c_str(), static_cast<long long>(shards_.front().end_of_document_id()));
    }
  }
}

// Reads every token, as validation that measures all of them will do.
void TokenDataset::count_unlearned_ends() {
  constexpr std::int64_t kPiece = 1 << 18;  // tokens that are read at once
  std::vector<std::int32_t> ids;
  for (const Text& text : texts_) {
    for (std::int64_t begin = text.begin; begin < text.end - 1; begin += kPiece) {
      ids.resize(static_cast<std::size_t>(std::min(kPiece, text.end - 1 - begin)));
      read(begin, ids);
      unlearned_ends_ +=
          std::count(ids.begin(), ids.end(), static_cast<std::int32_t>(shards_.front().end_of_document_id()));
    }
  }
}

double TokenDataset::attention_share() const {
  if (windows_ == 0) return 1;
  std::int64_t tiles = 0;
  std::vector<std::int64_t> lengths;
  for (std::size_t r = 0; r < rows_.count(); ++r) {
    lengths.clear();
    for (const std::size_t document : rows_.row(r)) lengths.push_back(documents_[document].tokens - 1);
    tiles += visible_tiles(lengths, seq_len_, kTile);
  }
  const std::int64_t whole_row = visible_tiles({}, seq_len_, kTile);
  return static_cast<double>(tiles) / (static_cast<double>(whole_row) * static_cast<double>(windows_));
}

void TokenDataset::require_windows(const std::string& pattern) const {
  if (windows_ > 0 && labels() > 0) return;
  if (of_pairs()) {
    fail(Exit::bad_file,
         "%s: of %lld pairs %lld have more than --seq-len %lld tokens, and in the others nothing is learned. Raise "
         "--seq-len",
         escaped(pattern).c_str(), static_cast<long long>(too_long_ + unlearned_), static_cast<long long>(too_long_),
         static_cast<long long>(seq_len_));
  }
  if (of_documents()) {
    fail(Exit::bad_file,
         "%s: of %lld conversations %lld have no answer that ends within --seq-len %lld, and in the others nothing is "
         "learned. Raise --seq-len, or prepare them with this --seq-len and --truncate",
         escaped(pattern).c_str(), static_cast<long long>(too_long_ + unlearned_), static_cast<long long>(too_long_),
         static_cast<long long>(seq_len_));
  }
  const std::string what = format("%s: %lld tokens", escaped(pattern).c_str(), static_cast<long long>(tokens()));
  if (windows_ > 0) {
    fail(Exit::bad_file, "%s, each of them a document: with --document-mask there is nothing to learn. Leave it out",
         what.c_str());
  }
  if (use_ == WindowUse::measurement) {
    fail(Exit::bad_file,
         "%s, at least 2 in a shard are needed: a loss is that of a token after another one. Give more text",
         what.c_str());
  }
  fail(Exit::bad_file, "%s, at least %lld are needed for --seq-len %lld. Lower --seq-len, or give more text",
       what.c_str(), static_cast<long long>(seq_len_ + 1), static_cast<long long>(seq_len_));
}

std::uint64_t TokenDataset::windows_of(const Text& text) const {
  const std::int64_t labels = text.end - text.begin - 1;
  return static_cast<std::uint64_t>(use_ == WindowUse::training ? labels / seq_len_ : ceil_div(labels, seq_len_));
}

std::int64_t TokenDataset::left_out() const {
  return of_documents() || use_ == WindowUse::measurement ? 0 : tokens() - std::ssize(texts_) - labels();
}

std::int64_t TokenDataset::labels() const {
  if (of_documents()) return learned_;
  return use_ == WindowUse::training ? static_cast<std::int64_t>(windows_) * seq_len_
                                     : tokens() - std::ssize(texts_) - unlearned_ends_;
}

std::string TokenDataset::directory() const {
  return parent_directory(shards_.front().path());
}

void TokenDataset::read_window(std::uint64_t window, std::span<std::int32_t> tokens, std::span<std::int32_t> labels,
                               std::span<std::int32_t> document_starts) const {
  if (document_starts.empty() == masks_documents()) {
    fail(Exit::internal, "window %llu: read %s where documents begin", static_cast<unsigned long long>(window),
         masks_documents() ? "without" : "with");
  }
  const std::size_t count =
      of_documents() ? read_documents(window, tokens, labels, document_starts) : read_text(window, tokens, labels);
  if (!of_documents() && options_.document_mask) {
    part_documents(tokens.first(count), labels.first(count), document_starts.first(count));
  }
  for (std::size_t t = count; t < tokens.size(); ++t) tokens[t] = tokens[t - count];
  std::fill(labels.begin() + static_cast<std::ptrdiff_t>(count), labels.end(), kIgnoredLabel);
  for (std::size_t t = count; t < document_starts.size(); ++t) document_starts[t] = static_cast<std::int32_t>(count);
}

MicroBatch TokenDataset::make_batch(std::int64_t rows) const {
  const auto size = static_cast<std::size_t>(rows * seq_len_);
  return {std::vector<std::int32_t>(size), std::vector<std::int32_t>(size),
          std::vector<std::int32_t>(masks_documents() ? size : 0),
          std::vector<std::uint64_t>(static_cast<std::size_t>(rows))};
}

void TokenDataset::read_row(std::uint64_t window, MicroBatch& batch, std::int64_t row) const {
  const auto T = static_cast<std::size_t>(seq_len_), begin = static_cast<std::size_t>(row) * T;
  const auto of_row = [&](std::vector<std::int32_t>& all) {
    return all.empty() ? std::span<std::int32_t>() : std::span(all).subspan(begin, T);
  };
  read_window(window, of_row(batch.tokens), of_row(batch.labels), of_row(batch.document_starts));
  batch.windows[static_cast<std::size_t>(row)] = window;
}

// These three read what a window or a document has, and return how many inputs and labels that is.
std::size_t TokenDataset::read_documents(std::uint64_t window, std::span<std::int32_t> tokens,
                                         std::span<std::int32_t> labels,
                                         std::span<std::int32_t> document_starts) const {
  std::size_t begin = 0;
  for (const std::size_t document : rows_.row(window)) {
    const std::size_t count = read_document(documents_[document], tokens.subspan(begin), labels.subspan(begin));
    if (!document_starts.empty()) {
      const std::span<std::int32_t> own = document_starts.subspan(begin, count);
      std::fill(own.begin(), own.end(), static_cast<std::int32_t>(begin));
    }
    begin += count;
  }
  return begin;
}

std::size_t TokenDataset::read_document(const Document& document, std::span<std::int32_t> tokens,
                                        std::span<std::int32_t> labels) const {
  const TokenShard& shard = shards_[document.shard];
  const auto count = static_cast<std::size_t>(document.tokens - 1);
  std::vector<std::uint8_t> learned(count);
  shard.read(document.begin, tokens.first(count));
  shard.read(document.begin + 1, labels.first(count));
  shard.read_learned(document.begin + 1, learned);
  for (std::size_t t = 0; t < count; ++t) {
    if (learned[t] == 0) labels[t] = kIgnoredLabel;
  }
  return count;
}

// Of a window of plain text: the first token of a document is no label, since the document before it does not predict it.
void TokenDataset::part_documents(std::span<const std::int32_t> tokens, std::span<std::int32_t> labels,
                                  std::span<std::int32_t> document_starts) const {
  std::size_t start = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    document_starts[t] = static_cast<std::int32_t>(start);
    if (tokens[t] != shards_.front().end_of_document_id()) continue;
    labels[t] = kIgnoredLabel;
    start = t + 1;
  }
}

std::size_t TokenDataset::read_text(std::uint64_t window, std::span<std::int32_t> tokens,
                                    std::span<std::int32_t> labels) const {
  const auto after = std::upper_bound(texts_.begin(), texts_.end(), window,
                                      [](std::uint64_t w, const Text& text) { return w < text.first_window; });
  const Text& text = *(after - 1);
  const std::int64_t begin = text.begin + static_cast<std::int64_t>(window - text.first_window) * seq_len_;
  const auto count = static_cast<std::size_t>(std::min(seq_len_, text.end - 1 - begin));
  read(begin, tokens.first(count));
  read(begin + 1, labels.first(count));
  return count;
}

// Tokens from number `begin` of all shards on: those of a joined text may lie in several.
void TokenDataset::read(std::int64_t begin, std::span<std::int32_t> tokens) const {
  auto shard = static_cast<std::size_t>(std::upper_bound(first_token_.begin(), first_token_.end(), begin) -
                                        first_token_.begin() - 1);
  for (; !tokens.empty(); ++shard) {
    const auto count = std::min(tokens.size(), static_cast<std::size_t>(first_token_[shard + 1] - begin));
    shards_[shard].read(begin - first_token_[shard], tokens.first(count));
    begin += static_cast<std::int64_t>(count);
    tokens = tokens.subspan(count);
  }
}

void TokenDataset::verify() const {
  for (const TokenShard& shard : shards_) shard.verify();
}

std::uint64_t TokenDataset::spread_window(std::uint64_t row, std::uint64_t rows, std::uint64_t windows) {
  __extension__ using Wide = unsigned __int128;  // a product of two counts of windows may need more than 64 bits
  return static_cast<std::uint64_t>(static_cast<Wide>(row) * windows / rows);
}

Json TokenDataset::fingerprint() const {
  Json list = Json::array();
  for (const TokenShard& shard : shards_) {
    list.push_back({{"name", utf8_replace_invalid(std::filesystem::path(shard.path()).filename().string())},
                    {"tokens", shard.count()},
                    {"xxh3", header_hash(shard)}});
  }
  return list;
}

DataLoader::DataLoader(const TokenDataset& data, std::int64_t micro_batch, std::uint64_t seed, std::uint64_t position,
                       DataShare share)
    : data_(data),
      micro_batch_(micro_batch),
      order_(data.windows(), seed),
      share_(share),
      begin_(position),
      position_(position),
      thread_([this] { read_ahead(); }) {}

DataLoader::~DataLoader() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

MicroBatch DataLoader::read(std::uint64_t position) const {
  MicroBatch batch = data_.make_batch(micro_batch_);
  for (std::int64_t b = 0; b < micro_batch_; ++b) {
    data_.read_row(order_.window_at(position + static_cast<std::uint64_t>(b)), batch, b);
  }
  return batch;
}

std::uint64_t DataLoader::position_of(std::uint64_t batch) const {
  const auto share = static_cast<std::uint64_t>(share_.micro_batches);
  const std::uint64_t step = batch / share, within = batch % share;
  const auto ranks = static_cast<std::uint64_t>(share_.ranks), rank = static_cast<std::uint64_t>(share_.rank);
  return begin_ + ((step * ranks + rank) * share + within) * static_cast<std::uint64_t>(micro_batch_);
}

void DataLoader::read_ahead() {
  try {
    for (std::uint64_t number = 0;; ++number) {
      MicroBatch batch = read(position_of(number));
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || ready_.size() < kReadyBatches; });
      if (stop_) return;
      ready_.push_back(std::move(batch));
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

MicroBatch DataLoader::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !ready_.empty() || error_ != nullptr; });
  if (ready_.empty()) std::rethrow_exception(error_);
  MicroBatch batch = std::move(ready_.front());
  ready_.pop_front();
  changed_.notify_all();
  position_ += static_cast<std::uint64_t>(share_.ranks * micro_batch_);
  return batch;
}

}  // namespace weft
