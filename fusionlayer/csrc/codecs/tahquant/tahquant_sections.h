// Messages of the `tahquant` codec with coarse tokens, section by section: the entropies of its tokens, the choice, the codes.
#pragma once

#include "cpu/verbs.h"
#include "tahquant_codec.h"

namespace fl::FL_ISA {

// The logarithm with kBend of codecs/tahquant/tahquant.h.
FL_INLINE vf log2_above(vi bits, uint32_t power) {
  const vf u = (vf)((bits & int32_t(kBendBits)) | 0x3f800000) - 1.0f;
  const vf bend = add_exact_product(u, u, -u) * add_exact_product(u, broadcast(kBendSlope), broadcast(-kBend));
  return add_exact_product(__builtin_convertvector(bits - int32_t(power), vf), broadcast(0x1p-23f), bend);
}

// entropy_key of codecs/tahquant/tahquant.h of the n values at x, with a residual (may be null) of the sums.
template <class T>
FL_NOINLINE uint32_t token_key(const T *x, const float *residual, int n) {
  const auto values = [&](int i, auto access) FL_LAMBDA {
    const Block b = access.load(x + i);
    return residual ? b + access.load(residual + i) : b;
  };
  const vi top = largest(n < kBlock ? values(0, Part{n}) : values(0, Whole{}));
  int32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = top[i] > most ? top[i] : most;
  const uint32_t power = entropy_power(uint32_t(most));
  Block total{}, logs{};
  for_each_block(n, [&](int i, auto access) FL_LAMBDA {
    prefetch_block(reinterpret_cast<const T *>(reinterpret_cast<const char *>(x + i) + kFarAhead));
    const Block b = values(i, access);
    for (int j = 0; j < kVectors; ++j) {
      const vi bits = magnitude_bits(b.v[j]);
      total.v[j] += (vf)bits;
      logs.v[j] += (vf)bits * log2_above(bits, power);
    }
  });
  static_assert(kBlock == kTahSums);
  alignas(64) float sums[kBlock], more[kBlock];
  store_block(sums, total);
  store_block(more, logs);
  for (int apart = kBlock / 2; apart > 0; apart /= 2)
    for (int i = 0; i < apart; ++i) sums[i] += sums[i + apart], more[i] += more[i + apart];
  return entropy_key({sums[0], more[0]}, power);
}

// The marks of a section of a message.
inline uint32_t section_marks(const TahShape &shape, const Job &job, int64_t message, TahSection section) {
  uint32_t keys[kTahSection];
  with_dtype(job.spec->dtype, [&](auto type) FL_LAMBDA {
    for (int token = 0; token < section.tokens; ++token) {
      const int64_t first = (section.first + token) * shape.channels, left = shape.numel - first;
      const int64_t place = message * shape.numel + first;
      const float *residual = job.residual ? job.residual + place : nullptr;
      keys[token] = token_key(type.at(job.x, place), residual, int(left < shape.channels ? left : shape.channels));
    }
  });
  uint32_t marks = 0;
  for (int token = 0; token < section.tokens; ++token) {
    int before = 0;
    for (int i = 0; i < section.tokens; ++i) before += tah_precedes(keys, i, token);
    marks |= uint32_t(before < section.coarse) << tah_mark_bit(token);
  }
  return marks;
}

// Sections begin..end - 1 of all messages. Values are in a cache when they are read the second time, unless a section is
// larger than that.
inline void encode_sections(const Job &job, int64_t begin, int64_t end) {
  const TahCodec codec(job);
  const TahShape shape = tah_shape(*job.spec);
  const int64_t tiles = (shape.numel + shape.tile - 1) / shape.tile;  // of a message, that hold an element
  for (; begin < end; ++begin) {
    const int64_t message = begin / shape.sections(), number = begin % shape.sections();
    const TahSection section(shape, number);
    auto *marks = static_cast<uint8_t *>(job.out->plane[0]) + message * job.out->stride;
    reinterpret_cast<uint32_t *>(marks)[number] = section_marks(shape, job, message, section);
    const int64_t first = section.first * shape.tiles_of_token(),
                  stop = first + section.tokens * shape.tiles_of_token();
    encode(codec, job, message * tiles + first, message * tiles + (stop < tiles ? stop : tiles));
  }
}

}  // namespace fl::FL_ISA
