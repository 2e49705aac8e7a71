// The `thc` codec (core/thc.h) on vectors. A tile of whole blocks is rotated in L1, then rounded.
#pragma once

#include "elements.h"
#include "kernels.h"
#include "random.h"
#include "rotation.h"
#include "thc.h"

namespace fl::FL_ISA {

// thc_code of core/thc.h.
class ThcGrid {
 public:
  explicit ThcGrid(bool uniform) : top_(uniform ? 15.0f : 30.0f), scale_(uniform ? 1.0f : 0.5f) {
    for (int i = 0; i < 32; ++i) {
#if defined(FL_AVX512)
      const int step = uniform ? i / 2 : i;
#else
      const int step = i;
#endif
      const int below = thc_code_below(uniform, step);
      const int low = thc_integer(uniform, below), high = thc_integer(uniform, below + 1);
#if defined(FL_AVX512)
      below_[i] = below;
      low_[i] = int32_t(float_bits(float(2 * low) - top_));
      width_[i] = int32_t(float_bits(float(2 * (high - low))));
#else
      intervals_[i] = below | 2 * (high - low) << 8 | (2 * low - int(top_) + 64) << 16;
#endif
    }
  }

  // `place` is 1.5 more than the noise.
  FL_INLINE vi code(vf v, vf place) const {
    v = clamp(v, top_);
#if defined(FL_AVX512)
    // v - low is a multiple of width / 2^25, or, where the width is no power of two, of 2^-19. So no rounding of the
    // quotient changes on which side of the place it is.
    constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const vi step = (vi)_mm512_fmadd_round_ps(v, broadcast(scale_), broadcast(12582912.0f + 15.0f), kDown);
    const vf width = (vf)look_up(width_, step);
    const vf least = _mm512_fmsub_round_ps(place, width, width, kDown);
    return count_greater(look_up(below_, step), v - (vf)look_up(low_, step), least);
#else
    const vi interval = look_up(intervals_, (floor_of(v) + int(top_)) >> 1), below = interval & 255;
    const vf low = __builtin_convertvector((interval >> 16) - 64, vf);
    const vf width = __builtin_convertvector(interval >> 8 & 255, vf);
    return below - (place - 1.5f < (v - low) / width - 0.5f);
#endif
  }

 private:
  float top_, scale_;
  // Of each whole number of steps the code below, its value, and the way to the next value.
#if defined(FL_AVX512)
  alignas(64) int32_t below_[32], low_[32], width_[32];  // but for the first bits of f32; uniform: of half steps
#else
  alignas(64) int32_t intervals_[32];  // code | way << 8 | value + 64 << 16
#endif
};

class ThcCodec {
 public:
  struct Message {
    const float *rms;
    uint8_t *codes;
    int64_t first;    // element of the message
    uint64_t number;  // of it in the sequence of the seed
  };

  static constexpr bool kCanonical = false;

  explicit ThcCodec(const Job &job)
      : shape_(thc_shape(*job.spec)),
        stochastic_(job.spec->param[0] & FL_THC_STOCHASTIC),
        key_(job.key),
        signs_(make_key(job.spec->param[3])),
        offset_(uint64_t(job.spec->offset)),
        grid_(shape_.uniform) {
    for (int code = 0; code < kThcLevels; ++code)
      levels_[code] = uint8_t(2 * thc_integer(shape_.uniform, code) - shape_.top());
  }

  int unit() const { return shape_.block; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    const int64_t first = unit * shape_.block;
    return {reinterpret_cast<const float *>(plane(0)), plane(1) + first / kBlock * shape_.run_bytes(), first,
            offset_ + uint64_t(message * shape_.numbers + first)};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t, Ahead ahead) const {
    alignas(64) float tile[kMaxTile];
    const int count = (n + shape_.block - 1) / shape_.block * shape_.block, runs = shape_.runs_of_block();
    if (!thc_usual(*out.rms)) {
      __builtin_memset(out.codes, 0, size_t(count / kBlock * shape_.run_bytes()));
      return;
    }
    const float *values = tile;
    if constexpr (std::is_same_v<T, float>)
      values = x;
    else
      for (int i = 0; i < count; i += kBlock) store_block(tile + i, load_block(x + i));
    const int lines = ahead.lines() / (count / kBlock);
    for (int g = 0; g < count; g += shape_.block) {
      const auto rotate_block = [&](auto n) FL_LAMBDA {
        rotate<decltype(n)::value>(values + g, tile + g, out.first + g, *out.rms, ahead, lines);
      };
      runs == 32 ? rotate_block(Runs<32>{}) : with_runs(runs, rotate_block);
    }
    quantize(tile, count, out);
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    alignas(64) float tile[kMaxTile];
    reconstruct(in, n, tile);
    for (int i = 0; i < n; i += kBlock) sink(i, load_block(tile + i));
  }

 private:
  // The signs of the elements from number `first` of a message on, none of which is 2^32 unless it is the first.
  class Signs {
   public:
    Signs(const ThcCodec &codec, int64_t first)
        : key_(key_at(codec.signs_, uint64_t(first))), spread_((iota() + uint32_t(first)) * kSpread + key_.a) {}

    // Element i is the first of the values.
    FL_INLINE Block on(Block b, int i) const {
      for (int j = 0; j < kVectors; ++j) {
        const vu bits = almost_random_bits(key_, spread_ + uint32_t(i + j * kLanes) * kSpread);
        b.v[j] = (vf)((vu)b.v[j] ^ (bits & 0x80000000u));
      }
      return b;
    }

   private:
    RngKey key_;
    vu spread_;
  };

