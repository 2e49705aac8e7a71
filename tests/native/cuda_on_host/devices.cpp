// Several devices that reach each other's memory, for csrc/cuda/peers.cuh: their launches run together, warp by warp, in an
// order drawn at random. What a device writes to another's memory arrives there as late and as mixed up as CUDA's memory
// model allows, a byte at a time:
//
//   - A device writes to an alias of the other's memory. Nothing of it is there until something brings it.
//   - A flag brings what its warp had written when it last met (__syncwarp), and with it what that warp had seen.
//   - Who sees a flag has what it brought once its warp has met. Until then it reads what was there before.
//   - Any byte may arrive earlier; all have when the launch has ended.
//
// One thing is stricter than on a device: a flag does not bring what its own lane has written since its warp met.
#include <cuda_runtime.h>
#include <sched.h>

#include <deque>
#include <map>
#include <random>
#include <vector>

namespace cuda_on_host {
namespace {

struct Launch {
  dim3 blocks;
  unsigned threads;
  std::function<void()> body;
};

// A byte on its way.
struct Byte {
  uint8_t *to;
  uint8_t value;
};

// A warp of a launch that runs together with others.
struct Actor {
  int device = 0;
  dim3 block, grid;
  unsigned first_thread = 0;
  std::function<void()> body;
  Warp warp;
  bool is_new = true, has_looked = false;
  std::vector<std::vector<Byte>> written, met;  // for each device: since the warp met; before that, and not yet brought
};

class Devices {
 public:
  Devices(int count, uint8_t *const *memory, int64_t bytes, uint32_t seed)
      : count_(count),
        bytes_(bytes),
        random_(seed),
        memory_(memory, memory + count),
        launches_(count),
        arrived_(count) {
    for (int from = 0; from < count; ++from)
      for (int to = 0; to < count; ++to) {
        alias_.emplace_back(new Alias);
        alias_.back()->now.resize(size_t(bytes) + kAlign);
        alias_.back()->before.resize(size_t(bytes));
      }
  }

  uint8_t *alias(int from, int to) { return from == to ? memory_[to] : alias_[size_t(from * count_ + to)]->begin(); }

  void add(int device, Launch launch) { launches_[size_t(device)].push_back(std::move(launch)); }

  // Runs all launches, those of a device one after the other, `resident` blocks of each at a time. False: they wait for
  // each other for ever. After `patience` turns, if it is not 0, it sets *stop.
  bool run(int resident, int64_t patience, uint32_t *stop) {
    std::vector<Running> running(static_cast<size_t>(count_));
    int64_t turns = 0, idle = 0;
    while (true) {
      std::vector<Actor *> able;
      for (int device = 0; device < count_; ++device) {
        refill(running[size_t(device)], device, resident);
        for (const auto &actor : running[size_t(device)].actors) able.push_back(actor.get());
      }
      if (able.empty()) return true;
      moved_ = false;
      take_turn(*able[random_() % able.size()]);
      for (auto &each : running) retire(each);
      if (random_() % 4 == 0) deliver_some();
      if (patience && ++turns == patience) *stop = 1;
      idle = moved_ ? 0 : idle + 1;
      if (idle > kIdle && !(patience && turns <= patience + kIdle)) return false;
    }
  }

  // For the kernels ----------------------------------------------------------------------------------------------------

  void raise(uint32_t *flag, uint32_t value) {
    Actor &actor = *now_;
    collect(actor);
    for (int to = 0; to < count_; ++to) {
      uint8_t *base = alias(actor.device, to);
      const int64_t at = reinterpret_cast<uint8_t *>(flag) - base;
      if (to == actor.device || at < 0 || at >= bytes_) continue;
      auto &bytes = actor.met[size_t(to)];
      auto &there = arrived_[size_t(to)];
      there.insert(there.end(), bytes.begin(), bytes.end());
      bytes.clear();
      // The model knows of the flag, so no byte of it is on its way.
      std::memcpy(memory_[size_t(to)] + at, &value, sizeof value);
      moved_ = true;
      if (random_() % 2) actor.warp.pause();
      return;
    }
    std::fputs("a flag that is in no other device's memory\n", stderr);
    std::abort();
  }

  uint32_t glance(const uint32_t *flag) {
    Actor &actor = *now_;
    collect(actor);
    actor.warp.pause();
    return *flag;
  }

