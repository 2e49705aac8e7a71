// Scalar specification of the `chunked_topk` codec: of each chunk of a tensor the largest magnitudes, as a sign and one of a
// few evenly spaced levels (SparseLoCo, arXiv 2508.15706). docs/wire_format.md has the planes.
//
//   1. v = scale * x + residual, two roundings. A magnitude is the 31 low bits of v.
//   2. A value of the chunk is not finite: levels NaN. All magnitudes are below 2^-100: levels 0. Either way positions and
//      codes are zero bytes.
//   3. Else the `kept` largest magnitudes go; of equal ones the first.
//   4. With 2 bits the levels are two means: of the magnitudes above the mean of all that go, and of the others. They are
//      sums of integers, so their order does not matter. With 3, 4 and 8 bits the levels go from the smallest of them to
//      the largest. Low level and step are rounded to bf16. With 32 bits the values travel, and the levels say 1 and 0.
//   5. A code is the nearest level, and above it the sign.
//   6. decode: low + level * step, two roundings.
//
// Positions are an Elias-Fano code. That of number i, counted from 0, is cut in two: its `low` low bits are field i of a
// stream of bits, the others, as a number q, set bit q + i of a bitmap.
#pragma once

#include "codecs/sparse/sparse.h"
#include "floats.h"
#include "fusionlayer_codec.h"
#include "int_group.h"

namespace fl {

constexpr int kChunkedPlanes = 3;
constexpr int kLeastChunk = 64, kMostChunk = 4096;
constexpr int kLevelBytes = 4;           // of a chunk: low level and step, bf16
constexpr float kUnits = 0x1p20f;        // of the largest magnitude: sums of 4096 are below 2^33
constexpr float kLeastStep = 0x1p-118f;  // below it a step is 0: neither a step nor its inverse is subnormal
constexpr uint16_t kBf16One = 0x3f80, kBf16Largest = 0x7f7f;

// How positions and codes of a chunk lie.
struct ChunkForm {
  int size, kept, bits;
  int low;  // bits of a position that are a field

  FL_HD int high_bits() const { return kept + ((size - 1) >> low); }
  FL_HD int high_bytes() const { return (high_bits() + 7) / 8; }
  FL_HD int low_bytes() const { return (kept * low + 7) / 8; }
  FL_HD int position_bytes() const { return high_bytes() + low_bytes(); }
  FL_HD int code_bytes() const { return (kept * bits + 7) / 8; }
  FL_HD int top() const { return (1 << (bits - 1)) - 1; }  // the highest level; not of 32 bits
};

// The form with the fewest bits, of two the one with the smaller bitmap.
inline ChunkForm chunk_form(int size, int kept, int bits) {
  int low = 0;
  const auto cost = [=](int l) { return kept * l + ((size - 1) >> l); };
  for (int l = 1; l <= 12; ++l)
    if (cost(l) <= cost(low)) low = l;
  return {size, kept, bits, low};
}

struct ChunkedShape {
  int64_t numel, chunks;
  ChunkForm full, last;

  FL_HD ChunkForm form(int64_t chunk) const {
    const bool whole = chunk + 1 < chunks;
    return {whole ? full.size : last.size, whole ? full.kept : last.kept, full.bits, whole ? full.low : last.low};
  }

