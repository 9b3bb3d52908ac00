// The base room: UTF-8, messages, JSON limits, dtypes, Philox, files that appear when they are complete,
// memory plans.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "address_space.h"
#include "colliding_names.h"
#include "llmc/base/arena.h"
#include "llmc/base/cgroup.h"
#include "llmc/base/checked.h"
#include "llmc/base/dtype.h"
#include "llmc/base/file.h"
#include "llmc/base/hash.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/percentile.h"
#include "llmc/base/philox.h"
#include "llmc/base/signals.h"
#include "llmc/base/threads.h"
#include "llmc/base/utf8.h"
#include "processor_time.h"
#include "sanitized.h"
#include "test_files.h"

// Some file systems give up reserving space when a signal comes; here as often as a test asks for it. In the place of the
// C library's function.
namespace {
std::atomic<int> interruptions{0};
std::atomic<int> reserving_error{0};  // that it always ends with; 0: none
}  // namespace
extern "C" int posix_fallocate(int fd, off_t offset, off_t length) {
  if (interruptions > 0) {
    --interruptions;
    return EINTR;
  }
  if (reserving_error != 0) return reserving_error;
  return ::fallocate(fd, 0, offset, length) == 0 ? 0 : errno;
}

namespace weft {
namespace {

// ---- text -----------------------------------------------------------------------------------------------------------

// The Unicode Standard 15, table 3-7, written as a decoder: the second formulation of well-formedness.
std::size_t decoded_length(const std::string& s) {
  const auto byte = [&](std::size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  const auto tail = [&](std::size_t i) { return (byte(i) & 0xC0) == 0x80; };
  if (s.empty()) return 0;
  if (byte(0) < 0x80) return 1;
  if ((byte(0) & 0xE0) == 0xC0 && tail(1)) return ((byte(0) & 0x1F) << 6 | (byte(1) & 0x3F)) >= 0x80 ? 2 : 0;
  if ((byte(0) & 0xF0) == 0xE0 && tail(1) && tail(2)) {
    const unsigned code = (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    return code >= 0x800 && (code < 0xD800 || code > 0xDFFF) ? 3 : 0;
  }
  if ((byte(0) & 0xF8) == 0xF0 && tail(1) && tail(2) && tail(3)) {
    const unsigned code = (byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
    return code >= 0x10000 && code <= 0x10FFFF ? 4 : 0;
  }
  return 0;
}

TEST(Utf8, AgreesWithADecoderOnEveryPairOfLeadingBytes) {
  for (unsigned first = 0; first < 256; ++first) {
    for (unsigned second = 0; second < 256; ++second) {
      for (const char* rest : {"", "\x80", "\xBF\x80", "\x80\xBF", "ab", "\x80z"}) {
        const std::string text = std::string{static_cast<char>(first), static_cast<char>(second)} + rest;
        ASSERT_EQ(utf8_sequence_length(text), decoded_length(text)) << first << " " << second << " + " << rest;
      }
    }
  }
  EXPECT_EQ(utf8_sequence_length(""), 0u);
}

TEST(Utf8, HoldsBackAnIncompleteSequence) {
  const std::string thread = "\U0001f9f5";
  for (std::size_t taken = 1; taken < 4; ++taken) {
    EXPECT_EQ(utf8_incomplete_suffix("text" + thread.substr(0, taken)), taken);
  }
  EXPECT_EQ(utf8_incomplete_suffix("text" + thread), 0u);
  EXPECT_EQ(utf8_incomplete_suffix("\xC3"), 1u);
  EXPECT_EQ(utf8_incomplete_suffix("\xE0\x80"), 0u);  // can never become well-formed
  EXPECT_EQ(utf8_incomplete_suffix("\xFF"), 0u);
  EXPECT_EQ(utf8_incomplete_suffix(""), 0u);
}

TEST(Utf8, ReplacesEachMaximalIllFormedSubpart) {
  const std::string r = "\uFFFD";
  EXPECT_EQ(utf8_replace_invalid("a\xC3\xA9z"), "a\u00e9z");
  // The example of The Unicode Standard 15, table 3-8 to 3-11.
  EXPECT_EQ(utf8_replace_invalid("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82"
                                 "A"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8_replace_invalid("\xED\xA0\x80\xED\xBF\xBF\xED\xAF"
                                 "A"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8_replace_invalid("\xF4\x91\x92\x93\xFF"
                                 "A\x80\xBF"
                                 "B"),
            r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(utf8_replace_invalid("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF"
                                 "A"),
            r + r + r + r + "A");
}

std::string utf8(char32_t c) {
  const auto tail = [c](int shift) { return static_cast<char>(0x80 | (c >> shift & 0x3F)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | c >> 18), tail(12), tail(6), tail(0)};
}

TEST(Escaped, LeavesNothingThatSteersATerminal) {
  EXPECT_EQ(escaped("plain \u00e9"), "'plain \u00e9'");
  EXPECT_EQ(escaped("a\x1b[31mb\n\x7f"), "'a\\x1b[31mb\\x0a\\x7f'");
  EXPECT_EQ(escaped("\xC2\x9B"
                    "1m"),
            "'\\xc2\\x9b1m'");  // U+009B is CSI in one character
  EXPECT_EQ(escaped("\xFF\xC0\xAF"), "'\\xff\\xc0\\xaf'");
  EXPECT_EQ(escaped("it's \\ here"), "'it\\'s \\\\ here'");
  EXPECT_EQ(escaped(std::string("a\0b", 3)), "'a\\x00b'");
  // What turns the direction of text, or cannot be seen.
  EXPECT_EQ(escaped("a\u202eb\ufeff\U000e0041"), "'a\\xe2\\x80\\xaeb\\xef\\xbb\\xbf\\xf3\\xa0\\x81\\x81'");
  // Each range of such characters to both of its ends, and not beyond.
  const std::pair<char32_t, char32_t> ranges[] = {
      {0x01, 0x1F},     {0x7F, 0x9F},     {0xAD, 0xAD},     {0x61C, 0x61C},   {0x180E, 0x180E},  {0x200B, 0x200F},
      {0x2028, 0x202E}, {0x2060, 0x206F}, {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB}, {0xE0000, 0xE007F}};
  const auto is_shown = [](char32_t c) { return escaped(utf8(c)) == "'" + utf8(c) + "'"; };
  for (const auto& [first, last] : ranges) {
    EXPECT_FALSE(is_shown(first)) << static_cast<unsigned>(first);
    EXPECT_FALSE(is_shown(last)) << static_cast<unsigned>(last);
    EXPECT_TRUE(first == 0x01 || is_shown(first - 1)) << static_cast<unsigned>(first);
    EXPECT_TRUE(is_shown(last + 1)) << static_cast<unsigned>(last);
  }
  EXPECT_EQ(escaped("abcdef", 3), "'a...ef'");
  EXPECT_EQ(escaped("abcdef", 6), "'abcdef'");
  EXPECT_EQ(escaped("ab\u00e9f", 3), "'a...f'");  // never cuts a character in two
  EXPECT_EQ(escaped("ab\u00e9f\n", 4), "'a...f\\x0a'");
  EXPECT_EQ(escaped("ab\U0001F600f", 6), "'ab...f'");
  EXPECT_EQ(escaped(std::string(9, 'a') + "\xFF\xFF\xFF", 6), "'aa...a\\xff\\xff\\xff'");
  std::string path;
  for (int i = 0; i < 100; ++i) path += "/dir";
  EXPECT_TRUE(escaped(path + "/file.bin").ends_with("/dir/file.bin'")) << escaped(path);
}

TEST(Format, MakesTextOfAnyLength) {
  EXPECT_EQ(format("%d %s", 7, "x"), "7 x");
  EXPECT_EQ(format("%s", std::string(100'000, 'y').c_str()).size(), 100'000u);
  EXPECT_EQ(format("%s", ""), "");
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

std::string json_error(const std::string& text, const JsonLimits& limits = {}) {
  return error_of(Exit::bad_file, [&] { parse_json(text, "x.json", limits); });
}

TEST(Json, AcceptsWhatIsWithinTheLimits) {
  EXPECT_EQ(parse_json(R"({"a":[1,{"a":2}],"b":{"a":3}})", "x.json")["a"][1]["a"], 2);
  const std::string nested = std::string(64, '[') + std::string(64, ']');
  EXPECT_TRUE(parse_json(nested, "x.json").is_array());
  EXPECT_EQ(parse_json("7", "x.json", {.bytes = 1}), 7);
}

// Without the parser's own words and without the text, which may hold anything.
TEST(Json, SaysWhatIsWrongAndWhere) {
  for (const auto& [text, problem] : std::vector<std::pair<std::string, std::string>>{
           {R"({"a": 3])", "unexpected ']'; expected '}' (byte 8)"},
           {"[1, 2", "unexpected end of input; expected ']' (byte 6)"},
           {"[\"\x1b[31m\"]", "invalid string: control character U+001B (ESC) must be escaped to \\u001B (byte 3)"},
           {"[nul\x1b]", "invalid literal (byte 5)"},
           {R"(["\ud800"])", "invalid string: surrogate U+D800..U+DBFF must be followed by U+DC00..U+DFFF (byte 9)"},
           {"[1e400]", "a number is out of range"}}) {
    EXPECT_EQ(json_error(text), "x.json: not valid JSON: " + problem);
  }
}

TEST(Json, NoMoreValuesThanAllowed) {
  const std::string three = R"({"a":[1,""],"b":null})";  // the object, the array, and what is in them: 5
  EXPECT_EQ(parse_json(three, "x.json", {.values = 5}).size(), 2u);
  expect_contains(json_error(three, {.values = 4}), "x.json: more than 4 JSON values are not accepted");
  const auto repeated = [](const std::string& value, std::size_t count) {
    std::string text = "[" + value;
    for (std::size_t i = 1; i < count; ++i) text += "," + value;
    return text + "]";
  };
  for (const char* value : {"0", "\"\"", "[]", "{}", "null", "true", "0.5", "-1"}) {
    EXPECT_EQ(parse_json(repeated(value, 9), "x.json", {.values = 10}).size(), 9u) << value;
    expect_contains(json_error(repeated(value, 10), {.values = 10}), "more than 10 JSON values");
  }
  expect_contains(json_error(repeated("0", 5'000'000)), "more than 5000000 JSON values");
}

TEST(Json, KeysThatCollideCostNoMoreThanOthers) {
  expect_no_collisions([](const std::vector<std::string>& names) {
    Json object;
    for (const std::string& name : names) object[name] = 0;
    const std::string text = object.dump();
    return processor_seconds([&] { parse_json(text, "text"); });
  });
}

TEST(Json, RefusesWhatIsNot) {
  expect_contains(json_error(std::string(65, '[') + std::string(65, ']')), "x.json: JSON nested deeper than 64 levels");
  expect_contains(json_error(std::string(1'000'000, '[')), "deeper than 64 levels");
  expect_contains(json_error(R"({"a":{"b":1,"c":2,"b":3}})"), "JSON key 'b' occurs twice in one object");
  expect_contains(json_error("[1, 2]", {.bytes = 5}), "6 bytes of JSON, at most 5 are accepted");
  for (const std::string text :
       {"", "{", "[1,]", "{\"a\" 1}", "[1] x", "\"\xFF\"", "NaN", "1e999", "'a'", "{\"a\":1}}"}) {
    EXPECT_NE(json_error(text), "") << text;
  }
}

// Numbers of 2^63 and more are integers of JSON, but none that fits.
TEST(Json, AnIntegerIsOneThatFits) {
  const auto integer = [](const char* text) { return json_integer(parse_json(text, "x")); };
  EXPECT_EQ(integer("0"), 0);
  EXPECT_EQ(integer("-1"), -1);
  EXPECT_EQ(integer("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(integer("-9223372036854775808"), std::numeric_limits<std::int64_t>::min());
  for (const char* none : {"9223372036854775808", "9223372036854775809", "18446744073709551615", "18446744073709551616",
                           "-9223372036854775809", "1.0", "1e3", "true", "null", "\"1\"", "[1]"}) {
    EXPECT_FALSE(integer(none).has_value()) << none;
  }
}

TEST(Json, MembersHaveTheirTypeAndRange) {
  const Json object = parse_json(R"({"i":5,"big":9223372036854775808,"f":1.5,"b":true,"s":"x","t":"\u001b"})", "x");
  EXPECT_EQ(json_int(object, "i", 5, 5, "x"), 5);
  EXPECT_EQ(json_number(object, "i", "x"), 5.0);
  EXPECT_EQ(json_number(object, "f", "x"), 1.5);
  EXPECT_TRUE(json_bool(object, "b", "x"));
  EXPECT_EQ(json_string(object, "s", "x"), "x");
  const auto int_error = [&](const char* key, std::int64_t low, std::int64_t high) {
    return error_of(Exit::bad_file, [&] { json_int(object, key, low, high, "x"); });
  };
  expect_contains(int_error("none", 0, 9), "x: none: missing");
  expect_contains(int_error("i", 6, 9), "x: i: got '5', expected an integer from 6 to 9");
  expect_contains(int_error("i", 0, 4), "x: i: got '5'");
  expect_contains(int_error("big", 0, std::numeric_limits<std::int64_t>::max()), "big");
  expect_contains(int_error("f", 0, 9), "f");
  expect_contains(int_error("b", 0, 9), "b");
  EXPECT_NE(error_of(Exit::bad_file, [&] { json_bool(object, "i", "x"); }), "");
  EXPECT_NE(error_of(Exit::bad_file, [&] { json_number(object, "s", "x"); }), "");
  const std::string message = error_of(Exit::bad_file, [&] { json_bool(object, "t", "x"); });
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_NE(error_of(Exit::bad_file, [&] { json_string(Json(3), "s", "x"); }), "");
}

// ---- numbers --------------------------------------------------------------------------------------------------------

// An IEEE 754 value from its fields, by arithmetic instead of shifts: the second formulation of the
// conversions.
double value_of(unsigned bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(static_cast<double>(bits & ((1u << mantissa_bits) - 1)), -mantissa_bits);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias) : sign * std::ldexp(1 + fraction, exponent - bias);
}

struct HalfFormat {
  const char* name;
  int exponent_bits, mantissa_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);
};
const HalfFormat kHalfFormats[] = {{"bf16", 8, 7, bf16_to_f32, f32_to_bf16}, {"f16", 5, 10, f16_to_f32, f32_to_f16}};

TEST(DTypes, EveryBitPatternWidensToItsValueAndComesBack) {
  for (const HalfFormat& half : kHalfFormats) {
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const double expected = value_of(bits, half.exponent_bits, half.mantissa_bits);
      const float got = half.widen(static_cast<std::uint16_t>(bits));
      const std::uint16_t back = half.narrow(got);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(got) && std::isnan(half.widen(back))) << half.name << " " << bits;
      } else {
        ASSERT_EQ(static_cast<double>(got), expected) << half.name << " " << bits;
        ASSERT_EQ(std::signbit(got), std::signbit(expected)) << half.name << " " << bits;
        ASSERT_EQ(back, bits) << half.name << " " << bits;
      }
    }
  }
}

// Between neighbours a < b of the 16-bit format: below the middle rounds to a, above to b, the middle to the
// even one.
TEST(DTypes, RoundsToNearestEven) {
  for (const HalfFormat& half : kHalfFormats) {
    const unsigned infinity = ((1u << half.exponent_bits) - 1) << half.mantissa_bits;
    for (unsigned bits = 0; bits < infinity; ++bits) {
      const double a = value_of(bits, half.exponent_bits, half.mantissa_bits);
      const double step = bits > 0 ? a - value_of(bits - 1, half.exponent_bits, half.mantissa_bits) : 0;
      const double b = bits + 1 < infinity ? value_of(bits + 1, half.exponent_bits, half.mantissa_bits) : a + step;
      const float middle = static_cast<float>((a + b) / 2);
      const float below = std::nextafter(middle, 0.0f);
      const float above = std::nextafter(middle, std::numeric_limits<float>::infinity());
      const unsigned even = bits % 2 == 0 ? bits : bits + 1;
      ASSERT_EQ(half.narrow(middle), even) << half.name << " " << bits;
      ASSERT_EQ(half.narrow(below), bits) << half.name << " " << bits;
      ASSERT_EQ(half.narrow(above), bits + 1) << half.name << " " << bits;
      ASSERT_EQ(half.narrow(-middle), even | 0x8000u) << half.name << " " << bits;
    }
  }
}

TEST(DTypes, NotANumberStaysNotANumber) {
  for (const std::uint32_t bits : {0x7F800001u, 0xFF800001u, 0x7FC00000u, 0x7FFFFFFFu, 0x7F801FFFu}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan)))) << bits;
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan)))) << bits;
  }
}

