// The verbs of FL_RANS for the CPU: one body for all instruction sets.
#pragma once

#include "cpu/kernels.h"

namespace fl {

int rans_encode(Job &job);
int rans_decode(Job &job);
int rans_decode_sum(Job &job);

}  // namespace fl
