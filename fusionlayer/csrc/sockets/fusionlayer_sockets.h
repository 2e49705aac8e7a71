/* The C ABI of links over TCP: messages between this process and its peers, each over several connections. Part of
 * libfusionlayer_cpu.so.
 *
 * A message is cut into chunks. Whichever connection can take more takes the next chunk, so shares follow the rates of
 * the connections. The receiver puts a chunk where its message is wanted, or keeps it, up to a bound, until the message
 * is. Chunks of a connection that is lost or stalls travel again over the others.
 *
 * The caller connects, and proves who is who, before it adds a connection. With keys that only both ends know, each frame
 * and its payload carry a tag, and nothing that has a wrong one counts. Nothing is allocated or written out of bounds by
 * what is read, whoever has sent it. One thread at a time makes calls. It drives the
 * connections itself. While none is in a call, fl_link_tend, from another thread, does what is left to do. fl_link_add,
 * fl_link_states and fl_link_close may come from any thread at any time.
 */
#ifndef FUSIONLAYER_SOCKETS_H
#define FUSIONLAYER_SOCKETS_H

#include <stdint.h>

#include "fusionlayer_codec.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fl_link fl_link;

/* A message to or from a peer. Both ends give one key and one length; of equal ones the first sent is the first received. */
typedef struct fl_link_message {
  void *data;
  int64_t nbytes; /* above 0 */
  uint64_t key;
  int32_t peer;
} fl_link_message;

enum fl_link_status {
  FL_LINK_DONE = 0,
  FL_LINK_INTERRUPTED = 1, /* by a signal: the call goes on with fl_link_wait */
  FL_LINK_LATE = 2,        /* the deadline has passed. From here on the link cannot be used any more */
  FL_LINK_LOST = 3,        /* no connection to the peer is left, or the peer has closed its end */
  FL_LINK_DAMAGED = 4,     /* a chunk or a frame whose checksum or tag is wrong has come from the peer */
  FL_LINK_NONSENSE = 5,    /* what has come from the peer contradicts itself or exceeds a bound */
  FL_LINK_CLOSED = 6,      /* by fl_link_close */
  FL_LINK_REFUSED = 7      /* the call before has not ended, or an argument is wrong */
};

typedef struct fl_link_result {
  int32_t peer;   /* whom a status other than DONE is about; -1: nobody */
  int64_t nbytes; /* DAMAGED: bytes of the message */
} fl_link_result;

enum fl_link_state {
  FL_LINK_DOWN = 0,
  FL_LINK_UP = 1,
  FL_LINK_STALLED = 2, /* what was sent does not arrive */
  FL_LINK_LEFT = 3     /* the peer has closed its end */
};

/* Returns a link without connections; null if the system has no files left. `checked` has a byte for each of `size` ranks:
 * whether chunks to and from it carry a checksum. Up to `window` bytes for each peer are under way, or wait here for a
 * call that wants them. */
FL_API fl_link *fl_link_open(int32_t rank, int32_t size, int32_t connections, const uint8_t *checked, int64_t window);

/* Takes `fd`, a connected TCP socket, as connection `index` to `peer`, in place of one that was there before. `keys`: 32
 * bytes for what is sent, 32 for what comes, of this connection alone; null: frames carry no tags. `encrypted`: by TLS, to
 * which the keys are given in place of tags; OpenSSL must be there. */
FL_API void fl_link_add(fl_link *link, int32_t peer, int32_t index, int32_t fd, const uint8_t *keys, int32_t encrypted);

/* Whether OpenSSL 3, libssl.so.3, is there; it is loaded by this call. */
FL_API int32_t fl_link_can_encrypt(void);

/* Sends and receives messages, all at once, until `deadline` (nanoseconds of CLOCK_MONOTONIC). Memory of sent messages
 * may be changed when it returns DONE. */
FL_API int fl_link_exchange(fl_link *link, const fl_link_message *outgoing, int32_t sends,
                            const fl_link_message *incoming, int32_t receives, int64_t deadline,
                            fl_link_result *result);

/* Goes on with an exchange that was interrupted. */
FL_API int fl_link_wait(fl_link *link, int64_t deadline, fl_link_result *result);

/* Does what is to be done without a call: reads, acknowledges, sends again. Never waits. Returns how many chunks no peer
 * has acknowledged yet, 0 too where the link has failed or a call is under way. */
FL_API int64_t fl_link_tend(fl_link *link);

/* Writes an fl_link_state for each peer and connection: out[peer * connections + index]. */
FL_API void fl_link_states(fl_link *link, uint8_t *out);

/* Writes the payload bytes that each connection has taken so far: out[peer * connections + index]. */
FL_API void fl_link_sent(fl_link *link, int64_t *out);

/* Makes the call in flight fail, here and at the peers. Without one, peers are told once they have acknowledged all, which
 * fl_link_tend brings about; with `at_once` nobody waits for that. */
FL_API void fl_link_close(fl_link *link, int32_t at_once);

/* Closes this process's copies of the sockets without a word to the peers, in a forked child. */
FL_API void fl_link_forget(fl_link *link);

/* Frees the link. No thread may be in one of its functions. */
FL_API void fl_link_free(fl_link *link);

#ifdef __cplusplus
}
#endif
#endif
