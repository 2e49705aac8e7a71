"""vLLM as a follower: the adapter with a stand-in for vLLM, and vLLM itself on CPUs."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, TransportError, UsageError
from fusionlayer.frameworks import vllm as adapter
from fusionlayer.publishing.server import TcpOutlet
from tests.integrations import vllm_stand_in
from tests.publishing.states import until
from tests.publishing.trainer import LONG, Trainer
from tests.tiers import engine, needs

WIDTH, ROWS = 8, 12


def checkpoint(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    names = {f"layer.{each}.weight": noise(ROWS, WIDTH) for each in ("q", "k", "v")}
    return {**names, "layer.down.weight": noise(WIDTH, ROWS), "norm.weight": noise(WIDTH), "expert.1.weight": noise(4)}


class Model:
    """The loaders of a tensor-parallel rank: fused rows, columns, a whole tensor, and one of another rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.fused = torch.zeros(3 * ROWS // world, WIDTH)
        self.down = torch.zeros(WIDTH, ROWS // world)
        self.norm = torch.zeros(WIDTH)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        share = ROWS // self.world
        for name, x in weights:
            kind = name.split(".")[1]
            if kind in "qkv":
                self.fused.narrow(0, "qkv".index(kind) * share, share).copy_(x.narrow(0, self.rank * share, share))
            elif kind == "down":
                self.down.copy_(x.narrow(1, self.rank * share, share))
            elif name == "norm.weight":
                self.norm.copy_(x)

    def shows(self, version: int) -> bool:
        expected = Model(self.rank, self.world)
        expected.load_weights(checkpoint(version).items())
        return all(torch.equal(getattr(self, name), getattr(expected, name)) for name in ("fused", "down", "norm"))


class Workers:
    """The engines of all tensor-parallel ranks, each on a thread, as vLLM calls them."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter.register()
        adapter.register()
        kind = vllm_stand_in.WeightTransferEngineFactory.registry["fusionlayer"]
        self.engines = [kind(None, None, None, Model(rank, world)) for rank in range(world)]
        self.shown: dict[int, Any] = {}
        self.barrier = threading.Barrier(world)
        self.loaded: list[str] = []
        self.local = threading.local()
        monkeypatch.setattr(adapter, "_exchange", self.exchange)

    def exchange(self, mine: Any) -> list[Any]:
        self.shown[self.local.rank] = mine
        self.barrier.wait(LONG)
        found = [self.shown[rank] for rank in range(len(self.engines))]
        self.barrier.wait(LONG)
        return found

    def call(self, method: str, *arguments: Any) -> list[Any]:
        answers: dict[int, Any] = {}

        def run(rank: int) -> None:
            self.local.rank = rank
            try:
                answers[rank] = getattr(self.engines[rank], method)(*arguments)
            except Exception as error:
                answers[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        for each in answers.values():
            if isinstance(each, Exception):
                raise each
        return [answers[rank] for rank in range(len(self.engines))]

    # ---- what `poll` uses of an LLM

    def collective_rpc(self, method: str) -> list[Any]:
        assert method == "received_version"
        workers = [SimpleNamespace(weight_transfer_engine=each) for each in self.engines]
        return [adapter.WorkerExtension.received_version(worker) for worker in workers]  # type: ignore[arg-type]

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.call("update_weights", request["update_info"])

    def finish_weight_update(self, weight_version: str) -> None:
        self.call("finish_weight_update")
        self.loaded.append(weight_version)

    def reset_prefix_cache(self) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[None]:
    vllm_stand_in.WeightTransferEngineFactory.registry.clear()
    with vllm_stand_in.installed():
        yield


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("world", [1, 2])
def test_workers_load_one_version_and_then_fetch_what_their_loaders_read(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(world, monkeypatch)
    with Trainer() as trainer:
        with pytest.raises(UsageError, match="init_weight_transfer_engine"):
            workers.call("update_weights", {})
        workers.call("init_transfer_engine", adapter.InitInfo(trainer.publisher.address))
        with pytest.raises(TransportError, match="has published none"):
            workers.call("update_weights", {"timeout": 0})
        assert adapter.poll(workers) is None
        for version in range(4):
            trainer.publish(checkpoint(version))
            if version == 2:  # as a trainer does it that drives vLLM itself
                workers.call("update_weights", {"version": version, "timeout": LONG})
            else:
                until(lambda version=version: adapter.poll(workers) == version)  # type: ignore[misc]
            assert all(each.model.shows(version) for each in workers.engines)
            assert adapter.poll(workers) is None
        assert workers.loaded == ["0", "1", "3"]
        shapes = [{name: tuple(x.shape) for name, x in each._follower.tensors()} for each in workers.engines]
        assert all(each["layer.q.weight"] == (ROWS // world, WIDTH) for each in shapes)
        assert all(each["layer.down.weight"] == (WIDTH, ROWS // world) for each in shapes)
        assert all((each["norm.weight"], each["expert.1.weight"]) == ((WIDTH,), (0,)) for each in shapes)
        trainer.publish({**checkpoint(4), "norm.weight": torch.zeros(3)})
        with pytest.raises(ConfigError, match=r"version 4 has other names, shapes or types .*norm\.weight"):
            workers.call("update_weights", {"version": 4, "timeout": LONG})
        assert all(each.model.shows(3) for each in workers.engines)
        workers.call("shutdown")


@pytest.mark.usefixtures("stand_in")
def test_an_async_engine_is_paused_for_the_update_alone() -> None:
    calls: list[str] = []

    class Engine:
        def __getattr__(self, name: str) -> Any:
            async def call(*args: Any, **kwargs: Any) -> list[int]:
                calls.append(name)
                if name == "update_weights":
                    assert args[0].update_info == {"version": 7}
                    raise OSError("the load fails")
                return [7, 7]

            return call

    with pytest.raises(OSError, match="the load fails"):
        asyncio.run(adapter.poll_async(Engine()))
    assert calls == ["collective_rpc", "pause_generation", "start_weight_update", "update_weights", "resume_generation"]


# ---- with vLLM itself -----------------------------------------------------------------------------------------------

PROMPTS = [[1, 5, 9, 2], [7, 3], [11, 12, 13, 14, 15, 16, 17]]
TOKENS = 12


def llama(width: int = 128, layers: int = 2) -> Any:
    """Return a model of transformers with random weights, whose answers depend on all of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 256, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"tie_word_embeddings": False, "initializer_range": 0.2, "torch_dtype": "float32"},
    )
    return LlamaForCausalLM(config)


