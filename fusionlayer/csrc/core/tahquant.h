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

// log2(1 + z) for 1 / sqrt(2) <= 1 + z <= sqrt(2), to 1e-7: z times a polynomial, the highest power first.
#define FL_LOG2_TERMS(term)                                                                                  \
  term(0x1.f5b86ep-4f) term(-0x1.abc2a0p-3f) term(0x1.be3ac0p-3f) term(-0x1.e906ecp-3f) term(0x1.26871ep-2f) \
      term(-0x1.715cf8p-2f) term(0x1.ec7736p-2f) term(-0x1.715472p-1f) term(0x1.715474p+0f)

// Where 1 + z and its power of two come from.
constexpr uint32_t kRootHalf = 0x3f3504f3u;  // bits of sqrt(1 / 2)

FL_HD int log2_exponent(uint32_t bits) { return int32_t(bits - kRootHalf) >> 23; }
FL_HD float log2_rest(uint32_t bits, int exponent) { return bits_float(bits - (uint32_t(exponent) << 23)) - 1.0f; }

FL_HD float log2_of_rest(float z) {
  float sum = 0.0f;
#define FL_TERM(factor) sum = sum * z + factor;
  FL_LOG2_TERMS(FL_TERM)
#undef FL_TERM
  return sum * z;
}

FL_HD double log2_of(uint32_t bits) {
  const int exponent = log2_exponent(bits);
  return double(exponent) + double(log2_of_rest(log2_rest(bits, exponent)));
}

// What one element adds to the two sums that a token's entropy is made of: |x|, and |x| log2 |x|. Subnormals count as 0.
// Element i belongs to partial sums i mod 32, which add up in order, in f64; the 32 are then folded: 16, 8, 4, 2 and 1 apart.
struct EntropySums {
  double total, logs;
};

FL_HD EntropySums entropy_terms(float x) {
  const uint32_t bits = float_bits(x) & 0x7fffffffu;
  if (bits < 0x00800000u) return {0.0, 0.0};
  const double a = double(bits_float(bits));
  return {a, a * log2_of(bits)};
}

// A token's entropy in units of 2^-20 bits; what is not finite comes last.
FL_HD int32_t entropy_key(EntropySums sums) {
  if (!(sums.total < 1e300)) return 0x7fffffff;
  if (sums.total == 0.0) return 0;
#if defined(__CUDA_ARCH__)
  const uint64_t bits = uint64_t(__double_as_longlong(sums.total));
#else
  uint64_t bits;
  std::memcpy(&bits, &sums.total, sizeof bits);
#endif
  const int exponent = int(bits >> 52) - 1023;
  const double log = double(exponent) + log2_of(0x3f800000u | uint32_t(bits >> 29 & 0x7fffffu));
  const double entropy = log - sums.logs / sums.total;
  return entropy > 0.0 ? int32_t(entropy * 1048576.0 + 0.5) : 0;
}

}  // namespace fl