  uint32_t look(const uint32_t *flag) {
    const uint32_t value = glance(flag);
    now_->has_looked = true;
    return value;
  }

  void met(int lane) {
    if (!now_ || lane != kLanes - 1) return;
    Actor &actor = *now_;
    collect(actor);
    for (int to = 0; to < count_; ++to) {
      auto &bytes = actor.written[size_t(to)];
      actor.met[size_t(to)].insert(actor.met[size_t(to)].end(), bytes.begin(), bytes.end());
      bytes.clear();
    }
    if (actor.has_looked) deliver(arrived_[size_t(actor.device)]);
    actor.has_looked = false;
  }

 private:
  static constexpr int kAlign = 256;
  static constexpr int64_t kIdle = 4000;

  struct Alias {
    std::vector<uint8_t> now, before;
    uint8_t *begin() { return now.data() + (kAlign - reinterpret_cast<uintptr_t>(now.data()) % kAlign) % kAlign; }
  };

  struct Running {
    unsigned next = 0;  // block of the launch in front
    bool open = false;
    std::vector<std::unique_ptr<Actor>> actors;
  };

  void refill(Running &running, int device, int resident) {
    auto &queue = launches_[size_t(device)];
    if (!running.open && !queue.empty()) {
      running.open = true, running.next = 0;
      for (int to = 0; to < count_; ++to) {
        Alias &alias = *alias_[size_t(device * count_ + to)];
        std::memcpy(alias.begin(), memory_[size_t(to)], size_t(bytes_));
        std::memcpy(alias.before.data(), memory_[size_t(to)], size_t(bytes_));
      }
    }
    if (!running.open) return;
    const Launch &launch = queue.front();
    const unsigned warps = launch.threads / kLanes;
    while (running.next < launch.blocks.x && running.actors.size() + warps <= size_t(resident) * warps) {
      for (unsigned warp = 0; warp < warps; ++warp) {
        auto actor = std::make_unique<Actor>();
        actor->device = device;
        actor->block.x = running.next, actor->block.y = 0;
        actor->grid = launch.blocks;
        actor->first_thread = warp * kLanes;
        actor->body = launch.body;
        actor->written.resize(size_t(count_)), actor->met.resize(size_t(count_));
        running.actors.push_back(std::move(actor));
      }
      ++running.next;
    }
    if (running.actors.empty()) {  // the launch has ended, so all is there
      deliver_from(device);
      queue.pop_front();
      running.open = false;
      moved_ = true;
      refill(running, device, resident);
    }
  }

  void retire(Running &running) {
    auto &actors = running.actors;
    for (size_t i = 0; i < actors.size();) {
      if (!actors[i]->is_new && actors[i]->warp.is_done()) {
        leave(*actors[i]);
        actors.erase(actors.begin() + long(i));
        moved_ = true;
      } else {
        ++i;
      }
    }
  }

  void take_turn(Actor &actor) {
    block = actor.block, grid = actor.grid;
    now_ = &actor;
    if (actor.is_new) {
      actor.is_new = false;
      actor.warp.run(actor.first_thread, actor.body);
    } else {
      actor.warp.go_on();
    }
    collect(actor);
    now_ = nullptr;
  }

  // Finds what the warp has written since the last look, for only it has run: words that have changed. Words, since a byte
  // often has the value that was there before.
  void collect(Actor &actor) {
    for (int to = 0; to < count_; ++to) {
      if (to == actor.device) continue;
      Alias &alias = *alias_[size_t(actor.device * count_ + to)];
      uint8_t *now = alias.begin(), *before = alias.before.data();
      for (int64_t at = 0; at < bytes_; at += kAlign) {
        const int64_t end = at + kAlign < bytes_ ? at + kAlign : bytes_;
        if (!std::memcmp(now + at, before + at, size_t(end - at))) continue;
        for (int64_t i = at; i < end; i += 4) {
          if (!std::memcmp(now + i, before + i, 4)) continue;
          for (int64_t j = i; j < i + 4; ++j)
            actor.written[size_t(to)].push_back({memory_[size_t(to)] + j, before[j] = now[j]});
        }
      }
    }
  }

  void leave(Actor &actor) {
    for (int to = 0; to < count_; ++to) {
      auto &late = left_[std::make_pair(actor.device, to)];
      for (auto *bytes : {&actor.met[size_t(to)], &actor.written[size_t(to)]})
        late.insert(late.end(), bytes->begin(), bytes->end());
    }
  }

