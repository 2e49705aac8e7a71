// The `qsdp` codec (core/qsdp.h) on vectors: one look at a group for its extremes, one for its codes.
#pragma once

#include "elements.h"
#include "kernels.h"
#include "qsdp.h"
#include "random.h"

namespace fl::FL_ISA {

template <int kBits>
class QsdpCodec {
 public:
  struct Message {
    float *steps, *origins;
    uint8_t *codes;
  };

  // Every NaN that comes out of decode is the canonical one.
  static constexpr bool kCanonical = true;

  explicit QsdpCodec(const Job &job)
      : shape_(qsdp_shape(*job.spec)),
        key_(job.key),
        shifts_(qsdp_key(job.spec->seed)),
        offset_(uint64_t(job.spec->offset)) {}

  int unit() const { return shape_.group; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    const auto floats = [&](int p) { return reinterpret_cast<float *>(plane(p)) + unit; };
    return {floats(0), floats(1), plane(2) + unit * shape_.group_bytes()};
  }

  template <class T>
  FL_NOINLINE void encode(const T *x, int n, Message out, int64_t unit, Ahead ahead) const {
    const int group = shape_.group, groups = (n + group - 1) / group, lines = (ahead.lines() + groups - 1) / groups;
    alignas(64) float values[kQsdpMaxGroup];
    for (int g = 0; g < groups; ++g, x += group, out.codes += shape_.group_bytes()) {
      ahead.fetch(lines);
      const int left = n - g * group, count = left < group ? left : group;
      const float *v = values;
      if constexpr (std::is_same_v<T, float>)
        if (count == group) v = x;
      if (v == values) widen_group(x, count, values);
      const uint64_t first = offset_ + uint64_t(unit + g) * uint64_t(group);
      const QsdpGrid grid = find_grid(v, first);
      out.steps[g] = grid.step;
      out.origins[g] = grid.origin;
      if (__builtin_expect(!(grid.step > 0.0f), 0))
        __builtin_memset(out.codes, 0, size_t(shape_.group_bytes()));
      else if (shape_.stochastic)
        quantize<true>(v, grid, first, out.codes);
      else
        quantize<false>(v, grid, first, out.codes);
    }
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    const int group = shape_.group, half = group / 2;
    for (int begin = 0; begin < n; begin += group, ++in.steps, ++in.origins, in.codes += shape_.group_bytes()) {
      const QsdpGrid grid = qsdp_sound({*in.steps, *in.origins});
      if constexpr (kBits == 8) {
        for (int i = 0; i < group; i += kBlock) {
          Block b;
          for (int h = 0; h < 2; ++h) {
            vi code[kQuad];
            load_bytes(in.codes + i + 16 * h, code);
            place(code, grid, b.v + h * kQuad);
          }
          sink(begin + i, b);
        }
      } else {
        for (int i = 0; i < half; i += kBlock) {
          Block low, high;
          for (int h = 0; h < 2 && i + 16 * h < half; ++h) {
            vi both[kQuad], code[kQuad];
            load_bytes(in.codes + i + 16 * h, both);
            for (int j = 0; j < kQuad; ++j) code[j] = both[j] << 28 >> 28, both[j] = both[j] >> 4;
            place(code, grid, low.v + h * kQuad);
            place(both, grid, (half > 16 ? high.v + h * kQuad : low.v + kQuad));
          }
          sink(begin + i, low);
          if (half > 16) sink(begin + half + i, high);
        }
      }
    }
  }

 private:
  // 16 values.
  static FL_INLINE void place(const vi (&code)[kQuad], QsdpGrid grid, vf *v) {
    for (int j = 0; j < kQuad; ++j) v[j] = __builtin_convertvector(code[j], vf) * grid.step + grid.origin;
  }

  // The values of a group, filled up with the last of `count`; those of x are followed by anything up to a whole block.
  template <class T>
  FL_INLINE void widen_group(const T *x, int count, float *values) const {
    for (int i = 0; i < count; i += kBlock) store_block(values + i, load_block(x + i));
    for (int i = count; i < shape_.group; ++i) values[i] = values[count - 1];
  }

  FL_INLINE QsdpGrid find_grid(const float *v, uint64_t first) const {
    constexpr int kStep = kBlock / kLanes;
    vf low[kStep], high[kStep], product[kStep];  // the products with 0 are 0, or NaN where a value is not finite
    for (int j = 0; j < kStep; ++j) low[j] = high[j] = load(v + j * kLanes), product[j] = vf{};
    for (int i = 0; i < shape_.group; i += kBlock)
      for (int j = 0; j < kStep; ++j) {
        const vf x = load(v + i + j * kLanes);
        low[j] = min(low[j], x);
        high[j] = max(high[j], x);
        product[j] += x * 0.0f;
      }
    for (int j = 1; j < kStep; ++j) {
      low[0] = min(low[0], low[j]);
      high[0] = max(high[0], high[j]);
      product[0] += product[j];
    }
    float least = low[0][0], most = high[0][0], zero = product[0][0];
    for (int i = 1; i < kLanes; ++i) {
      least = low[0][i] < least ? low[0][i] : least;
      most = high[0][i] > most ? high[0][i] : most;
      zero += product[0][i];
    }
    const float share = shape_.stochastic ? 0.5f : qsdp_share(shifts_, first);
    return qsdp_grid(zero == 0.0f, least, most, shape_.parts(), share);
  }

  // The codes of 16 values in the low bits of the lanes; the bits above are not zero.
  template <bool kStochastic>
  FL_INLINE void round_to_codes(const float *v, QsdpGrid grid, RngKey key, vu spread, vi (&codes)[kQuad]) const {
    const vf least = broadcast(kBits == 8 ? -128.0f : -8.0f), most = broadcast(kBits == 8 ? 127.0f : 7.0f);
    for (int j = 0; j < kQuad; ++j) {
      vf point = (load(v + j * kLanes) - grid.origin) / grid.step;
      if constexpr (kStochastic) point += rounding_noise(key, spread + j * kLanes * kSpread);
      codes[j] = (vi)(max(min(point, most), least) + 12582912.0f);  // round_even
    }
  }

  template <bool kStochastic>
  FL_INLINE void quantize(const float *v, QsdpGrid grid, uint64_t first, uint8_t *codes) const {
    const RngKey key = key_at(key_, first);
    const int half = shape_.group / 2;
    vu spread = (iota() + uint32_t(first)) * kSpread + key.a;
    vi low[kQuad], high[kQuad];
    if constexpr (kBits == 8) {
      for (int i = 0; i < shape_.group; i += 16, spread += 16 * kSpread) {
        round_to_codes<kStochastic>(v + i, grid, key, spread, low);
        store_low_bytes(codes + i, low);
      }
    } else {
      for (int i = 0; i < half; i += 16, spread += 16 * kSpread) {
        round_to_codes<kStochastic>(v + i, grid, key, spread, low);
        round_to_codes<kStochastic>(v + half + i, grid, key, spread + uint32_t(half) * kSpread, high);
        for (int j = 0; j < kQuad; ++j) low[j] = join_nibbles(low[j], high[j]);
        store_low_bytes(codes + i, low);
      }
    }
  }

  QsdpShape shape_;
  RngKey key_;
  uint64_t shifts_, offset_;
};

}  // namespace fl::FL_ISA
