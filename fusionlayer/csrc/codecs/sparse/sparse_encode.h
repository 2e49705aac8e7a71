// Encoding one superblock of a sparse message (codecs/sparse/sparse.h) in three steps: mark the elements that are selected, which
// reads everything; settle which of the marked go, and count them; emit those. The first alone is vectorised: the others
// look at marks, and at the few elements that have one.
#pragma once

#include <type_traits>

#include "cpu/magnitudes.h"
#include "cpu/random.h"

namespace fl::FL_ISA {

constexpr int kWords = kSuperblock / kWord;
constexpr int kBlockWords = kCounted / kWord;

// In place of an x to add.
struct Nothing {};

FL_INLINE uint32_t greater_mask(const vi (&a)[kVectors], vi b) {
  uint32_t mask = 0;
  for (int j = 0; j < kVectors; ++j) mask |= greater_mask(a[j], b) << (j * kLanes);
  return mask;
}

// Rules: selected(bits, element) has a bit for each of the 32 magnitudes `bits` that is selected, equal(bits) for those
// that may be. `element` is the number of the first one in the tensor.
class ByMagnitude {
 public:
  explicit ByMagnitude(const Selection &s) : threshold_(broadcast(s.threshold)), ties_(s.ties) {}

  FL_INLINE uint32_t selected(const vi (&bits)[kVectors], int64_t) const { return greater_mask(bits, threshold_); }

  FL_INLINE bool ties() const { return ties_; }

  FL_INLINE uint32_t equal(const vi (&bits)[kVectors], uint32_t selected) const {
    return greater_mask(bits, threshold_ - 1) & ~selected;
  }

 private:
  vi threshold_;
  bool ties_;
};

class ByNumber {
 public:
  explicit ByNumber(const Selection &s)
      : key_(s.key),
        offset_(s.offset),
        limit_(s.limit),
        flipped_(broadcast(int32_t(uint32_t(s.limit) ^ kFlip))),
        all_(s.limit > UINT32_MAX) {}

  FL_INLINE uint32_t selected(const vi (&bits)[kVectors], int64_t element) const {
    const uint64_t first = offset_ + uint64_t(element);
    const uint32_t wild = greater_mask(bits, broadcast(int32_t(kF32Inf) - 1));
    return wild | (all_ ? ~uint32_t(0) : uint32_t(first) > UINT32_MAX - kBlock ? one_by_one(first) : numbers(first));
  }

  FL_INLINE bool ties() const { return false; }
  FL_INLINE uint32_t equal(const vi (&)[kVectors], uint32_t) const { return 0; }

 private:
  static constexpr uint32_t kFlip = 0x80000000u;  // makes a signed comparison of an unsigned one

  FL_INLINE uint32_t numbers(uint64_t first) const {
    const RngKey key = key_at(key_, first);
    const vu spread = (iota() + uint32_t(first)) * kSpread + key.a;
    uint32_t mask = 0;
    for (int j = 0; j < kVectors; ++j) {
      const vu number = random_bits(key, spread + uint32_t(j * kLanes) * kSpread);
      mask |= greater_mask(flipped_, (vi)(number ^ kFlip)) << (j * kLanes);
    }
    return mask;
  }

  __attribute__((noinline)) uint32_t one_by_one(uint64_t first) const {
    uint32_t mask = 0;
    for (int i = 0; i < kBlock; ++i)
      mask |= uint32_t(fl::random_bits(key_at(key_, first + i), uint32_t(first + i)) < limit_) << i;
    return mask;
  }

  RngKey key_;
  uint64_t offset_, limit_;
  vi flipped_;
  bool all_;
};

FL_INLINE uint64_t *words_of(uint64_t *marks, int64_t superblock) { return marks + superblock * kWords; }

// Words of a superblock's marks, whole blocks of 256 elements.
FL_INLINE int word_count(const Selection &s, int64_t superblock) {
  return (s.shape.in_superblock(superblock) + kCounted - 1) / kCounted * kBlockWords;
}

template <class X, class Rule>
void mark(const Selection &s, const Rule &rule, int64_t superblock) {
  const int64_t first = superblock * kSuperblock;
  float *acc = s.acc + first;
  uint64_t *marked = words_of(s.marked, superblock), *equal = words_of(s.equal, superblock);
  const int last = word_count(s, superblock) - kBlockWords;
  __builtin_memset(marked + last, 0, kBlockWords * sizeof *marked);
  if (rule.ties()) __builtin_memset(equal + last, 0, kBlockWords * sizeof *equal);

  vi largest = {};
  int marks = 0, equals = 0;
  for_each_block(s.shape.in_superblock(superblock), [&](int i, auto access) FL_LAMBDA {
    Block v = access.load(acc + i);
    if constexpr (!std::is_same_v<X, Nothing>) {
      v = accumulated(v, access.load(static_cast<const X *>(s.x) + first + i), s.scale);
      access.store(acc + i, v);
    }
    vi bits[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      bits[j] = magnitude_bits(v.v[j]);
      largest = max(largest, bits[j]);
    }
    const uint32_t selected = rule.selected(bits, first + i) & access.mask();
    __builtin_memcpy(reinterpret_cast<uint8_t *>(marked) + i / 8, &selected, sizeof selected);
    marks += __builtin_popcount(selected);
    if (rule.ties()) {
      const uint32_t same = rule.equal(bits, selected) & access.mask();
      __builtin_memcpy(reinterpret_cast<uint8_t *>(equal) + i / 8, &same, sizeof same);
      equals += __builtin_popcount(same);
    }
  });
  Selection::Counts &counts = s.counts[superblock];
  counts.marked = marks;
  counts.equal = equals;
  counts.largest = largest_lane(largest);
}

// Keeps the first `count` of the bits that are set, and returns how many that were.
inline int64_t keep_first(uint64_t *words, int n, int64_t count) {
  int64_t kept = 0;
  for (int i = 0; i < n; ++i) {
    int extra = int(__builtin_popcountll(words[i])) - int(count - kept < kWord ? count - kept : kWord);
    for (; extra > 0; --extra) words[i] &= ~(uint64_t(1) << (63 - __builtin_clzll(words[i])));
    kept += __builtin_popcountll(words[i]);
  }
  return kept;
}

// Adds the first `ties` elements that equal the threshold to the marks, and leaves what form FL_SPARSE_BYTE can count.
inline void settle(const Selection &s, int64_t superblock) {
  uint64_t *marked = words_of(s.marked, superblock), *equal = words_of(s.equal, superblock);
  const int words = word_count(s, superblock);
  Selection::Counts &counts = s.counts[superblock];
  if (counts.ties > 0 && counts.equal > 0) {
    counts.marked += int32_t(keep_first(equal, words, counts.ties));
    for (int i = 0; i < words; ++i) marked[i] |= equal[i];
  }
  if (s.shape.form == FL_SPARSE_BYTE && counts.marked > kMostCounted) {
    counts.marked = 0;
    for (int i = 0; i < words; i += kBlockWords)
      counts.marked += int32_t(keep_first(marked + i, kBlockWords, kMostCounted));
  }
}

// A stretch of marked elements, by their places in a superblock.
struct Places {
  static constexpr int kElements = 4096;
  uint16_t place[kElements];
  int count = 0;

