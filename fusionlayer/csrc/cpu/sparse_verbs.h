// Sparse messages in the verbs that all codecs share.
#pragma once

#include "fusionlayer_codec.h"

namespace fl {

// fl_decode_sum of FL_SPARSE, on checked arguments.
int sparse_decode_sum(const fl_spec &spec, const fl_messages &in, void *out, bool add);

}  // namespace fl
