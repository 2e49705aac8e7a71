// All verbs of the `dynamiq` codec: a launch each.
#include "checks.h"
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
  int part;  // super-groups that a warp takes at a time
  DeviceLevels levels;
};

struct DecodeArguments {
  DynamiqLayout layout;
  fl_messages in;
  uint32_t dtype;
  void *out;
  int64_t out_stride;
  bool add;
  int part;
  DeviceLevels levels;
};

FL_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Writes the scales and leaves in `low` and `high` what the lane's groups are multiplied by; false: all codes are 0. Of the
// four lanes that share two groups the even ones make the scale of the first, the odd ones that of the second.
FL_DEVICE bool make_group_scales(const EncodeArguments &a, const DynamiqMessage &m, int64_t group, uint64_t number,
                                 float span, int lane, const float (&v)[kOwned], float &low, float &high) {
  float lower = 0.0f, upper = 0.0f;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    lower = larger_magnitude(lower, v[i]);
    upper = larger_magnitude(upper, v[kSide + i]);
  }
  const uint32_t first = float_bits(lower), second = float_bits(upper);
  const bool odd = lane & 1;
  uint32_t amax = larger(odd ? second : first, shuffle_xor(odd ? first : second, 1));
  amax = larger(amax, shuffle_xor(amax, 2));
  const uint32_t most = largest_of_lanes(amax);
  const int within = lane / 4 + (lane & 1) * (kScaleGroups / 2);
  const int64_t place = group * kScaleGroups + within;
  const bool writes = lane % 4 < 2;
  const uint32_t wire = scale_above(most);
  bool usual = wire != kBf16Nan;
  if (a.layout.flat) {
    amax = larger(amax, shuffle_xor(amax, 4));  // of the other group that shares the scale
    const uint16_t mine = usual ? scale_above(amax) : kBf16Nan;
    if (writes && !(within & 1)) reinterpret_cast<uint16_t *>(m.group_scales)[place / 2] = mine;
    amax = float_bits(bf16_to_f32(mine));
  } else {
    usual = usual && wire != 0;
  }
  // Even pairs of lanes divide by what is largest in their group, odd ones by the super-group's scale.
  const bool of_group = !(lane & 2);
  const float divisor = of_group ? bits_float(amax) : bits_float(wire << 16);
  const float quotient = (of_group ? span : 255.0f) / (usual && float_bits(divisor) >= kTinyBits ? divisor : 1.0f);
  const uint32_t factor = amax >= kTinyBits ? float_bits(quotient) : 0u;
  if (!a.layout.flat) {
    const float inverse = bits_float(shuffle(float_bits(quotient), lane | 2));
    const uint64_t g = number * kScaleGroups + uint64_t(within);
    const uint32_t random = random_bits(near_key(a.keys.scale, g), uint32_t(g));
    if (writes) m.group_scales[place] = usual ? uint8_t(group_code(bits_float(amax), inverse, random)) : uint8_t(0);
    if (lane == 0) m.scales[group] = uint16_t(wire);
  }
  low = bits_float(shuffle(factor, lane & ~3));
  high = bits_float(shuffle(factor, (lane & ~3) + 1));
  return usual;
}

FL_DEVICE void encode_super_group(const EncodeArguments &a, const Tables &tables, const DynamiqMessage &m,
                                  const Place &place, int64_t group, uint64_t number, int lane,
                                  const float (&v)[kOwned]) {
  const float span = place.bits == 8 ? a.levels.span8 : place.bits == 4 ? a.levels.span4 : 1.0f;
  float low = 0.0f, high = 0.0f;
  const bool usual = make_group_scales(a, m, group, number, span, lane, v, low, high);
  if (!place.inside) return;
  uint8_t *codes = m.codes + place.offset;
  const uint64_t first = number * kPairs + uint64_t(kSide * lane);
  const RngKey key = near_key(a.keys.noise, first);
  with_width(place.bits, [&](auto width) {
    constexpr int kBits = decltype(width)::bits;
    uint32_t codes_low = 0, codes_high = 0;
    if (usual) {
      uint32_t code[kOwned];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        const uint32_t places = rounding_places(a.keys, random_bits(key, uint32_t(first) + i));
        code[i] = level_code<kBits>(a.levels, tables, v[i], low, rounding_number(places, false));
        code[kSide + i] = level_code<kBits>(a.levels, tables, v[kSide + i], high, rounding_number(places, true));
      }
      codes_low = four_codes<kBits>(code, v);
      codes_high = four_codes<kBits>(code + kSide, v + kSide);
    }
    store_codes<kBits>(codes, lane, codes_low, codes_high);
  });
}

