// Scalar specification of the `rans` codec: exponents by interleaved rANS (Duda, arXiv 1311.2540) with one table of
// frequencies for a message, all other bits as they are; docs/wire_format.md has the planes.
//
// A block's symbols take turns on 32 states, which share one stream of 16-bit words: symbol i belongs to state i % 32. A
// decoder takes words in the order of the symbols; the encoder goes backwards.
#pragma once

#include "floats.h"
#include "fusionlayer_codec.h"
#include "zip.h"

namespace fl {

constexpr int kRansLanes = 32;
constexpr int kRansBlock = 32768;  // elements whose states are told
constexpr int kRansBits = 12;      // frequencies add up to 1 << kRansBits
constexpr uint32_t kRansTotal = 1u << kRansBits;
constexpr uint32_t kRansFirst = 1u << 16;  // a state's first value, and the smallest between two symbols
constexpr int kRansSymbols = 256;

// The parts of plane 1: frequencies, ends of blocks, states, bytes, for f32 the lower halves, then words; or the elements
// as they are. Plane 0 is a ZipHead with the bytes of the words in place of escapes.
struct RansShape {
  int64_t numel;
  uint32_t dtype;  // of the elements that were encoded

  int64_t blocks() const { return (numel + kRansBlock - 1) / kRansBlock; }
  int in_block(int64_t block) const {
    const int64_t left = numel - block * kRansBlock;
    return left < kRansBlock ? int(left) : kRansBlock;
  }
  int low_bytes() const { return dtype == FL_F32 ? 2 : 0; }
  int element_bytes() const { return dtype == FL_F32 ? 4 : 2; }

  // Offsets in plane 1.
  static int64_t ends() { return kRansSymbols * 2; }
  int64_t states() const { return filled(ends() + 4 * blocks()); }
  int64_t bytes() const { return states() + 4 * kRansLanes * blocks(); }
  int64_t low() const { return bytes() + filled(numel); }
  int64_t words() const { return low() + filled(low_bytes() * numel); }
  int64_t raw_bytes() const { return numel * element_bytes(); }
  int64_t data_bytes() const { return words() > raw_bytes() ? words() : raw_bytes(); }

  // As many bytes of words make a message no shorter than its elements.
  int64_t too_many() const { return words() < raw_bytes() ? raw_bytes() - words() : 0; }

 private:
  static int64_t filled(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

inline RansShape rans_shape(const fl_spec &spec) { return {spec.numel, spec.param[0]}; }

// An element's 16 bits with the exponent, for f32 the upper half, as symbol and byte. f16 has five bits of exponent: its
// upper byte is the symbol.
inline uint32_t rans_symbol(uint32_t dtype, uint32_t half) { return dtype == FL_F16 ? half >> 8 : half >> 7 & 255; }
inline uint32_t rans_byte(uint32_t dtype, uint32_t half) {
  return dtype == FL_F16 ? half & 255 : zip_byte(dtype, half);
}
inline uint32_t rans_half(uint32_t dtype, uint32_t symbol, uint32_t byte) {
  return dtype == FL_F16 ? symbol << 8 | byte : zip_half(dtype, symbol, byte, 0);
}

// Frequencies that add up to kRansTotal, at least 1 for each symbol that occurs. If rounding down leaves some over, these
// go to the symbols that lost most by rounding. If rare symbols, raised to 1, take too many, the most frequent symbols
// give these. Among equals the smallest symbol comes first.
inline void rans_frequencies(const int64_t *counts, int64_t total, uint16_t *frequencies) {
  int64_t lost[kRansSymbols];
  int64_t left = kRansTotal;
  for (int s = 0; s < kRansSymbols; ++s) {
    const int64_t share = counts[s] * kRansTotal / total;
    frequencies[s] = uint16_t(counts[s] && !share ? 1 : share);
    lost[s] = counts[s] && share ? counts[s] * kRansTotal % total : -1;
    left -= frequencies[s];
  }
  for (; left > 0; --left) {
    int best = 0;
    for (int s = 1; s < kRansSymbols; ++s)
      if (lost[s] > lost[best]) best = s;
    ++frequencies[best];
    lost[best] = -1;
  }
  for (; left < 0; ++left) {
    int best = 0;
    for (int s = 1; s < kRansSymbols; ++s)
      if (frequencies[s] > frequencies[best]) best = s;
    --frequencies[best];
  }
}

}  // namespace fl
