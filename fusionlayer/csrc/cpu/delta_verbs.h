// The verbs of FL_DELTA, on checked arguments.
#pragma once

#include "fusionlayer_codec.h"

namespace fl {

constexpr int kDeltaSlack = 128;  // bytes behind a block that its decoder may read

int delta_encode(const fl_spec &spec, const void *x, const void *base, const fl_messages &out);
int delta_decode(const fl_spec &spec, const fl_messages &in, const void *base, void *out);

}  // namespace fl
