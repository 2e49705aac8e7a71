"""Deliberate defects, small enough to be overlooked, for ``python -m tests.mutants``: what the tests must catch."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A defect: ``old``, which stands once in ``file``, becomes ``new``."""

    file: str
    old: str
    new: str
    breaks: str


def _of(folder: str, *rows: tuple[str, str, str, str]) -> list[Mutant]:
    return [Mutant(f"fusionlayer/{folder}{file}", old, new, breaks) for file, old, new, breaks in rows]


MUTANTS: list[Mutant] = [
    *_of(
        "",
        ("plan.py", "if slot.offset < end:", "if slot.offset < 0:", "slots that overlap are not refused"),
        ("plan.py", "if end > bucket.numel:", "if end > bucket.numel + 1:", "a slot may reach beyond its bucket"),
        ("wire.py", "return -(-nbytes // align) * align", "return nbytes // align * align", "planes overlap"),
        ("wire.py", "if version != WIRE_VERSION:", "if version > WIRE_VERSION:", "older messages are accepted"),
        ("seeds.py", "state ^= state >> 31", "state ^= state >> 30", "seeds, and so bytes on the wire"),
        ("config.py", "if not getattr(self, name) > 0:", "if getattr(self, name) < 0:", "0 is no longer refused"),
        ("functional.py", "return derive_seed(transport.sequence)", "return derive_seed(0)", "calls share their noise"),
        ("launch.py", "if place.size < largest.size:", "if place.size > largest.size:", "launchers that contradict"),
        ("timeline.py", "self._text, self._failed = None, True", "self._text = None", "a full disk is told of once"),
        ("outages.py", "return used + _FEW_FILES > ", "return used > ", "a lack of files is named"),
        ("timeline.py", '"dur": (end - start) / 1000,', '"dur": (end - start) / 1024,', "durations in timelines"),
    ),
    *_of(
        "codecs/",
        ("dgc.py", "return limit / norm if norm > limit else 1.0", "return limit / norm", "short gradients grow"),
        ("_sparse.py", "max(1, math.floor(self.density * numel))", "max(1, math.ceil(self.density * numel))", "k of n"),
        ("_low_rank.py", "return rows, -(-numel // rows)", "return rows, numel // rows + 1", "shapes of flat tensors"),
        (
            "powersgd.py",
            "return self if step >= self.warmup_steps",
            "return self if step > self.warmup_steps",
            "warm-up",
        ),
        ("zip.py", "lowest = ceil if", "lowest = floor if", "the window of exponents"),
        ("tahquant.py", "math.floor(self.coarse * tokens)", "math.ceil(self.coarse * tokens)", "coarse tokens"),
    ),
    *_of(
        "csrc/core/",
        ("residual.h", "return is_finite(lost) ? lost : residual;", "return is_finite(lost) ? lost : 0;", "feedback"),
    ),
    *_of(
        "transport/",
        ("_monitor.py", "threading.RLock()", "threading.Lock()", "a dropped transport waits for its own thread"),
        ("heartbeat.py", 'compare_set("cause", "", mine)', 'compare_set("cause", mine, mine)', "one cause for all"),
        ("_sum.py", "elif len(parts) == 2:", "elif len(parts) == 3:", "the third rank's part is left out"),
        ("_base.py", "x.copy_(every.amax(0))", "x.copy_(every[0])", "the largest of all ranks is rank 0's"),
        (
            "_base.py",
            'with self.doing(f"an agreement on {what}", why):',
            'with self.doing("", why):',
            "a payload is taken for a digest of the same length",
        ),
        ("star.py", "if not 0 < rank < size:", "if not 0 <= rank < size:", "a caller may be rank 0"),
        ("_shared_memory.py", "lag = 1 if whole else 2", "lag = 1", "shares are read before they are summed"),
        (
            "local.py",
            "self.bytes_sent += 2 * (self.size - 1)",
            "self.bytes_sent += 1 * (self.size - 1)",
            "bytes counted",
        ),
    ),
    *_of(
        "collectives/",
        ("reduction.py", "if isinstance(codec, Codec):", "if not isinstance(codec, Codec):", "pairs fail in step 1"),
        (
            "two_shot.py",
            "seed=derive_seed(seed, rank, 1)",
            "seed=derive_seed(seed, rank, 0)",
            "second noise is the first",
        ),
        ("two_shot.py", "offset=mine.start,", "offset=0,", "chunks of one rank share noise"),
        ("two_level.py", "seed=derive_seed(seed, 2)", "seed=derive_seed(seed, 1)", "noise of two levels is one"),
        ("two_level.py", "offset=starts[row[b]]", "offset=0", "chunks share noise"),
        ("_hops.py", "derive_seed(seed, transport.rank)", "derive_seed(seed)", "ranks share noise"),
        ("one_shot.py", "derive_seed(seed, transport.rank)", "derive_seed(seed)", "ranks share noise"),
        ("omnireduce.py", "codec.rows(residual)[chosen]", "codec.rows(0 * residual)[chosen]", "error feedback is lost"),
        ("switching.py", "        self._transport.barrier()\n", "", "a late rank is a cost of the form"),
        ("switching.py", "self._transport.all_reduce_max(known)", "known", "ranks choose for themselves"),
        (
            "oktopk.py",
            "torch.nonzero(touched).view(-1)[magnitudes >= threshold]",
            "torch.nonzero(touched).view(-1)[magnitudes > threshold]",
            "sums that equal the threshold are left out",
        ),
        ("oktopk.py", "residual[positions[failed]] += values[failed]", "pass", "what did not pass is lost"),
        (
            "butterfly.py",
            "held, given = (upper, lower) if rank >> step & 1",
            "held, given = (upper, lower) if rank & 1",
            "halves that two ranks hold",
        ),
    ),
    *_of(
        "scheduler/",
        ("engine.py", "lane.put(lambda _: agreement.wait())", "pass", "other lanes send before the ranks agree"),
        (
            "engine.py",
            "            job.wait()\n            buffer.join()",
            "            buffer.join()",
            "a plan is switched while buckets are under way",
        ),
        ("engine.py", "self._cause = self._cause or told", "self._cause = told", "the last failure is raised"),
        (
            "engine.py",
            "self._send(index, derive_seed(self.step, index))",
            "self._send(index, derive_seed(self.step))",
            "buckets share noise",
        ),
        ("order.py", "seconds / self._lanes", "seconds", "several lanes are taken for one"),
        (
            "order.py",
            "chosen = max(complete) if complete",
            "chosen = min(complete) if complete",
            "the order of forward",
        ),
        ("memory.py", "view.copy_(state.residual)", "pass", "another plan loses error feedback"),
        ("worker.py", "job.run(self.error)", "job.run(None)", "a lane goes on after a failure"),
        ("planners/horovod.py", "tensor.nbytes > room", "tensor.nbytes >= room", "full buckets"),
        ("planners/mg_wfbp.py", "arrives - start < costs.startup", "arrives - start > costs.startup", "what is merged"),
    ),
    *_of(
        "planning/",
        ("online.py", "Pace(*average(middle, transport))", "Pace(*middle)", "each rank decides about drift itself"),
        (
            "drift.py",
            "self._off.get(field.name, 0) + 1 if off else 0",
            "self._off.get(field.name, 0) + off",
            "looks need not be in a row",
        ),
        ("autotune/tuner.py", "self._window.settle + 1", "self._window.settle", "a step that settles counts"),
        ("autotune/tuner.py", "typical(every.amax(0).tolist())", "typical(every[0].tolist())", "rank 0 alone decides"),
        ("autotune/search.py", "ratio = 2 * seconds / (before", "ratio = seconds / (before", "who wins a duel"),
    ),
    *_of(
        "coordination/",
        ("matching.py", "        signature.postscale,\n", "", "operations of other scales travel together"),
        (
            "matching.py",
            "if total + other.nbytes <= self._fusion_bytes",
            "if total <= self._fusion_bytes",
            "messages longer than they may be",
        ),
        (
            "central.py",
            "signature.scaling(dtype, len(ranks))",
            "signature.scaling(dtype, len(present))",
            "ranks that joined do not count",
        ),
        (
            "reductions.py",
            "    scaling.scale_before_(x)\n",
            "",
            "what is scaled before other reductions than sums",
        ),
        ("reductions.py", 'return op == "Min"', 'return op != "Min"', "neutral elements of booleans"),
    ),
    *_of(
        "backend/",
        ("choices.py", "nbytes * self._size)", "nbytes)", "rules by size of an all-to-all"),
        ("group.py", "min(timeout, timedelta(seconds=self._settings.timeout))", "timeout", "the settings' timeout"),
        ("call_queue.py", "self._transport.purpose = what", "pass", "a sum here and an average there"),
        (
            "hints.py",
            "if residual is not None and residual.numel() != numel:",
            "if residual is None:",
            "error feedback of another size",
        ),
    ),
    *_of(
        "integrations/",
        ("optimizer.py", "gradient_predivide_factor / transport.size)", "1 / transport.size)", "predivision"),
        (
            "enrolment.py",
            "if p.requires_grad or under_way(p)}",
            "if p.requires_grad}",
            "a gradient begun before its parameter froze",
        ),
        (
            "enrolment.py",
            "or not all(map(is_, parameters, self._parameters))",
            "or len(parameters) != len(self._parameters)",
            "a parameter that replaces another",
        ),
        (
            "reduction.py",
            "self._fl_roster.look_again = True",
            "self._fl_roster.look_again = False",
            "a refused change is forgotten by the next step",
        ),
        (
            "sharded.py",
            "self._filled = min(max(0, total - transport.rank * chunk), chunk)",
            "self._filled = chunk",
            "padding is optimised with the last shard",
        ),
        (
            "replica.py",
            "if self.version != version else None",
            "if self.version == version else None",
            "which weights' differences travel",
        ),
        (
            "pipeline.py",
            "max(self._steps, 1) <= self._warmup_steps",
            "max(self._steps, 1) < self._warmup_steps",
            "the last step of the warm-up",
        ),
        ("moe.py", "if every[rank, -1] != every[0, -1]", "if every[rank, 0] != every[0, 0]", "widths that differ"),
        (
            "deepspeed/gradients.py",
            "with self._plain(any(self._names[id(each)] in self._exempt for each in parameters)):",
            "with self._plain(all(self._names[id(each)] in self._exempt for each in parameters)):",
            "exempt gradients in a mixed buffer of ZeRO-3",
        ),
        ("deepspeed/gradients.py", "filled = min(max(numel - rank * chunk, 0), chunk)", "filled = chunk", "padding"),
        ("ddp.py", "                self._sent += 1\n", "", "buckets of DDP share noise"),
        (
            "replicas.py",
            "if any(theirs != records[0][2]",
            "if all(theirs != records[0][2]",
            "rank 0 sends nothing",
        ),
        ("replicas.py", "max(1, (every - 1) // 2)", "max(1, every - 1)", "a bit that flipped is found too late"),
        ("replicas.py", "slice(start, end)", "slice(start, end - 1)", "the last element of a share is not compared"),
        ("replicas.py", "2 * count <= len(values)", "2 * count < len(values)", "half of the ranks is taken for most"),
        ("tensor_parallel/channel.py", '("one_shot", "two_shot") or', '("one_shot",) or', "two_shot is refused"),
    ),
    *_of(
        "torch/",
        ("sync_batch_norm.py", "(count / (count - 1))", "(1.0)", "the running variance is the biased one"),
        ("adasum.py", "2 * distance, transport)", "distance, transport)", "products of half of a block's ranks"),
        ("requests.py", "return ReduceOp.Average if average else ReduceOp.Sum", "return ReduceOp.Sum", "average=True"),
    ),
    *_of(
        "cli/",
        ("breakdown.py", "count = len(kept) - 1", "count = len(kept)", "seconds of a step"),
        ("hosts.py", "or int(slots) < 1:", "or int(slots) < 0:", "hosts of no slots"),
    ),
]

