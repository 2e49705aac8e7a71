// FL_RANS for one instruction set of the CPU: all have the same verbs.
#include "cpu/codec_list.h"
#include "rans_verbs.h"

namespace fl::FL_ISA {

const CodecVerbs rans_verbs = {rans_encode, rans_decode, rans_decode_sum, nullptr, {}};

}  // namespace fl::FL_ISA
