// Bits and fields of the `delta` codec: a stream of words of bits, and fields of one width, packed from a whole byte on.
#pragma once

#include "cpu/byte_planes.h"
#include "cpu/kernels.h"
#include "delta.h"

namespace fl::FL_ISA {

constexpr int kDeltaWords = kDeltaBlock / kWord;
constexpr int kPad = kWord;  // elements behind arrays of a block, which vectors touch

FL_INLINE uint64_t load_word(const uint8_t *p) {
  uint64_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return word;
}
FL_INLINE void store_word64(uint8_t *p, uint64_t word) { __builtin_memcpy(p, &word, sizeof word); }

constexpr int words_of(int bits) { return (bits + kWord - 1) / kWord; }

// The lowest bits, 0 to 64.
FL_INLINE uint64_t low_ones(int bits) { return bits < 64 ? (uint64_t(1) << bits) - 1 : ~uint64_t(0); }

// Sets and clears bits behind the first n of a mask.
FL_INLINE void cut_mask(uint64_t *words, int n) {
  if (n % kWord) words[n / kWord] &= low_ones(n % kWord);
}

// Eight numbers of some bits, a byte each, side by side in the lowest bytes of a word; and the inverse.
FL_INLINE uint64_t join_bytes(uint64_t v, int bits) {
  v = (v & 0x00ff00ff00ff00ff) | (v & 0xff00ff00ff00ff00) >> (8 - bits);
  v = (v & 0x0000ffff0000ffff) | (v & 0xffff0000ffff0000) >> (16 - 2 * bits);
  return (v & 0x00000000ffffffff) | (v & 0xffffffff00000000) >> (32 - 4 * bits);
}
FL_INLINE uint64_t part_bytes(uint64_t v, int bits) {
  const uint64_t quarter = low_ones(4 * bits), pair = low_ones(2 * bits) * 0x0000000100000001,
                 one = low_ones(bits) * 0x0001000100010001;
  v = (v & quarter) | (v >> 4 * bits & quarter) << 32;
  v = (v & pair) | (v >> 2 * bits & pair) << 16;
  return (v & one) | (v >> bits & one) << 8;
}

#if defined(FL_AVX512)
#define FL_VBMI2 __attribute__((target("avx512vbmi2"), noinline)) inline

// Not all CPUs that have AVX-512 move bytes and halves by masks.
inline bool moves_halves() {
  static const bool has = __builtin_cpu_supports("avx512vbmi2");
  return has;
}

// join_bytes of eight words, and what they are side by side, on 64 numbers at once.
FL_VBMI2 void pack_by_vectors(const uint16_t *v, int count, int shift, int bits, uint8_t *to) {
  const uint64_t kept = low_ones(bits) * 0x0101010101010101;
  const __m512i low = _mm512_set1_epi16(short(low_ones(bits))), bytes = _mm512_set1_epi64(0x00ff00ff00ff00ff),
                pairs = _mm512_set1_epi64(0x0000ffff0000ffff), quarters = _mm512_set1_epi64(0x00000000ffffffff);
  const __m128i down = _mm_cvtsi32_si128(shift), one = _mm_cvtsi32_si128(8 - bits),
                two = _mm_cvtsi32_si128(16 - 2 * bits), four = _mm_cvtsi32_si128(32 - 4 * bits);
  for (int i = 0; i < count; i += kWord, to += 8 * bits) {
    const __m512i a = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(v + i), down), low);
    const __m512i b = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(v + i + 32), down), low);
    __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
    x = _mm512_or_si512(_mm512_and_si512(x, bytes), _mm512_srl_epi64(_mm512_andnot_si512(bytes, x), one));
    x = _mm512_or_si512(_mm512_and_si512(x, pairs), _mm512_srl_epi64(_mm512_andnot_si512(pairs, x), two));
    x = _mm512_or_si512(_mm512_and_si512(x, quarters), _mm512_srl_epi64(_mm512_andnot_si512(quarters, x), four));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(kept, x));
  }
}

