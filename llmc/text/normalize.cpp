#include "llmc/text/normalize.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/text/unicode_ranges.h"

namespace weft {

namespace {

constexpr int kMostParts = 32;  // compatibility decompositions are at most 18 code points long

bool is_compatible(NormalForm form) {
  return form == NormalForm::nfkc || form == NormalForm::nfkd;
}

bool composes(NormalForm form) {
  return form == NormalForm::nfc || form == NormalForm::nfkc;
}

utf8proc_option_t options_of(NormalForm form) {
  return static_cast<utf8proc_option_t>(UTF8PROC_STABLE | (composes(form) ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                                        (is_compatible(form) ? UTF8PROC_COMPAT : 0));
}

utf8proc_int32_t next_code_point(std::string_view text, std::size_t& position) {
  utf8proc_int32_t code_point = -1;
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + position;
  const auto taken = utf8proc_iterate(bytes, static_cast<utf8proc_ssize_t>(text.size() - position), &code_point);
  if (taken <= 0) fail(Exit::internal, "normalization: got text that is not UTF-8 at byte %zu", position);
  position += static_cast<std::size_t>(taken);
  return code_point;
}

// True for ranges of characters that no form reorders or composes with anything before them: everything below the first
// combining mark, CJK ideographs, emoji. The text before such a character and the text from it on can be normalized
// separately.
bool starts_segment(utf8proc_int32_t code_point) {
  return code_point < 0x300 || (code_point >= 0x3400 && code_point <= 0x9FFF) ||
         (code_point >= 0x1F000 && code_point <= 0x1FAFF);
}

void decompose(std::string_view segment, utf8proc_option_t options, std::vector<utf8proc_int32_t>& out) {
  out.clear();
  for (std::size_t position = 0; position < segment.size();) {
    utf8proc_int32_t parts[kMostParts];
    int boundary = 0;
    const auto count =
        utf8proc_decompose_char(next_code_point(segment, position), parts, kMostParts, options, &boundary);
    if (count < 0 || count > kMostParts) fail(Exit::internal, "normalization: %s", utf8proc_errmsg(count));
    out.insert(out.end(), parts, parts + count);
  }
}

// The Canonical Ordering Algorithm. utf8proc's own is quadratic in the length of a run of marks.
void order_marks(std::vector<utf8proc_int32_t>& code_points) {
  const auto combining_class = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  const auto is_mark = [&](utf8proc_int32_t c) { return combining_class(c) != 0; };
  auto run = code_points.begin();
  while (run != code_points.end()) {
    run = std::find_if(run, code_points.end(), is_mark);
    const auto end = std::find_if_not(run, code_points.end(), is_mark);
    std::stable_sort(run, end, [&](auto a, auto b) { return combining_class(a) < combining_class(b); });
    run = end;
  }
}

class Composer {
 public:
  Composer(NormalForm form, std::string& out) : options_(options_of(form)), composes_(composes(form)), out_(out) {}

  void append_normalized(std::string_view segment) {
    decompose(segment, options_, code_points_);
    order_marks(code_points_);
    auto count = static_cast<utf8proc_ssize_t>(code_points_.size());
    if (composes_) count = utf8proc_normalize_utf32(code_points_.data(), count, options_);
    if (count < 0) fail(Exit::internal, "normalization: %s", utf8proc_errmsg(count));
    for (utf8proc_ssize_t i = 0; i < count; ++i) {
      utf8proc_uint8_t bytes[4];
      const auto length = utf8proc_encode_char(code_points_[static_cast<std::size_t>(i)], bytes);
      out_.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(length));
    }
  }

 private:
  utf8proc_option_t options_;
  bool composes_;
  std::string& out_;
  std::vector<utf8proc_int32_t> code_points_;  // kept for its capacity
};

}  // namespace

std::string normalize(std::string_view text, NormalForm form) {
  // Below this every character is its own form.
  const utf8proc_int32_t changes = is_compatible(form) ? 0xA0 : composes(form) ? 0x300 : 0xC0;
  std::string out;
  out.reserve(text.size());
  Composer composer(form, out);
  std::size_t begin = 0;  // of the segment that is being collected
  std::size_t plain = 0;  // bytes of its first character, if that is its own form: a segment of no more is copied
  const auto finish_segment = [&](std::size_t end) {
    const std::string_view segment = text.substr(begin, end - begin);
    if (segment.size() <= plain) {
      out += segment;
    } else {
      composer.append_normalized(segment);
    }
  };
  for (std::size_t position = 0; position < text.size();) {
    const std::size_t before = position;
    const utf8proc_int32_t code_point = next_code_point(text, position);
    const auto one = static_cast<char32_t>(code_point);
    const bool inert = is_compatible(form) ? inert_in_nfkc_9(one) : inert_in_nfc_9(one);
    if (!inert && !starts_segment(code_point)) continue;
    finish_segment(before);
    if (inert) out += text.substr(before, position - before);
    begin = inert ? position : before;
    plain = inert || (code_point >= changes && code_point < 0x3400) || (is_compatible(form) && code_point >= 0x1F000)
                ? 0
                : position - before;
  }
  finish_segment(text.size());
  return out;
}

}  // namespace weft
