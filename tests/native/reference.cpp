// The codecs one element at a time, from the scalar specification in csrc/core alone: what the libraries are compared
// with. It has the four verbs of the C ABI; it checks no argument and cares for no speed.
#include <cstring>
#include <vector>

#include "block_scale.h"
#include "floats.h"
#include "fusionlayer_codec.h"
#include "int_group.h"
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
      const int qmax = fl::int_qmax(bits);
      const fl::GroupScale scale = fl::make_scale(amax, float(qmax));
      reinterpret_cast<float *>(plane(out, 0, m))[g] = scale.scale;
      std::vector<int32_t> code(group);
      for (int64_t i = 0; i < group; ++i) {
        const uint64_t number = uint64_t(spec.offset + (m * groups + g) * group + i);
        const uint32_t random = fl::random_bits(fl::key_at(key, number), uint32_t(number));
        code[i] = fl::int_code(v[i], scale.inverse, stochastic ? fl::rounding_noise(random) : 0.0f, qmax);
      }
      uint8_t *codes = plane(out, 1, m) + g * group * bits / 8;
      for (int64_t i = 0; i < group * bits / 8; ++i)
        codes[i] = bits == 8 ? uint8_t(code[i]) : fl::pack_nibbles(code[i], code[i + group / 2]);
    }
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    std::vector<float> values(groups * group);
    for (int64_t g = 0; g < groups; ++g) {
      float *v = &values[g * group];
      const uint8_t *codes = plane(in, 1, m) + g * group * bits / 8;
      for (int64_t i = 0; i < group * bits / 8; ++i)
        if (bits == 8) {
          v[i] = float(int8_t(codes[i]));
        } else {
          v[i] = float(fl::low_nibble(codes[i]));
          v[i + group / 2] = float(fl::high_nibble(codes[i]));
        }
      transform(v);
      const float scale = fl::decode_scale(reinterpret_cast<const float *>(plane(in, 0, m))[g], hadamard);
      for (int64_t i = 0; i < group; ++i) v[i] *= scale;
    }
    values.resize(spec.numel);
    return values;
  }
};

struct BlockCodec {
  const fl_spec &spec;
  uint32_t format = spec.param[0], kind = spec.param[2];
  int64_t block = spec.param[1], blocks = (spec.numel + block - 1) / block;
  bool hadamard = spec.param[3] & FL_BLOCK_HADAMARD;
  int run_bytes = 4 * fl::format_bits(format);
  fl::BlockScaling scaling = fl::block_scaling(format, uint32_t(block), kind, hadamard);

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
              ? fl::given_block_scale(given, amax)
              : fl::make_block_scale(scaling, amax, fl::sum_of_block(squares.data(), int(block)));
      std::memcpy(wire, &scale.wire, kind == FL_SCALE_DUAL ? 4 : fl::scale_bytes(kind));
      if (kind == FL_SCALE_DUAL) std::memcpy(wire + 4, &scale.first, 4);
      for (int64_t i = 0; i < block; i += fl::kCodeRun) {
        uint32_t codes[fl::kCodeRun];
        for (int j = 0; j < fl::kCodeRun; ++j) codes[j] = fl::block_code(format, v[i + j], scale.inverse);
        fl::pack_run(fl::format_bits(format), codes, plane(out, 1, m) + (g * block + i) / fl::kCodeRun * run_bytes);
      }
    }
  }

  std::vector<float> decode(const fl_messages &in, int64_t m) const {
    std::vector<float> values(blocks * block);
    for (int64_t g = 0; g < blocks; ++g) {
      float *v = &values[g * block];
      for (int64_t i = 0; i < block; i += fl::kCodeRun) {
        uint32_t codes[fl::kCodeRun];
        fl::unpack_run(fl::format_bits(format), plane(in, 1, m) + (g * block + i) / fl::kCodeRun * run_bytes, codes);
        for (int j = 0; j < fl::kCodeRun; ++j) v[i + j] = fl::block_value(format, codes[j]);
      }
      if (hadamard) fl::hadamard(v, int(block));
      uint32_t wire = 0, first = 0;
      std::memcpy(&wire, scale_at(in, m, g), kind == FL_SCALE_DUAL ? 4 : fl::scale_bytes(kind));
      if (kind == FL_SCALE_DUAL) std::memcpy(&first, scale_at(in, m, g) + 4, 4);
      const float scale = fl::decode_block_scale(scaling, wire, first);
      for (int64_t i = 0; i < block; ++i) v[i] *= scale;
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

template <class Codec>
void add_messages(const Codec &codec, const fl_messages &in, std::vector<float> &values) {
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
  else
    body(CastCodec{spec});
  return FL_OK;
}

bool copies(const fl_spec &spec) { return spec.codec == FL_CAST && spec.param[0] == spec.dtype; }

int64_t bytes(const fl_spec &spec) { return spec.numel * (spec.dtype == FL_F32 ? 4 : 2); }

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
    const uint64_t number = first + uint64_t(i);
    out[i] = fl::rounding_noise(fl::random_bits(fl::key_at(key, number), uint32_t(number)));
  }
}

}  // extern "C"
