// The `thc` codec (codecs/thc/thc.h) on vectors. A tile of whole blocks is rotated in L1, then rounded.
#pragma once

#include "cpu/elements.h"
#include "cpu/kernels.h"
#include "cpu/random.h"
#include "cpu/rotation.h"
#include "thc.h"

namespace fl::FL_ISA {

// Bit i of the word: whether the sign of value i changes.
template <int... I>
FL_INLINE Block change_signs(Block b, uint32_t word, Lanes<I...>) {
  for (int j = 0; j < kVectors; ++j) {
#if defined(FL_AVX512) || defined(FL_AVX2)
    const vi bit = (broadcast(int32_t(word)) << (vi{(31 - I)...} - j * kLanes)) & INT32_MIN;
#else
    const vi which = vi{(1 << I)...}, bit = ((broadcast(int32_t(word >> j * kLanes)) & which) == which) & INT32_MIN;
#endif
    b.v[j] = (vf)((vi)b.v[j] ^ bit);
  }
  return b;
}

// What thc_code of codecs/thc/thc.h adds random bits to. With AVX-512 two tables have a line for each step of the grid.
class ThcGrid {
 public:
  explicit ThcGrid(bool uniform) : outermost_(thc_outermost(uniform)) {
#if defined(FL_AVX512)
    const int top = uniform ? 15 : 30;
    for (int step = 0, below = 0; step < 32; ++step) {
      while (!uniform && below < kThcLevels - 2 && thc_integer(uniform, below + 1) <= step) ++below;
      const int low = thc_integer(uniform, below), apart = thc_integer(uniform, below + 1) - low;
      const float slope = (uniform ? 1.0f : 3.0f) / float(apart);
      slopes_[step] = slope;
      starts_[step] =
          65536.0f * float(below) - 32768.0f * float(2 * low - top) / float(apart) - slope * kThcWhole + kThcPlaces;
    }
#else
    uniform_ = uniform;
#endif
  }

  // Places, in the low 20 bits.
  FL_INLINE vi places(vf v) const {
    const vf units = clamp(v, outermost_) + kThcWhole;
#if defined(FL_AVX512)
    // The lowest bit of this sum is a step. All else is exact, but for the place's last half of a part.
    constexpr float kSteps = 1.5f * 65536.0f * 8388608.0f + 15.0f * 65536.0f - 3.0f * kThcWhole;
    const vi step =
        (vi)_mm512_fmadd_round_ps(units, broadcast(3.0f), broadcast(kSteps), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return (vi)add_exact_product(units, look_up(slopes_, step), look_up(starts_, step));
#else
    return (vi)add_exact_product(twice(units - kThcWhole), broadcast(0.5f), broadcast(kThcMiddle + kThcPlaces));
#endif
  }

 private:
#if defined(FL_AVX512)
  alignas(64) float slopes_[32];  // parts of a unit
  alignas(64) float starts_[32];  // the place of unit -kThcWhole, above kThcPlaces
#else
  // thc_twice of codecs/thc/thc.h.
  FL_INLINE vf twice(vf units) const {
    if (uniform_) return units + units;
    const vf parts = units * 3.0f;
    return parts + (clamp(parts, 131072.0f) - clamp(parts, 65536.0f)) - (units - clamp(units, 262144.0f));
  }

  bool uniform_;
#endif
  float outermost_;
};

// section_rms of codecs/thc/thc.h of n values, which zeros make up to `count`.
inline FL_NOINLINE float root_mean_square(const float *v, int n, int count) {
  vi most[kVectors]{};
  for (int i = 0; i < count; i += kBlock)
    for (int j = 0; j < kVectors; ++j) most[j] = max(most[j], magnitude_bits(load(v + i + j * kLanes)));
  for (int j = 1; j < kVectors; ++j) most[0] = max(most[0], most[j]);
  uint32_t amax = 0;
  for (int i = 0; i < kLanes; ++i) amax = uint32_t(most[0][i]) > amax ? uint32_t(most[0][i]) : amax;
  if (amax < kTinyBits || amax >= kF32Inf) return section_rms(amax, 0, n);
  const vf units = broadcast(section_units(amax)), whole = broadcast(kThcWhole);
  vf squares[kVectors]{};
  for (int i = 0; i < count; i += kBlock)
    for (int j = 0; j < kVectors; ++j) {
      const vf value = add_exact_product(load(v + i + j * kLanes), units, whole) - whole;
      squares[j] = add_exact_product(value, value, squares[j]);
    }
  vi sum{};
  for (int j = 0; j < kVectors; ++j) sum += __builtin_convertvector(squares[j], vi);
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sum[i];
  return section_rms(amax, total, n);
}

class ThcCodec {
 public:
  struct Message {
    float *rms;  // of the section of the first element
    uint8_t *codes;
    int64_t first;    // element of the message
    uint64_t number;  // of it in the sequence of the seed
  };

