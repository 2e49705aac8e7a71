// Blocks of the `delta` codec (core/delta.h). Vectors find what changed; only changed elements are touched again.
#pragma once

#include "byte_planes.h"
#include "delta.h"
#include "kernels.h"

namespace fl::FL_ISA {

template <class T>
struct SignedOf {
  using type = int16_t;
};
template <>
struct SignedOf<uint32_t> {
  using type = int32_t;
};

FL_INLINE uint64_t load_word(const uint8_t *p) {
  uint64_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return word;
}

// What a block has changed: places, and differences as numbers.
struct DeltaChanges {
  uint16_t place[kDeltaBlock + kWord];
  uint32_t value[kDeltaBlock];
  int count;
};

// Writing -------------------------------------------------------------------------------------------------------------

class BitWriter {
 public:
  explicit BitWriter(uint8_t *to) : to_(to) {}

  FL_INLINE void put(uint32_t bits, int width) {
    word_ |= uint64_t(bits) << used_;
    used_ += width;
    for (; used_ >= 32; used_ -= 32, word_ >>= 32, to_ += 4) __builtin_memcpy(to_, &word_, 4);
  }

  // Writes a one behind as many zeros.
  FL_INLINE void put_unary(uint32_t zeros) {
    for (; zeros >= 31; zeros -= 31) put(0, 31);
    put(1u << zeros, int(zeros) + 1);
  }

  // Fills up a byte, and returns the next.
  uint8_t *finish() {
    for (; used_ > 0; used_ -= 8, word_ >>= 8) *to_++ = uint8_t(word_);
    return to_;
  }

