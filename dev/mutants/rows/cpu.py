"""Planted bugs in llmc/cpu. "fp8, against PyTorch": each is seen by the comparison with PyTorch's emulation."""

from mutant import Mutant, unit

ROWS = [
    # ---- llmc/cpu/adamw.cpp ------------------------------------------------------------------------------------------
    Mutant("AdamW bias correction off by one", "llmc/cpu/adamw.cpp", "static_cast<double>(step.step);",
           "static_cast<double>(step.step + 1);", unit("AdamW.*")),
    Mutant("AdamW ignores eps", "llmc/cpu/adamw.cpp", "inv_sqrt_correction2 + eps);",
           "inv_sqrt_correction2 + 1e-8f + 0 * eps);", unit("AdamW.*", "OperatorVectors.AdamW")),
    # ---- llmc/cpu/attention_blocks.cpp -------------------------------------------------------------------------------
    Mutant("K/V heads tiled, few queries", "llmc/cpu/attention_blocks.cpp",
           "kv = h / (shape.NH / shape.NKV), keys", "kv = h % shape.NKV, keys", unit("*Attention*")),
    Mutant("K/V heads tiled, blocks of queries", "llmc/cpu/attention_blocks.cpp",
           "HP = padded(HS), kv = h / (shape.NH / shape.NKV);", "HP = padded(HS), kv = h % shape.NKV;",
           unit("*Attention*")),
    Mutant("causal mask shows one key too many", "llmc/cpu/attention_blocks.cpp",
           "return shape.causal ? shape.TK - shape.TQ + t + 1 : shape.TK;",
           "return shape.causal ? std::min(shape.TK, shape.TK - shape.TQ + t + 2) : shape.TK;",
           unit("OperatorVectors.Attention*")),
    Mutant("more than 4 query heads have the wrong keys, a few rows", "llmc/cpu/attention_blocks.cpp",
           "HS = shape.HS, kv = h / (shape.NH / shape.NKV), keys",
           "HS = shape.HS, kv = shape.NH / shape.NKV > 4 ? h % shape.NKV : h / (shape.NH / shape.NKV), keys",
           unit("Groups/AttentionShapes.*")),
    Mutant("more than 4 query heads have the wrong keys, blocks", "llmc/cpu/attention_blocks.cpp",
           "HP = padded(HS), kv = h / (shape.NH / shape.NKV);",
           "HP = padded(HS), kv = shape.NH / shape.NKV > 4 ? h % shape.NKV : h / (shape.NH / shape.NKV);",
           unit("Groups/AttentionShapes.*", "WholeModel.HeadsThatShare*")),
    # ---- llmc/cpu/classifier.cpp -------------------------------------------------------------------------------------
    Mutant("the largest of a row of logits is at least 0", "llmc/cpu/classifier.cpp",
           "float maximum = -std::numeric_limits<float>::infinity();", "float maximum = 0;", unit("Classifier.SmallLogits*")),
    # ---- llmc/cpu/dequantize.cpp -------------------------------------------------------------------------------------
    Mutant("nibbles of int4 swapped", "llmc/cpu/dequantize.cpp",
           "      out[k] = scale * static_cast<float>((pair & 15) - zero);\n"
           "      out[k + 1] = scale * static_cast<float>((pair >> 4) - zero);\n",
           "      out[k] = scale * static_cast<float>((pair >> 4) - zero);\n"
           "      out[k + 1] = scale * static_cast<float>((pair & 15) - zero);\n",
           unit("QuantizedMatmul.*", "QuantizedModel.Computes*")),
    Mutant("zeros of int4 ignored", "llmc/cpu/dequantize.cpp", "const int zero = zeros[group];",
           "const int zero = 8 + 0 * zeros[group];", unit("QuantizedMatmul.*", "QuantizedModel.Computes*")),
    Mutant("scale of the first group for all", "llmc/cpu/dequantize.cpp", "f16_to_f32(scales[group])", "f16_to_f32(scales[0])",
           unit("QuantizedMatmul.*", "QuantizedModel.Computes*")),
    Mutant("groups of a row cut short", "llmc/cpu/dequantize.cpp", "groups = quant_groups(K);", "groups = K / kQuantGroup;",
           unit("QuantizedMatmul.*")),
    # ---- llmc/cpu/dot_products.h -------------------------------------------------------------------------------------
    Mutant("products of a row alone are not fused", "llmc/cpu/dot_products.h",
           "multiply_add(row, weights[o], partial[r][o])",
           "Rows == 1 ? partial[r][o] + row * weights[o] : multiply_add(row, weights[o], partial[r][o])",
           unit("MatmulRows.*", "PagedAttention.*")),
    Mutant("a sum that begins anew where a row of x ends", "llmc/cpu/dot_products.h",
           "if (whole < C) add(", "if (whole < C && Rows > 1) add(", unit("MatmulRows.*")),
    # ---- llmc/cpu/embedding.cpp --------------------------------------------------------------------------------------
    Mutant("embedding gradient overwritten by a token's last place", "llmc/cpu/embedding.cpp",
           "row[c] += gradient[c];", "row[c] = gradient[c];", unit("Embedding.*")),
    # ---- llmc/cpu/fp8.cpp --------------------------------------------------------------------------------------------
    Mutant("fp8: the scale is not taken out again", "llmc/cpu/fp8.cpp",
           "out[i] = round_to_fp8(std::isinf(value) ? value : finite, format) * inverse;",
           "out[i] = round_to_fp8(std::isinf(value) ? value : finite, format) + 0.0f * inverse;", unit("CpuFp8.*", "Fp8Model.*")),
    Mutant("fp8, against PyTorch: values are rounded without their scale", "llmc/cpu/fp8.cpp",
           "const float finite = std::clamp(value * scale,", "const float finite = std::clamp(value + 0.0f * scale,",
           unit("Golden.Fp8Training*")),
    Mutant("fp8: a tally has the magnitude of the last call", "llmc/cpu/fp8.cpp",
           "tally->amax_bits = std::max(tally->amax_bits, amax_bits(x, count));", "tally->amax_bits = amax_bits(x, count);",
           unit("CpuFp8.ATally*", "Fp8Model.TheHistory*")),
    Mutant("fp8, against PyTorch: what is beyond the range wraps", "llmc/cpu/fp8.cpp",
           "std::clamp(value * scale, -fp8_largest(format), fp8_largest(format));",
           "std::fmod(value * scale, fp8_largest(format));", unit("Golden.Fp8Training*")),
    # ---- llmc/cpu/fp8_linears.cpp ------------------------------------------------------------------------------------
    Mutant("fp8: rounded weights stay those before the update", "llmc/cpu/fp8_linears.cpp",
           "  scales_.push(step_tallies());\n  places_.forget();\n", "  scales_.push(step_tallies());\n",
           unit("Fp8Model.HalfAndHalf*")),
    Mutant("fp8: each rank knows its own largest magnitudes", "llmc/cpu/fp8_linears.cpp",
           "  scales_.push(step_tallies());\n", "  scales_.push(tallies_);\n", unit("RanksLoop.RanksInFp8*")),
    Mutant("fp8: the log counts one rank's values", "llmc/cpu/fp8_linears.cpp",
           "  micro_batches_ *= ranks.size();\n", "", unit("RanksLoop.RanksInFp8*")),
    Mutant("fp8, against PyTorch: scales follow from the step before the last", "llmc/cpu/fp8_linears.cpp",
           "  scales_.push(step_tallies());\n",
           "  static std::vector<Fp8Tally> late = tallies_;\n  scales_.push(late);\n  late = tallies_;\n", unit("Golden.Fp8Training*")),
    # ---- llmc/cpu/gelu.cpp -------------------------------------------------------------------------------------------
    Mutant("GELU by tanh", "llmc/cpu/gelu.cpp", "out[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * kInvSqrt2));",
           "out[i] = 0.5f * x[i] * (1.0f + std::tanh(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));",
           unit("Gelu.*")),
    # ---- llmc/cpu/inference.cpp --------------------------------------------------------------------------------------
    Mutant("of equal logits the higher id is the first alternative", "llmc/cpu/inference.cpp",
           "rank(a) > rank(b) : a < b; });", "rank(a) > rank(b) : a > b; });", unit("ChangedLlama.*")),
    Mutant("attention of decoding without 1/sqrt(d)", "llmc/cpu/inference.cpp",
           "scale = 1.0f / std::sqrt(static_cast<float>(HS));", "scale = 1.0f;", unit("Golden.*Decoding*")),
    Mutant("a reference that does not round its cache", "llmc/cpu/inference.cpp", "  model->round_cache_to(cache);\n", "",
           unit("FusedTolerance.NoiseOfSumsLiesBelow")),
    Mutant("cached keys turned from position 0", "llmc/cpu/inference.cpp", "span.rows, NKV, span.first_position);",
           "span.rows, NKV, 0);", unit("Golden.*Decoding*", "CpuInference.*")),
    Mutant("logits of inference that depend on the number of rows", "llmc/cpu/inference.cpp",
           "matmul_rows_forward(logits.data(), hidden.data(), head(), nullptr, rows, C, V);",
           "matmul_forward(logits.data(), hidden.data(), head().floats, nullptr, rows, C, V);", unit("CpuInference.Bits*")),
    Mutant("keys appended to the first page", "llmc/cpu/inference.cpp", "span.pages[position / P], h)",
           "span.pages[0], h)", unit("CpuInference.*")),
    Mutant("a slot's id goes to the first slot", "llmc/cpu/inference.cpp",
           "last_ids_[static_cast<std::size_t>(span.slot)] = id;", "last_ids_[0] = id;", unit("CpuInference.Bits*")),
    Mutant("an id drawn for the position of its predecessor", "llmc/cpu/inference.cpp",
           "span.first_position + rows_[wanted.span].rows, &id)", "span.first_position + rows_[wanted.span].rows - 1, &id)",
           unit("CpuInference.*")),
    Mutant("alternatives from the padding", "llmc/cpu/inference.cpp",
           "ids(static_cast<std::size_t>(config_.tokenizer_vocab));", "ids(static_cast<std::size_t>(config_.vocab_size));",
           unit("CpuInference.Logprobs*")),
    Mutant("hidden rows of the first piece of logits", "llmc/cpu/inference.cpp",
           "wanted[static_cast<std::size_t>(first + i)].row * C, C,", "wanted[static_cast<std::size_t>(i)].row * C, C,",
           unit("CpuLlamaTest.ScoresPastTheirPiece*")),
    Mutant("all rows of a verification are sampled for one position", "llmc/cpu/inference.cpp",
           "span.first_position + wanted.row - rows_[wanted.span].first_row + 1;",
           "span.first_position + rows_[wanted.span].rows;", unit("CpuSpeculation.AVerification*")),
    Mutant("more alternatives than ids leave out the last one", "llmc/cpu/inference.cpp",
           "(alternatives, std::ssize(ids));", "(alternatives, std::ssize(ids) - 1);", unit("ChangedLlama.EqualLogits*")),
    # ---- llmc/cpu/llama.cpp ------------------------------------------------------------------------------------------
    Mutant("validation in fp8 has the weights of before the update", "llmc/cpu/llama.cpp",
           "  if (fp8_) fp8_->use_weights(l, weights_.layers[static_cast<std::size_t>(l)], false);\n",
           "  if (fp8_ && training_) fp8_->use_weights(l, weights_.layers[static_cast<std::size_t>(l)], false);\n",
           unit("Fp8Model.Validation*")),
    Mutant("attention of training without 1/sqrt(d)", "llmc/cpu/llama.cpp",
           "1.0f / std::sqrt(static_cast<float>(config_.head_dim))};", "1.0f};", unit("Golden.LlamaTraining*")),
    Mutant("classifier counts ignored labels", "llmc/cpu/llama.cpp",
           "*label_count += labels[n] != kIgnoredLabel ? 1 : 0;", "*label_count += 1;", unit("CpuLlamaTest.*")),
    Mutant("gradients not zeroed", "llmc/cpu/llama.cpp", "    gradient_arena_.clear();\n", "",
           unit("TrainLoopTest.AccumulationEqualsOneBigBatch", "Golden.LlamaTraining*")),
    Mutant("a virtual rank accumulates on top of the one before", "llmc/cpu/llama.cpp",
           "  gradient_arena_.clear();\n  loss_sum_ = 0;\n  rank_micro", "  loss_sum_ = 0;\n  rank_micro",
           unit("VirtualRanks.TheGradient*")),
    Mutant("the norm of a divided update is that of the rank's part", "llmc/cpu/llama.cpp",
           "  ranks_->gather(squares.data(), blocks_of_rank);\n", "", unit("RanksLoop.*BitForBit*")),
    Mutant("layers in use stay those of the step before", "llmc/cpu/llama.cpp",
           "  portion_.places.forget();\n  if (divided_", "  if (divided_", unit("RanksLoop.*BitForBit*")),
    Mutant("a round replaces the sum of those before", "llmc/cpu/llama.cpp",
           "gradient_arena_.at<float>(0), parts_, ranks_added_ > 0);", "gradient_arena_.at<float>(0), parts_, false);",
           unit("RanksLoop.ProcessesShare*")),
    Mutant("labels of the classifier's first piece", "llmc/cpu/llama.cpp", "labels.data() + row, count",
           "labels.data(), count", unit("TrainLoopTest.RowsPastThePiece*")),
    Mutant("one dropout mask for all branches", "llmc/cpu/llama.cpp",
           "dropout_offset(micro_step_, std::max<std::int64_t>(branch, 0),", "dropout_offset(micro_step_, 0,",
           unit("WholeModel.EachBranch*")),
    Mutant("one dropout mask for all micro-steps", "llmc/cpu/llama.cpp", "dropout_offset(micro_step_,", "dropout_offset(0,",
           unit("WholeModel.*")),
    Mutant("dropout in a validation", "llmc/cpu/llama.cpp", "shape.dropout = training_ && branch >= 0",
           "shape.dropout = branch >= 0", unit("WholeModel.Validation*")),
    Mutant("a plan without activations", "llmc/cpu/llama.cpp",
           "  lines.push_back({\"activations (fp32)\", TrainingActivations<float>(config, options, kClassifierRows).plan().bytes()});\n",
           "",
           ("unit:CpuLlamaTest.ThePlan*",)),
    Mutant("bf16 on the CPU is fp32", "llmc/cpu/llama.cpp",
           "  check_precision(config, options);\n  return std::make_unique<Llama>(config, options, nullptr, Shard::none);",
           "  return std::make_unique<Llama>(config, options, nullptr, Shard::none);",
           ("unit:CpuLlamaTest.Other*",)),
    Mutant("fp8: a backward pass has the weights of another layer", "llmc/cpu/llama.cpp",
           "    if (fp8_) fp8_->use_weights(l, weights_.layers[static_cast<std::size_t>(l)], true);\n", "",
           unit("RanksLoop.RanksInFp8*")),
    Mutant("fp8: what is computed again is counted again", "llmc/cpu/llama.cpp",
           "recomputing_ ? Pass::again : Pass::training", "Pass::training", unit("Fp8Model.Recomputation*")),
    Mutant("fp8, against PyTorch: gradients of inputs by the weights of the first step", "llmc/cpu/llama.cpp",
           "    dout = fp8_->gradient(which, l, dout);\n    weight = fp8_->weight(which, l);\n",
           "    dout = fp8_->gradient(which, l, dout);\n    weight = fp8_->weight(which, l);\n"
           "    static std::vector<std::pair<const float*, std::vector<float>>> first;\n"
           "    std::size_t known = 0;\n"
           "    while (known < first.size() && first[known].first != weight) ++known;\n"
           "    if (known == first.size()) first.push_back({weight, std::vector<float>(weight, weight + size.C * size.OC)});\n"
           "    weight = first[known].second.data();\n", unit("Golden.Fp8Training*")),
    Mutant("norms that layers share are those of each layer", "llmc/cpu/llama.cpp",
           "if (!parsed || options_.recompute != Recompute::none) return {};",
           "if (!parsed || options_.recompute == Recompute::block) return {};",
           unit("WholeModel.Activations*")),
    Mutant("statistics that are asked for twice are exchanged twice", "llmc/cpu/llama.cpp",
           "if (ranks_ != nullptr && !exchanged_) complete_gradients();", "if (ranks_ != nullptr) complete_gradients();",
           unit("VirtualRanks.StatisticsCan*")),
    Mutant("backward after a validation", "llmc/cpu/llama.cpp", "  if (!training_) fail(Exit::internal, \"backward() without a forward()\");\n",
           "", unit("Fp8Model.ValidationChanges*")),
    # ---- llmc/cpu/llama_inference.cpp --------------------------------------------------------------------------------
    Mutant("inference without the bias of norms", "llmc/cpu/llama_inference.cpp",
           "{norm.weight, norm.bias}", "{norm.weight, nullptr}",
           unit("WholeModel.ItsDecoder*")),
    Mutant("a buffer of a Llama is not counted", "llmc/cpu/llama_inference.cpp", "row_values() + norm_.size() + branch_.size()",
           "row_values() + branch_.size()",
           unit("CpuInference.ItsMemory*")),
    # ---- llmc/cpu/matmul_rows.cpp ------------------------------------------------------------------------------------
    Mutant("scale of the neighbouring row", "llmc/cpu/matmul_rows.cpp", "multiply_add(sum, scales[o], of_bias)",
           "multiply_add(sum, scales[o > 0 ? o - 1 : o], of_bias)", unit("QuantizedMatmul.*", "QuantizedModel.Computes*")),
    Mutant("scale applied twice", "llmc/cpu/matmul_rows.cpp", "multiply_add(sum, scales[o], of_bias)",
           "multiply_add(sum * scales[o], scales[o], of_bias)", unit("QuantizedMatmul.*", "QuantizedModel.Computes*")),
    Mutant("bias scaled as well", "llmc/cpu/matmul_rows.cpp", "multiply_add(sum, scales[o], of_bias)", "(sum + of_bias) * scales[o]",
           unit("QuantizedMatmul.*")),
    # ---- llmc/cpu/neox_inference.cpp ---------------------------------------------------------------------------------
    Mutant("query_key_value read as three blocks", "llmc/cpu/neox_inference.cpp",
           "HeadView{qkv_.data() + part * HS, 0, 3 * C, 3 * HS}", "HeadView{qkv_.data() + part * C, 0, 3 * C, HS}",
           unit("Golden.NeoxDecoding*")),
    Mutant("parallel residual loses attention", "llmc/cpu/neox_inference.cpp",
           "c.parallel_residual ? Accumulate::yes : Accumulate::no", "Accumulate::no", unit("Golden.NeoxDecoding*")),
    Mutant("a GEMM of inference that depends on the number of rows", "llmc/cpu/neox_inference.cpp",
           "matmul_rows_forward(up_.data(), norm2_.data(), {w.up.weight, q.up}, w.up.bias, rows, C, F);",
           "matmul_forward(up_.data(), norm2_.data(), w.up.weight, w.up.bias, rows, C, F);", unit("CpuInference.Bits*")),
    # ---- llmc/cpu/paged_attention.cpp --------------------------------------------------------------------------------
    Mutant("more than 4 query heads have the wrong keys, over pages", "llmc/cpu/paged_attention.cpp",
           "kv_head = head / (shape.NH / kv.NKV);",
           "kv_head = shape.NH / kv.NKV > 4 ? head % kv.NKV : head / (shape.NH / kv.NKV);",
           unit("PagedAttention.*", "WholeModel.HeadsThatShare*")),
    Mutant("single rows of attention see a page less", "llmc/cpu/paged_attention.cpp",
           "(position + 1) / P : 0;", "(position + 1) / P : (position + 1) / P;", unit("PagedAttention.*")),
    Mutant("a page's maximum forgets the pages before", "llmc/cpu/paged_attention.cpp",
           "float maximum = row.maximum;", "float maximum = -std::numeric_limits<float>::infinity();",
           unit("PagedAttention.*", "CpuDecoder.*")),
    # ---- llmc/cpu/rank_sum.cpp ---------------------------------------------------------------------------------------
    Mutant("the ranks are added from the last one", "llmc/cpu/rank_sum.cpp",
           "std::copy_n(pieces[0] + first, size, block);\n    for (const float* piece : pieces.subspan(1))",
           "std::copy_n(pieces.back() + first, size, block);\n    for (const float* piece : pieces.first(pieces.size() - 1))",
           unit("RankSum.AddsInTheOrder*")),
    # ---- llmc/cpu/residual_norm.cpp ----------------------------------------------------------------------------------
    Mutant("norm backward without the skip gradient", "llmc/cpu/residual_norm.cpp", "dh[c] += skip[c];",
           "dh[c] += 0.0f * skip[c];", unit("OperatorVectors.ResidualNorm*")),
    Mutant("norm ignores eps", "llmc/cpu/residual_norm.cpp", "std::sqrt(variance + shape.eps)",
           "std::sqrt(variance + 1e-5)", unit("*ResidualNorm*")),
    Mutant("dropout does not rescale what it keeps", "llmc/cpu/residual_norm.cpp",
           "const float kept = scale / (1.0f - shape.dropout);", "const float kept = scale;", unit("*ResidualNorm*")),
    Mutant("dropout words counted from the row", "llmc/cpu/residual_norm.cpp",
           "random.word[e % 4]",
           "random.word[(e - begin) % 4]",
           unit("ResidualNorm.DropoutMaskIsAFlat*")),
    # ---- llmc/cpu/rope.cpp -------------------------------------------------------------------------------------------
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
    # ---- llmc/cpu/swiglu.cpp -----------------------------------------------------------------------------------------
    Mutant("SwiGLU with its branches swapped", "llmc/cpu/swiglu.cpp", """\
    const float* gate = gate_up + n * 2 * F;
    const float* up = gate + F;
    float* row""", """\
    const float* up = gate_up + n * 2 * F;
    const float* gate = up + F;
    float* row""", unit("Swiglu.*")),
]
