// The C ABI of sparsification for the CPU: checks, the order of the steps, threads.
#include "sparse_verbs.h"

#include <algorithm>
#include <cstring>

#include "checks.h"
#include "cpu/float_environment.h"
#include "cpu/run.h"
#include "cpu/thread_pool.h"
#include "select.h"

namespace fl {
namespace {

constexpr int64_t kStreamedBytes = int64_t(32) << 20;  // of results: they need not pass through the caches
constexpr int64_t kSharedSuperblocks = 8;              // from there on threads share an encoding

// Calls body(begin, end) for ranges of units of `unit` elements each.
template <class Body>
void split(int64_t numel, int64_t unit, const Body &body) {
  const int64_t units = ceil_div(numel, unit);
  const int64_t grain = numel < kInlineElements ? units : std::max<int64_t>(1, kGrainElements / unit);
  if (units > 0) parallel_for(units, grain, RangeTask(body));
}

void accumulate(const Accumulation &job) {
  const FloatEnvironment ieee;
  split(job.numel, kCastUnit, [&](int64_t begin, int64_t end) { kernels().accumulate(job, begin, end); });
}

fl_magnitudes add_up(const Magnitudes *runs, int64_t n) {
  fl_magnitudes all{};
  double total[kTotalSums] = {}, squares[kTotalSums] = {};
  for (int64_t r = 0; r < n; ++r) {
    total[r % kTotalSums] += runs[r].total;
    squares[r % kTotalSums] += runs[r].squares;
    all.count += runs[r].count;
    if (runs[r].count > 0) all.largest = std::max(all.largest, int64_t(runs[r].largest));
  }
  for (int h = 1; h < kTotalSums; h *= 2)
    for (int i = 0; i < kTotalSums; i += 2 * h) {
      total[i] += total[i + h];
      squares[i] += squares[i + h];
    }
  all.total = total[0];
  all.squares = squares[0];
  return all;
}

int64_t mark_bytes(const SparseShape &shape) { return shape.blocks() * (kCounted / 8); }

Selection selection_of(const fl_spec &spec, const void *x, float scale, float *acc, float *clear, const Bound &bound,
                       void *workspace, const fl_messages &out) {
  Selection s{};
  s.shape = sparse_shape(spec);
  s.random = spec.param[3] & FL_SPARSE_RANDOM;
  s.limit = bound.limit;
  s.threshold = bound.threshold;
  s.ties = bound.ties > 0;
  s.key = make_key(spec.seed);
  s.offset = uint64_t(spec.offset);
  s.x = x;
  s.dtype = spec.dtype;
  s.scale = scale;
  s.acc = acc;
  s.clear = clear;
  s.out = sparse_planes(out, 0);
  uint8_t *memory = static_cast<uint8_t *>(workspace);
  s.marked = reinterpret_cast<uint64_t *>(memory);
  s.equal = reinterpret_cast<uint64_t *>(memory + mark_bytes(s.shape));
  s.counts = reinterpret_cast<Selection::Counts *>(memory + 2 * mark_bytes(s.shape));
  return s;
}

// Runs a step for superblocks begin..end - 1.
template <class Step>
void each(int64_t begin, int64_t end, const Step &step) {
  const auto task = [&](int64_t from, int64_t to) {
    for (int64_t superblock = begin + from; superblock < begin + to; ++superblock) step(superblock);
  };
  parallel_for(end - begin, 1, RangeTask(task));
}

// What superblocks have taken so far.
struct Taken {
  int64_t ties, pairs;
};

// Ties and room are given out in order between the steps, so bytes depend neither on threads nor on how many superblocks
// a call has.
void encode(const Selection &s, int64_t begin, int64_t end, int64_t ties, Taken &taken) {
  const Kernels &kernel = kernels();
  each(begin, end, [&](int64_t superblock) { kernel.mark(s, superblock); });
  for (int64_t i = begin; i < end; ++i) {
    s.counts[i].ties = ties - taken.ties;
    taken.ties += std::min<int64_t>(s.counts[i].ties, s.counts[i].equal);
  }
  each(begin, end, [&](int64_t superblock) { kernel.settle(s, superblock); });
  for (int64_t i = begin; i < end; ++i) {
    s.counts[i].first = taken.pairs;
    taken.pairs = std::min(s.shape.capacity, taken.pairs + s.counts[i].marked);
  }
  each(begin, end, [&](int64_t superblock) { kernel.emit(s, superblock); });
}

void clear_behind(const Selection &s, int64_t pairs) {
  const auto clear = [&](void *plane, int64_t size) {
    std::memset(static_cast<uint8_t *>(plane) + pairs * size, 0, size_t((s.shape.capacity - pairs) * size));
  };
  if (s.shape.form != FL_SPARSE_BITMAP) clear(s.out.positions, s.shape.form == FL_SPARSE_BYTE ? 1 : 2);
  clear(s.out.values, s.shape.value_bytes());
}

bool valid_ends(const fl_spec &spec, const fl_messages &in) {
  const SparseShape shape = sparse_shape(spec);
  for (int64_t m = 0; m < in.count; ++m) {
    uint32_t end = 0;
    const uint32_t *ends = sparse_planes(in, m).ends;
    for (int64_t s = 0; s < shape.superblocks(); ++s) {
      if (ends[s] < end) return false;
      end = ends[s];
    }
    if (end > shape.capacity) return false;
  }
  return true;
}

}  // namespace

int sparse_decode_sum(Job &job) {
  const fl_spec &spec = *job.spec;
  if (!valid_ends(spec, *job.in)) return FL_BAD_MESSAGE;
  job.streamed = spec.numel * element_size(spec.dtype) >= kStreamedBytes;
  const Kernels &kernel = kernels();
  std::atomic<bool> valid{true};
  split(spec.numel, kSuperblock, [&](int64_t begin, int64_t end) {
    if (!kernel.sparse_valid(job, begin, end)) valid = false;
  });
  if (!valid) return FL_BAD_MESSAGE;
  const FloatEnvironment ieee;
  split(spec.numel, kSuperblock, [&](int64_t begin, int64_t end) { kernel.sparse_decode_sum(job, begin, end); });
  return FL_OK;
}

}  // namespace fl

