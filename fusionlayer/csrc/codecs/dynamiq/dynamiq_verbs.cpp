// The C ABI of the verbs that FL_DYNAMIQ alone has, for the CPU.
#include "checks.h"
#include "cpu/calls.h"
#include "dynamiq_shared.h"

namespace fl {
namespace {

int write_widths(const uint8_t *bits, int64_t groups, WidthRun *runs) {
  WidthRun run{};
  for (int64_t g = 0; g < groups; ++g) {
    const uint64_t bit = uint64_t(1) << g % kWidthRun;
    if (bits[g] != 2 && bits[g] != 4 && bits[g] != 8) return FL_BAD_ARGUMENT;
    if (bits[g] == 8) run.mask8 |= bit, ++run.ends8;
    if (bits[g] == 4) run.mask4 |= bit, ++run.ends4;
    if (g % kWidthRun != kWidthRun - 1 && g != groups - 1) continue;
    runs[g / kWidthRun] = run;
    run.mask8 = run.mask4 = 0;
  }
  return FL_OK;
}

}  // namespace

const DynamiqLevels &remembered_levels(uint32_t epsilons) {
  thread_local uint32_t made_for = ~uint32_t(0);
  thread_local DynamiqLevels levels;
  if (made_for != epsilons) levels = dynamiq_levels(epsilons);
  made_for = epsilons;
  return levels;
}

}  // namespace fl

extern "C" {

int fl_dynamiq_stats(uint32_t dtype, const void *x, const float *residual, int64_t numel, float *means, float *squares,
                     void *) {
  if (const int bad = fl::check_dynamiq_stats(dtype, x, residual, numel, means, squares)) return bad;
  const fl::SuperGroupStats stats{x, residual, numel, dtype, means, squares};
  fl::Job job = fl::job_of(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  job.prepared = &stats;
  return fl::run_own(FL_DYNAMIQ, 0, job);
}

int fl_dynamiq_widths(const uint8_t *bits, int64_t groups, void *plane) {
  if (groups < 0 || (groups && (!bits || !plane || !fl::aligned(plane, 8)))) return FL_BAD_ARGUMENT;
  return fl::write_widths(bits, groups, static_cast<fl::WidthRun *>(plane));
}

}  // extern "C"
