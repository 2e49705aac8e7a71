// The `block` codec (core/block_scale.h) on vectors. A tile of whole blocks is transformed into L1, its scales are made
// side by side, then its codes.
#pragma once

#include <type_traits>

#include "block_scale.h"
#include "elements.h"
#include "kernels.h"
#include "rotation.h"
#include "small_numbers.h"

namespace fl::FL_ISA {

template <class Numbers, bool kHadamard>
class BlockCodec {
 public:
  struct Message {
    uint8_t *scales;
    uint8_t *codes;
  };

  static constexpr bool kCanonical = false;  // formats have NaNs of their own

  explicit BlockCodec(const Job &job)
      : block_(int(job.spec->param[1])),
        scaling_(block_scaling(job.spec->param)),
        numbers_(job.spec->param[0]),
        look_(job.look),
        given_(job.spec->param[3] & FL_BLOCK_GIVEN) {}

  int unit() const { return block_; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    const int64_t scale = scaling_.kind == FL_SCALE_MESSAGE ? 0 : unit * scale_bytes(scaling_.kind);
    return {plane(0) + scale, plane(1) + unit * code_bytes()};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t) const {
    alignas(64) float tile[kMaxTile], inverse[kMaxBlocks];
    vi top[kMaxBlocks];
    const int blocks = (n + block_ - 1) / block_;
    const float *values = transform(x, blocks, tile, top);
    if (look_) return raise_amax(top, blocks, out);
    if (scaling_.kind == FL_SCALE_DUAL)
      values = bring(values, top, blocks, out, inverse, tile);
    else
      make_scales(top, blocks, out, inverse);
    const Numbers numbers = numbers_;
    const T *next = x + n;  // most often the next tile: it is on its way while this one is computed
    for (int g = 0; g < blocks; ++g) {
      const float factor = inverse[g];
      for (int i = 0; i < block_; i += kBlock, values += kBlock, next += kBlock, out.codes += Numbers::kBytes) {
        prefetch_block(next);
        if (__builtin_expect(factor == 0.0f, 0))
          __builtin_memset(out.codes, 0, Numbers::kBytes);
        else
          numbers.encode(values, factor, out.codes);
      }
    }
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    alignas(64) float scales[kMaxBlocks];
    load_scales(in, (n + block_ - 1) / block_, scales);
    const Numbers numbers = numbers_;
    const int block = block_, bytes = code_bytes();
    const float *scale = scales;
    for (int begin = 0; begin < n; begin += block, ++scale, in.codes += bytes)
      if constexpr (kHadamard) {
        decode_rotated(numbers, in.codes, *scale, begin, sink);
      } else {
        for (int i = 0; i < block; i += kBlock) {
          Block b = numbers.decode(in.codes + i / kBlock * Numbers::kBytes);
          for (vf &v : b.v) v *= *scale;
          sink(begin + i, b);
        }
      }
  }

 private:
  static constexpr int kMaxBlocks = kMaxTile / kBlock;

  int code_bytes() const { return block_ / kBlock * Numbers::kBytes; }

