// Scalar specification of the `dynamiq` codec (DynamiQ, sections 3.2 and 3.3): super-groups of 256 with 2, 4 or 8 bits for
// each value, levels that lie closer together near zero, scales of groups of 16 relative to that of their super-group, and
// rounding that is anticorrelated over ranks. The drivers in cpu/ and cuda/ compute the same numbers with vectors and
// shuffles; what they may not change is written here.
//
//   1. v = x, zero-padded to whole super-groups; amax of a group and of a super-group are taken on the bits.
//   2. The super-group's scale is its amax as bf16, rounded up. Not finite: the scale is NaN, group scales and codes are 0.
//      amax < 2^-100: the scale is 0, likewise.
//   3. A group's scale is r = floor(amax of the group * (255 / scale) + v), at most 255; v in [0, 1) is random.
//   4. y = |x| * (span / amax of the group) lies between two levels y_r and y_{r + 1} = y_r + step. The code is r + 1 if
//      y > y_r + u * step, else r; u in (0, 1) is random (rounding_number). The sign is the code's highest bit.
//   5. decode: value of the level * (r * (scale / 255)).
// FL_DYNAMIQ_FLAT: no scale for the super-group; two groups together have a scale, which takes as many bits: their amax as
// bf16, rounded up. It takes the place of amax in 4.
//
// Levels are y = ratio^r - 1, ratio = 1 + 2 epsilon^2, r = 0 .. 2^(bits - 1) - 1, or without epsilon evenly spaced from 0 to
// 1. All that depends on epsilon is made once per call, in f64, without functions of the C library.
#pragma once

#include "floats.h"
#include "fusionlayer_codec.h"
#include "int_group.h"
#include "rng.h"

