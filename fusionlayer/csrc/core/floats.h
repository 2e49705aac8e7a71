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
