// Driver of the `chunked_topk` codec (codecs/chunked/chunked.h). A chunk stays in the first-level cache from the sum of gradient and
// residual to the bytes and the new residual. Its largest are found in three steps: a bound that the largest of many groups
// reach often enough, the few elements that reach it, the exact magnitude among these.
#pragma once

#include "chunked.h"
#include "codecs/sparse/sparse_decode.h"
#include "cpu/magnitudes.h"
#include "residual.h"

namespace fl::FL_ISA {

// How many of n magnitudes, whole blocks, are at least t, which is above 0.
inline int reaching(const float *magnitudes, int n, uint32_t t) {
  const vi below = broadcast(int32_t(t) - 1);
  vi count[kVectors] = {};
  for (int i = 0; i < n; i += kBlock)
    for (int j = 0; j < kVectors; ++j) count[j] = count_greater(count[j], (vi)load(magnitudes + i + j * kLanes), below);
  for (int j = 1; j < kVectors; ++j) count[0] += count[j];
  return int(sum_of_lanes(count[0]));
}

// The k-th largest of n magnitudes, whole blocks, or another bound that exactly k of them reach.
inline uint32_t bound_of(const float *magnitudes, int n, int k) {
  uint32_t t = 0;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
    const int count = reaching(magnitudes, n, t | bit);
    if (count >= k) t |= bit;
    if (count == k) break;
  }
  return t;
}

// Fields of a few bits each, written one behind the other.
class BitWriter {
 public:
  explicit BitWriter(uint8_t *out) : out_(out) {}

  FL_INLINE void put(uint32_t field, int width) {
    held_ |= uint64_t(field) << bits_;
    bits_ += width;
    if (bits_ < 32) return;
    const uint32_t whole = uint32_t(held_);
    __builtin_memcpy(out_, &whole, sizeof whole);
    out_ += sizeof whole;
    held_ >>= 32;
    bits_ -= 32;
  }

  void finish() {
    for (; bits_ > 0; bits_ -= 8, held_ >>= 8) *out_++ = uint8_t(held_);
  }

 private:
  uint8_t *out_;
  uint64_t held_ = 0;
  int bits_ = 0;
};

// The values of a chunk, and which of them go.
class ChunkValues {
 public:
  explicit ChunkValues(const ChunkForm &form) : form_(form) {
    // Of four times as many groups as elements that go, most have one of these.
    groups_ = kBlock;
    while (groups_ < 4 * form.kept) groups_ *= 2;
    const int whole = (form.size + kBlock - 1) / kBlock * kBlock;
    all_ = groups_ >= whole;
    if (all_) groups_ = whole;
  }

  // block(i, access) gives elements i .. i + 31, zeros behind the last one.
  template <class Values>
  FL_INLINE void set(const Values &block) {
    __builtin_memset(group_, 0, size_t(groups_) * sizeof(float));
    int g = 0;
    for_each_block(form_.size, [&](int i, auto access) FL_LAMBDA {
      const Block b = block(i, access);
      store_block(v_ + i, b);
      for (int j = 0; j < kVectors; ++j) {
        float *largest = group_ + g + j * kLanes;
        store(largest, max((vi)load(largest), magnitude_bits(b.v[j])));
      }
      g = g + kBlock < groups_ ? g + kBlock : 0;
    });
  }

  // Writes the chunk; leaves in `residual`, which may be null, what stays of it.
  void encode(const ChunkBytes &out, float *residual) {
    const uint32_t largest = largest_magnitude();
    if (largest >= kF32Inf || largest < kTinyBits) {
      write_levels(out, largest < kTinyBits ? kNoLevels : kBrokenLevels);
      __builtin_memset(out.high, 0, size_t(form_.position_bytes()));
      __builtin_memset(out.codes, 0, size_t(form_.code_bytes()));
      if (residual && largest < kTinyBits) __builtin_memcpy(residual, v_, size_t(form_.size) * sizeof(float));
      return;
    }
    choose();
    write_positions(out);
    if (form_.bits == 32)
      write_values(out);
    else
      write_codes(out, residual, largest);
    if (residual) __builtin_memcpy(residual, v_, size_t(form_.size) * sizeof(float));
  }

 private:
  uint32_t largest_magnitude() const {
    vi largest = {};
    for (int i = 0; i < groups_; i += kLanes) largest = max(largest, (vi)load(group_ + i));
    return largest_lane(largest);
  }

