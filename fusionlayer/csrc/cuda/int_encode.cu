// encode, encode_difference, recode and recode_from of the `int` codec.
#include "int_group.cuh"
#include "owned.cuh"

namespace fl {
namespace {

// What is encoded: x; x and messages; messages of another layout; x, f32, less a base of dtype.
enum class Input { kValues, kSum, kForeign, kDifference };

struct EncodeArguments {
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

// In the low bits of v + kMagic stands v rounded, for |v| < 2^22.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4b400000;

// bytes = stochastic_code of core/int_group.h of the values of a lane's block, whose first element has the number `number`.
template <bool kWide>
FL_DEVICE void quantize_by_chance(const EncodeArguments &a, const float (&v)[kBlock], float inverse, uint64_t number,
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

// bytes = codes of a lane's block, whose first element has the number `number`: int_code of core/int_group.h, but for the
// order of its steps. Without noise 4 and 8 bits need limits with the full range alone.
FL_DEVICE void quantize(const EncodeArguments &a, const float (&v)[kBlock], float inverse, uint64_t number,
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
  const bool between = between_integers(bits);  // int_level of core/int_group.h, on four codes at once
  uint32_t biased[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    biased[i] = (between ? (bytes[i] << 1 & 0xfefefefeu) | 0x01010101u : bytes[i]) ^ 0x80808080u;
  dequantize<kTransform>(biased, code_bias(8), decode_scale(scale, bits, kTransform), v);
}

// One message. A group larger than a tile is gone through twice, the second time without its last tile, which is still in
// registers.
template <bool kTransform, Input kInput, bool kResidual>
FL_DEVICE void encode_message(const EncodeArguments &a, int64_t message) {
  const IntLayout &layout = a.layout;
  const int lane = lane_index(), tiles = layout.tiles();
  const int64_t start = message * layout.numel, spans = layout.spans();
  const void *x = byte_offset(a.x, message * a.x_stride);
  float *scales = byte_offset(a.out.scales, message * a.out.stride);
  uint8_t *codes = a.out.codes + message * a.out.stride;

  for (int64_t span = warp_index(); span < spans; span += warp_count()) {
    uint32_t amax = 0;
    GroupScale scale = {};
#pragma unroll 1
    for (int step = 0; step < 2 * tiles - 1; ++step) {
      const int tile = step & (tiles - 1);
      const Place at = place_of(layout, span, tile, lane);

      float v[kBlock];
      if (kInput == Input::kSum) {
        load_or_zero(a.dtype, a.x, layout.numel, at.first, lane, v);
        add_messages<kTransform>(layout, a.in, at, v);
        clear_padding(v, layout.numel - at.first);
      } else if (kInput == Input::kForeign) {
        load_or_zero(a.dtype, nullptr, layout.numel, at.first, lane, v);
        add_foreign_messages(a.source, a.source_transformed, a.in, at, v);
        clear_padding(v, layout.numel - at.first);
      } else if (kInput == Input::kDifference) {
        float base[kBlock];
        load_block(FL_F32, byte_offset(a.x, start * 4), layout.numel, at.first, lane, v);
        load_block(a.dtype, byte_offset(a.base, message * a.x_stride), layout.numel, at.first, lane, base);
#pragma unroll
        for (int i = 0; i < kBlock; ++i) v[i] -= base[i];
      } else {
        load_block(a.dtype, x, layout.numel, at.first, lane, v);
      }
      if (kResidual) add_residual(a.residual + start, layout.numel, at.first, lane, v);
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
      const uint64_t number = uint64_t(a.offset) + uint64_t(message * layout.groups << layout.log2_group) + at.first;
      quantize(a, v, scale.inverse, number, bytes);
      store_codes(layout, codes, at, bytes);
      if (at.exists && at.block == 0) scales[at.group] = scale.scale;
      if (kResidual) {
        decode_own<kTransform>(layout.bits, bytes, scale.scale, v);
        update_residual(a.residual + start, layout.numel, at.first, lane, wanted, v);
      }
    }
  }
}

template <bool kTransform, Input kInput, bool kResidual>
__global__ void __launch_bounds__(kThreads) encode_kernel(const EncodeArguments a) {
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) encode_message<kTransform, kInput, kResidual>(a, m);
}

EncodeArguments arguments(const fl_spec &spec, const void *x, float *residual, const fl_messages &out) {
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

template <Input kInput>
cudaError_t launch(const EncodeArguments &a, bool hadamard, cudaStream_t stream) {
  auto kernel = hadamard ? encode_kernel<true, kInput, false> : encode_kernel<false, kInput, false>;
  if constexpr (kInput != Input::kDifference)
    if (a.residual) kernel = hadamard ? encode_kernel<true, kInput, true> : encode_kernel<false, kInput, true>;
  const Grid grid(a.layout.spans(), a.out.count);
  if (grid.error) return grid.error;
  FL_LAUNCH(kernel, grid.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t int_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream) {
  return launch<Input::kValues>(arguments(spec, x, residual, out), spec.param[2] & FL_INT_HADAMARD, stream);
}

cudaError_t int_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                       const fl_messages &out, cudaStream_t stream) {
  EncodeArguments a = arguments(spec, x, residual, out);
  a.in = int_messages(in);
  return launch<Input::kSum>(a, spec.param[2] & FL_INT_HADAMARD, stream);
}

cudaError_t int_recode_from(const fl_spec &source, const fl_messages &in, const fl_spec &spec, float *residual,
                            const fl_messages &out, cudaStream_t stream) {
  EncodeArguments a = arguments(spec, nullptr, residual, out);
  a.in = int_messages(in);
  a.source = int_layout(source);
  a.source_transformed = (source.param[2] & FL_INT_HADAMARD) != 0;
  return launch<Input::kForeign>(a, spec.param[2] & FL_INT_HADAMARD, stream);
}

cudaError_t int_encode_difference(const fl_spec &spec, const float *x, const void *base, const fl_messages &out,
                                  cudaStream_t stream) {
  EncodeArguments a = arguments(spec, x, nullptr, out);
  a.base = base;
  return launch<Input::kDifference>(a, spec.param[2] & FL_INT_HADAMARD, stream);
}

}  // namespace fl
