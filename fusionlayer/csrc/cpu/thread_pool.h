// Splits a range over a few persistent threads.
#pragma once

#include <cstdint>

namespace fl {

// A function of a range, with what it was made from.
class RangeTask {
 public:
  template <class F>
  explicit RangeTask(const F &f)
      : self_(&f),
        call_([](const void *self, int64_t begin, int64_t end) { (*static_cast<const F *>(self))(begin, end); }) {}
  void operator()(int64_t begin, int64_t end) const { call_(self_, begin, end); }

 private:
  const void *self_;
  void (*call_)(const void *, int64_t, int64_t);
};

// How many threads parallel_for may use, the caller included; 1 at first.
void set_thread_count(int n);
int thread_count();

// Calls task(begin, end) for disjoint ranges that make up 0..count - 1, each of at least `grain` but for the last; returns
// when all are done. The caller takes part. If another thread's call has the pool, or no thread can be started, the
// caller does everything. Works in a forked child.
void parallel_for(int64_t count, int64_t grain, const RangeTask &task);

}  // namespace fl
