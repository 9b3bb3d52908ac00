// Every kernel that is launched in a chain (hw/launch.cuh) waits for its predecessor before it reads what the predecessor writes,
// and before it writes what the predecessor may still read or write. Each runs behind a kernel that lets it start at once and
// writes all of that long afterwards (late_writer.h): its results must have the bits that it makes of finished operands.
#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "llmc/cuda/op/attention/paged/append_to_pages.h"
#include "llmc/cuda/op/attention/paged/paged_attention.h"
#include "llmc/cuda/op/elementwise/step_rows.h"
#include "llmc/cuda/op/gemm/rows_matmul.h"
#include "llmc/cuda/op/gemm/rows_matmul_fp8.h"
#include "llmc/cuda/op/norm/head_norm.h"
#include "llmc/cuda/op/norm/post_norm.h"
#include "llmc/cuda/op/norm/residual_norm.h"
#include "llmc/cuda/op/sample/logit_rows.h"
#include "llmc/cuda/op/sample/score_rows.h"
#include "llmc/cuda/runtime/captured_graph.h"
#include "llmc/cuda/runtime/stream.h"
#include "test/gpu/late_writer.h"
#include "test/gpu/operator_tools.h"
#include "test/gpu/rows_tools.h"

namespace weft::test {
namespace {

using Names = std::vector<std::string>;
using Launches = std::function<void(cudaStream_t)>;

class Chain {
 public:
  // What the launches read or write of `buffer` is there when the predecessor has ended: what the buffer holds now. Until then
  // each of its bytes is `before`: 0xff is NaN, and 0 is for ids, which must be such.
  template <typename T>
  void late(const DeviceBuffer<T>& buffer, const char* name, int before = 0xff) {
    late_.push_back({name, buffer.data(), buffer.bytes(), before, DeviceBuffer<char>(buffer.bytes())});
    cuda::check(cudaMemcpy(late_.back().now.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToDevice), "test");
    cuda::check(cudaDeviceSynchronize(), "test");
  }

  // The buffers whose bytes differ from those of the same launches without a predecessor; "witness" is one that the predecessor
  // writes and that a kernel behind the launches copies, waiting for these alone.
  Names differing(const Launches& launches) {
    const auto with_witness = [&] {
      launches(stream_);
      cuda::copy_chained(seen_.data(), witness_.data(), kWitness, true, device_.overlapping, stream_);
    };
    restore();
    with_witness();
    stream_.synchronize("test: without a predecessor");
    const std::vector<std::vector<char>> expected = contents();

    // Launched one by one, while the predecessor runs.
    for (int microseconds = 2000;; microseconds *= 5) {
      spoil();
      const auto start = std::chrono::steady_clock::now();
      cuda::write_late(copies(), microseconds, stream_);
      with_witness();
      const bool in_time = std::chrono::steady_clock::now() - start < std::chrono::microseconds(microseconds / 2);
      stream_.synchronize("test: behind a late predecessor");
      if (!in_time && microseconds <= 50'000) continue;
      EXPECT_TRUE(in_time) << "the host took longer than the predecessor";
      break;
    }
    Names names = different(expected, "");
    // As a graph, like a step.
    cuda::CapturedGraph graph("test");
    graph.capture(stream_, [&] {
      cuda::write_late(copies(), 200, stream_);
      with_witness();
    });
    spoil();
    graph.launch(stream_);
    stream_.synchronize("test: behind a late predecessor, in a graph");
    for (std::string& name : different(expected, " in a graph")) names.push_back(std::move(name));
    return names;
  }

  const cuda::LaunchDevice& device() const { return device_; }

 private:
  static constexpr int kWitness = 64;
  struct Late {
    std::string name;
    void* data;
    std::size_t bytes;
    int before;
    DeviceBuffer<char> now;
  };

  std::vector<cuda::LateCopy> copies() const {
    std::vector<cuda::LateCopy> all = {{witness_.data(), true_witness_.data(), witness_.bytes()}};
    for (const Late& one : late_) all.push_back({one.data, one.now.data(), one.bytes});
    return all;
  }
  void restore() const {
    for (const cuda::LateCopy& copy : copies()) {
      cuda::check(cudaMemcpy(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice), "test");
    }
    cuda::check(cudaDeviceSynchronize(), "test");
  }
  void spoil() {
    for (const Late& one : late_) cuda::check(cudaMemset(one.data, one.before, one.bytes), "test");
    witness_.fill_bytes(0xff);
    seen_.fill_bytes(0xff);
    cuda::check(cudaDeviceSynchronize(), "test");
  }
  std::vector<std::vector<char>> contents() const {
    std::vector<std::vector<char>> all;
    for (const Late& one : late_) {
      all.emplace_back(one.bytes);
      cuda::check(cudaMemcpy(all.back().data(), one.data, one.bytes, cudaMemcpyDeviceToHost), "test");
    }
    all.emplace_back(seen_.bytes());
    cuda::check(cudaMemcpy(all.back().data(), seen_.data(), seen_.bytes(), cudaMemcpyDeviceToHost), "test");
    return all;
  }
  Names different(const std::vector<std::vector<char>>& expected, const char* where) const {
    Names names;
    const std::vector<std::vector<char>> got = contents();
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i] != expected[i]) names.push_back((i < late_.size() ? late_[i].name : "witness") + where);
    }
    return names;
  }

