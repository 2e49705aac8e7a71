// The `int` codec (core/int_group.h) on vectors.
#pragma once

#include "code_rotation.h"
#include "int_rounding.h"

namespace fl::FL_ISA {

struct IntMessage {
  float *scales;
  uint8_t *codes;
};

template <int kBits, bool kHadamard>
class IntCodec {
 public:
  using Message = IntMessage;

  // Every NaN that comes out of decode is the canonical one.
  static constexpr bool kCanonical = true;

  explicit IntCodec(const Job &job) : rounding_(job), group_(rounding_.group()) {}

  int unit() const { return group_; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    return {reinterpret_cast<float *>(plane(0)) + unit, plane(1) + unit * group_bytes()};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t unit, Ahead ahead) const {
    alignas(64) float tile[kMaxTile];
    vi top[kMaxGroups];
    const int groups = (n + group_ - 1) / group_;
    const float *values = transform_groups<kHadamard>(x, group_, groups, tile, top, ahead);
    rounding_.quantize(values, top, groups, out.scales, out.codes, unit, ahead);
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
#if defined(FL_CODE_ROTATION)
    if constexpr (kHadamard) return decode_rotated(in, n, sink);
#endif
    with_parts([&](auto parts) FL_LAMBDA {
      constexpr int N = decltype(parts)::value;
      const int reach = group_ / N;
      for (int begin = 0; begin < n; begin += group_, ++in.scales, in.codes += group_bytes()) {
        const vf scale = broadcast(decode_scale(*in.scales, kBits, kHadamard));
        for (int i = 0; i < reach; i += kBlock) {
          Block b[N];
          unpack(in.codes + code_bytes(i), b);
          if constexpr (kHadamard) hadamard(b);
          for (Block &block : b)
            for (vf &v : block.v) v *= scale;
          for (int k = 0; k < N; ++k) sink(begin + k * reach + i, b[k]);
        }
      }
    });
  }

  // v += the sum of n elements of all messages in their order; with Hadamard v becomes their sum, of whole groups. Its blocks
  // stay in registers while messages are added. Meanwhile one line in `share` of the bytes that most often come next is
  // prefetched; the caller fetches the others.
  FL_NOINLINE Ahead sum(const fl_messages &in, int64_t unit, int n, int share, float *v) const {
    const IntCodec codec = *this;  // in registers: stores to v do not change it
    const int whole = codec.groups_of(n) * codec.group_;
    Ahead ahead;
    if constexpr (kHadamard) __builtin_memset(v, 0, size_t(whole) * sizeof(float));
    for (int64_t first = 0; first < in.count; first += kTogether) {
      const int count = int(in.count - first < kTogether ? in.count - first : kTogether);
      Message messages[kTogether] = {};
      for (int m = 0; m < count; ++m) messages[m] = codec.at(in, first + m, unit);
      const int bytes = n * kBits / 8;
      ahead = Ahead(messages[0].codes + bytes, in.stride, count, bytes);
#if defined(FL_AVX512)
      if constexpr (kBits == 4) {
        codec.sum_nibbles(messages, count, n, ahead, share, v);
        continue;
      }
#endif
      codec.with_parts([&](auto parts) FL_LAMBDA {
        codec.template sum_parts<decltype(parts)::value>(messages, count, n, ahead, share, v);
      });
    }
    if constexpr (kHadamard) rotate_blocks(v, whole);
    return ahead;
  }

 private:
  static constexpr int kTogether = 8;  // messages that are read side by side

  int group_bytes() const { return rounding_.group_bytes(); }
  static constexpr int code_bytes(int i) { return IntRounding<kBits>::code_bytes(i); }

  // 4-bit codes of a group larger than a block come in parts: bytes that hold a block of each half.
  template <int N>
  struct Parts {
    static constexpr int value = N;
  };
  template <class Body>
  FL_INLINE void with_parts(const Body &body) const {
    if constexpr (kBits == 4)
      if (group_ > kBlock) return body(Parts<2>{});
    body(Parts<1>{});
  }

