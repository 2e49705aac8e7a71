// FL_SPARSE for one instruction set of the CPU: its shared verb. Compiled once for each.
#include "cpu/codec_list.h"
#include "sparse_verbs.h"

namespace fl::FL_ISA {

const CodecVerbs sparse_verbs = {nullptr, nullptr, sparse_decode_sum, nullptr, {}};

}  // namespace fl::FL_ISA
