// The CPU operators against PyTorch: vectors of scripts/make_operator_vectors.py, computed in float64 and
// rounded once. The tolerance, 1e-5 of a tensor's largest element, is derived in gradient_check.h.

#include <cstring>

#include "llmc/base/json.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/muon.h"
#include "llmc/cpu/residual_norm.h"
#include "llmc/cpu/rope.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/file/tensor_file.h"
#include "test/cpp/gradient_check.h"

namespace weft::cpu {
namespace {

using namespace weft::test;

// One case of a vector file: its tensors by their short names, its sizes from the configuration.
class Case {
 public:
  Case(const TensorFile& file, const Json& sizes) : file_(file), sizes_(sizes) {}

  std::string name() const { return sizes_.at("name"); }
  std::int64_t size(const char* key) const { return sizes_.at(key); }
  float number(const char* key) const { return sizes_.at(key); }
  const Json& operator[](const char* key) const { return sizes_.at(key); }

  bool has(const std::string& tensor) const { return file_.find(name() + "." + tensor) != nullptr; }
  Floats floats(const std::string& tensor) const {
    const TensorInfo& info = file_.at(name() + "." + tensor);
    Floats values(info.elements());
    file_.read_f32(info, values.data());
    return values;
  }
  std::vector<std::int32_t> integers(const std::string& tensor) const {
    const TensorInfo& info = file_.at(name() + "." + tensor);
    file_.verify(info);
    std::vector<std::int32_t> values(info.elements());
    std::memcpy(values.data(), file_.bytes(info).data(), info.bytes);
    return values;
  }
  void expect(const Floats& got, const std::string& tensor) const {
    expect_close(got, floats(tensor), name() + "." + tensor);
  }

