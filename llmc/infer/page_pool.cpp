#include "llmc/infer/page_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"

namespace weft {

namespace {

std::size_t at(std::int32_t page) {
  return static_cast<std::size_t>(page);
}

}  // namespace

PagePool::PagePool(std::int64_t num_pages, std::int64_t page_size) : page_size_(page_size) {
  if (num_pages < 1 || page_size < 1 || num_pages > INT32_MAX) {
    fail(Exit::internal, "page pool: got %lld pages of %lld positions", static_cast<long long>(num_pages),
         static_cast<long long>(page_size));
  }
  const auto count = static_cast<std::size_t>(num_pages);
  users_.assign(count, 0);
  name_.assign(count, kNoPrefix);
  before_.assign(count, kNoPrefix);
  ids_.assign(count * static_cast<std::size_t>(page_size), 0);
  bucket_.assign(std::bit_ceil(count), kNone);
  next_in_bucket_.assign(count, kNone);
  newer_.assign(count, kNone);
  older_.assign(count, kNone);
  for (std::int32_t page = static_cast<std::int32_t>(num_pages) - 1; page >= 0; --page) {
    newer_[at(page)] = first_free_;
    first_free_ = page;
  }
  free_count_ = num_pages;
}

std::int32_t PagePool::take() {
  std::int32_t page = first_free_;
  if (page != kNone) {
    first_free_ = newer_[at(page)];
    --free_count_;
  } else if (least_recent_ != kNone) {
    page = least_recent_;
    unlink_from_cache(page);
  } else {
    return kNone;
  }
  users_[at(page)] = 1;
  forget(page);
  return page;
}

void PagePool::share(std::int32_t page) {
  if (users_[at(page)]++ == 0) unlink_from_cache(page);
}

void PagePool::release(std::int32_t page) {
  if (users_[at(page)] <= 0) fail(Exit::internal, "page pool: page %d is released without a user", page);
  if (--users_[at(page)] > 0) return;
  if (name_[at(page)] == kNoPrefix) {
    newer_[at(page)] = first_free_;
    first_free_ = page;
    ++free_count_;
    return;
  }
  older_[at(page)] = most_recent_;
  newer_[at(page)] = kNone;
  (most_recent_ == kNone ? least_recent_ : newer_[at(most_recent_)]) = page;
  most_recent_ = page;
  ++cached_;
}

void PagePool::unlink_from_cache(std::int32_t page) {
  const std::int32_t older = older_[at(page)], newer = newer_[at(page)];
  (older == kNone ? least_recent_ : newer_[at(older)]) = newer;
  (newer == kNone ? most_recent_ : older_[at(newer)]) = older;
  --cached_;
}

std::span<const std::int32_t> PagePool::ids_of(std::int32_t page) const {
  const auto size = static_cast<std::size_t>(page_size_);
  return std::span(ids_).subspan(at(page) * size, size);
}

std::size_t PagePool::bucket_of(Name before, std::span<const std::int32_t> ids) const {
  const SeededHash hash;
  const std::size_t of_ids = hash(std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size_bytes()));
  return hash(std::uint64_t{of_ids ^ hash(before)}) & (bucket_.size() - 1);
}

std::optional<PagePool::Found> PagePool::find(Name before, std::span<const std::int32_t> ids) const {
  for (std::int32_t page = bucket_[bucket_of(before, ids)]; page != kNone; page = next_in_bucket_[at(page)]) {
    if (before_[at(page)] == before && std::ranges::equal(ids_of(page), ids)) return Found{page, name_[at(page)]};
  }
  return std::nullopt;
}

PagePool::Name PagePool::name_page(std::int32_t page, Name before, std::span<const std::int32_t> ids) {
  if (users_[at(page)] <= 0 || name_[at(page)] != kNoPrefix || std::ssize(ids) != page_size_) {
    fail(Exit::internal, "page pool: page %d cannot be named", page);
  }
  if (const std::optional<Found> found = find(before, ids)) return found->name;
  std::ranges::copy(ids, ids_.begin() + static_cast<std::ptrdiff_t>(at(page)) * page_size_);
  before_[at(page)] = before;
  name_[at(page)] = ++last_name_;
  std::int32_t& head = bucket_[bucket_of(before, ids)];
  next_in_bucket_[at(page)] = head;
  head = page;
  return last_name_;
}

void PagePool::forget(std::int32_t page) {
  if (name_[at(page)] == kNoPrefix) return;
  std::int32_t* link = &bucket_[bucket_of(before_[at(page)], ids_of(page))];
  while (*link != page) link = &next_in_bucket_[at(*link)];
  *link = next_in_bucket_[at(page)];
  name_[at(page)] = kNoPrefix;
}

