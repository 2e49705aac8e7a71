// bf16 and f16 as bits: exact widening, narrowing to nearest even. Every NaN that is written, in any type, has the one
// canonical pattern of that type, so that a NaN computed on different hardware never makes different bytes.
#pragma once

#include "portable.h"

namespace fl {

constexpr uint16_t kBf16Nan = 0x7fc0;
constexpr uint16_t kF16Nan = 0x7e00;
constexpr uint32_t kF32Inf = 0x7f800000u;
constexpr uint32_t kF32Nan = 0x7fc00000u;

FL_HD bool is_finite(float f) { return (float_bits(f) & 0x7fffffffu) < kF32Inf; }

// What an f32 result is written as.
FL_HD float canonical(float f) { return (float_bits(f) & 0x7fffffffu) > kF32Inf ? bits_float(kF32Nan) : f; }

// Scales are short: so many low bits of their mantissa are clear that their product with any code is exact in f32. What an
// exact product is added to is rounded once, whether a fused multiply-add does it or a multiply and an add.
constexpr int kShort = 8;  // bits that are clear, unless a codec says otherwise

FL_HD float shortened(float f, int clear = kShort) { return bits_float(float_bits(f) & ~((uint32_t(1) << clear) - 1)); }

// The least short scale of which `units` are not below amax. Nearer ones may lie below: then the largest magnitude would be
// above the outermost code, which is to be avoided where rounding is to have no bias. The products with `units` are exact.
FL_HD float short_scale(float amax, float units, int clear = kShort) {
  const uint32_t step = uint32_t(1) << clear;
  const uint32_t up = (float_bits(amax / units) + (step - 1)) & ~(step - 1);
  return bits_float(bits_float(up) * units < amax ? up + step : up);
}

FL_HD float bf16_to_f32(uint16_t h) { return bits_float(uint32_t(h) << 16); }

FL_HD uint16_t f32_to_bf16(float f) {
  const uint32_t u = float_bits(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > kF32Inf ? kBf16Nan : uint16_t(rounded);
}

FL_HD float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(h & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return bits_float(sign | magnitude | 0x70000000u);  // Inf and NaN
  // A multiply by 2^112 moves the exponent, normal and subnormal alike, and is exact.
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));
}

FL_HD uint16_t f32_to_f16(float f) {
  const uint32_t u = float_bits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > kF32Inf) return kF16Nan;
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above round to Inf
  if (a < 0x38800000u) {                                  // below 2^-14: let the adder round at 2^-24
    const uint32_t r = float_bits(bits_float(a) + 0.5f) - 0x3f000000u;
    return uint16_t(sign | r);
  }
  const uint32_t rounded = a - 0x38000000u + 0xfffu + ((a >> 13) & 1u);
  return uint16_t(sign | (rounded >> 13));
}

}  // namespace fl
