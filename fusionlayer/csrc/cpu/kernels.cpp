// The table of kernels of one instruction set. Compiled once for each, with FL_ISA set to its name (see setup.py).
#include "kernels.h"

#include "block_codec.h"
#include "cast_codec.h"
#include "dynamiq_codec.h"
#include "int_sums.h"
#include "magnitudes.h"
#include "sparse_decode.h"
#include "sparse_encode.h"
#include "tahquant_codec.h"
#include "thc_codec.h"
#include "verbs.h"
#include "zip_decode.h"

namespace fl::FL_ISA {
namespace {

template <class T>
struct Type {
  using type = T;
};

template <class Body>
FL_INLINE void with_dtype(uint32_t dtype, const Body &body) {
  if (dtype == FL_BF16) return body(Type<Bf16>{});
  if (dtype == FL_F16) return body(Type<F16>{});
  body(Type<float>{});
}

// Decoding does not depend on the rounding, so it is compiled once for both.
template <bool kEncodes, int kBits, bool kHadamard, class Body>
FL_INLINE void with_rounding(const Job &job, const Body &body) {
  if constexpr (kEncodes)
    if (job.spec->param[2] & FL_INT_STOCHASTIC) return body(IntCodec<kBits, kHadamard, true>(job));
  body(IntCodec<kBits, kHadamard, false>(job));
}

template <bool kEncodes, class Body>
FL_INLINE void with_int_codec(const Job &job, const Body &body) {
  const bool hadamard = job.spec->param[2] & FL_INT_HADAMARD;
  if (job.spec->param[0] == 8)
    hadamard ? with_rounding<kEncodes, 8, true>(job, body) : with_rounding<kEncodes, 8, false>(job, body);
  else
    hadamard ? with_rounding<kEncodes, 4, true>(job, body) : with_rounding<kEncodes, 4, false>(job, body);
}

template <class Body>
FL_INLINE void with_numbers(const Job &job, const Body &body) {
  const bool hadamard = job.spec->param[3] & FL_BLOCK_HADAMARD;
  if (job.spec->param[0] == FL_INT8)
    return hadamard ? body(BlockCodec<Int8, true>(job)) : body(BlockCodec<Int8, false>(job));
  const int bits = format_bits(job.spec->param[0]);
  if (bits == 8) return hadamard ? body(BlockCodec<Float8, true>(job)) : body(BlockCodec<Float8, false>(job));
  bits == 6 ? body(BlockCodec<Float6, false>(job)) : body(BlockCodec<Float4, false>(job));
}

// thc has all verbs but recode: the root mean square of a sum is not known before the sum is.
template <bool kEncodes, bool kThc, class Body>
FL_INLINE void with_codec(const Job &job, const Body &body) {
  const uint32_t *param = job.spec->param;
  if (job.spec->codec == FL_CAST)
    return with_dtype(param[0], [&](auto wire) { body(CastCodec<typename decltype(wire)::type>(job)); });
  if (job.spec->codec == FL_BLOCK) return with_numbers(job, body);
  if (job.spec->codec == FL_DYNAMIQ) return body(DynamiqCodec(job));
  if (job.spec->codec == FL_TAHQUANT) return body(TahCodec(job));
  if constexpr (kThc)
    if (job.spec->codec == FL_THC) return body(ThcCodec(job));
  with_int_codec<kEncodes>(job, body);
}

#define FL_VERB(verb, encodes, thc)                                                                                 \
  void run_##verb(const Job &job, int64_t begin, int64_t end) {                                                     \
    with_codec<encodes, thc>(job, [&](const auto &codec) {                                                          \
      with_dtype(job.spec->dtype, [&](auto type) { verb<typename decltype(type)::type>(codec, job, begin, end); }); \
    });                                                                                                             \
    if (job.streamed) finish_streaming();                                                                           \
  }
FL_VERB(encode, true, true)
FL_VERB(decode, false, true)
FL_VERB(decode_sum, false, true)
FL_VERB(recode, true, false)
#undef FL_VERB

void run_recode_from(const Job &job, int64_t begin, int64_t end) {
  with_int_codec<true>(job, [&](const auto &codec) {
    recode_from(codec, int(job.source->param[1]), sum_of(*job.source), job, begin, end);
  });
}

void run_encode_difference(const Job &job, int64_t begin, int64_t end) {
  with_int_codec<true>(job, [&](const auto &codec) {
    with_dtype(job.spec->dtype,
               [&](auto type) { encode_difference<typename decltype(type)::type>(codec, job, begin, end); });
  });
}

void run_accumulate(const Accumulation &job, int64_t begin, int64_t end) {
  with_dtype(job.dtype, [&](auto type) { accumulate<typename decltype(type)::type>(job, begin, end); });
}

void run_mark(const Selection &selection, int64_t superblock) {
  const auto with_rule = [&](auto type) {
    using X = typename decltype(type)::type;
    selection.random ? mark<X>(selection, ByNumber(selection), superblock)
                     : mark<X>(selection, ByMagnitude(selection), superblock);
  };
  selection.x ? with_dtype(selection.dtype, with_rule) : with_rule(Type<Nothing>{});
}

void run_sparse_decode_sum(const Job &job, int64_t begin, int64_t end) {
  with_dtype(job.spec->dtype, [&](auto type) { sparse_decode_sum<typename decltype(type)::type>(job, begin, end); });
  if (job.streamed) finish_streaming();
}

void run_zip_choose(const ZipEncoding &job, int64_t region) {
  with_dtype(job.shape.dtype, [&](auto type) { choose_exponents<typename decltype(type)::type>(job, region); });
}

template <bool kWrite>
int64_t encode_any(const ZipEncoding &job, int64_t region, int64_t first, int64_t room) {
  int64_t count = 0;
  with_dtype(job.shape.dtype, [&](auto type) {
    count = encode_region<typename decltype(type)::type, kWrite>(job, region, first, room);
  });
  return count;
}

int64_t run_zip_count(const ZipEncoding &job, int64_t region) { return encode_any<false>(job, region, 0, kZipRegion); }

int64_t run_zip_encode(const ZipEncoding &job, int64_t region, int64_t first, int64_t room) {
  return encode_any<true>(job, region, first, room);
}

// Calls body with the type of a message's elements, then that of out.
template <class Body>
FL_INLINE void with_both(const Job &job, const Body &body) {
  with_dtype(job.spec->param[0], [&](auto wire) { with_dtype(job.spec->dtype, [&](auto type) { body(wire, type); }); });
}

bool run_zip_decode(const Job &job, int64_t begin, int64_t end) {
  bool coherent = false;
  with_both(job, [&](auto wire, auto type) {
    coherent = zip_decode<typename decltype(wire)::type, typename decltype(type)::type>(job, begin, end);
  });
  return coherent;
}

bool run_zip_decode_sum(const Job &job, int64_t begin, int64_t end) {
  bool coherent = false;
  with_both(job, [&](auto wire, auto type) {
    coherent = zip_decode_sum<typename decltype(wire)::type, typename decltype(type)::type>(job, begin, end);
  });
  return coherent;
}

void run_token_keys(const Job &job, int64_t begin, int64_t end) {
  with_dtype(job.spec->dtype, [&](auto type) { token_keys<typename decltype(type)::type>(job, begin, end); });
}

void run_dynamiq_stats(const SuperGroupStats &job, int64_t begin, int64_t end) {
  with_dtype(job.dtype, [&](auto type) { dynamiq_stats<typename decltype(type)::type>(job, begin, end); });
}

}  // namespace

#define FL_TEXT(name) #name
#define FL_NAME(name) FL_TEXT(name)

const Kernels kernels = {
    FL_NAME(FL_ISA),
    run_encode,
    run_decode,
    run_decode_sum,
    run_recode,
    run_accumulate,
    stats,
    count_above,
    gather,
    run_mark,
    settle,
    emit,
    run_sparse_decode_sum,
    sparse_valid,
    run_zip_choose,
    run_zip_count,
    run_zip_encode,
    run_zip_decode,
    run_zip_decode_sum,
    add_codes,
    run_token_keys,
    run_dynamiq_stats,
    run_recode_from,
    run_encode_difference,
};

}  // namespace fl::FL_ISA
