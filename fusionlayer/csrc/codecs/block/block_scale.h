// Scalar specification of the `block` codec: numbers of a small format (codecs/block/formats.h) and a scale for each block of 32 to
// 512, optionally in the domain of a Hadamard transform of the whole block (TACO, section 4; OCP MX v1.0). The drivers in
// cpu/ and cuda/ compute the same numbers with vectors and shuffles; what they may not change is written here.
//
//   1. v = x, zero-padded to whole blocks; with Hadamard every block becomes H v: butterflies with strides 1, 2, 4, ..,
//      natural (Sylvester) order, not normalised. The order of the stages fixes the rounding.
//   2. amax = max |v| over the block, taken on the bits; for FL_SCALE_MESSAGE over the message.
//   3. amax not finite: the scale is NaN, codes 0. amax < 2^-100: the scale is 0, codes 0.
//      Else code = nearest(v * inverse), saturating, and 0 where inverse is 0, whatever v is; scale and inverse by make_block_scale, or given_block_scale. For
//      FL_SCALE_DUAL v is multiplied by `before` first. Where the scale times the largest value is not finite, the scale is
//      NaN, codes 0.
//   4. decode: value of the code * the decoded scale; with Hadamard H of these products: H H = block I, which the scale has in
//      it.
//   5. a sum: these products of all messages, added in their order to what they are added to. With Hadamard they are added to
//      0, and what they are added to is then added to H(sum).
//
// All these products are exact, so sums add them by fused multiply-add where there is one.
#pragma once

#include "formats.h"
#include "int_group.h"

