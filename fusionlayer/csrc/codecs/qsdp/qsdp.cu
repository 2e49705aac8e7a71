// The `qsdp` codec (codecs/qsdp/qsdp.h): a lane owns a block of 32 elements, a warp whole groups. Codes lie as those of `int`.
#include <cmath>

#include "codecs/int/int_group.cuh"
#include "cuda/owned.cuh"
#include "qsdp.h"

namespace fl {
namespace {

struct QsdpMessages {
  IntMessages steps;  // and codes
  float *origins;     // of message 0
};

struct QsdpArguments {
  IntLayout layout;
  QsdpShape shape;
  QsdpMessages in, out;
  uint32_t dtype;
  const void *x;
  void *y;
  int64_t row_bytes;  // bytes of the elements of a message
  float *residual;
  bool add;
  RngKey key;
  uint64_t shifts;
  uint64_t offset;
};

FL_DEVICE QsdpGrid load_grid(const QsdpMessages &in, int64_t message, const Place &at) {
  if (!at.exists) return {0.0f, 0.0f};
  const int64_t offset = message * in.steps.stride;
  return qsdp_sound({byte_offset(in.steps.scales, offset)[at.group], byte_offset(in.origins, offset)[at.group]});
}

FL_DEVICE void decode_block(const QsdpArguments &a, int64_t message, const Place &at, float (&v)[kBlock]) {
  const QsdpGrid grid = load_grid(a.in, message, at);
  uint32_t bytes[kWords];
  unpack_codes(a.layout, load_packed(a.layout, a.in.steps, message, at), at, bytes);
  const float bias = code_bias(a.layout.bits);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = unsigned_byte(bytes[i / 4], i % 4, bias) * grid.step + grid.origin;
}

FL_DEVICE void add_messages(const QsdpArguments &a, const Place &at, float (&v)[kBlock]) {
#pragma unroll 1
  for (int64_t m = 0; m < a.in.steps.count; ++m) {
    float part[kBlock];
    decode_block(a, m, at, part);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] += part[i];
  }
}

// What lies past the end of a message is its last value.
FL_DEVICE void fill_up(float (&v)[kBlock], int64_t left) {
  if (shuffle(left, kLanes - 1) >= kBlock) return;
  float last = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) last = i == left - 1 ? v[i] : last;
  const uint32_t holder = ballot(left >= 1 && left <= kBlock);
  last = bits_float(shuffle(float_bits(last), __ffs(int(holder)) - 1));
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = i < left ? v[i] : last;
}

FL_DEVICE QsdpGrid find_grid(const QsdpArguments &a, const float (&v)[kBlock], uint64_t first) {
  float low = v[0], high = v[0];
#pragma unroll
  for (int i = 1; i < kBlock; ++i) low = fminf(low, v[i]), high = fmaxf(high, v[i]);
  const int lanes = a.layout.lanes();
  const bool finite = max_over_lanes(largest_of(v), lanes) < kF32Inf;
  for (int mask = 1; mask < lanes; mask *= 2) {
    low = fminf(low, bits_float(shuffle_xor(float_bits(low), mask)));
    high = fmaxf(high, bits_float(shuffle_xor(float_bits(high), mask)));
  }
  const float share = a.shape.stochastic ? 0.5f : qsdp_share(a.shifts, first);
  return qsdp_grid(finite, low, high, a.shape.parts(), share);
}

// bytes = codes of a lane's block, whose first element has the number `number`.
FL_DEVICE void quantize(const QsdpArguments &a, const float (&v)[kBlock], QsdpGrid grid, uint64_t number,
                        uint32_t (&bytes)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) bytes[i] = 0;
  if (!(grid.step > 0.0f)) return;
  const float least = a.shape.least(), most = a.shape.most();
  const RngKey key = near_key(a.key, number);
  const auto code = [&](int i) {
    const float noise = a.shape.stochastic ? rounding_noise(random_bits(key, uint32_t(number) + i)) : 0.0f;
    return uint32_t(qsdp_code(v[i], grid, noise, least, most));
  };
#pragma unroll
  for (int i = 0; i < kWords; ++i) bytes[i] = low_bytes(code(4 * i), code(4 * i + 1), code(4 * i + 2), code(4 * i + 3));
}