  std::vector<Late> late_;
  DeviceBuffer<int> true_witness_{std::vector<int>(kWitness, 5)}, witness_{kWitness}, seen_{kWitness};
  cuda::LaunchDevice device_ = cuda::launch_device();
  cuda::Stream stream_;
};

// A buffer of `count` elements, all bits zero.
template <typename T>
DeviceBuffer<T> zeros(std::int64_t count) {
  DeviceBuffer<T> buffer(static_cast<std::size_t>(count));
  buffer.fill_bytes(0);
  return buffer;
}
template <typename T>
DeviceBuffer<T> random_buffer(std::int64_t count, unsigned seed, float scale = 1.0f) {
  return on_device<T>(random_floats(count, seed, scale));
}

// ---- the predecessor --------------------------------------------------------------------------------------------------

TEST(LateWriter, FindsAKernelThatDoesNotWait) {
  if (!cuda::launch_device().overlapping) GTEST_SKIP() << "launches overlap from sm_90 on";
  constexpr int kCount = 1000;
  const auto differing = [](bool waits) {
    const DeviceBuffer<int> in(std::vector<int>(kCount, 7)), out(std::vector<int>(kCount, 8));
    Chain chain;
    chain.late(in, "in");
    chain.late(out, "out");
    return chain.differing(
        [&](cudaStream_t stream) { cuda::copy_chained(out.data(), in.data(), kCount, waits, true, stream); });
  };
  EXPECT_EQ(differing(true), Names{});
  const Names found = differing(false);
  for (const char* name : {"out", "out in a graph"}) {
    EXPECT_EQ(std::count(found.begin(), found.end(), name), 1) << name;
  }
}

// ---- rows -------------------------------------------------------------------------------------------------------------

template <typename T>
class ChainedRows : public testing::Test {};
using Types = testing::Types<float, bf16, fp16>;
TYPED_TEST_SUITE(ChainedRows, Types);

template <typename T>
class MatmulOperands {
 public:
  // K2: of a second input; 0: none.
  MatmulOperands(std::int64_t K, std::int64_t OC, cuda::RowsEpilogue epilogue, std::int64_t most_rows,
                 std::int64_t K2 = 0)
      : K_(K),
        K2_(K2),
        OC_(OC),
        epilogue_(epilogue),
        x_(random_buffer<T>(most_rows * K, 1)),
        weight_(random_buffer<T>((cuda::gated(epilogue) ? 2 : 1) * OC * K, 2, 0.1f)),
        bias_(random_buffer<T>(OC, 3)),
        x2_(random_buffer<T>(most_rows * K2, 5)),
        weight2_(random_buffer<T>(OC * K2, 6, 0.1f)) {}

  // `older`: x is there from the beginning.
  Names differing(std::int64_t rows, cuda::RowsPath path, bool older) const {
    const bool fp32 = epilogue_ == cuda::RowsEpilogue::add || epilogue_ == cuda::RowsEpilogue::store_fp32;
    const DeviceBuffer<T> x(first(x_, rows * K_)), x2(first(x2_, rows * K2_));
    const DeviceBuffer<T> out = zeros<T>(fp32 ? 0 : rows * OC_);
    const DeviceBuffer<float> out_fp32 = random_buffer<float>(fp32 ? rows * OC_ : 0, 4);
    cuda::RowsMatmul<T> io;
    io.x = x.data();
    io.weight = weight_.data();
    io.bias = cuda::gated(epilogue_) ? nullptr : bias_.data();
    io.rows = rows, io.K = K_, io.OC = OC_;
    io.epilogue = epilogue_;
    io.x_is_older = older;
    Chain chain;
    if (!older) chain.late(x, "x");
    if (K2_ > 0) {
      io.x2 = x2.data(), io.weight2 = weight2_.data(), io.bias2 = bias_.data(), io.K2 = K2_;
      chain.late(x2, "x2");
    }
    if (fp32) {
      io.out_fp32 = out_fp32.data();
      chain.late(out_fp32, "out_fp32");
    } else {
      io.out = out.data();
      chain.late(out, "out");
    }
    return chain.differing([&](cudaStream_t stream) { cuda::rows_matmul(io, chain.device(), stream, path); });
  }

