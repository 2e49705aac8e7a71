// Scalar specification of fl_choose_threshold: how a threshold sparsifier finds what to send. It estimates thresholds from
// sums of magnitudes or from a sample, counts what they and a ladder around the last threshold would send, and takes the
// one that fits, else the k-th magnitude. docs/codecs.md says where each way was published.
#pragma once

#include "functions.h"
#include "sparse.h"

namespace fl {

constexpr double kLeastShare = 0.8;  // of k: a threshold that sends less is not used
constexpr int kRungs = FL_MAX_THRESHOLDS - 1;
constexpr int kWindow = 5;  // the number of stages adapts after so many estimates
constexpr double kFirstShare = 0.25;

// What the stages have found out. A stage is one fl_magnitude_stats.
struct Estimation {
  double low, high;    // estimates lie between them; where there is one estimate, it is `low`
  double first, rest;  // shares that stages look for
  int32_t stages;
  uint32_t above;  // what the next stage looks at; 0: there is none
  uint32_t few;    // whether no more than k elements are not 0
};

// Thresholds whose elements are counted, and in the end what is not finite.
struct Ladder {
  uint32_t bits[FL_MAX_THRESHOLDS];
  int32_t own;    // estimates, which come first
  int32_t count;  // of all
};

FL_HD uint32_t within_finite(int64_t bits) {
  return bits < 1 ? 1 : bits >= int64_t(kF32Inf) ? kF32Inf - 1 : uint32_t(bits);
}

// The bits of a magnitude, the nearest one that is finite and not 0.
FL_HD uint32_t magnitude_bits(double v) {
  if (!(v < double(bits_float(kF32Inf - 1)))) return kF32Inf - 1;
  return within_finite(float_bits(float(v > 0.0 ? v : 0.0)));
}

// ---- a threshold of an earlier step ---------------------------------------------------------------------------------

FL_HD bool keeps(const fl_chooser &how, const fl_threshold_memory &memory) {
  return how.reuse > 1 && memory.age >= 1.0f && memory.age < float(how.reuse);
}

// Whether it serves once more, if `count` elements reach it. Else it must be found anew.
FL_HD bool serves(const fl_chooser &how, int64_t numel, int64_t count, int64_t broken) {
  return !broken && 4 * count >= how.k && (count < how.capacity || how.capacity == numel);
}

// ---- estimates ------------------------------------------------------------------------------------------------------

FL_HD bool is_tail(const fl_chooser &how) {
  return how.estimator == FL_ESTIMATE_EXPONENTIAL || how.estimator == FL_ESTIMATE_PARETO;
}

FL_HD int most_stages(const fl_chooser &how) {
  if (how.estimator == FL_ESTIMATE_GIVEN || how.estimator == FL_ESTIMATE_SAMPLED) return 0;
  return !is_tail(how) ? 1 : how.stages > how.most_stages ? int(how.stages) : int(how.most_stages);
}

// The value that a share `ratio` of exponential values exceeds.
FL_HD double exponential_tail(double mean, double ratio) { return -mean * natural_log(ratio); }

// The same of generalized Pareto values, fitted by moments; of shape 0 it is exponential.
FL_HD double pareto_tail(double mean, double variance, double ratio) {
  if (!(variance > 0.0)) return exponential_tail(mean, ratio);
  const double relative = mean * mean / variance, shape = 0.5 * (relative - 1.0);
  if (!(shape > 1e-6 || shape < -1e-6) || shape > 1e300) return exponential_tail(mean, ratio);
  return 0.5 * mean * (relative + 1.0) * (1.0 - power(ratio, shape)) / shape;
}

FL_HD void begin(const fl_chooser &how, const fl_threshold_memory &memory, const fl_magnitudes &stats, Estimation &e) {
  e.above = 0;
  e.few = stats.count <= how.k;
  if (e.few) return;
  const double count = double(stats.count), ratio = double(how.k) / count;
  if (how.estimator == FL_ESTIMATE_NORMAL) e.low = std::sqrt(stats.squares / count) * normal_quantile(ratio / 2);
  if (how.estimator == FL_ESTIMATE_BISECTED || how.estimator == FL_ESTIMATE_TRIMMED) {
    e.low = stats.total / count;
    e.high = double(bits_float(uint32_t(stats.largest)));
  }
  if (!is_tail(how)) return;
  const int stages = memory.stages >= 1.0f ? int(memory.stages) : int(how.stages);
  const bool single = stages == 1 || ratio >= kFirstShare;
  e.low = 0.0;
  e.stages = single ? 1 : stages;
  e.first = single ? ratio : kFirstShare;
  e.rest = single ? ratio : power(ratio / kFirstShare, 1.0 / double(stages - 1));
}

// Takes the sums of a stage in.
FL_HD void add_stage(const fl_chooser &how, const fl_threshold_memory &memory, const fl_magnitudes &stats, int stage,
                     Estimation &e) {
  if (stage == 0) begin(how, memory, stats, e);
  e.above = 0;
  if (!is_tail(how) || e.few || stats.count < 2) return;
  const double count = double(stats.count), whole = stats.total / count, mean = whole - e.low;
  const double ratio = stage ? e.rest : e.first;
  if (stage == 0 && how.count)
    e.low = how.given[0];
  else if (how.estimator == FL_ESTIMATE_EXPONENTIAL)
    e.low += exponential_tail(mean, ratio);
  else
    e.low += pareto_tail(mean, stats.squares / count - whole * whole, ratio);
  if (stage + 1 < e.stages) e.above = magnitude_bits(e.low);
}

// FL_ESTIMATE_NORMAL is halved or raised by half three times at most, as published; twice leaves room for the ladder.
FL_HD int most_refined(const fl_chooser &how) { return how.published ? 3 : 2; }

// The place of its estimates by how often they were halved and raised, both together at most most_refined times.
FL_HD int refined(const fl_chooser &how, int halved, int raised) {
  return halved * (most_refined(how) + 1) - halved * (halved - 1) / 2 + raised;
}

FL_HD int estimates(const fl_chooser &how, const Estimation &e) {
  if (how.estimator == FL_ESTIMATE_GIVEN) return int(how.count);
  if (how.estimator == FL_ESTIMATE_SAMPLED) return 6;
  if (e.few) return 1;
  if (how.estimator == FL_ESTIMATE_NORMAL) return refined(how, most_refined(how), 0) + 1;
  return how.estimator == FL_ESTIMATE_BISECTED ? 7 : how.estimator == FL_ESTIMATE_TRIMMED ? 5 : 1;
}

// Estimates of FL_ESTIMATE_BISECTED: 4/8 of the way first, then 1/8 to 7/8.
FL_HD int eighths(int i) { return i == 0 ? 4 : i < 4 ? i : i + 1; }
FL_HD int at_eighths(int n) { return n == 4 ? 0 : n < 4 ? n : n - 1; }

FL_HD double lowered(double v, int times) {
  for (int i = 0; i < times; ++i) v *= 0.8;
  return v;
}

// Of the estimators that find them themselves.
FL_HD double estimate(const fl_chooser &how, const Estimation &e, double sampled, int i) {
  if (how.estimator == FL_ESTIMATE_SAMPLED) return lowered(sampled, i);
  if (e.few) return 0.0;
  if (how.estimator == FL_ESTIMATE_BISECTED) return e.low + double(eighths(i)) / 8 * (e.high - e.low);
  if (how.estimator == FL_ESTIMATE_TRIMMED) return e.low + double(4 - i) / 5 * (e.high - e.low);
  if (how.estimator != FL_ESTIMATE_NORMAL) return e.low;
  int halved = 0;
  while (i >= refined(how, halved + 1, 0)) ++halved;
  double raise = 1.0, value = e.low;
  for (int n = i - refined(how, halved, 0); n > 0; --n) raise *= 1.5;
  for (; halved > 0; --halved) value *= 0.5;
  return value * raise;
}

// Around the last threshold the ladder's steps are 1, 2, 3, 5, 8, 13 and 21 of 128 in an octave, up and down.
FL_HD void make_ladder(const fl_chooser &how, const fl_threshold_memory &memory, const Estimation &e, double sampled,
                       Ladder &ladder) {
  const int own = estimates(how, e);
  if (how.estimator == FL_ESTIMATE_GIVEN) {
    FL_UNROLL
    for (int i = 0; i < FL_MAX_ESTIMATES; ++i) ladder.bits[i] = magnitude_bits(how.given[i]);
  } else {
    for (int i = 0; i < own; ++i) ladder.bits[i] = magnitude_bits(estimate(how, e, sampled, i));
  }
  ladder.own = own;
  ladder.count = own ? FL_MAX_THRESHOLDS : 1;
  if (own) {
    const int64_t last = memory.threshold > 0.0f ? float_bits(memory.threshold) : ladder.bits[0];
    int64_t step = 1, next = 2;
    for (int i = own; i < kRungs; ++i) {
      const bool down = (i - own) % 2;
      ladder.bits[i] = within_finite(down ? last - step * 65536 : last + step * 65536);
      if (!down) continue;
      const int64_t sum = step + next;
      step = next;
      next = sum;
    }
  }
  ladder.bits[ladder.count - 1] = kF32Inf;
}

// ---- the choice -----------------------------------------------------------------------------------------------------

// Counts is an array of integers, or what reads as one.
template <class Counts>
FL_HD bool usable(const fl_chooser &how, const Counts &counts, int i) {
  return double(counts[i]) >= kLeastShare * double(how.k) && int64_t(counts[i]) <= how.capacity;
}

// The estimate where a search as published ends.
template <class Counts>
FL_HD int settled(const fl_chooser &how, int own, const Counts &counts) {
  if (own == 1 || how.estimator == FL_ESTIMATE_GIVEN) return 0;
  if (how.estimator == FL_ESTIMATE_NORMAL) {
    int halved = 0, raised = 0;
    while (halved + raised < most_refined(how)) {
      const int64_t count = int64_t(counts[refined(how, halved, raised)]);
      if (3 * count >= 2 * how.k && 3 * count <= 4 * how.k) break;
      count < how.k ? ++halved : ++raised;
    }
    return refined(how, halved, raised);
  }
  if (how.estimator == FL_ESTIMATE_BISECTED) {
    int low = 0, high = 8, middle = 4;
    for (int i = 0; i < 3; ++i) {
      middle = (low + high) / 2;
      const int64_t count = int64_t(counts[at_eighths(middle)]);
      if (count > how.k && count < 2 * how.k) break;
      count <= how.k ? high = middle : low = middle;
    }
    return at_eighths(middle);
  }
  const double enough = how.estimator == FL_ESTIMATE_SAMPLED ? kLeastShare * double(how.k) : double(how.k);
  for (int i = 0; i < own; ++i)
    if (double(counts[i]) >= enough) return i;
  return own - 1;
}

// The number of stages falls where they send too much on average, and rises where they send too little.
FL_HD void adapt(const fl_chooser &how, int64_t count, fl_threshold_memory &memory) {
  memory.sent = float(double(memory.sent) + double(count) / double(how.k));
  memory.estimates += 1.0f;
  if (memory.estimates < float(kWindow)) return;
  const double mean = double(memory.sent) / kWindow;
  const int now = memory.stages >= 1.0f ? int(memory.stages) : int(how.stages);
  const int then = now + (mean < 0.8) - (mean > 1.2), most = int(how.most_stages);
  memory.stages = float(then < 1 ? 1 : then > most ? most : then);
  memory.sent = memory.estimates = 0.0f;
}

FL_HD void remember(fl_threshold_memory &memory, int64_t threshold) {
  memory.threshold = bits_float(threshold ? uint32_t(threshold) : 1);
  memory.age = 1.0f;
}

// Whether counts decide. Else the k-th magnitude does.
template <class Counts>
FL_HD bool decide(const fl_chooser &how, const Ladder &ladder, const Counts &counts, fl_threshold_memory &memory,
                  fl_choice &choice) {
  if (counts[ladder.count - 1]) {  // as in largest_of
    choice.threshold = kF32Inf;
    choice.ties = -1;
    return true;
  }
  if (!ladder.own) return false;
  int pick = settled(how, ladder.own, counts);
  if (is_tail(how)) adapt(how, int64_t(counts[0]), memory);
  if (how.published) {
    const bool fits = int64_t(counts[pick]) >= 1 && int64_t(counts[pick]) <= how.capacity;
    if (!fits || how.estimator == FL_ESTIMATE_TRIMMED) return false;
  } else if (!usable(how, counts, pick)) {
    pick = -1;
    for (int i = 0; i < ladder.count - 1; ++i)
      if (usable(how, counts, i) && (pick < 0 || counts[i] > counts[pick])) pick = i;
  }
  if (pick < 0) return false;
  remember(memory, ladder.bits[pick]);
  choice.threshold = ladder.bits[pick];
  choice.ties = -1;
  return true;
}

}  // namespace fl
