/* Ethernet switch in user space that delays, loses and corrupts frames, for kernels without netem.
 *
 *   switch RATE DELAY LOSS CORRUPTION NAMESPACE...
 *
 * RATE: bits per second of every link, 0 for no limit. DELAY: nanoseconds from port to port. LOSS, CORRUPTION: chances
 * per frame, 0 to 1. NAMESPACE: path of each host's network namespace.
 *
 * Makes the TAP device eth0 in every namespace, prints "ready" and forwards until it is killed; the devices vanish with
 * it. Any failure before is one line on stdout and exit status 1.
 *
 * Hosts shape what they send by themselves. The switch shapes what a host is sent: a port passes a frame on at the
 * moment at which its first bit may leave, so a single stream is not slowed down twice. Where frames are neither lost
 * nor corrupted, TCP may hand over segments of many frames at a time. Where they are, each frame takes its own chance.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    ETHERNET_HEADER = 14,
    MAC = 6,
    LONGEST_FRAME = 1 << 17,
    CORRUPTIBLE = 1200,  /* bytes; shorter frames are likely headers, whose damage is noticed */
    READ_AT_ONCE = 16    /* frames of one port, before the others have their turn */
};

static const int64_t SECOND = 1000000000;
static const int64_t LONGEST_QUEUE = 50000000; /* ns of sending that may wait at a port, as in the shapers of the hosts */

struct frame {
    struct frame *next;
    int64_t due; /* ns, when it arrives */
    size_t length;
    unsigned char bytes[]; /* virtio header, then the frame */
};

struct port {
    int tap;
    int64_t idle; /* ns, when all frames accepted so far have left */
    struct frame *first, *last;
    unsigned char mac[MAC];
    int mac_known;
};

static double rate;
static int64_t delay;
static double loss, corruption;
static struct port *ports;
static int count;

static void fail(const char *what) {
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

static int open_tap(const char *namespace) {
    int target = open(namespace, O_RDONLY | O_CLOEXEC);
    if (target < 0 || setns(target, CLONE_NEWNET)) fail(namespace);
    close(target);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_name = "eth0"};
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(tap, TUNSETIFF, &request)) fail("making a TAP device");
    int header = sizeof(struct virtio_net_hdr), unlimited = INT_MAX;
    unsigned offloads = TUN_F_CSUM | (loss > 0 || corruption > 0 ? 0 : TUN_F_TSO4 | TUN_F_TSO6);
    if (ioctl(tap, TUNSETVNETHDRSZ, &header) || ioctl(tap, TUNSETSNDBUF, &unlimited) ||
        ioctl(tap, TUNSETOFFLOAD, offloads))
        fail("setting up a TAP device");
    return tap;
}

/* Bytes that the kernel's shapers would count: every segment of a long frame repeats the headers. */
static size_t bytes_on_wire(const struct virtio_net_hdr *header, const unsigned char *frame, size_t length) {
    size_t tcp = header->csum_start;
    if (header->gso_type == VIRTIO_NET_HDR_GSO_NONE || header->gso_size == 0 || tcp + 13 > length) return length;
    size_t headers = tcp + 4 * (size_t)(frame[tcp + 12] >> 4);
    if (headers >= length) return length;
    size_t segments = (length - headers + header->gso_size - 1) / header->gso_size;
    return length + (segments - 1) * headers;
}

static void enqueue(struct port *port, const unsigned char *bytes, size_t length, int64_t time, int64_t sending) {
    int64_t start = port->idle > time ? port->idle : time;
    if (start - time > LONGEST_QUEUE) return;
    struct frame *frame = malloc(sizeof *frame + length);
    if (!frame) return;
    port->idle = start + sending;
    *frame = (struct frame){.due = start + delay, .length = length};
    memcpy(frame->bytes, bytes, length);
    if (port->last) port->last->next = frame;
    else port->first = frame;
    port->last = frame;
}

static void forward(struct port *from, unsigned char *bytes, size_t length) {
    unsigned char *frame = bytes + sizeof(struct virtio_net_hdr);
    size_t size = length - sizeof(struct virtio_net_hdr);
    struct virtio_net_hdr header;
    memcpy(&header, bytes, sizeof header);
    memcpy(from->mac, frame + MAC, MAC);
    from->mac_known = 1;
    if (loss > 0 && drand48() < loss) return;
    if (corruption > 0 && size > CORRUPTIBLE && drand48() < corruption) frame[size / 2] ^= 0x40;
    int64_t time = now();
    int64_t sending = rate > 0 ? (int64_t)((double)bytes_on_wire(&header, frame, size) * 8e9 / rate) : 0;
    int group = frame[0] & 1;
    for (struct port *to = ports; to < ports + count; to++)
        if (to != from && (group || !to->mac_known || memcmp(to->mac, frame, MAC) == 0))
            enqueue(to, bytes, length, time, sending);
}

/* Hand over what is due; return when the next frame will be, -1 if none waits. */
static int64_t deliver(int64_t time) {
    int64_t next = -1;
    for (struct port *port = ports; port < ports + count; port++) {
        while (port->first && port->first->due <= time) {
            struct frame *frame = port->first;
            /* A host that cannot take it, because its device is down, say, has lost it. */
            ssize_t written = write(port->tap, frame->bytes, frame->length);
            (void)written;
            port->first = frame->next;
            if (!port->first) port->last = NULL;
            free(frame);
        }
        if (port->first && (next < 0 || port->first->due < next)) next = port->first->due;
    }
    return next;
}

static void wait_for_frames(struct pollfd *events, int64_t next) {
    int64_t left = next < 0 ? 0 : next - now();
    if (left < 0) left = 0;
    struct timespec timeout = {.tv_sec = left / SECOND, .tv_nsec = left % SECOND};
    if (ppoll(events, (nfds_t)count, next < 0 ? NULL : &timeout, NULL) < 0 && errno != EINTR) {
        perror("ppoll");
        exit(1);
    }
}

int main(int argc, char **argv) {
    if (argc < 7) {
        printf("usage: switch RATE DELAY LOSS CORRUPTION NAMESPACE NAMESPACE...\n");
        return 2;
    }
    rate = atof(argv[1]);
    delay = atoll(argv[2]);
    loss = atof(argv[3]);
    corruption = atof(argv[4]);
    count = argc - 5;
    ports = calloc((size_t)count, sizeof *ports);
    struct pollfd *events = calloc((size_t)count, sizeof *events);
    if (!ports || !events) fail("memory");
    for (int i = 0; i < count; i++) {
        ports[i].tap = open_tap(argv[5 + i]);
        events[i] = (struct pollfd){.fd = ports[i].tap, .events = POLLIN};
    }
    prctl(PR_SET_TIMERSLACK, 1);
    srand48(1);
    printf("ready\n");
    fflush(stdout);

    static unsigned char bytes[LONGEST_FRAME];
    const ssize_t shortest = (ssize_t)sizeof(struct virtio_net_hdr) + ETHERNET_HEADER;
    for (;;) {
        wait_for_frames(events, deliver(now()));
        for (int i = 0; i < count; i++)
            for (int taken = 0; events[i].revents && taken < READ_AT_ONCE; taken++) {
                ssize_t length = read(ports[i].tap, bytes, sizeof bytes);
                if (length < 0) break;
                if (length >= shortest) forward(&ports[i], bytes, (size_t)length);
            }
    }
}