 private:
  static std::vector<T> first(const DeviceBuffer<T>& buffer, std::int64_t count) {
    std::vector<T> values = buffer.download();
    values.resize(static_cast<std::size_t>(count));
    return values;
  }

  std::int64_t K_, K2_, OC_;
  cuda::RowsEpilogue epilogue_;
  DeviceBuffer<T> x_, weight_, bias_, x2_, weight2_;
};

// Several splits of K, at every number of rows where another kernel may begin.
TYPED_TEST(ChainedRows, MatmulWithSplits) {
  for (const cuda::RowsEpilogue epilogue : kEpilogues) {
    const MatmulOperands<TypeParam> operands(1000, 264, epilogue, 400);
    for (const std::int64_t rows : {1, 20, 40, 60, 90, 120, 180, 250, 400}) {
      for (const cuda::RowsPath path : kPaths) {
        SCOPED_TRACE(testing::Message() << rows << " rows, epilogue " << static_cast<int>(epilogue)
                                        << (path == cuda::RowsPath::portable ? ", portable" : ""));
        EXPECT_EQ(operands.differing(rows, path, false), Names{});
        EXPECT_EQ(operands.differing(rows, path, true), Names{}) << "x is older";
      }
    }
  }
}

// One split: the weight fills the GPU, in tiles of 64, 80 and 224 rows.
TYPED_TEST(ChainedRows, MatmulWithOneSplit) {
  for (const cuda::RowsEpilogue epilogue : {cuda::RowsEpilogue::store, cuda::RowsEpilogue::add}) {
    for (const std::int64_t OC : {30000, 10200, 25400}) {
      const MatmulOperands<TypeParam> operands(136, OC, epilogue, 300);
      for (const std::int64_t rows : {1, 20, 60, 90, 300}) {
        SCOPED_TRACE(testing::Message() << rows << " rows of " << OC << ", epilogue " << static_cast<int>(epilogue));
        EXPECT_EQ(operands.differing(rows, cuda::RowsPath::automatic, false), Names{});
        EXPECT_EQ(operands.differing(rows, cuda::RowsPath::automatic, true), Names{}) << "x is older";
      }
    }
  }
}

// Codes of rows, and GEMMs of codes: few rows and many, one split and several.
TEST(ChainedFp8Rows, CodesAndTheirProducts) {
  if (!cuda::rows_matmul_fp8_unsupported_gpu().empty()) GTEST_SKIP() << cuda::rows_matmul_fp8_unsupported_gpu();
  for (const std::int64_t K : {1008, 4112}) {
    for (const std::int64_t OC : {264, 8456}) {
      if (K * OC > (std::int64_t{1} << 24)) continue;
      const DeviceBuffer<float> weight_scales = random_buffer<float>(2 * OC, 3);
      DeviceBuffer<std::uint8_t> weight(static_cast<std::size_t>(2 * OC * K));
      weight.fill_bytes(0x31);
      for (const std::int64_t rows : {1, 90, 300}) {
        const DeviceBuffer<bf16> x = random_buffer<bf16>(rows * K, 1);
        const DeviceBuffer<std::uint8_t> codes = zeros<std::uint8_t>(rows * K);
        const DeviceBuffer<float> scales = zeros<float>(rows);
        const cuda::Fp8Rows of_x = {codes.data(), scales.data()};
        {
          SCOPED_TRACE(testing::Message() << "codes of " << rows << " rows of " << K);
          Chain chain;
          chain.late(x, "x");
          chain.late(codes, "codes");
          chain.late(scales, "scales");
          EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
            cuda::quantize_rows_fp8(of_x, x.data(), rows, K, chain.device(), stream);
          }),
                    Names{});
        }
        for (const cuda::RowsEpilogue epilogue :
             {cuda::RowsEpilogue::store, cuda::RowsEpilogue::swiglu, cuda::RowsEpilogue::add}) {
          SCOPED_TRACE(testing::Message()
                       << rows << " rows of " << K << " -> " << OC << ", epilogue " << static_cast<int>(epilogue));
          const DeviceBuffer<bf16> out = zeros<bf16>(rows * OC);
          const DeviceBuffer<float> out_fp32 = random_buffer<float>(rows * OC, 4);
          cuda::RowsMatmul<bf16> io;
          io.rows = rows, io.K = K, io.OC = OC, io.epilogue = epilogue;
          io.out = out.data(), io.out_fp32 = out_fp32.data();
          Chain chain;
          chain.late(codes, "codes");
          chain.late(scales, "scales");
          if (epilogue == cuda::RowsEpilogue::add) {
            chain.late(out_fp32, "out_fp32");
          } else {
            chain.late(out, "out");
          }
          EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
            cuda::rows_matmul_fp8(io, of_x, {weight.data(), weight_scales.data()}, chain.device(), stream);
          }),
                    Names{});
        }
      }
    }
  }
}

