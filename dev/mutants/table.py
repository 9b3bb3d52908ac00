"""The planted bugs of run.py: one row each, a replacement of text that must occur exactly once in its file.

`tests` are the narrowest tests that should turn red:
    unit:FILTER   build/<mode>/unit_tests with this GoogleTest filter
    py:SELECTION  pytest on this file or test of test/python (with the programs built)
    gpu:FILTER    build/<mode>/gpu_tests; only where there is a GPU
A bug that changes nothing that anyone can observe has no place here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def needs_gpu(self) -> bool:
        return any(test.startswith("gpu:") for test in self.tests)


def unit(*filters: str) -> tuple[str, ...]:
    return tuple(f"unit:{one}" for one in filters)


CPU = [
    # ---- operators ---------------------------------------------------------------------------------------------------
    Mutant("RoPE turns neighbours instead of halves", "llmc/cpu/rope.cpp", """\
        float* high = low + half;
#pragma omp simd
        for (std::int64_t i = 0; i < half; ++i) {
          const float c = cosine[i], s = direction * sine[i];
          const float a = low[i], z = high[i];
          low[i] = a * c - z * s;
          high[i] = z * c + a * s;
""", """\
        for (std::int64_t i = 0; i < half; ++i) {
          const float c = cosine[i], s = direction * sine[i];
          const float a = low[2 * i], z = low[2 * i + 1];
          low[2 * i] = a * c - z * s;
          low[2 * i + 1] = z * c + a * s;
""", unit("Rope.*")),
    Mutant("RoPE backward turns the same way", "llmc/cpu/rope.cpp", "first_position, -1.0f);", "first_position, 1.0f);",
           unit("Rope.*")),
    Mutant("attention of decoding without 1/sqrt(d)", "llmc/cpu/decoder.cpp",
           "shape.scale = 1.0f / std::sqrt(static_cast<float>(HS));", "shape.scale = 1.0f;", unit("Golden.*Decoding*")),
    Mutant("attention of training without 1/sqrt(d)", "llmc/cpu/llama.cpp",
           "1.0f / std::sqrt(static_cast<float>(config_.head_dim))};", "1.0f};", unit("Golden.LlamaTraining*")),
    Mutant("K/V heads tiled, few queries", "llmc/cpu/attention_blocks.cpp",
           "kv = h / (shape.NH / shape.NKV), keys", "kv = h % shape.NKV, keys", unit("*Attention*")),
    Mutant("K/V heads tiled, blocks of queries", "llmc/cpu/attention_blocks.cpp",
           "HP = padded(HS), kv = h / (shape.NH / shape.NKV);", "HP = padded(HS), kv = h % shape.NKV;",
           unit("*Attention*")),
    Mutant("causal mask shows one key too many", "llmc/cpu/attention_blocks.cpp",
           "return shape.causal ? shape.TK - shape.TQ + t + 1 : shape.TK;",
           "return shape.causal ? std::min(shape.TK, shape.TK - shape.TQ + t + 2) : shape.TK;",
           unit("OperatorVectors.Attention*")),
    Mutant("norm backward without the skip gradient", "llmc/cpu/residual_norm.cpp", "dh[c] += skip[c];",
           "dh[c] += 0.0f * skip[c];", unit("OperatorVectors.ResidualNorm*")),
    Mutant("norm ignores eps", "llmc/cpu/residual_norm.cpp", "std::sqrt(variance + shape.eps)",
           "std::sqrt(variance + 1e-5)", unit("*ResidualNorm*")),
    Mutant("dropout does not rescale what it keeps", "llmc/cpu/residual_norm.cpp",
           "const float kept = scale / (1.0f - shape.dropout);", "const float kept = scale;", unit("*ResidualNorm*")),
    Mutant("SwiGLU with its branches swapped", "llmc/cpu/swiglu.cpp", """\
    const float* gate = gate_up + n * 2 * F;
    const float* up = gate + F;
    float* row""", """\
    const float* up = gate_up + n * 2 * F;
    const float* gate = up + F;
    float* row""", unit("Swiglu.*")),
    Mutant("GELU by tanh", "llmc/cpu/gelu.cpp", "out[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * kInvSqrt2));",
           "out[i] = 0.5f * x[i] * (1.0f + std::tanh(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));",
           unit("Gelu.*")),
    Mutant("classifier counts ignored labels", "llmc/cpu/llama.cpp",
           "*label_count += labels[n] != kIgnoredLabel ? 1 : 0;", "*label_count += 1;", unit("CpuLlamaTest.*")),
    Mutant("embedding gradient overwritten by a token's last place", "llmc/cpu/embedding.cpp",
           "row[c] += gradient[c];", "row[c] = gradient[c];", unit("Embedding.*")),
    # ---- models ------------------------------------------------------------------------------------------------------
    Mutant("query_key_value read as three blocks", "llmc/cpu/neox.cpp",
           "HeadView{qkv_.data() + part * HS, 0, 3 * C, 3 * HS}", "HeadView{qkv_.data() + part * C, 0, 3 * C, HS}",
           unit("Golden.NeoxDecoding*")),
    Mutant("parallel residual loses attention", "llmc/cpu/neox.cpp",
           "c.parallel_residual ? Accumulate::yes : Accumulate::no", "Accumulate::no", unit("Golden.NeoxDecoding*")),
    Mutant("cached keys turned from position 0", "llmc/cpu/decoder.cpp", "rope_forward(k, rope_, 1, rows, NKV, length_);",
           "rope_forward(k, rope_, 1, rows, NKV, 0);", unit("Golden.*Decoding*", "Generate.*")),
    Mutant("llama3 scaling divides what it should keep", "llmc/model/config.cpp",
           "if (wavelength < original / high) continue;", "if (wavelength < original / high / 2) continue;",
           unit("Rope.Llama3*")),
    Mutant("theta has a default", "llmc/model/config.cpp", 'rope.theta = positive_number(object, "theta", source);',
           'rope.theta = object.contains("theta") ? positive_number(object, "theta", source) : 10000.0;',
           unit("ModelConfig.*")),
    Mutant("overlapping regions as large as the last one", "llmc/base/regions.h",
           "bytes = std::max(bytes, each->plan_.bytes());", "bytes = each->plan_.bytes();", unit("Regions.*")),
    Mutant("input and output projection of attention mixed up", "llmc/model/llama_layout.h",
           "find.weight(names.q),\n                        find.weight(names.output)",
           "find.weight(names.output),\n                        find.weight(names.q)", unit("Layout.Llama*")),
    Mutant("weight decay on norms", "llmc/model/tensor_table.cpp",
           "add(weight_of(module), {C}, Init::ones, false);\n    if",
           "add(weight_of(module), {C}, Init::ones, true);\n    if",
           unit("TensorTable.OnlyMatricesDecay")),
    Mutant("residual branches start too large", "llmc/train/initialize.cpp",
           "kStandardDeviation / std::sqrt(2.0 * static_cast<double>(num_layers))",
           "kStandardDeviation / std::sqrt(1.0 * static_cast<double>(num_layers))", unit("Initialize.*")),
    # ---- training ----------------------------------------------------------------------------------------------------
    Mutant("AdamW bias correction off by one", "llmc/cpu/adamw.cpp", "static_cast<double>(step.step);",
           "static_cast<double>(step.step + 1);", unit("AdamW.*")),
    Mutant("AdamW ignores eps", "llmc/cpu/adamw.cpp", "inv_sqrt_correction2 + eps);",
           "inv_sqrt_correction2 + 1e-8f + 0 * eps);", unit("AdamW.*", "OperatorVectors.AdamW")),
    Mutant("updates counted as steps", "llmc/train/loop.cpp", "update.step = state_.updates + 1;",
           "update.step = state_.step + 1;", unit("TrainLoopTest.Skip*")),
    Mutant("gradients not zeroed", "llmc/cpu/llama.cpp", "    gradient_arena_.clear();\n", "",
           unit("TrainLoopTest.AccumulationEqualsOneBigBatch", "Golden.LlamaTraining*")),
    Mutant("accumulated batches weigh as if alone", "llmc/train/loop.cpp", "1.0f / static_cast<float>(labels)",
           "1.0f / static_cast<float>(batch.labels.size())", unit("TrainLoopTest.AccumulationEqualsOneBigBatch")),
    Mutant("clipping that never clips", "llmc/model/compare.cpp", "std::min(1.0, limit / (gradient_norm + 1e-6))",
           "std::max(1.0, limit / (gradient_norm + 1e-6))", unit("Golden.LlamaTraining*")),
    Mutant("warm-up begins at zero", "llmc/train/schedule.cpp",
           "return peak * static_cast<double>(step) /", "return peak * static_cast<double>(step - 1) /", unit("Schedule.*")),
    Mutant("decay one step late", "llmc/train/schedule.cpp", "static_cast<double>(step - 1 - decay_begin)",
           "static_cast<double>(step - 2 - decay_begin)", unit("Schedule.*")),
    Mutant("an infinite loss passes the guard", "llmc/train/guard.cpp",
           "return std::isfinite(statistics.loss_sum) && std::isfinite(statistics.gradient_norm);",
           "return std::isfinite(statistics.gradient_norm);", unit("TrainLoopTest.InfiniteLossAloneStopsToo")),
    Mutant("every epoch in the same order", "llmc/train/data_order.cpp", "const std::uint64_t epoch = position / count_;",
           "const std::uint64_t epoch = 0 * position;", unit("DataOrder.*")),
    Mutant("labels are the tokens themselves", "llmc/train/data_loader.cpp", "shards_[shard].read(begin + 1, labels);",
           "shards_[shard].read(begin, labels);", unit("Loader.*")),
    Mutant("a window past the end of its shard", "llmc/train/data_loader.cpp",
           "static_cast<std::uint64_t>((shard.count() - 1) / seq_len)", "static_cast<std::uint64_t>(shard.count() / seq_len)",
           unit("Loader.*")),
    # ---- checkpoints and files ---------------------------------------------------------------------------------------
    Mutant("resumed with the first dropout mask", "llmc/train/checkpoint.cpp",
           'state.micro_steps = static_cast<std::uint64_t>(json_int(object, "micro_steps", 0, kMaxCounter, source));',
           'state.micro_steps = 0 * static_cast<std::uint64_t>(json_int(object, "micro_steps", 0, kMaxCounter, source));',
           unit("TrainLoopTest.MicroBatchesAreNumberedThroughTheRun", "CheckpointTest.BringsBackEveryBit")),
    Mutant("resumed at the first window of data", "llmc/train/checkpoint.cpp",
           'state.windows = static_cast<std::uint64_t>(json_int(object, "windows", 0, kMaxCounter, source));',
           'state.windows = 0 * static_cast<std::uint64_t>(json_int(object, "windows", 0, kMaxCounter, source));',
           unit("CheckpointTest.BringsBackEveryBit", "TrainLoopTest.HalfAndHalf*")),
    Mutant("manifest not compared with the tensors", "llmc/train/checkpoint.cpp", "if ((*tensors)[i] != expected) {",
           "if (tensors->empty() && (*tensors)[i] != expected) {", unit("CheckpointTest.ManifestWords*", "CheckpointTest.FilesOfTwo*")),
    Mutant("one checkpoint fewer kept", "llmc/train/checkpoint.cpp", "entry.step >= oldest_kept",
           "entry.step > oldest_kept", unit("CheckpointTest.KeepsTheNewestOnes")),
    Mutant("a lock that two can hold", "llmc/file/run_dir.cpp", "::flock(lock_, LOCK_EX | LOCK_NB)",
           "::flock(lock_, LOCK_SH | LOCK_NB)", unit("RunDirectoryTest.*")),
    Mutant("a link in a run directory is followed", "llmc/base/file.cpp", "flags | O_NOFOLLOW | O_NONBLOCK",
           "flags | O_NONBLOCK", unit("RunDirectoryTest.NothingIsWritten*")),
    Mutant("any directory that ends in .tmp is removed", "llmc/file/run_dir.cpp", "return step_of(name) >= 0;",
           "return name.starts_with(kStepPrefix);", unit("CheckpointTest.WhatNoSaveHasWritten*")),
    Mutant("the old name is not given back", "llmc/file/run_dir.cpp",
           "if (exists) ::rename(replaced.c_str(), target.c_str());", "", unit("FailingCallTest.TheSecondRename*")),
    Mutant("a checkpoint is not read back", "llmc/train/checkpoint.cpp",
           "    read_back(temporary, state, table, source);\n", "", unit("FailingCallTest.AFileThatReadsBack*")),
    Mutant("another model goes unnoticed", "llmc/train/checkpoint.cpp", "if (saved == run.began_from) return;",
           "if (!saved.empty()) return;", unit("CheckpointTest.AnotherBeginning*")),
    Mutant("the best checkpoint is removed", "llmc/train/checkpoint.cpp", "    if (entry.step == best_) continue;\n", "",
           unit("TrainLoopTest.TheCheckpointWithTheLowest*")),
    Mutant("an infinite moment is a lack of space", "llmc/train/loop.cpp",
           "if (last && result.error && result.error->code() != Exit::numeric) {", "if (last && result.error) {",
           unit("TrainLoopTest.AnInfiniteMomentInTheLastSave*")),
    Mutant("validation reads the beginning of the data only", "llmc/train/loop.cpp",
           "row * data.windows() / std::min(count * B, data.windows())", "row", unit("TrainLoopTest.ValidationIsSpread*")),
    Mutant("clipping to 0 instead of none", "llmc/model/compare.cpp", "return limit > 0 ?", "return limit >= 0 ?",
           unit("TrainLoopTest.GradientsAreClipped*")),
    Mutant("NaN passes a comparison", "llmc/model/compare.cpp", "row.pass = finite && row.relative <= tolerance;",
           "row.pass = row.relative <= tolerance;", unit("Distance.*")),
    Mutant("ids of a shard's first piece only", "llmc/file/token_shard.cpp", "read(begin, std::span(ids).first(piece));",
           "read(0, std::span(ids).first(piece));", unit("TokenShard.VerifyChecksTheIds*")),
    Mutant("values of a tensor's first piece only", "llmc/file/tensor_file.cpp",
           "if (finite_ && !first_) find_not_finite(begin, size);", "if (finite_ && begin == 0) find_not_finite(begin, size);",
           unit("TensorFile.EachPiece*")),
    Mutant("labels of the classifier's first piece", "llmc/cpu/llama.cpp", "labels.data() + row, count",
           "labels.data(), count", unit("TrainLoopTest.RowsPastThePiece*")),
    Mutant("scores against the first labels", "llmc/cpu/decoder.cpp", "ids.data() + begin + 1, rows", "ids.data() + 1, rows",
           unit("CpuLlamaTest.ScoresPastTheirPiece*")),
    Mutant("a matcher that looks no further than its block", "llmc/text/added_tokens.cpp",
           "std::min(text.size(), end + longest_ - 1)", "end", unit("AddedTokens.*")),
    Mutant("a failure link too few", "llmc/text/added_tokens.cpp",
           "if (token_[i] == kNone) token_[i] = token_[failure_[i]];", "", unit("AddedTokens.*")),
    Mutant("a vocabulary that is not padded", "llmc/train/inputs.cpp",
           "(ids + kVocabularyRows - 1) / kVocabularyRows * kVocabularyRows", "ids", unit("Inputs.TheVocabulary*")),
    Mutant("renamed before it is synced", "llmc/base/file.cpp",
           'if (!call_allowed("sync", path_) || ::fsync(fd_) != 0) fail_writing(path_, "sync");\n', "",
           ("py:test_train_cli.py::test_a_save_syncs_before_it_renames",)),
    Mutant("checkpoint named before its directory is synced", "llmc/file/run_dir.cpp", "  sync_directory(temporary);\n", "",
           unit("RunDirectoryTest.*")),
    Mutant("an error of the thread that writes is lost", "llmc/file/write_behind.cpp",
           "if (error_) std::rethrow_exception(error_);", "if (error_ && closed_) std::rethrow_exception(error_);",
           unit("WriteBehindTest.*")),
    Mutant("an error of a helper thread is lost", "llmc/base/parallel.cpp",
           "if (error) std::rethrow_exception(error);", "if (error && count == 0) std::rethrow_exception(error);",
           unit("InParallel.*")),
    Mutant("reading back checks the first moments twice", "llmc/train/checkpoint.cpp",
           "moment_name(kMoments[i % 3 - 1], spec)", "moment_name(kMoments[0], spec)", unit("CheckpointTest.*")),
    Mutant("tensor hash not checked", "llmc/file/tensor_file.cpp", "if (got != tensor.hash) {",
           "if (got != tensor.hash && tensor.bytes == 0) {", unit("TensorFile.*")),
    Mutant("header hash not checked", "llmc/file/tensor_file.cpp", "if (hash != header.header_hash) {",
           "if (hash != header.header_hash && hash == 0) {", unit("TensorFile.*")),
    Mutant("a file may be longer than it says", "llmc/file/tensor_file.cpp", "if (header.file_bytes < file_.size()) {",
           "if (header.file_bytes + 1 < file_.size()) {", unit("TensorFile.*")),
    Mutant("a shard may be longer than it says", "llmc/file/token_shard.cpp", "if (expected < file_.size()) {",
           "if (expected + 1 < file_.size()) {", unit("TokenShard.*")),
    Mutant("shard data hash not checked", "llmc/file/token_shard.cpp", "if (stream.digest() != data_hash_) {",
           "if (stream.digest() != data_hash_ && data_hash_ == 0) {", unit("TokenShard.*")),
    Mutant("an id one past the vocabulary", "llmc/file/token_shard.cpp",
           "if (largest < static_cast<std::uint64_t>(vocab_size_)) return;",
           "if (largest <= static_cast<std::uint64_t>(vocab_size_)) return;", unit("TokenShard.*")),
    Mutant("JSON one level deeper than the limit", "llmc/base/json.cpp",
           "if (static_cast<int>(keys_.size()) >= max_depth_) {", "if (static_cast<int>(keys_.size()) > max_depth_) {",
           unit("Json.*")),
    Mutant("JSON keys may occur twice", "llmc/base/json.cpp", "if (!keys_.back().insert(key).second) {",
           "if (!keys_.back().insert(key).second && key.empty()) {", unit("Json.*")),
    Mutant("an option may be given twice", "llmc/base/options.cpp", "if (given.size() > 1 && !entry.repeatable) {",
           "if (given.size() > 2 && !entry.repeatable) {", unit("Options.*")),
    # ---- text --------------------------------------------------------------------------------------------------------
    Mutant("BOS forgotten", "llmc/text/tokenizer.cpp", "if (add_bos && bos_) ids.push_back(*bos_);",
           "if (add_bos && bos_ && text.empty()) ids.push_back(*bos_);",
           unit("Tokenizer.*", "*TokenizerVectors.EncodesEveryString*")),
    Mutant("an empty prompt gets no first token", "llmc/infer/prompt.cpp",
           "if (start.has_value()) return {*start};", "if (start.has_value()) return {};", unit("Prompt.*")),
    Mutant("BPE merges a pair at another pair's rank", "llmc/text/bpe.cpp",
           "if (merge != nullptr && merge->rank == candidate >> 32)", "if (merge != nullptr)",
           unit("*TokenizerVectors.EncodesEveryString*")),
    Mutant("numbers in groups of four", "llmc/text/pretokenize.cpp", "|[N]{1,3}| ?[^SLN]+", "|[N]{1,4}| ?[^SLN]+",
           unit("*TokenizerVectors.EncodesEveryString*")),
    Mutant("special tokens in user text", "llmc/text/added_tokens.cpp",
           "if (token->special && !allow_special) continue;", "if (token->special && !allow_special && token->lstrip) continue;",
           unit("Tokenizer.*")),
    Mutant("a long path loses its file name", "llmc/base/error.cpp", "text.size() - (limit - limit / 3)", "text.size()",
           unit("Escaped.*")),
    # ---- generation --------------------------------------------------------------------------------------------------
    Mutant("padded ids sampled", "llmc/infer/sampler.cpp", "if (plan_.vocab_limit > 0) {",
           "if (plan_.vocab_limit > 0 && plan_.greedy) {", unit("Sampler.*", "Generate.*")),
    Mutant("top-p takes a token too many", "llmc/infer/sampler.cpp", "for (std::uint64_t mass = 0; mass < share;) {",
           "for (std::uint64_t mass = 0; mass <= share && rest != ids.begin();) {", unit("Sampler.*")),
    Mutant("min-p drops the boundary", "llmc/infer/sampler.cpp", "return weight(id) < plan_.least_weight;",
           "return weight(id) <= plan_.least_weight;", unit("Sampler.*")),
    Mutant("equal logits rank backwards", "llmc/infer/sampler.cpp", "return x != y ? x > y : a < b;",
           "return x != y ? x > y : a > b;", unit("Sampler.*")),
    Mutant("the beginning of a stop text is shown", "llmc/infer/stop_text.cpp",
           "const std::size_t keep = complete > 0 ? complete : begun;",
           "const std::size_t keep = complete > 0 ? complete : begun / 2;", unit("StopText.*", "Generate.*")),
    Mutant("perplexity scores the overlap twice", "llmc/infer/perplexity.cpp", "windows.push_back({begin, end, scored});",
           "windows.push_back({begin, end, begin + 1});", unit("Perplexity.*")),
    # ---- scripts -----------------------------------------------------------------------------------------------------
    Mutant("converter: theta has a default", "scripts/hf_config.py",
           '        if user_theta is None:\n            reader.fail("rope_theta", "got nothing',
           '        if user_theta is None:\n            return 10000.0\n            reader.fail("rope_theta", "got nothing',
           ("py:test_hf_config.py::test_theta_has_no_default",)),
    Mutant("converter: transposed weights pass", "scripts/convert_hf.py", "    if entry.shape != shape:\n",
           "    if sorted(entry.shape) != sorted(shape):\n",
           ("py:test_convert.py::test_every_wrong_shape_is_refused", "py:test_convert.py::test_wrong_shape_as_a_user_sees_it")),
    Mutant("converter: bf16 cut instead of rounded", "scripts/tensor_file.py", "        rounded += 0x7FFF\n",
           "        rounded *= 0\n", ("py:test_tensor_file.py",)),
    Mutant("converter: a head that differs is dropped", "scripts/convert_hf.py", "    if not same:\n", "    if False:\n",
           ("py:test_convert.py::test_tied_llama",)),
    Mutant("converter: offsets may leave a hole", "scripts/safetensors_reader.py", "if entry.begin != position:",
           "if entry.begin < position:",
           ("py:test_convert.py::test_hostile_weight_file",)),
]

# Where a GPU is. They need a build with nvcc.
GPU = [
    Mutant("GPU: AdamW bias correction off by one", "llmc/cuda/op/adamw.cu", "static_cast<double>(step.step);",
           "static_cast<double>(step.step + 1);", ("gpu:AdamW*",)),
    Mutant("GPU: AdamW ignores eps", "llmc/cuda/op/adamw.cu", "s.inv_sqrt_correction2 + s.eps)",
           "s.inv_sqrt_correction2 + 1e-8f)", ("gpu:AdamW*",)),
    Mutant("GPU: RoPE turns the wrong way", "llmc/cuda/op/rope.cu", "rotated_low[j] = a * c - z * s;",
           "rotated_low[j] = a * c + z * s;", ("gpu:*Rope*",)),
    Mutant("GPU: SwiGLU with its branches swapped", "llmc/cuda/op/swiglu.cu", """\
  gate.load(gate_up + row * 2 * F + column);
  up.load(gate_up + row * 2 * F + F + column);
  float values""", """\
  up.load(gate_up + row * 2 * F + column);
  gate.load(gate_up + row * 2 * F + F + column);
  float values""", ("gpu:SwiGlu*",)),
    Mutant("GPU: SwiGLU backward gives gate the gradient of up", "llmc/cuda/op/swiglu.cu", "dgate[i] = d.gate;",
           "dgate[i] = d.up;", ("gpu:SwiGlu*",)),
    Mutant("GPU: SwiGLU in the epilogue takes gate for up", "llmc/cuda/op/matmul_swiglu.cu",
           "up = sums.get(r, piece + kPieces);", "up = sums.get(r, piece);", ("gpu:MatmulSwiglu.*",)),
    Mutant("GPU: the second block of a cluster fetches gate again, not up", "llmc/cuda/op/matmul_swiglu.cu",
           "column + rank * static_cast<int>(p.F),", "column,", ("gpu:MatmulSwiglu.*",)),
    Mutant("GPU: a warpgroup rounds its sums over those that the other one still writes", "llmc/cuda/op/matmul_swiglu.cu",
           "    wait_to_write();\n", "", ("gpu:MatmulSwiglu.*",)),
    Mutant("GPU: K/V heads tiled", "llmc/cuda/op/attention/portable_forward.cu",
           "h = blockIdx.x % shape.NH, kv = h / (shape.NH / shape.NKV);",
           "h = blockIdx.x % shape.NH, kv = h % shape.NKV;", ("gpu:*Attention*",)),
    Mutant("GPU: attention without its scale", "llmc/cuda/op/attention/portable_forward.cu",
           "OnlineSoftmax<M> softmax(shape.scale);", "OnlineSoftmax<M> softmax(1.0f);", ("gpu:*Attention*",)),
    Mutant("GPU: attention's only stage filled with the same keys again", "llmc/cuda/op/attention/portable_forward.cu",
           "load_keys(first_key + kKeys, 0);", "load_keys(first_key, 0);", ("gpu:AttentionOfSmallBlocks*",)),
    Mutant("GPU: Hopper attention hides a key too few", "llmc/cuda/op/attention/hopper_forward.cu",
           "if (n * 8 + i >= limit) S", "if (n * 8 + i > limit) S", ("gpu:AttentionHopper/*",)),
    Mutant("GPU: head dimension 80 read as if its tiles had 64 columns", "llmc/cuda/hw/tile.cuh",
           "constexpr int kTileSteps = Tile::kTileColumns / 16;", "constexpr int kTileSteps = 4;",
           ("gpu:AttentionHopper/*",)),
    Mutant("GPU: gradients rotated on by RoPE, not back", "llmc/cuda/op/attention/hopper_backward.cu",
           "const float unrotated = low * cosine + high * sine;", "const float unrotated = low * cosine - high * sine;",
           ("gpu:AttentionHopperBackward/*Rope*",)),
    Mutant("GPU: blocks of keys add to dQ as they come", "llmc/cuda/op/attention/hopper_backward.cu",
           "while (load_acquire(added) != block)", "while (load_acquire(added) == 0)", ("gpu:AttentionHopperBackward/*",)),
    Mutant("GPU: a token's rows in the gradient split at the wrong place", "llmc/cuda/op/embedding.cu",
           "return i == N - 1 || token[i] != token[i + 1];", "return i == N - 1 || token[i] == token[i + 1];",
           ("gpu:*Embedding*",)),
    Mutant("GPU: steps behind a stop id write over the position before it", "llmc/cuda/transformer/neox_generate.cu",
           "  state->sequence = sequence + 1;\n", "  state->sequence = sequence + 1;\n  if (stop) return;\n",
           ("gpu:CudaNeox.GenerationEndsWhereItShould",)),
    Mutant("GPU: keys and values of a prompt lie one position too far", "llmc/cuda/op/decode_attention.cu",
           "position = first_position + row;", "position = first_position + row + 1;",
           ("gpu:CudaDecodeAttention*.PromptsAreRotated*",)),
    Mutant("GPU: tickets of a token's attention stay used", "llmc/cuda/op/decode_attention.cu",
           "  if (threadIdx.x == 0) *ticket = 0;  // for the next token\n", "", ("gpu:CudaDecodeAttention*.Tokens*",)),
    Mutant("GPU: a captured step keeps its first values", "llmc/cuda/runtime/step_graph.cu",
           "if (graph_.empty() || values != values_) {", "if (graph_.empty()) {",
           ("gpu:CudaStepGraph.*",)),
    Mutant("GPU: a recomputed norm adds up its rows in another order", "llmc/cuda/llama/operators.cu",
           "launch_norm(site.branch, norm_operands(site));", "launch_norm(-1, norm_operands(site));",
           ("gpu:CudaLlama.Recomputation*",)),
    Mutant("GPU: a Llama scores more ids than there is room for", "llmc/cuda/transformer/llama_decoder.cu",
           "  reset();\n  check_room(ids.size());\n", "  reset();\n", ("gpu:CudaLlamaDecoder.Scores*",)),
    Mutant("GPU: fused decoding loses the key at the edge of a split", "llmc/cuda/fused/block.cuh",
           "const int begin = min(split * each, position);", "const int begin = min(split * each + (split > 0), position);",
           ("gpu:FusedDecode.EveryContextUpToTheLimit",)),
    Mutant("GPU: fused decoding takes values of the layer before", "llmc/cuda/fused/consumer.cuh",
           "if (complete) missing &= ~(1u << k);", "missing &= ~(1u << k);",
           ("gpu:FusedDecode.ManyTokensInOneLaunch", "gpu:FusedDecode.SameBitsEveryRun")),
    Mutant("GPU: fused decoding takes the best logits of the token before", "llmc/cuda/fused/parameters.cuh",
           "return (static_cast<unsigned>(word) & 0x1ff00000u) == tag(token);",
           "return (static_cast<unsigned>(word) & 0x1ff00000u) <= tag(token);",
           ("gpu:FusedDecode.ManyTokensInOneLaunch", "gpu:FusedDecode.SameBitsEveryRun")),
    Mutant("GPU: fused decoding fills stages that are still read", "llmc/cuda/fused/producer.cuh",
           "if (next.stage == 0) wrapped = true;", "if (next.stage < 0) wrapped = true;",
           ("gpu:FusedDecode.ManyTokensInOneLaunch",)),
    Mutant("GPU: fused decoding merges splits of a head that are not ready", "llmc/cuda/fused/helper.cuh",
           "return static_cast<unsigned>(word >> 32) == step;", "return static_cast<unsigned>(word >> 32) <= step;",
           ("gpu:FusedDecode.EveryContextUpToTheLimit",)),
    Mutant("GPU: fused decoding adds the residual of another row", "llmc/cuda/fused/layer.cuh",
           "const int row = own.out.begin + thread;", "const int row = own.out.begin;",
           ("gpu:FusedDecode.MatchesTheCpuAtEveryShape",)),
    Mutant("GPU: fused decoding keeps no count of multiprocessors", "llmc/cuda/fused/plan.cu",
           "if (plan.blocks < 1 || most_rows > consumers) {", "if (plan.blocks < 1) {",
           ("gpu:FusedDecode.RefusesDevicesThatAreTooSmall",)),
    Mutant("GPU: a second launch of a text starts one position early", "llmc/cuda/transformer/neox_generate.cu",
           "fused.position = length_;", "fused.position = length_ > kFusedTokens ? length_ - 1 : length_;",
           ("gpu:FusedDecode.TextLongerThanALaunch",)),
    Mutant("GPU: LayerNorm without its mean", "llmc/cuda/op/residual_norm_forward.cu", "mean = sum[0] * per_column;",
           "mean = 0.0f * sum[0];", ("gpu:ResidualNorm.*",)),
    Mutant("GPU: norm copies the wrong row ahead", "llmc/cuda/op/residual_norm_forward.cu",
           "stage.fetch(shape, io, row + step);", "stage.fetch(shape, io, row + 1);", ("gpu:ResidualNorm.ManyRows",)),
    Mutant("GPU: gradient of the norm's weight without its last block", "llmc/cuda/op/residual_norm_backward.cu",
           "for (int block = y; block < blocks; block += kFinishLanes)",
           "for (int block = y; block < blocks - 1; block += kFinishLanes)", ("gpu:ResidualNorm.Bf16",)),
    Mutant("GPU: dropout mask of norm's backward shifted", "llmc/cuda/op/residual_norm_backward.cu", """\
      branch_factors(factors, shape, rowscale, row * C + column);
      float dx[""", """\
      branch_factors(factors, shape, rowscale, row * C + column + 4);
      float dx[""", ("gpu:ResidualNorm.Bf16",)),
    Mutant("GPU: norm with a branch adds its rows in another order", "llmc/cuda/op/residual_norm_forward.cu",
           "using Bounded = Spread<R, S::kRowThreads, S::kThreadColumns>;  // full", "using Bounded = Spread<R, 512, 32>;  // full",
           ("gpu:ResidualNorm.NormOfAStoredStream*",)),
    Mutant("GPU: norm asks for more shared memory than a block has", "llmc/cuda/op/residual_norm_backward.cu",
           "if (sum_bytes > shared_limit) return full_backward", "if (sum_bytes < 0) return full_backward",
           ("gpu:ResidualNorm.SmallSharedMemory",)),
    Mutant("GPU: top-p goes on where the share is reached exactly", "llmc/cuda/op/sampler.cuh",
           "before + own.measure >= need) scratch.answer", "before + own.measure > need) scratch.answer",
           ("gpu:GpuSampler*",)),
    Mutant("GPU: sampling forgets the logits that wait to fill a warp", "llmc/cuda/op/sampler.cuh",
           "      use_rest(found, look_at);\n", "", ("gpu:GpuSampler*",)),
    Mutant("GPU: sampling without the sums of a cluster's last block", "llmc/cuda/op/sampler.cuh", """\
        for (int b = 0; b < kBlocks; ++b) {
          const std::uint64_t one""", """\
        for (int b = 0; b < kBlocks - 1; ++b) {
          const std::uint64_t one""", ("gpu:GpuSampler*",)),
    Mutant("GPU: sampling takes more ids than its sums hold", "llmc/cuda/op/sampler.cu", "if (V > kMaxSampledVocab) {",
           "if (V > 2 * kMaxSampledVocab) {", ("gpu:GpuSampler*",)),
    Mutant("GPU: the classifier's maximum ignores two columns of eight", "llmc/cuda/op/classifier.cu",
           "__hmax2(most[2], most[3]));", "most[2]);", ("gpu:Classifier.EveryColumnCountsBf16",)),
    Mutant("GPU: the classifier counts what follows a row", "llmc/cuda/op/classifier.cu",
           "stash[last].value[i] = from_float<T>(-INFINITY);", "stash[last].value[i] = from_float<T>(0.0f);",
           ("gpu:Classifier*",)),
    Mutant("GPU: the classifier subtracts the label twice", "llmc/cuda/op/classifier.cu",
           "gradient[i] -= i == at ? loss_scale : 0.0f;", "gradient[i] -= i == at ? 2 * loss_scale : 0.0f;",
           ("gpu:Classifier*",)),
    Mutant("GPU: the classifier loses the sum of a row's last warp", "llmc/cuda/op/classifier.cu",
           "i < blocks * kWarps; i += kWarpSize", "i < blocks * kWarps - 1; i += kWarpSize", ("gpu:Classifier*",)),
    Mutant("GPU: the classifier adds a stage before it has arrived", "llmc/cuda/op/classifier.cu",
           "__pipeline_wait_prior(kStages - 1 - s);", "__pipeline_wait_prior(kStages);", ("gpu:Classifier*",)),
    Mutant("GPU: the classifier takes a long row's first chunk for all", "llmc/cuda/op/classifier.cu",
           "SoftmaxSum<T> own;\n  for (int chunk = 0; chunk < mine; chunk += kChunk)",
           "SoftmaxSum<T> own;\n  for (int chunk = 0; chunk < min(mine, kChunk); chunk += kChunk)", ("gpu:Classifier*",)),
    Mutant("GPU: the classifier of one block keeps the wrong part of a row", "llmc/cuda/op/classifier.cu",
           "unit < stashed) stash[unit] = values[u];", "unit < stashed) stash[unit] = values[0];", ("gpu:Classifier*",)),
]

MUTANTS = CPU + GPU
