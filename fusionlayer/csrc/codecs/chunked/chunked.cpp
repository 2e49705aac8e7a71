// FL_CHUNKED for one instruction set of the CPU. Compiled once for each.
#include "chunked_codec.h"
#include "cpu/tiled.h"

namespace fl::FL_ISA {

const CodecVerbs chunked_verbs = Tiled<Plain<ChunkedCodec, group_of>>::verbs;

}  // namespace fl::FL_ISA