  // Leaves in the tile what is to be quantised, and for each block a vector that holds the largest magnitude in some lane.
  // Values that are f32 already and are not rotated stay where they are.
  template <class T>
  __attribute__((noinline)) const float *transform(const T *x, int blocks, float *tile, vi *top) const {
    if constexpr (kHadamard) {
      with_runs(block_ / kBlock, [&](auto runs) FL_LAMBDA {
        constexpr int N = decltype(runs)::value;
        for (int g = 0; g < blocks; ++g) top[g] = rotate<N>(x + g * N * kBlock, tile + g * N * kBlock);
      });
      return tile;
    } else {
      for (int g = 0; g < blocks; ++g) {
        vi most{};
        for (int i = g * block_; i < (g + 1) * block_; i += kBlock) {
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

  template <int N, class T>
  static FL_INLINE vi rotate(const T *x, float *tile) {
    vi most{};
    hadamard_runs<N>(
        tile, [&](int k) FL_LAMBDA { return load_block(x + k * kBlock); },
        [&](vf v) FL_LAMBDA {
          most = max(most, magnitude_bits(v));
          return v;
        });
    return most;
  }

  template <class Sink>
  FL_INLINE void decode_rotated(const Numbers &numbers, const uint8_t *codes, float scale, int begin,
                                const Sink &sink) const {
    alignas(64) float tile[kMaxBlock];
    rotate_codes(numbers, codes, scale, tile);
    for (int i = 0; i < block_; i += kBlock) sink(begin + i, load_block(tile + i));
  }

  void rotate_codes(const Numbers &given, const uint8_t *codes, float scale, float *tile) const {
    const Numbers numbers = given;
    with_runs(block_ / kBlock, [&](auto runs) FL_LAMBDA {
      hadamard_runs<decltype(runs)::value>(
          tile, [&](int k) FL_LAMBDA { return numbers.decode(codes + k * Numbers::kBytes); },
          [&](vf v) FL_LAMBDA { return v * scale; });
    });
  }

  // The largest magnitude of each block.
  static FL_INLINE void reduce(vi *top, int blocks, int32_t *amax) {
    for (int g = blocks; g % kLanes; ++g) top[g] = vi{};
    for (int g = 0; g < blocks; g += kLanes) store(amax + g, max_of_each(top + g));
  }

  // FL_SCALE_MESSAGE, first of two passes: the plane becomes the largest magnitude of all that was looked at.
  static void raise_amax(vi *top, int blocks, Message out) {
    alignas(64) int32_t amax[kMaxBlocks];
    reduce(top, blocks, amax);
    uint32_t most = 0;
    for (int g = 0; g < blocks; ++g) most = uint32_t(amax[g]) > most ? uint32_t(amax[g]) : most;
    if (most >= kF32Inf) most = kF32Nan;
    uint32_t *plane = reinterpret_cast<uint32_t *>(out.scales);
    uint32_t seen = __atomic_load_n(plane, __ATOMIC_RELAXED);
    while (seen < most && !__atomic_compare_exchange_n(plane, &seen, most, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  // FL_SCALE_DUAL: makes the scales, and leaves in the tile the values at their target energy.
  __attribute__((noinline)) const float *bring(const float *values, vi *top, int blocks, Message out, float *inverse,
                                               float *tile) const {
    alignas(64) int32_t amax[kMaxBlocks];
    reduce(top, blocks, amax);
    for (int g = 0; g < blocks; ++g) {
      const float *v = values + g * block_;
      float squares[kMaxBlock];
      for (int i = 0; i < block_; ++i) squares[i] = v[i] * v[i];
      const BlockScale scale = make_block_scale(scaling_, uint32_t(amax[g]), sum_of_block(squares, block_));
      reinterpret_cast<uint32_t *>(out.scales)[2 * g] = scale.wire;
      reinterpret_cast<uint32_t *>(out.scales)[2 * g + 1] = scale.first;
      inverse[g] = scale.inverse;
      for (int i = 0; i < block_; ++i) tile[g * block_ + i] = v[i] * scale.before;
    }
    return tile;
  }

  void make_scales(vi *top, int blocks, Message out, float *inverse) const {
    alignas(64) int32_t amax[kMaxBlocks];
    BlockScaling scaling = scaling_;
    if (scaling.kind == FL_SCALE_MESSAGE) {
      const uint32_t all = *reinterpret_cast<const uint32_t *>(out.scales);
      const float factor = make_block_scale(scaling, all, 0.0f).inverse;
      for (int g = 0; g < blocks; ++g) inverse[g] = factor;
      return;
    }
    reduce(top, blocks, amax);
    if (given_) {
      uint16_t *scales = reinterpret_cast<uint16_t *>(out.scales);
      for (int g = 0; g < blocks; ++g) {
        const BlockScale scale = given_block_scale(scales[g], uint32_t(amax[g]));
        scales[g] = uint16_t(scale.wire);
        inverse[g] = scale.inverse;
      }
      return;
    }
    const auto write = [&](auto *scales, uint32_t kind) FL_LAMBDA {
      scaling.kind = kind;  // known to the compiler, so that it makes vectors of the loop
      for (int g = 0; g < blocks; ++g) {
        const BlockScale scale = make_block_scale(scaling, uint32_t(amax[g]), 0.0f);
        scales[g] = std::remove_reference_t<decltype(*scales)>(scale.wire);
        inverse[g] = scale.inverse;
      }
    };
    if (scaling.kind == FL_SCALE_F32) return write(reinterpret_cast<uint32_t *>(out.scales), FL_SCALE_F32);
    if (scaling.kind == FL_SCALE_E8M0) return write(out.scales, FL_SCALE_E8M0);
    write(reinterpret_cast<uint16_t *>(out.scales), FL_SCALE_BF16);
  }

  void load_scales(Message in, int blocks, float *scales) const {
    BlockScaling scaling = scaling_;
    const auto *words = reinterpret_cast<const uint32_t *>(in.scales);
    const auto *halves = reinterpret_cast<const uint16_t *>(in.scales);
    const auto read = [&](uint32_t kind, auto wire, auto first) FL_LAMBDA {
      scaling.kind = kind;
      for (int g = 0; g < blocks; ++g) scales[g] = decode_block_scale(scaling, wire(g), first(g));
    };
    const auto none = [](int) FL_LAMBDA { return 0u; };
    switch (scaling.kind) {
      case FL_SCALE_F32:
        return read(FL_SCALE_F32, [&](int g) FL_LAMBDA { return words[g]; }, none);
      case FL_SCALE_DUAL:
        return read(
            FL_SCALE_DUAL, [&](int g) FL_LAMBDA { return words[2 * g]; },
            [&](int g) FL_LAMBDA { return words[2 * g + 1]; });
      case FL_SCALE_E8M0:
        return read(FL_SCALE_E8M0, [&](int g) FL_LAMBDA { return uint32_t(in.scales[g]); }, none);
      case FL_SCALE_BF16:
        return read(FL_SCALE_BF16, [&](int g) FL_LAMBDA { return uint32_t(halves[g]); }, none);
      default:
        return read(FL_SCALE_MESSAGE, [&](int) FL_LAMBDA { return words[0]; }, none);
    }
  }

  int block_;
  BlockScaling scaling_;
  Numbers numbers_;
  bool look_;
  bool given_;
};

}  // namespace fl::FL_ISA