namespace fl {

constexpr int kMaxBlock = 512;

// What scales are made of, the same for all blocks of a message.
struct BlockScaling {
  uint32_t kind;       // enum fl_scale
  float largest;       // of the format
  float bound;         // the same of all codes: INT8 has -128, which no encoder writes
  int emax;            // exponent of its largest power of two
  float mean;          // 1 / block
  float unrotated;     // 1 / block with Hadamard, else 1: H v is larger than v by sqrt(block)
  float orthonormal;   // 1 / sqrt(block) with Hadamard, else 1
  float least;         // below it a decoder's scale is 0
  float tau, epsilon;  // of the first scale
  bool limited;        // the first scale is
};

// enum fl_scale of a spec's parameters.
FL_HD uint32_t scale_kind(const uint32_t *param) { return param[2] & 0xffffu; }

// Their last bit times that of any code is no less than 2^-149, so that products are exact. Encoders make none that are smaller,
// but of rotated E5M2, whose codes are the smallest ones; E8M0 has powers of two alone, and needs no least one.
constexpr float kLeastScale = 0x1p-117f, kLeastRotated = 0x1p-125f;

FL_HD BlockScaling block_scaling(const uint32_t *param) {
  const uint32_t format = param[0], block = param[1];
  const bool hadamard = param[3] & FL_BLOCK_HADAMARD;
  // 1 / sqrt(32), 64, 128, 256 and 512, rounded to f32
  constexpr float kRoots[] = {0x1.6a09e6p-3f, 0x1p-3f, 0x1.6a09e6p-4f, 0x1p-4f, 0x1.6a09e6p-5f};
  int order = 0;
  while (32u << order < block) ++order;
  const float mean = 1.0f / float(block);
  const uint32_t tau = param[2] & 0xffff0000u, epsilon = param[3] & 0xffff0000u;
  return {scale_kind(param),
          format_largest(format),
          format == FL_INT8 ? 128.0f : format_largest(format),
          format == FL_INT8 ? 0 : format_emax(format),
          mean,
          hadamard ? mean : 1.0f,
          hadamard ? kRoots[order] : 1.0f,
          hadamard && format != FL_E5M2 ? kLeastRotated : kLeastScale,
          tau ? bits_float(tau) : 448.0f,
          epsilon ? bits_float(epsilon) : 1e-6f,
          !(param[3] & FL_BLOCK_UNLIMITED)};
}

// Bytes of a block's scale on the wire; a message's is 4 bytes in all.
FL_HD int scale_bytes(uint32_t kind) {
  return kind == FL_SCALE_DUAL ? 8 : kind == FL_SCALE_E8M0 ? 1 : kind == FL_SCALE_BF16 ? 2 : 4;
}

struct BlockScale {
  uint32_t wire;   // bits of the scale: f32, bf16 or E8M0; FL_SCALE_DUAL: those of the second scale, s
  uint32_t first;  // FL_SCALE_DUAL: f32 bits of the first scale, alpha
  float inverse;   // what values are multiplied by; 0 makes every code 0
  float before;    // what they are multiplied by before that
};

// The first scale of TACO (equations 6 and 7). It brings a block to the target energy tau and is limited to 1e-3 .. 1e3.
// `squares` is the sum of v^2 (sum_of_block).
FL_HD float energy_scale(const BlockScaling &s, float squares) {
  const float energy = squares * s.mean * s.unrotated;
  const float alpha = s.tau / square_root(energy + s.epsilon);
  if (!s.limited) return alpha;
  return alpha < 1e-3f ? 1e-3f : (alpha > 1e3f ? 1e3f : alpha);
}

// `squares` is looked at for FL_SCALE_DUAL alone.
FL_HD BlockScale make_block_scale(const BlockScaling &s, uint32_t amax_bits, float squares) {
  bool finite = amax_bits < kF32Inf, usual = finite && amax_bits >= kTinyBits;
  if (s.kind == FL_SCALE_E8M0) {
    const uint32_t code = (amax_bits >> 23) - uint32_t(s.emax);  // 2^-100 and above leave it positive
    return {usual ? code : (finite ? 0u : 255u), 0, usual ? bits_float((254u - code) << 23) : 0.0f, 1.0f};
  }
  const float amax = bits_float(amax_bits);
  if (s.kind == FL_SCALE_DUAL) {
    const float alpha = energy_scale(s, squares), before = alpha * s.orthonormal, most = amax * before;
    if (!finite || !(alpha > 0.0f) || !is_finite(most)) return {kF32Nan, kF32Nan, 0.0f, 1.0f};
    const float scale = short_scale(most, s.largest);
    return {usual ? float_bits(scale) : 0u, float_bits(alpha), usual ? 1.0f / scale : 0.0f, before};
  }
  const float scale = short_scale(amax, s.largest, s.kind == FL_SCALE_BF16 ? 16 : kShort);
  finite = finite && is_finite(scale * s.bound);
  usual = usual && finite;
  const float inverse = usual ? 1.0f / scale : 0.0f;
  if (s.kind == FL_SCALE_MESSAGE) return {finite ? amax_bits : kF32Nan, 0, inverse, 1.0f};
  const uint32_t wire = usual ? float_bits(scale) : finite ? 0u : kF32Nan;
  return {s.kind == FL_SCALE_BF16 ? wire >> 16 : wire, 0, inverse, 1.0f};
}

// FL_BLOCK_GIVEN: a bf16 scale that stands there already. Values beyond the format's largest times it saturate; a block that
// is 2^40 times as large as its scale does not belong to it, and becomes NaN.
FL_HD BlockScale given_block_scale(const BlockScaling &s, uint32_t wire, uint32_t amax_bits) {
  const uint32_t bits = wire << 16;
  const bool positive = bits >= kTinyBits && bits < kF32Inf;
  const float inverse = positive ? 1.0f / bits_float(bits) : 0.0f;
  const bool finite = amax_bits < kF32Inf && is_finite(bits_float(bits) * s.bound);
  const bool fits = finite && bits_float(amax_bits) * inverse < 0x1p40f;
  return {fits ? (positive ? wire : 0u) : uint32_t(kBf16Nan), 0, fits ? inverse : 0.0f, 1.0f};
}

static_assert(float_format(FL_E4M3).mantissa < kShort && float_format(FL_E5M2).mantissa < kShort &&
                  float_format(FL_E2M3).mantissa < kShort && float_format(FL_E3M2).mantissa < kShort &&
                  float_format(FL_E2M1).mantissa < kShort && 128 <= 1 << kShort,
              "a code times a scale of 24 - kShort significant bits has 24 of them at most");

// What decoding multiplies by, whatever bits have arrived: it is short. Where a code could become infinite, or the scale is no
// number, it is the canonical NaN.
FL_HD float decode_block_scale(const BlockScaling &s, uint32_t wire, uint32_t first) {
  float scale = bits_float(wire);
  if (s.kind == FL_SCALE_E8M0) {
    scale = bits_float(wire == 255 ? kF32Nan : (wire ? wire << 23 : 0x00400000u));  // 0 is 2^-127
  } else if (s.kind == FL_SCALE_BF16) {
    scale = bf16_to_f32(uint16_t(wire));
  } else if (s.kind == FL_SCALE_MESSAGE) {
    const uint32_t amax = wire & 0x7fffffffu;
    scale = amax < kTinyBits ? 0.0f : short_scale(bits_float(amax), s.largest);
    if (amax >= kF32Inf) scale = bits_float(kF32Nan);
  } else if (s.kind == FL_SCALE_DUAL) {
    scale = scale / bits_float(first) * s.orthonormal;
  } else {
    scale = scale * s.unrotated;
  }
  scale = shortened(scale);
  if (s.kind != FL_SCALE_E8M0 && bits_float(float_bits(scale) & 0x7fffffffu) < s.least) scale = 0.0f;
  return is_finite(scale * s.bound) ? scale : bits_float(kF32Nan);
}

// The sum of n values, n a power of two: neighbours first, then neighbouring pairs, and so on. Destroys v.
FL_HD float sum_of_block(float *v, int n) {
  for (; n > 1; n /= 2)
    for (int i = 0; i < n / 2; ++i) v[i] = v[2 * i] + v[2 * i + 1];
  return v[0];
}

// Codes lie in runs of 32, each in 4 bytes for every bit of a code. 8 bits: one byte each, in order. 4 bits: byte i holds
// code i in its low half and code i + 16 in its high one. 6 bits: their low four bits like that, in 16 bytes; then 8 bytes,
// byte j of which holds the two high bits of codes j, j + 8, j + 16 and j + 24, the first lowest.
constexpr int kCodeRun = 32;

}  // namespace fl
