// The `block` codec (codecs/block/block_scale.h) on vectors. A tile of whole blocks is transformed into L1, its scales are made
// side by side, then its codes.
#pragma once

#include <type_traits>

#include "block_scales.h"
#include "cpu/rotation.h"
#include "small_numbers.h"

namespace fl::FL_ISA {

template <int N, class T>
FL_INLINE vi rotate_block(const T *x, float *tile) {
  vi most{};
  hadamard_runs<N>(
      tile, [&](int k) FL_LAMBDA { return load_block(x + k * kBlock); },
      [&](vf v) FL_LAMBDA {
        most = max(most, magnitude_bits(v));
        return v;
      });
  return most;
}

// Leaves in the tile what is to be quantised, and for each block a vector that holds the largest magnitude in some lane.
// Values that are f32 already and are not rotated stay where they are. Meanwhile `lines` are fetched for each block.
template <bool kHadamard, class T>
FL_NOINLINE const float *transform_tile(const T *x, int block, int blocks, float *tile, vi *top, Ahead &ahead,
                                        int lines) {
  if constexpr (kHadamard) {
    with_runs(block / kBlock, [&](auto runs) FL_LAMBDA {
      constexpr int N = decltype(runs)::value;
      for (int g = 0; g < blocks; ++g) {
        ahead.fetch(lines);
        top[g] = rotate_block<N>(x + g * N * kBlock, tile + g * N * kBlock);
      }
    });
    return tile;
  } else {
    for (int g = 0; g < blocks; ++g) {
      ahead.fetch(lines);
      vi most{};
      for (int i = g * block; i < (g + 1) * block; i += kBlock) {
        const Block b = load_block(x + i);
        for (const vf &v : b.v) most = max(most, magnitude_bits(v));
        if constexpr (!std::is_same_v<T, float>) store_block(tile + i, b);
      }
      top[g] = most;
    }
    if constexpr (std::is_same_v<T, float>)
      return x;
    else
      return tile;
  }
}

template <class Numbers, bool kHadamard>
class BlockCodec {
 public:
  struct Message {
    uint8_t *scales;
    uint8_t *codes;
  };

  static constexpr bool kCanonical = false;  // formats have NaNs of their own

  explicit BlockCodec(const Job &job) : scales_(job), block_(scales_.block()), look_(job.look) {}

  int unit() const { return block_; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    return {plane(0) + scales_.place(unit), plane(1) + unit * code_bytes()};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t, Ahead ahead) const {
    alignas(64) float tile[kMaxTile];
    vi top[kMaxBlocks];
    const int blocks = (n + block_ - 1) / block_;
    if constexpr (std::is_same_v<T, float> && !kHadamard)
      if (scales_.known() && !look_) return quantize(x, top, blocks, out, ahead, tile);
    const int lines = ahead.share(look_ ? blocks : 2 * blocks);
    const float *values = transform_tile<kHadamard>(x, block_, blocks, tile, top, ahead, lines);
    if (look_)
      BlockScales::raise_amax(top, blocks, out.scales);
    else
      quantize(values, top, blocks, out, ahead, tile);
  }

  // v += the sum of n elements of all messages in their order; with Hadamard v becomes their sum, of whole blocks. Its runs
  // stay in registers while messages are added.
  FL_NOINLINE void sum(const fl_messages &in, int64_t unit, int n, float *v) const {
    const int blocks = (n + block_ - 1) / block_, bytes = code_bytes();
    if (kHadamard && in.count == 0) __builtin_memset(v, 0, size_t(n) * sizeof(float));
    for (int64_t first = 0; first < in.count; first += kTogether) {
      const int count = int(in.count - first < kTogether ? in.count - first : kTogether);
      alignas(64) float scales[kTogether * kMaxBlocks];
      Message messages[kTogether] = {};
      for (int m = 0; m < count; ++m) {
        messages[m] = at(in, first + m, unit);
        scales_.load(messages[m].scales, blocks, Numbers::unit(), scales + m * kMaxBlocks);
      }
      Ahead ahead(messages[0].codes + blocks * bytes, in.stride, count, blocks * bytes);
      const int lines = ahead.share(blocks);
      const bool anew = kHadamard && first == 0;
      bool nans = false;
      if constexpr (Numbers::kOwnNan)
        for (int m = 0; m < count; ++m) nans |= Numbers::has_nan(messages[m].codes, blocks * bytes);
      for (int g = 0; g < blocks; ++g) {
        ahead.fetch(lines);
        const int codes = g * bytes;
        float *to = v + g * block_;
        if (nans)
          sum_block<true>(messages, count, codes, scales + g, anew, to);
        else
          sum_block<false>(messages, count, codes, scales + g, anew, to);
        if constexpr (kHadamard)
          if (first + count == in.count) rotate_back(to);
      }
    }
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    alignas(64) float scales[kMaxBlocks];
    scales_.load(in.scales, (n + block_ - 1) / block_, Numbers::unit(), scales);
    const int block = block_, bytes = code_bytes();
    const float *scale = scales;
    for (int begin = 0; begin < n; begin += block, ++scale, in.codes += bytes)
      if constexpr (kHadamard) {
        decode_rotated(in.codes, *scale, begin, sink);
      } else {
        for (int i = 0; i < block; i += kBlock) {
          Block b = Numbers::decode(in.codes + i / kBlock * Numbers::kBytes);
          for (vf &v : b.v) v *= *scale;
          sink(begin + i, b);
        }
      }
  }

