"""vLLM's own front of its engine, with the client's mistakes that it overlooks. vLLM 0.32.0 needs all of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


def tell_no_input(app: FastAPI) -> None:
    """Let vLLM's refusal of a body say what is wrong and where, without the client's own words."""
    refuse: Any = app.exception_handlers[RequestValidationError]

    async def refuse_without_input(request: Request, refusal: RequestValidationError) -> Response:
        errors = [{name: value for name, value in one.items() if name != "input"} for one in refusal.errors()]
        response: Response = await refuse(request, RequestValidationError(errors))
        return response

    app.exception_handler(RequestValidationError)(refuse_without_input)
    # vLLM has had its middlewares built already, and they hold the handler of before.
    app.middleware_stack = app.build_middleware_stack()


class CheckingLLM(AsyncLLM):  # type: ignore[misc]
    """Refuses what would break the engine or its answers; a refusal is a 400 by vLLM's own handlers."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's answer to one request.

        Raises:
            VLLMValidationError: the client asked for what the engine cannot give.
        """
        self._check(sampling_params)
        async with aclosing(super().generate(prompt, sampling_params, request_id, **options)) as outputs:
            async for output in outputs:
                if sampling_params.structured_outputs is not None and _is_broken(output):
                    raise VLLMValidationError(
                        "structured_outputs or response_format: the grammar cannot be compiled, "
                        "or it lets no token follow what was answered so far",
                        parameter="structured_outputs",
                    )
                yield output

    def _check(self, asked: SamplingParams) -> None:
        if self.vllm_config.speculative_config is not None and asked.logprob_token_ids:
            # Its rows do not fit those of the rejection sampler: the engine dies when a neighbour has `logprobs`.
            raise VLLMValidationError(
                f"logprob_token_ids={asked.logprob_token_ids} is not supported with speculative decoding",
                parameter="logprob_token_ids",
                value=asked.logprob_token_ids,
            )


def _is_broken(output: RequestOutput) -> bool:
    # Without a KV connector vLLM ends a request this way for its grammar only.
    return any(choice.finish_reason == "error" for choice in output.outputs)
