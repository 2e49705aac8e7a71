// fl_choose_threshold for the CPU: the looks are verbs of their own, and codecs/sparse/thresholds.h has the rest.
#include "checks.h"
#include "cpu/float_environment.h"
#include "thresholds.h"

namespace fl {
namespace {

struct Look {
  const float *acc;
  int64_t numel;
  void *workspace;

  int count(const uint32_t *thresholds, int number, int64_t *counts) const {
    return fl_count_above(acc, numel, thresholds, number, counts, nullptr);
  }
};

// Arrays of results are aligned as the verbs want a device's to be.
using Counts = int64_t[FL_MAX_THRESHOLDS];

int try_kept(const fl_chooser &how, const Look &look, fl_threshold_memory &memory, fl_choice &out, bool &done) {
  alignas(kPlaneAlignment) Counts counts;
  const uint32_t thresholds[] = {float_bits(memory.threshold), kF32Inf};
  if (const int bad = look.count(thresholds, 2, counts)) return bad;
  done = serves(how, look.numel, counts[0], counts[1]);
  memory.age = done ? memory.age + 1.0f : 0.0f;
  if (done) out = {int64_t(thresholds[0]), -1};
  return FL_OK;
}

int choose(const fl_chooser &how, const Look &look, const float *sample, fl_threshold_memory &memory, fl_choice &out) {
  const FloatEnvironment ieee;
  bool done = false;
  if (keeps(how, memory))
    if (const int bad = try_kept(how, look, memory, out, done)) return bad;
  if (done) return FL_OK;
  Estimation found{};
  found.above = 1;
  for (int stage = 0; stage < most_stages(how) && found.above; ++stage) {
    fl_magnitudes stats{};
    if (const int bad = fl_magnitude_stats(look.acc, look.numel, found.above, look.workspace, &stats, nullptr))
      return bad;
    add_stage(how, memory, stats, stage, found);
  }
  fl_kth sampled{};
  if (how.estimator == FL_ESTIMATE_SAMPLED)
    if (const int bad = fl_kth_magnitude(sample, how.sampled, how.sample_k, look.workspace, &sampled, nullptr))
      return bad;
  Ladder ladder{};
  make_ladder(how, memory, found, double(bits_float(uint32_t(sampled.magnitude))), ladder);
  alignas(kPlaneAlignment) Counts counts;
  if (const int bad = look.count(ladder.bits, ladder.count, counts)) return bad;
  if (decide(how, ladder, counts, memory, out)) return FL_OK;
  fl_kth kth{};
  if (const int bad = fl_kth_magnitude(look.acc, look.numel, how.k, look.workspace, &kth, nullptr)) return bad;
  out = largest_of(kth, how.k, false);
  remember(memory, out.threshold);
  return FL_OK;
}

}  // namespace
}  // namespace fl

extern "C" int fl_choose_threshold(const fl_chooser *how, const float *acc, int64_t numel, const float *sample,
                                   fl_threshold_memory *memory, void *workspace, fl_choice *out, void *) {
  if (const int bad = fl::check_choose_threshold(how, acc, numel, sample, memory, workspace, out)) return bad;
  return fl::choose(*how, {acc, numel, workspace}, sample, *memory, *out);
}