 private:
  uint8_t *to_;
  uint64_t word_ = 0;
  int used_ = 0;
};

FL_INLINE uint32_t low_part(uint32_t value, int bits) { return bits < 32 ? value & ((1u << bits) - 1) : value; }

// Tells `count` of n places, ascending.
inline uint8_t *write_places(const uint16_t *place, int count, int n, uint8_t *to) {
  const int bits = delta_low_bits(n - count, count);
  if (bits) {
    BitWriter low(to);
    int next = 0;
    for (int i = 0; i < count; next = place[i++] + 1) low.put(low_part(uint32_t(place[i] - next), bits), bits);
    to = low.finish();
  }
  BitWriter unary(to);
  int next = 0;
  for (int i = 0; i < count; next = place[i++] + 1) unary.put_unary(uint32_t(place[i] - next) >> bits);
  return unary.finish();
}

// How the values of a block are written.
struct DeltaPlan {
  int low_bits, layers, rest_bits;
  int reach[kDeltaLayers + 1];  // how many values reach each layer; all reach 0
  int64_t bits;                 // of the values, at most
};

FL_INLINE int bits_of(uint32_t v) { return v ? 32 - __builtin_clz(v) : 0; }

// Numbers with the same three leading bits have one bin, so where a number of three bits times a power of two begins is
// known exactly.
constexpr int kDeltaBins = 124;
FL_INLINE int bin_of(uint32_t v) {
  const int bits = bits_of(v);
  return bits < 3 ? int(v) : 4 * (bits - 2) + int(v >> (bits - 3) & 3);
}

// The best layers for a number of low bits; `from[bin]` values are in this bin or above.
inline DeltaPlan plan_layers(const int *from, uint32_t most, int count, int low_bits) {
  DeltaPlan plan{};
  plan.low_bits = low_bits;
  plan.reach[0] = count;
  most >>= low_bits;
  int64_t of_layers = 0;
  plan.rest_bits = bits_of(most);
  plan.bits = int64_t(count) * plan.rest_bits;
  for (int j = 1; j <= kDeltaLayers && uint32_t(j) <= most; ++j) {
    plan.reach[j] = from[bin_of(uint32_t(j) << low_bits)];
    of_layers += 16 + delta_list_bits(plan.reach[j - 1], plan.reach[j]);
    const int rest = bits_of(most - uint32_t(j));
    const int64_t bits = of_layers + int64_t(plan.reach[j]) * rest;
    if (bits >= plan.bits) continue;
    plan.bits = bits;
    plan.layers = j;
    plan.rest_bits = rest;
  }
  plan.bits += 16 + int64_t(count) * low_bits;
  return plan;
}

inline DeltaPlan plan_values(const uint32_t *value, int count) {
  int from[kDeltaBins + 1] = {};
  uint32_t most = 0;
  for (int i = 0; i < count; ++i) {
    ++from[bin_of(value[i])];
    most = value[i] > most ? value[i] : most;
  }
  for (int bin = kDeltaBins - 1; bin >= 0; --bin) from[bin] += from[bin + 1];
  DeltaPlan best = plan_layers(from, most, count, 1);
  for (int low_bits = 2; low_bits < bits_of(most) && int64_t(count) * low_bits < best.bits; ++low_bits) {
    const DeltaPlan plan = plan_layers(from, most, count, low_bits);
    if (plan.bits < best.bits) best = plan;
  }
  return best;
}

inline uint8_t *write_values(const DeltaPlan &plan, uint32_t *value, int count, uint8_t *to) {
  uint16_t place[kDeltaBlock];
  BitWriter low(to);
  for (int i = 0; i < count; ++i) {
    low.put(low_part(value[i], plan.low_bits), plan.low_bits);
    value[i] >>= plan.low_bits;
  }
  to = low.finish();
  for (int j = 1; j <= plan.layers; ++j) {  // those that reach a layer move to the front
    int kept = 0;
    for (int i = 0; i < plan.reach[j - 1]; ++i) {
      const uint32_t v = value[i];
      value[kept] = v - 1;
      place[kept] = uint16_t(i);
      kept += v > 0;
    }
    to = write_places(place, kept, plan.reach[j - 1], to);
  }
  BitWriter rest(to);
  if (plan.rest_bits)
    for (int i = 0; i < plan.reach[plan.layers]; ++i) rest.put(value[i], plan.rest_bits);
  return rest.finish();
}

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

template <class T>
void find_changes(const T *x, const T *base, int n, DeltaChanges &found) {
  uint16_t *to = found.place;
  for (int i = 0; i < n; i += kWord) {
    uint64_t word = 0;
    if (n - i >= kWord)
      word = changed_word(x + i, base + i);
    else
      for (int j = i; j < n; ++j) word |= uint64_t(x[j] != base[j]) << (j - i);
    for (; word; word &= word - 1) *to++ = uint16_t(i + __builtin_ctzll(word));
  }
  found.count = int(to - found.place);
}

template <class T>
int encode_delta(const T *x, const T *base, int n, uint8_t *out) {
  using Signed = typename SignedOf<T>::type;
  DeltaChanges changes;
  find_changes(x, base, n, changes);
  int count = changes.count;
  if (count == 0) return 0;
  int64_t bits = 8 * kDeltaFront;
  if (count > delta_most_places(n)) {
    count = n;
    for (int i = 0; i < n; ++i) changes.value[i] = delta_folded<T, Signed>(x[i], base[i]);
  } else {
    bits += delta_list_bits(n, count);
    for (int i = 0; i < count; ++i) {
      const int p = changes.place[i];
      changes.value[i] = uint32_t(delta_folded<T, Signed>(x[p], base[p])) - 1;
    }
  }
  const DeltaPlan plan = plan_values(changes.value, count);
  const int64_t most = int64_t(n) * int(sizeof(T));
  if (bits + plan.bits >= 8 * (most < kDeltaWhole ? most : kDeltaWhole)) return int(kDeltaWhole);
  const uint16_t first = uint16_t(count);
  __builtin_memcpy(out, &first, 2);
  out[2] = uint8_t(plan.low_bits | plan.layers << 5);
  out[3] = uint8_t(plan.rest_bits);
  uint8_t *to = out + kDeltaFront;
  for (int j = 1; j <= plan.layers; ++j, to += 2) {
    const uint16_t reach = uint16_t(plan.reach[j]);
    __builtin_memcpy(to, &reach, 2);
  }
  if (count < n) to = write_places(changes.place, count, n, to);
  to = write_values(plan, changes.value, count, to);
  return int(to - out);
}

// Reading -------------------------------------------------------------------------------------------------------------

// The bytes of a block; kDeltaSlack bytes behind its end may be read.
class DeltaReader {
 public:
  DeltaReader(const uint8_t *from, int bytes) : at_(from), end_(from + bytes) {}

