// The codecs one element at a time, from the scalar specification in csrc/core alone: what the libraries are compared
// with. It has the four verbs of the C ABI; it checks no argument and cares for no speed.
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "block_scale.h"
#include "dynamiq.h"
#include "floats.h"
#include "fusionlayer_codec.h"
#include "int_group.h"
#include "onebit.h"
#include "qsdp.h"
#include "residual.h"
#include "rng.h"

namespace {

float read(const void *array, int64_t i, uint32_t dtype) {
  if (dtype == FL_F32) return static_cast<const float *>(array)[i];
  const uint16_t bits = static_cast<const uint16_t *>(array)[i];
  return dtype == FL_BF16 ? fl::bf16_to_f32(bits) : fl::f16_to_f32(bits);
}

void write(void *array, int64_t i, uint32_t dtype, float value) {
  if (dtype == FL_F32)
    static_cast<float *>(array)[i] = fl::canonical(value);
  else
    static_cast<uint16_t *>(array)[i] = dtype == FL_BF16 ? fl::f32_to_bf16(value) : fl::f32_to_f16(value);
}

uint8_t *plane(const fl_messages &messages, int p, int64_t m) {
  return static_cast<uint8_t *>(messages.plane[p]) + m * messages.stride;
}

struct IntCodec {
  const fl_spec &spec;
  int bits = int(spec.param[0]);
  int64_t group = spec.param[1], groups = (spec.numel + group - 1) / group;
  bool hadamard = spec.param[2] & FL_INT_HADAMARD, stochastic = spec.param[2] & FL_INT_STOCHASTIC;
  fl::RngKey key = fl::make_key(spec.seed);

  void transform(float *v) const {
    if (hadamard)
      for (int64_t i = 0; i < group; i += fl::kHadamard) fl::hadamard32(v + i);
  }

  void encode(std::vector<float> values, const fl_messages &out, int64_t m) const {
    values.resize(groups * group, 0.0f);
    for (int64_t g = 0; g < groups; ++g) {
      float *v = &values[g * group];
      transform(v);
      uint32_t amax = 0;
      for (int64_t i = 0; i < group; ++i) {
        const uint32_t magnitude = fl::float_bits(v[i]) & 0x7fffffffu;
        amax = magnitude > amax ? magnitude : amax;
      }
      const fl::IntLevels levels = fl::int_levels(bits, int(group), stochastic, spec.param[2] & FL_INT_FULL);
      const fl::GroupScale scale = fl::make_scale(amax, bits, levels);
      reinterpret_cast<float *>(plane(out, 0, m))[g] = scale.scale;
      std::vector<int32_t> code(group);
      for (int64_t i = 0; i < group; ++i) {
        const uint64_t number = uint64_t(spec.offset + (m * groups + g) * group + i);
        code[i] = stochastic ? fl::stochastic_code(v[i], scale.inverse, fl::rounding_half(key, number), levels)
                             : fl::int_code(v[i], scale.inverse, levels);
      }
      pack(code.data(), plane(out, 1, m) + g * group * bits / 8);
    }
  }

  // Part k of a run of 32 codes has as many bits of each; see core/code_words.h.
  void pack(const int32_t *code, uint8_t *bytes) const {
    if (fl::between_integers(bits)) {
      std::memset(bytes, 0, size_t(group * bits / 8));
      for (int64_t run = 0; run < group; run += 32, bytes += 4 * bits)
        for (int i = 0; i < 32; ++i) {
          const uint32_t c = uint32_t(code[run + i]);
          bytes[i % 8] = uint8_t(bytes[i % 8] | (c & 3) << i / 8 * 2);
          if (bits == 3) bytes[8 + i % 4] = uint8_t(bytes[8 + i % 4] | (c >> 2 & 1) << i / 4);
        }
      return;
    }
    for (int64_t i = 0; i < group * bits / 8; ++i)
      bytes[i] = bits == 8 ? uint8_t(code[i]) : fl::pack_nibbles(code[i], code[i + group / 2]);
  }

