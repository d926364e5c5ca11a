// The numbers of the tests: in any element type, by definition and apart from csrc's own
// conversions, and drawn.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/views.h"

using tnt::Element;
using Values = std::vector<double>;  // of a tensor or matrix, row-major

constexpr Element kElements[] = {Element::kFloat, Element::kDouble, Element::kBFloat16,
                                 Element::kHalf};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A floating-point type of 16 bits, as IEEE 754 defines it.
struct Format {
  int exponent_bits, fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int all_ones() const { return (1 << exponent_bits) - 1; }
  int lowest_exponent() const { return 1 - bias(); }
};
constexpr Format kHalfFormat{5, 10}, kBFloat16Format{8, 7};

inline double decode(uint16_t bits, Format format) {
  const int exponent = bits >> format.fraction_bits & format.all_ones();
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == format.all_ones()) return fraction ? kNaN : sign * kInfinity;
  const int hidden = exponent == 0 ? 0 : 1 << format.fraction_bits;
  const int power = exponent == 0 ? format.lowest_exponent() : exponent - format.bias();
  return sign * std::ldexp(hidden + fraction, power - format.fraction_bits);
}

// The nearest number of the format, ties to even.
inline double nearest(double value, Format format) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int power = std::max(std::ilogb(value), format.lowest_exponent()) - format.fraction_bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -power)), power);
  const double largest = std::ldexp(2 - std::ldexp(1.0, -format.fraction_bits), format.bias());
  return std::abs(rounded) > largest ? std::copysign(kInfinity, value) : rounded;
}

inline uint16_t encode(double value, Format format) {
  value = nearest(value, format);
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = format.all_ones() << format.fraction_bits;
  if (value != value) return static_cast<uint16_t>(sign | infinity | 1);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  // The patterns count the numbers upwards, from 0.
  const int lowest = format.lowest_exponent();
  const int power = value == 0 ? lowest : std::max(std::ilogb(value), lowest);
  const auto units = static_cast<int>(std::ldexp(std::abs(value), format.fraction_bits - power));
  return static_cast<uint16_t>(sign | (((power - lowest) << format.fraction_bits) + units));
}

inline std::string name_of(Element element) {
  switch (element) {
    case Element::kFloat:
      return "float";
    case Element::kDouble:
      return "double";
    case Element::kBFloat16:
      return "bfloat16";
    case Element::kHalf:
      return "half";
  }
  return "";
}

inline size_t width_of(Element element) {
  return element == Element::kDouble ? 8 : element == Element::kFloat ? 4 : 2;
}

// What statistics, factors and momenta of a tensor of this type are made of.
inline Element state_of(Element element) {
  return element == Element::kDouble ? Element::kDouble : Element::kFloat;
}

inline double epsilon_of(Element element) {
  return element == Element::kDouble ? std::numeric_limits<double>::epsilon()
                                     : std::numeric_limits<float>::epsilon();
}

template <typename T>
T read_as(const unsigned char* memory) {
  T value;
  std::memcpy(&value, memory, sizeof(T));
  return value;
}

inline double load(Element element, const unsigned char* from) {
  switch (element) {
    case Element::kFloat:
      return read_as<float>(from);
    case Element::kDouble:
      return read_as<double>(from);
    case Element::kBFloat16:
      return decode(read_as<uint16_t>(from), kBFloat16Format);
    case Element::kHalf:
      return decode(read_as<uint16_t>(from), kHalfFormat);
  }
  return kNaN;
}

// Rounds once, to the nearest.
inline void store(Element element, double value, unsigned char* to) {
  const auto single = static_cast<float>(value);
  const uint16_t bits = encode(value, element == Element::kHalf ? kHalfFormat : kBFloat16Format);
  const void* from = element == Element::kDouble  ? static_cast<const void*>(&value)
                     : element == Element::kFloat ? static_cast<const void*>(&single)
                                                  : &bits;
  std::memcpy(to, from, width_of(element));
}

inline Values integers(int64_t count, int most, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_int_distribution<int> between(-most, most);
  Values values(static_cast<size_t>(count));
  for (double& value : values) value = between(engine);
  return values;
}

inline Values reals(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> between(-1, 1);
  Values values(static_cast<size_t>(count));
  for (double& value : values) value = between(engine);
  return values;
}

// Sums for the definitions, without sanitizers: they would make the sums many times slower, and
// the definitions are not what they are to check.
#define UNWATCHED __attribute__((no_sanitize("address", "thread", "undefined")))

UNWATCHED inline double dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// to <- to + weight from
UNWATCHED inline void add_multiple(double weight, const double* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += weight * from[i];
}

inline double largest_of(const Values& values) {
  double most = 0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

// The largest difference between two entries; NaN where either has one.
inline double distance(const Values& a, const Values& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double apart = std::abs(a[i] - b[i]);
    if (!(apart <= most)) most = apart;
    if (most != most) break;
  }
  return most;
}
