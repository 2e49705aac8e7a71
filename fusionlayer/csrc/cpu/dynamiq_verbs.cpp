#include "dynamiq_verbs.h"

#include <cstring>

namespace fl {
namespace {

int check_widths(const fl_spec &spec, const fl_messages &messages, bool written) {
  const int64_t groups = super_groups(spec.numel), room = int64_t(spec.param[1]) * kLeastCodes;
  for (int64_t m = 0; m < messages.count; ++m) {
    const DynamiqMessage message = dynamiq_message(messages, m);
    const int64_t taken = codes_in_all(message.runs, groups);
    if (taken < 0 || taken > room) return FL_BAD_MESSAGE;
    if (written) std::memset(message.codes + taken, 0, size_t(room - taken));
  }
  return FL_OK;
}

// The levels that the thread used last: making them takes as long as encoding thousands of elements.
const DynamiqLevels &remembered_levels(uint32_t epsilons) {
  thread_local uint32_t made_for = ~uint32_t(0);
  thread_local DynamiqLevels levels;
  if (made_for != epsilons) levels = dynamiq_levels(epsilons);
  made_for = epsilons;
  return levels;
}

}  // namespace

int prepare_dynamiq(Job &job) {
  const fl_spec &spec = *job.spec;
  if (job.in)
    if (const int bad = check_widths(spec, *job.in, false)) return bad;
  if (job.out)
    if (const int bad = check_widths(spec, *job.out, true)) return bad;
  job.levels = &remembered_levels(spec.param[3]);
  job.dynamiq = dynamiq_keys(spec.seed, spec.param[2]);
  return FL_OK;
}

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

}  // namespace fl
