// A codec's verbs from the code of its messages (verbs.h): what most codecs export.
//
// Options says for a codec
//   unit(spec)        elements that no two threads share
//   with(job, body)   calls body(codec), with the code that the spec's options need
#pragma once

#include "codec_list.h"
#include "run.h"
#include "verbs.h"

namespace fl::FL_ISA {

template <class Options>
struct Tiled {
  static int encode(Job &job) {
    return run(job, encode_units, unit(job), job.out->count, 1, job.out->count * plane_bytes(*job.spec, 0));
  }

  static int decode(Job &job) {
    return run(job, decode_units, unit(job), job.in->count, 1, job.in->count * out_bytes(job));
  }

  static int decode_sum(Job &job) { return run(job, sum_units, unit(job), 1, job.in->count, out_bytes(job)); }

  static int recode(Job &job) { return run(job, recode_units, unit(job), 1, job.in->count, plane_bytes(*job.spec, 0)); }

  static constexpr CodecVerbs verbs = {encode, decode, decode_sum, recode, {}};

 private:
  static int64_t unit(const Job &job) { return Options::unit(*job.spec); }
  static int64_t out_bytes(const Job &job) { return job.spec->numel * element_size(job.spec->dtype); }

  static void encode_units(const Job &job, int64_t begin, int64_t end) {
    Options::with(job, [&](const auto &codec) { FL_ISA::encode(codec, job, begin, end); });
    if (job.streamed) finish_streaming();
  }

  static void decode_units(const Job &job, int64_t begin, int64_t end) {
    Options::with(job, [&](const auto &codec) { FL_ISA::decode(codec, job, begin, end); });
    if (job.streamed) finish_streaming();
  }

  static void sum_units(const Job &job, int64_t begin, int64_t end) {
    Options::with(job, [&](const auto &codec) { FL_ISA::decode_sum(codec, job, begin, end); });
    if (job.streamed) finish_streaming();
  }

  static void recode_units(const Job &job, int64_t begin, int64_t end) {
    Options::with(job, [&](const auto &codec) { FL_ISA::recode(codec, job, begin, end); });
    if (job.streamed) finish_streaming();
  }
};

// Of a codec with one kind of message.
template <class Code, int64_t (*kUnit)(const fl_spec &)>
struct Plain {
  static int64_t unit(const fl_spec &spec) { return kUnit(spec); }

  template <class Body>
  FL_INLINE static void with(const Job &job, const Body &body) {
    body(Code(job));
  }
};

inline int64_t group_of(const fl_spec &spec) { return spec.param[1]; }

}  // namespace fl::FL_ISA