 private:
  static constexpr int kTogether = 8;                     // messages that are read side by side
  static constexpr int kWideRuns = kLanes == 16 ? 4 : 2;  // runs that are summed together

  template <bool kNans>
  FL_INLINE void sum_block(const Message *messages, int count, int codes, const float *scales, bool anew,
                           float *v) const {
    int k = 0;
    for (; (k + kWideRuns) * kBlock <= block_; k += kWideRuns)
      sum_runs<kWideRuns, kNans>(messages, count, codes + k * Numbers::kBytes, scales, anew, v + k * kBlock);
    for (; k * kBlock < block_; ++k)
      sum_runs<1, kNans>(messages, count, codes + k * Numbers::kBytes, scales, anew, v + k * kBlock);
  }

  // The scale of message m has number m * kMaxBlocks. The sum begins with 0 if it is made `anew`, else with v.
  template <int kWide, bool kNans>
  static FL_INLINE void sum_runs(const Message *messages, int count, int codes, const float *scales, bool anew,
                                 float *v) {
    Block sum[kWide] = {};
    if (!anew)
      for (int w = 0; w < kWide; ++w) sum[w] = load_block(v + w * kBlock);
    for (int m = 0; m < count; ++m) {
      const vf scale = broadcast(scales[m * kMaxBlocks]);
      for (int w = 0; w < kWide; ++w)
        add_scaled(sum[w], Numbers::template decode<kNans>(messages[m].codes + codes + w * Numbers::kBytes), scale);
    }
    for (int w = 0; w < kWide; ++w) store_block(v + w * kBlock, sum[w]);
  }

  FL_NOINLINE void rotate_back(float *v) const {
    with_runs(block_ / kBlock, [&](auto runs) FL_LAMBDA {
      hadamard_runs<decltype(runs)::value>(
          v, [&](int k) FL_LAMBDA { return load_block(v + k * kBlock); }, [](vf x) FL_LAMBDA { return x; });
    });
  }

  int code_bytes() const { return block_ / kBlock * Numbers::kBytes; }

  FL_NOINLINE void quantize(const float *values, vi *top, int blocks, Message out, Ahead ahead, float *tile) const {
    alignas(64) float inverse[kMaxBlocks];
    if (scales_.dual())
      values = scales_.bring(values, top, blocks, out.scales, inverse, tile);
    else
      scales_.make(top, blocks, out.scales, inverse);
    const int block = block_, lines = ahead.share(blocks);
    for (int g = 0; g < blocks; ++g) {
      const float factor = inverse[g];
      ahead.fetch(lines);
      for (int i = 0; i < block; i += kBlock, values += kBlock, out.codes += Numbers::kBytes) {
        if (__builtin_expect(factor == 0.0f, 0))
          __builtin_memset(out.codes, 0, Numbers::kBytes);
        else
          Numbers::encode(values, factor, out.codes);
      }
    }
  }

  template <class Sink>
  FL_INLINE void decode_rotated(const uint8_t *codes, float scale, int begin, const Sink &sink) const {
    alignas(64) float tile[kMaxBlock];
    rotate_codes(codes, scale, tile);
    for (int i = 0; i < block_; i += kBlock) sink(begin + i, load_block(tile + i));
  }

  FL_NOINLINE void rotate_codes(const uint8_t *codes, float scale, float *tile) const {
    with_runs(block_ / kBlock, [&](auto runs) FL_LAMBDA {
      hadamard_runs<decltype(runs)::value>(
          tile,
          [&](int k) FL_LAMBDA {
            Block b = Numbers::decode(codes + k * Numbers::kBytes);
            for (vf &v : b.v) v *= scale;
            return b;
          },
          [](vf v) FL_LAMBDA { return v; });
    });
  }

  const BlockScales scales_;
  const int block_;
  const bool look_;
};

// As for `int`: long tiles pay, where L1 has the codes of all messages.
template <class Numbers, bool kHadamard>
constexpr int kSumTile<BlockCodec<Numbers, kHadamard>> = Numbers::kBytes == 32 ? kShortTile : 2048;

template <class Numbers>
constexpr bool kSumsRotated<BlockCodec<Numbers, true>> = true;

template <class Codec>
class Values;

template <class Numbers, bool kHadamard>
FL_INLINE void add_messages(const BlockCodec<Numbers, kHadamard> &codec, Values<BlockCodec<Numbers, kHadamard>> &values,
                            const Job &job, int64_t unit) {
  codec.sum(*job.in, unit, values.size(), values.data());
}

}  // namespace fl::FL_ISA