  template <int N>
  FL_INLINE void sum_parts(const Message *messages, int count, int n, Ahead &ahead, int share, float *v) const {
    constexpr int kWide = kSideBySide > N ? kSideBySide / N : 1;
    const int reach = group_ / N;
    const int lines = lines_of_group(count, share);
    const int steps = reach >= kWide * kBlock ? reach / (kWide * kBlock) : 1;
    const Scales scales(messages, count, groups_of(n));
    for (int begin = 0, g = 0; begin < n; begin += group_, ++g) {
      const int codes = g * group_bytes();
      int i = 0;
      for (; i + kWide * kBlock <= reach; i += kWide * kBlock) {
        ahead.fetch((lines + steps - 1) / steps);
        sum_blocks<kWide, N>(messages, count, codes + code_bytes(i), scales.of(g), reach, v + begin + i);
      }
      if (i < reach) ahead.fetch(lines);
      for (; i < reach; i += kBlock)
        sum_blocks<1, N>(messages, count, codes + code_bytes(i), scales.of(g), reach, v + begin + i);
    }
  }

  int groups_of(int n) const { return (n + group_ - 1) / group_; }

  // Lines to fetch while a group is summed.
  int lines_of_group(int count, int share) const { return (count * group_bytes() + 64 * share - 1) / (64 * share); }

  // decode_scale of core/int_group.h of the first groups of messages, made side by side.
  class Scales {
   public:
    FL_INLINE Scales(const Message *messages, int count, int groups) {
      for (int m = 0; m < count; ++m) {
        const float *from = messages[m].scales;
        float *to = scales_ + m * kMaxGroups;
        __builtin_prefetch(from + groups);
        int g = 0;
        for (; g + kLanes <= groups; g += kLanes) store(to + g, decoded(load(from + g)));
#if defined(FL_AVX512)
        if (g < groups) store(to + g, decoded(_mm512_maskz_loadu_ps(__mmask16((1 << (groups - g)) - 1), from + g)));
#else
        for (; g < groups; ++g) to[g] = decode_scale(from[g], kBits, kHadamard);
#endif
      }
    }

    // Those of one group: message m has number m * kMaxGroups.
    const float *of(int group) const { return scales_ + group; }

   private:
    static FL_INLINE vf decoded(vf wire) {
      const vf scale = (vf)((vi)wire & -(1 << clear_bits(kBits)));
      const vi usual = magnitude_bits(scale * float(outermost_level(kBits))) < int32_t(kF32Inf);
      return usual ? (kHadamard ? scale * 0x1p-5f : scale) : (vf)broadcast(int32_t(kF32Nan));
    }

    alignas(64) float scales_[kTogether * kMaxGroups];
  };

#if defined(FL_CODE_ROTATION)
  // Calls body with the number of blocks that are rotated together.
  template <class Body>
  FL_INLINE void with_rotated(const Body &body) const {
    if constexpr (kBits == 4 || kWideBlocks == 2)
      if (group_ > kBlock) return body(Parts<2>{});
    body(Parts<1>{});
  }
  // How far apart the blocks lie, how many elements to the next ones, and to the end of those that come first.
  int apart() const { return kBits == 4 ? group_ / 2 : kBlock; }
  template <int N>
  static constexpr int kStep = kBits == 4 ? kBlock : N * kBlock;
  template <int N>
  int reach() const {
    return kBits == 4 ? group_ / N : group_;
  }

  template <class Sink>
  FL_INLINE void decode_rotated(Message in, int n, const Sink &sink) const {
    with_rotated([&](auto parts) FL_LAMBDA {
      constexpr int N = decltype(parts)::value;
      for (int begin = 0; begin < n; begin += group_, ++in.scales, in.codes += group_bytes()) {
        const vf scale = broadcast(decode_scale(*in.scales, kBits, true));
        for (int i = 0; i < reach<N>(); i += kStep<N>) {
          vf v[kRotatedVectors<N>];
          for (int r = 0; r < kRotatedVectors<N> / 4; ++r)
            rotated_codes<kBits, N>(in.codes + code_bytes(i), r, v + 4 * r);
          for (vf &x : v) x *= scale;
          Block b[N];
          in_order(v, b);
          for (int k = 0; k < N; ++k) sink(begin + k * apart() + i, b[k]);
        }
      }
    });
  }
#endif

#if defined(FL_AVX512)
  // A register holds the 16 levels: one operation looks up those of its lanes by their lowest four bits, in place of the three
  // that widen and convert.
  FL_INLINE void sum_nibbles(const Message *messages, int count, int n, Ahead &ahead, int share, float *v) const {
    const int reach = group_ / 2, lines = lines_of_group(count, share), steps = reach >= 64 ? reach / 64 : 1;
    const Scales scales(messages, count, groups_of(n));
    for (int begin = 0, g = 0; begin < n; begin += group_, ++g) {
      const int codes = g * group_bytes();
      int i = 0;
      for (; i + 64 <= reach; i += 64) {
        ahead.fetch((lines + steps - 1) / steps);
        sum_looked_up<4>(messages, count, codes + i, scales.of(g), reach, v + begin + i);
      }
      if (i == reach) continue;
      ahead.fetch(lines);
      for (; i < reach; i += kLanes) sum_looked_up<1>(messages, count, codes + i, scales.of(g), reach, v + begin + i);
    }
  }

