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
#define FL_ABI_VERSION 14
#define FL_MAX_PLANES 5
#define FL_MAX_PEERS 16

enum fl_status {
  FL_OK = 0,
  FL_BAD_ARGUMENT = 1, /* a field of the spec, a null pointer or a misaligned plane; nothing was written */
  FL_UNSUPPORTED = 2,  /* this library does not know the codec or the option */
  FL_DEVICE_ERROR = 3, /* CUDA reported an error: fl_last_error() has its text */
  FL_BAD_MESSAGE =
      4, /* a message contradicts itself (FL_SPARSE: nothing was written; FL_ZIP, FL_RANS; on the CPU alone; FL_DELTA) */
  FL_OTHER_BASE = 5 /* FL_DELTA: a message was made with another base; nothing was written for it */
};

enum fl_dtype { FL_F32 = 0, FL_BF16 = 1, FL_F16 = 2 };

enum fl_codec {
  /* plane 0: the values as param[0] = fl_dtype; same type in and on the wire = bytes copied unchanged */
  FL_CAST = 0,
  /* plane 0: one f32 scale per group; plane 1: integer codes. param[0] = bits, 2, 3, 4 or 8; param[1] = group size, a
   * power of two in 32..4096; param[2] = flags, FL_INT_* */
  FL_INT = 1,
  /* plane 0: ends, u32 per 65536 elements; plane 1: counts, u8 per 256 elements, in form FL_SPARSE_BYTE alone; plane
   * 2: positions; plane 3: values. param[0] = enum fl_sparse_form; param[1] = fl_dtype of the values, f32 or bf16;
   * param[2] = capacity in pairs, <= numel; param[3] = flags, FL_SPARSE_*. For fl_sparse_encode and fl_decode_sum;
   * other verbs give FL_UNSUPPORTED. docs/wire_format.md has the rest */
  FL_SPARSE = 2,
  /* plane 0: scales; plane 1: codes, runs of 32 in 4 bytes for each bit. param[0] = enum fl_format; param[1] = block,
   * a power of two in 32..512; param[2] = enum fl_scale; param[3] = flags, FL_BLOCK_*. For FL_SCALE_DUAL the upper half
   * of param[2] has the bits of tau as bf16, that of param[3] those of epsilon; 0: 448, and 1e-6 */
  FL_BLOCK = 3,
  /* lossless. plane 0: 16 bytes, u32 form and u32 number of escapes first; plane 1: as many bytes as the elements
   * have, or the static part where that is more. param[0] = fl_dtype of what was encoded, which is the spec's own to
   * encode; param[1] = enum fl_zip_choice; param[2] = 1 + the lowest exponent of the window, or 0: find it. numel <
   * 2^32. fl_recode and residuals give FL_UNSUPPORTED. Bytes of plane 1 behind the last escape are not written.
   * docs/wire_format.md has the rest */
  FL_ZIP = 4,
  /* plane 0: f32 root mean squares of sections of 1024 elements, with FL_THC_GIVEN there beforehand; plane 1: codes of 4
   * bits in runs of 32, or sums of their integers. param[0] = flags, FL_THC_*, and from bit FL_THC_RANKS_SHIFT on the
   * number of messages whose integers plane 1 has the sum of, 0: codes; param[1] = block, a power of two in 32..1024;
   * param[2] = f32 bits of the half steps of the grid in one root mean square, for blocks of the size that the message
   * has (the smallest power of two from 32 on that holds it, at most param[1]); param[3] = seed of the signs. fl_recode,
   * and encoding sums, give FL_UNSUPPORTED */
  FL_THC = 5,
  /* plane 0: marks of coarse tokens, a word for each 32, empty where there are none; plane 1: pivots; planes 2 and 3:
   * offsets and steps, bf16; plane 4: codes. param[0] = bits, 4 or 6; param[1] = channels of a token, a multiple of the
   * tile up to 16384; param[2] = tile, 32, 64 or 128; param[3] = the share of coarse tokens in 2^-32, 0 with 6 bits: of t
   * tokens t * param[3] >> 32. With coarse tokens fl_recode gives FL_UNSUPPORTED, as do more than 2^32 tokens */
  FL_TAHQUANT = 6,
  /* plane 0: widths of super-groups of 256 elements, 24 bytes for each 64; fl_encode and fl_recode find them there
   * (fl_dynamiq_widths writes them). plane 1: a bf16 scale per super-group; plane 2: a u8 scale per 16 elements; plane
   * 3: codes. param[0] = flags, FL_DYNAMIQ_*; param[1] = room for codes, in units of 64 bytes; param[2] = rank | ranks
   * << 16, those whose rounding is anticorrelated, ranks <= 16384; param[3] = epsilon of 4 bits | of 8 bits << 16, in
   * 1e-4, 0 for even levels. Offsets are multiples of 256. Where widths contradict themselves or the room the CPU
   * gives FL_BAD_MESSAGE; CUDA leaves out what would lie outside. docs/wire_format.md has the rest */
  FL_DYNAMIQ = 7,
  /* lossless. plane 0: 16 bytes, u32 form and u32 bytes of words first; plane 1 as for FL_ZIP. param[0] = fl_dtype of
   * what was encoded, as for FL_ZIP, as are the limits of verbs and numel. CUDA has no fl_decode_sum, and makes NaN of
   * blocks that contradict themselves. docs/wire_format.md has the rest */
  FL_RANS = 8,
  /* of each chunk the largest magnitudes. plane 0: low level and step of the chunk, bf16; plane 1: positions; plane 2:
   * codes; each chunk has whole bytes. param[0] = bits of a value, 2, 3, 4, 8 or 32; param[1] = elements of a chunk, a
   * power of two in 64..4096; param[2] = how many of them go, 1 to all; param[3] = f32 bits of a factor on x in
   * fl_encode, 0: none. What a message says of elements outside its chunk is left out. docs/wire_format.md has the rest */
  FL_CHUNKED = 9,
  /* lossless, what changed since a base; for fl_delta_encode and fl_delta_decode alone. plane 0: 16 bytes, u32 form, bytes
   * behind the index, and digests of base and result; plane 1: an index and blocks, or the elements as they are, and as
   * many bytes as the elements have, or the index where that is more. numel < 2^30. Bytes of plane 1 behind the last block
   * are not written. docs/wire_format.md has the rest */
  FL_DELTA = 10,
  /* plane 0: one f32 scale per group, the mean of its magnitudes; plane 1: a bit for each element, its sign, from the
   * lowest bit of a byte on, as many bytes as hold them. param[1] = group size, a power of two in 32..4096 */
  FL_ONEBIT = 11,
  /* planes 0 and 1: f32 steps and origins of groups; plane 2: integer codes. param[0] = bits, 4 or 8; param[1] = group
   * size, a power of two in 32..1024; param[2] = flags, FL_QSDP_*. Offsets are multiples of the group size */
  FL_QSDP = 12
};