  int32_t code_at(const uint8_t *bytes, int64_t i) const {
    if (bits == 8) return int8_t(bytes[i]);
    if (bits == 4) return i < group / 2 ? fl::low_nibble(bytes[i]) : fl::high_nibble(bytes[i - group / 2]);
    const int at = int(i % 32);
    bytes += i / 32 * 4 * bits;
    int32_t c = bytes[at % 8] >> at / 8 * 2 & 3;
    if (bits == 3) c |= (bytes[8 + at % 4] >> at / 4 & 1) << 2;
    return c >> (bits - 1) ? c - (1 << bits) : c;
  }

  // With `rotate` what a message decodes to, without it what sums are made of; of whole groups.
  std::vector<float> whole(const fl_messages &in, int64_t m, bool rotate) const {
    std::vector<float> values(groups * group);
    for (int64_t g = 0; g < groups; ++g) {
      float *v = &values[g * group];
      const uint8_t *codes = plane(in, 1, m) + g * group * bits / 8;
      for (int64_t i = 0; i < group; ++i) v[i] = float(fl::int_level(bits, code_at(codes, i)));
      if (rotate) transform(v);
      const float scale = fl::decode_scale(reinterpret_cast<const float *>(plane(in, 0, m))[g], bits, hadamard);
      for (int64_t i = 0; i < group; ++i) v[i] *= scale;
    }
    return values;
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    std::vector<float> values = whole(in, m, true);
    values.resize(spec.numel);
    return values;
  }

  void rotate_back(std::vector<float> &sum) const {
    for (int64_t g = 0; g < groups; ++g) transform(&sum[g * group]);
  }
};

struct BlockCodec {
  const fl_spec &spec;
  uint32_t format = spec.param[0], kind = fl::scale_kind(spec.param);
  int64_t block = spec.param[1], blocks = (spec.numel + block - 1) / block;
  bool hadamard = spec.param[3] & FL_BLOCK_HADAMARD;
  int run_bytes = 4 * fl::format_bits(format);
  fl::BlockScaling scaling = fl::block_scaling(spec.param);

  static uint32_t largest(const std::vector<float> &v, int64_t first, int64_t n) {
    uint32_t amax = 0;
    for (int64_t i = first; i < first + n; ++i) {
      const uint32_t magnitude = fl::float_bits(v[i]) & 0x7fffffffu;
      amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
  }

  uint8_t *scale_at(const fl_messages &messages, int64_t m, int64_t g) const {
    return plane(messages, 0, m) + (kind == FL_SCALE_MESSAGE ? 0 : g * fl::scale_bytes(kind));
  }

  void encode(std::vector<float> values, const fl_messages &out, int64_t m) const {
    values.resize(blocks * block, 0.0f);
    const uint32_t all = largest(values, 0, blocks * block);
    for (int64_t g = 0; g < blocks; ++g) {
      float *v = &values[g * block];
      if (hadamard) fl::hadamard(v, int(block));
      std::vector<float> squares(block);
      for (int64_t i = 0; i < block; ++i) squares[i] = v[i] * v[i];
      const uint32_t amax = kind == FL_SCALE_MESSAGE ? all : largest(values, g * block, block);
      uint8_t *wire = scale_at(out, m, g);
      uint16_t given;
      std::memcpy(&given, wire, sizeof given);
      const fl::BlockScale scale =
          spec.param[3] & FL_BLOCK_GIVEN
              ? fl::given_block_scale(scaling, given, amax)
              : fl::make_block_scale(scaling, amax, fl::sum_of_block(squares.data(), int(block)));
      std::memcpy(wire, &scale.wire, kind == FL_SCALE_DUAL ? 4 : fl::scale_bytes(kind));
      if (kind == FL_SCALE_DUAL) std::memcpy(wire + 4, &scale.first, 4);
      for (int64_t i = 0; i < block; i += fl::kCodeRun) {
        uint32_t codes[fl::kCodeRun];
        for (int j = 0; j < fl::kCodeRun; ++j)
          codes[j] = fl::block_code(format, v[i + j] * scale.before, scale.inverse);
        fl::pack_run(fl::format_bits(format), codes, plane(out, 1, m) + (g * block + i) / fl::kCodeRun * run_bytes);
      }
    }
  }

  std::vector<float> whole(const fl_messages &in, int64_t m, bool rotate) const {
    std::vector<float> values(blocks * block);
    for (int64_t g = 0; g < blocks; ++g) {
      float *v = &values[g * block];
      for (int64_t i = 0; i < block; i += fl::kCodeRun) {
        uint32_t codes[fl::kCodeRun];
        fl::unpack_run(fl::format_bits(format), plane(in, 1, m) + (g * block + i) / fl::kCodeRun * run_bytes, codes);
        for (int j = 0; j < fl::kCodeRun; ++j) v[i + j] = fl::block_value(format, codes[j]);
      }
      uint32_t wire = 0, first = 0;
      std::memcpy(&wire, scale_at(in, m, g), kind == FL_SCALE_DUAL ? 4 : fl::scale_bytes(kind));
      if (kind == FL_SCALE_DUAL) std::memcpy(&first, scale_at(in, m, g) + 4, 4);
      const float scale = fl::decode_block_scale(scaling, wire, first);
      for (int64_t i = 0; i < block; ++i) v[i] *= scale;
    }
    if (rotate) rotate_back(values);
    return values;
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    std::vector<float> values = whole(in, m, true);
    values.resize(spec.numel);
    return values;
  }

  void rotate_back(std::vector<float> &sum) const {
    for (int64_t g = 0; hadamard && g < blocks; ++g) fl::hadamard(&sum[g * block], int(block));
  }
};

struct DynamiqCodec {
  const fl_spec &spec;
  bool flat = spec.param[0] & FL_DYNAMIQ_FLAT;
  int64_t groups = fl::super_groups(spec.numel);
  fl::DynamiqLevels levels = fl::dynamiq_levels(spec.param[3]);
  fl::DynamiqKeys keys = fl::dynamiq_keys(spec.seed, spec.param[2]);

