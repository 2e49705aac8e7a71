// Scalar specification of the `int` codec: symmetric integers of 2, 3, 4 or 8 bits with one f32 scale per group, optionally
// in the domain of a 32-point Hadamard transform (SDP4Bit, sections 3.2 and 3.3). The drivers in cpu/ and cuda/ compute the
// same numbers with vectors and shuffles; what they may not change is written here.
//
//   1. v = x, zero-padded to whole groups; with Hadamard every 32 consecutive values become H32 v (hadamard32).
//   2. amax = max |v| over the group, taken on the bits.
//   3. amax not finite: scale = NaN, codes 0. amax < 2^-100: scale = 0, codes 0.
//      Else scale = short_scale(amax, units) and code = round(v * (steps / scale) - below), limited to least .. most
//      (int_levels). Where the scale times the outermost level is not finite, scale = NaN, codes 0. A value of a group
//      whose codes are 0 is not looked at: it may be Inf or NaN.
//   4. decode: level(code) * decode_scale; with Hadamard H32(levels), exact in f32, times decode_scale: H32 H32 = 32 I.
//   5. a sum: level(code) * decode_scale of all messages, added in their order to what they are added to. With Hadamard they
//      are added to 0, and what they are added to is then added to H32(sum). Of one message that is what decode makes, since
//      H32 of its products is exact, too.
//
// All these products are exact, so sums add them by fused multiply-add where there is one.
//
// 4 and 8 bits: a code is its level, in steps, and units = most: the largest magnitude has the outermost level. With the
// full range units = most + 1: steps are shorter, and a largest magnitude that is positive saturates. 2 and 3
// bits cannot spare a code: levels lie half a step beside the integers, none is 0, and a code c has the level 2 c + 1, in half
// steps, of which a scale is one. Their step is the one that loses least of values that are normal, as rotated ones nearly are; it is
// shorter than the largest magnitude asks for, which saturates. Stochastic rounding saturates nothing, since it would not be unbiased.
//
// Stochastic rounding takes v * (steps / scale) in units of 2^-16, rounded to a whole number of them, adds the 16 random bits
// of the element (core/rng.h), subtracts `below` in these units, and drops the fraction: whole numbers plus whole numbers, so that rounding has
// no bias at all beyond that of the units.
//
// Element i of group g of message m has the number offset + (m * groups + g) * group + i in the seed's sequence, `groups`
// being those of one message, the padded last one included.
#pragma once

#include "floats.h"
#include "rng.h"

namespace fl {

constexpr int kHadamard = 32;
constexpr uint32_t kTinyBits = 0x0d800000u;  // 2^-100: below it a group is zero, so no scale or inverse is subnormal

FL_HD constexpr bool between_integers(int bits) { return bits < 4; }

struct IntLevels {
  int32_t least, most;  // codes
  float below;          // a code lies so far below its level, in steps
  float units;          // scales in the largest magnitude
  float steps;          // in a scale

  constexpr float top() const { return float(most) + below; }  // the outermost level, in steps
};

constexpr IntLevels int_levels(int bits, int group, bool stochastic, bool full) {
  const int most = (1 << (bits - 1)) - 1;
  if (full) return {-most - 1, most, 0.0f, float(most + 1), 1.0f};
  if (!between_integers(bits)) return {-most, most, 0.0f, float(most), 1.0f};
  float span = float(most) + 0.5f;
  if (!stochastic) {
    span = 2.375f;  // of 32 elements; more of them have a larger magnitude among them, for the same step
    for (int n = 32; n < group; n *= 2) span += 0.21875f;
    span *= bits == 3 ? 1.75f : 1.0f;
  }
  return {-most - 1, most, 0.5f, 2.0f * span, 0.5f};
}

// The largest magnitude of a level that any bytes have, in scales, and the bits that are clear in a scale.
FL_HD constexpr int outermost_level(int bits) { return between_integers(bits) ? (1 << bits) - 1 : 1 << (bits - 1); }
FL_HD constexpr int clear_bits(int bits) { return bits == 8 ? 12 : kShort; }

// H32 of levels times a scale of 24 - clear_bits significant bits has 24 of them at most: the product is exact.
constexpr bool products_are_exact(int bits) { return kHadamard * outermost_level(bits) <= 1 << clear_bits(bits); }
static_assert(products_are_exact(2) && products_are_exact(3) && products_are_exact(4) && products_are_exact(8));

struct GroupScale {
  float scale;    // goes on the wire
  float inverse;  // what values are multiplied by; 0 makes every code 0
};

FL_HD GroupScale make_scale(uint32_t amax_bits, int bits, const IntLevels &levels) {
  if (amax_bits < kTinyBits) return {0.0f, 0.0f};
  const float scale = short_scale(bits_float(amax_bits), levels.units, clear_bits(bits));
  if (amax_bits >= kF32Inf || !is_finite(scale * float(outermost_level(bits)))) return {bits_float(kF32Nan), 0.0f};
  return {scale, levels.steps / scale};
}

// Round to nearest even for |v| < 2^22: the sum has no bits below 1, and its low bits are the integer.
FL_HD int32_t round_even(float v) { return int32_t(float_bits(v + 12582912.0f)) - 0x4b400000; }

// The same for all that an integer can hold.
FL_HD int32_t nearest_int(float v) {
#if defined(__CUDA_ARCH__)
  return __float2int_rn(v);
#else
  return int32_t(__builtin_rintf(v));
#endif
}

constexpr int kNoiseBits = 16;
constexpr float kNoiseUnits = float(1 << kNoiseBits);  // in a step

// What decoding multiplies by, whatever bits have arrived: those that a scale has clear are not looked at. Where a level could
// become infinite, or the scale is no number, the whole group is the canonical NaN.
FL_HD float decode_scale(float scale, int bits, bool hadamard) {
  const float s = shortened(scale, clear_bits(bits));
  if (!is_finite(s * float(outermost_level(bits)))) return bits_float(kF32Nan);
  return hadamard ? s * 0x1p-5f : s;
}

// Butterflies with strides 1, 2, 4, 8, 16, natural (Sylvester) order, not normalised. The order of the stages is part of
// the specification: it fixes the rounding.
FL_HD void hadamard32(float *v) {
  for (int h = 1; h < kHadamard; h *= 2)
    for (int i = 0; i < kHadamard; ++i)
      if (!(i & h)) {
        const float a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
}

// 8-bit codes are one byte each, in order. 4-bit codes are planar inside the group: byte i holds element i in its low nibble
// and element i + group / 2 in its high one. 2- and 3-bit codes lie in runs of 32 elements, as core/code_words.h packs them.
// All are in two's complement.

}  // namespace fl
