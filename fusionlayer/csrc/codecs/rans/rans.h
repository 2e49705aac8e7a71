// Scalar specification of the `rans` codec: exponents by interleaved rANS (Duda, arXiv 1311.2540) with one table of
// frequencies for a message, all other bits as they are; docs/wire_format.md has the planes.
//
// Each block of elements is coded by itself, by 32 states that share one stream of 16-bit words. They are the lanes of a
// warp: of each row of 256 elements a state has eight in a row, as a lane does that reads them at once. In each of eight turns
// every state takes one symbol, and then, in the order of the states, a word if it needs one. The encoder goes backwards. A
// state has to begin somewhere between 2^16 and 2^17; in a whole block it begins with two bytes of its last row.
#pragma once

#include "codecs/zip/zip.h"
#include "floats.h"
#include "fusionlayer_codec.h"

namespace fl {

constexpr int kRansLanes = 32;
constexpr int kRansTurns = 8;  // symbols of a row that a state has
constexpr int kRansRow = kRansLanes * kRansTurns;
constexpr int kRansBlock = 16384;  // elements whose states are told
constexpr int kRansBits = 12;      // frequencies add up to 1 << kRansBits
constexpr uint32_t kRansTotal = 1u << kRansBits;
constexpr uint32_t kRansFirst = 1u << 16;  // a state's first value, and the smallest between two symbols
constexpr int kRansSymbols = 256;
constexpr int kRansCarried = 2;  // bytes of a whole block's last row with which a state begins
constexpr int kRansBlockBytes = kRansBlock - kRansCarried * kRansLanes;  // of a whole block that are told

// The parts of plane 1: frequencies, ends of blocks, states, bytes, for f32 the lower halves, then words; or the elements
// as they are. Plane 0 is a ZipHead with the bytes of the words in place of escapes.
struct RansShape {
  int64_t numel;
  uint32_t dtype;  // of the elements that were encoded

  FL_HD int64_t blocks() const { return (numel + kRansBlock - 1) / kRansBlock; }
  FL_HD int in_block(int64_t block) const {
    const int64_t left = numel - block * kRansBlock;
    return left < kRansBlock ? int(left) : kRansBlock;
  }
  FL_HD bool is_whole(int64_t block) const { return in_block(block) == kRansBlock; }
  FL_HD int low_bytes() const { return dtype == FL_F32 ? 2 : 0; }
  FL_HD int element_bytes() const { return dtype == FL_F32 ? 4 : 2; }

  // Offsets in plane 1.
  static FL_HD int64_t ends() { return kRansSymbols * 2; }
  FL_HD int64_t states() const { return filled(ends() + 4 * blocks()); }
  FL_HD int64_t bytes() const { return states() + 4 * kRansLanes * blocks(); }
  FL_HD int64_t low() const { return bytes() + filled(told_bytes()); }
  FL_HD int64_t words() const { return low() + filled(low_bytes() * numel); }
  FL_HD int64_t raw_bytes() const { return numel * element_bytes(); }
  FL_HD int64_t data_bytes() const { return words() > raw_bytes() ? words() : raw_bytes(); }

  FL_HD int64_t told_bytes() const { return numel - numel / kRansBlock * (kRansBlock - kRansBlockBytes); }

  // As many bytes of words make a message no shorter than its elements.
  FL_HD int64_t too_many() const { return words() < raw_bytes() ? raw_bytes() - words() : 0; }

  // Whether a head tells of words that a message may have.
  FL_HD bool coded(const ZipHead &head) const {
    return head.form == kZipCoded && head.escapes < too_many() && head.escapes % 2 == 0;
  }

  // The words of a block among those of a message.
  struct Span {
    uint32_t begin, end;
    bool exists;
  };
  FL_HD Span span(const ZipHead &head, const uint8_t *data, int64_t block) const {
    const uint32_t *all = reinterpret_cast<const uint32_t *>(data + ends()), words = head.escapes / 2;
    const uint32_t begin = block ? all[block - 1] : 0, end = all[block];
    return {begin, end, begin <= end && end <= words && (block < blocks() - 1 || end == words)};
  }

