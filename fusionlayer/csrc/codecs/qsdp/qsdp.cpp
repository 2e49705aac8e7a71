// FL_QSDP for one instruction set of the CPU. Compiled once for each.
#include "cpu/tiled.h"
#include "qsdp_codec.h"

namespace fl::FL_ISA {
namespace {

struct Widths {
  static int64_t unit(const fl_spec &spec) { return spec.param[1]; }

  template <class Body>
  FL_INLINE static void with(const Job &job, const Body &body) {
    job.spec->param[0] == 8 ? body(QsdpCodec<8>(job)) : body(QsdpCodec<4>(job));
  }
};

}  // namespace

const CodecVerbs qsdp_verbs = Tiled<Widths>::verbs;

}  // namespace fl::FL_ISA
