// Messages of the `block` codec as a warp sees them: a lane owns a run of 32 elements, 1 to 16 neighbouring lanes a block.
// The arithmetic is codecs/block/block_scale.h.
#pragma once

#include "arguments.h"
#include "block_scale.h"
#include "cuda/launch.cuh"
#include "cuda/owned.cuh"

namespace fl {

constexpr int kWords = kBlock / 4;  // words that hold a run's codes, one byte each

struct BlockLayout {
  int64_t numel;   // of a message
  int64_t blocks;  // of a message
  int log2_lanes;  // of a block
  uint32_t format;
  int bits;
  BlockScaling scaling;
  bool given;  // FL_BLOCK_GIVEN

  FL_HD int lanes() const { return 1 << log2_lanes; }
  FL_HD int64_t runs() const { return blocks << log2_lanes; }
  FL_HD int64_t tiles() const { return (runs() + kLanes - 1) / kLanes; }  // of a run for each lane
};

struct BlockMessages {
  void *scales;    // of message 0
  uint8_t *codes;  // of message 0
  int64_t stride;
  int64_t count;

  FL_DEVICE BlockMessages only(int64_t m) const { return {byte_offset(scales, m * stride), codes + m * stride, 0, 1}; }
};

inline BlockLayout block_layout(const fl_spec &spec) {
  int log2_lanes = 0;
  while (uint32_t(kBlock) << log2_lanes < spec.param[1]) ++log2_lanes;
  const uint32_t format = spec.param[0];
  return {spec.numel,
          group_count(spec),
          log2_lanes,
          format,
          format_bits(format),
          block_scaling(spec.param),
          (spec.param[3] & FL_BLOCK_GIVEN) != 0};
}

inline BlockMessages block_messages(const fl_messages &m) {
  return {m.plane[0], static_cast<uint8_t *>(m.plane[1]), m.stride, m.count};
}

// The run that a lane owns.
struct Run {
  int64_t index;  // in the message
  int64_t first;  // its first element
  int64_t block;
  bool exists;  // false where the tile reaches past the last block

  FL_DEVICE Run(const BlockLayout &layout, int64_t tile, int lane)
      : index(tile * kLanes + lane),
        first(index * kBlock),
        block(index >> layout.log2_lanes),
        exists(index < layout.runs()) {}
};

// sum_of_block of the squares, in all lanes of the block.
FL_DEVICE float sum_of_squares(const float (&v)[kBlock], int width) {
  float sum[kBlock / 2];
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) sum[i] = v[2 * i] * v[2 * i] + v[2 * i + 1] * v[2 * i + 1];
#pragma unroll
  for (int h = 1; h < kBlock / 2; h *= 2)
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 2 * h) sum[i] += sum[i + h];
  float all = sum[0];
  for (int mask = 1; mask < width; mask *= 2) all += bits_float(shuffle_xor(float_bits(all), mask));
  return all;
}

// Scales ---------------------------------------------------------------------------------------------------------------

FL_DEVICE void store_block_scale(const BlockLayout &layout, void *scales, int64_t block, const BlockScale &scale) {
  switch (layout.scaling.kind) {
    case FL_SCALE_F32:
      static_cast<uint32_t *>(scales)[block] = scale.wire;
      break;
    case FL_SCALE_DUAL:
      static_cast<uint2 *>(scales)[block] = make_uint2(scale.wire, scale.first);
      break;
    case FL_SCALE_E8M0:
      static_cast<uint8_t *>(scales)[block] = uint8_t(scale.wire);
      break;
    case FL_SCALE_BF16:
      static_cast<uint16_t *>(scales)[block] = uint16_t(scale.wire);
      break;
    default:  // one for the message, which is there already
      break;
  }
}

