#include "llmc/text/tokenizer_json.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/text/byte_alphabet.h"

namespace weft {

namespace {

const Json kNull;

// A value of the document, with the path that names it in messages.
class Node {
 public:
  Node(const Json& json, std::string path, const std::string& source)
      : json_(&json), path_(std::move(path)), source_(&source) {}

  const Json& json() const { return *json_; }
  const std::string& path() const { return path_; }
  bool is_null() const { return json_->is_null(); }

  // A member; one that is absent reads as null, as in the original.
  Node operator[](const std::string& key) const {
    if (!json_->is_object()) refuse("an object");
    const auto found = json_->find(key);
    return {found == json_->end() ? kNull : *found, path_.empty() ? key : path_ + "." + key, *source_};
  }
  // A member whose key is chosen by the file, such as a token: the path quotes it.
  Node entry(const std::string& key) const {
    const Node member = (*this)[key];
    return {*member.json_, path_ + "[" + escaped(key) + "]", *source_};
  }
  Node operator[](std::size_t index) const {
    return {(*json_)[index], format("%s[%zu]", path_.c_str(), index), *source_};
  }

  std::size_t list_size() const {
    if (!json_->is_array()) refuse("a list");
    return json_->size();
  }
  const std::string& text() const {
    if (!json_->is_string()) refuse("a string");
    return json_->get_ref<const std::string&>();
  }
  bool flag(bool absent) const {
    if (is_null()) return absent;
    if (!json_->is_boolean()) refuse("true or false");
    return json_->get<bool>();
  }
  std::int32_t id() const {
    const bool integer = json_->is_number_integer();
    if (integer && (!json_->is_number_unsigned() || json_->get<std::uint64_t>() < kMaxVocabulary)) {
      const std::int64_t value = json_->get<std::int64_t>();
      if (value >= 0 && value < kMaxVocabulary) return static_cast<std::int32_t>(value);
    }
    refuse(format("a token id from 0 to %lld", static_cast<long long>(kMaxVocabulary - 1)).c_str());
  }

  [[noreturn]] void refuse(const char* expected) const {
    const std::string got = json_->dump(-1, ' ', true, Json::error_handler_t::replace);
    fail(Exit::bad_file, "%s: %s: got %s, expected %s", source_->c_str(), path_.c_str(), escaped(got).c_str(),
         expected);
  }
  // The same without quoting the value: for a value that is too long, or one that is not wrong by itself.
  [[noreturn]] void problem(const std::string& what) const {
    fail(Exit::bad_file, "%s: %s: %s", source_->c_str(), path_.c_str(), what.c_str());
  }

 private:
  const Json* json_;
  std::string path_;
  const std::string* source_;
};

void require_null(const Node& node) {
  if (!node.is_null()) node.refuse("null (nothing else is supported)");
}

// For options of the model that weft does not support: null, false, "" and 0 all mean that the option is off.
void require_off(const Node& node) {
  const Json& json = node.json();
  const bool off = json.is_null() || (json.is_boolean() && !json.get<bool>()) ||
                   (json.is_string() && json.get_ref<const std::string&>().empty()) ||
                   (json.is_number() && json.get<double>() == 0);
  if (!off) node.refuse("null (this option is not supported)");
}

using Vocabulary = std::unordered_map<std::string_view, std::int32_t, SeededHash>;

// Reads one document into one spec.
class Reader {
 public:
  Reader(const Json& document, const std::string& source) : root_(document, "", source) {}

  TokenizerSpec read() {
    require_null(root_["truncation"]);
    require_null(root_["padding"]);
    read_vocabulary();
    check_ids();
    read_merges();
    read_added_tokens();
    check_ids();
    read_bytes();
    read_normalizer(root_["normalizer"]);
    read_pre_tokenizer(root_["pre_tokenizer"]);
    read_post_processor(root_["post_processor"]);
    const Node decoder = root_["decoder"];
    if (decoder["type"].text() != "ByteLevel") decoder["type"].refuse("\"ByteLevel\"");
    return std::move(spec_);
  }

 private:
  void read_vocabulary();
  void read_merges();
  std::pair<std::string, std::string> merge_parts(const Node& merge) const;
  BpeMerge merge_of(const Node& merge) const;
  void read_added_tokens();
  AddedToken added_token(const Node& node) const;
  void add_token(const std::string& content, std::int32_t id, const Node& where);
  void check_ids() const;
  void read_bytes();
  void read_normalizer(const Node& node);
  void read_pre_tokenizer(const Node& node);
  void read_split(const Node& node);
  void read_post_processor(const Node& node);
  void read_template(const Node& node);