enum { FL_QSDP_STOCHASTIC = 1 /* values go up or down at random; else the grid is shifted at random */ };

enum {
  FL_INT_HADAMARD = 1,
  FL_INT_STOCHASTIC = 2,
  FL_INT_FULL = 4 /* 4 and 8 bits, alone: also the lowest code of two's complement, and steps that are shorter for it */
};

enum fl_format { FL_E4M3 = 0, FL_E5M2 = 1, FL_INT8 = 2, FL_E2M3 = 3, FL_E3M2 = 4, FL_E2M1 = 5 };

/* What plane 0 of FL_BLOCK has for each block: an f32; two (TACO's s and alpha, by which values are multiplied); a power of
 * two (OCP MX v1.0; float formats alone); a bf16 (likewise). FL_SCALE_MESSAGE: the largest magnitude of the message, an f32
 * in all. */
enum fl_scale { FL_SCALE_F32 = 0, FL_SCALE_DUAL = 1, FL_SCALE_E8M0 = 2, FL_SCALE_BF16 = 3, FL_SCALE_MESSAGE = 4 };

enum {
  FL_BLOCK_HADAMARD = 1, /* 8-bit formats with FL_SCALE_F32 or FL_SCALE_DUAL alone */
  FL_BLOCK_GIVEN = 2,    /* FL_SCALE_BF16 alone: plane 0 has the scales beforehand; larger values saturate */
  FL_BLOCK_UNLIMITED = 4 /* FL_SCALE_DUAL alone: alpha is not limited to 1e-3 .. 1e3 */
};

