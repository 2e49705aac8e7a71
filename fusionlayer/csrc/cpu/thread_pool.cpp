#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "float_environment.h"

namespace fl {
namespace {

// One parallel_for: threads take chunks until none is left.
struct Loop {
  const RangeTask &task;
  const int64_t count, chunk;
  std::atomic<int64_t> next{0};

  void run() {
    for (int64_t begin; (begin = next.fetch_add(chunk, std::memory_order_relaxed)) < count;)
      task(begin, std::min(count, begin + chunk));
  }
};

class Pool {
 public:
  // Returns false, and has done nothing, if another thread's loop has the pool. It does not wait for that loop: the caller
  // does the work by itself.
  bool run(int threads, Loop &loop) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) return false;
    {
      const std::lock_guard<std::mutex> lock(state_);
      grow(threads - 1);
      loop_ = &loop;
      seats_ = threads - 1;
    }
    work_.notify_all();
    loop.run();
    std::unique_lock<std::mutex> lock(state_);
    loop_ = nullptr;  // a worker that wakes from now on finds no loop; only the busy ones are waited for
    // The loop is on the caller's stack: it must outlive every worker's use of it.
    idle_.wait(lock, [this] { return busy_ == 0; });
    return true;
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(state_);
      stopped_ = true;
    }
    work_.notify_all();
    for (std::thread &worker : workers_) worker.join();
    workers_.clear();
  }

 private:
  void grow(int workers) {
    try {
      while (!stopped_ && int(workers_.size()) < workers) workers_.emplace_back([this] { serve(); });
    } catch (const std::system_error &) {  // the system has no more threads: the existing ones do the work
    } catch (const std::bad_alloc &) {
    }
  }

  void serve() {
    const FloatEnvironment ieee;
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      work_.wait(lock, [&] { return stopped_ || (loop_ && seats_ > 0); });
      if (stopped_) return;
      Loop &loop = *loop_;
      --seats_;
      ++busy_;
      lock.unlock();
      loop.run();
      lock.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  std::mutex turn_;   // held by the caller whose loop runs, until it is done
  std::mutex state_;  // guards what follows
  std::condition_variable work_, idle_;
  std::vector<std::thread> workers_;
  Loop *loop_ = nullptr;
  int seats_ = 0, busy_ = 0;
  bool stopped_ = false;
};

std::atomic<int> allowed_threads{1};
alignas(Pool) unsigned char storage[sizeof(Pool)];

Pool &pool() { return *std::launder(reinterpret_cast<Pool *>(storage)); }

// The pool is never destroyed: threads may still call it while static objects are being destroyed. A forked child has none
// of the threads, and its copies of the locks may be held for ever, so it gets a fresh pool.
void make_pool() { new (storage) Pool; }

__attribute__((constructor)) void start() {
  make_pool();
  pthread_atfork(nullptr, nullptr, make_pool);
}

__attribute__((destructor)) void finish() { pool().stop(); }

}  // namespace

void set_thread_count(int n) { allowed_threads = n; }

int thread_count() { return allowed_threads; }

void parallel_for(int64_t count, int64_t grain, const RangeTask &task) {
  constexpr int64_t kChunksPerThread = 4;  // threads differ in speed: fast ones take more chunks
  const int64_t threads = std::min<int64_t>(allowed_threads, count / grain);
  if (threads > 1) {
    Loop loop{task, count, std::max(grain, (count + threads * kChunksPerThread - 1) / (threads * kChunksPerThread))};
    if (pool().run(int(threads), loop)) return;
  }
  task(0, count);
}

}  // namespace fl
