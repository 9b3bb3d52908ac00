// Pages of keys and values, and who uses them: reference counts, block tables, and the prefix cache.
//
// A page holds page_size positions of one sequence. Once it is full, its content is a function of the ids from the sequence's
// first to the page's last, so it can be named by (name of the page before, its own ids), and a sequence that begins with the
// same ids uses it instead of computing it again. Only full pages are shared, and no position of a full page is written
// again: there is nothing to copy on write. Pages that nobody uses but that have a name are kept until their memory is
// needed, the least recently used first.
//
// A name is a number that is given to one pair (name of the page before, ids) and never again. The table compares
// complete pairs, so a collision of hashes cannot make two different prefixes share a page.
//
// Knows no device: a page is an index. All memory is allocated by the constructor. For one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace weft {

class PagePool {
 public:
  // A prefix of whole pages. kNoPrefix is the empty one, the name before a sequence's first page.
  using Name = std::uint64_t;
  static constexpr Name kNoPrefix = 0;

  PagePool(std::int64_t num_pages, std::int64_t page_size);

  std::int64_t num_pages() const { return static_cast<std::int64_t>(users_.size()); }
  std::int64_t page_size() const { return page_size_; }
  std::int64_t available() const { return free_count_ + cached_; }  // what take() can give
  std::int64_t in_use() const { return num_pages() - available(); }
  std::int32_t users(std::int32_t page) const { return users_[static_cast<std::size_t>(page)]; }
  std::int64_t cached() const { return cached_; }  // without users, kept for a prefix that may come again

  // A page with one user and no name: a free one, or the cached one that was used least recently. -1 if all are in use.
  std::int32_t take();
  // One more user of a page that is in use or cached.
  void share(std::int32_t page);
  // One user less. Without users a page is cached if it has a name, and free otherwise.
  void release(std::int32_t page);

  struct Found {
    std::int32_t page;
    Name name;
  };
  // The page that holds `ids` (page_size of them) after the prefix `before`. It gets no new user.
  std::optional<Found> find(Name before, std::span<const std::int32_t> ids) const;
  // Says that `page`, in use and without a name, is full and holds `ids` after `before`. Returns the name of the longer
  // prefix. If another page has it already, this one stays without a name and is free once it is released.
  Name name_page(std::int32_t page, Name before, std::span<const std::int32_t> ids);
  // Takes the name of a page in use away: find() does not find it any more.
  void forget(std::int32_t page);

  // Empty if reference counts, free list, order of use and table of names agree; otherwise what does not. Reads everything:
  // for tests.
  std::string inconsistency() const;

 private:
  static constexpr std::int32_t kNone = -1;

  std::span<const std::int32_t> ids_of(std::int32_t page) const;
  std::size_t bucket_of(Name before, std::span<const std::int32_t> ids) const;
  void unlink_from_cache(std::int32_t page);

  std::int64_t page_size_;
  std::vector<std::int32_t> users_;  // by page
  // Names, by page: 0 for a page without one. Pages of one bucket are linked through next_in_bucket_.
  std::vector<Name> name_, before_;
  std::vector<std::int32_t> ids_;  // [num_pages, page_size]
  std::vector<std::int32_t> bucket_, next_in_bucket_;
  Name last_name_ = kNoPrefix;
  // Free pages are a list through newer_, cached pages a list from the least to the most recently used.
  std::vector<std::int32_t> newer_, older_;
  std::int32_t first_free_ = kNone, least_recent_ = kNone, most_recent_ = kNone;
  std::int64_t free_count_ = 0, cached_ = 0;
};

// The pages of one sequence, and the name of what it has filled. Its positions are appended in order.
class BlockTable {
 public:
  explicit BlockTable(PagePool& pool) : pool_(pool) {}
  ~BlockTable() { release(); }
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // Reserves memory for this many pages, so that grow() allocates none.
  void reserve(std::int64_t pages) { pages_.reserve(static_cast<std::size_t>(pages)); }

  // -1: given back by release_before().
  std::span<const std::int32_t> pages() const { return pages_; }
  std::int64_t held() const { return std::ssize(pages_) - released_; }
  // Pages that are missing for `positions` positions.
  std::int64_t missing(std::int64_t positions) const;
  // Takes the missing pages. False, with none of them taken, if the pool has too few.
  bool grow(std::int64_t positions);

  // Appends shared pages that hold the ids behind the filled pages, as far as they lie within the first
  // `limit` positions. Does nothing unless the table is empty or ends with a full and named page. Returns the
  // positions that the table then covers.
  std::int64_t extend_by_prefix(std::span<const std::int32_t> ids, std::int64_t limit);
  // The number of pages that extend_by_prefix() would append, and how many of them are cached: take() could give those
  // out now, but not afterwards.
  struct PrefixHit {
    std::int64_t pages = 0, cached = 0;
  };
  PrefixHit prefix_hit(std::span<const std::int32_t> ids, std::int64_t limit) const;

  // Whether both sequences have filled the same prefix, this one has no page behind it yet, and both continue with the
  // same ids in the next page. Each sequence must have the ids of one more full page.
  bool has_same_next_page(std::span<const std::int32_t> ids, const BlockTable& other,
                          std::span<const std::int32_t> other_ids) const;

  // Names the pages that the first `positions` positions fill. `ids`: the sequence's, at least `positions` of them.
  void name_full_pages(std::span<const std::int32_t> ids, std::int64_t positions);

  // Releases the pages that lie wholly in front of `position`, for a sequence of which no row reads them again. Those that have
  // names keep them, so others find them until their memory is needed.
  void release_before(std::int64_t position);

  // Releases all pages, the last one first, so that a cached prefix is kept longer than what continues it. `forget`:
  // takes their names away, for a sequence whose content is not to be trusted.
  void release(bool forget = false);

 private:
  std::span<const std::int32_t> ids_of_page(std::span<const std::int32_t> ids, std::int64_t page) const;

  PagePool& pool_;
  std::vector<std::int32_t> pages_;
  std::int64_t named_ = 0;     // pages that name_full_pages() or extend_by_prefix() has processed
  std::int64_t released_ = 0;  // pages that release_before() has given back
  PagePool::Name name_ = PagePool::kNoPrefix;
};

}  // namespace weft
