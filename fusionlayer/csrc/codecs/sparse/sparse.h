// Scalar specification of sparse messages and of the verbs that choose what goes into them (SAFusion: sparsification ahead
// of fusion). A message holds pairs (position, value) in the order of the elements; docs/wire_format.md has its planes.
//
// Sums of magnitudes, bit-equal wherever they are computed:
//   1. f64. A magnitude and its square are exact, so only additions round. What is not finite counts as 0.
//   2. A run is 4096 elements. Element i of a run belongs to partial sum i mod 16; each adds up in order, from 0.
//   3. The 16 partial sums of a run are folded: p[i] + p[i + 1] for even i, then those 2, 4 and 8 apart.
//   4. Run r belongs to partial sum r mod 32; each adds up in order, from 0; the 32 are folded likewise, up to 16 apart.
#pragma once

#include "floats.h"
#include "fusionlayer_codec.h"
#include "rng.h"

namespace fl {

constexpr int kSparsePlanes = 4;
constexpr int kSuperblock = 65536;  // elements that one of `ends` closes
constexpr int kCounted = 256;       // elements that one of `counts` counts
constexpr int kMostCounted = 255;   // pairs that it can count
constexpr uint32_t kMagnitudeBits = 0x7fffffffu;

constexpr int kRun = 4096;
constexpr int kRunSums = 16;
constexpr int kTotalSums = 32;

// What fl_magnitude_stats knows of a run. The largest counts if `count` is not 0.
struct Magnitudes {
  double total, squares;
  int64_t count;
  uint32_t largest;
};

FL_HD uint32_t magnitude(float f) { return float_bits(f) & kMagnitudeBits; }

FL_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct SparseShape {
  int64_t numel, capacity;
  uint32_t form, values;  // enum fl_sparse_form, enum fl_dtype

  FL_HD int64_t superblocks() const { return ceil_div(numel, kSuperblock); }
  FL_HD int64_t blocks() const { return ceil_div(numel, kCounted); }
  FL_HD int64_t value_bytes() const { return values == FL_F32 ? 4 : 2; }

  FL_HD int64_t plane_bytes(int p) const {
    if (p == 0) return superblocks() * 4;
    if (p == 1) return form == FL_SPARSE_BYTE ? blocks() : 0;
    if (p == 3) return capacity * value_bytes();
    return form == FL_SPARSE_BITMAP ? ceil_div(numel, 8) : form == FL_SPARSE_BYTE ? capacity : 2 * capacity;
  }

  // Elements of a superblock.
  FL_HD int in_superblock(int64_t s) const {
    const int64_t left = numel - s * kSuperblock;
    return left < kSuperblock ? int(left) : kSuperblock;
  }
};

inline SparseShape sparse_shape(const fl_spec &spec) {
  return {spec.numel, int64_t(spec.param[2]), spec.param[0], spec.param[1]};
}

// The planes of one message.
struct SparsePlanes {
  uint32_t *ends;
  uint8_t *counts;
  void *positions;
  void *values;
};

FL_HD SparsePlanes sparse_planes(const fl_messages &messages, int64_t message) {
  const int64_t offset = message * messages.stride;
  const auto at = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + offset; };
  return {reinterpret_cast<uint32_t *>(at(0)), at(1), at(2), at(3)};
}

FL_HD float accumulated(float acc, float x, float scale) { return canonical(acc + scale * x); }

// One element of fl_accumulate_momentum; `scaled` is scale * x.
FL_HD void add_momentum(float scaled, float momentum, bool nesterov, float &velocity, float &acc) {
  velocity = canonical(nesterov ? (velocity + scaled) * momentum : momentum * velocity + scaled);
  acc = canonical(acc + (nesterov ? velocity + scaled : velocity));
}

// What fl_choose_largest chooses: `kth` is of k, `broken` says whether an element is not finite. A value that is not finite
// makes an optimizer skip the step: only such values go, so that the residual keeps all others. Zeros need not travel, but
// a message has a pair.
FL_HD fl_choice largest_of(const fl_kth &kth, int64_t k, bool broken) {
  if (broken) return {int64_t(kF32Inf), -1};
  return {kth.magnitude, kth.magnitude ? k - kth.above : kth.above ? 0 : 1};
}

constexpr int64_t kNumbers = int64_t(1) << 32;  // an element draws a number below it

// What fl_choose_drawn compares of a number that an element draws: 31 bits, like those of a magnitude.
FL_HD uint32_t half_drawn(RngKey key, uint64_t number) {
  return random_bits(near_key(key, number), uint32_t(number)) >> 1;
}

// What fl_choose_drawn chooses, if `kth` is the k-th least half.
FL_HD fl_choice drawn_of(uint32_t kth, bool broken) { return {broken ? 0 : 2 * (int64_t(kth) + 1), -1}; }

// A choice as encoders take it.
struct Bound {
  uint64_t limit;  // random: numbers below it are selected
  int threshold;   // else: magnitudes above it
  int64_t ties;    // and as many that equal it
};

FL_HD Bound bound_of(const fl_choice &choice, bool random) {
  if (random) return {uint64_t(choice.threshold), 0, 0};
  const bool all = choice.ties < 0;  // that equal t: all above t - 1
  return {0, int(choice.threshold) - int(all), all ? 0 : choice.ties};
}

// What stays of `value` after it was sent as `sent`.
FL_HD float kept(float value, float sent) {
  const float lost = value - sent;
  return is_finite(lost) ? lost : 0.0f;
}

}  // namespace fl