  static constexpr bool kCanonical = false;

  explicit ThcCodec(const Job &job)
      : shape_(thc_shape(*job.spec)),
        stochastic_(job.spec->param[0] & FL_THC_STOCHASTIC),
        given_(job.spec->param[0] & FL_THC_GIVEN),
        key_(job.key),
        signs_(make_key(job.spec->param[3])),
        offset_(uint64_t(job.spec->offset)),
        grid_(shape_.uniform) {
    for (int code = 0; code < kThcLevels; ++code)
      levels_[code] = uint8_t(2 * thc_integer(shape_.uniform, code) - shape_.top());
  }

  int unit() const { return kThcSection; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    const int64_t first = unit * kThcSection;
    return {reinterpret_cast<float *>(plane(0)) + unit, plane(1) + first / kBlock * shape_.run_bytes(), first,
            offset_ + uint64_t(message * shape_.numbers + first)};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t, Ahead ahead) const {
    alignas(64) float tile[kMaxTile];
    const int count = (n + shape_.block - 1) / shape_.block * shape_.block;
    const float *values = tile;
    if constexpr (std::is_same_v<T, float>)
      values = x;
    else
      for (int i = 0; i < count; i += kBlock) store_block(tile + i, load_block(x + i));
    const int lines = ahead.lines() / (2 * count / kBlock);  // for a run, half of them now, half while codes are made
    for (int g = 0; g < count; g += kThcSection, ++out.rms) {
      const int left = count - g, size = left < kThcSection ? left : kThcSection;
      if (!given_) *out.rms = root_mean_square(values + g, n - g < size ? n - g : size, size);
      if (thc_usual(*out.rms)) {
        rotate_section(values + g, tile + g, size, out, ahead, lines);
        quantize(tile + g, size, out, ahead, 2 * lines);
      } else {
        __builtin_memset(out.codes, 0, size_t(size / kBlock * shape_.run_bytes()));
      }
      out.first += size;
      out.number += uint64_t(size);
      out.codes += size / kBlock * shape_.run_bytes();
    }
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    alignas(64) float tile[kMaxTile];
    reconstruct(in, n, tile);
    for (int i = 0; i < n; i += kBlock) sink(i, load_block(tile + i));
  }

 private:
  // thc_signs of the runs of a block.
  struct Signs {
    Signs(const ThcCodec &codec, int64_t first) {
      const RngKey key = key_at(codec.signs_, uint64_t(first));
      vu spread = (iota() * kBlock + uint32_t(first)) * kSpread + key.a;
      for (int r = 0; r < codec.shape_.runs_of_block(); r += kLanes, spread += kLanes * kBlock * kSpread)
        store(of_run + r, random_bits(key, spread));
    }

    FL_INLINE Block on(Block b, int run) const { return change_signs(b, of_run[run], AllLanes{}); }

    alignas(64) uint32_t of_run[kThcMaxBlock / kBlock];
  };

  // A section of values, scaled, with random signs, each block rotated.
  FL_INLINE void rotate_section(const float *x, float *out, int count, const Message &message, Ahead &ahead,
                                int lines) const {
    const int runs = shape_.runs_of_block();
    const float scale = thc_scale(*message.rms, shape_);
    for (int g = 0; g < count; g += shape_.block) {
      const auto rotate_block = [&](auto n) FL_LAMBDA {
        rotate<decltype(n)::value>(x + g, out + g, message.first + g, scale, ahead, lines);
      };
      runs == 32 ? rotate_block(Runs<32>{}) : with_runs(runs, rotate_block);
    }
  }

  // A block of values that are scaled, with random signs, rotated.
  template <int N>
  FL_NOINLINE void rotate(const float *x, float *out, int64_t first, float scale, Ahead &ahead, int lines) const {
    const Signs signs(*this, first);
    hadamard_runs<N>(
        out,
        [&](int k) FL_LAMBDA {
          if (k % kTogether<N> == 0) ahead.fetch(lines * kTogether<N>);
          Block b = load_block(x + k * kBlock);
          for (vf &v : b.v) v *= scale;
          return signs.on(b, k);
        },
        [](vf v) FL_LAMBDA { return v; });
  }

