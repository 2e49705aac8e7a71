#include "link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace fl::sockets {
namespace {

// While much is to come and little comes at a time, wait a little, so that not every packet costs a wake-up.
constexpr uint64_t kBulk = 256 << 10;
constexpr uint64_t kTrickle = 16 << 10;
constexpr int kTrickles = 4;  // so little in so many rounds, one after the other
constexpr long kNap = kMillisecond / 2;
constexpr int kEvents = 64;
// How much later than all else a chunk may come.
constexpr double kPatience = 1.25;
constexpr double kNever = 1e30;
// The key of the event that wakes a thread.
constexpr uint64_t kWake = UINT64_MAX;

}  // namespace

Link::Link(int rank, int size, int connections, const uint8_t *checked, uint64_t window)
    : rank_(rank),
      size_(size),
      count_(connections),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(size_t(size)),
      connections_(new Connection[size_t(size) * size_t(connections)]) {
  for (int peer = 0; peer < size; ++peer) {
    Peer &each = peers_[size_t(peer)];
    each.checked = checked[peer] != 0;
    each.connections = &connection(peer, 0);
    each.count = connections;
    each.incoming.open(window);
    each.outgoing.open(connections, window);
  }
  if (!is_open()) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
}

Link::~Link() {
  if (epoll_ >= 0) ::close(epoll_);
  if (wake_ >= 0) ::close(wake_);
}

void Link::add(int peer, int index, int fd, const uint8_t *keys, bool encrypted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_shut_ || status_ || peer < 0 || peer >= size_ || peer == rank_ || index < 0 || index >= count_) {
    ::close(fd);
    return;
  }
  Connection &added = connection(peer, index);
  if (added.is_open()) lose(peer, added);
  using Tunnel = Connection::Tunnel;  // higher ranks call
  added.open(fd, count_, keys, !encrypted ? Tunnel::none : rank_ > peer ? Tunnel::as_caller : Tunnel::as_host);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = uint64_t(peer) * uint64_t(count_) + uint64_t(index);
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);  // it can be written to at once, which wakes a thread that waits
}

int Link::exchange(const fl_link_message *outgoing, int sends, const fl_link_message *incoming, int receives,
                   int64_t deadline, fl_link_result *result) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_calling_) return FL_LINK_REFUSED;
  if (is_ending_) {
    result->peer = -1;
    return FL_LINK_CLOSED;
  }
  for (int i = 0; i < sends + receives; ++i) {
    const fl_link_message &each = i < sends ? outgoing[i] : incoming[i - sends];
    if (each.peer < 0 || each.peer >= size_ || each.peer == rank_ || each.nbytes <= 0) return FL_LINK_REFUSED;
  }
  is_calling_ = true;
  // All receives come before the first send: what arrives meanwhile goes straight to its place.
  for (int i = 0; i < receives; ++i)
    peers_[size_t(incoming[i].peer)].incoming.want(incoming[i].data, uint64_t(incoming[i].nbytes), incoming[i].key);
  for (int i = 0; i < sends; ++i)
    peers_[size_t(outgoing[i].peer)].outgoing.post(outgoing[i].data, uint64_t(outgoing[i].nbytes), outgoing[i].key);
  const int64_t start = now();
  next_look_ = std::max(next_look_, start + kLook / 4);
  for (int i = 0; i < size_ * count_; ++i) connections_[i].heard_at = start;
  return wait_locked(lock, deadline, result);
}

int Link::wait(int64_t deadline, fl_link_result *result) {
  std::unique_lock<std::mutex> lock(mutex_);
  return is_calling_ ? wait_locked(lock, deadline, result) : FL_LINK_REFUSED;
}

int Link::wait_locked(std::unique_lock<std::mutex> &lock, int64_t deadline, fl_link_result *result) {
  while (true) {
    if (!status_ && is_shut_) fail(FL_LINK_CLOSED, -1);
    if (!status_) progress();
    if (!status_ && !is_done()) {
      for (int peer = 0; peer < size_ && !status_; ++peer) judge(peer);
      const int64_t time = now();
      if (!status_ && time >= deadline) fail(FL_LINK_LATE, missing());
      if (!status_) {
        if (time >= next_look_) look(time);
        bool interrupted = false;
        is_waiting_ = true;
        await(lock, std::min(deadline, next_look_), &interrupted);
        is_waiting_ = false;
        if (interrupted && !is_shut_) return FL_LINK_INTERRUPTED;
        continue;
      }
    }
    end_call();
    if (is_shut_) shut();
    result->peer = culprit_;
    result->nbytes = culprit_ < 0 ? 0 : int64_t(peers_[size_t(culprit_)].damaged_bytes);
    return status_;
  }
}

