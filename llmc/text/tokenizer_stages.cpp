#include "llmc/text/tokenizer_stages.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "llmc/base/error.h"
#include "llmc/text/split_pattern.h"

namespace weft {

namespace {

constexpr std::string_view kPatternAdvice = ". Write it otherwise, or use the model without its tokenizer.json, by ids";

bool holds_byte_level(const Json& node) {
  if (!node.is_object()) return false;
  const auto type = node.find("type");
  if (type == node.end() || !type->is_string()) return false;
  if (*type == "ByteLevel") return true;
  const auto list = node.find("pretokenizers");
  return *type == "Sequence" && list != node.end() && list->is_array() &&
         std::any_of(list->begin(), list->end(), holds_byte_level);
}

class StageReader {
 public:
  StageReader(const Node& root, TokenizerSpec& spec) : root_(root), spec_(spec) {}

  void read() {
    read_normalizer(root_["normalizer"]);
    const Node pre_tokenizer = root_["pre_tokenizer"];
    if (!spec_.base.by_character) {
      read_pre_tokenizer(pre_tokenizer);
      if (!byte_level_seen_) pre_tokenizer.refuse("ByteLevel as the last pre-tokenizer");
    } else if (!pre_tokenizer.is_null()) {
      read_pre_tokenizer(pre_tokenizer);
    }
    read_post_processor(root_["post_processor"]);
    read_decoder(root_["decoder"]);
  }

 private:
  void read_normalizer(const Node& node);
  void read_pre_tokenizer(const Node& node);
  SplitBehavior behavior(const Node& node) const;
  void read_split(const Node& node);
  MetaspaceRule metaspace(const Node& node) const;
  void read_metaspace(const Node& node);
  void read_post_processor(const Node& node);
  void read_template(const Node& node);
  void read_decoder(const Node& node);
  void read_decoder_step(const Node& node);
  void read_strip(const Node& node);

