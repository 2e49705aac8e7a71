// The names of all codecs, in the order of enum fl_codec, and what shared code asks of each. Host only.
#pragma once

#include "codec_entry.h"

#define FL_CODECS(X) \
  X(cast) X(int) X(sparse) X(block) X(zip) X(thc) X(tahquant) X(dynamiq) X(rans) X(chunked) X(delta) X(onebit) X(qsdp)

namespace fl {

constexpr uint32_t kCodecCount = FL_QSDP + 1;
extern const Codec kCodecs[kCodecCount];  // table.h

}  // namespace fl
