// encode and recode of the `tahquant` codec. Where tokens are coarse, a kernel of its own chooses them first.
#include <cmath>

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
  uint32_t large = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float magnitude = fabsf(v[i]);
    if (magnitude + magnitude > bits_float(amax)) large |= 1u << i;
  }
  uint32_t count = __popc(large), found = large ? run.lane_of_tile() * kBlock + __ffs(large) - 1 : 0u;
  for (int mask = 1; mask < run.width; mask *= 2) count += shuffle_xor(count, mask);
  found = max_over_lanes(found, run.width);
  return count == 1 && amax < kF32Inf ? int(found) : kNoPivot;
}

// The largest over all lanes of a tile, in all of them.
FL_DEVICE float largest_in_tile(float v, int width) {
  for (int mask = 1; mask < width; mask *= 2) v = fmaxf(v, bits_float(shuffle_xor(float_bits(v), mask)));
  return v;
}

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
      float high = v[0], low = v[0];  // of what is not NaN
#pragma unroll
      for (int i = 1; i < kBlock; ++i) high = fmaxf(high, v[i]), low = fminf(low, v[i]);
      const bool finite = max_over_lanes(largest_of(v), run.width) < kF32Inf;
      high = largest_in_tile(high, run.width);
      low = -largest_in_tile(-low, run.width);

      const TahPlace place = place_of(shape, a.out, m, run);
      const TahScale scale = tah_scale(finite, low, high, float((1 << place.bits) - 1));
      const bool none = tah_codes_are_zero(scale);
      const float offset = bf16_to_f32(scale.offset), inverse = none ? 0.0f : tah_inverse(bf16_to_f32(scale.step));
      pivot = scale.step >= kF32Inf >> 16 ? kNoPivot : pivot;
      const auto code = [&](int i) { return float_bits(tah_code(v[i], offset, inverse)); };
      uint32_t bytes[kCodeWords];
#pragma unroll
      for (int w = 0; w < kCodeWords; ++w)
        bytes[w] = none ? 0u : low_bytes(code(4 * w), code(4 * w + 1), code(4 * w + 2), code(4 * w + 3));
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

// The logarithm with kBend of codecs/tahquant/tahquant.h, with fused operations.
FL_DEVICE float log2_above(uint32_t bits, uint32_t power) {
  const float u = bits_float((bits & kBendBits) | 0x3f800000u) - 1.0f;
  const float bend = add_exact_product(u, u, -u) * add_exact_product(u, kBendSlope, -kBend);
  return add_exact_product(float(int32_t(bits - power)), 0x1p-23f, bend);
}

// entropy_key of a token of `count` elements from number `first` on, in lane 0. Lane l has partial sums l.
template <bool kResidual>
FL_DEVICE uint32_t token_key(const EncodeArguments &a, int64_t first, int count, int lane) {
  EntropySums sums = {0.0f, 0.0f};
  uint32_t power = 0;
  with_element(a.dtype, [&](auto element) {
    using E = decltype(element);
    const typename E::Bits *x = static_cast<const typename E::Bits *>(a.x) + first;
    const auto bits = [&](int i) {
      const float v = E::widen(x[i]);
      return float_bits(kResidual ? v + a.residual[first + i] : v) & 0x7fffffffu;
    };
    power = entropy_power(largest_of_lanes(lane < count ? bits(lane) : 0u));
#pragma unroll 4
    for (int i = lane; i < count; i += kLanes) {
      const uint32_t magnitude = bits(i);
      sums.total += bits_float(magnitude);
      sums.logs += bits_float(magnitude) * log2_above(magnitude, power);
    }
  });
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    sums.total += bits_float(shuffle_xor(float_bits(sums.total), mask));
    sums.logs += bits_float(shuffle_xor(float_bits(sums.logs), mask));
  }
  return entropy_key(sums, power);
}

constexpr int kChoiceThreads = 512;  // two tokens of a section for each warp

// The marks of a section for each block.
template <bool kResidual>
__global__ void __launch_bounds__(kChoiceThreads) choice_kernel(const EncodeArguments a) {
  __shared__ uint32_t keys[kTahSection];
  const int lane = lane_index(), warp = int(threadIdx.x) / kLanes;
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y)
    for (int64_t number = blockIdx.x; number < a.shape.sections(); number += gridDim.x) {
      const TahSection section(a.shape, number);
      for (int token = warp; token < section.tokens; token += kChoiceThreads / kLanes) {
        const int64_t first = (section.first + token) * a.shape.channels, left = a.shape.numel - first;
        const int count = int(left < a.shape.channels ? left : a.shape.channels);
        const uint32_t key = token_key<kResidual>(a, m * a.shape.numel + first, count, lane);
        if (lane == 0) keys[token] = key;
      }
      meet_all();
      if (warp == 0) {
        const int token = 4 * (lane & 7) + lane / 8;  // whose mark is bit `lane`
        int before = 0;
#pragma unroll 1
        for (int i = 0; i < section.tokens; ++i) before += tah_precedes(keys, i, token);
        const uint32_t marks = ballot(token < section.tokens && before < section.coarse);
        if (lane == 0) byte_offset(a.out.marks, m * a.out.stride)[number] = marks;
      }
      meet_all();
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
  if (!kSum && a.shape.coarse) {
    const Grid sections(a.shape.sections() * kWarps, out.count);  // a block each
    if (sections.error) return sections.error;
    const auto kernel = residual ? choice_kernel<true> : choice_kernel<false>;
    FL_LAUNCH(kernel, sections.blocks, kChoiceThreads, stream, a);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  const auto kernel = residual ? encode_kernel<kSum, true> : encode_kernel<kSum, false>;
  return launch_over(Grid(a.tiles, out.count), kernel, a, stream);
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

const Encoders tahquant_encoders = {tah_encode, tah_recode, nullptr};

}  // namespace fl
