// The `tahquant` codec (codecs/tahquant/tahquant.h) on vectors. Facts of tiles are gathered side by side, then come their codes.
#pragma once

#include "cpu/code_runs.h"
#include "cpu/elements.h"
#include "cpu/kernels.h"
#include "cpu/rotation.h"
#include "tahquant.h"

namespace fl::FL_ISA {

class TahCodec {
 public:
  // A message, and the tile in it that work begins with.
  struct Message {
    const uint32_t *marks;
    uint8_t *pivots;
    uint16_t *offsets, *steps;
    uint8_t *codes;
    int64_t first;
  };

  static constexpr bool kCanonical = false;

  explicit TahCodec(const Job &job)
      : shape_(tah_shape(*job.spec)), runs_(shape_.tile / kBlock), root_(tah_root(shape_.tile)) {}

  int unit() const { return shape_.tile; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    const auto plane = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
    return {reinterpret_cast<const uint32_t *>(plane(0)), plane(1), reinterpret_cast<uint16_t *>(plane(2)),
            reinterpret_cast<uint16_t *>(plane(3)),       plane(4), unit};
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t, Ahead ahead) const {
    alignas(64) float values[kMaxTile];
    const int tiles = (n + shape_.tile - 1) / shape_.tile;
    if constexpr (std::is_same_v<T, float>) return quantize(x, values, tiles, out, ahead);
    for (int i = 0; i < tiles * shape_.tile; i += kBlock) store_block(values + i, load_block(x + i));
    quantize(values, values, tiles, out, ahead);
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    alignas(64) float values[kMaxTile];
    reconstruct(in, n, values);
    for (int i = 0; i < n; i += kBlock) sink(i, load_block(values + i));
  }

 private:
  static constexpr int kMaxTiles = kMaxTile / kBlock;

  // Goes from tile to tile of a message and knows where their codes lie.
  class Walk {
   public:
    Walk(const TahCodec &codec, const Message &message)
        : shape_(codec.shape_),
          message_(message),
          tile_(message.first),
          token_(tile_ / shape_.tiles_of_token()),
          left_((token_ + 1) * shape_.tiles_of_token() - tile_) {
      place();
      codes_ += (shape_.tiles_of_token() - left_) * bytes_of_tile();
    }

    int64_t tile() const { return tile_; }
    int bits() const { return bits_; }
    uint8_t *codes() const { return codes_; }

    void next() {
      ++tile_;
      codes_ += bytes_of_tile();
      if (--left_ || tile_ == shape_.tiles()) return;
      ++token_;
      left_ = shape_.tiles_of_token();
      place();
    }

   private:
    int bytes_of_tile() const { return shape_.tile / 8 * bits_; }

    void place() {
      const uint32_t marks = shape_.coarse ? message_.marks[token_ / kTahSection] : 0;
      const int before = __builtin_popcount(marks & tah_marks_before(int(token_ % kTahSection)));
      const TahPlace place = tah_place(shape_, token_, marks, before);
      bits_ = place.bits;
      codes_ = message_.codes + place.offset;
    }

    const TahShape &shape_;
    const Message &message_;
    int64_t tile_, token_, left_;  // tiles of the token that are left
    int bits_ = 0;
    uint8_t *codes_ = nullptr;
  };

  // What there is to know of tiles side by side, with room for whole vectors.
  struct Facts {
    static constexpr int kRoom = kMaxTiles + kLanes;
    alignas(64) int32_t high[kRoom], low[kRoom], amax[kRoom], most[kRoom], offset[kRoom], step[kRoom];
    alignas(64) float start[kRoom], inverse[kRoom];  // the offset, and tah_inverse of the step
  };

  static FL_INLINE vi at(const int32_t *p) { return (vi)load(reinterpret_cast<const float *>(p)); }

  // tah_scale of kLanes tiles from tile g on.
  static FL_INLINE void scale_tiles(Facts &facts, int g) {
    const vf top = (vf)at(facts.high + g), bottom = (vf)at(facts.low + g), least = broadcast(0x1p-100f);
    const vi finite = max(magnitude_bits(top), magnitude_bits(bottom)) < int32_t(kF32Inf);
    const vi usual = (vi)(top >= least) | (vi)(-bottom >= least);
    const vi bits = (vi)(bottom + 0.0f) & usual;
    const vi offset = (vi)((vu)(bits - (bits >> 31 & -0xffff)) >> 16);
    const vf range = (vf)((vi)top & usual) - (vf)(offset << 16);
    const vi step = (vi)((vu)((vi)(range / __builtin_convertvector(at(facts.most + g), vf)) + 0xffff) >> 16);
    const vi fits = finite & ((offset & 0x7fff) < int32_t(kF32Inf >> 16)) & (step < int32_t(kF32Inf >> 16));
    store(facts.offset + g, fits ? offset : broadcast(int32_t(kBf16Nan)));
    store(facts.step + g, fits ? step : broadcast(int32_t(kBf16Nan)));
    store(facts.start + g, (vf)(offset << 16));
    store(facts.inverse + g, 1.0f / max((vf)(step << 16), broadcast(0x1p-126f)));
  }