namespace fl {

constexpr int kDynamiqPlanes = 4;
constexpr int kSuperGroup = 256;
constexpr int kScaleGroup = 16;  // elements that share a scale
constexpr int kScaleGroups = kSuperGroup / kScaleGroup;
constexpr int kFlatScales = kScaleGroups / 2;
constexpr int kPairs = kSuperGroup / 2;           // elements i and i + 128 share a random number
constexpr int kLeastCodes = kSuperGroup * 2 / 8;  // bytes of a super-group of 2 bits
constexpr uint32_t kMostRanks = 1 << 14;
constexpr double kEpsilonUnit = 1e-4;

// Plane 0: which super-groups of 64 have 8 bits, which 4. The counts include all super-groups before them.
constexpr int kWidthRun = 64;
struct WidthRun {
  uint32_t ends8, ends4;
  uint64_t mask8, mask4;
};
static_assert(sizeof(WidthRun) == 24, "it is the wire format");

FL_HD int count_bits(uint64_t v) {
#if defined(__CUDA_ARCH__)
  return __popcll(v);
#else
  return __builtin_popcountll(v);
#endif
}

FL_HD int64_t super_groups(int64_t numel) { return (numel + kSuperGroup - 1) / kSuperGroup; }
FL_HD int64_t width_runs(int64_t groups) { return (groups + kWidthRun - 1) / kWidthRun; }

// Where a super-group's codes lie in plane 3: those of 8 bits come first, then those of 4, then those of 2.
struct CodePlace {
  int bits;
  int64_t offset;
};

FL_HD CodePlace code_place(const WidthRun *runs, int64_t groups, int64_t group) {
  const WidthRun &run = runs[group / kWidthRun], &last = runs[width_runs(groups) - 1];
  const uint64_t bit = uint64_t(1) << group % kWidthRun, below = bit - 1;
  const int64_t eights = int64_t(run.ends8) - count_bits(run.mask8 & ~below);
  const int64_t fours = int64_t(run.ends4) - count_bits(run.mask4 & ~below);
  if (run.mask8 & bit) return {8, eights * 4 * kLeastCodes};
  const int64_t end8 = int64_t(last.ends8) * 4 * kLeastCodes;
  if (run.mask4 & bit) return {4, end8 + fours * 2 * kLeastCodes};
  return {2, end8 + int64_t(last.ends4) * 2 * kLeastCodes + (group - eights - fours) * kLeastCodes};
}

FL_HD int64_t code_bytes(int bits) { return bits * (kSuperGroup / 8); }

// Bytes that all codes of a message take; -1 if the runs contradict themselves.
inline int64_t codes_in_all(const WidthRun *runs, int64_t groups) {
  uint64_t eights = 0, fours = 0;
  for (int64_t i = 0; i < width_runs(groups); ++i) {
    const int64_t left = groups - i * kWidthRun;
    const uint64_t exist = left >= kWidthRun ? ~uint64_t(0) : (uint64_t(1) << left) - 1;
    if (runs[i].mask8 & runs[i].mask4 || (runs[i].mask8 | runs[i].mask4) & ~exist) return -1;
    eights += uint64_t(count_bits(runs[i].mask8));
    fours += uint64_t(count_bits(runs[i].mask4));
    if (runs[i].ends8 != eights || runs[i].ends4 != fours) return -1;
  }
  return (groups + int64_t(fours) + 3 * int64_t(eights)) * kLeastCodes;
}

// What a random number (rounding_number) is less its place. Exact in f32, as is their difference.
constexpr float kFirstPlace = 1.0f - 1.0f / 131072.0f;

// Levels ---------------------------------------------------------------------------------------------------------------

// The levels of one width. `curve` is a polynomial of y without constant term, of degree 4 for 4 bits and 6 for 8. It
// gives the number of a level, with a fraction between levels. For 8 bits it is right to a few thousandths of a step. For
// 4 bits it tells which level is the one below y; what to compare y with is looked up.
constexpr int kCurve4 = 4, kCurve8 = 6;
struct Levels {
  alignas(64) float value[128];
  alignas(64) float low[16], step[16];  // of 4 bits: y_r - step * kFirstPlace, and step; nothing is above the highest
  float curve[kCurve8];                 // of y, y^2, ..
  float span;                           // of all y
  int top;                              // number of the highest level
};

struct DynamiqLevels {
  Levels two, four, eight;
};

// Coefficients of the polynomial through (y[r], r) for degree + 1 of the levels, 0 and the highest among them.
inline void fit_curve(const double *y, int top, int degree, float *curve) {
  // Where Chebyshev's polynomials have their extremes.
  constexpr double kPlaces4[] = {0.0, 0.14644660940672624, 0.5, 0.8535533905932737, 1.0};
  constexpr double kPlaces8[] = {0.0, 0.0669872981077807, 0.25, 0.5, 0.75, 0.9330127018922193, 1.0};
  double at[kCurve8 + 1], difference[kCurve8 + 1], power[kCurve8 + 1] = {};
  for (int k = 0; k <= degree; ++k) {
    const double place = (degree == kCurve4 ? kPlaces4 : kPlaces8)[k] * y[top];
    int r = 0;
    while (r < top && y[r + 1] <= place) ++r;
    if (r < top && y[r + 1] - place < place - y[r]) ++r;
    at[k] = y[r];
    difference[k] = r;
  }
  for (int order = 1; order <= degree; ++order)
    for (int k = degree; k >= order; --k) difference[k] = (difference[k] - difference[k - 1]) / (at[k] - at[k - order]);
  for (int k = degree; k >= 0; --k) {  // power = power * (y - at[k]) + difference[k]
    for (int i = degree; i > 0; --i) power[i] = power[i - 1] - at[k] * power[i];
    power[0] = difference[k] - at[k] * power[0];
  }
  for (int i = 0; i < degree; ++i) curve[i] = float(power[i + 1]);
}

inline void make_levels(int bits, uint32_t epsilon_units, Levels &levels) {
  levels = Levels{};
  const int top = levels.top = (1 << (bits - 1)) - 1;
  const double epsilon = epsilon_units * kEpsilonUnit, ratio = 1.0 + 2.0 * epsilon * epsilon;
  double y[128], power = 1.0;
  for (int r = 0; r <= top; ++r, power *= ratio) y[r] = epsilon_units ? power - 1.0 : double(r) / double(top);
  levels.span = float(y[top]);
  for (int r = 0; r <= top; ++r) {
    levels.value[r] = float(y[r] / y[top]);
    if (bits != 4) continue;
    const double step = r < top ? y[r + 1] - y[r] : 0.0;
    levels.low[r] = r < top ? float(y[r] - step * double(kFirstPlace)) : bits_float(kF32Inf);
    levels.step[r] = float(step);
  }
  if (epsilon_units && bits > 2)
    fit_curve(y, top, bits == 4 ? kCurve4 : kCurve8, levels.curve);
  else
    levels.curve[0] = float(top);
}

inline DynamiqLevels dynamiq_levels(uint32_t epsilons) {
  DynamiqLevels all;
  make_levels(2, 0, all.two);
  make_levels(4, epsilons & 0xffff, all.four);
  make_levels(8, epsilons >> 16, all.eight);
  return all;
}

FL_HD const Levels &levels_of(const DynamiqLevels &all, int bits) {
  return bits == 8 ? all.eight : bits == 4 ? all.four : all.two;
}

// Epsilons for which the curves are close and levels far enough apart for f32; 0 is even spacing.
inline bool epsilons_fit(uint32_t epsilons) {
  const uint32_t four = epsilons & 0xffff, eight = epsilons >> 16;
  return (four == 0 || (four >= 500 && four <= 3300)) && (eight == 0 || (eight >= 200 && eight <= 700));
}

template <int kDegree>
FL_HD float curve_at(const float *curve, float y) {
  float sum = curve[kDegree - 1];
  for (int i = kDegree - 2; i >= 0; --i) sum = sum * y + curve[i];
  return sum * y;
}

// The level of 0 <= y <= span that is rounded at place u = w - kFirstPlace: of 2 bits, y > u; of 8, the curve plus 1 - u,
// rounded down, at most `top`; of 4, r + (y > low[r] + w * step[r]), r being the curve rounded down.

// Random numbers -------------------------------------------------------------------------------------------------------

// A super-group with number s has the random bits of numbers 128 s .. 128 s + 127, which are the same on all ranks: of element
// i < 128 the low half of number i, of element i + 128 the upper one. Group g of it is number 16 s + g of `scale`, which
// each rank has for itself.
//
// From the common bits each rank makes a place of its own (DynamiQ, section 3.3): of n ranks one in each n-th of (0, 1). The
// bits are moved on in a circle by what a rank has of it; where in a cell of at most an n-th they lie is then what a rank's
// own factor makes of them, so that ranks do not also have that in common.
struct DynamiqKeys {
  RngKey noise, scale;
  uint32_t factor;
  uint16_t moved, cell;  // in 65536 steps of 0 to 1; a power of two less 1
};

inline DynamiqKeys dynamiq_keys(uint64_t seed, uint32_t place) {
  const uint32_t rank = place & 0xffff, ranks = place >> 16;
  const uint64_t mine = seed + (uint64_t(rank) + 1) * 0x9e3779b97f4a7c15ull;
  uint32_t cell = 65536;
  while (cell * ranks > 65536) cell /= 2;
  const uint16_t moved = uint16_t(65536ull * rank / ranks);
  return {make_key(seed), make_key(~mine), make_key(mine).c, moved, uint16_t(cell - 1)};
}

// A number in both halves of a word.
FL_HD uint32_t both_halves(uint16_t half) { return half * 0x10001u; }

// Where this rank rounds two elements that share bits, one in each half of the result.
FL_HD uint32_t rounding_places(const DynamiqKeys &keys, uint32_t bits) {
  const uint32_t cell = both_halves(keys.cell);
  return ((bits + both_halves(keys.moved)) & ~cell) | (bits * keys.factor & cell);
}

// 1 + t / 65536, t being the place of the first or the second of two elements.
FL_HD float rounding_number(uint32_t places, bool second) {
#if defined(__CUDA_ARCH__)
  return bits_float(
      __funnelshift_r(second ? places & 0xffff0000u : places << 16, 0x7fu, 9));  // the same bits in two steps
#else
  return bits_float(0x3f800000u | (second ? places >> 16 : places & 0xffff) << 7);
#endif
}

// Scales ---------------------------------------------------------------------------------------------------------------

// bf16 at least as large as a magnitude, of which these are the bits; NaN if there is no finite one, 0 below 2^-100.
FL_HD uint16_t scale_above(uint32_t amax_bits) {
  const uint32_t up = (amax_bits + 0xffffu) >> 16;
  return amax_bits < kTinyBits ? uint16_t(0) : up < 0x7f80u ? uint16_t(up) : kBf16Nan;
}

// The scale as it is decoded: one NaN, and 0 or more.
FL_HD float scale_value(uint16_t wire) {
  const float scale = bf16_to_f32(wire & 0x7fff);
  return is_finite(scale) ? scale : bits_float(kF32Nan);
}

FL_HD uint32_t group_code(float amax, float inverse, uint32_t random) {
  const float code = amax * inverse + (bits_float((random >> 9) | 0x3f800000u) - 1.0f);
  return uint32_t(code < 255.0f ? code : 255.0f);
}

FL_HD float signed_value(float magnitude, uint32_t sign) {
  return bits_float(float_bits(magnitude) ^ (sign ? 0x80000000u : 0u));
}

// Statistics -----------------------------------------------------------------------------------------------------------

// A super-group is summed up in pairs: neighbours, then neighbouring sums, and so on.

struct DynamiqMessage {
  WidthRun *runs;
  uint16_t *scales;
  uint8_t *group_scales;  // FL_DYNAMIQ_FLAT: kFlatScales bf16 in as many bytes
  uint8_t *codes;
};

FL_HD DynamiqMessage dynamiq_message(const fl_messages &messages, int64_t message) {
  const auto at = [&](int p) { return static_cast<uint8_t *>(messages.plane[p]) + message * messages.stride; };
  return {reinterpret_cast<WidthRun *>(at(0)), reinterpret_cast<uint16_t *>(at(1)), at(2), at(3)};
}

}  // namespace fl
