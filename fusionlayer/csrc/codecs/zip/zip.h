// Scalar specification of the `zip` codec (ZipCCL): exponents in three bits, all other bits as they are. Every element is
// 16 bits with an exponent, for f32 the upper half; docs/wire_format.md has the planes.
//
// Which seven exponents have a code of their own is decided for each region of 65536 elements, from a sample: 16 runs of
// 32 elements. Counts and squares of the sample are integers, so it does not matter in which order they are added up.
#pragma once

#include "floats.h"
#include "fusionlayer_codec.h"

namespace fl {

constexpr int kZipGroup = 64;      // elements that a last tile is filled up to a multiple of
constexpr int kZipTile = 1024;     // elements of a block
constexpr int kZipRegion = 65536;  // elements that share a table
constexpr int kZipTiles = kZipRegion / kZipTile;
constexpr int kZipCodes = 7;
constexpr int kZipBins = 256;
constexpr int kZipRuns = 16;  // of a region's sample, of kZipRun elements each
constexpr int kZipRun = 32;
constexpr int64_t kZipMaxElements = 0xffffffffll;  // escapes are counted in 32 bits

enum { kZipRaw = 0, kZipCoded = 1 };

// Plane 0.
struct ZipHead {
  uint32_t form;
  uint32_t escapes;
  uint32_t zero[2];
};

// Plane 1 begins with one for each region.
struct ZipRegion {
  uint8_t exponent[8];  // of each code; code 0, whose exponent is an escape, has 0
  uint32_t first;       // number of the region's first escape
  uint32_t count;       // its escapes
};
static_assert(sizeof(ZipHead) == 16 && sizeof(ZipRegion) == 16, "they are the wire format");

FL_HD int zip_bias(uint32_t dtype) { return dtype == FL_F16 ? 15 : 127; }
FL_HD int zip_exponents(uint32_t dtype) { return dtype == FL_F16 ? 32 : 256; }

FL_HD uint32_t zip_exponent(uint32_t dtype, uint32_t half) {
  return dtype == FL_F16 ? half >> 10 & 31 : half >> 7 & 255;
}

// Sign and the seven highest bits of the mantissa.
FL_HD uint32_t zip_byte(uint32_t dtype, uint32_t half) {
  return (half >> 8 & 0x80) | ((dtype == FL_F16 ? half >> 3 : half) & 0x7f);
}

// The element with these parts; f16 has three mantissa bits more.
FL_HD uint32_t zip_half(uint32_t dtype, uint32_t exponent, uint32_t byte, uint32_t low) {
  const uint32_t sign = (byte & 0x80) << 8, mantissa = byte & 0x7f;
  return dtype == FL_F16 ? sign | (exponent & 31) << 10 | mantissa << 3 | low : sign | exponent << 7 | mantissa;
}

// How plane 1 is made up: regions, index, blocks, escapes; or the elements as they are.
struct ZipShape {
  int64_t numel;
  uint32_t dtype;  // of the elements that were encoded

  FL_HD int64_t tiles() const { return (numel + kZipTile - 1) / kZipTile; }
  FL_HD int64_t regions() const { return (numel + kZipRegion - 1) / kZipRegion; }
  FL_HD int planes() const { return dtype == FL_F16 ? 6 : 3; }  // of bits
  FL_HD int low_bytes() const { return dtype == FL_F32 ? 2 : 0; }
  FL_HD int element_bytes() const { return dtype == FL_F32 ? 4 : 2; }

  FL_HD int in_tile(int64_t tile) const { return part(numel - tile * kZipTile, kZipTile); }
  FL_HD int in_region(int64_t region) const { return part(numel - region * kZipRegion, kZipRegion); }
  FL_HD int tiles_in(int64_t region) const { return part(tiles() - region * kZipTiles, kZipTiles); }
  static FL_HD int filled(int elements) { return (elements + kZipGroup - 1) / kZipGroup * kZipGroup; }

  // Offsets in plane 1.
  FL_HD int64_t index() const { return regions() * int64_t(sizeof(ZipRegion)); }
  FL_HD int64_t block(int64_t tile) const {
    return (index() + 2 * tiles() + 63) / 64 * 64 + tile * block_bytes(kZipTile);
  }
  FL_HD int64_t escapes() const {
    const int rest = int(numel % kZipTile);
    return rest ? block(tiles() - 1) + block_bytes(filled(rest)) : block(tiles());
  }
  FL_HD int64_t raw_bytes() const { return numel * element_bytes(); }
  FL_HD int64_t bytes() const { return escapes() > raw_bytes() ? escapes() : raw_bytes(); }

  // As many escapes make a message no shorter than its elements.
  FL_HD int64_t too_many() const { return escapes() < raw_bytes() ? raw_bytes() - escapes() : 0; }

  // Of a block of `filled` elements: bytes, planes of bits, for f32 the lower halves.
  FL_HD int64_t block_bytes(int filled) const { return filled + planes() * (filled / 8) + low_bytes() * filled; }

 private:
  static FL_HD int part(int64_t left, int most) { return left < most ? int(left) : most; }
};

inline ZipShape zip_shape(const fl_spec &spec) { return {spec.numel, spec.param[0]}; }

// One message.
struct ZipMessage {
  ZipHead *head;
  uint8_t *data;

