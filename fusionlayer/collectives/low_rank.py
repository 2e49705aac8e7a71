"""``low_rank``: all-reduces the thin factors of matrices instead of the matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import codecs
from ..base.seeds import derive_seed
from ..codecs import Codec, Part
from ..codecs.lowrank.factors import orthonormal, product, random_factor, square_shape
from ..codecs.lowrank.powersgd import PowerSGD
from ..observe.timeline import here
from ..transport import Transport
from ._base import check_pair, collective, get
from .choice import usual

_KEPT = "right"


@collective(
    "low_rank",
    takes=lambda codec, size: isinstance(codec, PowerSGD) or codec.name == "raw",
    because="sums the factors of matrices",
)
def low_rank(x: Tensor, codec: Codec, transport: Transport, *, seed: int = 0, residual: Tensor | None = None) -> None:
    """Sum matrices by one step of subspace iteration of all ranks together (PowerSGD, algorithms 1 and 2).

    1. Left factors: P = M Q for each matrix M. One all-reduce sums all of them; then each is made orthonormal.
    2. Right factors: Q = M^T P. Another all-reduce sums them and the tensors that are not compressed.
    3. The sum of each matrix is P Q^T. The next step begins with this Q.

    A matrix of n rows and m columns takes r (n + m) numbers in the all-reduces. ``residual`` keeps M - P Q^T for this
    rank's own M and Q: all residuals and the result add up to all inputs. PowerSGD is ``raw`` in its warm-up; its
    values are then summed uncompressed.
    """
    check_pair("low_rank", codec, transport.size)
    if codec.name == "raw":
        transport.all_reduce(x)
        return
    assert isinstance(codec, PowerSGD)
    if codec.parts is None:
        _as_square(x, codec, transport, seed, residual)
        return
    with here.doing("fusionlayer: encode"):
        wanted = x.float() if residual is None else x + residual
        work = _FactorMessages.of(codec, wanted, seed)
        for each in work.matrices:
            torch.mm(each.start, each.matrix.T, out=each.left)
    _sum(work.lefts, codec, transport, derive_seed(seed, 0))
    with here.doing("fusionlayer: recode"):
        for group in work.alike():
            found = orthonormal(torch.stack([each.left for each in group]))
            for each, left in zip(group, found, strict=True):
                torch.mm(each.left.copy_(left), each.matrix, out=each.right)
        for span, values in work.others:
            values.copy_(wanted[span])
        given = None if residual is None else work.rights.clone()
        lost = None if residual is None else torch.zeros_like(work.rights)
    _sum(work.rights, codec, transport, derive_seed(seed, 1), lost)
    with here.doing("fusionlayer: decode"):
        if residual is not None and given is not None and lost is not None:
            _keep(residual, wanted, work, given.sub_(lost))
        for each in work.matrices:
            product(each.left, each.right, x[each.span].view_as(each.matrix))
        for span, values in work.others:
            x[span].copy_(values)
    if codec.warm_start:
        _remember(work, seed)


def _as_square(x: Tensor, codec: PowerSGD, transport: Transport, seed: int, residual: Tensor | None) -> None:
    """Sum ``x`` (n,), whose parts are not known, as one square matrix, from a new random start in every call."""
    shape, numel = square_shape(x.numel()), x.numel()
    if not codec.rank_of(*shape):
        return low_rank(x, codec.for_parts([Part("", (numel,))]), transport, seed=seed, residual=residual)
    more = (0, shape[0] * shape[1] - numel)
    square, kept = pad(x, more), None if residual is None else pad(residual, more)
    of_square = replace(codec, warm_start=False, parts=(Part("", shape),))
    low_rank(square, of_square, transport, seed=seed, residual=kept)
    x.copy_(square[:numel])
    if residual is not None and kept is not None:
        residual.copy_(kept[:numel])


@dataclass(frozen=True)
class _Matrix:
    """A tensor that is sent as factors.

    Attributes:
        part: the tensor.
        matrix: (n, m) f32, the values that this rank has to send.
        start: (r, m) f32, the right factor that the step begins with, the same on all ranks.
        left: (r, n) f32, the left factor, a view of the first message.
        right: (r, m) f32, the right factor, a view of the second message.
    """

    part: Part
    matrix: Tensor
    start: Tensor
    left: Tensor
    right: Tensor

    @property
    def span(self) -> slice:
        """The tensor's elements in the flat one."""
        return slice(self.part.start, self.part.stop)


