// fl_magnitude_stats, fl_count_above, fl_kth_magnitude, fl_choose_largest, fl_choose_threshold, fl_choose_drawn: what
// thresholds are made of (codecs/sparse/sparse.h), and how they are chosen (codecs/sparse/thresholds.h).
#include "checks.h"
#include "cuda/launch.cuh"
#include "rng.h"
#include "thresholds.h"

namespace fl {
namespace {

constexpr int kHeld = 16;               // elements that a lane looks at together
constexpr int kSwath = kHeld * kLanes;  // and a warp
constexpr int kAbsent = -1;             // in place of the magnitude of an element that does not exist

// held[i] = magnitude of element first + i * kLanes + lane.
FL_DEVICE void load_magnitudes(const float *x, int64_t numel, int64_t first, int (&held)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t element = first + i * kLanes + lane_index();
    held[i] = element < numel ? int(magnitude(x[element])) : kAbsent;
  }
}

FL_DEVICE double shuffle_xor_f64(double v, int mask) {
  return __longlong_as_double(shuffle_xor(int64_t(__double_as_longlong(v)), mask));
}

// Sums over groups of `width` lanes, in all of them: the order of codecs/sparse/sparse.h.
FL_DEVICE void fold(Magnitudes &m, int width) {
  for (int mask = 1; mask < width; mask *= 2) {
    m.total += shuffle_xor_f64(m.total, mask);
    m.squares += shuffle_xor_f64(m.squares, mask);
    m.count += shuffle_xor(m.count, mask);
    const uint32_t other = shuffle_xor(m.largest, mask);
    m.largest = other > m.largest ? other : m.largest;
  }
}

// Half a warp takes a run: lane l of it is partial sum l.
FL_DEVICE void sum_runs(const float *x, int64_t numel, int above, Magnitudes *runs) {
  const int lane = lane_index(), partial = lane % kRunSums;
  const int64_t count = ceil_div(numel, kRun);
  for (int64_t pair = warp_index(); 2 * pair < count; pair += warp_count()) {
    const int64_t run = 2 * pair + lane / kRunSums;
    Magnitudes m = {};
#pragma unroll 8
    for (int i = 0; i < kRun; i += kRunSums) {
      const int64_t element = run * kRun + i + partial;
      const int bits = element < numel ? int(magnitude(x[element])) : kAbsent;
      const bool counts = bits >= above;
      const double term = counts && bits < int(kF32Inf) ? double(bits_float(uint32_t(bits))) : 0.0;
      m.total += term;
      m.squares += term * term;
      m.count += counts;
      m.largest = counts && uint32_t(bits) > m.largest ? uint32_t(bits) : m.largest;
    }
    fold(m, kRunSums);
    if (partial == 0 && run < count) runs[run] = m;
  }
}

__global__ void __launch_bounds__(kThreads) run_kernel(const float *x, int64_t numel, int above, Magnitudes *runs) {
  sum_runs(x, numel, above, runs);
}

// The sum of all runs, in all lanes. Where other warps have just written them, they are volatile: no cache may know them.
template <class Run>
FL_DEVICE fl_magnitudes total_of(Run *runs, int64_t count) {
  Magnitudes all = {};
  for (int64_t r = lane_index(); r < count; r += kTotalSums) {
    const Magnitudes run = {runs[r].total, runs[r].squares, runs[r].count, runs[r].largest};
    all.total += run.total;
    all.squares += run.squares;
    all.count += run.count;
    all.largest = run.largest > all.largest ? run.largest : all.largest;
  }
  fold(all, kTotalSums);
  return {all.count, all.total, all.squares, int64_t(all.largest)};
}

__global__ void __launch_bounds__(kLanes) total_kernel(const Magnitudes *runs, int64_t count, fl_magnitudes *out) {
  const fl_magnitudes all = total_of(runs, count);
  if (lane_index() == 0) *out = all;
}

struct Bounds {
  int bound[FL_MAX_THRESHOLDS];  // magnitudes above it count
  int count;
};

using Counter = unsigned long long;  // what atomicAdd takes

FL_DEVICE void count_all(const float *x, int64_t numel, const Bounds &bounds, Counter *counts) {
  uint32_t found[FL_MAX_THRESHOLDS] = {};
  for (int64_t swath = warp_index(); swath * kSwath < numel; swath += warp_count()) {
    int held[kHeld];
    load_magnitudes(x, numel, swath * kSwath, held);
#pragma unroll
    for (int t = 0; t < FL_MAX_THRESHOLDS; ++t) {
      if (t >= bounds.count) break;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) found[t] += held[i] > bounds.bound[t];
    }
  }
#pragma unroll
  for (int t = 0; t < FL_MAX_THRESHOLDS; ++t) {
    const int64_t sum = sum_over_lanes(found[t]);
    if (t < bounds.count && lane_index() == 0 && sum > 0) atomicAdd(counts + t, Counter(sum));
  }
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const float *x, int64_t numel, const Bounds bounds, Counter *counts) {
  count_all(x, numel, bounds, counts);
}

