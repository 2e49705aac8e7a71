// Scalar specification of the `delta` codec: what changed since a base that sender and receiver have, bit for bit;
// docs/wire_format.md has the planes.
//
// The bits of an element, ordered as its values are, make an integer; the message has differences of these integers, in
// blocks. A block tells which elements changed, as a list of places, and the differences of these. A list has the gaps
// between places, in low bits of a width that suits it and the rest in unary (Golomb-Rice). A difference has low bits,
// too; what is above them is told bit by bit, in layers, each with a list of the elements that reach it. So whatever is
// told of an element stands beside the same of its neighbours, and vectors can write and read it.
#pragma once

#include "fusionlayer_codec.h"
#include "portable.h"

namespace fl {

constexpr int kDeltaBlock = 16384;                       // elements
constexpr int kDeltaLowBits = 5;                         // of the field that tells how many low bits differences have
constexpr int kDeltaSamples = 256;                       // differences that tell how many they should have, at most
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

  FL_HD int64_t blocks() const { return (numel + kDeltaBlock - 1) / kDeltaBlock; }
  FL_HD int in_block(int64_t block) const {
    const int64_t left = numel - block * kDeltaBlock;
    return left < kDeltaBlock ? int(left) : kDeltaBlock;
  }
  FL_HD int64_t index_bytes() const { return 2 * blocks(); }
  FL_HD int64_t raw_bytes() const { return numel * element_bytes; }
  FL_HD int64_t data_bytes() const { return index_bytes() > raw_bytes() ? index_bytes() : raw_bytes(); }

  // Bytes of a block's elements, and of what an entry of the index stands for.
  FL_HD int block_bytes(int64_t block) const { return in_block(block) * element_bytes; }
  FL_HD int told_bytes(int64_t block, uint32_t entry) const {
    return entry == kDeltaWhole ? block_bytes(block) : int(entry);
  }

  // As many bits make a block no shorter than its elements, or longer than an entry can tell.
  FL_HD int too_many_bits(int n) const {
    const int whole = n * element_bytes;
    return 8 * (whole < int(kDeltaWhole) ? whole : int(kDeltaWhole));
  }

  // As many bytes of blocks make a message no shorter than its elements.
  FL_HD int64_t too_many() const { return index_bytes() < raw_bytes() ? raw_bytes() - index_bytes() : 0; }
};

inline DeltaShape delta_shape(const fl_spec &spec) { return {spec.numel, spec.dtype == FL_F32 ? 4 : 2}; }

// The best number of low bits for `count` numbers of a geometric distribution that add up to `total` (Kiely, JPL IPN
// progress report 42-159): 0.4812 * (mean + 1/2) < 2^bits.
FL_HD int delta_low_bits(int64_t total, int64_t count) {
  int bits = 0;
  while (493 * (2 * total + count) >= (2048 * count) << bits) ++bits;
  return bits;
}

// The bits of a field for numbers up to `most`.
FL_HD int delta_width(uint32_t most) {
#if defined(__CUDA_ARCH__)
  return 32 - __clz(int(most));
#else
  return most ? 32 - __builtin_clz(most) : 0;
#endif
}

// The most bits of a list's gaps in unary.
FL_HD int delta_most_unary(int n, int count, int low_bits) { return count + ((n - count) >> low_bits); }

// Bits of a difference with as many low bits: a one for each layer that it reaches, a zero, and what layers tell of it.
FL_HD int delta_cost(uint32_t value, int low_bits) { return low_bits + 2 * delta_width((value >> low_bits) + 1) - 1; }

// The most low bits of differences of elements of so many bytes.
FL_HD int delta_most_low_bits(int element_bytes) { return 8 * element_bytes - 1; }

// The number of low bits from 1 on behind which costs, a function of it, no longer fall.
template <class Cost>
FL_HD int delta_best_low_bits(int most, const Cost &cost) {
  int best = 1;
  for (int64_t least = cost(best); best < most; ++best) {
    const int64_t next = cost(best + 1);
    if (next >= least) break;
    least = next;
  }
  return best;
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