// Two inputs, both of which are late, in one launch and, on the portable path, in two.
TYPED_TEST(ChainedRows, MatmulWithTwoInputs) {
  const MatmulOperands<TypeParam> operands(264, 1000, cuda::RowsEpilogue::add, 400, 1032);
  for (const std::int64_t rows : {1, 20, 40, 60, 120, 250, 400}) {
    for (const cuda::RowsPath path : kPaths) {
      SCOPED_TRACE(testing::Message() << rows << " rows" << (path == cuda::RowsPath::portable ? ", portable" : ""));
      EXPECT_EQ(operands.differing(rows, path, false), Names{});
    }
  }
}

TYPED_TEST(ChainedRows, Norms) {
  using T = TypeParam;
  for (const std::int64_t C : {64, 1000, 2560, 16384}) {
    for (const std::int64_t rows : {1, 300}) {
      for (const int shared_limit : {cuda::norm_shared_memory(), 0}) {
        const auto weight = random_buffer<T>(C, 1), bias = random_buffer<T>(C, 2), weight2 = random_buffer<T>(C, 3);
        const auto x = random_buffer<T>(rows * C, 4);
        const auto residual = random_buffer<float>(rows * C, 5);
        const auto out = zeros<T>(rows * C), out2 = zeros<T>(rows * C);
        const auto mean = zeros<float>(rows), rstd = zeros<float>(rows);
        for (const char* form : {"norm", "two norms", "branch", "dropout"}) {
          SCOPED_TRACE(testing::Message()
                       << form << ", " << rows << " rows of " << C << ", " << shared_limit << " bytes");
          const std::string is = form;
          ResidualNormShape shape;
          shape.rows = rows, shape.C = C;
          shape.kind = is == "norm" ? NormKind::rmsnorm : NormKind::layernorm;
          shape.eps = 1e-5f;
          cuda::ResidualNormForward<T, float> io;
          io.residual = residual.data();
          io.weight = weight.data();
          io.out = out.data();
          io.rstd = rstd.data();
          Chain chain;
          chain.late(residual, "residual");
          chain.late(out, "out");
          chain.late(rstd, "rstd");
          if (shape.kind == NormKind::layernorm) {
            io.bias = bias.data();
            io.mean = mean.data();
            chain.late(mean, "mean");
          }
          if (is == "two norms") {
            io.weight2 = weight2.data();
            io.bias2 = bias.data();
            io.out2 = out2.data();
            chain.late(out2, "out2");
          }
          if (is == "branch" || is == "dropout") {
            io.x = x.data();
            io.residual_out = residual.data();
            chain.late(x, "x");
            shape.dropout = is == "dropout" ? 0.25f : 0.0f;
          }
          EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
            cuda::residual_norm_forward(shape, io, stream, shared_limit, chain.device().overlapping);
          }),
                    Names{});
        }
      }
    }
  }
}

