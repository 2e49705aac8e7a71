// Splits the work of a verb over threads.
#pragma once

#include "arguments.h"
#include "kernels.h"

namespace fl {

constexpr int64_t kInlineElements = 64 * 1024;  // 256 KiB of f32: below, waking threads costs more than it gains
constexpr int64_t kGrainElements = 16 * 1024;

// Runs a kernel over units of `unit` elements of `messages` messages. Each value takes `inputs` values to make, and all
// results have `result_bytes`.
int run(Job &job, Kernels::Verb *kernel, int64_t unit, int64_t messages, int64_t inputs, int64_t result_bytes);

// Runs a kernel over `units` units of `work` elements each.
int run_units(Job &job, Kernels::Verb *kernel, int64_t units, int64_t work);

// Copies `count` messages, or what they are made from, of so many bytes.
int copy_messages(uint8_t *to, int64_t to_stride, const uint8_t *from, int64_t from_stride, int64_t bytes,
                  int64_t count);

// Runs a verb that one codec alone has.
int run_own(uint32_t codec, int number, Job &job);

}  // namespace fl
