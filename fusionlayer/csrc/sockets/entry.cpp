#include <new>

#include "fusionlayer_sockets.h"
#include "link.h"

struct fl_link : fl::sockets::Link {
  using fl::sockets::Link::Link;
};

extern "C" {

fl_link *fl_link_open(int32_t rank, int32_t size, int32_t connections, const uint8_t *checked, int64_t window) {
  auto *link = new (std::nothrow) fl_link(rank, size, connections, checked, uint64_t(window));
  if (link && !link->is_open()) {
    delete link;
    link = nullptr;
  }
  return link;
}

int32_t fl_link_can_encrypt(void) { return fl::sockets::Tls::is_there(); }

void fl_link_add(fl_link *link, int32_t peer, int32_t index, int32_t fd, const uint8_t *keys, int32_t encrypted) {
  link->add(peer, index, fd, keys, encrypted != 0);
}

int fl_link_exchange(fl_link *link, const fl_link_message *outgoing, int32_t sends, const fl_link_message *incoming,
                     int32_t receives, int64_t deadline, fl_link_result *result) {
  return link->exchange(outgoing, sends, incoming, receives, deadline, result);
}

int fl_link_wait(fl_link *link, int64_t deadline, fl_link_result *result) { return link->wait(deadline, result); }

int64_t fl_link_tend(fl_link *link) { return link->tend(); }

void fl_link_states(fl_link *link, uint8_t *out) { link->states(out); }

void fl_link_sent(fl_link *link, int64_t *out) { link->sent(out); }

void fl_link_close(fl_link *link, int32_t at_once) { link->close(at_once != 0); }

void fl_link_forget(fl_link *link) { link->forget(); }

void fl_link_free(fl_link *link) { delete link; }
}
