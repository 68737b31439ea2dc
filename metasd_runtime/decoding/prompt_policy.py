"""Policies that read the prompt, once, at the query's start."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from metasd_bandits import Policy

__all__ = ["PromptPolicy"]


class PromptPolicy(Policy):
    """A policy that is shown each query's prompt; the router calls `read` behind `begin`."""

    @abstractmethod
    def read(self, tokens: Sequence[int], arms: Sequence[str]) -> None:
        """A query begins with these tokens; `arms` names those it may choose from."""