TEST(DTypes, NamesAndSizes) {
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < kNumDTypes; ++i) names.insert(dtype_name(static_cast<DType>(i)));
  EXPECT_EQ(names.size(), kNumDTypes);
  EXPECT_EQ(dtype_bytes(DType::bf16), 2u);
  EXPECT_EQ(dtype_bytes(DType::i64), 8u);
  EXPECT_EQ(dtype_bits(DType::u4), 4u);
  EXPECT_NE(error_of(Exit::internal, [&] { dtype_bytes(DType::u4); }), "");
}

// Against the formula of the format: sign, exponent of bias 7, three bits of mantissa; subnormals; the largest is 448.
TEST(DTypes, E4m3HasTheValuesOfItsFormat) {
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
    const float got = e4m3_to_f32(static_cast<std::uint8_t>(bits));
    if ((bits & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(static_cast<double>(got), bits < 128 ? magnitude : -magnitude) << bits;
      EXPECT_EQ(std::signbit(got), bits >= 128) << bits;
    }
  }
  EXPECT_EQ(e4m3_to_f32(0x7E), 448.0f);
}

TEST(DTypes, ArraysConvert) {
  const std::vector<float> values = {0, -1.5f, 65504, 0x1p-24f, 3};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::byte> stored(values.size() * dtype_bytes(dtype));
    std::vector<float> back(values.size());
    convert_from_f32(values.data(), dtype, stored.data(), values.size());
    convert_to_f32(stored.data(), dtype, back.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(back[i], dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(values[i])) : values[i]);
    }
  }
  float value = 0;
  EXPECT_NE(error_of(Exit::internal, [&] { convert_to_f32(&value, DType::i32, &value, 0); }), "");
  EXPECT_NE(error_of(Exit::internal, [&] { convert_from_f32(&value, DType::u8, &value, 0); }), "");
}

