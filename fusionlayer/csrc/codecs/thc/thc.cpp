// FL_THC for one instruction set of the CPU. Compiled once for each.
#include "cpu/tiled.h"
#include "thc_codec.h"

namespace fl::FL_ISA {
namespace {

int64_t section_of(const fl_spec &) { return kThcSection; }

using Verbs = Tiled<Plain<ThcCodec, section_of>>;

void rms_of_sections(const Job &job, int64_t begin, int64_t end) {
  with_dtype(job.spec->dtype, [&](auto type) { thc_rms<typename decltype(type)::type>(job, begin, end); });
}

int sum_codes(Job &job) {
  if (!job.in->count) return FL_OK;
  return run_units(job, add_codes, thc_shape(*job.spec).count() / 32, 32 * job.in->count);
}

int rms(Job &job) { return run_units(job, rms_of_sections, thc_shape(*job.spec).sections(), kThcSection); }

}  // namespace

const CodecVerbs thc_verbs = {Verbs::encode, Verbs::decode, Verbs::decode_sum, nullptr, {sum_codes, rms}};

}  // namespace fl::FL_ISA