extern "C" {

int64_t fl_workspace_bytes(int verb, int64_t numel) {
  if (numel < 0 || numel > fl::kMaxElements) return -1;
  if (verb == FL_WORKSPACE_STATS) return fl::ceil_div(numel, fl::kRun) * int64_t(sizeof(fl::Magnitudes));
  if (verb == FL_WORKSPACE_KTH) return fl::kth_workspace(numel);
  if (verb == FL_WORKSPACE_THRESHOLD)
    return std::max(fl_workspace_bytes(FL_WORKSPACE_STATS, numel), fl::kth_workspace(numel));
  if (verb == FL_WORKSPACE_DELTA_16 || verb == FL_WORKSPACE_DELTA_32) return 0;
  if (verb != FL_WORKSPACE_ENCODE) return -1;
  const fl::SparseShape shape{numel, 0, 0, 0};
  return 2 * fl::mark_bytes(shape) + shape.superblocks() * int64_t(sizeof(fl::Selection::Counts));
}

int fl_accumulate(uint32_t dtype, const void *x, float scale, int64_t numel, float *acc, void *) {
  if (const int bad = fl::check_accumulate(dtype, x, numel, acc)) return bad;
  fl::accumulate({x, dtype, scale, 0.0f, false, nullptr, acc, numel});
  return FL_OK;
}

int fl_accumulate_momentum(uint32_t dtype, const void *x, float scale, float momentum, int nesterov, int64_t numel,
                           float *velocity, float *acc, void *) {
  if (const int bad = fl::check_accumulate(dtype, x, numel, acc)) return bad;
  if (const int bad = fl::check_array(velocity, numel, 4)) return bad;
  fl::accumulate({x, dtype, scale, momentum, nesterov != 0, velocity, acc, numel});
  return FL_OK;
}

int fl_magnitude_stats(const float *acc, int64_t numel, uint32_t above, void *workspace, fl_magnitudes *out, void *) {
  if (const int bad = fl::check_look(acc, numel, out, workspace)) return bad;
  if (above > fl::kMagnitudeBits) return FL_BAD_ARGUMENT;
  const fl::FloatEnvironment ieee;
  fl::Magnitudes *runs = static_cast<fl::Magnitudes *>(workspace);
  fl::split(numel, fl::kRun, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t first = r * fl::kRun;
      runs[r] = fl::kernels().stats(acc + first, int(std::min<int64_t>(fl::kRun, numel - first)), above);
    }
  });
  *out = fl::add_up(runs, fl::ceil_div(numel, fl::kRun));
  return FL_OK;
}

