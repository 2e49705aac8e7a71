// The `int` codec (core/int_group.h) on vectors. A tile of whole groups is transformed into L1, its scales are made side
// by side, then its codes.
#pragma once

#include "int_group.h"
#include "kernels.h"
#include "simd.h"

namespace fl::FL_ISA {

// random_bits and rounding_noise of core/rng.h.
FL_INLINE vf rounding_noise(RngKey key, vu low) {
  vu h = low ^ key.a;
  h ^= h >> 16;
  h *= 0x7feb352du;
  h = (h ^ (h >> 15)) + key.b;
  h *= 0x846ca68bu;
  h ^= h >> 16;
  return (vf)((h >> 9) | 0x3f800000u) - 1.5f;
}

template <int kBits, bool kHadamard, bool kStochastic>
class IntCodec {
 public:
  static constexpr int kMaxTile = 4096;

  struct Message {
    float *scales;
    uint8_t *codes;
  };

  explicit IntCodec(const Job &job) : key_(job.key), offset_(uint64_t(job.spec->offset)), group_(job.spec->param[1]) {}

  int unit() const { return group_; }
  int tile_units() const { return group_ >= kTile ? 1 : kTile / group_; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    return {reinterpret_cast<float *>(plane(0)) + unit, plane(1) + unit * group_bytes()};
  }

  // Whole groups from n elements, n <= kMaxTile; `unit` counts groups over all messages.
  template <class T>
  void encode(const T *x, int n, Message out, int64_t unit) const {
    alignas(64) float tile[kMaxTile], inverse[kMaxTile / kBlock];
    alignas(64) int32_t amax[kMaxTile / kBlock];
    const int groups = (n + group_ - 1) / group_;
    transform(x, n, tile, amax);
    make_scales(amax, groups, out.scales, inverse);
    for (int g = 0; g < groups; ++g) {
      float *values = tile + g * group_;
      if (__builtin_expect(inverse[g] == 0.0f, 0)) __builtin_memset(values, 0, group_ * sizeof(float));
      const uint64_t first = offset_ + uint64_t(unit + g) * group_;
      quantize(values, inverse[g], key_at(key_, first), uint32_t(first), out.codes + g * group_bytes());
    }
  }

  // Calls sink(i, block) for every block of the groups that hold the first n elements, i being its first element.
  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    for (int begin = 0; begin < n; begin += group_, ++in.scales, in.codes += group_bytes()) {
      const vf scale = broadcast(decode_scale(*in.scales, kHadamard));
      const auto emit = [&](int i, const vi *low, const vi *high) {
        Block b;
        for (int j = 0; j < kQuad; ++j) {
          b.v[j] = __builtin_convertvector(low[j], vf);
          b.v[j + kQuad] = __builtin_convertvector(high[j], vf);
        }
        if constexpr (kHadamard) hadamard(b);
        for (int j = 0; j < kVectors; ++j) b.v[j] *= scale;
        sink(begin + i, b);
      };
      vi a[kQuad], b[kQuad];
      if constexpr (kBits == 8) {
        for (int i = 0; i < group_; i += kBlock) {
          load_bytes(in.codes + i, a);
          load_bytes(in.codes + i + 16, b);
          emit(i, a, b);
        }
      } else if (group_ == kBlock) {
        load_bytes(in.codes, a);
        vi low[kQuad], high[kQuad];
        split_nibbles(a, low, high);
        emit(0, low, high);
      } else {
        const int half = group_ / 2;
        for (int i = 0; i < half; i += kBlock) {
          vi low[2][kQuad], high[2][kQuad];
          load_bytes(in.codes + i, a);
          load_bytes(in.codes + i + 16, b);
          split_nibbles(a, low[0], high[0]);
          split_nibbles(b, low[1], high[1]);
          emit(i, low[0], low[1]);
          emit(half + i, high[0], high[1]);
        }
      }
    }
  }

 private:
  static constexpr int kTile = 2048;

  int group_bytes() const { return group_ * kBits / 8; }

  static FL_INLINE void split_nibbles(const vi (&bytes)[kQuad], vi (&low)[kQuad], vi (&high)[kQuad]) {
    for (int j = 0; j < kQuad; ++j) {
      low[j] = bytes[j] << 28 >> 28;
      high[j] = bytes[j] >> 4;
    }
  }

  template <class T>
  FL_INLINE void transform(const T *x, int n, float *tile, int32_t *amax) const {
    for (int begin = 0; begin < n; begin += group_) {
      vi top = {};
      for (int i = begin; i < begin + group_; i += kBlock) {
        Block b = load_block(x, i, n);
        if constexpr (kHadamard) hadamard(b);
        for (int j = 0; j < kVectors; ++j) {
          top = max(top, magnitude_bits(b.v[j]));
          store(tile + i + j * kLanes, b.v[j]);
        }
      }
      *amax++ = int32_t(max_lane(top));
    }
  }

  // make_scale of core/int_group.h for every group.
  static FL_INLINE void make_scales(const int32_t *amax, int groups, float *scales, float *inverse) {
    constexpr float qmax = int_qmax(kBits);
    for (int g = 0; g < groups; g += kLanes) {
      const vf top = load(reinterpret_cast<const float *>(amax + g));
      const vi bits = (vi)top;
      const vi zero = (bits < int32_t(kTinyBits)) | (bits >= int32_t(kF32Inf));
      const vi nan = (bits >= int32_t(kF32Inf)) & int32_t(kF32Nan);
      const vf scale = (vf)(((vi)(top / qmax) & ~zero) | nan);
      store(inverse + g, (vf)((vi)(qmax / top) & ~zero));
      alignas(64) float lanes[kLanes];
      store(lanes, scale);
      __builtin_memcpy(scales + g, lanes, sizeof(float) * (groups - g < kLanes ? groups - g : kLanes));
    }
  }

  // The code of each lane in its low bits; the bits above are not zero.
  static FL_INLINE void round16(const float *values, float inverse, RngKey key, uint32_t number, vi (&codes)[kQuad]) {
    for (int j = 0; j < kQuad; ++j) {
      vf v = load(values + j * kLanes) * inverse;
      if constexpr (kStochastic) {
        constexpr float qmax = int_qmax(kBits);
        v += rounding_noise(key, iota() + (number + j * kLanes));
        v = v < qmax ? v : broadcast(qmax);
        v = v > -qmax ? v : broadcast(-qmax);
      }
      codes[j] = (vi)(v + 12582912.0f);
    }
  }

  FL_INLINE void quantize(const float *values, float inverse, RngKey key, uint32_t number, uint8_t *codes) const {
    vi low[kQuad];
    if constexpr (kBits == 8) {
      for (int i = 0; i < group_; i += 16) {
        round16(values + i, inverse, key, number + i, low);
        store_low_bytes(codes + i, low);
      }
    } else {
      const int half = group_ / 2;
      for (int i = 0; i < half; i += 16) {
        vi high[kQuad];
        round16(values + i, inverse, key, number + i, low);
        round16(values + half + i, inverse, key, number + half + i, high);
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