template <bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads) encode_kernel(const QsdpArguments a) {
  const IntLayout &layout = a.layout;
  const int lane = lane_index();
  for (int64_t m = blockIdx.y; m < a.out.steps.count; m += gridDim.y) {
    const int64_t start = m * layout.numel, offset = m * a.out.steps.stride;
    const void *x = a.x ? byte_offset(a.x, m * a.row_bytes) : nullptr;
    for (int64_t span = warp_index(); span < layout.spans(); span += warp_count()) {
      const Place at = place_of(layout, span, 0, lane);
      float v[kBlock];
      load_or_zero(a.dtype, x, layout.numel, at.first, lane, v);
      if (kSum) add_messages(a, at, v);
      if (kResidual) add_residual(a.residual + start, layout.numel, at.first, lane, v);
      fill_up(v, layout.numel - at.first);
      const uint64_t numbers = a.offset + (uint64_t(m * layout.groups) << layout.log2_group);
      const QsdpGrid grid = find_grid(a, v, numbers + (uint64_t(at.group) << layout.log2_group));
      uint32_t bytes[kWords];
      quantize(a, v, grid, numbers + uint64_t(at.first), bytes);
      store_codes(layout, a.out.steps.codes + offset, at, bytes);
      if (at.exists && at.block == 0) {
        byte_offset(a.out.steps.scales, offset)[at.group] = grid.step;
        byte_offset(a.out.origins, offset)[at.group] = grid.origin;
      }
      if (kResidual) {
        float sent[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i)
          sent[i] = unsigned_byte(bytes[i / 4] ^ 0x80808080u, i % 4, code_bias(8)) * grid.step + grid.origin;
        update_residual(a.residual + start, layout.numel, at.first, lane, v, sent);
      }
    }
  }
}

// kOne: all messages become one sum; else each has its own place.
template <bool kOne>
__global__ void __launch_bounds__(kThreads) decode_kernel(const QsdpArguments a) {
  const int lane = lane_index();
  const int64_t rows = kOne ? 1 : a.in.steps.count;
  for (int64_t m = blockIdx.y; m < rows; m += gridDim.y) {
    void *y = byte_offset(a.y, m * a.row_bytes);
    for (int64_t span = warp_index(); span < a.layout.spans(); span += warp_count()) {
      const Place at = place_of(a.layout, span, 0, lane);
      float v[kBlock];
      if (kOne) {
        load_or_zero(a.dtype, a.add ? y : nullptr, a.layout.numel, at.first, lane, v);
        add_messages(a, at, v);
      } else {
        decode_block(a, m, at, v);
      }
      store_block(a.dtype, y, a.layout.numel, at.first, lane, v);
    }
  }
}

QsdpMessages messages_of(const fl_messages &m) {
  return {{static_cast<float *>(m.plane[0]), static_cast<uint8_t *>(m.plane[2]), m.stride, m.count},
          static_cast<float *>(m.plane[1])};
}

QsdpArguments arguments(const fl_spec &spec) {
  QsdpArguments a{};
  a.layout = int_layout(spec), a.shape = qsdp_shape(spec), a.dtype = spec.dtype;
  a.row_bytes = spec.numel * element_size(spec.dtype);
  a.key = make_key(spec.seed), a.shifts = qsdp_key(spec.seed), a.offset = uint64_t(spec.offset);
  return a;
}

cudaError_t launch(void (*kernel)(QsdpArguments), const QsdpArguments &a, int64_t outputs, cudaStream_t stream) {
  return launch_over(Grid(a.layout.spans(), outputs), kernel, a, stream);
}

}  // namespace

cudaError_t qsdp_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                        cudaStream_t stream) {
  QsdpArguments a = arguments(spec);
  a.x = x, a.residual = residual, a.out = messages_of(out);
  return launch(residual ? encode_kernel<false, true> : encode_kernel<false, false>, a, out.count, stream);
}

cudaError_t qsdp_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  QsdpArguments a = arguments(spec);
  a.in = messages_of(in), a.y = out;
  return launch(decode_kernel<false>, a, in.count, stream);
}

cudaError_t qsdp_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  QsdpArguments a = arguments(spec);
  a.in = messages_of(in), a.y = out, a.add = add;
  return launch(decode_kernel<true>, a, 1, stream);
}

cudaError_t qsdp_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                        const fl_messages &out, cudaStream_t stream) {
  QsdpArguments a = arguments(spec);
  a.in = messages_of(in), a.x = x, a.residual = residual, a.out = messages_of(out);
  return launch(residual ? encode_kernel<true, true> : encode_kernel<true, false>, a, 1, stream);
}

const Encoders qsdp_encoders = {qsdp_encode, qsdp_recode, nullptr};
const Decoders qsdp_decoders = {qsdp_decode, qsdp_decode_sum};

}  // namespace fl
