// Blocks of the `delta` codec (codecs/delta/delta.h) on vectors: from bytes to elements.
#pragma once

#include "delta_codec.h"

namespace fl::FL_ISA {

#if defined(FL_AVX512)
template <bool kBits>
FL_VBMI2 void descend_by_vectors(const uint64_t *mask, const uint16_t *above, const uint64_t *lowest, int count,
                                 uint16_t *number) {
  const __m512i one = _mm512_set1_epi16(1);
  for (int i = 0; i < count; i += 32) {
    const uint32_t here = uint32_t(mask[i / kWord] >> i % kWord);
    __m512i v = _mm512_mask_expand_epi16(one, here, _mm512_loadu_si512(above));
    above += __builtin_popcount(here);
    if constexpr (kBits) {
      v = _mm512_add_epi16(v, v);
      v = _mm512_mask_add_epi16(v, uint32_t(lowest[i / kWord] >> i % kWord), v, one);
    }
    _mm512_storeu_si512(number + i, v);
  }
}
#endif

// The inverse of climb: numbers of a layer from those of the next one, and from their lowest bits.
template <bool kBits, class T>
void descend(const uint64_t *mask, const T *above, const uint64_t *lowest, int count, T *number) {
#if defined(FL_AVX512)
  if constexpr (sizeof(T) == 2)
    if (moves_halves()) return descend_by_vectors<kBits>(mask, above, lowest, count, number);
#endif
  for (int i = 0; i < count; ++i) {
    const T up = T(mask[i / kWord] >> i % kWord & 1);
    T v = T(1 + (T(*above - 1) & T(0 - up)));  // without a branch, which nobody could foresee
    above += up;
    if constexpr (kBits) v = T(v << 1 | (lowest[i / kWord] >> i % kWord & 1));
    number[i] = v;
  }
}

// Reads `count` differences, folded.
template <class T>
bool read_values(BitReader &in, int count, int low_bits, T *value) {
  constexpr int kLayers = 8 * sizeof(T);
  __builtin_memset(value, 0, size_t(count + kPad) * sizeof(T));
  if (!in.take_fields(value, count, low_bits)) return false;
  uint64_t mask[kLayers][kDeltaWords];
  int64_t lowest[kLayers];  // where they begin
  int size[kLayers + 1] = {count};
  int layers = 0;
  for (;; ++layers) {
    uint32_t above;
    if (!in.take(delta_width(uint32_t(size[layers])), above)) return false;
    if (above == 0) break;
    if (layers == kLayers || above > uint32_t(size[layers])) return false;
    if (!read_list(in, size[layers], int(above), mask[layers])) return false;
    size[layers + 1] = int(above);
    lowest[layers] = in.at();
    if (!in.skip(above)) return false;
  }
  T numbers[2][kDeltaBlock + kPad];
  const T *above = numbers[1];
  uint64_t none[kDeltaWords];
  if (layers < kLayers) __builtin_memset(mask[layers], 0, size_t(words_of(size[layers])) * 8);
  __builtin_memset(none, 0, size_t(words_of(size[layers])) * 8);
  for (int j = layers; j >= 0; --j) {
    const uint64_t *up = j < kLayers ? mask[j] : none;
    T *number = numbers[j % 2];
    if (j > 0) {
      uint64_t bits[kDeltaWords];
      for (int w = 0; w < words_of(size[j]); ++w) bits[w] = in.word(lowest[j - 1] + w * kWord);
      descend<true>(up, above, bits, size[j], number);
    } else {
      descend<false>(up, above, nullptr, count, number);
    }
    above = number;
  }
  for (int i = 0; i < count; ++i) value[i] = T((T(above[i] - 1) << low_bits | value[i]) + 1);
  return true;
}

#if defined(FL_AVX512)
// The elements of whole words that a mask names; returns how many.
FL_VBMI2 int take_out_by_vectors(const uint64_t *mask, const uint16_t *x, int words, uint16_t *taken) {
  uint16_t *to = taken;
  for (int w = 0; w < words; ++w)
    for (int half = 0; half < 2; ++half, x += 32) {
      const uint32_t here = uint32_t(mask[w] >> 32 * half);
      _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(here, _mm512_loadu_si512(x)));
      to += __builtin_popcount(here);
    }
  return int(to - taken);
}

FL_VBMI2 void put_back_by_vectors(const uint64_t *mask, const uint16_t *x, int words, const uint16_t *taken,
                                  uint16_t *out) {
  for (int w = 0; w < words; ++w)
    for (int half = 0; half < 2; ++half, x += 32, out += 32) {
      const uint32_t here = uint32_t(mask[w] >> 32 * half);
      const __m512i v = _mm512_mask_expand_epi16(_mm512_loadu_si512(x), here, _mm512_loadu_si512(taken));
      taken += __builtin_popcount(here);
      _mm512_storeu_si512(out, v);
    }
}
#endif

// Writes the elements that a mask names, changed by folded differences, and the others.
template <class T>
void change(const uint64_t *mask, const T *value, const T *base, T *out, int n) {
  using Signed = typename SignedOf<T>::type;
  int w = 0;
#if defined(FL_AVX512)
  if constexpr (sizeof(T) == 2)
    if (moves_halves()) {
      w = n / kWord;
      uint16_t taken[kDeltaBlock + kPad];
      const int count = take_out_by_vectors(mask, base, w, taken);
      for (int i = 0; i < count; ++i) taken[i] = delta_unfolded<T, Signed>(value[i], taken[i]);
      put_back_by_vectors(mask, base, w, taken, out);
      value += count;
    }
#endif
  if (out != base) __builtin_memcpy(out + w * kWord, base + w * kWord, size_t(n - w * kWord) * sizeof(T));
  for (; w < words_of(n); ++w)
    for (uint64_t word = mask[w]; word; word &= word - 1) {
      T &element = out[w * kWord + __builtin_ctzll(word)];
      element = delta_unfolded<T, Signed>(*value++, element);
    }
}

template <class T>
bool decode_delta(const uint8_t *in, int bytes, const T *base, T *out, int n) {
  BitReader from(in, bytes);
  uint32_t count, low_bits;
  uint64_t mask[kDeltaWords];
  T value[kDeltaBlock + kPad];
  if (!from.take(delta_width(uint32_t(n)), count) || !from.take(kDeltaLowBits, low_bits)) return false;
  if (count < 1 || count > uint32_t(n) || low_bits < 1 || low_bits > uint32_t(delta_most_low_bits(sizeof(T))))
    return false;
  if (!read_list(from, n, int(count), mask)) return false;
  if (!read_values(from, int(count), int(low_bits), value) || !from.done()) return false;
  change(mask, value, base, out, n);
  return true;
}

}  // namespace fl::FL_ISA
