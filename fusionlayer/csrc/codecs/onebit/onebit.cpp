// FL_ONEBIT for one instruction set of the CPU. Compiled once for each.
#include "cpu/tiled.h"
#include "onebit_codec.h"

namespace fl::FL_ISA {

const CodecVerbs onebit_verbs = Tiled<Plain<OneBitCodec, group_of>>::verbs;

}  // namespace fl::FL_ISA
