// Stands in for libcuda.so: a stream is a thread that does what is queued, in order and after random pauses.
//
// It has the functions that fusionlayer/transport calls, and refuses what CUDA would not understand. Memory of devices
// is memory of the host. Memory of the host that is registered has another address on the device, so that one is not
// taken for the other. With CUDA's header at hand it compares its declarations with the real ones (WITH_CUDA_H).
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef WITH_CUDA_H
#include <cuda.h>
#undef cuMemHostRegister
#undef cuMemHostGetDevicePointer
#undef cuStreamBatchMemOp
_Static_assert(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS == 122, "attribute");
_Static_assert(CU_STREAM_MEM_OP_WRITE_VALUE_32 == 2 && CU_STREAM_MEM_OP_WAIT_VALUE_64 == 4, "operations");
_Static_assert(CU_STREAM_WAIT_VALUE_GEQ == 0 && CU_STREAM_WRITE_VALUE_DEFAULT == 0, "flags");
_Static_assert(CU_MEMHOSTREGISTER_PORTABLE == 1 && CU_MEMHOSTREGISTER_DEVICEMAP == 2, "flags of memory");
_Static_assert(sizeof(CUstreamBatchMemOpParams) == 48, "size");
_Static_assert(offsetof(CUstreamBatchMemOpParams, waitValue.address) == 8, "address");
_Static_assert(offsetof(CUstreamBatchMemOpParams, waitValue.value64) == 16, "value");
_Static_assert(offsetof(CUstreamBatchMemOpParams, waitValue.flags) == 24, "flags");
_Static_assert(offsetof(CUstreamBatchMemOpParams, writeValue.address) == 8, "address");
_Static_assert(offsetof(CUstreamBatchMemOpParams, writeValue.value) == 16, "value");
_Static_assert(offsetof(CUstreamBatchMemOpParams, writeValue.flags) == 24, "flags");
CUresult (*const same_copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = cuMemcpyAsync;
CUresult (*const same_batch)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned) = cuStreamBatchMemOp_v2;
CUresult (*const same_register)(void *, size_t, unsigned) = cuMemHostRegister_v2;
CUresult (*const same_pointer)(CUdeviceptr *, void *, unsigned) = cuMemHostGetDevicePointer_v2;
CUresult (*const same_device)(CUdevice *, int) = cuDeviceGet;
CUresult (*const same_attribute)(int *, CUdevice_attribute, CUdevice) = cuDeviceGetAttribute;
CUresult (*const same_name)(CUresult, const char **) = cuGetErrorName;
#else

enum { SUCCESS = 0, INVALID = 1, COPY = 1, WRITE = 2, WAIT = 4, MARK = 8 };
enum { MOST_PAGES = 4096, PAGE = 4096 };
static const uint64_t kElsewhere = UINT64_C(1) << 50;

typedef struct {
  uint32_t operation;
  uint64_t address, value;
  uint32_t flags;
  uint64_t alias, rest;
} Operation;

typedef struct Work {
  int kind;
  uint64_t to, value;
  size_t nbytes;
  struct Work *next;
} Work;

typedef struct {
  pthread_mutex_t mutex;  // guards the list and `queued`
  pthread_cond_t filled;
  Work *first, *last;
  long queued, done;
  uint32_t seed, longest;  // microseconds of a pause
} Stream;

static pthread_mutex_t pages_mutex = PTHREAD_MUTEX_INITIALIZER;  // guards the two below
static uint64_t pages[MOST_PAGES];
static int registered;
int host_can_wait = 1;

static void rest(Stream *stream) {
  stream->seed ^= stream->seed << 13;
  stream->seed ^= stream->seed >> 17;
  stream->seed ^= stream->seed << 5;
  if (stream->longest && stream->seed % 3 == 0) usleep(stream->seed / 3 % stream->longest);
}

