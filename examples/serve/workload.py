"""A made-up stream of requests: short and long prompts, some with a beginning in common."""

from __future__ import annotations

import numpy as np

from serve.model import Config
from serve.server import Request

SHORT_PREFIX, LONG_PREFIX = 384, 2304  # shared beginnings; the long one fills 18 blocks
LONG_FROM = 24  # step from which more requests have the long prefix: prefilling it takes a while


class Workload:
    """Requests by step; the same for every server with the same seed."""

    def __init__(self, config: Config, seed: int = 1, arrivals: float = 0.15) -> None:
        self.config = config
        self.rng = np.random.default_rng(seed)
        self.arrivals = arrivals
        self.short, self.long = (self._tokens(size) for size in (SHORT_PREFIX, LONG_PREFIX))

    def arriving(self, step: int) -> list[Request]:
        """The requests that join the queue before a step."""
        if step == 0:
            return [self._request(self.long), self._request(self.short)]
        if self.rng.random() >= self.arrivals:
            return []
        kinds = [np.zeros(0, np.int32), self.short, self.long]
        kind = self.rng.integers(3 if step >= LONG_FROM else 2)
        return [self._request(kinds[kind])]

    def _request(self, prefix: np.ndarray) -> Request:
        own = self._tokens(int(self.rng.integers(20, 200)))
        return Request(np.concatenate([prefix, own]), int(self.rng.integers(16, 64)))

    def _tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, self.config.vocab, count).astype(np.int32)