// The inverse, by part_bytes; `or`s the numbers to those that are there.
FL_VBMI2 void unpack_by_vectors(const uint8_t *from, int count, int shift, int bits, uint16_t *v) {
  const uint64_t kept = low_ones(bits) * 0x0101010101010101;
  const __m512i quarter = _mm512_set1_epi64(int64_t(low_ones(4 * bits))),
                pair = _mm512_set1_epi64(int64_t(low_ones(2 * bits) * 0x0000000100000001)),
                single = _mm512_set1_epi64(int64_t(low_ones(bits) * 0x0001000100010001));
  const __m128i up = _mm_cvtsi32_si128(shift), one = _mm_cvtsi32_si128(8 - bits),
                two = _mm_cvtsi32_si128(16 - 2 * bits), four = _mm_cvtsi32_si128(32 - 4 * bits);
  for (int i = 0; i < count; i += kWord, from += 8 * bits) {
    __m512i x = _mm512_maskz_expand_epi8(kept, _mm512_loadu_si512(from));
    x = _mm512_or_si512(_mm512_and_si512(x, quarter), _mm512_sll_epi64(_mm512_andnot_si512(quarter, x), four));
    x = _mm512_or_si512(_mm512_and_si512(x, pair), _mm512_sll_epi64(_mm512_andnot_si512(pair, x), two));
    x = _mm512_or_si512(_mm512_and_si512(x, single), _mm512_sll_epi64(_mm512_andnot_si512(single, x), one));
    const __m512i a = _mm512_sll_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(x)), up);
    const __m512i b = _mm512_sll_epi16(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(x, 1)), up);
    _mm512_storeu_si512(v + i, _mm512_or_si512(a, _mm512_loadu_si512(v + i)));
    _mm512_storeu_si512(v + i + 32, _mm512_or_si512(b, _mm512_loadu_si512(v + i + 32)));
  }
}
#endif

// Packs 64 numbers after the other, `bits` above the lowest `shift` of each, 8 at most; kPad behind them are touched.
template <class T>
void pack(const T *v, int count, int shift, int bits, uint8_t *to) {
#if defined(FL_AVX512)
  if constexpr (sizeof(T) == 2)
    if (moves_halves()) return pack_by_vectors(v, count, shift, bits, to);
#endif
  for (int i = 0; i < count; i += kWord) {
    alignas(64) uint8_t bytes[kWord];
    alignas(64) uint64_t joined[8];
    for (int j = 0; j < kWord; ++j) bytes[j] = uint8_t(v[i + j] >> shift) & uint8_t(low_ones(bits));
    __builtin_memcpy(joined, bytes, sizeof joined);
    for (int j = 0; j < 8; ++j) joined[j] = join_bytes(joined[j], bits);
    for (int j = 0; j < 8; ++j, to += bits) store_word64(to, joined[j]);
  }
}

template <class T>
void unpack(const uint8_t *from, int count, int shift, int bits, T *v) {
#if defined(FL_AVX512)
  if constexpr (sizeof(T) == 2)
    if (moves_halves()) return unpack_by_vectors(from, count, shift, bits, v);
#endif
  for (int i = 0; i < count; i += kWord) {
    alignas(64) uint64_t parted[8];
    alignas(64) uint8_t bytes[kWord];
    for (int j = 0; j < 8; ++j, from += bits) parted[j] = load_word(from);
    for (int j = 0; j < 8; ++j) parted[j] = part_bytes(parted[j], bits);
    __builtin_memcpy(bytes, parted, sizeof bytes);
    for (int j = 0; j < kWord; ++j) v[i + j] = T(v[i + j] | T(bytes[j]) << shift);
  }
}

class BitWriter {
 public:
  explicit BitWriter(uint8_t *to) : begin_(to), to_(to) {}

