// All verbs of the `dynamiq` codec: a launch each.
#include "dynamiq_codes.cuh"

namespace fl {
namespace {

struct EncodeArguments {
  DynamiqLayout layout;
  DynamiqKeys keys;
  fl_messages in;  // recode: added to x
  fl_messages out;
  uint32_t dtype;
  const void *x;
  int64_t x_stride;  // bytes of the elements of a message
  float *residual;
  DeviceLevels levels;
};

struct DecodeArguments {
  DynamiqLayout layout;
  fl_messages in;
  uint32_t dtype;
  void *out;
  int64_t out_stride;
  bool add;
  DeviceLevels levels;
};

FL_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

FL_DEVICE uint32_t magnitude_of(float v) { return float_bits(v) & 0x7fffffffu; }

// Writes the scales and leaves in `low` and `high` what the lane's groups are multiplied by; false: all codes are 0.
FL_DEVICE bool make_group_scales(const EncodeArguments &a, const DynamiqMessage &m, int64_t group, uint64_t number,
                                 float span, int lane, const float (&v)[kOwned], float &low, float &high) {
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    first = larger(first, magnitude_of(v[i]));
    second = larger(second, magnitude_of(v[kSide + i]));
  }
  for (int mask = 1; mask < 4; mask *= 2) {
    first = larger(first, shuffle_xor(first, mask));
    second = larger(second, shuffle_xor(second, mask));
  }
  uint32_t most = larger(first, second);
  for (int mask = 4; mask < kLanes; mask *= 2) most = larger(most, shuffle_xor(most, mask));
  const int64_t place = group * kScaleGroups + lane / 4;
  const bool writes = lane % 4 == 0;
  const uint16_t wire = scale_above(most);
  if (a.layout.flat) {
    uint16_t *scales = reinterpret_cast<uint16_t *>(m.group_scales);
    const uint16_t one = wire == kBf16Nan ? kBf16Nan : scale_above(first);
    const uint16_t other = wire == kBf16Nan ? kBf16Nan : scale_above(second);
    if (writes) {
      scales[place] = one;
      scales[place + kScaleGroups / 2] = other;
    }
    first = float_bits(bf16_to_f32(one));
    second = float_bits(bf16_to_f32(other));
    if (wire == kBf16Nan) return false;
  } else {
    uint32_t one = 0, other = 0;
    const bool usual = wire != 0 && wire != kBf16Nan;
    if (usual) {
      const float inverse = 255.0f / bf16_to_f32(wire);
      const uint64_t g = number * kScaleGroups + uint64_t(lane / 4);
      const RngKey key = key_at(a.keys.scale, g);
      one = group_code(bits_float(first), inverse, random_bits(key, uint32_t(g)));
      other = group_code(bits_float(second), inverse, random_bits(key, uint32_t(g) + kScaleGroups / 2));
    }
    if (writes) {
      m.group_scales[place] = uint8_t(one);
      m.group_scales[place + kScaleGroups / 2] = uint8_t(other);
    }
    if (lane == 0) m.scales[group] = wire;
    if (!usual) return false;
  }
  low = first >= kTinyBits ? span / bits_float(first) : 0.0f;
  high = second >= kTinyBits ? span / bits_float(second) : 0.0f;
  return true;
}

FL_DEVICE void encode_super_group(const EncodeArguments &a, const DeviceLevels &levels, const DynamiqMessage &m,
                                  int64_t group, uint64_t number, int lane, const float (&v)[kOwned]) {
  const CodePlace place = code_place(m.runs, a.layout.groups, group);
  const int bits = place.bits;
  const float span = bits == 8 ? levels.span8 : bits == 4 ? levels.span4 : 1.0f;
  float low = 0.0f, high = 0.0f;
  const bool usual = make_group_scales(a, m, group, number, span, lane, v, low, high);
  const uint64_t first = number * kPairs + uint64_t(kSide * lane);
  const RngKey shared_key = key_at(a.keys.shared, first), own_key = key_at(a.keys.own, first);
  uint32_t code[kOwned];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const uint32_t shared = random_bits(shared_key, uint32_t(first) + i),
                   own = random_bits(own_key, uint32_t(first) + i);
    const float u = rounding_place(a.keys, shared & 0xffff, own & 0xffff);
    const float w = rounding_place(a.keys, shared >> 16, own >> 16);
    code[i] = usual ? level_code(levels, bits, v[i], low, u) : 0;
    code[kSide + i] = usual ? level_code(levels, bits, v[kSide + i], high, w) : 0;
  }
  // The same for all lanes.
  if (inside(a.layout, place)) store_codes(m.codes + place.offset, bits, lane, code);
}

