// Scales of the `block` codec (codecs/block/block_scale.h): those of a tile are made, or read, side by side.
#pragma once

#include <type_traits>

#include "block_scale.h"
#include "cpu/elements.h"
#include "cpu/kernels.h"

namespace fl::FL_ISA {

constexpr int kMaxBlocks = kMaxTile / kBlock;

class BlockScales {
 public:
  explicit BlockScales(const Job &job)
      : block_(int(job.spec->param[1])),
        scaling_(block_scaling(job.spec->param)),
        given_(job.spec->param[3] & FL_BLOCK_GIVEN) {}

  int block() const { return block_; }
  bool dual() const { return scaling_.kind == FL_SCALE_DUAL; }
  bool known() const { return scaling_.kind == FL_SCALE_MESSAGE; }  // in the second pass, whatever the blocks hold

  // Where those of a unit lie in the plane of a message.
  int64_t place(int64_t unit) const {
    return scaling_.kind == FL_SCALE_MESSAGE ? 0 : unit * scale_bytes(scaling_.kind);
  }

  // FL_SCALE_MESSAGE, first of two passes: the plane becomes the largest magnitude of all that was looked at.
  static FL_NOINLINE void raise_amax(vi *top, int blocks, uint8_t *out) {
    alignas(64) int32_t amax[kMaxBlocks];
    reduce(top, blocks, amax);
    uint32_t most = 0;
    for (int g = 0; g < blocks; ++g) most = uint32_t(amax[g]) > most ? uint32_t(amax[g]) : most;
    if (most >= kF32Inf) most = kF32Nan;
    uint32_t *plane = reinterpret_cast<uint32_t *>(out);
    uint32_t seen = __atomic_load_n(plane, __ATOMIC_RELAXED);
    while (seen < most && !__atomic_compare_exchange_n(plane, &seen, most, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  // FL_SCALE_DUAL: what transform_tile left becomes scales, and what values are multiplied by once they are at their target
  // energy. These values are left in the tile.
  FL_NOINLINE const float *bring(const float *values, vi *top, int blocks, uint8_t *out, float *inverse,
                                 float *tile) const {
    alignas(64) int32_t amax[kMaxBlocks];
    uint32_t *words = reinterpret_cast<uint32_t *>(out);
    reduce(top, blocks, amax);
    for (int g = 0; g < blocks; ++g) {
      const float *v = values + g * block_;
      float squares[kMaxBlock];
      for (int i = 0; i < block_; ++i) squares[i] = v[i] * v[i];
      const BlockScale scale = make_block_scale(scaling_, uint32_t(amax[g]), sum_of_block(squares, block_));
      words[2 * g] = scale.wire;
      words[2 * g + 1] = scale.first;
      inverse[g] = scale.inverse;
      for (int i = 0; i < block_; ++i) tile[g * block_ + i] = v[i] * scale.before;
    }
    return tile;
  }

  // The same for the other kinds, whose values stay what they are.
  FL_NOINLINE void make(vi *top, int blocks, uint8_t *out, float *inverse) const {
    alignas(64) int32_t amax[kMaxBlocks];
    BlockScaling scaling = scaling_;
    if (scaling.kind == FL_SCALE_MESSAGE) {
      const uint32_t all = *reinterpret_cast<const uint32_t *>(out);
      const float factor = make_block_scale(scaling, all, 0.0f).inverse;
      for (int g = 0; g < blocks; ++g) inverse[g] = factor;
      return;
    }
    reduce(top, blocks, amax);
    if (given_) {
      uint16_t *scales = reinterpret_cast<uint16_t *>(out);
      for (int g = 0; g < blocks; ++g) {
        const BlockScale scale = given_block_scale(scaling, scales[g], uint32_t(amax[g]));
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
    if (scaling.kind == FL_SCALE_F32) return write(reinterpret_cast<uint32_t *>(out), FL_SCALE_F32);
    if (scaling.kind == FL_SCALE_E8M0) return write(out, FL_SCALE_E8M0);
    write(reinterpret_cast<uint16_t *>(out), FL_SCALE_BF16);
  }

  // What codes are multiplied by, times a power of two.
  FL_NOINLINE void load(const uint8_t *in, int blocks, float factor, float *scales) const {
    BlockScaling scaling = scaling_;
    const auto *words = reinterpret_cast<const uint32_t *>(in);
    const auto *halves = reinterpret_cast<const uint16_t *>(in);
    const auto read = [&](uint32_t kind, auto wire, auto first) FL_LAMBDA {
      scaling.kind = kind;
      for (int g = 0; g < blocks; ++g) scales[g] = decode_block_scale(scaling, wire(g), first(g)) * factor;
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
        return read(FL_SCALE_E8M0, [&](int g) FL_LAMBDA { return uint32_t(in[g]); }, none);
      case FL_SCALE_BF16:
        return read(FL_SCALE_BF16, [&](int g) FL_LAMBDA { return uint32_t(halves[g]); }, none);
      default:
        return read(FL_SCALE_MESSAGE, [&](int) FL_LAMBDA { return words[0]; }, none);
    }
  }

 private:
  // The largest magnitude of each block.
  static FL_INLINE void reduce(vi *top, int blocks, int32_t *amax) {
    for (int g = blocks; g % kLanes; ++g) top[g] = vi{};
    for (int g = 0; g < blocks; g += kLanes) store(amax + g, max_of_each(top + g));
  }

  const int block_;
  const BlockScaling scaling_;
  const bool given_;
};

}  // namespace fl::FL_ISA