# Tests that know most of a file, where its name does not tell which they are.
LIKELY = {
    "seeds.py": "test_seeds.py",
    "codecs/_sparse.py": "codecs/test_thresholds.py codecs/test_sparse.py",
    "codecs/_low_rank.py": "codecs/test_low_rank.py",
    "codecs/powersgd.py": "codecs/test_low_rank.py",
    "csrc/core/residual.h": "codecs/test_isa.py native/test_cpu_core.py",
    "transport/_sum.py": "transport/test_local.py",
    "transport/_base.py": "transport/test_local.py integrations/test_enrolment.py",
    "transport/_shared_memory.py": "transport/test_c10d.py",
    "collectives/reduction.py": "collectives/test_conformance.py",
    "collectives/two_shot.py": "collectives/test_noise.py",
    "collectives/one_shot.py": "collectives/test_noise.py",
    "collectives/two_level.py": "collectives/test_noise.py",
    "collectives/_hops.py": "collectives/test_noise.py",
    "collectives/omnireduce.py": "collectives/test_residuals.py",
    "collectives/switching.py": "collectives/test_late_ranks.py",
    "collectives/butterfly.py": "collectives/test_multi_hop.py",
    "scheduler/engine.py": "scheduler/test_lanes.py scheduler/test_engine.py",
    "scheduler/memory.py": "scheduler/test_lanes.py",
    "scheduler/worker.py": "scheduler/test_lanes.py",
    "scheduler/planners/horovod.py": "scheduler/test_planners.py",
    "scheduler/planners/mg_wfbp.py": "scheduler/test_planners.py",
    "planning/autotune/tuner.py": "planning/test_disagreement.py planning/test_autotune.py",
    "planning/autotune/search.py": "planning/test_autotune_search.py",
    "planning/online.py": "planning/test_disagreement.py",
    "coordination/central.py": "coordination/test_matching.py coordination/test_scales.py",
    "coordination/execution.py": "coordination/test_scales.py",
    "coordination/reductions.py": "coordination/test_reductions.py torch/test_join.py",
    "integrations/optimizer.py": "integrations/test_optimizer_contract.py",
    "integrations/replicas.py": "integrations/test_replicas.py",
    "integrations/enrolment.py": "integrations/test_enrolment.py",
    "integrations/reduction.py": "integrations/test_enrolment.py",
    "integrations/deepspeed/gradients.py": "integrations/test_deepspeed_exempt.py integrations/test_deepspeed.py",
    "integrations/tensor_parallel/channel.py": "integrations/test_tensor_parallel.py",
    "cli/breakdown.py": "cli/test_trace.py",
    "cli/hosts.py": "cli/test_fusionrun.py",
    "torch/sync_batch_norm.py": "torch/test_functions.py",
    "torch/requests.py": "torch/test_behaviours.py",
    "scheduler/order.py": "scheduler/test_lanes.py",
    "coordination/matching.py": "coordination/test_scales.py",
    "backend/choices.py": "backend/test_policy.py",
    "backend/call_queue.py": "backend/test_groups.py",
    "backend/group.py": "backend/test_groups.py",
    "wire.py": "test_wire.py codecs/test_conformance.py",
    "timeline.py": "test_timeline.py cli/test_trace.py",
}