TYPED_TEST(ChainedRows, PostNorm) {
  using T = TypeParam;
  for (const std::int64_t rows : {1, 70}) {
    for (const std::int64_t C : {72, 1152, 9000}) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << C);
      const auto branch = random_buffer<float>(rows * C, 1), residual = random_buffer<float>(rows * C, 2);
      const auto weight = random_buffer<T>(C, 3), weight2 = random_buffer<T>(C, 4), out = zeros<T>(rows * C);
      const cuda::PostNorm<T> io = {branch.data(),   weight.data(),  nullptr, residual.data(),
                                    residual.data(), weight2.data(), nullptr, out.data()};
      ResidualNormShape shape;
      shape.rows = rows, shape.C = C;
      shape.eps = 1e-6f;
      Chain chain;
      chain.late(branch, "branch");
      chain.late(residual, "residual");
      chain.late(out, "out");
      EXPECT_EQ(
          chain.differing([&](cudaStream_t stream) { cuda::post_norm(shape, io, stream, chain.device().overlapping); }),
          Names{});
    }
  }
}

// ---- pages ------------------------------------------------------------------------------------------------------------

struct Rows {
  std::int64_t count, first_position;  // of a sequence
};

constexpr std::int64_t kMaxPositions = 900;

// Which pages the rows of a step use. Each chunk is of a sequence of its own, whose pages follow one another backwards.
struct StepRows {
  std::vector<cuda::PagedChunk> chunks;
  std::vector<std::int32_t> positions, tables, pages;

  StepRows(const std::vector<Rows>& of_chunks, std::int64_t page_size) {
    const std::int64_t each = (kMaxPositions + page_size - 1) / page_size, all = each * std::ssize(of_chunks);
    for (const Rows& rows : of_chunks) {
      chunks.push_back({std::ssize(positions), rows.count, rows.first_position});
      for (std::int64_t i = 0; i < rows.count; ++i) {
        positions.push_back(static_cast<std::int32_t>(rows.first_position + i));
        tables.push_back(static_cast<std::int32_t>(pages.size()));
      }
      for (std::int64_t i = 0; i < each; ++i) pages.push_back(static_cast<std::int32_t>(all - 1 - std::ssize(pages)));
    }
  }
};

template <typename T>
struct PagedStep {
  cuda::PagedAttentionShape shape;
  std::int64_t page_size;
  StepRows host;
  DeviceBuffer<std::int32_t> positions, tables, pages;
  DeviceBuffer<T> qkv, keys, values;  // rows of [NH q heads | NKV k heads | NKV v heads]

  PagedStep(std::int64_t NKV, std::int64_t G, std::int64_t HS, std::int64_t of_page, const std::vector<Rows>& chunks)
      : page_size(of_page),
        host(chunks, of_page),
        positions(host.positions),
        tables(host.tables),
        pages(host.pages),
        qkv(random_buffer<T>(std::ssize(host.positions) * (G + 2) * NKV * HS, 1, 2.0f)),
        keys(random_buffer<T>(std::ssize(host.pages) * of_page * NKV * HS, 2)),
        values(random_buffer<T>(std::ssize(host.pages) * of_page * NKV * HS, 3)) {
    shape.NH = NKV * G, shape.NKV = NKV, shape.HS = HS;
    shape.max_rows = rows();
    shape.max_chunks = std::ssize(chunks);
    shape.max_positions = kMaxPositions;
  }

  std::int64_t rows() const { return std::ssize(host.positions); }
  std::int64_t row_size() const { return (shape.NH + 2 * shape.NKV) * shape.HS; }
  HeadViewOf<T> heads(std::int64_t first) const { return {qkv.data() + first * shape.HS, 0, row_size(), shape.HS}; }
  cuda::PagedKv<T> kv() const { return {keys.data(), values.data(), page_size, shape.NKV, shape.HS}; }
  cuda::PagedRows paged_rows() const { return {positions.data(), tables.data(), pages.data(), rows()}; }
};

TYPED_TEST(ChainedRows, HeadNorm) {
  for (const std::int64_t rows : {1, 70}) {
    for (const std::int64_t HS : {32, 80, 256}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, HS " << HS);
      const std::int64_t NH = 5, NKV = 2, row = (NH + 2 * NKV) * HS;
      const auto qkv = random_buffer<TypeParam>(rows * row, 1), weight = random_buffer<TypeParam>(HS, 2);
      const auto kept = zeros<TypeParam>(rows * (NH + NKV) * HS);
      const cuda::HeadNormForward<TypeParam> io = {
          {qkv.data(), 0, row, HS}, {qkv.data() + NH * HS, 0, row, HS}, weight.data(), weight.data(), kept.data()};
      Chain chain;
      chain.late(qkv, "qkv");
      chain.late(kept, "kept");
      EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
        cuda::head_norm_forward({1, rows, NH, NKV, HS, 1e-6f}, io, stream, chain.device().overlapping);
      }),
                Names{});
    }
  }
}

