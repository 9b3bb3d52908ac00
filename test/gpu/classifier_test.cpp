// Softmax + cross-entropy on the GPU, against the CPU.

#include "llmc/cuda/op/classifier/classifier.h"

#include "llmc/cpu/classifier.h"
#include "llmc/model/train_model.h"
#include "test/gpu/operator_tools.h"

namespace weft::cuda {
namespace {

using namespace weft::test;
using Labels = std::vector<std::int32_t>;

// Every third row is ignored; the others take the first label, the last, and some between.
Labels make_labels(std::int64_t N, std::int64_t V) {
  Labels labels(static_cast<std::size_t>(N));
  for (std::size_t n = 0; n < labels.size(); ++n) {
    const std::int64_t choices[] = {0, V - 1, kIgnoredLabel, static_cast<std::int64_t>(n * 31 + 5) % V};
    labels[n] = static_cast<std::int32_t>(choices[n % 4]);
  }
  return labels;
}

// Rows of V logits at a distance of `stride`; what lies between rows is `filler`.
Floats padded(const Floats& rows, std::int64_t N, std::int64_t V, std::int64_t stride, float filler) {
  Floats result(static_cast<std::size_t>(N * stride), filler);
  for (std::int64_t n = 0; n < N; ++n) std::copy_n(rows.begin() + n * V, V, result.begin() + n * stride);
  return result;
}

constexpr float kLossScale = 1.0f / 16;

// Gradients are compared a second time without the elements of the labels, beside which all others are nearly nothing.
template <typename T>
void expect_gradient(const Floats& got, Floats want, const Labels& labels, std::int64_t stride) {
  expect_near<T>(got, want, "dlogits");
  Floats others = got;
  for (std::size_t n = 0; n < labels.size(); ++n) {
    if (labels[n] == kIgnoredLabel) continue;
    const std::size_t at = n * static_cast<std::size_t>(stride) + static_cast<std::size_t>(labels[n]);
    others[at] = want[at] = 0;
  }
  expect_near<T>(others, want, "dlogits_of_others");
}

// `logits` [N, V] are values that T holds exactly.
template <typename T>
void check_logits(const Floats& logits, const Labels& labels, std::int64_t V, std::int64_t stride,
                  const ClassifierLimits& limits) {
  const auto N = static_cast<std::int64_t>(labels.size());
  SCOPED_TRACE(type_name<T>() + " " + std::to_string(N) + " x " + std::to_string(V) + " stride " +
               std::to_string(stride));
  Floats gradient = logits, losses(static_cast<std::size_t>(N));
  cpu::classifier(gradient.data(), losses.data(), labels.data(), N, V, kLossScale, true);

  const Floats rows = padded(logits, N, V, stride, NAN);  // padding that is read shows
  const DeviceBuffer<std::int32_t> gpu_labels(labels);
  const DeviceBuffer<T> written = on_device<T>(rows), again = on_device<T>(rows), kept = on_device<T>(rows);
  const DeviceBuffer<float> gpu_losses(losses.size()), losses_alone(losses.size());
  classifier(written.data(), gpu_losses.data(), gpu_labels.data(), N, V, stride, kLossScale, true, nullptr, limits);
  expect_gradient<T>(on_host(written), padded(gradient, N, V, stride, 0.0f), labels, stride);
  expect_near<float>(on_host(gpu_losses), losses, "losses");
  classifier(again.data(), losses_alone.data(), gpu_labels.data(), N, V, stride, kLossScale, true, nullptr, limits);
  expect_same_bits(written, again, "dlogits");
  classifier(kept.data(), losses_alone.data(), gpu_labels.data(), N, V, stride, kLossScale, false, nullptr, limits);
  expect_same_bits(gpu_losses, losses_alone, "losses");
  expect_same_bits(kept, on_device<T>(rows), "logits without write_gradient");
}

// Weights of the rows: those of the CPU, and 1 is none.
template <typename T>
void check_weights(std::int64_t N, std::int64_t V, std::int64_t stride, const ClassifierLimits& limits) {
  SCOPED_TRACE(type_name<T>() + " " + std::to_string(N) + " x " + std::to_string(V) + " stride " +
               std::to_string(stride));
  const Floats logits = random_stored<T>(N * V, 1, 4, -3), rows = padded(logits, N, V, stride, NAN);
  const Labels labels = make_labels(N, V);
  const DeviceBuffer<std::int32_t> gpu_labels(labels);
  const auto computed = [&](const float* weights, const DeviceBuffer<float>& losses) {
    DeviceBuffer<T> gradient = on_device<T>(rows);
    classifier(gradient.data(), losses.data(), gpu_labels.data(), N, V, stride, kLossScale, true, nullptr, limits,
               weights);
    return gradient;
  };
  Floats weights(static_cast<std::size_t>(N));
  for (std::size_t n = 0; n < weights.size(); ++n) weights[n] = 1.5f - 0.4f * static_cast<float>(n);
  Floats gradient = logits, losses(weights.size());
  cpu::classifier(gradient.data(), losses.data(), labels.data(), N, V, kLossScale, true, weights.data());
  const DeviceBuffer<float> gpu_weights(weights), ones(Floats(weights.size(), 1.0f)), gpu_losses(losses.size()),
      plain_losses(losses.size());
  const DeviceBuffer<T> plain = computed(nullptr, plain_losses);
  expect_gradient<T>(on_host(computed(gpu_weights.data(), gpu_losses)), padded(gradient, N, V, stride, 0.0f), labels,
                     stride);
  expect_same_bits(gpu_losses, plain_losses, "losses");
  expect_same_bits(computed(ones.data(), gpu_losses), plain, "dlogits");
}
template <typename T>
void check_weights() {
  for (const std::int64_t V : {7, 1003, 50'257}) {
    check_weights<T>(6, V, V, classifier_limits());
    check_weights<T>(6, V, (V + 7) / 8 * 8, classifier_limits());
    check_weights<T>(6, V, (V + 7) / 8 * 8, {8, 99 << 10, 100 << 10});
  }
}
TEST(Classifier, WeightsOfRows) {
  check_weights<float>();
  check_weights<bf16>();
  check_weights<fp16>();
}
template <typename T>
void check_classifier(std::int64_t N, std::int64_t V, std::int64_t stride,
                      const ClassifierLimits& limits = classifier_limits()) {
  check_logits<T>(random_stored<T>(N * V, 1, 4, -3), make_labels(N, V), V, stride, limits);
}

// GPUs whose blocks take a row each, with shared memory for all of it or for its beginning (sm_80, sm_86).
const ClassifierLimits kOlder[] = {{8, 163 << 10, 164 << 10}, {8, 99 << 10, 100 << 10}};

template <typename T>
void check_shapes() {
  for (const std::int64_t V : {1, 2, 7, 8, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 17'003}) {
    for (const std::int64_t N : {1, 7}) {
      check_classifier<T>(N, V, V);
      check_classifier<T>(N, V, (V + 7) / 8 * 8);
      check_classifier<T>(N, V, (V + 127) / 128 * 128);
    }
  }
  check_classifier<T>(5, 50'257, 50'257);
  check_classifier<T>(5, 50'257, 50'264);
  check_classifier<T>(9, 128'256, 128'256);
  check_classifier<T>(1000, 515, 520);
  for (const std::int64_t V : {78'001, 110'001, 150'003, 190'001, 220'001})
    check_classifier<T>(3, V, (V + 15) / 16 * 16);
  check_classifier<T>(2, 400'003, 400'008);      // parts of several chunks
  check_classifier<T>(2, 1'000'003, 1'000'008);  // more than a cluster holds
  for (const ClassifierLimits& limits : kOlder) {
    for (const std::int64_t V : {1, 7, 8, 1003, 12'291, 16'383, 16'384, 16'385, 128'256}) {
      check_classifier<T>(5, V, (V + 7) / 8 * 8, limits);
      check_classifier<T>(5, V, (V + 127) / 128 * 128, limits);
    }
    check_classifier<T>(1000, 515, 520, limits);
  }
}
TEST(Classifier, Fp32) {
  check_shapes<float>();
}
TEST(Classifier, Bf16) {
  check_shapes<bf16>();
}
TEST(Classifier, Fp16) {
  check_shapes<fp16>();
}

// -inf logits (masked tokens), far-off logits, and a row whose threads hold nothing but -inf.
TEST(Classifier, ExtremeLogits) {
  const std::int64_t N = 4, V = 100'000;
  Floats logits(static_cast<std::size_t>(N * V), -INFINITY);
  logits[5] = 3, logits[99'999] = 2;                          // row 0: two tokens allowed
  for (std::int64_t v = 0; v < V; ++v) logits[V + v] = 1000;  // row 1: e^1000 overflows without the maximum
  for (std::int64_t v = 0; v < V; ++v) logits[2 * V + v] = v == 7 ? 0.0f : -1000.0f - static_cast<float>(v % 3);
  logits[3 * V + 3] = -2, logits[3 * V + 4] = 1;  // row 3: all logits of some blocks are -inf
  const Labels labels = {5, 4, 7, 3};
  Floats gradient = logits, losses(N);
  cpu::classifier(gradient.data(), losses.data(), labels.data(), N, V, 1, true);
  const DeviceBuffer<std::int32_t> gpu_labels(labels);
  const DeviceBuffer<float> gpu_logits(logits), gpu_losses(N);
  classifier(gpu_logits.data(), gpu_losses.data(), gpu_labels.data(), N, V, V, 1, true, nullptr);
  expect_near<float>(on_host(gpu_losses), losses, "losses");
  expect_near<float>(on_host(gpu_logits), gradient, "dlogits");
}

// Row n has its greatest logit in column columns[n], so far above the others that without it every exponential of the row
// overflows; then the only one that is not -inf; then a NaN. So no column may be left out of a maximum or a sum.
template <typename T>
void check_every_column(std::int64_t V, std::int64_t stride, const ClassifierLimits& limits) {
  const std::vector<std::int64_t> columns = telling_columns(V);
  const auto N = static_cast<std::int64_t>(columns.size());
  const auto with_extreme = [&](float others, float extreme) {
    Floats logits = random_stored<T>(N * V, 1, 2);
    for (std::int64_t n = 0; n < N; ++n) {
      if (others != 0) std::fill_n(logits.begin() + n * V, V, others);
      logits[static_cast<std::size_t>(n * V + columns[static_cast<std::size_t>(n)])] = extreme;
    }
    return logits;
  };
  Labels at_extreme, beside;
  for (const std::int64_t column : columns) {
    at_extreme.push_back(static_cast<std::int32_t>(column));
    beside.push_back(static_cast<std::int32_t>((column + 5) % V));
  }
  check_logits<T>(with_extreme(0, 256), beside, V, stride, limits);
  check_logits<T>(with_extreme(0, 256), at_extreme, V, stride, limits);
  check_logits<T>(with_extreme(-INFINITY, -3), at_extreme, V, stride, limits);

  const DeviceBuffer<T> bad = on_device<T>(padded(with_extreme(0, NAN), N, V, stride, 0));
  const DeviceBuffer<std::int32_t> labels(beside);
  const DeviceBuffer<float> losses(static_cast<std::size_t>(N));
  classifier(bad.data(), losses.data(), labels.data(), N, V, stride, 1, true, nullptr, limits);
  const Floats got = on_host(losses), gradient = on_host(bad);
  for (std::int64_t n = 0; n < N; ++n) {
    const std::int64_t column = columns[static_cast<std::size_t>(n)];
    EXPECT_TRUE(std::isnan(got[static_cast<std::size_t>(n)])) << "NaN in column " << column << " of " << V;
    EXPECT_TRUE(std::isnan(gradient[static_cast<std::size_t>(n * stride)]))
        << "NaN in column " << column << " of " << V;
  }
}
template <typename T>
void check_every_column() {
  for (const std::int64_t V : {8, 24, 1003, 1024, 16'391, 50'257}) {
    check_every_column<T>(V, (V + 7) / 8 * 8, classifier_limits());
    check_every_column<T>(V, (V + 7) / 8 * 8 + 1, classifier_limits());  // one element at a time
    for (const ClassifierLimits& limits : kOlder) check_every_column<T>(V, (V + 7) / 8 * 8, limits);
  }
}
TEST(Classifier, EveryColumnCountsFp32) {
  check_every_column<float>();
}
TEST(Classifier, EveryColumnCountsBf16) {
  check_every_column<bf16>();
}
TEST(Classifier, EveryColumnCountsFp16) {
  check_every_column<fp16>();
}

TEST(Classifier, NotANumberReachesTheLoss) {
  const std::int64_t V = 4099;
  for (const std::int64_t where : {std::int64_t{0}, V - 1, V / 2}) {
    Floats logits = random_floats(V, 1);
    logits[static_cast<std::size_t>(where)] = NAN;
    const DeviceBuffer<std::int32_t> label(Labels{3});
    const DeviceBuffer<float> gpu_logits(logits), loss(1);
    classifier(gpu_logits.data(), loss.data(), label.data(), 1, V, V, 1, true, nullptr);
    EXPECT_TRUE(std::isnan(on_host(loss)[0])) << where;
  }
}

TEST(Classifier, TotalAddsUpMicroBatches) {
  const DeviceBuffer<LossTotal> total(1), again(1);
  double want = 0;
  std::int64_t count = 0;
  for (const DeviceBuffer<LossTotal>* target : {&total, &again}) {
    check(cudaMemset(target->data(), 0, sizeof(LossTotal)), "clear");
    want = 0;
    count = 0;
    for (const std::int64_t N : {1, 7, 1024, 40'001}) {
      const Floats losses = random_floats(N, static_cast<unsigned>(N), 1, 9);
      const Labels labels = make_labels(N, 100);
      for (const float loss : losses) want += static_cast<double>(loss);
      for (const std::int32_t label : labels) count += label != kIgnoredLabel ? 1 : 0;
      const DeviceBuffer<float> gpu_losses(losses);
      const DeviceBuffer<std::int32_t> gpu_labels(labels);
      add_losses(target->data(), gpu_losses.data(), gpu_labels.data(), N, nullptr);
      check(cudaStreamSynchronize(nullptr), "add_losses");
    }
  }
  const LossTotal got = total.download()[0];
  EXPECT_NEAR(got.loss_sum, want, 1e-12 * want);
  EXPECT_EQ(got.label_count, count);
  expect_same_bits(total, again, "total");
}

}  // namespace
}  // namespace weft::cuda