std::string PagePool::inconsistency() const {
  std::vector<int> seen(users_.size(), 0);
  std::int64_t count = 0;
  for (std::int32_t page = first_free_; page != kNone && count <= num_pages(); page = newer_[at(page)], ++count) {
    if (users_[at(page)] != 0 || name_[at(page)] != kNoPrefix) return format("free page %d has users or a name", page);
    ++seen[at(page)];
  }
  if (count != free_count_) return format("the free list has %lld pages", static_cast<long long>(count));
  count = 0;
  std::int32_t before = kNone;
  for (std::int32_t page = least_recent_; page != kNone && count <= num_pages(); page = newer_[at(page)], ++count) {
    if (users_[at(page)] != 0 || name_[at(page)] == kNoPrefix) return format("cached page %d: users or no name", page);
    if (older_[at(page)] != before) return format("cached page %d: its links differ", page);
    before = page;
    ++seen[at(page)];
  }
  if (count != cached_ || before != most_recent_) return "the cached pages are not one list";
  for (std::int32_t page = 0; page < num_pages(); ++page) {
    if (seen[at(page)] != (users_[at(page)] == 0 ? 1 : 0)) return format("page %d: in %d lists", page, seen[at(page)]);
    if (name_[at(page)] == kNoPrefix) continue;
    const std::optional<Found> found = find(before_[at(page)], ids_of(page));
    if (!found.has_value() || found->page != page) return format("page %d: not found by its name", page);
  }
  return "";
}

std::int64_t BlockTable::missing(std::int64_t positions) const {
  const std::int64_t needed = (positions + pool_.page_size() - 1) / pool_.page_size();
  return std::max<std::int64_t>(needed - std::ssize(pages_), 0);
}

bool BlockTable::grow(std::int64_t positions) {
  const std::int64_t count = missing(positions);
  if (count > pool_.available()) return false;
  for (std::int64_t i = 0; i < count; ++i) pages_.push_back(pool_.take());
  return true;
}

std::span<const std::int32_t> BlockTable::ids_of_page(std::span<const std::int32_t> ids, std::int64_t page) const {
  const auto size = static_cast<std::size_t>(pool_.page_size());
  return ids.subspan(static_cast<std::size_t>(page) * size, size);
}

BlockTable::PrefixHit BlockTable::prefix_hit(std::span<const std::int32_t> ids, std::int64_t limit) const {
  PrefixHit hit;
  if (named_ != std::ssize(pages_)) return hit;
  PagePool::Name name = name_;
  for (std::int64_t page = named_; (page + 1) * pool_.page_size() <= limit; ++page) {
    const std::optional<PagePool::Found> found = pool_.find(name, ids_of_page(ids, page));
    if (!found.has_value()) break;
    name = found->name;
    ++hit.pages;
    if (pool_.users(found->page) == 0) ++hit.cached;
  }
  return hit;
}

std::int64_t BlockTable::extend_by_prefix(std::span<const std::int32_t> ids, std::int64_t limit) {
  if (named_ == std::ssize(pages_)) {
    for (; (named_ + 1) * pool_.page_size() <= limit; ++named_) {
      const std::optional<PagePool::Found> found = pool_.find(name_, ids_of_page(ids, named_));
      if (!found.has_value()) break;
      pool_.share(found->page);
      pages_.push_back(found->page);
      name_ = found->name;
    }
  }
  return std::ssize(pages_) * pool_.page_size();
}

bool BlockTable::has_same_next_page(std::span<const std::int32_t> ids, const BlockTable& other,
                                    std::span<const std::int32_t> other_ids) const {
  return named_ == std::ssize(pages_) && named_ == other.named_ && name_ == other.name_ &&
         std::ranges::equal(ids_of_page(ids, named_), other.ids_of_page(other_ids, named_));
}

void BlockTable::name_full_pages(std::span<const std::int32_t> ids, std::int64_t positions) {
  for (; (named_ + 1) * pool_.page_size() <= positions; ++named_) {
    name_ = pool_.name_page(pages_[static_cast<std::size_t>(named_)], name_, ids_of_page(ids, named_));
  }
}

void BlockTable::release_before(std::int64_t position) {
  for (; (released_ + 1) * pool_.page_size() <= position && released_ < std::ssize(pages_); ++released_) {
    pool_.release(std::exchange(pages_[static_cast<std::size_t>(released_)], -1));
  }
}

void BlockTable::release(bool forget) {
  for (; held() > 0; pages_.pop_back()) {
    if (forget) pool_.forget(pages_.back());
    pool_.release(pages_.back());
  }
  pages_.clear();
  named_ = released_ = 0;
  name_ = PagePool::kNoPrefix;
}

}  // namespace weft
