"""What the bodies of all generating endpoints have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import InvalidField
from trtmesh.router.doors.openai.answer import Wanted
from trtmesh.router.doors.openai.fields import OBJECT, Fields
from trtmesh.router.doors.openai.served import Served
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.values.request import parse_request
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


@dataclass(frozen=True, slots=True)
class Requested:
    """A body, with the model that it names."""

    fields: Fields
    served: Served
    request_id: str
    tokenizers: TokenizerPool
    predicted_ids: Sequence[int] = ()
    """The answer that the client expects."""
    defaults: pb.GenerationConfig | None = None
    """What the model recommends, if that counts."""

    def names_developers(self, template: str | None) -> bool:
        """Whether this chat template, or the model's, knows the role of developers. Raises NoTokenizer."""
        own = template or self.tokenizers.describe(self.served.model).chat_template
        return "developer" in own

    def wanted(
        self,
        items: Sequence[router_pb.GenerateItem],
        config: pb.GenerationConfig,
        *,
        is_large: bool,
    ) -> Wanted:
        """The request, once an endpoint has taken its own fields. Raises TrtmeshError for the first bad prompt: an
        answer has no place for it."""
        fields = self.fields
        streamed = fields.take_flag("stream")
        with_usage = self._stream_options(streamed=streamed)
        with_token_ids = fields.take_flag("return_token_ids")
        tokens_as_ids = fields.take_flag("return_tokens_as_token_ids")
        fields.refuse_rest()
        config.output.stream = streamed
        if self.predicted_ids:
            config.draft.token_ids.extend(self.predicted_ids)
            # They say how much of it came true.
            config.output.perf_metrics = True
        if self.served.adapter:
            config.lora.name = self.served.adapter
        message = router_pb.GenerateRequest(
            request_id=self.request_id, model=self.served.model, items=items, config=config
        )
        request = parse_request(message, "", is_large=is_large)
        for refused in request.refused:
            raise refused.error.of_item(refused.batch_index)
        sequences = request.items[0].sequences
        return Wanted(
            request,
            self.served.name,
            sequences,
            streamed,
            with_usage,
            with_token_ids,
            tokens_as_ids,
        )

    def _stream_options(self, *, streamed: bool) -> bool:
        """Whether a stream ends with the usage."""
        given = self.fields.take("stream_options", OBJECT)
        if given is None:
            return False
        if not streamed:
            raise InvalidField("belongs to a request with stream", field="stream_options")
        options = Fields(given, "stream_options.")
        with_usage = options.take_flag("include_usage")
        # Pads chunks against listeners who measure them; nothing here does.
        options.refuse("include_obfuscation", "is not served", neutral=False)
        options.refuse_rest()
        return with_usage
