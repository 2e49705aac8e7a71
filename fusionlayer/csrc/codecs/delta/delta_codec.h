// Blocks of the `delta` codec (codecs/delta/delta.h) on vectors: from elements to bytes.
#pragma once

#include "delta_lists.h"

namespace fl::FL_ISA {

template <class T>
struct SignedOf {
  using type = int16_t;
};
template <>
struct SignedOf<uint32_t> {
  using type = int32_t;
};

// What a block has changed: a mask, and the elements that it names, after and before.
template <class T>
struct DeltaChanges {
  uint64_t mask[kDeltaWords];
  T x[kDeltaBlock + kPad], base[kDeltaBlock + kPad];
  int count;
};

// Bit i: x[i] != base[i], for kWord elements.
FL_INLINE uint64_t changed_word(const uint16_t *x, const uint16_t *base) {
  constexpr int kHalf = kVectorBytes / 2;
  uint64_t word = 0;
  for (int j = 0; j < kWord / kVectorBytes; ++j, x += kVectorBytes, base += kVectorBytes) {
    const vh a = (vh)(load_vh(x) != load_vh(base)), b = (vh)(load_vh(x + kHalf) != load_vh(base + kHalf));
    word |= plane_of<0>(pack_halves(a & 1, b & 1)) << j * kVectorBytes;
  }
  return word;
}
FL_INLINE uint64_t changed_word(const uint32_t *x, const uint32_t *base) {
  typedef vi unaligned __attribute__((aligned(4), may_alias));
  uint64_t word = 0;
  for (int i = 0; i < kWord; i += kLanes) {
    const vi a = *reinterpret_cast<const unaligned *>(x + i), b = *reinterpret_cast<const unaligned *>(base + i);
    word |= uint64_t(greater_mask(vi{}, (vi)(a != b))) << i;
  }
  return word;
}

// Most often of the next block, which then is there when its turn comes.
template <class T>
FL_INLINE void prefetch_next(const T *p) {
  for (int i = 0; i < kWord * int(sizeof(T)); i += 64)
    __builtin_prefetch(reinterpret_cast<const char *>(p + kDeltaBlock) + i, 0, 2);
}

#if defined(FL_AVX512)
// The whole words of a block; returns how many elements changed.
FL_VBMI2 int find_by_vectors(const uint16_t *x, const uint16_t *base, int words, DeltaChanges<uint16_t> &found) {
  int count = 0;
  for (int w = 0; w < words; ++w, x += kWord, base += kWord) {
    prefetch_next(x);
    prefetch_next(base);
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32);
    const __m512i c = _mm512_loadu_si512(base), d = _mm512_loadu_si512(base + 32);
    const __mmask32 low = _mm512_cmpneq_epi16_mask(a, c), high = _mm512_cmpneq_epi16_mask(b, d);
    found.mask[w] = low | uint64_t(high) << 32;
    _mm512_storeu_si512(found.x + count, _mm512_maskz_compress_epi16(low, a));
    _mm512_storeu_si512(found.base + count, _mm512_maskz_compress_epi16(low, c));
    count += __builtin_popcount(low);
    _mm512_storeu_si512(found.x + count, _mm512_maskz_compress_epi16(high, b));
    _mm512_storeu_si512(found.base + count, _mm512_maskz_compress_epi16(high, d));
    count += __builtin_popcount(high);
  }
  return count;
}
#endif

template <class T>
void find_changes(const T *x, const T *base, int n, DeltaChanges<T> &found) {
  int w = 0, count = 0;
#if defined(FL_AVX512)
  if constexpr (sizeof(T) == 2)
    if (moves_halves()) {
      w = n / kWord;
      count = find_by_vectors(x, base, w, found);
    }
#endif
  for (; w < words_of(n); ++w) {
    const T *xs = x + w * kWord, *bases = base + w * kWord;
    const int left = n - w * kWord;
    uint64_t word = 0;
    if (left >= kWord) {
      prefetch_next(xs);
      prefetch_next(bases);
      word = changed_word(xs, bases);
    } else {
      for (int i = 0; i < left; ++i) word |= uint64_t(xs[i] != bases[i]) << i;
    }
    found.mask[w] = word;
    for (; word; word &= word - 1, ++count) {
      const int i = __builtin_ctzll(word);
      found.x[count] = xs[i];
      found.base[count] = bases[i];
    }
  }
  found.count = count;
}

