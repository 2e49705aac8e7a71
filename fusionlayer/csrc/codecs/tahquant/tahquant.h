// Scalar specification of the `tahquant` codec (TAH-Quant, 2025): tiles with an offset and a step, tokens with one bit less.
// The drivers in cpu/ and cuda/ compute the same numbers with vectors and shuffles; what they may not change is written here.
//
//   1. v = x, zero-padded to whole tokens. Of each section of 32 tokens those of lowest entropy are coarse: entropy_key,
//      tah_precedes.
//   2. A tile whose largest magnitude is not 0 and at least twice every other one changes that element, the pivot, with its
//      first and becomes H v / sqrt(tile).
//   3. Offset and step: tah_scale. code: tah_code.
//   4. decode: code * step + offset; a tile with a pivot becomes H v / sqrt(tile), then the two change places.
#pragma once

#include "codecs/block/block_scale.h"

namespace fl {

constexpr int kTahMaxTile = 128;
constexpr uint8_t kNoPivot = 255;
constexpr int kTahSection = 32;  // tokens among which coarse ones are chosen; their marks are a word

struct TahShape {
  int64_t numel;  // of a message
  int64_t channels;
  int tile;
  int bits;
  uint32_t share;  // of tokens with one bit less, in 2^-32
  int64_t coarse;  // how many those are

  FL_HD int64_t tokens() const { return (numel + channels - 1) / channels; }
  FL_HD int64_t sections() const { return (tokens() + kTahSection - 1) / kTahSection; }
  FL_HD int64_t tiles() const { return tokens() * (channels / tile); }
  FL_HD int64_t tiles_of_token() const { return channels / tile; }
  FL_HD int64_t mark_bytes() const { return coarse ? sections() * 4 : 0; }
  FL_HD int64_t code_bytes() const { return (tokens() * bits - coarse) * (channels / 8); }

  // How many of the first tokens are coarse, where they end a section or the message. Tokens are at most kTahMostTokens.
  FL_HD int64_t coarse_before(int64_t token) const { return int64_t(uint64_t(token) * share >> 32); }
};

constexpr int64_t kTahMostTokens = int64_t(1) << 32;

inline TahShape tah_shape(const fl_spec &spec) {
  TahShape shape = {spec.numel, spec.param[1], int(spec.param[2]), int(spec.param[0]), spec.param[3], 0};
  shape.coarse = shape.coarse_before(shape.tokens());
  return shape;
}

// The tokens of a section.
struct TahSection {
  int64_t first;
  int tokens, coarse;

