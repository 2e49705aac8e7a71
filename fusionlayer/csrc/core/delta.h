// Scalar specification of the `delta` codec: what changed since a base that sender and receiver have, bit for bit;
// docs/wire_format.md has the planes.
//
// The bits of an element, ordered as its values are, make an integer; the message has differences of these integers, in
// blocks. A block tells which elements changed, by the gaps between them, and the differences of these. A gap has low
// bits of a width that suits its block, and the rest of it in unary (Golomb-Rice). So has a difference, but its unary
// part is written in layers: which elements reach 1, which of these reach 2, ... Each layer is told by gaps again.
#pragma once

#include "fusionlayer_codec.h"
#include "portable.h"

namespace fl {

constexpr int kDeltaBlock = 16384;                       // elements
constexpr int kDeltaLayers = 7;                          // of a difference, at most; what they leave has one width
constexpr int kDeltaFront = 4;                           // bytes before a block's sizes of layers
constexpr uint32_t kDeltaWhole = 0xffff;                 // in the index: a block of elements as they are
constexpr int64_t kDeltaMaxElements = int64_t(1) << 30;  // a message has less
enum { kDeltaRaw = 0, kDeltaCoded = 1 };

// Plane 0.
struct DeltaHead {
  uint32_t form, rest;    // bytes behind the index
  uint32_t base, result;  // digests of what the message is added to, and of what it makes of that
};

// The parts of plane 1: an index, u16 bytes of each block, 0 if nothing changed, and the blocks; or the elements.
struct DeltaShape {
  int64_t numel;
  int element_bytes;

  int64_t blocks() const { return (numel + kDeltaBlock - 1) / kDeltaBlock; }
  int in_block(int64_t block) const {
    const int64_t left = numel - block * kDeltaBlock;
    return left < kDeltaBlock ? int(left) : kDeltaBlock;
  }
  int64_t index_bytes() const { return 2 * blocks(); }
  int64_t raw_bytes() const { return numel * element_bytes; }
  int64_t data_bytes() const { return index_bytes() > raw_bytes() ? index_bytes() : raw_bytes(); }

  // As many bytes of blocks make a message no shorter than its elements.
  int64_t too_many() const { return index_bytes() < raw_bytes() ? raw_bytes() - index_bytes() : 0; }
};

inline DeltaShape delta_shape(const fl_spec &spec) { return {spec.numel, spec.dtype == FL_F32 ? 4 : 2}; }

// Where more elements of a block change, all are told, without places. Less than n.
inline int delta_most_places(int n) { return n - 1 - n / 4; }

// The best number of low bits for `count` numbers of a geometric distribution that add up to `total` (Kiely, JPL IPN
// progress report 42-159): 0.4812 * (mean + 1/2) < 2^bits.
FL_HD int delta_low_bits(int64_t total, int64_t count) {
  int bits = 0;
  while (493 * (2 * total + count) >= (2048 * count) << bits) ++bits;
  return bits;
}

// Bits of `count` of n elements told by gaps, at most; a byte is begun.
FL_HD int64_t delta_list_bits(int n, int count) {
  const int low = delta_low_bits(n - count, count);
  return 16 + int64_t(count) * (low + 1) + ((n - count) >> low);
}

// The bits of an element as an integer that is ordered as the values are; the same function takes it back.
template <class T, class Signed>
FL_HD T delta_ordered(T bits) {
  return T(bits ^ (T(Signed(bits) >> (8 * sizeof(T) - 1)) >> 1));
}

// A difference modulo the type's range as a number that is small where the difference is: 0, -1, 1, -2, 2, ...
template <class T, class Signed>
FL_HD T delta_folded(T x, T base) {
  const T difference = T(delta_ordered<T, Signed>(x) - delta_ordered<T, Signed>(base));
  return T(T(difference << 1) ^ T(Signed(difference) >> (8 * sizeof(T) - 1)));
}
template <class T, class Signed>
FL_HD T delta_unfolded(T folded, T base) {
  const T difference = T(T(folded >> 1) ^ T(0 - (folded & 1)));
  return delta_ordered<T, Signed>(T(delta_ordered<T, Signed>(base) + difference));
}

// A digest is the sum of its blocks' checksums, each mixed with the block's place.
FL_HD uint32_t delta_mixed(uint32_t crc, int64_t block) {
  uint32_t h = crc + uint32_t(block) * 0x9e3779b9u;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

}  // namespace fl
