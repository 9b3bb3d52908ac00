// What a long conversation costs before a model sees it: rendering by a chat format, and tokenizing. Needs no GPU.
//   make benches && build/release/dev/bench/chat_bench TOKENIZER.json TEXT FORMAT.json...
//
// For each format: messages of a user of 20 words of TEXT and answers of 60, in turn, as many as the first column says; the bytes
// that are rendered, the ids, and the processor time of both, median and largest of 21 runs.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/base/error.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/options.h"
#include "llmc/base/percentile.h"
#include "llmc/infer/chat.h"

using namespace weft;

namespace {

constexpr std::uint64_t kMaxBytes = 100'000'000;
constexpr int kRuns = 21;

// The words of a text in turn, from its beginning again behind its end.
class Words {
 public:
  explicit Words(const std::string& text) {
    std::istringstream stream(text);
    for (std::string word; stream >> word;) words_.push_back(word);
    if (words_.empty()) fail(Exit::bad_file, "the text has no words");
  }
  std::string next(std::size_t count) {
    std::string text;
    for (std::size_t i = 0; i < count; ++i) text += (i > 0 ? " " : "") + words_[next_++ % words_.size()];
    return text;
  }

 private:
  std::vector<std::string> words_;
  std::size_t next_ = 0;
};

double milliseconds_of_process() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

void measure(const Chat& chat, const std::string& name, Words words, std::size_t turns) {
  std::vector<ChatMessage> messages;
  for (std::size_t i = 0; i < turns; ++i) {
    messages.push_back({i % 2 == 0 ? "user" : "assistant", words.next(i % 2 == 0 ? 20 : 60)});
  }
  messages.push_back({"user", words.next(20)});
  std::vector<double> rendering, tokenizing;
  std::size_t bytes = 0, ids = 0;
  for (int run = 0; run < kRuns; ++run) {
    const double begin = milliseconds_of_process();
    const std::vector<TextSegment> segments = chat.render(messages, Chat::Tail::answer);
    const double rendered = milliseconds_of_process();
    ids = chat.ids(segments).size();
    tokenizing.push_back(milliseconds_of_process() - rendered);
    rendering.push_back(rendered - begin);
    bytes = joined_text(segments).size();
  }
  std::sort(rendering.begin(), rendering.end());
  std::sort(tokenizing.begin(), tokenizing.end());
  std::printf("%-44s %5zu turns %8zu bytes %7zu ids   rendering %.2f ms (%.2f), tokenizing %.2f ms (%.2f)\n",
              name.c_str(), turns, bytes, ids, percentile(rendering, 50), rendering.back(), percentile(tokenizing, 50),
              tokenizing.back());
}

Exit run(int argc, char** argv) {
  if (argc < 4) fail(Exit::usage, "expected TOKENIZER.json TEXT FORMAT.json...");
  const Tokenizer tokenizer = Tokenizer::from_json(read_text_file(argv[1], kMaxBytes), argv[1]);
  const Words words(read_text_file(argv[2], kMaxBytes));
  for (int i = 3; i < argc; ++i) {
    const Json format = parse_json(read_text_file(argv[i], kMaxBytes), argv[i]);
    const Chat chat(ChatFormat::from_json(format, argv[i]), tokenizer);
    const std::string path = argv[i];
    for (const std::size_t turns : {100, 1000}) measure(chat, path.substr(path.rfind('/') + 1), words, turns);
  }
  return Exit::ok;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] { return run(argc, argv); });
}
