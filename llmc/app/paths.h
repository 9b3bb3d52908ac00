// Directories given in the place of a file: refused with a message that says what to give instead.
#pragma once

#include <string>

namespace weft {

// A Hugging Face directory given as --model: Exit::bad_file with the command that converts it. Anything else passes.
void refuse_model_directory(const std::string& path);
// A directory given as --tokenizer: Exit::bad_file with the file in it that is meant. Anything else passes.
void refuse_tokenizer_directory(const std::string& path);

}  // namespace weft