FL_DEVICE float load_block_scale(const BlockLayout &layout, const void *scales, int64_t block) {
  uint32_t wire, first = 0;
  switch (layout.scaling.kind) {
    case FL_SCALE_F32:
      wire = static_cast<const uint32_t *>(scales)[block];
      break;
    case FL_SCALE_DUAL: {
      const uint2 both = static_cast<const uint2 *>(scales)[block];
      wire = both.x, first = both.y;
      break;
    }
    case FL_SCALE_E8M0:
      wire = static_cast<const uint8_t *>(scales)[block];
      break;
    case FL_SCALE_BF16:
      wire = static_cast<const uint16_t *>(scales)[block];
      break;
    default:
      wire = *static_cast<const uint32_t *>(scales);
      break;
  }
  return decode_block_scale(layout.scaling, wire, first);
}

// Codes ----------------------------------------------------------------------------------------------------------------

template <uint32_t kCode>
struct Format {
  static constexpr uint32_t code = kCode;
};

// f(Format<..>()): the same for all lanes.
template <class F>
FL_DEVICE void with_format(uint32_t format, F f) {
  switch (format) {
    case FL_E4M3:
      return f(Format<FL_E4M3>());
    case FL_E5M2:
      return f(Format<FL_E5M2>());
    case FL_INT8:
      return f(Format<FL_INT8>());
    case FL_E2M3:
      return f(Format<FL_E2M3>());
    case FL_E3M2:
      return f(Format<FL_E3M2>());
    default:
      return f(Format<FL_E2M1>());
  }
}

// Where the hardware converts to and from FP8.
FL_DEVICE constexpr bool hardware_converts(uint32_t format) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return format == FL_E4M3 || format == FL_E5M2;
#else
  (void)format;
  return false;
#endif
}

