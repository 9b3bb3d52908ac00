// Reads the stages of a tokenizer.json around its model: normalizer, pre-tokenizer, post-processor and decoder.
#pragma once

#include "llmc/text/json_node.h"
#include "llmc/text/tokenizer_json.h"

namespace weft {

// True if the tokens are spelled in the byte alphabet: the pre-tokenizer or the decoder is of the type ByteLevel.
bool is_byte_level(const Node& root);

// `spec`: with the vocabulary and the added tokens. Anything that is not supported: Exit::bad_file with the field's name.
void read_stages(const Node& root, TokenizerSpec& spec);

}  // namespace weft