  FL_HD ZipRegion *regions() const { return reinterpret_cast<ZipRegion *>(data); }
  // For each tile, how many escapes of its region lie in tiles before it.
  FL_HD uint16_t *index(const ZipShape &shape) const { return reinterpret_cast<uint16_t *>(data + shape.index()); }
};

FL_HD ZipMessage zip_message(const fl_messages &messages, int64_t message) {
  uint8_t *head = static_cast<uint8_t *>(messages.plane[0]) + message * messages.stride;
  return {reinterpret_cast<ZipHead *>(head), static_cast<uint8_t *>(messages.plane[1]) + message * messages.stride};
}

// The sample ----------------------------------------------------------------------------------------------------------

// Elements from the start of one run to that of the next, in a region of n elements.
FL_HD int zip_stride(int n) {
  const int stride = n / kZipRuns / kZipRun * kZipRun;
  return stride > kZipRun ? stride : kZipRun;
}

// The bin of an exponent: how often it occurs, in the upper half, and the sum of squared significands, of 8 bits.
using ZipBin = unsigned long long;
FL_HD ZipBin zip_weight(uint32_t byte) {
  const uint32_t significand = 128 + (byte & 0x7f);
  return ZipBin(1) << 32 | significand * significand;
}
FL_HD uint32_t zip_count(ZipBin bin) { return uint32_t(bin >> 32); }

FL_HD double power_of_two(int exponent) { return bits_double(uint64_t(1023 + exponent) << 52); }
FL_HD int exponent_of(double positive) { return int(double_bits(positive) >> 52) - 1023; }

// The square of the sigma for which windows that begin at 2^-1 and at 1 cover equally much of a Gaussian:
// P(0) = P(-1), P(x) = erf(2^(x + 7) / (sigma sqrt 2)) - erf(2^x / (sigma sqrt 2)). ZipCCL takes the better one of floor
// and ceil of log2(sigma) - 5.36. That is the largest x with 4^x times this square <= sigma^2.
constexpr double kZipTurn = 694.1776512421804;

// The exponents of a sample that has none below the first and above the second.
struct ZipRange {
  int low, high;
};

// The lowest exponent of the window for a Gaussian of the sample's sigma. What is not finite does not count, subnormals
// count as 0.
FL_HD int zip_base(const ZipBin *bins, ZipRange range, uint32_t dtype) {
  const int special = zip_exponents(dtype) - 1, bias = zip_bias(dtype);
  double sum = 0.0;
  int64_t count = zip_count(bins[0]);
  for (int e = range.low > 1 ? range.low : 1; e <= range.high && e < special; ++e) {
    count += zip_count(bins[e]);
    if (bins[e]) sum += double(uint32_t(bins[e])) * power_of_two(2 * (e - bias - 7));
  }
  if (sum == 0.0) return 0;
  const double ratio = sum / double(count) / kZipTurn;
  const int base = bias + (exponent_of(ratio) >> 1), most = special + 1 - kZipCodes;
  return base < 0 ? 0 : base > most ? most : base;
}

// The seven most frequent exponents, ascending; of equally frequent ones the smaller.
FL_HD void zip_frequent(const ZipBin *bins, uint32_t dtype, uint8_t *found) {
  uint32_t counts[kZipCodes];
  int n = 0;
  for (int e = 0; e < zip_exponents(dtype); ++e) {
    const uint32_t count = zip_count(bins[e]);
    if (n == kZipCodes && count <= counts[kZipCodes - 1]) continue;
    int at = n < kZipCodes ? n++ : kZipCodes - 1;
    for (; at > 0 && counts[at - 1] < count; --at) {
      counts[at] = counts[at - 1];
      found[at] = found[at - 1];
    }
    counts[at] = count;
    found[at] = uint8_t(e);
  }
  for (int i = 1; i < kZipCodes; ++i)
    for (int at = i; at > 0 && found[at - 1] > found[at]; --at) {
      const uint8_t swapped = found[at];
      found[at] = found[at - 1];
      found[at - 1] = swapped;
    }
}

FL_HD void zip_window(int base, uint8_t *found) {
  for (int i = 0; i < kZipCodes; ++i) found[i] = uint8_t(base + i);
}

FL_HD int64_t zip_covered(const ZipBin *bins, const uint8_t *exponents) {
  int64_t count = 0;
  for (int i = 0; i < kZipCodes; ++i) count += zip_count(bins[exponents[i]]);
  return count;
}

// An upper bound of how many more elements of the sample the table covers than the window. At best, each exponent outside
// replaces the least frequent one inside, and gains the difference of the two counts.
FL_HD int64_t zip_gain_at_most(const ZipBin *bins, ZipRange range, const uint8_t *window) {
  uint32_t least = zip_count(bins[window[0]]);
  for (int i = 1; i < kZipCodes; ++i) {
    const uint32_t count = zip_count(bins[window[i]]);
    least = count < least ? count : least;
  }
  int64_t gain = int64_t(kZipCodes) * least - zip_covered(bins, window);  // cancels what the loop adds for those inside
  for (int e = range.low; e <= range.high; ++e) {
    const uint32_t count = zip_count(bins[e]);
    gain += count > least ? count - least : 0;
  }
  return gain;
}

// Leaves in `exponents` those of codes 1 to 7. A window is a little faster. It gives way where the table covers 1/64
// of the sample more.
FL_HD void zip_choose(const ZipBin *bins, ZipRange range, int sampled, uint32_t dtype, uint32_t choice,
                      uint8_t *exponents) {
  if (choice != FL_ZIP_TABLE) zip_window(zip_base(bins, range, dtype), exponents);
  if (choice == FL_ZIP_WINDOW) return;
  if (choice == FL_ZIP_AUTO && zip_gain_at_most(bins, range, exponents) * 64 <= sampled) return;
  uint8_t frequent[kZipCodes];
  zip_frequent(bins, dtype, frequent);
  if (choice == FL_ZIP_AUTO && (zip_covered(bins, frequent) - zip_covered(bins, exponents)) * 64 <= sampled) return;
  for (int i = 0; i < kZipCodes; ++i) exponents[i] = frequent[i];
}

}  // namespace fl