  const Node& root_;
  TokenizerSpec& spec_;
  bool byte_level_seen_ = false;
  std::size_t decoder_steps_ = 0;
  bool fused_ = false;
  bool metaspace_seen_ = false;
};

struct Replacement {
  std::string character;
  std::string text;
};

// A Replace of one character by another. Longer patterns could grow a text without bounds, or match across tokens.
Replacement replacement_of(const Node& node) {
  return {node["pattern"]["String"].character(), node["content"].character()};
}

std::optional<NormalForm> normal_form(const std::string& type) {
  if (type == "NFC") return NormalForm::nfc;
  if (type == "NFD") return NormalForm::nfd;
  if (type == "NFKC") return NormalForm::nfkc;
  if (type == "NFKD") return NormalForm::nfkd;
  return std::nullopt;
}

void StageReader::read_normalizer(const Node& node) {
  if (node.is_null()) return;
  const std::string type = node["type"].text();
  if (type == "Sequence") {
    const Node list = node["normalizers"];
    for (std::size_t i = 0; i < list.list_size(); ++i) read_normalizer(list[i]);
    return;
  }
  if (spec_.normalizers.size() >= kMaxSteps) node.problem(format("got more than %zu normalizers", kMaxSteps));
  if (const auto form = normal_form(type)) {
    spec_.normalizers.push_back({.kind = NormalizerStep::Kind::form, .form = *form});
  } else if (type == "Prepend") {
    const std::string text = node["prepend"].text();
    if (text.empty() || text.size() > kMaxPrependBytes) {
      node["prepend"].problem(format("got %zu bytes, expected 1 to %zu", text.size(), kMaxPrependBytes));
    }
    spec_.normalizers.push_back({.kind = NormalizerStep::Kind::prepend, .text = text});
  } else if (type == "Replace") {
    const auto [character, text] = replacement_of(node);
    spec_.normalizers.push_back({.kind = NormalizerStep::Kind::replace, .character = character, .text = text});
  } else {
    node["type"].refuse("\"NFC\", \"NFD\", \"NFKC\", \"NFKD\", \"Prepend\", \"Replace\", \"Sequence\" or null");
  }
}

SplitBehavior StageReader::behavior(const Node& node) const {
  constexpr std::pair<std::string_view, SplitBehavior> kNames[] = {{"Isolated", SplitBehavior::isolated},
                                                                   {"Removed", SplitBehavior::removed},
                                                                   {"MergedWithPrevious", SplitBehavior::with_previous},
                                                                   {"MergedWithNext", SplitBehavior::with_next},
                                                                   {"Contiguous", SplitBehavior::contiguous}};
  for (const auto& [name, value] : kNames) {
    if (node.text() == name) return value;
  }
  node.refuse("\"Isolated\", \"Removed\", \"MergedWithPrevious\", \"MergedWithNext\" or \"Contiguous\"");
}

void StageReader::read_split(const Node& node) {
  const Node pattern = node["pattern"], regex = pattern["Regex"];
  PreTokenizerStep step;
  if (regex.is_null()) {
    const std::string text = pattern["String"].text();
    if (text.size() > kMaxSplitBytes) {
      pattern["String"].problem(format("got %zu bytes, at most %zu are accepted", text.size(), kMaxSplitBytes));
    }
    step.pattern = literal_split_pattern(text);
  } else {
    const SplitPattern translated = translate_split_pattern(regex.text());
    if (!translated.problem.empty()) regex.problem(translated.problem + std::string(kPatternAdvice));
    step.pattern = translated.pcre2;
  }
  step.behavior = behavior(node["behavior"]);
  step.invert = node["invert"].flag(false);
  spec_.steps.push_back(std::move(step));
}

// The old field add_prefix_space only matters if it is false: then it must agree with prepend_scheme.
MetaspaceRule StageReader::metaspace(const Node& node) const {
  MetaspaceRule rule;
  rule.character = node["replacement"].character();
  const Node scheme = node["prepend_scheme"];
  const std::string name = scheme.is_null() ? "always" : scheme.text();
  if (name == "first") {
    rule.prepend = MetaspaceRule::Prepend::first;
  } else if (name == "never") {
    rule.prepend = MetaspaceRule::Prepend::never;
  } else if (name != "always") {
    scheme.refuse("\"always\", \"first\" or \"never\"");
  }
  const Node prefix = node["add_prefix_space"];
  if (!prefix.flag(true) && rule.prepend != MetaspaceRule::Prepend::never) {
    prefix.refuse("true, or \"prepend_scheme\": \"never\" beside it");
  }
  rule.split = node["split"].flag(true);
  return rule;
}

// "first" asks where a piece begins in the text before it was normalized, which weft knows only of whole texts.
void StageReader::read_metaspace(const Node& node) {
  const MetaspaceRule rule = metaspace(node);
  for (const PreTokenizerStep& step : spec_.steps) {
    if (step.metaspace) node.problem("got a second Metaspace, expected one");
  }
  if (rule.prepend == MetaspaceRule::Prepend::first) {
    const auto normalized = [](const AddedToken& token) { return token.normalized; };
    if (!spec_.steps.empty()) node["prepend_scheme"].refuse("\"first\" in the first pre-tokenizer alone");
    if (!spec_.normalizers.empty() && std::any_of(spec_.added.begin(), spec_.added.end(), normalized)) {
      node["prepend_scheme"].refuse("\"always\" or \"never\" beside a normalizer and added tokens that are normalized");
    }
  }
  spec_.steps.emplace_back().metaspace = rule;
}

// ByteLevel must be last: what follows it in the original sees characters of the byte alphabet, not the text.
void StageReader::read_pre_tokenizer(const Node& node) {
  const std::string type = node.is_null() ? "" : node["type"].text();
  if (byte_level_seen_) node.refuse("ByteLevel as the last pre-tokenizer");
  if (spec_.steps.size() >= kMaxSteps) node.problem(format("got more than %zu pre-tokenizers", kMaxSteps));
  const bool by_character = spec_.base.by_character;
  if (type == "Sequence") {
    const Node list = node["pretokenizers"];
    for (std::size_t i = 0; i < list.list_size(); ++i) read_pre_tokenizer(list[i]);
  } else if (type == "ByteLevel" && !by_character) {
    const bool use_regex = node["use_regex"].flag(true);
    PreTokenizerStep& step = spec_.steps.emplace_back(use_regex ? gpt2_step() : PreTokenizerStep{});
    step.add_prefix_space = node["add_prefix_space"].flag(true);
    byte_level_seen_ = true;
  } else if (type == "Split") {
    read_split(node);
  } else if (type == "Digits") {
    spec_.steps.push_back(digits_step(node["individual_digits"].flag(false)));
  } else if (type == "Punctuation") {
    PreTokenizerStep& step = spec_.steps.emplace_back(punctuation_step());
    if (!node["behavior"].is_null()) step.behavior = behavior(node["behavior"]);
  } else if (type == "WhitespaceSplit") {
    spec_.steps.push_back(whitespace_step());
  } else if (type == "Metaspace" && by_character) {
    read_metaspace(node);
  } else if (by_character) {
    node["type"].refuse(
        "\"Metaspace\", \"ByteLevel\", \"Split\", \"Digits\", \"Punctuation\", \"WhitespaceSplit\", \"Sequence\" or "
        "null");
  } else {
    node["type"].refuse(
        "\"ByteLevel\", \"Split\", \"Digits\", \"Punctuation\", \"WhitespaceSplit\" or \"Sequence\" (the decoder is "
        "ByteLevel)");
  }
}

void StageReader::read_post_processor(const Node& node) {
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
void StageReader::read_template(const Node& node) {
  const Node single = node["single"];
  const std::size_t count = single.list_size();
  if (spec_.bos || count < 1 || count > 2 || single[count - 1]["Sequence"].is_null()) {
    single.refuse("at most one token, in front of the text");
  }
  if (count == 1) return;
  const std::string name = single[0]["SpecialToken"]["id"].text();
  const Node ids = node["special_tokens"].entry(name)["ids"];
  if (ids.list_size() != 1) ids.refuse("one id");
  const auto id = static_cast<std::int32_t>(ids[0].integer(0, kMaxVocabulary - 1, "token id"));
  if (static_cast<std::size_t>(id) >= spec_.contents.size()) ids.refuse("an id of the vocabulary");
  spec_.bos = id;
}

void StageReader::read_decoder(const Node& node) {
  if (!spec_.base.by_character) {
    if (node["type"].text() != "ByteLevel") node["type"].refuse("\"ByteLevel\"");
    return;
  }
  if (node.is_null()) node.refuse("a decoder (without one the tokens of a text are printed with spaces between them)");
  read_decoder_step(node);
}

// The order is that of transformers' conversions from SentencePiece: replacements and ByteFallback in any order, then Fuse,
// replacements again, then Strip.
void StageReader::read_decoder_step(const Node& node) {
  DecoderSpec& decoder = spec_.decoder;
  const std::string type = node["type"].text();
  if (type == "Sequence") {
    const Node list = node["decoders"];
    for (std::size_t i = 0; i < list.list_size(); ++i) read_decoder_step(list[i]);
    return;
  }
  if (++decoder_steps_ > kMaxSteps) node.problem(format("got more than %zu decoders", kMaxSteps));
  if (!decoder.strip.empty()) node["type"].refuse("Strip as the last decoder");
  if (type == "Replace") {
    const auto [character, text] = replacement_of(node);
    decoder.after_bytes.push_back({character, text, text});
  } else if (type == "ByteFallback") {
    if (decoder.byte_fallback || fused_ || metaspace_seen_) {
      node["type"].refuse("one ByteFallback, before Fuse and Metaspace");
    }
    decoder.before_bytes.insert(decoder.before_bytes.end(), decoder.after_bytes.begin(), decoder.after_bytes.end());
    decoder.after_bytes.clear();
    decoder.byte_fallback = true;
  } else if (type == "Metaspace") {
    if (fused_ || metaspace_seen_) node["type"].refuse("one Metaspace, before Fuse");
    metaspace_seen_ = true;
    const MetaspaceRule rule = metaspace(node);
    decoder.after_bytes.push_back({rule.character, " ", rule.prepend == MetaspaceRule::Prepend::never ? " " : ""});
  } else if (type == "Fuse") {
    fused_ = true;
  } else if (type == "Strip") {
    read_strip(node);
  } else {
    node["type"].refuse(
        "\"Replace\", \"ByteFallback\", \"Metaspace\", \"Fuse\", \"Strip\", \"Sequence\" or \"ByteLevel\"");
  }
}

// At the end of a text nothing is stripped: a text that arrives token by token has no end.
void StageReader::read_strip(const Node& node) {
  if (!fused_) node["type"].refuse("Fuse before Strip");
  if (!node["stop"].json().is_number_integer() || node["stop"].json() != 0) node["stop"].refuse("0");
  spec_.decoder.strip = node["content"].character();
  spec_.decoder.strip_count = static_cast<std::uint64_t>(node["start"].integer(0, kMaxStripped, "number"));
}

}  // namespace

bool is_byte_level(const Node& root) {
  return holds_byte_level(root["decoder"].json()) || holds_byte_level(root["pre_tokenizer"].json());
}

void read_stages(const Node& root, TokenizerSpec& spec) {
  StageReader(root, spec).read();
}

}  // namespace weft
