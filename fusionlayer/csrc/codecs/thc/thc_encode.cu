// encode of the `thc` codec, and the sum of codes.
#include "checks.h"
#include "thc.cuh"

namespace fl {
namespace {

struct EncodeArguments {
  ThcShape shape;
  ThcMessages out;
  uint32_t dtype;
  const void *x;
  int64_t x_stride;  // bytes of the elements of a message
  float *residual;
  bool stochastic, given;
  RngKey key, signs;
  int64_t offset;
};

// The codes of a lane's run of rotated values, one byte each; its first element has the number `number`.
FL_DEVICE void round_values(const EncodeArguments &a, const float (&v)[kBlock], uint64_t number,
                            uint32_t (&codes)[kCodeWords]) {
  const RngKey key = key_at(a.key, number);
#pragma unroll
  for (int w = 0; w < kCodeWords / 2; ++w) {
    uint32_t first = 0, second = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * w + j;
      const uint32_t random = a.stochastic ? random_bits(key, uint32_t(number) + i) : kThcNearest * 0x10001u;
      first |= uint32_t(thc_code(a.shape.uniform, v[i], half_of_bits(random, false))) << 8 * j;
      second |= uint32_t(thc_code(a.shape.uniform, v[i + kNoisePair], half_of_bits(random, true))) << 8 * j;
    }
    codes[w] = first;
    codes[w + kCodeWords / 2] = second;
  }
}

template <bool kResidual>
__global__ void __launch_bounds__(kThreads, kResidual ? 3 : 4) encode_kernel(const EncodeArguments a) {
  const ThcShape &shape = a.shape;
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    float *rms_of = byte_offset(a.out.rms, m * a.out.stride);
    for (int64_t tile = warp_index(); tile < shape.sections(); tile += warp_count()) {
      const ThcRun run(shape, tile, lane);
      float v[kBlock], wanted[kBlock];
      load_block(a.dtype, byte_offset(a.x, m * a.x_stride), shape.numel, run.first, lane, v);
      if (kResidual) add_residual(a.residual + m * shape.numel, shape.numel, run.first, lane, v);
      const float rms = a.given ? rms_of[tile] : tile_rms(shape, tile, v);
      if (!a.given && lane == 0) rms_of[tile] = rms;
      const float scale = thc_scale(rms, shape);
      const bool usual = thc_usual(rms);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) wanted[i] = v[i];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) v[i] *= scale;
      change_signs(a.signs, run.first, v);
      rotate(shape, lane, v);

      uint32_t codes[kCodeWords];
      round_values(a, v, uint64_t(a.offset + m * shape.numbers + run.first), codes);
#pragma unroll
      for (int w = 0; w < kCodeWords; ++w) codes[w] = usual ? codes[w] : 0u;
      uint32_t packed[4];
      pack_words<4>(codes, packed);
      if (run.exists)
        store_chunk(a.out.codes + m * a.out.stride + run.index * 16, {{packed[0], packed[1], packed[2], packed[3]}});
      if (kResidual) {
        half_steps(shape, codes, v);
        reconstruct(shape, a.signs, run.first, lane, rms, v);
        update_residual(a.residual + m * shape.numel, shape.numel, run.first, lane, wanted, v);
      }
    }
  }
}

struct RmsArguments {
  ThcShape shape;
  uint32_t dtype;
  const void *x;
  const float *residual;
  float *rms;
};

__global__ void __launch_bounds__(kThreads) rms_kernel(const RmsArguments a) {
  const int lane = lane_index();
  for (int64_t tile = warp_index(); tile < a.shape.sections(); tile += warp_count()) {
    const ThcRun run(a.shape, tile, lane);
    float v[kBlock];
    load_block(a.dtype, a.x, a.shape.numel, run.first, lane, v);
    if (a.residual) add_residual(a.residual, a.shape.numel, run.first, lane, v);
    const float rms = tile_rms(a.shape, tile, v);
    if (lane == 0) a.rms[tile] = rms;
  }
}

struct AddArguments {
  ThcShape shape;
  ThcMessages in;
  uint8_t *out;
  int bits;
};

// The low bytes of four integers.
FL_DEVICE uint32_t four_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | d << 24;
}

