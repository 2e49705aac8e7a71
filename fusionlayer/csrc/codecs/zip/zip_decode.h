// The `zip` codec (codecs/zip/zip.h) on vectors: from messages to elements, block by block.
#pragma once

#include "zip_codec.h"

namespace fl::FL_ISA {

// The inverse of gather_escapes. Behind the groups there is a place for bytes that belong nowhere.
inline void scatter_escapes(const uint8_t *escapes, const uint64_t *masks, int groups, uint8_t *exponents) {
  uint8_t *nowhere = exponents + kZipTile;
  for (int g = 0; g < groups; ++g, exponents += kZipGroup) {
    uint64_t mask = masks[g];
    const int count = __builtin_popcountll(mask);
    for (int i = 0; i < kAtOnce; ++i, mask &= mask - 1) *(mask ? exponents + lowest(mask) : nowhere) = escapes[i];
    for (int i = kAtOnce; mask; ++i, mask &= mask - 1) exponents[lowest(mask)] = escapes[i];
    escapes += count;
  }
}

// The exponents of a block's elements, escapes filled in; false if there are more than the message has.
template <class T>
FL_INLINE bool decode_exponents(const uint8_t *planes, int filled, const ZipRegion &region, const uint8_t *escapes,
                                int64_t left, uint8_t *exponents) {
  uint64_t masks[kZipGroups];
  uint8_t found[kZipTile + kZipGroup];
  const int plane = filled / 8, groups = filled / kZipGroup;
  uint8_t table[8];
  __builtin_memcpy(table, region.exponent, 8);
  int count = 0;
  constexpr int kGroupBytes = kZipGroup * (sizeof(T) == 4 ? 27 : kDtype<T> == FL_F16 ? 14 : 11) / 8;
  const uint8_t *next = planes - filled + kZipGroups * kGroupBytes;
  for (int g = 0; g < groups; ++g) {
    for (int i = 0; i < kGroupBytes; i += 64) __builtin_prefetch(next + g * kGroupBytes + i);
    uint64_t word[3];
    for (int p = 0; p < 3; ++p) __builtin_memcpy(&word[p], planes + p * plane + g * 8, 8);
    for (int j = 0; j < kGroupVectors; ++j) {
      const int shift = j * kVectorBytes;
      const vb codes = spread<0>(word[0] >> shift) | spread<1>(word[1] >> shift) | spread<2>(word[2] >> shift);
      store(exponents + g * kZipGroup + shift, look_up(table, codes));
    }
    masks[g] = ~(word[0] | word[1] | word[2]);
    count += __builtin_popcountll(masks[g]);
  }
  if (count > left) return false;
  __builtin_memcpy(found, escapes, size_t(count));
  scatter_escapes(found, masks, groups, exponents);
  return true;
}

// The elements of a block.
template <class T>
__attribute__((noinline)) void join_block(const uint8_t *block, int filled, const uint8_t *exponents, uint8_t *out) {
  const uint8_t *planes = block + filled, *low = planes + 3 * (filled / 8);
  const int plane = filled / 8;
  alignas(64) uint16_t high[kIsHalf<T> ? 1 : kZipTile];
  for (int i = 0; i < filled; i += kVectorBytes) {
    vh exponent[2], byte[2], half[2];
    unpack_halves(load_vb(exponents + i), exponent[0], exponent[1]);
    unpack_halves(load_vb(block + i), byte[0], byte[1]);
    if constexpr (kDtype<T> == FL_F16) {
      uint64_t word[3] = {};
      for (int p = 0; p < 3; ++p) __builtin_memcpy(&word[p], low + p * plane + i / 8, kVectorBytes / 8);
      vh rest[2];
      unpack_halves(spread<0>(word[0]) | spread<1>(word[1]) | spread<2>(word[2]), rest[0], rest[1]);
      for (int k = 0; k < 2; ++k)
        half[k] = (byte[k] & 0x80) << 8 | (exponent[k] & 31) << 10 | (byte[k] & 0x7f) << 3 | rest[k];
    } else {
      for (int k = 0; k < 2; ++k) half[k] = (byte[k] & 0x80) << 8 | exponent[k] << 7 | (byte[k] & 0x7f);
    }
    uint8_t *to = kIsHalf<T> ? out : reinterpret_cast<uint8_t *>(high);
    store(to + 2 * i, half[0]);
    store(to + 2 * i + kVectorBytes, half[1]);
  }
  if constexpr (!kIsHalf<T>)
    for (int i = 0; i < filled; i += kBlock) {
      vi upper[kVectors], lower[kVectors];
      load_high_halves(high + i, upper);
      load_high_halves(reinterpret_cast<const uint16_t *>(low) + i, lower);
      for (int j = 0; j < kVectors; ++j) store(out + 4 * (i + j * kLanes), upper[j] | (vi)((vu)lower[j] >> 16));
    }
}

// Whether decode_groups can be called.
FL_INLINE bool joins_at_once() {
#if defined(FL_AVX512)
  return moves_bytes();
#else
  return false;
#endif
}

#if defined(FL_AVX512)
// A block's elements in one go: exponents stay in registers until escapes are filled in and the other bits are there.
template <class T, Store kStore>
__attribute__((target("avx512vbmi2"), noinline)) void decode_groups(const uint8_t *block, int filled,
                                                                    const uint8_t (&table)[8], const uint8_t *escapes,
                                                                    uint8_t *out) {
  const uint8_t *planes = block + filled, *low = planes + 3 * (filled / 8);
  const int plane = filled / 8;
  constexpr int kGroupBytes = kZipGroup * (sizeof(T) == 4 ? 27 : kDtype<T> == FL_F16 ? 14 : 11) / 8;
  const uint8_t *next = block + kZipGroups * kGroupBytes;  // most often of the next tile
  for (int g = 0; g < filled / kZipGroup; ++g) {
    for (int i = 0; i < kGroupBytes; i += 64) __builtin_prefetch(next + g * kGroupBytes + i);
    uint64_t word[6];
    for (int p = 0; p < (kDtype<T> == FL_F16 ? 6 : 3); ++p) __builtin_memcpy(&word[p], planes + p * plane + g * 8, 8);
    const uint64_t escaped = ~(word[0] | word[1] | word[2]);
    const vb codes = spread<0>(word[0]) | spread<1>(word[1]) | spread<2>(word[2]);
    const vb found = (vb)_mm512_mask_expand_epi8((__m512i)look_up(table, codes), escaped, _mm512_loadu_si512(escapes));
    escapes += __builtin_popcountll(escaped);
    vh exponent[2], byte[2], half[2];
    unpack_halves(found, exponent[0], exponent[1]);
    unpack_halves(load_vb(block + g * kZipGroup), byte[0], byte[1]);
    if constexpr (kDtype<T> == FL_F16) {
      vh rest[2];
      unpack_halves(spread<0>(word[3]) | spread<1>(word[4]) | spread<2>(word[5]), rest[0], rest[1]);
      for (int k = 0; k < 2; ++k)
        half[k] = (byte[k] & 0x80) << 8 | (exponent[k] & 31) << 10 | (byte[k] & 0x7f) << 3 | rest[k];
    } else {
      for (int k = 0; k < 2; ++k) half[k] = (byte[k] & 0x80) << 8 | exponent[k] << 7 | (byte[k] & 0x7f);
    }
    uint8_t *to = out + g * kZipGroup * sizeof(T);
    for (int k = 0; k < 2; ++k) {
      if constexpr (kIsHalf<T>) {
        store<kStore>(to + k * 64, half[k]);
      } else {
        const __m512i rest = (__m512i)load_vh(reinterpret_cast<const uint16_t *>(low) + g * kZipGroup + k * 32);
        const auto join = [](__m256i upper, __m256i lower) FL_LAMBDA {
          return _mm512_or_si512(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16), _mm512_cvtepu16_epi32(lower));
        };
        store<kStore>(to + k * 128, join(_mm512_castsi512_si256((__m512i)half[k]), _mm512_castsi512_si256(rest)));
        store<kStore>(to + k * 128 + 64,
                      join(_mm512_extracti64x4_epi64((__m512i)half[k], 1), _mm512_extracti64x4_epi64(rest, 1)));
      }
    }
  }
}
#endif

// decode_groups, where the block has no more escapes than are left.
template <class T>
FL_INLINE bool decode_at_once([[maybe_unused]] const uint8_t *block, [[maybe_unused]] int filled,
                              [[maybe_unused]] const ZipRegion &region, [[maybe_unused]] const uint8_t *escapes,
                              [[maybe_unused]] int64_t left, [[maybe_unused]] bool streamed,
                              [[maybe_unused]] uint8_t *out) {
#if defined(FL_AVX512)
  const uint8_t *planes = block + filled;
  const int plane = filled / 8;
  int count = 0;
  for (int g = 0; g < filled / kZipGroup; ++g) {
    uint64_t word[3];
    for (int p = 0; p < 3; ++p) __builtin_memcpy(&word[p], planes + p * plane + g * 8, 8);
    count += __builtin_popcountll(~(word[0] | word[1] | word[2]));
  }
  if (count > left) return false;
  uint8_t found[kZipTile + kZipGroup];  // with room to read a group at once
  __builtin_memcpy(found, escapes, size_t(count));
  uint8_t table[8];
  __builtin_memcpy(table, region.exponent, 8);
  streamed ? decode_groups<T, Store::kStreamed>(block, filled, table, found, out)
           : decode_groups<T, Store::kCached>(block, filled, table, found, out);
#endif
  return true;
}