// Waits for the network, without the lock, until a time or a signal.
void Link::await(std::unique_lock<std::mutex> &lock, int64_t until, bool *interrupted) {
  trickles_ = moved_ < kTrickle && is_bulk() ? trickles_ + 1 : 0;
  if (trickles_ >= kTrickles) {
    lock.unlock();
    const timespec nap{0, kNap};
    *interrupted = nanosleep(&nap, nullptr) != 0;
    lock.lock();
    if (*interrupted) return;
  }
  const int64_t left = until - now();
  poll(left <= 0 ? 0 : int((left + kMillisecond - 1) / kMillisecond), &lock, interrupted);
}

void Link::poll(int milliseconds, std::unique_lock<std::mutex> *lock, bool *interrupted) {
  epoll_event events[kEvents];
  if (lock) lock->unlock();
  const int count = epoll_wait(epoll_, events, kEvents, milliseconds);
  if (lock) lock->lock();
  *interrupted = count < 0 && errno == EINTR;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kWake) {
      uint64_t value;
      [[maybe_unused]] const ssize_t got = ::read(wake_, &value, sizeof value);
      continue;
    }
    Connection &each = connections_[events[i].data.u64];
    if (!each.is_open()) continue;
    if (events[i].events & ~uint32_t(EPOLLOUT)) each.readable = true;
    if (events[i].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) each.writable = true;
  }
}

// Reads and writes as far as the connections allow.
void Link::progress() {
  moved_ = 0;
  for (bool more = true; more && !status_;) {
    more = false;
    for (int peer = 0; peer < size_ && !status_; ++peer) {
      Peer &each = peers_[size_t(peer)];
      for (int index = 0; index < count_ && !status_; ++index) {
        Connection &from = connection(peer, index);
        if (!from.readable) continue;
        const uint64_t before = from.heard();
        const Step step = from.read(each);
        moved_ += from.heard() - before;
        if (step == Step::lost) lose(peer, from);
        if (step == Step::damaged) fail(FL_LINK_DAMAGED, peer);
        if (step == Step::nonsense) fail(FL_LINK_NONSENSE, peer);
        more = more || from.readable;
      }
      if (!status_) more = send(peer) || more;
    }
  }
}

// Gives chunks to connections that can take more; returns whether one could still do so.
bool Link::send(int peer) {
  Peer &each = peers_[size_t(peer)];
  for (int index = 0; index < count_; ++index) {
    Connection &to = connection(peer, index);
    if (to.is_writing() && to.writable) write(peer, to);
  }
  bool more = false;
  for (int turn = 0; turn < 2 * count_; ++turn) {
    Connection *to = free_connection(each);
    if (!to) break;
    Piece piece = each.outgoing.pull();
    if (!piece.message) break;
    moved_ += piece.message->nbytes(piece.index);
    to->begin(each, std::move(piece));
    write(peer, *to);
    more = true;
  }
  tell(peer, false);
  return more;
}

// The connection that can take a chunk and has least under way; a stalled one only if all are.
Connection *Link::free_connection(Peer &peer) {
  Connection *best = nullptr;
  bool best_is_stalled = false, any_works = false;
  uint64_t under_way = 0;
  for (int index = 0; index < count_; ++index) {
    Connection &each = peer.connections[index];
    if (!each.is_open()) continue;
    any_works = any_works || !each.stalled;
    under_way += each.stalled ? 0 : each.flight_bytes();
    if (!each.writable || each.is_writing()) continue;
    if (best && best_is_stalled <= each.stalled && best->flight_bytes() <= each.flight_bytes()) continue;
    if (best && best_is_stalled < each.stalled) continue;
    best = &each;
    best_is_stalled = each.stalled;
  }
  if (!best || (best_is_stalled && any_works)) return nullptr;
  const bool is_last_part = peer.outgoing.untaken() && peer.outgoing.untaken() <= under_way;
  return is_last_part && !best_is_stalled ? earliest(peer) : best;
}