enum { FL_THC_UNIFORM = 1, FL_THC_STOCHASTIC = 2, FL_THC_GIVEN = 4, FL_THC_RANKS_SHIFT = 16 };
enum { FL_DYNAMIQ_FLAT = 1 /* plane 1 is empty, plane 2 has a bf16 scale per 32 elements */ };

/* Which exponents get a code: seven in a row, seven of any kind, or whichever has more. */
enum fl_zip_choice { FL_ZIP_AUTO = 0, FL_ZIP_WINDOW = 1, FL_ZIP_TABLE = 2 };

/* How positions are written: a bit for each element; u8 inside blocks of 256 elements; u16 inside those of 65536. */
enum fl_sparse_form { FL_SPARSE_BITMAP = 0, FL_SPARSE_BYTE = 1, FL_SPARSE_SHORT = 2 };

enum { FL_SPARSE_RANDOM = 1 /* select by the element's number of the seed's sequence, not by its magnitude */ };

/* What is encoded and how. */
typedef struct fl_spec {
  uint32_t codec;    /* enum fl_codec */
  uint32_t dtype;    /* enum fl_dtype: of x and out */
  uint32_t param[4]; /* see enum fl_codec; unused ones are 0 */
  uint64_t seed;     /* of stochastic rounding and FL_SPARSE_RANDOM */
  int64_t offset;    /* number of element 0 in the seed's sequence; FL_INT: a multiple of the group size. Elements are
                        numbered as they lie on the wire: message after message, the last group of each filled up */
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

/* out[m * numel .. (m + 1) * numel) = decode(in[m]). FL_ZIP, here and below: where escapes, their number and their index
 * contradict each other, the CPU gives FL_BAD_MESSAGE, and out holds anything; CUDA reports nothing. Bits are kept where
 * out has the type that was encoded. */
FL_API int fl_decode(const fl_spec *spec, const fl_messages *in, void *out, void *stream);

/* out = (add ? out : 0) + decode(in[0]) + decode(in[1]) + ..., `numel` elements, summed in this order in f32 and rounded to
 * `dtype` once. FL_INT and FL_BLOCK with Hadamard: rotated values are summed in this order, from 0 on, and that sum is
 * rotated back and added to (add ? out : 0); of one message that is what fl_decode makes. Where a rotated sum overflows,
 * nothing outside of its 32 elements, or its block, is touched. FL_SPARSE: the CPU looks through all messages first, and
 * gives FL_BAD_MESSAGE where ends descend or pass the capacity, counts or bits contradict them, or positions do not ascend
 * or leave the tensor; CUDA leaves out whatever lies outside the planes or the tensor, and reports nothing. */
FL_API int fl_decode_sum(const fl_spec *spec, const fl_messages *in, void *out, int add, void *stream);

/* out[0] = encode((x ? x : 0) + decode(in[0]) + decode(in[1]) + ...), the sum made as by fl_decode_sum and kept in f32;
 * out->count is 1. Residual as in fl_encode, added last. */
FL_API int fl_recode(const fl_spec *spec, const fl_messages *in, const void *x, float *residual, const fl_messages *out,
                     void *stream);

/* out[0] = encode(decode(in[0]) + decode(in[1]) + ...) as fl_recode does without x, `in` being messages of `source`. FL_INT
 * alone, of equal numel. */
FL_API int fl_recode_from(const fl_spec *source, const fl_messages *in, const fl_spec *spec, float *residual,
                          const fl_messages *out, void *stream);

/* out[i] = for each i < out->count what fl_recode (source NULL, no x) or fl_recode_from makes of the in->count messages that
 * begin i * step bytes behind those of `in`. Element 0 of row i is number spec->offset + starts[i] of the sequence, and its
 * residual is residual[starts[i]]. Rows before one that is refused are written. */
FL_API int fl_recode_rows(const fl_spec *source, const fl_messages *in, int64_t step, const fl_spec *spec,
                          const int64_t *starts /* host */, float *residual, const fl_messages *out, void *stream);

/* out[m] = encode(x - base) of elements m * numel .., x being f32 and base of spec->dtype; the difference is f32. FL_INT
 * alone. */
FL_API int fl_encode_difference(const fl_spec *spec, const float *x, const void *base, const fl_messages *out,
                                void *stream);

/* FL_THC alone: out (aligned to 16) = the sum of the integers of in->count messages' codes, whose form depends on
 * the count and the spec's block alone: docs/wire_format.md. */
FL_API int fl_add_codes(const fl_spec *spec, const fl_messages *in, uint8_t *out, void *stream);

/* FL_THC alone: rms[i] = the root mean square of section i of x, with a residual (may be NULL) of x + residual, as fl_encode
 * makes it. */
FL_API int fl_thc_rms(const fl_spec *spec, const void *x, const float *residual, float *rms /* device */, void *stream);

/* Sparsification -------------------------------------------------------------------------------------------------
 * `acc` is what a tensor has to send: its new gradients and what was held back before. A magnitude is the 31 low bits of
 * an f32, compared as an integer: Inf and NaN are the largest. NaNs that are computed become canonical. A workspace is
 * `fl_workspace_bytes` bytes of the device's memory, aligned to 16, which hold nothing before or after the call. Results
 * marked "device" lie in the device's memory. */

enum fl_workspace {
  FL_WORKSPACE_STATS = 0,
  FL_WORKSPACE_KTH = 1,
  FL_WORKSPACE_ENCODE = 2,
  FL_WORKSPACE_THRESHOLD = 3,
  FL_WORKSPACE_DELTA_16 = 4, /* of elements of 16 bits; both verbs, for any number of messages */
  FL_WORKSPACE_DELTA_32 = 5  /* of elements of 32 bits */
};

/* Bytes of workspace that a verb of this library needs for numel elements, about a quarter of them at most, and for
 * FL_DELTA on CUDA three times as many as they have; -1 where an argument makes no sense. */
FL_API int64_t fl_workspace_bytes(int verb, int64_t numel);

/* acc += scale * x, both operations rounded; x of `dtype`. */
FL_API int fl_accumulate(uint32_t dtype, const void *x, float scale, int64_t numel, float *acc, void *stream);

/* Momentum correction (Lin et al., ICLR 2018, section 3.1), with s = scale * x: velocity = momentum * velocity + s, then
 * acc += velocity. Nesterov: velocity = (velocity + s) * momentum, then acc += velocity + s. */
FL_API int fl_accumulate_momentum(uint32_t dtype, const void *x, float scale, float momentum, int nesterov,
                                  int64_t numel, float *velocity, float *acc, void *stream);

/* Over the elements whose magnitude is >= above. The sums leave out what is not finite; their order is fixed:
 * codecs/sparse/sparse.h. */
typedef struct fl_magnitudes {
  int64_t count;
  double total;    /* of |acc| */
  double squares;  /* of acc^2 */
  int64_t largest; /* magnitude; 0 if there is none */
} fl_magnitudes;
FL_API int fl_magnitude_stats(const float *acc, int64_t numel, uint32_t above, void *workspace,
                              fl_magnitudes *out /* device */, void *stream);

/* counts[i] = number of elements whose magnitude is >= thresholds[i] (in host memory, <= 0x7fffffff), 1 to 16 of them. */
#define FL_MAX_THRESHOLDS 16
FL_API int fl_count_above(const float *acc, int64_t numel, const uint32_t *thresholds, int count,
                          int64_t *counts /* device */, void *stream);

/* The k-th largest magnitude, 1 <= k <= numel, and how many are larger. */
typedef struct fl_kth {
  int64_t magnitude;
  int64_t above;
} fl_kth;
FL_API int fl_kth_magnitude(const float *acc, int64_t numel, int64_t k, void *workspace, fl_kth *out /* device */,
                            void *stream);

/* What fl_sparse_encode selects. */
typedef struct fl_choice {
  int64_t threshold;
  int64_t ties;
} fl_choice;

/* Chooses the k largest magnitudes, 1 <= k <= numel, among equals the first; fewer if fewer are not 0, but at least one.
 * Where an element is not finite, all that are not finite are chosen, and no others. */
FL_API int fl_choose_largest(const float *acc, int64_t numel, int64_t k, void *workspace /* FL_WORKSPACE_KTH */,
                             fl_choice *out /* device */, void *stream);

/* For FL_SPARSE_RANDOM: chooses the k elements that draw the least numbers, 1 <= k <= numel, and one more if its number
 * differs from the k-th in the lowest bit alone. Where an element of acc is not finite, all that are not finite are chosen,
 * and no others. */
FL_API int fl_choose_drawn(const fl_spec *spec, const float *acc, int64_t k, void *workspace /* FL_WORKSPACE_KTH */,
                           fl_choice *out /* device */, void *stream);

/* How fl_choose_threshold estimates: thresholds that are given; the sample_k-th magnitude of a sample, and five that are
 * each a fifth lower; the quantile of a normal distribution; between the mean and the largest magnitude, by bisection or
 * from the top; the quantile of an exponential or a generalized Pareto distribution, fitted in stages. */
enum fl_estimator {
  FL_ESTIMATE_GIVEN = 0,
  FL_ESTIMATE_SAMPLED = 1,
  FL_ESTIMATE_NORMAL = 2,
  FL_ESTIMATE_BISECTED = 3,
  FL_ESTIMATE_TRIMMED = 4,
  FL_ESTIMATE_EXPONENTIAL = 5,
  FL_ESTIMATE_PARETO = 6
};

#define FL_MAX_ESTIMATES 14
#define FL_MAX_STAGES 64
typedef struct fl_chooser {
  uint32_t estimator;             /* enum fl_estimator */
  uint32_t reuse;                 /* calls that a threshold serves, at least 1 */
  int64_t k, capacity;            /* elements that should go, and that may: 1 <= k <= capacity <= numel */
  int64_t sampled, sample_k;      /* elements of the sample; of which the sample_k-th magnitude is taken */
  uint32_t stages, most_stages;   /* of quantiles that are fitted: to begin with, and at most; 1 to FL_MAX_STAGES */
  uint32_t count;                 /* of given, at most FL_MAX_ESTIMATES */
  uint32_t published;             /* 1: what the estimator's rule ends with goes, whatever its share of k; else 0 */
  double given[FL_MAX_ESTIMATES]; /* FL_ESTIMATE_PARETO: given[0], if count is not 0, is what the first stage finds */
} fl_chooser;

/* What is kept of a tensor from call to call; zeros to begin with. */
typedef struct fl_threshold_memory {
  float threshold, age;          /* the last threshold, and how many calls it has served */
  float stages, estimates, sent; /* of quantiles that are fitted: stages; estimates since they changed, shares of k */
} fl_threshold_memory;

/* Chooses about k elements of acc by a threshold: one that is kept if it still serves, else an estimate that sends at least
 * 0.8 k and fits into the capacity, or one near the last threshold that does, else the k largest. As published the estimate
 * goes if it sends anything and fits, else the k largest; FL_ESTIMATE_TRIMMED takes the k largest of what it finds, which
 * are the k largest of all. Where an element is not finite, all that are not finite are chosen, and no others. */
FL_API int fl_choose_threshold(const fl_chooser *how, const float *acc, int64_t numel,
                               const float *sample /* FL_ESTIMATE_SAMPLED, else null */,
                               fl_threshold_memory *memory /* device */, void *workspace /* FL_WORKSPACE_THRESHOLD */,
                               fl_choice *out /* device */, void *stream);

/* First acc += scale * x if x (of spec->dtype) is not null. Then selects the elements whose magnitude is > threshold, and
 * the first `ties` of those that equal it (-1: all). With FL_SPARSE_RANDOM it selects those whose number is < threshold (up
 * to 2^32), and those that are not finite. The message takes the selected elements in their order: no more than the
 * capacity, and in form FL_SPARSE_BYTE at most 255 of each 256. acc keeps what was not sent, bf16 rounding included, and
 * becomes 0 where that is not finite. `clear` (f32, may be null) becomes 0 where an element was sent or was not finite.
 * Planes are written whole: zeros behind the last pair. A `choice` takes the place of `threshold` and `ties`. */
FL_API int fl_sparse_encode(const fl_spec *spec, const void *x, float scale, float *acc, float *clear,
                            int64_t threshold, int64_t ties, const fl_choice *choice /* device, may be null */,
                            void *workspace, const fl_messages *out, void *stream);

/* Super-groups of FL_DYNAMIQ ------------------------------------------------------------------------------------------ */

/* For each 256 elements of x + residual (f32, may be null): their mean, the last ones' over those that there are, and the
 * sum of their squares. f32, neighbours added first. */
FL_API int fl_dynamiq_stats(uint32_t dtype, const void *x, const float *residual, int64_t numel, float *means,
                            float *squares, void *stream);

/* Plane 0 for `groups` super-groups from a byte for each: 2, 4 or 8 bits. CPU library only. */
FL_API int fl_dynamiq_widths(const uint8_t *bits, int64_t groups, void *plane);

/* Differences, FL_DELTA ---------------------------------------------------------------------------------------------- */

/* out[m] = what turns the bits of base into those of x, for elements m * numel .., both of spec->dtype. Without a base it
 * is zeros. The workspace is CUDA's alone. */
FL_API int fl_delta_encode(const fl_spec *spec, const void *x, const void *base, const fl_messages *out,
                           void *workspace, void *stream);

/* out[m * numel .. (m + 1) * numel) = base with in[m] applied, to the bit; `out` may be `base`. FL_OTHER_BASE where the
 * digest of base is not the message's; base is as it was. FL_BAD_MESSAGE where the message contradicts itself or makes of
 * base what has another digest than the sender's elements. With any error an `out` apart from base holds anything, and
 * later messages are not looked at. These two statuses the CPU returns; CUDA leaves in `status` what would be returned. */
FL_API int fl_delta_decode(const fl_spec *spec, const fl_messages *in, const void *base, void *out, void *workspace,
                           int32_t *status /* device; CUDA alone */, void *stream);

/* Sums over ranks in one launch, CUDA library only --------------------------------------------------------------------- */

/* The memory of all ranks of a host. Each rank's begins as zeros, has the same size on all ranks, and holds nothing else. It
 * is aligned to 16 bytes. */
typedef struct fl_peers {
  int32_t rank, size;         /* size <= FL_MAX_PEERS */
  int32_t warps;              /* that a launch has at most, the same on all ranks; a multiple of 4. Not more than
                                 fl_most_warps: all of them must run at a time, since they wait for those of others */
  int64_t bytes;              /* of each memory, at least fl_two_shot_bytes */
  void *memory[FL_MAX_PEERS]; /* of each rank, as this device addresses it, this rank's own included */
  const uint32_t *stop; /* as this device addresses it. Where it is not 0, launches end without waiting any longer;
                                 their results, and the memory, are then worth nothing */
} fl_peers;

/* out = the sum of x over all ranks, to the bit what the collective two_shot makes of it, and the same bits on every rank.
 * Rank r sums elements chunk * r .. of all ranks; chunk is a multiple of the group or block, and chunk * size >= numel. Values
 * are encoded as fl_encode does, one message for each share, and sums as fl_recode does, with sum_seed and this rank's share's
 * own elements' numbers. Without a residual rotated values are summed as they are. With a residual (f32, as long as x, may be
 * NULL) both encodings add it, and leave there what they lose. out may be x. All ranks make the same calls in the same
 * order, each on one stream. FL_INT of 4 and 8 bits, and FL_BLOCK with a scale for each block and codes of 4 or 8 bits;
 * FL_UNSUPPORTED for any other. Nothing of a launch depends on how many there were before: a CUDA graph may repeat it. */
FL_API int fl_two_shot(const fl_spec *spec, uint64_t sum_seed, int64_t chunk, const void *x, void *out, float *residual,
                       const fl_peers *peers, void *stream);

/* Bytes of each rank's memory that such a call needs; -1 where an argument makes no sense, or fl_two_shot has no such codec. */
FL_API int64_t fl_two_shot_bytes(const fl_spec *spec, int64_t chunk, int32_t size, int32_t warps);

/* How many warps of fl_two_shot the current device runs at a time; -1: fl_last_error() says why that is not known. */
FL_API int32_t fl_most_warps(void);

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
