// Scalar specification of the `tahquant` codec (TAH-Quant, 2025): tiles with an offset and a step, tokens with one bit less.
// The drivers in cpu/ and cuda/ compute the same numbers with vectors and shuffles; what they may not change is written here.
//
//   1. v = x, zero-padded to whole tokens. Plane 0 says beforehand which tokens are coarse; fl_token_keys is what the
//      choice is made by.
//   2. A tile whose largest magnitude is not 0 and at least twice every other one changes that element, the pivot, with its
//      first and becomes H v / sqrt(tile).
//   3. Offset and step: tah_scale. code: tah_code.
//   4. decode: code * step + offset; a tile with a pivot becomes H v / sqrt(tile), then the two change places.
#pragma once

#include "block_scale.h"

namespace fl {

constexpr int kTahMaxTile = 128;
constexpr uint8_t kNoPivot = 255;

struct TahShape {
  int64_t numel;  // of a message
  int64_t channels;
  int tile;
  int bits;
  int64_t coarse;  // tokens with one bit less

  FL_HD int64_t tokens() const { return (numel + channels - 1) / channels; }
  FL_HD int64_t tiles() const { return tokens() * (channels / tile); }
  FL_HD int64_t tiles_of_token() const { return channels / tile; }
  FL_HD int64_t mark_bytes() const { return coarse ? (tokens() + 31) / 32 * 4 : 0; }
  FL_HD int64_t code_bytes() const { return (tokens() * bits - coarse) * (channels / 8); }
};

inline TahShape tah_shape(const fl_spec &spec) {
  return {spec.numel, spec.param[1], int(spec.param[2]), int(spec.param[0]), spec.param[3]};
}

// 1 / sqrt(32), 64 and 128, rounded to f32.
FL_HD float tah_root(int tile) { return tile == 32 ? 0x1.6a09e6p-3f : tile == 64 ? 0x1p-3f : 0x1.6a09e6p-4f; }

// Where a token's codes lie, and how many bits each has: those of fine tokens come first, in their order, then those of
// coarse ones. `before` is how many tokens before it are marked. No encoder makes more or fewer marks than `coarse`;
// if a message has another number of them, places still lie inside the plane.
struct TahPlace {
  int64_t offset;  // bytes
  int bits;
};

FL_HD TahPlace tah_place(const TahShape &shape, int64_t token, bool marked, int64_t before) {
  const int64_t fine = shape.tokens() - shape.coarse, last = shape.tokens() - 1;
  int64_t place = marked ? fine + before : token - before;
  place = place < last ? place : last;
  const int64_t step = shape.channels / 8;
  return place < fine ? TahPlace{place * shape.bits * step, shape.bits}
                      : TahPlace{(fine * shape.bits + (place - fine) * (shape.bits - 1)) * step, shape.bits - 1};
}

// Marks lie in runs of 32 tokens: bit i / 4 of byte i mod 4 is that of token i.
FL_HD bool tah_marked(uint32_t word, int token) { return word >> (8 * (token & 3) + (token >> 2 & 7)) & 1; }

// The bits of a run's marks that belong to its first `token` mod 32 tokens.
FL_HD uint32_t tah_marks_before(int token) {
  const int row = token >> 2 & 7, column = token & 3;
  return ((1u << row) - 1) * 0x01010101u | (0x01010101u & ((1u << 8 * column) - 1)) << row;
}

struct TahScale {
  uint16_t offset, step;  // bf16
};

// Offset rounded down and step rounded up, so that all values lie between the lowest and the highest code. `finite`: all
// values of the tile are.
FL_HD TahScale tah_scale(bool finite, float low, float high, float most) {
  const float below = low + 0.0f;  // -0 becomes 0
  const bool usual = high >= 0x1p-100f || -low >= 0x1p-100f;
  const uint32_t bits = usual ? float_bits(below) : 0;
  const uint32_t offset = (bits >> 31 ? bits + 0xffffu : bits) >> 16;
  const float range = (usual ? high : 0.0f) - bits_float(offset << 16);
  const uint32_t step = (float_bits(range / most) + 0xffffu) >> 16;
  const bool fits = finite && (offset & 0x7fffu) < (kF32Inf >> 16) && step < (kF32Inf >> 16);
  return {fits ? uint16_t(offset) : kBf16Nan, fits ? uint16_t(step) : kBf16Nan};
}

FL_HD bool tah_codes_are_zero(TahScale scale) { return scale.step == 0 || scale.step >= (kF32Inf >> 16); }

// The code of a value where they are not all 0.
FL_HD uint32_t tah_code(float v, float offset, float step, int32_t most) {
  const int32_t code = round_even((v - offset) / step);
  return uint32_t(code < 0 ? 0 : code > most ? most : code);
}

// What decoders take for a bf16 scale or offset: NaN where it is not finite.
FL_HD float tah_value(uint16_t wire) {
  const float value = bf16_to_f32(wire);
  return is_finite(value) ? value : bits_float(kF32Nan);
}

// Entropy -------------------------------------------------------------------------------------------------------------

// log2 m - (m - 1) for 1 <= m < 2, to 4e-7: 1 / 4 - h^2 times a polynomial in h = m - 3 / 2, the highest power first.
constexpr float kLog2First = -0x1.f25ac4p-7f;
#define FL_LOG2_TERMS(term) \
  term(0x1.9e90c6p-6f) term(-0x1.507c6cp-5f) term(0x1.3acf94p-4f) term(-0x1.38f940p-3f) term(0x1.5c01f8p-2f)

FL_HD float log2_bend(float h) {
  float sum = kLog2First;
#define FL_TERM(factor) sum = sum * h + factor;
  FL_LOG2_TERMS(FL_TERM)
#undef FL_TERM
  return sum * (0.25f - h * h);
}

// log2 of a magnitude less that of a power of two, both given by their bits. The bits, read as an integer, are a logarithm that
// is straight from each power of two to the next.
FL_HD float log2_above(uint32_t bits, uint32_t power) {
  const float straight = float(int32_t(bits - power)) * 0x1p-23f;
  return straight + log2_bend(bits_float((bits & 0x007fffffu) | 0x3f800000u) - 1.5f);
}

// What one element adds to the two sums that a token's entropy is made of: |x|, and |x| times its logarithm above that of the
// power of two below the largest of the token's first 32 magnitudes, so that sums of any scale are as exact. Element i belongs
// to partial sums i mod 32, which add up in order; the 32 are then folded: 16, 8, 4, 2 and 1 apart. All of it is f32.
struct EntropySums {
  float total, logs;
};

constexpr int kTahSums = 32;
FL_HD uint32_t entropy_power(uint32_t largest) { return largest & kF32Inf; }

FL_HD EntropySums entropy_terms(float x, uint32_t power) {
  const uint32_t bits = float_bits(x) & 0x7fffffffu;
  return {bits_float(bits), bits_float(bits) * log2_above(bits, power)};
}

// A token's entropy in units of 2^-20 bits; what is not finite comes last.
FL_HD int32_t entropy_key(EntropySums sums, uint32_t power) {
  if (!is_finite(sums.total) || !is_finite(sums.logs)) return 0x7fffffff;
  if (sums.total == 0.0f) return 0;
  const float entropy = log2_above(float_bits(sums.total), power) - sums.logs / sums.total;
  return entropy > 0.0f ? int32_t(entropy * 1048576.0f + 0.5f) : 0;
}

}  // namespace fl