TEST(Checked, ArithmeticRefusesToWrap) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(checked_mul(kMax, 1, "x"), kMax);
  EXPECT_EQ(checked_add(kMax - 1, 1, "x"), kMax);
  EXPECT_EQ(align_up(257, 256, "x"), 512u);
  EXPECT_EQ(align_up(256, 256, "x"), 256u);
  EXPECT_EQ(align_up(0, 256, "x"), 0u);
  expect_contains(error_of(Exit::bad_file, [&] { checked_mul(kMax / 2, 3, "rows"); }), "rows: size overflows 64 bits");
  EXPECT_NE(error_of(Exit::bad_file, [&] { checked_add(kMax, 1, "x"); }), "");
  EXPECT_NE(error_of(Exit::bad_file, [&] { align_up(kMax, 2, "x"); }), "");
}

TEST(Percentile, IsTheNearestRank) {
  // 1 to `count`, so that a value is its rank; 37 has no divisor in common with any count here.
  const auto of = [](int count, double percent) {
    std::vector<double> values;
    for (int i = 0; i < count; ++i) values.push_back(1 + i * 37 % count);
    return percentile(values, percent);
  };
  const double percents[] = {0, 1, 50, 99, 100};
  const std::map<int, std::vector<double>> expected = {
      {1, {1, 1, 1, 1, 1}},       {2, {1, 1, 1, 2, 2}},        {3, {1, 1, 2, 3, 3}},
      {100, {1, 1, 50, 99, 100}}, {101, {1, 2, 51, 100, 101}},
  };
  for (const auto& [count, ranks] : expected) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      EXPECT_EQ(of(count, percents[i]), ranks[i]) << count << " values, " << percents[i] << " %";
    }
  }
  // In fp64 0.07 * 100 and 0.28 * 100 are more than 7 and 28.
  for (int percent = 1; percent <= 100; ++percent) EXPECT_EQ(of(100, percent), percent);
  EXPECT_TRUE(std::isnan(percentile({}, 50)));
}

