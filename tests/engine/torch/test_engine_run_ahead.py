"""Steps launched ahead of their collection give the tokens of alternating launch and collect."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from engine.short_names import by_short_names
from engine.torch.harness import configure
from oracle import tiny_models
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.admission import admit
from trtmesh.engine.backend import PromptDetails, StepOutput, Submission
from trtmesh.engine.backends.torch.engine import Launched
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.scheduling.sequence import sequences_of
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

GREEDY = configure(max_tokens=12, ignore_end_id=True)
CONFIGS = [
    GREEDY,
    configure(max_tokens=15, ignore_end_id=True, temperature=1.5, top_k=20, seed=3),
    configure(max_tokens=9, ignore_end_id=True, prompt_log_probs=True),
    configure(max_tokens=7, ignore_end_id=True, beam_width=3),
    configure(max_tokens=11, ignore_end_id=True, repetition_penalty=1.3, log_probs=True),
]
AMPLE: dict[str, Any] = {"kv_cache_tokens": 2048}
TIGHT: dict[str, Any] = {"kv_cache_tokens": 64, "max_sequence_tokens": 60}


class Driver:
    """Drives an engine with up to `ahead` launched steps."""

    def __init__(self, model_dir: Path, ahead: int, **settings: Any) -> None:
        settings = {"threads": 1, "tokens_per_block": 4, "max_step_tokens": 16, **settings}
        files = weight_files(model_dir)
        self.loaded = load_engine(model_dir, files, by_short_names(TorchSettings, **settings))
        self.engine = self.loaded.engine
        self.ahead = ahead
        self.tokens: dict[int, list[int]] = {}
        self.prompts: list[PromptDetails] = []
        self.ends: dict[int, int] = {}
        self.launched: deque[Launched] = deque()

    def add(self, key: int, prompt: list[int], config: GenerationConfig) -> None:
        item = Submission(
            keys=(key,),
            request_id="",
            batch_index=key,
            sequence_index=0,
            token_ids=prompt,
            emitted_tokens=0,
            config=config,
        )
        rule = admit(item, self.loaded.info)
        lanes = [key, *(-100 * key - lane for lane in range(1, config.beam_search.beam_width))]
        rules = TokenRules(config, normalize_log_probs=False)
        self.tokens[key] = []
        self.engine.add(item.keys, sequences_of(item, lanes, rule, rules))

    def launch(self) -> Launched:
        self.launched.append(self.engine.launch())
        return self.launched[-1]

    def collect(self) -> None:
        self.take(self.engine.collect(self.launched.popleft()))

    def take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        first = 0
        for key, offset, count in zip(
            output.keys, output.token_offsets, output.token_counts, strict=True
        ):
            assert key not in self.ends
            # Beams are delivered again from the first changed token.
            assert offset in (0, len(self.tokens[key]))
            self.tokens[key][offset:] = output.token_ids[first : first + count]
            first += count
        self.prompts += output.prompts
        self.ends |= {end.key: end.reason for end in output.ends}

    def run(self) -> None:
        while self.engine.scheduler.has_work:
            self.launch()
            if len(self.launched) >= self.ahead:
                self.collect()
        while self.launched:
            self.collect()
        self.take(self.engine.leftover())
        assert self.ends.keys() == self.tokens.keys()
        assert self.engine.scheduler.pool.used_blocks == 0


@pytest.mark.parametrize("ahead", [2, 3])
@pytest.mark.parametrize("pool", [AMPLE, TIGHT], ids=["ample", "tight"])
def test_steps_launched_ahead_give_the_same_tokens(
    llama: Path, pool: dict[str, Any], ahead: int
) -> None:
    drivers = [Driver(llama, depth, **pool) for depth in (1, ahead)]
    for driver in drivers:
        for key, (prompt, config) in enumerate(
            zip(tiny_models.prompts(5), CONFIGS, strict=True), start=1
        ):
            driver.add(key, prompt, config)
        driver.run()
        assert bool(driver.engine.scheduler.preemptions) == (pool is TIGHT)
    alternating, running_ahead = drivers
    assert running_ahead.tokens == alternating.tokens
    assert running_ahead.ends == alternating.ends
    one, other = (
        [log_prob for prompt in driver.prompts for log_prob in prompt.log_probs]
        for driver in drivers
    )
    assert one == pytest.approx(other)


def test_second_launch_computes_what_is_not_in_flight(llama: Path) -> None:
    driver = Driver(llama, 2, **AMPLE)
    driver.add(1, [5, 6, 7], GREEDY)
    driver.add(2, [8] * 40, GREEDY)
    first, second = driver.launch(), driver.launch()
    assert [sequence.key for sequence in first.awaited] == [1]
    assert list(second.awaited) == []
    (running, prompt) = driver.engine.scheduler.running
    assert (running.num_computed, prompt.num_computed) == (3, 13 + 16)
    third = driver.launch()
    assert [sequence.key for sequence in third.awaited] == [2]
    assert driver.launch().forwards == []
    driver.run()


def test_token_of_a_sequence_stopped_in_flight_is_dropped(llama: Path) -> None:
    drivers = [Driver(llama, 1, **AMPLE), Driver(llama, 2, **AMPLE)]
    for driver in drivers:
        for key, prompt in enumerate(tiny_models.prompts(3), start=1):
            driver.add(key, prompt, GREEDY)
    alternating, running_ahead = drivers
    alternating.run()
    while len(running_ahead.tokens[1]) < 3:
        running_ahead.launch()
        running_ahead.collect()
    step = running_ahead.launch()
    assert 1 in [sequence.key for sequence in step.awaited]
    running_ahead.launch()
    running_ahead.engine.stop([1], pb.FINISH_REASON_STOPPED)
    # Its blocks and its row of the block table go to another item before the collect.
    running_ahead.add(4, [9] * 30, GREEDY)
    running_ahead.launch()
    while running_ahead.launched:
        running_ahead.collect()
    running_ahead.run()
    assert running_ahead.tokens[1] == alternating.tokens[1][:3]
    assert running_ahead.ends[1] == pb.FINISH_REASON_STOPPED
    for key in (2, 3):
        assert running_ahead.tokens[key] == alternating.tokens[key]