int fl_count_above(const float *acc, int64_t numel, const uint32_t *thresholds, int count, int64_t *counts, void *) {
  if (const int bad = fl::check_count_above(acc, numel, thresholds, count, counts)) return bad;
  int32_t bounds[FL_MAX_THRESHOLDS];
  for (int i = 0; i < FL_MAX_THRESHOLDS; ++i) bounds[i] = int32_t(thresholds[std::min(i, count - 1)]) - 1;
  const int groups = (count + fl::kBoundGroup - 1) / fl::kBoundGroup;
  std::atomic<int64_t> totals[FL_MAX_THRESHOLDS] = {};
  fl::split(numel, fl::kRun, [&](int64_t begin, int64_t end) {
    int64_t found[FL_MAX_THRESHOLDS] = {};
    const int64_t first = begin * fl::kRun;
    fl::kernels().count_above(acc + first, std::min(numel, end * fl::kRun) - first, bounds, groups, found);
    for (int i = 0; i < count; ++i) totals[i].fetch_add(found[i], std::memory_order_relaxed);
  });
  for (int i = 0; i < count; ++i) counts[i] = totals[i];
  return FL_OK;
}

int fl_kth_magnitude(const float *acc, int64_t numel, int64_t k, void *workspace, fl_kth *out, void *) {
  if (const int bad = fl::check_look(acc, numel, out, workspace)) return bad;
  if (k < 1 || k > numel) return FL_BAD_ARGUMENT;
  *out = fl::kth_magnitude(acc, numel, k, workspace);
  return FL_OK;
}

int fl_choose_largest(const float *acc, int64_t numel, int64_t k, void *workspace, fl_choice *out, void *stream) {
  const uint32_t infinite = fl::kF32Inf;
  alignas(fl::kPlaneAlignment) int64_t broken = 0;
  fl_kth kth{};
  if (const int bad = fl::check_look(acc, numel, out, workspace)) return bad;
  if (const int bad = fl_kth_magnitude(acc, numel, k, workspace, &kth, stream)) return bad;
  if (const int bad = fl_count_above(acc, numel, &infinite, 1, &broken, stream)) return bad;
  *out = fl::largest_of(kth, k, broken > 0);
  return FL_OK;
}

int fl_choose_drawn(const fl_spec *spec, const float *acc, int64_t k, void *workspace, fl_choice *out, void *stream) {
  if (const int bad = fl::check_choose_drawn(spec, acc, k, workspace, out)) return bad;
  const uint32_t infinite = fl::kF32Inf;
  alignas(fl::kPlaneAlignment) int64_t broken = 0;
  if (const int bad = fl_count_above(acc, spec->numel, &infinite, 1, &broken, stream)) return bad;
  const fl::RngKey key = fl::make_key(spec->seed);
  *out = fl::drawn_of(fl::kth_drawn(key, uint64_t(spec->offset), spec->numel, k, workspace), broken > 0);
  return FL_OK;
}

int fl_sparse_encode(const fl_spec *spec, const void *x, float scale, float *acc, float *clear, int64_t threshold,
                     int64_t ties, const fl_choice *choice, void *workspace, const fl_messages *out, void *) {
  const fl_choice given = choice && fl::aligned(choice, 8) ? *choice : fl_choice{threshold, ties};
  if (const int bad = fl::check_sparse_encode(spec, x, acc, clear, given, choice, workspace, out)) return bad;
  if (spec->numel == 0) return FL_OK;
  const fl::FloatEnvironment ieee;
  const fl::Bound bound = fl::bound_of(given, spec->param[3] & FL_SPARSE_RANDOM);
  const fl::Selection s = fl::selection_of(*spec, x, scale, acc, clear, bound, workspace, *out);
  const int64_t superblocks = s.shape.superblocks();
  // One thread takes each superblock through all steps while the second-level cache has it.
  const bool shared = fl::thread_count() > 1 && superblocks >= fl::kSharedSuperblocks;
  const int64_t together = shared ? superblocks : 1;
  fl::Taken taken{};
  for (int64_t i = 0; i < superblocks; i += together)
    fl::encode(s, i, std::min(superblocks, i + together), bound.ties, taken);
  fl::clear_behind(s, taken.pairs);
  return FL_OK;
}

}  // extern "C"
