"""How long a step's drafts are to be, and what each row keeps, where rows have the names of requests. Pure."""

from __future__ import annotations

from serving.proposers.decide import Policy, RowHistory


class Chooser:
    """The rows of one engine, by request id."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._histories: dict[str, RowHistory] = {}
        self._chosen: dict[str, int] = {}

    def choose(self, requests: list[str], num_sampled: list[int], kv_tokens: float) -> int:
        """Decide for a step's rows, and give the longest draft.

        Args:
            num_sampled: tokens that the step gave each row, 0 within its prompt; shape (rows,).
            kv_tokens: positions in the KV cache of all rows together.
        """
        histories = [self._histories.get(request) or RowHistory() for request in requests]
        self._histories = dict(zip(requests, histories, strict=True))
        for history, num_tokens in zip(histories, num_sampled, strict=True):
            if num_tokens:
                history.learn(num_tokens)
        available = [self._policy.max_drafts if num_tokens else 0 for num_tokens in num_sampled]
        chosen = self._policy.choose(histories, available, kv_tokens)
        self._chosen = dict(zip(requests, chosen, strict=True))
        return max(chosen, default=0)

    def skip(self) -> None:
        """No row is to have a draft after this step, which is not decided on; how the last drafts fared is lost."""
        self._chosen = {}
        for history in self._histories.values():
            history.drafted = 0

    def cut(self, requests: list[str], drafts: list[list[int]]) -> list[list[int]]:
        """What each row keeps of its draft."""
        return [
            draft[: self._chosen.get(request, 0)] for request, draft in zip(requests, drafts, strict=True)
        ]
