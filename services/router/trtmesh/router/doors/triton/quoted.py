"""Errors with Triton's status and words."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus

import grpc
from trtmesh.chassis.errors import ErrorRow, TrtmeshError


class Quoted(TrtmeshError):
    """An error in Triton's words and under Triton's status, INTERNAL, with the reason and blame of `own`, the error of
    the mesh."""

    def __init__(self, words: str, own: TrtmeshError) -> None:
        super().__init__(words, worker=own.worker, retry_after_ms=own.retry_after_ms)
        self._own = own
        # To be copied.
        self.args = (words, own)

    @property
    def row(self) -> ErrorRow:
        http = HTTPStatus.INTERNAL_SERVER_ERROR
        return replace(self._own.row, status=grpc.StatusCode.INTERNAL, http=http)
