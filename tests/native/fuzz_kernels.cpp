// A table of kernels with the codecs FL_DELTA, FL_RANS and FL_ZIP alone: what fuzz.cpp needs, and no more, since sanitizers
// make the whole table slow to compile. Compiled once for each instruction set, with FL_ISA set to its name.
#include "codec_list.h"

namespace fl::FL_ISA {
namespace {

const CodecVerbs *codecs[FL_QSDP + 1];

Kernels few_codecs(const char *name) {
  codecs[FL_DELTA] = &delta_verbs;
  codecs[FL_RANS] = &rans_verbs;
  codecs[FL_ZIP] = &zip_verbs;
  Kernels table{};
  table.name = name;
  table.codecs = codecs;
  return table;
}

}  // namespace

#define FL_TEXT(name) #name
#define FL_NAME(name) FL_TEXT(name)

const Kernels kernels = few_codecs(FL_NAME(FL_ISA));

}  // namespace fl::FL_ISA
