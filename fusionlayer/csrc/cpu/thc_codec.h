// The `thc` codec (core/thc.h) on vectors. A tile of whole blocks is rotated in L1, then rounded.
#pragma once

#include "elements.h"
#include "kernels.h"
#include "random.h"
#include "rotation.h"
#include "thc.h"

namespace fl::FL_ISA {

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
        offset_(uint64_t(job.spec->offset)) {
    for (int t = 0; t < 32; ++t) {
      const int below = thc_code_below(shape_.uniform, t);
      const int low = thc_integer(shape_.uniform, below), high = thc_integer(shape_.uniform, below + 1);
#if defined(FL_AVX512)
      below_[t] = below;
      low_[t] = int32_t(float_bits(float(2 * low - shape_.top())));
      width_[t] = int32_t(float_bits(float(2 * (high - low))));
      inverse_[t] = int32_t(float_bits(1.0f / float(2 * (high - low))));
#else
      intervals_[t] = below | 2 * (high - low) << 8 | (2 * low - shape_.top() + 64) << 16;
#endif
    }
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
  void encode(const T *x, int n, Message out, int64_t, Ahead) const {
    alignas(64) float tile[kMaxTile];
    const int count = (n + shape_.block - 1) / shape_.block * shape_.block;
    const float rms = *out.rms;
    if (!thc_usual(rms)) {
      __builtin_memset(out.codes, 0, size_t(count / kBlock * shape_.run_bytes()));
      return;
    }
    for (int i = 0; i < count; i += kBlock) {
      Block b = load_block(x + i);
      for (vf &v : b.v) v /= rms;
      store_block(tile + i, with_signs(b, out.first + i));
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
  // Values whose signs are those of the elements from number `first` of a message on.
  FL_INLINE Block with_signs(Block b, int64_t first) const {
    const RngKey key = key_at(signs_, uint64_t(first));
    const vu spread = (iota() + uint32_t(first)) * kSpread + key.a;
    for (int j = 0; j < kVectors; ++j)
      b.v[j] = (vf)((vu)b.v[j] ^ (almost_random_bits(key, spread + j * kLanes * kSpread) & 0x80000000u));
    return b;
  }

  FL_NOINLINE void quantize(float *tile, int count, Message out) const {
    for (int g = 0; g < count; g += shape_.block) rotate_in_place(tile + g, shape_.runs_of_block(), shape_.steps);
    for (int i = 0; i < count; i += kBlock, out.codes += 16) {
      const uint64_t number = out.number + uint64_t(i);
      const RngKey key = key_at(key_, number);
      const vu spread = (iota() + uint32_t(number)) * kSpread + key.a;
      vi both[kQuad];
      for (int j = 0; j < kQuad; ++j)
        both[j] = code(load(tile + i + j * kLanes), key, spread + j * kLanes * kSpread) |
                  code(load(tile + i + 16 + j * kLanes), key, spread + (16 + j * kLanes) * kSpread) << 4;
      store_low_bytes(out.codes, both);
    }
  }

  // thc_code.
  FL_INLINE vi code(vf v, RngKey key, vu spread) const {
    const int top = shape_.top();
    v = clamp(v, float(top));
    const vi place = (floor_of(v) + top) >> 1;
#if defined(FL_AVX512)
    const vi below = look_up(below_, place);
    const vf width = (vf)look_up(width_, place), inverse = (vf)look_up(inverse_, place);
    const vf up = quotient(v - (vf)look_up(low_, place), width, inverse) - 0.5f;
#else
    const vi interval = look_up(intervals_, place), below = interval & 255;
    const vf low = __builtin_convertvector((interval >> 16) - 64, vf);
    const vf width = __builtin_convertvector(interval >> 8 & 255, vf);
    const vf up = (v - low) / width - 0.5f;
#endif
    vf noise{};
    if (stochastic_) noise = (vf)((random_bits(key, spread) >> 9) | 0x3f800000u) - 1.5f;
    return below - (noise < up);
  }

  FL_NOINLINE void reconstruct(Message in, int n, float *tile) const {
    const int count = (n + shape_.block - 1) / shape_.block * shape_.block;
    const float factor = thc_factor(*in.rms, shape_);
    for (int i = 0; i < count; i += kBlock, in.codes += shape_.run_bytes())
      shape_.ranks ? load_sums(in.codes, tile + i) : load_levels(in.codes, tile + i);
    for (int g = 0; g < count; g += shape_.block) rotate_in_place(tile + g, shape_.runs_of_block(), factor);
    for (int i = 0; i < count; i += kBlock) {
      Block b = with_signs(load_block(tile + i), in.first + i);
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
  // Of each whole number of steps the code below, its value, the way to the next value, and 1 / that.
#if defined(FL_AVX512)
  alignas(64) int32_t below_[32], low_[32], width_[32], inverse_[32];  // but for the first bits of f32
#else
  alignas(64) int32_t intervals_[32];  // code | way << 8 | value + 64 << 16
#endif
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