  // The next bytes, null where the block has fewer.
  const uint8_t *take(int64_t bytes) {
    if (bytes > end_ - at_) return nullptr;
    at_ += bytes;
    return at_ - bytes;
  }
  const uint8_t *take_bits(int64_t bits) { return take((bits + 7) / 8); }
  bool done() const { return at_ == end_; }

  // `count` of n places.
  bool read_places(int n, int count, uint16_t *place) {
    const int bits = delta_low_bits(n - count, count);
    const uint8_t *low = take_bits(int64_t(count) * bits);
    if (!low) return false;
    int found = 0;
    int64_t next = 0, last = -1;  // the place that may come next; the bit of the last one
    for (const uint8_t *from = at_; found < count; from += 8) {
      if (from >= end_) return false;
      const int64_t first = 8 * (from - at_);
      for (uint64_t word = load_word(from); word && found < count; word &= word - 1) {
        const int64_t bit = first + __builtin_ctzll(word);
        next += ((bit - last - 1) << bits) + field(low, int64_t(found) * bits, bits);
        last = bit;
        if (next >= n) return false;
        place[found++] = uint16_t(next++);
      }
    }
    return take_bits(last + 1) != nullptr;
  }

  // The bits of a field, at most 32, from a bit on.
  static FL_INLINE uint32_t field(const uint8_t *from, int64_t bit, int width) {
    return low_part(uint32_t(load_word(from + bit / 8) >> bit % 8), width);
  }

 private:
  const uint8_t *at_, *end_;
};

inline bool read_values(DeltaReader &reader, int low_bits, const int *reach, int layers, int rest_bits,
                        uint32_t *value) {
  uint16_t place[kDeltaBlock], reaching[kDeltaBlock];
  const uint8_t *low = reader.take_bits(int64_t(reach[0]) * low_bits);
  if (!low) return false;
  for (int i = 0; i < reach[0]; ++i) value[i] = DeltaReader::field(low, int64_t(i) * low_bits, low_bits);
  for (int j = 1; j <= layers; ++j) {
    if (reach[j] < 1 || reach[j] > reach[j - 1] || !reader.read_places(reach[j - 1], reach[j], place)) return false;
    for (int i = 0; i < reach[j]; ++i) {
      reaching[i] = j == 1 ? place[i] : reaching[place[i]];
      value[reaching[i]] += 1u << low_bits;
    }
  }
  const uint8_t *rest = reader.take_bits(int64_t(reach[layers]) * rest_bits);
  if (!rest) return false;
  if (rest_bits)
    for (int i = 0; i < reach[layers]; ++i)
      value[layers ? reaching[i] : i] += DeltaReader::field(rest, int64_t(i) * rest_bits, rest_bits) << low_bits;
  return true;
}

template <class T>
bool decode_delta(const uint8_t *in, int bytes, const T *base, T *out, int n) {
  using Signed = typename SignedOf<T>::type;
  uint16_t place[kDeltaBlock];
  uint32_t value[kDeltaBlock];
  DeltaReader reader(in, bytes);
  const uint8_t *front = reader.take(kDeltaFront);
  if (!front) return false;
  int reach[kDeltaLayers + 1] = {front[0] | front[1] << 8};
  const int count = reach[0], low_bits = front[2] & 31, layers = front[2] >> 5, rest_bits = front[3];
  if (count < 1 || count > n || rest_bits > 32) return false;
  const uint8_t *sizes = reader.take(2 * layers);
  if (!sizes) return false;
  for (int j = 0; j < layers; ++j) reach[j + 1] = sizes[2 * j] | sizes[2 * j + 1] << 8;
  if (count < n && !reader.read_places(n, count, place)) return false;
  if (!read_values(reader, low_bits, reach, layers, rest_bits, value) || !reader.done()) return false;
  if (count == n) {
    for (int i = 0; i < n; ++i) out[i] = delta_unfolded<T, Signed>(T(value[i]), base[i]);
    return true;
  }
  if (out != base) __builtin_memcpy(out, base, size_t(n) * sizeof(T));
  for (int i = 0; i < count; ++i) {
    const int p = place[i];
    out[p] = delta_unfolded<T, Signed>(T(value[i] + 1), base[p]);
  }
  return true;
}

}  // namespace fl::FL_ISA