  FL_NOINLINE void quantize(const float *tile, int count, Message out, Ahead &ahead, int lines) const {
    for (int i = 0; i < count;) {  // a key holds for numbers whose upper halves are equal
      const int64_t left = (int64_t(1) << 32) - int64_t(uint32_t(out.number)), n = left < count - i ? left : count - i;
      stochastic_ ? store_codes<true>(tile + i, int(n), out, ahead, lines)
                  : store_codes<false>(tile + i, int(n), out, ahead, lines);
      i += int(n);
      out.number += uint64_t(n);
      out.codes += n / 2;
    }
  }

  template <bool kStochastic>
  FL_INLINE void store_codes(const float *tile, int count, const Message &out, Ahead &ahead, int lines) const {
    const ThcGrid grid = grid_;  // that no store of bytes can change
    const RngKey key = key_at(key_, out.number);
    vu spread = (iota() + uint32_t(out.number)) * kSpread + key.a;
    // Above 16 bits: codes of the first halves of two runs, and of the second ones.
    vi low[kVectors]{}, high[kVectors]{};
    const auto round_run = [&](const float *run, vi *first, vi *second) FL_LAMBDA {
      for (int j = 0; j < kQuad; ++j, spread += kLanes * kSpread) {
        const Halves random = kStochastic ? random_halves(key, spread)
                                          : Halves{broadcast(int32_t(kThcNearest)), broadcast(int32_t(kThcNearest))};
        first[j] = grid.places(load(run + j * kLanes)) + random.first;
        second[j] = grid.places(load(run + 16 + j * kLanes)) + random.second;
      }
      spread += 16 * kSpread;
    };
    int i = 0;
    for (; i + 2 * kBlock <= count; i += 2 * kBlock) {
      ahead.fetch(lines);
      for (int run = 0; run < 2; ++run) round_run(tile + i + run * kBlock, low + run * kQuad, high + run * kQuad);
      store_third_nibbles(out.codes + i / 2, low, high);
    }
    if (i == count) return;
    alignas(32) uint8_t bytes[kBlock];
    round_run(tile + i, low, high);
    store_third_nibbles(bytes, low, high);
    __builtin_memcpy(out.codes + i / 2, bytes, kBlock / 2);
  }

  FL_NOINLINE void reconstruct(Message in, int n, float *tile) const {
    const int count = (n + shape_.block - 1) / shape_.block * shape_.block;
    for (int i = 0; i < count; i += kBlock, in.codes += shape_.run_bytes())
      shape_.ranks ? load_sums(in.codes, tile + i) : load_levels(in.codes, tile + i);
    for (int g = 0; g < count; g += shape_.block, in.first += shape_.block) {
      float *v = tile + g;
      rotate_in_place(v, shape_.runs_of_block(), thc_factor(in.rms[g / kThcSection], shape_));
      const Signs signs(*this, in.first);
      for (int run = 0; run < shape_.runs_of_block(); ++run) {
        Block b = signs.on(load_block(v + run * kBlock), run);
        for (vf &lanes : b.v) lanes += 0.0f;  // -0 becomes 0
        store_block(v + run * kBlock, b);
      }
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
  bool stochastic_, given_;
  RngKey key_, signs_;
  uint64_t offset_;
  ThcGrid grid_;
  alignas(16) uint8_t levels_[kThcLevels];
};

// fl_thc_rms: sections begin..end - 1.
template <class T>
void thc_rms(const Job &job, int64_t begin, int64_t end) {
  for (int64_t section = begin; section < end; ++section) {
    const int64_t first = section * kThcSection, left = job.spec->numel - first;
    const int n = int(left < kThcSection ? left : kThcSection);
    const T *x = static_cast<const T *>(job.x) + first;
    alignas(64) float values[kThcSection];
    for_each_block(n, [&](int i, auto access) FL_LAMBDA {
      prefetch_block(reinterpret_cast<const T *>(reinterpret_cast<const char *>(x + i) + kFarAhead));
      const Block b = access.load(x + i);
      store_block(values + i, job.residual ? b + access.load(job.residual + first + i) : b);
    });
    static_cast<float *>(job.y)[section] = root_mean_square(values, n, (n + kBlock - 1) / kBlock * kBlock);
  }
}

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
