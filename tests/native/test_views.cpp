// The 16-bit types, against IEEE 754's definition of them in double: every pattern, and roundings
// on a grid around every number of the type.

#include <cmath>
#include <limits>

#include "cpu/tasks.h"
#include "cpu/views.h"
#include "expect.h"
#include "numbers.h"

namespace {

constexpr float kSmallest = std::numeric_limits<float>::denorm_min();
constexpr float kLargest = std::numeric_limits<float>::max();

template <typename T>
concept HasElement = requires { tnt::kElement<T>; };

static_assert(tnt::kElement<float> == tnt::Element::kFloat);
static_assert(tnt::kElement<double> == tnt::Element::kDouble);
static_assert(tnt::kElement<tnt::BFloat16> == tnt::Element::kBFloat16);
static_assert(tnt::kElement<tnt::Half> == tnt::Element::kHalf);
static_assert(!HasElement<uint16_t> && !HasElement<long double> && !HasElement<const float>);

// To the bit, but all NaN are one.
bool same(double a, double b) {
  if (a != a || b != b) return a != a && b != b;
  return a == b && std::signbit(a) == std::signbit(b);
}

template <typename To>
bool converts(uint16_t bits, Format format) {
  return same(tnt::convert<double>(To{bits}), decode(bits, format)) &&
         same(tnt::convert<float>(To{bits}), decode(bits, format));
}

template <typename To>
bool rounds(float value, Format format) {
  const uint16_t bits = tnt::round_to<To>(value).bits;
  return same(decode(bits, format), nearest(value, format)) &&
         (value != value || bits == encode(value, format));
}

// A number, halfway to each of its neighbours, and a float's last place to every side of these.
template <typename To>
bool rounds_around(uint16_t bits, Format format) {
  const auto here = static_cast<float>(decode(bits, format));
  bool good = rounds<To>(here, format);
  for (const int neighbour : {-1, 1}) {
    const auto there = decode(static_cast<uint16_t>(bits + neighbour), format);
    if (!std::isfinite(here) || !std::isfinite(there)) continue;
    for (const double share : {0.0, 0.25, 0.5, 0.75}) {
      const auto between = static_cast<float>(here + share * (there - here));
      good = good && rounds<To>(between, format) &&
             rounds<To>(std::nextafter(between, -kLargest), format) &&
             rounds<To>(std::nextafter(between, kLargest), format);
    }
  }
  return good;
}

template <typename To>
void check_type(const char* name, Format format) {
  const expect::Case type(name);
  int wrong_conversions = 0, wrong_round_trips = 0, wrong_roundings = 0;
  for (uint32_t pattern = 0; pattern <= 0xffff; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const double value = decode(bits, format);
    const uint16_t back = tnt::round_to<To>(tnt::convert<float>(To{bits})).bits;
    wrong_conversions += !converts<To>(bits, format);
    wrong_round_trips += value != value ? !std::isnan(decode(back, format)) : back != bits;
    wrong_roundings += !rounds_around<To>(bits, format);
  }
  EXPECT(wrong_conversions == 0);
  EXPECT(wrong_round_trips == 0);
  EXPECT(wrong_roundings == 0);

  // What lies beyond the type's numbers.
  const double largest = std::ldexp(2 - std::ldexp(1.0, -format.fraction_bits), format.bias());
  const double spacing = std::ldexp(1.0, format.bias() - format.fraction_bits);
  const auto tie = static_cast<float>(largest + spacing / 2);  // rounds to infinity
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT(rounds<To>(sign * tie, format));
    EXPECT(rounds<To>(sign * std::nextafter(tie, 0.0f), format));
    EXPECT(rounds<To>(sign * kLargest, format));
    EXPECT(rounds<To>(sign * kSmallest, format));
    EXPECT(rounds<To>(sign * std::numeric_limits<float>::infinity(), format));
    EXPECT(rounds<To>(std::copysign(std::numeric_limits<float>::quiet_NaN(), sign), format));
    EXPECT(rounds<To>(std::copysign(std::numeric_limits<float>::signaling_NaN(), sign), format));
  }
}

// Half's subnormal numbers are ordinary floats: kernels that flush a float's must not lose them.
void check_flushing() {
  const tnt::FlushSubnormals flush;
  int wrong = 0;
  for (uint32_t pattern = 0; pattern <= 0xffff; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const double value = decode(bits, kHalfFormat);
    const float converted = tnt::convert<float>(tnt::Half{bits});
    wrong += !same(converted, value) ||
             (value == value && tnt::round_to<tnt::Half>(converted).bits != bits);
  }
  EXPECT(wrong == 0);
}

void check_contiguous() {
  const int64_t sizes[] = {2, 1, 3};
  const auto contiguous = [&](int64_t a, int64_t b, int64_t c) {
    const int64_t strides[] = {a, b, c};
    return tnt::TensorView{nullptr, Element::kFloat, 3, sizes, strides}.contiguous();
  };
  EXPECT(contiguous(3, 3, 1));
  EXPECT(contiguous(3, 99, 1));  // the stride of a mode of size 1 says nothing
  EXPECT(!contiguous(1, 2, 2));
  EXPECT(!contiguous(4, 4, 1));
  EXPECT(!contiguous(0, 3, 1));
  EXPECT(!contiguous(6, 6, 2));
}

}  // namespace

int main() {
  check_type<tnt::Half>("half", kHalfFormat);
  check_type<tnt::BFloat16>("bfloat16", kBFloat16Format);
  check_flushing();
  check_contiguous();
  return expect::finish();
}
