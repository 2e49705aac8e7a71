// The shared verb of FL_SPARSE for the CPU: one body for all instruction sets.
#pragma once

#include "cpu/kernels.h"

namespace fl {

int sparse_decode_sum(Job &job);

}  // namespace fl
