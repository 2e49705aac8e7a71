// FL_BLOCK for one instruction set of the CPU. Compiled once for each.
#include <cstring>

#include "block_codec.h"
#include "cpu/tiled.h"

namespace fl::FL_ISA {
namespace {

struct Formats {
  static int64_t unit(const fl_spec &spec) { return spec.param[1]; }

  template <class Body>
  FL_INLINE static void with(const Job &job, const Body &body) {
    const auto rotated_or_not = [&](auto numbers) FL_LAMBDA {
      using Numbers = decltype(numbers);
      job.spec->param[3] & FL_BLOCK_HADAMARD ? body(BlockCodec<Numbers, true>(job))
                                             : body(BlockCodec<Numbers, false>(job));
    };
    switch (job.spec->param[0]) {
      case FL_E4M3:
        return rotated_or_not(Float8<FL_E4M3>{});
      case FL_E5M2:
        return rotated_or_not(Float8<FL_E5M2>{});
      case FL_INT8:
        return rotated_or_not(Int8{});
      case FL_E2M3:
        return body(BlockCodec<Float6<FL_E2M3>, false>(job));
      case FL_E3M2:
        return body(BlockCodec<Float6<FL_E3M2>, false>(job));
      default:
        return body(BlockCodec<Float4, false>(job));
    }
  }
};

using Verbs = Tiled<Formats>;

// Where all of a message shares a scale, a first pass finds it.
template <int (*kVerb)(Job &)>
int encode(Job &job) {
  if (job.spec->param[2] == FL_SCALE_MESSAGE && job.spec->numel) {
    for (int64_t m = 0; m < job.out->count; ++m)
      std::memset(static_cast<uint8_t *>(job.out->plane[0]) + m * job.out->stride, 0, sizeof(float));
    job.look = true;
    if (const int bad = kVerb(job)) return bad;
    job.look = false;
  }
  return kVerb(job);
}

}  // namespace

const CodecVerbs block_verbs = {encode<Verbs::encode>, Verbs::decode, Verbs::decode_sum, encode<Verbs::recode>, {}};

}  // namespace fl::FL_ISA
