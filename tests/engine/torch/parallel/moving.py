"""Items that move from a worker of several ranks, one of which is killed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from e2e.mesh import DEMO, PATIENT, Mesh, check_beginning, running_mesh
from engine.torch.parallel.followers import followers

TOKENS = 60
POSITIONS = 2048
"""Of the demo model."""
PROMPTS = [[300 + number, 40, 50, 60] for number in range(4)]


async def check_killed_rank_moves_items(
    ranks: str, single: str, *flags: str, model: Path = DEMO, positions: int = POSITIONS
) -> None:
    """Serves a model with the demo model's tokenizer by a worker on the devices `ranks` and one on the device
    `single`. More tokens than are computed before the rank is killed fit in the positions."""
    given = ("--model-dir", str(model), "--model", "demo")
    shared = (*given, "--torch-kv-cache-tokens", str(len(PROMPTS) * positions), *flags)

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(
            mesh.start_tokenizer(),
            mesh.start_engine(*shared, "--torch-device", ranks, "--worker", "parallel"),
            mesh.start_engine(*shared, "--torch-device", single, "--worker", "single"),
        )
        await mesh.start_router(*PATIENT, "--placement-policy", "round_robin")
        await mesh.ready(workers=2, tokenizers=1)

    async with running_mesh(start=start) as mesh:
        (parallel,) = [each for each in mesh.engines if followers(each.pid)]
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        longest = positions - 2 * TOKENS
        reader = mesh.open(PROMPTS, max_tokens=longest, ignore_end_id=True)
        await reader.until(lambda r: all(r.tokens(index) > 3 for index in range(len(PROMPTS))))
        (rank,) = followers(parallel.pid)
        # Meant for all processes of a terminal or a container; the first rank ends the others.
        for number in (signal.SIGINT, signal.SIGTERM):
            rank.send_signal(number)
        tokens = reader.tokens()
        await reader.until(lambda r: r.tokens() > tokens)
        rank.kill()
        check_beginning(await reader.stopped_at(TOKENS), expected)
        assert await parallel.wait() == 1
        assert "was killed by SIGKILL" in parallel.stderr
        await mesh.counted("moved_sequences", 1)
