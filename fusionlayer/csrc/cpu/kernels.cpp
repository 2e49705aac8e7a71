// The table of kernels of one instruction set. Compiled once for each, with FL_ISA set to its name (see setup.py).
#include "kernels.h"

#include "codec_list.h"
#include "codecs/sparse/sparse_decode.h"
#include "codecs/sparse/sparse_encode.h"
#include "magnitudes.h"

namespace fl::FL_ISA {
namespace {

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

#define FL_ENTRY(name) &name##_verbs,
constexpr const CodecVerbs *codecs[] = {FL_CODECS(FL_ENTRY)};
#undef FL_ENTRY

}  // namespace

#define FL_TEXT(name) #name
#define FL_NAME(name) FL_TEXT(name)

const Kernels kernels = {
    FL_NAME(FL_ISA), codecs, run_accumulate,        stats,        count_above, gather, run_mark,
    settle,          emit,   run_sparse_decode_sum, sparse_valid,
};

}  // namespace fl::FL_ISA
