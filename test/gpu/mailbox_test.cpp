// The host's side of the mailbox; the GPU's is tested with the kernels that publish.
#include "llmc/cuda/op/sample/mailbox.h"

#include <gtest/gtest.h>

#include <atomic>

#include "llmc/base/error.h"
#include "llmc/cuda/runtime/stream.h"
#include "test/cpp/test_files.h"

namespace weft::test {
namespace {

using cuda::kMailboxIds;
using cuda::Mailbox;

// As a kernel would.
void publish(const Mailbox& mailbox, std::uint32_t sequence, std::uint32_t id, SampleError error = SampleError::none) {
  const std::uint64_t low = static_cast<std::uint64_t>(error) << cuda::kMailboxErrorShift | id;
  std::atomic_ref<std::uint64_t>(mailbox.words()->ids[sequence % kMailboxIds])
      .store(static_cast<std::uint64_t>(sequence) << 32 | low);
}

TEST(Mailbox, NumbersAreUsedOnce) {
  Mailbox mailbox;
  EXPECT_EQ(mailbox.reserve(1), 1u);
  EXPECT_EQ(mailbox.reserve(kMailboxIds), 2u);
  EXPECT_EQ(mailbox.reserve(3), 2u + kMailboxIds);
}

TEST(Mailbox, ReadsTheIdOfItsNumberAlone) {
  const Mailbox mailbox;
  const cuda::Stream stream;
  const auto never = [] { return false; };
  publish(mailbox, 5, 1000);
  publish(mailbox, 6, (1u << cuda::kMailboxErrorShift) - 1);
  publish(mailbox, 7, 0, SampleError::nothing_finite);
  EXPECT_EQ(mailbox.wait(5, stream, never).value().id, 1000);
  EXPECT_EQ(mailbox.wait(6, stream, never).value().id, (1 << cuda::kMailboxErrorShift) - 1);
  EXPECT_EQ(mailbox.wait(6, stream, never).value().error, SampleError::none);
  EXPECT_EQ(mailbox.wait(7, stream, never).value().error, SampleError::nothing_finite);

  // The word of number 5 is that of 5 + kMailboxIds, too, which has not been published.
  int asked = 0;
  EXPECT_FALSE(mailbox.wait(5 + kMailboxIds, stream, [&] { return ++asked == 3; }).has_value());
  EXPECT_EQ(asked, 3);
  publish(mailbox, 5 + kMailboxIds, 2000);
  EXPECT_EQ(mailbox.wait(5 + kMailboxIds, stream, never).value().id, 2000);

  // Published in the moment in which the end shows: the id is not lost.
  const auto at_the_end = [&] {
    publish(mailbox, 8, 3000);
    return true;
  };
  EXPECT_EQ(mailbox.wait(8, stream, at_the_end).value().id, 3000);
}

TEST(Mailbox, AStreamThatHasFinishedWithoutPublishingIsAnError) {
  const Mailbox mailbox;
  const cuda::Stream stream;
  const std::string message = error_of(Exit::internal, [&] { mailbox.wait(1, stream, [] { return false; }); });
  EXPECT_NE(message.find("without publishing"), std::string::npos);
}

}  // namespace
}  // namespace weft::test
