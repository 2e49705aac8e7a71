// The `onebit` codec (codecs/onebit/onebit.h) on vectors: one pass takes signs and adds magnitudes up.
#pragma once

#include "cpu/elements.h"
#include "cpu/kernels.h"
#include "onebit.h"

namespace fl::FL_ISA {

// Bit i: the sign of value i.
FL_INLINE uint32_t sign_mask(const Block &b) {
  uint32_t mask = 0;
  for (int j = 0; j < kVectors; ++j) mask |= greater_mask(vi{}, (vi)b.v[j]) << (j * kLanes);
  return mask;
}

// Value i is `minus` where bit i of the mask is set, else `plus`.
template <int... I>
FL_INLINE Block with_signs(uint32_t mask, vf plus, vf minus, Lanes<I...>) {
  Block b;
  for (int j = 0; j < kVectors; ++j) {
#if defined(FL_AVX512)
    b.v[j] = _mm512_mask_mov_ps(plus, __mmask16(mask >> j * kLanes), minus);
#else
    const vi bit = vi{(1 << I)...};
    b.v[j] = (broadcast(int32_t(mask >> j * kLanes)) & bit) == bit ? minus : plus;
#endif
  }
  return b;
}

class OneBitCodec {
 public:
  struct Message {
    float *scales;
    uint8_t *signs;
  };

  static constexpr bool kCanonical = true;

  explicit OneBitCodec(const Job &job) : group_(int(job.spec->param[1])) {}

  int unit() const { return group_; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    return {reinterpret_cast<float *>(plane(0)) + unit, plane(1) + unit * (group_ / 8)};
  }

  template <class T>
  FL_NOINLINE void encode(const T *x, int n, Message out, int64_t, Ahead ahead) const {
    const int group = group_;
    for (int begin = 0; begin < n; begin += group, x += group, ++out.scales, out.signs += group / 8) {
      const int count = n - begin < group ? n - begin : group;
      *out.scales = encode_group(x, count, out.signs, ahead);
      if (!is_finite(*out.scales)) __builtin_memset(out.signs, 0, size_t(count + 7) / 8);
    }
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    const int group = group_;
    for (int begin = 0; begin < n; begin += group, ++in.scales) {
      const float scale = *in.scales, nan = bits_float(kF32Nan);
      const bool finite = is_finite(scale);
      const vf plus = broadcast(finite ? scale : nan), minus = broadcast(finite ? -scale : nan);
      const int stop = n - begin < group ? n : begin + group;
      for (int i = begin; i < stop; i += kBlock, in.signs += kBlock / 8) {
        uint32_t mask = 0;
        if (__builtin_expect(stop - i >= kBlock, 1))
          __builtin_memcpy(&mask, in.signs, sizeof mask);
        else
          __builtin_memcpy(&mask, in.signs, size_t(stop - i + 7) / 8);
        sink(i, with_signs(mask, plus, minus, AllLanes{}));
      }
    }
  }

 private:
  // Writes the signs of `count` values, which zeros follow up to a whole block, and returns their scale.
  template <class T>
  FL_INLINE float encode_group(const T *x, int count, uint8_t *signs, Ahead &ahead) const {
    vd sums[2 * kVectors] = {};
    for (int i = 0; i < count; i += kBlock, signs += kBlock / 8) {
      ahead.fetch(kBlock * int(sizeof(T)) / 64);
      const Block b = load_block(x + i);
      for (int j = 0; j < kVectors; ++j) {
        vd wide[2];
        widen((vf)magnitude_bits(b.v[j]), wide);
        sums[2 * j] += wide[0];
        sums[2 * j + 1] += wide[1];
      }
      const uint32_t mask = sign_mask(b);
      if (__builtin_expect(count - i >= kBlock, 1))
        __builtin_memcpy(signs, &mask, sizeof mask);
      else
        __builtin_memcpy(signs, &mask, size_t(count - i + 7) / 8);
    }
    alignas(64) double lanes[kOneBitLanes];
    for (int j = 0; j < 2 * kVectors; ++j) store(lanes + j * (kLanes / 2), sums[j]);
    return onebit_scale(onebit_sum(lanes), count);
  }

  const int group_;
};

}  // namespace fl::FL_ISA