  Node root_;
  TokenizerSpec spec_;
  Vocabulary ids_;           // of the model's vocabulary; the keys point into the document
  std::vector<bool> taken_;  // by id: a token has it
  bool byte_level_seen_ = false;
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

void Reader::read_vocabulary() {
  const Node model = root_["model"];
  const Node vocab = model["vocab"];
  if (model["type"].text() != "BPE") model["type"].refuse("\"BPE\"");
  for (const char* option :
       {"unk_token", "dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"}) {
    require_off(model[option]);
  }
  spec_.ignore_merges = model["ignore_merges"].flag(false);
  if (!vocab.json().is_object()) vocab.problem("got no object, expected the tokens and their ids");
  if (vocab.json().size() > static_cast<std::size_t>(kMaxVocabulary)) {
    vocab.problem(format("got %zu tokens, at most %lld are accepted", vocab.json().size(),
                         static_cast<long long>(kMaxVocabulary)));
  }
  ids_.reserve(vocab.json().size());
  for (const auto& entry : vocab.json().get_ref<const Json::object_t&>()) {
    add_token(entry.first, vocab.entry(entry.first).id(), vocab);
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

void Reader::read_merges() {
  const Node merges = root_["model"]["merges"];
  const std::size_t count = merges.list_size();
  // Each merge gives a token of the vocabulary, and few tokens come from more than a few merges: 8 is ample.
  if (count > 8 * static_cast<std::size_t>(kMaxVocabulary)) merges.problem(format("got %zu merges", count));
  spec_.merges.reserve(count);
  std::unordered_set<std::uint64_t, SeededHash> pairs;
  for (std::size_t i = 0; i < count; ++i) {
    const BpeMerge merge = merge_of(merges[i]);
    const auto pair = static_cast<std::uint64_t>(merge.left) << 32 | static_cast<std::uint32_t>(merge.right);
    if (!pairs.insert(pair).second) merges[i].refuse("each merge once");
    spec_.merges.push_back(merge);
  }
}

AddedToken Reader::added_token(const Node& node) const {
  AddedToken token;
  token.content = node["content"].text();
  token.id = node["id"].id();
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

// Tokens with a character outside the alphabet, such as an added "  ", stand for their own UTF-8. (The
// original decodes added tokens through the alphabet too: one that reads "né" comes out as the bytes 6E E9.)
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
    spec_.byte_ids[byte] = found == ids_.end() ? -1 : found->second;
  }
  spec_.bytes.reserve(spec_.contents.size());
  for (std::size_t id = 0; id < spec_.contents.size(); ++id) {
    const std::string& content = spec_.contents[id];
    auto bytes = bytes_of_alphabet(content);
    if (bytes && ids_.contains(content)) spec_.words.push_back(static_cast<std::int32_t>(id));
    spec_.bytes.push_back(bytes ? *bytes : content);
  }
}

void Reader::read_normalizer(const Node& node) {
  if (node.is_null()) return;
  const std::string type = node["type"].text();
  if (type == "NFC") {
    spec_.nfc = true;
  } else if (type == "Sequence") {
    const Node list = node["normalizers"];
    for (std::size_t i = 0; i < list.list_size(); ++i) read_normalizer(list[i]);
  } else {
    node["type"].refuse("\"NFC\", \"Sequence\" or null");
  }
}

void Reader::read_split(const Node& node) {
  const Node pattern = node["pattern"];
  const auto rule = split_rule_of_pattern(pattern["Regex"].is_null() ? "" : pattern["Regex"].text());
  if (!rule) pattern.refuse("the pattern of GPT-2, Llama-3 or Qwen-2 (no other has been verified)");
  if (node["behavior"].text() != "Isolated") node["behavior"].refuse("\"Isolated\"");
  if (node["invert"].flag(false)) node["invert"].refuse("false");
  spec_.steps.push_back({*rule, false});
}

// ByteLevel must be last: what follows it in the original sees characters of the byte alphabet, not the text.
void Reader::read_pre_tokenizer(const Node& node) {
  constexpr std::size_t kMaxSteps = 8;
  const std::string type = node.is_null() ? "" : node["type"].text();
  if (byte_level_seen_ || spec_.steps.size() >= kMaxSteps) node.refuse("ByteLevel as the last pre-tokenizer");
  if (type == "Sequence") {
    const Node list = node["pretokenizers"];
    for (std::size_t i = 0; i < list.list_size(); ++i) read_pre_tokenizer(list[i]);
  } else if (type == "ByteLevel") {
    const bool use_regex = node["use_regex"].flag(true);
    spec_.steps.push_back({use_regex ? SplitRule::gpt2 : SplitRule::none, node["add_prefix_space"].flag(true)});
    byte_level_seen_ = true;
  } else if (type == "Split") {
    read_split(node);
  } else if (type == "Digits") {
    spec_.steps.push_back({node["individual_digits"].flag(false) ? SplitRule::digit : SplitRule::digit_run, false});
  } else {
    node["type"].refuse("\"ByteLevel\", \"Split\", \"Digits\" or \"Sequence\"");
  }
  if (node.path() == "pre_tokenizer" && !byte_level_seen_) node.refuse("ByteLevel as the last pre-tokenizer");
}

void Reader::read_post_processor(const Node& node) {
  if (node.is_null()) return;
  const std::string type = node["type"].text();
  if (type == "Sequence") {
    const Node list = node["processors"];
    for (std::size_t i = 0; i < list.list_size(); ++i) read_post_processor(list[i]);
  } else if (type == "TemplateProcessing") {
    read_template(node);
  } else if (type != "ByteLevel") {  // ByteLevel only changes offsets, which weft does not report
    node["type"].refuse("\"ByteLevel\", \"TemplateProcessing\", \"Sequence\" or null");
  }
}

// The template of a single text: one special token, or none, before the text. weft encodes no pairs.
void Reader::read_template(const Node& node) {
  const Node single = node["single"];
  const std::size_t count = single.list_size();
  if (spec_.bos || count < 1 || count > 2 || single[count - 1]["Sequence"].is_null()) {
    single.refuse("at most one token, in front of the text");
  }
  if (count == 1) return;
  const std::string name = single[0]["SpecialToken"]["id"].text();
  const Node ids = node["special_tokens"].entry(name)["ids"];
  if (ids.list_size() != 1) ids.refuse("one id");
  const std::int32_t id = ids[0].id();
  if (static_cast<std::size_t>(id) >= spec_.contents.size()) ids.refuse("an id of the vocabulary");
  spec_.bos = id;
}

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source) {
  const Json document = parse_json(text, source);
  if (!document.is_object()) fail(Exit::bad_file, "%s: got no JSON object, expected a tokenizer", source.c_str());
  return Reader(document, source).read();
}

}  // namespace weft
