"""Clients of the Triton door, each with its own way to send a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from compat.differential.cases import Case
from compat.differential.results import Disagreement, Row, read, require
from compat.differential.tensors import json_body, tensors
from compat.plain_http import PlainHttp
from compat.triton import Response, Triton
from tritonclient.utils import InferenceServerException

TEXT_ONLY = ("embedding_bias", "prompt_table_extra_id")
BLS = "tensorrt_llm_bls"
CORE = "tensorrt_llm"


class Clients:
    """Each method sends a case and returns its rows. Raises Disagreement."""

    def __init__(self, triton: Triton, http: PlainHttp) -> None:
        self._triton, self._http = triton, http

    async def unary(self, model: str, case: Case) -> list[Row]:
        """ModelInfer: one response with all rows."""
        response = await self._infer(model, tensors(case))
        return read(case, [response], apart=False)

    async def apart(self, model: str, case: Case) -> list[Row]:
        """ModelStreamInfer without pieces: a response for each row and sequence."""
        return await self._over_stream(model, case, stream=False)

    async def streamed(self, model: str, case: Case) -> list[Row]:
        """ModelStreamInfer in pieces, by a client of an old release."""
        return await self._over_stream(model, case, stream=True)

    async def beside_a_bad_row(self, model: str, case: Case) -> list[Row]:
        """The rows of the case after a row that fails alone."""
        spoilt = case.spoilt
        responses = await self._triton.stream(model, tensors(spoilt))
        (error,) = [response.error for response in responses if response.error] or [""]
        require(error.startswith("row 0: "), "the bad row has the error", repr(error))
        good = [response for response in responses if not response.error]
        require(all(response.number["batch_index"] for response in good), "the bad row has outputs")
        return read(spoilt, good, apart=True)[1:]

    async def _over_stream(self, model: str, case: Case, *, stream: bool) -> list[Row]:
        inputs = tensors(case, stream=stream, old_names=stream)
        responses = await self._triton.stream(model, inputs)
        rows = read(case, responses, apart=True)
        finals = [response.final for response in responses]
        marked = [False] * (len(finals) - 1) + [model != BLS]
        require(finals == marked, model, "marked as final", finals)
        if not stream:
            count = len(case.prompts) * (1 if case.has_beams else case.returned)
            require(len(responses) == count, len(responses), "responses, not", count)
        return rows

    async def generated(self, model: str, case: Case) -> Mapping[str, Any]:
        """HTTP `generate`: the JSON of a case with one row."""
        reply = await self._http.post(f"/v2/models/{model}/generate", json_body(case))
        require(reply.status == 200, "generate answered", reply.status, reply.body)
        return dict(reply.json)

    async def generated_stream(self, model: str, case: Case) -> Sequence[Mapping[str, Any]]:
        """HTTP `generate_stream`: the events of a case with one row."""
        reply = await self._http.post(
            f"/v2/models/{model}/generate_stream", json_body(case, stream=True)
        )
        require(reply.status == 200, "generate_stream answered", reply.status, reply.body)
        return list(reply.events)

    async def by_hand(self, case: Case) -> tuple[Case, list[Row]]:
        """preprocessing, tensorrt_llm, postprocessing: the case of the core model, and its rows with texts."""
        core = await self._encoded(case)
        rows = await self.unary(CORE, core)
        flat = [sequence for row in rows for sequence in row.sequences]
        longest = max(len(sequence.ids) for sequence in flat)
        ids = [sequence.ids + [-1] * (longest - len(sequence.ids)) for sequence in flat]
        size = (len(rows), len(flat) // len(rows))
        decoded = await self._infer(
            "postprocessing",
            {
                "TOKENS_BATCH": np.array(ids, np.int32).reshape(*size, longest),
                "SEQUENCE_LENGTH": np.array([len(s.ids) for s in flat], np.int32).reshape(size),
            },
        )
        for sequence, text in zip(flat, decoded.outputs["OUTPUT"].tolist(), strict=True):
            sequence.text = text.decode()
        return core, rows

    async def _encoded(self, case: Case) -> Case:
        """The case with ids for its texts and words."""
        given = tensors(case)
        inputs = {"QUERY": given["text_input"], "REQUEST_OUTPUT_LEN": given["max_tokens"]}
        for name, input_name in (
            ("bad_words", "BAD_WORDS_DICT"),
            ("stop_words", "STOP_WORDS_DICT"),
            ("embedding_bias_words", "EMBEDDING_BIAS_WORDS"),
            ("embedding_bias_weights", "EMBEDDING_BIAS_WEIGHTS"),
            ("end_id", "END_ID"),
            ("prompt_table_extra_id", "PROMPT_TABLE_EXTRA_ID"),
        ):
            if name in given:
                inputs[input_name] = given[name]
        outputs = (await self._infer("preprocessing", inputs)).outputs
        prompts, rows = [], []
        for at, options in enumerate(case.rows):
            length = outputs["REQUEST_INPUT_LEN"][at, 0]
            prompts.append(tuple(outputs["INPUT_ID"][at, :length].tolist()))
            row = {k: v for k, v in options.items() if not k.startswith(TEXT_ONLY)}
            row["max_tokens"] = int(outputs["REQUEST_OUTPUT_LEN"][at, 0])
            row["end_id"] = int(outputs["OUT_END_ID"][at, 0])
            for name in ("bad_words", "stop_words"):
                if name in options:
                    row[name] = words_of(outputs[f"{name.upper()}_IDS"][at])
            if "embedding_bias_words" in options:
                row["embedding_bias"] = outputs["EMBEDDING_BIAS"][at].tolist()
            if "prompt_table_extra_id" in options:
                row["prompt_table_extra_ids"] = outputs["OUT_PROMPT_TABLE_EXTRA_IDS"][at].tolist()
            rows.append(row)
        return replace(case, prompts=tuple(prompts), rows=tuple(rows))

    async def _infer(self, model: str, inputs: Mapping[str, Any]) -> Response:
        try:
            return await self._triton.infer(model, inputs)
        except InferenceServerException as error:
            raise Disagreement(f"{model}: {error}") from error


def words_of(ids_over_ends: Any) -> list[tuple[int, ...]]:
    ids, ends = ids_over_ends.tolist()
    ends = [0, *(end for end in ends if end >= 0)]
    return [tuple(ids[a:b]) for a, b in pairwise(ends)]
