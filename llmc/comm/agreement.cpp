#include "llmc/comm/agreement.h"

#include <map>

#include "llmc/base/error.h"

namespace weft {

namespace {

// The texts of all ranks, in their order.
std::vector<std::string> gather_texts(Communicator& ranks, const std::string& mine) {
  const std::vector<std::int64_t> sizes = ranks.gather(static_cast<std::int64_t>(mine.size()));
  std::vector<Range> parts;
  for (const std::int64_t size : sizes) {
    const std::int64_t begin = parts.empty() ? 0 : parts.back().end;
    parts.push_back({begin, begin + size});
  }
  std::string all(static_cast<std::size_t>(parts.back().end), '\0');
  const auto place = [&](int rank) { return static_cast<std::size_t>(parts[static_cast<std::size_t>(rank)].begin); };
  mine.copy(all.data() + place(ranks.rank()), mine.size());
  ranks.gather(all.data(), parts);
  std::vector<std::string> texts;
  for (int r = 0; r < ranks.size(); ++r) {
    texts.push_back(all.substr(place(r), static_cast<std::size_t>(sizes[static_cast<std::size_t>(r)])));
  }
  return texts;
}

// Names and values, each ended by a zero byte, which neither an option nor JSON can hold.
std::string text_of(const std::vector<RankField>& fields) {
  std::string text;
  for (const RankField& field : fields) text += field.name + '\0' + field.value + '\0';
  return text;
}

std::vector<RankField> fields_of(const std::string& text) {
  std::vector<RankField> fields;
  for (std::size_t at = 0; at < text.size();) {
    RankField& field = fields.emplace_back();
    for (std::string* part : {&field.name, &field.value}) {
      const std::size_t end = std::min(text.find('\0', at), text.size());
      *part = text.substr(at, end - at);
      at = end + 1;
    }
  }
  return fields;
}

const std::string* value_of(const std::vector<RankField>& fields, const std::string& name) {
  for (const RankField& field : fields) {
    if (field.name == name) return &field.value;
  }
  return nullptr;
}

std::string shown(const std::string* value) {
  return value == nullptr ? "nothing" : escaped(*value);
}

}  // namespace

void require_same(Communicator& ranks, const std::vector<RankField>& fields) {
  std::vector<std::vector<RankField>> all;
  for (const std::string& text : gather_texts(ranks, text_of(fields))) all.push_back(fields_of(text));
  std::vector<RankField> named = all[0];  // and those that other ranks alone have
  for (const std::vector<RankField>& of_rank : all) {
    for (const RankField& field : of_rank) {
      if (value_of(named, field.name) == nullptr) named.push_back(field);
    }
  }
  for (const RankField& field : named) {
    const std::string* const first = value_of(all[0], field.name);
    for (std::size_t r = 1; r < all.size(); ++r) {
      const std::string* const other = value_of(all[r], field.name);
      if (first == nullptr || other == nullptr ? first == other : *first == *other) continue;
      fail(Exit::environment, "rank %zu: %s: got %s, expected %s as on rank 0. All ranks of a run have this in common",
           r, field.name.c_str(), shown(other).c_str(), shown(first).c_str());
    }
  }
}

void require_distinct(Communicator& ranks, const std::string& what, const std::string& value) {
  std::map<std::string, std::size_t> owners;
  const std::vector<std::string> all = gather_texts(ranks, value);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    const auto [owner, is_new] = owners.try_emplace(all[r], r);
    if (is_new) continue;
    fail(Exit::environment, "rank %zu: %s: got %s, which is that of rank %zu. Each rank needs one of its own", r,
         what.c_str(), escaped(all[r]).c_str(), owner->second);
  }
}

}  // namespace weft
