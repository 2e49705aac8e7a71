"""onebit: signs, and the mean of magnitudes."""

import torch
from torch import Tensor, nn

import fusionlayer as fl
from fusionlayer import codecs, collectives
from fusionlayer.transport import Transport, local
from tests.integrations.training import make_model, train, weights
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient


def test_a_known_answer() -> None:
    codec = codecs.get("onebit", group_size=32).bare
    x = torch.tensor([1.0, -2.0, 3.0, -0.5] * 8 + [-4.0, 2.0])
    payload = codec.compress(x)
    scales, signs = codec.wire(34).views(payload)
    assert scales.tolist() == [1.625, 3.0] and signs.tolist() == [0b10101010] * 4 + [0b01]
    assert codec.decompress(payload, 34).tolist() == [1.625, -1.625] * 16 + [-3.0, 3.0]


@looped("world", [2, 4])
def test_feedback_is_of_workers_and_of_the_owner_of_the_sum(world: int) -> None:
    """1-bit Adam's two errors: after steps of one gradient the mean result is that gradient's sum."""
    n, steps, codec = 2000, 60, codecs.get("onebit", group_size=256).bare
    exact = torch.stack([gradient(n, rank) for rank in range(world)]).sum(0)

    def body(transport: Transport) -> tuple[float, float]:
        errors = []
        for residual in (torch.zeros(n), None):
            mean = torch.zeros(n)
            for step in range(steps):
                x = gradient(n, transport.rank)
                collectives.get("two_shot")(x, codec, transport, seed=step, residual=residual)
                mean += x / steps
            errors.append(float((mean - exact).norm() / exact.norm()))
        return errors[0], errors[1]

    for kept, lost in over_threads(world, body):
        assert kept < 0.2 and lost > 0.8


def test_training_after_a_warm_up_of_values_as_they_are() -> None:
    codec = codecs.get("onebit", warmup_steps=3)
    assert [codec.at_step(step).name for step in (0, 2, 3)] == ["raw", "raw", "onebit"] and codec.at_step(3) is codec

    def trained(rank: int, **options: object) -> list[Tensor]:
        model: nn.Module = make_model()
        wrapped = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = fl.DistributedOptimizer(wrapped, model.named_parameters(), algorithm="two_shot", **options)
        found = []
        for step in range(6):
            train(model, optimizer, rank, [step])
            found.append(weights(model))
        optimizer.close()  # type: ignore[attr-defined]
        return found

    def rank_main(rank: int) -> None:
        raw, compressed = trained(rank, codec="raw"), trained(rank, codec="onebit", warmup_steps=3)
        same = [torch.equal(*pair) for pair in zip(raw, compressed, strict=True)]
        assert same == [True, True, True, False, False, False]
        theirs = compressed[-1].clone()
        transport = local.current()
        assert transport is not None
        transport.broadcast(theirs, 0)
        assert torch.equal(theirs, compressed[-1])

    local.run(rank_main, 3)
