"""One request for each way of choosing tokens."""

from __future__ import annotations

from engine.torch.harness import Harness, configure

NEW_TOKENS = 12
FREE = configure(max_tokens=NEW_TOKENS, ignore_end_id=True)
CONFIGS = [
    FREE,
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.3, seed=1),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=0.8, seed=4, top_p=0.9),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.0, seed=6, log_probs=True),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, prompt_log_probs=True),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, repetition_penalty=1.4),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, beam_width=3),
    configure(
        max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.1, seed=2, num_return_sequences=3
    ),
]
Tokens = list[list[list[int]]]


async def together(engine: Harness, prompts: list[list[int]]) -> Tokens:
    """The tokens of all configurations in one batch."""
    with engine.gate.held():
        keys = [
            engine.submit(prompt, config) for prompt, config in zip(prompts, CONFIGS, strict=True)
        ]
    return [[stream.token_ids for stream in await engine.ended(each)] for each in keys]
