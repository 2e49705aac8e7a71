// Counter-based randomness: a value is a pure function of (seed, element number), whatever the launch shape, sharding or
// device. Philox4x32-10 (Salmon et al., SC 2011) makes the key once per call; a two-multiply mixer with the key injected
// twice turns the element number into 32 bits. The numbers are spread out by an odd factor first: mixed as they come,
// neighbours would be far from independent. (Kernels that walk through elements add the factor instead.)
#pragma once

#include "portable.h"

namespace fl {

struct RngKey {
  uint32_t a, b, c;
};

inline void philox4x32(uint32_t counter[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xd2511f53u) * counter[0];
    const uint64_t p1 = uint64_t(0xcd9e8d57u) * counter[2];
    const uint32_t c0 = uint32_t(p1 >> 32) ^ counter[1] ^ k0, c2 = uint32_t(p0 >> 32) ^ counter[3] ^ k1;
    counter[1] = uint32_t(p1);
    counter[3] = uint32_t(p0);
    counter[0] = c0;
    counter[2] = c2;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
}

inline RngKey make_key(uint64_t seed) {
  uint32_t c[4] = {0, 0, 0, 0};
  philox4x32(c, uint32_t(seed), uint32_t(seed >> 32));
  return {c[0], c[1], c[2] | 1u};
}

// The key of a run of elements whose numbers share their upper 32 bits (a group never straddles one).
FL_HD RngKey key_at(RngKey key, uint64_t element) {
  const uint32_t high = uint32_t(element >> 32);
  return {key.a ^ (high * 0x9e3779b9u), key.b + high * key.c, key.c};
}

// The same, for numbers that rarely reach 2^32.
FL_HD RngKey near_key(RngKey key, uint64_t element) { return element >> 32 ? key_at(key, element) : key; }

constexpr uint32_t kSpread = 0x9e3779b1u;

// 32 random bits of element number `low` (lower 32 bits; the upper ones are in the key).
FL_HD uint32_t random_bits(RngKey key, uint32_t low) {
  uint32_t h = low * kSpread + key.a;
  h ^= h >> 16;
  h *= 0x7feb352du;
  h = (h ^ (h >> 15)) + key.b;
  h *= 0x846ca68bu;
  return h ^ (h >> 16);
}

// 16 random bits are enough for a rounding: elements i and i + 16 of a run of 32 share the bits of the first one's number. It
// takes the low half of them, the other one the high half.
constexpr uint32_t kNoisePair = 16;

FL_HD uint32_t half_of_bits(uint32_t bits, bool second) { return second ? bits >> 16 : bits & 0xffffu; }

// What stochastic rounding of `qsdp` adds before rounding to nearest: uniform on the 2^23 multiples of 2^-23 in [-0.5, 0.5).
FL_HD float rounding_noise(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return bits_float(__funnelshift_r(bits, 0x7fu, 9)) - 1.5f;  // the same bits in one step
#else
  return bits_float((bits >> 9) | 0x3f800000u) - 1.5f;
#endif
}

}  // namespace fl
