// All codecs, in the order of enum fl_codec: an include and a name for each. Host only.
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

#define FL_CODECS(X) \
  X(cast) X(int) X(sparse) X(block) X(zip) X(thc) X(tahquant) X(dynamiq) X(rans) X(chunked) X(delta) X(onebit) X(qsdp)

namespace fl {

#define FL_ENTRY(name) name##_codec,
constexpr Codec kCodecs[] = {FL_CODECS(FL_ENTRY)};
#undef FL_ENTRY

constexpr uint32_t kCodecCount = sizeof kCodecs / sizeof *kCodecs;
static_assert(kCodecCount == FL_QSDP + 1, "a line for each number of enum fl_codec");

}  // namespace fl