// Known answers of philox4x32-10 from Random123's kat_vectors (Salmon et al., SC11).
TEST(Philox, KnownAnswers) {
  const auto words = [](const PhiloxWords& got) { return std::vector<std::uint32_t>(got.word, got.word + 4); };
  constexpr std::uint64_t kOnes = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(words(philox(0, 0, 0)), (std::vector<std::uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words(philox(kOnes, kOnes, kOnes)),
            (std::vector<std::uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e)),
            (std::vector<std::uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformLiesInTheHalfOpenInterval) {
  EXPECT_EQ(uniform01(0), 0.0f);
  EXPECT_EQ(uniform01(0xFFFFFFFFu), 1.0f - 0x1p-24f);
  EXPECT_EQ(uniform01(0x80000000u), 0.5f);
}

// Vectors of the XXH3 specification's reference implementation: the empty input, and streaming equal to one
// call.
TEST(Xxh3, StreamAndOneCallAgree) {
  EXPECT_EQ(xxh3_64("", 0), 0x2D06800538D394C2u);
  std::string text;
  for (int i = 0; i < 5000; ++i) text += static_cast<char>(i * 7 + i / 256);
  for (const std::size_t piece : {1u, 63u, 256u, 1025u, 5000u}) {
    Xxh3Stream stream;
    stream.update("rubbish", 7);
    stream.reset();
    for (std::size_t i = 0; i < text.size(); i += piece)
      stream.update(text.data() + i, std::min(piece, text.size() - i));
    EXPECT_EQ(stream.digest(), xxh3_64(text));
  }
}

// ---- files ----------------------------------------------------------------------------------------------------------

TEST(AtomicFile, AppearsOnlyWhenPublished) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  AtomicFile file(path, 100);
  file.write("hello ");
  file.write("world");
  file.rewrite(0, "J", 1);
  EXPECT_EQ(file.size(), 11u);
  EXPECT_FALSE(std::filesystem::exists(path));
  file.publish();
  EXPECT_EQ(read_bytes(path), "Jello world");  // and not the 100 bytes that were reserved
  EXPECT_EQ(directory.entries(), 1u);
}

// Another user of /tmp may guess the name.
TEST(AtomicFile, ALinkUnderItsTemporaryNameIsNotFollowed) {
  const TemporaryDirectory directory;
  write_bytes(directory.file("victim"), "precious");
  const std::string temporary = format("%s.tmp.%d", directory.file("x").c_str(), static_cast<int>(::getpid()));
  std::filesystem::create_symlink(directory.file("victim"), temporary);
  write_file_atomically(directory.file("x"), "new");
  EXPECT_EQ(read_bytes(directory.file("victim")), "precious");
  EXPECT_EQ(read_bytes(directory.file("x")), "new");
  EXPECT_FALSE(std::filesystem::is_symlink(directory.file("x")));
  EXPECT_EQ(directory.entries(), 2u);
}

TEST(AtomicFile, AbandonedItLeavesTheOldFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  write_file_atomically(path, "old");
  {
    AtomicFile file(path);
    file.write("new");
  }
  EXPECT_EQ(read_bytes(path), "old");
  EXPECT_EQ(directory.entries(), 1u);
}

// Runs `work` with files limited to `bytes`: the way to a full disk that needs no privileges.
template <typename Work>
auto with_file_limit(rlim_t bytes, Work work) {
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{bytes, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const auto result = work();
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  return result;
}

template <typename Work>
std::string error_with_file_limit(rlim_t bytes, Work work) {
  return with_file_limit(bytes, [&] { return error_of(Exit::resources, work); });
}

TEST(AtomicFile, AFullDiskIsFoundWhenReservingAndWhenWriting) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x");
  write_file_atomically(path, "old");
  const auto before = open_descriptors();
  expect_contains(error_with_file_limit(4096, [&] { AtomicFile file(path, 1 << 20); }), "cannot reserve space");
  expect_contains(error_with_file_limit(4096, [&] { AtomicFile(path).write(std::string(1 << 20, 'x')); }),
                  "cannot write");
  EXPECT_EQ(open_descriptors(), before) << "a process that goes on keeps none open";
  EXPECT_EQ(read_bytes(path), "old");
  EXPECT_EQ(directory.entries(), 1u);
}

TEST(AtomicFile, ASignalWhileItReservesIsNoError) {
  const TemporaryDirectory directory;
  interruptions = 2;
  write_file_atomically(directory.file("x"), "new");
  EXPECT_EQ(interruptions, 0);
  EXPECT_EQ(read_bytes(directory.file("x")), "new");
}

// Not every file system can reserve space: the file is written without.
TEST(AtomicFile, WhereNoSpaceCanBeReservedItIsWrittenAllTheSame) {
  const TemporaryDirectory directory;
  for (const int error : {EOPNOTSUPP, EINVAL}) {
    reserving_error = error;
    EXPECT_NO_THROW(write_file_atomically(directory.file("x"), "new")) << std::strerror(error);
    reserving_error = 0;
    EXPECT_EQ(read_bytes(directory.file("x")), "new");
    std::filesystem::remove(directory.file("x"));
  }
  reserving_error = EIO;
  expect_contains(error_of(Exit::environment, [&] { write_file_atomically(directory.file("x"), "new"); }),
                  "cannot reserve space: Input/output error");
  reserving_error = 0;
  EXPECT_EQ(directory.entries(), 0u);
}

TEST(AtomicFile, AnAbsentDirectoryIsAnEnvironmentError) {
  const TemporaryDirectory directory;
  expect_contains(error_of(Exit::environment, [&] { AtomicFile(directory.file("none/x")); }), "cannot create");
}

std::size_t always_fail(const std::string&, std::uint64_t offset, std::size_t bytes) {
  if (offset >= 4) fail(Exit::resources, "injected");
  return bytes;
}

TEST(AtomicFile, TheFaultHookRunsBeforeEachWrite) {
  const TemporaryDirectory directory;
  set_write_fault(always_fail);
  EXPECT_EQ(error_of(Exit::resources,
                     [&] {
                       AtomicFile file(directory.file("x"));
                       file.write("abcd");
                       file.write("efgh");
                     }),
            "injected");
  set_write_fault(nullptr);
  EXPECT_EQ(directory.entries(), 0u);
}

// Less than was asked for: the hook tears a write at an exact byte.
TEST(AtomicFile, TheFaultHookMayCutAWriteIntoPieces) {
  const TemporaryDirectory directory;
  set_write_fault([](const std::string&, std::uint64_t offset, std::size_t bytes) -> std::size_t {
    return offset < 6 ? std::min<std::size_t>(bytes, 6 - offset) : bytes;
  });
  write_file_atomically(directory.file("x"), "abcdefghij");
  set_write_fault(nullptr);
  EXPECT_EQ(read_bytes(directory.file("x")), "abcdefghij");
}

// Inode numbers are those of one file system: a file of another one may have the same.
TEST(FileIdentity, TellsFilesApart) {
  struct stat info {};
  info.st_dev = 1, info.st_ino = 2, info.st_size = 3, info.st_mtim.tv_sec = 4, info.st_mtim.tv_nsec = 5;
  struct stat device = info, inode = info, size = info, seconds = info, nanoseconds = info;
  ++device.st_dev, ++inode.st_ino, ++size.st_size, ++seconds.st_mtim.tv_sec, ++nanoseconds.st_mtim.tv_nsec;
  EXPECT_TRUE(FileIdentity::of(info) == FileIdentity::of(info));
  for (const struct stat& other : {device, inode, size, seconds, nanoseconds}) {
    EXPECT_FALSE(FileIdentity::of(other) == FileIdentity::of(info));
  }
}

TEST(Log, LinesOfAnyLengthAreWhole) {
  const std::string text(100'000, 'x');
  testing::internal::CaptureStderr();
  log_info("%s.", text.c_str());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), text + ".\n");
}

TEST(AtomicFile, ACallThatFailsLeavesTheOldFile) {
  const TemporaryDirectory directory;
  write_file_atomically(directory.file("x"), "old");
  for (const char* call : {"sync", "rename"}) {
    static const char* failing;
    failing = call;
    set_call_fault([](const char* now, const std::string&) { return std::strcmp(now, failing) != 0; });
    expect_contains(error_of(Exit::environment, [&] { write_file_atomically(directory.file("x"), "new"); }),
                    "Input/output error");
    set_call_fault(nullptr);
    EXPECT_EQ(read_bytes(directory.file("x")), "old");
    EXPECT_EQ(directory.entries(), 1u);
  }
}

// A file that is cut while it is read: the page is gone, and the kernel has no other way to say so.
TEST(MappedFileDeathTest, APageThatIsGoneIsABadFile) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto read_cut_file = [] {
    const TemporaryDirectory directory;
    write_bytes(directory.file("x"), std::string(100000, 'x'));
    const MappedFile file(directory.file("x"));
    install_bus_error_handler();
    std::filesystem::resize_file(directory.file("x"), 10);
    std::filesystem::remove_all(directory.file(""));  // no destructor runs after what follows
    const volatile std::byte* last = file.data() + 99999;
    [[maybe_unused]] const std::byte gone = *last;
  };
  EXPECT_EXIT(read_cut_file(), testing::ExitedWithCode(3), "error: a file in use cannot be read any more");
}

