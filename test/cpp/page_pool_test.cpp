#include "llmc/infer/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "llmc/base/error.h"
#include "test/cpp/test_files.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

Ids counted(std::int64_t count, std::int32_t first = 10) {
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(first + static_cast<std::int32_t>(i));
  return ids;
}

// A sequence that computes `ids`: takes what is shared, computes the rest. Returns the positions that it found.
std::int64_t compute(BlockTable& table, const Ids& ids) {
  const std::int64_t found = table.extend_by_prefix(ids, std::ssize(ids));
  EXPECT_TRUE(table.grow(std::ssize(ids)));
  table.name_full_pages(ids, std::ssize(ids));
  return found;
}

TEST(PagePool, EveryPageIsGivenOutOnceAndComesBack) {
  PagePool pool(5, 2);
  std::set<std::int32_t> pages;
  for (int i = 0; i < 5; ++i) pages.insert(pool.take());
  EXPECT_EQ(pages, (std::set<std::int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(pool.take(), -1);
  EXPECT_EQ(pool.in_use(), 5);
  pool.share(3);
  pool.release(3);
  EXPECT_EQ(pool.take(), -1);  // one user is left
  pool.release(3);
  EXPECT_EQ(pool.take(), 3);
  for (const std::int32_t page : pages) pool.release(page);
  EXPECT_EQ(pool.available(), 5);
  EXPECT_EQ(pool.inconsistency(), "");
  error_of(Exit::internal, [&] { pool.release(0); });
}

TEST(PagePool, SizesThatCannotBe) {
  error_of(Exit::internal, [] { PagePool(0, 4); });
  error_of(Exit::internal, [] { PagePool(4, 0); });
  error_of(Exit::internal, [] { PagePool(std::int64_t{1} << 31, 4); });
}

TEST(PagePool, ASequenceFindsTheFullPagesOfAnother) {
  PagePool pool(16, 4);
  const Ids ids = counted(11);
  BlockTable first(pool), second(pool), third(pool);
  EXPECT_EQ(compute(first, ids), 0);
  EXPECT_EQ(compute(second, ids), 8);  // two full pages; the third is not full
  EXPECT_EQ(first.pages()[0], second.pages()[0]);
  EXPECT_EQ(first.pages()[1], second.pages()[1]);
  EXPECT_NE(first.pages()[2], second.pages()[2]);
  EXPECT_EQ(pool.in_use(), 4);
  Ids other = ids;
  other[5] = 0;
  EXPECT_EQ(compute(third, other), 4);
  first.release();
  second.release();
  third.release();
  EXPECT_EQ(pool.cached(), 3);
  EXPECT_EQ(pool.in_use(), 0);
  EXPECT_EQ(pool.inconsistency(), "");
  EXPECT_EQ(second.prefix_hit(ids, 11).pages, 2);
  EXPECT_EQ(second.prefix_hit(ids, 11).cached, 2);
  EXPECT_EQ(second.prefix_hit(ids, 7).pages, 1);  // the limit is not at the end of a page
}

// The same ids after another prefix are another page. With two pages there are two buckets, so that names meet in them, as
// those of colliding hashes would.
TEST(PagePool, ANameIsTheWholePrefix) {
  for (std::int32_t trial = 0; trial < 20; ++trial) {
    PagePool pool(2, 2);
    BlockTable table(pool), probe(pool);
    const Ids ids = {trial, 1, 7, 7};
    compute(table, ids);
    EXPECT_EQ(probe.prefix_hit(ids, 4).pages, 2);
    EXPECT_EQ(probe.prefix_hit(Ids{7, 7, 7, 7}, 4).pages, 0);
    EXPECT_EQ(probe.prefix_hit(Ids{trial, 2, 7, 7}, 4).pages, 0);
    EXPECT_EQ(probe.prefix_hit(Ids{trial, 1, 7, 8}, 4).pages, 1);
    for (PagePool::Name before = 2; before < 30; ++before) EXPECT_EQ(pool.find(before, Ids{7, 7}), std::nullopt);
  }
}

TEST(PagePool, TheLeastRecentlyUsedPrefixIsGivenUpFirstAndItsEndBeforeItsBeginning) {
  PagePool pool(4, 2);
  const Ids old = counted(4, 10), recent = counted(4, 20);
  BlockTable a(pool), b(pool);
  compute(b, recent);
  compute(a, old);
  a.release();
  b.release();
  EXPECT_EQ(pool.cached(), 4);
  BlockTable probe(pool);
  pool.take();
  EXPECT_EQ(probe.prefix_hit(old, 4).pages, 1);
  {
    BlockTable again(pool);
    EXPECT_EQ(again.extend_by_prefix(old, 4), 2);  // used again: now the other one is older
  }
  pool.take();
  EXPECT_EQ(probe.prefix_hit(old, 4).pages, 1);
  EXPECT_EQ(probe.prefix_hit(recent, 4).pages, 1);
  pool.take();
  EXPECT_EQ(probe.prefix_hit(recent, 4).pages, 0);
  pool.take();
  EXPECT_EQ(probe.prefix_hit(old, 4).pages, 0);
  EXPECT_EQ(pool.take(), -1);
  EXPECT_EQ(pool.inconsistency(), "");
}

TEST(PagePool, APageInUseIsNeverGivenUp) {
  PagePool pool(2, 2);
  BlockTable a(pool), b(pool);
  compute(a, counted(2));
  EXPECT_EQ(compute(b, counted(2)), 2);
  a.release();
  EXPECT_NE(pool.take(), -1);
  EXPECT_EQ(pool.take(), -1);
  EXPECT_FALSE(b.grow(4));
  EXPECT_EQ(b.pages().size(), 1u);
}

TEST(PagePool, GrowingTakesAllPagesOrNone) {
  PagePool pool(3, 2);
  BlockTable table(pool);
  EXPECT_TRUE(table.grow(3));
  EXPECT_EQ(table.missing(6), 1);
  EXPECT_FALSE(table.grow(7));
  EXPECT_EQ(pool.in_use(), 2);
  EXPECT_TRUE(table.grow(6));
  EXPECT_EQ(table.missing(6), 0);
}

// Two sequences that compute the same prefix at the same time: the first one names its pages, and what the second one adds
// continues that name.
TEST(PagePool, AThirdSequenceFindsWhatTwoComputedAtTheSameTime) {
  PagePool pool(8, 2);
  const Ids shorter = counted(2), longer = counted(4);
  BlockTable first(pool), second(pool), third(pool);
  EXPECT_TRUE(first.grow(2) && second.grow(4));
  first.name_full_pages(shorter, 2);
  second.name_full_pages(longer, 4);
  EXPECT_EQ(third.extend_by_prefix(longer, 4), 4);
  EXPECT_EQ(third.pages()[0], first.pages()[0]);
  EXPECT_EQ(third.pages()[1], second.pages()[1]);
  second.release();
  EXPECT_EQ(pool.in_use(), 2);
  first.release();
  third.release();
  EXPECT_EQ(pool.inconsistency(), "");
}

// What lies in front of a window is free while the sequence goes on; what has a name is found by others.
TEST(PagePool, PagesInFrontOfAPositionAreGivenBack) {
  PagePool pool(5, 2);
  BlockTable table(pool), other(pool);
  compute(table, counted(7));
  const std::vector<std::int32_t> pages(table.pages().begin(), table.pages().end());
  table.release_before(1);
  EXPECT_EQ(table.held(), 4);
  table.release_before(5);
  table.release_before(3);
  EXPECT_EQ(table.held(), 2);
  EXPECT_EQ(Ids(table.pages().begin(), table.pages().end()), (Ids{-1, -1, pages[2], pages[3]}));
  EXPECT_EQ(pool.in_use(), 2);
  EXPECT_EQ(pool.cached(), 2);
  EXPECT_EQ(other.extend_by_prefix(counted(7), 7), 6);
  EXPECT_EQ(Ids(other.pages().begin(), other.pages().end()), Ids(pages.begin(), pages.begin() + 3));
  other.release();

  EXPECT_TRUE(table.grow(13));  // into the pages that it has given back
  EXPECT_FALSE(other.grow(1));
  table.name_full_pages(counted(13), 13);
  table.release_before(100);
  EXPECT_EQ(table.held(), 0);
  table.release();
  EXPECT_TRUE(table.pages().empty());
  EXPECT_EQ(pool.in_use(), 0);
  EXPECT_EQ(pool.inconsistency(), "");
  EXPECT_TRUE(table.grow(10));
  EXPECT_EQ(table.held(), 5);
}

TEST(PagePool, WhatIsForgottenIsNotFound) {
  PagePool pool(4, 2);
  BlockTable a(pool), b(pool);
  compute(a, counted(4));
  a.release(/*forget=*/true);
  EXPECT_EQ(b.prefix_hit(counted(4), 4).pages, 0);
  EXPECT_EQ(pool.cached(), 0);
  EXPECT_EQ(pool.available(), 4);
  EXPECT_EQ(pool.inconsistency(), "");
}

// Against a model of the cache that is written with maps: random sequences come, grow, and go.
TEST(PagePool, RandomSequencesFindWhatIsThere) {
  constexpr std::int64_t kPage = 3;
  std::mt19937 random(1);
  PagePool pool(24, kPage);
  struct Live {
    explicit Live(PagePool& pool) : table(pool) {}
    BlockTable table;
    Ids ids;
  };
  std::deque<std::unique_ptr<Live>> live;
  std::map<std::int32_t, Ids>
      content;  // by page: the ids from the first on, for pages that were full when they were filled
  std::int64_t found = 0;
  for (int i = 0; i < 20000; ++i) {
    if (live.size() < 4 && random() % 2 == 0) {
      auto next = std::make_unique<Live>(pool);
      for (std::int64_t length = 1 + random() % 15; length > 0; --length) {
        next->ids.push_back(static_cast<std::int32_t>(random() % 2));
      }
      const std::int64_t covered = next->table.extend_by_prefix(next->ids, std::ssize(next->ids));
      found += covered;
      for (std::int64_t page = 0; page < covered / kPage; ++page) {
        const Ids prefix(next->ids.begin(), next->ids.begin() + (page + 1) * kPage);
        ASSERT_EQ(content[next->table.pages()[static_cast<std::size_t>(page)]], prefix);
      }
      live.push_back(std::move(next));
    } else if (!live.empty()) {
      Live& one = *live[random() % live.size()];
      if (one.table.grow(std::ssize(one.ids))) {
        one.table.name_full_pages(one.ids, std::ssize(one.ids));
        for (std::size_t page = 0; page < one.table.pages().size(); ++page) {
          const std::size_t end = std::min((page + 1) * kPage, one.ids.size());
          content[one.table.pages()[page]] = Ids(one.ids.begin(), one.ids.begin() + static_cast<std::ptrdiff_t>(end));
        }
      }
      one.ids.push_back(static_cast<std::int32_t>(random() % 2));
      if (random() % 4 == 0) live.erase(live.begin() + static_cast<std::ptrdiff_t>(random() % live.size()));
    }
    if (i % 50 == 0) {
      ASSERT_EQ(pool.inconsistency(), "");
    }
  }
  EXPECT_GT(found, 1000);
  live.clear();
  EXPECT_EQ(pool.in_use(), 0);
  EXPECT_EQ(pool.inconsistency(), "");
}

}  // namespace
}  // namespace weft
