// The `zip` codec (codecs/zip/zip.h) on vectors: from elements to messages, tile by tile. Each tile is taken apart in L1.
#pragma once

#include "cpu/byte_planes.h"
#include "cpu/kernels.h"
#include "zip.h"

namespace fl {

// Encoding of one message by FL_ZIP, region by region.
struct ZipEncoding {
  ZipShape shape;
  uint32_t choice;  // enum fl_zip_choice
  const uint8_t *x;
  ZipMessage out;
  bool streamed;
};

}  // namespace fl

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

#endif

// The bytes that the masks name, group by group, in order.
inline void gather_escapes(const uint8_t *exponents, const uint64_t *masks, int groups, ZipEscapes &escapes) {
#if defined(FL_AVX512)
  if (moves_bytes()) return gather_by_vectors(exponents, masks, groups, escapes);
#endif
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

// Calls body(begin, end) for the runs of a region's sample.
template <class Body>
FL_INLINE void for_each_run(int n, const Body &body) {
  const int stride = zip_stride(n);
  for (int run = 0; run < kZipRuns && run * stride < n; ++run) {
    const int begin = run * stride;
    body(begin, begin + kZipRun < n ? begin + kZipRun : n);
  }
}

// Chooses the exponents of a region. Meanwhile it prefetches the runs of the next region's sample: they lie far apart, so
// every run would be a cache miss.
template <class T>
void choose_exponents(const ZipEncoding &job, int64_t region) {
  constexpr int kHighHalf = kIsHalf<T> ? 0 : 1, kHalves = sizeof(T) / 2, kSample = kZipRuns * kZipRun;
  const T *first = reinterpret_cast<const T *>(job.x) + region * kZipRegion;
  const uint16_t *x = reinterpret_cast<const uint16_t *>(first);
  uint8_t exponents[kSample], bytes[kSample];
  int sampled = 0;
  for_each_run(job.shape.in_region(region), [&](int begin, int end) FL_LAMBDA {
    for (int i = begin; i < end; ++i, ++sampled) {
      uint16_t half;
      __builtin_memcpy(&half, x + i * kHalves + kHighHalf, 2);
      exponents[sampled] = uint8_t(zip_exponent(kDtype<T>, half));
      bytes[sampled] = uint8_t(zip_byte(kDtype<T>, half));
    }
  });
  if (region + 1 < job.shape.regions())
    for_each_run(job.shape.in_region(region + 1), [&](int begin, int end) FL_LAMBDA {
      const char *run = reinterpret_cast<const char *>(first + kZipRegion + begin);
      for (int i = 0; i <= int(sizeof(T)) * (end - begin); i += 64) __builtin_prefetch(run + i, 0, 2);
    });
  uint8_t low = 255, high = 0;
  for (int i = 0; i < sampled; ++i) {
    low = exponents[i] < low ? exponents[i] : low;
    high = exponents[i] > high ? exponents[i] : high;
  }
  constexpr int kBanks = 4;  // neighbours often have one exponent, and would wait for each other's count
  ZipBin bins[kZipBins] = {}, more[kBanks - 1][kZipBins];
  for (ZipBin *bank : more) __builtin_memset(bank + low, 0, size_t(high - low + 1) * sizeof(ZipBin));
  int i = 0;
  for (; i + kBanks <= sampled; i += kBanks) {
    bins[exponents[i]] += zip_weight(bytes[i]);
    for (int k = 1; k < kBanks; ++k) more[k - 1][exponents[i + k]] += zip_weight(bytes[i + k]);
  }
  for (; i < sampled; ++i) bins[exponents[i]] += zip_weight(bytes[i]);
  for (int e = low; e <= high; ++e) bins[e] += more[0][e] + more[1][e] + more[2][e];
  uint8_t *chosen = job.out.regions()[region].exponent;
  chosen[0] = 0;
  zip_choose(bins, {low, high}, sampled, kDtype<T>, job.choice, chosen + 1);
}

}  // namespace fl::FL_ISA
