"""Parallel heads on the target's last hidden state: Medusa, and blockwise parallel decoding.

Head k looks at the target's last hidden state h, the one that its output head turns into the
distribution of the text's last token, and guesses the state k tokens on; the target's own output
head, cut to the tokens that occur in practice, turns that into a distribution. All heads look at
the same h and none sees what another drafts: a block costs one product with each matrix.

The two differ in the block that stands on h, which in both is residual:

- Medusa (Cai et al. 2024, section 2.1): h + SiLU(W_k h + b_k);
- blockwise parallel decoding, BPD (Stern et al. 2018, section 6): h + V_k ReLU(U_k h), whose
  inner width is twice the target's here, so that it can begin as any linear map.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.matrix import Matrix, quantise
from metasd_runtime.drafters.output_head import DraftHead
from metasd_runtime.model.target import Target

__all__ = ["ParallelHeads", "ParallelShape"]


@dataclass(frozen=True)
class ParallelShape:
    """Everything about parallel heads but their weights.

    Attributes
    ----------
    block : {"medusa", "bpd"}
        What stands on the hidden state.
    layer : int
        The hidden state it reads: the target's last.
    hidden : int
        The target's width, H.
    positions : int
        Heads, and the most tokens they can draft; K.
    """

    block: str
    layer: int
    hidden: int
    positions: int

    def __post_init__(self) -> None:
        checks.choice("block", self.block, ("medusa", "bpd"))
        checks.integer("heads.positions", self.positions, 1)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Each weight's name and shape; the heads' rows lie one below the other."""
        K, H = self.positions, self.hidden
        if self.block == "medusa":
            return {"up": (K * H, H), "bias": (K * H,)}
        return {"up": (K * 2 * H, H), "down": (K * H, 2 * H)}


class ParallelHeads(Drafter):
    """Draft a whole block at once with Medusa's or BPD's heads.

    It keeps the hidden state of one token, so it never owes anything. Where more tokens are asked
    for than it has heads, it drafts one a head.

    Parameters
    ----------
    shape : ParallelShape
    weights : mapping of str to tensor
        By the names of `ParallelShape.sizes`; kept in eight bits a weight.
    vocabulary : (V,) int64
        The tokens it can draft, besides those of the prompt.
    target : Target
        Lends the rows of its output head.
    name : str, default "medusa"
    head : DraftHead, optional
        Of that target and vocabulary, where several drafters share it.
    """

    def __init__(
        self,
        shape: ParallelShape,
        weights: Mapping[str, Tensor],
        vocabulary: Tensor,
        target: Target,
        name: str = "medusa",
        head: DraftHead | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.needs_features = (shape.layer,)
        self._head = DraftHead(target, vocabulary) if head is None else head
        self._install(weights, target.device)
        self._logits = torch.full((target.vocab_size,), float("-inf"), device=target.device)
        self.start(())

    def _install(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._up = Matrix(*quantise(weights["up"]), device)
        if self.shape.block == "medusa":
            self._bias = weights["bias"].float().to(device)
            return
        self._downs = [
            Matrix(*quantise(rows), device) for rows in weights["down"].chunk(self.shape.positions)
        ]

    def clone(self) -> ParallelHeads:
        """Another over the same weights."""
        twin = copy.copy(self)
        twin._head, twin._logits = self._head.clone(), self._logits.clone()
        twin.start(())
        return twin

    def start(self, tokens: Sequence[int]) -> None:
        self._state: Tensor | None = None
        self._read = 0
        self._head.start(tokens)
        self._logits.fill_(float("-inf"))

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if features is not None and len(features):
            self._state = features[-1:]
            self._read += len(features)

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        text, drafted, rows = list(tokens), list[int](), list[Tensor]()
        for logits in self.logits(tokens)[:n]:
            self._logits.index_copy_(0, self.tokens, logits)
            token, probs = sampling.propose(self._logits, text)
            text.append(token)
            drafted.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(drafted, torch.stack(rows)) if drafted else Draft()

    @property
    def tokens(self) -> Tensor:
        """(m,) int64: the tokens that can be drafted in the present query."""
        return self._head.tokens

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Of the tokens that can be drafted at each position, (K, m); K = 0 behind one token.

        Raises
        ------
        DrafterUnavailableError
            If the target's hidden states have not come.
        """
        if self._read != len(tokens) - 1:
            raise DrafterUnavailableError(
                f"it has the target's hidden states of {self._read} tokens and needs those of "
                f"{len(tokens) - 1}"
            )
        if self._state is None:  # nothing has a token before it yet
            return self._logits.new_empty(0, len(self.tokens))
        return self._head(self._outputs(self._state.float()))

    def _outputs(self, h: Tensor) -> Tensor:
        """The states the heads foresee, (K, H), from (1, H)."""
        inner = self._up(h).view(self.shape.positions, -1)
        if self.shape.block == "medusa":
            return h + silu(inner + self._bias.view_as(inner))
        inner = inner.relu()
        return h + torch.cat([down(inner[k : k + 1]) for k, down in enumerate(self._downs)])
