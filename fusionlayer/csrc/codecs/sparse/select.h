// The k-th largest magnitude, and the k-th least number that elements draw.
#pragma once

#include "fusionlayer_codec.h"
#include "rng.h"

namespace fl {

// Bytes of workspace that kth_magnitude may use.
int64_t kth_workspace(int64_t numel);

fl_kth kth_magnitude(const float *x, int64_t n, int64_t k, void *workspace);

// The k-th least half (half_drawn) of n elements, the first of which has the number `offset`.
uint32_t kth_drawn(RngKey key, uint64_t offset, int64_t n, int64_t k, void *workspace);

}  // namespace fl
