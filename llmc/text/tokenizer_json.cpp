#include "llmc/text/tokenizer_json.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/base/utf8.h"
#include "llmc/text/byte_alphabet.h"
#include "llmc/text/code_points.h"
#include "llmc/text/json_node.h"
#include "llmc/text/tokenizer_stages.h"

namespace weft {

namespace {

std::int32_t token_id(const Node& node) {
  return static_cast<std::int32_t>(node.integer(0, kMaxVocabulary - 1, "token id"));
}

// For options of the model that weft does not support: null, false, "" and 0 all mean that the option is off.
void require_off(const Node& node) {
  const Json& json = node.json();
  const bool off = json.is_null() || (json.is_boolean() && !json.get<bool>()) ||
                   (json.is_string() && json.get_ref<const std::string&>().empty()) ||
                   (json.is_number() && json.get<double>() == 0);
  if (!off) node.refuse("null (this option is not supported)");
}

constexpr std::int32_t kRepeated = -1;

bool is_version_line(const Json& merge) {
  return merge.is_string() && merge.get_ref<const std::string&>().starts_with("#version");
}

using Vocabulary = std::unordered_map<std::string_view, std::int32_t, SeededHash>;

// Reads one document into one spec.
class Reader {
 public:
  Reader(const Json& document, const std::string& source) : root_(document, "", source) {}

  TokenizerSpec read() {
    spec_.base.by_character = !is_byte_level(root_);
    read_model_options();
    read_vocabulary();
    check_ids();
    read_merges();
    read_added_tokens();
    check_ids();
    if (spec_.base.by_character) {
      read_characters();
    } else {
      read_bytes();
    }
    read_stages(root_, spec_);
    read_texts();
    return std::move(spec_);
  }

 private:
  void read_model_options();
  void read_vocabulary();
  void read_merges();
  std::pair<std::string, std::string> merge_parts(const Node& merge) const;
  BpeMerge merge_of(const Node& merge) const;
  void read_added_tokens();
  AddedToken added_token(const Node& node) const;
  void add_token(const std::string& content, std::int32_t id, const Node& where);
  void check_ids() const;
  void read_bytes();
  void read_characters();
  void read_texts();
  std::string text_of(const std::string& content) const;

