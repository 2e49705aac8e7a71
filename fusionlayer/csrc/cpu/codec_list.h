// The verbs that each codec's folder defines for one instruction set.
#pragma once

#include "codecs/names.h"
#include "kernels.h"

namespace fl::FL_ISA {

#define FL_DECLARE(name) extern const CodecVerbs name##_verbs;
FL_CODECS(FL_DECLARE)
#undef FL_DECLARE

}  // namespace fl::FL_ISA
