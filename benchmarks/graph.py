"""Device time of kernels launched without the JAX runtime, from replays of a CUDA graph.

The plain way to a kernel's own time: no dispatch, no operation between links, and launches may
overlap as they ask to (programmatic dependent launch), which they cannot inside a jitted program.
Peers' figures are taken in this way too.

`lower` takes a function's kernels apart, `Bound` fixes their buffers (torch's); the launches then
go on torch's current stream, where torch captures and times them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.inputs import Inputs
from benchmarks.stages import Part, Stage, initial
from benchmarks.timing import Times
from msa_icp_jax.ops._mosaic import direct
from msa_icp_jax.ops._mosaic.direct import Lowered, Unlaunchable, lower
from msa_icp_jax.rows import READY

__all__ = ["Bound", "GraphRun", "Lowered", "Unlaunchable", "lower", "replays"]

_MAX_LINKS = 512


class Bound:
    """The steps of a lowered function with their buffers.

    `scratch` holds the buffers of its own, made when it comes empty; several may share it whose
    launches follow one another.
    """

    def __init__(self, lowered: Lowered, arguments: Sequence[Any], scratch: list[Any]) -> None:
        import torch

        torch.cuda.current_stream().query()  # makes the context current in this thread
        if not scratch:
            scratch += [empty(struct, 0) for struct in lowered.scratch]
        tensors = [x if torch.is_tensor(x) else torch.from_dlpack(x) for x in arguments]
        program = direct.Program(lowered, scratch, _on_device)
        self._launches = program.bind(tensors)
        self._alive = (program, tensors)
        self.results = [program.buffer(source, tensors) for source in lowered.returned]

    def launch(self) -> None:
        """Launches everything on torch's current stream."""
        import torch

        direct.launch(self._launches, torch.cuda.current_stream().cuda_stream)


def _on_device(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.array(value)).cuda()


def empty(like: jax.ShapeDtypeStruct, fill: int | None = None) -> Any:
    """A torch tensor on the GPU."""
    import torch

    dtype = getattr(torch, like.dtype.name)
    if fill is None:
        return torch.empty(tuple(like.shape), dtype=dtype, device="cuda")
    return torch.full(tuple(like.shape), fill, dtype=dtype, device="cuda")


# ---- timing a stage ----


class GraphRun:
    """A stage's links, each on the next input set, ready to be captured."""

    def __init__(
        self,
        stage: Stage,
        inputs: Inputs,
        shapes: dict[str, Any],
        links: int,
        lowered: dict[str, Lowered],
    ) -> None:
        """Lowers, compiles and binds; there are `links` links (at most 512), or one a set.

        `lowered` holds the parts that stages of the same case and precision have lowered, by name.
        """
        self._stage = stage
        self._shapes = shapes
        self._inputs = inputs
        self._abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs.fixed | inputs.sets[0]
        )
        self._written: list[dict[str, Any]] = [{} for _ in inputs.sets]
        self._lowered = lowered
        self._scratch: dict[str, list[Any]] = collections.defaultdict(list)
        self.links = min(_MAX_LINKS, max(links, len(inputs.sets)))
        self._received = self._receive() if self._merges else None
        self._prelude = [
            bound for i in range(len(inputs.sets)) for bound in self._bind(stage.prelude, i)[0]
        ]
        bound = [self._bind(stage.parts, i) for i in range(self.links)]
        self._links = [link for link, _ in bound]
        self._first = bound[0][1]

    def run(self) -> dict[str, Any]:
        """Runs the prelude and the first link; all arrays of the first link."""
        import torch

        self._arm()
        for bound in (*self._prelude, *self._links[0]):
            bound.launch()
        torch.cuda.synchronize()
        return self._first

    def times(self, runs: int) -> Times:
        """Times `runs` replays of a graph of all links."""
        import torch

        self._arm()
        for link in self._links:  # loads every kernel and touches every buffer
            for bound in link:
                bound.launch()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for link in self._links:
                for bound in link:
                    bound.launch()
        return replays(graph, runs, self.links, before=self._arm)

    @property
    def _merges(self) -> bool:
        return any("received" in part.reads for part in self._stage.parts)

    def _bind(self, parts: Sequence[Part], link: int) -> tuple[list[Bound], dict[str, Any]]:
        """Launches of a link, and its arrays: a set has buffers of its own to write into."""
        number = link % len(self._inputs.sets)
        arrays = self._inputs.fixed | self._inputs.sets[number] | self._written[number]
        if self._received is not None:
            arrays["received"] = self._received[link]
        launches = []
        for part in parts:
            for name in part.reads:
                if name not in arrays:
                    if name not in self._written[number]:
                        self._written[number][name] = empty(self._shapes[name], initial(name))
                    arrays[name] = self._written[number][name]
            flat = jax.tree.leaves([arrays[name] for name in part.reads])
            launches.append(Bound(self._lower(part), flat, self._scratch[part.name]))
            arrays.update(zip(part.writes, launches[-1].results, strict=True))
        return launches, arrays

    def _lower(self, part: Part) -> Lowered:
        if part.name not in self._lowered:
            structs = self._shapes | self._abstract
            self._lowered[part.name] = lower(part.run, *(structs[name] for name in part.reads))
        return self._lowered[part.name]

    def _receive(self) -> Any:
        """Each link's own received rows [links, W, hpr, T, 33]: a merge clears their flags."""
        import torch

        sets = [
            _on_device(np.array((self._inputs.fixed | one_set)["received"]))
            for one_set in self._inputs.sets
        ]
        return torch.stack([sets[i % len(sets)] for i in range(self.links)])

    def _arm(self) -> None:
        if self._received is not None:
            self._received[..., -1] = READY


def replays(graph: Any, runs: int, links: int, before: Callable[[], None] = lambda: None) -> Times:
    """Times replays of a captured graph of `links` links."""
    import torch

    found = []
    for replay in range(runs + 1):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay:  # the first one uploads the graph
            found.append(begin.elapsed_time(end) * 1e3 / links)
    return Times(tuple(found), "graph")