// The connection that can take the next chunk and brings it first. None, if it is worth waiting for one that cannot take
// it yet: of the last chunks, a slow connection takes only those that it brings before all else is through.
Connection *Link::earliest(Peer &peer) {
  Connection *best = nullptr;
  const double chunk = double(peer.outgoing.next_nbytes());
  double rate = 0, left = double(peer.outgoing.untaken()), soonest = kNever, best_time = kNever;
  for (int index = 0; index < count_; ++index) {
    Connection &each = peer.connections[index];
    if (!each.is_open() || each.stalled) continue;
    const Pace pace = each.pace();
    const double time = pace.rate > 0 ? (pace.backlog + chunk) / pace.rate : 0;
    rate += pace.rate;
    left += pace.backlog;
    soonest = std::min(soonest, time);
    if (!each.writable || each.is_writing() || time >= best_time) continue;
    best = &each;
    best_time = time;
  }
  return best_time <= kPatience * std::max(soonest, rate > 0 ? left / rate : 0) ? best : nullptr;
}

void Link::write(int peer, Connection &to) {
  // What the peer has sent before it went is read first; that finds out too that the connection is lost.
  if (to.write(peers_[size_t(peer)]) != Step::lost) return;
  to.writable = false;
  to.readable = true;
}

// The connection is lost. What it had under way travels by the others.
void Link::lose(int peer, Connection &lost) {
  Peer &each = peers_[size_t(peer)];
  lost.abandon(each.outgoing);
  lost.drop();
  lost.close();
  each.told_delivered = 0;  // it may have been told by this connection
}

// From here on the link cannot be used any more, and no memory of the caller's is touched.
void Link::fail(int status, int peer) {
  status_ = status;
  culprit_ = peer;
  for (Peer &each : peers_) each.incoming.drop();
  if (status == FL_LINK_DAMAGED) return;  // the peers go on until they hear why
  for (int i = 0; i < size_ * count_; ++i)
    if (connections_[i].is_open()) shutdown(connections_[i].fd(), SHUT_RDWR);
}

// Fails the link if a peer that the call needs is gone or has left.
void Link::judge(int peer) {
  const Peer &each = peers_[size_t(peer)];
  if (!each.incoming.unmet() && each.outgoing.is_written()) return;
  if (!each.is_reachable() || each.has_left) fail(FL_LINK_LOST, peer);
}

bool Link::is_done() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer &each) { return !each.incoming.unmet() && each.outgoing.is_written(); });
}

bool Link::is_bulk() const {
  uint64_t bytes = 0;
  for (const Peer &each : peers_) bytes += each.incoming.unmet_bytes();
  return bytes > kBulk;
}

int Link::missing() const {
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    if (peers_[size_t(peer)].incoming.unmet()) return peer;
  }
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    if (!peers_[size_t(peer)].outgoing.is_written()) return peer;
  }
  return -1;
}

// The caller gets its memory back.
void Link::end_call() {
  is_calling_ = false;
  if (status_) return;
  for (int i = 0; i < size_ * count_; ++i)
    if (connections_[i].is_open() && connections_[i].piece().message) {
      OutMessage &message = *connections_[i].piece().message;
      message.copy(connections_[i].piece().index);
    }
  for (Peer &each : peers_) each.outgoing.settle();
  for (int i = 0; i < size_ * count_; ++i)
    if (connections_[i].is_open() && connections_[i].piece().message) connections_[i].piece().message->data = nullptr;
}

void Link::states(uint8_t *out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < size_ * count_; ++i) {
    const Connection &each = connections_[i];
    out[i] = peers_[size_t(i / count_)].has_left ? FL_LINK_LEFT
             : !each.is_open()                   ? FL_LINK_DOWN
             : each.stalled                      ? FL_LINK_STALLED
                                                 : FL_LINK_UP;
  }
}

void Link::sent(int64_t *out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < size_ * count_; ++i) out[i] = int64_t(connections_[i].sent());
}

void Link::close(bool at_once) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_shut_) return;
  if (!is_calling_ && !status_ && !at_once) {
    is_ending_ = true;
    return;
  }
  is_shut_ = true;
  if (!is_waiting_) return shut();
  for (int i = 0; i < size_ * count_; ++i)
    if (connections_[i].is_open()) shutdown(connections_[i].fd(), SHUT_RDWR);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_, &one, sizeof one);
}

void Link::shut() {
  is_shut_ = true;
  for (int i = 0; i < size_ * count_; ++i) {
    connections_[i].drop();
    connections_[i].close();
  }
}

// Without the lock: a thread that is not here may have held it when the process was forked.
void Link::forget() {
  for (int i = 0; i < size_ * count_; ++i) connections_[i].forget();
  if (epoll_ >= 0) ::close(epoll_);
  if (wake_ >= 0) ::close(wake_);
  epoll_ = wake_ = -1;
}

}  // namespace fl::sockets
