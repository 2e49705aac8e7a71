// The table of kernels of one instruction set. Compiled once for each, with FL_ISA set to its name (see setup.py).
#include "kernels.h"

#include "delta_kernels.h"
#include "magnitudes.h"
#include "sparse_decode.h"
#include "sparse_encode.h"
#include "with_codec.h"
#include "zip_decode.h"

namespace fl::FL_ISA {
namespace {

FL_VERB(decode, true)
FL_VERB(decode_sum, true)

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

void run_thc_rms(const Job &job, int64_t begin, int64_t end) {
  with_dtype(job.spec->dtype, [&](auto type) { thc_rms<typename decltype(type)::type>(job, begin, end); });
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
    run_encode_sections,
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
    run_thc_rms,
    run_dynamiq_stats,
    run_recode_from,
    run_encode_difference,
    run_delta_encode,
    run_delta_decode,
};

}  // namespace fl::FL_ISA
