// FL_TAHQUANT for one instruction set of the CPU. Compiled once for each.
#include "cpu/tiled.h"
#include "tahquant_sections.h"

namespace fl::FL_ISA {
namespace {

int64_t tile_of(const fl_spec &spec) { return spec.param[2]; }

using Verbs = Tiled<Plain<TahCodec, tile_of>>;

// Which tokens are coarse is known when all of a section were looked at, so threads share sections.
int encode(Job &job) {
  const TahShape shape = tah_shape(*job.spec);
  if (!shape.coarse) return Verbs::encode(job);
  return run_units(job, encode_sections, job.out->count * shape.sections(), kTahSection * shape.channels);
}

}  // namespace

const CodecVerbs tahquant_verbs = {encode, Verbs::decode, Verbs::decode_sum, Verbs::recode, {}};

}  // namespace fl::FL_ISA
