"""Counts the bytes of tensors that are alive: CPU has no allocator that would tell."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, counts every storage that an operation makes, until it is freed.

    What existed before does not count, so weights and inputs stay out.

    Attributes:
        now: bytes alive.
        peak: the most that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __enter__(self) -> "LiveBytes":
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        """Runs the operation and counts the storages that are new among its outputs."""
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), inputs)
        return outputs

    def _count(self, storage, inputs: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in inputs:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes
