// The `zip` codec (core/zip.h) on vectors, tile by tile: each is taken apart in L1.
#pragma once

#include "byte_planes.h"
#include "kernels.h"
#include "zip.h"

namespace fl::FL_ISA {

constexpr int kZipGroups = kZipTile / kZipGroup;
constexpr int kGroupVectors = kZipGroup / kVectorBytes;
constexpr int kZipBlockBytes = kZipTile * 27 / 8;  // the largest, of f32
constexpr int kAtOnce = 4;                         // escapes of a group that are moved without a branch

template <class T>
constexpr uint32_t kDtype = FL_F32;
template <>
inline constexpr uint32_t kDtype<Bf16> = FL_BF16;
template <>
inline constexpr uint32_t kDtype<F16> = FL_F16;

template <class T>
constexpr bool kIsHalf = sizeof(T) == 2;

// The codes of a region's exponents.
class ZipTable {
 public:
  explicit ZipTable(const uint8_t (&exponent)[8]) : window_(true) {
    for (int code = 0; code < 8; ++code) {
      exponent_[code] = exponent[code];
      if (code > 1 && exponent[code] != exponent[code - 1] + 1) window_ = false;
    }
  }

  template <bool kWindow>
  FL_INLINE vb codes(vb exponents) const {
    if constexpr (kWindow) {
      const vb codes = exponents - broadcast_byte(exponent_[1] - 1);
      return codes & (vb)(codes <= broadcast_byte(kZipCodes));
    } else {
      vb codes{};
      for (int code = 1; code <= kZipCodes; ++code)
        codes |= (vb)(exponents == broadcast_byte(exponent_[code])) & broadcast_byte(code);
      return codes;
    }
  }

  bool window() const { return window_; }
  uint8_t first() const { return exponent_[1]; }

 private:
  uint8_t exponent_[8];
  bool window_;
};

// What a tile becomes besides its block.
struct ZipEscapes {
  uint8_t bytes[kZipTile + kZipGroup];  // with room to write a group at once
  int count;
};

FL_INLINE void store_word(uint8_t *p, uint64_t word, int bytes) { __builtin_memcpy(p, &word, size_t(bytes)); }

// The lowest bit that is set; some place of a group where none is.
FL_INLINE int lowest(uint64_t mask) { return __builtin_ctzll(mask | uint64_t(1) << (kZipGroup - 1)); }

#if defined(FL_AVX512)
// Not all CPUs that have AVX-512 move bytes by masks.
inline bool moves_bytes() {
  static const bool has = __builtin_cpu_supports("avx512vbmi2");
  return has;
}

__attribute__((target("avx512vbmi2"), noinline)) inline void gather_by_vectors(const uint8_t *exponents,
                                                                               const uint64_t *masks, int groups,
                                                                               ZipEscapes &escapes) {
  uint8_t *to = escapes.bytes;
  for (int g = 0; g < groups; ++g) {
    const __m512i group = _mm512_load_si512(exponents + g * kZipGroup);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(masks[g], group));
    to += __builtin_popcountll(masks[g]);
  }
  escapes.count = int(to - escapes.bytes);
}

__attribute__((target("avx512vbmi2"), noinline)) inline void scatter_by_vectors(const uint8_t *escapes,
                                                                                const uint64_t *masks, int groups,
                                                                                uint8_t *exponents) {
  for (int g = 0; g < groups; ++g) {
    uint8_t *group = exponents + g * kZipGroup;
    const __m512i found = _mm512_loadu_si512(escapes);
    _mm512_store_si512(group, _mm512_mask_expand_epi8(_mm512_load_si512(group), masks[g], found));
    escapes += __builtin_popcountll(masks[g]);
  }
}
#endif

// The bytes that the masks name, group by group, in order.
inline void gather_escapes(const uint8_t *exponents, const uint64_t *masks, int groups, ZipEscapes &escapes) {
  uint8_t *to = escapes.bytes;
  for (int g = 0; g < groups; ++g, exponents += kZipGroup) {
    uint64_t mask = masks[g];
    const int count = __builtin_popcountll(mask);
    for (int i = 0; i < kAtOnce; ++i, mask &= mask - 1) to[i] = exponents[lowest(mask)];
    for (int i = kAtOnce; mask; ++i, mask &= mask - 1) to[i] = exponents[lowest(mask)];
    to += count;
  }
  escapes.count = int(to - escapes.bytes);
}

// Writes the block of `filled` elements whose halves are given; f32's lower halves are there already.
template <class T, bool kWindow>
__attribute__((noinline)) void encode_block(const uint16_t *half, int filled, const ZipTable &table, uint8_t *block,
                                            ZipEscapes &escapes) {
  alignas(64) uint8_t exponents[kZipTile];
  uint64_t masks[kZipGroups];
  const ZipTable codes_of = table;
  uint8_t *planes = block + filled;
  const int plane = filled / 8;
  for (int g = 0; g < filled / kZipGroup; ++g) {
    uint64_t word[6] = {};
    const uint16_t *next = half + g * kZipGroup + kZipTile;  // most often of the next tile
    if constexpr (kIsHalf<T>)
      for (int i = 0; i < kZipGroup; i += 32) __builtin_prefetch(next + i);
    for (int j = 0; j < kGroupVectors; ++j) {
      const int i = g * kZipGroup + j * kVectorBytes;
      const vh a = load_vh(half + i), b = load_vh(half + i + kVectorBytes / 2);
      vb exponent;
      if constexpr (kDtype<T> == FL_F16) {
        exponent = pack_halves(a >> 10 & 31, b >> 10 & 31);
        store(block + i, pack_halves((a >> 8 & 0x80) | (a >> 3 & 0x7f), (b >> 8 & 0x80) | (b >> 3 & 0x7f)));
        const vb low = pack_halves(a & 7, b & 7);
        word[3] |= plane_of<0>(low) << j * kVectorBytes;
        word[4] |= plane_of<1>(low) << j * kVectorBytes;
        word[5] |= plane_of<2>(low) << j * kVectorBytes;
      } else {
        exponent = pack_halves(a >> 7 & 0xff, b >> 7 & 0xff);
        store(block + i, pack_halves((a >> 8 & 0x80) | (a & 0x7f), (b >> 8 & 0x80) | (b & 0x7f)));
      }
      store(exponents + i, exponent);
      const vb codes = codes_of.codes<kWindow>(exponent);
      word[0] |= plane_of<0>(codes) << j * kVectorBytes;
      word[1] |= plane_of<1>(codes) << j * kVectorBytes;
      word[2] |= plane_of<2>(codes) << j * kVectorBytes;
    }
    for (int p = 0; p < (kDtype<T> == FL_F16 ? 6 : 3); ++p) store_word(planes + p * plane + g * 8, word[p], 8);
    masks[g] = ~(word[0] | word[1] | word[2]);
  }
  gather_escapes(exponents, masks, filled / kZipGroup, escapes);
}

// The halves of n elements, filled up with zeros of an exponent that has a code; f32's lower halves go to `low`.
template <class T>
const uint16_t *halves_of(const T *x, int n, int filled, const ZipTable &table, uint16_t *half, uint8_t *low) {
  if constexpr (kIsHalf<T>) {
    if (n == filled) return &x->bits;
    __builtin_memcpy(half, x, size_t(n) * 2);
  } else {
    uint16_t *lower = reinterpret_cast<uint16_t *>(low);
    for_each_block(filled, [&](int i, auto) FL_LAMBDA {
      prefetch_block(x + i + kZipTile);
      const Block b = n - i >= kBlock ? load_block(x + i) : n > i ? Part{n - i}.load(x + i) : Block{};
      vi high[kVectors], rest[kVectors];
      for (int j = 0; j < kVectors; ++j) {
        high[j] = (vi)b.v[j];
        rest[j] = high[j] << 16;
      }
      store_high_halves<Store::kCached>(half + i, high);
      store_high_halves<Store::kCached>(lower + i, rest);
    });
  }
  for (int i = n; i < filled; ++i) half[i] = uint16_t(table.first() << (kDtype<T> == FL_F16 ? 10 : 7));
  return half;
}

FL_INLINE void copy_block(uint8_t *to, const uint8_t *from, int bytes) {
  for (int i = 0; i < bytes; i += kVectorBytes) store<Store::kStreamed>(to + i, load_vb(from + i));
}

// The escapes of a region; -1 if there are more than `room`. With kWrite its index, blocks and escapes are written.
template <class T, bool kWrite>
int64_t encode_region(const ZipEncoding &job, int64_t region, int64_t first, int64_t room) {
  alignas(64) uint8_t local[kZipBlockBytes];
  alignas(64) uint16_t half[kZipTile];
  ZipEscapes escapes;
  const ZipShape &shape = job.shape;
  const ZipTable table(job.out.regions()[region].exponent);
  uint16_t *index = job.out.index(shape) + region * kZipTiles;
  uint8_t *blocks = job.out.data + shape.block(0), *to = job.out.data + shape.escapes() + first;
  const bool streamed = job.streamed && reinterpret_cast<uintptr_t>(blocks) % kStreamAlignment == 0;
  const int64_t block_bytes = shape.block_bytes(kZipTile);
  int64_t count = 0;
  for (int t = 0; t < shape.tiles_in(region); ++t) {
    const int64_t tile = region * kZipTiles + t;
    const int n = shape.in_tile(tile), filled = ZipShape::filled(n);
    uint8_t *target = blocks + tile * block_bytes;
    const bool direct = kWrite && !(streamed && filled == kZipTile);
    uint8_t *block = direct ? target : local;
    uint8_t *low = block + filled + shape.planes() * (filled / 8);
    const uint16_t *halves =
        halves_of(reinterpret_cast<const T *>(job.x) + tile * kZipTile, n, filled, table, half, low);
    table.window() ? encode_block<T, true>(halves, filled, table, block, escapes)
                   : encode_block<T, false>(halves, filled, table, block, escapes);
    if (count + escapes.count > room) return -1;
    if constexpr (kWrite) {
      if (!direct) copy_block(target, local, int(block_bytes));
      index[t] = uint16_t(count);
      __builtin_memcpy(to + count, escapes.bytes, size_t(escapes.count));
    }
    count += escapes.count;
  }
  if (streamed) finish_streaming();
  return count;
}

// Chooses the exponents of a region.
template <class T>
void choose_exponents(const ZipEncoding &job, int64_t region) {
  ZipBin bins[kZipBins] = {};
  constexpr int kHighHalf = kIsHalf<T> ? 0 : 1, kHalves = sizeof(T) / 2;
  const int n = job.shape.in_region(region), stride = zip_stride(n);
  const uint16_t *x = reinterpret_cast<const uint16_t *>(reinterpret_cast<const T *>(job.x) + region * kZipRegion);
  int sampled = 0;
  for (int run = 0; run < kZipRuns && run * stride < n; ++run) {
    const int begin = run * stride, end = begin + kZipRun < n ? begin + kZipRun : n;
    for (int i = begin; i < end; ++i) {
      uint16_t half;
      __builtin_memcpy(&half, x + i * kHalves + kHighHalf, 2);
      bins[zip_exponent(kDtype<T>, half)] += zip_weight(zip_byte(kDtype<T>, half));
    }
    sampled += end - begin;
  }
  uint8_t *exponents = job.out.regions()[region].exponent;
  exponents[0] = 0;
  zip_choose(bins, sampled, kDtype<T>, job.choice, exponents + 1);
}

// Decoding ------------------------------------------------------------------------------------------------------------

// The inverse of gather_escapes. Behind the groups there is a place for bytes that belong nowhere.
inline void scatter_escapes(const uint8_t *escapes, const uint64_t *masks, int groups, uint8_t *exponents) {
#if defined(FL_AVX512)
  if (moves_bytes()) return scatter_by_vectors(escapes, masks, groups, exponents);
#endif
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

// Writes a tile's elements, filled up to whole groups, where the message is coherent.
template <class T>
bool decode_tile(const ZipShape &shape, const ZipMessage &in, int64_t tile, T *out) {
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
  alignas(64) uint8_t exponents[kZipTile + 1];  // and one place for bytes that belong nowhere
  const uint8_t *block = in.data + shape.block(tile);
  if (!decode_exponents<T>(block + filled, filled, region, in.data + shape.escapes() + first, escapes - first,
                           exponents))
    return false;
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
      const bool direct = n % kZipGroup == 0 && !stream;
      if (!decode_tile(shape, zip_message(*job.in, message), tile, direct ? out : values)) return false;
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
