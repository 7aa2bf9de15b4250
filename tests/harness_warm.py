"""What the fork server imports before it forks the first rank, without a look for garbage among it.

Named as the only module of `multiprocessing`'s preload list. What is imported here is frozen: ranks and processes of
`run_alone` do not look through it, nor copy the pages it lies in to count references there, a third of a second each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys

# torch._dynamo: the first torch.optim optimizer of a process imports it, 1.7 s of CPU time; a model of transformers
# costs as much, once in every rank that has one, and makes every later look for garbage there ten times as long.
MODULES = ("torch", "torch.distributed", "torch._dynamo", "lamina", "transformers.modeling_utils", "pytest")

gc.disable()
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
IMPORTED = frozenset(sys.modules)
gc.freeze()
gc.enable()
