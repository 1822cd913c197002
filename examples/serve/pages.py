"""The pages of the cache: who holds them, and which hold a prompt's beginning for reuse."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class PagePool:
    """Page numbers of one layer (every layer and rank uses the same).

    A page that holds a full page of some prompt stays findable after its last request has left,
    until it is the least recently used of those and a new request needs it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free = list(range(pages))
        self.users = [0] * pages
        self.page_of: dict[bytes, int] = {}  # prompt up to a page's end -> the page
        self.prefix_of: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # findable, without user; oldest first

    def take(self, prompt: np.ndarray, length: int) -> tuple[list[int], int] | None:
        """Pages for `length` positions, and how many of the first hold the prompt's beginning.

        None while there are too few. The prompt's last token is never reused: its hidden state is
        what the first answer token comes from.
        """
        reused = self._find(prompt[:-1])
        count = -(-length // self.page_size) - len(reused)
        idle = sum(page in self.idle for page in reused)
        if count > len(self.free) + len(self.idle) - idle:
            return None
        for page in reused:
            self.users[page] += 1
            self.idle.pop(page, None)
        return reused + [self._fresh() for _ in range(count)], len(reused)

    def publish(self, prompt: np.ndarray, number: int, page: int) -> None:
        """Makes `page`, the prompt's page `number`, findable. Its writes must be dispatched."""
        prefix = prompt[: (number + 1) * self.page_size].tobytes()
        if prefix not in self.page_of:
            self.page_of[prefix] = page
            self.prefix_of[page] = prefix

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):  # so that a prefix's end is evicted before its beginning
            self.users[page] -= 1
            if self.users[page]:
                continue
            if page in self.prefix_of:
                self.idle[page] = None
            else:
                self.free.append(page)

    def _find(self, prompt: np.ndarray) -> list[int]:
        pages: list[int] = []
        for end in range(self.page_size, len(prompt) + 1, self.page_size):
            page = self.page_of.get(prompt[:end].tobytes())
            if page is None:
                break
            pages.append(page)
        return pages

    def _fresh(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            del self.page_of[self.prefix_of.pop(page)]
        self.users[page] = 1
        return page