  Node root_;
  TokenizerSpec spec_;
  Vocabulary ids_;           // of the model's vocabulary; the keys point into the document
  std::vector<bool> taken_;  // by id: a token has it
};

// Gives `id` to a token, which must be its only one. `where` is named in errors.
void Reader::add_token(const std::string& content, std::int32_t id, const Node& where) {
  const auto index = static_cast<std::size_t>(id);
  if (content.empty()) where.problem("got an empty token");
  if (content.size() > kMaxTokenBytes) {
    where.problem(format("got a token of %zu bytes, at most %zu are accepted", content.size(), kMaxTokenBytes));
  }
  if (index >= taken_.size()) {
    taken_.resize(index + 1, false);
    spec_.contents.resize(index + 1);
  }
  if (taken_[index]) {
    where.problem(format("id %d belongs to both %s and %s", id, escaped(spec_.contents[index]).c_str(),
                         escaped(content).c_str()));
  }
  taken_[index] = true;
  spec_.contents[index] = content;
}

void Reader::read_model_options() {
  const Node model = root_["model"];
  if (model["type"].text() != "BPE") model["type"].refuse("\"BPE\"");
  for (const char* option : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) require_off(model[option]);
  spec_.base.fuse_unknown = model["fuse_unk"].flag(false);
  spec_.ignore_merges = model["ignore_merges"].flag(false);
}

void Reader::read_vocabulary() {
  const Node vocab = root_["model"]["vocab"];
  if (!vocab.json().is_object()) vocab.problem("got no object, expected the tokens and their ids");
  if (vocab.json().size() > static_cast<std::size_t>(kMaxVocabulary)) {
    vocab.problem(format("got %zu tokens, at most %lld are accepted", vocab.json().size(),
                         static_cast<long long>(kMaxVocabulary)));
  }
  ids_.reserve(vocab.json().size());
  for (const auto& entry : vocab.json().get_ref<const Json::object_t&>()) {
    add_token(entry.first, token_id(vocab.entry(entry.first)), vocab);
    ids_.emplace(entry.first, entry.second.get<std::int32_t>());
  }
}

std::pair<std::string, std::string> Reader::merge_parts(const Node& merge) const {
  if (merge.json().is_string()) {
    const std::string& text = merge.text();
    const std::size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) merge.refuse("\"left right\"");
    return {text.substr(0, space), text.substr(space + 1)};
  }
  if (!merge.json().is_array() || merge.list_size() != 2) merge.refuse("\"left right\" or [\"left\", \"right\"]");
  return {merge[0].text(), merge[1].text()};
}

BpeMerge Reader::merge_of(const Node& merge) const {
  const auto id_of = [&](const std::string& token) {
    const auto found = ids_.find(token);
    if (found == ids_.end()) merge.problem(format("token %s is not in the vocabulary", escaped(token).c_str()));
    return found->second;
  };
  const auto [left, right] = merge_parts(merge);
  return {id_of(left), id_of(right), id_of(left + right)};
}

// Of a merge that the file repeats the last place counts. Lines such as "#version: 0.2" are left over from merges.txt.
void Reader::read_merges() {
  const Node merges = root_["model"]["merges"];
  const std::size_t count = merges.list_size();
  // Each merge gives a token of the vocabulary, and few tokens come from more than a few merges: 8 is ample.
  if (count > 8 * static_cast<std::size_t>(kMaxVocabulary)) merges.problem(format("got %zu merges", count));
  spec_.merges.reserve(count);
  std::unordered_map<std::uint64_t, std::size_t, SeededHash> places;
  for (std::size_t i = 0; i < count; ++i) {
    if (is_version_line(merges[i].json())) continue;
    const BpeMerge merge = merge_of(merges[i]);
    const auto pair = static_cast<std::uint64_t>(merge.left) << 32 | static_cast<std::uint32_t>(merge.right);
    const auto [place, is_new] = places.emplace(pair, spec_.merges.size());
    if (!is_new) spec_.merges[std::exchange(place->second, spec_.merges.size())].left = kRepeated;
    spec_.merges.push_back(merge);
  }
  std::erase_if(spec_.merges, [](const BpeMerge& merge) { return merge.left == kRepeated; });
}

AddedToken Reader::added_token(const Node& node) const {
  AddedToken token;
  token.content = node["content"].text();
  token.id = token_id(node["id"]);
  token.special = node["special"].flag(false);
  token.normalized = node["normalized"].flag(!token.special);
  token.lstrip = node["lstrip"].flag(false);
  token.rstrip = node["rstrip"].flag(false);
  token.single_word = node["single_word"].flag(false);
  return token;
}

void Reader::read_added_tokens() {
  const Node list = root_["added_tokens"];
  const std::size_t count = list.is_null() ? 0 : list.list_size();
  std::unordered_set<std::string, SeededHash> seen;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const AddedToken token = added_token(list[i]);
    bytes += token.content.size();
    if (bytes > kMaxAddedBytes) {
      list.problem(format("got more than %zu bytes of added tokens, at most that many are accepted", kMaxAddedBytes));
    }
    if (!seen.insert(token.content).second) list[i]["content"].refuse("each added token once");
    const auto known = ids_.find(token.content);
    if (known == ids_.end()) {
      // The original ignores the ids of new tokens and numbers them in the order of the list, so the two must agree.
      if (!spec_.contents.empty() && static_cast<std::size_t>(token.id) < spec_.contents.size()) {
        const std::string& owner = spec_.contents[static_cast<std::size_t>(token.id)];
        if (owner.empty()) list[i]["id"].refuse("added tokens in the order of their ids");
      }
      add_token(token.content, token.id, list[i]);
    } else if (known->second != token.id) {
      list[i]["id"].refuse(format("%d, its id in the vocabulary", known->second).c_str());
    }
    spec_.added.push_back(token);
  }
  std::stable_partition(spec_.added.begin(), spec_.added.end(), [](const AddedToken& token) { return token.special; });
}

