// encode and recode of the `tahquant` codec, and the entropies by which coarse tokens are chosen.
#include "tahquant.cuh"

namespace fl {
namespace {

struct EncodeArguments {
  TahShape shape;
  TahMessages in;  // recode: added to x
  TahMessages out;
  uint32_t dtype;
  const void *x;
  int64_t x_stride;  // bytes of the elements of a message
  float *residual;
  int64_t tiles;  // of runs for all lanes
};

// The place of the element that is at least twice as large as all others of a tile; kNoPivot if there is none.
FL_DEVICE int find_pivot(const TahRun &run, uint32_t amax, const float (&v)[kBlock]) {
  uint32_t count = 0, found = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float magnitude = bits_float(float_bits(v[i]) & 0x7fffffffu);
    const bool large = float_bits(magnitude + magnitude) > amax;
    count += large;
    found = large ? uint32_t(i) : found;
  }
  found = count ? found + run.lane_of_tile() * kBlock : 0u;
  for (int mask = 1; mask < run.width; mask *= 2) count += shuffle_xor(count, mask);
  found = max_over_lanes(found, run.width);
  return count == 1 && amax < kF32Inf ? int(found) : kNoPivot;
}

// Orders floats as unsigned integers.
FL_DEVICE uint32_t ordered(float v) {
  const uint32_t bits = float_bits(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
FL_DEVICE float from_ordered(uint32_t v) { return bits_float(v >> 31 ? v & 0x7fffffffu : ~v); }

template <bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads) encode_kernel(const EncodeArguments a) {
  const TahShape &shape = a.shape;
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t tile = warp_index(); tile < a.tiles; tile += warp_count()) {
      const TahRun run(shape, tile, lane);
      float v[kBlock], wanted[kBlock];
      if (kSum) {
        load_or_zero(a.dtype, a.x, shape.numel, run.first, lane, v);
        add_messages(shape, a.in, run, lane, v);
        clear_padding(v, shape.numel - run.first);
      } else {
        load_block(a.dtype, byte_offset(a.x, m * a.x_stride), shape.numel, run.first, lane, v);
      }
      if (kResidual) add_residual(a.residual + m * shape.numel, shape.numel, run.first, lane, v);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) wanted[i] = v[i];

      int pivot = find_pivot(run, max_over_lanes(largest_of(v), run.width), v);
      if (ballot(pivot != kNoPivot)) {
        swap_elements(run, pivot, pivot != kNoPivot, lane, v);
        rotate(shape, run.width, pivot != kNoPivot, lane, v);
      }
      uint32_t high = 0, low = 0;  // the latter of negated values
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const uint32_t above = ordered(v[i]), below = ordered(-v[i]);
        high = above > high ? above : high;
        low = below > low ? below : low;
      }
      const bool finite = max_over_lanes(largest_of(v), run.width) < kF32Inf;
      high = max_over_lanes(high, run.width);
      low = max_over_lanes(low, run.width);

      const TahPlace place = place_of(shape, a.out, m, run, lane);
      const int32_t most = (1 << place.bits) - 1;
      const TahScale scale = tah_scale(finite, -from_ordered(low), from_ordered(high), float(most));
      const bool none = tah_codes_are_zero(scale);
      const float offset = bf16_to_f32(scale.offset), step = bf16_to_f32(scale.step);
      pivot = scale.step >= kF32Inf >> 16 ? kNoPivot : pivot;
      uint32_t bytes[kCodeWords];
#pragma unroll
      for (int w = 0; w < kCodeWords; ++w) {
        bytes[w] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) bytes[w] |= none ? 0u : tah_code(v[4 * w + j], offset, step, most) << 8 * j;
      }
      if (run.exists) {
        uint8_t *codes = a.out.codes + m * a.out.stride + place.offset;
        if (place.bits == 3)
          store_codes<3>(codes, bytes);
        else if (place.bits == 4)
          store_codes<4>(codes, bytes);
        else
          store_codes<6>(codes, bytes);
        if (run.lane_of_tile() == 0) {
          a.out.pivots[m * a.out.stride + run.tile] = uint8_t(pivot);
          byte_offset(a.out.offsets, m * a.out.stride)[run.tile] = scale.offset;
          byte_offset(a.out.steps, m * a.out.stride)[run.tile] = scale.step;
        }
      }
      if (kResidual) {
        decode_codes(shape, run, bytes, scale.offset, scale.step, pivot, lane, v);
        update_residual(a.residual + m * shape.numel, shape.numel, run.first, lane, wanted, v);
      }
    }
}