  Places(const uint64_t *words, int n, int first) {
    for (int w = 0; w < n; ++w)
      for (uint64_t word = words[w]; word; word &= word - 1)
        place[count++] = uint16_t(first + w * kWord + __builtin_ctzll(word));
  }
};

inline void emit_positions(const Selection &s, const uint64_t *words, int n, int64_t block, const Places &places,
                           int64_t first) {
  if (s.shape.form == FL_SPARSE_SHORT) {
    __builtin_memcpy(static_cast<uint16_t *>(s.out.positions) + first, places.place, size_t(places.count) * 2);
  } else if (s.shape.form == FL_SPARSE_BYTE) {
    uint8_t *positions = static_cast<uint8_t *>(s.out.positions) + first;
    for (int i = 0; i < places.count; ++i) positions[i] = uint8_t(places.place[i]);
    for (int i = 0; i < n; i += kBlockWords) {
      int count = 0;
      for (int w = 0; w < kBlockWords; ++w) count += __builtin_popcountll(words[i + w]);
      s.out.counts[block + i / kBlockWords] = uint8_t(count);
    }
  } else {
    const int64_t byte = block * kCounted / 8, left = s.shape.plane_bytes(2) - byte;
    __builtin_memcpy(static_cast<uint8_t *>(s.out.positions) + byte, words, size_t(left < n * 8 ? left : n * 8));
  }
}

// Writes the values of the places, and leaves in acc what is kept of them.
inline void emit_values(const Selection &s, float *acc, const Places &places, int64_t first) {
  if (s.shape.values == FL_F32) {
    float *values = static_cast<float *>(s.out.values) + first;
    for (int i = 0; i < places.count; ++i) {
      values[i] = fl::canonical(acc[places.place[i]]);
      acc[places.place[i]] = 0.0f;
    }
  } else {
    uint16_t *values = static_cast<uint16_t *>(s.out.values) + first;
    for (int i = 0; i < places.count; ++i) {
      const float value = acc[places.place[i]];
      values[i] = f32_to_bf16(value);
      acc[places.place[i]] = kept(value, bf16_to_f32(values[i]));
    }
  }
}

// What is not finite was sent, or is forgotten.
inline void drop_wild(float *acc, float *clear, int n) {
  for (int i = 0; i < n; ++i)
    if (!is_finite(acc[i])) {
      acc[i] = 0.0f;
      if (clear) clear[i] = 0.0f;
    }
}

inline void emit(const Selection &s, int64_t superblock) {
  int64_t first = s.counts[superblock].first;
  const int64_t element = superblock * kSuperblock, room = s.shape.capacity - first;
  uint64_t *marked = words_of(s.marked, superblock);
  const int words = word_count(s, superblock);
  float *acc = s.acc + element, *clear = s.clear ? s.clear + element : nullptr;
  if (s.counts[superblock].marked > room) keep_first(marked, words, room);
  constexpr int kStretch = Places::kElements / kWord;
  for (int w = 0; w < words; w += kStretch) {
    const int n = words - w < kStretch ? words - w : kStretch;
    const Places places(marked + w, n, w * kWord);
    emit_positions(s, marked + w, n, (element + w * kWord) / kCounted, places, first);
    emit_values(s, acc, places, first);
    if (clear)
      for (int i = 0; i < places.count; ++i) clear[places.place[i]] = 0.0f;
    first += places.count;
  }
  s.out.ends[superblock] = uint32_t(first);
  if (s.counts[superblock].largest >= kF32Inf) drop_wild(acc, clear, s.shape.in_superblock(superblock));
}

}  // namespace fl::FL_ISA
