"""Steps launched ahead of their collection give the tokens of alternating launch and collect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.short_names import by_short_names
from engine.torch.conftest import ModelDir
from engine.torch.drafts.drafters import FixedLengths, Knowing
from engine.torch.guided.guides import guided
from engine.torch.guided.lateness import SomeLate
from engine.torch.harness import configure, running
from engine.torch.loads import shared_loads
from oracle import tiny_models
from torch import Tensor
from trtmesh.chassis.vocabulary import GenerationConfig, GuidedDecoding
from trtmesh.engine.admission import admit
from trtmesh.engine.backend import PromptDetails, StepOutput, Submission
from trtmesh.engine.backends.torch.compute.device import Compute, Forward
from trtmesh.engine.backends.torch.drafts import drafting
from trtmesh.engine.backends.torch.drafts.drafter import Wish
from trtmesh.engine.backends.torch.engine import Launched
from trtmesh.engine.backends.torch.guided.grammars import Grammar
from trtmesh.engine.backends.torch.guided.guidance import compiler_for
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.sampling.choice import LogitsChoice, TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence, sequences_of
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

GREEDY = configure(max_tokens=12, ignore_end_id=True)
LONGER = configure(max_tokens=20, ignore_end_id=True)
CONFIGS = [
    GREEDY,
    configure(max_tokens=15, ignore_end_id=True, temperature=1.5, top_k=20, seed=3),
    configure(max_tokens=9, ignore_end_id=True, prompt_log_probs=True),
    configure(max_tokens=7, ignore_end_id=True, beam_width=3),
    configure(max_tokens=11, ignore_end_id=True, repetition_penalty=1.3, log_probs=True),
]
AMPLE: dict[str, Any] = {"kv_cache_tokens": 2048}
TIGHT: dict[str, Any] = {"kv_cache_tokens": 64, "max_sequence_tokens": 60}

MOST_AGAIN = 38
"""Tokens of a prompt that goes on; a tight pool has room for 20 more."""


class Driver:
    """Drives an engine with up to `ahead` launched steps."""

    def __init__(self, model_dir: Path, ahead: int, **settings: Any) -> None:
        settings = {"threads": 1, "tokens_per_block": 4, "max_step_tokens": 16, **settings}
        files = weight_files(model_dir)
        with shared_loads():
            self.loaded = load_engine(model_dir, files, by_short_names(TorchSettings, **settings))
        self.engine = self.loaded.engine
        self.ahead = ahead
        self.tokens: dict[int, list[int]] = {}
        self.prompts: list[PromptDetails] = []
        self.ends: dict[int, int] = {}
        self.launched: deque[Launched] = deque()

    def add(
        self,
        key: int,
        prompt: list[int],
        config: GenerationConfig,
        grammar: Grammar | None = None,
    ) -> None:
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
        sequences = sequences_of(item, lanes, rule, rules)
        for sequence in sequences:
            sequence.grammar = grammar
        self.engine.add(item.keys, sequences)

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


class Following:
    """Implements Compute: a CPU that hides the tokens of the last step from the host, as a GPU does."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.may_follow = False
        self.captured_steps = 0
        self.followed = 0
        self.fails_at: set[int] = set()
        self.needless = 0
        """Tokens computed after the last of their sequence."""
        self._hidden: list[tuple[Sequence, int]] = []
        self._ids: list[int] = []
        self.opened = 0
        self.move, self.rank = compute.move, compute.rank
        self.synchronize, self.check = compute.synchronize, compute.check
        self.release_memory, self.verify = compute.release_memory, compute.verify
        self.most_run_tokens = None

    def forward(
        self, chunks: SequenceOf[Chunk], written: Callable[[int], None] | None = None
    ) -> Forward:
        self._hidden, self.may_follow = [], False
        return self._compute.forward(chunks, written)

    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Forward:
        # The tokens of the last chunks are known.
        pairs = zip(chunks, rows, strict=False)
        self._hidden, self.may_follow = [(c.sequence, self._ids[row]) for c, row in pairs], False
        self.needless += sum(len(each.tokens) + 1 >= each.rule.limit for each, _ in self._hidden)
        self.followed += 1
        if self.followed in self.fails_at:
            self._hidden = []
            raise RuntimeError("the device has no memory")
        with self._known():
            return self._compute.forward(chunks)

    def can_follow(self, chunk: Chunk) -> bool:
        return chunk.completes and chunk.count == 1

    def awaits(self, sequences: SequenceOf[Continuation]) -> bool:
        if not any(each.token_rules.remembers for each in sequences):
            return False
        self.opened += 1
        self._hidden = []
        return True

    def choose(self, sequences: SequenceOf[Continuation], logits: Tensor) -> TokenChoice:
        with self._known():
            choice = self._compute.choose(sequences, logits)
        assert isinstance(choice, LogitsChoice)
        self._ids = choice.ids.tolist()
        self.may_follow = True
        return choice

    @contextmanager
    def _known(self) -> Iterator[None]:
        for sequence, token in self._hidden:
            sequence.tokens.append(token)
        try:
            yield
        finally:
            for sequence, _ in self._hidden:
                sequence.tokens.pop()