template <bool kSum>
cudaError_t launch(const fl_spec &spec, const fl_messages *in, const void *x, float *residual, const fl_messages &out,
                   cudaStream_t stream) {
  EncodeArguments a = {};
  a.shape = tah_shape(spec);
  if (in) a.in = tah_messages(*in);
  a.out = tah_messages(out);
  a.dtype = spec.dtype;
  a.x = x;
  a.x_stride = spec.numel * element_size(spec.dtype);
  a.residual = residual;
  a.tiles = warp_tiles(a.shape);
  const Grid grid(a.tiles, out.count);
  if (grid.error) return grid.error;
  const auto kernel = residual ? encode_kernel<kSum, true> : encode_kernel<kSum, false>;
  FL_LAUNCH(kernel, grid.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

struct KeyArguments {
  TahShape shape;
  uint32_t dtype;
  const void *x;
  const float *residual;
  int64_t tokens;  // of all messages
  int32_t *keys;
};

// A warp for each token; lane l has the partial sums l of core/tahquant.h.
__global__ void __launch_bounds__(kThreads) keys_kernel(const KeyArguments a) {
  const int lane = lane_index();
  for (int64_t each = warp_index(); each < a.tokens; each += warp_count()) {
    const int64_t message = each / a.shape.tokens(), first = each % a.shape.tokens() * a.shape.channels;
    const int64_t left = a.shape.numel - first, count = left < a.shape.channels ? left : a.shape.channels;
    const int64_t place = message * a.shape.numel + first;
    EntropySums sums = {0.0f, 0.0f};
    uint32_t power = 0;
    with_element(a.dtype, [&](auto element) {
      using E = decltype(element);
      const typename E::Bits *x = static_cast<const typename E::Bits *>(a.x) + place;
      const auto value = [&](int64_t i) {
        const float v = E::widen(x[i]);
        return a.residual ? v + a.residual[place + i] : v;
      };
      const uint32_t first_bits = lane < count ? float_bits(value(lane)) & 0x7fffffffu : 0u;
      power = entropy_power(max_over_lanes(first_bits, kLanes));
      for (int64_t i = lane; i < count; i += kLanes) {
        const EntropySums more = entropy_terms(value(i), power);
        sums.total += more.total;
        sums.logs += more.logs;
      }
    });
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      sums.total += bits_float(shuffle_xor(float_bits(sums.total), mask));
      sums.logs += bits_float(shuffle_xor(float_bits(sums.logs), mask));
    }
    if (lane == 0) a.keys[each] = entropy_key(sums, power);
  }
}

}  // namespace

cudaError_t tah_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream) {
  return launch<false>(spec, nullptr, x, residual, out, stream);
}

cudaError_t tah_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                       const fl_messages &out, cudaStream_t stream) {
  return launch<true>(spec, &in, x, residual, out, stream);
}

cudaError_t tah_token_keys(const fl_spec &spec, const void *x, const float *residual, int64_t count, int32_t *keys,
                           cudaStream_t stream) {
  const TahShape shape = tah_shape(spec);
  const KeyArguments a = {shape, spec.dtype, x, residual, count * shape.tokens(), keys};
  const Grid grid(a.tokens, 1);
  if (grid.error) return grid.error;
  FL_LAUNCH(keys_kernel, grid.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

}  // namespace fl
