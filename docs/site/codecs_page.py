"""docs/codecs.md: what each codec sends and keeps, from the codecs themselves."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from docs.site.markdown import as_code, as_page, table
from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec, PartsCodec, StatefulCodec, TensorState, VariableSizeCodec

__all__ = ["codec_table"]

_ELEMENTS = 1 << 20  # of the tensor whose bits are counted
_RANKS = 8  # for which a collective is chosen
_PAPERS = Path(__file__).parents[1] / "papers.md"


def codec_table() -> str:
    """Return docs/codecs.md."""
    known = {name: codecs.get(name) for name in codecs.names()}
    families: dict[str, list[str]] = {"Lossless": [], "Quantizers": [], "Low rank": [], "Sparsifiers": []}
    for name, codec in known.items():
        families[_family(codec)].append(name)
    parts: list[str | list[str]] = []
    for family, names in families.items():
        usual = Counter(_use(known[name]) for name in names).most_common(1)[0][0]
        parts += [f"## {family}", f"Unless a line says otherwise: {'; '.join(usual)}."]
        parts.append([_codec_line(name, known[name], usual) for name in names])
    pairs: dict[str, list[str]] = {}
    for name in collectives.names():
        fitting = {n for n, codec in known.items() if _fits(name, codec)}
        pairs.setdefault(
            "; ".join(_of_family(*each, fitting) for each in families.items() if fitting & {*each[1]}), []
        ).append(name)
    return as_page(
        "# Codecs",
        INTRODUCTION.strip(),
        *parts,
        "## Which collective takes which codec",
        f"For {_RANKS} ranks. A pair that is not here is refused when an optimizer, a rule or a plan names it.",
        table(["collective", "codecs"], ([as_code(names), fitting] for fitting, names in pairs.items())),
    )


def _use(codec: Codec) -> tuple[str, str]:
    """Return what a codec keeps, and its default collective."""
    collective = collectives.choose(codec, (_RANKS,), ahead=None)
    return f"keeps {_keeps(codec)}", f"sent by `{collective}`"


def _codec_line(name: str, codec: Codec, usual: Sequence[str]) -> str:
    """Return an item of a list, which leaves out what is usual."""
    source = _paper(name, codec).partition(" (")[0]
    known = {"", re.sub(r"\W", "", codec.name)}
    facts = [_bits(codec), *(fact for fact in _use(codec) if fact not in usual)]
    facts += [f"from {source}"] if re.sub(r"\W", "", source).lower() not in known else []
    return f"- `{name}`: {_summary(name, codec)} ({'; '.join(facts)})"


def _of_family(family: str, names: Sequence[str], fitting: Collection[str]) -> str:
    """Return which codecs of a family are fitting: "all quantizers but `thc`"."""
    others = [name for name in names if name not in fitting]
    if len(others) > len(names) // 2:
        return as_code(name for name in names if name in fitting)
    return f"all of {family.lower()}" + (f" but {as_code(others)}" if others else "")


def _family(codec: Codec) -> str:
    if codec.lossless:
        return "Lossless"
    if codec.ahead:
        return "Sparsifiers"
    return "Low rank" if isinstance(codec, PartsCodec) else "Quantizers"


INTRODUCTION = """
Which codecs are there, what does each send, and what does it cost? A codec turns gradients into messages and back. Give
its name where gradients are reduced: `fl.DistributedOptimizer(optimizer, model, codec="int8")`. Options follow the
name: `codec="int", bits=4, group_size=128`. [Choosing](choosing.md) recommends one for your network and optimizer. It
does not name these:

| you have | use |
|---|---|
| a network for which `int4` sends too much | `int3` (a tenth of the bytes), `int2` (a fourteenth); measure your loss |
| a result that must not change by a bit | `raw`, or `zip` where the network is very slow |
| matrices, and a network for which four bits are too many | `powersgd` |
| local steps on such a network | `chunked_topk`: fewer bytes than `topk` |
| activations of tensor parallelism, of a pipeline | `taco`, `tahquant` ([model parallelism](model_parallel.md)) |

A line of the lists has:

- the **bits** for each element of f32, metadata included, for a million elements and the codec's defaults. A codec of
  variable size has the bits of normal random values.
- what a rank **keeps** of each tensor between steps. A *residual* is f32, as large as the gradient. It is the default;
  `error_feedback=False` leaves it out where the codec can do without.
- the default **collective** on 8 ranks of one node. Several nodes of several ranks use `two_level` instead of
  `two_shot`. Two ranks use `one_shot` instead of `two_shot`, `butterfly` and `integer_sum`. `butterfly` becomes
  `ring` if the number of ranks is no power of two. Sparse codecs without a collective of their own are encoded
  [ahead](glossary.md) and gathered.
- the source, if it has another name. [Papers](papers.md) lists differences and tests.
"""


def _summary(name: str, codec: Codec) -> str:
    """Return a preset's options, or the first sentence of a codec's docstring without the paper, which has a column."""
    if name != codec.name:
        base = codecs.get(codec.name).options
        differ = as_code(f"{key}={value!r}" for key, value in codec.options.items() if value != base[key])
        return f"`{codec.name}` with {differ or 'its defaults'}"
    first = (inspect.getdoc(type(codec)) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
    return re.sub(r" \((?=[^)]*(\d{4}|section|MX))[^()]*(\([^()]*\))*[^()]*\)", "", first).rstrip(".")


def _bits(codec: Codec) -> str:
    if isinstance(codec, PartsCodec) and not codec.ahead:
        return "bits by shape and rank"
    if isinstance(codec, VariableSizeCodec):
        x = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
        payload = torch.zeros(codec.bare.wire(_ELEMENTS).capacity, dtype=torch.uint8)
        codec.bare.encode_tensor(x, payload, TensorState(residual=None))
        size = codec.bare.used_bytes(payload, _ELEMENTS)
    else:
        size = codec.bare.wire(_ELEMENTS).capacity
    digits = f"{8 * size / _ELEMENTS:.2f}".rstrip("0").rstrip(".")
    return f"{digits} bits at density {codec.options['density']:.2g}" if codec.ahead else f"{digits} bits"


def _keeps(codec: Codec) -> str:
    kept = []
    if codec.feedback_pays:
        kept.append("residual")
    if isinstance(codec, PartsCodec):
        kept.append("thresholds, regions" if codec.ahead else "right factors")
    if isinstance(codec, StatefulCodec):
        kept += codec.kept()
    return ", ".join(kept) or "nothing"


def _fits(name: str, codec: Codec) -> bool:
    try:
        collectives.check_pair(name, codec, _RANKS)
    except ConfigError:
        return False
    return True


def _paper(name: str, codec: Codec) -> str:
    """Return the first source in docs/papers.md whose row names the codec's module."""
    module = f"`{type(codec).__module__.partition('.')[2].replace('.', '/')}.py`"
    for line in _PAPERS.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and module in cells[3]:
            sources = re.split(r"; ", cells[1])
            letters = re.sub(r"\W", "", type(codec).name).lower()
            named = [source for source in sources if re.sub(r"\W", "", source).lower().startswith(letters)]
            return re.split(r", (?:sections?|algorithms?|appendix) |: ", (named or sources)[0])[0]
    return ""
