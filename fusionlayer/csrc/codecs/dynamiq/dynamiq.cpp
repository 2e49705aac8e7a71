// FL_DYNAMIQ for one instruction set of the CPU. Compiled once for each.
#include <cstring>

#include "cpu/tiled.h"
#include "dynamiq_codec.h"

namespace fl::FL_ISA {
namespace {

int64_t super_group_of(const fl_spec &) { return kSuperGroup; }

using Verbs = Tiled<Plain<DynamiqCodec, super_group_of>>;

// Looks through the widths of all messages, and clears the room behind the codes of those that are written.
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

template <int (*kVerb)(Job &)>
int prepared(Job &job) {
  const fl_spec &spec = *job.spec;
  if (spec.numel == 0) return FL_OK;
  if (job.in)
    if (const int bad = check_widths(spec, *job.in, false)) return bad;
  if (job.out)
    if (const int bad = check_widths(spec, *job.out, true)) return bad;
  const DynamiqPrepared prepared{&remembered_levels(spec.param[3]), dynamiq_keys(spec.seed, spec.param[2])};
  job.prepared = &prepared;
  return kVerb(job);
}

void stats_units(const Job &job, int64_t begin, int64_t end) {
  const auto &stats = *static_cast<const SuperGroupStats *>(job.prepared);
  with_dtype(stats.dtype, [&](auto type) { dynamiq_stats<typename decltype(type)::type>(stats, begin, end); });
}

int stats(Job &job) {
  const int64_t numel = static_cast<const SuperGroupStats *>(job.prepared)->numel;
  return run_units(job, stats_units, super_groups(numel), kSuperGroup);
}

}  // namespace

const CodecVerbs dynamiq_verbs = {
    prepared<Verbs::encode>, prepared<Verbs::decode>, prepared<Verbs::decode_sum>, prepared<Verbs::recode>, {stats}};

}  // namespace fl::FL_ISA