// The k-th magnitude is found digit by digit, the highest first: a histogram of the digit among the elements that begin
// as it does, then a choice, by the warp that counts last.
constexpr int kBins = 256;

struct Search {
  Counter bins[kBins];
  int64_t above;    // elements whose digits so far are larger
  int64_t broken;   // elements that are not finite
  uint32_t prefix;  // the digits so far
  uint32_t asked;   // warps that have counted
};

// What is looked for, and where it goes: one of the two.
struct Kth {
  int64_t k;
  fl_kth *out;
  fl_choice *choice;
  fl_threshold_memory *memory;  // keeps the choice; may be null
  const uint32_t *settled;      // where it is not 0, nothing is looked for; may be null
};

struct Digit {
  int shift, bits;
};
constexpr Digit kDigits[] = {{23, 8}, {15, 8}, {7, 8}, {0, 7}};

// By one warp, when all bins are counted. Lane 0 has the highest bins; the highest of the first digit is that of what is
// not finite. Leaves the bins empty.
FL_DEVICE void choose_digit(Search *search, const Digit digit, const Kth &wanted) {
  constexpr int kEach = kBins / kLanes;
  volatile Counter *bins = search->bins;  // other warps have counted them: no cache of this one may know them
  const int lane = lane_index(), highest = kBins - 1 - lane * kEach;
  const int64_t above = search->above;
  const uint32_t prefix = search->prefix;
  if (digit.shift == kDigits[0].shift && lane == 0) search->broken = int64_t(bins[kBins - 1]);
  int64_t mine = 0;
  for (int i = 0; i < kEach; ++i) mine += int64_t(bins[highest - i]);
  int64_t before = above + sum_before(mine, lane);
  if (before < wanted.k && wanted.k <= before + mine) {
    int bin = highest;
    for (; before + int64_t(bins[bin]) < wanted.k; --bin) before += int64_t(bins[bin]);
    search->prefix = prefix << digit.bits | uint32_t(bin);
    search->above = before;
    const fl_kth found{int64_t(search->prefix), before};
    if (digit.shift == 0 && wanted.out) *wanted.out = found;
    if (digit.shift == 0 && wanted.choice) {
      const fl_choice choice = largest_of(found, wanted.k, search->broken > 0);
      *wanted.choice = choice;
      if (wanted.memory) remember(*wanted.memory, choice.threshold);
    }
  }
  meet();
  for (int i = 0; i < kEach; ++i) bins[highest - i] = 0;
}

// Whether this warp is the last to ask; it sees what the others wrote before they asked.
FL_DEVICE bool is_last(uint32_t *asked) {
  __threadfence();
  meet();
  uint32_t before = 0;
  if (lane_index() == 0) before = atomicAdd(asked, 1u);
  const bool last = shuffle(before, 0) == uint32_t(warp_count()) - 1;
  __threadfence();
  return last;
}

// What is looked through: magnitudes; or halves of the numbers that elements draw, subtracted, so that the least are the
// largest.
struct OfMagnitudes {
  const float *x;

  FL_DEVICE void load(int64_t numel, int64_t first, int (&held)[kHeld]) const {
    load_magnitudes(x, numel, first, held);
  }
};

struct OfNumbers {
  RngKey key;
  uint64_t offset;

