// The small number formats of the `block` codec: floats of 8, 6 and 4 bits as OCP MX v1.0 has them, and 8-bit integers.
// A code is a sign bit above the bits of a magnitude; E4M3 has NaN but no infinity, the 6- and 4-bit formats have neither.
#pragma once

#include "floats.h"
#include "fusionlayer_codec.h"

namespace fl {

struct FloatFormat {
  int bits;       // of a code
  int mantissa;   // bits of it
  int bias;       // of the exponent
  uint32_t top;   // the largest finite magnitude's code
  float largest;  // its value
};

FL_HD constexpr FloatFormat float_format(uint32_t format) {
  switch (format) {
    case FL_E4M3:
      return {8, 3, 7, 0x7e, 448.0f};
    case FL_E5M2:
      return {8, 2, 15, 0x7b, 57344.0f};
    case FL_E2M3:
      return {6, 3, 1, 0x1f, 7.5f};
    case FL_E3M2:
      return {6, 2, 3, 0x1f, 28.0f};
    default:
      return {4, 1, 1, 0x7, 6.0f};  // E2M1
  }
}

FL_HD constexpr int format_bits(uint32_t format) { return format == FL_INT8 ? 8 : float_format(format).bits; }

// The largest magnitude of a format: what a block's own largest becomes.
FL_HD float format_largest(uint32_t format) { return format == FL_INT8 ? 127.0f : float_format(format).largest; }

// Exponent of the largest power of two of a float format.
FL_HD int format_emax(uint32_t format) { return int(float_bits(float_format(format).largest) >> 23) - 127; }

// Rounding to nearest even by the adder. E is the exponent of `a`; for subnormals it is the smallest exponent. Adding
// 2^(E + 23 - mantissa) makes the low bits of the sum count steps of 2^(E - mantissa). The code follows from these bits,
// the carry into the next exponent included.
struct FloatRounding {
  int shift;      // bits of an f32's mantissa that a code lacks
  int32_t least;  // f32 bits of the smallest normal value
  int32_t step;   // added to the bits of 2^E
};

FL_HD constexpr FloatRounding float_rounding(const FloatFormat &f) {
  return {23 - f.mantissa, (128 - f.bias) << 23, (23 - f.mantissa) << 23};
}

// The code nearest to |v| < 2^100, ties to even; what lies beyond the largest value becomes that (saturation).
FL_HD uint32_t float_code(const FloatFormat &f, float v) {
  const FloatRounding r = float_rounding(f);
  const uint32_t u = float_bits(v), a = u & 0x7fffffffu;
  int32_t exponent = int32_t(a & 0x7f800000u);
  exponent = exponent > r.least ? exponent : r.least;
  const int32_t base = exponent + r.step;
  const int32_t steps = int32_t(float_bits(bits_float(a) + bits_float(uint32_t(base)))) - base;
  const uint32_t magnitude = uint32_t(((exponent - r.least) >> r.shift) + steps);
  return (magnitude < f.top ? magnitude : f.top) | u >> 31 << (f.bits - 1);
}

// What a code stands for. A multiply by a power of two moves the exponent, normal and subnormal alike, and is exact.
FL_HD float code_value(const FloatFormat &f, uint32_t code) {
  const uint32_t sign = code >> (f.bits - 1) << 31, magnitude = code & ((1u << (f.bits - 1)) - 1);
  if (magnitude > f.top) return bits_float(f.bias == 15 && magnitude == f.top + 1 ? sign | kF32Inf : kF32Nan);
  const float moved = bits_float(magnitude << (23 - f.mantissa)) * bits_float(uint32_t(254 - f.bias) << 23);
  return bits_float(sign | float_bits(moved));
}

}  // namespace fl
