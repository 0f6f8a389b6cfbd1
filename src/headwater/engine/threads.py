"""How threads of the numeric libraries wait for each other; they read it from the environment when they are loaded."""

from __future__ import annotations

from collections.abc import MutableMapping

ENGINE_THREADS = {"GOMP_SPINCOUNT": "5000", "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
"""Unless the user's environment says otherwise: how long (in spins, some 200 us) the kernels' threads wait for each
other before they sleep, and no threads besides them. libgomp's own 300,000 spins made a decode step 10 times slower
on a machine whose cores other processes used too; an idle machine does not notice. The tokenizer and numpy would
each start a thread per core."""


def settle_threads(environment: MutableMapping[str, str]) -> None:
    """Put ENGINE_THREADS into the environment of this process, what the user set left as it is. Before PyTorch is
    imported: afterwards it changes nothing."""
    for name, value in ENGINE_THREADS.items():
        environment.setdefault(name, value)