  // The tiles of x; `values` has room for those that are rotated, and may be x.
  FL_NOINLINE void quantize(const float *x, float *values, int tiles, Message out, Ahead ahead) const {
    const int lines = (ahead.lines() / 2 + tiles - 1) / tiles;  // half of them meanwhile, half while codes are made
    Facts facts;
    const float *tile[kMaxTiles];
    for (int g = 0; g < tiles; ++g) tile[g] = x + g * shape_.tile;
    vi largest[kMaxTiles];
    extremes(tile, tiles, facts, largest, ahead, lines);
    for (int g = 0; g < tiles; g += kLanes)
      store(facts.amax + g, max(at(facts.high + g) & INT32_MAX, at(facts.low + g) & INT32_MAX));
    bool rotated = false;
    for (int g = 0; g < tiles; ++g) {
      const int pivot = find_pivot(tile[g], largest[g], facts.amax[g]);
      out.pivots[out.first + g] = uint8_t(pivot);
      if (pivot != kNoPivot) {
        float *v = values + g * shape_.tile;
        if (v != tile[g]) __builtin_memcpy(v, tile[g], size_t(shape_.tile) * sizeof(float));
        tile[g] = v;
        swap(v, pivot);
        rotate_in_place(v, runs_, root_);
        rotated = true;
      }
    }
    if (rotated) extremes(tile, tiles, facts, largest, ahead, 0);
    Walk walk(*this, out);
    uint8_t *codes[kMaxTiles];
    for (int g = 0; g < tiles; ++g, walk.next()) {
      facts.most[g] = (1 << walk.bits()) - 1;
      codes[g] = walk.codes();
    }
    for (int g = tiles; g % kLanes; ++g) facts.most[g] = 1;
    for (int g = 0; g < tiles; g += kLanes) scale_tiles(facts, g);
    for (int g = 0; g < tiles; ++g) {
      ahead.fetch(lines);
      const TahScale scale = {uint16_t(facts.offset[g]), uint16_t(facts.step[g])};
      out.offsets[out.first + g] = scale.offset;
      out.steps[out.first + g] = scale.step;
      if (scale.step >= kF32Inf >> 16) out.pivots[out.first + g] = kNoPivot;
      if (__builtin_expect(tah_codes_are_zero(scale), 0))
        __builtin_memset(codes[g], 0, size_t(runs_ * run_bytes(facts.most[g])));
      else
        store_codes(tile[g], facts.start[g], facts.inverse[g], facts.most[g], codes[g]);
    }
    const int64_t existing = (shape_.numel + shape_.tile - 1) / shape_.tile;
    if (walk.tile() == existing) fill_token(out, walk, shape_.tiles());
  }

  // Tiles of the last token that no element reaches.
  void fill_token(Message out, Walk &walk, int64_t end) const {
    for (; walk.tile() < end; walk.next()) {
      out.pivots[walk.tile()] = kNoPivot;
      out.offsets[walk.tile()] = out.steps[walk.tile()] = 0;
      __builtin_memset(walk.codes(), 0, size_t(shape_.tile / 8 * walk.bits()));
    }
  }

  // The bits of each tile's highest value and of its lowest one, and its largest magnitudes in each lane. As integers, the
  // largest bits are those of the highest value if one has no sign; without their sign, those of the lowest one if one has.
  FL_INLINE void extremes(const float *const *tile, int tiles, Facts &facts, vi *magnitudes, Ahead &ahead,
                          int lines) const {
    vi top[Facts::kRoom], bottom[Facts::kRoom];
    for (int g = 0; g < tiles; ++g) {
      ahead.fetch(lines);
      vi most = (vi)load(tile[g]);
      vu least = (vu)most;
      for (int i = kLanes; i < shape_.tile; i += kLanes) {
        const vi v = (vi)load(tile[g] + i);
        most = max(most, v);
        least = max(least, (vu)v);
      }
      magnitudes[g] = max(most & INT32_MAX, (vi)least & INT32_MAX);
      top[g] = most, bottom[g] = (vi)least ^ INT32_MIN;
    }
    reduce(top, tiles, facts.high);
    reduce(bottom, tiles, facts.low);
    for (int g = 0; g < tiles; ++g) {
      int32_t &high = facts.high[g], &low = facts.low[g];
      low ^= INT32_MIN;
      if (__builtin_expect(high < 0, 0)) high = INT32_MIN | least_magnitude(tile[g]);
      if (__builtin_expect(low >= 0, 0)) low = least_magnitude(tile[g]);
    }
  }

  FL_INLINE int32_t least_magnitude(const float *v) const {
    vi least = magnitude_bits(load(v));
    for (int i = kLanes; i < shape_.tile; i += kLanes) least = min(least, magnitude_bits(load(v + i)));
    int32_t found = least[0];
    for (int i = 1; i < kLanes; ++i) found = least[i] < found ? least[i] : found;
    return found;
  }

  static FL_INLINE void reduce(vi *top, int tiles, int32_t *found) {
    for (int g = tiles; g % kLanes; ++g) top[g] = vi{};
    for (int g = 0; g < tiles; g += kLanes) store(found + g, max_of_each(top + g));
  }