TEST(SignalsDeathTest, AHangupThatNohupIgnoresStaysIgnored) {
  const auto hang_up = [](void (*inherited)(int)) {
    ::signal(SIGHUP, inherited);
    install_signal_handlers();
    ::raise(SIGHUP);
    ::_exit(stop_signal());
  };
  EXPECT_EXIT(hang_up(SIG_IGN), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(hang_up(SIG_DFL), testing::ExitedWithCode(SIGHUP), "");
}

// Each runs in a process of its own and tells by its exit code how it ended.
TEST(SignalsDeathTest, LeaveEndsTheProgramAtOnce) {
  const auto leave = [](int signal_number) {
    on_stop(OnStop::leave, "not shown", "nothing is lost");
    install_signal_handlers();
    ::raise(signal_number);
    ::_exit(0);
  };
  EXPECT_EXIT(leave(SIGINT), testing::ExitedWithCode(130), "^nothing is lost\n$");
  EXPECT_EXIT(leave(SIGTERM), testing::ExitedWithCode(143), "nothing is lost");
}

TEST(SignalsDeathTest, FinishSaysWhatItDoesAndWhatASecondSignalCosts) {
  const auto finish = [](int signal_number, bool twice) {
    ::signal(SIGHUP, SIG_DFL);  // the tests may run under nohup
    install_signal_handlers();
    on_stop(OnStop::finish, "finishing", "stopped at once");
    ::raise(signal_number);
    if (twice) {
      ::usleep(150'000);  // two within 0.1 s are one
      ::raise(signal_number);
    }
    ::_exit(stop_signal());
  };
  EXPECT_EXIT(finish(SIGINT, false), testing::ExitedWithCode(SIGINT), "^finishing\n$");
  EXPECT_EXIT(finish(SIGINT, true), testing::ExitedWithCode(130), "^finishing\nstopped at once\n$");
  EXPECT_EXIT(finish(SIGTERM, true), testing::ExitedWithCode(143), "^finishing\nstopped at once\n$");
  // A terminal may hang up more than once, and nobody is there to insist.
  EXPECT_EXIT(finish(SIGHUP, true), testing::ExitedWithCode(SIGHUP), "^finishing\n$");
}

// A process of many parts says many times what a signal does: the last one counts, and what it does not say is not said.
TEST(SignalsDeathTest, TheLastReactionCountsWithItsWords) {
  const auto end = [](int silent) {
    install_signal_handlers();
    for (const char* words : {"one", "two", "three"}) on_stop(OnStop::leave, "not shown", words);
    for (int i = 0; i < silent; ++i) on_stop(OnStop::leave);
    ::raise(SIGTERM);
  };
  EXPECT_EXIT(end(0), testing::ExitedWithCode(143), "^three\n$");
  for (const int silent : {1, 2, 3}) EXPECT_EXIT(end(silent), testing::ExitedWithCode(143), "^$") << silent;
}

TEST(SignalsDeathTest, FinishSoonHasASecond) {
  const auto finish = [](bool in_time) {
    install_signal_handlers();
    on_stop(OnStop::finish_soon, "", "too late");
    ::raise(SIGTERM);
    if (in_time) on_stop(OnStop::finish);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
    while (std::chrono::steady_clock::now() < end) ::usleep(10'000);
    ::_exit(stop_signal());
  };
  EXPECT_EXIT(finish(true), testing::ExitedWithCode(SIGTERM), "^$");
  EXPECT_EXIT(finish(false), testing::ExitedWithCode(143), "^too late\n$");
}

TEST(Signals, EachHasItsExitCode) {
  EXPECT_EQ(exit_after_signal(0), Exit::ok);
  EXPECT_EQ(exit_after_signal(SIGINT), Exit::interrupted);
  for (const int number : {SIGTERM, SIGHUP}) EXPECT_EQ(exit_after_signal(number), Exit::terminated);
}

TEST(Threads, AreNeverMoreThanTheOptionAllows) {
  ThreadLimits limits;
  for (const std::int64_t cores : {std::int64_t{0}, std::int64_t{1}, kMaxThreads, kMaxThreads + 1}) {
    limits.cores = cores;
    EXPECT_EQ(choose_threads(0, limits), std::clamp<std::int64_t>(cores, 1, kMaxThreads));
  }
}

// A thread that is started meanwhile gets none of them; afterwards the mask is as it was.
TEST(Signals, AllThatHaveAHandlerGoElsewhere) {
  const auto blocked = [] {
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    std::set<int> numbers;
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGALRM, SIGSEGV, SIGBUS, SIGCHLD}) {
      if (sigismember(&now, number) == 1) numbers.insert(number);
    }
    return numbers;
  };
  const std::set<int> before = blocked();
  {
    const SignalsElsewhere signals;
    std::set<int> expected = before;
    expected.insert({SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGALRM});
    EXPECT_EQ(blocked(), expected);
  }
  EXPECT_EQ(blocked(), before);
}

TEST(Threads, AreThoseThatTheProcessMayUse) {
  EXPECT_EQ(choose_threads(3, {8, 2.0, "1"}), 3) << "the option wins";
  EXPECT_EQ(choose_threads(0, {8, {}, ""}), 8);
  EXPECT_EQ(choose_threads(0, {8, 2.9, ""}), 2) << "a team waits for its slowest thread";
  EXPECT_EQ(choose_threads(0, {8, 0.1, ""}), 1);
  EXPECT_EQ(choose_threads(0, {8, {}, "4"}), 4);
  EXPECT_EQ(choose_threads(0, {8, {}, "4,2"}), 4);
  for (const char* odd : {"99999", "99999999999999999999", "0", "-3", "many", "4x", " "}) {
    EXPECT_EQ(choose_threads(0, {8, {}, odd}), 8) << odd;
  }
  EXPECT_EQ(choose_threads(0, {0, {}, ""}), 1);
}

TEST(Threads, TheQuotaOfAControlGroupIsTheSmallestOnTheWay) {
  const TemporaryDirectory folder;
  const auto write = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder.file(file)).parent_path());
    std::ofstream(folder.file(file)) << text;
  };
  const std::string root = folder.file("");
  EXPECT_EQ(cpu_quota("0::/a/b\n", root), std::nullopt);
  write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota("0::/a/b\n", root), std::nullopt);
  write("a/cpu.max", "150000 100000\n");
  write("cpu.max", "400000 100000\n");
  EXPECT_EQ(cpu_quota("0::/a/b\n", root), 1.5);
  EXPECT_EQ(cpu_quota("0::/elsewhere\n", root), 4.0) << "a path of the host: the root counts";
  write("a/b/cpu.max", "300000 100000\n");
  EXPECT_EQ(cpu_quota("0::/a/b\n", root), 1.5) << "that of the parent";
  write("a/b/cpu.max", "25000 100000\n");
  EXPECT_EQ(cpu_quota("0::/a/b\n", root), 0.25) << "that of the group itself";
  write("cpu/x/cpu.cfs_quota_us", "50000\n");
  write("cpu/x/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota("3:memory:/y\n2:cpu,cpuacct:/x\n", root), 0.5);
  write("cpu/x/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cpu_quota("2:cpu:/x\n", root), std::nullopt);
  EXPECT_EQ(cpu_quota("damaged", root), std::nullopt);
}

// Names of controllers contain each other, and a line may have several in any order.
TEST(Cgroup, TheDirectoriesAreThoseOfTheController) {
  using Paths = std::vector<std::string>;
  const auto of_cpu = [](const char* membership) { return cgroup_directories(membership, "cpu", "/r"); };
  const Paths of_x = {"/r/cpu/x", "/r/cpu"};
  for (const char* others : {"cpuset", "cpuacct", "cpuset,cpuacct", "xcpu", "xcpu,cpus", "name=cpu", "cp", ","}) {
    const std::string line = std::string("3:") + others + ":/other\n";
    EXPECT_EQ(of_cpu(line.c_str()), Paths()) << others;
    EXPECT_EQ(of_cpu((line + "2:cpu:/x\n").c_str()), of_x) << others;
    EXPECT_EQ(of_cpu(("2:cpu:/x\n" + line).c_str()), of_x) << others;
    EXPECT_EQ(of_cpu((std::string("2:cpu,") + others + ":/x\n").c_str()), of_x) << others;
    EXPECT_EQ(of_cpu((std::string("2:") + others + ",cpu:/x\n").c_str()), of_x) << others;
    EXPECT_EQ(of_cpu((std::string("2:a,cpu,") + others + ":/x\n").c_str()), of_x) << others;
  }
  EXPECT_EQ(of_cpu("0::/a/b\n"), (Paths{"/r/a/b", "/r/a", "/r"}));
  EXPECT_EQ(of_cpu("0::/a\n4:cpu:/x"), (Paths{"/r/a", "/r", "/r/cpu/x", "/r/cpu"})) << "both versions";
  EXPECT_EQ(of_cpu("2:cpu:/a:cpuset:b\n"), (Paths{"/r/cpu/a:cpuset:b", "/r/cpu"}));
  EXPECT_EQ(of_cpu("2:cpu:/\n"), (Paths{"/r/cpu/", "/r/cpu"}));
  for (const char* none : {"", "\n", "cpu", "2:cpu\n", "2:cpuset:/cpu\n", "cpu:2:/x\n"})
    EXPECT_EQ(of_cpu(none), Paths());
}

TEST(Memory, TheMembershipIsTheKernelsText) {
  std::ifstream file("/proc/self/cgroup");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(cgroup_membership(), text);
}

TEST(Memory, TheLimitOfAControlGroupIsTheSmallestOnTheWay) {
  const TemporaryDirectory folder;
  const auto write = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder.file(file)).parent_path());
    std::ofstream(folder.file(file)) << text;
  };
  const std::string root = folder.file("");
  constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  const auto limit = [&](const char* membership) { return cgroup_memory(membership, root).limit; };
  const auto free = [&](const char* membership) { return cgroup_memory(membership, root).free; };
  EXPECT_EQ(limit("0::/a/b\n"), kNone);
  write("a/b/memory.max", "max\n");
  EXPECT_EQ(limit("0::/a/b\n"), kNone);
  EXPECT_EQ(free("0::/a/b\n"), kNone);
  write("a/memory.max", "3000\n");
  write("a/memory.stat", "anon 1000\nfile 500\n");
  write("memory.max", "5000\n");
  write("memory.stat", "file 700\nanon 4500\n");
  EXPECT_EQ(limit("0::/a/b\n"), 3000u) << "of the group around it";
  EXPECT_EQ(free("0::/a/b\n"), 500u) << "the root has less left than the smaller group in it";
  EXPECT_EQ(limit("0::/elsewhere\n"), 5000u) << "a path of the host: the root counts";
  write("memory/x/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(limit("3:memory:/x/y\n2:cpu,cpuacct:/a\n"), 9223372036854771712u) << "version 1 without a limit";
  write("memory/x/y/memory.limit_in_bytes", "2000\n");
  write("memory/x/y/memory.stat", "rss 1\ntotal_rss 1900\n");
  EXPECT_EQ(limit("3:memory:/x/y\n2:cpu,cpuacct:/a\n"), 2000u);
  EXPECT_EQ(free("3:hugetlb,memory:/x/y\n"), 100u);
  write("memory/x/y/memory.stat", "total_rss 2100\n");
  EXPECT_EQ(free("3:memory:/x/y\n"), 0u);
  EXPECT_EQ(limit("damaged"), kNone);
}

