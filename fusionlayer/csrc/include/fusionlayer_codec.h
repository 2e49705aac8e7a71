/* The C ABI of the codec core: what libfusionlayer_cpu.so and libfusionlayer_cuda.so both export.
 *
 * A codec turns `numel` elements into one message, a few planes of bytes (scales, codes, ...). Where the planes lie is
 * the caller's affair (fusionlayer/wire.py is the one place that lays them out); the core gets a pointer to each.
 *
 * Contract of every verb:
 *   - nothing is allocated, nothing is kept between calls, all sizes are 64-bit;
 *   - the bytes written depend on the arguments alone: CPU (any instruction set) and CUDA write the same ones;
 *   - planes are written whole, padding of the last group included; bytes outside the planes are not touched;
 *   - plane pointers and strides are multiples of 16 bytes; x, residual and out need their own type's alignment only;
 *   - floating-point exceptions, rounding mode and flush-to-zero of the caller change nothing;
 *   - CUDA: `stream` is a cudaStream_t, the work is only enqueued; CPU: `stream` is ignored, the work is done on return.
 */
#ifndef FUSIONLAYER_CODEC_H
#define FUSIONLAYER_CODEC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FL_API __attribute__((visibility("default")))
#define FL_ABI_VERSION 1
#define FL_MAX_PLANES 4

enum fl_status {
  FL_OK = 0,
  FL_BAD_ARGUMENT = 1, /* a field of the spec, a null pointer or a misaligned plane; nothing was written */
  FL_UNSUPPORTED = 2,  /* this library does not know the codec or the option */
  FL_DEVICE_ERROR = 3  /* CUDA reported an error: fl_last_error() has its text */
};

enum fl_dtype { FL_F32 = 0, FL_BF16 = 1, FL_F16 = 2 };

enum fl_codec {
  FL_CAST = 0, /* plane 0: the values as param[0] = fl_dtype; same type in and on the wire = bytes copied unchanged */
  FL_INT = 1   /* plane 0: one f32 scale per group; plane 1: integer codes. param[0] = bits, 4 or 8; param[1] = group
                  size, a power of two in 32..4096; param[2] = flags, FL_INT_* */
};

enum { FL_INT_HADAMARD = 1, FL_INT_STOCHASTIC = 2 };

/* What is encoded and how. */
typedef struct fl_spec {
  uint32_t codec;    /* enum fl_codec */
  uint32_t dtype;    /* enum fl_dtype: of x and out */
  uint32_t param[4]; /* see enum fl_codec; unused ones are 0 */
  uint64_t seed;     /* of stochastic rounding */
  int64_t offset;    /* number of element 0 in the seed's sequence; a multiple of the group size. Elements are numbered
                        as they lie on the wire: message after message, the last group of each filled up */
  int64_t numel;     /* elements in each message */
} fl_spec;

/* One or more messages of the same size: plane p of message m starts at plane[p] + m * stride (bytes). */
typedef struct fl_messages {
  void *plane[FL_MAX_PLANES];
  int64_t stride;
  int64_t count;
} fl_messages;

/* out[m] = encode(x[m * numel .. (m + 1) * numel)). With a residual (f32, as long as x, may be NULL): encodes
 * x + residual instead, and leaves in residual what encoding lost; where the group is not finite, residual stays. */
FL_API int fl_encode(const fl_spec *spec, const void *x, float *residual, const fl_messages *out, void *stream);

/* out[m * numel .. (m + 1) * numel) = decode(in[m]). */
FL_API int fl_decode(const fl_spec *spec, const fl_messages *in, void *out, void *stream);

/* out = (add ? out : 0) + decode(in[0]) + decode(in[1]) + ..., `numel` elements, summed in this order in f32 and
 * rounded to `dtype` once. */
FL_API int fl_decode_sum(const fl_spec *spec, const fl_messages *in, void *out, int add, void *stream);

/* out[0] = encode((x ? x : 0) + decode(in[0]) + decode(in[1]) + ...), the sum kept in f32; out->count is 1. Residual as
 * in fl_encode, added last. */
FL_API int fl_recode(const fl_spec *spec, const fl_messages *in, const void *x, float *residual, const fl_messages *out,
                     void *stream);

/* What this library is: "key=value" lines (abi, kind, compiler, isas or archs). Static storage. */
FL_API const char *fl_build_info(void);

/* Text of the calling thread's last FL_DEVICE_ERROR, or "". */
FL_API const char *fl_last_error(void);

/* CPU library only ---------------------------------------------------------------------------------------------- */

/* crc32c (Castagnoli) of n bytes, continuing from crc (0 to start). */
FL_API uint32_t fl_crc32c(uint32_t crc, const void *data, int64_t n);

/* Choose the instruction set: "avx512", "avx2", "baseline" or "auto"; FL_UNSUPPORTED where the CPU or the build lacks it. */
FL_API int fl_select_isa(const char *name);

/* The instruction set in use. Static storage. */
FL_API const char *fl_isa(void);

/* Number of threads that large calls are split over, the caller included; >= 1. */
FL_API int fl_set_threads(int n);

#ifdef __cplusplus
}
#endif
#endif