  // The low nibbles of kWide times 16 bytes, and the high ones, whose elements lie so many further on.
  template <int kWide>
  static FL_INLINE void sum_looked_up(const Message *messages, int count, int codes, const float *scales, int apart,
                                      float *v) {
    const vf levels = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    vf low[kWide], high[kWide];
    for (int w = 0; w < kWide; ++w) {
      low[w] = load(v + w * kLanes);
      high[w] = load(v + apart + w * kLanes);
    }
    for (int m = 0; m < count; ++m) {
      const vf scale = broadcast(scales[m * kMaxGroups]);
      for (int w = 0; w < kWide; ++w) {
        const uint8_t *bytes = messages[m].codes + codes + w * kLanes;
        const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
        low[w] = add_exact_product(_mm512_permutexvar_ps(both, levels), scale, low[w]);
        high[w] = add_exact_product(_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), levels), scale, high[w]);
      }
    }
    for (int w = 0; w < kWide; ++w) {
      store(v + w * kLanes, low[w]);
      store(v + apart + w * kLanes, high[w]);
    }
  }
#endif

  // kWide blocks of each of N parts of a group, which lie so many elements apart.
  template <int kWide, int N>
  static FL_INLINE void sum_blocks(const Message *messages, int count, int codes, const float *scales, int apart,
                                   float *v) {
    Block sum[kWide][N];
    for (int w = 0; w < kWide; ++w)
      for (int k = 0; k < N; ++k) sum[w][k] = load_block(v + k * apart + w * kBlock);
    for (int m = 0; m < count; ++m) {
      const vf scale = broadcast(scales[m * kMaxGroups]);
      for (int w = 0; w < kWide; ++w) {
        Block b[N];
        unpack(messages[m].codes + codes + code_bytes(w * kBlock), b);
        for (int k = 0; k < N; ++k) add_scaled(sum[w][k], b[k], scale);
      }
    }
    for (int w = 0; w < kWide; ++w)
      for (int k = 0; k < N; ++k) store_block(v + k * apart + w * kBlock, sum[w][k]);
  }

  // The levels of N blocks.
  template <int N>
  static FL_INLINE void unpack(const uint8_t *codes, Block (&b)[N]) {
    if constexpr (between_integers(kBits)) {
      b[0] = load_run<kBits>(codes);
    } else {
      vi low[N][kQuad], high[N][kQuad];
      for (int k = 0; k < N; ++k) {
        load_bytes(codes + 16 * k, low[k]);
        if (kBits == 8)
          load_bytes(codes + 16, high[k]);
        else
          split_nibbles(low[k], low[k], high[k]);
      }
      if constexpr (N == 1) {
        b[0] = to_float(low[0], high[0]);
      } else {
        b[0] = to_float(low[0], low[1]);
        b[1] = to_float(high[0], high[1]);
      }
    }
  }

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

  static FL_INLINE void rotate_blocks(float *v, int n) {
    int i = 0;
    for (; i + kSideBySide * kBlock <= n; i += kSideBySide * kBlock) transform_blocks<kSideBySide, true>(v + i, v + i);
    for (; i < n; i += kBlock) transform_blocks<1, true>(v + i, v + i);
  }

  const IntRounding<kBits> rounding_;
  const int group_;
};

// Sums stay in registers and scales of a tile are made side by side: long tiles pay, where L1 has the codes of all messages.
template <int kBits, bool kHadamard>
constexpr int kSumTile<IntCodec<kBits, kHadamard>> = kBits == 8 ? kShortTile : 2048;

template <int kBits>
constexpr bool kSumsRotated<IntCodec<kBits, true>> = true;

template <class Codec>
class Values;

template <int kBits, bool kHadamard>
FL_INLINE void add_messages(const IntCodec<kBits, kHadamard> &codec, Values<IntCodec<kBits, kHadamard>> &values,
                            const Job &job, int64_t unit) {
  codec.sum(*job.in, unit, values.size(), 1, values.data());
}

}  // namespace fl::FL_ISA