TEST(Threads, BusyTicksAreThoseOfOurCpus) {
  const std::string stat =
      "cpu  100 0 0 0 0 0 0 0 0 0\ncpu0 10 1 2 1000 50 3 4 5 6 7\ncpu1 20 0 0 1000 0 0 0 0 0 0\ncpu12 7 0 0 0 0 0 0 0\n"
      "intr 1 2 3\n";
  EXPECT_EQ(busy_ticks(stat, {true, false}), 10u + 1 + 2 + 3 + 4 + 5);
  EXPECT_EQ(busy_ticks(stat, {true, true}), 45u);
  EXPECT_EQ(busy_ticks("", {true}), 0u);
}

// CPU time of this process while its threads have nothing to do, after work for all of them: median.
double idle_milliseconds() {
  const auto cpu_time = [] {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
  };
  std::vector<double> times;
  while (times.size() < 15) {
    std::atomic<int> reached{0};
    const double before = cpu_time();
#pragma omp parallel
    ++reached;
    ::usleep(30'000);
    times.push_back(cpu_time() - before);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Simulates steps that take `all(time)` seconds with all threads and `one(time)` with one, for `seconds`; returns what
// they took altogether, relative to the faster of the two at each step.
double relative_to_the_best(StepThreads& threads, int count, double seconds, const std::function<double(double)>& all,
                            const std::function<double(double)>& one) {
  double time = 0, best = 0;
  while (time < seconds) {
    const double step = threads.one_thread() ? one(time) : all(time);
    best += step * std::min(all(time), one(time)) / step;
    time += step;
    threads.took(step, count);
  }
  return time / best;
}

TEST(StepThreads, KeepToTheFasterChoice) {
  const auto constant = [](double seconds) { return [seconds](double) { return seconds; }; };
  StepThreads busy;  // as measured for the smallest model on busy cores
  EXPECT_LT(relative_to_the_best(busy, 2, 10, constant(1.1e-3), constant(0.32e-3)), 1.05);
  EXPECT_TRUE(busy.one_thread());
  StepThreads idle;
  EXPECT_LT(relative_to_the_best(idle, 2, 10, constant(0.2e-3), constant(0.32e-3)), 1.02);
  StepThreads equal;
  EXPECT_LT(relative_to_the_best(equal, 2, 10, constant(1e-3), constant(0.98e-3)), 1.03);
  EXPECT_FALSE(equal.one_thread()) << "a difference of 2 % is noise";
  StepThreads many;
  EXPECT_LT(relative_to_the_best(many, 64, 10, constant(0.5e-3), constant(30e-3)), 1.1);
  StepThreads collapsed;  // all threads are a hundred times slower, and still tried now and then
  EXPECT_LT(relative_to_the_best(collapsed, 2, 20, constant(30e-3), constant(0.3e-3)), 1.1);
}

TEST(StepThreads, FollowTheLoad) {
  const auto noise = [](double time) { return 1 + 0.2 * std::sin(1e4 * time); };
  const auto crowded = [](double time) { return std::fmod(time, 20) > 10; };
  StepThreads threads;
  EXPECT_LT(relative_to_the_best(
                threads, 2, 200, [&](double time) { return noise(time) * (crowded(time) ? 1.2e-3 : 0.2e-3); },
                [&](double time) { return noise(time) * (crowded(time) ? 0.4e-3 : 0.32e-3); }),
            1.2);
}

TEST(StepThreads, AStepThatWouldTakeLongWithOneThreadIsNotTried) {
  StepThreads threads;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_FALSE(threads.one_thread());
    threads.took(0.01, 64);
  }
}

TEST(StepThreads, RunSetsTheTeamAndSetsItBack) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(3);
  StepThreads threads;
  std::set<int> seen;
  for (int i = 0; i < 200; ++i) {
    threads.run([&] {
      seen.insert(omp_get_max_threads());
      std::this_thread::sleep_for(std::chrono::milliseconds(omp_get_max_threads() == 1 ? 1 : 5));
    });
    ASSERT_EQ(omp_get_max_threads(), 3);
  }
  EXPECT_EQ(seen, (std::set<int>{1, 3}));
  EXPECT_TRUE(threads.one_thread()) << "five times faster";
  EXPECT_THROW(threads.run([] { fail(Exit::internal, "a step that fails"); }), Error);
  EXPECT_EQ(omp_get_max_threads(), 3);
  omp_set_num_threads(before);
}

TEST(Threads, ShortWaitsSendIdleThreadsToSleep) {
  if (omp_get_max_threads() == 1 || std::getenv("OMP_WAIT_POLICY") != nullptr ||
      std::getenv("GOMP_SPINCOUNT") != nullptr) {
    GTEST_SKIP() << "OpenMP has one thread, or the environment says how it waits";
  }
  const double spinning = idle_milliseconds();
  double sleeping = 0;
  {
    const ShortWaits waits;
    sleeping = idle_milliseconds();
  }
  EXPECT_LT(sleeping, 0.3);
  EXPECT_GT(spinning, 2 * sleeping) << "libgomp spins by itself";
  EXPECT_GT(idle_milliseconds(), 2 * sleeping) << "and does so again afterwards";
}

// What others can cause without end is a line in ten seconds, and one at the end for the rest.
TEST(Log, ARepeatedErrorIsCounted) {
  testing::internal::CaptureStderr();
  {
    RepeatedError errors;
    const auto start = RepeatedError::Clock::now();
    const auto after = [&](double seconds) { return start + std::chrono::milliseconds(std::llround(seconds * 1000)); };
    errors.log("one", after(0));
    for (int i = 1; i <= 999; ++i) errors.log("two", after(0.01 * i));
    errors.log("three", after(10));
    errors.log("four", after(19.9));
    errors.log("five", after(20));
    errors.log("six", after(30));
    errors.log("seven", after(31));
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "error: one\n"
            "error: three (and 999 more since the last such line)\n"
            "error: five (and 1 more since the last such line)\n"
            "error: six\n"
            "error: seven (1 since the last such line)\n");
}

TEST(Log, ALineFitsTheTerminal) {
  EXPECT_EQ(fit_columns("12345", 5), "12345");
  EXPECT_EQ(fit_columns("123456", 5), "12...");
  EXPECT_EQ(fit_columns("\xc3\xa4\xc3\xb6\xc3\xbc\xc3\x9f", 4), "\xc3\xa4\xc3\xb6\xc3\xbc\xc3\x9f");
  EXPECT_EQ(fit_columns("\xc3\xa4\xc3\xb6\xc3\xbc\xc3\x9f!", 4), "\xc3\xa4...") << "no character is cut";
  EXPECT_EQ(fit_columns("\xe6\xbc\xa2\xe5\xad\x97\xe6\xbc\xa2", 5), "\xe6\xbc\xa2...") << "two columns each";
  EXPECT_EQ(fit_columns("\xff\xff\xff\xff", 3), "...");
  EXPECT_EQ(fit_columns("12345", 2), "..");
}

TEST(MappedFile, AcceptsOnlyRegularFiles) {
  const TemporaryDirectory directory;
  expect_contains(error_of(Exit::bad_file, [&] { MappedFile(directory.file("absent")); }), "cannot open");
  expect_contains(error_of(Exit::bad_file, [&] { MappedFile(directory.file(".")); }), "this is a directory");
  ASSERT_EQ(::mkfifo(directory.file("fifo").c_str(), 0600), 0);
  expect_contains(error_of(Exit::bad_file, [&] { MappedFile(directory.file("fifo")); }), "not a regular file");
  write_bytes(directory.file("empty"), "");
  EXPECT_EQ(MappedFile(directory.file("empty")).size(), 0u);
}

TEST(MappedFile, KnowsThatTheFileWasReplaced) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("x with space");
  write_bytes(path, "content");
  MappedFile first(path);
  const MappedFile file = std::move(first);
  EXPECT_EQ(file.text(), "content");
  EXPECT_TRUE(file.unchanged());
  write_file_atomically(path, "content");
  EXPECT_FALSE(file.unchanged());
  EXPECT_EQ(file.text(), "content");  // the mapping still shows the old file
  const MappedFile second(path);
  for (const int seconds : {-1, 1}) {  // written over in place, at another time: the same inode and size
    std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(seconds));
    EXPECT_EQ(second.unchanged(), seconds == 1) << seconds;
  }
  std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(1));
  EXPECT_FALSE(second.unchanged());
  std::filesystem::remove(path);
  EXPECT_FALSE(file.unchanged());
}

