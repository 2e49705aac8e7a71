// The k-th largest magnitude.
#pragma once

#include "fusionlayer_codec.h"

namespace fl {

// Bytes of workspace that kth_magnitude may use.
int64_t kth_workspace(int64_t numel);

fl_kth kth_magnitude(const float *x, int64_t n, int64_t k, void *workspace);

}  // namespace fl