TYPED_TEST(ChainedRows, AppendToPages) {
  for (const std::int64_t HS : {64, 80}) {
    const PagedStep<TypeParam> step(2, 2, HS, 16, {{1, 700}, {5, 14}, {1, 0}});
    // Rotated in pieces of 16 bytes, of two elements, of one.
    for (const std::int64_t half : {HS / 2, HS / 8 + 2, HS / 8 + 1}) {
      SCOPED_TRACE(testing::Message() << "HS " << HS << ", " << half << " pairs rotated");
      const auto cosine = random_buffer<float>(kMaxPositions * half, 4),
                 sine = random_buffer<float>(kMaxPositions * half, 5);
      cuda::AppendToPages<TypeParam> io;
      io.q = step.heads(0);
      io.k = step.heads(step.shape.NH);
      io.v = step.heads(step.shape.NH + step.shape.NKV);
      io.NH = step.shape.NH;
      io.kv = step.kv();
      io.rows = step.paged_rows();
      io.rope = {cosine.data(), sine.data(), kMaxPositions, half};
      Chain chain;
      chain.late(step.qkv, "qkv");
      chain.late(step.keys, "keys");
      chain.late(step.values, "values");
      EXPECT_EQ(chain.differing([&](cudaStream_t stream) { cuda::append_to_pages(io, chain.device(), stream); }),
                Names{});
    }
  }
}

// Decoded rows of one split and of several, chunks of prompts, both.
const std::vector<std::vector<Rows>> kSteps = {
    {{1, 700}, {1, 30}, {1, 0}, {1, 899}}, {{130, 100}, {40, 0}}, {{1, 800}, {130, 250}, {3, 511}}};

template <typename T>
class Attention {
 public:
  explicit Attention(const PagedStep<T>& step)
      : step_(step),
        work_(work_of(step)),
        workspace_(zeros<char>(static_cast<std::int64_t>(cuda::paged_attention_workspace(step.shape)))),
        out_(zeros<T>(step.rows() * step.shape.NH * step.shape.HS)) {
    io_.shape = step.shape;
    io_.scale = 0.1f;
    io_.q = step.heads(0);
    io_.kv = step.kv();
    io_.rows = step.paged_rows();
    io_.work = work_.data();
    io_.workspace = workspace_.data();
    io_.out = out_.data();
  }
  void read_codes(const KvCodes& codes) {
    io_.kv.codes = codes;
    io_.decodes = cuda::paged_work_decodes(work_of(step_).data());
  }
  void operands(Chain& chain) const {
    chain.late(step_.qkv, "qkv");
    chain.late(step_.keys, "keys");
    chain.late(step_.values, "values");
    chain.late(out_, "out");
  }
  void launch(const cuda::LaunchDevice& device, cudaStream_t stream) const {
    cuda::paged_attention(io_, device, stream);
  }

 private:
  static std::vector<std::int64_t> work_of(const PagedStep<T>& step) {
    std::vector<std::int64_t> work(cuda::paged_work_bytes(step.shape) / sizeof(std::int64_t));
    cuda::write_paged_work(work.data(), step.shape, step.host.chunks);
    return work;
  }

  const PagedStep<T>& step_;
  DeviceBuffer<std::int64_t> work_;
  DeviceBuffer<char> workspace_;
  DeviceBuffer<T> out_;
  cuda::PagedAttention<T> io_;
};

TYPED_TEST(ChainedRows, PagedAttention) {
  struct Heads {
    std::int64_t NKV, G, HS;
  };
  for (const Heads& heads : {Heads{2, 1, 32}, Heads{2, 2, 64}, Heads{2, 1, 80}, Heads{1, 3, 96}, Heads{1, 4, 128},
                             Heads{1, 20, 128}, Heads{1, 2, 256}}) {
    for (const auto& chunks : kSteps) {
      SCOPED_TRACE(testing::Message() << "HS " << heads.HS << ", NKV " << heads.NKV << ", G " << heads.G << ", "
                                      << chunks.size() << " chunks, the first of " << chunks[0].count);
      const PagedStep<TypeParam> step(heads.NKV, heads.G, heads.HS, 32, chunks);
      const Attention<TypeParam> attention(step);
      Chain chain;
      attention.operands(chain);
      EXPECT_EQ(chain.differing([&](cudaStream_t stream) { attention.launch(chain.device(), stream); }), Names{});
    }
  }
}