void Reader::check_ids() const {
  const Node vocab = root_["model"]["vocab"];
  if (taken_.empty()) vocab.problem("got no tokens");
  const auto hole = std::find(taken_.begin(), taken_.end(), false);
  if (hole != taken_.end()) {
    vocab.problem(format("no token has the id %td, but ids go up to %zu; expected ids without holes",
                         hole - taken_.begin(), taken_.size() - 1));
  }
}

void Reader::read_bytes() {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string character = alphabet_character(static_cast<std::uint8_t>(byte));
    const auto found = ids_.find(character);
    // NeoX has no tokens for the bytes that UTF-8 never uses; encode() sees only UTF-8.
    const bool in_utf8 = byte < 0xC0 || (byte > 0xC1 && byte < 0xF5);
    if (found == ids_.end() && in_utf8) {
      root_["model"]["vocab"].problem(
          format("no token for the byte 0x%02X (%s)", static_cast<unsigned>(byte), escaped(character).c_str()));
    }
    spec_.base.byte_ids[byte] = found == ids_.end() ? -1 : found->second;
  }
}

// The tokens of single characters, those of byte fallback, and the unknown token: all of the model's vocabulary, not of the
// added tokens.
void Reader::read_characters() {
  const Node model = root_["model"];
  BaseTokenSpec& base = spec_.base;
  for (const auto& [token, id] : ids_) {
    if (utf8_sequence_length(token) == token.size()) base.characters.push_back({code_point_of(token), id});
  }
  const bool fallback = model["byte_fallback"].flag(false);
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = fallback ? ids_.find(format("<0x%02X>", static_cast<unsigned>(byte))) : ids_.end();
    base.byte_ids[static_cast<std::size_t>(byte)] = found == ids_.end() ? -1 : found->second;
  }
  if (!model["unk_token"].is_null()) {
    const auto found = ids_.find(model["unk_token"].text());
    if (found == ids_.end()) model["unk_token"].refuse("a token of model.vocab, or null");
    base.unknown = found->second;
  }
}

// What the decoder gets for a token that reads `content`. Byte-level tokens with a character outside the alphabet, such as an
// added "  ", stand for their own UTF-8. (The original decodes added tokens through the alphabet, too: one that reads "né"
// comes out as the bytes 6E E9.)
std::string Reader::text_of(const std::string& content) const {
  return spec_.base.by_character ? content : bytes_of_alphabet(content).value_or(content);
}

// An added token that is matched in the normalized text is decoded as its normalized content. The original
// recognises special tokens by their decoded text, so it leaves out such a token only if its normalized content,
// too, is that of a special token.
void Reader::read_texts() {
  const Normalizer normalizer(spec_.normalizers);
  std::vector<std::string> decoded = spec_.contents;
  std::unordered_set<std::string_view, SeededHash> special;
  for (const AddedToken& token : spec_.added) {
    if (token.special) special.insert(token.content);
    if (token.normalized) decoded[static_cast<std::size_t>(token.id)] = normalizer.apply(token.content);
  }
  spec_.texts.reserve(decoded.size());
  for (const std::string& content : decoded) {
    spec_.texts.push_back(text_of(content));
    spec_.left_out.push_back(special.contains(content));
  }
  if (!spec_.ignore_merges) return;
  spec_.words.reserve(ids_.size());
  for (const auto& [token, id] : ids_) {
    const std::string content(token);
    if (spec_.base.by_character || bytes_of_alphabet(content)) spec_.words.push_back({text_of(content), id});
  }
}

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source) {
  const Json document = parse_json(text, source);
  if (!document.is_object()) fail(Exit::bad_file, "%s: got no JSON object, expected a tokenizer", source.c_str());
  return Reader(document, source).read();
}

}  // namespace weft