  // Byte and lowest bit of the code of element i among those of a super-group.
  static std::pair<int, int> code_at(int bits, int i) {
    const int bytes = 32 * bits;
    return {i % bytes, i / bytes * bits};
  }

  void encode(std::vector<float> values, const fl_messages &out, int64_t m) const {
    const fl::DynamiqMessage message = fl::dynamiq_message(out, m);
    const int64_t taken = fl::codes_in_all(message.runs, groups), room = int64_t(spec.param[1]) * 64;
    std::memset(message.codes + taken, 0, size_t(room - taken));
    values.resize(groups * fl::kSuperGroup, 0.0f);
    for (int64_t g = 0; g < groups; ++g) {
      const float *v = &values[g * fl::kSuperGroup];
      const uint64_t number = uint64_t(spec.offset) / fl::kSuperGroup + uint64_t(m * groups + g);
      const fl::CodePlace place = fl::code_place(message.runs, groups, g);
      const fl::Levels &table = fl::levels_of(levels, place.bits);
      uint8_t *codes = message.codes + place.offset;
      std::memset(codes, 0, size_t(fl::code_bytes(place.bits)));
      uint32_t amax[fl::kScaleGroups] = {}, most = 0;
      for (int i = 0; i < fl::kSuperGroup; ++i) {
        const uint32_t magnitude = fl::float_bits(v[i]) & 0x7fffffffu;
        if (magnitude > amax[i / 16]) amax[i / 16] = magnitude;
        if (magnitude > most) most = magnitude;
      }
      const uint16_t wire = fl::scale_above(most);
      const bool usual = wire != fl::kBf16Nan && (flat || wire != 0);
      if (!flat) message.scales[g] = wire;
      for (int k = 0; k < fl::kScaleGroups; ++k) {
        const uint64_t at = number * fl::kScaleGroups + uint64_t(k);
        const uint32_t random = fl::random_bits(fl::key_at(keys.scale, at), uint32_t(at));
        uint16_t *flats = reinterpret_cast<uint16_t *>(message.group_scales) + g * fl::kFlatScales;
        if (flat) {
          if (k % 2 == 0 && amax[k + 1] > amax[k]) amax[k] = amax[k + 1];
          if (k % 2 == 0) flats[k / 2] = usual ? fl::scale_above(amax[k]) : fl::kBf16Nan;
          amax[k] = uint32_t(flats[k / 2]) << 16;
        } else {
          message.group_scales[g * fl::kScaleGroups + k] =
              usual ? uint8_t(fl::group_code(fl::bits_float(amax[k]), 255.0f / fl::bf16_to_f32(wire), random)) : 0;
        }
      }
      for (int i = 0; usual && i < fl::kSuperGroup; ++i) {
        const uint64_t at = number * fl::kPairs + uint64_t(i % fl::kPairs);
        const uint32_t random = fl::random_bits(fl::key_at(keys.noise, at), uint32_t(at));
        const float w = fl::rounding_number(fl::rounding_places(keys, random), i >= fl::kPairs);
        const uint32_t most_of_group = amax[i / 16];
        const float factor = most_of_group >= fl::kTinyBits ? table.span / fl::bits_float(most_of_group) : 0.0f;
        const float y = std::fabs(v[i]) * factor;
        const int code = fl::level_number(table, place.bits, y, w) | int(fl::float_bits(v[i]) >> 31)
                                                                         << (place.bits - 1);
        const auto [byte, bit] = code_at(place.bits, i);
        codes[byte] = uint8_t(codes[byte] | code << bit);
      }
    }
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    const fl::DynamiqMessage message = fl::dynamiq_message(in, m);
    std::vector<float> values(groups * fl::kSuperGroup);
    for (int64_t g = 0; g < groups; ++g) {
      const fl::CodePlace place = fl::code_place(message.runs, groups, g);
      for (int i = 0; i < fl::kSuperGroup; ++i) {
        const auto [byte, bit] = code_at(place.bits, i);
        const int code = message.codes[place.offset + byte] >> bit & ((1 << place.bits) - 1);
        const int half = 1 << (place.bits - 1);
        const int64_t k = g * fl::kScaleGroups + i / 16;
        const float scale = flat ? fl::scale_value(reinterpret_cast<const uint16_t *>(message.group_scales)[k / 2])
                                 : float(message.group_scales[k]) * (fl::scale_value(message.scales[g]) / 255.0f);
        const float level = fl::levels_of(levels, place.bits).value[code % half];
        values[g * fl::kSuperGroup + i] = fl::signed_value(level * scale, uint32_t(code / half));
      }
    }
    values.resize(spec.numel);
    return values;
  }
};

struct OneBitCodec {
  const fl_spec &spec;
  int64_t group = spec.param[1], groups = (spec.numel + group - 1) / group;

