// The four verbs of the C ABI for any codec, tile by tile: partial sums stay in L1.
//
// A codec says how many elements no tile may part (unit), how many units make a tile, and offers
//   at(messages, message, unit)    where a unit of a message lies
//   encode(x, n, at, unit)         makes a message of n elements; `unit` counts over all messages
//   decode(at, n, sink)            calls sink(i, block) for at least every block with elements before n; i is its first
#pragma once

#include "kernels.h"
#include "simd.h"

namespace fl::FL_ISA {

// A part of one message: `size` elements from number `element` of the message on, which begin its unit `unit`.
struct Tile {
  int64_t message, unit, element;
  int size;
};

// Calls body(tile) for the units begin..end - 1 of all messages.
template <class Codec, class Body>
FL_INLINE void for_each_tile(const Codec &codec, int64_t numel, int64_t begin, int64_t end, const Body &body) {
  const int64_t units = (numel + codec.unit() - 1) / codec.unit();
  while (begin < end) {
    const int64_t message = begin / units, first = message * units;
    const int64_t stop = end < first + units ? end : first + units;
    for (; begin < stop; begin += codec.tile_units()) {
      const int64_t element = (begin - first) * codec.unit();
      const int64_t full = (stop - begin < codec.tile_units() ? stop - begin : codec.tile_units()) * codec.unit();
      body(Tile{message, begin - first, element, int(full < numel - element ? full : numel - element)});
    }
    begin = stop;
  }
}

// A tile of n f32 values in L1.
template <class Codec>
class Values {
 public:
  explicit Values(int n) : n_(n) {}

  const float *data() const { return v_; }

  void clear() { __builtin_memset(v_, 0, size_t(n_) * sizeof(float)); }

  template <class T>
  void set(const T *x) {
    for (int i = 0; i < n_; i += kBlock) put(i, load_block(x, i, n_));
  }

  template <class T>
  void add(const T *x) {
    for (int i = 0; i < n_; i += kBlock) add(i, load_block(x, i, n_));
  }

  void add(const Codec &codec, typename Codec::Message message) {
    codec.decode(message, n_, [this](int i, const Block &b) FL_LAMBDA { add(i, b); });
  }

  template <class T>
  void copy_to(T *out) const {
    for (int i = 0; i < n_; i += kBlock) store_block(out, get(i), i, n_);
  }

  // Puts into residual what was lost if `message` is what the values became.
  void lose(const Codec &codec, typename Codec::Message message, float *residual) const {
    codec.decode(message, n_, [&](int i, const Block &decoded) FL_LAMBDA {
      if (i >= n_) return;
      const Block value = get(i), old = load_block(residual, i, n_);
      Block fresh;
      for (int j = 0; j < kVectors; ++j) fresh.v[j] = residual_after(value.v[j], decoded.v[j], old.v[j]);
      store_block(residual, fresh, i, n_);
    });
  }

 private:
  FL_INLINE Block get(int i) const {
    Block b;
    for (int j = 0; j < kVectors; ++j) b.v[j] = load(v_ + i + j * kLanes);
    return b;
  }

  FL_INLINE void put(int i, const Block &b) {
    for (int j = 0; j < kVectors; ++j) store(v_ + i + j * kLanes, b.v[j]);
  }

  FL_INLINE void add(int i, const Block &b) {
    if (i >= n_) return;
    Block sum = get(i);
    for (int j = 0; j < kVectors; ++j) sum.v[j] += b.v[j];
    put(i, sum);
  }

  const int n_;
  alignas(64) float v_[Codec::kMaxTile];
};

template <class Codec>
FL_INLINE void encode_values(const Codec &codec, Values<Codec> &values, float *residual, int n,
                             typename Codec::Message out, int64_t unit) {
  if (residual) values.add(residual);
  codec.encode(values.data(), n, out, unit);
  if (residual) values.lose(codec, out, residual);
}

template <class T, class Codec>
void encode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel, units = (numel + codec.unit() - 1) / codec.unit();
  for_each_tile(codec, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    const int64_t offset = tile.message * numel + tile.element, unit = tile.message * units + tile.unit;
    const T *x = static_cast<const T *>(job.x) + offset;
    const auto out = codec.at(*job.out, tile.message, tile.unit);
    if (!job.residual) return codec.encode(x, tile.size, out, unit);
    Values<Codec> values(tile.size);
    values.set(x);
    encode_values(codec, values, job.residual + offset, tile.size, out, unit);
  });
}

template <class T, class Codec>
void decode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  const int64_t numel = job.spec->numel;
  for_each_tile(codec, numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    T *out = static_cast<T *>(job.y) + tile.message * numel + tile.element;
    codec.decode(codec.at(*job.in, tile.message, tile.unit), tile.size,
                 [&](int i, const Block &b) FL_LAMBDA { store_block(out, b, i, tile.size); });
  });
}

template <class Codec>
FL_INLINE void add_messages(const Codec &codec, Values<Codec> &values, const Job &job, int64_t unit) {
  for (int64_t m = 0; m < job.in->count; ++m) values.add(codec, codec.at(*job.in, m, unit));
}

template <class T, class Codec>
void decode_sum(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  for_each_tile(codec, job.spec->numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    T *out = static_cast<T *>(job.y) + tile.element;
    Values<Codec> values(tile.size);
    job.add ? values.set(out) : values.clear();
    add_messages(codec, values, job, tile.unit);
    values.copy_to(out);
  });
}

template <class T, class Codec>
void recode(const Codec &codec, const Job &job, int64_t begin, int64_t end) {
  for_each_tile(codec, job.spec->numel, begin, end, [&](const Tile &tile) FL_LAMBDA {
    Values<Codec> values(tile.size);
    job.x ? values.set(static_cast<const T *>(job.x) + tile.element) : values.clear();
    add_messages(codec, values, job, tile.unit);
    float *residual = job.residual ? job.residual + tile.element : nullptr;
    encode_values(codec, values, residual, tile.size, codec.at(*job.out, 0, tile.unit), tile.unit);
  });
}

}  // namespace fl::FL_ISA
