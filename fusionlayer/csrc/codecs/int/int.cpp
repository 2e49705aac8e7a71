// FL_INT for one instruction set of the CPU. Compiled once for each.
#include <algorithm>

#include "cpu/tiled.h"
#include "int_sums.h"

namespace fl::FL_ISA {
namespace {

struct Widths {
  static int64_t unit(const fl_spec &spec) { return spec.param[1]; }

  template <class Body>
  FL_INLINE static void with(const Job &job, const Body &body) {
    const uint32_t bits = job.spec->param[0];
    if (bits == 2) return rotated_or_not<2>(job, body);
    if (bits == 3) return rotated_or_not<3>(job, body);
    if (bits == 4) return rotated_or_not<4>(job, body);
    rotated_or_not<8>(job, body);
  }

  template <int kBits, class Body>
  FL_INLINE static void rotated_or_not(const Job &job, const Body &body) {
    job.spec->param[2] & FL_INT_HADAMARD ? body(IntCodec<kBits, true>(job)) : body(IntCodec<kBits, false>(job));
  }
};

using Verbs = Tiled<Widths>;

void recode_from_units(const Job &job, int64_t begin, int64_t end) {
  Widths::with(job, [&](const auto &codec) {
    recode_from(codec, int(job.source->param[1]), sum_of(*job.source), job, begin, end);
  });
}

void difference_units(const Job &job, int64_t begin, int64_t end) {
  Widths::with(job, [&](const auto &codec) { encode_difference(codec, job, begin, end); });
}

int recode_from(Job &job) {
  const int64_t unit = std::max(Widths::unit(*job.spec), Widths::unit(*job.source));
  return run(job, recode_from_units, unit, 1, job.in->count, plane_bytes(*job.spec, 0));
}

int encode_difference(Job &job) {
  return run(job, difference_units, Widths::unit(*job.spec), job.out->count, 1,
             job.out->count * plane_bytes(*job.spec, 0));
}

}  // namespace

const CodecVerbs int_verbs = {
    Verbs::encode, Verbs::decode, Verbs::decode_sum, Verbs::recode, {recode_from, encode_difference}};

}  // namespace fl::FL_ISA
