// Bits of the blocks of `delta`, by a warp: the words of a section are made each by a lane, whatever bit they begin at.
#pragma once

#include "delta.cuh"

namespace fl {

// The lowest bits, 0 to 32.
FL_DEVICE uint32_t low_ones(int bits) { return bits < 32 ? (1u << bits) - 1 : ~0u; }

FL_DEVICE int highest_one(uint32_t word) { return delta_width(word) - 1; }

// 32 bits from a bit on, of words that go on one word behind the last bit.
FL_DEVICE uint32_t word_at(const uint32_t *words, int bit) {
  const uint32_t low = words[bit / 32], high = words[bit / 32 + 1];
  return bit % 32 ? low >> bit % 32 | high << (32 - bit % 32) : low;
}

// The largest over all lanes.
FL_DEVICE int largest_over_lanes(int v) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const int other = int(shuffle_xor(uint32_t(v), mask));
    v = other > v ? other : v;
  }
  return v;
}

FL_DEVICE void invert_mask(uint32_t *mask, int n) {
  for (int w = lane_index(); w < (n + 31) / 32; w += kLanes) mask[w] = ~mask[w] & low_ones(n - 32 * w);
  meet();
}

// Writes sections until there are too many bits.
class DeltaSink {
 public:
  FL_DEVICE DeltaSink(uint32_t *words, int too_many) : words_(words), too_many_(too_many) {}

  FL_DEVICE bool full() const { return at_ >= too_many_; }
  FL_DEVICE int bytes() const { return (at_ + 7) / 8; }
  FL_DEVICE void fill_byte() { at_ = (at_ + 7) / 8 * 8; }

  // bits(i): 32 bits of the section from its bit i on.
  template <class Bits>
  FL_DEVICE void put(int length, const Bits &bits) {
    const int begin = at_, end = begin + length;
    at_ = end;
    if (full() || length == 0) return;
    for (int w = begin / 32 + lane_index(); 32 * w < end; w += kLanes) {
      const int from = 32 * w - begin;
      uint32_t word = from < 0 ? bits(0) << -from : bits(from);
      word &= low_ones(end - 32 * w);
      if (from < 0) word |= words_[w];  // which is 0 behind its last section
      words_[w] = word;
    }
    meet();
  }

  FL_DEVICE void put_number(uint32_t number, int width) {
    put(width, [&](int i) { return number >> i; });
  }

  FL_DEVICE void put_mask(const uint32_t *mask, int length) {
    put(length, [&](int i) { return word_at(mask, i); });
  }

  // Fields of the lowest `width` bits of v[0], v[1], ...
  template <class T>
  FL_DEVICE void put_fields(const T *v, int count, int width) {
    for (int shift = 0; shift < width; shift += 8) {
      const int bits = width - shift < 8 ? width - shift : 8;
      const auto field = [&](int i) { return uint32_t(v[i]) >> shift & low_ones(bits); };
      fill_byte();
      put(count * bits, [&](int i) {
        int number = i / bits, got = bits - i % bits;
        uint32_t word = field(number) >> i % bits;
        for (; got < 32 && ++number < count; got += bits) word |= field(number) << got;
        return word;
      });
    }
  }

 private:
  uint32_t *words_;
  int too_many_, at_ = 0;
};

// Tells which `count` of n a mask names. The mask may be inverted, and the unary numbers and gaps are written on the way.
FL_DEVICE void write_list(DeltaSink &out, uint32_t *mask, uint32_t *unary, uint16_t *gaps, int n, int count) {
  if (count == 0 || count == n) return;
  if (2 * count > n) {
    invert_mask(mask, n);
    count = n - count;
  }
  const int bits = delta_low_bits(n - count, count), words = (n + 31) / 32, lane = lane_index();
  if (bits)
    for (int w = lane; w <= delta_most_unary(n, count, bits) / 32; w += kLanes) unary[w] = 0;
  meet();
  int last = -1, rank = 0,
      zeros = 0;  // the place of the last one so far, how many there were, and zeros in unary numbers
  for (int first = 0; first < words; first += kLanes) {
    const int w = first + lane;
    uint32_t word = w < words ? mask[w] : 0, all;
    const uint32_t lanes = ballot(word != 0), lower = below(lanes, lane);
    if (!lanes) continue;
    const int own = 32 * w + highest_one(word);
    const int before = int(shuffle(uint32_t(own), lower ? highest_one(lower) : 0));
    int previous = lower ? before : last, number = rank + int(count_before(__popc(word), lane, all));
    rank += int(all);
    last = int(shuffle(uint32_t(own), highest_one(lanes)));
    if (bits == 0) continue;
    uint32_t sum = 0;
    for (uint32_t left = word, i = 0; left; left &= left - 1, ++i) {
      const int place = 32 * w + __ffs(left) - 1, gap = place - previous - 1;
      gaps[number + i] = uint16_t(gap);
      sum += gap >> bits;
      previous = place;
    }
    int at = zeros + int(count_before(sum, lane, all));
    zeros += int(all);
    for (; word; word &= word - 1, ++number) {
      at += gaps[number] >> bits;
      atomicOr(&unary[(number + at) / 32], 1u << (number + at) % 32);
    }
  }
  meet();
  if (bits == 0) return out.put_mask(mask, last + 1);
  out.put_fields(gaps, count, bits);
  out.put_mask(unary, count + zeros);
}