// Writes a tile's elements, filled up to whole groups, where the message is coherent; past the caches if `streamed`, where
// they are joined at once.
template <class T>
bool decode_tile(const ZipShape &shape, const ZipMessage &in, int64_t tile, T *out, bool streamed = false) {
  const int n = shape.in_tile(tile), filled = ZipShape::filled(n);
  if (in.head->form == kZipRaw) {
    __builtin_memcpy(out, in.data + tile * kZipTile * int64_t(sizeof(T)), size_t(n) * sizeof(T));
    return true;
  }
  const int64_t escapes = in.head->escapes;
  if (in.head->form != kZipCoded || escapes >= shape.too_many()) return false;
  const ZipRegion &region = in.regions()[tile / kZipTiles];
  const int64_t first = int64_t(region.first) + in.index(shape)[tile];
  if (first > escapes) return false;
  const uint8_t *block = in.data + shape.block(tile), *found = in.data + shape.escapes() + first;
  if (joins_at_once())
    return decode_at_once<T>(block, filled, region, found, escapes - first, streamed, reinterpret_cast<uint8_t *>(out));
  alignas(64) uint8_t exponents[kZipTile + 1];  // and one place for bytes that belong nowhere
  if (!decode_exponents<T>(block + filled, filled, region, found, escapes - first, exponents)) return false;
  join_block<T>(block, filled, exponents, reinterpret_cast<uint8_t *>(out));
  return true;
}

// Elements of type T of a message, in memory of type Y.
template <class T, class Y>
bool zip_decode(const Job &job, int64_t begin, int64_t end) {
  const ZipShape shape = zip_shape(*job.spec);
  const int64_t tiles = shape.tiles();
  alignas(64) T values[kZipTile];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t message = unit / tiles, tile = unit % tiles;
    const int n = shape.in_tile(tile);
    Y *out = static_cast<Y *>(job.y) + message * shape.numel + tile * kZipTile;
    const bool stream = job.streamed && reinterpret_cast<uintptr_t>(out) % kStreamAlignment == 0;
    if constexpr (kDtype<T> == kDtype<Y>) {
      const bool direct = n % kZipGroup == 0 && (!stream || joins_at_once());
      if (!decode_tile(shape, zip_message(*job.in, message), tile, direct ? out : values, direct && stream))
        return false;
      if (direct) continue;
      if (stream && n == kZipTile)
        copy_block(reinterpret_cast<uint8_t *>(out), reinterpret_cast<const uint8_t *>(values), sizeof values);
      else
        __builtin_memcpy(out, values, size_t(n) * sizeof(T));
    } else {
      if (!decode_tile(shape, zip_message(*job.in, message), tile, values)) return false;
      for_each_block(n,
                     [&](int i, auto access) FL_LAMBDA { access.store(out + i, canonical(access.load(values + i))); });
    }
  }
  if (job.streamed) finish_streaming();
  return true;
}

template <class T, class Y>
bool zip_decode_sum(const Job &job, int64_t begin, int64_t end) {
  const ZipShape shape = zip_shape(*job.spec);
  alignas(64) T values[kZipTile];
  alignas(64) float sums[kZipTile];
  for (int64_t tile = begin; tile < end; ++tile) {
    const int n = shape.in_tile(tile);
    Y *out = static_cast<Y *>(job.y) + tile * kZipTile;
    __builtin_memset(sums, 0, sizeof sums);
    if (job.add) for_each_block(n, [&](int i, auto access) FL_LAMBDA { store_block(sums + i, access.load(out + i)); });
    for (int64_t m = 0; m < job.in->count; ++m) {
      if (!decode_tile(shape, zip_message(*job.in, m), tile, values)) return false;
      for_each_block(n, [&](int i, auto access)
                            FL_LAMBDA { store_block(sums + i, load_block(sums + i) + access.load(values + i)); });
    }
    for_each_block(n, [&](int i, auto access) FL_LAMBDA { access.store(out + i, canonical(load_block(sums + i))); });
  }
  return true;
}

}  // namespace fl::FL_ISA