  int64_t count(int64_t g) const { return g + 1 < groups ? group : spec.numel - g * group; }

  void encode(const std::vector<float> &values, const fl_messages &out, int64_t m) const {
    uint8_t *signs = plane(out, 1, m);
    std::memset(signs, 0, size_t(spec.numel + 7) / 8);
    for (int64_t g = 0; g < groups; ++g) {
      double lanes[fl::kOneBitLanes] = {};
      for (int64_t i = 0; i < count(g); ++i) lanes[i % fl::kOneBitLanes] += std::fabs(values[g * group + i]);
      const float scale = fl::onebit_scale(fl::onebit_sum(lanes), int(count(g)));
      reinterpret_cast<float *>(plane(out, 0, m))[g] = scale;
      for (int64_t i = g * group; fl::is_finite(scale) && i < g * group + count(g); ++i)
        signs[i / 8] = uint8_t(signs[i / 8] | fl::float_bits(values[i]) >> 31 << i % 8);
    }
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    std::vector<float> values(spec.numel);
    for (int64_t i = 0; i < spec.numel; ++i) {
      const float scale = reinterpret_cast<const float *>(plane(in, 0, m))[i / group];
      values[i] = fl::onebit_value(scale, plane(in, 1, m)[i / 8] >> i % 8 & 1);
    }
    return values;
  }
};

struct QsdpCodec {
  const fl_spec &spec;
  fl::QsdpShape shape = fl::qsdp_shape(spec);
  int64_t group = spec.param[1], groups = (spec.numel + group - 1) / group;

  static float *floats(const fl_messages &messages, int p, int64_t m) {
    return reinterpret_cast<float *>(plane(messages, p, m));
  }