// Fields of `width` bits, as put_fields writes them.
struct DeltaFields {
  int begin, count, width;
};

// Reads a block of a message; nothing outside the message is touched. What it says is trusted nowhere.
class DeltaSource {
 public:
  // Of `bytes` bytes, which begin at a byte of data that has data_bytes of them.
  FL_DEVICE DeltaSource(const uint8_t *data, int64_t data_bytes, int64_t begin, int bytes)
      : words_(reinterpret_cast<const uint32_t *>(data) + begin / 4),
        shift_(int(begin % 4) * 8),
        end_(8 * bytes),
        rest_(data_bytes - begin / 4 * 4) {}

  FL_DEVICE int at() const { return at_; }
  FL_DEVICE int left() const { return end_ - at_; }
  FL_DEVICE bool done() const { return left() >= 0 && left() < 8; }

  // 32 bits from a bit on; those behind the end mean nothing.
  FL_DEVICE uint32_t word(int bit) const {
    const int from = shift_ + bit;
    const uint32_t low = load(from / 32);
    return from % 32 ? low >> from % 32 | load(from / 32 + 1) << (32 - from % 32) : low;
  }

  // False, here and below, where the block has fewer.
  FL_DEVICE bool skip(int bits) {
    at_ += bits;
    return at_ <= end_;
  }

  FL_DEVICE bool take(int width, int &number) {
    number = int(word(at_) & low_ones(width));
    return skip(width);
  }

  FL_DEVICE bool take_fields(int count, int width, DeltaFields &fields) {
    at_ = (at_ + 7) / 8 * 8;
    fields = {at_, count, width};
    return skip(count * width);
  }

  FL_DEVICE uint32_t field(const DeltaFields &fields, int i) const {
    uint32_t value = 0;
#pragma unroll 1
    for (int shift = 0; shift < fields.width; shift += 8) {
      const int bits = fields.width - shift < 8 ? fields.width - shift : 8;
      value |= (word(fields.begin + shift * fields.count + i * bits) & low_ones(bits)) << shift;
    }
    return value;
  }

 private:
  FL_DEVICE uint32_t load(int w) const {
    if (4 * int64_t(w) + 4 <= rest_) return words_[w];
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(words_ + w);
    uint32_t word = 0;
#pragma unroll 1
    for (int i = 0; 4 * int64_t(w) + i < rest_ && i < 4; ++i) word |= uint32_t(bytes[i]) << 8 * i;
    return word;
  }

  const uint32_t *words_;
  int shift_, end_, at_ = 0;
  int64_t rest_;  // bytes of data from words_ on
};

// Makes the mask of a list; false where it is not coherent.
FL_DEVICE bool read_list(DeltaSource &in, int n, int count, uint32_t *mask) {
  const int words = (n + 31) / 32, lane = lane_index();
  for (int w = lane; w < words; w += kLanes) mask[w] = count == n ? low_ones(n - 32 * w) : 0;
  meet();
  if (count == 0 || count == n) return true;
  const bool turned = 2 * count > n;
  if (turned) count = n - count;
  const int bits = delta_low_bits(n - count, count), most = bits ? delta_most_unary(n, count, bits) : n;
  DeltaFields lows = {};
  if (bits && !in.take_fields(count, bits, lows)) return false;
  const int begin = in.at(), limit = in.left() < most ? in.left() : most;
  int rank = 0, sum = 0;
  for (int first = 0; rank < count; first += kLanes) {
    if (32 * first >= limit) return false;
    const int from = 32 * (first + lane);
    uint32_t word = from < limit ? in.word(begin + from) & low_ones(limit - from) : 0, all;
    int number = rank + int(count_before(__popc(word), lane, all));
    rank += int(all);
    for (int kept = count - number > 0 ? count - number : 0; __popc(word) > kept;) word ^= 1u << highest_one(word);
    if (rank >= count) in.skip(largest_over_lanes(word ? from + highest_one(word) + 1 : 0));
    bool inside = true;
    if (bits == 0) {
      if (word) mask[first + lane] = word;
    } else {
      uint32_t own = 0;
#pragma unroll 1
      for (int i = 0; i < __popc(word); ++i) own += in.field(lows, number + i);
      int before = sum + int(count_before(own, lane, all));
      sum += int(all);
      for (; word; word &= word - 1, ++number) {
        before += int(in.field(lows, number));
        const int place = ((from + __ffs(word) - 1 - number) << bits) + before + number;
        inside = inside && place < n;
        if (place < n) atomicOr(&mask[place / 32], 1u << place % 32);
      }
    }
    if (ballot(!inside)) return false;
  }
  meet();
  if (turned) invert_mask(mask, n);
  return true;
}

}  // namespace fl
