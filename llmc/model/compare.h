// --compare: runs the inputs of a reference dump (scripts/dump_reference.py) through a model and prints one
// row a tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llmc/file/tensor_file.h"
#include "llmc/model/decode_model.h"
#include "llmc/model/train_model.h"

namespace weft {

// The norm in which two tensors are compared, as |got - want| / |want|. `max` is the strict one: a few
// hundred rounding errors hold in it for sums of any length. `l2` is for parameters after AdamW steps, where
// an element whose gradient is rounding noise moves by the learning rate in a direction that noise decides.
// `loss` is max, but with 1 in the place of a smaller |want|: a loss is the logarithm of a probability, which an error
// of e changes by the factor 1 + e however small the loss is.
enum class Norm { max, l2, loss };

// How far a tensor is from its reference; `relative` in the norm asked for.
struct TensorDistance {
  std::string name;
  double max_abs = 0, relative = 0, cosine = 1;
  bool pass = false;
  double tolerance = 0;  // of `relative`
};
// Different sizes and non-finite values never pass: they are infinitely far away.
TensorDistance distance(const std::string& name, std::span<const float> got, std::span<const float> want,
                        double tolerance, Norm norm = Norm::max);

struct Comparison {
  std::vector<TensorDistance> rows;
  double tolerance = 0;  // in Norm::max; 0: those of the rows, in the 2-norm

  bool passed() const;                     // every row, and at least one
  std::vector<std::string> table() const;  // a header, one line a row, a verdict
};

// The options of the model that compare_training() makes for the dump's batch. More positions than the model has:
// Exit::bad_file, before anything is allocated for them.
TrainOptions training_options(const TensorFile& dump, Precision precision, const ModelConfig& config);
// Activations, loss, every gradient, and the losses and parameters of the dump's AdamW steps, whichever the
// dump holds. `make` builds the model, with its parameters loaded, for the dump's batch. Exit::bad_file for a dump in fp8 with
// another precision, and for another dump with fp8.
// With bf16 a tensor may err, in the 2-norm, three times what PyTorch's own bf16 run errs on it against its fp32 run (the
// dump's act16.*, loss16, grad16.*, adamw16.losses); tensors without that yardstick are left out, and `tolerance` is not
// used.
// With fp32 `tolerance` holds, except after AdamW steps: losses and parameters may err three times what PyTorch's own steps
// make of weights that begin one unit in the last place away (the dump's "ulp"), if that is more. The first steps divide a
// gradient by its own size, so that rounding noise decides where an element with a tiny gradient goes.
// With fp8 a value within rounding noise of the middle between two codes may get either, and by that one step of fp8 differ from its
// reference, as does what follows from it. A tensor may err, in the 2-norm, three times what noise on all that is rounded makes of
// it in PyTorch (`activations` f32: noise of fp32, bf16: a model in bf16), and, if that is less, twice what rounding to fp8 makes of
// it: two computations whose codes have nothing in common are sqrt(2) times that apart. `tolerance` is the least. What a model
// in bf16 does not keep is left out, and so are single numbers.
Comparison compare_training(const TensorFile& dump, Precision precision, double tolerance,
                            const std::function<std::unique_ptr<TrainModel>(const TrainOptions&)>& make,
                            DType activations = DType::f32);

// Positions of the K/V cache that compare_decoding() needs for the dump. More than the model has: Exit::bad_file, before
// anything is allocated for them.
std::int64_t decoding_positions(const TensorFile& dump, const ModelConfig& config);
// Activations, loss and the greedy continuation, whichever the dump holds.
Comparison compare_decoding(const TensorFile& dump, double tolerance, DecodeModel& model);

// The factor of gradient clipping, as torch.nn.utils.clip_grad_norm_ computes it: min(1, limit / (norm +
// 1e-6)). limit 0: no clipping.
float clip_factor(double gradient_norm, double limit);

}  // namespace weft