  FL_DEVICE void load(int64_t numel, int64_t first, int (&held)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t element = first + i * kLanes + lane_index();
      held[i] = element < numel ? int(kMagnitudeBits - half_drawn(key, offset + uint64_t(element))) : kAbsent;
    }
  }
};

template <class Keys>
__global__ void __launch_bounds__(kThreads)
    digit_kernel(const Keys keys, int64_t numel, const Digit digit, const Kth wanted, Search *search) {
  __shared__ uint32_t all_bins[kWarps][kBins];
  if (wanted.settled && *wanted.settled) return;
  uint32_t *bins = all_bins[threadIdx.x / kLanes];
  const int lane = lane_index();
  for (int i = lane; i < kBins; i += kLanes) bins[i] = 0;
  meet();
  const uint32_t prefix = search->prefix, mask = (1u << digit.bits) - 1;
  for (int64_t swath = warp_index(); swath * kSwath < numel; swath += warp_count()) {
    int held[kHeld];
    keys.load(numel, swath * kSwath, held);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const uint32_t bits = uint32_t(held[i]) >> digit.shift;
      if (held[i] != kAbsent && bits >> digit.bits == prefix) atomicAdd(bins + (bits & mask), 1u);
    }
  }
  meet();
  for (int i = lane; i < kBins; i += kLanes)
    if (bins[i]) atomicAdd(search->bins + i, Counter(bins[i]));
  if (!is_last(&search->asked)) return;
  choose_digit(search, digit, wanted);
  if (lane == 0) search->asked = 0;
}

// `search` is zeros.
template <class Keys>
cudaError_t find_in(const Keys keys, int64_t numel, const Kth &wanted, Search *search, cudaStream_t stream) {
  const Grid grid(ceil_div(numel, kSwath), 1);
  if (grid.error) return grid.error;
  for (const Digit digit : kDigits)
    FL_LAUNCH(digit_kernel<Keys>, grid.blocks, kThreads, stream, keys, numel, digit, wanted, search);
  return cudaGetLastError();
}

template <class Keys>
cudaError_t find(const Keys keys, int64_t numel, const Kth &wanted, void *workspace, cudaStream_t stream) {
  Search *search = static_cast<Search *>(workspace);
  if (const cudaError_t error = cudaMemsetAsync(search, 0, sizeof *search, stream)) return error;
  return find_in(keys, numel, wanted, search, stream);
}

// What fl_choose_threshold has found out, in its workspace; zeros to begin with. In each kernel the warp that ends last
// draws the conclusions.
struct Job {
  uint32_t done;   // the choice is made
  uint32_t asked;  // warps that have done their part of a kernel
  Estimation found;
  Ladder ladder;
  Counter counts[FL_MAX_THRESHOLDS];
  fl_kth sampled;
  Search of_sample, of_all;
};

struct Choosing {
  fl_chooser how;
  const float *x;
  int64_t numel;
  fl_threshold_memory *memory;
  fl_choice *out;
  Job *job;
  Magnitudes *runs;
};

// Whether a threshold that is kept still serves.
__global__ void __launch_bounds__(kThreads) kept_kernel(const Choosing c) {
  if (!keeps(c.how, *c.memory)) return;
  const uint32_t kept = float_bits(c.memory->threshold);
  const Bounds bounds{{int(kept) - 1, int(kF32Inf) - 1}, 2};
  count_all(c.x, c.numel, bounds, c.job->counts);
  if (!is_last(&c.job->asked) || lane_index() != 0) return;
  volatile Counter *counts = c.job->counts;
  if (serves(c.how, c.numel, int64_t(counts[0]), int64_t(counts[1]))) {
    c.job->done = 1;
    c.memory->age += 1.0f;
    c.out->threshold = kept;
    c.out->ties = -1;
  } else {
    c.memory->age = 0.0f;
  }
  counts[0] = counts[1] = 0;
  c.job->asked = 0;
}

__global__ void __launch_bounds__(kThreads) stage_kernel(const Choosing c, int stage) {
  const uint32_t above = stage ? c.job->found.above : 1;
  if (c.job->done || !above) return;
  sum_runs(c.x, c.numel, int(above), c.runs);
  if (!is_last(&c.job->asked)) return;
  const volatile Magnitudes *runs = c.runs;
  const fl_magnitudes stats = total_of(runs, ceil_div(c.numel, kRun));
  if (lane_index() != 0) return;
  add_stage(c.how, *c.memory, stats, stage, c.job->found);
  c.job->asked = 0;
}