// All members go along; what the other one had goes with it.
TEST(MappedFile, AMoveTakesAllOfAFile) {
  const TemporaryDirectory directory;
  const std::string one = directory.file("one"), another = directory.file("another");
  write_bytes(one, "content");
  write_bytes(another, "other content");
  std::optional<MappedFile> from(one), over(another);
  MappedFile file = std::move(*from);
  from.reset();
  EXPECT_EQ(file.path(), one);
  EXPECT_EQ(file.text(), "content");
  EXPECT_TRUE(file.unchanged());
  void* const before = const_cast<std::byte*>(file.data());
  file = std::move(*over);
  over.reset();
  unsigned char present = 0;
  EXPECT_EQ(::mincore(before, 1, &present), -1) << "what it had before is still mapped";
  EXPECT_EQ(file.path(), another);
  EXPECT_EQ(file.text(), "other content");
  EXPECT_TRUE(file.unchanged());
  write_file_atomically(one, "content");
  EXPECT_TRUE(file.unchanged());
  write_file_atomically(another, "other content");
  EXPECT_FALSE(file.unchanged());
}

TEST(Files, WhatMeansThatNothingMoreFits) {
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) EXPECT_TRUE(is_full(error));
  for (const int error : {0, EIO, EACCES}) EXPECT_FALSE(is_full(error));
}

// A pipe that is full stands for a file whose write a signal interrupts.
TEST(Files, ASignalDoesNotKeepALineFromBeingAppended) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const std::string page(4096, 'x');
  while (::write(ends[1], page.data(), page.size()) > 0) continue;
  ASSERT_EQ(::fcntl(ends[1], F_SETFL, 0), 0);  // from here on a write waits
  struct sigaction quiet {
  }, before{};
  quiet.sa_handler = [](int) {};  // without SA_RESTART
  ASSERT_EQ(::sigaction(SIGUSR2, &quiet, &before), 0);
  std::atomic<bool> done{false};
  int error = -1;
  std::thread writer([&] {
    error = append_line(ends[1], "pipe", "line\n");
    done = true;
  });
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!done) ::pthread_kill(writer.native_handle(), SIGUSR2);
  }
  EXPECT_FALSE(done);
  std::string text(1 << 20, ' ');
  std::size_t size = 0;
  const auto read_more = [&] {
    const ssize_t got = ::read(ends[0], text.data() + size, text.size() - size);
    size += got > 0 ? static_cast<std::size_t>(got) : 0;
    return got > 0;
  };
  while (!done) read_more();
  writer.join();
  while (read_more()) continue;
  EXPECT_EQ(error, 0);
  text.resize(size);
  EXPECT_TRUE(text.ends_with("xline\n"));
  ::sigaction(SIGUSR2, &before, nullptr);
  ::close(ends[0]);
  ::close(ends[1]);
}

