// crc32c (Castagnoli) as arithmetic of polynomials: what drivers make tables and factors of. Polynomials have their bits
// reversed: the highest bit is that of x^0.
#pragma once

#include "portable.h"

namespace fl {

constexpr uint32_t kCrcPolynomial = 0x82f63b78;
constexpr uint32_t kCrcOne = 1u << 31;
constexpr int64_t kCrcOrder = (int64_t(1) << 31) - 1;  // x to this power is 1

// Times x.
FL_HD constexpr uint32_t crc_shifted(uint32_t crc) { return crc & 1 ? (crc >> 1) ^ kCrcPolynomial : crc >> 1; }

// The product. Where b is a constant, so are its multiples.
FL_HD constexpr uint32_t crc_times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  FL_UNROLL
  for (int bit = 31; bit >= 0; --bit) {
    product ^= (0u - (a >> bit & 1)) & b;
    b = crc_shifted(b);
  }
  return product;
}

// x to a power that is not negative.
FL_HD constexpr uint32_t crc_power(int64_t power) {
  uint32_t result = kCrcOne, square = kCrcOne >> 1;
  for (; power > 0; power >>= 1) {
    if (power & 1) result = crc_times(result, square);
    square = crc_times(square, square);
  }
  return result;
}

static_assert(crc_power(kCrcOrder) == kCrcOne, "exponents count modulo the order");

}  // namespace fl