__global__ void __launch_bounds__(kLanes) ladder_kernel(const Choosing c) {
  if (c.job->done || lane_index() != 0) return;
  const double sampled = double(bits_float(uint32_t(c.job->sampled.magnitude)));
  make_ladder(c.how, *c.memory, c.job->found, sampled, c.job->ladder);
}

__global__ void __launch_bounds__(kThreads) decide_kernel(const Choosing c) {
  if (c.job->done) return;
  Bounds bounds{{}, c.job->ladder.count};
#pragma unroll
  for (int t = 0; t < FL_MAX_THRESHOLDS; ++t) bounds.bound[t] = int(c.job->ladder.bits[t]) - 1;
  count_all(c.x, c.numel, bounds, c.job->counts);
  if (!is_last(&c.job->asked) || lane_index() != 0) return;
  const volatile Counter *counts = c.job->counts;
  if (decide(c.how, c.job->ladder, counts, *c.memory, *c.out)) c.job->done = 1;
}

cudaError_t choose(const Choosing &c, const float *sample, cudaStream_t stream) {
  if (const cudaError_t error = cudaMemsetAsync(c.job, 0, sizeof *c.job, stream)) return error;
  const Grid swaths(ceil_div(c.numel, kSwath), 1), pairs((ceil_div(c.numel, kRun) + 1) / 2, 1);
  if (swaths.error || pairs.error) return swaths.error ? swaths.error : pairs.error;
  if (c.how.reuse > 1) FL_LAUNCH(kept_kernel, swaths.blocks, kThreads, stream, c);
  for (int stage = 0; stage < most_stages(c.how); ++stage)
    FL_LAUNCH(stage_kernel, pairs.blocks, kThreads, stream, c, stage);
  if (c.how.estimator == FL_ESTIMATE_SAMPLED) {
    const Kth wanted{c.how.sample_k, &c.job->sampled, nullptr, nullptr, &c.job->done};
    if (const cudaError_t error = find_in(OfMagnitudes{sample}, c.how.sampled, wanted, &c.job->of_sample, stream))
      return error;
  }
  FL_LAUNCH(ladder_kernel, dim3(1), kLanes, stream, c);
  FL_LAUNCH(decide_kernel, swaths.blocks, kThreads, stream, c);
  return find_in(OfMagnitudes{c.x}, c.numel, {c.how.k, nullptr, c.out, c.memory, &c.job->done}, &c.job->of_all, stream);
}

int64_t job_bytes() { return ceil_div(sizeof(Job), 16) * 16; }

// `search` has found the k-th, and its first bin holds how many elements are not finite.
__global__ void __launch_bounds__(kLanes) drawn_kernel(const Search *search, fl_choice *choice) {
  if (lane_index() == 0) *choice = drawn_of(kMagnitudeBits - search->prefix, search->bins[0] > 0);
}

cudaError_t choose_drawn(const fl_spec &spec, const float *acc, int64_t k, void *workspace, fl_choice *out,
                         cudaStream_t stream) {
  const OfNumbers numbers{make_key(spec.seed), uint64_t(spec.offset)};
  const Kth wanted{k, nullptr, nullptr, nullptr, nullptr};
  if (const cudaError_t error = find(numbers, spec.numel, wanted, workspace, stream)) return error;
  Search *search = static_cast<Search *>(workspace);
  const Grid grid(ceil_div(spec.numel, kSwath), 1);
  const Bounds broken{{int(kF32Inf) - 1}, 1};
  FL_LAUNCH(count_kernel, grid.blocks, kThreads, stream, acc, spec.numel, broken, search->bins);
  FL_LAUNCH(drawn_kernel, dim3(1), kLanes, stream, search, out);
  return cudaGetLastError();
}

Bounds bounds_of(const uint32_t *thresholds, int count) {
  Bounds bounds{{}, count};
  for (int i = 0; i < count; ++i) bounds.bound[i] = int(thresholds[i]) - 1;
  return bounds;
}

}  // namespace