  void choose() {
    uint32_t bound = bound_of(group_, groups_, form_.kept);
    const int count = find(bound);
    float found[kMostChunk];
    for (int i = 0; i < count; ++i) found[i] = bits_float(magnitude(v_[place_[i]]));
    const int whole = (count + kBlock - 1) / kBlock * kBlock;
    __builtin_memset(found + count, 0, size_t(whole - count) * sizeof(float));
    if (!all_) bound = bound_of(found, whole, form_.kept);
    int ties = form_.kept - reaching(found, whole, bound + 1), kept = 0;
    for (int i = 0; i < count; ++i) {
      const uint32_t bits = float_bits(found[i]);
      const bool tie = bits == bound && ties > 0;
      ties -= tie;
      place_[kept] = place_[i];
      kept += bits > bound || tie;
    }
  }

  // Lists the elements that reach the bound, in their order; returns how many.
  int find(uint32_t bound) {
    const vi below = broadcast(int32_t(bound) - 1);
    int count = 0;
    for_each_block(form_.size, [&](int i, auto access) FL_LAMBDA {
      for (int j = 0; j < kVectors; ++j) {
        const int first = i + j * kLanes;
        uint32_t mask = greater_mask(magnitude_bits(load(v_ + first)), below);
        mask &= access.mask() >> (j * kLanes);
        if (kLanes < 16 && mask == 0) continue;  // where lanes are stored one by one
        count += store_lanes(place_ + count, (vi)(iota() + uint32_t(first)), mask);
      }
    });
    return count;
  }

  static void write_levels(const ChunkBytes &out, ChunkLevels levels) {
    const uint32_t word = level_word(levels);
    __builtin_memcpy(out.levels, &word, sizeof word);
  }

  void write_positions(const ChunkBytes &out) const {
    __builtin_memset(out.high, 0, size_t(form_.high_bytes()));
    BitWriter low(out.low);
    const uint32_t mask = (1u << form_.low) - 1;
    for (int i = 0; i < form_.kept; ++i) {
      const int place = high_place(int(place_[i]), i, form_.low);
      out.high[place >> 3] |= uint8_t(1 << (place & 7));
      low.put(place_[i] & mask, form_.low);
    }
    low.finish();
  }

  void write_values(const ChunkBytes &out) {
    write_levels(out, kExactLevels);
    for (int i = 0; i < form_.kept; ++i) {
      __builtin_memcpy(out.codes + 4 * i, v_ + place_[i], sizeof(float));
      v_[place_[i]] = 0.0f;
    }
  }

  void write_codes(const ChunkBytes &out, const float *residual, uint32_t largest) {
    const ChunkLevels levels = form_.bits == 2 ? mean_levels(largest) : even_levels(largest);
    const LevelCoder coder(form_, levels);
    write_levels(out, levels);
    BitWriter codes(out.codes);
    for (int i = 0; i < form_.kept; ++i) {
      const uint32_t place = place_[i], code = coder.code(v_[place]);
      codes.put(code, form_.bits);
      if (residual) v_[place] = fl::residual_after(v_[place], coder.value(code), residual[place]);
    }
    codes.finish();
  }

  ChunkLevels mean_levels(uint32_t largest) const {
    const float per = units_per(largest);
    int64_t total = 0, high = 0;
    int count = 0;
    for (int i = 0; i < form_.kept; ++i) total += units_of(magnitude(v_[place_[i]]), per);
    for (int i = 0; i < form_.kept; ++i) {
      const int64_t units = units_of(magnitude(v_[place_[i]]), per);
      const bool above = above_mean(units, form_.kept, total);
      high += above ? units : 0;
      count += above;
    }
    return two_levels(form_.kept, total, count, high, largest);
  }

  ChunkLevels even_levels(uint32_t largest) const {
    uint32_t least = largest;
    for (int i = 0; i < form_.kept; ++i) {
      const uint32_t bits = magnitude(v_[place_[i]]);
      least = bits < least ? bits : least;
    }
    return levels_between(bits_float(least), bits_float(largest), form_.top());
  }

  const ChunkForm form_;
  int groups_;
  bool all_;                                             // every element is a group of its own
  alignas(64) float v_[kMostChunk], group_[kMostChunk];  // group_: the largest magnitude of each group
  uint32_t place_[kMostChunk + kLanes];
};

// Sums of the elements of a chunk over messages.
class ChunkSums {
 public:
  explicit ChunkSums(const ChunkForm &form) : form_(form) {}

  const float *data() const { return sums_; }

  // The elements of x from number `first` on, or zeros if x is null.
  void set(uint32_t dtype, const void *x, int64_t first) {
    if (!x) return void(__builtin_memset(sums_, 0, sizeof sums_));
    with_dtype(dtype, [&](auto type) FL_LAMBDA {
      const auto *from = type.at(x, first);
      for_each_block(form_.size, [&](int i, auto access) FL_LAMBDA { store_block(sums_ + i, access.load(from + i)); });
    });
  }

