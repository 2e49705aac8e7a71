/* Ethernet switch in user space that delays, loses, corrupts and reorders frames, for kernels without netem.
 *
 *   switch DELAY LOSS CORRUPTION REORDERING [DEVICE RATE NAMESPACE]...
 *
 * DELAY: nanoseconds from port to port. LOSS, CORRUPTION, REORDERING: chances per frame, 0 to 1. For every port, DEVICE:
 * its name in the host, such as eth0; RATE: bits per second of its link, 0 for no limit; NAMESPACE: path of the host's
 * network namespace. Ports of one name are a network of their own.
 *
 * Makes the TAP devices, prints "ready" and forwards until it is killed; the devices vanish with it. Any failure before
 * is one line on stdout and exit status 1.
 *
 * Hosts shape what they send by themselves. The switch shapes what a host is sent: a port passes a frame on at the
 * moment at which its first bit may leave, so a single stream is not slowed down twice. Where frames are not lost,
 * corrupted or reordered, TCP may hand over segments of many frames at a time. Where they are, each frame takes its own
 * chance. A frame that is reordered is held back for a while, so that frames behind it overtake it.
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
static const int64_t HELD_BACK = 1000000;      /* ns by which a frame is late that is reordered */

struct frame {
    struct frame *next;
    int64_t due; /* ns, when it arrives */
    size_t length;
    unsigned char bytes[]; /* virtio header, then the frame */
};

struct queue {
    struct frame *first, *last; /* by due */
};

struct port {
    int tap;
    const char *device;
    double rate;
    int64_t idle; /* ns, when all frames accepted so far have left */
    struct queue queues[2]; /* of frames in their order, and of frames that are held back */
    unsigned char mac[MAC];
    int mac_known;
};

static int64_t delay;
static double loss, corruption, reordering;
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

static int open_tap(const char *device, const char *namespace) {
    int target = open(namespace, O_RDONLY | O_CLOEXEC);
    if (target < 0 || setns(target, CLONE_NEWNET)) fail(namespace);
    close(target);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tap < 0) fail("/dev/net/tun");
    struct ifreq request = {0};
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(tap, TUNSETIFF, &request)) fail("making a TAP device");
    int header = sizeof(struct virtio_net_hdr), unlimited = INT_MAX;
    unsigned offloads = TUN_F_CSUM | (loss > 0 || corruption > 0 || reordering > 0 ? 0 : TUN_F_TSO4 | TUN_F_TSO6);
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

static void enqueue(struct port *port, const unsigned char *bytes, size_t length, int64_t time, size_t on_wire) {
    int64_t start = port->idle > time ? port->idle : time;
    if (start - time > LONGEST_QUEUE) return;
    struct frame *frame = malloc(sizeof *frame + length);
    if (!frame) return;
    port->idle = start + (port->rate > 0 ? (int64_t)((double)on_wire * 8e9 / port->rate) : 0);
    int late = reordering > 0 && drand48() < reordering;
    *frame = (struct frame){.due = start + delay + (late ? HELD_BACK : 0), .length = length};
    memcpy(frame->bytes, bytes, length);
    struct queue *queue = &port->queues[late];
    if (queue->last) queue->last->next = frame;
    else queue->first = frame;
    queue->last = frame;
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
    size_t on_wire = bytes_on_wire(&header, frame, size);
    int group = frame[0] & 1;
    for (struct port *to = ports; to < ports + count; to++)
        if (to != from && strcmp(to->device, from->device) == 0 &&
            (group || !to->mac_known || memcmp(to->mac, frame, MAC) == 0))
            enqueue(to, bytes, length, time, on_wire);
}

/* Hand over what is due; return when the next frame of the queue will be, or `next` if that is earlier; -1: never. */
static int64_t deliver_queue(int tap, struct queue *queue, int64_t time, int64_t next) {
    while (queue->first && queue->first->due <= time) {
        struct frame *frame = queue->first;
        /* A host that cannot take it, because its device is down, say, has lost it. */
        ssize_t written = write(tap, frame->bytes, frame->length);
        (void)written;
        queue->first = frame->next;
        if (!queue->first) queue->last = NULL;
        free(frame);
    }
    return queue->first && (next < 0 || queue->first->due < next) ? queue->first->due : next;
}

static int64_t deliver(int64_t time) {
    int64_t next = -1;
    for (struct port *port = ports; port < ports + count; port++)
        for (int late = 0; late < 2; late++) next = deliver_queue(port->tap, &port->queues[late], time, next);
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
    if (argc < 8 || argc % 3 != 2) {
        printf("usage: switch DELAY LOSS CORRUPTION REORDERING [DEVICE RATE NAMESPACE]...\n");
        return 2;
    }
    delay = atoll(argv[1]);
    loss = atof(argv[2]);
    corruption = atof(argv[3]);
    reordering = atof(argv[4]);
    count = (argc - 5) / 3;
    ports = calloc((size_t)count, sizeof *ports);
    struct pollfd *events = calloc((size_t)count, sizeof *events);
    if (!ports || !events) fail("memory");
    for (int i = 0; i < count; i++) {
        char **words = argv + 5 + 3 * i;
        ports[i].device = words[0];
        ports[i].rate = atof(words[1]);
        ports[i].tap = open_tap(words[0], words[2]);
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