int64_t stats_workspace(int64_t numel) { return ceil_div(numel, kRun) * int64_t(sizeof(Magnitudes)); }
int64_t kth_workspace() { return sizeof(Search); }
int64_t threshold_workspace(int64_t numel) { return job_bytes() + stats_workspace(numel); }

}  // namespace fl

extern "C" {

int fl_magnitude_stats(const float *acc, int64_t numel, uint32_t above, void *workspace, fl_magnitudes *out,
                       void *stream) {
  if (const int bad = fl::check_look(acc, numel, out, workspace)) return bad;
  if (above > fl::kMagnitudeBits) return FL_BAD_ARGUMENT;
  fl::Magnitudes *runs = static_cast<fl::Magnitudes *>(workspace);
  const int64_t count = fl::ceil_div(numel, fl::kRun);
  if (count > 0) {
    const fl::Grid grid((count + 1) / 2, 1);
    if (grid.error) return fl::finish(grid.error);
    FL_LAUNCH(fl::run_kernel, grid.blocks, fl::kThreads, fl::as_stream(stream), acc, numel, int(above), runs);
  }
  FL_LAUNCH(fl::total_kernel, dim3(1), fl::kLanes, fl::as_stream(stream), runs, count, out);
  return fl::finish(cudaGetLastError());
}

int fl_count_above(const float *acc, int64_t numel, const uint32_t *thresholds, int count, int64_t *counts,
                   void *stream) {
  if (const int bad = fl::check_count_above(acc, numel, thresholds, count, counts)) return bad;
  if (const cudaError_t error = cudaMemsetAsync(counts, 0, size_t(count) * 8, fl::as_stream(stream)))
    return fl::finish(error);
  if (numel == 0) return FL_OK;
  const fl::Grid grid(fl::ceil_div(numel, fl::kSwath), 1);
  if (grid.error) return fl::finish(grid.error);
  FL_LAUNCH(fl::count_kernel, grid.blocks, fl::kThreads, fl::as_stream(stream), acc, numel,
            fl::bounds_of(thresholds, count), reinterpret_cast<fl::Counter *>(counts));
  return fl::finish(cudaGetLastError());
}

int fl_kth_magnitude(const float *acc, int64_t numel, int64_t k, void *workspace, fl_kth *out, void *stream) {
  if (const int bad = fl::check_look(acc, numel, out, workspace)) return bad;
  if (k < 1 || k > numel) return FL_BAD_ARGUMENT;
  return fl::finish(
      fl::find(fl::OfMagnitudes{acc}, numel, {k, out, nullptr, nullptr, nullptr}, workspace, fl::as_stream(stream)));
}

int fl_choose_largest(const float *acc, int64_t numel, int64_t k, void *workspace, fl_choice *out, void *stream) {
  if (const int bad = fl::check_look(acc, numel, out, workspace)) return bad;
  if (k < 1 || k > numel) return FL_BAD_ARGUMENT;
  return fl::finish(
      fl::find(fl::OfMagnitudes{acc}, numel, {k, nullptr, out, nullptr, nullptr}, workspace, fl::as_stream(stream)));
}

int fl_choose_threshold(const fl_chooser *how, const float *acc, int64_t numel, const float *sample,
                        fl_threshold_memory *memory, void *workspace, fl_choice *out, void *stream) {
  if (const int bad = fl::check_choose_threshold(how, acc, numel, sample, memory, workspace, out)) return bad;
  uint8_t *room = static_cast<uint8_t *>(workspace);
  auto *runs = reinterpret_cast<fl::Magnitudes *>(room + fl::job_bytes());
  const fl::Choosing c{*how, acc, numel, memory, out, reinterpret_cast<fl::Job *>(room), runs};
  return fl::finish(fl::choose(c, sample, fl::as_stream(stream)));
}

int fl_choose_drawn(const fl_spec *spec, const float *acc, int64_t k, void *workspace, fl_choice *out, void *stream) {
  if (const int bad = fl::check_choose_drawn(spec, acc, k, workspace, out)) return bad;
  return fl::finish(fl::choose_drawn(*spec, acc, k, workspace, out, fl::as_stream(stream)));
}

}  // extern "C"
