// The `qsdp` codec (codecs/qsdp/qsdp.h) on vectors: one look at a group for its extremes, one for its codes.
#pragma once

#include "cpu/elements.h"
#include "cpu/kernels.h"
#include "cpu/random.h"
#include "qsdp.h"

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

  // Grids of all groups first: what makes one is a long chain of operations, which others fill up.
  template <class T>
  FL_NOINLINE void encode(const T *x, int n, Message out, int64_t unit, Ahead ahead) const {
    const int group = shape_.group, groups = (n + group - 1) / group;
    alignas(64) float tile[kMaxTile];
    QsdpGrid grids[kMaxTile / kBlock];
    const float *values = tile;
    if constexpr (std::is_same_v<T, float>)
      if (n % group == 0) values = x;
    if (values == tile) widen_groups(x, n, groups * group, tile);
    const uint64_t first = offset_ + uint64_t(unit) * uint64_t(group);
    const int lines = ahead.share(2 * groups * group / kStep);  // for so many values, half of them now
    for (int g = 0; g < groups; ++g)
      grids[g] = find_grid(values + g * group, first + uint64_t(g) * uint64_t(group), ahead, lines);
    for (int g = 0; g < groups; ++g, values += group, out.codes += shape_.group_bytes()) {
      const QsdpGrid grid = grids[g];
      out.steps[g] = grid.step;
      out.origins[g] = grid.origin;
      if (__builtin_expect(!(grid.step > 0.0f), 0))
        __builtin_memset(out.codes, 0, size_t(shape_.group_bytes()));
      else
        quantize(values, grid, first + uint64_t(g) * uint64_t(group), out.codes, ahead, lines);
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

  static constexpr int kChains = 4;  // of vectors: as many as hide how long an operation takes
  static constexpr int kStep = kChains * kLanes;

  // n values, filled up with the last of them; those of x are followed by anything up to a whole block.
  template <class T>
  static FL_INLINE void widen_groups(const T *x, int n, int whole, float *values) {
    for (int i = 0; i < n; i += kBlock) store_block(values + i, load_block(x + i));
    for (int i = n; i < whole; ++i) values[i] = values[n - 1];
  }

  FL_INLINE QsdpGrid find_grid(const float *v, uint64_t first, Ahead &ahead, int lines) const {
    vf low[kChains], high[kChains], product[kChains];  // the products with 0 are 0, or NaN where a value is not finite
    for (int j = 0; j < kChains; ++j) low[j] = high[j] = broadcast(*v), product[j] = vf{};
    for (int i = 0; i < shape_.group; i += kStep) {
      ahead.fetch(lines);
      for (int j = 0; j < kChains; ++j) {
        const vf x = load(v + i + (j * kLanes & (shape_.group - 1)));  // again, if a group has less
        low[j] = min(low[j], x);
        high[j] = max(high[j], x);
        product[j] = add_exact_product(x, vf{}, product[j]);
      }
    }
    for (int j = 1; j < kChains; ++j) {
      low[0] = min(low[0], low[j]);
      high[0] = max(high[0], high[j]);
      product[0] += product[j];
    }
    const float least = fold(low[0], [](vf a, vf b) FL_LAMBDA { return min(a, b); });
    const float most = fold(high[0], [](vf a, vf b) FL_LAMBDA { return max(a, b); });
    const float zero = fold(product[0], [](vf a, vf b) FL_LAMBDA { return a + b; });
    const float share = shape_.stochastic ? 0.5f : qsdp_share(shifts_, first);
    return qsdp_grid(zero == 0.0f, least, most, shape_.parts(), share);
  }

  FL_INLINE void quantize(const float *v, QsdpGrid grid, uint64_t first, uint8_t *codes, Ahead &ahead,
                          int lines) const {
    const vf step = broadcast(grid.step);
#if defined(FL_QUOTIENT)
    // Nothing is subnormal, but for what becomes code 0, and no value is so far from the origin that the difference is infinite.
    if (grid.step >= 0x1p-60f && grid.step < 0x1p118f) {
      const vf inverse = broadcast(1.0f / grid.step);
      const auto divide = [&](vf x) FL_LAMBDA { return quotient(x, step, inverse); };
      return quantize_by(v, grid, first, codes, ahead, lines, divide);
    }
#endif
    quantize_by(v, grid, first, codes, ahead, lines, [&](vf x) FL_LAMBDA { return x / step; });
  }

  template <class Divide>
  FL_INLINE void quantize_by(const float *v, QsdpGrid grid, uint64_t first, uint8_t *codes, Ahead &ahead, int lines,
                             const Divide &divide) const {
    if (shape_.stochastic)
      store_group<true>(v, grid.origin, first, codes, ahead, lines, divide);
    else
      store_group<false>(v, grid.origin, first, codes, ahead, lines, divide);
  }

  template <bool kStochastic, class Divide>
  FL_INLINE void store_group(const float *v, float origin, uint64_t first, uint8_t *codes, Ahead &ahead, int lines,
                             const Divide &divide) const {
    const RngKey key = key_at(key_, first);
    vu spread = iota() * kSpread + (uint32_t(first) * kSpread + key.a);
    // Of kQuad vectors the places on the grid, not limited yet.
    const auto place_all = [&](const float *from, vu numbers, vf(&point)[kQuad]) FL_LAMBDA {
      for (int j = 0; j < kQuad; ++j) {
        point[j] = divide(load(from + j * kLanes) - origin);
        if constexpr (kStochastic) point[j] += rounding_noise(key, numbers + j * kLanes * kSpread);
      }
    };
    const int reach = shape_.group * kBits / 8;
    for (int i = 0; i < reach; i += 16, spread += 16 * kSpread) {
      if (i % (kStep * kBits / 8) == 0) ahead.fetch(lines);
      vf point[kQuad];
      vi code[kQuad];
      place_all(v + i, spread, point);
      if constexpr (kBits == 8) {
        for (int j = 0; j < kQuad; ++j) code[j] = nearest_of(point[j]);
        store_saturated_bytes(codes + i, code);
      } else {
        vf high[kQuad];
        place_all(v + reach + i, spread + uint32_t(reach) * kSpread, high);
        for (int j = 0; j < kQuad; ++j) code[j] = join_nibbles(nibble(point[j]), nibble(high[j]));
        store_low_bytes(codes + i, code);
      }
    }
  }

  // The code in the low bits of the lanes; the bits above are not zero.
  static FL_INLINE vi nibble(vf point) {
    return (vi)(max(min(point, broadcast(7.0f)), broadcast(-8.0f)) + 12582912.0f);  // round_even
  }

  QsdpShape shape_;
  RngKey key_;
  uint64_t shifts_, offset_;
};

}  // namespace fl::FL_ISA
