// Masks of elements, lists of places, and moving what a mask names together and apart.
#pragma once

#include "delta_bits.h"

namespace fl::FL_ISA {

// Masks and places ----------------------------------------------------------------------------------------------------

#if defined(FL_AVX512)
FL_VBMI2 int places_by_vectors(const uint64_t *words, int n, uint16_t *place) {
  alignas(64) uint16_t first[32];
  for (int i = 0; i < 32; ++i) first[i] = uint16_t(i);
  __m512i at = _mm512_load_si512(first);
  const __m512i step = _mm512_set1_epi16(32);
  uint16_t *to = place;
  for (int w = 0; w < n; ++w, at = _mm512_add_epi16(at, step)) {
    const uint32_t low = uint32_t(words[w]), high = uint32_t(words[w] >> 32);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(low, at));
    to += __builtin_popcount(low);
    at = _mm512_add_epi16(at, step);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(high, at));
    to += __builtin_popcount(high);
  }
  return int(to - place);
}
#endif

// The places of the ones in n words; returns how many. kPad more are touched.
inline int places_of(const uint64_t *words, int n, uint16_t *place) {
#if defined(FL_AVX512)
  if (moves_halves()) return places_by_vectors(words, n, place);
#endif
  uint16_t *to = place;
  for (int w = 0; w < n; ++w)
    for (uint64_t word = words[w]; word; word &= word - 1) *to++ = uint16_t(w * kWord + __builtin_ctzll(word));
  return int(to - place);
}

// A byte for each bit of a mask: a store for each one does not wait for the one before it, as setting bits would.
class Marks {
 public:
  explicit Marks(int n) : words_(words_of(n)) { __builtin_memset(mark_, 0, size_t(words_) * kWord); }

  // Marks the places that steps lead to from in front of the first one; returns how far they go.
  FL_INLINE int walk(const uint16_t *step, int count) {
    uint8_t *to = mark_ - 1;
    for (int i = 0; i < count; ++i) *(to += step[i]) = 1;
    return int(to - mark_) + 1;
  }

  void write(uint64_t *words) const {
    for (int w = 0; w < words_; ++w) {
      uint64_t word = 0;
      for (int i = 0; i < kWord; i += kVectorBytes) word |= plane_of<0>(load_vb(mark_ + w * kWord + i)) << i;
      words[w] = word;
    }
  }

 private:
  int words_;
  alignas(64) uint8_t mark_[kDeltaBlock];
};

// Lists ---------------------------------------------------------------------------------------------------------------

// The mask of the others.
FL_INLINE void invert(const uint64_t *from, int n, uint64_t *to) {
  for (int w = 0; w < words_of(n); ++w) to[w] = ~from[w];
  cut_mask(to, n);
}

// Tells which `count` of n a mask names.
inline void write_list(BitWriter &out, const uint64_t *mask, int n, int count) {
  if (count == 0 || count == n) return;
  uint64_t others[kDeltaWords];
  if (2 * count > n) {
    invert(mask, n, others);
    mask = others;
    count = n - count;
  }
  const int bits = delta_low_bits(n - count, count);
  if (bits == 0) {
    int last = words_of(n) - 1;
    while (!mask[last]) --last;
    out.put_mask(mask, last * kWord + kWord - __builtin_clzll(mask[last]));
    return;
  }
  uint16_t place[kDeltaBlock / 2 + kPad], gap[kDeltaBlock / 2 + kPad];
  places_of(mask, words_of(n), place);
  gap[0] = place[0];
  for (int i = 1; i < count; ++i) gap[i] = uint16_t(place[i] - place[i - 1] - 1);
  __builtin_memset(gap + count, 0, kPad * sizeof *gap);
  out.put_fields(gap, count, 0, bits);
  Marks marks(delta_most_unary(n, count, bits));
  for (int i = 0; i < count; ++i) gap[i] = uint16_t((gap[i] >> bits) + 1);
  const int length = marks.walk(gap, count);
  uint64_t unary[kDeltaWords];
  marks.write(unary);
  out.put_mask(unary, length);
}

// The mask of a list; false where it is not coherent.
inline bool read_list(BitReader &in, int n, int count, uint64_t *mask) {
  const int words = words_of(n);
  __builtin_memset(mask, count == n ? 0xff : 0, size_t(words) * sizeof *mask);
  cut_mask(mask, n);
  if (count == 0 || count == n) return true;
  const bool turned = 2 * count > n;
  if (turned) count = n - count;
  const int bits = delta_low_bits(n - count, count);
  uint64_t unary[kDeltaWords + 1];
  const int most = bits ? delta_most_unary(n, count, bits) : n;
  if (bits == 0) {
    if (!in.take_ones(count, most, unary)) return false;
    int at = 0, left = count;
    for (; left > 0; ++at) {
      mask[at] = unary[at];
      left -= __builtin_popcountll(unary[at]);
    }
  } else {
    uint16_t gap[kDeltaBlock / 2 + kPad], place[kDeltaBlock / 2 + kPad];
    __builtin_memset(gap, 0, size_t(count + kPad) * sizeof *gap);
    if (!in.take_fields(gap, count, bits)) return false;
    const int64_t begin = in.at();
    if (!in.take_ones(count, most, unary)) return false;
    places_of(unary, words_of(int(in.at() - begin)), place);
    uint32_t reach = gap[0] = uint16_t(gap[0] + (place[0] << bits) + 1);
    for (int i = 1; i < count; ++i) {
      gap[i] = uint16_t(gap[i] + ((place[i] - place[i - 1] - 1) << bits) + 1);
      reach += gap[i];
    }
    if (reach > uint32_t(n)) return false;
    Marks marks(n);
    marks.walk(gap, count);
    marks.write(mask);
  }
  if (turned) invert(mask, n, mask);
  return true;
}

}  // namespace fl::FL_ISA