#ifdef __CUDA_ARCH__
template <uint32_t kFormat>
FL_DEVICE uint32_t hardware_codes(float a, float b) {
  uint16_t pair;
  if constexpr (kFormat == FL_E4M3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
}

template <uint32_t kFormat>
FL_DEVICE void hardware_values(uint32_t codes, float *v) {
  const uint16_t pair = uint16_t(codes);
  uint32_t halves;
  if constexpr (kFormat == FL_E4M3)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  else
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  asm("cvt.f32.f16 %0, %1;" : "=f"(v[0]) : "h"(uint16_t(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(v[1]) : "h"(uint16_t(halves >> 16)));
}
#else
template <uint32_t kFormat>
uint32_t hardware_codes(float, float);
template <uint32_t kFormat>
void hardware_values(uint32_t, float *);
#endif

// The magnitude's code of E2M1 is the least of three lines, rounded to nearest even, and 7: twice the magnitude, it and 2, half
// of it and 4. Each is rounded by an adder whose last bit is half of one, one, and two.
FL_DEVICE uint32_t fp4_magnitude(float v) {
  const float a = bits_float(float_bits(v) & 0x7fffffffu);
  const auto least = [](int32_t a, int32_t b) { return a < b ? a : b; };
  int32_t code = least(int32_t(float_bits(a + 6291456.0f)) - 0x4ac00000, 7);
  code = least(int32_t(float_bits(a + 12582912.0f)) - (0x4b400000 - 2), code);
  return uint32_t(least(int32_t(float_bits(a + 25165824.0f)) - (0x4bc00000 - 4), code));
}

// The highest bytes of four values.
FL_DEVICE uint32_t high_bytes(float a, float b, float c, float d) {
  return __byte_perm(__byte_perm(float_bits(a), float_bits(b), 0x0073),
                     __byte_perm(float_bits(c), float_bits(d), 0x0073), 0x5410);
}

// The codes of four values times the inverse of their scale, one byte each. Where the hardware converts to FP8, it makes
// the bytes of float_code.
template <uint32_t kFormat>
FL_DEVICE uint32_t four_codes(float a, float b, float c, float d) {
  constexpr FloatFormat kNumber = float_format(kFormat);
  if constexpr (kFormat == FL_INT8) {
    return low_bytes(round_even(a), round_even(b), round_even(c), round_even(d));
  } else if constexpr (hardware_converts(kFormat)) {
    return hardware_codes<kFormat>(a, b) | hardware_codes<kFormat>(c, d) << 16;
  } else if constexpr (kFormat == FL_E2M1) {
    return low_bytes(fp4_magnitude(a), fp4_magnitude(b), fp4_magnitude(c), fp4_magnitude(d)) |
           (high_bytes(a, b, c, d) >> 4 & 0x08080808u);
  } else {
    return float_code(kNumber, a) | float_code(kNumber, b) << 8 | float_code(kNumber, c) << 16 |
           float_code(kNumber, d) << 24;
  }
}

// What four codes of E2M1 stand for: the two upper bytes of each value are looked up for all four at once, by the codes as
// nibbles.
FL_DEVICE void fp4_values(uint32_t codes, float *v) {
  const uint32_t magnitudes = codes & 0x07070707u, nibbles = __byte_perm(magnitudes | magnitudes >> 4, 0, 0x4420);
  const uint32_t upper = __byte_perm(0x3f3f3f00u, 0x40404040u, nibbles) | (codes & 0x08080808u) << 4;
  const uint32_t lower = __byte_perm(0xc0800000u, 0xc0804000u, nibbles);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t two = __byte_perm(lower, upper, i ? 0x7362 : 0x5140);
    v[2 * i] = bits_float(two << 16);
    v[2 * i + 1] = bits_float(two & 0xffff0000u);
  }
}

// What four codes stand for.
template <uint32_t kFormat>
FL_DEVICE void four_values(uint32_t codes, float *v) {
  constexpr FloatFormat kNumber = float_format(kFormat);
  if constexpr (kFormat == FL_E2M1) {
    fp4_values(codes, v);
  } else if constexpr (kFormat == FL_INT8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = unsigned_byte(codes ^ 0x80808080u, i, 128.0f);
  } else if constexpr (hardware_converts(kFormat)) {
    hardware_values<kFormat>(codes, v);
    hardware_values<kFormat>(codes >> 16, v + 2);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = code_value(kNumber, codes >> 8 * i & 255u);
  }
}

// A run as it lies in memory (kCodeRun of codecs/block/block_scale.h) and its codes, one byte each.
template <int kBits>
FL_DEVICE void store_run(uint8_t *codes, int64_t run, const uint32_t (&bytes)[kWords]) {
  if constexpr (kBits == 8) {
    store_chunk(codes + run * 32, {{bytes[0], bytes[1], bytes[2], bytes[3]}});
    store_chunk(codes + run * 32 + 16, {{bytes[4], bytes[5], bytes[6], bytes[7]}});
  } else {
    Chunk low;
#pragma unroll
    for (int i = 0; i < 4; ++i) low.word[i] = (bytes[i] & 0x0f0f0f0fu) | (bytes[i + 4] & 0x0f0f0f0fu) << 4;
    if constexpr (kBits == 4) {
      store_chunk(codes + run * 16, low);
    } else {
      uint32_t high[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        high[i] = (bytes[i] >> 4 & 0x03030303u) | (bytes[i + 2] >> 4 & 0x03030303u) << 2 |
                  (bytes[i + 4] >> 4 & 0x03030303u) << 4 | (bytes[i + 6] >> 4 & 0x03030303u) << 6;
      uint2 *words = reinterpret_cast<uint2 *>(codes + run * 24);
      words[0] = make_uint2(low.word[0], low.word[1]);
      words[1] = make_uint2(low.word[2], low.word[3]);
      words[2] = make_uint2(high[0], high[1]);
    }
  }
}

// What a lane has loaded of its run: codes as they lie in memory, and the scale.
struct PackedRun {
  uint32_t words[kWords];
  float scale;
};

FL_DEVICE PackedRun load_run(const BlockLayout &layout, const BlockMessages &in, int64_t message, const Run &run) {
  PackedRun packed = {};
  if (!run.exists) return packed;
  const uint8_t *codes = in.codes + message * in.stride;
  if (layout.bits == 6) {
    const uint2 *words = reinterpret_cast<const uint2 *>(codes + run.index * 24);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint2 pair = words[i];
      packed.words[2 * i] = pair.x, packed.words[2 * i + 1] = pair.y;
    }
  } else {
    const uint8_t *start = codes + run.index * (4 * layout.bits);
    const Chunk first = load_chunk(start), second = layout.bits == 8 ? load_chunk(start + 16) : Chunk{};
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.words[i] = first.word[i], packed.words[i + 4] = second.word[i];
  }
  packed.scale = load_block_scale(layout, byte_offset(in.scales, message * in.stride), run.block);
  return packed;
}

// bytes = codes, one byte each.
template <int kBits>
FL_DEVICE void unpack_words(const uint32_t (&words)[kWords], uint32_t (&bytes)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kBits == 8) {
      bytes[i] = words[i];
    } else {
      bytes[i] = words[i % 4] >> 4 * (i / 4) & 0x0f0f0f0fu;
      if constexpr (kBits == 6) bytes[i] |= (words[4 + i % 2] >> 2 * (i / 2) & 0x03030303u) << 4;
    }
  }
}

