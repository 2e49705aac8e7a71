// The `int` codec (core/int_group.h) on vectors. A tile of whole groups is transformed into L1, its scales are made side
// by side, then its codes.
#pragma once

#include "int_group.h"
#include "kernels.h"
#include "random.h"
#include "simd.h"

namespace fl::FL_ISA {

// rounding_noise of core/rng.h, from low * kSpread + key.a.
FL_INLINE vf rounding_noise(RngKey key, vu spread) {
  return (vf)((random_bits(key, spread) >> 9) | 0x3f800000u) - 1.5f;
}

template <int kBits, bool kHadamard, bool kStochastic>
class IntCodec {
 public:
  struct Message {
    float *scales;
    uint8_t *codes;
  };

  // Every NaN that comes out of decode is the canonical one.
  static constexpr bool kCanonical = true;

  explicit IntCodec(const Job &job) : key_(job.key), offset_(uint64_t(job.spec->offset)), group_(job.spec->param[1]) {}

  int unit() const { return group_; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    return {reinterpret_cast<float *>(plane(0)) + unit, plane(1) + unit * group_bytes()};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t unit) const {
    alignas(64) float tile[kMaxTile], inverse[kMaxGroups];
    vi top[kMaxGroups];
    const int groups = (n + group_ - 1) / group_;
    transform(x, groups, tile, top);
    make_scales(top, groups, out.scales, inverse);
    for (int g = 0; g < groups; ++g) {
      float *values = tile + g * group_;
      if (__builtin_expect(inverse[g] == 0.0f, 0)) __builtin_memset(values, 0, group_ * sizeof(float));
      const uint64_t first = offset_ + uint64_t(unit + g) * group_;
      quantize(values, inverse[g], key_at(key_, first), uint32_t(first), out.codes + g * group_bytes());
    }
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    for (int begin = 0; begin < n; begin += group_, ++in.scales, in.codes += group_bytes()) {
      const vf scale = broadcast(decode_scale(*in.scales, kHadamard));
      if (kBits == 8 || group_ == kBlock) {
        for (int i = 0; i < group_; i += kBlock) {
          vi low[kQuad], high[kQuad];
          load_bytes(in.codes + i, low);
          if (kBits == 8)
            load_bytes(in.codes + i + 16, high);
          else
            split_nibbles(low, low, high);
          Block b[] = {to_float(low, high)};
          scale_blocks(b, scale);
          sink(begin + i, b[0]);
        }
      } else {
        const int half = group_ / 2;
        for (int i = 0; i < half; i += kBlock) {
          vi low[2][kQuad], high[2][kQuad];
          for (int k = 0; k < 2; ++k) {
            load_bytes(in.codes + i + 16 * k, low[k]);
            split_nibbles(low[k], low[k], high[k]);
          }
          Block b[] = {to_float(low[0], low[1]), to_float(high[0], high[1])};
          scale_blocks(b, scale);
          sink(begin + i, b[0]);
          sink(begin + half + i, b[1]);
        }
      }
    }
  }

 private:
  static constexpr int kMaxGroups = kMaxTile / kBlock;
  static constexpr int kSideBySide = kLanes / 4;  // blocks in 8 registers

  int group_bytes() const { return group_ * kBits / 8; }

  static FL_INLINE void split_nibbles(const vi (&bytes)[kQuad], vi (&low)[kQuad], vi (&high)[kQuad]) {
    for (int j = 0; j < kQuad; ++j) {
      high[j] = bytes[j] >> 4;
      low[j] = bytes[j] << 28 >> 28;
    }
  }

  static FL_INLINE Block to_float(const vi (&first)[kQuad], const vi (&second)[kQuad]) {
    Block b;
    for (int j = 0; j < kQuad; ++j) {
      b.v[j] = __builtin_convertvector(first[j], vf);
      b.v[j + kQuad] = __builtin_convertvector(second[j], vf);
    }
    return b;
  }

  template <int N>
  static FL_INLINE void scale_blocks(Block (&b)[N], vf scale) {
    if constexpr (kHadamard) hadamard(b);
    for (Block &block : b)
      for (vf &v : block.v) v *= scale;
  }

