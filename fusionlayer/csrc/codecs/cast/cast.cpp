// FL_CAST for one instruction set of the CPU: values as f32, bf16 or f16. Compiled once for each.
#include "cpu/tiled.h"

namespace fl::FL_ISA {

template <class Wire>
class CastCodec {
 public:
  static constexpr bool kCanonical = false;

  using Message = Wire *;

  explicit CastCodec(const Job &job) : streamed_(job.streamed) {}

  int unit() const { return kCastUnit; }

  Message at(const fl_messages &messages, int64_t message, int64_t unit) const {
    uint8_t *plane = static_cast<uint8_t *>(messages.plane[0]) + message * messages.stride;
    return reinterpret_cast<Wire *>(plane) + unit * kCastUnit;
  }

  template <class T>
  void encode(const T *x, int n, Message out, int64_t, Ahead) const {
    with_store(streamed_, out, [&](auto way) FL_LAMBDA {
      constexpr Store kStore = decltype(way)::value;
      for_each_block(n, [&](int i, auto access)
                            FL_LAMBDA { access.template store<kStore>(out + i, canonical(load_block(x + i))); });
    });
  }

  template <class Sink>
  FL_INLINE void decode(Message in, int n, const Sink &sink) const {
    for_each_block(n, [&](int i, auto access) FL_LAMBDA { sink(i, access.load(in + i)); });
  }

 private:
  bool streamed_;
};

namespace {

struct Types {
  static int64_t unit(const fl_spec &) { return kCastUnit; }

  template <class Body>
  FL_INLINE static void with(const Job &job, const Body &body) {
    with_dtype(job.spec->param[0], [&](auto wire) { body(CastCodec<typename decltype(wire)::type>(job)); });
  }
};

using Verbs = Tiled<Types>;

// Values of the same type keep their bytes.
bool copies(const fl_spec &spec) { return spec.param[0] == spec.dtype; }

int encode(Job &job) {
  if (!copies(*job.spec) || job.residual) return Verbs::encode(job);
  const int64_t bytes = plane_bytes(*job.spec, 0);
  const auto to = static_cast<uint8_t *>(job.out->plane[0]);
  return copy_messages(to, job.out->stride, static_cast<const uint8_t *>(job.x), bytes, bytes, job.out->count);
}

int decode(Job &job) {
  if (!copies(*job.spec)) return Verbs::decode(job);
  const int64_t bytes = plane_bytes(*job.spec, 0);
  const auto from = static_cast<const uint8_t *>(job.in->plane[0]);
  return copy_messages(static_cast<uint8_t *>(job.y), bytes, from, job.in->stride, bytes, job.in->count);
}

}  // namespace

const CodecVerbs cast_verbs = {encode, decode, Verbs::decode_sum, Verbs::recode, {}};

}  // namespace fl::FL_ISA