// v = the values of a lane's codes, before the transform and the scale.
FL_DEVICE void values_of(const BlockLayout &layout, const PackedRun &packed, float (&v)[kBlock]) {
  with_format(layout.format, [&](auto format) {
    constexpr uint32_t kFormat = decltype(format)::code;
    uint32_t bytes[kWords];
    unpack_words<format_bits(kFormat)>(packed.words, bytes);
#pragma unroll
    for (int i = 0; i < kWords; ++i) four_values<kFormat>(bytes[i], v + 4 * i);
  });
}

// H v, of which a lane has its run.
FL_DEVICE void transform_run(const BlockLayout &layout, int lane, float (&v)[kBlock]) {
  hadamard32(v);
  hadamard_over_lanes(v, layout.lanes(), lane);
}

// v = decoded values of a lane's run, from `v` of its codes.
template <bool kTransform>
FL_DEVICE void finish_values(const BlockLayout &layout, float scale, int lane, float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] *= scale;
  if (kTransform) transform_run(layout, lane, v);
}

template <bool kTransform>
FL_DEVICE void decode_run(const BlockLayout &layout, const PackedRun &packed, int lane, float (&v)[kBlock]) {
  values_of(layout, packed, v);
  finish_values<kTransform>(layout, packed.scale, lane, v);
}

// Brings a tile of all messages into the device's cache.
FL_DEVICE void fetch_messages_ahead(const BlockLayout &layout, const BlockMessages &in, int64_t tile) {
  const int64_t block = tile * kLanes >> layout.log2_lanes;
  if (block >= layout.blocks) return;
  const int lane = lane_index(), lines = layout.bits, each = kLanes / lines;
  const int64_t codes = tile * (kLanes * kBlock / 8) * layout.bits;
  for (int64_t m = lane / lines; m < in.count && lane < each * lines; m += each)
    fetch_ahead(in.codes + m * in.stride + codes + lane % lines * 128, 1, 0);
  const int64_t at = layout.scaling.kind == FL_SCALE_MESSAGE ? 0 : block * scale_bytes(layout.scaling.kind);
  for (int64_t m = lane; m < in.count; m += kLanes)
    fetch_ahead(static_cast<const uint8_t *>(byte_offset(in.scales, m * in.stride)) + at, 1, 0);
}

// v = the elements of x, 0 where it is null, plus all messages in their order: codecs/block/block_scale.h. While one is decoded the
// bytes of the next are on their way.
template <bool kTransform>
FL_DEVICE void sum_messages(const BlockLayout &layout, const BlockMessages &in, uint32_t dtype, const void *x,
                            const Run &run, int lane, float (&v)[kBlock]) {
  load_or_zero(dtype, kTransform ? nullptr : x, layout.numel, run.first, lane, v);
  PackedRun next = {};
  if (in.count > 0) next = load_run(layout, in, 0, run);
#pragma unroll 1
  for (int64_t m = 0; m < in.count; ++m) {
    const PackedRun packed = next;
    if (m + 1 < in.count) next = load_run(layout, in, m + 1, run);
    float part[kBlock];
    values_of(layout, packed, part);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = add_exact_product(part[i], packed.scale, v[i]);
  }
  if constexpr (kTransform) {
    transform_run(layout, lane, v);
    add_elements(dtype, x, layout.numel, run.first, lane, v);
  }
}

}  // namespace fl
