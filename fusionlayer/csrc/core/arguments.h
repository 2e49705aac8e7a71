// Argument checks that every implementation of the C ABI makes first, and sizes that follow from a spec. Host only.
#pragma once

#include "block_scale.h"
#include "chunked.h"
#include "delta.h"
#include "dynamiq.h"
#include "qsdp.h"
#include "rans.h"
#include "sparse.h"
#include "tahquant.h"
#include "thc.h"
#include "zip.h"

namespace fl {

constexpr int64_t kMaxElements = int64_t(1) << 56;  // products of sizes below stay far from overflow
constexpr int kPlaneAlignment = 16;

inline int64_t element_size(uint32_t dtype) { return dtype == FL_F32 ? 4 : 2; }
inline bool known_dtype(uint32_t dtype) { return dtype <= FL_F16; }

inline int plane_count(const fl_spec &spec) {
  if (spec.codec == FL_TAHQUANT) return 5;
  if (spec.codec == FL_DYNAMIQ) return kDynamiqPlanes;
  if (spec.codec == FL_CHUNKED) return kChunkedPlanes;
  if (spec.codec == FL_QSDP) return kQsdpPlanes;
  return spec.codec == FL_SPARSE ? kSparsePlanes : spec.codec == FL_CAST ? 1 : 2;
}

// Groups of FL_INT, FL_ONEBIT and FL_QSDP, blocks of FL_BLOCK.
inline int64_t group_count(const fl_spec &spec) {
  const int64_t group = spec.param[1];
  return (spec.numel + group - 1) / group;
}

// Lossless, and recoded by decoding and encoding.
inline bool is_lossless(const fl_spec &spec) { return spec.codec == FL_ZIP || spec.codec == FL_RANS; }

inline int64_t rans_bytes(const fl_spec &spec) { return spec.numel ? rans_shape(spec).data_bytes() : 0; }

inline int64_t dynamiq_plane_bytes(const fl_spec &spec, int p) {
  const int64_t groups = super_groups(spec.numel);
  const bool flat = spec.param[0] & FL_DYNAMIQ_FLAT;
  if (p == 0) return width_runs(groups) * int64_t(sizeof(WidthRun));
  if (p == 1) return flat ? 0 : groups * 2;
  return p == 2 ? groups * kScaleGroups : int64_t(spec.param[1]) * kLeastCodes;
}

// Bytes of plane p of one message.
inline int64_t plane_bytes(const fl_spec &spec, int p) {
  if (spec.codec == FL_DYNAMIQ) return dynamiq_plane_bytes(spec, p);
  if (spec.codec == FL_CAST) return spec.numel * element_size(spec.param[0]);
  if (spec.codec == FL_SPARSE) return sparse_shape(spec).plane_bytes(p);
  if (spec.codec == FL_CHUNKED) return chunked_shape(spec).plane_bytes(p);
  if (spec.codec == FL_ZIP) return p || !spec.numel ? zip_shape(spec).bytes() : int64_t(sizeof(ZipHead));
  if (spec.codec == FL_DELTA) return spec.numel ? p ? delta_shape(spec).data_bytes() : int64_t(sizeof(DeltaHead)) : 0;
  if (spec.codec == FL_RANS) return p || !spec.numel ? rans_bytes(spec) : int64_t(sizeof(ZipHead));
  if (spec.codec == FL_THC) {
    const ThcShape shape = thc_shape(spec);
    return p ? shape.count() / kCodeRun * shape.run_bytes() : shape.sections() * int64_t(sizeof(float));
  }
  if (spec.codec == FL_TAHQUANT) {
    const TahShape shape = tah_shape(spec);
    return p == 0 ? shape.mark_bytes() : p == 4 ? shape.code_bytes() : p == 1 ? shape.tiles() : 2 * shape.tiles();
  }
  const int64_t groups = group_count(spec), elements = groups * spec.param[1];
  if (spec.codec == FL_ONEBIT) return p == 0 ? groups * 4 : (spec.numel + 7) / 8;
  if (spec.codec == FL_QSDP && p == 1) return groups * 4;
  if (spec.codec == FL_INT || spec.codec == FL_QSDP) return p == 0 ? groups * 4 : elements * spec.param[0] / 8;
  if (p == 1) return elements * format_bits(spec.param[0]) / 8;
  const uint32_t kind = scale_kind(spec.param);
  return kind == FL_SCALE_MESSAGE ? (spec.numel ? 4 : 0) : groups * scale_bytes(kind);
}

inline int check_block(const uint32_t *param) {
  const uint32_t format = param[0], block = param[1], scale = scale_kind(param), flags = param[3] & 0xffffu;
  const uint32_t tau = param[2] >> 16, epsilon = param[3] >> 16, largest = kF32Inf >> 16;
  if (scale != FL_SCALE_DUAL && (tau || epsilon || flags & FL_BLOCK_UNLIMITED)) return FL_UNSUPPORTED;
  if (tau >= largest || epsilon >= largest) return FL_BAD_ARGUMENT;
  if (format > FL_E2M1 || scale > FL_SCALE_MESSAGE) return FL_BAD_ARGUMENT;
  if (block < 32 || block > kMaxBlock || (block & (block - 1))) return FL_BAD_ARGUMENT;
  if (flags & ~uint32_t(FL_BLOCK_HADAMARD | FL_BLOCK_GIVEN | FL_BLOCK_UNLIMITED)) return FL_UNSUPPORTED;
  if (flags & FL_BLOCK_GIVEN && scale != FL_SCALE_BF16) return FL_UNSUPPORTED;
  if (format == FL_INT8 && (scale == FL_SCALE_E8M0 || scale == FL_SCALE_BF16)) return FL_UNSUPPORTED;
  const bool hadamard = flags & FL_BLOCK_HADAMARD;
  return hadamard && (format_bits(format) != 8 || scale > FL_SCALE_DUAL) ? FL_UNSUPPORTED : FL_OK;
}

inline int check_sparse(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if (param[0] > FL_SPARSE_SHORT || !known_dtype(param[1]) || param[2] > spec.numel) return FL_BAD_ARGUMENT;
  if (spec.offset < 0 || spec.offset > kMaxElements) return FL_BAD_ARGUMENT;
  return param[1] == FL_F16 || param[3] & ~uint32_t(FL_SPARSE_RANDOM) ? FL_UNSUPPORTED : FL_OK;
}

inline int check_dynamiq(const fl_spec &spec) {
  const uint32_t *param = spec.param, rank = param[2] & 0xffff, ranks = param[2] >> 16;
  if (param[1] < uint64_t(super_groups(spec.numel)) || rank >= ranks || ranks > kMostRanks) return FL_BAD_ARGUMENT;
  if (spec.offset < 0 || spec.offset > kMaxElements || spec.offset % kSuperGroup) return FL_BAD_ARGUMENT;
  if (!epsilons_fit(param[3])) return FL_BAD_ARGUMENT;
  return param[0] & ~uint32_t(FL_DYNAMIQ_FLAT) ? FL_UNSUPPORTED : FL_OK;
}

inline int check_zip(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if (!known_dtype(param[0]) || param[1] > FL_ZIP_TABLE || param[3]) return FL_BAD_ARGUMENT;
  if (param[2] > uint32_t(zip_exponents(param[0]) + 1 - kZipCodes)) return FL_BAD_ARGUMENT;
  return spec.numel > kZipMaxElements ? FL_UNSUPPORTED : FL_OK;
}

inline int check_rans(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if (!known_dtype(param[0]) || param[1] || param[2] || param[3]) return FL_BAD_ARGUMENT;
  return spec.numel > kZipMaxElements ? FL_UNSUPPORTED : FL_OK;
}

inline bool power_of_two_within(int64_t v, int64_t least, int64_t most) {
  return v >= least && v <= most && !(v & (v - 1));
}

inline int check_thc(const fl_spec &spec) {
  const uint32_t *param = spec.param, flags = param[0] & ((1u << FL_THC_RANKS_SHIFT) - 1);
  if (!power_of_two_within(param[1], kCodeRun, kThcMaxBlock)) return FL_BAD_ARGUMENT;
  if (flags & ~uint32_t(FL_THC_UNIFORM | FL_THC_STOCHASTIC | FL_THC_GIVEN)) return FL_UNSUPPORTED;
  if (param[2] < 0x00800000u || param[2] >= kF32Inf) return FL_BAD_ARGUMENT;
  const ThcShape shape = thc_shape(spec);
  if (shape.ranks * shape.top() > 0xffff) return FL_BAD_ARGUMENT;
  return spec.offset < 0 || spec.offset % kCodeRun ? FL_BAD_ARGUMENT : FL_OK;
}

inline int check_tahquant(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if ((param[0] != 4 && param[0] != 6) || !power_of_two_within(param[2], 32, kTahMaxTile)) return FL_BAD_ARGUMENT;
  if (!param[1] || param[1] > 16384 || param[1] % param[2]) return FL_BAD_ARGUMENT;
  if (param[3] && param[0] == 6) return FL_BAD_ARGUMENT;
  return param[3] && tah_shape(spec).tokens() > kTahMostTokens ? FL_UNSUPPORTED : FL_OK;
}

inline int check_chunked(const uint32_t *param) {
  const uint32_t bits = param[0];
  if (bits != 2 && bits != 3 && bits != 4 && bits != 8 && bits != 32) return FL_BAD_ARGUMENT;
  if (!power_of_two_within(param[1], kLeastChunk, kMostChunk)) return FL_BAD_ARGUMENT;
  if (param[2] < 1 || param[2] > param[1]) return FL_BAD_ARGUMENT;
  return (param[3] & kMagnitudeBits) < kF32Inf ? FL_OK : FL_BAD_ARGUMENT;
}

inline int check_onebit(const uint32_t *param) {
  if (param[0] || param[2] || param[3]) return FL_BAD_ARGUMENT;
  return power_of_two_within(param[1], 32, 4096) ? FL_OK : FL_BAD_ARGUMENT;
}

inline int check_qsdp(const fl_spec &spec) {
  const uint32_t *param = spec.param;
  if ((param[0] != 4 && param[0] != 8) || param[3]) return FL_BAD_ARGUMENT;
  if (!power_of_two_within(param[1], 32, kQsdpMaxGroup)) return FL_BAD_ARGUMENT;
  if (spec.offset < 0 || spec.offset % param[1]) return FL_BAD_ARGUMENT;
  return param[2] & ~uint32_t(FL_QSDP_STOCHASTIC) ? FL_UNSUPPORTED : FL_OK;
}

inline int check_spec(const fl_spec *spec) {
  if (!spec) return FL_BAD_ARGUMENT;
  if (spec->codec == FL_DELTA || spec->codec > FL_QSDP) return FL_UNSUPPORTED;
  if (!known_dtype(spec->dtype) || spec->numel < 0 || spec->numel > kMaxElements) return FL_BAD_ARGUMENT;
  if (spec->codec == FL_SPARSE) return check_sparse(*spec);
  if (spec->codec == FL_BLOCK) return check_block(spec->param);
  if (spec->codec == FL_ZIP) return check_zip(*spec);
  if (spec->codec == FL_RANS) return check_rans(*spec);
  if (spec->codec == FL_THC) return check_thc(*spec);
  if (spec->codec == FL_TAHQUANT) return check_tahquant(*spec);
  if (spec->codec == FL_DYNAMIQ) return check_dynamiq(*spec);
  if (spec->codec == FL_CHUNKED) return check_chunked(spec->param);
  if (spec->codec == FL_ONEBIT) return check_onebit(spec->param);
  if (spec->codec == FL_QSDP) return check_qsdp(*spec);
  const uint32_t *param = spec->param;
  if (spec->codec == FL_CAST)
    return known_dtype(param[0]) && !param[1] && !param[2] && !param[3] ? FL_OK : FL_BAD_ARGUMENT;
  const uint32_t bits = param[0], group = param[1];
  if (bits != 8 && (bits < 2 || bits > 4)) return FL_BAD_ARGUMENT;
  if (group < 32 || group > 4096 || (group & (group - 1)) || param[3]) return FL_BAD_ARGUMENT;
  if (spec->offset < 0 || spec->offset % group) return FL_BAD_ARGUMENT;
  if (param[2] == FL_INT_FULL) return between_integers(int(bits)) ? FL_UNSUPPORTED : FL_OK;
  return param[2] & ~uint32_t(FL_INT_HADAMARD | FL_INT_STOCHASTIC) ? FL_UNSUPPORTED : FL_OK;
}

// For verbs that sparse messages do not have.
inline int check_dense_spec(const fl_spec *spec) {
  if (const int bad = check_spec(spec)) return bad;
  return spec->codec == FL_SPARSE ? FL_UNSUPPORTED : FL_OK;
}

inline bool aligned(const void *p, int64_t bytes) { return uintptr_t(p) % uintptr_t(bytes) == 0; }

// A flat array argument: null only where it has no elements.
inline int check_array(const void *p, int64_t numel, int64_t size) {
  return numel == 0 || (p && aligned(p, size)) ? FL_OK : FL_BAD_ARGUMENT;
}

inline int check_optional(const void *p, int64_t numel, int64_t size) {
  return p ? check_array(p, numel, size) : FL_OK;
}

// Messages do not overlap: with more than one, each plane ends before the same plane of the next begins.
inline int check_messages(const fl_spec &spec, const fl_messages *messages) {
  if (!messages || messages->count < 0 || messages->count > kMaxElements) return FL_BAD_ARGUMENT;
  if (messages->count == 0 || spec.numel == 0) return FL_OK;
  if (spec.numel > kMaxElements / messages->count) return FL_BAD_ARGUMENT;
  for (int p = 0; p < plane_count(spec); ++p) {
    if (plane_bytes(spec, p) == 0) continue;
    if (!messages->plane[p] || !aligned(messages->plane[p], kPlaneAlignment)) return FL_BAD_ARGUMENT;
    if (messages->count > 1 && messages->stride < plane_bytes(spec, p)) return FL_BAD_ARGUMENT;
  }
  return messages->count > 1 && messages->stride % kPlaneAlignment ? FL_BAD_ARGUMENT : FL_OK;
}

inline int first_error(int a, int b) { return a ? a : b; }

inline int check_encode(const fl_spec *spec, const void *x, const float *residual, const fl_messages *out) {
  if (const int bad = check_dense_spec(spec)) return bad;
  if (const int bad = check_messages(*spec, out)) return bad;
  if (is_lossless(*spec) && (residual || spec->dtype != spec->param[0])) return FL_UNSUPPORTED;
  if (spec->codec == FL_THC && thc_shape(*spec).ranks) return FL_UNSUPPORTED;
  const int64_t numel = spec->numel * out->count;
  return first_error(check_array(x, numel, element_size(spec->dtype)), check_optional(residual, numel, 4));
}

inline int check_decode(const fl_spec *spec, const fl_messages *in, const void *out) {
  if (const int bad = check_dense_spec(spec)) return bad;
  if (const int bad = check_messages(*spec, in)) return bad;
  return check_array(out, spec->numel * in->count, element_size(spec->dtype));
}

inline int check_decode_sum(const fl_spec *spec, const fl_messages *in, const void *out) {
  if (const int bad = check_spec(spec)) return bad;
  return first_error(check_messages(*spec, in), check_array(out, spec->numel, element_size(spec->dtype)));
}

inline int check_recode(const fl_spec *spec, const fl_messages *in, const void *x, const float *residual,
                        const fl_messages *out) {
  if (const int bad = check_dense_spec(spec)) return bad;
  if (is_lossless(*spec) || spec->codec == FL_THC) return FL_UNSUPPORTED;
  if (spec->codec == FL_TAHQUANT && tah_shape(*spec).coarse) return FL_UNSUPPORTED;
  if (const int bad = first_error(check_messages(*spec, in), check_messages(*spec, out))) return bad;
  if (out->count != 1) return FL_BAD_ARGUMENT;
  return first_error(check_optional(x, spec->numel, element_size(spec->dtype)),
                     check_optional(residual, spec->numel, 4));
}

// For verbs of FL_INT alone.
inline int check_int_spec(const fl_spec *spec) {
  if (const int bad = check_spec(spec)) return bad;
  return spec->codec == FL_INT ? FL_OK : FL_UNSUPPORTED;
}

inline int check_recode_from(const fl_spec *source, const fl_messages *in, const fl_spec *spec, const float *residual,
                             const fl_messages *out) {
  if (const int bad = first_error(check_int_spec(source), check_int_spec(spec))) return bad;
  if (const int bad = first_error(check_messages(*source, in), check_messages(*spec, out))) return bad;
  if (out->count != 1 || source->numel != spec->numel) return FL_BAD_ARGUMENT;
  return check_optional(residual, spec->numel, 4);
}

inline int check_encode_difference(const fl_spec *spec, const float *x, const void *base, const fl_messages *out) {
  if (const int bad = check_int_spec(spec)) return bad;
  if (const int bad = check_messages(*spec, out)) return bad;
  const int64_t numel = spec->numel * out->count;
  return first_error(check_array(x, numel, 4), check_array(base, numel, element_size(spec->dtype)));
}

// Both verbs of FL_DELTA, which no other verb takes.
inline int check_delta(const fl_spec *spec, const void *x, const void *base, const fl_messages *messages) {
  if (!spec) return FL_BAD_ARGUMENT;
  if (spec->codec != FL_DELTA) return FL_UNSUPPORTED;
  const uint32_t *param = spec->param;
  if (!known_dtype(spec->dtype) || param[0] || param[1] || param[2] || param[3] || spec->numel < 0)
    return FL_BAD_ARGUMENT;
  if (spec->numel >= kDeltaMaxElements) return FL_UNSUPPORTED;
  if (const int bad = check_messages(*spec, messages)) return bad;
  const int64_t numel = spec->numel * messages->count, size = element_size(spec->dtype);
  return first_error(check_array(x, numel, size), check_optional(base, numel, size));
}

inline int check_add_codes(const fl_spec *spec, const fl_messages *in, const uint8_t *out) {
  if (const int bad = check_spec(spec)) return bad;
  if (spec->codec != FL_THC || thc_shape(*spec).ranks) return FL_UNSUPPORTED;
  if (const int bad = check_messages(*spec, in)) return bad;
  if (in->count * thc_shape(*spec).top() > 0xffff) return FL_BAD_ARGUMENT;
  return check_array(out, in->count ? spec->numel : 0, kPlaneAlignment);
}

inline int check_thc_rms(const fl_spec *spec, const void *x, const float *residual, const float *rms) {
  if (const int bad = check_spec(spec)) return bad;
  if (spec->codec != FL_THC) return FL_UNSUPPORTED;
  const int arrays =
      first_error(check_array(x, spec->numel, element_size(spec->dtype)), check_optional(residual, spec->numel, 4));
  return first_error(arrays, check_array(rms, spec->numel, 4));
}

inline int check_accumulate(uint32_t dtype, const void *x, int64_t numel, const float *acc) {
  if (!known_dtype(dtype) || numel < 0 || numel > kMaxElements) return FL_BAD_ARGUMENT;
  return first_error(check_array(x, numel, element_size(dtype)), check_array(acc, numel, 4));
}

inline int check_dynamiq_stats(uint32_t dtype, const void *x, const float *residual, int64_t numel, const float *means,
                               const float *squares) {
  if (!known_dtype(dtype) || numel < 0 || numel > kMaxElements) return FL_BAD_ARGUMENT;
  const int arrays = first_error(check_array(x, numel, element_size(dtype)), check_optional(residual, numel, 4));
  return first_error(arrays, first_error(check_array(means, numel, 4), check_array(squares, numel, 4)));
}

// A call that looks at acc alone and leaves its result in out.
inline int check_look(const float *acc, int64_t numel, const void *out, const void *workspace) {
  if (numel < 0 || numel > kMaxElements || !out || !aligned(out, 8)) return FL_BAD_ARGUMENT;
  return first_error(check_array(acc, numel, 4), check_array(workspace, numel, kPlaneAlignment));
}

inline int check_count_above(const float *acc, int64_t numel, const uint32_t *thresholds, int count,
                             const int64_t *counts) {
  if (!thresholds || count < 1 || count > FL_MAX_THRESHOLDS) return FL_BAD_ARGUMENT;
  for (int i = 0; i < count; ++i)
    if (thresholds[i] > kMagnitudeBits) return FL_BAD_ARGUMENT;
  return check_look(acc, numel, counts, counts);
}

inline int check_choose_drawn(const fl_spec *spec, const float *acc, int64_t k, const void *workspace,
                              const fl_choice *out) {
  if (const int bad = check_spec(spec)) return bad;
  if (spec->codec != FL_SPARSE || !(spec->param[3] & FL_SPARSE_RANDOM)) return FL_UNSUPPORTED;
  if (k < 1 || k > spec->numel) return FL_BAD_ARGUMENT;
  return check_look(acc, spec->numel, out, workspace);
}

inline int check_choose_threshold(const fl_chooser *how, const float *acc, int64_t numel, const float *sample,
                                  const fl_threshold_memory *memory, const void *workspace, const fl_choice *out) {
  if (!how || how->estimator > FL_ESTIMATE_PARETO || how->reuse < 1 || how->count > FL_MAX_ESTIMATES)
    return FL_BAD_ARGUMENT;
  if (numel < 1 || how->k < 1 || how->k > how->capacity || how->capacity > numel) return FL_BAD_ARGUMENT;
  if (how->stages < 1 || how->stages > FL_MAX_STAGES) return FL_BAD_ARGUMENT;
  if (how->published > 1) return FL_BAD_ARGUMENT;
  if (how->most_stages < 1 || how->most_stages > FL_MAX_STAGES) return FL_BAD_ARGUMENT;
  const bool takes_sample = how->estimator == FL_ESTIMATE_SAMPLED;
  if (takes_sample && (how->sampled < 1 || how->sampled > numel || how->sample_k < 1 || how->sample_k > how->sampled))
    return FL_BAD_ARGUMENT;
  const int arrays = first_error(check_array(sample, takes_sample ? how->sampled : 0, 4), check_array(memory, 1, 4));
  return first_error(arrays, check_look(acc, numel, out, workspace));
}

inline int check_sparse_encode(const fl_spec *spec, const void *x, const float *acc, const float *clear,
                               const fl_choice &given, const fl_choice *choice, const void *workspace,
                               const fl_messages *out) {
  if (const int bad = check_spec(spec)) return bad;
  if (spec->codec != FL_SPARSE) return FL_UNSUPPORTED;
  if (const int bad = check_messages(*spec, out)) return bad;
  const int64_t most = spec->param[3] & FL_SPARSE_RANDOM ? kNumbers : int64_t(kMagnitudeBits);
  if (given.threshold < 0 || given.threshold > most || given.ties < -1) return FL_BAD_ARGUMENT;
  if (out->count != 1 || !aligned(choice, 8)) return FL_BAD_ARGUMENT;
  const int arrays = first_error(check_array(acc, spec->numel, 4), check_optional(clear, spec->numel, 4));
  return first_error(arrays, first_error(check_optional(x, spec->numel, element_size(spec->dtype)),
                                         check_array(workspace, spec->numel, kPlaneAlignment)));
}

// Sums over ranks in one launch ------------------------------------------------------------------------------------------

constexpr int kPeerPhases = 2;  // what a warp tells others in a round: its parts are there; its sum is there

// Where something begins in a rank's memory.
FL_HD int64_t peer_aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

// Bytes of the numbers with which a rank's memory begins: rounds and flags of `warps` warps.
FL_HD int64_t peer_numbers(int64_t warps, int64_t size) { return peer_aligned(4 * warps * (1 + kPeerPhases * size)); }

// Bytes of a message of `chunk` elements there.
inline int64_t peer_message_bytes(fl_spec spec, int64_t chunk) {
  spec.numel = chunk;
  return peer_aligned(plane_bytes(spec, 0)) + peer_aligned(plane_bytes(spec, 1));
}

inline int check_two_shot_spec(const fl_spec *spec, int64_t chunk, int32_t size, int32_t warps) {
  if (const int bad = check_spec(spec)) return bad;
  if (spec->codec != FL_INT && spec->codec != FL_BLOCK) return FL_UNSUPPORTED;
  if (spec->codec == FL_INT && between_integers(int(spec->param[0]))) return FL_UNSUPPORTED;
  if (spec->codec == FL_BLOCK) {
    const uint32_t *param = spec->param;
    if (scale_kind(param) == FL_SCALE_MESSAGE || param[3] & FL_BLOCK_GIVEN || format_bits(param[0]) == 6)
      return FL_UNSUPPORTED;
  }
  if (size < 1 || size > FL_MAX_PEERS || warps < 4 || warps % 4 || chunk < 1 || chunk > kMaxElements)
    return FL_BAD_ARGUMENT;
  return chunk % spec->param[1] || chunk < (spec->numel + size - 1) / size ? FL_BAD_ARGUMENT : FL_OK;
}

inline int64_t two_shot_bytes(const fl_spec &spec, int64_t chunk, int32_t size, int32_t warps) {
  return peer_numbers(warps, size) + 2 * size * peer_message_bytes(spec, chunk);
}

inline int check_two_shot(const fl_spec *spec, int64_t chunk, const void *x, const void *out, const float *residual,
                          const fl_peers *peers) {
  if (!peers) return FL_BAD_ARGUMENT;
  if (const int bad = check_two_shot_spec(spec, chunk, peers->size, peers->warps)) return bad;
  if (peers->rank < 0 || peers->rank >= peers->size || !peers->stop || !aligned(peers->stop, 4)) return FL_BAD_ARGUMENT;
  for (int rank = 0; rank < peers->size; ++rank)
    if (!peers->memory[rank] || !aligned(peers->memory[rank], kPlaneAlignment)) return FL_BAD_ARGUMENT;
  if (peers->bytes < two_shot_bytes(*spec, chunk, peers->size, peers->warps)) return FL_BAD_ARGUMENT;
  const int64_t size = element_size(spec->dtype);
  return first_error(first_error(check_array(x, spec->numel, size), check_array(out, spec->numel, size)),
                     check_optional(residual, spec->numel, 4));
}

}  // namespace fl
