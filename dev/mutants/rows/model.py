"""Planted bugs in llmc/model."""

from mutant import Mutant, unit

ROOM = "llmc/model"

ROWS = [
    Mutant("NaN passes a comparison", "distance", "finite && row", "row", unit("Distance.*")),
    Mutant("a dump may not err what an ulp leads to", "check", "? kFactor * ulp_distance", "? 0 * kFactor * ulp_distance",
           unit("CompareDump.SteppedParameters*")),
    Mutant("llama3 scaling divides what it should keep", "rope_inverse_frequencies", "(wavelength < original / high)",
           "(wavelength < original / high / 2)", unit("Rope.Llama3*")),
    Mutant("linear scaling multiplies", "rope_inverse_frequencies", "/= factor; return", "*= factor;\n    return",
           unit("Rope.Linear*")),
    Mutant("yarn divides fast dimensions", "yarn_scaled", "(1 - kept) + frequencies[i] * kept",
           "kept + frequencies[i] * (1 - kept)", unit("Rope.Yarn*")),
    Mutant("sin is not scaled", "rope_table", "sin(static_cast<double>(angle))) * scale", "sin(static_cast<double>(angle)))",
           unit("Rope.TableIsScaled*")),
    Mutant("fp8: all layers have a place where ranks have two layers' parameters", "Fp8Buffers::Fp8Buffers",
           "parameters_sharded ?", "parameters_sharded && layers < 2 ?",
           unit("Fp8Buffers.*", "RanksLoop.DividedParametersAreRounded*")),
    Mutant("fp8: scales know nothing of the last step", "find_exponents", "int64_t step = 0", "int64_t step = 1",
           unit("Fp8Scales.*")),
    Mutant("fp8: what is not finite is a zero of the history", "push", "if (std::isfinite(amax)) amax_[slot] = amax",
           "amax_[slot] = std::isfinite(amax) ? amax : 0", unit("Fp8Scales.WhatIsNotFinite*")),
    Mutant("fp8: a place has every layer that was in it", "has", "== layer;", "!= kNone;",
           unit("Fp8Buffers.*", "RanksLoop.RanksInFp8*")),
    Mutant("a guess counts whatever was sampled", "accept_drafts", "|| rows[i].id.id != drafted[i]", "",
           unit("CpuSpeculation.*", "Engine.Drafts*")),
    Mutant("biases of a Llama begin behind its weights", "bind_weights", "bias_of(modules.front())",
           "bias_of(modules.back())", unit("Layout.BiasesOfALlama*")),
    Mutant("input and output projection of attention mixed up", "bind_weights", "linear(block.qkv)",
           "linear(block.output)", unit("Layout.Llama*")),
    Mutant("damaged quantised weights are loaded", "read_quantized", "file_.verify(tensor);", "",
           unit("QuantizedModel.DamageIsFound*")),
    Mutant("-128 passes as int8", "first_invalid_value", "q == INT8_MIN;", "q != q;", unit("QuantizedModel.Refuses*")),
    Mutant("the cache may overflow", "check_room", "capacity_ - length_", "capacity_", unit("CpuDecoder.NothingIsWritten*")),
    Mutant("weight decay on norms", "add_norm", "Init::ones, false", "Init::ones, true",
           unit("TensorTable.OnlyMatricesDecay")),
    Mutant("a copy of the state read from its first value each time", "read", "static_cast<std", "0 * static_cast<std",
           unit("BackgroundSaveTest.BothSourcesGiveEveryPieceOfATensor")),
]