 private:
  static FL_HD int64_t filled(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

inline RansShape rans_shape(const fl_spec &spec) { return {spec.numel, spec.param[0]}; }

// An element's 16 bits with the exponent, for f32 the upper half, as symbol and byte. f16 has five bits of exponent: its
// upper byte is the symbol.
FL_HD uint32_t rans_symbol(uint32_t dtype, uint32_t half) { return dtype == FL_F16 ? half >> 8 : half >> 7 & 255; }
FL_HD uint32_t rans_byte(uint32_t dtype, uint32_t half) { return dtype == FL_F16 ? half & 255 : zip_byte(dtype, half); }
FL_HD uint32_t rans_half(uint32_t dtype, uint32_t symbol, uint32_t byte) {
  return dtype == FL_F16 ? symbol << 8 | byte : zip_half(dtype, symbol, byte, 0);
}

// Frequencies ---------------------------------------------------------------------------------------------------------

// They add up to kRansTotal, and are at least 1 for each symbol that occurs. If rounding down leaves some over, these go to
// the symbols that lost most by rounding. If rare symbols, raised to 1, take too many, the most frequent symbols give
// these. Among equals the smallest symbol comes first.
struct RansShare {
  uint32_t frequency;
  int64_t lost;  // by rounding; -1: of those left over it gets none
};

FL_HD RansShare rans_share(int64_t count, int64_t total) {
  // A long division: on a device one by the compiler would be a call.
  uint32_t share = 0;
  int64_t rest = count * kRansTotal;
  for (int bit = kRansBits; bit >= 0; --bit)
    if (total << bit <= rest) {
      rest -= total << bit;
      share |= 1u << bit;
    }
  return {count && !share ? 1 : share, share ? rest : -1};
}

inline void rans_frequencies(const int64_t *counts, int64_t total, uint16_t *frequencies) {
  RansShare shares[kRansSymbols];
  int64_t left = kRansTotal;
  for (int s = 0; s < kRansSymbols; ++s) {
    shares[s] = rans_share(counts[s], total);
    left -= shares[s].frequency;
  }
  for (; left > 0; --left) {
    RansShare *best = shares;
    for (RansShare &share : shares)
      if (share.lost > best->lost) best = &share;
    ++best->frequency;
    best->lost = -1;
  }
  for (; left < 0; ++left) {
    RansShare *best = shares;
    for (RansShare &share : shares)
      if (share.frequency > best->frequency) best = &share;
    --best->frequency;
  }
  for (int s = 0; s < kRansSymbols; ++s) frequencies[s] = uint16_t(shares[s].frequency);
}

// States --------------------------------------------------------------------------------------------------------------

// What encoding a symbol needs. x / frequency is x * inverse >> 32 + shift, where the inverse, 2^(32 + shift) / frequency
// rounded up, has 33 bits: it is too large by less than one, and x < 2^20 * frequency, so the product is by less than
// 2^(32 + shift) / frequency.
struct alignas(16) RansSymbol {
  uint32_t inverse;  // its lower 32 bits
  uint32_t most;     // from which value on a word leaves the state first: 2^20 * frequency, or no state has it
  uint32_t others;   // kRansTotal - frequency
  uint32_t start;    // the sum of the frequencies of smaller symbols, above 5 bits of shift
};

FL_HD RansSymbol rans_entry(uint32_t frequency, uint32_t start) {
  if (!frequency) return {0, 0, 0, 0};
  uint32_t shift = 0;
  while (1u << shift < frequency) ++shift;
  const uint64_t inverse = ((uint64_t(1) << (32 + shift)) + frequency - 1) / frequency;
  return {uint32_t(inverse), frequency < kRansTotal ? frequency << 20 : ~0u, kRansTotal - frequency,
          start << 5 | shift};
}

// What a state begins with, with two bytes or without, and whether it is one.
FL_HD uint32_t rans_first(uint32_t byte, uint32_t next) { return kRansFirst | next << 8 | byte; }
FL_HD bool is_rans_first(uint32_t x, bool carries) { return carries ? x >> 16 == 1 : x == kRansFirst; }

FL_HD bool rans_full(const RansSymbol &symbol, uint32_t x) { return x >= symbol.most; }

FL_HD uint32_t rans_pushed(const RansSymbol &symbol, uint32_t x) {
  const uint32_t product = uint32_t((uint64_t(x) * symbol.inverse + (uint64_t(x) << 32)) >> 32);
#if defined(__CUDA_ARCH__)
  const uint32_t quotient = __funnelshift_r(product, 0, symbol.start);  // by its lowest five bits
#else
  const uint32_t quotient = product >> (symbol.start & 31);
#endif
  return quotient * symbol.others + x + (symbol.start >> 5);
}

// For a value of a state's low bits: its symbol, how far behind the symbol's first it is, and the frequency less 1.
FL_HD uint32_t rans_slot(uint32_t symbol, uint32_t behind, uint32_t frequency) {
  return symbol | behind << 8 | (frequency - 1) << 20;
}

// The state without its symbol, of which this is the slot. Below kRansFirst it takes a word.
FL_HD uint32_t rans_popped(uint32_t slot, uint32_t x) {
  return ((slot >> 20) + 1) * (x >> kRansBits) + (slot >> 8 & (kRansTotal - 1));
}

}  // namespace fl
