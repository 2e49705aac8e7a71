// Runs of 32 codes of the small formats (core/formats.h, pack_run of core/block_scale.h) on vectors.
#pragma once

#include "block_scale.h"
#include "elements.h"

namespace fl::FL_ISA {

// float_code of core/formats.h, the sign in bit `sign`; and its inverse by way of f16, which holds every value of these
// formats times a power of two.
class FloatLanes {
 public:
  FloatLanes(const FloatFormat &format, uint32_t sign_bit)
      : rounding_(float_rounding(format)),
        top_(int32_t(format.top)),
        sign_(int32_t(sign_bit)),
        magnitude_(uint16_t(sign_bit - 1)),
        to_f16_(10 - format.mantissa),
        sign_to_f16_(15 - (format.bits - 1)),
        nan_(format.top == 0x7e ? uint16_t(0x7f) : uint16_t(0xffff)),
        unit_(bits_float(uint32_t(127 + 15 - format.bias) << 23)) {}

  FL_INLINE vi codes(vf v) const {
    const vi a = magnitude_bits(v);
    const vi exponent = max(a & int32_t(kF32Inf), broadcast(rounding_.least));
    const vi base = exponent + rounding_.step;
    const vi steps = (vi)((vf)a + (vf)base) - base;
    const vi magnitude = ((exponent - rounding_.least) >> rounding_.shift) + steps;
    return min(magnitude, broadcast(top_)) | ((vi)v >> 31 & sign_);
  }

  // The values divided by `unit`.
  FL_INLINE Block in_units(vh (&codes)[kHalfVectors]) const {
    for (vh &h : codes) {
      const vh magnitude = h & magnitude_;
      const vh moved = magnitude << to_f16_ | (h ^ magnitude) << sign_to_f16_;
      h = magnitude == nan_ ? kF16Nan - vh{} : moved;
    }
    return f16_to_f32(codes);
  }
  float unit() const { return unit_; }

  FL_INLINE Block values(vh (&codes)[kHalfVectors]) const {
    Block b = in_units(codes);
    for (vf &v : b.v) v *= unit_;
    return b;
  }

 private:
  FloatRounding rounding_;
  int32_t top_, sign_;
  uint16_t magnitude_;
  int to_f16_, sign_to_f16_;
  uint16_t nan_;
  float unit_;
};

// encode writes the codes of 32 values times `inverse`, kBytes of them; decode reads such a run, as multiples of `unit`: a power
// of two that scales can take in, so that no value is multiplied twice.

class Float8 {
 public:
  static constexpr int kBytes = 32;

  explicit Float8(uint32_t format) : lanes_(float_format(format), 0x80) {}

  FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) const {
    for (int i = 0; i < kBlock; i += 16) {
      vi codes[kQuad];
      for (int j = 0; j < kQuad; ++j) codes[j] = lanes_.codes(load(values + i + j * kLanes) * inverse);
      store_low_bytes(bytes + i, codes);
    }
  }

  FL_INLINE Block decode(const uint8_t *bytes) const {
    vh codes[kHalfVectors];
    widen_bytes(load_bytes16(bytes), load_bytes16(bytes + 16), codes);
    return lanes_.in_units(codes);
  }

  float unit() const { return lanes_.unit(); }

 private:
  FloatLanes lanes_;
};

class Int8 {
 public:
  static constexpr int kBytes = 32;

  float unit() const { return 1.0f; }

  explicit Int8(uint32_t) {}

  FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) const {
    for (int i = 0; i < kBlock; i += 16) {
      vi codes[kQuad];  // round_even of core/int_group.h; what lies above the low bytes is dropped
      for (int j = 0; j < kQuad; ++j) codes[j] = (vi)(load(values + i + j * kLanes) * inverse + 12582912.0f);
      store_low_bytes(bytes + i, codes);
    }
  }

  FL_INLINE Block decode(const uint8_t *bytes) const {
    Block b;
    for (int i = 0; i < 2; ++i) {
      vi codes[kQuad];
      load_bytes(bytes + 16 * i, codes);
      for (int j = 0; j < kQuad; ++j) b.v[i * kQuad + j] = __builtin_convertvector(codes[j], vf);
    }
    return b;
  }
};

class Float6 {
 public:
  static constexpr int kBytes = 24;

  float unit() const { return 1.0f; }

  explicit Float6(uint32_t format) : lanes_(float_format(format), 0x20) {}

  FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) const {
    vi low[kQuad], high[kQuad];
    for (int j = 0; j < kQuad; ++j) {
      const vi a = lanes_.codes(load(values + j * kLanes) * inverse);
      const vi b = lanes_.codes(load(values + 16 + j * kLanes) * inverse);
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

  FL_INLINE Block decode(const uint8_t *bytes) const {
    typedef uint64_t Words __attribute__((vector_size(16)));
    uint64_t top;
    __builtin_memcpy(&top, bytes + 16, 8);
    const Bytes16 low = load_bytes16(bytes), high = (Bytes16)Words{top, top >> 2};
    vh codes[kHalfVectors];
    widen_bytes((low & 15) | (high & 3) << 4, low >> 4 | (high & 0x30), codes);
    return lanes_.values(codes);
  }

 private:
  FloatLanes lanes_;
};

class Float4 {
 public:
  static constexpr int kBytes = 16;

  float unit() const { return 1.0f; }

  explicit Float4(uint32_t format) : lanes_(float_format(format), 8) {}

  FL_INLINE void encode(const float *values, float inverse, uint8_t *bytes) const {
    vi codes[kQuad];
    for (int j = 0; j < kQuad; ++j)
      codes[j] = lanes_.codes(load(values + j * kLanes) * inverse) |
                 lanes_.codes(load(values + 16 + j * kLanes) * inverse) << 4;
    store_low_bytes(bytes, codes);
  }

  FL_INLINE Block decode(const uint8_t *bytes) const {
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
    return lanes_.values(codes);
#endif
  }

 private:
  FloatLanes lanes_;
};

}  // namespace fl::FL_ISA
