// core/rng.h on vectors.
#pragma once

#include "elements.h"
#include "rng.h"

namespace fl::FL_ISA {

// random_bits of core/rng.h before its last step, which leaves the upper half as it is, from low * kSpread + key.a.
FL_INLINE vu almost_random_bits(RngKey key, vu h) {
  h ^= h >> 16;
  h *= 0x7feb352du;
  h = (h ^ (h >> 15)) + key.b;
  return h * 0x846ca68bu;
}

FL_INLINE vu random_bits(RngKey key, vu spread) {
  const vu h = almost_random_bits(key, spread);
  return h ^ (h >> 16);
}

// The random bits of core/rng.h for the elements of some numbers and for those 16 further on, from the numbers' spread.
struct Halves {
  vi first, second;
};

FL_INLINE Halves random_halves(RngKey key, vu spread) {
  const vu bits = almost_random_bits(key, spread), upper = bits >> 16;
  return {(vi)((bits ^ upper) & 0xffff), (vi)upper};
}

// rounding_noise of core/rng.h, likewise. The last step's shift and this one's make one of each operand, which saves an
// operation where three operands can be combined in one.
FL_INLINE vf rounding_noise(RngKey key, vu spread) {
  const vu h = almost_random_bits(key, spread);
  return (vf)((h >> 9 ^ h >> 25) | 0x3f800000u) - 1.5f;
}

}  // namespace fl::FL_ISA