  void encode(std::vector<float> values, const fl_messages &out, int64_t m) const {
    values.resize(groups * group, values.empty() ? 0.0f : values.back());
    const fl::RngKey key = fl::make_key(spec.seed);
    for (int64_t g = 0; g < groups; ++g) {
      const float *v = &values[g * group];
      float low = v[0], high = v[0];
      bool finite = true;
      for (int64_t i = 0; i < group; ++i) {
        low = v[i] < low ? v[i] : low;
        high = v[i] > high ? v[i] : high;
        finite = finite && fl::is_finite(v[i]);
      }
      const uint64_t first = uint64_t(spec.offset + (m * groups + g) * group);
      const float share = shape.stochastic ? 0.5f : fl::qsdp_share(fl::qsdp_key(spec.seed), first);
      const fl::QsdpGrid grid = fl::qsdp_grid(finite, low, high, shape.parts(), share);
      floats(out, 0, m)[g] = grid.step;
      floats(out, 1, m)[g] = grid.origin;
      std::vector<int32_t> code(group);
      for (int64_t i = 0; grid.step > 0.0f && i < group; ++i) {
        const uint32_t random = fl::random_bits(fl::key_at(key, first + uint64_t(i)), uint32_t(first + uint64_t(i)));
        code[i] = fl::qsdp_code(v[i], grid, shape.stochastic ? fl::rounding_noise(random) : 0.0f, shape.least(),
                                shape.most());
      }
      uint8_t *bytes = plane(out, 2, m) + g * shape.group_bytes();
      for (int i = 0; i < shape.group_bytes(); ++i)
        bytes[i] = shape.bits == 8 ? uint8_t(code[i]) : fl::pack_nibbles(code[i], code[i + group / 2]);
    }
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    std::vector<float> values(groups * group);
    for (int64_t g = 0; g < groups; ++g) {
      const fl::QsdpGrid grid = fl::qsdp_sound({floats(in, 0, m)[g], floats(in, 1, m)[g]});
      const uint8_t *bytes = plane(in, 2, m) + g * shape.group_bytes();
      for (int64_t i = 0; i < group; ++i) {
        const int32_t nibble =
            i < group / 2 ? fl::low_nibble(bytes[i % (group / 2)]) : fl::high_nibble(bytes[i - group / 2]);
        values[g * group + i] = fl::qsdp_value(shape.bits == 8 ? int8_t(bytes[i]) : nibble, grid);
      }
    }
    values.resize(spec.numel);
    return values;
  }
};

struct CastCodec {
  const fl_spec &spec;

