// Encoding by the `int` codec: what its own kernels and those that send what they encode share.
#pragma once

#include "cuda/owned.cuh"
#include "int_group.cuh"

namespace fl {

// What is encoded: x; x and messages; messages of another layout; x, f32, less a base of dtype.
enum class IntInput { kValues, kSum, kForeign, kDifference };

struct IntEncoding {
  IntLayout layout;
  IntMessages in;           // added to x
  IntLayout source;         // kForeign: of `in`
  bool source_transformed;  // likewise
  IntMessages out;
  uint32_t dtype;
  const void *x;
  int64_t x_stride;  // bytes of the elements of a message
  const void *base;  // kDifference
  float *residual;
  IntLevels levels;
  bool stochastic;
  RngKey key;
  int64_t offset;
};

// One message: where its elements come from, and where it goes.
struct IntPiece {
  IntLayout layout;
  const void *x;     // kSum: may be null
  const void *base;  // kDifference
  float *residual;
  float *scales;
  uint8_t *codes;
  uint64_t number;  // of its first element in the seed's sequence
};

// In the low bits of v + kMagic stands v rounded, for |v| < 2^22.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4b400000;

// bytes = stochastically rounded codes (core/int_group.h) of the values of a lane's block, whose first element has the number `number`.
template <bool kWide>
FL_DEVICE void quantize_by_chance(const IntEncoding &a, const float (&v)[kBlock], float inverse, uint64_t number,
                                  uint32_t (&bytes)[kWords]) {
  const RngKey key = near_key(a.key, number);
  const float units = inverse * kNoiseUnits;
  const int32_t below = int32_t(a.levels.below * kNoiseUnits) + (kWide ? 0 : kMagicBits);
  const auto sum = [&](int i, uint32_t random) {
    const float t = v[i] * units;
    return uint32_t((kWide ? nearest_int(t) : int32_t(float_bits(t + kMagic))) + int32_t(random) - below);
  };
#pragma unroll
  for (int word = 0; word < kWords / 2; ++word) {
    uint32_t first[4], second[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * word + j;
      const uint32_t random = random_bits(key, uint32_t(number) + i);
      first[j] = sum(i, half_of_bits(random, false));
      second[j] = sum(i + kNoisePair, half_of_bits(random, true));
    }
    bytes[word] = low_bytes<kNoiseBits / 8>(first[0], first[1], first[2], first[3]);
    bytes[word + kWords / 2] = low_bytes<kNoiseBits / 8>(second[0], second[1], second[2], second[3]);
  }
}

// bytes = codes of a lane's block, whose first element has the number `number`: as core/int_group.h rounds to nearest, but for the
// order of its steps. Without noise 4 and 8 bits need limits with the full range alone.
FL_DEVICE void quantize(const IntEncoding &a, const float (&v)[kBlock], float inverse, uint64_t number,
                        uint32_t (&bytes)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) bytes[i] = 0;
  if (inverse == 0.0f) return;
  const int32_t most = kMagicBits + a.levels.most, least = kMagicBits + a.levels.least;
  const auto limited = [&](float t) {
    const int32_t q = int32_t(float_bits(t - a.levels.below + kMagic));
    return uint32_t(q > most ? most : q < least ? least : q);
  };
  if (a.stochastic) {
    if (a.layout.bits == 8)
      quantize_by_chance<true>(a, v, inverse, number, bytes);
    else
      quantize_by_chance<false>(a, v, inverse, number, bytes);
  } else if (between_integers(a.layout.bits) || a.levels.units > float(a.levels.most)) {
    const auto code = [&](int i) { return limited(v[i] * inverse); };
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      bytes[i] = low_bytes(code(4 * i), code(4 * i + 1), code(4 * i + 2), code(4 * i + 3));
  } else {
    const auto code = [&](int i) { return float_bits(v[i] * inverse + kMagic); };
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      bytes[i] = low_bytes(code(4 * i), code(4 * i + 1), code(4 * i + 2), code(4 * i + 3));
  }
}