  // The lowest `width` bits of a word, 64 at most; all others are 0.
  FL_INLINE void put(uint64_t bits, int width) {
    word_ |= bits << used_;
    if (used_ + width >= kWord) {
      store_word64(to_, word_);
      to_ += 8;
      word_ = used_ ? bits >> (kWord - used_) : 0;
      used_ -= kWord;
    }
    used_ += width;
  }

  void put_mask(const uint64_t *words, int n) {
    for (; n > kWord; n -= kWord) put(*words++, kWord);
    if (n > 0) put(*words & low_ones(n), n);
  }

  // `width` bits of each number above its lowest `shift`; kPad numbers behind are touched.
  template <class T>
  void put_fields(const T *v, int count, int shift, int width) {
    for (; width > 0; shift += 8, width -= 8) {
      fill_byte();
      const int bits = width < 8 ? width : 8;
      pack(v, count, shift, bits, to_);
      const int64_t written = int64_t(count) * bits;
      to_ += written / 8;
      used_ = int(written % 8);
      word_ = *to_ & low_ones(used_);
    }
  }

  int64_t bits() const { return 8 * (to_ - begin_) + used_; }

  // Fills up a byte, and returns how many there are.
  int64_t finish() {
    fill_byte();
    return to_ - begin_;
  }

 private:
  void fill_byte() {
    store_word64(to_, word_);
    to_ += (used_ + 7) / 8;
    word_ = 0;
    used_ = 0;
  }

  uint8_t *begin_, *to_;
  uint64_t word_ = 0;
  int used_ = 0;
};

// The bytes of a block; kDeltaSlack bytes behind its end may be read.
class BitReader {
 public:
  BitReader(const uint8_t *from, int bytes) : from_(from), end_(8 * int64_t(bytes)) {}

  int64_t at() const { return at_; }
  int64_t left() const { return end_ - at_; }
  bool done() const { return left() >= 0 && left() < 8; }

  // 64 bits from a bit on.
  FL_INLINE uint64_t word(int64_t bit) const {
    const uint8_t *p = from_ + bit / 8;
    const int shift = int(bit % 8);
    return load_word(p) >> shift | uint64_t(p[8]) << 1 << (63 - shift);
  }

  bool skip(int64_t bits) {
    at_ += bits;
    return at_ <= end_;
  }

  // A number of some bits, 32 at most; false where the block has fewer.
  bool take(int width, uint32_t &value) {
    if (left() < width) return false;
    value = uint32_t(word(at_) & low_ones(width));
    at_ += width;
    return true;
  }

  // Bits up to the `count`th one, `most` at most, as a mask; the word behind it is 0.
  bool take_ones(int count, int most, uint64_t *words) {
    const int64_t limit = left() < most ? left() : most;
    int64_t read = 0;
    for (int found = 0; read < limit; read += kWord) {
      uint64_t word = this->word(at_ + read);
      const int ones = __builtin_popcountll(word);
      if (found + ones >= count) {
        uint64_t rest = word;
        for (; found < count - 1; ++found) rest &= rest - 1;
        const int last = __builtin_ctzll(rest);
        *words++ = word & low_ones(last + 1);
        *words = 0;
        at_ += read + last + 1;
        return read + last + 1 <= limit;
      }
      found += ones;
      *words++ = word;
    }
    return false;
  }

  // What put_fields wrote; numbers are added to those that are there.
  template <class T>
  bool take_fields(T *v, int count, int width) {
    for (int shift = 0; width > 0; shift += 8, width -= 8) {
      at_ = (at_ + 7) / 8 * 8;
      const int bits = width < 8 ? width : 8;
      if (left() < int64_t(count) * bits) return false;
      unpack(from_ + at_ / 8, count, shift, bits, v);
      at_ += int64_t(count) * bits;
    }
    return true;
  }

 private:
  const uint8_t *from_;
  int64_t end_, at_ = 0;
};

}  // namespace fl::FL_ISA