  // Fills the tile, and for each group a vector that holds the largest magnitude in some lane.
  template <class T>
  FL_INLINE void transform(const T *x, int groups, float *tile, vi *top) const {
    for (int g = 0; g < groups; ++g, x += group_, tile += group_) {
      if (group_ >= kSideBySide * kBlock) {
        top[g] = transform_blocks<kSideBySide>(x, tile);
        for (int i = kSideBySide * kBlock; i < group_; i += kSideBySide * kBlock)
          top[g] = max(top[g], transform_blocks<kSideBySide>(x + i, tile + i));
      } else {
        top[g] = vi{};
        for (int i = 0; i < group_; i += kBlock) top[g] = max(top[g], transform_blocks<1>(x + i, tile + i));
      }
    }
  }

  template <int N, class T>
  static FL_INLINE vi transform_blocks(const T *x, float *tile) {
    Block b[N];
    for (int k = 0; k < N; ++k) b[k] = load_block(x + k * kBlock);
    if constexpr (kHadamard) hadamard(b);
    for (int k = 0; k < N; ++k) store_block(tile + k * kBlock, b[k]);
    vi top[N * kVectors];
    for (int j = 0; j < N * kVectors; ++j) top[j] = magnitude_bits(b[j / kVectors].v[j % kVectors]);
    for (int width = N * kVectors / 2; width > 0; width /= 2)
      for (int j = 0; j < width; ++j) top[j] = max(top[j], top[j + width]);
    return top[0];
  }

  // make_scale of core/int_group.h for every group.
  static FL_INLINE void make_scales(vi *top, int groups, float *scales, float *inverse) {
    constexpr float qmax = int_qmax(kBits);
    for (int g = groups; g % kLanes; ++g) top[g] = vi{};
    for (int g = 0; g < groups; g += kLanes) {
      const vi bits = max_of_each(top + g);
      const vi not_finite = bits >= int32_t(kF32Inf), usual = ~not_finite & (bits >= int32_t(kTinyBits));
      const vi scale = ((vi)((vf)bits / qmax) & usual) | (int32_t(kF32Nan) & not_finite);
      store(inverse + g, (vf)((vi)(qmax / (vf)bits) & usual));
      if (groups - g >= kLanes)
        store(scales + g, (vf)scale);
      else
        __builtin_memcpy(scales + g, &scale, size_t(groups - g) * sizeof(float));
    }
  }

  // The codes of 16 values in the low bits of the lanes; the bits above are not zero. `spread` is that of the element
  // numbers of the first lanes.
  static FL_INLINE void round16(const float *values, float inverse, RngKey key, vu spread, vi (&codes)[kQuad]) {
    for (int j = 0; j < kQuad; ++j) {
      vf v = load(values + j * kLanes) * inverse;
      if constexpr (kStochastic) v = clamp(v + rounding_noise(key, spread + j * kLanes * kSpread), int_qmax(kBits));
      codes[j] = (vi)(v + 12582912.0f);  // round_even of core/int_group.h; without noise no code exceeds qmax
    }
  }

  FL_INLINE void quantize(const float *values, float inverse, RngKey key, uint32_t first, uint8_t *codes) const {
    vu spread = (iota() + first) * kSpread + key.a;
    vi low[kQuad], high[kQuad];
    if constexpr (kBits == 8) {
      for (int i = 0; i < group_; i += 16, spread += 16 * kSpread) {
        round16(values + i, inverse, key, spread, low);
        store_low_bytes(codes + i, low);
      }
    } else {
      const int half = group_ / 2;
      for (int i = 0; i < half; i += 16, spread += 16 * kSpread) {
        round16(values + i, inverse, key, spread, low);
        round16(values + half + i, inverse, key, spread + half * kSpread, high);
        for (int j = 0; j < kQuad; ++j) low[j] = (low[j] & 15) | (high[j] << 4 & 0xf0);
        store_low_bytes(codes + i, low);
      }
    }
  }

  RngKey key_;
  uint64_t offset_;
  int group_;
};

}  // namespace fl::FL_ISA