// Zeros in the room behind the codes.
FL_DEVICE void clear_rest(const DynamiqLayout &layout, const DynamiqMessage &m, int lane) {
  const WidthRun &last = m.runs[width_runs(layout.groups) - 1];
  const int64_t taken = (layout.groups + int64_t(last.ends4) + 3 * int64_t(last.ends8)) * kLeastCodes;
  for (int64_t at = taken + 4 * (warp_index() * kLanes + lane); at < layout.room; at += 4 * warp_count() * kLanes)
    *reinterpret_cast<uint32_t *>(m.codes + at) = 0;
}

// v += all messages of `in`. `places` are those of the first messages of a batch.
FL_DEVICE void add_messages(const DynamiqLayout &layout, const Tables &tables, const fl_messages &in, Places places,
                            int64_t group, int lane, float (&v)[kOwned]) {
  for (int64_t first = 0; first < in.count; first += kLookedUp) {
    if (first) places = Places(layout, in, first, group & ~int64_t(kBatch - 1), lane);
    const int count = in.count - first < kLookedUp ? int(in.count - first) : kLookedUp;
    for (int i = 0; i < count; ++i) {
      float part[kOwned];
      decode_super_group(layout, tables, dynamiq_message(in, first + i), Place(places, i, group), group, lane, part);
#pragma unroll
      for (int j = 0; j < kOwned; ++j) v[j] += part[j];
    }
  }
}

template <bool kSum, bool kResidual>
FL_DEVICE void encode_group(const EncodeArguments &a, const Tables &tables, const DynamiqMessage &out,
                            const Place &place, const Places &in_places, int64_t m, int64_t group, uint64_t number,
                            int lane, float (&v)[kOwned]) {
  const DynamiqLayout &layout = a.layout;
  float kept[kOwned];
  if (kSum) {
    add_messages(layout, tables, a.in, in_places, group, lane, v);
    if (layout.numel - group * kSuperGroup < kSuperGroup) {
#pragma unroll
      for (int j = 0; j < kOwned; ++j) {
        const int64_t at = group * kSuperGroup + kSide * lane + (j < kSide ? j : kPairs + j - kSide);
        v[j] = at < layout.numel ? v[j] : 0.0f;
      }
    }
  }
  if (kResidual) {
    load_residual(a.residual + m * layout.numel, layout.numel, group, lane, kept);
#pragma unroll
    for (int j = 0; j < kOwned; ++j) v[j] += kept[j];
  }
  encode_super_group(a, tables, out, place, group, number, lane, v);
  if (kResidual) {
    float sent[kOwned];
    uint32_t bits[kOwned];
    meet();
    decode_super_group(layout, tables, out, place, group, lane, sent);
#pragma unroll
    for (int j = 0; j < kOwned; ++j) bits[j] = float_bits(residual_after(v[j], sent[j], kept[j]));
    store_owned(reinterpret_cast<uint32_t *>(a.residual + m * layout.numel), layout.numel, group, lane, bits);
  }
}

// f(first super-group of a batch, first, end): a warp takes one batch after another, or, of messages with few, parts of
// batches.
template <class F>
FL_DEVICE void for_each_batch(int64_t groups, int part, F f) {
  for (int64_t first = warp_index() * part; first < groups; first += warp_count() * part)
    f(first & ~int64_t(kBatch - 1), first, first + part < groups ? first + part : groups);
}

// While one super-group is encoded the next is on its way.
template <bool kSum, bool kResidual>
__global__ void __launch_bounds__(kThreads, kSum || kResidual ? 5 : 7) encode_kernel(const EncodeArguments a) {
  const int lane = lane_index();
  const Tables &tables = share_tables(a.levels);
  for (int64_t m = blockIdx.y; m < a.out.count; m += gridDim.y) {
    const DynamiqMessage out = dynamiq_message(a.out, m);
    const void *x = a.x ? byte_offset(a.x, m * a.x_stride) : nullptr;
    clear_rest(a.layout, out, lane);
    for_each_batch(a.layout.groups, a.part, [&](int64_t base, int64_t first, int64_t end) {
      Source source(a.dtype, x, a.layout.numel, first, end, lane);
      RawGroup next = source.next();
      const Places places(a.layout, a.out, m, base, lane);
      const Places in_places(a.layout, a.in, 0, base, lane);  // of no messages where there is no sum
      uint64_t number = a.layout.first + uint64_t(m * a.layout.groups + first);
      for (int64_t group = first; group < end; ++group, ++number) {
        float v[kOwned];
        widen(a.dtype, next, v);
        if (group + 1 < end) next = source.next();
        encode_group<kSum, kResidual>(a, tables, out, Place(places, 0, group), in_places, m, group, number, lane, v);
      }
    });
  }
}