@dataclass(frozen=True)
class _FactorMessages:
    """The messages of one sum.

    Attributes:
        matrices: the tensors that are sent as factors.
        others: for each tensor that is not compressed, its span in the flat tensor and its view of the second message.
        lefts: the first message, flat f32: all left factors.
        rights: the second message, flat f32: all right factors, then the tensors that are not compressed.
    """

    matrices: list[_Matrix]
    others: list[tuple[slice, Tensor]]
    lefts: Tensor
    rights: Tensor

    @classmethod
    def of(cls, codec: PowerSGD, wanted: Tensor, seed: int) -> _FactorMessages:
        assert codec.parts is not None
        shapes = [(part, *_matrix_shape(part)) for part in codec.parts]
        thin = [(part, n, m, rank) for part, n, m in shapes if (rank := codec.rank_of(n, m))]
        spans = [slice(part.start, part.stop) for part, n, m in shapes if not codec.rank_of(n, m)]
        lefts = wanted.new_empty(sum(rank * n for _, n, _, rank in thin))
        lengths = [rank * m for _, _, m, rank in thin] + [span.stop - span.start for span in spans]
        rights = wanted.new_empty(sum(lengths))
        left_of, right_of = lefts.split([rank * n for _, n, _, rank in thin]), rights.split(lengths)
        matrices = [
            _Matrix(
                part,
                wanted[part.start : part.stop].view(n, m),
                _start(part, codec, rank, m, seed).to(wanted.device),
                left.view(rank, n),
                right.view(rank, m),
            )
            for (part, n, m, rank), left, right in zip(thin, left_of, right_of, strict=False)
        ]
        return cls(matrices, list(zip(spans, right_of[len(thin) :], strict=True)), lefts, rights)

    def alike(self) -> Iterable[list[_Matrix]]:
        """Return the matrices in groups whose left factors have one shape."""
        groups: dict[torch.Size, list[_Matrix]] = {}
        for each in self.matrices:
            groups.setdefault(each.left.shape, []).append(each)
        return groups.values()


def _matrix_shape(part: Part) -> tuple[int, int]:
    rows = part.shape[0] if len(part.shape) > 1 else 1
    return rows, (part.stop - part.start) // max(1, rows)


def _start(part: Part, codec: PowerSGD, rank: int, columns: int, seed: int) -> Tensor:
    """Return the factor (rank, columns) that a step begins with: that of the last step, if one of this size was
    kept."""
    kept = part.state.tensors.get(_KEPT) if codec.warm_start else None
    if kept is not None and kept.numel() == rank * columns:
        return kept.view(rank, columns)
    own = () if codec.warm_start else (seed,)  # the name alone, so that fusion does not change the start
    return random_factor(rank, columns, *own, *part.name.encode())


def _sum(flat: Tensor, codec: PowerSGD, transport: Transport, seed: int, residual: Tensor | None = None) -> None:
    if not flat.numel():
        return
    if codec.factors == "f32":
        transport.all_reduce(flat)
        return
    factors = codecs.get("bf16").bare
    reduce = get(usual(factors, transport.node_sizes))
    reduce(flat, factors, transport, seed=seed, residual=residual)


def _keep(residual: Tensor, wanted: Tensor, work: _FactorMessages, sent: Tensor) -> None:
    """Set ``residual`` to ``wanted`` minus the values that this rank has sent; ``sent`` was its part of the second
    message."""
    places = zip(work.matrices, _like(sent, [each.right for each in work.matrices]), strict=True)
    for each, right in places:
        each.matrix.addmm_(each.left.T, right, alpha=-1)
    behind = sent[sum(each.right.numel() for each in work.matrices) :]
    for (span, values), part in zip(work.others, _like(behind, [values for _, values in work.others]), strict=True):
        wanted[span] -= part.view_as(values)
    # A finite sum has only finite summands. Only if it is not finite, each element is looked at.
    sound = bool(wanted.sum().isfinite())
    residual.copy_(wanted if sound else torch.where(wanted.isfinite(), wanted, residual))


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the beginning of ``flat`` in the shapes of ``tensors``, one after the other."""
    lengths = [tensor.numel() for tensor in tensors]
    pieces = flat[: sum(lengths)].split(lengths)
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def _remember(work: _FactorMessages, seed: int) -> None:
    """Keep the right factors for the next step, unless one is not finite.

    A row of zeros, which a matrix of smaller rank leaves, would stay zero for ever. Random numbers replace it, since
    the next matrix may have full rank.
    """
    if not work.matrices:
        return
    rows = torch.cat([each.right.abs().amax(1) for each in work.matrices]).tolist()
    if not all(largest < float("inf") for largest in rows):
        return
    for each in work.matrices:
        own, rows = rows[: len(each.right)], rows[len(each.right) :]
        kept = each.right.clone()
        gone = [i for i, largest in enumerate(own) if largest == 0]
        if gone:
            fresh = random_factor(*kept.shape, seed, *each.part.name.encode())
            kept[gone] = fresh[gone].to(kept.device)
        each.part.state.tensors[_KEPT] = kept.view(-1)