  void encode(const std::vector<float> &values, const fl_messages &out, int64_t m) const {
    for (int64_t i = 0; i < spec.numel; ++i) write(plane(out, 0, m), i, spec.param[0], values[i]);
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    std::vector<float> values(spec.numel);
    for (int64_t i = 0; i < spec.numel; ++i) values[i] = read(plane(in, 0, m), i, spec.param[0]);
    return values;
  }
};

template <class Codec>
void encode_values(const Codec &codec, std::vector<float> values, float *residual, const fl_messages &out, int64_t m) {
  if (residual)
    for (size_t i = 0; i < values.size(); ++i) values[i] += residual[i];
  codec.encode(values, out, m);
  if (!residual) return;
  const std::vector<float> decoded = codec.decode(out, m);
  for (size_t i = 0; i < values.size(); ++i) residual[i] = fl::residual_after(values[i], decoded[i], residual[i]);
}

// Codecs that rotate sum rotated values from 0 on.
template <class Codec>
void add_rotated(const Codec &codec, const fl_messages &in, std::vector<float> &values) {
  std::vector<float> sum(values.size(), 0.0f);
  for (int64_t m = 0; m < in.count; ++m) {
    const std::vector<float> rotated = codec.whole(in, m, false);
    sum.resize(rotated.size(), 0.0f);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += rotated[i];
  }
  if (in.count > 0) codec.rotate_back(sum);
  for (size_t i = 0; i < values.size(); ++i) values[i] += sum[i];
}

template <class Codec>
void add_messages(const Codec &codec, const fl_messages &in, std::vector<float> &values) {
  if constexpr (std::is_same_v<Codec, IntCodec> || std::is_same_v<Codec, BlockCodec>)
    if (codec.hadamard) return add_rotated(codec, in, values);
  for (int64_t m = 0; m < in.count; ++m) {
    const std::vector<float> decoded = codec.decode(in, m);
    for (size_t i = 0; i < values.size(); ++i) values[i] += decoded[i];
  }
}

std::vector<float> read_all(const fl_spec &spec, const void *x, int64_t first) {
  std::vector<float> values(spec.numel);
  for (int64_t i = 0; x && i < spec.numel; ++i) values[i] = read(x, first + i, spec.dtype);
  return values;
}

void write_all(const fl_spec &spec, void *out, int64_t first, const std::vector<float> &values) {
  for (int64_t i = 0; i < spec.numel; ++i) write(out, first + i, spec.dtype, values[i]);
}

template <class Body>
int with_codec(const fl_spec &spec, const Body &body) {
  if (spec.codec == FL_INT)
    body(IntCodec{spec});
  else if (spec.codec == FL_BLOCK)
    body(BlockCodec{spec});
  else if (spec.codec == FL_DYNAMIQ)
    body(DynamiqCodec{spec});
  else if (spec.codec == FL_ONEBIT)
    body(OneBitCodec{spec});
  else if (spec.codec == FL_QSDP)
    body(QsdpCodec{spec});
  else
    body(CastCodec{spec});
  return FL_OK;
}

bool copies(const fl_spec &spec) { return spec.codec == FL_CAST && spec.param[0] == spec.dtype; }

int64_t bytes(const fl_spec &spec) { return spec.numel * (spec.dtype == FL_F32 ? 4 : 2); }

// Scales of every exponent, with few, all and some low bits set.
template <class Body>
void for_each_scale(const Body &body) {
  uint32_t random = 1;
  for (uint32_t exponent = 0; exponent < 256; ++exponent)
    for (int i = 0; i < 40; ++i) {
      random = random * 1664525u + 1013904223u;
      const uint32_t mantissa = i == 0 ? 0 : i == 1 ? 0x7fffffu : i == 2 ? 0x7fff00u : i == 3 ? 0x7ff000u : random >> 9;
      body(exponent << 23 | mantissa);
    }
}

bool is_inexact(float a, float b) { return fl::is_finite(a) && fl::is_finite(b) && double(a) * b != double(a * b); }

}  // namespace

extern "C" {

int fl_encode(const fl_spec *spec, const void *x, float *residual, const fl_messages *out, void *) {
  return with_codec(*spec, [&](const auto &codec) {
    for (int64_t m = 0; m < out->count; ++m) {
      const int64_t first = m * spec->numel;
      if (copies(*spec) && !residual)
        std::memcpy(plane(*out, 0, m), static_cast<const uint8_t *>(x) + m * bytes(*spec), bytes(*spec));
      else
        encode_values(codec, read_all(*spec, x, first), residual ? residual + first : nullptr, *out, m);
    }
  });
}

int fl_decode(const fl_spec *spec, const fl_messages *in, void *out, void *) {
  return with_codec(*spec, [&](const auto &codec) {
    for (int64_t m = 0; m < in->count; ++m)
      if (copies(*spec))
        std::memcpy(static_cast<uint8_t *>(out) + m * bytes(*spec), plane(*in, 0, m), bytes(*spec));
      else
        write_all(*spec, out, m * spec->numel, codec.decode(*in, m));
  });
}

int fl_decode_sum(const fl_spec *spec, const fl_messages *in, void *out, int add, void *) {
  return with_codec(*spec, [&](const auto &codec) {
    std::vector<float> values = read_all(*spec, add ? out : nullptr, 0);
    add_messages(codec, *in, values);
    write_all(*spec, out, 0, values);
  });
}

int fl_recode(const fl_spec *spec, const fl_messages *in, const void *x, float *residual, const fl_messages *out,
              void *) {
  return with_codec(*spec, [&](const auto &codec) {
    std::vector<float> values = read_all(*spec, x, 0);
    add_messages(codec, *in, values);
    encode_values(codec, values, residual, *out, 0);
  });
}

// What stochastic rounding adds to elements first .. first + n - 1.
void reference_noise(uint64_t seed, uint64_t first, int64_t n, float *out) {
  const fl::RngKey key = fl::make_key(seed);
  for (int64_t i = 0; i < n; ++i) {
    out[i] = (float(fl::rounding_half(key, first + uint64_t(i))) + 0.5f) / fl::kNoiseUnits - 0.5f;
  }
}

// The mean of what a value becomes, in steps, over all that its 16 random bits may be. The scale is one step.
double reference_mean(int bits, float value) {
  const fl::IntLevels levels = fl::int_levels(bits, 128, true, false);
  int64_t sum = 0;
  for (uint32_t random = 0; random < 1u << fl::kNoiseBits; ++random)
    sum += fl::stochastic_code(value, 1.0f, random, levels);
  return double(sum) / fl::kNoiseUnits + levels.below;
}

// How many products of what a scale is multiplied by and a scale are not exact: 0, so that they may be added fused.
int64_t reference_inexact_levels(int bits, int hadamard) {
  int64_t count = 0;
  const int most = fl::outermost_level(bits) * (hadamard ? fl::kHadamard : 1);
  for_each_scale([&](uint32_t wire) {
    const float scale = fl::decode_scale(fl::bits_float(wire), bits, hadamard != 0);
    for (int level = -most; level <= most; ++level) count += is_inexact(float(level), scale);
  });
  return count;
}

// The same of the codes of a small format.
int64_t reference_inexact_codes(uint32_t format, uint32_t block, uint32_t kind, uint32_t flags) {
  int64_t count = 0;
  const uint32_t param[4] = {format, block, kind, flags};
  const fl::BlockScaling scaling = fl::block_scaling(param);
  for_each_scale([&](uint32_t bits) {
    const uint32_t wire = kind == FL_SCALE_E8M0 ? bits >> 23 & 255 : kind == FL_SCALE_BF16 ? bits >> 16 : bits;
    const float scale = fl::decode_block_scale(scaling, wire, 0x3fa12345u);
    for (uint32_t code = 0; code < 1u << fl::format_bits(format); ++code)
      count += is_inexact(fl::block_value(format, code), scale);
  });
  return count;
}

// fl_dynamiq_stats of one super-group of n elements.
void reference_stats(const float *x, int64_t n, float *mean, float *squares) {
  float v[fl::kSuperGroup] = {}, w[fl::kSuperGroup] = {};
  for (int64_t i = 0; i < n; ++i) v[i] = x[i], w[i] = x[i] * x[i];
  *mean = fl::sum_super_group(v) / float(n);
  *squares = fl::sum_super_group(w);
}

// The 2^(bits - 1) levels of a width.
void reference_levels(int bits, uint32_t epsilons, float *values) {
  const fl::DynamiqLevels all = fl::dynamiq_levels(epsilons);
  std::memcpy(values, fl::levels_of(all, bits).value, sizeof(float) << (bits - 1));
}

// Where a rank rounds the elements of pairs 0 to n - 1, two in each word.
void reference_places(uint64_t seed, uint32_t place, int n, uint32_t *places) {
  const fl::DynamiqKeys keys = fl::dynamiq_keys(seed, place);
  for (int i = 0; i < n; ++i) places[i] = fl::rounding_places(keys, fl::random_bits(keys.noise, uint32_t(i)));
}

// How often a value between 0 and the largest, 1, becomes the level below and the one above, of n places that cover (0, 1); by
// how much the mean differs from it, in steps.
double reference_bias(int bits, uint32_t epsilons, float value, int n) {
  const fl::DynamiqLevels all = fl::dynamiq_levels(epsilons);
  const fl::Levels &levels = fl::levels_of(all, bits);
  double sum = 0.0;
  for (int i = 0; i < n; ++i) {
    const float w = float((i + 0.5) / n + fl::kFirstPlace);
    const int r = fl::level_number(levels, bits, value * levels.span, w);
    sum += levels.value[r];
  }
  int below = 0;
  while (below + 1 < levels.top && levels.value[below + 1] <= value) ++below;
  return (sum / n - value) / (levels.value[below + 1] - levels.value[below]);
}

}  // extern "C"