__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  const Tables &tables = share_tables(a.levels);
  for (int64_t m = blockIdx.y; m < a.in.count; m += gridDim.y)
    for_each_batch(a.layout.groups, a.part, [&](int64_t base, int64_t first, int64_t end) {
      const Places places(a.layout, a.in, m, base, lane);
      for (int64_t group = first; group < end; ++group) {
        float v[kOwned];
        const Place place(places, 0, group);
        decode_super_group(a.layout, tables, dynamiq_message(a.in, m), place, group, lane, v);
        store_super_group(a.dtype, byte_offset(a.out, m * a.out_stride), a.layout.numel, group, lane, v);
      }
    });
}

__global__ void __launch_bounds__(kThreads) decode_sum_kernel(const DecodeArguments a) {
  const int lane = lane_index();
  const Tables &tables = share_tables(a.levels);
  for_each_batch(a.layout.groups, a.part, [&](int64_t base, int64_t first, int64_t end) {
    const Places places(a.layout, a.in, 0, base, lane);
    Source source(a.dtype, a.add ? a.out : nullptr, a.layout.numel, first, end, lane);
    for (int64_t group = first; group < end; ++group) {
      float v[kOwned];
      widen(a.dtype, source.next(), v);
      add_messages(a.layout, tables, a.in, places, group, lane, v);
      store_super_group(a.dtype, a.out, a.layout.numel, group, lane, v);
    }
  });
}

// The sum over a super-group (codecs/dynamiq/dynamiq.h), in all lanes.
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
    widen(a.dtype, Source(a.dtype, a.x, a.numel, group, group + 1, lane).next(), v);
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
          1,
          device_levels(spec.param[3])};
}

DecodeArguments decode_arguments(const fl_spec &spec, const fl_messages &in, void *out, bool add) {
  return {dynamiq_layout(spec),        in, spec.dtype, out, spec.numel * element_size(spec.dtype), add, 1,
          device_levels(spec.param[3])};
}

// Whole batches where they keep all multiprocessors busy.
template <class Arguments>
cudaError_t launch_batches(void (*kernel)(Arguments), Arguments a, int64_t outputs, cudaStream_t stream) {
  constexpr int64_t kManyWarps = 1 << 14;
  while (a.part < kBatch && a.layout.groups * outputs > kManyWarps * a.part) a.part *= 2;
  return launch_over(Grid((a.layout.groups + a.part - 1) / a.part, outputs), kernel, a, stream);
}

}  // namespace

cudaError_t dynamiq_encode(const fl_spec &spec, const void *x, float *residual, const fl_messages &out,
                           cudaStream_t stream) {
  const EncodeArguments a = encode_arguments(spec, x, residual, out);
  return launch_batches(residual ? encode_kernel<false, true> : encode_kernel<false, false>, a, out.count, stream);
}

cudaError_t dynamiq_recode(const fl_spec &spec, const fl_messages &in, const void *x, float *residual,
                           const fl_messages &out, cudaStream_t stream) {
  EncodeArguments a = encode_arguments(spec, x, residual, out);
  a.in = in;
  return launch_batches(residual ? encode_kernel<true, true> : encode_kernel<true, false>, a, 1, stream);
}

cudaError_t dynamiq_decode(const fl_spec &spec, const fl_messages &in, void *out, cudaStream_t stream) {
  const DecodeArguments a = decode_arguments(spec, in, out, false);
  return launch_batches(decode_kernel, a, in.count, stream);
}

cudaError_t dynamiq_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add, cudaStream_t stream) {
  const DecodeArguments a = decode_arguments(spec, in, out, add);
  return launch_batches(decode_sum_kernel, a, 1, stream);
}

const Encoders dynamiq_encoders = {dynamiq_encode, dynamiq_recode, nullptr};
const Decoders dynamiq_decoders = {dynamiq_decode, dynamiq_decode_sum};

}  // namespace fl

extern "C" int fl_dynamiq_stats(uint32_t dtype, const void *x, const float *residual, int64_t numel, float *means,
                                float *squares, void *stream) {
  if (const int bad = fl::check_dynamiq_stats(dtype, x, residual, numel, means, squares)) return bad;
  if (numel == 0) return FL_OK;
  const fl::StatsArguments a{dtype, x, residual, numel, means, squares};
  return fl::finish(fl::launch_over(fl::Grid(fl::super_groups(numel), 1), fl::stats_kernel, a, fl::as_stream(stream)));
}
