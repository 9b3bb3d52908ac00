// The three GEMMs of a linear layer against the CPU, and plans that do not depend on timing.
#include "llmc/cuda/op/gemm/matmul.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "llmc/base/dtype.h"
#include "llmc/base/file.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cuda/runtime/stream.h"
#include "llmc/model/compare.h"

namespace weft::cuda {
namespace {

using test::DeviceBuffer;

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<__nv_bfloat16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<__half>() {
  return DType::f16;
}

// Values on the device in T, and the same rounded values in fp32 on the host.
template <typename T>
struct Operand {
  std::vector<float> host;
  DeviceBuffer<T> device;

  Operand(std::int64_t count, unsigned seed) : host(static_cast<std::size_t>(count)), device(host.size()) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> noise(0, 1);
    for (float& value : host) value = noise(generator);
    std::vector<T> stored(host.size());
    convert_from_f32(host.data(), dtype_of<T>(), stored.data(), stored.size());
    convert_to_f32(stored.data(), dtype_of<T>(), host.data(), host.size());
    device.upload(stored);
  }
  std::vector<float> download() const {
    const std::vector<T> stored = device.download();
    std::vector<float> values(stored.size());
    convert_to_f32(stored.data(), dtype_of<T>(), values.data(), values.size());
    return values;
  }
};

// A result is one fp32 sum, rounded once to T: half a unit of T in the 2-norm, and the order of the sum.
template <typename T>
double tolerance() {
  return dtype_of<T>() == DType::f32 ? 1e-5 : dtype_of<T>() == DType::bf16 ? 0x1p-8 : 0x1p-11;
}

template <typename T>
void expect_near(const char* what, const std::vector<float>& got, const std::vector<float>& want) {
  const TensorDistance row = distance(what, got, want, tolerance<T>(), Norm::l2);
  EXPECT_TRUE(row.pass) << what << " " << row.relative;
}

struct Size {
  std::int64_t N, C, OC;
};
constexpr Size kSizes[] = {{1, 8, 8}, {7, 24, 40}, {111, 72, 320}, {65, 200, 1003}, {1000, 64, 72}};

template <typename T>
class MatmulTest : public testing::Test {};
using Types = testing::Types<float, __nv_bfloat16, __half>;
TYPED_TEST_SUITE(MatmulTest, Types);

TYPED_TEST(MatmulTest, MatchesTheCpu) {
  using T = TypeParam;
  const Stream stream;
  Matmul matmul(stream);
  for (const auto [N, C, OC] : kSizes) {
    SCOPED_TRACE(testing::Message() << N << " x " << C << " -> " << OC);
    const Operand<T> x(N * C, 1), weight(OC * C, 2), bias(OC, 3), dout(N * OC, 4);
    for (const bool accumulate : {false, true}) {
      for (const bool with_bias : {false, true}) {
        const Operand<T> out(N * OC, 5);
        std::vector<float> want = out.host;
        cpu::matmul_forward(want.data(), x.host.data(), weight.host.data(), with_bias ? bias.host.data() : nullptr, N,
                            C, OC, accumulate ? cpu::Accumulate::yes : cpu::Accumulate::no);
        matmul.forward<T>(out.device.data(), x.device.data(), weight.device.data(),
                          with_bias ? bias.device.data() : nullptr, N, C, OC,
                          accumulate ? Accumulate::yes : Accumulate::no);
        stream.synchronize("test");
        expect_near<T>("out", out.download(), want);
      }
      const Operand<T> dx(N * C, 6);
      const Operand<float> dweight(OC * C, 7);
      std::vector<float> dx_want = dx.host, dweight_want = dweight.host;
      cpu::matmul_backward(dx_want.data(), nullptr, nullptr, dout.host.data(), x.host.data(), weight.host.data(), N, C,
                           OC, accumulate ? cpu::Accumulate::yes : cpu::Accumulate::no);
      if (!accumulate) dweight_want.assign(dweight_want.size(), 0);
      cpu::matmul_backward(nullptr, dweight_want.data(), nullptr, dout.host.data(), x.host.data(), weight.host.data(),
                           N, C, OC);
      const Accumulate mode = accumulate ? Accumulate::yes : Accumulate::no;
      matmul.input_grad<T>(dx.device.data(), dout.device.data(), weight.device.data(), N, C, OC, mode);
      matmul.weight_grad<T>(dweight.device.data(), dout.device.data(), x.device.data(), N, C, OC, mode);
      stream.synchronize("test");
      expect_near<T>("dx", dx.download(), dx_want);
      expect_near<float>("dweight", dweight.download(), dweight_want);
    }
  }
}

// An environment variable for the time of a scope.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    const char* old = std::getenv(name);
    if (old != nullptr) old_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() {
    if (old_) {
      ::setenv(name_, old_->c_str(), 1);
    } else {
      ::unsetenv(name_);
    }
  }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

template <typename T>
constexpr cudaDataType_t cuda_type() {
  return dtype_of<T>() == DType::f32 ? CUDA_R_32F : dtype_of<T>() == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

// The results of all three GEMMs of a size, as one vector.
template <typename T>
std::vector<float> gemms(Matmul& matmul, const Stream& stream, const Size& size, bool prepared) {
  const auto [N, C, OC] = size;
  const Operand<T> x(N * C, 1), weight(OC * C, 2), dout(N * OC, 4);
  if (prepared) {
    const MatmulShape shapes[] = {{Gemm::forward, N, C, OC, cuda_type<T>(), Accumulate::no, false},
                                  {Gemm::input_grad, N, C, OC, cuda_type<T>(), Accumulate::no, false},
                                  {Gemm::weight_grad, N, C, OC, cuda_type<T>(), Accumulate::no, false}};
    matmul.prepare(shapes);
  }
  const Operand<T> out(N * OC, 5), dx(N * C, 6);
  const Operand<float> dweight(OC * C, 7);
  matmul.forward<T>(out.device.data(), x.device.data(), weight.device.data(), nullptr, N, C, OC);
  matmul.input_grad<T>(dx.device.data(), dout.device.data(), weight.device.data(), N, C, OC);
  matmul.weight_grad<T>(dweight.device.data(), dout.device.data(), x.device.data(), N, C, OC, Accumulate::no);
  stream.synchronize("test");
  std::vector<float> all = out.download();
  for (const std::vector<float>& part : {dx.download(), dweight.download()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Sizes with several candidates that add in different orders, and the odd ones.
constexpr Size kPlannedSizes[] = {{1, 8, 8}, {111, 72, 320}, {65, 200, 1003}, {512, 4096, 256}, {2048, 256, 512}};

TYPED_TEST(MatmulTest, WithoutAPlaceToRememberTimingChangesNoBit) {
  using T = TypeParam;
  const Variable nowhere("WEFT_CACHE_DIR", "/proc/no-such-directory");
  const Stream stream;
  for (const Size& size : kPlannedSizes) {
    SCOPED_TRACE(testing::Message() << size.N << " x " << size.C << " -> " << size.OC);
    Matmul plain(stream);
    const std::vector<float> first = gemms<T>(plain, stream, size, false);
    for (int repeat = 0; repeat < 3; ++repeat) {
      Matmul timed(stream);
      EXPECT_TRUE(same_bits(first, gemms<T>(timed, stream, size, true)));
      EXPECT_EQ(timed.report().size(), 3u);  // timed anew each time
    }
  }
}

TYPED_TEST(MatmulTest, RememberedPlansGiveTheSameBitsAndAreNotTimedAgain) {
  using T = TypeParam;
  const std::string directory = testing::TempDir() + "/weft-plans-" + std::to_string(::getpid());
  const Variable cache("WEFT_CACHE_DIR", directory);
  const Stream stream;
  for (const Size& size : kPlannedSizes) {
    SCOPED_TRACE(testing::Message() << size.N << " x " << size.C << " -> " << size.OC);
    Matmul first(stream), second(stream);  // both made before either has chosen
    const std::vector<float> expected = gemms<T>(first, stream, size, true);
    EXPECT_TRUE(same_bits(expected, gemms<T>(second, stream, size, true)));
    Matmul third(stream, directory + "/run.txt");
    EXPECT_TRUE(same_bits(expected, gemms<T>(third, stream, size, true)));
    EXPECT_EQ(third.report().size(), 0u);
    // The run's own file alone, in a process that remembers nothing else.
    const Variable nowhere("WEFT_CACHE_DIR", "/proc/no-such-directory");
    Matmul resumed(stream, directory + "/run.txt");
    EXPECT_TRUE(same_bits(expected, gemms<T>(resumed, stream, size, true)));
    EXPECT_EQ(resumed.report().size(), 0u);
  }
  std::filesystem::remove_all(directory);
}

// out = x W^T + addend with the sum rounded once, in another tensor than the addend.
TYPED_TEST(MatmulTest, AddendIsAddedBeforeRounding) {
  using T = TypeParam;
  const Stream stream;
  Matmul matmul(stream);
  for (const auto [N, C, OC] : kSizes) {
    SCOPED_TRACE(testing::Message() << N << " x " << C << " -> " << OC);
    const Operand<T> x(N * C, 1), weight(OC * C, 2), addend(N * OC, 3), out(N * OC, 4);
    std::vector<float> want = addend.host;
    cpu::matmul_forward(want.data(), x.host.data(), weight.host.data(), nullptr, N, C, OC, cpu::Accumulate::yes);
    matmul.forward<T>(out.device.data(), x.device.data(), weight.device.data(), nullptr, N, C, OC, Accumulate::no,
                      addend.device.data());
    stream.synchronize("test");
    expect_near<T>("out", out.download(), want);
    EXPECT_TRUE(same_bits(addend.download(), addend.host));
  }
}

// ---- the files --------------------------------------------------------------------------------------------------------

class MatmulPlansTest : public testing::Test {
 protected:
  MatmulPlansTest()
      : directory_(testing::TempDir() + "/weft-plan-files-" + std::to_string(::getpid())),
        cache_("WEFT_CACHE_DIR", directory_) {}
  ~MatmulPlansTest() override { std::filesystem::remove_all(directory_); }

  // The only plan file of the directory.
  std::string cache_file() const {
    std::string found;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      if (entry.path().extension() == ".txt") found = entry.path().string();
    }
    return found;
  }

  const std::string directory_;
  const Variable cache_;
  const StoredAlgorithm one_{1, 2, 3, 4, 5, 6, 7, 8}, two_{~std::uint64_t{0}, 0, 1};
};

TEST_F(MatmulPlansTest, TheFirstChoiceStays) {
  MatmulPlans a("identity A", ""), b("identity A", "");
  EXPECT_TRUE(a.remembers());
  EXPECT_EQ(a.find("product"), nullptr);
  a.add({{"product", one_}});
  b.add({{"product", two_}, {"other", two_}});  // chosen in the meantime
  EXPECT_EQ(*b.find("product"), one_);
  EXPECT_EQ(*b.find("other"), two_);
  const MatmulPlans c("identity A", ""), other("identity B", "");
  EXPECT_EQ(*c.find("product"), one_);
  EXPECT_EQ(*c.find("other"), two_);
  EXPECT_EQ(other.find("product"), nullptr);
}

// Another process wrote its choice while this one was timing.
TEST_F(MatmulPlansTest, AChoiceInTheFileStaysThough) {
  MatmulPlans mine("identity G", "");
  MatmulPlans("identity H", "").add({{"product", one_}});
  std::string text = read_text_file(cache_file(), 10000);
  text.replace(text.find("identity H"), 10, "identity G");
  std::string name = cache_file();
  std::filesystem::remove(name);
  MatmulPlans("identity G", "").add({{"other", two_}});  // makes the file of G
  name = cache_file();
  write_file_atomically(name, text);
  mine.add({{"product", two_}});
  EXPECT_EQ(*mine.find("product"), one_);
  EXPECT_EQ(*MatmulPlans("identity G", "").find("product"), one_);
}

// A remembered algorithm that this version of the library declines: the new choice must not be lost against the old line.
TEST_F(MatmulPlansTest, ARefusedPlanIsReplaced) {
  MatmulPlans("identity J", "").add({{"product", one_}, {"other", one_}});
  MatmulPlans mine("identity J", "");
  mine.forget("product");
  EXPECT_EQ(mine.find("product"), nullptr);
  mine.add({{"product", two_}});
  EXPECT_EQ(*mine.find("product"), two_);
  const MatmulPlans next("identity J", "");  // of the same process
  EXPECT_EQ(*next.find("product"), two_);
  EXPECT_EQ(*next.find("other"), one_);
  const std::string text = read_text_file(cache_file(), 10000);  // what another process reads
  EXPECT_NE(text.find("product: ffffffffffffffff"), std::string::npos) << text;
  // Somebody else replaced it meanwhile: that choice stays.
  MatmulPlans late("identity J", "");
  late.forget("product");
  MatmulPlans quick("identity J", "");
  quick.forget("product");
  quick.add({{"product", one_}});
  late.add({{"product", {9}}});
  EXPECT_EQ(*late.find("product"), one_);
}

TEST_F(MatmulPlansTest, TheRunsFileComesFirst) {
  const std::string run = directory_ + "/plans-of-a-run";
  MatmulPlans writer("identity C", run);
  writer.add({{"product", one_}});
  std::string text = read_text_file(run, 10000);
  const std::size_t word = text.find("0000000000000001");
  ASSERT_NE(word, std::string::npos);
  text.replace(word, 16, "000000000000000f");
  write_file_atomically(run, text);
  const MatmulPlans reader("identity C", run), stranger("identity D", run);
  EXPECT_EQ((*reader.find("product"))[0], 15u);
  EXPECT_EQ(stranger.find("product"), nullptr);
}

// What the first rank of a run has chosen, the others take, whatever they would have remembered.
TEST_F(MatmulPlansTest, ThePlansOfAnotherRankReplaceItsOwn) {
  MatmulPlans first("identity R", "");
  first.add({{"product", one_}, {"other", two_}});
  MatmulPlans second("identity R", ""), stranger("identity S", "");
  second.adopt(first.text());
  EXPECT_EQ(*second.find("product"), one_);
  EXPECT_EQ(*second.find("other"), two_);
  first.add({{"third", one_}});
  MatmulPlans fewer("identity R", "");
  fewer.adopt(second.text());
  EXPECT_EQ(fewer.find("third"), nullptr) << "a plan that the first rank does not have";
  for (const std::string& text : {first.text(), std::string("damaged")}) {
    try {
      stranger.adopt(text);
      ADD_FAILURE() << "plans of another GPU were taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::environment);
    }
  }
}

TEST_F(MatmulPlansTest, DamagedFilesAreLeftAside) {
  MatmulPlans writer("identity E", "");
  writer.add({{"product", one_}});
  const std::string path = cache_file(), whole = read_text_file(path, 10000);
  for (const std::string& damaged :
       {std::string(), whole.substr(0, whole.size() - 5), whole + "rubbish\n", whole + "p: 1 2 3 4 5 6 7 8 9\n",
        whole.substr(0, whole.size() - 1) + " 0000000000000009\n", "weft matmul plans 1" + whole.substr(19),
        std::string("\0\xff", 2)}) {
    // As the file of a run that this process knows nothing of.
    std::string stranger = damaged;
    if (const std::size_t at = stranger.find("identity E"); at != std::string::npos) stranger[at + 9] = 'X';
    write_file_atomically(directory_ + "/run", stranger);
    MatmulPlans reader("identity X", directory_ + "/run");
    EXPECT_EQ(reader.find("product"), nullptr) << damaged;
    EXPECT_EQ(reader.find("p"), nullptr) << damaged;
    reader.add({});
    EXPECT_EQ(read_text_file(directory_ + "/run", 10000), "weft matmul plans 2\nidentity X\n");
    write_file_atomically(path, damaged);
    EXPECT_NO_THROW(MatmulPlans("identity E", ""));
  }
}

TEST_F(MatmulPlansTest, NowhereToWriteIsSaid) {
  const Variable nowhere("WEFT_CACHE_DIR", "/proc/no-such-directory");
  MatmulPlans plans("identity F", "");
  EXPECT_FALSE(plans.remembers());
  plans.add({{"product", one_}});
  EXPECT_EQ(*plans.find("product"), one_);
}

}  // namespace
}  // namespace weft::cuda
