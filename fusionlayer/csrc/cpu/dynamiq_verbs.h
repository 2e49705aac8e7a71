// FL_DYNAMIQ for the CPU: what a call needs before its super-groups are shared out.
#pragma once

#include "kernels.h"

namespace fl {

// Looks through the widths of all messages, clears the room behind the codes of those that are written, and sets the job's
// levels and keys. A status.
int prepare_dynamiq(Job &job);

// A status.
int write_widths(const uint8_t *bits, int64_t groups, WidthRun *runs);

}  // namespace fl