 private:
  const TensorFile& file_;
  const Json& sizes_;
};

void for_each_case(const std::string& op, const std::function<void(const Case&)>& check) {
  const TensorFile file = TensorFile::open("test/fixtures/operators/" + op + ".bin", FileKind::reference_dump);
  ASSERT_FALSE(file.config().at("cases").empty());
  for (const Json& sizes : file.config().at("cases")) check(Case(file, sizes));
}

// The data of an optional tensor: null where the case does not have it.
struct Optional {
  Optional(const Case& c, const std::string& tensor) {
    if (c.has(tensor)) values = c.floats(tensor), data = values.data();
  }
  Floats values;
  const float* data = nullptr;
};

TEST(OperatorVectors, Embedding) {
  for_each_case("embedding", [](const Case& c) {
    const std::int64_t N = c.size("N"), C = c.size("C");
    const std::vector<std::int32_t> tokens = c.integers("tokens");
    const Floats weight = c.floats("weight"), dout = c.floats("dout");
    Floats out(N * C), dweight(weight.size());
    embedding_forward(out.data(), tokens.data(), weight.data(), N, C);
    embedding_backward(dweight.data(), dout.data(), tokens.data(), N, C);
    c.expect(out, "out");
    c.expect(dweight, "dweight");
  });
}

TEST(OperatorVectors, Matmul) {
  for_each_case("matmul", [](const Case& c) {
    const std::int64_t N = c.size("N"), C = c.size("C"), OC = c.size("OC");
    const Floats x = c.floats("x"), weight = c.floats("weight"), dout = c.floats("dout");
    const Optional bias(c, "bias");
    Floats out(N * OC), dx(N * C), dweight(OC * C), dbias(OC);
    matmul_forward(out.data(), x.data(), weight.data(), bias.data, N, C, OC);
    matmul_backward(dx.data(), dweight.data(), bias.data ? dbias.data() : nullptr, dout.data(), x.data(), weight.data(),
                    N, C, OC);
    c.expect(out, "out");
    c.expect(dx, "dx");
    c.expect(dweight, "dweight");
    if (bias.data) c.expect(dbias, "dbias");
  });
}

void check_residual_norm(const Case& c) {
  const std::int64_t rows = c.size("rows"), C = c.size("C"), n = rows * C;
  const NormKind kind = c["kind"] == "rmsnorm" ? NormKind::rmsnorm : NormKind::layernorm;
  const ResidualNormShape shape = {rows, C, kind, c.number("eps"), 0, 0, 0};
  const Optional residual(c, "residual"), rowscale(c, "rowscale"), colscale(c, "colscale"), bias(c, "bias"),
      weight2(c, "weight2"), bias2(c, "bias2"), dout2(c, "dout2");
  const Floats x = c.floats("x"), weight = c.floats("weight"), dout = c.floats("dout");
  const Floats dresidual_out = c.floats("dresidual_out");

  Floats residual_out(n), out(n), out2(n), mean(rows), rstd(rows);
  ResidualNormForward forward;
  forward.x = x.data(), forward.residual = residual.data;
  forward.rowscale = rowscale.data, forward.colscale = colscale.data;
  forward.weight = weight.data(), forward.bias = bias.data;
  forward.weight2 = weight2.data, forward.bias2 = bias2.data;
  forward.residual_out = residual_out.data(), forward.out = out.data(), forward.out2 = out2.data();
  forward.mean = mean.data(), forward.rstd = rstd.data();
  residual_norm_forward(shape, forward);
  c.expect(residual_out, "residual_out");
  c.expect(out, "out");
  if (weight2.data) c.expect(out2, "out2");

  Floats dx(n), dresidual(n), dweight(C), dbias(C), dweight2(C), dbias2(C), dcolscale(C);
  ResidualNormBackward backward;
  backward.dout = dout.data(), backward.dout2 = dout2.data, backward.dresidual_out = dresidual_out.data();
  backward.residual_out = residual_out.data(), backward.x = x.data();
  backward.rowscale = rowscale.data, backward.colscale = colscale.data;
  backward.weight = weight.data(), backward.weight2 = weight2.data;
  backward.mean = mean.data(), backward.rstd = rstd.data();
  backward.dx = dx.data(), backward.dresidual = dresidual.data();
  backward.dweight = dweight.data(), backward.dbias = dbias.data();
  if (weight2.data) backward.dweight2 = dweight2.data(), backward.dbias2 = dbias2.data();
  if (colscale.data) backward.dcolscale = dcolscale.data();
  residual_norm_backward(shape, backward);
  c.expect(dx, "dx");
  c.expect(dweight, "dweight");
  if (residual.data) c.expect(dresidual, "dresidual");
  if (bias.data) c.expect(dbias, "dbias");
  if (weight2.data) c.expect(dweight2, "dweight2");
  if (bias2.data) c.expect(dbias2, "dbias2");
  if (colscale.data) c.expect(dcolscale, "dcolscale");
}

TEST(OperatorVectors, ResidualNorm) {
  for_each_case("residual_norm", check_residual_norm);
}

TEST(OperatorVectors, Rope) {
  for_each_case("rope", [](const Case& c) {
    const std::int64_t B = c.size("B"), T = c.size("T"), NH = c.size("NH"), HS = c.size("HS"), first = c.size("first");
    RopeTable table;
    table.positions = first + T, table.half = c.size("rotary_dim") / 2;
    table.cos = c.floats("cos"), table.sin = c.floats("sin");
    const auto view = [&](Floats& values) { return HeadView{values.data(), T * NH * HS, NH * HS, HS}; };
    Floats out = c.floats("x"), dx = c.floats("dout");
    rope_forward(view(out), table, B, T, NH, first);
    rope_backward(view(dx), table, B, T, NH, first);
    c.expect(out, "out");
    c.expect(dx, "dx");
  });
}

// Both forms against PyTorch's. `s`: without its sizes.
void expect_attention(const Case& c, AttentionShape s) {
  s.B = c.size("B"), s.TQ = c.size("TQ"), s.TK = c.size("TK");
  s.NH = c.size("NH"), s.NKV = c.size("NKV"), s.HS = c.size("HS"), s.causal = c["causal"];
  s.scale = 1.0f / std::sqrt(static_cast<float>(s.HS));
  for (const auto& [forward, backward] :
       {std::pair{&attention_forward, &attention_backward}, {&plain::attention_forward, &plain::attention_backward}}) {
    const Floats q = c.floats("q"), k = c.floats("k"), v = c.floats("v"), dout = c.floats("dout");
    Floats out(q.size()), lse(s.B * s.NH * s.TQ), dq(q.size()), dk(k.size()), dv(v.size());
    const auto queries = [&](auto& values) { return HeadViewOf{values.data(), s.TQ * s.NH * s.HS, s.NH * s.HS, s.HS}; };
    const auto keys = [&](auto& values) { return HeadViewOf{values.data(), s.TK * s.NKV * s.HS, s.NKV * s.HS, s.HS}; };
    forward(s, queries(out), lse.data(), queries(q), keys(k), keys(v));
    backward(s, queries(dq), keys(dk), keys(dv), queries(dout), queries(out), lse.data(), queries(q), keys(k), keys(v));
    c.expect(out, "out");
    c.expect(lse, "lse");
    c.expect(dq, "dq");
    c.expect(dk, "dk");
    c.expect(dv, "dv");
  }
}

TEST(OperatorVectors, Attention) {
  for_each_case("attention", [](const Case& c) { expect_attention(c, {}); });
}

TEST(OperatorVectors, AttentionWithWindowsAndDocuments) {
  for_each_case("attention_masks", [](const Case& c) {
    const std::vector<std::int32_t> starts = c["document_starts"];
    AttentionShape s;
    s.window = c.size("window"), s.document_starts = starts.data();
    expect_attention(c, s);
  });
}

TEST(OperatorVectors, Swiglu) {
  for_each_case("swiglu", [](const Case& c) {
    const std::int64_t N = c.size("N"), F = c.size("F");
    const Floats gate_up = c.floats("gate_up"), dout = c.floats("dout");
    Floats out(N * F), dgate_up(N * 2 * F);
    swiglu_forward(out.data(), gate_up.data(), N, F);
    swiglu_backward(dgate_up.data(), dout.data(), gate_up.data(), N, F);
    c.expect(out, "out");
    c.expect(dgate_up, "dgate_up");
  });
}

TEST(OperatorVectors, Gelu) {
  for_each_case("gelu", [](const Case& c) {
    const std::int64_t count = c.size("count");
    const Floats x = c.floats("x"), dout = c.floats("dout");
    Floats out(count), dx(count);
    gelu_forward(out.data(), x.data(), count);
    gelu_backward(dx.data(), dout.data(), x.data(), count);
    c.expect(out, "out");
    c.expect(dx, "dx");
  });
}

TEST(OperatorVectors, Classifier) {
  for_each_case("classifier", [](const Case& c) {
    const std::int64_t N = c.size("N"), V = c.size("V");
    const std::vector<std::int32_t> labels = c.integers("labels");
    Floats logits = c.floats("logits"), losses(N);
    classifier(logits.data(), losses.data(), labels.data(), N, V, c.number("loss_scale"), true);
    c.expect(losses, "losses");
    c.expect(logits, "dlogits");
  });
}

TEST(OperatorVectors, AdamW) {
  for_each_case("adamw", [](const Case& c) {
    const std::int64_t count = c.size("count");
    const Floats gradients = c.floats("gradients"), scales = c.floats("scales");
    Floats parameters = c.floats("start"), moment1(count), moment2(count);
    AdamWStep step;
    step.learning_rate = c.number("lr"), step.weight_decay = c.number("weight_decay");
    step.beta1 = c.number("beta1"), step.beta2 = c.number("beta2"), step.eps = c.number("eps");
    for (step.step = 1; step.step <= c.size("steps"); ++step.step) {
      step.gradient_scale = scales[step.step - 1];
      adamw(parameters.data(), gradients.data() + (step.step - 1) * count, moment1.data(), moment2.data(), count,
            c["decay"], step);
    }
    c.expect(parameters, "parameters");
    c.expect(moment1, "moment1");
    c.expect(moment2, "moment2");
  });
}

// Not from PyTorch: scripts/make_muon_vectors.py, in float64 by singular values.
TEST(OperatorVectors, Muon) {
  for_each_case("muon", [](const Case& c) {
    TensorSpec spec;
    spec.shape = {c.size("rows"), c.size("columns")};
    spec.elements = spec.shape[0] * spec.shape[1];
    spec.hidden_matrix = true;
    spec.decay = c["decay"];
    const Floats gradients = c.floats("gradients"), scales = c.floats("scales");
    Floats parameters = c.floats("start"), momentum(spec.elements), workspace(muon_workspace(spec));
    OptimizerStep step{AdamWStep{}};
    step.muon = {c.number("lr"), c.number("momentum"), c.number("weight_decay"), 1};
    for (std::int64_t t = 0; t < c.size("steps"); ++t) {
      step.muon.gradient_scale = scales[t];
      muon_update({spec,
                   spec.elements,
                   parameters.data(),
                   gradients.data() + t * spec.elements,
                   {momentum.data(), nullptr},
                   workspace.data()},
                  step);
    }
    c.expect(parameters, "parameters");
    c.expect(momentum, "momentum");
  });
}

}  // namespace
}  // namespace weft::cpu