template <typename T>
class ChainedCodes : public testing::Test {};
using CodeTypes = testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(ChainedCodes, CodeTypes);

// Over codes attention may copy positions older than the step before its predecessor, the append, has ended, but not those that
// it appends. At the end other rows are appended, so that the next run does not find its own.
TYPED_TEST(ChainedCodes, AreReadAfterTheirAppend) {
  using T = TypeParam;
  struct Heads {
    std::int64_t NKV, G, HS;
  };
  for (const Heads& heads : {Heads{2, 1, 80}, Heads{1, 4, 128}, Heads{1, 2, 256}}) {
    for (const auto& chunks : kSteps) {
      SCOPED_TRACE(testing::Message() << "HS " << heads.HS << ", " << chunks.size() << " chunks, the first of "
                                      << chunks[0].count);
      const PagedStep<T> step(heads.NKV, heads.G, heads.HS, 32, chunks);
      const auto other = random_buffer<T>(step.rows() * step.row_size(), 9, 2.0f);
      const std::int64_t NH = step.shape.NH, half = heads.HS / 2;
      const std::size_t rows = step.keys.size() / static_cast<std::size_t>(heads.HS);
      std::mt19937 random(7);
      std::vector<std::uint8_t> bytes(step.keys.size());
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
      const DeviceBuffer<std::uint8_t> keys(bytes), values(bytes), key_scales(std::vector<std::uint8_t>(rows, 122)),
          value_scales(std::vector<std::uint8_t>(rows, 121));
      const auto cosine = random_buffer<float>(kMaxPositions * half, 4),
                 sine = random_buffer<float>(kMaxPositions * half, 5);
      const auto append = [&](const DeviceBuffer<T>& qkv) {
        const auto of = [&](std::int64_t head) {
          return HeadViewOf<T>{qkv.data() + head * heads.HS, 0, step.row_size(), heads.HS};
        };
        cuda::AppendToPages<T> io;
        io.q = of(0), io.k = of(NH), io.v = of(NH + heads.NKV);
        io.NH = NH;
        io.kv = step.kv();
        io.kv.codes = {keys.data(), values.data(), key_scales.data(), value_scales.data()};
        io.rows = step.paged_rows();
        io.rope = {cosine.data(), sine.data(), kMaxPositions, half};
        return io;
      };
      const cuda::AppendToPages<T> own = append(step.qkv), others = append(other);
      Attention<T> attention(step);
      attention.read_codes(own.kv.codes);
      Chain chain;
      attention.operands(chain);
      EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
        cuda::append_to_pages(own, chain.device(), stream);
        attention.launch(chain.device(), stream);
        cuda::append_to_pages(others, chain.device(), stream);
      }),
                Names{});
    }
  }
}

// What paged_attention.h promises: its successor may read without waiting what kernels before attention wrote. Attention gets a
// part of the GPU, so that there is room for a successor that starts too early.
TYPED_TEST(ChainedRows, WhatIsOlderThanAttentionIsThereWhenItsSuccessorStarts) {
  using T = TypeParam;
  constexpr std::int64_t K = 512, OC = 264;
  for (const auto& chunks : kSteps) {
    const PagedStep<T> step(2, 2, 64, 32, chunks);
    const Attention<T> attention(step);
    const auto weight = random_buffer<T>(OC * K, 1, 0.1f), x = random_buffer<T>(step.rows() * K, 2);
    const DeviceBuffer<T> out = zeros<T>(step.rows() * OC);
    cuda::RowsMatmul<T> io;
    io.x = x.data();
    io.weight = weight.data();
    io.rows = step.rows(), io.K = K, io.OC = OC;
    io.out = out.data();
    io.x_is_older = true;
    Chain chain;
    attention.operands(chain);
    chain.late(x, "x");
    chain.late(out, "out of rows_matmul");
    EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
      attention.launch({chain.device().multiprocessors / 4, chain.device().overlapping}, stream);
      cuda::rows_matmul(io, chain.device(), stream);
    }),
              Names{})
        << chunks.size() << " chunks, the first of " << chunks[0].count;
  }
}

// ---- the ends of a step -----------------------------------------------------------------------------------------------

