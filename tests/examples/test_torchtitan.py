"""torchtitan's debug model on CPUs, configured by examples/train_torchtitan.py. Last run: torchtitan 0.3.0."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import engine, long, needs

from .places import EXAMPLES

pytestmark = [pytest.mark.medium, engine, needs("torchtitan", "triton")]

SMALL = {"training.steps": 4, "training.seq_len": 128, "training.local_batch_size": 2, "debug.seed": 1}
STEP = re.compile(r"step: +(\d+).{0,14}?loss: +([\d.]+)")


def make_assets(folder: Path) -> None:
    """Write what torchtitan's sources have under these names, in small: a tokenizer, and texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=alphabet)
    )
    assets = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True)
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    about = {"bos_token": special[0], "eos_token": special[1]}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))
    (assets / "c4_test" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 20))


def losses(folder: Path, **degrees: int) -> list[float]:
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    options += [f"--parallelism.{name}_degree={value}" for name, value in degrees.items()]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *(str(EXAMPLES / "torchtitan_on_cpu.py"), "--module=train_torchtitan", "--config=llama3_debugmodel"),
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = dict(STEP.findall(done.stdout + done.stderr))  # all ranks log the same
    return [float(loss) for loss in found.values()]


@long(guarded_by="tests/integrations/test_hsdp.py::test_replicas_train_as_torch_s_own_and_agree_with_lossy_codecs")
@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_shard": 4},
        {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        {"tensor_parallel": 2, "data_parallel_shard": 2},
    ],
    ids=["FSDP2", "HSDP", "TP"],
)
def test_debug_model(degrees: dict[str, int], tmp_path: Path) -> None:
    make_assets(tmp_path)
    found = losses(tmp_path, **degrees)
    assert len(found) == SMALL["training.steps"] and found[-1] < found[0] - 0.2, found