// Zeros in the room behind the codes.
FL_DEVICE void clear_rest(const DynamiqLayout &layout, const DynamiqMessage &m, int lane) {
  const WidthRun &last = m.runs[width_runs(layout.groups) - 1];
  const int64_t taken = (layout.groups + int64_t(last.ends4) + 3 * int64_t(last.ends8)) * kLeastCodes;
  for (int64_t at = taken + 4 * (warp_index() * kLanes + lane); at < layout.room; at += 4 * warp_count() * kLanes)
    *reinterpret_cast<uint32_t *>(m.codes + at) = 0;
}

template <bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads, 6) encode_kernel(const EncodeArguments a) {
  const int lane = lane_index();
  const Tables tables(a.levels, lane);
  const DynamiqLayout &layout = a.layout;
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    const DynamiqMessage out = dynamiq_message(a.out, m);
    clear_rest(layout, out, lane);
    for (int64_t group = warp_index(); group < layout.groups; group += warp_count()) {
      float v[kOwned], kept[kOwned];
      load_super_group(a.dtype, a.x ? byte_offset(a.x, m * a.x_stride) : nullptr, layout.numel, group, lane, v);
      if (kSum) {
        for (int64_t i = 0; i < a.in.count; ++i) {
          float part[kOwned];
          decode_super_group(layout, *tables.levels, dynamiq_message(a.in, i), group, lane, part);
#pragma unroll
          for (int j = 0; j < kOwned; ++j) v[j] += part[j];
        }
#pragma unroll
        for (int j = 0; j < kOwned; ++j) {
          const int64_t at = group * kSuperGroup + kSide * lane + (j < kSide ? j : kPairs + j - kSide);
          v[j] = at < layout.numel ? v[j] : 0.0f;
        }
      }
      if (kResidual) {
        load_residual(a.residual + m * layout.numel, layout.numel, group, lane, kept);
#pragma unroll
        for (int j = 0; j < kOwned; ++j) v[j] += kept[j];
      }
      const uint64_t number = layout.first + uint64_t(m * layout.groups + group);
      encode_super_group(a, *tables.levels, out, group, number, lane, v);
      if (kResidual) {
        float sent[kOwned];
        uint32_t bits[kOwned];
        meet();
        decode_super_group(layout, *tables.levels, out, group, lane, sent);
#pragma unroll
        for (int j = 0; j < kOwned; ++j) bits[j] = float_bits(residual_after(v[j], sent[j], kept[j]));
        store_owned(reinterpret_cast<uint32_t *>(a.residual + m * layout.numel), layout.numel, group, lane, bits);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  const Tables tables(a.levels, lane);
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y)
    for (int64_t group = warp_index(); group < a.layout.groups; group += warp_count()) {
      float v[kOwned];
      decode_super_group(a.layout, *tables.levels, dynamiq_message(a.in, m), group, lane, v);
      store_super_group(a.dtype, byte_offset(a.out, m * a.out_stride), a.layout.numel, group, lane, v);
    }
}

__global__ void __launch_bounds__(kThreads) decode_sum_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  const Tables tables(a.levels, lane);
  for (int64_t group = warp_index(); group < a.layout.groups; group += warp_count()) {
    float v[kOwned];
    load_super_group(a.dtype, a.add ? a.out : nullptr, a.layout.numel, group, lane, v);
    for (int64_t i = 0; i < a.in.count; ++i) {
      float part[kOwned];
      decode_super_group(a.layout, *tables.levels, dynamiq_message(a.in, i), group, lane, part);
#pragma unroll
      for (int j = 0; j < kOwned; ++j) v[j] += part[j];
    }
    store_super_group(a.dtype, a.out, a.layout.numel, group, lane, v);
  }
}