  // A block of x / rms with random signs, rotated, in half steps. The divisions take long, and the stages of the
  // transform fill their gaps.
  template <int N>
  FL_NOINLINE void rotate(const float *x, float *out, int64_t first, float rms, Ahead &ahead, int lines) const {
    const Signs signs(*this, first);
    const float steps = shape_.steps;
    hadamard_runs<N>(
        out,
        [&](int k) FL_LAMBDA {
          ahead.fetch(lines);
          Block b = load_block(x + k * kBlock);
          for (vf &v : b.v) v /= rms;
          return signs.on(b, k * kBlock);
        },
        [&](vf v) FL_LAMBDA { return v * steps; });
  }

  FL_NOINLINE void quantize(const float *tile, int count, Message out) const {
    for (int i = 0; i < count;) {  // a key holds for numbers whose upper halves are equal
      const int64_t left = (int64_t(1) << 32) - int64_t(uint32_t(out.number)), n = left < count - i ? left : count - i;
      stochastic_ ? store_codes<true>(tile + i, int(n), out) : store_codes<false>(tile + i, int(n), out);
      i += int(n);
      out.number += uint64_t(n);
      out.codes += n / 2;
    }
  }

  template <bool kStochastic>
  FL_INLINE void store_codes(const float *tile, int count, const Message &out) const {
    const ThcGrid grid = grid_;  // that no store of bytes can change
    const RngKey key = key_at(key_, out.number);
    vu spread = (iota() + uint32_t(out.number)) * kSpread + key.a;
    for (int i = 0; i < count; i += kBlock, spread += kBlock * kSpread) {
      const auto code = [&](int at) FL_LAMBDA {
        vf place = broadcast(1.5f);
        if constexpr (kStochastic) {
          const vu h = almost_random_bits(key, spread + uint32_t(at) * kSpread);
          place = (vf)((h >> 9 ^ h >> 25) | 0x3f800000u);
        }
        return grid.code(load(tile + i + at), place);
      };
      vi both[kQuad];
      for (int j = 0; j < kQuad; ++j) both[j] = code(j * kLanes) | code(16 + j * kLanes) << 4;
      store_low_bytes(out.codes + i / 2, both);
    }
  }

  FL_NOINLINE void reconstruct(Message in, int n, float *tile) const {
    const int count = (n + shape_.block - 1) / shape_.block * shape_.block;
    const float factor = thc_factor(*in.rms, shape_);
    for (int i = 0; i < count; i += kBlock, in.codes += shape_.run_bytes())
      shape_.ranks ? load_sums(in.codes, tile + i) : load_levels(in.codes, tile + i);
    for (int g = 0; g < count; g += shape_.block) rotate_in_place(tile + g, shape_.runs_of_block(), factor);
    for (int i = 0; i < count; i += kBlock) {
      Block b = Signs(*this, in.first + i).on(load_block(tile + i), 0);
      for (vf &v : b.v) v += 0.0f;  // -0 becomes 0
      store_block(tile + i, b);
    }
  }

  FL_INLINE void load_levels(const uint8_t *codes, float *values) const {
    const Bytes16 both = load_bytes16(codes), levels = load_bytes16(levels_);
    const Bytes16 halves[2] = {look_up(levels, both & 15), look_up(levels, both >> 4)};
    for (int h = 0; h < 2; ++h) {
      alignas(16) uint8_t bytes[16];
      store(bytes, halves[h]);
      vi wide[kQuad];
      load_bytes(bytes, wide);
      for (int j = 0; j < kQuad; ++j) store(values + 16 * h + j * kLanes, __builtin_convertvector(wide[j], vf));
    }
  }

  FL_INLINE void load_sums(const uint8_t *bytes, float *values) const {
    const int all = shape_.ranks * shape_.top();
    uint16_t sums[kBlock];
    unpack_sums(shape_.bits(), bytes, sums);
    for (int i = 0; i < kBlock; ++i) values[i] = float(2 * int(sums[i]) - all);
  }

  ThcShape shape_;
  bool stochastic_;
  RngKey key_, signs_;
  uint64_t offset_;
  ThcGrid grid_;
  alignas(16) uint8_t levels_[kThcLevels];
};

// fl_add_codes: runs begin..end - 1 of 32 elements.
inline void add_codes(const Job &job, int64_t begin, int64_t end) {
  const ThcShape shape = thc_shape(*job.spec);
  const int64_t count = job.in->count;
  const int bits = shape.sum_bits(int(count)), most = 255 / shape.top();
  alignas(16) uint8_t integers[kThcLevels];
  for (int code = 0; code < kThcLevels; ++code) integers[code] = uint8_t(thc_integer(shape.uniform, code));
  const Bytes16 table = load_bytes16(integers);
  const uint8_t *codes = static_cast<const uint8_t *>(job.in->plane[1]);
  uint8_t *out = static_cast<uint8_t *>(job.y);
  for (int64_t run = begin; run < end; ++run) {
    uint16_t sums[kBlock] = {};
    for (int64_t m = 0; m < count;) {
      Bytes16 low{}, high{};
      for (const int64_t stop = count - m < most ? count : m + most; m < stop; ++m) {
        const Bytes16 both = load_bytes16(codes + m * job.in->stride + run * 16);
        low += look_up(table, both & 15);
        high += look_up(table, both >> 4);
      }
      alignas(16) uint8_t part[kBlock];
      store(part, low);
      store(part + 16, high);
      for (int i = 0; i < kBlock; ++i) sums[i] = uint16_t(sums[i] + part[i]);
    }
    pack_sums(bits, sums, out + run * 4 * bits);
  }
}

}  // namespace fl::FL_ISA