  FL_HD int64_t plane_bytes(int p) const {
    if (chunks == 0) return 0;
    if (p == 0) return chunks * kLevelBytes;
    return p == 1 ? (chunks - 1) * full.position_bytes() + last.position_bytes()
                  : (chunks - 1) * full.code_bytes() + last.code_bytes();
  }
};

// param[0] = bits, param[1] = elements of a chunk, param[2] = how many of them go. Of a shorter last chunk as large a share
// goes, rounded down, but one at least.
inline ChunkedShape chunked_shape(const fl_spec &spec) {
  const int bits = int(spec.param[0]), chunk = int(spec.param[1]), kept = int(spec.param[2]);
  const int64_t chunks = ceil_div(spec.numel, chunk);
  const int left = chunks ? int(spec.numel - (chunks - 1) * chunk) : chunk;
  const int share = int(int64_t(kept) * left / chunk);
  return {spec.numel, chunks, chunk_form(chunk, kept, bits), chunk_form(left, share ? share : 1, bits)};
}

// The factor on x that a spec carries; without one it is 1.
FL_HD float chunked_scale(const fl_spec &spec) { return spec.param[3] ? bits_float(spec.param[3]) : 1.0f; }

// Where a chunk of a message lies.
struct ChunkBytes {
  uint8_t *levels, *high, *low, *codes;
};

FL_HD ChunkBytes chunk_bytes(const ChunkedShape &shape, const fl_messages &messages, int64_t message, int64_t chunk) {
  const int64_t offset = message * messages.stride;
  uint8_t *positions =
      static_cast<uint8_t *>(messages.plane[1]) + offset + chunk * int64_t(shape.full.position_bytes());
  return {static_cast<uint8_t *>(messages.plane[0]) + offset + chunk * kLevelBytes, positions,
          positions + shape.form(chunk).high_bytes(),
          static_cast<uint8_t *>(messages.plane[2]) + offset + chunk * int64_t(shape.full.code_bytes())};
}

// What stands in the levels of a chunk.
struct ChunkLevels {
  uint16_t low, step;
};

constexpr ChunkLevels kNoLevels = {0, 0}, kBrokenLevels = {kBf16Nan, 0}, kExactLevels = {kBf16One, 0};

FL_HD uint32_t level_word(ChunkLevels levels) { return levels.low | uint32_t(levels.step) << 16; }
FL_HD ChunkLevels word_levels(uint32_t word) { return {uint16_t(word), uint16_t(word >> 16)}; }
FL_HD bool are_broken(ChunkLevels levels) { return (levels.low & 0x7f80) == 0x7f80; }

FL_HD uint16_t to_bf16_finite(float f) {
  const uint16_t rounded = f32_to_bf16(f);
  return rounded > kBf16Largest ? kBf16Largest : rounded;
}

// Levels low, low + step, .. of which number `top` is near `high`.
FL_HD ChunkLevels levels_between(float low, float high, int top) {
  const uint16_t first = to_bf16_finite(low);
  const float step = (high - bf16_to_f32(first)) / float(top);
  return {first, step >= kLeastStep ? to_bf16_finite(step) : uint16_t(0)};
}

// A magnitude as an integer, the largest one being 2^20.
FL_HD float units_per(uint32_t largest) { return kUnits / bits_float(largest); }
FL_HD int64_t units_of(uint32_t magnitude, float per) { return round_even(bits_float(magnitude) * per); }

// Whether a magnitude of `units` is above the mean of `kept` with the sum `total`.
FL_HD bool above_mean(int64_t units, int kept, int64_t total) { return units * kept > total; }

// The levels of 2 bits: `high` is the sum of the `count` magnitudes above the mean, in units.
FL_HD ChunkLevels two_levels(int kept, int64_t total, int count, int64_t high, uint32_t largest) {
  const float unit = bits_float(largest) * (1.0f / kUnits);
  const float low = float(total - high) / float(kept - count) * unit;
  return levels_between(low, count ? float(high) / float(count) * unit : low, 1);
}

// Levels as coding takes them.
struct LevelCoder {
  float low, step, inverse;
  int bits, top;

  FL_HD LevelCoder(const ChunkForm &form, ChunkLevels levels)
      : low(bf16_to_f32(levels.low)),
        step(bf16_to_f32(levels.step)),
        inverse(levels.step ? 1.0f / bf16_to_f32(levels.step) : 0.0f),
        bits(form.bits),
        top(form.top()) {}

  FL_HD uint32_t code(float v) const {
    float level = (bits_float(magnitude(v)) - low) * inverse;
    level = level > 0.0f ? level : 0.0f;
    level = level < float(top) ? level : float(top);
    return uint32_t(round_even(level)) | float_bits(v) >> 31 << (bits - 1);
  }

  FL_HD float value(uint32_t code) const {
    const float v = low + float(int(code) & top) * step;
    return bits_float(float_bits(v) ^ code >> (bits - 1) << 31);
  }
};

// Field i of a stream of fields of `width` bits, up to 12, the first in the lowest bits.
FL_HD uint32_t bit_field(const uint8_t *bytes, int i, int width) {
  const int first = i * width, shift = first & 7;
  if (width == 0) return 0;
  const uint8_t *at = bytes + (first >> 3);
  uint32_t v = at[0];
  if (shift + width > 8) v |= uint32_t(at[1]) << 8;
  if (shift + width > 16) v |= uint32_t(at[2]) << 16;
  return v >> shift & ((1u << width) - 1);
}

// Byte j of a stream of `count` fields; get(i) is field i.
template <class Get>
FL_HD uint8_t packed_byte(const Get &get, int count, int width, int j) {
  uint32_t v = 0;
  for (int i = 8 * j / width; i < count && i * width < 8 * j + 8; ++i) {
    const int shift = i * width - 8 * j;
    v |= shift >= 0 ? get(i) << shift : get(i) >> -shift;
  }
  return uint8_t(v);
}

// The bit of the bitmap that stands for the position of number i.
FL_HD int high_place(int position, int i, int low) { return (position >> low) + i; }

// The position that bit `place` of the bitmap stands for, which is set, as `i` bits before it are.
FL_HD int position_of(const ChunkForm &form, const uint8_t *lows, int place, int i) {
  return (place - i) << form.low | int(bit_field(lows, i, form.low));
}

}  // namespace fl