// The number of low bits that samples of the values are told with in the fewest.
template <class T>
int low_bits_for(const T *value, int count) {
  const int samples = count < kDeltaSamples ? count : kDeltaSamples, stride = count / samples;
  const auto cost = [&](int low_bits) FL_LAMBDA {
    int bits = 0;
    for (int i = 0; i < samples; ++i) bits += delta_cost(value[i * stride], low_bits);
    return bits;
  };
  return delta_best_low_bits(delta_most_low_bits(sizeof(T)), cost);
}

// Layers --------------------------------------------------------------------------------------------------------------

// What numbers of a layer are: those above 1, as a mask, and the lowest bits, as another.
struct DeltaLayer {
  uint64_t above[kDeltaWords], lowest[kDeltaWords];
};

#if defined(FL_AVX512)
template <bool kFirst>
FL_VBMI2 int climb_by_vectors(uint16_t *number, int count, DeltaLayer &layer) {
  int kept = 0;
  const __m512i one = _mm512_set1_epi16(1);
  uint32_t *above = reinterpret_cast<uint32_t *>(layer.above), *lowest = reinterpret_cast<uint32_t *>(layer.lowest);
  for (int i = 0; i < count; i += 32) {
    __m512i v = _mm512_loadu_si512(number + i);
    if constexpr (!kFirst) {
      const uint32_t bits = _mm512_test_epi16_mask(v, one);
      __builtin_memcpy(lowest++, &bits, 4);
      v = _mm512_srli_epi16(v, 1);
    }
    uint32_t mask = _mm512_cmpgt_epu16_mask(v, one);
    if (count - i < 32) mask &= (1u << (count - i)) - 1;
    __builtin_memcpy(above++, &mask, 4);
    _mm512_storeu_si512(number + kept, _mm512_maskz_compress_epi16(mask, v));
    kept += __builtin_popcount(mask);
  }
  const uint32_t none = 0;
  if ((count + 31) / 32 % 2) __builtin_memcpy(above, &none, 4);  // the other half of the last word
  return kept;
}
#endif

// Splits `count` numbers, which are halved first but in the first layer: those above 1 move to the front; returns how many.
template <bool kFirst, class T>
int climb(T *number, int count, DeltaLayer &layer) {
#if defined(FL_AVX512)
  if constexpr (sizeof(T) == 2)
    if (moves_halves()) return climb_by_vectors<kFirst>(number, count, layer);
#endif
  int kept = 0;
  for (int i = 0; i < count; i += kWord) {
    uint64_t above = 0, lowest = 0;
    const int here = count - i < kWord ? count - i : kWord;
    for (int j = 0; j < here; ++j) {
      T v = number[i + j];
      if constexpr (!kFirst) {
        lowest |= uint64_t(v & 1) << j;
        v >>= 1;
      }
      number[kept] = v;
      kept += v > 1;
      above |= uint64_t(v > 1) << j;
    }
    layer.above[i / kWord] = above;
    layer.lowest[i / kWord] = lowest;
  }
  return kept;
}

template <class T>
int encode_delta(const T *x, const T *base, int n, uint8_t *out) {
  using Signed = typename SignedOf<T>::type;
  DeltaChanges<T> changes;
  DeltaLayer layer;
  find_changes(x, base, n, changes);
  int count = changes.count;
  if (count == 0) return 0;
  T *value = changes.x;
  for (int i = 0; i < count; ++i) value[i] = T(delta_folded<T, Signed>(value[i], changes.base[i]) - 1);
  __builtin_memset(value + count, 0, kPad * sizeof(T));
  const int low_bits = low_bits_for(value, count);
  const int64_t limit = DeltaShape{n, int(sizeof(T))}.too_many_bits(n);
  BitWriter to(out);
  to.put(uint64_t(count), delta_width(uint32_t(n)));
  to.put(uint64_t(low_bits), kDeltaLowBits);
  write_list(to, changes.mask, n, count);
  if (to.bits() + int64_t(count) * low_bits >= limit) return int(kDeltaWhole);
  to.put_fields(value, count, 0, low_bits);
  for (int i = 0; i < count; ++i) value[i] = T((value[i] >> low_bits) + 1);
  for (int above = climb<true>(value, count, layer);;) {
    to.put(uint64_t(above), delta_width(uint32_t(count)));
    if (to.bits() >= limit) return int(kDeltaWhole);
    if (above == 0) break;
    write_list(to, layer.above, count, above);
    count = above;
    above = climb<false>(value, count, layer);
    to.put_mask(layer.lowest, count);
  }
  const int64_t bytes = to.finish();
  return 8 * bytes < limit ? int(bytes) : int(kDeltaWhole);
}

}  // namespace fl::FL_ISA