// sum_super_group of core/dynamiq.h, in all lanes.
FL_DEVICE float sum_owned(const float (&v)[kOwned]) {
  float low = (v[0] + v[1]) + (v[2] + v[3]), high = (v[4] + v[5]) + (v[6] + v[7]);
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    low += bits_float(shuffle_xor(float_bits(low), mask));
    high += bits_float(shuffle_xor(float_bits(high), mask));
  }
  return low + high;
}

struct StatsArguments {
  uint32_t dtype;
  const void *x;
  const float *residual;
  int64_t numel;
  float *means, *squares;
};

__global__ void __launch_bounds__(kThreads) stats_kernel(const StatsArguments a) {
  const int lane = lane_index();
  for (int64_t group = warp_index(); group < super_groups(a.numel); group += warp_count()) {
    float v[kOwned];
    load_super_group(a.dtype, a.x, a.numel, group, lane, v);
    if (a.residual) {
      float kept[kOwned];
      load_residual(a.residual, a.numel, group, lane, kept);
#pragma unroll
      for (int i = 0; i < kOwned; ++i) v[i] += kept[i];
    }
    const float sum = sum_owned(v);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v[i] *= v[i];
    const float squares = sum_owned(v);
    if (lane) continue;
    const int64_t left = a.numel - group * kSuperGroup;
    a.means[group] = canonical(sum / float(left < kSuperGroup ? int(left) : kSuperGroup));
    a.squares[group] = canonical(squares);
  }
}

EncodeArguments encode_arguments(const fl_spec &spec, const void *x, float *residual, const fl_messages &out) {
  return {dynamiq_layout(spec),
          dynamiq_keys(spec.seed, spec.param[2]),
          {},
          out,
          spec.dtype,
          x,
          spec.numel * element_size(spec.dtype),
          residual,
          device_levels(spec.param[3])};
}

DecodeArguments decode_arguments(const fl_spec &spec, const fl_messages &in, void *out, bool add) {
  return {dynamiq_layout(spec),        in, spec.dtype, out, spec.numel * element_size(spec.dtype), add,
          device_levels(spec.param[3])};
}

template <class Arguments>
cudaError_t launch(void (*kernel)(Arguments), const Arguments &a, int64_t groups, int64_t outputs,
                   cudaStream_t stream) {
  const Grid grid(groups, outputs);
  if (grid.error) return grid.error;
  FL_LAUNCH(kernel, grid.blocks, kThreads, stream, a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t dynamiq_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                           cudaStream_t stream) {
  const EncodeArguments a = encode_arguments(spec, x, residual, out);
  return launch(residual ? encode_kernel<false, true> : encode_kernel<false, false>, a, a.layout.groups, out.count,
                stream);
}

cudaError_t dynamiq_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                           const fl_messages &out, cudaStream_t stream) {
  EncodeArguments a = encode_arguments(spec, x, residual, out);
  a.in = in;
  return launch(residual ? encode_kernel<true, true> : encode_kernel<true, false>, a, a.layout.groups, 1, stream);
}

cudaError_t dynamiq_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  const DecodeArguments a = decode_arguments(spec, in, out, false);
  return launch(decode_kernel, a, a.layout.groups, in.count, stream);
}

cudaError_t dynamiq_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  const DecodeArguments a = decode_arguments(spec, in, out, add);
  return launch(decode_sum_kernel, a, a.layout.groups, 1, stream);
}

}  // namespace fl

extern "C" int fl_dynamiq_stats(uint32_t dtype, const void *x, const float *residual, int64_t numel, float *means,
                                float *squares, void *stream) {
  if (const int bad = fl::check_dynamiq_stats(dtype, x, residual, numel, means, squares)) return bad;
  if (numel == 0) return FL_OK;
  const fl::StatsArguments a{dtype, x, residual, numel, means, squares};
  return fl::finish(fl::launch(fl::stats_kernel, a, fl::super_groups(numel), 1, fl::as_stream(stream)));
}
