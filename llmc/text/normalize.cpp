#include "llmc/text/normalize.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/text/unicode_ranges.h"

namespace weft {

namespace {

constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

utf8proc_int32_t next_code_point(std::string_view text, std::size_t& position) {
  utf8proc_int32_t code_point = -1;
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + position;
  const auto taken = utf8proc_iterate(bytes, static_cast<utf8proc_ssize_t>(text.size() - position), &code_point);
  if (taken <= 0) fail(Exit::internal, "NFC: got text that is not UTF-8 at byte %zu", position);
  position += static_cast<std::size_t>(taken);
  return code_point;
}

// True for ranges of characters that NFC neither reorders nor composes with anything before them: everything below the first
// combining mark, CJK ideographs, emoji. The text before such a character and the text from it on can be normalized
// separately.
bool starts_segment(utf8proc_int32_t code_point) {
  return code_point < 0x300 || (code_point >= 0x3400 && code_point <= 0x9FFF) ||
         (code_point >= 0x1F000 && code_point <= 0x1FAFF);
}

void decompose(std::string_view segment, std::vector<utf8proc_int32_t>& out) {
  out.clear();
  for (std::size_t position = 0; position < segment.size();) {
    utf8proc_int32_t parts[8];  // canonical decompositions are at most four code points long
    int boundary = 0;
    const auto count = utf8proc_decompose_char(next_code_point(segment, position), parts, 8, kCompose, &boundary);
    if (count < 0 || count > 8) fail(Exit::internal, "NFC: %s", utf8proc_errmsg(count));
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
  explicit Composer(std::string& out) : out_(out) {}

  void append_normalized(std::string_view segment) {
    decompose(segment, code_points_);
    order_marks(code_points_);
    const auto count =
        utf8proc_normalize_utf32(code_points_.data(), static_cast<utf8proc_ssize_t>(code_points_.size()), kCompose);
    if (count < 0) fail(Exit::internal, "NFC: %s", utf8proc_errmsg(count));
    for (utf8proc_ssize_t i = 0; i < count; ++i) {
      utf8proc_uint8_t bytes[4];
      const auto length = utf8proc_encode_char(code_points_[static_cast<std::size_t>(i)], bytes);
      out_.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(length));
    }
  }

 private:
  std::string& out_;
  std::vector<utf8proc_int32_t> code_points_;  // kept for its capacity
};

}  // namespace

std::string normalize_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  Composer composer(out);
  std::size_t begin = 0;  // of the segment that is being collected
  std::size_t plain = 0;  // bytes of its first character, if that is its own NFC: a segment of no more is copied
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
    const bool inert = inert_in_nfc_9(static_cast<char32_t>(code_point));
    if (!inert && !starts_segment(code_point)) continue;
    finish_segment(before);
    if (inert) out += text.substr(before, position - before);
    begin = inert ? position : before;
    plain = inert ? 0 : position - before;
  }
  finish_segment(text.size());
  return out;
}

}  // namespace weft
