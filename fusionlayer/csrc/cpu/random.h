// core/rng.h on vectors.
#pragma once

#include "rng.h"
#include "simd.h"

namespace fl::FL_ISA {

// random_bits of core/rng.h, from low * kSpread + key.a.
FL_INLINE vu random_bits(RngKey key, vu h) {
  h ^= h >> 16;
  h *= 0x7feb352du;
  h = (h ^ (h >> 15)) + key.b;
  h *= 0x846ca68bu;
  return h ^ (h >> 16);
}

}  // namespace fl::FL_ISA
