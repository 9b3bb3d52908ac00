// Pages that several neighbouring rows see in full are read once for up to kGroupRows of them; those at the rows' own
// positions, and where their windows begin, are taken row by row. Every row does the same operations in the same order either
// way.
#include "llmc/cpu/paged_attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "llmc/base/ceil_div.h"
#include "llmc/cpu/dot_products.h"
#include "llmc/cpu/exp.h"
#include "llmc/model/visibility.h"

namespace weft::cpu {

namespace {

constexpr int kGroupRows = 4, kKeys = 3;

// The running softmax of one row and head.
struct RowState {
  float* out;  // [HS]: sum of e^(score - maximum) v
  float maximum = -std::numeric_limits<float>::infinity();
  float sum = 0;
  float factor = 0;  // brings `out` to the maximum: 0 for the first page
};

// Turns the scores of `count` keys into weights.
void take_scores(RowState& row, float* scores, std::int64_t count, float scale) {
  float maximum = row.maximum;
#pragma omp simd reduction(max : maximum)
  for (std::int64_t j = 0; j < count; ++j) {
    scores[j] *= scale;
    maximum = scores[j] > maximum ? scores[j] : maximum;
  }
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) scores[j] = exp_f32(scores[j] - maximum);
  row.factor = exp_f32(row.maximum - maximum);
  row.sum = multiply_add(row.sum, row.factor, sum_of(scores, count));
  row.maximum = maximum;
}

template <int Rows, int Keys>
void score_block(float* const* scores, const float* q, std::int64_t q_stride, const float* keys, std::int64_t first,
                 std::int64_t HS) {
  float sums[Rows][Keys];
  dot_products(sums, q, q_stride, keys + first * HS, HS, HS);
  for (int r = 0; r < Rows; ++r) {
    for (int k = 0; k < Keys; ++k) scores[r][first + k] = sums[r][k];
  }
}

// out[r] = out[r] factor[r] + sum over j < count, in order, of weights[r][j] v[j]. A page is summed by itself: added one by one
// to the sum of a long text, most positions would be of the size of its rounding.
template <int Rows>
void add_values(RowState* rows, float* const* weights, const float* values, std::int64_t count, std::int64_t HS) {
  const auto add = [&](std::int64_t d, const auto& load, const auto& store) {
    Lanes sums[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r] = Lanes{};
    for (std::int64_t j = 0; j < count; ++j) {
      const Lanes value = load(values + j * HS + d);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sums[r] = multiply_add(all_lanes(weights[r][j]), value, sums[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
      store(rows[r].out + d, multiply_add(load(rows[r].out + d), all_lanes(rows[r].factor), sums[r]));
  };
  const std::int64_t whole = HS / kLanes * kLanes, rest = HS - whole;
  for (std::int64_t d = 0; d < whole; d += kLanes) {
    add(
        d, [](const float* p) { return *lanes(p); }, [](float* p, const Lanes& v) { *lanes(p) = v; });
  }
  if (rest == 0) return;
  add(
      whole, [rest](const float* p) { return partial_lanes(p, rest); },
      [rest](float* p, const Lanes& v) { std::memcpy(p, &v, static_cast<std::size_t>(rest) * sizeof(float)); });
}

// One page, of which the rows see `count` positions from `keys` and `values` on.
template <int Rows>
void take_page(RowState* rows, float* const* scores, const float* q, std::int64_t q_stride, const float* keys,
               const float* values, std::int64_t count, float scale, std::int64_t HS) {
  std::int64_t k = 0;
  for (; k + kKeys <= count; k += kKeys) score_block<Rows, kKeys>(scores, q, q_stride, keys, k, HS);
  for (; k < count; ++k) score_block<Rows, 1>(scores, q, q_stride, keys, k, HS);
  for (int r = 0; r < Rows; ++r) take_scores(rows[r], scores[r], count, scale);
  add_values<Rows>(rows, scores, values, count, HS);
}

// At most kGroupRows neighbouring rows of a sequence.
struct Group {
  const PagedRows* work;
  std::int64_t first, rows;  // in *work
};

// The positions of a page that rows see, for one K/V head.
struct KeysAndValues {
  const float *keys, *values;  // [positions, HS]
};
// `widened`: 2 page_size HS floats, for codes.
KeysAndValues page_rows(const PagedKv& kv, std::int32_t page, std::int64_t kv_head, const Range& positions,
                        float* widened) {
  const std::int64_t HS = kv.HS, first = kv.row(page, kv_head) + positions.begin;
  if (!kv.fp8()) return {kv.keys + first * HS, kv.values + first * HS};
  float* const values = widened + kv.page_size * HS;
  kv_load(KvKind::key, kv.codes.keys, kv.codes.key_scales, HS, first, positions.size(), widened);
  kv_load(KvKind::value, kv.codes.values, kv.codes.value_scales, HS, first, positions.size(), values);
  return {widened, values};
}

// Floats that attend() needs.
std::int64_t scratch_floats(const PagedKv& kv) {
  return kGroupRows * kv.page_size + (kv.fp8() ? 2 * kv.page_size * kv.HS : 0);
}

void attend(const PagedAttentionShape& shape, float* out, const float* q, const PagedKv& kv, const Group& group,
            std::int64_t head, float* scratch) {
  const std::int64_t HS = kv.HS, P = kv.page_size, kv_head = head / (shape.NH / kv.NKV);
  const std::int64_t row = group.work->first_row + group.first, position = group.work->first_position + group.first;
  const float* queries = q + row * shape.q_row_stride + head * shape.q_head_stride;
  RowState rows[kGroupRows];
  float* scores[kGroupRows];
  for (std::int64_t r = 0; r < group.rows; ++r) {
    rows[r].out = out + ((row + r) * shape.NH + head) * HS;
    std::fill_n(rows[r].out, HS, 0.0f);
    scores[r] = scratch + r * P;
  }
  const auto rows_of = [&](std::int64_t page, const Range& positions) {
    return page_rows(kv, group.work->pages[static_cast<std::size_t>(page)], kv_head, positions,
                     scratch + kGroupRows * P);
  };

  const Visibility visibility = {.first_position = static_cast<int>(position),
                                 .window = static_cast<int>(shape.window)};
  // A row's own part of these pages.
  const auto take_alone = [&](std::int64_t r, const Range& pages) {
    const Range seen = visible_keys(visibility, r);
    for (std::int64_t page = std::max(pages.begin, seen.begin / P); page < pages.end && page * P < seen.end; ++page) {
      const Range here = common(seen, {page * P, (page + 1) * P});
      const auto [keys, values] = rows_of(page, {here.begin - page * P, here.end - page * P});
      take_page<1>(rows + r, scores + r, queries + r * shape.q_row_stride, 0, keys, values, here.size(), shape.scale,
                   HS);
    }
  };

  // The pages that all of the rows see in full.
  const std::int64_t begin = ceil_div(visible_keys(visibility, group.rows - 1).begin, P);
  const Range together = {begin, group.rows == kGroupRows ? (position + 1) / P : begin};
  for (std::int64_t r = 0; r < group.rows; ++r) take_alone(r, {0, together.begin});
  for (std::int64_t page = together.begin; page < together.end; ++page) {
    const auto [keys, values] = rows_of(page, {0, P});
    take_page<kGroupRows>(rows, scores, queries, shape.q_row_stride, keys, values, P, shape.scale, HS);
  }
  for (std::int64_t r = 0; r < group.rows; ++r) {
    take_alone(r, {std::max(together.begin, together.end), (position + group.rows - 1) / P + 1});
    const float normalizer = 1 / rows[r].sum;
#pragma omp simd
    for (std::int64_t d = 0; d < HS; ++d) rows[r].out[d] *= normalizer;
  }
}

}  // namespace

void paged_attention(const PagedAttentionShape& shape, float* out, const float* q, const PagedKv& kv,
                     std::span<const PagedRows> work) {
  std::vector<Group> groups;
  for (const PagedRows& rows : work) {
    for (std::int64_t first = 0; first < rows.rows; first += kGroupRows) {
      groups.push_back({&rows, first, std::min<std::int64_t>(kGroupRows, rows.rows - first)});
    }
  }
#pragma omp parallel
  {
    std::vector<float> scratch(static_cast<std::size_t>(scratch_floats(kv)));
#pragma omp for collapse(2) schedule(dynamic)
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::int64_t head = 0; head < shape.NH; ++head) {
        attend(shape, out, q, kv, groups[g], head, scratch.data());
      }
    }
  }
}

}  // namespace weft::cpu