TYPED_TEST(ChainedRows, Embedding) {
  constexpr std::int64_t kRows = 5, kWidth = 72, kVocab = 50;
  const auto weight = random_buffer<TypeParam>(kVocab * kWidth, 1);
  const DeviceBuffer<std::int32_t> ids(std::vector<std::int32_t>{3, -1, 49, -3, -2}),
      last_ids(std::vector<std::int32_t>{11, 22, 33});
  const auto out = zeros<float>(kRows * kWidth);
  Chain chain;
  chain.late(last_ids, "last_ids", 0);
  chain.late(out, "out");
  EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
    cuda::embed_rows(out.data(), ids.data(), last_ids.data(), weight.data(), 1.0f, kRows, kWidth, stream);
  }),
            Names{});
}

TEST(ChainedHead, GatherRows) {
  constexpr std::int64_t kRows = 300, kWidth = 2560;
  const auto in = random_buffer<float>(kRows * kWidth, 1);
  const DeviceBuffer<std::int32_t> rows(std::vector<std::int32_t>{299, 0, 17, 17});
  const auto out = zeros<float>(4 * kWidth);
  Chain chain;
  chain.late(in, "in");
  chain.late(out, "out");
  EXPECT_EQ(chain.differing([&](cudaStream_t stream) {
    cuda::gather_rows(out.data(), in.data(), rows.data(), 4, kWidth, chain.device().overlapping, stream);
  }),
            Names{});
}

TEST(ChainedHead, LogitRows) {
  constexpr std::int64_t kRows = 2, kVocab = 5000;
  const auto logits = random_buffer<float>(kRows * kVocab, 1, 3.0f);
  const DeviceBuffer<std::int32_t> last_ids(std::vector<std::int32_t>{1, 2, 3});
  const std::vector<LogitEdit> edits = {{7, 2, 3, 1}, {4999, -1, 0, 1}, {2, 0, 1, 0}};
  LogitRow row;
  row.edits = edits;
  row.penalties = {1.5, 0.25, 0.5};
  row.recent = {&kUnknownId, 1};
  row.forbidden = {{7}, {8, 3}, {9, 2}};
  cuda::LogitRowUpload upload(kRows);
  upload.begin(kRows);
  upload.set(1, row, 1);
  for (const bool restored : {false, true}) {
    Chain chain;
    chain.late(logits, "logits");
    chain.late(last_ids, "last_ids", 0);
    const auto launches = [&](cudaStream_t stream) {
      const bool overlapping = chain.device().overlapping;
      cuda::edit_logits(upload.rows(), kRows, logits.data(), kVocab, last_ids.data(), overlapping, stream);
      if (!restored) return;
      cuda::restore_logits(upload.rows(), kRows, logits.data(), kVocab, last_ids.data(), overlapping, stream);
    };
    EXPECT_EQ(chain.differing(launches), Names{}) << (restored ? "restored" : "edited");
  }
}

TEST(ChainedHead, ScoreRows) {
  constexpr std::int64_t kRows = 4, kVocab = 5000;
  const auto logits = random_buffer<float>(kRows * kVocab, 1, 3.0f);
  const DeviceBuffer<std::int32_t> slots(std::vector<std::int32_t>{2, -1, 0, 1}),
      targets(std::vector<std::int32_t>{-1, 4999, 7, -1}), alternatives(std::vector<std::int32_t>{3, 20, 0, 5}),
      ids(std::vector<std::int32_t>{4321, 0, 17, 5}), last_ids(std::vector<std::int32_t>{1, 2, 3});
  const DeviceBuffer<SampleError> errors(
      std::vector<SampleError>{SampleError::none, SampleError::none, SampleError::none, SampleError::infinite});
  const auto scores = zeros<cuda::RowScore>(kRows);
  const auto most_likely = zeros<IdLogprob>(kRows * cuda::kMaxAlternatives);
  cuda::ScoreRows io;
  io.logits = logits.data();
  io.rows = kRows, io.V = kVocab, io.tokenizer_vocab = 4990;
  io.slots = slots.data(), io.targets = targets.data(), io.alternatives = alternatives.data();
  io.ids = ids.data(), io.errors = errors.data(), io.last_ids = last_ids.data();
  io.scores = scores.data(), io.most_likely = most_likely.data();
  Chain chain;
  chain.late(logits, "logits");
  chain.late(ids, "ids", 0);
  chain.late(errors, "errors", 0);
  chain.late(last_ids, "last_ids", 0);
  chain.late(scores, "scores");
  chain.late(most_likely, "most_likely");
  EXPECT_EQ(chain.differing([&](cudaStream_t stream) { cuda::score_rows(io, chain.device().overlapping, stream); }),
            Names{});
}

}  // namespace
}  // namespace weft::test