  void deliver_from(int device) {
    for (int to = 0; to < count_; ++to) deliver(left_[std::make_pair(device, to)]);
  }

  static void deliver(std::vector<Byte> &bytes) {
    for (const Byte &byte : bytes) *byte.to = byte.value;
    bytes.clear();
  }

  // Some bytes that flags have brought, early: each place keeps the order of what is written to it.
  void deliver_some() {
    auto &bytes = arrived_[random_() % arrived_.size()];
    const size_t first = bytes.empty() ? 0 : random_() % bytes.size();
    for (size_t i = 0; i < first; ++i) *bytes[i].to = bytes[i].value;
    bytes.erase(bytes.begin(), bytes.begin() + long(first));
  }

  int count_;
  int64_t bytes_;
  std::mt19937 random_;
  std::vector<uint8_t *> memory_;
  std::vector<std::unique_ptr<Alias>> alias_;
  std::vector<std::deque<Launch>> launches_;
  std::vector<std::vector<Byte>> arrived_;                 // at each device: brought by flags, and not yet seen
  std::map<std::pair<int, int>, std::vector<Byte>> left_;  // by warps that have ended, and not brought by a flag
  Actor *now_ = nullptr;
  bool moved_ = false;
};

std::unique_ptr<Devices> devices;
int launching = -1;  // the device whose launches wait for the run

// Runs the warps of a block, all of them from one barrier to the next.
void run_block(unsigned threads, const std::function<void()> &body) {
  static std::map<unsigned, std::unique_ptr<Warp>> warps;  // by first thread
  unsigned done = 0;
  for (bool is_new = true; done < threads; is_new = false) {
    if (!is_new && done) {
      std::fputs("a warp left the others of its block alone at a barrier\n", stderr);
      std::abort();
    }
    for (unsigned first = 0; first < threads; first += kLanes) {
      auto &warp = warps[first];
      if (!warp) warp.reset(new Warp);
      is_new ? warp->run(first, body) : warp->go_on();
      if (warp->is_done()) done += kLanes;
    }
  }
}

}  // namespace

void launch(dim3 blocks, unsigned threads, const std::function<void()> &body) {
  if (blocks.x == 0 || blocks.y == 0 || blocks.y > 65535 || threads == 0 || threads % kLanes) {
    next_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (launching >= 0) return devices->add(launching, {blocks, threads, body});
  grid = blocks;
  for (block.y = 0; block.y < blocks.y; ++block.y)
    for (block.x = 0; block.x < blocks.x; ++block.x) run_block(threads, body);
}

void has_met(int lane) {
  if (devices) devices->met(lane);
}

}  // namespace cuda_on_host

// Without `devices` other ranks are other processes, or threads.
namespace fl {

void raise_flag(uint32_t *flag, uint32_t value) {
  if (cuda_on_host::devices) return cuda_on_host::devices->raise(flag, value);
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

uint32_t look_at_flag(const uint32_t *flag) {
  if (cuda_on_host::devices) return cuda_on_host::devices->look(flag);
  sched_yield();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

uint32_t glance_at_flag(const uint32_t *flag) {
  if (cuda_on_host::devices) return cuda_on_host::devices->glance(flag);
  sched_yield();
  return __atomic_load_n(flag, __ATOMIC_RELAXED);
}

bool is_stopped(const uint32_t *stop) { return __atomic_load_n(stop, __ATOMIC_RELAXED) != 0; }

}  // namespace fl

// What the tests call.
#pragma GCC visibility push(default)
extern "C" {

void devices_begin(int count, uint8_t *const *memory, int64_t bytes, uint32_t seed) {
  cuda_on_host::devices.reset(new cuda_on_host::Devices(count, memory, bytes, seed));
}

void *devices_alias(int from, int to) { return cuda_on_host::devices->alias(from, to); }

void devices_launch_on(int device) { cuda_on_host::launching = device; }

int devices_run(int resident, int64_t patience, uint32_t *stop) {
  return cuda_on_host::devices->run(resident, patience, stop);
}

void devices_end() { cuda_on_host::devices.reset(); }

// Lets a test see what a failing CUDA call comes to.
void fail_next_cuda_call() { cuda_on_host::next_error = cudaErrorNoDevice; }
}
#pragma GCC visibility pop