// What the receiver will make of a lane's codes, which are still a byte each.
template <bool kTransform>
FL_DEVICE void decode_own(int bits, const uint32_t (&bytes)[kWords], float scale, float (&v)[kBlock]) {
  const bool between = between_integers(bits);  // levels of core/int_group.h, of four codes at once
  uint32_t biased[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    biased[i] = (between ? (bytes[i] << 1 & 0xfefefefeu) | 0x01010101u : bytes[i]) ^ 0x80808080u;
  dequantize<kTransform>(biased, code_bias(8), decode_scale(scale, bits, kTransform), v);
}

// A span of a message. A group larger than a tile is gone through twice, the second time without its last tile, which is
// still in registers. kAhead messages of a sum are on their way.
template <bool kTransform, IntInput kInput, bool kResidual, int kAhead = 2>
FL_DEVICE void encode_span(const IntEncoding &a, const IntPiece &piece, int64_t span) {
  const IntLayout &layout = piece.layout;
  const int lane = lane_index(), tiles = layout.tiles();
  uint32_t amax = 0;
  GroupScale scale = {};
#pragma unroll 1
  for (int step = 0; step < 2 * tiles - 1; ++step) {
    const int tile = step & (tiles - 1);
    const Place at = place_of(layout, span, tile, lane);

    float v[kBlock];
    if (kInput == IntInput::kSum) {
      sum_messages<kTransform, kAhead>(layout, a.in, a.dtype, piece.x, at, lane, v);
      clear_padding(v, layout.numel - at.first);
    } else if (kInput == IntInput::kForeign) {
      sum_foreign_messages(a.source, a.source_transformed, a.in, at, v);
      clear_padding(v, layout.numel - at.first);
    } else if (kInput == IntInput::kDifference) {
      float base[kBlock];
      load_block(FL_F32, piece.x, layout.numel, at.first, lane, v);
      load_block(a.dtype, piece.base, layout.numel, at.first, lane, base);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] -= base[i];
    } else {
      load_block(a.dtype, piece.x, layout.numel, at.first, lane, v);
    }
    if (kResidual) add_residual(piece.residual, layout.numel, at.first, lane, v);
    float wanted[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) wanted[i] = v[i];
    if (kTransform) hadamard32(v);

    if (step < tiles) {
      const uint32_t largest = largest_of(v);
      amax = largest > amax ? largest : amax;
    }
    if (step == tiles - 1) scale = make_scale(max_over_lanes(amax, layout.lanes()), layout.bits, a.levels);
    if (step < tiles - 1) continue;

    uint32_t bytes[kWords];
    quantize(a, v, scale.inverse, piece.number + at.first, bytes);
    store_codes(layout, piece.codes, at, bytes);
    if (at.exists && at.block == 0) piece.scales[at.group] = scale.scale;
    if (kResidual) {
      decode_own<kTransform>(layout.bits, bytes, scale.scale, v);
      update_residual(piece.residual, layout.numel, at.first, lane, wanted, v);
    }
  }
}

inline IntEncoding int_encoding(const fl_spec &spec, const void *x, float *residual, const fl_messages &out) {
  return {
      int_layout(spec),
      {},
      {},
      false,
      int_messages(out),
      spec.dtype,
      x,
      spec.numel * element_size(spec.dtype),
      nullptr,
      residual,
      int_levels(int(spec.param[0]), int(spec.param[1]), (spec.param[2] & FL_INT_STOCHASTIC) != 0,
                 (spec.param[2] & FL_INT_FULL) != 0),
      (spec.param[2] & FL_INT_STOCHASTIC) != 0,
      make_key(spec.seed),
      spec.offset,
  };
}

// In int_two_shot.cu.
cudaError_t int_two_shot(const fl_spec &spec, const TwoShot &call, const Peers &peers, cudaStream_t stream);

}  // namespace fl
