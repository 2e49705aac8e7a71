// The table of all codecs: an include for each of names.h. Each library's entry alone includes it, so that a change of one
// codec does not recompile the others. Host only.
#pragma once

#include "codecs/block/codec.h"
#include "codecs/cast/codec.h"
#include "codecs/chunked/codec.h"
#include "codecs/delta/codec.h"
#include "codecs/dynamiq/codec.h"
#include "codecs/int/codec.h"
#include "codecs/onebit/codec.h"
#include "codecs/qsdp/codec.h"
#include "codecs/rans/codec.h"
#include "codecs/sparse/codec.h"
#include "codecs/tahquant/codec.h"
#include "codecs/thc/codec.h"
#include "codecs/zip/codec.h"
#include "names.h"

namespace fl {

#define FL_ENTRY(name) name##_codec,
const Codec kCodecs[] = {FL_CODECS(FL_ENTRY)};
#undef FL_ENTRY

static_assert(sizeof kCodecs / sizeof *kCodecs == kCodecCount, "a name for each number of enum fl_codec");

}  // namespace fl
