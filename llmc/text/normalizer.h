// What a tokenizer does to the text before it cuts it: the normalizers of tokenizer.json that weft supports.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/text/normalize.h"

namespace weft {

struct NormalizerStep {
  enum class Kind {
    form,     // a Unicode Normalization Form (normalize.h)
    prepend,  // puts `text` in front, of a text that is not empty
    replace,  // puts `text` in the place of every `character`
  };
  Kind kind = Kind::form;
  std::string character = {};  // one character of UTF-8
  std::string text = {};
  NormalForm form = NormalForm::nfc;
};

class Normalizer {
 public:
  explicit Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {}

  bool changes_nothing() const { return steps_.empty(); }
  // The steps, one after the other, on `text`, valid UTF-8. Linear in the text, apart from normal forms.
  std::string apply(std::string_view text) const;

 private:
  std::vector<NormalizerStep> steps_;
};

// `text` with `to` in the place of every `from`, which is not empty.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace weft
