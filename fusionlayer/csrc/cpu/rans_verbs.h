// Messages of FL_RANS in the verbs that all codecs share, on checked arguments.
#pragma once

#include "fusionlayer_codec.h"

namespace fl {

int rans_encode(const fl_spec &spec, const void *x, const fl_messages &out);
int rans_decode(const fl_spec &spec, const fl_messages &in, void *out);
int rans_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add);

}  // namespace fl