__global__ void __launch_bounds__(kThreads) add_kernel(const AddArguments a) {
  const int lane = lane_index();
  for (int64_t tile = warp_index(); tile < a.shape.sections(); tile += warp_count()) {
    const ThcRun run(a.shape, tile, lane);
    if (!run.exists) continue;
    uint32_t sums[16] = {};  // of elements i, and i + 16 above
#pragma unroll 1
    for (int64_t m = 0; m < a.in.count; ++m) {
      const Chunk codes = load_chunk(a.in.codes + m * a.in.stride + run.index * 16);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int low = int(codes.word[i / 4] >> 8 * (i % 4) & 15u),
                  high = int(codes.word[i / 4] >> (8 * (i % 4) + 4) & 15u);
        sums[i] += uint32_t(thc_integer(a.shape.uniform, low)) | uint32_t(thc_integer(a.shape.uniform, high)) << 16;
      }
    }
    Chunk low, high, upper_low, upper_high;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t *s = sums + 4 * w;
      low.word[w] = four_bytes(s[0], s[1], s[2], s[3]);
      high.word[w] = four_bytes(s[0] >> 16, s[1] >> 16, s[2] >> 16, s[3] >> 16);
      upper_low.word[w] = four_bytes(s[0] >> 8, s[1] >> 8, s[2] >> 8, s[3] >> 8);
      upper_high.word[w] = four_bytes(s[0] >> 24, s[1] >> 24, s[2] >> 24, s[3] >> 24);
    }
    uint8_t *out = a.out + run.index * (4 * a.bits);
    store_chunk(out, low);
    store_chunk(out + 16, high);
    if (a.bits == 12) {
#pragma unroll
      for (int w = 0; w < 4; ++w) upper_low.word[w] |= upper_high.word[w] << 4;
    }
    if (a.bits > 8) store_chunk(out + 32, upper_low);
    if (a.bits == 16) store_chunk(out + 48, upper_high);
  }
}

}  // namespace

cudaError_t thc_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                       cudaStream_t stream) {
  const EncodeArguments a = {
      thc_shape(spec),
      thc_messages(out),
      spec.dtype,
      x,
      spec.numel * element_size(spec.dtype),
      residual,
      (spec.param[0] & FL_THC_STOCHASTIC) != 0,
      (spec.param[0] & FL_THC_GIVEN) != 0,
      make_key(spec.seed),
      make_key(spec.param[3]),
      spec.offset,
  };
  const auto kernel = residual ? encode_kernel<true> : encode_kernel<false>;
  return launch_over(Grid(a.shape.sections(), out.count), kernel, a, stream);
}

cudaError_t thc_rms(const fl_spec &spec, const void *x, const float *residual, float *rms, cudaStream_t stream) {
  const RmsArguments a = {thc_shape(spec), spec.dtype, x, residual, rms};
  return launch_over(Grid(a.shape.sections(), 1), rms_kernel, a, stream);
}

cudaError_t thc_add_codes(const fl_spec &spec, const fl_messages &in, uint8_t *out, cudaStream_t stream) {
  const ThcShape shape = thc_shape(spec);
  const AddArguments a = {shape, thc_messages(in), out, shape.sum_bits(int(in.count))};
  return launch_over(Grid(shape.sections(), 1), add_kernel, a, stream);
}

const Encoders thc_encoders = {thc_encode, nullptr, nullptr};

}  // namespace fl

extern "C" {

int fl_add_codes(const fl_spec *spec, const fl_messages *in, uint8_t *out, void *stream) {
  if (const int bad = fl::check_add_codes(spec, in, out)) return bad;
  if (spec->numel == 0 || in->count == 0) return FL_OK;
  return fl::finish(fl::thc_add_codes(*spec, *in, out, fl::as_stream(stream)));
}

int fl_thc_rms(const fl_spec *spec, const void *x, const float *residual, float *rms, void *stream) {
  if (const int bad = fl::check_thc_rms(spec, x, residual, rms)) return bad;
  if (spec->numel == 0) return FL_OK;
  return fl::finish(fl::thc_rms(*spec, x, residual, rms, fl::as_stream(stream)));
}

}  // extern "C"