  // The element that is at least twice as large as all others; kNoPivot if there is none. Two lanes tell most often that there
  // is none.
  FL_INLINE int find_pivot(const float *v, vi magnitudes, int32_t amax) const {
    const vf largest = (vf)magnitudes;
    if (__builtin_popcount(greater_mask((vi)(largest + largest), broadcast(amax))) > 1) return kNoPivot;
    int count = 0, found = 0;
    for (int i = 0; i < shape_.tile; i += kBlock) {
      uint32_t mask = 0;
      for (int j = 0; j < kVectors; ++j) {
        const vf magnitude = (vf)magnitude_bits(load(v + i + j * kLanes));
        mask |= greater_mask((vi)(magnitude + magnitude), broadcast(amax)) << j * kLanes;
      }
      count += __builtin_popcount(mask);
      found = mask ? i + __builtin_ctz(mask) : found;
    }
    return count == 1 && amax < int32_t(kF32Inf) ? found : kNoPivot;
  }

  static FL_INLINE void swap(float *v, int place) {
    const float first = v[0];
    v[0] = v[place];
    v[place] = first;
  }

  static int run_bytes(int32_t most) { return most == 7 ? 12 : most == 15 ? 16 : 24; }

  // tah_code of the values of a tile, in runs of 32; `most` says how many bits they have.
  FL_INLINE void store_codes(const float *values, float offset, float inverse, int32_t most, uint8_t *codes) const {
    for (int i = 0; i < shape_.tile; i += kBlock, codes += run_bytes(most)) {
      vi run[kVectors];
      for (int j = 0; j < kVectors; ++j)
        run[j] = (vi)((load(values + i + j * kLanes) - offset) * inverse + 12582912.0f);
      if (most == 7)
        store_run<3>(codes, run);
      else
        store_parts(most, run, codes);
    }
  }

  // 4 bits of each code, and two more of 6.
  static FL_INLINE void store_parts(int32_t most, const vi (&run)[kVectors], uint8_t *codes) {
    vi joined[kQuad];
    for (int j = 0; j < kQuad; ++j) joined[j] = join_nibbles(run[j], run[j + kQuad]);
    store_low_bytes(codes, joined);
    if (most == 15) return;
    vi upper[kVectors];
    for (int j = 0; j < kVectors; ++j) upper[j] = run[j] >> 4;
    store_run<2>(codes + 16, upper);
  }

  typedef uint64_t Words __attribute__((vector_size(16)));
  static constexpr uint64_t kOnes = 0x0101010101010101u;

  // The codes of a run.
  static FL_INLINE void unpack_run(int bits, const uint8_t *codes, Bytes16 &first, Bytes16 &second) {
    if (bits == 3) {
      uint64_t low;
      uint32_t top;
      __builtin_memcpy(&low, codes, 8);
      __builtin_memcpy(&top, codes + 8, 4);
      const uint64_t high = top | uint64_t(top >> 1) << 32;
      const Bytes16 both = (Bytes16)Words{low, low >> 2};
      first = (both & 3) | (Bytes16)(Words{high & kOnes, high >> 2 & kOnes} << 2);
      second = (both >> 4 & 3) | (Bytes16)(Words{high >> 4 & kOnes, high >> 6 & kOnes} << 2);
      return;
    }
    const Bytes16 both = load_bytes16(codes);
    first = both & 15;
    second = both >> 4;
    if (bits == 4) return;
    uint64_t high;
    __builtin_memcpy(&high, codes + 16, 8);
    const Bytes16 upper = (Bytes16)Words{high, high >> 2};
    first |= (upper & 3) << 4;
    second |= upper & 0x30;
  }

  FL_NOINLINE void reconstruct(Message in, int n, float *values) const {
    Walk walk(*this, in);
    for (int begin = 0; begin < n; begin += shape_.tile, walk.next()) load_tile(in, walk, values + begin);
  }

  FL_INLINE void load_tile(const Message &in, const Walk &walk, float *tile) const {
    const float offset = tah_value(in.offsets[walk.tile()]), step = tah_value(in.steps[walk.tile()]);
    const uint8_t *codes = walk.codes();
    for (int i = 0; i < shape_.tile; i += kBlock, codes += 4 * walk.bits()) {
      Bytes16 halves[2];
      unpack_run(walk.bits(), codes, halves[0], halves[1]);
      for (int h = 0; h < 2; ++h) {
        alignas(16) uint8_t bytes[16];
        store(bytes, halves[h]);
        vi wide[kQuad];
        load_bytes(bytes, wide);  // codes are below 128
        for (int j = 0; j < kQuad; ++j)
          store(tile + i + 16 * h + j * kLanes, __builtin_convertvector(wide[j], vf) * step + offset);
      }
    }
    const int pivot = in.pivots[walk.tile()];
    if (pivot >= shape_.tile) return;
    rotate_in_place(tile, runs_, root_);
    swap(tile, pivot);
  }

  TahShape shape_;
  int runs_;
  float root_;
};

}  // namespace fl::FL_ISA
