// Scalar specification of the `int` codec: symmetric integers of 4 or 8 bits with one f32 scale per group, optionally in
// the domain of a 32-point Hadamard transform (SDP4Bit, sections 3.2 and 3.3). The drivers in cpu/ and cuda/ compute the
// same numbers with vectors and shuffles; what they may not change is written here.
//
//   1. v = x, zero-padded to whole groups; with Hadamard every 32 consecutive values become H32 v (hadamard32).
//   2. amax = max |v| over the group, taken on the bits.
//   3. amax not finite: scale = NaN, codes 0. amax < 2^-100: scale = 0, codes 0.
//      Else scale = amax / qmax, code = round(v * (qmax / amax)), qmax = 127 or 7.
//   4. decode: code * decode_scale; with Hadamard H32(codes), exact in f32, times decode_scale: H32 H32 = 32 I.
//
// Element i of group g of message m has the number offset + (m * groups + g) * group + i in the seed's sequence, `groups`
// being those of one message, the padded last one included.
#pragma once

#include "floats.h"
#include "rng.h"

namespace fl {

constexpr int kHadamard = 32;
constexpr uint32_t kTinyBits = 0x0d800000u;  // 2^-100: below it a group is zero, so no scale or inverse is subnormal

constexpr int int_qmax(int bits) { return bits == 8 ? 127 : 7; }

struct GroupScale {
  float scale;    // goes on the wire
  float inverse;  // what values are multiplied by; 0 makes every code 0
};

FL_HD GroupScale make_scale(uint32_t amax_bits, float qmax) {
  if (amax_bits >= kF32Inf) return {bits_float(kF32Nan), 0.0f};
  if (amax_bits < kTinyBits) return {0.0f, 0.0f};
  const float amax = bits_float(amax_bits);
  return {amax / qmax, qmax / amax};
}

// Round to nearest even for |v| < 2^22: the sum has no bits below 1, and its low bits are the integer.
FL_HD int32_t round_even(float v) { return int32_t(float_bits(v + 12582912.0f)) - 0x4b400000; }

// The code of one value; `noise` is 0 (nearest) or rounding_noise (stochastic). Only noise can reach past qmax. With
// inverse 0 the value is not looked at: it may be Inf or NaN.
FL_HD int32_t int_code(float v, float inverse, float noise, int32_t qmax) {
  if (inverse == 0.0f) return 0;
  const int32_t q = round_even(v * inverse + noise);
  return q > qmax ? qmax : (q < -qmax ? -qmax : q);
}

// What decoding multiplies by. A scale that is not finite, whatever its bits, makes the whole group the canonical NaN.
FL_HD float decode_scale(float scale, bool hadamard) {
  if (!is_finite(scale)) return bits_float(kF32Nan);
  return hadamard ? scale * 0x1p-5f : scale;
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

// 4-bit codes are planar inside the group: byte i holds element i in its low nibble and element i + group / 2 in its high
// one, both in two's complement. 8-bit codes are one byte each, in order.
FL_HD uint8_t pack_nibbles(int32_t low, int32_t high) { return uint8_t((low & 15) | (high & 15) << 4); }
FL_HD int32_t low_nibble(uint8_t b) { return int32_t(int8_t(uint8_t(b << 4))) >> 4; }
FL_HD int32_t high_nibble(uint8_t b) { return int32_t(int8_t(b)) >> 4; }

}  // namespace fl