static void *run(void *given) {
  Stream *stream = given;
  for (;;) {
    pthread_mutex_lock(&stream->mutex);
    while (!stream->first) pthread_cond_wait(&stream->filled, &stream->mutex);
    Work *work = stream->first;
    stream->first = work->next;
    if (!stream->first) stream->last = NULL;
    pthread_mutex_unlock(&stream->mutex);
    rest(stream);
    if (work->kind == COPY) {
      size_t half = work->nbytes / 2;
      memcpy((char *)work->to, (char *)work->value, half);
      rest(stream);
      memcpy((char *)work->to + half, (char *)work->value + half, work->nbytes - half);
    } else if (work->kind == WRITE) {
      __atomic_store_n((uint32_t *)work->to, (uint32_t)work->value, __ATOMIC_RELEASE);
    } else if (work->kind == WAIT) {
      while ((int64_t)(__atomic_load_n((uint64_t *)work->to, __ATOMIC_ACQUIRE) - work->value) < 0) usleep(20);
    }
    free(work);
    __atomic_add_fetch(&stream->done, 1, __ATOMIC_RELEASE);
  }
  return NULL;
}

static void queue(Stream *stream, int kind, uint64_t to, uint64_t value, size_t nbytes) {
  Work *work = malloc(sizeof *work);
  *work = (Work){kind, to, value, nbytes, NULL};
  pthread_mutex_lock(&stream->mutex);
  if (stream->last)
    stream->last->next = work;
  else
    stream->first = work;
  stream->last = work;
  ++stream->queued;
  pthread_cond_signal(&stream->filled);
  pthread_mutex_unlock(&stream->mutex);
}

// For the tests.

Stream *host_stream(uint32_t seed, uint32_t longest) {
  Stream *stream = calloc(1, sizeof *stream);
  pthread_t thread;
  pthread_mutex_init(&stream->mutex, NULL);
  pthread_cond_init(&stream->filled, NULL);
  stream->seed = seed * 2654435761u + 1, stream->longest = longest;
  pthread_create(&thread, NULL, run, stream);
  pthread_detach(thread);
  return stream;
}

long host_mark(Stream *stream) {
  queue(stream, MARK, 0, 0, 0);
  return stream->queued;
}

int host_has_reached(Stream *stream, long mark) { return __atomic_load_n(&stream->done, __ATOMIC_ACQUIRE) >= mark; }

// CUDA's.

int cuGetErrorName(int error, const char **name) {
  *name = error == INVALID ? "CUDA_ERROR_INVALID_VALUE" : NULL;
  return *name ? SUCCESS : INVALID;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = 40 + ordinal;
  return ordinal < 0 || ordinal > 1 ? INVALID : SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = host_can_wait;
  return attribute != 122 || device < 40 || device > 41 ? INVALID : SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
  (void)mode;
  return SUCCESS;
}

int cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags) {
  if ((uint64_t)memory % PAGE || !nbytes || nbytes % PAGE || flags != 3) return INVALID;
  pthread_mutex_lock(&pages_mutex);
  for (size_t at = 0; at < nbytes && registered < MOST_PAGES; at += PAGE) pages[registered++] = (uint64_t)memory + at;
  pthread_mutex_unlock(&pages_mutex);
  return SUCCESS;
}

static uint64_t on_host(uint64_t address) {
  uint64_t found = 0;
  pthread_mutex_lock(&pages_mutex);
  for (int i = 0; i < registered; ++i)
    if (address - kElsewhere - pages[i] < PAGE) found = address - kElsewhere;
  pthread_mutex_unlock(&pages_mutex);
  return found;
}

int cuMemHostGetDevicePointer_v2(uint64_t *there, void *host, unsigned flags) {
  *there = (uint64_t)host + kElsewhere;
  return flags || !on_host(*there) ? INVALID : SUCCESS;
}

int cuMemcpyAsync(uint64_t to, uint64_t source, size_t nbytes, Stream *stream) {
  if (!to || !source || !nbytes || !stream || to >= kElsewhere || source >= kElsewhere) return INVALID;
  queue(stream, COPY, to, source, nbytes);
  return SUCCESS;
}

int cuStreamBatchMemOp_v2(Stream *stream, unsigned count, Operation *operations, unsigned flags) {
  if (!stream || !count || count > 255 || flags) return INVALID;
  for (unsigned i = 0; i < count; ++i) {
    const Operation each = operations[i];
    unsigned alignment = each.operation == WAIT ? 8 : 4;
    if ((each.operation != WAIT && each.operation != WRITE) || each.flags || each.address % alignment) return INVALID;
    if (!on_host(each.address) || each.value >> (each.operation == WAIT ? 63 : 32)) return INVALID;
  }
  for (unsigned i = 0; i < count; ++i)
    queue(stream, operations[i].operation, on_host(operations[i].address), operations[i].value, 0);
  return SUCCESS;
}
#endif