// Where a part of a line fits the file ends as it did before, in one that was just opened, too.
TEST(Files, ALineThatDoesNotFitLeavesTheFileAsItWas) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("log"), line = "the second line\n";
  std::string expected = "the first line\n";
  write_bytes(path, expected);
  testing::internal::CaptureStderr();
  for (const bool opened_now : {true, false}) {
    const int fd = ::open(path.c_str(), O_RDWR | O_APPEND | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    if (!opened_now) {
      EXPECT_EQ(append_line(fd, path, line), 0);
      expected += line;
    }
    for (const std::size_t room : {line.size() - 1, std::size_t{1}, std::size_t{0}}) {
      const int error = with_file_limit(expected.size() + room, [&] { return append_line(fd, path, line); });
      EXPECT_EQ(error, room > 0 ? ENOSPC : EFBIG);
      EXPECT_EQ(read_bytes(path), expected) << "with room for " << room;
    }
    EXPECT_EQ(with_file_limit(expected.size() + line.size(), [&] { return append_line(fd, path, line); }), 0);
    expected += line;
    EXPECT_EQ(read_bytes(path), expected);
    ::close(fd);
  }
  const int reading = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(append_line(reading, path, line), EBADF);
  ::close(reading);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// A pipe takes a part of a long line and does not give it back.
TEST(Files, HalfALineThatStaysIsSaid) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  testing::internal::CaptureStderr();
  EXPECT_EQ(append_line(ends[1], "a\tpipe", std::string(1 << 20, 'x')), ENOSPC);
  expect_contains(testing::internal::GetCapturedStderr(), "warning: 'a\\x09pipe' ends in half a line\n");
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(Files, TextLimitsGlobsAndParents) {
  const TemporaryDirectory directory;
  write_bytes(directory.file("b_2.bin"), "2");
  write_bytes(directory.file("b_1.bin"), "1");
  std::filesystem::create_directory(directory.file("b_0.bin"));
  EXPECT_EQ(expand_glob(directory.file("b_*.bin")),
            (std::vector<std::string>{directory.file("b_1.bin"), directory.file("b_2.bin")}));
  const std::string message = error_of(Exit::bad_file, [&] { expand_glob(directory.file("c_*")); });
  expect_contains(message, "c_*");
  expect_contains(message, escaped(std::filesystem::current_path().string()));
  expect_contains(error_of(Exit::bad_file, [&] { expand_glob(directory.file("b_0.bin")); }), "it is a directory");
  EXPECT_EQ(read_text_file(directory.file("b_1.bin"), 1), "1");
  EXPECT_NE(error_of(Exit::bad_file, [&] { read_text_file(directory.file("b_1.bin"), 0); }), "");
  EXPECT_EQ(parent_directory("a"), ".");
  EXPECT_EQ(parent_directory("/a"), "/");
  EXPECT_EQ(parent_directory("a/b/c"), "a/b");
}

// ---- memory, text for people ----------------------------------------------------------------------------------------

TEST(Memory, PlansAreAlignedAndArenasZero) {
  MemoryPlan plan("activations");
  EXPECT_EQ(plan.add(1), 0u);
  EXPECT_EQ(plan.add(256), 256u);
  EXPECT_EQ(plan.add(0), 512u);
  EXPECT_EQ(plan.add(3), 512u);
  EXPECT_EQ(plan.bytes(), 515u);
  const HostArena arena(plan);
  EXPECT_EQ(arena.at<char>(514)[0], 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena.at<char>(256)) % kRegionAlignment, 0u);
  EXPECT_NE(error_of(Exit::bad_file, [&] { plan.add(std::numeric_limits<std::uint64_t>::max()); }), "");
}

// Arenas come and go with the models of a process: their address space goes back.
TEST(Memory, AnArenaGivesItsMemoryBack) {
  const auto mapped_bytes = [] {
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  };
  constexpr std::uint64_t kBytes = 256 << 20;  // its pages are never touched
  MemoryPlan plan("state");
  plan.add(kBytes);
  const std::uint64_t before = mapped_bytes();
  for (int i = 0; i < 4; ++i) {
    const HostArena arena(plan);
    EXPECT_GE(mapped_bytes(), before + kBytes);
  }
  EXPECT_LT(mapped_bytes(), before + kBytes);
}

TEST(Memory, AnArenaThatCannotFitIsAResourceError) {
  MemoryPlan plan("optimizer state");
  plan.add(std::uint64_t{1} << 60);
  const std::string message = error_of(Exit::resources, [&] { HostArena arena(plan); });
  expect_contains(message, "optimizer state");
  EXPECT_GT(available_host_memory(), 1u << 20);
}

// What ulimit -v leaves must hold the buffers of the math library, too, one for each thread and one more: without them the
// first GEMM hangs.
TEST(MemoryDeathTest, AnArenaLeavesAddressSpaceForTheMathLibrary) {
  if (test::sanitized()) GTEST_SKIP() << "a sanitizer needs the address space";
  constexpr std::uint64_t kMegabyte = 1 << 20, kBuffer = 128 * kMegabyte;
  const auto try_arena = [&](int threads, std::uint64_t megabytes) {
    omp_set_num_threads(threads);
    const std::uint64_t buffers = static_cast<std::uint64_t>(threads + 1) * kBuffer;
    test::limit_address_space(buffers + 64 * kMegabyte);
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    const std::uint64_t free = free_host_memory();
    if (available_host_memory() > limit.rlim_cur || free > buffers + 64 * kMegabyte) std::_Exit(2);
    MemoryPlan plan("state");
    plan.add(megabytes * kMegabyte);
    try {
      const HostArena arena(plan);
      std::fputs("fits", stderr);
    } catch (const Error& error) {
      if (error.code() != Exit::resources) std::_Exit(3);
      std::fputs(error.what(), stderr);
    }
    std::_Exit(0);
  };
  for (const auto& [threads, needs] : {std::pair{1, "268 MB"}, {3, "537 MB"}}) {
    EXPECT_EXIT(try_arena(threads, 48), testing::ExitedWithCode(0), "^fits$") << threads;
    for (const std::uint64_t megabytes : {72u, 128u * static_cast<unsigned>(threads + 1) + 16u}) {
      EXPECT_EXIT(
          try_arena(threads, megabytes), testing::ExitedWithCode(0),
          std::string("^state: cannot allocate .* of host memory: ulimit -v leaves .*, and the math library needs ") +
              needs + "$")
          << threads << ", " << megabytes;
    }
  }
}

TEST(Human, BytesAndSeconds) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1000), "1.00 KB");
  EXPECT_EQ(human_bytes(1500), "1.50 KB");
  EXPECT_EQ(human_bytes(10'000), "10.0 KB");
  EXPECT_EQ(human_bytes(100'000), "100 KB");
  EXPECT_EQ(human_bytes(1e6), "1.00 MB");
  EXPECT_EQ(human_bytes(17'400), "17.4 KB");
  EXPECT_EQ(human_bytes(312e6), "312 MB");
  EXPECT_EQ(human_bytes(5e15), "5000 TB");
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999'999), "999999");
  EXPECT_EQ(human_count(1e6), "1.00 M");
  EXPECT_EQ(human_count(8'030'261'248), "8030.26 M");
  EXPECT_EQ(counted(0, "row") + ", " + counted(1, "row") + ", " + counted(2, "row"), "0 rows, 1 row, 2 rows");
  EXPECT_EQ(human_seconds(5), "0:05");
  EXPECT_EQ(human_seconds(185), "3:05");
  EXPECT_EQ(human_seconds(7385), "2:03:05");
  EXPECT_EQ(human_seconds(3599.6), "1:00:00");
  EXPECT_EQ(human_seconds(1e9), "277777:46:40");
  EXPECT_EQ(human_seconds(1.01e9), "?");
  EXPECT_EQ(human_seconds(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(human_seconds(std::nan("")), "?");
  EXPECT_EQ(human_seconds(-1), "?");
}

}  // namespace
}  // namespace weft