  FL_HD TahSection(const TahShape &shape, int64_t section) : first(section * kTahSection) {
    const int64_t left = shape.tokens() - first;
    tokens = int(left < kTahSection ? left : kTahSection);
    coarse = int(shape.coarse_before(first + tokens) - shape.coarse_before(first));
  }
};

// 1 / sqrt(32), 64 and 128, rounded to f32.
FL_HD float tah_root(int tile) { return tile == 32 ? 0x1.6a09e6p-3f : tile == 64 ? 0x1p-3f : 0x1.6a09e6p-4f; }

// Marks lie in words of a section: bit i / 4 of byte i mod 4 is that of its token i.
FL_HD int tah_mark_bit(int token) { return 8 * (token & 3) + (token >> 2); }

// The bits of marks that belong to the tokens before one of the section.
FL_HD uint32_t tah_marks_before(int token) {
  const int row = token >> 2, column = token & 3;
  return ((1u << row) - 1) * 0x01010101u | (0x01010101u & ((1u << 8 * column) - 1)) << row;
}

// Whether token `one` of a section is coarse sooner than token `other`: tokens with the lowest keys are, of equal ones the
// first. Those that fewer tokens precede than a section has coarse ones are coarse.
FL_HD bool tah_precedes(const uint32_t *keys, int one, int other) { return keys[one] < keys[other] + (one < other); }

// Where a token's codes lie, and how many bits each has. Sections follow each other. In a section those of fine tokens come
// first, in their order, then those of coarse ones. `marks` are the section's, `before` is how many of its tokens before this
// one are marked. No encoder makes more or fewer marks than the section has coarse tokens; if a message has another number
// of them, places still lie inside the section.
struct TahPlace {
  int64_t offset;  // bytes
  int bits;
};

FL_HD TahPlace tah_place(const TahShape &shape, int64_t token, uint32_t marks, int before) {
  const int64_t step = shape.channels / 8;
  if (!shape.coarse) return {token * shape.bits * step, shape.bits};
  const TahSection section(shape, token / kTahSection);
  const int own = int(token - section.first), fine = section.tokens - section.coarse, last = section.tokens - 1;
  const int wanted = marks >> tah_mark_bit(own) & 1 ? fine + before : own - before;
  const int place = wanted < last ? wanted : last;
  const int64_t start = section.first * shape.bits - shape.coarse_before(section.first);
  return place < fine ? TahPlace{(start + place * shape.bits) * step, shape.bits}
                      : TahPlace{(start + place * shape.bits - (place - fine)) * step, shape.bits - 1};
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

// What values above the offset are multiplied by to become codes, where those are not all 0. It is finite where a step is
// subnormal, too.
FL_HD float tah_inverse(float step) { return 1.0f / (step < 0x1p-126f ? 0x1p-126f : step); }

// The low byte of the result's bits is a value's code. No value of a tile is below 0 or beyond the highest code.
FL_HD float tah_code(float v, float offset, float inverse) { return (v - offset) * inverse + 12582912.0f; }

// What decoders take for a bf16 scale or offset: NaN where it is not finite.
FL_HD float tah_value(uint16_t wire) {
  const float value = bf16_to_f32(wire);
  return is_finite(value) ? value : bits_float(kF32Nan);
}

// Entropy -------------------------------------------------------------------------------------------------------------

// log2 of a magnitude less that of a power of two, both given by their bits, but for what `bend` adds. The bits, read as an
// integer, are a logarithm that is straight from each power of two to the next.
FL_HD float log2_straight(uint32_t bits, uint32_t power) { return float(int32_t(bits - power)) * 0x1p-23f; }

// log2 (1 + u) - u for 0 <= u < 1, to 1e-3, and without error in the mean over u: (u - u^2)(kBend - kBendSlope u). A mantissa
// gives u its kBendBits: few, so that products are exact.
constexpr float kBend = 0x1.b01p-2f, kBendSlope = 0x1.4p-3f;
constexpr uint32_t kBendBits = 0x007ff800u;

// The same to 4e-7: 1 / 4 - h^2 times a polynomial in h = u - 1 / 2, the highest power first.
FL_HD float log2_bend_of_total(uint32_t bits) {
  const float h = bits_float((bits & 0x007fffffu) | 0x3f800000u) - 1.5f;
  const float terms[] = {0x1.9e90c6p-6f, -0x1.507c6cp-5f, 0x1.3acf94p-4f, -0x1.38f940p-3f, 0x1.5c01f8p-2f};
  float sum = -0x1.f25ac4p-7f;
  FL_UNROLL
  for (float term : terms) sum = sum * h + term;
  return sum * (0.25f - h * h);
}

// What one element adds to the two sums that a token's entropy is made of: |x|, and |x| times its logarithm above that of the
// power of two below the largest of the token's first 32 magnitudes, so that sums of any scale are as exact. Element i belongs
// to partial sums i mod 32, which add up in order; the 32 are then folded: 16, 8, 4, 2 and 1 apart. All of it is f32.
struct EntropySums {
  float total, logs;
};

constexpr int kTahSums = 32;
FL_HD uint32_t entropy_power(uint32_t largest) { return largest & kF32Inf; }

// A token's entropy in units of 2^-20 bits; what is not finite comes last.
FL_HD uint32_t entropy_key(EntropySums sums, uint32_t power) {
  if (!is_finite(sums.total) || !is_finite(sums.logs)) return 0x7fffffff;
  if (sums.total == 0.0f) return 0;
  const uint32_t total = float_bits(sums.total);
  const float entropy = log2_straight(total, power) + log2_bend_of_total(total) - sums.logs / sums.total;
  return entropy > 0.0f ? uint32_t(entropy * 1048576.0f + 0.5f) : 0;
}

}  // namespace fl
