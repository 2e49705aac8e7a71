// Runs of 32 codes of the small formats (codecs/block/formats.h, kCodeRun of codecs/block/block_scale.h) on vectors.
#pragma once

#include "block_scale.h"
#include "cpu/elements.h"

namespace fl::FL_ISA {

// float_code of codecs/block/formats.h, and its inverse by way of f16, which holds every value of these formats times a power of two.
template <uint32_t kFormat>
struct FloatLanes {
  static constexpr FloatFormat kNumber = float_format(kFormat);
  static constexpr int kSign = 1 << (kNumber.bits - 1);

  static FL_INLINE vi codes(vf v) {
    constexpr FloatRounding kRounding = float_rounding(kNumber);
    const vi a = magnitude_bits(v);
    const vi exponent = max(a & int32_t(kF32Inf), broadcast(kRounding.least));
    const vi base = exponent + kRounding.step;
    const vi steps = (vi)((vf)a + (vf)base) - base;
    const vi magnitude = ((exponent - kRounding.least) >> kRounding.shift) + steps;
    return min(magnitude, broadcast(int32_t(kNumber.top))) | ((vi)v >> 31 & kSign);
  }

  static constexpr uint16_t kMagnitude = kSign - 1;
  // Whether the format has a NaN that is none as f16.
  static constexpr bool kOwnNan = kFormat == FL_E4M3;

  // The values divided by `unit`. Codes of E4M3 are signed; the caller may know that none of them is a NaN.
  template <bool kNans = kOwnNan>
  static FL_INLINE Block in_units(vh (&codes)[kHalfVectors]) {
    for (vh &h : codes) {
      if constexpr (kFormat == FL_E5M2) {
        h <<= 8;
      } else if constexpr (kFormat == FL_E4M3) {
        const vh moved = (h << 7) & uint16_t(0xbfff);  // without the copy of the sign beside the exponent
        h = kNans && (h & kMagnitude) == kMagnitude ? kF16Nan - vh{} : moved;
      } else {
        h = (h & kMagnitude) << (10 - kNumber.mantissa) | (h & uint16_t(kSign)) << (16 - kNumber.bits);
      }
    }
    return f16_to_f32(codes);
  }
  static float unit() { return bits_float(uint32_t(127 + 15 - kNumber.bias) << 23); }

  static FL_INLINE Block values(vh (&codes)[kHalfVectors]) {
    Block b = in_units(codes);
    for (vf &v : b.v) v *= unit();
    return b;
  }
};

// encode writes the codes of 32 values times `inverse`, kBytes of them; decode reads such a run, as multiples of `unit`: a power
// of two that scales can take in, so that no value is multiplied twice.

template <uint32_t kFormat>
class Float8 {
  using Lanes = FloatLanes<kFormat>;

 public:
  static constexpr int kBytes = 32;

  static FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) {
    for (int i = 0; i < kBlock; i += 16) {
      vi codes[kQuad];
      for (int j = 0; j < kQuad; ++j) codes[j] = Lanes::codes(load(values + i + j * kLanes) * inverse);
      store_low_bytes(bytes + i, codes);
    }
  }

  static constexpr bool kOwnNan = Lanes::kOwnNan;

  template <bool kNans = kOwnNan>
  static FL_INLINE Block decode(const uint8_t *bytes) {
    vh codes[kHalfVectors];
    if constexpr (kOwnNan)
      load_signed_bytes(bytes, codes);
    else
      widen_bytes(load_bytes16(bytes), load_bytes16(bytes + 16), codes);
    return Lanes::template in_units<kNans>(codes);
  }

  // Whether there is a NaN of the format's own among `count` bytes, a multiple of 32.
  static FL_INLINE bool has_nan(const uint8_t *bytes, int count) {
    return count % 64 ? find_nan<32>(bytes, count) : find_nan<64>(bytes, count);
  }

  static float unit() { return Lanes::unit(); }

