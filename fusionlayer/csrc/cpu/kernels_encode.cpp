// The kernels of one instruction set that make messages of any codec. Compiled once for each, like kernels.cpp.
#include "tahquant_sections.h"
#include "with_codec.h"

namespace fl::FL_ISA {

FL_VERB(encode, true)
FL_VERB(recode, false)

void run_encode_sections(const Job &job, int64_t begin, int64_t end) { encode_sections(job, begin, end); }

void run_recode_from(const Job &job, int64_t begin, int64_t end) {
  with_int_codec(job, [&](const auto &codec) {
    recode_from(codec, int(job.source->param[1]), sum_of(*job.source), job, begin, end);
  });
}

void run_encode_difference(const Job &job, int64_t begin, int64_t end) {
  with_int_codec(job, [&](const auto &codec) { encode_difference(codec, job, begin, end); });
}

}  // namespace fl::FL_ISA