class FollowingDriver(Driver):
    """Launches the next step before it collects the last, wherever it can."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        super().__init__(model_dir, 1, **settings)
        self.compute = Following(self.engine._compute)
        self.engine._compute = self.compute

    def run(self) -> None:
        while self.engine.scheduler.has_work:
            step: Launched | None = self.launched.pop() if self.launched else self.engine.launch()
            while step:
                following = self.engine.launch_next(step)
                self.take(self.engine.collect(step))
                step = following
        super().run()


PLAIN = [
    configure(max_tokens=12, ignore_end_id=True),
    configure(max_tokens=29, ignore_end_id=True, temperature=1.5, seed=3),
    configure(max_tokens=17, ignore_end_id=True),
    configure(max_tokens=1, ignore_end_id=True),
    configure(max_tokens=40, ignore_end_id=True, temperature=0.7, seed=4),
]


AWAITING = [
    PLAIN[1],
    configure(max_tokens=33, ignore_end_id=True, repetition_penalty=1.3, log_probs=True),
    configure(max_tokens=17, min_tokens=5, no_repeat_ngram_size=2),
    PLAIN[3],
    configure(max_tokens=40, ignore_end_id=True, frequency_penalty=0.7, temperature=0.9, seed=6),
]
"""Some tokens depend on those before, and are chosen while their step is computed."""


@pytest.mark.parametrize(
    ("pool", "configs"),
    [
        pytest.param(AMPLE, PLAIN, id="ample-plain"),
        pytest.param(AMPLE, CONFIGS, id="ample-mixed", marks=pytest.mark.soak),
        pytest.param(AMPLE, AWAITING, id="ample-awaiting"),
        pytest.param(TIGHT, PLAIN, id="tight-plain", marks=pytest.mark.soak),
        pytest.param(TIGHT, CONFIGS, id="tight-mixed"),
        pytest.param(TIGHT, AWAITING, id="tight-awaiting"),
    ],
)
def test_steps_of_unknown_tokens_give_the_same_tokens(
    llama: Path, pool: dict[str, Any], configs: list[GenerationConfig]
) -> None:
    """And the same KV is found again."""
    drivers = [Driver(llama, 1, **pool), FollowingDriver(llama, **pool)]
    for driver in drivers:
        for key, (prompt, config) in enumerate(
            zip(tiny_models.prompts(5), configs, strict=True), start=1
        ):
            driver.add(key, prompt, config)
        driver.run()
        for key, prompt in enumerate(tiny_models.prompts(5), start=1):
            driver.add(10 + key, (prompt + driver.tokens[key])[:MOST_AGAIN], LONGER)
        driver.run()
    known, unknown = drivers
    assert unknown.tokens == known.tokens
    assert unknown.ends == known.ends
    assert isinstance(unknown, FollowingDriver)
    assert unknown.compute.followed > (0 if pool is TIGHT or configs is CONFIGS else 40)
    assert not unknown.compute.needless
    assert bool(unknown.compute.opened) == (configs is not PLAIN) or pool is TIGHT
    reused = [driver.engine.scheduler.reused_prompt_tokens for driver in drivers]
    assert reused[0] == reused[1] or pool is TIGHT


def test_prefix_evicted_by_a_step_of_unknown_tokens_is_copied_before_its_block_is_written(
    llama: Path,
) -> None:
    prompt, small = list(range(3, 27)), {**TIGHT, "host_cache_bytes": 2**20}
    drivers = [Driver(llama, 1, **AMPLE), FollowingDriver(llama, **small)]
    for driver in drivers:
        driver.add(1, prompt, PLAIN[3])
        driver.run()
        driver.add(2, [7, 8], configure(max_tokens=56, ignore_end_id=True))
        driver.run()
        driver.add(3, [*prompt, 9], LONGER)
        driver.run()
    ample, tight = drivers
    assert tight.tokens == ample.tokens
    assert tight.engine.scheduler.reused_prompt_tokens >= len(prompt)
    assert isinstance(tight, FollowingDriver)
    assert tight.compute.followed > 40


GUIDED = [
    (guided("REGEX", "[a-z ]{150,}", max_tokens=30, temperature=1.4, seed=7), "[a-z ]{150,}"),
    (PLAIN[1], None),
    (guided("REGEX", "[a-z]*", max_tokens=17, repetition_penalty=1.3), "[a-z]*"),
    (guided("REGEX", "(ab|cd){99}", max_tokens=21, prompt_log_probs=True), "(ab|cd){99}"),
    (guided("REGEX", "[0-9]{99}", max_tokens=40, temperature=0.9, seed=9), "[0-9]{99}"),
    (guided("REGEX", "[a-f]{9}", max_tokens=9, beam_width=3, temperature=None), "[a-f]{9}"),
]
"""With their expressions."""


SITTING_OUT = [
    pytest.param(
        *(family, pool, beams, seed),
        id=f"{family}-{name}-{'beams' if beams else 'plain'}-{seed}",
        # Every two of the three meet in every run.
        marks=[]
        if not seed and (family == "llama") ^ (pool is TIGHT) ^ beams
        else pytest.mark.soak,
    )
    for family in ("llama", "mistral")
    for name, pool in (("ample", AMPLE), ("tight", TIGHT))
    for beams in (False, True)
    for seed in range(4)
]


@pytest.mark.parametrize(("family", "pool", "beams", "seed"), SITTING_OUT)
def test_rows_that_sit_out_any_steps_get_the_same_tokens(
    family: str, pool: dict[str, Any], beams: bool, seed: int, model_dir: ModelDir
) -> None:
    """And the same KV is found again. Mistral sees a window."""
    model = model_dir(family)
    items = GUIDED if beams else GUIDED[:-1]
    compile_guide = compiler_for(model, tiny_models.VOCABULARY_SIZE, (0,))
    assert compile_guide
    drivers = [Driver(model, 1, **pool), FollowingDriver(model, **pool), Driver(model, 2, **pool)]
    late = [
        SomeLate(driver.engine._masks, seed, all_may_be=driver.ahead > 1) for driver in drivers[1:]
    ]
    for driver, masks in zip(drivers[1:], late, strict=True):
        driver.engine._masks = masks
    prompts = tiny_models.prompts(len(items), seed=seed)
    for driver in drivers:
        for key, (prompt, (config, text)) in enumerate(zip(prompts, items, strict=True), start=1):
            asked = GuidedDecoding(pb.GUIDE_TYPE_REGEX, text)
            grammar = Grammar(compile_guide(asked)) if text else None
            driver.add(key, prompt, config, grammar)
        driver.run()
        for key, prompt in enumerate(prompts, start=1):
            driver.add(10 + key, (prompt + driver.tokens[key])[:MOST_AGAIN], LONGER)
        driver.run()
        assert driver.engine.scheduler.pending_prompt_tokens == 0
    known, following, ahead = drivers
    assert following.tokens == ahead.tokens == known.tokens
    assert following.ends == ahead.ends == known.ends
    assert [masks.counts.late_masks for masks in late] == [masks.sat_out for masks in late]
    assert min(masks.sat_out for masks in late) > 5
    assert isinstance(following, FollowingDriver)
    # Two rows of five sit out each step: few are without.
    assert beams or pool is TIGHT or following.compute.followed > 40
    computed = {driver.engine.scheduler.computed_prompt_tokens for driver in drivers}
    assert pool is TIGHT or len(computed) == 1


def test_token_after_an_end_that_the_host_did_not_know_is_dropped(llama: Path) -> None:
    """Of three sequences one ends by a stop word, whose blocks another takes at once."""
    prompts = tiny_models.prompts(4)
    alone = Driver(llama, 1, **AMPLE)
    for key, prompt in enumerate(prompts):
        alone.add(key, prompt, LONGER)
    alone.run()
    word = tuple(alone.tokens[1][4:6])
    ending = configure(max_tokens=20, ignore_end_id=True, stop_token_ids=[word])
    driver = FollowingDriver(llama, **AMPLE | {"max_batch_size": 3})
    for key, prompt in enumerate(prompts):
        driver.add(key, prompt, ending if key == 1 else LONGER)
    driver.run()
    end = next(i for i in range(2, 21) if tuple(alone.tokens[1][i - 2 : i]) == word)
    assert driver.tokens == alone.tokens | {1: alone.tokens[1][:end]}
    assert driver.ends[1] == pb.FINISH_REASON_STOP_WORD
    assert driver.compute.followed > 10


def test_nothing_follows_a_step_after_which_a_newcomer_could_start(llama: Path) -> None:
    driver = FollowingDriver(llama, **AMPLE)
    driver.add(1, [5, 6, 7], GREEDY)
    first = driver.engine.launch()
    second = driver.engine.launch_next(first)
    assert second
    assert [sequence.in_flight for sequence in second.awaited] == [True]
    driver.add(2, [8, 9], GREEDY)
    assert driver.engine.launch_next(second) is None
    driver.take(driver.engine.collect(first))
    assert [sequence.in_flight for sequence in second.awaited] == [True]
    driver.launched.append(second)
    driver.run()
    assert driver.ends.keys() == {1, 2}


def test_nothing_follows_while_a_sequence_is_handed_over(llama: Path) -> None:
    driver = FollowingDriver(llama, **AMPLE)
    driver.add(1, [5, 6, 7], GREEDY)
    driver.take(driver.engine.collect(driver.engine.launch()))
    driver.engine.hand_over(1, "lease")
    step = driver.engine.launch()
    assert driver.compute.may_follow
    assert driver.engine.launch_next(step) is None
    driver.take(driver.engine.collect(step))
    assert driver.ends[1] == pb.FINISH_REASON_HANDOFF
    driver.engine.drop("lease")


def test_step_that_cannot_be_launched_ahead_is_launched_later(llama: Path) -> None:
    drivers = [Driver(llama, 1, **AMPLE), FollowingDriver(llama, **AMPLE)]
    for driver in drivers:
        for key, prompt in enumerate(tiny_models.prompts(3)):
            driver.add(key, prompt, LONGER)
    known, failing = drivers
    assert isinstance(failing, FollowingDriver)
    failing.compute.fails_at = {2, 5}
    for driver in drivers:
        driver.run()
    assert failing.compute.followed > 6
    assert failing.tokens == known.tokens


class Broken(Knowing):
    """Fails every time."""

    def propose(self, wishes: SequenceOf[Wish]) -> list[list[int]]:
        raise RuntimeError("as planned")


def test_steps_launched_ahead_end_the_pause_of_a_source_of_drafts(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "PAUSE_STEPS", 5)
    driver = FollowingDriver(llama, drafts="ngram", **AMPLE)
    own = driver.engine.drafting
    assert own
    own.drafter, own.lengths = Broken({}), FixedLengths(2)
    driver.add(1, [5, 6, 7], LONGER)
    driver.run()
    assert driver.compute.followed > 12
    assert own.counts.failures == 3


async def test_backend_launches_ahead_and_gives_the_same_tokens(llama: Path) -> None:
    """While commands come."""
    prompts = tiny_models.prompts(6)
    async with running(llama) as engine:
        expected = await engine.run(prompts, LONGER)
    async with running(llama) as engine:
        loaded = engine.backend._loaded.engine
        following = loaded._compute = Following(loaded._compute)
        endless = engine.submit(prompts[0], configure(max_tokens=200, ignore_end_id=True))
        assert await engine.run(prompts, LONGER) == expected
        engine.backend.stop(endless, pb.FINISH_REASON_STOPPED)
        (stream,) = await engine.ended(endless)
        assert stream.token_ids[: len(expected[0])] == expected[0]
        assert following.followed > 0