 private:
  template <int kWidth>
  static FL_INLINE bool find_nan(const uint8_t *bytes, int count) {
    typedef uint8_t Codes __attribute__((vector_size(kWidth)));
    Codes most{};
    for (int i = 0; i < count; i += kWidth) {
      Codes magnitudes;
      __builtin_memcpy(&magnitudes, bytes + i, kWidth);
      magnitudes &= uint8_t(Lanes::kMagnitude);
      most = magnitudes > most ? magnitudes : most;
    }
    most += uint8_t(1);  // the largest magnitude is the NaN, and alone becomes kSign
    uint64_t parts[kWidth / 8], any = 0;
    __builtin_memcpy(parts, &most, kWidth);
    for (const uint64_t part : parts) any |= part;
    return any & 0x0101010101010101u * Lanes::kSign;
  }
};

class Int8 {
 public:
  static constexpr int kBytes = 32;
  static constexpr bool kOwnNan = false;

  static float unit() { return 1.0f; }

  static FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) {
    for (int i = 0; i < kBlock; i += 16) {
      vi codes[kQuad];  // round_even of core/int_group.h; what lies above the low bytes is dropped
      for (int j = 0; j < kQuad; ++j) codes[j] = (vi)(load(values + i + j * kLanes) * inverse + 12582912.0f);
      store_low_bytes(bytes + i, codes);
    }
  }

  template <bool = kOwnNan>
  static FL_INLINE Block decode(const uint8_t *bytes) {
    Block b;
    for (int i = 0; i < 2; ++i) {
      vi codes[kQuad];
      load_bytes(bytes + 16 * i, codes);
      for (int j = 0; j < kQuad; ++j) b.v[i * kQuad + j] = __builtin_convertvector(codes[j], vf);
    }
    return b;
  }
};

template <uint32_t kFormat>
class Float6 {
  using Lanes = FloatLanes<kFormat>;

 public:
  static constexpr int kBytes = 24;
  static constexpr bool kOwnNan = false;

  static float unit() { return 1.0f; }

  static FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) {
    vi low[kQuad], high[kQuad];
    for (int j = 0; j < kQuad; ++j) {
      const vi a = Lanes::codes(load(values + j * kLanes) * inverse);
      const vi b = Lanes::codes(load(values + 16 + j * kLanes) * inverse);
      low[j] = (a & 15) | (b & 15) << 4;
      high[j] = a >> 4 | b >> 4 << 4;
    }
    store_low_bytes(bytes, low);
    alignas(16) uint8_t pairs[16];
    store_low_bytes(pairs, high);
    uint64_t first, second;
    __builtin_memcpy(&first, pairs, 8);
    __builtin_memcpy(&second, pairs + 8, 8);
    first |= second << 2;
    __builtin_memcpy(bytes + 16, &first, 8);
  }

  template <bool = kOwnNan>
  static FL_INLINE Block decode(const uint8_t *bytes) {
    typedef uint64_t Words __attribute__((vector_size(16)));
    uint64_t top;
    __builtin_memcpy(&top, bytes + 16, 8);
    const Bytes16 low = load_bytes16(bytes), high = (Bytes16)Words{top, top >> 2};
    vh codes[kHalfVectors];
    widen_bytes((low & 15) | (high & 3) << 4, low >> 4 | (high & 0x30), codes);
    return Lanes::values(codes);
  }
};

class Float4 {
  using Lanes = FloatLanes<FL_E2M1>;

 public:
  static constexpr int kBytes = 16;
  static constexpr bool kOwnNan = false;

  static float unit() { return 1.0f; }

  static FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) {
    vi codes[kQuad];
    for (int j = 0; j < kQuad; ++j)
      codes[j] = Lanes::codes(load(values + j * kLanes) * inverse) |
                 Lanes::codes(load(values + 16 + j * kLanes) * inverse) << 4;
    store_low_bytes(bytes, codes);
  }

  template <bool = kOwnNan>
  static FL_INLINE Block decode(const uint8_t *bytes) {
#if defined(FL_AVX512)
    // All 16 values fit into a register, which a lane's lowest four bits choose from.
    const vf values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
    return {{_mm512_permutexvar_ps(both, values), _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values)}};
#else
    const Bytes16 both = load_bytes16(bytes);
    vh codes[kHalfVectors];
    widen_bytes(both & 15, both >> 4, codes);
    return Lanes::values(codes);
#endif
  }
};

}  // namespace fl::FL_ISA