def greedy(model: Any) -> list[list[int]]:
    """Return the answers of the trainer's model, by its whole forward pass for each token."""
    answers = []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(TOKENS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            answers.append(tokens[len(prompt) :])
    return answers


def options_of(model: Any, folder: Path) -> dict[str, Any]:
    """Return what vLLM needs for a model whose weights are random until the first version."""
    from vllm.config import WeightTransferConfig

    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    model.config.save_pretrained(folder)
    return {
        **{"model": str(folder), "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "float32"},
        **{"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4},
        "weight_transfer_config": WeightTransferConfig("fusionlayer"),
        "worker_extension_cls": "fusionlayer.frameworks.vllm.WorkerExtension",
    }


def serve(model: Any, folder: Path, workers: int = 1) -> Any:
    """Return an ``LLM`` of so many tensor-parallel workers."""
    from vllm import LLM

    return LLM(**options_of(model, folder), tensor_parallel_size=workers)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.randint(256, (4, 32)), labels=torch.randint(256, (4, 32))).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def answers_of(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], sampling, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


@engine
@needs("vllm")
def test_the_interface_is_the_recorded_one() -> None:
    assert vllm_stand_in.different() == {}


@engine
@pytest.mark.medium
@pytest.mark.timeout(900)
@needs("vllm", "transformers")
@pytest.mark.parametrize("workers", [1, 2])
def test_vllm_answers_as_the_model_of_the_trainer_at_every_version(workers: int, tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    llm = serve(model, tmp_path, workers)
    seen, pauses = [], []
    with fl.publish(model, "tcp://127.0.0.1:0") as publisher:
        outlet = publisher._outlet
        assert isinstance(outlet, TcpOutlet)
        llm.init_weight_transfer_engine({"init_info": {"address": publisher.address}})
        assert adapter.poll(llm) is None
        for version in range(6):
            assert publisher.step() == version
            until(lambda: publisher.followers == workers and publisher.flush(1))
            start = time.perf_counter()
            until(lambda version=version: adapter.poll(llm) == version)  # type: ignore[misc]
            pauses.append(time.perf_counter() - start)
            assert llm.get_weight_version() == str(version)
            seen.append(answers_of(llm))
            assert seen[-1] == greedy(model), f"version {version}"
            train(model, optimizer)
        until(lambda: all(peer.takes for peer in outlet._peers.values()) or workers == 1)
    assert len({json.dumps(each) for each in seen}) == len(seen)  # each version answers otherwise
    print(f"{len(seen)} versions, {len(seen) * len(PROMPTS) * TOKENS} tokens, pauses {pauses}")


@engine
@pytest.mark.medium
@pytest.mark.timeout(900)
@needs("vllm", "transformers")
def test_no_request_of_an_async_engine_mixes_versions(tmp_path: Path) -> None:
    """Requests run all the time, while versions are published and loaded."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    expected: list[list[list[int]]] = []
    answers: list[tuple[int, list[int]]] = []

    async def ask(llm: Any, prompt: int, ended: asyncio.Event) -> None:
        while not ended.is_set():
            inputs = {"prompt_token_ids": PROMPTS[prompt]}
            async for output in llm.generate(inputs, sampling, f"{prompt} {len(answers)}"):
                last = output
            answers.append((prompt, list(last.outputs[0].token_ids)))

    async def run(publisher: fl.Publisher) -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options_of(model, tmp_path)))
        await llm.init_weight_transfer_engine(WeightTransferInitRequest({"address": publisher.address}))
        ended = asyncio.Event()
        asking: list[asyncio.Task[None]] = []
        for _ in range(5):
            expected.append(greedy(model))
            version = publisher.step()
            while await adapter.poll_async(llm) != version:
                await asyncio.sleep(0.01)
            asking = asking or [asyncio.create_task(ask(llm, each, ended)) for each in range(len(PROMPTS))]
            count = len(answers)
            while len(answers) < count + 2 * len(PROMPTS):
                await asyncio.sleep(0.01)
            train(model, optimizer)
        ended.set()
        await asyncio.gather(*asking)
        llm.shutdown()

    with fl.publish(model, "tcp://127.0.0.1:0") as publisher:
        asyncio.run(run(publisher))
    for prompt in range(len(PROMPTS)):
        versions = [[each[prompt] for each in expected].index(answer) for at, answer in answers if at == prompt]
        assert versions == sorted(versions) and {*versions} == {*range(5)}
