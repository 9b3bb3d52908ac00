#include "llmc/text/thoughts.h"

#include <algorithm>
#include <utility>

namespace weft {

namespace {

constexpr std::string_view kSpaces = " \t\r\n";

void drop_leading_spaces(std::string& text) {
  text.erase(0, std::min(text.find_first_not_of(kSpaces), text.size()));
}

// The length of the longest end of `text` with which `mark` begins.
std::size_t begun_mark(std::string_view text, std::string_view mark) {
  std::size_t length = std::min(text.size(), mark.size() - 1);
  while (!text.ends_with(mark.substr(0, length))) --length;
  return length;
}

}  // namespace

// Thoughts may begin behind white space alone.
void ThoughtDivider::leave_start(Parts& parts) {
  const std::size_t first = std::min(held_.find_first_not_of(kSpaces), held_.size());
  const std::string_view rest = std::string_view(held_).substr(first);
  if (rest.starts_with(marks_.begin)) {
    held_.erase(0, first + marks_.begin.size());
    place_ = Place::thoughts;
  } else if (!std::string_view(marks_.begin).starts_with(rest)) {
    parts.said += std::exchange(held_, {});
    place_ = Place::said;
  }
}

void ThoughtDivider::take_thoughts(Parts& parts) {
  if (!begun_) drop_leading_spaces(held_);
  const std::size_t end = held_.find(marks_.end);
  const std::size_t before = end != std::string::npos ? end : held_.size() - begun_mark(held_, marks_.end);
  const std::size_t certain = std::string_view(held_).substr(0, before).find_last_not_of(kSpaces) + 1;
  begun_ = begun_ || certain > 0;
  parts.thoughts += held_.substr(0, certain);
  if (end == std::string::npos) {
    held_.erase(0, certain);
    return;
  }
  held_.erase(0, end + marks_.end.size());
  place_ = Place::behind;
}

ThoughtDivider::Parts ThoughtDivider::push(std::string_view piece) {
  Parts parts;
  if (place_ == Place::said) {
    parts.said = piece;
    return parts;
  }
  held_ += piece;
  if (place_ == Place::start) leave_start(parts);
  if (place_ == Place::thoughts) take_thoughts(parts);
  if (place_ == Place::behind) {
    drop_leading_spaces(held_);
    if (!held_.empty()) {
      parts.said += std::exchange(held_, {});
      place_ = Place::said;
    }
  }
  return parts;
}

ThoughtDivider::Parts ThoughtDivider::finish() {
  Parts parts;
  if (place_ == Place::start) parts.said = std::exchange(held_, {});
  if (place_ == Place::thoughts) {
    held_.erase(held_.find_last_not_of(kSpaces) + 1);
    parts.thoughts = std::exchange(held_, {});
  }
  return parts;
}

std::string EmptyThoughtsFilter::shown(const ThoughtDivider::Parts& parts) {
  thinks_ = !parts.thoughts.empty();
  return thinks_ ? std::exchange(all_, {}) : parts.said;
}

std::string EmptyThoughtsFilter::push(std::string_view piece) {
  if (thinks_) return std::string(piece);
  all_ += piece;
  return shown(divider_.push(piece));
}

std::string EmptyThoughtsFilter::finish() {
  return thinks_ ? std::string() : shown(divider_.finish());
}

}  // namespace weft
