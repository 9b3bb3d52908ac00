// The command line of infer_pythia, one argument a line: its table, and what it checks of the values together.
#include "llmc/infer/options.h"
#include "test/fuzz/option_words.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  using namespace weft::fuzz;
  parse_words<InferOptionParser>(data, size, [](const InferSettings& s) {
    // The task is the one that was asked for, with what it needs.
    FUZZ_CHECK(s.model.empty() != s.random_model.empty());
    FUZZ_CHECK((s.task == InferTask::prompt_file) == !s.prompt_file.empty());
    FUZZ_CHECK((s.task == InferTask::prompt_ids) == !s.prompt_ids.empty());
    FUZZ_CHECK((s.task == InferTask::batch) == !s.batch.empty());
    FUZZ_CHECK((s.task == InferTask::batch) == !s.output.empty());
    FUZZ_CHECK((s.kv_bytes > 0) == !s.kv_memory.empty() && (s.kv_bytes == 0 || s.many_sequences()));
    FUZZ_CHECK(s.max_running >= 1);
    FUZZ_CHECK((s.task == InferTask::perplexity) == !s.perplexity.empty());
    FUZZ_CHECK((s.task == InferTask::compare) == !s.compare.empty());
    FUZZ_CHECK((s.task == InferTask::serve) == !s.serve.empty());
    FUZZ_CHECK(s.max_queue >= 0 && s.max_connections >= 1 && s.max_body >= 1 && s.drain_seconds >= 0);
    FUZZ_CHECK((s.task == InferTask::interactive) == s.interactive && (s.task == InferTask::bench) == s.bench);
    FUZZ_CHECK(s.max_tokens >= 1 && s.context >= 0 && s.stride >= 0 && s.threads >= 0);
    FUZZ_CHECK(s.temperature >= 0 && s.top_p >= 0 && s.top_p <= 1 && s.min_p >= 0 && s.min_p <= 1);
    FUZZ_CHECK((s.task == InferTask::bench_batch) == !s.bench_batch.empty() && s.bench_prompt >= 1);
    FUZZ_CHECK(s.bench || s.task == InferTask::bench_batch || s.random_model.empty());
    FUZZ_CHECK(s.bench || (!s.bench_layer && !s.bench_timeline && s.bench_contexts.empty()));
  });
  return 0;
}