  void add(const ChunkBytes &in) {
    uint32_t word;
    __builtin_memcpy(&word, in.levels, sizeof word);
    const ChunkLevels levels = word_levels(word);
    if (are_broken(levels)) {
      for (int i = 0; i < form_.size; ++i) sums_[i] = bits_float(kF32Nan);
    } else if (form_.bits == 32) {
      add_all(in, [&](int i) FL_LAMBDA {
        float value;
        __builtin_memcpy(&value, in.codes + 4 * i, sizeof value);
        return value;
      });
    } else {
      const LevelCoder coder(form_, levels);
      add_all(in, [&](int i) FL_LAMBDA { return coder.value(bit_field(in.codes, i, form_.bits)); });
    }
  }

  void copy_to(uint32_t dtype, void *out, int64_t first, bool streamed) const {
    with_dtype(dtype, [&](auto type) FL_LAMBDA {
      auto *to = type.at(out, first);
      with_store(streamed, to, [&](auto way) FL_LAMBDA {
        constexpr Store kStore = decltype(way)::value;
        for_each_block(form_.size, [&](int i, auto access) FL_LAMBDA {
          access.template store<kStore>(to + i, canonical(load_block(sums_ + i)));
        });
      });
    });
  }

 private:
  template <class Value>
  FL_INLINE void add_all(const ChunkBytes &in, const Value &value) {
    const int bytes = form_.high_bytes();
    int i = 0;
    for (int w = 0; w < bytes && i < form_.kept; w += 8)
      for (uint64_t word = word_at(in.high + w, bytes - w); word && i < form_.kept; word &= word - 1, ++i) {
        const int position = position_of(form_, in.low, 8 * w + __builtin_ctzll(word), i);
        if (position < form_.size) sums_[position] += value(i);
      }
  }

  const ChunkForm form_;
  alignas(64) float sums_[kMostChunk];
};

class ChunkedCodec {
 public:
  explicit ChunkedCodec(const Job &job) : shape(chunked_shape(*job.spec)) {}

  const ChunkedShape shape;
};

inline void encode(const ChunkedCodec &codec, const Job &job, int64_t begin, int64_t end) {
  const ChunkedShape &shape = codec.shape;
  const float scale = chunked_scale(*job.spec);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t message = unit / shape.chunks, chunk = unit % shape.chunks;
    const int64_t offset = message * shape.numel + chunk * shape.full.size;
    float *residual = job.residual ? job.residual + offset : nullptr;
    ChunkValues values(shape.form(chunk));
    with_dtype(job.spec->dtype, [&](auto type) FL_LAMBDA {
      const auto *x = type.at(job.x, offset);
      values.set([&](int i, auto access) FL_LAMBDA {
        Block b = access.load(x + i);
        for (int j = 0; j < kVectors; ++j) b.v[j] *= scale;
        return residual ? b + access.load(residual + i) : b;
      });
    });
    values.encode(chunk_bytes(shape, *job.out, message, chunk), residual);
  }
}

inline void decode(const ChunkedCodec &codec, const Job &job, int64_t begin, int64_t end) {
  const ChunkedShape &shape = codec.shape;
  const uint32_t dtype = job.spec->dtype;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t message = unit / shape.chunks, chunk = unit % shape.chunks;
    ChunkSums sums(shape.form(chunk));
    sums.set(dtype, nullptr, 0);
    sums.add(chunk_bytes(shape, *job.in, message, chunk));
    sums.copy_to(dtype, job.y, message * shape.numel + chunk * shape.full.size, job.streamed);
  }
}

inline void decode_sum(const ChunkedCodec &codec, const Job &job, int64_t begin, int64_t end) {
  const ChunkedShape &shape = codec.shape;
  const uint32_t dtype = job.spec->dtype;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t offset = chunk * shape.full.size;
    ChunkSums sums(shape.form(chunk));
    sums.set(dtype, job.add ? job.y : nullptr, offset);
    for (int64_t m = 0; m < job.in->count; ++m) sums.add(chunk_bytes(shape, *job.in, m, chunk));
    sums.copy_to(dtype, job.y, offset, job.streamed);
  }
}

inline void recode(const ChunkedCodec &codec, const Job &job, int64_t begin, int64_t end) {
  const ChunkedShape &shape = codec.shape;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t offset = chunk * shape.full.size;
    float *residual = job.residual ? job.residual + offset : nullptr;
    ChunkSums sums(shape.form(chunk));
    sums.set(job.spec->dtype, job.x, offset);
    for (int64_t m = 0; m < job.in->count; ++m) sums.add(chunk_bytes(shape, *job.in, m, chunk));
    ChunkValues values(shape.form(chunk));
    values.set([&](int i, auto access) FL_LAMBDA {
      const Block b = access.load(sums.data() + i);
      return residual ? b + access.load(residual + i) : b;
    });
    values.encode(chunk_bytes(shape, *job.out, 0, chunk), residual);
  }
}

}  // namespace fl::FL_ISA
