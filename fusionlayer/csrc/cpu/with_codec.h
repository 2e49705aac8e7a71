// Picks the code of a codec and its options: what all kernels that take any codec begin with.
#pragma once

#include "block_codec.h"
#include "cast_codec.h"
#include "chunked_codec.h"
#include "dynamiq_codec.h"
#include "int_sums.h"
#include "onebit_codec.h"
#include "qsdp_codec.h"
#include "tahquant_codec.h"
#include "thc_codec.h"
#include "verbs.h"

namespace fl::FL_ISA {

// Those that encode are in a file of their own, so that two compilers may work at once.
Kernels::Verb run_encode, run_recode, run_encode_sections, run_recode_from, run_encode_difference;

template <int kBits, class Body>
FL_INLINE void with_rotation(const Job &job, const Body &body) {
  job.spec->param[2] & FL_INT_HADAMARD ? body(IntCodec<kBits, true>(job)) : body(IntCodec<kBits, false>(job));
}

template <class Body>
FL_INLINE void with_int_codec(const Job &job, const Body &body) {
  const uint32_t bits = job.spec->param[0];
  if (bits == 2) return with_rotation<2>(job, body);
  if (bits == 3) return with_rotation<3>(job, body);
  if (bits == 4) return with_rotation<4>(job, body);
  with_rotation<8>(job, body);
}

template <class Body>
FL_INLINE void with_numbers(const Job &job, const Body &body) {
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

// thc has all verbs but recode: sums of its messages are encoded anew, or are sums of codes.
template <bool kThc, class Body>
FL_INLINE void with_codec(const Job &job, const Body &body) {
  const uint32_t *param = job.spec->param;
  if (job.spec->codec == FL_CAST)
    return with_dtype(param[0], [&](auto wire) { body(CastCodec<typename decltype(wire)::type>(job)); });
  if (job.spec->codec == FL_BLOCK) return with_numbers(job, body);
  if (job.spec->codec == FL_DYNAMIQ) return body(DynamiqCodec(job));
  if (job.spec->codec == FL_CHUNKED) return body(ChunkedCodec(job));
  if (job.spec->codec == FL_TAHQUANT) return body(TahCodec(job));
  if (job.spec->codec == FL_ONEBIT) return body(OneBitCodec(job));
  if (job.spec->codec == FL_QSDP) return job.spec->param[0] == 8 ? body(QsdpCodec<8>(job)) : body(QsdpCodec<4>(job));
  if constexpr (kThc)
    if (job.spec->codec == FL_THC) return body(ThcCodec(job));
  with_int_codec(job, body);
}

#define FL_VERB(verb, thc)                                                          \
  void run_##verb(const Job &job, int64_t begin, int64_t end) {                     \
    with_codec<thc>(job, [&](const auto &codec) { verb(codec, job, begin, end); }); \
    if (job.streamed) finish_streaming();                                           \
  }

}  // namespace fl::FL_ISA
